"""The paper's tracking of the gradient inner product: Fish and ERM on the same batches from one start.

Each iteration draws a minibatch of each of S domains, for both. Fish's inner loop takes them one after the
other; ERM takes S steps on the same examples, shuffled together and split again into S. The mean cosine and
inner product between the gradients of the minibatches are measured at both models before and after. Both have
the same optimizer and learning rate.

Beside them are two classifiers that ignore their input: the network with zero weights in its last layer and
its bias at the logarithms of the labels' frequencies (in regression, at their mean), or with the first output
1 higher (in regression, a standard deviation). The second is wrong in every domain in the same way, so that
its gradients agree almost perfectly: agreement alone is no sign of learning.

A seed is a run like any other, done by :func:`run` in place of the usual loop. Its record has the agreement
of all four in ``agreement`` and their scores in the held-out domains in ``history``.

Reference: Shi et al., Gradient Matching for Domain Generalization, 2021, its two algorithms in the appendix.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms.base import Log
from shoal.data.batch import DomainBatch, cut
from shoal.data.batch import pool as pooled
from shoal.data.loader import MetaBatchLoader, seed_all
from shoal.data.sampler import REGROUP, key, permute
from shoal.errors import InputError, check_names
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, selection_score
from shoal.experiments.run import prepare
from shoal.experiments.statistics import plus_minus
from shoal.paper import recipes
from shoal.paper.columns import is_share, unit
from shoal.paper.published import published
from shoal.report.tables import Table
from shoal.training.agreement import Agreement, Pending
from shoal.training.capture import LoadedSteps, draws
from shoal.training.loop import Training
from shoal.training.processes import together
from shoal.training.stepping import WORLD
from shoal.training.stopping import Signals
from shoal.training.summary import environment
from shoal.training.world import world

if TYPE_CHECKING:
    import pandas

    from shoal.paper.reproduce import Reproduction, Request

EVALUATIONS = 20
CONSTANT_STEPS = 20
"""Iterations on whose minibatches the constant classifiers are measured."""
READ_EVERY = 20
CONSTANTS = ("constant classifier", "constant and wrong")
KINDS = ("mean_cosine", "mean_inner_product")
SPRITES: dict[str, Any] = {
    "data_options": {"domains": 15},
    "settings": {"meta_lr": 0.1, "inner_state": "reset"},
    "steps": 1000,
    "batch_size": 64,
    "eval_limit": 5000,
}
QUICK: dict[str, Any] = {
    **SPRITES,
    "data_options": {"domains": 15, "size": 32, "per_domain": 1000},
    "model_options": {"width": 16},
    "steps": 160,
    "batch_size": 32,
    "eval_limit": 500,
}
SEEDS, QUICK_SEEDS, QUICK_EVERY = 3, 2, 4
"""A quick run measures every fourth iteration."""
LEFT_OUT = (
    "Two seeds, 32×32 images, a small network and the first {steps} iterations, of which every fourth is "
    "measured. These are curves of the beginning of training: nothing can be concluded about convergence, "
    "about which method ends with better agreement, or about accuracy."
)


def plan(dataset: str, seeds: int, preset: str, quick: bool) -> list[RunConfig]:
    """Fish's side, one configuration per seed; ERM's is the same with ``erm``."""
    if dataset == "cdsprites":
        own = dict(QUICK if quick else SPRITES)
        data, steps = own.pop("data_options"), own.pop("steps")
        configs = [
            RunConfig(dataset, "fish", steps, lr=1e-3, data_options={**data, "seed": n}, seed=n, **own)
            for n in range(seeds)
        ]
    else:
        configs = recipes.runs(dataset, [recipes.Variant("Fish")], preset=preset, seeds=seeds, quick=quick)
        configs = [replace(c, eval_limit=c.eval_limit or SPRITES["eval_limit"]) for c in configs]
    return [
        replace(c, select="last", label="Fish and ERM", eval_every=max(1, c.steps // EVALUATIONS))
        for c in configs
    ]


def run(
    config: RunConfig,
    device: str | None = None,
    tell: Callable[[int, str], None] | bool = False,
    how: Mapping[str, Any] | None = None,
) -> RunRecord:
    """Both trainings of one seed; gradients are compared every ``how["track_every"]``-th iteration."""
    if together():
        raise InputError("tracking trains two models in one process; run it without torchrun.")
    options = {name: value for name, value in (how or {}).items() if name not in ("runner", "track_every")}
    fish = prepare(config, device, how=options)
    alone: dict[str, Any] = {"domains_per_step": 1, "settings": {}, "draw": "pooled", "warm_start": None}
    erm = prepare(replace(config, algorithm="erm", **alone), device, how=options)
    if fish.sampler.domains_per_step < 2:
        raise InputError("an inner product between domains requires at least 2 domains per step.")
    with world(fish.device, fish.options["deterministic"]), Signals(watch=False) as signals:
        return Pair(fish, erm, (how or {}).get("track_every", 1)).run(config, signals, tell)


class Side:
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
        """Copy what was measured from the device; whether all losses were finite."""
        for when, pending in self.pending:
            values = self.agreement.read(pending)
            own = self.measured.setdefault(pending.step, {})
            own[when] = {name: values[name] for name in KINDS}
        losses, self.pending, self.losses = self.losses, [], []
        return not losses or bool(torch.stack(losses).isfinite().all())

    def scores(self) -> dict[str, Any]:
        """In the held-out domains."""
        return self.training.evaluator(self.training.model)["test"].to_dict()


class Pair:
    """Fish and ERM, iteration by iteration."""

    def __init__(self, fish: Training, erm: Training, every: int = 1) -> None:
        self.sides = {"Fish": Side(fish), "ERM": Side(erm)}
        self.training, self.every = fish, every
        self.steps, self.seed, self.device = fish.options["steps"], fish.options["seed"], fish.device
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
            agreement[0]["models"][name] = measured
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
        """Copy what was measured from the device; the error where a loss was not finite."""
        lost = [name for name, side in self.sides.items() if not side.read()]
        where = f"became non-finite by iteration {step + 1}; lower the learning rate."
        return f"seed {self.seed}: the loss of {lost[0]} {where}" if lost else ""

    def _batches(self, stop: int) -> Iterator[list[DomainBatch]]:
        fish, workers = self.training, self.training.options["workers"]
        given: dict[str, Any] = {"workers": workers, "device": self.device, "stop": stop}
        with closing(MetaBatchLoader(fish.examples, fish.sampler, **given)) as loader:
            yield from loader

    def _evaluate(self, step: int) -> None:
        scores = dict(zip(("test", "ERM"), (side.scores() for side in self.sides.values()), strict=True))
        passes = step * self.training.sampler.domains_per_step
        self.history.append({"step": step, "passes": passes, "loss": None, "scores": scores})

    def constants(self) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
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
            side = Side(training, capture=False)
            with torch.no_grad():
                head.bias.copy_(value)
            for step, meta_batch in enumerate(batches):
                side.measure("before", step, meta_batch)
            side.read()
            values = [[m["before"][kind] for m in side.measured.values()] for kind in KINDS]
            means = [float(np.mean([v for v in own if v is not None] or [np.nan])) for own in values]
            known = {k: m if np.isfinite(m) else None for k, m in zip(KINDS, means, strict=True)}
            result[name] = {"before": known, "after": known}, side.scores()
        with torch.no_grad():
            for p, value in zip(head.parameters(), before, strict=True):
                p.copy_(value)
        return result


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


# Tables


def frames(records: Sequence[RunRecord]) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """What was measured, one row per seed, iteration, model and before or after; and the held-out scores."""
    import pandas

    measured = [
        {"seed": r.config.seed, "iteration": e["step"], "model": model, "when": when, **values}
        for r in records
        for e in r.agreement
        for model, own in e["models"].items()
        for when, values in own.items()
    ]
    scores = [
        {
            "seed": r.config.seed,
            "iteration": point["step"],
            "model": "Fish" if name == "test" else name,
            "score": selection_score(own)[1],
        }
        for r in records
        for point in r.history
        for name, own in point["scores"].items()
    ]
    kinds = dict.fromkeys(KINDS, float)
    return pandas.DataFrame(measured).astype(kinds), pandas.DataFrame(scores).astype({"score": float})


def summary(records: Sequence[RunRecord]) -> dict[str, dict[str, list[float]]]:
    """By model, one value per seed: mean agreement over the first and the last tenth, and the last score.

    ``change`` is how much an update changes the cosine, on average over all of training.
    """
    measured, scores = frames(records)
    result = {}
    for model, own in measured.groupby("model", sort=False):
        step = own["iteration"]
        start, end = own[step <= step.quantile(0.1)], own[step >= step.quantile(0.9)]

        def mean(part: Any, when: str, kind: str = "mean_cosine") -> list[float]:
            return list(part[part["when"] == when].groupby("seed")[kind].mean())

        result[str(model)] = {
            "start": mean(start, "after"),
            "before": mean(end, "before"),
            "after": mean(end, "after"),
            "inner product": mean(end, "after", "mean_inner_product"),
            "change": np.subtract(mean(own, "after"), mean(own, "before")).tolist(),
            "score": list(scores[scores["model"] == model].groupby("seed")["score"].last()),
        }
    return result


def reproduce(request: Request) -> Reproduction:
    from shoal.paper.figures import tracking_figure

    names = request.datasets or ("cdsprites",)
    check_names("dataset of tracking:", names, ["cdsprites", *recipes.datasets()])
    seeds = request.seeds or (QUICK_SEEDS if request.quick else SEEDS)
    plans = {name: plan(name, seeds, request.preset, request.quick) for name in names}
    how = {"runner": "paper.tracking", "track_every": QUICK_EVERY if request.quick else 1}
    records, failed = request.run([c for configs in plans.values() for c in configs], how)
    failed += [f"diverged: {r.error}" for r in records if r.status != "finished"]
    tables, figures, data = {}, {}, {}
    for name, configs in plans.items():
        planned = {c.identity for c in configs}
        own = [r for r in records if r.config.identity in planned and r.status == "finished"]
        if not own:
            continue
        metric = selection_score(own[0].history[-1]["scores"]["test"])[0]
        data[name] = summary(own)
        columns = ["cosine, start", "before", "after, end", "change by an update", "inner product, end"]
        table = Table(["", *columns, f"held-out {unit(metric)}"])
        for model, values in data[name].items():
            cosines = [plus_minus(values[k], 3) for k in ("start", "before", "after")]
            cosines.append(plus_minus(values["change"], 4))
            product = f"{np.mean(values['inner product']):.2e}"
            share = is_share(metric)
            score = plus_minus([100 * v if share else v for v in values["score"]], 1 if share else 3)
            table.add(model, *cosines, product, score)
        domains = own[0].history[-1]["passes"] // own[0].history[-1]["step"]
        title = f"{name}, {domains} domains per iteration"
        tables[title] = table
        file = "tracking" if name == "cdsprites" else f"tracking-{name}"
        figures[file] = tracking_figure(*frames(own), title, metric)
    over = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    text = (
        "Cosines and inner products of the domains' gradients after updates over the first tenth of the "
        "iterations (start), before and after updates over the last tenth (end), and how much an update "
        f"changes the cosine, over all of training. Scores are those of the last iteration; {over}.\n"
        "The paper has figures without numbers, and says of the cosine:\n"
        + "\n".join(f"  {claim['method']}: {claim['words']}" for claim in published("tracking"))
    )
    left_out = LEFT_OUT.format(steps=plans[names[0]][0].steps)
    return request.result(tables, text, data, failed=failed, figures=figures, left_out=left_out)
