"""Sweeps that DomainBed has run: reading them, and their tables."""

from __future__ import annotations

import json
import random
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from references import domainbed as reference
from shoal.errors import InputError
from shoal.experiments import domainbed, selection
from shoal.report import domainbed as view


def lines(
    out: list[int],
    inside: list[list[float]],
    outside: list[list[float]],
    *,
    draw: int = 0,
    trial: int = 0,
    dataset: str = "Made",
    algorithm: str = "ERM",
) -> str:
    """``results.jsonl`` with a checkpoint every 300 steps; accuracies by checkpoint and domain."""
    args = {
        "algorithm": algorithm,
        "dataset": dataset,
        "hparams_seed": draw,
        "output_dir": "somewhere",
        "steps": None,
        "task": "domain_generalization",
        "test_envs": out,
        "trial_seed": trial,
    }
    found = []
    for n, (a, b) in enumerate(zip(inside, outside, strict=True)):
        accuracies = {f"env{i}_in_acc": v for i, v in enumerate(a)}
        accuracies |= {f"env{i}_out_acc": v for i, v in enumerate(b)}
        content = {
            "args": args,
            "hparams": {"lr": 1e-3},
            "step": 300 * n,
            "loss": 0.5,
            "epoch": 1.0,
            "mem_gb": 0.1,
        }
        found.append(json.dumps(content | accuracies, sort_keys=True) + "\n")
    return "".join(found)


def write(folder: Path, name: str, text: str, done: bool = True) -> None:
    (folder / name).mkdir()
    (folder / name / "results.jsonl").write_text(text)
    if done:
        (folder / name / "done").write_text("done")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three domains, two draws; env0 left out alone, and with each other."""
    write(tmp_path, "r0", lines([0], [[0.1, 1, 1], [0.2, 1, 1]], [[0.3, 0.5, 0.7], [0.1, 0.6, 0.4]]))
    write(tmp_path, "r1", lines([0], [[0.3, 1, 1], [0.4, 1, 1]], [[0.0, 0.5, 0.5], [0.2, 0.5, 0.5]], draw=1))
    for draw, (first, second) in enumerate([([0.2, 0.9], [0.2, 0.1]), ([0.6, 0.3], [0.1, 0.3])]):
        ones = [[1.0, 1.0, 1.0]] * 2
        write(tmp_path, f"p1{draw}", lines([0, 1], [[1, v, 1] for v in first], ones, draw=draw))
        write(tmp_path, f"p2{draw}", lines([2, 0], [[1, 1, v] for v in second], ones, draw=draw))
    return tmp_path


def choice(found: selection.Sweep, rule: str, dataset: str = "Made") -> dict[str, Any]:
    return next(c for c in selection.select(found, dataset, rule) if c["left_out"] == "env0")


class TestReading:
    @pytest.mark.parametrize(
        ("rule", "draw", "step", "judged", "score"),
        [
            ("training", 0, 0, 0.6, 0.1),  # (0.5 + 0.7) / 2
            ("leave-one-out", 0, 300, 0.5, 0.2),  # (0.9 + 0.1) / 2
            ("oracle", 1, 300, 0.2, 0.4),
        ],
    )
    def test_the_same_rules_work_on_it(
        self, folder: Path, rule: str, draw: int, step: int, judged: float, score: float
    ) -> None:
        found, troubles = domainbed.read(folder)
        assert troubles == []
        assert len(found.runs) == 6
        chosen = choice(found, rule)
        assert (chosen["draw"], chosen["step"], chosen["score"]) == (draw, step, score)
        assert chosen["judged"] == pytest.approx(judged)

    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (lambda r: cut(r, 0), "r1: results.jsonl is empty."),
            (lambda r: (r / "results.jsonl").write_bytes(b"\xff\xfe\n"), "r1: results.jsonl cannot be read"),
            (lambda r: (r / "results.jsonl").write_text("{}\n{}\n"), "r1: line 1 is not a checkpoint"),
            (lambda r: (r / "results.jsonl").write_text("[]\n"), "r1: line 1 is not a checkpoint"),
            (lambda r: edit(r, '"env2_out_acc"', '"env9_out_acc"'), "r1: a checkpoint lacks accuracies."),
            (lambda r: edit(r, '"hparams_seed": 1', '"hparams_seed": 0'), "r1: the same run as 'r0'"),
        ],
    )
    def test_what_cannot_be_used_is_reported(self, folder: Path, spoil: Any, words: str) -> None:
        spoil(folder / "r1")
        found, troubles = domainbed.read(folder)
        assert len(troubles) == 1
        assert troubles[0].startswith(words)
        assert len(found.runs) == 5
        assert choice(found, "training")["missing"] == [
            "ERM on Made, env0 held out, seed 0, hyperparameter trial 1"
        ]

    @pytest.mark.parametrize(
        ("spoil", "words", "oracle"),
        [
            (lambda r: (r / "done").unlink(), "there is no file 'done'; it is used up to step 300.", 0.4),
            (lambda r: cut(r, -40), "the last line is truncated; it is used up to step 0.", 0.2),
        ],
    )
    def test_an_unfinished_run_counts_with_what_it_has(
        self, folder: Path, spoil: Any, words: str, oracle: float
    ) -> None:
        """As in DomainBed. Of draw 1 the last step has 0.2 on the out-split, and the first 0.0."""
        spoil(folder / "r1")
        found, troubles = domainbed.read(folder)
        assert troubles == [f"r1: not finished: {words}"]
        assert choice(found, "oracle")["score"] == oracle
        assert choice(found, "oracle")["missing"] == []

    def test_losses_that_are_not_finite(self, folder: Path) -> None:
        edit(folder / "r1", '"loss": 0.5', '"loss": NaN')
        assert domainbed.read(folder)[1] == []

    def test_a_run_with_a_broken_line_was_begun_all_the_same(self, tmp_path: Path) -> None:
        for draw in range(2):
            write(tmp_path, f"r{draw}", lines([0], [[1, 1], [1, 1]], [[1, 1], [1, 1]], draw=draw))
        edit(tmp_path / "r1", '"step": 300', '"stop": 300')
        assert choice(domainbed.read(tmp_path)[0], "training")["missing"] == [
            "ERM on Made, env0 held out, seed 0, hyperparameter trial 1"
        ]

    def test_other_folders_are_passed_over(self, folder: Path) -> None:
        (folder / "notes").mkdir()
        (folder / "results.txt").write_text("a table")
        assert domainbed.read(folder)[1] == []

    def test_no_sweep(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="contains no DomainBed run"):
            domainbed.read(tmp_path)
        with pytest.raises(InputError, match="is not a folder"):
            domainbed.read(tmp_path / "none")

    def test_a_trial_that_one_algorithm_lacks(self, folder: Path) -> None:
        write(folder, "f", lines([0], [[0.1, 1, 1]], [[1, 1, 1]], trial=1, algorithm="Fish"))
        missing = selection.results(domainbed.read(folder)[0], "Made")["missing"]
        assert "ERM on Made, env0 held out, seed 1, hyperparameter trial 0" in missing
        assert "Fish on Made, env0 held out, seed 0, hyperparameter trial 1" in missing
        assert "Fish on Made, env0 held out, seed 1, hyperparameter trial 0" not in missing

    def test_domains_that_have_names_come_in_order(self, tmp_path: Path) -> None:
        for n in (3, 0, 2, 1):
            write(tmp_path, f"t{n}", lines([n], [[n / 10] * 4], [[1] * 4], dataset="TerraIncognita"))
        result = selection.results(domainbed.read(tmp_path)[0], "TerraIncognita")
        assert result["left_out"] == ["L100", "L38", "L43", "L46"]
        assert [v["mean"] for v in result["rows"][0]["domains"].values()] == [0.0, 0.1, 0.2, 0.3]


def cut(folder: Path, end: int) -> None:
    path = folder / "results.jsonl"
    path.write_text(path.read_text()[:end])


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / "results.jsonl"
    path.write_text(path.read_text().replace(old, new))


class TestTables:
    @pytest.fixture
    def found(self, tmp_path: Path) -> selection.Sweep:
        """Two trials of three algorithms on PACS; every score is a number of its own."""
        number = 0
        for algorithm in ("Zeta", "Fish", "ERM"):
            for n in range(4):
                for trial in range(2):
                    number += 1
                    text = lines(
                        [n], [[number / 100] * 4], [[1] * 4], trial=trial, dataset="PACS", algorithm=algorithm
                    )
                    write(tmp_path, f"r{number}", text)
        return domainbed.read(tmp_path)[0]

    def test_a_dataset(self, found: selection.Sweep) -> None:
        result = selection.results(found, "PACS")
        table = view.dataset_table(result)
        unit = "accuracy (%)"
        assert table.columns == [
            "algorithm",
            *(f"{d}, {unit}" for d in "ACPS"),
            f"average, {unit}",
        ]
        assert [row[0] for row in table.rows] == ["ERM", "Fish", "Zeta"]
        # Fish has the numbers 9 to 16, two a domain: apart by 1, of standard error √(0.25 / 2).
        fish = ["9.5 ± 0.4", "11.5 ± 0.4", "13.5 ± 0.4", "15.5 ± 0.4", "12.5"]
        assert list(table.rows[1][1:]) == fish

    def test_all_datasets(self, found: selection.Sweep) -> None:
        result = selection.results(found, "PACS")
        other = {**result, "dataset": "mine", "rows": [r for r in result["rows"] if r["algorithm"] != "Zeta"]}
        table = view.overall_table([result, other])
        unit = "accuracy (%)"
        assert table.columns == [
            "algorithm",
            f"PACS, {unit}",
            f"mine, {unit}",
            f"average, {unit}",
        ]
        assert list(table.rows[1]) == ["Fish", "12.5 ± 0.4", "12.5 ± 0.4", "12.5"]
        assert list(table.rows[2]) == ["Zeta", "4.5 ± 0.4", "–", "–"]

    def test_other_metrics_are_named_and_not_in_percent(self, found: selection.Sweep) -> None:
        table = view.dataset_table({**selection.results(found, "PACS"), "metric": "mean squared error"})
        assert table.columns[1] == "A, mean squared error"
        assert table.rows[1][1] == "0.09500 ± 0.00354"
        assert len(table.columns) == 6

    def test_what_is_missing_is_said(self, found: selection.Sweep) -> None:
        gone = selection.Key("PACS", "Fish", ("P",), 1, 0)
        kept = {k: r for k, r in found.runs.items() if k != gone}
        some = selection.Sweep(found.planned, kept, by_domainbed=True)
        result = selection.results(some, "PACS")
        table, words = view.dataset_table(result), " ".join(view.words([result]))
        assert list(table.rows[1][3:6]) == ["13.0 (1 of 2)", "15.5 ± 0.4", "12.4"]
        assert "1 missing: Fish on PACS, P held out, seed 1, hyperparameter trial 0." in words
        assert "mean ± standard error (with n, as in DomainBed) over 2 seeds; training-domain" in words
        none = selection.results(selection.Sweep(found.planned, {}, by_domainbed=True), "PACS")
        assert list(view.dataset_table(none).rows[0]) == ["ERM", *["missing"] * 5]
        assert "; and 16 more." in " ".join(view.words([none]))


def made_up(seed: int) -> list[dict[str, Any]]:
    """Lines of a sweep with many equal accuracies; runs are missing, cut short, or begun twice."""
    chance = random.Random(seed)
    lost, levels, found = chance.choice([0, 0.2, 0.5]), chance.choice([1, 3, 10]), []
    for dataset, envs in (("PACS", 4), ("ColoredMNIST", 3)):
        outs = [[e] for e in range(envs)] + [list(pair) for pair in combinations(range(envs), 2)]
        for algorithm in ("ERM", "Fish"):
            for out, trial, hparams in ((o, t, h) for o in outs for t in range(2) for h in range(3)):
                steps = [0, 300, 600]
                if chance.random() < lost:
                    steps = chance.choice([[], [0], [0, 300], [0, 0, 300, 600]])
                for step in steps:
                    both = [[chance.randint(0, levels) / 10 for _ in range(envs)] for _ in range(2)]
                    line = {"dataset": dataset, "algorithm": algorithm, "test_envs": out, "step": step}
                    found.append(line | {"trial": trial, "hparams": hparams, "in": both[0], "out": both[1]})
    return found


def write_lines(folder: Path, every: list[dict[str, Any]]) -> None:
    for line in every:
        args = {"dataset": line["dataset"], "algorithm": line["algorithm"], "test_envs": line["test_envs"]}
        args |= {"trial_seed": line["trial"], "hparams_seed": line["hparams"]}
        place = folder / "-".join(map(str, args.values()))
        place.mkdir(exist_ok=True)
        scores = {f"env{i}_{w}_acc": v for w in ("in", "out") for i, v in enumerate(line[w])}
        with (place / "results.jsonl").open("a") as file:
            file.write(json.dumps({"args": args, "step": line["step"], **scores}) + "\n")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_tables_are_those_of_domainbed(seed: int) -> None:
    every = made_up(seed)
    with tempfile.TemporaryDirectory() as folder:
        write_lines(Path(folder), every)
        found = domainbed.read(folder)[0]
    for rule in selection.RULES:
        for dataset in found.datasets:
            names = domainbed.ENVIRONMENTS[dataset]
            result = selection.results(found, dataset, rule)
            assert result["left_out"] == list(names)
            for row in result["rows"]:
                about = (every, rule, dataset, row["algorithm"])
                for env, name in enumerate(names):
                    check_cell(row["domains"][name], reference.cell(*about, env))
                check_cell(row["by_seed"], reference.overall(*about))
                average = reference.dataset_average(*about, len(names))
                assert row["average"]["mean"] == (None if average is None else pytest.approx(average))


def check_cell(summary: dict[str, Any], expected: tuple[float, float] | None) -> None:
    assert summary["mean"] == (None if expected is None else pytest.approx(expected[0]))
    if summary["se"] is not None:
        assert expected is not None
        assert summary["se"] == pytest.approx(expected[1])
