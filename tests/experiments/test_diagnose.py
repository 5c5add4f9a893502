"""Shifts that were planted are named, without one nothing is significant, and entities stay together."""

from __future__ import annotations

import itertools
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score

import shoal
from shoal.data import from_table
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.experiments import diagnose as module
from shoal.experiments.diagnose import diagnose
from shoal.report import diagnose as view


def in_memory(x: np.ndarray, y: np.ndarray, domains: Domains, classes: int | None) -> DomainData:
    labels = torch.as_tensor(y, dtype=torch.float32 if classes is None else torch.int64)
    examples = TensorData(torch.as_tensor(x, dtype=torch.float32), labels)
    return DomainData(examples, {"train": domains}, classes, x.shape[1:], "mlp")


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
    return in_memory(x, y, domains, 2)


@cache
def found(kind: str | None) -> dict[str, Any]:
    return diagnose(planted(kind))


@pytest.mark.parametrize("kind", ["labels", "inputs", "relation"])
def test_a_planted_shift_is_named(kind: str) -> None:
    result = found(kind)
    assert view.kinds(result) == [kind]
    assert json.loads(json.dumps(result)) == result


def test_without_a_shift_nothing_is_significant_and_results_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    one = diagnose(planted(None))
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert {**one, "seconds": 0} == {**found(None), "seconds": 0}
    assert one["significant"] == []
    assert one["average"]["low"] < 0 < one["average"]["high"]
    assert any("use ERM" in line for line in view.reading(one))


def patients(seed: int) -> dict[str, Any]:
    """Four hospitals of eight patients with eight rows each; no shift."""
    rng, patient = np.random.default_rng(seed), np.repeat(np.arange(32), 8)
    table = {f"x{n}": rng.normal(size=32)[patient] + 0.2 * rng.normal(size=256) for n in range(4)}
    ill = np.where(rng.random(32) < 0.5, "yes", "no")[patient]
    return {**table, "ill": ill, "hospital": patient // 8, "patient": [f"p{n}" for n in patient]}


def test_patients_with_eight_rows_are_no_shift() -> None:
    """Permuting rows would call every one of these tables shifted."""
    for seed in range(3):
        with warnings.catch_warnings(action="ignore"):
            data = from_table(patients(seed), label="ill", domain="hospital", group="patient")
        result = diagnose(data)
        assert result["significant"] == [], seed
        assert (result["entities"], result["domains"][0]["entities"]) == (32, 8)
    assert "32 entities" in " ".join(view.reading(result))
    assert "entities" in view.tables(result)[0].text()
    naive = from_table(patients(0), label="ill", domain="hospital", drop=["patient"])
    assert diagnose(naive)["significant"]


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

    orders = set(itertools.permutations(groups.tolist())) - {tuple(groups.tolist())}
    every = np.array([groups, *map(list, orders)])
    made = module.label_test(module.Sample(np.zeros((7, 1)), codes, 3, groups, np.arange(7)), every)
    assert made.statistic == pytest.approx(statistic(groups))
    assert made.p == pytest.approx(np.mean([statistic(g) >= statistic(groups) - 1e-9 for g in every]))


def test_the_classifier_is_fitted_anew_for_every_permutation() -> None:
    """All permutations at once are the same as one at a time, with scikit-learn's own classifier."""
    from sklearn.linear_model import Ridge

    rng, domains = np.random.default_rng(0), np.repeat([0, 1, 2], [20, 30, 40])
    sample = module.Sample(rng.normal(size=(90, 4)) + domains[:, None], domains, 3, domains, np.arange(90))
    groupings, folds = module.permuted(domains, sample.units, (0,)), sample.folds(0)
    x = module.smooth(sample.x)
    made = module.domain_test("inputs", x, groupings, folds)
    naive = []
    for groups in groupings[:5]:
        guess = np.empty(90, int)
        for train, test in folds:
            member = (groups[:, None] == np.arange(3)) / np.bincount(groups)
            guess[test] = Ridge(1.0).fit(x[train], member[train]).predict(x[test]).argmax(1)
        naive.append(balanced_accuracy_score(groups, guess))
    assert made.statistic == pytest.approx(naive[0])
    assert made.p == 1 / 200
    assert np.mean(naive[1:]) < 0.5


def test_where_domains_do_not_overlap_nothing_is_said_of_the_relation() -> None:
    rng, domains = np.random.default_rng(0), np.repeat([0, 1, 2], 80)
    y = rng.integers(0, 2, 240) ^ (domains == 1)
    x = rng.normal(size=(240, 3)) + 20 * domains[:, None]
    result = diagnose(in_memory(x, y, Domains.from_labels(domains), 2))
    assert next(test["p"] for test in result["tests"] if test["name"] == "relation") == 1
    assert result["effects"]["overlap"] < 0.1
    assert "inconclusive whether P(label | inputs) changes" in " ".join(view.reading(result))


def test_the_gradients_are_those_of_softmax_regression() -> None:
    """Against autograd: the cosines between the domains' gradients at zero weights."""
    sample, _ = module.draw(planted("inputs"), 0, 300, 12)
    _, agreement = module.gradient_agreement(sample, 0)
    x = torch.as_tensor(np.column_stack([np.ones(len(sample.x)), module.smooth(sample.x)]))
    weight, y = torch.zeros(x.shape[1], 2, dtype=torch.float64), torch.as_tensor(sample.codes)
    weight.requires_grad_()
    each = []
    for d in range(3):
        own = torch.as_tensor(sample.domains == d)
        loss = torch.nn.functional.cross_entropy(x[own] @ weight, y[own])
        each.append(torch.autograd.grad(loss, weight)[0].flatten())
    gradients = torch.stack(each)
    gradients /= gradients.norm(dim=1, keepdim=True)
    assert np.array(agreement["matrix"]) == pytest.approx((gradients @ gradients.T).numpy(), abs=1e-5)


def test_regression_is_in_units_of_r2() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 6))
    y = 50 + 10 * (x[:, 0] + 0.3 * rng.normal(size=300))
    y[200:] += 15
    result = diagnose(in_memory(x, y, Domains.from_sizes({"a": 100, "b": 100, "c": 100}), None))
    assert (result["task"], "labels" in result["significant"]) == ("regression", True)
    assert result["domains"][0]["labels"]["mean"] == pytest.approx(y[:100].mean(), abs=1e-3)
    assert result["average"]["gap"] > 0.2
    assert "R², in training" in view.text(result)


def test_without_a_model_that_has_learned_there_is_no_gap() -> None:
    """Labels that do not depend on the inputs: a constant prediction is as good, so nothing is concluded."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 4)), (rng.random(200) < 0.8).astype(int)
    result = diagnose(in_memory(x, y, Domains.from_sizes({"a": 100, "b": 100}), 2))
    assert (result["gaps"], result["average"], result["model"]["learned"]) == ([], None, False)
    assert result["model"]["constant"] == pytest.approx(y.mean())
    assert "No generalization gap is reported" in " ".join(view.reading(result))
    assert not any("use ERM" in line for line in view.reading(result))


def test_columns_that_differ_in_level_spread_or_missing_values_are_named() -> None:
    rng = np.random.default_rng(1)
    place = np.tile(["oslo", "rome", "lima"], 100)
    holes = np.where((place == "lima") & (rng.random(300) < 0.5), np.nan, rng.normal(size=300))
    table = {
        "level": rng.normal(size=300) + 2 * (place == "oslo"),
        "spread": rng.normal(size=300) * (1 + 3 * (place == "rome")),
        "holes": holes,
        "same": rng.normal(size=300),
        "kind": rng.choice(["a", "b"], 300),
    }
    result = diagnose(
        from_table({**table, "y": rng.integers(0, 2, 300), "place": place}, label="y", domain="place")
    )
    columns = {c["name"]: c for c in result["columns"]}
    assert {name for name, c in columns.items() if c["differs"]} == {"level", "spread", "holes"}
    most = [columns[name]["most_different"]["domain"] for name in ("level", "holes")]
    assert most == ["oslo", "lima"]


def test_sampling_small_domains_and_wrong_data() -> None:
    rng, domains = np.random.default_rng(0), Domains.from_labels(np.arange(60_000) % 3_000)
    data = in_memory(rng.normal(size=(60_000, 6)), rng.integers(0, 2, 60_000), domains, 2)
    result = diagnose(data, max_domains=5)
    assert (len(result["domains"]), result["examples"], result["not_drawn"]) == (5, 100, 2_995)
    assert any("2,995 more domains" in line for line in view.reading(result))
    few = diagnose(planted(None, sizes=(500, 40, 300, 3)), examples=240)
    assert [d["taken"] for d in few["domains"]] == [100, 40, 100]
    assert few["too_small"] == {"last": 3}
    for sizes, message in (((40,), "one domain"), ((3, 40), "at least 16 examples")):
        with pytest.raises(InputError, match=message):
            diagnose(planted(None, sizes=sizes))
    with pytest.raises(InputError, match="not finite"):
        module.features(torch.tensor([[1.0], [float("nan")]]))


# The public function


FAST: dict[str, Any] = {"progress": False, "out": None}


def frame() -> pandas.DataFrame:
    rng, site = np.random.default_rng(0), np.array(["oslo", "lima"])[np.arange(120) % 2]
    age, bmi = rng.normal(50, 10, 120) + 15 * (site == "lima"), rng.normal(25, 3, 120)
    sex, ill = rng.choice(["m", "f"], 120), rng.integers(0, 2, 120)
    return pandas.DataFrame({"age": age, "bmi": bmi, "sex": sex, "ill": ill, "site": site})


def test_the_function_takes_frames_files_arrays_names_and_datasets(tmp_path: Path) -> None:
    content, columns = frame(), {"label": "ill", "domain": "site", **FAST}
    content.to_csv(tmp_path / "t.csv", index=False)
    result = shoal.diagnose(content, **columns)
    assert [c["name"] for c in result.result["columns"] if c["differs"]] == ["age"]
    assert "shoal compare DATA --label ill --domain site" in " ".join(result.reading())
    file = shoal.diagnose(tmp_path / "t.csv", **columns)
    assert file.to_frame()["p"].tolist() == result.to_frame()["p"].tolist()
    assert f"shoal compare {tmp_path / 't.csv'} --label ill --domain site" in " ".join(file.reading())
    x = np.stack([content["age"], content["bmi"]], 1)
    assert "inputs" in shoal.diagnose((x, content["ill"], content["site"]), **FAST).significant
    named = shoal.diagnose("linear", max_domains=3, data_options={"per_domain": 100}, **FAST)
    assert len(named.result["domains"]) == 3
    assert named.compare == "shoal compare linear --data-options.per_domain 100"


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (frame(), {"label": "ill"}, "domain=COLUMN"),
        (frame(), {"label": "ill", "domain": "sit"}, "Did you mean 'site'"),
        (frame(), {"label": "ill", "domain": "site", "drop": 0.5}, "no column '0.5'"),
        ("linear", {"label": "ill"}, "label: is for tables"),
    ],
)
def test_wrong_input_of_the_function(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        shoal.diagnose(data, **FAST | options)


def test_a_diagnosis_shows_and_saves_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A domain's name is shown and drawn as it is."""
    out, data = tmp_path / "out", planted("labels", name="<script>$x$", sizes=(60, 60, 60))
    result = shoal.diagnose(data, **FAST | {"out": out})
    assert capsys.readouterr() == ("", "")
    assert {path.name for path in result.files} == {"diagnosis.json", "report.html"}
    assert "&lt;script&gt;$x$" in (out / "report.html").read_text(encoding="utf-8")
    saved = json.loads((out / "diagnosis.json").read_text(encoding="utf-8"))
    assert saved == json.loads(json.dumps(result.to_dict()))
    assert saved["reading"][0] == "Detected: label shift."
    assert "<script>$x$" in str(result)
    assert "<script>" not in result._repr_html_()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="out"):
        shoal.diagnose(data, **FAST | {"out": tmp_path / "file"})
