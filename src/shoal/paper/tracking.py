"""The paper's tracking of the gradient inner product: Fish and ERM side by side from one start.

Each iteration draws one minibatch d_1 … d_S of each of S domains, for both. Fish walks through them and steps
back; ERM takes S steps on the same examples, shuffled together and split again into S. The mean inner product
between the gradients of d_1 … d_S, raw and normalised, is taken at both models before and after. Both take
the same optimizer with the same rate α.

Beside them stand two classifiers that look at nothing: the network at its start with its last layer's weights
zero, and its bias at the logarithms of the labels' frequencies (in regression, at their mean), or with the
first logit 1 higher than that (in regression, a standard deviation). What they score, in gradients' agreement
too, has been had without learning anything: the second one is wrong in every domain in the same way, so that
its gradients agree almost perfectly.

Reference: Shi et al., Gradient Matching for Domain Generalization, 2021, its two algorithms in the appendix.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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
from shoal.experiments import pool
from shoal.experiments.config import RunConfig
from shoal.experiments.run import prepare
from shoal.files import read_json, write_atomically
from shoal.paper import recipes
from shoal.training.agreement import Agreement, Pending
from shoal.training.capture import LoadedSteps, draws
from shoal.training.loop import Training
from shoal.training.processes import pick_device, together
from shoal.training.stepping import WORLD
from shoal.training.stopping import Signals
from shoal.training.summary import environment
from shoal.training.world import world

STEPS = 1000
EVALUATIONS = 20
EVAL_LIMIT = 5000
CONSTANT_STEPS = 20
"""Iterations over whose minibatches the constant classifier is measured."""
READ_EVERY = 20
SIDES, WHEN, KINDS = ("fish", "erm"), ("before", "after"), ("normalised", "raw")
"""The curves of a result: whose, before or after an update, of cosines or of inner products."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cdsprites": {
        "data_options": {"domains": 15},
        "batch_size": 64,
        "settings": {"meta_lr": 0.1, "inner_state": "reset"},
    },
}
"""What is done otherwise on a dataset unless it is asked for; on CdSprites as in the paper, N = 15."""

Result = dict[str, Any]
"""What was tracked with one seed, as plain data."""
Tell = Callable[[int, str], None]


def plan(
    dataset: str,
    seeds: int,
    *,
    preset: str | None = None,
    steps: int | None = None,
    data_options: Mapping[str, Any] | None = None,
    model: str | None = None,
    model_options: Mapping[str, Any] | None = None,
    optimizer: str | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    domains_per_step: int | None = None,
    settings: Mapping[str, Any] | None = None,
    warm_start: int | float | str | None = None,
    precision: str | None = None,
    weights: str | None = None,
    eval_limit: int = EVAL_LIMIT,
) -> list[RunConfig]:
    """Fish's side of it, a configuration a seed; ERM's is the same with ``erm``.

    With ``preset`` one of WILDS' recipes (see :mod:`shoal.paper.recipes`), its warm start included; whatever
    else is given counts more.
    """
    if preset is None:
        configs = _plain(dataset, seeds, dict(data_options or {}), 1e-3 if lr is None else lr)
    else:
        changes = recipes.Changes(
            model=model,
            model_options=model_options or None,
            data_options=data_options or {},
            batch=batch_size,
            lr=lr,
            seeds=seeds,
        )
        configs = recipes.runs(dataset, [recipes.Variant("Fish")], given=preset, changes=changes)
    given: dict[str, Any] = {
        "steps": steps,
        "model": model,
        "model_options": model_options or None,
        "optimizer": optimizer,
        "batch_size": batch_size,
        "domains_per_step": domains_per_step,
        "warm_start": warm_start,
        "precision": precision,
        "weights": weights,
    }
    same = {name: value for name, value in given.items() if value is not None}
    return [_tracked(replace(c, **same), settings or {}, eval_limit) for c in configs]


def _plain(dataset: str, seeds: int, options: dict[str, Any], lr: float) -> list[RunConfig]:
    usual = dict(DEFAULTS.get(dataset.lower(), {}))
    options = {**usual.pop("data_options", {}), **options}
    takes_seed = "seed" in inspect.signature(sets.registry.module(dataset).load).parameters
    return [
        RunConfig(
            dataset=dataset,
            algorithm="fish",
            steps=STEPS,
            data_options={"seed": seed, **options} if takes_seed else options,
            optimizer_options={"lr": lr},
            seed=seed,
            **usual,
        )
        for seed in range(seeds)
    ]


def _tracked(config: RunConfig, settings: Mapping[str, Any], eval_limit: int) -> RunConfig:
    return replace(
        config,
        settings={**config.settings, **settings},
        select="last",
        eval_splits=["test"],
        eval_every=max(1, config.steps // EVALUATIONS),
        eval_limit=eval_limit,
        label="",
    )


def track(
    config: RunConfig,
    device: str | None = None,
    tell: Tell | bool = False,
    *,
    every: int = 1,
    how: Mapping[str, Any] | None = None,
) -> Result:
    """Both trainings of one seed; gradients are compared every ``every``-th iteration."""
    if together():
        raise InputError("shoal track trains two models in one process; start it without torchrun.")
    fish = prepare(config, device, how=how)
    alone: dict[str, Any] = {"domains_per_step": 1, "settings": {}, "draw": "pooled", "warm_start": None}
    erm = prepare(replace(config, algorithm="erm", **alone), device, how=how)
    if fish.sampler.domains_per_step < 2:
        raise InputError("an inner product between domains needs at least 2 of them a step.")
    deterministic = fish.options.deterministic
    with world(fish.device, deterministic), Signals(watch=False) as signals:
        return _Pair(fish, erm, every, tell if callable(tell) else None).run(config, signals)


class _Side:
    """One of the two models: how it is trained on batches, and measured."""

    def __init__(self, training: Training) -> None:
        self.training = training
        algorithm, engine = training.algorithm, training.engine
        capture = training.unroll > 0
        self.advance: Callable[[Sequence[DomainBatch]], Log] = (
            LoadedSteps(algorithm, engine).run if capture else partial(engine.step, algorithm)
        )
        replayed = capture and training.gathers and not draws(algorithm)
        self.agreement = Agreement(algorithm, engine, capture=replayed)
        self.seen: dict[str, list[Pending]] = {when: [] for when in WHEN}
        self.found: dict[str, dict[str, list[float | None]]] = {
            when: {kind: [] for kind in KINDS} for when in WHEN
        }
        self.scores: list[float | None] = []
        self.losses: list[Tensor] = []

    def measure(self, when: str, step: int, batches: Sequence[DomainBatch]) -> None:
        self.seen[when].append(self.agreement(step, [""] * len(batches), batches))

    def step(self, batches: Sequence[DomainBatch]) -> None:
        self.losses.append(self.advance(batches)["losses"].mean())

    def read(self) -> bool:
        """Takes what was measured off the device; whether all losses were finite."""
        for when, pending in self.seen.items():
            for one in map(self.agreement.read, pending):
                self.found[when]["normalised"].append(one["mean_cosine"])
                self.found[when]["raw"].append(one["mean_inner_product"])
            pending.clear()
        losses, self.losses = self.losses, []
        return not losses or bool(torch.stack(losses).isfinite().all())

    def score(self) -> tuple[str, float | None]:
        """In the unseen domains, with the name of what is measured."""
        scores = self.training.evaluator(self.training.model)["test"]
        judged = scores.judged
        return scores.selects or scores.metric, judged if math.isfinite(judged) else None


class _Pair:
    """Fish and ERM, iteration by iteration."""

    def __init__(self, fish: Training, erm: Training, every: int, tell: Tell | None) -> None:
        self.fish, self.erm = _Side(fish), _Side(erm)
        self.every, self.tell = every, tell
        self.steps = fish.options.steps
        self.eval_every = fish.eval_every
        self.seed, self.device = fish.options.seed, fish.device

    def run(self, config: RunConfig, signals: Signals) -> Result:
        began = time.monotonic()
        fish = self.fish.training
        if fish.warm is not None:
            for _ in fish.warm.stages(None, signals):
                pass
            fish.warm.restore_selected()
        self.erm.training.model.load_state_dict(fish.model.state_dict())
        for side in (self.fish, self.erm):
            side.training.model.train()
        constant = self._constant()
        metric, measured, evaluated = "", list[int](), list[int]()
        for step, batches in enumerate(self._batches(0, self.steps)):
            if step % self.eval_every == 0:
                metric = self._evaluate(step, evaluated)
            if step % self.every == 0:
                measured.append(step)
            self.iterate(step, batches)
            if step % READ_EVERY == 0:
                self._read(step)
                if self.tell:
                    self.tell(step, "")
        self._read(self.steps - 1)
        metric = self._evaluate(self.steps, evaluated)
        return {
            "config": config.to_dict(),
            "every": self.every,
            "domains": fish.sampler.domains_per_step,
            "iterations": measured,
            "fish": self.fish.found,
            "erm": self.erm.found,
            "scores": {
                "metric": metric,
                "iterations": evaluated,
                "fish": self.fish.scores,
                "erm": self.erm.scores,
            },
            "constant": constant,
            "seconds": round(time.monotonic() - began, 3),
            "environment": environment(self.device),
        }

    def iterate(self, step: int, batches: Sequence[DomainBatch]) -> None:
        """One round of the paper's algorithm."""
        due = step % self.every == 0
        if due:
            for side in (self.fish, self.erm):
                side.measure("before", step, batches)
        seed = int(key(self.seed, WORLD, step)[0])
        seed_all(seed, self.device)
        self.fish.step(batches)
        seed_all(seed, self.device)
        for batch in rearranged(batches, self.seed, step):
            self.erm.step([batch])
        if due:
            for side in (self.fish, self.erm):
                side.measure("after", step, batches)

    def _batches(self, start: int, stop: int) -> Iterator[list[DomainBatch]]:
        fish = self.fish.training
        loader = MetaBatchLoader(
            fish.examples,
            fish.sampler,
            workers=fish.options.workers,
            device=self.device,
            start=start,
            stop=stop,
        )
        return iter(loader)

    def _read(self, step: int) -> None:
        for name, side in (("Fish", self.fish), ("ERM", self.erm)):
            if not side.read():
                raise InputError(
                    f"seed {self.seed}: the loss of {name} was not finite by iteration {step + 1}; "
                    "lower the learning rate."
                )

    def _evaluate(self, step: int, evaluated: list[int]) -> str:
        metric = ""
        for side in (self.fish, self.erm):
            metric, score = side.score()
            side.scores.append(score)
        evaluated.append(step)
        return metric

    def _constant(self) -> Result | None:
        """What constant classifiers score; ``None`` where the model does not end in a linear layer."""
        training = self.fish.training
        head = last_linear(training.model)
        if head is None:
            return None
        batches = list(self._batches(0, min(CONSTANT_STEPS, self.steps)))
        labels = torch.cat([b.y for step in batches for b in step])
        kept = [p.detach().clone() for p in head.parameters()]
        bias = constant_bias(labels, training.task.classes)
        shift = torch.zeros_like(bias)
        shift[0] = 1.0 if training.task.is_classification else float(labels.float().std())
        found: Result = {}
        try:
            with torch.no_grad():
                head.weight.zero_()
            for name, value in (("constant", bias), ("wrong", bias + shift)):
                side = _Side(training)
                side.agreement = Agreement(training.algorithm, training.engine)
                with torch.no_grad():
                    head.bias.copy_(value)
                for step, meta_batch in enumerate(batches):
                    side.measure("before", step, meta_batch)
                side.read()
                found[name] = {kind: _mean(values) for kind, values in side.found["before"].items()}
                found[name]["score"] = side.score()[1]
        finally:
            with torch.no_grad():
                for p, before in zip(head.parameters(), kept, strict=True):
                    p.copy_(before)
        return {**found["constant"], "wrong": found["wrong"]}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def last_linear(model: nn.Module) -> nn.Linear | None:
    """The layer that gives the output, if it is linear and has a bias."""
    found = [m for m in model.modules() if not list(m.children()) and list(m.parameters())]
    last = found[-1] if found else None
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
    found = []
    for rows in np.array_split(order, len(batches)):
        index: Any = torch.from_numpy(rows).to(whole.y.device)
        found.append(DomainBatch(cut(whole.x, index), whole.y[index], None))
    return found


class Job(NamedTuple):
    """A seed for a worker process."""

    config: RunConfig
    device: str | None
    every: int
    how: Mapping[str, Any]

    def run(self, tell: Tell | bool) -> Result:
        return track(self.config, self.device, tell, every=self.every, how=self.how)


class TrackStore:
    """One JSON file a seed, in a folder named by everything else."""

    def __init__(self, folder: Path, configs: Sequence[RunConfig], every: int) -> None:
        first = configs[0]
        unseeded = {**first.to_dict(), "seed": 0, "every": every}
        own = {"fold"} | ({"seed"} if all(c.data_options.get("seed") == c.seed for c in configs) else set())
        unseeded["data_options"] = {k: v for k, v in first.data_options.items() if k not in own}
        text = json.dumps(unseeded, sort_keys=True, default=dict)
        self.folder = folder / f"{first.dataset}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def path(self, config: RunConfig) -> Path:
        fold = config.data_options.get("fold")
        return self.folder / (f"seed-{config.seed}" + (f"-fold-{fold}.json" if fold else ".json"))

    def path_of(self, result: Result) -> Path:
        return self.path(RunConfig.from_dict(result["config"]))

    def find(self, config: RunConfig) -> Result | None:
        path = self.path(config)
        if not path.exists():
            return None
        try:
            found: Result = read_json(path)
            same = RunConfig.from_dict(found["config"]).identity == config.identity
            _check(found)
        except (ValueError, KeyError, TypeError, InputError) as error:
            raise InputError(f"{str(path)!r} is not what `shoal track` wrote; move it away.") from error
        if not same:
            raise InputError(f"{str(path)!r} is of another run; choose another --out.")
        return found

    def save(self, result: Result) -> None:
        write_atomically(self.path_of(result), json.dumps(result, default=dict).encode())


def _check(found: Result) -> None:
    """Raises ``ValueError``, ``KeyError`` or ``TypeError`` where a result is not what :func:`track` gives."""
    count, scores, constant = len(found["iterations"]), found["scores"], found["constant"]
    curves = [(found[name][when][kind], count) for name, when, kind in product(SIDES, WHEN, KINDS)]
    curves += [(scores[name], len(scores["iterations"])) for name in SIDES]
    curves += [(found["iterations"], count), (scores["iterations"], len(scores["iterations"]))]
    if constant is not None:
        curves += [([c[k] for k in (*KINDS, "score")], 3) for c in (constant, constant["wrong"])]
    for values, length in curves:
        if not (isinstance(values, list) and 0 < length == len(values)):
            raise ValueError("a curve is cut short")
        if not all(v is None or isinstance(v, int | float) for v in values):
            raise TypeError("a curve is not of numbers")
    if not isinstance(scores["metric"], str) or not isinstance(found["environment"]["device"], str):
        raise TypeError("a name is not a text")
    if None in found["iterations"] or None in scores["iterations"] or not isinstance(found["domains"], int):
        raise TypeError("a count is not a number")


def track_all(
    configs: Sequence[RunConfig],
    store: TrackStore,
    *,
    every: int = 1,
    device: str | None = None,
    jobs: int | None = None,
    how: Mapping[str, Any] | None = None,
    tell: Callable[[RunConfig, int, str], None] | None = None,
    done: Callable[[Result], None] | None = None,
) -> list[Result]:
    """What was tracked with each seed, doing what the store lacks; each is saved as it finishes.

    On the CPU seeds are worked on side by side, one a core; on CUDA one after the other.
    """
    work = [Job(c, device, every, how or {}) for c in configs if store.find(c) is None]
    count = min(jobs or (1 if pick_device(device).type == "cuda" else pool._cores()), len(work))
    if work:
        run: Any = pool._side_by_side if count > 1 else pool._alone
        for result in run(work, count, tell):
            store.save(result)
            if done:
                done(result)
    return [found for c in configs if (found := store.find(c)) is not None]
