"""Rows of CSV files as texts, their tokens, and batches of them."""

from __future__ import annotations

import csv
import errno
import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from imitations.wilds_text import fake_tokenizer
from shoal.data import (
    DomainBatchSampler,
    MetaBatchLoader,
    TensorData,
    concatenate,
    text,
)
from shoal.data.sets import amazon
from shoal.data.text import Column, Table, TextRows, TokenCache, first_seen, identity, read_table, scan
from shoal.data.wilds import by_group
from shoal.errors import InputError

WORDS = (
    "the good",
    "a great,\n superb one, so it was",
    "",
    "you",
    'said "so" and 日本 ' + "more " * 40,
    "no",
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SHOAL_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("transformers")
    return str(fake_tokenizer(tmp_path_factory.mktemp("models")))


def table_of(path: Path, words: Any = WORDS) -> Table:
    with path.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines).writerows([("id", "text"), *enumerate(words)])
    return read_table(path, ("id",))


def rows_of(folder: Path, tokenizer: str, **options: Any) -> TextRows:
    path = folder / "table.csv"
    table = read_table(path, ("id",)) if path.exists() else table_of(path)
    return TextRows(table, "text", np.arange(len(table)) % 2, tokenizer=tokenizer, **options)


# The table

FIELDS = st.text(alphabet='ab,"\n\r\0é日🙂 \u2028\x85', max_size=12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(FIELDS, FIELDS, FIELDS), min_size=1, max_size=8),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    ending=st.sampled_from(["\n", "\r\n"]),
    blank=st.booleans(),
    mark=st.booleans(),
    last=st.booleans(),
)
def test_records_are_those_of_the_csv_module(
    rows: Any, quoting: Any, ending: str, blank: bool, mark: bool, last: bool, tmp_path: Path
) -> None:
    path = tmp_path / "odd.csv"
    if ending == "\n" and any("\r" in value for row in rows for value in row):
        quoting = csv.QUOTE_ALL  # the module leaves a lone \r without, and then reads two records
    with path.open("w", encoding="utf-8-sig" if mark else "utf-8", newline="") as lines:
        writer = csv.writer(lines, quoting=quoting, lineterminator=ending)
        writer.writerow(["x", "é", "z"])
        for n, row in enumerate(rows):
            writer.writerow(row)
            lines.write(ending if blank and n % 2 else "")
    if not last:
        path.write_bytes(path.read_bytes().removesuffix(ending.encode()))
    with path.open(encoding="utf-8-sig", newline="") as lines:
        header, *expected = [row for row in csv.reader(lines) if row]
    table = scan(path, ("z", "é"))
    assert list(table.header) == header
    assert [table.record(i) for i in range(len(table))] == expected
    for name, place in (("é", 1), ("z", 2)):
        column = table.columns[name]
        assert [column.values[c] for c in column.codes] == [row[place] for row in expected]
        assert column.values == list(dict.fromkeys(row[place] for row in expected))


def test_quotation_marks_within_a_field_are_read_as_the_csv_module_does(tmp_path: Path) -> None:
    path = tmp_path / "loose.csv"
    path.write_text('a,b\nx"y,1\n"q"z,2\n p "q" , 3\nplain,4\n', encoding="utf-8")
    with path.open(newline="") as lines:
        expected = list(csv.reader(lines))[1:]
    table = scan(path, ("b",))
    assert [table.record(i) for i in range(len(table))] == expected


def test_a_text_may_be_long(tmp_path: Path) -> None:
    before = csv.field_size_limit(100_000)
    try:
        assert table_of(tmp_path / "long.csv", ["x" * 300_000, "y"]).record(0) == ["0", "x" * 300_000]
    finally:
        csv.field_size_limit(before)


def test_bytes_that_are_no_utf8_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes(b"a,b\ncaf\xe9,1\n")
    assert scan(path, ("a",)).columns["a"].values == ["caf\ufffd"]
    assert scan(path, ("a",)).record(0) == ["caf\ufffd", "1"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no column 'split'"),
        ("splits,b\n1,2\n", "has no column 'split'. Did you mean 'splits'?"),
        ("split,b\n", "has no rows"),
        ("split,b\n\n\n", "has no rows"),
        ("split,b\n1,2\n\n3\n4,5\n", r"at byte 13: 1 values \('3'\) where the first line names 2"),
    ],
)
def test_tables_that_are_wrong_are_named(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=f"wrong.csv'.*{said}"):
        read_table(path, ("split",))


def test_a_mark_that_is_never_closed_is_an_error_and_not_a_full_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "LONGEST", 1000)
    path = tmp_path / "open.csv"
    path.write_text("a,b\n" + '"x,1\n' + "y,2\n" * 2000)
    before = csv.field_size_limit()
    with pytest.raises(InputError, match=r"open.csv' is not a valid CSV file"):
        read_table(path, ("a",))
    assert csv.field_size_limit() == before


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.csv' cannot be read \(No such file"):
        read_table(tmp_path / "none.csv", ("a",))


def test_numbers(tmp_path: Path) -> None:
    column = Column(np.array([0, 1, 0, 2], np.int32), ["1.5", "", "-2"])
    assert column.numbers("a.csv: x", missing=7).tolist() == [1.5, 7, 1.5, -2]
    with pytest.raises(InputError, match=r"a.csv: x is '' in record 2; it must be "):
        column.numbers("a.csv: x")


def test_codes_are_numbered_as_they_first_come() -> None:
    used, codes = first_seen(np.array([7, 2, 7, 9, 2]))
    assert used.tolist() == [7, 2, 9]
    assert codes.tolist() == [0, 1, 0, 2, 1]


# What is kept of it


def count_scans(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    seen: list[Path] = []
    real = text.scan

    def counted(path: Path, *others: Any) -> Table:
        seen.append(path)
        return real(path, *others)

    monkeypatch.setattr(text, "scan", counted)
    return seen


def test_a_table_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans, path = count_scans(monkeypatch), tmp_path / "table.csv"
    first = table_of(path)
    again = read_table(path, ("id",))
    assert len(scans) == 1
    assert again.key == first.key
    assert again.header == first.header
    for a, b in ((first.starts, again.starts), (first.lengths, again.lengths)):
        assert a.dtype == b.dtype
        assert a.tolist() == b.tolist()
    assert again.columns["id"].values == first.columns["id"].values
    assert [again.record(i)[1] for i in range(len(again))] == list(WORDS)
    read_table(path, ("text",))
    assert len(scans) == 2  # other columns
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    read_table(Path(shutil.copy2(path, moved)), ("id",))
    assert len(scans) == 2  # the same file, in another place
    about = path.stat()
    path.write_bytes(path.read_bytes().replace(b"you", b"him"))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert read_table(path, ("id",)).record(3) == ["3", "him"]
    assert len(scans) == 3  # of the same size and time, and another content
    os.utime(path, ns=(0, 5))
    read_table(path, ("id",))
    assert len(scans) == 4


def test_what_is_kept_may_be_damaged(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table_of(tmp_path / "table.csv")
    (kept,) = (cache / "tables").iterdir()
    whole = kept.read_bytes()
    scans = count_scans(monkeypatch)
    for damaged in (b"", whole[:100], whole[: len(whole) // 2], b"\0" * len(whole)):
        kept.write_bytes(damaged)
        assert len(read_table(tmp_path / "table.csv", ("id",))) == len(WORDS)
        assert kept.read_bytes() == whole
    assert len(scans) == 4


def test_a_disk_that_takes_nothing_costs_a_warning(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match=r"table.csv holds cannot be kept in .*SHOAL_CACHE names another"):
        rows = rows_of(tmp_path, tiny)
    with pytest.warns(UserWarning, match=r"tokens cannot be kept in .* made anew"):
        first = rows.tokens(0)
    assert rows.tokens(0).tolist() == first.tolist()


def test_a_disk_that_fills_up_costs_one_warning(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(tmp_path, tiny)
    expected = [rows.tokens(i).tolist() for i in range(3)]
    shutil.rmtree(os.environ["SHOAL_CACHE"])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    rows = rows_of(tmp_path, tiny)
    monkeypatch.setattr(text._Files, "write", full)
    with pytest.warns(UserWarning, match="No space left on device") as said:
        assert [rows.tokens(i).tolist() for i in range(3)] == expected
    assert len(said) == 1


# Tokens


def test_tokens_are_the_tokenizers(tmp_path: Path, tiny: str) -> None:
    rows, tokenizer = rows_of(tmp_path, tiny, max_tokens=20), text.load_tokenizer(tiny)
    for _ in range(2):  # made, then read
        for n, words in enumerate(WORDS):
            expected = tokenizer(words, truncation=True, max_length=20)["input_ids"]
            x, y = rows[n]
            assert rows.text(n) == words
            assert x["input_ids"].tolist() == expected
            assert x["attention_mask"].tolist() == [1] * len(expected)
            assert x["input_ids"].dtype == x["attention_mask"].dtype == torch.int64
            assert y == n % 2
    assert len(rows[4][0]["input_ids"]) == 20
    assert len(rows[2][0]["input_ids"]) == 2  # nothing but the two marks


def test_tokens_are_made_once(tmp_path: Path, tiny: str) -> None:
    rows = rows_of(tmp_path, tiny)
    expected = [rows.tokens(n).tolist() for n in range(len(rows))]
    again = rows_of(tmp_path, tiny)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("made again")

    assert again.cache.writable
    again.__dict__["made"] = refuse
    assert [again.tokens(n).tolist() for n in range(len(rows))] == expected


def test_a_damaged_slot_is_made_anew(cache: Path, tmp_path: Path, tiny: str) -> None:
    rows = rows_of(tmp_path, tiny)
    expected = [rows.tokens(n).tolist() for n in range(len(rows))]
    (kept,) = (cache / "tokens").iterdir()
    at = rows.cache.at
    content = bytearray(kept.read_bytes())
    content[at[1] + 9] ^= 1  # a token
    content[at[3] + 1] ^= 8  # how many there are
    kept.write_bytes(content[: at[5] + 3])  # and the last is cut off
    again = rows_of(tmp_path, tiny)
    assert [again.tokens(n).tolist() for n in range(len(rows))] == expected
    assert kept.read_bytes()[at[1] : at[2]] != content[at[1] : at[2]]


def test_caches_of_different_tokenizers_lengths_and_files_do_not_collide(
    cache: Path, tmp_path: Path, tiny: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    words = (other / "vocab.txt").read_text().split("\n")
    words[-3], words[-2] = words[-2], words[-3]
    (other / "vocab.txt").write_text("\n".join(words))
    cased = tmp_path / "cased"
    shutil.copytree(tiny, cased)
    settings = (cased / "tokenizer_config.json").read_text()
    (cased / "tokenizer_config.json").write_text(
        settings.replace('"do_lower_case": true', '"do_lower_case": false')
    )
    names = {identity(text.load_tokenizer(str(place))) for place in (tiny, other, cased)}
    assert len(names) == 3
    tokenizer = text.load_tokenizer(tiny)
    before = identity(tokenizer)
    tokenizer("a text", truncation=True, max_length=5)
    assert identity(tokenizer) == before
    for place in (tiny, str(other), str(cased)):
        rows_of(tmp_path, place).tokens(0)
        rows_of(tmp_path, place, max_tokens=7).tokens(0)
    assert len(list((cache / "tokens").iterdir())) == 6
    table_of(tmp_path / "table.csv", ("another",))
    rows = TextRows(read_table(tmp_path / "table.csv", ("id",)), "text", np.zeros(1, int), tokenizer=tiny)
    assert rows.tokens(0).tolist() == tokenizer("another")["input_ids"]
    assert len(list((cache / "tokens").iterdir())) == 7


@pytest.mark.parametrize(("words", "size"), [(65_536, 2), (65_537, 4)])
def test_large_vocabularies_take_four_bytes(words: int, size: int, tmp_path: Path) -> None:
    kept = TokenCache(tmp_path / "x.ids", np.array([100, 8, 100]), 30, words)
    assert kept.get(0) is None
    kept.put(2, [words - 1, 0, 7])
    kept.put(1, list(range(20)))
    kept.put(0, list(range(21)))
    assert kept.at[1] == 8 + 30 * size
    assert kept.get(2).tolist() == [words - 1, 0, 7]  # type: ignore[union-attr]
    assert kept.get(1).tolist() == list(range(20))  # type: ignore[union-attr]
    assert kept.get(0).tolist() == list(range(21))  # type: ignore[union-attr]
    kept.put(1, list(range(21)))  # more than eight bytes of text are given room for
    assert kept.get(1).tolist() == list(range(20))  # type: ignore[union-attr]


def test_any_number_of_workers_gives_the_same_batches(tmp_path: Path, tiny: str) -> None:
    rng = np.random.default_rng(0)
    table = table_of(tmp_path / "table.csv", [" ".join(["the good"] * n) for n in rng.integers(1, 9, 60)])
    sampler = DomainBatchSampler(np.arange(60) % 3, 4, 2, seed=1)

    def run(workers: int) -> str:
        rows = TextRows(table, "text", np.arange(60), tokenizer=tiny, pad_to=1)
        return str(list(MetaBatchLoader(rows, sampler, workers=workers, stop=5)))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        first = run(2)
        assert run(0) == first == run(1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "distilbert-base-uncased",
            r"tokenizer of 'distilbert-base-uncased'.*no network; use a folder with",
        ),
        ("/nowhere/at/all", r"there is no '/nowhere/at/all/config.json'; a model's folder has config.json"),
    ],
)
def test_a_tokenizer_that_is_not_there(name: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = rows_of(tmp_path, name)  # the table can be looked at without one
    began = time.monotonic()
    with pytest.raises(InputError, match=said):
        rows[0]
    assert time.monotonic() - began < 10
    assert rows.problem(1) is None
    assert rows.path(1).endswith("table.csv")


def test_without_transformers_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'shoal\[text\]'"):
        rows_of(tmp_path, "tiny")[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 2}, "max_tokens of TextRows must be "),
        ({"max_tokens": 8.5}, "max_tokens of TextRows must be"),
        ({"pad_to": 0}, "pad_to of TextRows must be "),
        ({"pad_to": "longest"}, "or 'max', got 'longest'"),
        ({"rows": np.arange(2)}, "2 rows and 6 labels"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        rows_of(tmp_path, "tiny", **options)


def test_a_file_that_changes_under_way_is_told(tmp_path: Path) -> None:
    table = table_of(tmp_path / "table.csv")
    (tmp_path / "table.csv").write_text("a,b,c\n" * 60)
    with pytest.raises(InputError, match="has changed since"):
        table.record(3)


# Batches


@pytest.mark.parametrize(("pad_to", "length"), [(1, 12), (8, 16), (64, 30), ("max", 30)])
def test_batches_are_padded(pad_to: Any, length: int, tmp_path: Path, tiny: str) -> None:
    rows = rows_of(tmp_path, tiny, max_tokens=30, pad_to=pad_to)
    items = [rows[n] for n in (0, 1, 2, 3)]
    assert max(len(x["input_ids"]) for x, _ in items) == 12
    x, y = rows.collate(items)
    assert x["input_ids"].shape == x["attention_mask"].shape == (4, length)
    assert y.tolist() == [0, 1, 0, 1]
    for n, (one, _) in enumerate(items):
        size = len(one["input_ids"])
        assert x["input_ids"][n, :size].tolist() == one["input_ids"].tolist()
        assert x["attention_mask"][n].tolist() == [1] * size + [0] * (length - size)
        assert not x["input_ids"][n, size:].any()


class Padded:
    """Items of different lengths with a ``collate`` of their own."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(index + 1), index

    def collate(self, items: list[Any]) -> tuple[Tensor, Tensor]:
        x = torch.nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
        return x, torch.tensor([y for _, y in items])


def test_a_datasets_own_collate_is_used_unless_one_is_given() -> None:
    sampler = DomainBatchSampler(np.zeros(6, int), 6, 1)
    (batch,) = MetaBatchLoader(Padded(), sampler, stop=1)  # type: ignore[arg-type]
    assert batch.x.sum(1).tolist() == (batch.y + 1).tolist()
    given = MetaBatchLoader(Padded(), sampler, stop=1, collate=lambda items: (torch.ones(1), torch.ones(1)))  # type: ignore[arg-type]
    assert next(iter(given)).y.tolist() == [1]
    joined: Any = concatenate({"a": Padded(), "b": Padded()})[0]
    assert joined.collate([joined[2], joined[7]])[0].shape == (2, 3)
    mixed = concatenate({"a": Padded(), "b": TensorData(torch.ones(2, 1), torch.ones(2))})[0]
    assert not hasattr(mixed, "collate")


# A hundred thousand reviewers


def test_many_reviewers_are_grouped_without_a_loop_over_rows_for_each() -> None:
    rng = np.random.default_rng(0)
    column = Column(rng.integers(0, 10**5, 10**6).astype(np.int32), [f"A{n}" for n in range(10**5)])
    split = rng.integers(-1, 5, 10**6)
    began = time.process_time()
    rows = np.flatnonzero(split != -1)
    users, names = amazon._numbered(column, rows, np.argsort(split[rows], kind="stable"))
    domains = by_group(users, names.__getitem__, split[rows] == 0)
    DomainBatchSampler(domains, 8, 5).plan(10**6)
    assert time.process_time() - began < 5
    chosen = rows[domains.indices_of(77)]
    name = domains.names[77]
    assert chosen.tolist() == np.flatnonzero((split == 0) & (column.codes == int(name[1:]))).tolist()
