"""What :func:`shoal.soup` does: checks, scores and averages finished runs, and writes the mean as a run.

References: Wortsman et al., Model soups, ICML 2022; Ramé et al., Diverse Weight Averaging for
Out-of-Distribution Generalization, NeurIPS 2022.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn

from shoal.data.batch import DomainData
from shoal.errors import InputError, shown
from shoal.experiments import baselines
from shoal.experiments.config import RunConfig
from shoal.experiments.record import PYTHON, Measurement, RunRecord, left_out, read_record
from shoal.experiments.run import data_of, packages, write_predictions
from shoal.experiments.store import Store
from shoal.files import dump_yaml, read_bytes, write_atomically
from shoal.models.backbones import Backbone
from shoal.trained import About, find, load
from shoal.training import predictions
from shoal.training.averaging import average_weights, difference, has_batchnorm
from shoal.training.card import card
from shoal.training.checkpoint import load_weights
from shoal.training.evaluate import Evaluator, Scores, snapshot
from shoal.training.folder import check_files
from shoal.training.loop import Training
from shoal.training.options import Options
from shoal.training.processes import pick_device
from shoal.training.progress import Progress
from shoal.training.summary import environment, surroundings
from shoal.training.world import world

ALGORITHM = "soup"
"""What a soup's configuration has in place of the name of an algorithm."""
OF_TRAINING = ("pretrained", "dropout")
"""Options of models that change nothing in a trained one."""


@dataclass(frozen=True)
class Ingredient:
    """A finished run."""

    folder: Path
    record: RunRecord
    about: About
    checksum: str
    """Of its weights."""

    @classmethod
    def read(cls, folder: Path) -> Ingredient:
        """The run in a folder, whose files are checked; an InputError where it cannot be averaged."""
        weights = find(folder)
        folder = weights.parent
        if not (folder / "record.json").exists():
            raise InputError(f"the run in {str(folder)!r} is not finished: it has no record.json.")
        record = read_record(folder / "record.json")
        if record.status != "finished":
            raise InputError(f"the run in {str(folder)!r} {record.status}; a soup requires finished runs.")
        if baselines.is_one(record.config):
            name = record.config.algorithm
            raise InputError(f"the run in {str(folder)!r} is the baseline {name}, which cannot be averaged.")
        check_files(folder, record.files)
        about = About.read(folder / "inputs.json")
        return cls(folder, record, about, hashlib.sha256(read_bytes(weights, None)).hexdigest())

    @property
    def config(self) -> RunConfig:
        return self.record.config

    @property
    def began(self) -> str:
        """The weights that its training began with; nothing if they were random or are not known."""
        return self.record.environment.get("weights", "")

    def weights(self) -> dict[str, Tensor]:
        return load_weights(self.folder / "model.safetensors")

    def traits(self) -> dict[str, Any]:
        """What all runs of a soup must have in common, by what messages call it."""
        config, about = self.config, self.about
        data = {
            k: v for k, v in config.data_options.items() if k != "file" or "digest" not in config.data_options
        }
        options = about.model.get("options")
        model = (
            {k: v for k, v in options.items() if k not in OF_TRAINING} if isinstance(options, dict) else {}
        )
        return {
            "dataset": config.dataset,
            "held-out domains": left_out(self.record),
            "data options": data,
            "validation split": {"holdout": config.holdout, "trial": config.protocol.get("trial")},
            "task": about.task,
            "classes": about.class_names or about.classes,
            "input shape": about.input_shape,
            "preprocessing": {"inputs": about.inputs, "numbers": about.numbers, **self.prepared()},
            "model": about.model.get("name") or about.model.get("class"),
            "model options": model,
        }

    def prepared(self) -> dict[str, str]:
        """Checksums of the files that it takes to build and feed the model, such as a tokenizer's."""
        own = ("tokenizer", "encoder")
        return {name: value for name, value in self.record.files.items() if name.split("/")[0] in own}

    def domains(self, split: str) -> dict[str, int] | None:
        """The examples of each domain of a split, as its evaluations had them."""
        scores = self.record.chosen.get(split)
        return scores and dict(zip(scores["domains"], scores.get("sizes") or (), strict=False))


def read_ingredients(paths: Iterable[Path]) -> list[Ingredient]:
    """The runs in these folders, checked against each other before any work."""
    folders = [folder for path in paths for folder in _folders(path)]
    if len(folders) < 2:
        raise InputError(f"a soup requires at least two runs, got {len(folders)}.")
    real = [os.path.realpath(folder) for folder in folders]
    for number, place in enumerate(real):
        if place in real[:number]:
            raise InputError(f"the run in {str(folders[number])!r} is listed twice.")
    found = [Ingredient.read(folder) for folder in folders]
    for number, run in enumerate(found):
        for other in found[:number]:
            if other.checksum == run.checksum:
                both = f"{str(other.folder)!r} and {str(run.folder)!r}"
                raise InputError(f"{both} have the same weights; list each run once.")
    for run in found[1:]:
        _check_alike(found[0], run)
    first = found[0].weights()
    for run in found:
        weights = run.weights()
        if why := difference(first, weights):
            raise InputError(f"{_named(found[0], run)} have different architectures: {why}.")
        if bad := [k for k, v in weights.items() if v.is_floating_point() and not v.isfinite().all()]:
            raise InputError(f"the weights in {str(run.folder)!r} are damaged: {bad[0]!r} is not finite.")
    return found


def _folders(path: Path) -> list[Path]:
    """The run's folder, or those of all seeds that `shoal train --seeds` planned in it."""
    store = Store(path, weights=True) if path.is_dir() else None
    planned = store.planned() if store else None
    if store is None or planned is None:
        return [path]
    folders = [store.workplace(config) for config in planned[0]]
    if missing := [f.name for f in folders if not (f / "record.json").exists()]:
        raise InputError(f"{str(path)!r} is not finished ({', '.join(missing[:5])}): shoal resume {path}")
    return folders


def _named(first: Ingredient, other: Ingredient) -> str:
    return f"the runs in {str(first.folder)!r} and {str(other.folder)!r}"


def _check_alike(first: Ingredient, other: Ingredient) -> None:
    ours, theirs = first.traits(), other.traits()
    for what, value in ours.items():
        if value == theirs[what]:
            continue
        a, b = value, theirs[what]
        if isinstance(a, dict) and isinstance(b, dict):
            name = next(k for k in [*a, *b] if k not in a or k not in b or a[k] != b[k])
            what, a, b = f"{what} ({name})", a.get(name), b.get(name)
        raise InputError(
            f"{_named(first, other)} differ in their {what}: {shown(a)} and {shown(b)}. A soup requires "
            "runs on the same data, with the same model."
        )
    if first.config.eval_limit == other.config.eval_limit:
        for split in ("validation", "test"):
            a, b = first.domains(split), other.domains(split)
            if a and b and a != b:
                raise InputError(
                    f"{_named(first, other)} have different {split} examples: {shown(a)} and {shown(b)}."
                )


def warn_of_start(runs: Sequence[Ingredient]) -> None:
    """A warning unless all records name the same pretrained weights."""
    began = {run.began for run in runs}
    if len(began) == 1 and "" not in began:
        return
    if began == {""}:
        why = "do not show that they started from pretrained weights"
    else:
        names = ", ".join(sorted(name or "none" for name in began))
        why = f"list different initial weights ({names})"
    warnings.warn(
        f"the records of these runs {why}. An average of weights is a good model only if the runs were "
        "fine-tuned from the same initial weights.",
        stacklevel=4,
    )


class Measured(NamedTuple):
    """What a model of the table scores: a run's, or a soup's."""

    name: str
    used: bool | None
    """Whether a run is in the soup that is written; ``None`` for a soup."""
    scores: Mapping[str, Scores]
    worst: tuple[str, float] | None
    """The test domain with the worst score."""

    def to_dict(self) -> dict[str, Any]:
        scores = {split: found.to_dict() for split, found in self.scores.items()}
        worst = dict(zip(("domain", "score"), self.worst, strict=True)) if self.worst else None
        return {"name": self.name, "used": self.used, "scores": scores, "worst": worst}


class Evaluation:
    """Scores weights on the data of the runs, as their own evaluations did."""

    def __init__(self, training: Training, progress: Progress) -> None:
        self.training, self.progress, self.done = training, progress, 0
        self.evaluators = {tuple(training.splits): training.evaluator}

    def scores(self, name: str, runs: Sequence[Ingredient], splits: Sequence[str]) -> dict[str, Scores]:
        """Of the mean of some runs' weights, with the statistics of BatchNorm that belong to it."""
        training, model = self.training, self.training.model
        with self.progress.phase(f"evaluating {name}"):
            model.load_state_dict(average_weights(run.weights() for run in runs))
            model.train(len(runs) > 1)
            if has_batchnorm(model):
                training.selection.refresh()
            model.eval()
            found = self._evaluator(tuple(splits))(model)
        self.done += 1
        self.progress.update(self.done)
        return found

    def _evaluator(self, splits: tuple[str, ...]) -> Evaluator:
        if splits not in self.evaluators:
            limit = self.training.options.eval_limit
            limits = None if limit is None else dict.fromkeys(splits, limit)
            self.evaluators[splits] = self.training.evaluator_of(splits, limits)
        return self.evaluators[splits]

    def close(self) -> None:
        self.training.selection.close()
        for evaluator in self.evaluators.values():
            evaluator.loader.close()


def make_training(
    runs: Sequence[Ingredient],
    data: DomainData | None,
    model: nn.Module | None,
    device: str | None,
    workers: int,
) -> Training:
    """The first run's model and data with what evaluates them; nothing is trained."""
    first, where = runs[0], pick_device(device)
    config = first.config
    network = load(first.folder, model, device=where).model
    if all(run.began for run in runs) and isinstance(
        features := getattr(network, "features", None), Backbone
    ):
        features.has_weights()  # so that BatchNorm is frozen as it was in training
    names = ("batch_size", "seed", "eval_limit", "precision", "metric", "eval_splits")
    same: dict[str, Any] = {name: getattr(config, name) for name in names}
    if same["eval_splits"] is None:
        del same["eval_splits"]
    options = Options(steps=1, select="last", device=where, workers=workers, progress=False, **same)
    return Training("erm", network, data_of(config, where) if data is None else data, options)


def _check_data(run: Ingredient, scores: Mapping[str, Scores]) -> None:
    """Refuses data that are not those which the run's record was measured on."""
    for split, found in scores.items():
        before, now = run.domains(split), dict(zip(found.names, found.sizes, strict=True))
        if before and before != now:
            raise InputError(
                f"the data are not those of the run in {str(run.folder)!r}: the {split} split has "
                f"{shown(now)}, and its record {shown(before)}."
            )


def _worst(scores: Scores | None, uncounted: frozenset[str]) -> tuple[str, float] | None:
    """The domain with the worst score, and the score."""
    if scores is None:
        return None
    pairs = zip(scores.names, scores.values, strict=True)
    known = [(n, v) for n, v in pairs if n not in uncounted and not math.isnan(v)]
    worst = min if scores.metric == "accuracy" else max
    return worst(known, key=lambda pair: pair[1]) if known else None


def choose(scores: Sequence[Scores], measure: Callable[[Sequence[int]], Scores]) -> list[int]:
    """The greedy soup: the numbers of the runs in it, in the order in which they were added.

    Runs are taken by their validation ``scores``, the best first. One is added if the score of the soup with
    it, ``measure(numbers)``, is not worse than without.
    """

    def order(a: int, b: int) -> int:
        return scores[b].better_than(scores[a]) - scores[a].better_than(scores[b])

    best, *rest = sorted(range(len(scores)), key=functools.cmp_to_key(order))
    chosen, score = [best], scores[best]
    for number in rest:
        found = measure([*chosen, number])
        if not score.better_than(found):
            chosen, score = [*chosen, number], found
    return chosen


class Mixed(NamedTuple):
    """A soup before it is written."""

    weights: Mapping[str, Tensor]
    used: Sequence[int]
    rows: Sequence[Measured]
    scores: Mapping[str, Scores]


def mix(runs: Sequence[Ingredient], training: Training, greedy: bool, progress: Progress) -> Mixed:
    """Scores every run and the uniform soup; with ``greedy`` also that soup, which is then the result."""
    every, evaluation = list(training.splits), Evaluation(training, progress)
    splits = [split for split in every if split != "train"]
    if greedy and "validation" not in splits:
        raise InputError(
            "a greedy soup requires validation scores, and this dataset has no validation split."
        )

    def measure(numbers: Sequence[int]) -> Scores:
        parts = [runs[n] for n in numbers]
        return evaluation.scores("greedy soup", parts, ["validation"])["validation"]

    found, soups, used = [], {}, list(range(len(runs)))
    with world(training.device), contextlib.closing(evaluation):
        for run in runs:
            found.append(evaluation.scores(str(run.folder), [run], splits))
            if run.config.eval_limit == training.options.eval_limit:
                _check_data(run, found[-1])
        soups["uniform soup"] = scores = evaluation.scores("uniform soup", runs, every)
        if greedy:
            used = choose([each["validation"] for each in found], measure)
            soups["greedy soup"] = scores = evaluation.scores("greedy soup", [runs[n] for n in used], every)
    rows: list[tuple[str, bool | None, Mapping[str, Scores]]]
    rows = [(str(run.folder), n in used, found[n]) for n, run in enumerate(runs)]
    rows += [(name, None, each) for name, each in soups.items()]
    worst = [_worst(each.get("test"), training.data.uncounted) for *_, each in rows]
    measured = [Measured(*row, domain) for row, domain in zip(rows, worst, strict=True)]
    weights = {name: value.cpu() for name, value in snapshot(training.model).items()}
    return Mixed(weights, used, measured, scores)


def mix_unseen(runs: Sequence[Ingredient]) -> Mixed:
    """The uniform soup of runs whose data are not at hand: nothing is measured."""
    weights = average_weights(run.weights() for run in runs)
    first = runs[0].weights()
    if any(k.endswith("running_mean") and not torch.equal(v, first[k]) for k, v in weights.items()):
        warnings.warn(
            "BatchNorm statistics are averages over the runs and not recomputed on training data; to "
            "recompute "
            "them, pass the data to shoal.soup as 'data'.",
            stacklevel=4,
        )
    return Mixed(weights, range(len(runs)), (), {})


def make_record(
    runs: Sequence[Ingredient], mixed: Mixed, greedy: bool, training: Training | None, began: float
) -> RunRecord:
    """That of a run with one measurement, the soup's."""
    used = [runs[number] for number in mixed.used]
    config = _config(used, greedy)
    rule = f"mean of {len(used)} runs (uniform soup)"
    if greedy:
        what = f"mean of {len(used)}" if len(used) > 1 else "one"
        rule = f"best on validation, {what} of {len(runs)} runs (greedy soup)"
    where = environment(training.device if training else torch.device("cpu")) | packages(runs[0].config)
    starts = {run.began for run in used}
    at: Measurement = {"step": config.steps, "passes": 0, "loss": None}
    at["scores"] = {split: scores.to_dict() for split, scores in mixed.scores.items()}
    return RunRecord(
        config=config,
        status="finished",
        history=(at,),
        selected=0,
        rule=rule,
        seconds=round(time.monotonic() - began, 3),
        environment=where | ({"weights": starts.pop()} if len(starts) == 1 and "" not in starts else {}),
        notes=dict(training.data.notes) if training else dict(runs[0].record.notes),
    )


def shared(runs: Sequence[Ingredient]) -> dict[str, Any]:
    """The fields of their configurations that are the same in all."""
    first, *rest = (asdict(run.config) for run in runs)
    return {name: value for name, value in first.items() if all(other[name] == value for other in rest)}


def _config(used: Sequence[Ingredient], greedy: bool) -> RunConfig:
    """What the runs have in common, and defaults where they differ; ``settings`` says what was averaged."""
    first, same = used[0].config, shared(used)
    needed = {name: getattr(first, name) for name in ("dataset", "data_options", "steps")}
    names = {run.config.name for run in used}
    digest = hashlib.sha256("".join(run.checksum for run in used).encode()).hexdigest()[:16]
    own = {
        "algorithm": ALGORITHM,
        "label": f"{ALGORITHM} of {names.pop()}" if len(names) == 1 else ALGORITHM,
        "settings": {"greedy": greedy, "runs": len(used), "digest": digest},
    }
    return RunConfig(**{"optimizer_options": {}, **needed, **same, **own})


def digest_of(runs: Sequence[Ingredient]) -> str:
    return hashlib.sha256("".join(sorted(run.checksum for run in runs)).encode()).hexdigest()[:8]


def write(
    folder: Path, runs: Sequence[Ingredient], mixed: Mixed, record: RunRecord, training: Training | None
) -> RunRecord:
    """The files of a run: its record, which is returned with their checksums, is the last."""
    first, config, used = runs[0], record.config, [runs[number] for number in mixed.used]
    sources = [
        {
            "folder": str(run.folder),
            "identity": run.config.identity,
            "sha256": run.checksum,
            "used": run in used,
        }
        for run in runs
    ]
    where = surroundings(training.device if training else torch.device("cpu"))
    written: dict[str, Any] = {"run": config.to_dict()}
    if config.dataset == PYTHON:  # which says that there is nothing to load and to resume
        written = {"algorithm": config.name, "options": {"steps": config.steps}}
    written |= {"soup": sources, **where, "environment": dict(record.environment)}
    files = {name: read_bytes(first.folder / name, None) for name in ("inputs.json", *first.prepared())}
    files["model.safetensors"] = save({name: value.contiguous() for name, value in mixed.weights.items()})
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    record = replace(record, files=checksums)
    if training is not None:
        same = {
            name: value
            for name, value in shared(used).items()
            if name not in ("algorithm", "label", "settings")
        }
        same |= {name: getattr(config, name) for name in ("algorithm", "label", "settings")}
        sizes = {
            split: dict(zip(map(str, domains.names), domains.sizes.tolist(), strict=True))
            for split, domains in training.data.splits.items()
        }
        text = card(record.to_dict(), first.about.to_dict(), {**written, "run": same}, sizes)
        files["card.md"] = text.encode("utf-8", "backslashreplace")
    for name, content in {"config.yaml": dump_yaml(written).encode(), **files}.items():
        write_atomically(folder / name, content)
    write_atomically(folder / "record.json", json.dumps(record.to_dict(), default=dict).encode())
    return record


def predict(training: Training, config: RunConfig, folder: Path) -> None:
    """The soup's predictions, in the format of WILDS' leaderboard."""
    if config.dataset == PYTHON:
        predictions.write(training, folder / "predictions", "data", ("seed", str(config.seed)))
    else:
        write_predictions(training, config, folder)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A hidden folder beside ``path``, which gets its name at the end of the block or is removed."""
    place = path.parent / f".soup-{secrets.token_hex(4)}"
    try:
        place.mkdir()
        yield place
        os.rename(place, path)
    except OSError as error:
        raise InputError(f"out={str(path)!r} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
