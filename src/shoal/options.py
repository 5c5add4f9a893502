"""Every option of a training, declared once: its type and range, its default, and what it does.

:func:`shoal.fit`, :func:`shoal.train`, :func:`shoal.compare`, :func:`shoal.sweep` and :func:`shoal.diagnose`
take options as keyword arguments of these types, run configurations have them as fields, recipes set them,
model cards list them, and the command line makes its flags from them. To add an option, declare it here and
use it where it belongs.

A key that is missing was not given: :func:`with_defaults` fills it in, after recipes have set theirs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from typing_extensions import TypedDict

from shoal.settings import (
    Count,
    Few,
    Fraction,
    Function,
    Positive,
    Range,
    Rate,
    Seed,
    checked,
    options_type,
    valid_if,
)


@dataclass(frozen=True, eq=False)
class Option:
    """An option: its default, and the commands that have a flag for it (no other than Python, if none).

    The rest is filled in by :func:`declared`.
    """

    default: Any = None
    commands: str = ""
    name: str = ""
    type: Any = None
    help: str = ""

    def describe(self) -> str:
        """What it does, in one sentence with its default, for the help of a command."""
        sentence = self.help.partition(". ")[0].rstrip(".")
        shown = self.default not in (None, False, {}, ()) and "(default: " not in sentence
        return f"{sentence} (default: {self.default})." if shown else f"{sentence}."


def _text(pattern: str, words: str) -> AfterValidator:
    """For an annotation: text that matches a pattern, which is ``words`` in error messages."""
    return valid_if(lambda value: re.fullmatch(pattern, value), words)


HEAD = _text(
    r"plateau|head(-train)?(:[1-9][0-9]{0,8})?",
    "'plateau', 'head', 'head:STEPS', 'head-train' or 'head-train:STEPS'",
)
SHARE = r"0?\.0*[1-9][0-9]*"
AVERAGE = _text(
    rf"(online-)?sma(:[1-9][0-9]{{0,8}})?|ema(:{SHARE})?|swad(:({SHARE}|[1-9][0-9]*(\.[0-9]+)?))?",
    "'sma', 'sma:START', 'online-sma', 'online-sma:START', 'ema', 'ema:DECAY', 'swad' or 'swad:RATIO'",
)
DECAY = rf"(cosine|linear|step:(1|{SHARE}):[1-9][0-9]*)"
SCHEDULE = _text(
    rf"constant|{DECAY}|warmup:[1-9][0-9]*(,{DECAY})?",
    "'constant', 'cosine', 'linear', 'step:FACTOR:STEPS', 'warmup:STEPS' or 'warmup:STEPS,cosine'",
)
WarmStart = Annotated[int, Range(1, 10**9)] | Fraction | Annotated[str, HEAD]
Average = Annotated[str, AVERAGE]
Schedule = Annotated[str, SCHEDULE]
Draw = Literal["domains", "one-domain", "pooled", "balanced", "regrouped"]
Kind = Literal["numeric", "boolean", "date", "categorical", "text"]
DropRows = Literal["missing", "mostly-empty", "outliers", "single"]
Maker = Callable[..., Any]
Names = str | int | Sequence[str | int]
"""One name or several, such as those of domains; a domain may be called 3."""
Algorithms = str | type | Sequence[str | type]
"""One algorithm or several: names, files, or classes."""


OF_DATA = Option(None, "train compare diagnose check")


class RoleOptions(TypedDict, total=False):
    """The label and the domain of a row."""

    label: Annotated[str | None, OF_DATA]
    """Column to predict."""
    domain: Annotated[str | None, OF_DATA]
    """Column with the domain of each row."""


class TableOptions(TypedDict, total=False):
    """How a table is read."""

    group: Annotated[str | None, OF_DATA]
    """Column that identifies the entity of each row, such as a patient; rows of one entity stay in the same
    split."""
    task: Annotated[Literal["classification", "regression"] | None, OF_DATA]
    """Kind of the task (default: inferred from the label)."""
    drop: Annotated[Names | None, OF_DATA]
    """Columns to ignore."""
    columns: Annotated[Names | None, Option()]
    """Columns to use as features (default: all others)."""
    kinds: Annotated[Mapping[str, Kind] | None, OF_DATA]
    """Kind of a column whose inferred kind is wrong: numeric, boolean, date, categorical or text. In Python
    ``{"zip": "categorical"}``, on the command line ``--kinds.zip categorical``."""
    decimal: Annotated[Literal[".", ","] | None, OF_DATA]
    """Decimal mark, where it is ambiguous."""
    day_first: Annotated[bool | None, OF_DATA]
    """Whether 3/4/2020 is in April, where it is ambiguous."""
    drop_rows: Annotated[Sequence[DropRows] | None, OF_DATA]
    """Rows to ignore: missing (no label or domain), mostly-empty (such as totals), outliers (labels far from
    all others) or single (domains of one row)."""
    encoding: Annotated[str | None, OF_DATA]
    """Encoding of a CSV file, such as cp1252 (default: UTF-8)."""
    sheet: Annotated[str | int | None, OF_DATA]
    """Name of the sheet of an Excel file, or its number from 0 (default: the first)."""
    skip_rows: Annotated[Annotated[int, Range(0)] | None, OF_DATA]
    """Number of lines, or rows of a sheet, above the names of the columns."""


class DataOptions(RoleOptions, TableOptions, total=False):
    """How data are read: a table, a folder of images, or a dataset by name."""

    bad_images: Annotated[Literal["stop", "skip"] | None, Option(None, "train compare")]
    """Stop at an image that cannot be read, or skip it (default: stop)."""
    data_dir: Annotated[str | Path | None, Option(None, "train compare diagnose")]
    """Folder that contains the datasets (default: $SHOAL_DATA)."""
    data_options: Annotated[Mapping[str, Any] | None, OF_DATA]
    """Options of the dataset."""


class ModelOptions(TypedDict, total=False):
    """The model of a run, by name."""

    model: Annotated[str | None, Option(None, "train compare sweep")]
    """Name of a model of Shoal or timm, or name or folder of a text encoder (default: the dataset's)."""
    model_options: Annotated[Mapping[str, Any], Option({}, "train compare")]
    """Options of the model."""
    weights: Annotated[str | Path | None, Option(None, "train compare sweep")]
    """File of initial weights: .safetensors, or a .pt file that contains only weights."""
    freeze_backbone: Annotated[bool, Option(False, "train compare")]
    """Train only the head, on features computed once without augmentation."""


class TrainingOptions(TypedDict, total=False):
    """What decides the result of a training: also the fields of a run configuration."""

    steps: Annotated[Count, Option(1000, "train compare sweep")]
    """Number of training steps, each on one batch from every domain of the step (default: 1000; for compare
    based on the data, for sweep 5001)."""
    batch_size: Annotated[Count, Option(32, "train compare")]
    """Number of examples per batch (default: 32; for compare of a table, by its size)."""
    domains_per_step: Annotated[Count | None, Option(None, "train compare")]
    """Number of domains per step (default: all if there are at most 16, otherwise 5)."""
    settings: Annotated[Mapping[str, Any], Option({}, "train")]
    """Hyperparameters of the algorithm (`shoal list fish`)."""
    draw: Annotated[Draw | None, Option()]
    """How batches are sampled (default: as the algorithm requires); regrouped is the random grouping of the
    paper."""
    seed: Annotated[Seed, Option(0, "train diagnose")]
    """Random seed of the initial weights and the batches."""
    optimizer: Annotated[Literal["adam", "adamw", "sgd"] | Maker, Option("adam", "train")]
    """Optimizer. In Python also a class such as torch.optim.SGD, or a function that creates an optimizer from
    parameters, including its learning rate."""
    optimizer_options: Annotated[Mapping[str, Any], Option({})]
    """Further arguments of the optimizer, such as {'weight_decay': 0.01}."""
    lr: Annotated[Rate | None, Option(None, "train compare")]
    """Learning rate (default: 0.001; for pretrained models by name 5e-05, or 0.0002 with LoRA, after a
    warmup)."""
    head_lr: Annotated[Rate | None, Option()]
    """Learning rate of the head (default: lr)."""
    layer_decay: Annotated[Fraction | None, Option()]
    """Layer-wise learning rate decay: k layers below the head, the learning rate is multiplied by this factor
    to the power of k; 0.65 to 0.9 are usual for transformers."""
    schedule: Annotated[Schedule | Maker | None, Option(None, "train")]
    """Learning rate schedule: constant, cosine, linear, step:0.96:1000, warmup:50 or warmup:50,cosine. In
    Python also a function that creates a scheduler from the optimizer."""
    clip: Annotated[Positive | None, Option()]
    """Maximum norm of the gradient; in Fish, of each inner step's."""
    accumulate: Annotated[Count, Option(1)]
    """Number of micro-batches that each batch is split into, to save memory; for algorithms whose objective
    is a mean over examples."""
    warm_start: Annotated[WarmStart | None, Option(None, "train")]
    """Train with ERM first, for a number of steps (500), for a fraction of the data (0.1), or until
    validation stops improving (plateau); or only the head, for steps / 10 steps (head) or a given number
    (head:500); or the head as in ERM++, on the batches of the training and with the rest in training mode,
    for 500 steps (head-train) or a given number (head-train:100)."""
    average: Annotated[Average | None, Option(None, "train")]
    """Average the weights: sma from a tenth of the steps on, or from step START on (sma:START); online-sma
    as in ERM++, from step 100 or START on, with BatchNorm of the averaged network tracked online; ema
    exponentially, with decay 0.999 or DECAY (ema:DECAY); swad between a start and an end found on the
    validation loss, with ratio 1.3 or RATIO (swad:RATIO)."""
    wise_ft: Annotated[Annotated[float, Range(0, 1)] | Literal["validation"] | None, Option()]
    """Interpolate between the initial weights (after a warm start) and the selected weights: the fraction of
    the selected ones, or 'validation' to choose it on validation (Wortsman et al. 2022). A new head needs
    warm_start='head'."""
    l2_sp: Annotated[Annotated[float, Range(0, 1e30)] | None, Option()]
    """Weight of the L2-SP penalty, the squared distance to the initial weights (Li et al. 2018)."""
    miro: Annotated[Annotated[float, Range(0, 1e30)] | None, Option()]
    """Weight of the MIRO penalty, which keeps features close to those of the pretrained model, such as 0.1
    (Cha et al. 2022)."""
    retrain: Annotated[bool, Option(False)]
    """After selection, train again from the initial weights on training and validation examples, for as many
    steps as the selected weights were trained."""
    precision: Annotated[Literal["fp32", "bf16"] | None, Option(None, "train")]
    """Precision of the forward pass (default: fp32; bf16 for pretrained image models by name, on CUDA)."""
    memory_format: Annotated[Literal["contiguous", "channels-last"] | None, Option()]
    """Memory format of images and convolutions (default: contiguous; channels-last for pretrained image
    models by name, on CUDA)."""
    metric: Annotated[str | Maker | None, Option(None, "train compare")]
    """Metric for selection, such as AUC or 'worst-group accuracy' (default: the dataset's; otherwise accuracy
    or mse). In Python also a function of outputs, labels and groups."""
    select: Annotated[Literal["best", "last"] | None, Option(None, "train")]
    """Keep the best weights on validation, or the last (default: best if there is validation data)."""
    patience: Annotated[Count | None, Option(None, "train")]
    """Stop after this number of evaluations without improvement on validation."""
    eval_every: Annotated[Count | None, Option(None, "train")]
    """Number of steps between evaluations (default: chosen so that evaluation costs less than training)."""
    calibrate: Annotated[bool, Option(True, "train compare")]
    """Fit a temperature for the probabilities of a classifier, on validation examples. It does not change
    which class is predicted."""
    eval_limit: Annotated[Count | None, Option()]
    """Maximum number of examples per split to evaluate on, a random sample (default: all; about 5,000 for
    train)."""


class ExecutionOptions(TypedDict, total=False):
    """Where and how a training is computed; they do not change its result, up to rounding."""

    device: Annotated[Any, Option(None, "train compare sweep")]
    """Device, such as cpu, cuda or cuda:1 (default: cuda if available)."""
    workers: Annotated[Annotated[int, Range(0, 1000)], Option(0, "train compare")]
    """Number of processes that load examples."""
    compile: Annotated[bool, Option(False)]
    """Compile the model with torch.compile."""
    deterministic: Annotated[bool, Option(False)]
    """Use only deterministic kernels; slower on CUDA."""
    progress: Annotated[bool | Callable[[int, str], None], Option(True)]
    """Show progress on stderr."""


class LogOptions(TypedDict, total=False):
    """What is written down of one run."""

    track_every: Annotated[Count | None, Option(None, "train")]
    """Number of steps between measurements of the gradient agreement between domains."""
    track_after: Annotated[bool, Option(False)]
    """Measure the gradient agreement after these steps too, on the same batches."""
    checkpoint_every: Annotated[Count | None, Option()]
    """Number of steps between checkpoints (default: every minute, and at the end)."""
    predictions: Annotated[bool | str, Option(False, "train")]
    """Write predictions in the format of the WILDS leaderboard."""
    wandb: Annotated[str | None, Option(None, "train")]
    """Weights & Biases project to log to."""


class ParallelOptions(TypedDict, total=False):
    """How several runs are distributed."""

    jobs: Annotated[Few | None, Option(None, "train compare sweep")]
    """Number of runs in parallel (default: one per core, or one per GPU)."""
    engine: Annotated[Literal["local", "ray"], Option("local", "train compare sweep")]
    """Run on this machine, or on Ray ($RAY_ADDRESS)."""


class FitOptions(TrainingOptions, ExecutionOptions, LogOptions, total=False):
    """The options of :func:`shoal.fit`."""

    loss: Annotated[Maker | None, Option()]
    """Function loss(output, y), a mean over examples (default: cross-entropy for classes, binary
    cross-entropy for several labels, otherwise the squared error)."""
    classes: Annotated[Count | None, Option()]
    """Number of classes (default: inferred from the data)."""
    capture: Annotated[bool | None, Option()]
    """Replay steps as CUDA graphs (default: if possible)."""
    eval_batch: Annotated[Count | None, Option()]
    """Number of examples per batch in evaluation (default: four times those of a training step, at
    most 1024)."""
    callbacks: Annotated[Sequence[Any], Option(())]
    """Callbacks; see :class:`shoal.Callback`."""


class TrainOptions(
    DataOptions, ModelOptions, TrainingOptions, ExecutionOptions, LogOptions, ParallelOptions, total=False
):
    """The options of :func:`shoal.train`."""


class CompareOptions(
    DataOptions, ModelOptions, TrainingOptions, ExecutionOptions, ParallelOptions, total=False
):
    """The options of :func:`shoal.compare`."""


class SweepOptions(ModelOptions, TrainingOptions, ExecutionOptions, ParallelOptions, total=False):
    """The options of :func:`shoal.sweep`."""


@functools.cache
def declared(options: type) -> dict[str, Option]:
    """The options of a ``TypedDict`` above, by name, in the order of the declarations."""
    hints, helps = typing.get_type_hints(options, include_extras=True), _docstrings()
    return {
        name: replace(hint.__metadata__[-1], name=name, type=hint, help=helps[name])
        for name, hint in hints.items()
    }


@functools.cache
def _docstrings() -> dict[str, str]:
    """The docstring below each declaration in this file."""
    tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        option.target.id: " ".join(ast.literal_eval(below.value).split())  # type: ignore[union-attr]
        for option, below in (pair for body in bodies for pair in itertools.pairwise(body))
        if isinstance(option, ast.AnnAssign) and isinstance(below, ast.Expr)
    }


def options_of(function: Callable[..., Any]) -> dict[str, Option]:
    """The options that a public function takes as ``**options``."""
    options = options_type(function)
    return {} if options is None else declared(options)


def with_defaults(options: Mapping[str, Any], of: type) -> dict[str, Any]:
    """``options``, with the declared default of each that is missing."""
    return {name: options.get(name, each.default) for name, each in declared(of).items()}


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """What sets these options on the command line.

    >>> as_flags({"lr": 0.1, "held_out": ["a", "b"], "retrain": True, "settings": {"meta_lr": 0.5}})
    ['--lr', '0.1', '--held-out', 'a', 'b', '--retrain', '--settings.meta_lr', '0.5']
    """
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [word for key, each in value.items() for word in (f"--{flag}.{key}", str(each))]
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def public(*main: str) -> Callable[[Function], Function]:
    """Makes a public function check its arguments before it does anything.

    Args:
        main: options that its signature shows in notebooks and ``help``, before the others.
    """

    def decorate(function: Function) -> Function:
        wrapped, signature = checked(function), inspect.signature(function)
        if main:
            known, (*parameters, rest) = options_of(function), signature.parameters.values()
            only = inspect.Parameter.KEYWORD_ONLY
            own = [inspect.Parameter(n, only, default=known[n].default) for n in main]
            wrapped.__signature__ = signature.replace(parameters=[*parameters, *own, rest])  # type: ignore[attr-defined]
        return wrapped

    return decorate
