"""DomainBed's rules of selection, against the same written again and by hand."""

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


def config(out: tuple[str, ...], trial: int = 0, draw: int = 0, algorithm: str = "erm") -> RunConfig:
    about = {"held_out": list(out), "trial": trial, **({"draw": draw} if draw else {})}
    return replace(BASE, algorithm=algorithm, batch_size=8 + draw, seed=trial, protocol=about)


def record(made: RunConfig, rows: list[dict[str, Any]], metric: str = "accuracy") -> RunRecord:
    """The checkpoints as a run writes them: in- and out-splits of the others and of those left out."""
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
                "validation": split(row["held"], False),
                "test": split(row["in"], True),
                "oracle": split(row["held"], True),
            },
        }
        for row in rows
    )
    status = "finished" if all(row["sound"] for row in rows) else "diverged"
    return RunRecord(made, status, history, len(history) - 1, "last step", 1.0, {})


def made_up(
    count: int, trials: int, draws: int, steps: int, levels: int, seed: int, metric: str = "accuracy"
) -> tuple[list[RunConfig], list[RunRecord], Rows]:
    """Two algorithms; scores of a few ``levels``, so that many are equal; every seventh run diverges."""
    chance, names = random.Random(seed), [f"d{n}" for n in range(count)]
    singles = [(n,) for n in names]
    configs, records, rows = [], [], {}
    for algorithm in ("erm", "fish"):
        for trial in range(trials):
            for out in [*singles, *(combinations(names, 2) if count > 2 else [])]:
                for draw in range(draws):
                    sound = chance.random() > 1 / 7

                    def scores() -> dict[str, float]:
                        return {n: chance.randrange(levels + 1) / levels for n in names}

                    own = [
                        {
                            "draw": draw,
                            "out": set(out),
                            "step": s,
                            "sound": sound,
                            "in": scores(),
                            "held": scores(),
                        }
                        for s in range(1, steps + 1)
                    ]
                    configs.append(config(out, trial, draw, algorithm))
                    records.append(record(configs[-1], own, metric))
                    rows.setdefault((algorithm, trial), []).extend(own)
    return configs, records, rows


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 6),
    trials=st.integers(1, 3),
    draws=st.integers(1, 4),
    steps=st.integers(1, 4),
    levels=st.sampled_from([4, 2**20]),
    metric=st.sampled_from(["accuracy", "mean squared error"]),
    seed=st.integers(0, 2**32),
)
def test_the_rules_choose_what_naive_ones_do(
    count: int, trials: int, draws: int, steps: int, levels: int, metric: str, seed: int
) -> None:
    configs, records, rows = made_up(count, trials, draws, steps, levels, seed, metric)
    found = selection.sweep(configs, records)
    names, sign = [f"d{n}" for n in range(count)], 1 if metric == "accuracy" else -1
    for rule in selection.RULES:
        if rule == "leave-one-out" and count == 2:
            continue
        result = selection.results(found, "made", rule)
        expected = {
            (a, d, t): expected_choice(own, d, rule, sign) for (a, t), own in rows.items() for d in names
        }
        chosen = {
            (c["algorithm"], c["held_out"], c["trial"]): None
            if c["status"] == "diverged"
            else (c["draw"], c["step"], c["score"])
            for c in result["choices"]
        }
        assert chosen == expected
        for row in result["rows"]:
            for d in names:
                values = [v[2] for t in range(trials) if (v := expected[row["algorithm"], d, t]) is not None]
                check_summary(row["domains"][d], values)
            whole = [[expected[row["algorithm"], d, t] for d in names] for t in range(trials)]
            check_summary(
                row["average"], [sum(v[2] for v in own if v) / count for own in whole if None not in own]
            )


def expected_choice(rows: list[dict[str, Any]], name: str, rule: str, sign: int) -> Any:
    """Draw, step and score by :mod:`references.domainbed`, without draws that lost a run they need."""
    number = {n: i for i, n in enumerate(rows[0]["in"])}
    needed = [r for r in rows if name in r["out"] and (rule == "leave-one-out" or len(r["out"]) == 1)]
    lost = {r["draw"] for r in needed if not r["sound"]}
    lines = []
    for row in (r for r in needed if r["draw"] not in lost):
        inside: list[Any] = [sign * v for v in row["in"].values()]
        if len(row["out"]) == 1:  # what is reported, and chosen by nothing
            inside[number[name]] = (row["draw"], row["step"], row["in"][name])
        line = {"test_envs": [number[n] for n in row["out"]], "hparams": row["draw"], "step": row["step"]}
        lines.append(line | {"in": inside, "out": [sign * v for v in row["held"].values()]})
    return domainbed.choice(lines, number[name], rule)


def check_summary(summary: dict[str, Any], values: list[float]) -> None:
    assert summary["mean"] == (pytest.approx(sum(values) / len(values)) if values else None)
    assert summary["se"] == (pytest.approx(naive.standard_error(values)) if len(values) > 1 else None)


def rows_of(*points: tuple[dict[str, float], dict[str, float]], sound: bool = True) -> list[dict[str, Any]]:
    """Checkpoints at steps 1, 2, …: scores on in-splits and on out-splits."""
    return [{"step": n, "in": a, "held": b, "sound": sound} for n, (a, b) in enumerate(points, 1)]


def alone(*points: tuple[float, float, float, float], draw: int = 0, sound: bool = True) -> RunRecord:
    """With "a" left out of a, b, c. A point: a in, a held, b held, c held; b and c in are 0."""
    made = [({"a": i, "b": 0.0, "c": 0.0}, {"a": h, "b": b, "c": c}) for i, h, b, c in points]
    return record(config(("a",), draw=draw), rows_of(*made, sound=sound))


def chosen(records: list[RunRecord], rule: str = "training") -> dict[str, Any]:
    found = selection.sweep([r.config for r in records], records)
    return next(c for c in selection.select(found, "made", rule) if c["held_out"] == "a")


class TestByHand:
    def test_training_domains_count_once_each_and_the_held_out_domain_not_at_all(self) -> None:
        first = alone((0.1, 1.0, 0.4, 0.6), (0.2, 0.0, 0.9, 0.3))
        assert (chosen([first])["step"], chosen([first])["score"]) == (2, 0.2)

    def test_the_oracle_looks_at_the_last_step_alone(self) -> None:
        records = [
            alone((0.1, 0.9, 1, 1), (0.2, 0.3, 1, 1)),
            alone((0.3, 0.1, 0, 0), (0.4, 0.4, 0, 0), draw=1),
        ]
        found = chosen(records, "oracle")
        assert (found["draw"], found["step"], found["score"]) == (1, 2, 0.4)

    def test_a_run_that_diverged_loses(self) -> None:
        records = [alone((0.9, 1, 1, 1), sound=False), alone((0.1, 0, 0, 0), draw=1)]
        assert [chosen(records, rule)["draw"] for rule in ("training", "oracle")] == [1, 1]
        assert chosen(records)["diverged"] == 1
        assert chosen(records[:1])["status"] == "diverged"

    def test_a_score_that_is_not_finite_is_not_chosen(self) -> None:
        nan = float("nan")
        assert chosen([alone((0.9, 0.5, nan, 1), (0.1, 0, 0, 0))])["step"] == 2
        assert chosen([alone((nan, 0.5, 1, 1), (0.1, 0, 0, 0))])["status"] == "diverged"

    def test_leave_one_domain_out_takes_step_and_draw_from_the_pairs(self) -> None:
        """They are best at step 1, whatever the out-splits of the run without "a" alone say."""
        b, c = {"a": 0.9, "b": 0.0, "c": 0.9}, {"a": 0.9, "b": 0.9, "c": 0.0}
        pair_b = record(config(("a", "b")), rows_of((b | {"b": 0.7}, b), (b | {"b": 0.2}, b)))
        pair_c = record(config(("a", "c")), rows_of((c | {"c": 0.5}, c), (c | {"c": 0.8}, c)))
        records = [alone((0.1, 0, 0.0, 0.0), (0.2, 0, 1.0, 1.0)), pair_b, pair_c]
        found = chosen(records, "leave-one-out")
        assert (found["step"], found["selection_score"], found["score"]) == (1, 0.6, 0.1)
        assert chosen(records)["step"] == 2


class TestMissing:
    def test_what_is_missing_is_named(self) -> None:
        configs, records, _ = made_up(3, 2, 2, 1, 4, seed=0)
        gone = config(("d0", "d2"), trial=1, draw=1, algorithm="fish")
        found = selection.sweep(configs, [r for r in records if r.config != gone])
        result = selection.results(found, "made", "leave-one-out")
        assert result["missing"] == ["fish on made, d0 and d2 held out, seed 1, hyperparameter trial 1"]
        states = {
            (c["algorithm"], c["held_out"], c["trial"]) for c in result["choices"] if c["status"] == "missing"
        }
        assert states == {("fish", "d0", 1), ("fish", "d2", 1)}
        for rule in ("training", "oracle"):
            assert selection.results(found, "made", rule)["missing"] == []

    def test_pairs_that_were_never_planned(self) -> None:
        found = selection.sweep([config(("a",))], [alone((0.1, 0.5, 0.5, 0.5))])
        assert selection.results(found, "made", "leave-one-out")["missing"] == [
            "erm on made, a and b held out, seed 0, hyperparameter trial 0",
            "erm on made, a and c held out, seed 0, hyperparameter trial 0",
        ]

    def test_two_domains_cannot_be_held_out_one_by_one(self) -> None:
        configs, records, _ = made_up(2, 1, 1, 1, 4, seed=0)
        missing = selection.results(selection.sweep(configs, records), "made", "leave-one-out")["missing"]
        assert missing == [
            "leave-one-domain-out validation on made, which has two domains and needs three",
        ]

    def test_nothing_was_run(self) -> None:
        result = selection.results(selection.sweep([config(("a",)), config(("b",))], []), "made")
        assert len(result["missing"]) == 2
        assert result["rows"][0]["average"]["mean"] is None
        assert result["metric"] is None
