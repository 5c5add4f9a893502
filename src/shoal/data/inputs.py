"""From raw tables, images and text to what a trained model takes.

:class:`~shoal.data.DomainData` describes in plain data, under ``inputs``, how its examples were made. Such a
description is read here and nowhere else: ``reader(description, shape)`` gives a :class:`Reader`, whose
``batches(source)`` are names of examples and what the model takes of them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from shoal.data.batch import leaves, map_nest
from shoal.data.images import BAD, ENDINGS, ToTensor, Unreadable, need_pillow
from shoal.data.tables import Encoder, as_table, ending, is_table, need_column
from shoal.data.text import load_tokenizer, tokenize
from shoal.errors import InputError, check_names

TOKENIZER = "tokenizer"
"""The folder beside a trained model with its tokenizer's files."""


class Batch(NamedTuple):
    """Examples by name, and what the model takes of them."""

    names: list[str]
    x: Any


class Reader:
    """Makes of raw input what a model takes.

    Args:
        description: how examples were made in training.
        shape: of an example, as the model takes it.
        bad: at an image that cannot be read: ``stop``, or ``skip`` it.
        column: of a table of text, which column has it.
        names: column of a table that names the rows, which are else called by their numbers.
        folder: a trained model's, with the files that its description names. Nothing is downloaded for it.

    Attributes:
        notes: what a user should know about the input, after its batches were read.
        warnings: those of the notes that say what could not be read.
    """

    accepts: str
    """What it reads, in words."""

    def __init__(
        self,
        description: Mapping[str, Any],
        shape: Sequence[int],
        *,
        bad: str = "stop",
        column: str | None = None,
        names: str | None = None,
        folder: Path | None = None,
    ) -> None:
        check_names("bad_images", [bad], BAD)
        self.description, self.shape = description, tuple(shape)
        self.bad, self.column, self.names, self.folder = bad, column, names, folder
        self.notes, self.warnings = list[str](), list[str]()

    def open(self, source: Any) -> tuple[list[str], Callable[[int, int], Any]]:
        """The names of all examples, and a function that makes of some of them what the model takes."""
        raise NotImplementedError

    def batches(self, source: Any, batch_size: int = 256, workers: int = 0) -> Iterator[Batch]:
        """The examples of ``source`` in order."""
        names, made = self.open(source)
        for start in range(0, len(names), batch_size):
            stop = min(start + batch_size, len(names))
            yield Batch(names[start:stop], made(start, stop))

    def in_units(self, outputs: NDArray[Any]) -> NDArray[Any]:
        """In regression, the model's outputs in the units of the label."""
        return outputs

    def sample(self, count: int, seed: int = 0) -> Any:
        """As many made-up inputs of the form that real ones have."""
        return torch.randn(count, *self.shape, generator=torch.Generator().manual_seed(seed))

    def portable(self) -> tuple[Mapping[str, Any], dict[str, bytes]]:
        """A description that refers to no other file than those that come with it, by name."""
        return self.description, {}

    def _refused(self, source: Any) -> InputError:
        what = repr(os.fspath(source)) if isinstance(source, str | Path) else f"a {type(source).__name__}"
        return InputError(f"this model takes {self.accepts}, not {what}.")

    def _rows(self, table: Any) -> list[str]:
        """The names of the rows of a table."""
        if self.names is None:
            return [str(row + 1) for row in range(table.rows)]
        need_column(self.names, table, "names of the rows")
        return [text or "" for text in table[self.names].texts()]


def reader(description: Mapping[str, Any], shape: Sequence[int], **options: Any) -> Reader:
    """What reads raw input as ``description`` says, for a model that takes examples of ``shape``.

    ``options`` are those of :class:`Reader`. An empty description stands for arrays that are ready.
    """
    kind = str(description.get("kind", "array"))
    check_names("kind of input", [kind], KINDS)
    try:
        return KINDS[kind](description, shape, **options)
    except InputError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise InputError(f"the description of the model's {kind} input is damaged ({error!r}).") from error


class Arrays(Reader):
    """Inputs that are ready: tensors, NumPy arrays (several in a tuple or mapping), or a ``.npy`` file."""

    @property
    def accepts(self) -> str:  # type: ignore[override]
        if not self.shape:
            return "arrays of n examples, several of them in a tuple or mapping if it has several inputs"
        return f"arrays of shape (n, {', '.join(map(str, self.shape))}), or such a .npy file"

    def open(self, source: Any) -> tuple[list[str], Callable[[int, int], Any]]:
        if isinstance(source, str | Path) and str(source).lower().endswith(".npy"):
            try:
                source = np.load(source, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise InputError(f"{str(source)!r} is not an array that can be read ({error}).") from error
        parts = [source] if self.shape else list(leaves(source))
        if not parts or not all(isinstance(v, Tensor | np.ndarray) and v.ndim for v in parts):
            raise self._refused(source)
        if self.shape and tuple(source.shape[1:]) != self.shape:
            raise InputError(f"this model takes {self.accepts}; these have shape {tuple(source.shape)}.")
        if len({len(part) for part in parts}) > 1:
            sizes = ", ".join(str(len(part)) for part in parts)
            raise InputError(f"the inputs have {sizes} examples; the numbers must be equal.")
        names = [str(n + 1) for n in range(len(parts[0]))]
        return names, lambda start, stop: map_nest(lambda part: _finite(part[start:stop], start), source)


def _finite(part: Any, first: int) -> Tensor:
    """Rows of an array, from number ``first`` on, as a tensor of finite numbers."""
    if isinstance(part, Tensor):
        x = part
    else:
        x = torch.from_numpy(np.array(part))
        x = x.float() if x.is_floating_point() else x
    if not bool(x.isfinite().all()):
        row = first + int((~x.isfinite()).reshape(len(x), -1).any(1).nonzero()[0])
        raise InputError(f"row {row + 1} of the input has a number that is not finite.")
    return x


class Tables(Reader):
    """Rows of a table, encoded as the training examples were."""

    accepts = "a table: a .csv, .parquet or .xlsx file, a DataFrame or a mapping of columns"

    def __init__(self, description: Mapping[str, Any], shape: Sequence[int], **options: Any) -> None:
        super().__init__(description, shape, **options)
        self.encoder = Encoder.from_dict(description)

    def open(self, source: Any) -> tuple[list[str], Callable[[int, int], Any]]:
        if not is_table(source):
            raise self._refused(source)
        table = as_table(source)
        for name in self.encoder.names:
            need_column(name, table, f"model in {table.where}")
        if unused := [repr(name) for name in table if name not in (*self.encoder.names, self.names)]:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            self.notes.append(f"Columns not used: {', '.join(unused[:5])}{more}.")
        self.warnings += (unknown := self.encoder.unknown(table).notes())
        self.notes += unknown
        encode = self.encoder.transform
        return self._rows(table), lambda a, b: torch.from_numpy(encode(table, np.arange(a, b)))

    def in_units(self, outputs: NDArray[Any]) -> NDArray[Any]:
        return self.encoder.predictions(outputs)


class Texts(Reader):
    """Text as token ids and a mask: from a list, a file with one per line, or a column of a table."""

    accepts = "text: a list of strings, a .txt file with one per line, or a table with a column of text"

    def __init__(self, description: Mapping[str, Any], shape: Sequence[int], **options: Any) -> None:
        super().__init__(description, shape, **options)
        self.max_tokens, self.pad_to = int(description["max_tokens"]), description.get("pad_to", 8)
        if self.max_tokens < 1 or (self.pad_to != "max" and int(self.pad_to) < 1):
            raise ValueError(f"max_tokens {self.max_tokens}, pad_to {self.pad_to}")
        self.name = str(description["tokenizer"])

    @cached_property
    def tokenizer(self) -> Any:
        if self.folder is None:
            return load_tokenizer(self.name)
        place = self.folder / self.name
        if Path(self.name).name != self.name or self.name == ".." or not place.is_dir():
            where = repr(str(place.parent))
            raise InputError(f"there is no tokenizer {self.name!r} next to the model in {where}.")
        return load_tokenizer(str(place.resolve()))

    def open(self, source: Any) -> tuple[list[str], Callable[[int, int], Any]]:
        names: list[str] | None = None
        if isinstance(source, str | Path) and str(source).lower().endswith(".txt"):
            texts = _lines(Path(source).expanduser())
        elif is_table(source):
            table = as_table(source)
            column = self.column or self.description.get("column")
            if column is None and len(table) > 1:
                raise InputError(f"specify the text column of {table.where}, one of: {', '.join(table)}.")
            column = need_column(str(column), table, "text") if column else next(iter(table))
            texts, names = [text or "" for text in table[column].texts()], self._rows(table)
        elif isinstance(source, str | Path) or not hasattr(source, "__len__"):
            raise self._refused(source)
        else:
            texts = list(source)
            for n, text in enumerate(texts, 1):
                if not isinstance(text, str):
                    raise InputError(f"text {n} is a {type(text).__name__}; each must be a str.")
        return names or [str(n + 1) for n in range(len(texts))], lambda a, b: self._ids(texts[a:b])

    def _ids(self, texts: Sequence[str]) -> dict[str, Tensor]:
        return tokenize(self.tokenizer, texts, self.max_tokens, self.pad_to)

    def sample(self, count: int, seed: int = 0) -> Any:
        """Words of the tokenizer's own, up to eight per text, with another seed up to sixteen and so on."""
        words = sorted(word for word in self.tokenizer.get_vocab() if word.isalpha()) or ["a"]
        rng = np.random.default_rng(seed)
        lengths = [8 * (seed + 1), *rng.integers(1, 8 * (seed + 1), count - 1).tolist()]
        return self._ids([" ".join(rng.choice(words, length)) for length in lengths])

    def portable(self) -> tuple[Mapping[str, Any], dict[str, bytes]]:
        """With the tokenizer's files: using the model needs neither a network nor the folder they were in."""
        with tempfile.TemporaryDirectory() as place:
            self.tokenizer.save_pretrained(place)
            files = {f"{TOKENIZER}/{p.name}": p.read_bytes() for p in Path(place).iterdir()}
        return {**self.description, "tokenizer": TOKENIZER}, files


@contextmanager
def offline() -> Iterator[None]:
    """Within the block transformers finds what is on this machine and asks nobody else."""
    try:
        from huggingface_hub import constants
    except ImportError:
        constants = SimpleNamespace(HF_HUB_OFFLINE=True)  # type: ignore[assignment]
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _lines(path: Path) -> list[str]:
    """The lines of a text file, blank ones too, so that numbers are those of an editor."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return [line.rstrip("\n") for line in file]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"{str(path)!r} cannot be read: {why}.") from error


class Images(Reader):
    """Images as in evaluation: of a folder and all below it, of a list of files, or a single one."""

    accepts = "images: files, or a folder of them, or a list of Pillow's"

    def __init__(self, description: Mapping[str, Any], shape: Sequence[int], **options: Any) -> None:
        super().__init__(description, shape, **options)
        if (size := int(description["size"])) < 1:
            raise ValueError(f"size {size}")
        self.to_tensor = ToTensor(size, description["mean"], description["deviation"])

    def batches(self, source: Any, batch_size: int = 256, workers: int = 0) -> Iterator[Batch]:
        need_pillow()
        images, generator = _Decoded(*self._files(source), self.to_tensor), torch.Generator()
        loader = DataLoader(images, batch_size, num_workers=workers, collate_fn=list, generator=generator)
        for items in loader:
            sound = []
            for name, x in items:
                if isinstance(x, Tensor):
                    sound.append((name, x))
                elif self.bad == "skip":
                    self.notes.append(f"the image {name!r} is skipped: {x}")
                else:
                    advice = "Download it again, or skip such images (bad_images: skip)"
                    raise InputError(f"the image {name!r} cannot be read ({x}). {advice}.")
            if sound:
                names, tensors = zip(*sound, strict=True)
                yield Batch(list(names), torch.stack(tensors))

    def _files(self, source: Any) -> tuple[list[str], list[Any]]:
        """Names, and images of Pillow's or paths; in a folder, a name is the path from there."""
        several = [source] if isinstance(source, str | Path) else source
        if isinstance(several, Tensor | np.ndarray | Mapping) or not hasattr(several, "__iter__"):
            raise self._refused(source)
        several = list(several)
        if several and all(hasattr(each, "convert") for each in several):
            return [str(n + 1) for n in range(len(several))], several
        if not all(isinstance(each, str | Path) for each in several):
            raise self._refused(source)
        paths = [Path(each).expanduser() for each in several]
        if len(paths) == 1 and paths[0].is_dir():
            return self._below(paths[0])
        for path in paths:
            if ending(path):
                raise InputError(f"this model takes images, and {path.name!r} is a table.")
            if not path.is_file():
                raise InputError(f"there is no image {str(path)!r}.")
        return [str(path) for path in paths], [str(path) for path in paths]

    def _below(self, root: Path) -> tuple[list[str], list[str]]:
        """The images in a folder and all below it, sorted; other files are mentioned."""
        every = [path.relative_to(root) for path in sorted(root.rglob("[!.]*")) if path.is_file()]
        images = [str(path) for path in every if path.suffix.lower() in ENDINGS]
        if not images:
            raise InputError(f"there is no image in {str(root)!r} or its subfolders: {', '.join(ENDINGS)}.")
        if others := len(every) - len(images):
            self.notes.append(f"{others} files in {str(root)!r} are not images ({', '.join(ENDINGS)}).")
        return images, [str(root / path) for path in images]


class _Decoded(Dataset["tuple[str, Tensor | str]"]):
    """Files, or Pillow's images, by name: as the model takes them, or why one cannot be read."""

    def __init__(self, names: Sequence[str], files: Sequence[Any], to_tensor: ToTensor) -> None:
        self.names, self.files, self.to_tensor = names, files, to_tensor

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[str, Tensor | str]:
        try:
            return self.names[index], self.to_tensor(self.files[index])
        except Unreadable as error:
            return self.names[index], str(error)


KINDS: dict[str, type[Reader]] = {"array": Arrays, "image": Images, "table": Tables, "text": Texts}
