"""Examples that are rows of a big CSV file: text, read and turned into tokens when it is asked for."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import struct
import threading
import warnings
import zipfile
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import Examples
from shoal.data.folders import SAY_WHERE
from shoal.data.hub import Source, need_transformers
from shoal.data.reading import check_header
from shoal.errors import InputError, nearest
from shoal.files import lines_of, open_regular, open_text, parse_json, write_atomically
from shoal.settings import Range, checked

VARIABLE = "SHOAL_CACHE"
FORMAT = 1  # of what is kept on disk; another number makes old files be made anew
LONGEST = 2**24  # characters of a field; more means that a quotation mark is never closed
ENDS = 2**16  # bytes from either end of a file by which it is known
SLOT = struct.Struct("<II")  # before a row's tokens: how many, and their checksum
MULTIPLE = 8
DISTILBERT = "distilbert-base-uncased"

Item = tuple[dict[str, Tensor], Any]
MaxTokens = Annotated[int, Range(4, 10**6)]
PadTo = Annotated[int, Range(1, 10**6)] | Literal["max"]


def cache_folder() -> Path:
    """Where what is expensive to find out is kept: ``$SHOAL_CACHE``, or ``~/.cache/shoal``."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/shoal").expanduser()


@dataclass(frozen=True)
class Column:
    """A column's distinct ``values`` in the order they first come, and which of them each row has."""

    codes: NDArray[np.int32]
    values: list[str]

    def numbers(self, where: str, *, missing: float | None = None) -> NDArray[np.float64]:
        """As numbers; an empty value is ``missing``, or an error."""
        result = np.empty(len(self.values))
        for n, value in enumerate(self.values):
            try:
                result[n] = missing if missing is not None and not value else float(value)
            except ValueError:
                record = int(np.argmax(self.codes == n)) + 1
                raise InputError(
                    f"{where} is {value[:40]!r} in record {record:,}; it must be a number."
                ) from None
        return result[self.codes]

    def text(self) -> NDArray[np.object_]:
        """The values as an array, of which ``[codes]`` is the column."""
        result = np.empty(len(self.values), dtype=object)
        result[:] = self.values
        return result


def first_seen(codes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """The distinct codes in the order they first come, and the codes numbered by that order."""
    distinct, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order))
    return distinct[order], rank[inverse]


@dataclass(frozen=True)
class Table:
    """Where each record of a CSV file is, and some of its columns; blank lines are no records."""

    path: Path
    header: tuple[str, ...]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    columns: Mapping[str, Column]
    key: str
    """Stands for the file's content."""
    _files: _Files = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_files", _Files(self.path))

    def __len__(self) -> int:
        return len(self.starts)

    def record(self, row: int) -> list[str]:
        """All values of a row, read from the file."""
        raw = self._files.read(int(self.starts[row]), int(self.lengths[row])).decode("utf-8", "replace")
        if csv.field_size_limit() < len(raw):
            csv.field_size_limit(LONGEST)
        try:
            result = next(csv.reader([raw]), [])
        except csv.Error:
            result = []
        if len(result) != len(self.header):
            raise InputError(f"{str(self.path)!r} has changed since it was indexed; start again.")
        return result


def read_table(path: Path, columns: Sequence[str]) -> Table:
    """Looks a CSV file with a line of names through, once: what is found is kept in :func:`cache_folder`.

    It is found again by the file's name, size, time of change and ends, and the columns' names. A disk that
    is full or may not be written to costs the time again, and a warning.
    """
    key = _key(path)
    asked = hashlib.sha256(json.dumps([FORMAT, list(columns)]).encode()).hexdigest()[:12]
    kept = cache_folder() / "tables" / f"{path.stem}-{key}-{asked}.npz"
    try:
        with np.load(kept, allow_pickle=False) as stored:
            header, values = parse_json(stored["texts"].tobytes())
            read = dict(zip(columns, map(Column, stored["codes"], values), strict=True))
            return Table(path, tuple(header), stored["starts"], stored["lengths"], read, key)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        table = scan(path, columns, key)
    content = io.BytesIO()
    made = list(table.columns.values())
    np.savez(
        content,
        starts=table.starts,
        lengths=table.lengths,
        codes=np.array([column.codes for column in made], np.int32),
        texts=np.frombuffer(json.dumps([table.header, [c.values for c in made]]).encode(), np.uint8),
    )
    try:
        write_atomically(kept, content.getvalue())
    except OSError as error:
        warnings.warn(
            f"what {path.name} holds cannot be kept in {str(kept.parent)!r} ({error.strerror or error}) and "
            f"will be looked up again next time; {VARIABLE} names another folder.",
            stacklevel=3,
        )
    return table


def _key(path: Path) -> str:
    try:
        about = path.stat()
        with open_regular(path) as file:
            start = file.read(ENDS)
            file.seek(max(0, about.st_size - ENDS))
            ends = hashlib.sha256(start + file.read(ENDS)).hexdigest()
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read ({error.strerror or error}); {SAY_WHERE} to look."
        ) from error
    described_by = json.dumps([path.name, about.st_size, about.st_mtime_ns, ends])
    return hashlib.sha256(described_by.encode()).hexdigest()[:16]


def scan(path: Path, columns: Sequence[str], key: str = "", strict: bool = False) -> Table:
    """The same from the file itself, in one pass over it; ``strict`` refuses what is not UTF-8."""
    limit = csv.field_size_limit(LONGEST)
    try:
        # One character a byte, so that lengths are bytes; what is kept is read as UTF-8 below.
        with open_text(path, "latin-1") as file:
            table = _scanned(path, _Counted(lines_of(file, path)), columns, key)
        if strict and any("\ufffd" in value for column in table.columns.values() for value in column.values):
            raise InputError(f"{str(path)!r} cannot be read: it is not UTF-8 text.")
        return table
    except csv.Error as error:
        raise InputError(f"{str(path)!r} is not a valid CSV file ({error}).") from error
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read ({error.strerror or error}); {SAY_WHERE} to look."
        ) from error
    finally:
        csv.field_size_limit(limit)


class _Counted:
    """Lines, and how many bytes have been handed over: a reader takes no more than the record's own."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines, self.end = iter(lines), 0

    def __iter__(self) -> Iterator[str]:
        for line in self.lines:
            self.end += len(line)
            yield line.removeprefix("\xef\xbb\xbf")  # UTF-8's mark of order
            break
        for line in self.lines:
            self.end += len(line)
            yield line


def _scanned(path: Path, lines: _Counted, columns: Sequence[str], key: str) -> Table:
    reader = csv.reader(lines)
    header = [_utf8(name) for name in next(reader, [])]
    check_header(header, repr(str(path)))
    known: list[defaultdict[str, int]] = [defaultdict() for _ in columns]
    for numbers in known:
        numbers.default_factory = numbers.__len__  # a value not met before gets the next number
    codes = [array("i") for _ in columns]
    each = list(zip([_place(path, header, name) for name in columns], known, codes, strict=True))
    starts, ends, end, width = array("q"), array("q"), lines.end, len(header)
    for row in reader:
        start, end = end, lines.end
        if len(row) != width:
            if not row:
                continue
            raise InputError(
                f"{str(path)!r}, at byte {start:,}: {len(row)} values ({','.join(row)[:40]!r}) where the "
                f"first line names {width} columns."
            )
        starts.append(start)
        ends.append(end)
        for place, numbers, codes_of in each:
            codes_of.append(numbers[row[place]])
    if not starts:
        raise InputError(f"{str(path)!r} has no rows after its header.")
    begin = np.array(starts, np.int64)
    made = [Column(np.array(c, np.int32), list(map(_utf8, n))) for c, n in zip(codes, known, strict=True)]
    lengths = (np.array(ends, np.int64) - begin).astype(np.int32)
    return Table(path, tuple(header), begin, lengths, dict(zip(columns, made, strict=True)), key)


def _utf8(text: str) -> str:
    return text.encode("latin-1").decode("utf-8", "replace")


def _place(path: Path, header: list[str], name: str) -> int:
    if name in header:
        return header.index(name)
    near = nearest(name, header)
    hint = f" Did you mean {near!r}?" if near else ""
    columns = ", ".join(repr(column) for column in header[:30])
    raise InputError(f"{str(path)!r} has no column {name!r}.{hint} Its columns: {columns or 'none'}.")


class _Files:
    """A file opened once in every thread of every process: none moves the place where another reads."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self.path, self.flags = path, flags | getattr(os, "O_BINARY", 0)
        self.open: dict[tuple[int, int], io.FileIO] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.flags)

    def __call__(self) -> io.FileIO:
        own = os.getpid(), threading.get_ident()
        if own not in self.open:
            try:
                handle = os.open(self.path, self.flags, 0o666)
            except FileNotFoundError as error:
                raise InputError(f"{str(self.path)!r} no longer exists.") from error
            self.open[own] = io.FileIO(handle, "r" if not self.flags & os.O_RDWR else "r+")
        return self.open[own]

    def read(self, at: int, size: int) -> bytes:
        file = self()
        file.seek(at)
        return file.read(size)

    def write(self, at: int, content: bytes) -> None:
        file = self()
        file.seek(at)
        if file.write(content) != len(content):
            raise OSError("the disk is full")


class TokenCache:
    """The tokens of every row in a file of slots, each filled by whoever first needs it.

    All who fill a slot write the same into it, and a checksum tells a slot that is filled from one that is
    not, or was half written when the machine stopped: no locks are needed. The file has holes where nothing
    was written. A slot has room for a token in two bytes of the record; tokens that need more are not kept.

    Rows are numbers of the :class:`Table`'s. ``words`` is how many there are in the tokenizer's vocabulary:
    up to 65,536 fit in two bytes each, more take four.
    """

    def __init__(self, path: Path, lengths: NDArray[Any], max_tokens: int, words: int) -> None:
        self.path = path
        self.dtype = np.dtype("<u2" if words <= 2**16 else "<i4")
        room = np.minimum(max_tokens, lengths.astype(np.int64) // 2 + 16)
        self.at = np.concatenate([[0], np.cumsum(SLOT.size + room * self.dtype.itemsize)])
        self.files: _Files | None = None
        self.writable = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.files = _Files(path, os.O_RDWR | os.O_CREAT)
            self.files()
        except OSError as error:
            self.writable = False
            self.files = _Files(path) if path.is_file() and os.access(path, os.R_OK) else None
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.writable = False
        warnings.warn(
            f"tokens cannot be kept in {str(self.path)!r} ({error.strerror or error}) and will be made anew "
            f"each time; {VARIABLE} names another folder.",
            stacklevel=4,
        )

    def get(self, row: int) -> NDArray[np.int64] | None:
        if self.files is None:
            return None
        start, stop = int(self.at[row]), int(self.at[row + 1])
        content = self.files.read(start, stop - start)
        if len(content) < SLOT.size:
            return None
        count, checksum = SLOT.unpack_from(content)
        tokens = content[SLOT.size : SLOT.size + count * self.dtype.itemsize]
        if not count or len(tokens) < count * self.dtype.itemsize or zlib.crc32(tokens) != checksum:
            return None
        return np.frombuffer(tokens, self.dtype).astype(np.int64)

    def put(self, row: int, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        start, stop = int(self.at[row]), int(self.at[row + 1])
        if self.files is None or not self.writable or not len(tokens):
            return
        content = np.asarray(tokens, self.dtype).tobytes()
        if SLOT.size + len(content) > stop - start:
            return
        try:
            self.files.write(start, SLOT.pack(len(tokens), zlib.crc32(content)) + content)
        except OSError as error:
            self._give_up(error)


class TextExamples(Examples):
    """Text as token ids, beside them a mask of ones, and a label; subclasses say what :meth:`text` is.

    An example's ids are as many as its text has tokens, ``max_tokens`` at most; :meth:`collate` pads a batch
    of them.

    Args:
        tokenizer: of which model, by name or by the folder its files are in. It is loaded when the first
            text is needed.
        max_tokens: what is longer is cut off.
        pad_to: batches are padded to a multiple of this, or with ``"max"`` all to ``max_tokens``: steps then
            all have the same shapes.
    """

    @checked
    def __init__(
        self, labels: Any, *, tokenizer: str, max_tokens: MaxTokens = 512, pad_to: PadTo = MULTIPLE
    ) -> None:
        self.labels, self.tokenizer, self.max_tokens, self.pad_to = labels, tokenizer, max_tokens, pad_to

    def __len__(self) -> int:
        return len(self.labels)

    def known_labels(self) -> NDArray[Any]:
        return np.asarray(self.labels)

    def __getitem__(self, index: int) -> Item:
        ids = torch.from_numpy(self.tokens(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, self.labels[index].item()

    def text(self, index: int) -> str:
        raise NotImplementedError

    @cached_property
    def made(self) -> Any:
        """The tokenizer itself."""
        return load_tokenizer(self.tokenizer)

    @property
    def padding(self) -> int:
        return int(self.made.pad_token_id or 0)

    def tokens(self, index: int) -> NDArray[np.int64]:
        """An example's token ids."""
        ids = self.made(self.text(index), truncation=True, max_length=self.max_tokens)["input_ids"]
        return np.array(ids or [self.padding], np.int64)  # a model cannot attend to nothing

    def collate(self, items: Sequence[Item]) -> tuple[dict[str, Tensor], Tensor]:
        """A batch: ids padded to the longest of them (see ``pad_to``) and a mask that is 0 there."""
        x = padded([x["input_ids"] for x, _ in items], self.max_tokens, self.pad_to, self.padding)
        return x, torch.tensor([y for _, y in items])


class TextRows(TextExamples):
    """A column of a :class:`Table`, whose tokens are made once and then read from the disk.

    ``rows`` are those of the table's that count, by default all. ``metadata`` is one number a row for each
    name; ``names`` says what the numbers stand for, where they are codes.
    """

    def __init__(
        self,
        table: Table,
        text: str,
        labels: NDArray[np.int64],
        *,
        rows: NDArray[Any] | None = None,
        metadata: Mapping[str, NDArray[Any]] | None = None,
        names: Mapping[str, NDArray[Any]] | None = None,
        tokenizer: str = DISTILBERT,
        max_tokens: int = 512,
        pad_to: PadTo = MULTIPLE,
    ) -> None:
        super().__init__(labels, tokenizer=str(tokenizer), max_tokens=max_tokens, pad_to=pad_to)
        self.table, self.column = table, _place(table.path, list(table.header), text)
        self.rows = np.arange(len(table)) if rows is None else rows
        if len(self.rows) != len(labels):
            raise InputError(f"there are {len(self.rows)} rows and {len(labels)} labels; give one for each.")
        self.metadata, self.names = dict(metadata or {}), dict(names or {})

    def text(self, index: int) -> str:
        return self.table.record(int(self.rows[index]))[self.column]

    def path(self, index: int) -> str:
        return str(self.table.path)

    def problem(self, index: int) -> str | None:
        try:
            self.text(index)
        except (InputError, OSError, csv.Error) as error:
            return str(error)
        return None

    def tokens(self, index: int) -> NDArray[np.int64]:
        row = int(self.rows[index])
        ids = self.cache.get(row)
        if ids is None:
            ids = super().tokens(index)
            self.cache.put(row, ids)
        return ids

    @cached_property
    def cache(self) -> TokenCache:
        words = f"{identity(self.made)}-{self.max_tokens}-{self.column}"
        place = cache_folder() / "tokens" / f"{self.table.path.stem}-{self.table.key}-{words}.ids"
        return TokenCache(place, self.table.lengths, self.max_tokens, len(self.made))


def padded(every: Sequence[Tensor], max_tokens: int, pad_to: int | str, filler: int) -> dict[str, Tensor]:
    """Texts' ids as one batch, padded to the longest of them (see ``pad_to``), and a mask that is 0 there."""
    longest = max(map(len, every))
    if pad_to == "max":
        longest = max_tokens
    else:
        multiple = int(pad_to)
        longest = max(longest, min(max_tokens, -(-longest // multiple) * multiple))
    ids = torch.full((len(every), longest), filler)
    mask = torch.zeros_like(ids)
    for n, own in enumerate(every):
        ids[n, : len(own)] = own
        mask[n, : len(own)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def identity(tokenizer: Any) -> str:
    """Stands for all that decides what tokens a text becomes."""
    inside = getattr(tokenizer, "backend_tokenizer", None)
    if inside is not None:
        described_by = {
            k: v for k, v in parse_json(inside.to_str()).items() if k not in ("truncation", "padding")
        }
    else:
        described_by = {"vocabulary": tokenizer.get_vocab(), "kind": repr(tokenizer)}
    return hashlib.sha256(json.dumps([FORMAT, described_by], sort_keys=True).encode()).hexdigest()[:16]


def described(
    tokenizer: str, max_tokens: int, pad_to: int | str = MULTIPLE, column: str = ""
) -> dict[str, Any]:
    """How a text becomes what a model takes, as plain data; see :mod:`shoal.data.inputs`."""
    result = {"kind": "text", "tokenizer": str(tokenizer), "max_tokens": max_tokens, "pad_to": pad_to}
    return {**result, "column": column} if column else result


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, by the model's name or by the folder that its files are in."""
    need_transformers()
    return Source(name, "tokenizer", "tokenizer: DIR in data_options").tokenizer()
