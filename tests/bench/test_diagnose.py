"""Shifts that were planted are named, without one there is no alarm, and closed forms equal refits."""

from __future__ import annotations

import itertools
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.bench import diagnose as bench
from shoal.bench.diagnose import Diagnosis, Question, diagnose, holm
from shoal.cli import main
from shoal.data import sets
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.gradients import gip, gradient
from shoal.report import diagnose as view
from shoal.report import figures

CHEAP: dict[str, Any] = {"steps": 20, "lr": 0.05, "device": "cpu"}


def linear(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(6, 2)


def planted(
    kind: str | None, seed: int = 0, sizes: tuple[int, ...] = (130, 120, 110), name: str = "last"
) -> DomainData:
    """Two overlapping classes in six dimensions; of the last domain something is changed."""
    rng = np.random.default_rng(seed)
    names = [*(f"d{n}" for n in range(len(sizes) - 1)), name]
    domains = Domains.from_sizes(dict(zip(names, sizes, strict=True)))
    last = domains.indices_of(len(sizes) - 1)
    y = rng.integers(0, 2, sum(sizes))
    if kind == "labels":
        y[last] = rng.random(len(last)) < 0.9
    x = rng.normal(size=(len(y), 6))
    x[:, :2] += 1.2 * (2 * y - 1)[:, None]
    if kind == "inputs":
        x[last, 3:] += 1.5
    if kind == "relation":
        y[last] = 1 - y[last]
    return in_memory(x, y, {"train": domains}, 2)


def in_memory(x: np.ndarray, y: np.ndarray, splits: dict[str, Domains], classes: int | None) -> DomainData:
    labels = torch.as_tensor(y, dtype=torch.float32 if classes is None else torch.int64)
    examples = TensorData(torch.as_tensor(x, dtype=torch.float32), labels)
    return DomainData(examples, splits, classes, x.shape[1:], "mlp")


@cache
def found(kind: str | None) -> Diagnosis:
    return diagnose(planted(kind), linear, **CHEAP)


@pytest.mark.parametrize("kind", ["labels", "inputs", "relation"])
def test_a_planted_shift_is_named(kind: str) -> None:
    result = found(kind).to_dict()
    assert view.kinds(result) == [kind]
    lines = view.reading(result, "shoal compare mine")
    assert lines[0] == f"There is a shift: {view.KINDS[kind]}."
    advice = next(line for line in lines if line.startswith("Try:"))
    assert "shoal compare mine --algorithms erm" in advice
    assert ("reweighted" in advice) == (kind == "labels")


def test_flipped_labels_cost_the_domain_that_has_them() -> None:
    diagnosis = found("relation")
    assert "unseen" in diagnosis.alarms
    assert "gradients at the start" in diagnosis.alarms
    last = diagnosis.prices[-1]
    assert last.unseen < 0.2
    assert last.price > 0.05
    assert last.low < last.price < last.high
    assert last.price == pytest.approx(last.seen - last.unseen)
    cosines = np.array(diagnosis.cosines["at the start"])
    assert cosines[0, 1] > 0.5
    assert cosines[0, 2] < 0
    assert np.diag(cosines) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
def test_without_a_shift_there_is_no_alarm(seed: int) -> None:
    diagnosis = diagnose(planted(None, seed), linear, seed=seed, **CHEAP)
    assert diagnosis.alarms == ()
    lines = view.reading(diagnosis.to_dict())
    assert lines[0].startswith("No shift was seen")
    assert any(line.startswith("Try: plain ERM") for line in lines)


def test_few_examples_cannot_tell_and_tiny_domains_are_listed() -> None:
    diagnosis = diagnose(planted(None, sizes=(20, 25, 3, 18)), linear, **CHEAP)
    assert diagnosis.too_small == {"d2": 3}
    assert [d.name for d in diagnosis.domains] == ["d0", "d1", "last"]
    lines = view.reading(diagnosis.to_dict())
    assert lines[0].startswith("Cannot tell")
    assert any("Too small to judge" in line and "d2 (3)" in line for line in lines)


def test_same_seed_same_diagnosis_and_the_callers_generators_are_left_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one = diagnose(planted(None), linear, **CHEAP).to_dict()
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    two = found(None).to_dict()
    assert {**one, "seconds": 0} == {**two, "seconds": 0}


def test_all_splits_are_pooled_by_domain() -> None:
    whole = planted("labels")
    every = whole.splits["train"]
    rest = {n: every.indices_of(d)[40:] for d, n in enumerate(every.names)}
    first = {n: every.indices_of(d)[:40] for d, n in enumerate(every.names)}
    splits = {"train": Domains.from_indices(rest), "validation": Domains.from_indices(first)}
    parted = DomainData(whole.examples, splits, 2, (6,), "mlp")
    assert diagnose(parted, linear, **CHEAP).questions == found("labels").questions


def test_many_domains_and_examples_are_sampled() -> None:
    rng = np.random.default_rng(0)
    domains = Domains.from_labels(np.arange(60_000) % 3_000)
    data = in_memory(rng.normal(size=(60_000, 6)), rng.integers(0, 2, 60_000), {"train": domains}, 2)
    diagnosis = diagnose(data, linear, domains=5, steps=2, device="cpu")
    assert len(diagnosis.domains) == 5
    assert (diagnosis.examples, diagnosis.left_aside) == (100, 2_995)
    assert any("2,995 more domains" in line for line in view.reading(diagnosis.to_dict()))
    few = bench.draw(planted(None, sizes=(500, 40, 300)), 0, examples=240, most=12)
    assert np.bincount(few.groups).tolist() == [100, 40, 100]


def test_an_example_in_two_domains_counts_in_the_smaller() -> None:
    data = planted(None, sizes=(60, 60))
    splits = {"train": Domains.from_indices({"all": np.arange(120), "some": np.arange(40)})}
    sample = bench.draw(DomainData(data.examples, splits, 2, (6,), "mlp"), 0, 1000, 5)
    assert dict(zip(sample.names, sample.sizes, strict=True)) == {"all": 80, "some": 40}
    assert sample.overlapping == 40


@pytest.mark.parametrize("shifted", [False, True])
def test_regression(shifted: bool) -> None:
    rng = np.random.default_rng(1)
    domains = Domains.from_sizes({"a": 100, "b": 100, "c": 100})
    x = rng.normal(size=(300, 6))
    y = 50 + 10 * (x[:, 0] + 0.3 * rng.normal(size=300))
    if shifted:
        y[200:] += 15
    data = in_memory(x, y, {"train": domains}, None)

    def make(seed: int) -> nn.Module:
        return nn.Sequential(linear(seed), nn.Linear(2, 1), nn.Flatten(0))

    diagnosis = diagnose(data, make, steps=60, lr=0.03, device="cpu")
    assert diagnosis.task == "regression"
    assert ("labels" in diagnosis.alarms) == shifted
    assert bool(diagnosis.alarms) == shifted
    assert diagnosis.domains[0].labels["mean"] == pytest.approx(y[:100].mean(), abs=1e-3)
    assert (diagnosis.average.unseen > diagnosis.average.seen + 0.2) == shifted
    assert view.text(diagnosis.to_dict())
    assert view.figure(diagnosis.to_dict())


def arrangements(groups: np.ndarray) -> list[np.ndarray]:
    return [np.array(order) for order in set(itertools.permutations(groups.tolist()))]


def test_the_label_test_agrees_with_all_arrangements() -> None:
    """Brute force: every way to deal seven examples, each as likely."""
    codes, groups = np.array([0, 0, 0, 1, 1, 1, 2]), np.array([0, 0, 0, 0, 1, 1, 1])

    def statistic(g: np.ndarray) -> float:
        total = 0.0
        for d, c in itertools.product(range(2), range(3)):
            joint = np.mean((g == d) & (codes == c))
            if joint > 0:
                total += joint * np.log(joint / (np.mean(g == d) * np.mean(codes == c)))
        return total

    every = [statistic(g) for g in arrangements(groups)]
    exact = np.mean([t >= statistic(groups) - 1e-9 for t in every])
    made = bench.label_question(codes, groups, 20_000, seed=0)
    assert made.found == pytest.approx(statistic(groups))
    assert made.p == pytest.approx(exact, abs=0.012)  # more than three standard errors
    assert made.chance == pytest.approx(np.mean(every), abs=0.01)


def test_the_unseen_test_agrees_with_refits_for_all_arrangements() -> None:
    rng = np.random.default_rng(3)
    x, targets = rng.normal(size=(7, 2)), rng.normal(size=(7, 1))
    groups = np.array([0, 0, 0, 1, 1, 1, 1])
    kernel = bench.likeness(x)

    def refitted(g: np.ndarray) -> float:
        error = 0.0
        for d in range(2):
            rest, own = np.flatnonzero(g != d), np.flatnonzero(g == d)
            inner = kernel[np.ix_(rest, rest)] + bench.RIDGE * np.eye(len(rest))
            guess = kernel[np.ix_(own, rest)] @ np.linalg.solve(inner, targets[rest])
            error += float(((targets[own] - guess) ** 2).sum())
        return error / float((targets**2).sum())

    exact = np.mean([refitted(g) >= refitted(groups) - 1e-9 for g in arrangements(groups)])
    made = bench.unseen_question(bench.inverted(kernel), targets, groups, 5_000, seed=0)
    assert made.found == pytest.approx(refitted(groups))
    assert made.p == pytest.approx(exact, abs=0.025)


def test_predictions_for_one_left_out_equal_refits() -> None:
    rng = np.random.default_rng(4)
    kernel, targets = bench.likeness(rng.normal(size=(12, 3))), rng.normal(size=(12, 2))
    predicted = bench.left_out_one(bench.inverted(kernel)) @ targets
    for i in range(12):
        rest = np.delete(np.arange(12), i)
        inner = kernel[np.ix_(rest, rest)] + bench.RIDGE * np.eye(11)
        assert predicted[i] == pytest.approx(kernel[i, rest] @ np.linalg.solve(inner, targets[rest]))


def test_shuffles_keep_sizes_and_strata() -> None:
    groups, codes = np.array([0, 0, 1, 1, 1, 2, 2, 2]), np.array([0, 1, 0, 1, 1, 0, 1, 1])
    table = bench.counts(codes, groups)
    made = list(bench.shuffles(groups, 4_000, (0, 1), within=codes))
    assert all(np.array_equal(bench.counts(codes, g), table) for g in made)
    assert len({tuple(g.tolist()) for g in made}) == 180  # 3! times 5! / (1! 2! 2!): each there can be


def test_cosines_of_groups_are_those_of_their_gradients() -> None:
    data = planted("inputs", sizes=(32, 24))
    sample = bench.draw(data, 0, 1000, 5)
    trainer = bench._Trainer(sample, linear, torch.device("cpu"), 1, 8, 1e-3)
    chunks, groups = list(np.arange(56).reshape(7, 8)), np.array([0, 0, 0, 0, 1, 1, 1])
    model = linear(0)
    products = bench.chunk_products(model, trainer, chunks, 0)
    params = list(model.parameters())
    whole = [
        gradient(trainer.loss(model(trainer.x[rows]), trainer.y[rows]), params)
        for rows in (slice(0, 32), slice(32, 56))
    ]
    assert bench.mean_cosine(products, groups) == pytest.approx(float(gip(whole, normalize=True)), abs=1e-5)
    assert bench.mean_cosine(np.zeros((7, 7)), groups) == 0


def test_sketches_keep_inner_products(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = bench.draw(planted("relation", sizes=(64, 64)), 0, 1000, 5)

    def wide(seed: int) -> nn.Module:
        return nn.Sequential(linear(seed), nn.Linear(2, 3000), nn.Linear(3000, 2))

    trainer = bench._Trainer(sample, wide, torch.device("cpu"), 1, 8, 1e-3)
    chunks, groups, model = list(np.arange(128).reshape(16, 8)), np.repeat([0, 1], 8), wide(0)
    exact = bench.mean_cosine(bench.chunk_products(model, trainer, chunks, 0), groups)
    monkeypatch.setattr(bench, "SKETCH", 4096)
    assert bench.mean_cosine(bench.chunk_products(model, trainer, chunks, 0), groups) == pytest.approx(
        exact, abs=0.08
    )


def test_holm() -> None:
    made = [Question(str(p), "", 0, 0, 0, p) for p in (0.04, 0.005, 0.02)]
    adjusted = {q.name: q.adjusted for q in holm(made)}
    assert adjusted == pytest.approx({"0.005": 0.015, "0.02": 0.04, "0.04": 0.04})
    assert all(q.alarm for q in holm(made))
    assert [q.alarm for q in holm([Question("a", "", 0, 0, 0, 0.03), Question("b", "", 0, 0, 0, 0.9)])] == [
        False,
        False,
    ]


def test_effects_of_labels() -> None:
    apart = bench.label_effects(np.repeat([0, 1], 50), np.repeat([0, 1], 50))
    assert apart["cramers_v"] == pytest.approx(1, abs=0.02)
    assert apart["total_variation"] == pytest.approx(0.5)
    alike = bench.label_effects(np.tile([0, 1], 50), np.repeat([0, 1], 50))
    assert alike == {"cramers_v": 0, "total_variation": 0}
    assert bench.label_effects(np.zeros(10, int), np.repeat([0, 1], 5))["cramers_v"] == 0


def test_the_probe_sees_texts_and_large_images() -> None:
    ids = torch.tensor([[5, 6, 6], [7, 0, 0]])
    bags = bench.features({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])})
    assert bags.shape == (2, 3)  # 5, 6 and 7; the padding does not count
    assert bench.features(torch.rand(4, 3, 64, 48)).shape == (4, 3 * 16 * 16)
    assert bench.features([torch.rand(5, 2), {"more": torch.rand(5, 1)}]).shape == (5, 3)
    with pytest.raises(InputError, match="cannot look at them"):
        bench.features("text")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"domains": 1}, "at least 2"),
        ({"seed": -1}, "seed=-1"),
        ({"regroupings": 20}, "fewer than 139"),
        ({"lr": 0.0}, "lr=0.0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        diagnose(planted(None), linear, **{**CHEAP, **options})


def test_wrong_data() -> None:
    one = planted(None, sizes=(50,))
    with pytest.raises(InputError, match="one domain, 'last'"):
        diagnose(one, linear, **CHEAP)
    with pytest.raises(InputError, match="at least 16"):
        diagnose(planted(None, sizes=(50, 3, 4)), linear, **CHEAP)
    for sizes, said in {(50, 3, 4): "of 3 domains 1 has", (5, 3): "of 2 domains none has"}.items():
        with pytest.raises(InputError, match=f"{said} at least 16 examples of its own; a diagnosis"):
            diagnose(planted(None, sizes=sizes), linear, **CHEAP)
    broken = planted(None)
    broken.examples.x[7, 2] = float("nan")  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="not finite"):
        diagnose(broken, linear, **CHEAP)


def test_a_matrix_of_no_domains_is_an_empty_picture() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        empty = figures.matrix([], [], "none")
        assert "<svg" in figures.svg(empty, "none", "a")
    assert not empty.axes[0].collections
    assert len(figures.matrix(["a"], [[1.0]]).axes[0].collections) == 1


def test_a_training_that_diverges_says_so() -> None:
    with pytest.raises(InputError, match="diverged at the learning rate 3e\\+37"):
        diagnose(planted(None), linear, steps=5, lr=3e37, device="cpu")


def test_one_class_alone_gives_no_alarm() -> None:
    data = planted(None, sizes=(40, 40))
    data.examples.y[:] = 1  # type: ignore[attr-defined]
    diagnosis = diagnose(data, linear, **CHEAP)
    assert not {"labels", "relation", "unseen"} & set(diagnosis.alarms)
    assert diagnosis["labels"].p == 1
    assert view.text(diagnosis.to_dict())


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A domain's name is shown and drawn as it is."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sets, "load", lambda name, **options: planted("labels", name="<script>$x$"))
    out = tmp_path / "out"
    command = ["diagnose", "linear", "--steps", "5", "--out", str(out), "--device", "cpu"]
    assert main([*command, "--json"]) == 0
    shown = capsys.readouterr()
    content = json.loads(shown.out)
    assert "short trainings" in shown.err
    assert json.loads((out / "diagnosis.json").read_text(encoding="utf-8")) == content
    assert "labels" in content["alarms"]
    assert content["reading"][0] == "There is a shift: of labels."
    assert content["domains"][-1]["name"] == "<script>$x$"
    assert (out / "diagnosis.png").stat().st_size > 10_000
    picture = (out / "diagnosis.svg").read_text(encoding="utf-8")
    assert "<script" not in picture.replace("<!-- <script", "")
    assert main([*command, "--data", "per_domain=3"]) == 0
    text = capsys.readouterr().out
    assert "<script>$x$" in text
    assert "There is a shift: of labels." in text
    assert "shoal compare linear --data per_domain=3 --device" not in text
    assert "--data per_domain=3" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rotated-digit"], "Did you mean 'rotated-digits'"),
        (["linear", "--data", "nonsense=1"], "nonsense"),
        (["linear", "--device", "gpu"], "device='gpu'"),
    ],
)
def test_wrong_input_ends_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
