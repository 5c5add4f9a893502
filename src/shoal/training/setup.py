"""What a training is made of: checked against each other and built, before any step."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from shoal.algorithms import Algorithm, algorithm_class, build, check_settings, settings_of
from shoal.algorithms.base import trained_parameters
from shoal.data.batch import DomainData, Task, TensorData, tensors_in
from shoal.data.check import check_examples, check_outputs
from shoal.data.loader import MetaBatchLoader, seeded, to_device
from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError
from shoal.losses import BINARY, OF_NUMBERS, PROBABILITIES, UNKNOWN_LOSS, shown_loss
from shoal.models.calling import arguments, call
from shoal.models.feature_model import FeatureModel
from shoal.models.features import FeatureExtractor, find_head
from shoal.options import FitOptions
from shoal.replay import preserve_state
from shoal.tensors import map_nest
from shoal.training.engine import Engine, cannot_accumulate
from shoal.training.evaluate import Evaluator, evaluating
from shoal.training.fine_tuning import L2SP, head_for, scale_rates
from shoal.training.metrics import choose_metrics
from shoal.training.options import SPLITS, learning_rate, make_optimizer, make_schedule, uses_swad
from shoal.training.processes import Processes
from shoal.training.progress import Progress

TRAIN_SAMPLE = 5000
"""Examples of the training domains that are evaluated, unless the user says how many."""
EVALUATIONS, SWAD_EVALUATIONS = (10, 5, 4, 2, 1), 20
"""How many there may be by default, divisors of most numbers of steps; with SWAD, which ends by them, 20."""
CHEAP = 2000
"""So many examples may be evaluated in the shortest training."""
MOST_CLASSES = 512
"""Classes that a loss is tried on."""


class Setup:
    """The parts of a training. Everything is checked when it is made; nothing is trained.

    ``only`` is the part of the model that is trained, if not all of it, and ``frozen`` the mode of the rest;
    ``horizon`` is the number of steps that algorithms schedule by, if not that of ``options``.
    """

    def __init__(
        self,
        algorithm: str | type[Algorithm],
        model: nn.Module,
        data: DomainData,
        options: FitOptions,
        label: str | None = None,
        stage: str = "train",
        processes: Processes | None = None,
        only: nn.Module | None = None,
        horizon: int | None = None,
        frozen: Literal["train", "eval"] = "eval",
    ) -> None:
        self.stage, self.only, self.frozen = stage, only, frozen
        self.processes = processes or Processes(options["device"])
        self.device, main = self.processes.device, self.processes.main
        self.model = model.to(self.device)
        self.data = data
        if isinstance(data.examples, TensorData):
            self.data = replace(data, examples=data.examples.to(self.device))
        # Pretrained image models compute in bf16 with channels last on CUDA.
        images = bool(getattr(model, "weights", "")) and any(p.ndim == 4 for p in model.parameters())
        fast = images and self.device.type == "cuda" and torch.cuda.is_bf16_supported(False)
        decided: FitOptions = {
            "select": options["select"] or ("best" if "validation" in data.splits else "last"),
            "precision": options["precision"] or ("bf16" if fast else "fp32"),
            "memory_format": options["memory_format"] or ("channels-last" if fast else "contiguous"),
        }
        self.options = options = {**options, **decided}
        self.channels_last = options["memory_format"] == "channels-last"
        self.label = label or (algorithm if isinstance(algorithm, str) else algorithm.__name__)
        self.progress = Progress(self.label, options["steps"], options["progress"] if main else False)
        with seeded(options["seed"]), self.progress.phase("reading data"):  # which may draw random numbers
            self._build(algorithm, horizon)
        self.sampler = DomainBatchSampler(
            data.splits["train"],
            options["batch_size"],
            options["domains_per_step"],
            draw=options["draw"] or self.algorithm.draw,
            seed=options["seed"],
            steps=options["steps"],
        )
        self._check()
        with only_trained(model, only):
            self._make_engine()
        self._make_evaluator()
        if options["compile"]:
            parts = self.algorithm.needs_features and self.algorithm.extractor is None
            for module in [model.features, model.head] if parts else [model]:  # what the engine calls
                _compile(module)  # type: ignore[arg-type]

    def _build(self, algorithm: str | type[Algorithm], horizon: int | None) -> None:
        """Find out the task and the loss from two examples and the model's outputs; build the algorithm."""
        options, model, data, cls = self.options, self.model, self.data, algorithm_class(algorithm)
        loss: Any = options["loss"]
        if isinstance(loss, nn.Module):
            loss.to(self.device)  # its class weights
        settings, extractor = check_settings(cls, options["settings"]), None
        layer = settings.get("features")
        if cls.needs_features and (layer is not None or not isinstance(model, FeatureModel)):
            extractor = FeatureExtractor(model, layer)
            extractor.close()
        which = data.splits["train"].indices[:2]
        if not isinstance(data.examples, TensorData):  # whose examples may differ in size
            which = which[[0, 0]]
        x, y, *weight = to_device(data.examples.batch(which), self.device)
        if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
            _forward(model, x)  # gives them their shapes
        with preserve_state(model):
            output, width = _forward(model, x), None
            if extractor is not None:
                args, kwargs = arguments(model, x)
                width = extractor.find(*args, **kwargs).width
            elif isinstance(model, FeatureModel):
                width = max([1, *(t[:1].numel() for t in tensors_in(_forward(model.features, x)))])
        kind, classes = _kind(data.kind, options["classes"] or data.classes, output, y)
        for split in data.splits.values():
            check_examples(data.examples, split, classes)
        check_outputs(output, y, classes, kind)
        self.scored = isinstance(output, Tensor) and (classes is not None or output.shape == y.shape)
        form = (
            f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        )
        forms = f"the model's output is {form} and the targets are of shape {tuple(y.shape)}"
        if loss is None and not self.scored:
            raise InputError(
                f"{forms}: regression needs one output per target. For classification make labels integers "
                "(y.long()); for other outputs give a loss."
            )
        if not self.scored and set(SPLITS) & set(data.splits) != {"train"}:
            raise InputError(f"{forms}; give the model one output, or train without other splits.")
        if not self.scored:
            warn(f"{forms}, which cannot be compared: nothing is evaluated.", stacklevel=5)
        default: Any = F.mse_loss if classes is None else F.cross_entropy
        default = F.binary_cross_entropy_with_logits if kind == "multilabel" else default
        steps = horizon or options["steps"]
        self.task = Task(len(data.splits["train"]), classes, features=width, kind=kind, steps=steps)
        if extractor is not None and "features" in settings_of(cls):
            settings |= {"features": extractor.layer}
        self.algorithm = build(algorithm, model, loss or default, self.task, **settings).to(self.device)
        self.algorithm.check_input(x)
        self.example = x
        if loss is not None or weight:
            self._check_loss(output, y, bool(weight))

    def _check_loss(self, output: Any, y: Tensor, weighted: bool) -> None:
        """Refuse a loss that is not one number, or cannot be divided as is asked of it."""
        algorithm, task, pieces = self.algorithm, self.task, self.options["accumulate"]
        loss, terms, name = algorithm.loss, algorithm.terms, type(algorithm).__name__
        if weighted and terms is None:
            raise InputError(UNKNOWN_LOSS.format("sample weights need", shown_loss(loss)))
        if weighted and not algorithm.sample_weights:
            raise InputError(
                f"{name} does not take sample weights; leave them out, or train with 'fish', 'vrex' or 'erm'."
            )
        wrong: tuple[Any, ...] = (*BINARY, *OF_NUMBERS) if task.classes is not None else ()
        if terms is not None and terms.function in (PROBABILITIES if task.kind == "multilabel" else wrong):
            raise InputError(
                f"{shown_loss(loss)} does not fit: the task is {task.kind} and outputs are logits. Leave the "
                "loss out, or say task='multilabel' (with nn.BCEWithLogitsLoss()) or task='regression'.",
                "loss",
            )
        if not isinstance(output, Tensor):
            return
        try:
            with torch.no_grad():
                value = loss(output, y)
        except Exception as error:
            if terms is None:  # it asks for more than this trial knows of; its first step will tell
                return
            shapes = f"outputs {tuple(output.shape)} and targets {tuple(y.shape)}"
            raise InputError(f"cannot take {shapes}: {_first_line(error)}", "loss") from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"loss(output, y) must return one number, a mean over examples; got {got}.")
        gathered = type(algorithm).objective is not Algorithm.objective
        by_parts = terms is not None and algorithm.sample_weights and not algorithm.second_order
        needs = "training in several processes" if self.processes.count > 1 else ""
        needs = f"accumulate={pieces}" if pieces > 1 else needs
        needs = name if algorithm.plain_mean else "" if gathered or by_parts else needs
        if needs and not _is_plain_mean(loss, output, y, task.classes):
            raise InputError(
                f"{needs} needs a loss that is the mean of its examples' losses, without class weights or "
                "ignore_index: the result would depend on how batches are divided. Class weights in "
                "nn.CrossEntropyLoss(weight=…) can be divided by most algorithms."
            )

    def _check(self) -> None:
        """Refuse options that do not go together."""
        options, algorithm, count = self.options, self.algorithm, self.processes.count
        names, each = self.data.splits["train"].names, self.sampler.domains_per_step
        name, size, pieces = type(algorithm).__name__, options["batch_size"], options["accumulate"]
        needed = {
            "select": options["select"] == "best",
            "patience": options["patience"],
            "average": uses_swad(options),
            "warm_start": options["warm_start"] == "plateau",
            "wise_ft": options["wise_ft"] == "validation",
            "retrain": options["retrain"],
        }
        for option in needed:
            if needed[option] and not (self.scored and "validation" in self.data.splits):
                raise InputError(f"{options[option]!r} requires validation data.", option)  # type: ignore[literal-required]
        if algorithm.min_domains > 1:
            if len(names) < 2:
                raise InputError(
                    f"{name} compares domains and there is only one to train on ({names[0]!r}); "
                    "give at least two, or train with 'erm'."
                )
            if not 2 <= each <= len(names):
                raise InputError(
                    f"{name} compares domains; domains_per_step={each} must be from 2 to {len(names)}."
                )
        once = {"compile": options["compile"], "miro": options["miro"], "accumulate": pieces > 1}
        for option, given in once.items() if algorithm.second_order else ():
            if given:
                why = f"{name} differentiates the model twice"
                raise InputError(f"{options[option]} cannot be used, as {why}.", option)  # type: ignore[literal-required]
        if pieces > 1 and type(algorithm).objective is not Algorithm.objective:
            raise InputError(cannot_accumulate(algorithm, pieces))
        if size % count or pieces > size // count:
            raise InputError(
                f"{size} cannot be split over {count} processes and accumulate={pieces} pieces, each process "
                "with as many examples.",
                "batch_size",
            )

    def _make_engine(self) -> None:
        """MIRO and L2-SP are parts of the algorithm, with which they are moved, trained and saved."""
        from shoal.training.miro import Miro

        options, model, algorithm = self.options, self.model, self.algorithm
        self.miro: Miro | None = None
        if options["miro"]:
            self.miro = Miro(model, find_head(model, self.example), options["miro"], self.example)
            algorithm.add_module("miro", self.miro)
        head = head_for(options, model, self.example)
        self.l2_sp: L2SP | None = None
        if options["l2_sp"] is not None and head is not None:
            self.l2_sp = L2SP(model, head, options["l2_sp"])
            algorithm.add_module("l2_sp", self.l2_sp)
        auxiliary = algorithm.auxiliary_optimizers()
        optimizer = make_optimizer(options, trained_parameters(algorithm, auxiliary))
        if self.miro is not None:
            self.miro.own_rate(optimizer)
        if head is not None:
            scale_rates(optimizer, options, model, head)
        algorithm.prepare(optimizer, learning_rate(optimizer.param_groups[0]))
        self.engine = Engine(
            algorithm,
            optimizer,
            self.processes,
            precision=options["precision"] or "fp32",
            clip=options["clip"],
            accumulate=options["accumulate"],
            auxiliary=auxiliary,
        )
        self.engine.extra_loss = self.miro
        if self.l2_sp is not None:
            self.engine.gradient_hooks.append(self.l2_sp.added)
        self.schedule = make_schedule(options, optimizer)

    def _make_evaluator(self) -> None:
        """And how often it is used: as long as no more examples pass through the model than in training."""
        options, data, limit = self.options, self.data, self.options["eval_limit"]
        step = self.sampler.domains_per_step * options["batch_size"]
        splits = [split for split in SPLITS if split in data.splits and self.scored]
        metrics, selects = choose_metrics(options["metric"], data.metrics, self.task.kind)
        self.evaluator = Evaluator(
            data.examples.evaluation(),
            {split: data.splits[split] for split in splits},
            task=self.task,
            loss=self.algorithm.loss,
            # Without gradients a batch may be larger than those of the training.
            batch_size=options["eval_batch"] or max(1, min(4 * step // options["accumulate"], 1024)),
            workers=options["workers"],
            limits={split: limit or TRAIN_SAMPLE for split in splits if limit or split == "train"},
            processes=self.processes,
            autocast=self.engine.autocast,
            enter=channels_last if self.channels_last else lambda x: x,
            metrics=metrics,
            selects=selects,
            excluded_groups=data.excluded_groups,
            watch=lambda split, done, total: self.progress.show(f"evaluating {split} {done:,}/{total:,}"),
            label_scale=data.label_scale,
        )
        each, count = sum(map(len, self.evaluator.which.values())), SWAD_EVALUATIONS
        if not uses_swad(options):
            most = math.inf if options["patience"] else max(options["steps"] * step, CHEAP)
            count = max(1, *(n for n in EVALUATIONS if n * each <= most), 0)
        self.eval_every = options["eval_every"] or math.ceil(options["steps"] / count)

    def evaluator_of(self, splits: Sequence[str], limits: Mapping[str, int]) -> Evaluator:
        """An evaluator of these splits."""
        return replace(self.evaluator, splits={s: self.data.splits[s] for s in splits}, limits=limits)

    def loader(self, sampler: Any, start: int, stop: int, workers: int | None = None) -> MetaBatchLoader:
        """This process's share of the batches that a sampler plans."""
        return MetaBatchLoader(
            self.data.examples,
            sampler,
            workers=self.options["workers"] if workers is None else workers,
            device=self.device,
            enter=channels_last if self.channels_last else lambda x: x,
            start=start,
            stop=stop,
            share=(self.processes.index, self.processes.count),
        )

    @contextmanager
    def training(self) -> Iterator[None]:
        """While it trains: modes are set, weights laid out as asked, hooks attached, other parts frozen."""
        modules: list[Any] = [self.model] + ([self.miro.pretrained] if self.miro else [])
        recording = self.miro.recording() if self.miro else nullcontext()
        try:
            for module in modules if self.channels_last else ():
                module.to(memory_format=torch.channels_last)
            self.model.train(self.only is None or self.frozen == "train")
            if self.only is not None:
                self.only.train()
            with self.algorithm.extractor or nullcontext(), recording, only_trained(self.model, self.only):
                yield
        finally:
            for module in modules if self.channels_last else ():
                module.to(memory_format=torch.contiguous_format)


def _forward(model: nn.Module, x: Any) -> Any:
    try:
        with torch.no_grad(), evaluating(model):
            return call(model, x)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        what, why = f"a {type(x).__name__}", _first_line(error)
        if isinstance(x, Tensor):
            what = f"x of shape {tuple(x.shape)}, {x.dtype}"
        elif isinstance(error, TypeError):
            why += (
                ". A tuple is passed as several arguments where forward needs more than one, a dict by name "
                "where all its keys are parameters of forward; otherwise x is one argument."
            )
        raise InputError(f"the model cannot take two training examples ({what}): {why}") from error


def _kind(kind: str | None, classes: int | None, output: Any, y: Tensor) -> tuple[str, int | None]:
    """The kind of the task and the classes, by what the data say or else by shapes of labels and outputs."""
    if y.is_floating_point():
        if classes is not None or kind == "ordinal":
            raise InputError(f"the targets are {y.dtype}; the labels of classes must be integers: y.long().")
        return (kind if kind not in (None, "classification") else "regression"), None
    if not isinstance(output, Tensor):
        return kind or "classification", classes
    if y.ndim > 1 or output.ndim > 2:
        raise InputError(
            f"the model's output has shape {tuple(output.shape)} and the labels {tuple(y.shape)}: a class "
            "per example needs outputs (B, classes) and labels (B,). Several labels of 0 or 1 are "
            "task='multilabel', several numbers floating targets (y.float())."
        )
    if classes is None and output.ndim:
        classes = output[0].numel()
        if output.ndim == 1 or classes == 1:
            raise InputError(
                "the model has one output and the labels are whole numbers, which are classes: give it one "
                "output per class; for regression say task='regression' or make the targets floating; one "
                "logit with loss=nn.BCEWithLogitsLoss() is task='multilabel'."
            )
    return kind or "classification", classes


def _is_plain_mean(loss: Any, output: Tensor, y: Tensor, classes: int | None) -> bool:
    """Whether a loss is the mean of its examples' losses, tried on random outputs and every class."""
    count = min(classes or 8, MOST_CLASSES)
    generator, numbers = torch.Generator().manual_seed(0), torch.arange(count, device=y.device)
    output = torch.randn((count, *output.shape[1:]), generator=generator).to(output)
    y = numbers.to(y.dtype) if classes and y.ndim == 1 else y[numbers % len(y)]
    with torch.no_grad():
        whole = float(loss(output, y))
        parts = [float(loss(output[i : i + 1], y[i : i + 1])) for i in range(count)]
    return math.isclose(whole, sum(parts) / count, rel_tol=1e-3, abs_tol=1e-5)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def channels_last(x: Any) -> Any:
    """Images of a nest in this memory format, in which the weights are too."""

    def converted(part: Any) -> Any:
        images = isinstance(part, Tensor) and part.ndim == 4
        return part.contiguous(memory_format=torch.channels_last) if images else part

    return map_nest(converted, x)


@contextmanager
def only_trained(model: nn.Module, part: nn.Module | None) -> Iterator[None]:
    """Within the block no parameter outside ``part`` requires a gradient; ``None``: nothing changes."""
    own = set((model if part is None else part).parameters())
    frozen = [p for p in model.parameters() if p.requires_grad and p not in own]
    try:
        for p in frozen:
            p.requires_grad_(False)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)


def _compile(module: nn.Module) -> None:
    """As ``module.compile()``; one that cannot be compiled runs as it is, with the same result."""
    plain = module._call_impl
    compiled = torch.compile(lambda *args, **kwargs: plain(*args, **kwargs))

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except Exception as error:  # of any of the compilers; an error of the model itself comes again
            module._compiled_call_impl = None
            result = plain(*args, **kwargs)
            why = f"{type(error).__name__}: {_first_line(error)}"
            logging.getLogger("shoal").warning(f"the model cannot be compiled ({why}); it runs as it is.")
            return result

    module._compiled_call_impl = call
