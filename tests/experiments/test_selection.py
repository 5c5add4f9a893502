"""DomainBed's selection rules, against a naive implementation and by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from references import domainbed, naive
from shoal.experiments import selection
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord

BASE = RunConfig("made", "erm", 9, select="last")
Rows = dict[tuple[str, int], list[dict[str, Any]]]


def config(out: tuple[str, ...], seed: int = 0, trial: int = 0, algorithm: str = "erm") -> RunConfig:
    about = {"held_out": list(out), "seed": seed, **({"trial": trial} if trial else {})}
    return replace(BASE, algorithm=algorithm, batch_size=8 + trial, seed=seed, protocol=about)


def record(made: RunConfig, rows: list[dict[str, Any]], metric: str = "accuracy") -> RunRecord:
    """Evaluations as a run writes them: in- and out-splits of the training and of the held-out domains."""
    out = made.protocol["held_out"]

    def split(values: dict[str, float], held_out: bool) -> dict[str, Any]:
        own = {d: v for d, v in values.items() if (d in out) == held_out}
        return {"metric": metric, "average": 0.5, "domains": own}

    history = tuple(
        {
            "step": row["step"],
            "passes": row["step"],
            "loss": 1.0,
            "scores": {
                "train": split(row["in"], False),
                "validation": split(row["out"], False),
                "test": split(row["in"], True),
                "oracle": split(row["out"], True),
            },
        }
        for row in rows
    )
    status = "finished" if all(row["sound"] for row in rows) else "diverged"
    return RunRecord(made, status, history, len(history) - 1, "last step", 1.0, {})


def made_up(
    domains: int, seeds: int, trials: int, steps: int, levels: int, chance: random.Random, metric: str
) -> tuple[list[RunConfig], list[RunRecord], Rows]:
    """Two algorithms; scores of a few ``levels``, so that many are equal; every seventh run diverges."""
    names = [f"d{n}" for n in range(domains)]
    groups = [*((n,) for n in names), *(combinations(names, 2) if domains > 2 else [])]
    configs, records, rows = [], [], {}
    for algorithm in ("erm", "fish"):
        for seed in range(seeds):
            for out in groups:
                for trial in range(trials):
                    about = {"trial": trial, "held_out": set(out), "sound": chance.random() > 1 / 7}

                    def scores() -> dict[str, float]:
                        return {n: chance.randrange(levels + 1) / levels for n in names}

                    own = [{**about, "step": s, "in": scores(), "out": scores()} for s in range(1, steps + 1)]
                    configs.append(config(out, seed, trial, algorithm))
                    records.append(record(configs[-1], own, metric))
                    rows.setdefault((algorithm, seed), []).extend(own)
    return configs, records, rows


@settings(max_examples=40, deadline=None)
@given(
    domains=st.integers(2, 6),
    seeds=st.integers(1, 3),
    trials=st.integers(1, 4),
    steps=st.integers(1, 4),
    levels=st.sampled_from([4, 2**20]),
    metric=st.sampled_from(["accuracy", "mean squared error"]),
    chance=st.integers(0, 2**32),
)
def test_the_rules_select_what_naive_ones_do(
    domains: int, seeds: int, trials: int, steps: int, levels: int, metric: str, chance: int
) -> None:
    args = (domains, seeds, trials, steps, levels, random.Random(chance), metric)
    configs, records, rows = made_up(*args)
    names, sign = [f"d{n}" for n in range(domains)], 1 if metric == "accuracy" else -1
    for rule in selection.RULES:
        if rule == "leave-one-out" and domains == 2:
            continue
        (result,) = selection.sweep_results(configs, records, rule)
        expected = {
            (a, d, s): naive_choice(own, d, rule, sign) for (a, s), own in rows.items() for d in names
        }
        selected = {
            (c["algorithm"], c["held_out"], c["seed"]): None
            if c["status"] == "diverged"
            else (c["trial"], c["step"], c["score"])
            for c in result["cases"]
        }
        assert selected == expected
        for row in result["rows"]:
            by_seed = [[expected[row["algorithm"], d, s] for d in names] for s in range(seeds)]
            for n, d in enumerate(names):
                check_summary(row["domains"][d], [own[n][2] for own in by_seed if own[n]])
            whole = [sum(v[2] for v in own) / domains for own in by_seed if None not in own]
            check_summary(row["average"], whole)


def naive_choice(rows: list[dict[str, Any]], name: str, rule: str, sign: int) -> Any:
    """Trial, step and score by :mod:`references.domainbed`, without trials of which a needed run diverged."""
    number = {n: i for i, n in enumerate(rows[0]["in"])}
    pairs = rule == "leave-one-out"
    needed = [r for r in rows if name in r["held_out"] and (pairs or len(r["held_out"]) == 1)]
    lost = {r["trial"] for r in needed if not r["sound"]}
    lines = []
    for row in (r for r in needed if r["trial"] not in lost):
        inside: list[Any] = [sign * v for v in row["in"].values()]
        if len(row["held_out"]) == 1:  # what is reported, and selects nothing
            inside[number[name]] = (row["trial"], row["step"], row["in"][name])
        line = {"test_envs": [number[n] for n in row["held_out"]], "hparams": row["trial"]}
        lines.append(
            line | {"step": row["step"], "in": inside, "out": [sign * v for v in row["out"].values()]}
        )
    return domainbed.choice(lines, number[name], rule)


def check_summary(summary: dict[str, Any], values: list[float]) -> None:
    assert summary["mean"] == (pytest.approx(sum(values) / len(values)) if values else None)
    assert summary["se"] == (pytest.approx(naive.standard_error(values)) if len(values) > 1 else None)
