"""CdSprites-N: accuracy against the number of training domains N.

A pass is one minibatch forward and backward. All methods have the same optimizer, learning rate, batch size
and number of passes. Those with an inner loop over N domains take passes/N steps of N batches, ERM one batch
per step. Direct IDGM, whose update takes a batch of every domain, then makes 1/N of Fish's updates; since the
paper trains by epochs, a second row gives it the same number of updates for every N.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import plus_minus
from shoal.paper.published import published
from shoal.report.tables import Table

if TYPE_CHECKING:
    from shoal.paper.reproduce import Reproduction, Request

ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 1e-3, "optimizer_options": {"fused": True}}
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1}
BATCH = 64
POINTS = 20
"""Evaluations per training."""


@dataclass(frozen=True)
class Method:
    label: str
    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    draw: str | None = None


RESET = {"meta_lr": 0.1, "inner_state": "reset"}
CARRY = {"meta_lr": 0.3, "inner_state": "carry"}
ERM = Method("ERM", "erm")
FISH = Method("Fish", "fish", RESET)
REGROUPED = Method("Fish, random grouping", "fish", RESET, "regrouped")
REPTILE = Method("Reptile", "reptile", RESET)
IDGM = Method("IDGM", "idgm")
AS_PRINTED = Method("IDGM, no trust ratio, γ=0.3", "idgm", {"trust": None, "gamma": 0.3})
CARRIED = (replace(FISH, settings=CARRY), replace(REGROUPED, settings=CARRY), ERM)

CONTROLS: Mapping[str, tuple[Sequence[Method], dict[str, Any]]] = {
    "sgd": ((ERM, *CARRIED[:2]), {"optimizer": SGD}),
    "palette": ((ERM, FISH, REGROUPED), {"palette": "random"}),
    "as-printed": ((AS_PRINTED,), {}),
}
PARTS = ("adam", "idgm", "batch-256", *CONTROLS)
OF_THE_PAPER = ("adam", "idgm")
"""The other parts are controls of ours, at N = 10."""


@dataclass(frozen=True)
class Size:
    """How large the experiment is; ``deal`` is what all methods have in common."""

    numbers: Sequence[int]
    """Of training domains."""
    seeds: int
    deal: Mapping[str, Any]
    updates: int
    """Of IDGM at every N, in the row with equal updates."""
    methods: Sequence[Method]
    """Of the part ``adam``."""


FULL = Size(
    (5, 10, 15, 20, 30, 40, 50),
    5,
    {"passes": 12_000, "size": 64, "eval_limit": 5000},
    1500,
    (FISH, REGROUPED, REPTILE, ERM),
)
QUICK = Size(
    (10,),
    1,
    {"passes": 3_400, "size": 32, "per_domain": 1000, "width": 16, "eval_limit": 500},
    100,
    CARRIED,
)
LEFT_OUT = (
    "One seed, N = 10, 32×32 images, a small network and a quarter of the passes; Fish keeps the state of "
    "its optimizer between inner loops, with ε = 0.3 in place of 0.1; without `only`, the part adam alone, "
    "without Reptile. Fish has not converged by then: a lead over its control with random grouping, or the "
    "lack of one, must not be taken for a result, and nothing is shown of how accuracy depends on N."
)


def configs(
    methods: Iterable[Method],
    numbers: Iterable[int],
    seeds: Iterable[int],
    *,
    passes: int,
    size: int = 64,
    palette: str = "adjacent",
    per_domain: int | None = None,
    width: int = 32,
    optimizer: Mapping[str, Any] = ADAM,
    eval_limit: int | None = None,
) -> list[RunConfig]:
    """Every method on every N and seed."""
    result = []
    for number in numbers:
        if passes % (number * POINTS):
            raise InputError(f"passes={passes} must be a multiple of {number * POINTS} for N={number}.")
        for seed in seeds:
            data = {"domains": number, "size": size, "palette": palette}
            data |= {"per_domain": per_domain, "seed": seed}
            for method in methods:
                batches = 1 if method.algorithm == "erm" else number
                steps = passes // batches
                own = {k: v for k, v in vars(method).items() if k != "algorithm"}
                result.append(
                    RunConfig(
                        "cdsprites",
                        method.algorithm,
                        steps,
                        data_options=data,
                        model_options={"width": width},
                        batch_size=BATCH,
                        domains_per_step=batches,
                        eval_every=steps // POINTS,
                        eval_limit=eval_limit,
                        seed=seed,
                        **optimizer,
                        **own,
                    )
                )
    return result


class Row(NamedTuple):
    """A row of the table: the runs of all seeds, read at step ``at``."""

    part: str
    method: str
    domains: int
    at: int
    runs: list[RunConfig]


def plan(parts: Sequence[str], size: Size, seeds: Sequence[int]) -> list[Row]:
    """The rows of the given parts."""
    rows = []
    for part in parts:
        methods, more = CONTROLS.get(part, (size.methods, {}))
        for number in sorted(size.numbers, key=lambda n: n != 10) if part in OF_THE_PAPER else [10]:
            if part in ("idgm", "batch-256"):
                rows += _idgm_rows(part, number, size, seeds)
                continue
            for method in methods:
                runs = configs([method], [number], seeds, **size.deal, **more)
                rows.append(Row(part, method.label, number, runs[0].steps, runs))
    return rows


def _idgm_rows(part: str, number: int, size: Size, seeds: Sequence[int]) -> list[Row]:
    """Rows of IDGM with different numbers of updates, which share their runs."""
    lengths = {"IDGM, equal updates": size.updates}
    if part == "idgm":
        lengths["IDGM"] = size.deal["passes"] // number
        if number == 10:
            lengths[f"IDGM, {4 * size.updates:,} updates"] = 4 * size.updates
    every = _divisor(math.gcd(*lengths.values()), max(1, size.updates // 10))
    changes = {
        "steps": max(lengths.values()),
        "eval_every": every,
        "batch_size": 256 if part != "idgm" else BATCH,
    }
    runs = [replace(c, **changes) for c in configs([IDGM], [number], seeds, **size.deal)]
    return [Row(part, label, number, at, runs) for label, at in lengths.items()]


def _divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def entry(row: Row, records: Mapping[str, RunRecord]) -> dict[str, Any]:
    """A row as plain data: accuracies at its last step and at the step that validation selects.

    A run that diverged before has no score, not even that of its last evaluation.
    """
    runs = [records[c.identity] for c in row.runs if c.identity in records]
    histories = {r.config.seed: [m for m in r.history if m["step"] <= row.at] for r in runs}
    scored = {seed: own for seed, own in histories.items() if own and own[-1]["step"] == row.at}
    best = [max(own, key=lambda m: m["scores"]["validation"]["average"]) for own in scored.values()]
    last = [own[-1] for own in scored.values()]

    def accuracies(points: Sequence[Mapping[str, Any]], split: str) -> list[float]:
        return [m["scores"][split]["average"] for m in points]

    said = published("cdsprites") if row.part in OF_THE_PAPER else []
    own = [c for c in said if (c["method"], c["domains"]) == (row.method, row.domains)]
    return {
        "part": row.part,
        "method": row.method,
        "domains": row.domains,
        "seeds": list(scored),
        "diverged": [seed for seed in histories if seed not in scored],
        "train last": accuracies(last, "train"),
        "test last": accuracies(last, "test"),
        "test selected": accuracies(best, "test"),
        "paper": "  ".join(f"{c['split']}: {c['words']}" for c in own),
    }


def percent(values: Iterable[float]) -> str:
    """Mean ± standard deviation over seeds, in percent."""
    return plus_minus([100 * v for v in values])


def table(entries: Sequence[Mapping[str, Any]]) -> Table:
    scores = {"train last": "train, last", "test last": "test, last"}
    scores["test selected"] = "test, selected (oracle-like)"
    result = Table(["part", "method", "N", "seeds", *scores.values(), "paper"])
    for e in entries:
        diverged = f", {len(e['diverged'])} diverged" if e["diverged"] else ""
        cells = [f"{len(e['seeds'])}{diverged}", *(percent(e[name]) for name in scores)]
        result.add(e["part"], e["method"], e["domains"], *cells, e["paper"] or "–")
    return result


def series(entries: Iterable[Mapping[str, Any]], split: str) -> dict[str, dict[int, list[float]]]:
    """By method and N the accuracies at the last step, for the figure."""
    result: dict[str, dict[int, list[float]]] = {}
    for e in entries:
        if e["part"] in OF_THE_PAPER and e[f"{split} last"]:
            result.setdefault(e["method"], {})[e["domains"]] = e[f"{split} last"]
    return result


def samples(options: Mapping[str, Any], each: int = 9) -> dict[str, Any]:
    """A few images of every domain, as arrays for the figures."""
    import torch

    from shoal.data.sets import load

    data = load("cdsprites", **{**options, "per_domain": 2 * each})
    examples: Any = data.examples
    result = {}
    for split in ("train", "test"):
        domains = data.splits[split]
        for d, name in enumerate(domains.names):
            images, _ = examples.batch(torch.as_tensor(domains.indices_of(d)[:each]).long())
            result["held-out" if split == "test" else name] = images.permute(0, 2, 3, 1).numpy()
    return result


def reproduce(request: Request) -> Reproduction:
    from shoal.paper.figures import cdsprites_figure, samples_figure

    size = QUICK if request.quick else FULL
    parts = request.parts(PARTS)
    if request.quick and not request.only:
        parts = ["adam"]
    rows = plan(parts, size, range(request.seeds or size.seeds))
    records, failed = request.run(list({c.identity: c for row in rows for c in row.runs}.values()))
    entries = [entry(row, {r.config.identity: r for r in records}) for row in rows]
    pixels = size.deal["size"]
    setting = (
        f"{pixels}×{pixels} images, Adam {ADAM['lr']:g}, batches of {BATCH}, {size.deal['passes']:,} "
        f"minibatches per run (IDGM, equal updates: {size.updates:,} updates).\n"
        f"Fish, Fish with random grouping and Reptile: ε = {size.methods[0].settings['meta_lr']:g}."
    )
    text = (
        f"{setting}\nAccuracy in percent, mean ± standard deviation over seeds. Validation is sampled like "
        'the test domain, so "selected" is oracle-like; use the column "last". Parts but adam and idgm '
        "are controls of ours."
    )
    train, test = (series(entries, split) for split in ("train", "test"))
    figures = {"cdsprites-samples": samples_figure(samples({"domains": 10, "size": pixels}))}
    figures |= {"cdsprites": cdsprites_figure(train, test, setting)} if train else {}
    data = {"rows": entries}
    return request.result({"": table(entries)}, text, data, failed=failed, figures=figures, left_out=LEFT_OUT)
