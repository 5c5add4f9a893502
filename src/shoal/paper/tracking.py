"""The paper's tracking of the gradient inner product: Fish and ERM on the same batches from one start.

Each iteration draws one minibatch d_1 … d_S of each of S domains, for both. Fish's inner loop takes them one
after the other; ERM takes S steps on the same examples, shuffled together and split again into S. The mean
inner product between the gradients of d_1 … d_S, raw and normalised, is taken at both models before and
after. Both have the same optimizer with the same rate α.

Beside them stand two classifiers that look at nothing: the network at its start with its last layer's weights
zero, and its bias at the logarithms of the labels' frequencies (in regression, at their mean), or with the
first logit 1 higher than that (in regression, a standard deviation). What they score, in gradients' agreement
too, is had without learning anything: the second one is wrong in every domain in the same way, so that its
gradients agree almost perfectly.

A seed is a run like any other, done by :func:`run` in place of the usual loop. Its record has the agreement
of all four in ``agreement`` and their scores in the held-out domains in ``history``.

Reference: Shi et al., Gradient Matching for Domain Generalization, 2021, its two algorithms in the appendix.
"""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms.base import Log
from shoal.data import sets
from shoal.data.batch import DomainBatch, cut
from shoal.data.batch import pool as pooled
from shoal.data.loader import MetaBatchLoader, seed_all
from shoal.data.sampler import REGROUP, key, permute
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, judged
from shoal.experiments.run import prepare
from shoal.experiments.statistics import plus_minus
from shoal.paper import recipes
from shoal.report.tables import Table
from shoal.training.agreement import Agreement, Pending
from shoal.training.capture import LoadedSteps, draws
from shoal.training.loop import Training
from shoal.training.processes import together
from shoal.training.stepping import WORLD
from shoal.training.stopping import Signals
from shoal.training.summary import environment
from shoal.training.world import world

RUNNER = "paper.tracking"
"""What ``how["runner"]`` calls this module (see :func:`shoal.experiments.run.run`)."""
STEPS, EVALUATIONS, EVAL_LIMIT = 1000, 20, 5000
CONSTANT_STEPS = 20
"""Iterations over whose minibatches the constant classifiers are measured."""
READ_EVERY = 20
END = 0.1
"""The share of the measurements, at their end, that the table's means are over."""
SIDES = {"fish": "Fish", "erm": "ERM"}
CONSTANTS = ("constant classifier", "constant and wrong")
KINDS = {"normalised": "mean_cosine", "raw": "mean_inner_product"}
"""The curves of a result, as they are called there and in a record."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cdsprites": {
        "data_options": {"domains": 15},
        "batch_size": 64,
        "settings": {"meta_lr": 0.1, "inner_state": "reset"},
    },
}
"""What is done otherwise on a dataset unless it is asked for; on CdSprites as in the paper, N = 15."""

Result = dict[str, Any]
"""What was tracked with one seed, in curves."""


def plan(
    dataset: str,
    seeds: int,
    *,
    preset: str | None = None,
    data_options: Mapping[str, Any] | None = None,
    lr: float | None = None,
    settings: Mapping[str, Any] | None = None,
    eval_limit: int = EVAL_LIMIT,
    **changes: Any,
) -> list[RunConfig]:
    """Fish's side of it, one configuration per seed; ERM's is the same with ``erm``.

    With ``preset`` one of WILDS' recipes (see :mod:`shoal.paper.recipes`), its warm start included.
    ``changes`` are other fields of the configuration; those that are ``None`` or empty stay as they are.
    """
    changes = {name: value for name, value in changes.items() if value not in (None, {})}
    if preset is None:
        usual = dict(DEFAULTS.get(dataset.lower(), {}))
        options = {**usual.pop("data_options", {}), **(data_options or {})}
        seeded = "seed" in inspect.signature(sets.registry.module(dataset).load).parameters
        usual["optimizer_options"] = {"lr": 1e-3 if lr is None else lr}
        each = [({"seed": n, **options} if seeded else options, n) for n in range(seeds)]
        configs = [RunConfig(dataset, "fish", STEPS, own, seed=n, **usual) for own, n in each]
    else:
        names = {"model": "model", "model_options": "model_options", "batch": "batch_size"}
        same: dict[str, Any] = {name: changes.get(field) for name, field in names.items()}
        own = recipes.Changes(data_options=data_options or {}, lr=lr, seeds=seeds, **same)
        configs = recipes.runs(dataset, [recipes.Variant("Fish")], preset=preset, changes=own)
    changes |= {"select": "last", "eval_limit": eval_limit, "label": ""}
    changed = [replace(c, **changes, settings={**c.settings, **(settings or {})}) for c in configs]
    return [
        replace(
            c, eval_every=max(1, c.steps // EVALUATIONS), eval_splits=_splits(c.warm_start, c.warm_select)
        )
        for c in changed
    ]


def _splits(warm_start: int | float | str | None, warm_select: str | None) -> list[str]:
    """What is evaluated: a warm start may be selected on validation, the training itself never is."""
    return ["validation", "test"] if warm_select == "best" or warm_start == "plateau" else ["test"]


def folder_of(out: Path, configs: Sequence[RunConfig], every: int) -> Path:
    """Named by everything but the seeds, which are kept together."""
    first = configs[0]
    own = {"fold"} | ({"seed"} if all(c.data_options.get("seed") == c.seed for c in configs) else set())
    shared = {k: v for k, v in first.data_options.items() if k not in own}
    identity = replace(first, seed=0, data_options=shared).identity[:8]
    return out / f"{first.dataset}-{identity}{f'-every-{every}' if every > 1 else ''}"


def run(
    config: RunConfig,
    device: str | None = None,
    tell: Callable[[int, str], None] | bool = False,
    how: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Both trainings of one seed; gradients are compared every ``how["track_every"]``-th iteration."""
    if together():
        raise InputError("shoal track trains two models in one process; run it without torchrun.")
    options = {name: value for name, value in (how or {}).items() if name not in ("runner", "track_every")}
    fish = prepare(config, device, how=options)
    alone: dict[str, Any] = {"domains_per_step": 1, "settings": {}, "draw": "pooled", "warm_start": None}
    erm = prepare(replace(config, algorithm="erm", **alone), device, how=options)
    if fish.sampler.domains_per_step < 2:
        raise InputError("an inner product between domains requires at least 2 domains per step.")
    with world(fish.device, fish.options.deterministic), Signals(watch=False) as signals:
        return Pair(fish, erm, (how or {}).get("track_every", 1)).run(config, signals, tell)


class _Side:
    """One of the two models: how it is trained on batches, and measured."""

    def __init__(self, training: Training, capture: bool = True) -> None:
        self.training = training
        algorithm, engine = training.algorithm, training.engine
        capture = capture and training.unroll > 0
        self.advance: Callable[[Sequence[DomainBatch]], Log] = (
            LoadedSteps(algorithm, engine).run if capture else partial(engine.step, algorithm)
        )
        replayed = capture and training.gathers and not draws(algorithm)
        self.agreement = Agreement(algorithm, engine, capture=replayed)
        self.pending: list[tuple[str, Pending]] = []
        self.measured: dict[int, dict[str, dict[str, float | None]]] = {}
        """By iteration, before and after the update."""
        self.losses: list[Tensor] = []

    def measure(self, when: str, step: int, batches: Sequence[DomainBatch]) -> None:
        self.pending.append((when, self.agreement(step, [""] * len(batches), batches)))

    def step(self, batches: Sequence[DomainBatch]) -> None:
        self.losses.append(self.advance(batches)["losses"].mean())

    def read(self) -> bool:
        """Takes what was measured off the device; whether all losses were finite."""
        for when, pending in self.pending:
            values = self.agreement.read(pending)
            own = self.measured.setdefault(pending.step, {})
            own[when] = {name: values[name] for name in KINDS.values()}
        losses = self.losses
        self.pending, self.losses = [], []
        return not losses or bool(torch.stack(losses).isfinite().all())

    def scores(self) -> dict[str, Any]:
        """In the held-out domains."""
        return self.training.evaluator(self.training.model)["test"].to_dict()


class Pair:
    """Fish and ERM, iteration by iteration."""

    def __init__(self, fish: Training, erm: Training, every: int = 1) -> None:
        self.sides = {"Fish": _Side(fish), "ERM": _Side(erm)}
        self.training, self.every = fish, every
        self.steps, self.seed, self.device = fish.options.steps, fish.options.seed, fish.device
        self.history: list[dict[str, Any]] = []

    def run(self, config: RunConfig, signals: Signals, tell: Any = None) -> RunRecord:
        began, fish = time.monotonic(), self.training
        if fish.warm is not None:
            for _ in fish.warm.stages(None, signals):
                pass
            fish.warm.restore_selected()
        self.sides["ERM"].training.model.load_state_dict(fish.model.state_dict())
        for side in self.sides.values():
            side.training.model.train()
        constants, error = self.constants(), ""
        for step, batches in enumerate(self._batches(self.steps)):
            if step % fish.eval_every == 0:
                self._evaluate(step)
            self.iterate(step, batches)
            if step % READ_EVERY == 0 or step == self.steps - 1:
                if callable(tell):
                    tell(step, "")
                if error := self.read(step):
                    break
        else:
            self._evaluate(self.steps)
        agreement: list[dict[str, Any]] = []
        for step, before in self.sides["Fish"].measured.items():
            models = {name: side.measured[step] for name, side in self.sides.items()}
            agreement.append({"step": step, **before["before"], "models": models})
        for name, (measured, scores) in constants.items():
            agreement[0]["models"][name] = {"before": measured}
            self.history[0]["scores"][name] = scores
        return RunRecord(
            config,
            "diverged" if error else "finished",
            tuple(self.history),
            len(self.history) - 1,
            "last step",
            round(time.monotonic() - began, 3),
            environment(self.device),
            error,
            agreement=tuple(agreement),
        )

    def iterate(self, step: int, batches: Sequence[DomainBatch]) -> None:
        """One iteration of the paper's algorithm."""
        due = self.sides.values() if step % self.every == 0 else ()
        for side in due:
            side.measure("before", step, batches)
        seed = int(key(self.seed, WORLD, step)[0])
        seed_all(seed, self.device)
        self.sides["Fish"].step(batches)
        seed_all(seed, self.device)
        for batch in rearranged(batches, self.seed, step):
            self.sides["ERM"].step([batch])
        for side in due:
            side.measure("after", step, batches)

    def read(self, step: int) -> str:
        """Takes what was measured off the device; the error, where a loss was not finite."""
        lost = [name for name, side in self.sides.items() if not side.read()]
        where = f"became non-finite by iteration {step + 1}; lower the learning rate."
        return f"seed {self.seed}: the loss of {lost[0]} {where}" if lost else ""

    def _batches(self, stop: int) -> Iterator[list[DomainBatch]]:
        fish, workers = self.training, self.training.options.workers
        given: dict[str, Any] = {"workers": workers, "device": self.device, "stop": stop}
        with closing(MetaBatchLoader(fish.examples, fish.sampler, **given)) as loader:
            yield from loader

    def _evaluate(self, step: int) -> None:
        fish, erm = (side.scores() for side in self.sides.values())
        passes = step * self.training.sampler.domains_per_step
        point = {"step": step, "passes": passes, "loss": None, "scores": {"test": fish, "ERM": erm}}
        self.history.append(point)

    def constants(self) -> dict[str, tuple[dict[str, float | None], dict[str, Any]]]:
        """Agreement and scores of constant classifiers; none where the model ends in no linear layer."""
        training = self.training
        head = last_linear(training.model)
        if head is None:
            return {}
        batches = list(self._batches(min(CONSTANT_STEPS, self.steps)))
        labels = torch.cat([b.y for step in batches for b in step])
        before = [p.detach().clone() for p in head.parameters()]
        bias = constant_bias(labels, training.task.classes)
        wrong = bias.clone()
        wrong[0] += 1.0 if training.task.is_classification else float(labels.float().std())
        result = {}
        with torch.no_grad():
            head.weight.zero_()
        for name, value in zip(CONSTANTS, (bias, wrong), strict=True):
            side = _Side(training, capture=False)
            with torch.no_grad():
                head.bias.copy_(value)
            for step, meta_batch in enumerate(batches):
                side.measure("before", step, meta_batch)
            side.read()
            curves = {k: [m["before"][k] for m in side.measured.values()] for k in KINDS.values()}
            result[name] = {k: _mean(values) for k, values in curves.items()}, side.scores()
        with torch.no_grad():
            for p, value in zip(head.parameters(), before, strict=True):
                p.copy_(value)
        return result


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return statistics.fmean(known) if known else None


def last_linear(model: nn.Module) -> nn.Linear | None:
    """The layer that gives the output, if it is linear and has a bias."""
    leaves = [m for m in model.modules() if not list(m.children()) and list(m.parameters())]
    last = leaves[-1] if leaves else None
    return last if isinstance(last, nn.Linear) and last.bias is not None else None


def constant_bias(labels: Tensor, classes: int | None) -> Tensor:
    """Logits of the labels' frequencies, a class that did not occur counted as half an example."""
    if classes is None:
        return labels.float().mean(0).reshape(-1)
    counts = torch.bincount(labels.reshape(-1), minlength=classes).float().clamp(min=0.5)
    return (counts / counts.sum()).log()


def rearranged(batches: Sequence[DomainBatch], seed: int, step: int) -> list[DomainBatch]:
    """The examples of all batches, shuffled together and split again into as many.

    The order is that of ``draw="regrouped"`` (see :class:`~shoal.data.DomainBatchSampler`).
    """
    whole = pooled(batches)
    size = len(whole.y)
    order = permute(key(seed, REGROUP, step), size, np.arange(size))
    result = []
    for rows in np.array_split(order, len(batches)):
        index: Any = torch.from_numpy(rows).to(whole.y.device)
        result.append(DomainBatch(cut(whole.x, index), whole.y[index], None))
    return result


# Reading


def is_tracked(record: RunRecord) -> bool:
    return bool(record.agreement) and "models" in record.agreement[0]


def result_of(record: RunRecord) -> Result:
    """The curves in a record; KeyError, TypeError or the like where it is not one of these."""
    entries, points = record.agreement, record.history

    def number(value: Any) -> float | None:
        return None if value is None else value + 0.0

    def curves(model: str) -> Any:
        each = [e["models"][model] for e in entries]
        return {
            w: {k: [number(m[w][v]) for m in each] for k, v in KINDS.items()} for w in ("before", "after")
        }

    def score(point: Mapping[str, Any], name: str) -> float | None:
        value = number(judged(point["scores"][name])[1])
        return value if value is not None and math.isfinite(value) else None

    constants = []
    for name in CONSTANTS if CONSTANTS[0] in points[0]["scores"] else ():
        measured = entries[0]["models"][name]["before"]
        own = {kind: number(measured[key]) for kind, key in KINDS.items()}
        constants.append(own | {"score": score(points[0], name)})
    scores = {"fish": "test", "erm": "ERM"}
    return {
        "config": record.config.to_dict(),
        "domains": points[-1]["passes"] // points[-1]["step"],
        "iterations": [e["step"] for e in entries],
        "fish": curves("Fish"),
        "erm": curves("ERM"),
        "scores": {
            "metric": judged(points[-1]["scores"]["test"])[0],
            "iterations": [p["step"] for p in points],
            **{side: [score(p, name) for p in points] for side, name in scores.items()},
        },
        "constant": {**constants[0], "wrong": constants[1]} if constants else None,
        "environment": record.environment,
    }


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float | None]]]:
    """One value per seed: agreement at the end of training and its start, and the last score.

    ``change`` is by how much an update changes the cosine, over all of training.
    """
    result: dict[str, dict[str, list[float | None]]] = {}
    for name, label in SIDES.items():
        before, after = ([r[name][when] for r in results] for when in ("before", "after"))
        pairs = [
            zip(a["normalised"], b["normalised"], strict=True) for a, b in zip(after, before, strict=True)
        ]
        result[label] = {
            "before": [_end(b["normalised"]) for b in before],
            "after": [_end(a["normalised"]) for a in after],
            "raw": [_end(a["raw"]) for a in after],
            "score": [r["scores"][name][-1] for r in results],
            "start": [_mean(a["normalised"][: _count(a["normalised"])]) for a in after],
            "change": [_mean([a - b for a, b in own if None not in (a, b)]) for own in pairs],
        }
    for label, each in constants_of(results).items():
        cosines, raw, scores = ([c[key] for c in each] for key in (*KINDS, "score"))
        same = dict.fromkeys(("before", "after", "start"), cosines)
        result[label] = {**same, "raw": raw, "score": scores, "change": []}
    return result


def constants_of(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The constant classifiers of all seeds, where they were measured."""
    known = [r["constant"] for r in results if r.get("constant")]
    return dict(zip(CONSTANTS, (known, [c["wrong"] for c in known]), strict=True)) if known else {}


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    metric = results[0]["scores"]["metric"]
    result = Table(["", "cosine before", "cosine after", "GIP after", f"held-out {metric}"])
    scale, digits = (100, 1) if "accuracy" in metric else (1, 3)
    for label, row in summary(results).items():
        cosines = [plus_minus(row[k], 3) for k in ("before", "after")]
        score = plus_minus([scale * v for v in row["score"] if v is not None], digits)
        result.add(label, *cosines, scientific(row["raw"]), score)
    return result


def scientific(values: Sequence[float | None]) -> str:
    mean = _mean(values)
    return "–" if mean is None else f"{mean:.2e}"


def words(results: Sequence[Mapping[str, Any]]) -> str:
    """What the means of the table are over."""
    seeds = len(results)
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    devices = ", ".join(sorted({r["environment"]["device"] for r in results}))
    measured = {(tuple(r["iterations"]), r["config"]["steps"]) for r in results}
    iterations, steps = next(iter(measured))
    tail = iterations[-_count(iterations) :]
    if all(len(iterations) == steps >= 1 / END for iterations, steps in measured):
        when = "over the last tenth of the iterations"
    elif len(measured) > 1:  # folds of different sizes
        when = "over the last tenth of the measurements, at least one"
    elif len(tail) == 1:
        when = f"at the last measurement (iteration {tail[0]:,} of 0 to {steps - 1:,})"
    else:
        span = f"iterations {tail[0]:,} to {tail[-1]:,} of 0 to {steps - 1:,}"
        when = f"over the last {len(tail):,} measurements ({span})"
    return (
        f"Gradients {when}, scores at the last; {over}, on {devices}.\n"
        "Before and after an update: on the minibatches of that update."
    )


def _count(measured: Sequence[Any]) -> int:
    return max(1, round(END * len(measured)))


def _end(values: Sequence[float | None]) -> float | None:
    """The mean over the last tenth."""
    return _mean(values[-_count(values) :])
