"""CdSprites-N: the paper's figure of accuracy against the number of domains, and the demo's small version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import InputError
from shoal.experiments.config import RunConfig

ADAM = ("adam", {"lr": 1e-3, "fused": True})
SGD = ("sgd", {"lr": 0.1})
WALK = {"meta_lr": 0.1, "inner_state": "reset"}
BATCH = 64
POINTS = 20
"""Evaluations over a training."""


@dataclass(frozen=True)
class Method:
    label: str
    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    draw: str | None = None


ERM = Method("ERM", "erm")
FISH = Method("Fish", "fish", WALK)
REGROUPED = Method("Fish, random grouping", "fish", WALK, "regrouped")
REPTILE = Method("Reptile", "reptile", WALK)
IDGM = Method("IDGM", "idgm")
IDGM_PRINTED = Method("IDGM, no trust ratio, γ=0.3", "idgm", {"trust": None, "gamma": 0.3})


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

    A pass is one minibatch forward and backward. Methods that walk through N domains take passes/N steps of
    N batches; ERM takes one batch a step.
    """
    found = []
    for number in numbers:
        if passes % (number * POINTS):
            raise InputError(f"passes={passes} must be a multiple of {number * POINTS} for N={number}.")
        for seed in seeds:
            for method in methods:
                batches = 1 if method.algorithm == "erm" else number
                steps = passes // batches
                found.append(
                    RunConfig(
                        dataset="cdsprites",
                        data_options={
                            "domains": number,
                            "size": size,
                            "palette": palette,
                            "per_domain": per_domain,
                            "seed": seed,
                        },
                        algorithm=method.algorithm,
                        settings=method.settings,
                        draw=method.draw,
                        model_options={"width": width},
                        optimizer=optimizer[0],
                        optimizer_options=optimizer[1],
                        steps=steps,
                        batch_size=BATCH,
                        domains_per_step=batches,
                        seed=seed,
                        eval_every=steps // POINTS,
                        eval_limit=eval_limit,
                        label=method.label,
                    )
                )
    return found


NUMBERS = (5, 10, 15, 20, 30, 40, 50)
"""Of domains, in the figure."""
PASSES = {10: 16_000, 50: 10_000}
"""Passes a run in the figure: N = 10 is where Fish is slow to find the shape, and 50 must divide its own."""
OTHER_PASSES = 9_600


def figure(
    numbers: Sequence[int], seeds: Sequence[int], passes: int | None = None, size: int = 64
) -> dict[str, list[RunConfig]]:
    """The runs of ``shoal reproduce cdsprites``, by the part of the figure they belong to."""
    common: dict[str, Any] = {"size": size, "eval_limit": 5000}
    walk = {"meta_lr": 0.3, "inner_state": "carry"}
    plain = [Method(m.label, m.algorithm, {} if m is ERM else walk, m.draw) for m in (ERM, FISH, REGROUPED)]
    ten = passes or PASSES[10]

    def every_number(*methods: Method) -> list[RunConfig]:
        found = []
        for number in sorted(numbers, key=lambda n: n != 10):
            own = passes or PASSES.get(number, OTHER_PASSES)
            found += configs(methods, [number], seeds, passes=own, **common)
        return found

    return {
        # ERM's steps are short, a walk's long: side by side on a GPU they would wait for each other.
        "Adam": every_number(FISH, REGROUPED, REPTILE) + every_number(ERM),
        "IDGM": every_number(IDGM),
        "plain SGD": configs(plain, [10], seeds, passes=ten, optimizer=SGD, **common),
        "random palette": configs(
            (ERM, FISH, REGROUPED), [10], seeds, passes=ten, palette="random", **common
        ),
        "IDGM as printed": configs((IDGM_PRINTED,), [10], seeds, passes=ten, **common),
    }


DEMO: dict[str, Any] = {"passes": 6_000, "size": 32, "per_domain": 2000, "width": 24, "eval_limit": 2000}
"""What fits a laptop: 32×32 pixels, two thousand images a domain, a network three quarters as wide."""


def demo(seeds: Sequence[int]) -> list[RunConfig]:
    """Fish, its control and ERM on ten domains."""
    walk = {"meta_lr": 0.3, "inner_state": "carry"}
    methods = (Method("Fish", "fish", walk), Method("Fish, random grouping", "fish", walk, "regrouped"), ERM)
    return configs(methods, [10], seeds, **DEMO)
