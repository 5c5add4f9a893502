"""``shoal.train``: one algorithm on a dataset or a user's own data, in a folder that can be resumed."""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shoal.api.source import OF_TABLE, Source, datasets_in, find_source, make_folder
from shoal.errors import InputError, TableWarning
from shoal.settings import Count, Few, Head, Range, Rate, Seed, checked

if TYPE_CHECKING:
    import pandas

    from shoal.experiments.config import RunConfig
    from shoal.experiments.record import RunRecord
    from shoal.report.tables import Table
    from shoal.trained import Trained

Kind = Literal["numeric", "boolean", "date", "categorical", "text"]
Draw = Literal["domains", "one-domain", "pooled", "balanced", "regrouped"]
WarmStart = (
    Annotated[int, Range(1, 10**9, what="a number of steps")]
    | Annotated[float, Range(above=0, most=1, what="a fraction of the data")]
    | Literal["plateau"]
    | Head
)
Positive = Annotated[float, Range(above=0)]

HOW = ("workers", "compile", "deterministic", "checkpoint_every", "keep", "log_every", "predictions",
       "track_every", "track_layers")  # fmt: skip
"""Options that change no result."""
SAME = ("settings", "model", "weights", "optimizer", "clip", "accumulate", "precision", "average",
        "average_start", "average_ratio", "select", "patience", "on_nan", "batch_size", "domains_per_step",
        "draw", "seed", "eval_every", "eval_limit", "metric", "eval_splits", "warm_start",
        "warm_select", "average_decay", "wise_ft", "miro", "l2_sp", "l2_sp_head", "memory_format",
        "head_lr", "layer_decay", "retrain")  # fmt: skip
"""What a run's configuration calls by the same name."""
EXECUTION = ("engine", "device", "jobs", "address", "gpus_per_run", "cpus_per_run")
OF_BASELINES = ("algorithm", "data", "data_options", "bad_images", "data_dir", "held_out", "settings", "seed",
                "metric", "out", "progress", *OF_TABLE)  # fmt: skip
"""What a baseline takes; other options belong to the training of a network."""


@dataclass(frozen=True)
class Run:
    """The result of :func:`train`: one run, or several with different seeds.

    Attributes:
        records: record of each run.
        folder: folder of the run, or of the runs.
    """

    records: Sequence[RunRecord]
    folder: Path

    @property
    def record(self) -> RunRecord:
        """The record of the first run."""
        return self.records[0]

    @property
    def problems(self) -> list[str]:
        """The errors of runs that did not finish."""
        several = len(self.records) > 1
        lost = [r for r in self.records if r.status != "finished"]
        return [f"seed {r.config.seed}: {r.error}" if several else r.error for r in lost]

    @property
    def finished(self) -> list[RunRecord]:
        """The records of finished runs."""
        return [r for r in self.records if r.status == "finished"]

    def table(self) -> Table:
        """Return a table of each metric and domain; for several seeds, mean ± standard deviation and each
        seed."""
        from shoal.report.runs import run_table, seeds_table

        contents = [r.to_dict() for r in self.finished]
        if not contents:
            raise InputError("no run finished. " + " ".join(self.problems[:2]))
        return run_table(contents[0]) if len(self.records) == 1 else seeds_table(contents)

    def load(self, device: str = "cpu") -> Trained:
        """Load the trained model of the first seed.

        Args:
            device: device of the model.
        """
        from shoal.experiments.store import Store
        from shoal.trained import load

        several = len(self.records) > 1
        first = Store(self.folder, weights=True).workplace(self.finished[0].config)
        return load(first if several else self.folder, device=device)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as ``--json`` prints it."""
        records = [r.to_dict() for r in self.records]
        return records[0] if len(records) == 1 else {"records": records}

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per seed, split and domain."""
        import pandas

        columns = ["seed", "split", "domain", "metric", "score"]
        rows = [
            (r.config.seed, split, domain, scores["metric"], score)
            for r in self.finished
            for split, scores in r.chosen.items()
            for domain, score in scores["domains"].items()
        ]
        return pandas.DataFrame(rows, columns=columns)

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_dict` as JSON.

        Args:
            path: file to write.
        """
        from shoal.files import dump_json, finite, write_atomically

        write_atomically(Path(path), dump_json(finite(self.to_dict())))

    def __str__(self) -> str:
        from shoal.training.metrics import why_missing

        table, first = self.table().text(), self.finished[0]
        at, config = first.history[first.selected], first.config
        note, rule, lines = first.notes.get("validation", ""), first.rule, []
        seconds = sum(r.seconds for r in self.records)
        if len(self.records) == 1:
            skipped = f" {first.skipped} non-finite steps were skipped." if first.skipped else ""
            files = ", with predictions" if (self.folder / "predictions").is_dir() else ""
            done = f"{rule} (step {at['step']:,}), {seconds:.1f} s.{skipped} Saved in {self.folder}{files}."
            for split, scores in at["scores"].items():
                lines += why_missing(split, scores.get("metrics") or {})
        else:
            if len({r.rule for r in self.finished}) > 1:  # which steps were averaged may differ
                rule = f"{rule.split(',')[0]}, {config.average}"
            over = f"mean ± standard deviation over {len(self.finished)} seeds"
            done = f"{rule}, {over}; {seconds:.1f} s of training. Saved in {self.folder}."
            lines = self.problems
        if note and rule.startswith("best"):
            lines.insert(0, f"Validation is {note}.")
        return "\n".join([f"{table}\n\n{config.name} on {config.dataset}, {done}", *lines])

    def _repr_html_(self) -> str:
        return self.table().html()


@checked
def train(
    algorithm: str,
    data: Any,
    *,
    data_options: Mapping[str, Any] | None = None,
    bad_images: Literal["stop", "skip"] | None = None,
    data_dir: str | Path | None = None,
    held_out: str | Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    steps: Count = 1000,
    batch_size: Count = 32,
    domains_per_step: Count | None = None,
    model: str | None = None,
    model_options: Mapping[str, Any] | None = None,
    weights: str | Path | None = None,
    freeze_backbone: bool = False,
    draw: Draw | None = None,
    warm_start: WarmStart | None = None,
    warm_select: Literal["best", "last"] | None = None,
    seed: Seed = 0,
    seeds: Few | None = None,
    label: str | None = None,
    domain: str | None = None,
    group: str | None = None,
    task: str | None = None,
    drop: Sequence[str] = (),
    kinds: Mapping[str, Kind] | None = None,
    decimal: Literal[".", ","] | None = None,
    day_first: bool | None = None,
    optimizer: Literal["adam", "adamw", "sgd"] = "adam",
    lr: Rate | None = None,
    head_lr: Rate | None = None,
    layer_decay: Annotated[float, Range(above=0, most=1)] | None = None,
    schedule: str | None = None,
    clip: Positive | None = None,
    accumulate: Count = 1,
    precision: Literal["fp32", "bf16", "fp16", "auto"] | None = None,
    memory_format: Literal["contiguous", "channels-last", "auto"] | None = None,
    average: Literal["sma", "ema", "swad", "swad-paper"] | None = None,
    average_start: Count | None = None,
    average_ratio: Positive | None = None,
    average_decay: Annotated[float, Range(above=0, below=1)] | None = None,
    wise_ft: Annotated[float, Range(0, 1)] | Literal["validation"] | None = None,
    miro: Annotated[float, Range(0)] | None = None,
    l2_sp: Annotated[float, Range(0)] | None = None,
    l2_sp_head: Annotated[float, Range(0)] | None = None,
    retrain: bool = False,
    select: Literal["best", "last"] | None = None,
    metric: str | None = None,
    patience: Count | None = None,
    on_nan: Literal["stop", "skip"] = "stop",
    out: str | Path | None = None,
    device: str | None = None,
    workers: Annotated[int, Range(0, 1000)] = 0,
    jobs: Few | None = None,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    gpus_per_run: Annotated[float, Range(0)] | None = None,
    cpus_per_run: Positive | None = None,
    eval_every: Count | None = None,
    eval_limit: Count | None = None,
    eval_splits: Sequence[str] | None = None,
    predictions: bool = False,
    log_every: Count = 50,
    track_every: Count | None = None,
    track_layers: bool = False,
    checkpoint_every: Count | None = None,
    keep: Count = 2,
    compile: bool = False,
    deterministic: bool = False,
    wandb: str | None = None,
    progress: bool = True,
) -> Run:
    """Train one algorithm and save the run in a folder; the same call resumes it if interrupted. ::

        run = shoal.train("fish", "patients.csv", label="ill", domain="hospital", held_out="B", steps=500)
        print(run)
        model = run.load()

    The Python equivalent of `shoal train`. To train your own model and loss, see :func:`shoal.fit`.

    Args:
        algorithm: name of an algorithm, a baseline, or a recipe for pretrained models such as auto or erm++
            (`shoal list algorithms`).
        data: name of a dataset (`shoal list datasets`), table (.csv, .tsv, .csv.gz, .parquet, .xlsx), or
            folder of images arranged as folder/domain/class. In Python also a DataFrame, arrays (X, y,
            domains), a mapping of columns, or a Hugging Face dataset.
        data_options: options of the dataset.
        bad_images: whether to stop at an image that cannot be read, or skip it (default: stop).
        data_dir: folder that contains the datasets (default: $SHOAL_DATA).
        held_out: test domains, which are not trained on; none: train on all domains of your own data
            (default: the dataset's test domains).
        settings: hyperparameters of the algorithm.
        steps: number of training steps; each uses one batch from every domain of the step.
        batch_size: number of examples per batch.
        domains_per_step: number of domains per step (default: all if there are at most 16, otherwise 5).
        model: name of a model of Shoal or timm, or name or folder of a text encoder (default: the dataset's
            model).
        model_options: options of the model.
        weights: file of initial weights: .safetensors, or a .pt file that contains only weights; for timm
            models, parameter names of timm or torchvision.
        freeze_backbone: train only the head, on features computed once without image augmentation.
        draw: how batches are sampled (default: as the algorithm requires).
        warm_start: train with ERM first, for a number of steps (500), for a fraction of the data (0.1), or
            until validation stops improving (plateau); or train only the head first, for steps / 10 steps
            (head) or a given number (head:500).
        warm_select: continue from the best weights of the warm start on validation, or from its last weights
            (default: best for plateau, otherwise last).
        seed: random seed of the initial weights and the batches.
        seeds: number of runs, with seeds SEED, SEED+1, …
        label: column to predict.
        domain: column with the domain of each row.
        group: column that identifies the entity of each row, such as a patient; rows of one entity stay in
            the same split.
        task: classification or regression (default: inferred from the label).
        drop: columns to ignore.
        kinds: kind of each column whose inferred kind is wrong: numeric, boolean, date, categorical or text.
        decimal: decimal mark, for columns where it is ambiguous.
        day_first: whether 3/4/2020 is in April, for columns where it is ambiguous.
        optimizer: optimizer.
        lr: learning rate (default: 0.001; for pretrained models 5e-05, or 0.0002 with LoRA, after a warmup).
        head_lr: learning rate of the head of a pretrained model (default: lr).
        layer_decay: layer-wise learning rate decay: k layers below the head, the learning rate is multiplied
            by this factor to the power of k, such as 0.75.
        schedule: learning rate schedule: constant, cosine, linear, step:0.96:1000, warmup:50 or
            warmup:50,cosine.
        clip: maximum norm of the gradient.
        accumulate: number of micro-batches that each batch is split into, to save memory.
        precision: precision of the forward pass; auto: fp32 or bf16, whichever is faster on CUDA (default:
            fp32; auto for pretrained models).
        memory_format: memory format of images and convolutions; auto: whichever is faster on CUDA (default:
            contiguous; auto for pretrained models).
        average: average the weights: sma (from average_start on), ema (exponential), swad (by the validation
            loss, as in its authors' code) or swad-paper (as in their paper; needs frequent evaluations).
        average_start: step at which sma starts (default: steps / 10).
        average_ratio: swad ends after 6 evaluations with a validation loss above this multiple of the loss at
            its start (default: 1.3).
        average_decay: decay of ema (default: 0.999, less in the first steps).
        wise_ft: interpolate between the initial weights (after a warm start) and the selected weights: α, the
            fraction of the selected ones, or validation to choose α on validation. A new head needs
            warm_start=head.
        l2_sp: weight of the L2-SP penalty, the squared distance to the initial weights, except for the head.
        l2_sp_head: weight decay of the head, with l2_sp (default: the weight of l2_sp).
        miro: weight of the MIRO penalty, which keeps features close to those of the pretrained model, such as
            0.1.
        retrain: after selection, train again from the initial weights on training and validation examples,
            for as many steps as the selected weights were trained; keep the last weights, or their average.
        select: keep the best weights on validation, or the last weights (default: best if there is validation
            data).
        metric: metric for selection, such as AUC or "worst-group accuracy" (default: the dataset's metric).
        patience: stop after this number of evaluations without improvement.
        on_nan: stop at a step with a non-finite loss or gradient, or skip it; such a step is never applied.
        out: folder of the run (default: a folder in runs/ named after the run).
        device: device, such as cpu, cuda or cuda:1 (default: cuda if available).
        workers: number of processes that load examples.
        jobs: number of runs in parallel (default: one per core; on CUDA 10, or one per GPU if there are
            several).
        engine: run on this machine or on a Ray cluster.
        address: address of the Ray cluster: auto, HOST:PORT or ray://HOST:PORT (default: start Ray on this
            machine).
        gpus_per_run: GPUs per run on Ray, such as 0.25 (default: 1, or 0 without GPUs).
        cpus_per_run: CPUs per run on Ray (default: 1).
        eval_every: number of steps between evaluations (default: chosen so that evaluation costs less than
            training).
        eval_limit: maximum number of examples per split to evaluate on, a random sample (default: all; 5,000
            for train).
        eval_splits: splits to evaluate (default: all).
        predictions: write predictions in the format of the WILDS leaderboard.
        log_every: number of steps between log entries.
        track_every: number of steps between measurements of the gradient agreement between domains.
        track_layers: measure gradient agreement per layer as well.
        checkpoint_every: number of steps between checkpoints (default: at evaluations and every five
            minutes).
        keep: number of checkpoints to keep besides the best.
        compile: compile the model with torch.compile.
        deterministic: use deterministic CUDA kernels, which are slower.
        wandb: Weights & Biases project to log to.
        progress: show progress on stderr.
    """
    options = dict(locals())
    with datasets_in(data_dir):
        config, source, chosen = configuration(options)
        with warnings.catch_warnings():
            return _train(config, source, chosen, options)


def defaults() -> dict[str, Any]:
    """The options of :func:`train` that need not be given."""
    parameters = inspect.signature(train).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def configuration(options: Mapping[str, Any]) -> tuple[RunConfig, Source, str]:
    """The run that is asked for, its data, and what was chosen for the learning rate."""
    from shoal.experiments import baselines
    from shoal.experiments.config import RunConfig
    from shoal.experiments.run import check
    from shoal.experiments.search import with_format, with_model_options, with_rate
    from shoal.training.recipes import find_recipe

    if (recipe := find_recipe(options["algorithm"])) is not None:
        options = {**recipe.fill(options, defaults()), "algorithm": recipe.algorithm}
    algorithm, chosen = options["algorithm"].lower().replace("_", "-"), ""
    if algorithm in baselines.SPACES:
        _refuse_options(algorithm, options)
    names = ("data_options", "bad_images", "held_out", *OF_TABLE)
    source = find_source(options["data"], **{name: options[name] for name in names})
    settings = dict(options["settings"] or {})
    if algorithm in baselines.SPACES:
        steps = baselines.TREES if algorithm == baselines.BOOSTING else 1
        own: dict[str, Any] = {"seed": options["seed"], "metric": options["metric"], "select": "best"}
        config = RunConfig(source.dataset, algorithm, steps, source.options, settings, **own)
    else:
        same = {name: options[name] for name in SAME} | {"settings": settings}
        of_model = model_options(options["model"], options["model_options"] or {}, options["freeze_backbone"])
        same["weights"] = None if options["weights"] is None else str(options["weights"])
        same["eval_splits"] = None if options["eval_splits"] is None else list(options["eval_splits"])
        config = RunConfig(
            source.dataset,
            algorithm,
            options["steps"],
            source.options,
            model_options=of_model,
            label=recipe.name if recipe else "",
            **same,
        )
        if recipe is not None:
            config = with_model_options(recipe, config)
        config, chosen = with_rate(with_format(config), options["lr"], options["schedule"])
    check(config)
    return config, source, chosen


def _refuse_options(algorithm: str, options: Mapping[str, Any]) -> None:
    """A baseline has no use for the options of a network."""
    from shoal.experiments.baselines import SPACES

    for name, default in defaults().items():
        if name not in OF_BASELINES and options[name] not in (default, "cpu", [], {}):
            raise InputError(
                f"{name}= is an option of neural networks, and {algorithm} is not one. "
                f"settings= accepts: {', '.join(SPACES[algorithm]) or 'nothing'}."
            )


def model_options(model: str | None, options: Mapping[str, Any], freeze_backbone: bool) -> dict[str, Any]:
    """The options of a model, ``freeze_backbone`` among them."""
    chosen = dict(options)
    if freeze_backbone:
        if not chosen.get("frozen", True):
            raise InputError(
                "freeze_backbone= contradicts model_options= frozen=false; specify only one of them."
            )
        if model is None:
            raise InputError("freeze_backbone= requires a timm model, such as model=mobilenetv2_100.")
        chosen["frozen"] = True
    return chosen


def _train(config: RunConfig, source: Source, chosen: str, options: Mapping[str, Any]) -> Run:
    from shoal.experiments import baselines
    from shoal.experiments.display import run_seeds
    from shoal.experiments.execute import make_executor
    from shoal.experiments.run import Turns
    from shoal.training.processes import together

    several, progress = options["seeds"], options["progress"]

    def note(texts: Sequence[str]) -> None:
        print(*(f"{text}\n" for text in texts if progress), sep="", end="", file=sys.stderr, flush=True)

    if several and together():
        raise InputError("seeds= trains several models in parallel; run it without torchrun.")
    if several and options["wandb"]:
        raise InputError("wandb= logs a single run; use seed= instead of seeds=.")
    name = f"{config.algorithm}-{config.dataset}-{config.identity[:8]}" + "-seeds" * bool(several)
    folder = Path(options["out"] or Path("runs") / name)
    executor = make_executor(**{name: options[name] for name in EXECUTION}) if several else None
    rate = [f"{chosen[0].upper()}{chosen[1:]}."] if chosen else []
    if progress:
        note(source.notes())
        warnings.simplefilter("ignore", TableWarning)  # of columns, which were shown
    make_folder(folder, source.given, run=not several)
    how = {name: options[name] for name in HOW}
    try:
        if several:
            note(rate)
            configs = [replace(config, seed=config.seed + n) for n in range(several)]
            return Run(run_seeds(configs, folder, how, executor, quiet=not progress), folder)
        if baselines.is_one(config):
            return Run([baselines.train(config, folder)], folder)
        turns = Turns(config, options["device"], progress, folder, how, options["wandb"])
        note(rate if turns.training is not None else [])  # after all that could be wrong
        return Run([turns.to_the_end()], folder)
    except InputError:
        with contextlib.suppress(OSError):
            folder.rmdir()  # it was made for this run, if nothing is in it
        raise
