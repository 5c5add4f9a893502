"""``shoal.soup``: the mean of the weights of several runs, as one model.

References: Wortsman et al., Model soups, ICML 2022 (greedy: recipe 1); Ramé et al., Diverse Weight Averaging
for Out-of-Distribution Generalization, NeurIPS 2022.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from shoal.api.result import Result
from shoal.api.source import datasets_in, make_folder
from shoal.errors import InputError, shown
from shoal.experiments import baselines
from shoal.experiments.config import RunConfig
from shoal.experiments.record import PYTHON, RunRecord, read_record
from shoal.experiments.run import data_of
from shoal.models.backbones import Backbone
from shoal.report.runs import number
from shoal.report.tables import Table
from shoal.settings import Range, checked
from shoal.trained import ABOUT, RECORD, WEIGHTS, About, Calibration, Trained, find_model, load, write_model
from shoal.training.averaging import average_weights
from shoal.training.calibration import calibrated
from shoal.training.checkpoint import load_weights
from shoal.training.evaluate import Scores
from shoal.training.options import complete
from shoal.training.processes import pick_device
from shoal.training.setup import Setup
from shoal.training.stopping import isolated_rng
from shoal.training.trainer import Trainer

UNIFORM, GREEDY = "uniform soup", "greedy soup"


@dataclass(frozen=True)
class Soup(Result):
    """The result of :func:`soup`: the average of the weights of several runs, saved as a run folder.

    Attributes:
        folder: folder of the soup.
        record: record of the soup, with one evaluation.
        runs: folders of all runs.
        used: folders of the runs that were averaged, in the order in which they were added.
        scores: scores by split of every run, by its folder, and of the soups.
    """

    folder: Path
    record: RunRecord
    runs: tuple[Path, ...]
    used: tuple[Path, ...]
    scores: Mapping[str, Mapping[str, Scores]]

    def load(self, device: str = "cpu") -> Trained:
        """Load the model.

        Args:
            device: device of the model.
        """
        return load(self.folder, device=device)

    def to_dict(self) -> dict[str, Any]:
        scores = {name: {s: v.to_dict() for s, v in each.items()} for name, each in self.scores.items()}
        folders = {"runs": list(map(str, self.runs)), "used": list(map(str, self.used))}
        return {"folder": str(self.folder), **folders, "scores": scores, "record": self.record.to_dict()}

    def __str__(self) -> str:
        splits = [split for split in ("validation", "test") if split in self.record.scores]
        table = Table(["weights", *splits])
        for name, scores in self.scores.items():
            table.add(name, *(number(scores[split].selection_score) for split in splits))
        return f"{table.text()}\n\n{self.record.config.name}: {self.record.rule}. Saved in {self.folder}."


@checked
def soup(
    runs: str | Path | Sequence[str | Path],
    *,
    greedy: bool = False,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    device: str | None = None,
    workers: Annotated[int, Range(0, 1000)] = 0,
) -> Soup:
    """Average the selected weights of finished runs into one model. ::

        shoal.train("erm", "PACS", model="resnet50.tv_in1k", seeds=5, out="erm")
        soup = shoal.soup("erm", greedy=True, out="erm-soup")
        print(soup)
        model = soup.load()

    The runs must use the same model, data and held-out domains, and should have started from the same
    pretrained weights. BatchNorm statistics are recomputed on training data, unless they were frozen. The
    result is a run folder, accepted by every function and command that takes one.

    Args:
        runs: folders of finished runs, or of several seeds, written by :func:`shoal.train`.
        greedy: add runs in the order of their validation scores, each only if the validation score of the
            soup does not decrease (default: average all runs).
        out: folder to write (default: a folder in runs/ named after the runs).
        data_dir: folder that contains the datasets (default: $SHOAL_DATA).
        device: device, such as cpu, cuda or cuda:1 (default: cuda if available).
        workers: number of processes that load examples.
    """
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    records = _read_runs([Path(path).expanduser() for path in paths])
    folders, config = list(records), next(iter(records.values())).config
    scores = {
        str(folder): {s: Scores.from_dict(v) for s, v in record.scores.items() if s != "train"}
        for folder, record in records.items()
    }
    if greedy and any("validation" not in each for each in scores.values()):
        raise InputError("a greedy soup requires a validation split, and these runs have none.", "greedy")
    name = f"soup-{config.dataset}-{_digest(records.values())[:8]}" + "-greedy" * greedy
    folder = Path(out).expanduser() if out is not None else Path("runs") / name
    if os.path.lexists(folder):
        raise InputError(f"{str(folder)!r} exists; choose another folder.", "out")
    make_folder(folder.parent, str(config.data_options.get("folder", "")), run=True)
    where = pick_device(device)
    model = load(folders[0], device=where)
    features = getattr(model.model, "features", None)
    if isinstance(features, Backbone) and _pretrained(records):
        features.has_weights()  # so that BatchNorm is frozen as it was in training
    names = ("batch_size", "seed", "eval_limit", "precision", "metric", "calibrate")
    same: Any = {name: getattr(config, name) for name in names}
    options = complete(steps=1, device=where, workers=workers, select="last", progress=False, **same)
    with datasets_in(data_dir), isolated_rng(where):
        # The trainer evaluates and recomputes BatchNorm statistics; nothing is trained.
        trainer = Trainer(Setup("erm", model.model, data_of(config, where), options))
        with contextlib.closing(trainer.selection):
            kind, used = UNIFORM, folders
            scores[UNIFORM] = _evaluate(trainer, folders)
            if greedy:
                kind, used = (
                    GREEDY,
                    _greedy(trainer, {run: scores[str(run)]["validation"] for run in folders}),
                )
                scores[GREEDY] = _evaluate(trainer, used)
            fitted = calibrated(trainer.setup)
    record = _record(records, used, kind, scores[kind])
    calibration = Calibration.model_validate(fitted) if fitted else None
    model.about = model.about.model_copy(update={"calibration": calibration})
    write_model(folder, model.files(), record.to_dict())
    return Soup(folder, read_record(folder / RECORD), tuple(folders), tuple(used), scores)


def _read_runs(paths: Sequence[Path]) -> dict[Path, RunRecord]:
    """The records of finished runs by folder; the runs must fit together."""
    folders: list[Path] = []
    for path in paths:
        seeds = [file.parent for file in path.glob("seed-*/config.yaml")]
        folders += sorted(seeds, key=lambda seed: (len(seed.name), seed.name)) or [path]
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        got = ", ".join(map(str, folders)) or "none"
        raise InputError(f"a soup requires two or more different runs, got {got}.", "runs")
    folders = [find_model(folder).parent for folder in folders]
    runs = {folder: read_record(folder / RECORD) for folder in folders}
    for folder, record in runs.items():
        if record.status != "finished" or baselines.is_one(record.config) or record.config.dataset == PYTHON:
            raise InputError(
                f"{str(folder)!r} is not the finished training of a network by shoal.train.", "runs"
            )
    first, *others = folders
    ours = _traits(first, runs[first])
    for folder in others:
        theirs = _traits(folder, runs[folder])
        for name in {**ours, **theirs}:
            if (a := ours.get(name)) != (b := theirs.get(name)):
                which = f"{str(first)!r} and {str(folder)!r} differ in {name}: {shown(a)} and {shown(b)}"
                raise InputError(f"{which}. A soup requires the same model and data.", "runs")
    if not _pretrained(runs):
        warnings.warn(
            "these runs do not name the same pretrained weights. An average of weights is a good model only "
            "if the runs were fine-tuned from the same initial weights.",
            stacklevel=4,
        )
    return runs


def _pretrained(runs: Mapping[Path, RunRecord]) -> bool:
    """Whether all runs started from the same pretrained weights."""
    starts = {record.environment.get("weights", "") for record in runs.values()}
    return len(starts) == 1 and starts != {""}


def _traits(folder: Path, record: RunRecord) -> dict[str, Any]:
    """What all runs of a soup must have in common."""
    config, about = record.config, About.read(folder / ABOUT)
    free = {"trial", "pretrained", "dropout", *(["file"] if "digest" in config.data_options else [])}
    traits = {"dataset": config.dataset, "model": about.model.get("name"), "classes": about.classes}
    traits |= {f"model option {name}": v for name, v in about.model.get("options", {}).items()}
    traits |= {f"data {name}": v for name, v in {**config.data_options, **config.protocol}.items()}
    traits |= {"validation split": config.holdout, "preprocessing": about.inputs}
    return {name: value for name, value in traits.items() if name.rpartition(" ")[2] not in free}


def _digest(records: Iterable[RunRecord]) -> str:
    checksums = sorted(record.files.get(WEIGHTS, "") for record in records)
    return hashlib.sha256("".join(checksums).encode()).hexdigest()[:16]


def _evaluate(trainer: Trainer, folders: Sequence[Path]) -> dict[str, Scores]:
    """Gives the mean of some runs to the model, and evaluates it."""
    model, setup = trainer.model, trainer.setup
    model.load_state_dict(average_weights(load_weights(folder / WEIGHTS) for folder in folders))
    model.train(len(folders) > 1)
    trainer.selection.refresh()
    model.eval()
    splits = [split for split in setup.evaluator.splits if split != "train"]
    evaluator = setup.evaluator_of(splits, setup.evaluator.limits)
    with contextlib.closing(evaluator.loader):
        return evaluator(model)


def _greedy(trainer: Trainer, single: Mapping[Path, Scores]) -> list[Path]:
    """The runs in a greedy soup: the best first, each added if the soup with it is not worse than without."""

    def order(a: Path, b: Path) -> int:
        return single[b].better_than(single[a]) - single[a].better_than(single[b])

    best, *rest = sorted(single, key=functools.cmp_to_key(order))
    used, score = [best], single[best]
    for run in rest:
        with_run = _evaluate(trainer, [*used, run])["validation"]
        if not score.better_than(with_run):
            used, score = [*used, run], with_run
    return used


def _record(
    runs: Mapping[Path, RunRecord], used: Sequence[Path], kind: str, scores: Mapping[str, Scores]
) -> RunRecord:
    """That of a run with one evaluation. Its configuration has what the runs have in common."""
    records = [runs[folder] for folder in used]
    first, *rest = (record.config.to_dict() for record in records)
    same = {name: value for name, value in first.items() if all(other[name] == value for other in rest)}
    same |= {name: first[name] for name in ("dataset", "data_options", "steps")} | {"algorithm": "soup"}
    names = sorted({record.config.name for record in records})
    same["label"] = f"soup of {' and '.join(names)}"
    same["settings"] = {"greedy": kind == GREEDY, "runs": len(used), "digest": _digest(records)}
    found = {split: one.to_dict() for split, one in scores.items()}
    return RunRecord(
        config=RunConfig(**{"optimizer_options": {}, **same}),
        status="finished",
        history=({"step": first["steps"], "passes": 0, "loss": None, "scores": found},),
        selected=0,
        rule=f"mean of {len(used)} of {len(runs)} runs ({kind})",
        seconds=0.0,
        environment=records[0].environment,
        notes=records[0].notes,
    )
