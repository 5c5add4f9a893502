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
    | Annotated[float, Range(above=0, most=1, what="a share of the data")]
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
    """A run that came to its end, or several that differ in their seeds."""

    records: Sequence[RunRecord]
    folder: Path

    @property
    def record(self) -> RunRecord:
        """The first of them."""
        return self.records[0]

    @property
    def problems(self) -> list[str]:
        """What kept runs from finishing."""
        several = len(self.records) > 1
        lost = [r for r in self.records if r.status != "finished"]
        return [f"seed {r.config.seed}: {r.error}" if several else r.error for r in lost]

    @property
    def finished(self) -> list[RunRecord]:
        return [r for r in self.records if r.status == "finished"]

    def table(self) -> Table:
        """A row for every measure and domain: of several seeds mean ± standard deviation, and each."""
        from shoal.report.runs import run_table, seeds_table

        contents = [r.to_dict() for r in self.finished]
        if not contents:
            raise InputError("no run finished. " + " ".join(self.problems[:2]))
        return run_table(contents[0]) if len(self.records) == 1 else seeds_table(contents)

    def load(self, device: str = "cpu") -> Trained:
        """The trained model, of the first seed."""
        from shoal.experiments.store import Store
        from shoal.trained import load

        several = len(self.records) > 1
        first = Store(self.folder, weights=True).workplace(self.finished[0].config)
        return load(first if several else self.folder, device=device)

    def to_dict(self) -> dict[str, Any]:
        records = [r.to_dict() for r in self.records]
        return records[0] if len(records) == 1 else {"records": records}

    def to_frame(self) -> pandas.DataFrame:
        """One row for each seed, split and domain."""
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
        """Writes what :meth:`to_dict` gives as JSON."""
        from shoal.files import dump_json, finite, write_atomically

        write_atomically(Path(path), dump_json(finite(self.to_dict())))

    def __str__(self) -> str:
        from shoal.training.metrics import why_missing

        table, first = self.table().text(), self.finished[0]
        at, config = first.history[first.selected], first.config
        note, rule, lines = first.notes.get("validation", ""), first.rule, []
        seconds = sum(r.seconds for r in self.records)
        if len(self.records) == 1:
            skipped = f" {first.skipped} steps were not finite and were skipped." if first.skipped else ""
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
    """Trains one algorithm and keeps the run in a folder; the same call again resumes it. ::

        run = shoal.train("fish", "patients.csv", label="ill", domain="hospital", held_out="B", steps=500)
        print(run)
        model = run.load()

    What `shoal train` does. To train a model and a loss of your own, see :func:`shoal.fit`.

    Args:
        algorithm: an algorithm, a baseline, or a recipe for a pretrained model such as auto or erm++; see
            `shoal list algorithms`.
        data: a dataset (`shoal list datasets`), a table (.csv, .tsv, .parquet, .xlsx), or a folder of images
            as folder/domain/class. In Python also a DataFrame, arrays (X, y, domains), columns by name, or a
            Hugging Face dataset.
        data_options: the dataset's options.
        bad_images: what to do with an image that cannot be read (default: stop).
        data_dir: where datasets are (default: $SHOAL_DATA).
        held_out: domains to test on and not train on; none: train on all of your own data (default: the
            dataset's test domains).
        settings: the algorithm's hyperparameters.
        steps: training steps, each on a batch from every domain of the step.
        batch_size: examples per batch.
        domains_per_step: domains per step (default: all up to 16, else 5).
        model: one of Shoal's or timm's, or a text encoder by its name or folder (default: the dataset's).
        model_options: the model's options.
        weights: start from these: safetensors, or a .pt that holds weights only; for timm's models with
            timm's or torchvision's names.
        freeze_backbone: train only the head, on features that are computed once (images are not augmented).
        draw: how batches are drawn (default: the algorithm's own).
        warm_start: train with ERM first: steps (500), share of the data (0.1), or plateau; or only the head,
            with the rest frozen: head (for steps / 10) or head:500.
        warm_select: train on from the warm start's best weights on validation, or its last (default: the best
            of a plateau, else the last).
        seed: of the initial weights and the batches.
        seeds: train this many times, with seeds SEED, SEED+1, …
        label: the column to predict.
        domain: the column with the domain of a row.
        group: the column with the entity of a row, such as a patient: rows of one entity stay on one side of
            every split.
        task: classification or regression (default: inferred from the label).
        drop: columns not to use.
        kinds: what columns hold, where it is not what their cells look like.
        decimal: the decimal mark, where columns leave it open.
        day_first: whether 3/4/2020 is in April, where columns leave it open.
        optimizer: the optimizer.
        lr: learning rate (default: 0.001; with a warm-up 5e-05 for pretrained models, 0.0002 with LoRA).
        head_lr: learning rate of the model's head, which is new where the rest is pretrained (default: lr).
        layer_decay: the learning rate of what is k layers below the head is multiplied by this to the power
            of k, such as 0.75.
        schedule: of the learning rate: constant, cosine, linear, step:0.96:1000, warmup:50 or
            warmup:50,cosine.
        clip: the largest norm of a gradient.
        accumulate: split each batch into this many parts, to save memory.
        precision: of the forward pass; auto takes fp32 or bf16, whichever is faster on CUDA (default: fp32;
            auto for pretrained models).
        memory_format: of images and convolutions; auto takes what is faster on CUDA (default: contiguous;
            auto for pretrained models).
        average: average the weights: sma; ema, exponentially; swad by the validation loss, as its authors'
            program does, or swad-paper, as their paper says, with frequent evaluations.
        average_start: the step at which sma begins (default: steps / 10).
        average_ratio: swad ends after 6 evaluations with a loss above this many times that at its start
            (default: 1.3).
        average_decay: the share of the mean before in each mean of ema (default: 0.999, less in the first
            steps).
        wise_ft: interpolate: (1 - α) of the weights at the start, after a warm start, and α of the selected
            ones; α itself, or validation to choose it there. A new head needs warm_start=head.
        l2_sp: weight of the squared distance to the weights at the start (L2-SP), the head's excepted.
        l2_sp_head: weight decay of the head, with l2_sp (default: the same weight).
        miro: keep the features of a pretrained model close to what they were, with this weight, such as 0.1.
        retrain: then train again from the start on training and validation examples, for as many steps as
            the selected weights have; the result is the last of these, or their average.
        select: keep the weights that are best on validation, or the last.
        metric: what selects: "worst-group accuracy", AUC … (default: the dataset's metric).
        patience: stop after this many evaluations without an improvement.
        on_nan: a step that is not finite is never applied; stop, or skip it.
        out: the run's folder (default: one in runs/, named by the run).
        device: cpu, cuda, cuda:1 … (default: cuda where there is one).
        workers: processes that read examples.
        jobs: runs in parallel, of several seeds (default: one per core, or ten on CUDA).
        engine: processes on this machine, or a Ray cluster, for several seeds.
        address: Ray: 'auto', HOST:PORT or ray://HOST:PORT (default: one on this machine).
        gpus_per_run: Ray: such as 0.25 (default: 1, on the CPU 0).
        cpus_per_run: Ray: (default: 1).
        eval_every: steps between evaluations (default: so that evaluation costs less than training).
        eval_limit: evaluate on a random sample of so many examples per split (default: all, of train 5,000).
        eval_splits: the splits to evaluate (default: all).
        predictions: write the predictions in the format of WILDS' leaderboard.
        log_every: steps between lines of the log.
        track_every: steps between measurements of the agreement of the domains' gradients.
        track_layers: measure it in each layer too.
        checkpoint_every: steps between checkpoints (default: at evaluations and every five minutes).
        keep: checkpoints to keep besides the best.
        compile: compile the model with torch.compile.
        deterministic: the same bits every time on CUDA too; slower.
        wandb: a project of Weights & Biases to log to as well.
        progress: show notes and progress on stderr.
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
                f"{name}= is for training a network, and {algorithm} is none. "
                f"settings= takes: {', '.join(SPACES[algorithm]) or 'nothing'}."
            )


def model_options(model: str | None, options: Mapping[str, Any], freeze_backbone: bool) -> dict[str, Any]:
    """The options of a model, ``freeze_backbone`` among them."""
    chosen = dict(options)
    if freeze_backbone:
        if not chosen.get("frozen", True):
            raise InputError("freeze_backbone=, but model_options= frozen=false; give one of them.")
        if model is None:
            raise InputError("freeze_backbone= needs one of timm's models: model=mobilenetv2_100.")
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
        raise InputError("seeds= trains several models in parallel; start it without torchrun.")
    if several and options["wandb"]:
        raise InputError("wandb= logs one run; give seed= instead of seeds=.")
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
