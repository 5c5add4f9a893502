"""From raw tables, images and text to what a trained model takes.

:class:`~shoal.data.DomainData` describes in plain data, under ``inputs``, how its examples were made. Such a
description is read here and nowhere else: ``reader(description, shape)`` gives a :class:`Reader`, whose
``batches(source)`` are names of examples and what the model takes of them, a part of the source at a time.
"""

from __future__ import annotations

import difflib
import itertools
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shoal.data.batch import leaves, map_nest
from shoal.data.images import BAD, ENDINGS, ToTensor, Unreadable, need_pillow
from shoal.data.tables import Encoder, Table, as_table, ending, is_table
from shoal.data.text import Encoding, load_tokenizer
from shoal.errors import InputError, unknown_name
from shoal.files import check_regular, lines_of, open_text, read_bytes

ROWS = 4096
"""Of a table that are encoded at a time, as words take much memory."""
TOKENIZER = "tokenizer"
"""The folder beside a trained model with its tokenizer's files."""


class Batch(NamedTuple):
    """Examples by name, and what the model takes of them."""

    names: list[str]
    x: Any


class Options(NamedTuple):
    """What the one who predicts may say of the source."""

    bad: str = "stop"
    """At an image that cannot be read, or ``skip`` it."""
    column: str | None = None
    """Of a table of texts: which column has them."""
    names: str | None = None
    """Of a table: the column that names the rows, which are else called by their numbers."""
    folder: Path | None = None
    """A trained model's, with the files that its description names. Nothing is fetched for such a model."""


class Reader(ABC):
    """Makes of raw input what a model takes; ``notes`` fill with what whoever asked should know."""

    takes: str
    """What it reads, in words."""

    def __init__(self, description: Mapping[str, Any], shape: Sequence[int], options: Options) -> None:
        self.description, self.shape, self.options = description, tuple(shape), options
        self.notes: list[str] = []
        self.doubts: list[str] = []
        """Those of the notes that say what could not be read."""

    @abstractmethod
    def batches(self, source: Any, batch_size: int = 256, workers: int = 0) -> Iterator[Batch]:
        """The examples of ``source`` in order."""

    def answers(self, outputs: NDArray[Any]) -> NDArray[Any]:
        """In regression, what the model gives in the units of what it learned from."""
        return outputs

    def sample(self, count: int, seed: int = 0) -> Any:
        """As many made-up inputs of the form that real ones have."""
        return torch.randn(count, *self.shape, generator=torch.Generator().manual_seed(seed))

    def kept(self) -> tuple[Mapping[str, Any], dict[str, bytes]]:
        """Files to put beside a model for what the description refers to, and a description that says so."""
        return self.description, {}

    def _refused(self, source: Any) -> InputError:
        what = repr(os.fspath(source)) if isinstance(source, str | Path) else f"a {type(source).__name__}"
        return InputError(f"this model takes {self.takes}, not {what}.")


def reader(description: Mapping[str, Any], shape: Sequence[int], **options: Any) -> Reader:
    """What reads raw input as ``description`` says, for a model that takes examples of ``shape``.

    ``options`` are the fields of :class:`Options`. An empty description stands for arrays that are ready.
    """
    kind = str(description.get("kind", "array"))
    if kind not in KINDS:
        raise unknown_name("kind of input", kind, KINDS)
    chosen = Options(**options)
    if chosen.bad not in BAD:
        raise unknown_name("way with bad images: bad =", str(chosen.bad), BAD)
    try:
        return KINDS[kind](description, shape, chosen)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the description of the model's {kind} input is damaged ({error!r}).") from error


class Arrays(Reader):
    """Inputs that are ready: tensors, NumPy arrays, or a ``.npy`` file, of which a part is read at a time."""

    @property
    def takes(self) -> str:  # type: ignore[override]
        if not self.shape:
            return "arrays of n examples, several of them in a tuple or mapping if it has several inputs"
        return f"arrays of shape (n, {', '.join(map(str, self.shape))}), or such a .npy file"

    def batches(self, source: Any, batch_size: int = 256, workers: int = 0) -> Iterator[Batch]:
        if not self.shape and isinstance(source, (Mapping, tuple, list)):
            yield from self._several(source, batch_size)
            return
        values = self._open(source)
        if self.shape and tuple(values.shape[1:]) != self.shape:
            raise InputError(f"this model takes {self.takes}; these have shape {tuple(values.shape)}.")
        for at in range(0, len(values), batch_size):
            part = _ready(values[at : at + batch_size], at)
            yield Batch([str(n + 1) for n in range(at, at + len(part))], part)

    def _several(self, source: Any, batch_size: int) -> Iterator[Batch]:
        """Of several inputs, in the nest that the model takes."""
        parts = list(leaves(source))
        if not parts or not all(isinstance(v, Tensor | np.ndarray) and v.ndim for v in parts):
            raise self._refused(source)
        sizes = [len(v) for v in parts]
        if min(sizes) != max(sizes):
            raise InputError(
                f"the inputs have {', '.join(map(str, sizes))} examples; the numbers must be equal."
            )
        for at in range(0, sizes[0], batch_size):
            end = min(at + batch_size, sizes[0])
            x = map_nest(partial(_rows_of, at, end), source)
            yield Batch([str(n + 1) for n in range(at, end)], x)

    def _open(self, source: Any) -> Any:
        if isinstance(source, str | Path) and str(source).lower().endswith(".npy"):
            try:
                check_regular(source)
                return np.load(source, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise InputError(f"{str(source)!r} is not an array that can be read ({error}).") from error
        if isinstance(source, Tensor | np.ndarray) and source.ndim:
            return source
        raise self._refused(source)


def _rows_of(start: int, end: int, values: Any) -> Tensor:
    return _ready(values[start:end], start)


def _ready(part: Any, at: int) -> Tensor:
    """Rows of an array, from number ``at`` on, as a tensor of finite numbers."""
    if not isinstance(part, Tensor):
        part = torch.from_numpy(np.array(part))
        part = part.float() if part.is_floating_point() else part
    if not bool(part.isfinite().all()):
        row = at + int((~part.isfinite()).reshape(len(part), -1).any(1).nonzero()[0])
        raise InputError(f"row {row + 1} of the input has a number that is not finite.")
    found: Tensor = part
    return found


# Tables


def check_columns(table: Table, needed: Sequence[str], what: str) -> None:
    """Refuses a table that lacks a column, with what it may be called there."""
    lacking = [name for name in needed if name not in table]
    if not lacking:
        return
    near = difflib.get_close_matches(lacking[0], list(table), n=1, cutoff=0.6)
    hint = f" Is {lacking[0]!r} named {near[0]!r} there?" if near else ""
    some = ", ".join(map(repr, lacking[:5])) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
    raise InputError(f"{table.where} lacks {what} {some}.{hint} It has: {_some(list(table), 20)}.")


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(repr, names[:most])) or "none") + more


class Tables(Reader):
    """Rows of a table, made into numbers as the training examples were."""

    takes = "a table: a .csv, .parquet or .xlsx file, a DataFrame or a mapping of columns"

    def __init__(self, description: Mapping[str, Any], shape: Sequence[int], options: Options) -> None:
        super().__init__(description, shape, options)
        self.encoder = Encoder.from_dict(description)

    def batches(self, source: Any, batch_size: int = 256, workers: int = 0) -> Iterator[Batch]:
        if not is_table(source):
            raise self._refused(source)
        table, needed, name = as_table(source), list(self.encoder.names), self.options.names
        check_columns(table, needed, "what the model needs:")
        if name is not None:
            check_columns(table, [name], "the column")
        if unused := [column for column in table if column not in (*needed, name)]:
            self.notes.append(f"{_many(len(unused), 'column')} not used: {_some(unused)}.")
        unknown = self.encoder.unknown(table).notes()
        self.doubts += unknown
        self.notes += unknown
        for start in range(0, table.rows, ROWS):
            rows = np.arange(start, min(start + ROWS, table.rows))
            x = torch.from_numpy(self.encoder.transform(table, rows))
            names = _named(table, name, rows)
            for at in range(0, len(x), batch_size):
                yield Batch(names[at : at + batch_size], x[at : at + batch_size])

    def answers(self, outputs: NDArray[Any]) -> NDArray[Any]:
        return self.encoder.predictions(outputs)


def _many(count: int, what: str) -> str:
    return f"{count} {what} is" if count == 1 else f"{count} {what}s are"


# Texts


class Texts(Reader):
    """Text as token ids and a mask: from a list, a file with one per line, or a column of a table."""

    takes = "text: a list of strings, a .txt file with one per line, or a table with a column of text"

    def __init__(self, description: Mapping[str, Any], shape: Sequence[int], options: Options) -> None:
        super().__init__(description, shape, options)
        self.max_tokens, self.pad_to = int(description["max_tokens"]), description.get("pad_to", 8)
        if self.max_tokens < 1 or (self.pad_to != "max" and int(self.pad_to) < 1):
            raise ValueError(f"max_tokens {self.max_tokens}, pad_to {self.pad_to}")
        self.name = str(description["tokenizer"])

    @cached_property
    def tokenizer(self) -> Any:
        if self.options.folder is None:
            return load_tokenizer(self.name)
        place = self.options.folder / self.name
        if Path(self.name).name != self.name or self.name == ".." or not place.is_dir():
            raise InputError(
                f"there is no tokenizer {self.name!r} next to the model in {str(place.parent)!r}."
            )
        return load_tokenizer(str(place.resolve()))

    def batches(self, source: Any, batch_size: int = 256, workers: int = 0) -> Iterator[Batch]:
        for names, texts in self._texts(source, batch_size):
            yield Batch(names, self._ids(texts))

    def _ids(self, texts: Sequence[str]) -> dict[str, Tensor]:
        return Encoding(self.tokenizer, self.max_tokens, self.pad_to)(texts)

    def _texts(self, source: Any, size: int) -> Iterator[tuple[list[str], list[str]]]:
        if isinstance(source, str | Path) and str(source).lower().endswith(".txt"):
            yield from _lines(Path(source), size)
            return
        if is_table(source):
            yield from self._column(as_table(source), size)
            return
        if isinstance(source, str | Path) or not hasattr(source, "__len__"):
            raise self._refused(source)
        for n, text in enumerate(source):
            if not isinstance(text, str):
                raise InputError(f"text {n + 1} is a {type(text).__name__}; each must be a str.")
        yield from _numbered(iter(source), size)

    def _column(self, table: Table, size: int) -> Iterator[tuple[list[str], list[str]]]:
        column = self.options.column or self.description.get("column")
        if column is None and len(table) == 1:
            column = next(iter(table))
        if column is None:
            raise InputError(f"specify the text column of {table.where}, one of: {_some(list(table), 20)}.")
        check_columns(table, [column, *([self.options.names] if self.options.names else [])], "the column")
        for start in range(0, table.rows, size):
            rows = np.arange(start, min(start + size, table.rows))
            texts = [value or "" for value in table[column].texts(rows)]
            yield _named(table, self.options.names, rows), texts

    def sample(self, count: int, seed: int = 0) -> Any:
        """Words of the tokenizer's own, up to eight a text, with another seed up to sixteen and so on."""
        words = sorted(word for word in self.tokenizer.get_vocab() if word.isalpha()) or ["a"]
        rng = np.random.default_rng(seed)
        lengths = [8 * (seed + 1), *rng.integers(1, 8 * (seed + 1), count - 1).tolist()]
        return self._ids([" ".join(rng.choice(words, length)) for length in lengths])

    def kept(self) -> tuple[Mapping[str, Any], dict[str, bytes]]:
        """The tokenizer's files: using the model then needs neither a network nor the folder they were in."""
        with tempfile.TemporaryDirectory() as place:
            self.tokenizer.save_pretrained(place)
            files = {f"{TOKENIZER}/{p.name}": read_bytes(p) for p in Path(place).iterdir()}
        return {**self.description, "tokenizer": TOKENIZER}, files


@contextmanager
def offline() -> Iterator[None]:
    """Within the block transformers finds what is on this machine and asks nobody else."""
    try:
        from huggingface_hub import constants
    except ImportError:
        yield
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _named(table: Table, column: str | None, rows: NDArray[Any]) -> list[str]:
    if column is None:
        return [str(row + 1) for row in rows]
    return [value or "" for value in table[column].texts(rows)]


def _numbered(texts: Iterator[str], size: int) -> Iterator[tuple[list[str], list[str]]]:
    start = 1
    while part := list(itertools.islice(texts, size)):
        yield [str(n) for n in range(start, start + len(part))], part
        start += len(part)


def _lines(path: Path, size: int) -> Iterator[tuple[list[str], list[str]]]:
    """The lines of a text file, blank ones too, so that numbers are those of an editor."""
    try:
        with open_text(path.expanduser()) as lines:
            yield from _numbered((line.rstrip("\r\n") for line in lines_of(lines, path)), size)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"{str(path)!r} cannot be read: {why}.") from error


# Images


class Images(Reader):
    """Images as in evaluation: of a folder and all below it, of a list of files, or a single one."""

    takes = "images: files, or a folder of them, or a list of Pillow's"

    def __init__(self, description: Mapping[str, Any], shape: Sequence[int], options: Options) -> None:
        super().__init__(description, shape, options)
        if (size := int(description["size"])) < 1:
            raise ValueError(f"size {size}")
        self.to_tensor = ToTensor(size, description["mean"], description["deviation"])

    def batches(self, source: Any, batch_size: int = 256, workers: int = 0) -> Iterator[Batch]:
        need_pillow()
        if _are_images(source):
            names, files = [str(n + 1) for n in range(len(source))], list(source)
        else:
            root, names = self._files(source)
            files = [os.path.join(root, name) for name in names]
        images = _Images(files, self.to_tensor)
        loader = DataLoader(
            images, batch_size=batch_size, num_workers=workers, collate_fn=list, generator=torch.Generator()
        )
        at = 0
        for items in loader:
            here, at = names[at : at + len(items)], at + len(items)
            fine = [(name, x) for name, (x, why) in zip(here, items, strict=True) if self._sound(name, why)]
            if fine:
                yield Batch([name for name, _ in fine], torch.stack([x for _, x in fine]))

    def _sound(self, name: str, why: str) -> bool:
        if not why:
            return True
        if self.options.bad == "stop":
            raise InputError(
                f"the image {name!r} cannot be read ({why}). Download it again, or skip such images "
                "(bad_images: skip)."
            )
        self.notes.append(f"the image {name!r} is skipped: {why}")
        return False

    def _files(self, source: Any) -> tuple[str, list[str]]:
        """A folder, and the names of files from there."""
        if not isinstance(source, str | Path):
            if isinstance(source, Tensor | np.ndarray | Mapping) or not hasattr(source, "__iter__"):
                raise self._refused(source)
            several = [Path(one).expanduser() for one in source]
            if len(several) == 1:
                return self._files(several[0])
            for path in several:
                if not path.is_file():
                    raise InputError(f"there is no image {str(path)!r}.")
            return "", [str(path) for path in several]
        path = Path(source).expanduser()
        if path.is_file():
            if ending(path):
                raise InputError(f"this model takes images, and {path.name!r} is a table.")
            return "", [str(path)]
        if not path.is_dir():
            raise InputError(f"there is no image and no folder {str(path)!r}.")
        names, others = _below(path)
        if not names:
            raise InputError(f"there is no image in {str(path)!r} or its subfolders: {', '.join(ENDINGS)}.")
        if others:
            self.notes.append(f"{others} files in {str(path)!r} are not images ({', '.join(ENDINGS)}).")
        return str(path), names


def _below(root: Path) -> tuple[list[str], int]:
    """The images in a folder and all below it, sorted, and how many other files there are."""
    names: list[str] = []
    others = 0
    for place, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        seen = [name for name in sorted(files) if not name.startswith(".")]
        result = [name for name in seen if name.lower().endswith(ENDINGS)]
        others += len(seen) - len(result)
        names += [os.path.relpath(os.path.join(place, name), root) for name in result]
    return names, others


def _are_images(source: Any) -> bool:
    """Whether it is a list of Pillow's images, such as a column of a Hugging Face dataset has."""
    return isinstance(source, list | tuple) and bool(source) and all(hasattr(p, "convert") for p in source)


class _Images(Dataset[tuple[Tensor, str]]):
    """Files, or Pillow's images, as the model takes them, or why one cannot be read."""

    def __init__(self, files: Sequence[Any], to_tensor: ToTensor) -> None:
        self.files, self.to_tensor = files, to_tensor

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        try:
            return self.to_tensor(self.files[index]), ""
        except Unreadable as error:
            return torch.empty(0), str(error)


KINDS: dict[str, type[Reader]] = {"array": Arrays, "image": Images, "table": Tables, "text": Texts}
