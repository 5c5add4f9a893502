"""The scikit-learn estimators: its conventions, its tools, and the same results as ``shoal.fit``."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import sklearn
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.model_selection import LeaveOneGroupOut, cross_val_predict, cross_validate
from sklearn.utils.estimator_checks import parametrize_with_checks

import shoal
from shoal import models
from shoal.data.batch import DomainData, TensorData
from shoal.data.domains import Domains
from shoal.errors import InputError
from shoal.sklearn import DomainClassifier, DomainRegressor

QUICK: dict[str, Any] = {"steps": 8, "random_state": 0}
Estimator = type[DomainClassifier] | type[DomainRegressor]
BOTH = pytest.mark.parametrize("cls", [DomainClassifier, DomainRegressor])


@parametrize_with_checks([DomainClassifier(steps=40, lr=0.03), DomainRegressor(steps=40, lr=0.03)])
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Fish requires several domains", UserWarning)
        check(estimator)


def table(rows: int = 120) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Three hospitals, and two classes that one column tells apart."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4))
    y = x[:, 0] + 0.1 * rng.normal(size=rows) > 0
    return x, y.astype(int), np.array(["a", "b", "<script>"])[np.arange(rows) % 3]


X, Y, HOSPITAL = table()


def test_the_same_as_shoal_fit_by_hand() -> None:
    found = DomainClassifier("fish", settings={"meta_lr": 0.3}, **QUICK).fit(X, Y, groups=HOSPITAL)
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    x = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float32)
    domains = Domains.from_labels(HOSPITAL)
    net = models.build("tabular", input_shape=(4,), classes=2, seed=seed)
    data = DomainData(TensorData(x, torch.tensor(Y)), {"train": domains}, 2, (4,), "")
    by_hand = shoal.fit("fish", net, data, steps=8, settings={"meta_lr": 0.3}, seed=seed, progress=False)
    with torch.no_grad():
        expected = by_hand.model(x).softmax(1).numpy()
    np.testing.assert_allclose(found.predict_proba(X), expected, atol=1e-5)
    for mine, theirs in zip(found.model_.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@BOTH
def test_random_state_decides_everything_and_the_world_is_left_alone(cls: Estimator) -> None:
    np.random.seed(3)
    torch.manual_seed(3)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[union-attr]
    model = cls("fish", validation=0.2, **QUICK).fit(X, Y, HOSPITAL)
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    torch.manual_seed(99)
    again = clone(model).fit(X, Y, HOSPITAL)
    assert np.array_equal(model.predict(X), again.predict(X))
    other = clone(model).set_params(random_state=1).fit(X, Y, HOSPITAL)
    assert not np.array_equal(model.history_[0]["loss"], other.history_[0]["loss"])


@pytest.mark.parametrize("routing", [False, True], ids=["without routing", "with routing"])
def test_leave_one_group_out(routing: bool) -> None:
    """Every fold trains on the two hospitals that are left."""
    cls = DomainClassifier
    params: dict[str, Any] = {"params": {"groups": HOSPITAL}} | ({} if routing else {"groups": HOSPITAL})
    with sklearn.config_context(enable_metadata_routing=routing):
        found = cross_validate(
            cls("fish", **QUICK), X, Y, cv=LeaveOneGroupOut(), return_estimator=True, **params
        )
        predicted = cross_val_predict(cls("fish", **QUICK), X, Y, cv=LeaveOneGroupOut(), **params)
    assert [e.domains_ for e in found["estimator"]] == [["a", "b"], ["<script>", "b"], ["<script>", "a"]]
    assert {e.algorithm_ for e in found["estimator"]} == {"Fish"}
    last = HOSPITAL == "b"
    assert np.array_equal(predicted[last], found["estimator"][2].predict(X[last]))


@pytest.mark.parametrize("groups", [None, ["rome"] * 120], ids=["none", "one"])
def test_without_domains_to_compare_it_is_erm(groups: Any) -> None:
    said = "no groups" if groups is None else r"one group only \('rome'\)"
    with pytest.warns(UserWarning, match=f"^Fish requires several domains.*{said}; it trains as ERM.$"):
        model = DomainClassifier("fish", settings={"meta_lr": 0.1}, **QUICK).fit(X, Y, groups)
    assert model.algorithm_ == "ERM"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        erm = DomainClassifier("erm", **QUICK).fit(X, Y, groups)
        assert DomainClassifier("sam", **QUICK).fit(X, Y, groups).algorithm_ == "SAM"
    assert np.array_equal(model.predict_proba(X), erm.predict_proba(X))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": "fisch"}, "unknown algorithm 'fisch'.*'fish'"),
        ({"settings": {"metalr": 1}}, "unknown setting of Fish: 'metalr'.*'meta_lr'"),
        ({"model": torch.nn.Linear(4, 2)}, "model must be a name, or a function.*got Linear"),
        ({"lr": 0.0}, "lr must be above 0, got 0.0"),
        ({"options": {"weight_decy": 0}}, "unknown option of fit: .weight_decy."),
        ({"options": {"patience": 2}}, "patience"),
    ],
)
def test_wrong_parameters_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DomainClassifier(**given).fit(X, Y, HOSPITAL)


def test_wrong_data_are_named() -> None:
    model = DomainClassifier(**QUICK)
    with pytest.raises(TypeError, match="Sparse data was passed for X, but dense data is required"):
        model.fit(csr_matrix(X), Y, HOSPITAL)
    with pytest.raises(ValueError, match="Input X contains NaN"):
        model.fit(np.where(X > 2, np.nan, X), Y, HOSPITAL)
    with pytest.raises(InputError, match="domain label at position 1 is None"):
        model.fit(X, Y, ["a", None, *HOSPITAL[2:]])
    with pytest.raises(InputError, match=r"y has one class only, .*'ill'"):
        model.fit(X, ["ill"] * 120, HOSPITAL)
    with pytest.raises(InputError, match="supports classification and ordinal, and this task is regression"):
        DomainRegressor("cdann", **QUICK).fit(X, X[:, 0], HOSPITAL)
    for groups in ("hospital", X, HOSPITAL[:100]):
        with pytest.raises(ValueError):
            model.fit(X, Y, groups)
