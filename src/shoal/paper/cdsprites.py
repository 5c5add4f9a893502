"""CdSprites-N: the paper's figure of accuracy against the number of domains, and the demo's small version."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from shoal.errors import InputError, check_names
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import plus_minus
from shoal.paper.evidence.verdicts import compared, verdict
from shoal.paper.published import claims
from shoal.report.tables import Table

T = TypeVar("T")
ADAM = ("adam", {"lr": 1e-3, "fused": True})
SGD = ("sgd", {"lr": 0.1})
RESET = {"meta_lr": 0.1, "inner_state": "reset"}
CARRY = {"meta_lr": 0.3, "inner_state": "carry"}
BATCH = 64
POINTS = 20
"""Evaluations over a training."""
NUMBERS = (5, 10, 15, 20, 30, 40, 50)
"""Of domains, in the figure."""
PASSES = 12_000
"""Minibatches per run in the figure, for every N."""
UPDATES = 1_500
"""Updates per run of IDGM, for every N, in the row with equal updates."""
OF_THE_PAPER = ("Adam", "IDGM", "IDGM, equal updates")
"""Parts of the figure; the others are controls of ours."""
DEMO: dict[str, Any] = {"passes": 6_000, "size": 32, "per_domain": 2000, "width": 24, "eval_limit": 2000}
"""What fits a laptop: 32×32 pixels, two thousand images per domain, a network three quarters as wide."""


@dataclass(frozen=True)
class Method:
    label: str
    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    draw: str | None = None


ERM = Method("ERM", "erm")
FISH = Method("Fish", "fish", RESET)
REGROUPED = Method("Fish, random grouping", "fish", RESET, "regrouped")
REPTILE = Method("Reptile", "reptile", RESET)
IDGM = Method("IDGM", "idgm")
IDGM_UPDATES = Method("IDGM, equal updates", "idgm")
IDGM_LONGER = Method("IDGM, 6,000 updates", "idgm")
IDGM_LARGER = Method("IDGM, batches of 256", "idgm")
IDGM_PRINTED = Method("IDGM, no trust ratio, γ=0.3", "idgm", {"trust": None, "gamma": 0.3})
CARRIED = (
    Method("Fish", "fish", CARRY),
    Method("Fish, random grouping", "fish", CARRY, "regrouped"),
    ERM,
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
    optimizer: tuple[str, dict[str, Any]] = ADAM,
    eval_limit: int | None = None,
) -> list[RunConfig]:
    """Every method on every N and seed, with the same optimizer, rate, batch size and number of passes.

    A pass is one minibatch forward and backward. Methods with an inner loop over N domains take passes/N
    steps of N batches; ERM takes one batch per step.
    """
    common: dict[str, Any] = {
        "model_options": {"width": width},
        "batch_size": BATCH,
        "eval_limit": eval_limit,
    }
    common |= {"optimizer": optimizer[0], "optimizer_options": optimizer[1]}
    result = []
    for number in numbers:
        _check_passes(passes, number)
        for seed in seeds:
            data = {
                "domains": number,
                "size": size,
                "palette": palette,
                "per_domain": per_domain,
                "seed": seed,
            }
            common["data_options"] = data
            for method in methods:
                batches = 1 if method.algorithm == "erm" else number
                steps = passes // batches
                own = {k: v for k, v in vars(method).items() if k != "algorithm"}
                own |= {"steps": steps, "domains_per_step": batches, "eval_every": steps // POINTS}
                result.append(RunConfig("cdsprites", method.algorithm, seed=seed, **own, **common))
    return result


def _check_passes(passes: int, number: int) -> None:
    if passes % (number * POINTS):
        raise InputError(f"passes={passes} must be a multiple of {number * POINTS} for N={number}.")


def idgm_configs(
    method: Method,
    number: int,
    seeds: Iterable[int],
    updates: int,
    every: int,
    *,
    batch: int = BATCH,
    **more: Any,
) -> list[RunConfig]:
    """``updates`` steps of IDGM on ``number`` domains, evaluated after every ``every`` of them."""
    runs = configs([method], [number], seeds, passes=number * POINTS, **more)
    return [replace(c, steps=updates, eval_every=every, batch_size=batch) for c in runs]


def figure(
    numbers: Sequence[int],
    seeds: Sequence[int],
    passes: int | None = None,
    size: int = 64,
    parts: Collection[str] | None = None,
) -> dict[str, list[RunConfig]]:
    """The runs of ``shoal reproduce cdsprites``, by the part of the figure they belong to.

    ``parts`` are the names of those wanted; ``passes`` must be possible only for their N.

    With the same number of minibatches IDGM, whose update takes one of every domain, makes 1/N of Fish's
    updates. A second row gives it the same number of updates for every N. Both are evaluated at the same
    steps, so that the longer run contains the shorter one: see :func:`longest`.
    """
    passes = passes or PASSES
    common: dict[str, Any] = {"size": size, "eval_limit": 5000}
    ten: dict[str, Any] = {"numbers": [10], "seeds": seeds, "passes": passes, **common}
    ordered = sorted(numbers, key=lambda n: n != 10)

    def every_number(*methods: Method) -> list[RunConfig]:
        return configs(methods, ordered, seeds, passes=passes, **common)

    def idgm(method: Method, updates: int | None = None) -> list[RunConfig]:
        result = []
        for number in ordered:
            updates_here = updates or passes // number
            result += idgm_configs(method, number, seeds, updates_here, evaluated(number), **common)
        return result

    def evaluated(number: int) -> int:
        _check_passes(passes, number)
        return _divisor(math.gcd(passes // number, UPDATES), UPDATES // 10)

    every: dict[str, Callable[[], list[RunConfig]]] = {
        # ERM's steps are short, inner loops long: in parallel on a GPU they would wait for each other.
        "Adam": lambda: every_number(FISH, REGROUPED, REPTILE) + every_number(ERM),
        "IDGM": lambda: idgm(IDGM),
        "IDGM, equal updates": lambda: idgm(IDGM_UPDATES, UPDATES),
        "IDGM, N = 10": lambda: (
            idgm_configs(IDGM_LONGER, 10, seeds, 4 * UPDATES, evaluated(10), **common)
            + idgm_configs(IDGM_LARGER, 10, seeds, UPDATES, evaluated(10), batch=4 * BATCH, **common)
        ),
        "plain SGD": lambda: configs((ERM, *CARRIED[:2]), **ten, optimizer=SGD),
        "random palette": lambda: configs((ERM, FISH, REGROUPED), **ten, palette="random"),
        "IDGM as printed": lambda: configs((IDGM_PRINTED,), **ten),
    }
    check_names("part", parts or (), every)
    return {part: configs_of() for part, configs_of in every.items() if part in (parts or every)}


def setting(passes: int, size: int) -> str:
    """What the figure's runs have in common, in a line."""
    epsilon = RESET["meta_lr"]
    return (
        f"{size}×{size} images, Adam {ADAM[1]['lr']:g}, batches of {BATCH}, {passes:,} minibatches per run "
        f"(IDGM, equal updates: {UPDATES:,} updates).\n"
        f"Fish, Fish with random grouping and Reptile: ε = {epsilon:g}."
    )


def _divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def longest(configs: Iterable[RunConfig]) -> list[RunConfig]:
    """Those that no other one contains, as :func:`with_shorter` reads them."""
    every = {c.identity: c for c in configs}.values()
    groups = _alike(every, lambda c: c)
    return [
        c for group in groups.values() for c in group if not any(_contains(d, c) for d in group if d is not c)
    ]


def with_shorter(configs: Iterable[RunConfig], records: Iterable[RunRecord]) -> list[RunRecord]:
    """The records of these configurations; of a run that a longer one contains, from the longer one's.

    The learning rate is constant, so that up to its last step a shorter training is the same.
    """
    known = {r.config.identity: r for r in records if r.status != "failed"}
    groups = _alike(known.values(), lambda r: r.config)
    found = []
    for config in configs:
        if config.identity in known:
            found.append(replace(known[config.identity], config=config))
            continue
        longer = [r for r in groups.get(but_for_length(config), ()) if _contains(r.config, config)]
        found += [short for r in longer if (short := _up_to(r, config))][:1]
    return found


def _alike(items: Iterable[T], config_of: Callable[[T], RunConfig]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(but_for_length(config_of(item)), []).append(item)
    return groups


def but_for_length(config: RunConfig) -> str:
    """The same for runs that differ only in their number of steps and in when they are evaluated."""
    return replace(config, steps=1, eval_every=None).identity


def _contains(longer: RunConfig, config: RunConfig) -> bool:
    """Whether the one is evaluated where the other ends."""
    return longer.steps >= config.steps and config.steps % (longer.eval_every or longer.steps) == 0


def _up_to(record: RunRecord, config: RunConfig) -> RunRecord | None:
    history = tuple(m for m in record.history if m["step"] <= config.steps)
    if not history or history[-1]["step"] != config.steps:
        return replace(record, config=config) if record.status == "diverged" else None
    validation = [m["scores"]["validation"]["average"] for m in history]
    selected = max(range(len(history)), key=validation.__getitem__)
    seconds = record.seconds * config.steps / record.config.steps
    return replace(
        record,
        config=config,
        history=history,
        selected=selected,
        seconds=seconds,
        status="finished",
        error="",
    )


def demo(seeds: Sequence[int]) -> list[RunConfig]:
    """Fish, its control and ERM on ten domains."""
    return configs(CARRIED, [10], seeds, **DEMO)


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


def by_method(records: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    result: dict[str, list[RunRecord]] = {}
    for record in records:
        result.setdefault(record.config.name, []).append(record)
    return result


def curves(records: Iterable[RunRecord], split: str) -> dict[str, list[tuple[list[int], list[float]]]]:
    return {m: [r.curve(split) for r in rs if r.history] for m, rs in by_method(records).items()}


def percent(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds, in percent."""
    return plus_minus([100 * v for v in values if not math.isnan(v)])


def scored(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Those that finished. A run that diverged has no score, not even that of its last measurement."""
    return [r for r in records if r.status == "finished" and r.history]


def demo_table(records: Sequence[RunRecord]) -> Table:
    table = Table(["method", "training domains", "held-out domain", "optimizer", "passes"])
    for method, runs in by_method(records).items():
        config = runs[0].config
        accuracies = [
            percent([r.score(split, last=True) for r in scored(runs)]) for split in ("train", "test")
        ]
        optimizer = f"{config.optimizer.capitalize()} {config.optimizer_options['lr']:g}"
        passes = f"{runs[0].history[-1]['passes']:,}" if runs[0].history else "–"
        table.add(method, *accuracies, optimizer, passes)
    return table


def rows(parts: Mapping[str, Sequence[RunRecord]]) -> list[dict[str, Any]]:
    """One entry for each part, method and N: accuracies at the last and at the selected step.

    ``seeds`` are those of the runs that finished, in the accuracies' order, and ``diverged`` the others.
    """
    result = []
    for part, records in parts.items():
        # The paper speaks of Adam and of one palette; other parts are ours alone.
        said = claims("cdsprites") if part in OF_THE_PAPER else []
        for method, runs in by_method(records).items():
            for number in sorted({r.config.data_options["domains"] for r in runs}):
                every = [r for r in runs if r.config.data_options["domains"] == number]
                entry: dict[str, Any] = {
                    "part": part,
                    "method": method,
                    "domains": number,
                    "seeds": [r.config.seed for r in scored(every)],
                    "diverged": [r.config.seed for r in every if r.status == "diverged"],
                    "seconds": sum(r.seconds for r in every),
                }
                for split in ("train", "test"):
                    entry[f"{split} last"] = [r.score(split, last=True) for r in scored(every)]
                    entry[f"{split} selected"] = [r.score(split) for r in scored(every)]
                own = [c for c in said if (c["method"], c["domains"]) == (method, number)]
                entry["paper"] = "  ".join(f"{c['split']}: {c['words']}" for c in own)
                entry["verdict"] = "  ".join(f"{c['split']} {judged(entry, c)}" for c in own)
                result.append(entry)
    return result


def judged(entry: Mapping[str, Any], claim: Mapping[str, Any]) -> str:
    """The verdict on one number of the paper, by the rules of the page of claims."""
    values = [100 * v for v in entry[f"{claim['split']} last"] if math.isfinite(v)]
    return verdict(compared(entry["method"], values, len(entry["diverged"]), claim))


def table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """At the last step, and at the step best on validation, which is drawn like the test domain."""
    scores = {"train last": "train, last", "test last": "test, last"}
    scores["test selected"] = "test, selected (oracle-like)"
    result = Table(["part", "method", "N", "seeds", *scores.values(), "paper", "verdict"])
    for e in entries:
        seeds = counted(len(e["seeds"]), len(e["seeds"]) + len(e["diverged"]), len(e["diverged"]))
        cells = [seeds, *(percent(e[name]) for name in scores)]
        result.add(e["part"], e["method"], e["domains"], *cells, e["paper"] or "–", e["verdict"] or "–")
    return result


def counted(scored: int, every: int, diverged: int) -> str:
    """How many seeds a mean is over, of how many, and how many diverged."""
    of = f" of {every}" if scored < every else ""
    return f"{scored}{of}" + (f", {diverged} diverged" if diverged else "")


def listed(parts: Mapping[str, Sequence[RunConfig]]) -> list[str]:
    """Runs by name, those that differ in their seed alone together."""
    result: dict[str, list[str]] = {}
    for part, runs in parts.items():
        for c in runs:
            result.setdefault(f"{c.name} ({part}), N={c.data_options['domains']}", []).append(str(c.seed))
    return [f"{name}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}" for name, seeds in result.items()]


def series(entries: Iterable[Mapping[str, Any]], split: str) -> dict[str, dict[int, list[float]]]:
    """By method and N the accuracies of the paper's parts at the last step, for the figure."""
    result: dict[str, dict[int, list[float]]] = {}
    for e in entries:
        values = [v for v in e[f"{split} last"] if not math.isnan(v)]
        if values and e["part"] in OF_THE_PAPER:
            result.setdefault(e["method"], {})[e["domains"]] = values
    return result


def marks(split: str) -> list[tuple[str, int, float]]:
    """The method, N and accuracy in percent of the paper's numbers, to be drawn beside ours."""
    said = [c for c in claims("cdsprites") if c["split"] == split and c["relation"] != "below"]
    return [(c["method"], c["domains"], c["value"]) for c in said]
