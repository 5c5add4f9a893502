"""Shifts that were planted are named, without one there is no alarm, and closed forms equal refits."""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import shoal
from shoal.data import sets
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.experiments import diagnose as bench
from shoal.experiments import shift_tests as tests
from shoal.experiments.diagnose import diagnose, holm
from shoal.experiments.diagnosis import Diagnosis
from shoal.gradients import gip, gradient
from shoal.report import diagnose as view

CHEAP: dict[str, Any] = {"steps": 20, "lr": 0.05, "device": "cpu", "budget": None}  # whatever the load


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
    assert json.loads(json.dumps(result))["domains"]


def test_flipped_labels_give_the_domain_a_gap() -> None:
    diagnosis = found("relation")
    assert "held-out" in diagnosis.alarms
    assert "gradients at the start" in diagnosis.alarms
    last = diagnosis.gaps[-1]
    assert last.held_out < 0.2
    assert last.gap > 0.05
    assert last.low < last.gap < last.high
    assert last.gap == pytest.approx(last.in_domain - last.held_out)
    start = diagnosis.gradients["at the start"]
    cosines = np.array(start.matrix)
    assert cosines[0, 1] > 0.5
    assert cosines[0, 2] < 0
    assert np.diag(cosines) == pytest.approx(1)
    assert start.lowest == "last"
    assert "last" in start.conflicting
    assert "last" in start.pair


def test_without_a_shift_there_is_hardly_an_alarm() -> None:
    """Each dataset has a chance of 5 % at most: of six, one may. The benchmark counts hundreds."""
    alarms = 0
    for seed in range(6):
        diagnosis = diagnose(planted(None, seed), linear, seed=seed, **CHEAP)
        alarms += bool(diagnosis.alarms)
    assert alarms <= 1


def test_few_examples_cannot_tell_and_tiny_domains_are_listed() -> None:
    diagnosis = diagnose(planted(None, sizes=(20, 25, 3, 18)), linear, **CHEAP)
    assert diagnosis.too_small == {"d2": 3}
    assert [d.name for d in diagnosis.domains] == ["d0", "d1", "last"]


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
    diagnosis = diagnose(data, linear, max_domains=5, steps=2, device="cpu")
    assert len(diagnosis.domains) == 5
    assert (diagnosis.examples, diagnosis.not_drawn) == (100, 2_995)
    assert any("2,995 more domains" in line for line in view.reading(diagnosis.to_dict()))
    few = bench.draw(planted(None, sizes=(500, 40, 300)), 0, examples=240, most=12)
    assert np.bincount(few.groups).tolist() == [100, 40, 100]


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
    assert (diagnosis.average.held_out > diagnosis.average.in_domain + 0.2) == shifted
    assert view.text(diagnosis.to_dict())
    assert view.figure(diagnosis.to_dict())


# The relation between inputs and labels: when it changes, and when it must not be said to


@cache
def families() -> Any:
    """The calibration's families of data, from the benchmark's file."""
    path = Path(__file__).parents[2] / "benchmarks" / "diagnose.py"
    spec = importlib.util.spec_from_file_location("calibration_of_diagnose", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def relation_of(family: str, seed: int, prevalence: bool = False) -> tests.Relation:
    """Of the first 300 examples or so, with few signs."""
    x, y, groups = getattr(families(), family)(np.random.default_rng([seed, 5]))
    some = np.sort(np.random.default_rng(seed).permutation(len(y))[:300])
    x, y = bench.standardised(x[some]), np.unique(y[some], return_inverse=True)[1]
    targets = tests.one_hot(y) if len(np.unique(y)) < 50 else tests.ranks(y)[:, None]
    columns = [[n] for n in range(x.shape[1])]
    return tests.relation_test(x, targets, groups[some], columns, prevalence=prevalence, seed=seed, flips=199)


@pytest.mark.parametrize(
    "family",
    [
        *("no_shift", "covariate_curved", "covariate_regression", "ten_rings", "labels_of_3"),
    ],
)
def test_an_unchanged_relation_raises_no_alarm(family: str) -> None:
    """Of four datasets one may fall below 0.05 by chance, and none far below."""
    p = sorted(relation_of(family, seed, prevalence=family == "labels_of_3").p for seed in range(4))
    assert p[0] >= 0.01
    assert p[1] > 0.05


def test_label_shift_changes_the_relation_by_an_offset_alone() -> None:
    assert min(relation_of("labels_of_3", seed).p for seed in range(3)) < 0.02


def test_where_domains_do_not_overlap_nothing_is_said_of_the_relation() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1, 2], 80)
    x = bench.standardised(rng.normal(size=(240, 3)) + 20 * groups[:, None])
    found = tests.relation_test(x, tests.one_hot(rng.integers(0, 2, 240) ^ (groups == 1)), groups, [[0]])
    assert not found.tested
    assert found.p == 1
    assert found.overlap < 0.1


@pytest.mark.parametrize("family", ["flip_in_half", "flip_of_a_yes", "flip_in_regression"])
def test_a_planted_flip_is_named(family: str) -> None:
    shifts = bench.find_shifts(families().sample_of(family, 3), 3)
    questions = holm(shifts.questions)
    columns = bench.described_columns(shifts, questions)
    assert "relation" in view.kinds({"questions": [vars(q) for q in questions]})
    first = columns[0]
    assert first.name == "feature 1"
    assert first.changes
    assert first.flips
    assert min(first.correlations.values()) < 0 < max(first.correlations.values())
    assert [c.name for c in columns if c.flips] == ["feature 1"]


@pytest.mark.parametrize("seed", range(3))
def test_predictions_out_of_sample_do_not_know_the_label(seed: int) -> None:
    """Labels that are noise cannot be predicted, by any of the learners."""
    rng = np.random.default_rng(seed)
    x, y = bench.standardised(rng.normal(size=(150, 5))), tests.one_hot(rng.integers(0, 3, 150))
    (guess,) = tests.predicted(x, [y])
    assert ((y - guess) ** 2).sum() > 0.96 * ((y - y.mean(0)) ** 2).sum()


def test_columns_that_differ_in_level_spread_or_missing_values_are_named(tmp_path: Path) -> None:
    rng, rows = np.random.default_rng(0), []
    for n in range(300):
        place = ("oslo", "rome", "lima")[n % 3]
        high = "" if place == "lima" and rng.random() < 0.5 else f"{rng.normal():.3f}"
        values = (
            *(
                f"{rng.normal() + 2 * (place == 'oslo'):.3f}",
                f"{rng.normal() * (1 + 3 * (place == 'rome')):.3f}",
            ),
            *(high, f"{rng.normal():.3f}", rng.choice(["a", "b"]), rng.integers(0, 2), place),
        )
        rows.append(",".join(map(str, values)))
    file = tmp_path / "t.csv"
    file.write_text("level,spread,holes,same,kind,y,place\n" + "\n".join(rows))
    data = sets.load("table", file=str(file), label="y", domain="place")
    data = replace(data, examples=data.examples.unguarded())  # type: ignore[attr-defined]
    shifts = bench.find_shifts(bench.draw(data, 0, 1000, 12), 0)
    columns = {c.name: c for c in bench.described_columns(shifts, holm(shifts.questions))}
    assert {name for name, c in columns.items() if c.differs} == {"level", "spread", "holes"}
    assert columns["level"].how["domain"] == "oslo"
    assert (columns["spread"].how["domain"], columns["spread"].how["measure"]) == ("rome", "sd")
    assert (columns["holes"].how["domain"], columns["holes"].how["part"]) == ("lima", "missing")


def test_a_minority_of_reversed_domains_is_seen_in_the_gradients() -> None:
    """Two of nine domains point the other way: the mean cosine is high, and they are named."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(9), 20)
    sign = np.where(np.isin(groups, [3, 7]), -1.0, 1.0)
    rows = sign[:, None] * np.array([1.0, 0, 0, 0]) + rng.normal(size=(180, 4))
    names = [f"d{n}" for n in range(9)]
    asked, agreement = bench.agreement_question(rows @ rows.T, groups, names, 199, (0, 1))
    assert asked.p == pytest.approx(1 / 200)
    assert agreement.lowest in ("d3", "d7")
    assert {"d3", "d7"} <= set(agreement.conflicting)
    assert agreement.pair_cosine < -0.8
    apart = rng.normal(size=(180, 4)) + np.array([1.0, 0, 0, 0])
    same, _ = bench.agreement_question(apart @ apart.T, groups, names, 199, (0, 1))
    assert same.p > 0.05


# Images, and the time they take


def pictures(count: int = 120, side: int = 24) -> DomainData:
    """Three classes by the place of a bar; three domains by colour."""
    rng = np.random.default_rng(0)
    domains = Domains.from_labels(np.arange(count) % 3)
    y = rng.integers(0, 3, count)
    x = rng.normal(size=(count, 3, side, side)) * 0.2
    x[np.arange(count), np.arange(count) % 3] += 1
    for n in range(count):
        x[n, :, 7 * y[n] : 7 * y[n] + 6] += 1
    return in_memory(x, y, {"train": domains}, 3)


def test_images_are_seen_through_a_fixed_embedding() -> None:
    phases: list[str] = []
    diagnosis = diagnose(
        pictures(), device="cpu", steps=40, tell=lambda phase, done, total: phases.append(phase)
    )
    assert diagnosis.settings["embedded"]
    assert not diagnosis.columns
    assert "inputs" in diagnosis.alarms
    assert diagnosis.average.in_domain > 0.8
    assert list(dict.fromkeys(phases)) == ["testing for shifts", "short training runs", "gradients"]


def test_a_slow_model_is_kept_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return self.inner(x)

    quick = bench.find_shifts(bench.draw(planted(None), 0, 1000, 12), 0)
    monkeypatch.setattr(bench, "find_shifts", lambda *args: quick)
    begun = time.perf_counter()
    diagnosis = diagnose(planted(None), lambda seed: Slow(), steps=400, budget=3, device="cpu")
    assert time.perf_counter() - begun < 20
    assert diagnosis.reduced
    assert any("To meet the time budget" in line for line in view.reading(diagnosis.to_dict()))
    whole = diagnose(planted(None), linear, steps=5, budget=None, device="cpu")
    assert whole.reduced == ()


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


def test_the_held_out_test_agrees_with_refits_for_all_arrangements() -> None:
    rng = np.random.default_rng(3)
    x, targets = rng.normal(size=(7, 2)), rng.normal(size=(7, 1))
    groups = np.array([0, 0, 0, 1, 1, 1, 1])
    kernel = tests.gaussian(tests.squared_distances(x))

    def refitted(g: np.ndarray) -> float:
        error = 0.0
        for d in range(2):
            rest, own = np.flatnonzero(g != d), np.flatnonzero(g == d)
            inner = kernel[np.ix_(rest, rest)] + bench.RIDGE * np.eye(len(rest))
            guess = kernel[np.ix_(own, rest)] @ np.linalg.solve(inner, targets[rest])
            error += float(((targets[own] - guess) ** 2).sum())
        return error / float((targets**2).sum())

    exact = np.mean([refitted(g) >= refitted(groups) - 1e-9 for g in arrangements(groups)])
    made = bench.held_out_question(bench.inverted(kernel), targets, groups, 5_000, seed=0)
    assert made.found == pytest.approx(refitted(groups))
    assert made.p == pytest.approx(exact, abs=0.025)


def test_leave_one_out_predictions_equal_refits() -> None:
    rng = np.random.default_rng(4)
    x, targets = rng.normal(size=(12, 3)), rng.normal(size=(12, 2))
    kernel = tests.gaussian(tests.squared_distances(x))
    predicted = bench.leave_one_out(bench.inverted(kernel)) @ targets
    for i in range(12):
        rest = np.delete(np.arange(12), i)
        inner = kernel[np.ix_(rest, rest)] + bench.RIDGE * np.eye(11)
        assert predicted[i] == pytest.approx(kernel[i, rest] @ np.linalg.solve(inner, targets[rest]))


def test_cosines_of_groups_are_those_of_their_gradients() -> None:
    data = planted("inputs", sizes=(32, 24))
    sample = bench.draw(data, 0, 1000, 5)
    trainer = bench._Trainer(sample, linear, torch.device("cpu"), 8, 1e-3)
    chunks, groups = list(np.arange(56).reshape(7, 8)), np.array([0, 0, 0, 0, 1, 1, 1])
    model = linear(0)
    products = bench.chunk_products(model, trainer, chunks, 0)
    params = list(model.parameters())
    whole = [
        gradient(trainer.loss(model(trainer.x[rows]), trainer.y[rows]), params)
        for rows in (slice(0, 32), slice(32, 56))
    ]
    cosine = bench.cosine_matrix(products, groups)[0, 1]
    assert cosine == pytest.approx(float(gip(whole, normalize=True)), abs=1e-5)
    assert bench.cosine_matrix(np.zeros((7, 7)), groups)[0, 1] == 0


def test_features_of_text_and_images() -> None:
    ids = torch.tensor([[5, 6, 6], [7, 0, 0]])
    bags = bench.features({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])})
    assert bags.shape == (2, 3)  # 5, 6 and 7; the padding does not count
    images = torch.rand(40, 3, 64, 48)
    embedded = bench.features(images)
    assert embedded.shape == (40, 40)  # as many principal components as examples
    assert np.array_equal(embedded, bench.features(images))
    assert bench.features(torch.rand(300, 1, 9, 7)).shape == (300, bench.EMBEDDED)
    assert bench.features([torch.rand(5, 2), {"more": torch.rand(5, 1)}]).shape == (5, 3)
    with pytest.raises(InputError, match="cannot be tested"):
        bench.features("text")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"max_domains": 1}, "at least 2"),
        ({"seed": -1}, "got -1"),
        ({"regroupings": 20}, "at least 179"),
        ({"budget": 0}, "budget"),
        ({"lr": 0.0}, "lr"),
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


def test_a_training_that_diverges_says_so() -> None:
    with pytest.raises(InputError, match="diverged with the learning rate 3e\\+37"):
        diagnose(planted(None), linear, steps=5, lr=3e37, device="cpu")


def test_one_class_alone_gives_no_alarm() -> None:
    data = planted(None, sizes=(40, 40))
    data.examples.y[:] = 1  # type: ignore[attr-defined]
    diagnosis = diagnose(data, linear, **CHEAP)
    assert not {"labels", "relation", "held-out"} & set(diagnosis.alarms)
    assert diagnosis["labels"].p == 1
    assert view.text(diagnosis.to_dict())


# The public function


def frame(rows: int = 150) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    site = np.array(["lima", "oslo", "rome"])[np.arange(rows) % 3]
    age = rng.normal(50, 10, rows) + 15 * (site == "rome")
    return {"age": age, "bmi": rng.normal(25, 3, rows), "ill": (rng.random(rows) < 0.5) * 1, "site": site}


FAST: dict[str, Any] = {"steps": 5, "device": "cpu", "progress": False, "budget": None, "out": None}


def test_the_function_takes_frames_files_arrays_names_and_datasets(tmp_path: Path) -> None:
    content = pandas.DataFrame(frame())
    content.to_csv(tmp_path / "t.csv", index=False)
    columns = {"label": "ill", "domain": "site", **FAST}
    found = shoal.diagnose(content, **columns)
    assert "inputs" in found.alarms
    assert [c.name for c in found.columns if c.differs] == ["age"]
    assert "shoal compare DATA --label ill --domain site --algorithms erm" in " ".join(found.reading())
    file = shoal.diagnose(tmp_path / "t.csv", **columns)
    for one, other in zip(found.questions, file.questions, strict=True):
        assert one.found == pytest.approx(other.found)
        assert one.p == other.p
    assert f"shoal compare {tmp_path / 't.csv'} --label ill --domain site" in " ".join(file.reading())
    x = np.stack([content["age"], content["bmi"]], 1)
    assert "inputs" in shoal.diagnose((x, content["ill"], content["site"]), **FAST).alarms
    assert shoal.diagnose(planted("labels"), model=linear, **FAST).alarms[0] == "labels"
    named = shoal.diagnose("linear", max_domains=3, model="mlp", data_options={"per_domain": 100}, **FAST)
    assert len(named.domains) == 3
    assert named.compare == "shoal compare linear --data-options.per_domain 100 --model mlp"


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (frame(), {"label": "ill"}, "domain: specify the column"),
        (frame(), {"domain": "site"}, "label: specify the column"),
        (frame(), {"label": "ill", "domain": "sit"}, "Did you mean 'site'"),
        ("linear", {"label": "ill"}, "label: is for tables"),
        ("rotated-digit", {}, "Did you mean 'rotated-digits'"),
        ("linear", {"data_options": {"nonsense": 1}}, "nonsense"),
        ("linear", {"device": "gpu"}, "device"),
        ("linear", {"model": "mpl"}, "Did you mean 'mlp'"),
        ("linear", {"max_examples": 0}, "max_examples"),
        ("linear", {"max_domains": 1}, "max_domains"),
    ],
)
def test_wrong_input_of_the_function(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        shoal.diagnose(data, **FAST | options)


def test_a_diagnosis_shows_and_saves_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A domain's name is shown and drawn as it is."""
    out = tmp_path / "out"
    found = shoal.diagnose(planted("labels", name="<script>$x$"), model=linear, **FAST | {"out": out})
    assert capsys.readouterr() == ("", "")
    assert {path.name for path in found.files} == {"diagnosis.json", "diagnosis.png", "diagnosis.svg"}
    assert (out / "diagnosis.png").stat().st_size > 10_000
    assert "<script" not in (out / "diagnosis.svg").read_text(encoding="utf-8").replace("<!-- <script", "")
    saved = json.loads((out / "diagnosis.json").read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(found.to_dict()))
    assert saved["reading"][0] == "Detected: label shift."
    assert "<script>$x$" in str(found)
    assert f"Saved: {out / 'diagnosis.json'}" in str(found)
    page = found._repr_html_()
    assert page.count("<table") == 4
    assert "<script>" not in page
    assert found.to_frame()["p"].tolist() == [q.p for q in found.questions]
    assert found.to_frame("gaps")["name"].tolist() == [g.name for g in found.gaps]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="out"):
        found.save(tmp_path / "file")
