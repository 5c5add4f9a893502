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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from torch import Tensor, nn

from shoal.api.fit import as_domain_data
from shoal.api.result import Result
from shoal.api.source import datasets_in, make_folder
from shoal.data.batch import DomainData
from shoal.errors import InputError, check_names, shown
from shoal.experiments import baselines
from shoal.experiments.config import RunConfig
from shoal.experiments.record import PYTHON, RunRecord, read_record, selection_score
from shoal.experiments.run import data_of
from shoal.files import dump_yaml
from shoal.models.backbones import Backbone
from shoal.report.runs import number
from shoal.report.tables import Table
from shoal.settings import Range, checked
from shoal.trained import (
    ABOUT,
    RECORD,
    WEIGHTS,
    About,
    Calibration,
    Trained,
    find_model,
    load,
    pack_weights,
    write_model,
)
from shoal.training.averaging import average_weights, batchnorm_in_training
from shoal.training.calibration import calibrated
from shoal.training.card import card
from shoal.training.checkpoint import load_weights
from shoal.training.evaluate import Scores, snapshot
from shoal.training.options import complete
from shoal.training.processes import pick_device
from shoal.training.progress import Progress
from shoal.training.setup import Setup
from shoal.training.stopping import isolated_rng
from shoal.training.trainer import Trainer

if TYPE_CHECKING:
    import pandas

UNIFORM, GREEDY = "uniform soup", "greedy soup"
AllScores = dict[str, dict[str, Scores]]
"""By the name of the weights, and by split."""


@dataclass(frozen=True)
class Soup(Result):
    """The result of :func:`soup`: the average of the weights of several runs, saved as a run folder.

    Attributes:
        folder: folder of the soup.
        record: record of the soup, with one evaluation.
        runs: folders of all runs.
        used: folders of the runs that were averaged, in the order in which they were added.
        scores: scores by split of every run, by its folder, of the uniform soup and, if requested, of the
            greedy one; empty if the data are not known.
    """

    folder: Path
    record: RunRecord
    runs: tuple[Path, ...]
    used: tuple[Path, ...]
    scores: AllScores

    def load(self, model: nn.Module | None = None, device: str = "cpu") -> Trained:
        """Load the model; the arguments are those of :func:`shoal.load`."""
        return load(self.folder, model, device=device)

    def to_dict(self) -> dict[str, Any]:
        scores = {name: {s: v.to_dict() for s, v in each.items()} for name, each in self.scores.items()}
        folders = {"runs": list(map(str, self.runs)), "used": list(map(str, self.used))}
        return {"folder": str(self.folder), **folders, "scores": scores, "record": self.record.to_dict()}

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per model, split and domain."""
        import pandas

        rows = [
            (name, split, domain, scores.metric, value)
            for name, each in self.scores.items()
            for split, scores in each.items()
            for domain, value in zip(scores.names, scores.values, strict=True)
        ]
        return pandas.DataFrame(rows, columns=["weights", "split", "domain", "metric", "score"])

    def __str__(self) -> str:
        done = f"{self.record.config.name}: {self.record.rule}. Saved in {self.folder}."
        if not self.scores:
            return (
                f"{done}\nIt was not evaluated: runs of shoal.fit do not save their data; pass it as data=."
            )
        first = next(iter(self.scores.values()))
        splits = [split for split in ("validation", "test") if split in first]
        heads = [f"{split} {selection_score(first[split].to_dict())[0]}" for split in splits]
        table = Table(["weights", "used", *heads, *["worst test domain"] * ("test" in first)])
        for name, scores in self.scores.items():
            used = "" if name in (UNIFORM, GREEDY) else "yes" if Path(name) in self.used else "no"
            cells = [number(scores[split].selection_score) for split in splits]
            if test := scores.get("test"):
                cells.append(f"{number(test.worst)} ({test.names[test.values.index(test.worst)]})")
            table.add(name, used, *cells)
        return f"{table.text()}\n\n{done}"


@checked
def soup(
    runs: str | Path | Sequence[str | Path],
    *,
    greedy: bool = False,
    out: str | Path | None = None,
    data: DomainData | Mapping[str, Mapping[str, Any]] | None = None,
    model: nn.Module | None = None,
    data_dir: str | Path | None = None,
    device: str | None = None,
    workers: Annotated[int, Range(0, 1000)] = 0,
    progress: bool = True,
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
        runs: folders of finished runs, or of several seeds, written by :func:`shoal.train` or
            :func:`shoal.fit`.
        greedy: add runs in the order of their validation scores, each only if the validation score of the
            soup does not decrease (default: average all runs).
        out: folder to write (default: a folder in runs/ named after the runs).
        data: data of runs of :func:`shoal.fit`, which do not save any: a :class:`~shoal.data.DomainData` or
            ``{"train": …, "validation": …, "test": …}``, as given to ``fit``. Without it, a uniform soup of
            such runs is not evaluated, and a greedy soup is not possible.
        model: for runs of your own network: an instance of it, which receives the weights of the soup.
        data_dir: folder that contains the datasets (default: $SHOAL_DATA).
        device: device, such as cpu, cuda or cuda:1 (default: cuda if available).
        workers: number of processes that load examples.
        progress: show progress on stderr.
    """
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    found = _read_runs([Path(path).expanduser() for path in paths])
    first, config = next(iter(found)), next(iter(found.values())).config
    if isinstance(data, Mapping):
        check_names("split of data:", data, ("train", "validation", "test"))
        data = as_domain_data(data.get("train", {}), data.get("validation"), data.get("test"))
    known = config.dataset != PYTHON or data is not None
    if greedy and not known:
        raise InputError("a greedy soup needs the data of the runs, which shoal.fit does not save.", "data")
    name = f"soup-{config.dataset}-{_digest(found.values())[:8]}" + "-greedy" * greedy
    folder = Path(out).expanduser() if out is not None else Path("runs") / name
    if os.path.lexists(folder):
        raise InputError(f"{str(folder)!r} exists; choose another folder.", "out")
    make_folder(folder.parent, str(config.data_options.get("folder", "")), run=True)
    scores, calibration = AllScores(), None
    used, weights = list(found), _average(list(found))
    if known:
        where = pick_device(device)
        network = load(first, model, device=where).model
        features = getattr(network, "features", None)
        if isinstance(features, Backbone) and all(map(_start, found.values())):
            features.has_weights()  # so that BatchNorm is frozen as it was in training
        names = ("batch_size", "seed", "eval_limit", "precision", "metric", "calibrate")
        same: Any = {n: getattr(config, n) for n in names} | {"select": "last", "progress": False}
        options = complete(steps=1, device=where, workers=workers, **same)
        with datasets_in(data_dir):
            data = data_of(config, where) if data is None else data
            training = Trainer(Setup("erm", network, data, options))  # which evaluates; nothing is trained
            scores, used = _evaluate(found, training, greedy, Progress("soup", len(found), progress))
            calibration = calibrated(training.setup)
        weights = snapshot(network)
    elif any(name.endswith("running_mean") for name in weights):
        warnings.warn(
            "BatchNorm statistics are averages over the runs; to recompute them, pass the data as data=.",
            stacklevel=3,
        )
    _write(folder, found, _record(found, used, scores), weights, calibration)
    return Soup(folder, read_record(folder / RECORD), tuple(found), tuple(used), scores)


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
        if record.status != "finished" or baselines.is_one(record.config):
            raise InputError(f"{str(folder)!r} is not the finished training of a network.", "runs")
    (first, ours), *others = ((folder, _traits(folder, record)) for folder, record in runs.items())
    for folder, theirs in others:
        for name in sorted({*ours, *theirs}):
            if (a := ours.get(name)) != (b := theirs.get(name)):
                which = f"{str(first)!r} and {str(folder)!r} differ in {name}: {shown(a)} and {shown(b)}"
                raise InputError(f"{which}. A soup requires the same model and data.", "runs")
    if len({_start(record) for record in runs.values()}) > 1 or not _start(runs[first]):
        warnings.warn(
            "these runs do not name the same pretrained weights. An average of weights is a good model only "
            "if the runs were fine-tuned from the same initial weights.",
            stacklevel=4,
        )
    return runs


def _traits(folder: Path, record: RunRecord) -> dict[str, Any]:
    """What all runs of a soup must have in common."""
    config, about = record.config, About.read(folder / ABOUT).model_dump(exclude={"calibration"})
    parts = {"data": config.data_options, "protocol": config.protocol, "inputs": about.pop("inputs")}
    parts["model option"] = about["model"].pop("options", None) or {}
    traits = {"dataset": config.dataset, "holdout": config.holdout, **about}
    traits |= {f"{part} {name}": value for part, each in parts.items() for name, value in each.items()}
    free = ["protocol trial", "model option pretrained", "model option dropout"]
    free += ["data file"] if "digest" in config.data_options else []  # the same file elsewhere
    return {name: value for name, value in traits.items() if name not in free}


def _start(record: RunRecord) -> str:
    """The pretrained weights that a training started from, if any are recorded."""
    return record.environment.get("weights", "")


def _average(folders: Sequence[Path]) -> dict[str, Tensor]:
    return average_weights(load_weights(folder / WEIGHTS) for folder in folders)


def _digest(records: Iterable[RunRecord]) -> str:
    checksums = sorted(record.files.get(WEIGHTS, "") for record in records)
    return hashlib.sha256("".join(checksums).encode()).hexdigest()[:16]


def _evaluate(
    runs: Mapping[Path, RunRecord], training: Trainer, greedy: bool, progress: Progress
) -> tuple[AllScores, list[Path]]:
    """Scores of every run and soup, and the runs in the last, whose weights the model gets."""
    folders, model = list(runs), training.model
    splits = [split for split in training.setup.splits if split != "train"]
    if greedy and "validation" not in splits:
        raise InputError("a greedy soup requires a validation split, and these data have none.", "greedy")
    limit: Any = runs[folders[0]].config.eval_limit

    def scores_of(name: str, parts: Sequence[Path], splits: Sequence[str] = splits) -> dict[str, Scores]:
        with progress.phase(f"evaluating {name}"):
            model.load_state_dict(_average(parts))
            model.train(len(parts) > 1)
            if batchnorm_in_training(model):
                training.selection.refresh()
            model.eval()
            evaluator = training.setup.evaluator_of(splits, dict.fromkeys(splits, limit) if limit else {})
            with contextlib.closing(evaluator.loader):
                return evaluator(model)

    with isolated_rng(training.setup.device), contextlib.closing(training.selection):
        scores = {str(folder): scores_of(str(folder), [folder]) for folder in folders}
        scores[UNIFORM] = scores_of(UNIFORM, folders)
        if not greedy:
            return scores, folders
        used = _greedy(
            {folder: scores[str(folder)]["validation"] for folder in folders},
            lambda parts: scores_of(GREEDY, parts, ["validation"])["validation"],
        )
        scores[GREEDY] = scores_of(GREEDY, used)
        return scores, used


def _greedy(single: Mapping[Path, Scores], measure: Callable[[list[Path]], Scores]) -> list[Path]:
    """The runs in a greedy soup: the best first, each added if the soup with it is not worse than without."""

    def order(a: Path, b: Path) -> int:
        return single[b].better_than(single[a]) - single[a].better_than(single[b])

    best, *rest = sorted(single, key=functools.cmp_to_key(order))
    used, score = [best], single[best]
    for run in rest:
        found = measure([*used, run])
        if not score.better_than(found):
            used, score = [*used, run], found
    return used


def _record(runs: Mapping[Path, RunRecord], used: Sequence[Path], scores: AllScores) -> RunRecord:
    """That of a run with one evaluation. Its configuration has what the runs have in common."""
    records, kind = [runs[folder] for folder in used], GREEDY if GREEDY in scores else UNIFORM
    first, *rest = (record.config.to_dict() for record in records)
    same = {name: value for name, value in first.items() if all(other[name] == value for other in rest)}
    same |= {name: first[name] for name in ("dataset", "data_options", "steps")}
    names = {record.config.name for record in records}
    same |= {"algorithm": "soup", "label": f"soup of {names.pop()}" if len(names) == 1 else "soup"}
    same["settings"] = {"greedy": kind == GREEDY, "runs": len(used), "digest": _digest(records)}
    found = {split: one.to_dict() for split, one in scores.get(kind, {}).items()}
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


def _write(
    folder: Path,
    runs: Mapping[Path, RunRecord],
    record: RunRecord,
    weights: Mapping[str, Tensor],
    calibration: Mapping[str, Any] | None,
) -> None:
    """The folder of a run: the files of the first, with the weights and the record of the soup."""
    first, config = next(iter(runs)), record.config
    fitted = calibration and Calibration.model_validate(calibration)
    about = About.read(first / ABOUT).model_copy(update={"calibration": fitted})
    written: dict[str, Any] = {"run": config.to_dict(), "soup": list(map(str, runs))}
    own = [name for name in runs[first].files if name.split("/")[0] in ("tokenizer", "encoder")]
    files = {WEIGHTS: pack_weights(weights)} | {name: (first / name).read_bytes() for name in own}
    if record.scores:
        sizes = {s: dict(zip(own["domains"], own["sizes"], strict=True)) for s, own in record.scores.items()}
        text = card(record.to_dict(), about.to_dict(), written, {"train": {}, **sizes})
        files["card.md"] = text.encode("utf-8", "backslashreplace")
    if config.dataset == PYTHON:  # there is no dataset to load
        written = {"algorithm": config.name, "options": {"steps": config.steps}}
    write_model(folder, about, {**files, "config.yaml": dump_yaml(written).encode()}, record.to_dict())
