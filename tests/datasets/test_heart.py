"""Heart disease of four hospitals: what the real files give, and what is said of wrong ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.data.batch import DomainData
from shoal.datasets import heart, load
from shoal.errors import InputError


def real(folder: str) -> Path:
    root = os.environ.get("SHOAL_DATA")
    if not root:
        pytest.skip(f"SHOAL_DATA is unset: no real files of {folder}")
    if not Path(root, folder).is_dir():
        pytest.skip(f"no real files at {Path(root, folder)}")
    return Path(root, folder)


def rows(data: DomainData, *splits: str, domain: str) -> Tensor:
    """The examples of a domain in these splits, in order."""
    chosen = [data.splits[s].indices_of(data.splits[s].number(domain)) for s in splits]
    return torch.from_numpy(np.sort(np.concatenate(chosen))).long()


ILL = {"cleveland": (139, 303), "hungarian": (106, 294), "switzerland": (115, 123), "va": (149, 200)}
INDICATOR = {name: 6 + i for i, name in enumerate(heart.SOMETIMES_MISSING)}


def lines(folder: Path, hospital: str) -> list[str]:
    return (folder / f"processed.{hospital}.data").read_text().splitlines()


def copied(folder: Path, to: Path) -> Path:
    for hospital in heart.DOMAINS:
        shutil.copyfile(folder / f"processed.{hospital}.data", to / f"processed.{hospital}.data")
    return to


def examples_of(data: DomainData, split: str) -> list[tuple[bytes, bytes]]:
    """The features and labels of each domain of a split, bit for bit."""
    found = []
    for d in range(len(data.splits[split])):
        x, y = data.examples.batch(torch.from_numpy(data.splits[split].indices_of(d)).long())  # type: ignore[attr-defined]
        found.append((x.numpy().tobytes(), y.numpy().tobytes()))
    return found


@pytest.mark.parametrize("hospital", heart.DOMAINS)
def test_hospitals_have_the_published_patients(hospital: str) -> None:
    real("heart_disease")
    data = load("heart", held_out=hospital)
    x, y = data.examples.batch(rows(data, "test", domain=hospital))  # type: ignore[attr-defined]
    ill, patients = ILL[hospital]
    assert (int(y.sum()), len(y)) == (ill, patients)
    assert data.notes["test"] == f"{ill} of its {patients} patients are ill"
    assert x.isfinite().all()
    assert data.input_shape == (30,)
    assert len(data.examples) == 920  # type: ignore[arg-type]
    for name in set(heart.DOMAINS) - {hospital}:
        held, mine = len(rows(data, "validation", domain=name)), len(rows(data, "train", domain=name))
        assert held + mine == ILL[name][1]
        assert abs(held - 0.2 * ILL[name][1]) <= 1


@pytest.mark.parametrize("hospital", heart.DOMAINS)
def test_features_say_what_the_file_says(hospital: str) -> None:
    """Read back naively: numbers by undoing the scale, categories by the column that is 1."""
    folder = real("heart_disease")
    data = load("heart", held_out=hospital)
    examples = data.examples
    x = examples.batch(rows(data, "test", domain=hospital))[0].double().numpy()  # type: ignore[attr-defined]
    table = [line.split(",") for line in lines(folder, hospital)]
    starts = np.cumsum([11, *map(len, heart.CATEGORIES.values())])
    for start, (name, values) in zip(starts, heart.CATEGORIES.items(), strict=False):
        for patient, row in zip(x, table, strict=True):
            text = row[heart.COLUMNS.index(name)]
            one_hot = [float(text != "?" and float(text) == value) for value in values]
            assert patient[start : start + len(values)].tolist() == one_hot
    for i, name in enumerate(heart.NUMBERS):
        texts = [row[heart.COLUMNS.index(name)] for row in table]
        zero = name in ("chol", "trestbps")
        missing = np.array([t == "?" or (zero and float(t) == 0) for t in texts])
        assert (x[missing, i] == 0).all()
        if name != "age":
            assert np.array_equal(x[:, INDICATOR[name]], missing)
        known = np.array([float(t) for t, m in zip(texts, missing, strict=True) if not m])
        if len(set(known)) > 1:
            slope, start = np.polyfit(known, x[~missing, i], 1)
            assert slope > 0
            assert np.allclose(start + slope * known, x[~missing, i], atol=1e-5)


def test_zero_cholesterol_is_missing() -> None:
    real("heart_disease")
    data = load("heart", held_out="switzerland")
    x, _ = data.examples.batch(rows(data, "test", domain="switzerland"))  # type: ignore[attr-defined]
    assert (x[:, INDICATOR["chol"]] == 1).all()
    assert (x[:, heart.NUMBERS.index("chol")] == 0).all()


def test_numbers_are_standard_in_the_training_part() -> None:
    real("heart_disease")
    data = load("heart", held_out="hungarian", seed=3)
    x = data.examples.batch(torch.from_numpy(data.splits["train"].examples()).long())[0]  # type: ignore[attr-defined]
    for i, name in enumerate(heart.NUMBERS):
        known = x[x[:, INDICATOR[name]] == 0, i] if name in INDICATOR else x[:, i]
        assert float(known.mean()) == pytest.approx(0, abs=1e-5)
        assert float(known.std(correction=0)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("hospital", heart.DOMAINS)
def test_the_test_hospital_never_touches_the_rest(hospital: str, tmp_path: Path) -> None:
    folder = copied(real("heart_disease"), tmp_path)
    before = load("heart", held_out=hospital, folder=str(folder))
    changed = ["999,0,4,?,9999,?,2,?,1,99,3,3,?,4" for _ in lines(folder, hospital)[::2]]
    (folder / f"processed.{hospital}.data").write_text("\n".join(changed))
    after = load("heart", held_out=hospital, folder=str(folder))
    for split in ("train", "validation"):
        assert examples_of(before, split) == examples_of(after, split)
    assert examples_of(before, "test") != examples_of(after, "test")


def test_validation_examples_never_touch_the_training_part(tmp_path: Path) -> None:
    folder = copied(real("heart_disease"), tmp_path)
    before = load("heart", folder=str(folder))
    table = lines(folder, "cleveland")
    for row in rows(before, "validation", domain="cleveland"):
        table[row] = "999,0,4,?,9999,?,2,?,1,99,3,3,?,4"
    (folder / "processed.cleveland.data").write_text("\n".join(table))
    after = load("heart", folder=str(folder))
    assert examples_of(before, "train") == examples_of(after, "train")
    assert examples_of(before, "test") == examples_of(after, "test")
    assert examples_of(before, "validation")[0] != examples_of(after, "validation")[0]


def test_the_seed_chooses_the_validation_patients() -> None:
    real("heart_disease")
    first, same, other = (rows(load("heart", seed=s), "validation", domain="hungarian") for s in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


PATIENT = "63,1,1,145,233,1,2,150,0,2.3,3,0,6,0"


def made(folder: Path, spoilt: str = PATIENT, hospital: str = "va") -> str:
    """Four small hospitals; the third line of one of them is ``spoilt``."""
    for name in heart.DOMAINS:
        table = [PATIENT, "", spoilt if name == hospital else PATIENT, *[PATIENT] * 4]
        (folder / f"processed.{name}.data").write_text("\n".join(table) + "\n")
    return str(folder)


def with_value(name: str, text: str) -> str:
    values = PATIENT.split(",")
    values[heart.COLUMNS.index(name)] = text
    return ",".join(values)


def test_equal_patients_do_not_divide_by_zero(tmp_path: Path) -> None:
    data = load("heart", folder=made(tmp_path))
    x = data.examples.batch(torch.arange(24))[0]  # type: ignore[attr-defined]
    assert x[:, :11].abs().max() < 1e-6
    assert (x[:, 11:].sum(1) == len(heart.CATEGORIES)).all()


@pytest.mark.parametrize("held_out", ["va", "cleveland"])
@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (PATIENT + ",0", "15 values; there must be 14: age, sex, .*num"),
        (PATIENT[:-2], "13 values; there must be 14"),
        (with_value("chol", "high"), "chol is 'high'; it must be "),
        (with_value("age", ""), "age is ''; it must be "),
        (with_value("oldpeak", "nan"), "oldpeak is 'nan'; it must be "),
        (with_value("cp", "5"), "cp is '5'; it must be 1, 2, 3, 4, or \\? where it is missing"),
        (with_value("thal", "3.5"), "thal is '3.5'; it must be 3, 6, 7, or \\?"),
        (with_value("num", "?"), "num is '\\?'; it must be 0, 1, 2, 3, 4\\."),
        (with_value("num", "-1"), "num is '-1'; it must be 0, 1, 2, 3, 4\\."),
    ],
)
def test_a_malformed_line_is_named(spoilt: str, message: str, held_out: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"processed.va.data', line 3: {message}"):
        load("heart", held_out=held_out, folder=made(tmp_path, spoilt))


def test_missing_and_empty_hospitals_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path)
    (tmp_path / "processed.hungarian.data").write_text("")
    with pytest.raises(InputError, match=r"processed.hungarian.data' contains no patients.*SHOAL_DATA"):
        load("heart", folder=folder)
    (tmp_path / "processed.hungarian.data").unlink()
    with pytest.raises(InputError, match=f"'processed.hungarian.data' in '{tmp_path}'; "):
        load("heart", folder=folder)
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    with pytest.raises(InputError, match=r"processed.cleveland.data, .* are needed; "):
        load("heart")


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    patients = draw(st.integers(1, 6))
    numbers = st.one_of(st.just(float("nan")), st.sampled_from([0.1, 0.7, 120.0]), st.floats(-1e6, 1e6))
    return np.array([[draw(numbers) for _ in heart.COLUMNS] for _ in range(patients)])


@settings(max_examples=60, deadline=None)
@given(table=tables(), copies=st.integers(1, 30))
def test_features_are_finite_and_fitted_to_what_they_are_told(
    table: np.ndarray[Any, Any], copies: int
) -> None:
    fitted_to = np.repeat(table[:1], copies, axis=0)
    x = heart.features(table, fitted_to)
    assert np.isfinite(x).all()
    assert (np.abs(x[0, :6]) < 1e-6).all()  # the only patient it is fitted to is the mean
    for i, name in enumerate(heart.NUMBERS):
        column = table[:, heart.COLUMNS.index(name)]
        centre = 0.0 if np.isnan(column[0]) else column[0]
        expected = np.where(np.isnan(column), 0, column - centre)  # one value has no deviation: none is used
        np.testing.assert_allclose(x[:, i], expected, rtol=1e-5, atol=1e-6)
