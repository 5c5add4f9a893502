"""The datasets that are read from files: what the real files give, and what is said of wrong ones."""

from __future__ import annotations

import gzip
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from shoal.data.batch import DomainData
from shoal.datasets import coloured_mnist, heart, load, rotated_mnist
from shoal.datasets.digits import FILES, ByteImages, read_idx, read_mnist, rotate
from shoal.errors import InputError

MNIST_SETS = ["coloured-mnist", "rotated-mnist"]


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


def byte_images(data: DomainData) -> ByteImages:
    assert isinstance(data.examples, ByteImages)
    return data.examples


# MNIST's own files


@pytest.fixture(scope="module")
def mnist() -> tuple[Tensor, Tensor]:
    return read_mnist(real("mnist"))


def test_mnist_is_the_published_one(mnist: tuple[Tensor, Tensor]) -> None:
    images, digits = mnist
    assert images.shape == (70_000, 28, 28)
    assert digits[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert digits[60_000:60_010].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert digits[:60_000].bincount().tolist() == counts
    assert digits[60_000:].bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    training = images[:60_000].numpy()
    assert training.mean() / 255 == pytest.approx(0.1307, abs=5e-5)
    assert training.std() / 255 == pytest.approx(0.3081, abs=5e-5)


@pytest.fixture(scope="module")
def coloured() -> DomainData:
    real("mnist")
    return load("coloured-mnist", held_out="+80%")


def test_coloured_mnist_uses_every_image_once(mnist: tuple[Tensor, Tensor], coloured: DomainData) -> None:
    examples = byte_images(coloured)
    grey = examples.x.amax(1).numpy()
    assert sorted(i.tobytes() for i in grey) == sorted(i.tobytes() for i in mnist[0].numpy())
    sizes = {split: domains.sizes.tolist() for split, domains in coloured.splits.items()}
    assert sizes == {"train": [18_668, 18_667], "validation": [4_666, 4_666], "test": [23_333]}


def test_coloured_mnist_follows_its_probabilities(mnist: tuple[Tensor, Tensor], coloured: DomainData) -> None:
    examples = byte_images(coloured)
    digit_of = {image.tobytes(): int(digit) for image, digit in zip(mnist[0].numpy(), mnist[1], strict=True)}
    digits = torch.tensor([digit_of[image.tobytes()] for image in examples.x.amax(1).numpy()])
    light = examples.x.flatten(2).amax(2)
    assert (light.amin(1) == 0).all()
    assert (light.amax(1) > 0).all()
    colour, flipped = light.argmax(1), (digits < 5).long() != examples.y
    for name, agreement in {"+90%": 0.9, "+80%": 0.8, "-90%": 0.1}.items():
        mine = rows(coloured, *(["test"] if name == "+80%" else ["train", "validation"]), domain=name)
        # 23,333 images: four standard deviations are under 0.012; of the quarter flipped, 0.021.
        agree = (colour == examples.y)[mine].float()
        assert float(agree.mean()) == pytest.approx(agreement, abs=0.012)
        assert float(flipped[mine].float().mean()) == pytest.approx(0.25, abs=0.012)
        assert float(agree[flipped[mine]].mean()) == pytest.approx(agreement, abs=0.021)


@pytest.fixture(scope="module")
def rotated() -> DomainData:
    real("mnist")
    return load("rotated-mnist", held_out="30°", seed=4)


def test_rotated_mnist_turns_each_raw_image(mnist: tuple[Tensor, Tensor], rotated: DomainData) -> None:
    examples = byte_images(rotated)
    order = torch.randperm(70_000, generator=torch.Generator().manual_seed(4))
    assert torch.equal(examples.y, mnist[1][order])
    for i, name in enumerate(rotated_mnist.DOMAINS):
        mine = rows(rotated, *(["test"] if name == "30°" else ["train", "validation"]), domain=name)
        assert torch.equal(mine, torch.arange(i, 70_000, 6))
        some = torch.cat([mine[:200], mine[-200:]])
        upright = mnist[0][order[some]].float() / 255
        turned = examples.batch(some)[0][:, 0]
        assert (turned - rotate(upright, 15 * i)).abs().max() <= 0.501 / 255
        assert torch.equal(turned, upright) == (i == 0)


def test_rotated_mnist_has_every_digit_everywhere(rotated: DomainData) -> None:
    y = byte_images(rotated).y
    share = y.bincount() / len(y)
    for domains in rotated.splits.values():
        for d in range(len(domains)):
            mine = y[torch.from_numpy(domains.indices_of(d)).long()]
            deviation = (len(mine) * share * (1 - share)).sqrt()
            assert ((mine.bincount() - len(mine) * share).abs() < 5 * deviation).all()


# MNIST's format, from files written here


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def contents(train: int = 60, test: int = 30) -> dict[str, bytes]:
    """The four files, of random images."""
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, (n, 28, 28), np.uint8) for n in (train, test)]
    digits = [draw.integers(0, 10, n).astype(np.uint8) for n in (train, test)]
    parts = [part for pair in zip(images, digits, strict=True) for part in pair]
    return {name: idx(part) for name, part in zip(FILES, parts, strict=True)}


def write(folder: Path, files: dict[str, bytes], gz: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}{'.gz' * gz}").write_bytes(gzip.compress(content) if gz else content)


@pytest.mark.parametrize("gz", [True, False], ids=["gz", "plain"])
@pytest.mark.parametrize("inside", [".", "raw", "MNIST/raw"])
@pytest.mark.parametrize("said_by", ["folder", "SHOAL_DATA", "SHOAL_DATA/mnist"])
def test_files_are_found_where_they_may_be(
    gz: bool, inside: str, said_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / ("mnist" * said_by.endswith("/mnist")) / inside, contents(), gz)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "nowhere" if said_by == "folder" else tmp_path))
    images, digits = read_mnist(tmp_path if said_by == "folder" else None)
    assert images.numpy().tobytes() == b"".join(contents()[name][16:] for name in FILES[::2])
    assert bytes(digits.tolist()) == b"".join(contents()[name][8:] for name in FILES[1::2])


def test_a_whole_set_of_files_is_taken_before_a_part_of_one(tmp_path: Path) -> None:
    write(tmp_path, {FILES[0]: b""})
    write(tmp_path / "raw", contents())
    assert len(read_mnist(tmp_path)[1]) == 90


@pytest.mark.parametrize("name", MNIST_SETS)
def test_per_domain_only_shortens(name: str, tmp_path: Path) -> None:
    write(tmp_path, contents(300, 60))
    whole, short = (byte_images(load(name, folder=str(tmp_path), seed=2, per_domain=n)) for n in (None, 5))
    assert len(short) == 5 * {"coloured-mnist": 3, "rotated-mnist": 6}[name]
    assert torch.equal(short.x, whole.x[: len(short)])
    assert torch.equal(short.y, whole.y[: len(short)])
    sizes = load(name, folder=str(tmp_path), per_domain=20).splits
    assert set(sizes["train"].sizes) == {16}
    assert set(sizes["validation"].sizes) == {4}
    assert set(sizes["test"].sizes) == {20}


@pytest.mark.parametrize("name", MNIST_SETS)
def test_mnist_follows_the_seed(name: str, tmp_path: Path) -> None:
    write(tmp_path, contents())
    first, same, other = (byte_images(load(name, folder=str(tmp_path), seed=s)) for s in (0, 0, 1))
    assert torch.equal(first.x, same.x)
    assert not torch.equal(first.x, other.x)
    assert not torch.equal(first.y, other.y)


@pytest.mark.parametrize("per_domain", [4, 16, 10.0, "all"])
def test_per_domain_out_of_range_is_named(per_domain: Any, tmp_path: Path) -> None:
    write(tmp_path, contents())
    with pytest.raises(InputError, match=f"from 5 to 15, one of 6 parts of 90 images; not {per_domain!r}"):
        rotated_mnist.load(folder=str(tmp_path), per_domain=per_domain)


def test_byte_images_are_floats_only_in_batches(tmp_path: Path) -> None:
    write(tmp_path, contents())
    examples = byte_images(coloured_mnist.load(folder=str(tmp_path)))
    assert examples.x.dtype == torch.uint8
    chosen = torch.tensor([3, 0, 89])
    x, y = examples.batch(chosen)
    assert x.dtype == torch.float32
    assert torch.equal((x * 255).round().to(torch.uint8), examples.x[chosen])
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert torch.equal(examples[3][0], x[0])
    assert torch.equal(y, examples.y[chosen])
    elsewhere = examples.to("meta")
    assert type(elsewhere) is ByteImages
    assert elsewhere.x.device == elsewhere.y.device == torch.device("meta")
    assert elsewhere.batch(chosen.to("meta"))[0].dtype == torch.float32


def set_bytes(start: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:start] + new + content[start + len(new) :]


@pytest.mark.parametrize("gz", [True, False], ids=["gz", "plain"])
@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        (0, lambda c: c[:-1], "contains 47039 bytes of data, but its header specifies 60 × 28 × 28"),
        (1, lambda c: c + b"\0", "contains 61 bytes of data, but its header specifies 60"),
        (2, lambda c: c[:10], "is truncated: 10 bytes"),
        (3, lambda c: b"", "is truncated: 0 bytes"),
        (2, set_bytes(3, b"\1"), "starts with the number 2049, not 2051"),
        (3, set_bytes(0, b"<html>"), "starts with the number 1013478509, not 2049"),
        (0, set_bytes(4, struct.pack(">3I", 60, 14, 56)), "contains images of 14 × 56 pixels, not 28 × 28"),
        (1, lambda c: idx(np.zeros(59, np.uint8)), "contains 59 labels for 60 images"),
        (3, set_bytes(20, b"\x0a"), "contains the label 10"),
    ],
)
def test_a_spoilt_file_is_named(
    file: int, spoil: Callable[[bytes], bytes], message: str, gz: bool, tmp_path: Path
) -> None:
    files = contents()
    write(tmp_path, files | {FILES[file]: spoil(files[FILES[file]])}, gz)
    with pytest.raises(InputError, match=message) as caught:
        load("rotated-mnist", folder=str(tmp_path))
    said = str(caught.value)
    assert repr(str(tmp_path / f"{FILES[file]}{'.gz' * gz}")) in said
    assert "SHOAL_DATA" in said
    assert "\n" not in said


@pytest.mark.parametrize("name", MNIST_SETS)
def test_a_missing_file_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "raw", {n: c for n, c in contents().items() if n != FILES[2]})
    there = f"'{FILES[2]}' \\(or .gz\\) in '{tmp_path / 'raw'}'.*SHOAL_DATA"
    with pytest.raises(InputError, match=there):
        load(name, folder=str(tmp_path))
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "empty"))
    both = f"'{FILES[0]}' .* in '{tmp_path / 'empty' / 'mnist'}' or '{tmp_path / 'empty'}'; "
    with pytest.raises(InputError, match=both):
        load(name)
    monkeypatch.delenv("SHOAL_DATA")
    with pytest.raises(InputError, match=f"{FILES[0]}, .* are needed.*SHOAL_DATA"):
        load(name)


@settings(max_examples=60, deadline=None)
@given(
    array=arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)),
    gz=st.booleans(),
    data=st.data(),
)
def test_idx_files_are_read_whole_or_not_at_all(
    array: np.ndarray[Any, Any], gz: bool, data: st.DataObject
) -> None:
    content = gzip.compress(idx(array)) if gz else idx(array)
    cut = data.draw(st.integers(0, len(content) - 1), label="cut")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(content)
        assert np.array_equal(read_idx(path, array.ndim), array)
        with pytest.raises(InputError, match="starts with the number"):
            read_idx(path, array.ndim - 1)
        path.write_bytes(content[:cut])
        with pytest.raises(InputError, match=r"'.*file' (is truncated|contains|cannot be read)"):
            read_idx(path, array.ndim)


# Heart disease

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
