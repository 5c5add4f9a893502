"""From raw tables, images and text to what a trained model takes, by the classes that training uses.

:class:`~shoal.data.DomainData` describes in plain data, under ``inputs``, how its examples were made. Such a
description is read here and nowhere else: ``reader(description, shape)`` gives a :class:`Reader`, whose
``batches(source)`` are names of examples and what the model takes of them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.arrays import as_tensor
from shoal.data.batch import Examples, TensorData, leaves
from shoal.data.check import not_finite
from shoal.data.images import ENDINGS, ImageFiles, ToTensor, image_frame
from shoal.data.loader import InOrder, MetaBatchLoader
from shoal.data.tables import Encoder, as_table, is_table, need_column
from shoal.data.text import TextExamples
from shoal.errors import InputError, check_names
from shoal.tensors import map_nest

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
        column: of a table of text, which column has it.
        folder: a trained model's, with the files that its description names. Nothing is downloaded for it.

    Attributes:
        notes: what a user should know about the input, after it was opened.
        warnings: those of the notes that say what could not be read.
    """

    accepts = ""
    """What it reads, in words."""

    def __init__(
        self,
        description: Mapping[str, Any],
        shape: Sequence[int],
        *,
        column: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self.description, self.shape, self.column, self.folder = description, tuple(shape), column, folder
        self.notes, self.warnings = list[str](), list[str]()
        self.prepare()

    def prepare(self) -> None:
        """Read the description."""

    def open(self, source: Any) -> Examples:
        """The examples of ``source``, with labels that mean nothing."""
        raise NotImplementedError

    def names(self, examples: Examples) -> list[str]:
        return [str(n + 1) for n in range(len(examples))]

    def batches(self, source: Any, batch_size: int = 256, workers: int = 0) -> Iterator[Batch]:
        """The examples of ``source`` in order."""
        examples = self.open(source)
        names = self.names(examples)
        order = InOrder({"": np.arange(len(names))}, batch_size)
        loader = MetaBatchLoader(examples, order, workers=workers, stop=len(order.batches))
        for n, batch in enumerate(loader):
            yield Batch(names[n * batch_size : (n + 1) * batch_size], batch.x)
        loader.close()

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

    def prepare(self) -> None:
        self.accepts = "arrays of n examples, several of them in a tuple or mapping if it has several inputs"
        if self.shape:
            self.accepts = f"arrays of shape (n, {', '.join(map(str, self.shape))}), or such a .npy file"

    def open(self, source: Any) -> Examples:
        if isinstance(source, str | Path) and str(source).lower().endswith(".npy"):
            try:
                source = np.load(source, mmap_mode="c", allow_pickle=False)
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
        x = map_nest(lambda part: as_tensor(part, "the data"), source)
        for part in leaves(x):
            if len(part) and (wrong := not_finite(part)).any():
                row = int(wrong.int().argmax()) + 1
                raise InputError(f"row {row} of the input has a number that is not finite.")
        first = next(leaves(x))
        return TensorData(x, torch.zeros(len(first), device=first.device))


class Tables(Reader):
    """Rows of a table, encoded as the training examples were."""

    accepts = "a table: a .csv, .parquet or .xlsx file, a DataFrame or a mapping of columns"

    def prepare(self) -> None:
        self.encoder = Encoder.from_dict(self.description)

    def open(self, source: Any) -> Examples:
        if not is_table(source):
            raise self._refused(source)
        table = as_table(source)
        for name in self.encoder.names:
            need_column(name, table, f"model in {table.where}")
        if unused := [repr(name) for name in table if name not in self.encoder.names]:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            self.notes.append(f"Columns not used: {', '.join(unused[:5])}{more}.")
        self.warnings += (unknown := self.encoder.unknown(table).notes())
        self.notes += unknown
        x = torch.from_numpy(self.encoder.transform(table, np.arange(table.rows)))
        return TensorData(x, torch.zeros(len(x)))

    def in_units(self, outputs: NDArray[Any]) -> NDArray[Any]:
        return self.encoder.predictions(outputs)


class Texts(Reader):
    """Text as token ids and a mask: from a list, a file with one per line, or a column of a table."""

    accepts = "text: a list of strings, a .txt file with one per line, or a table with a column of text"

    def prepare(self) -> None:
        about, name = self.description, str(self.description["tokenizer"])
        if self.folder is not None:
            place = self.folder / name
            if Path(name).name != name or name == ".." or not place.is_dir():
                where = repr(str(place.parent))
                raise InputError(f"there is no tokenizer {name!r} next to the model in {where}.")
            name = str(place.resolve())
        self.options = {
            "tokenizer": name,
            "max_tokens": about["max_tokens"],
            "pad_to": about.get("pad_to", 8),
        }
        self.words = TextExamples([], [], **self.options)

    def open(self, source: Any) -> Examples:
        path = Path(source).expanduser() if isinstance(source, str | Path) else None
        if path is not None and path.suffix.lower() == ".txt":
            try:
                with path.open(encoding="utf-8-sig") as file:
                    texts = [line.rstrip("\n") for line in file]
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is not UTF-8 text"
                raise InputError(f"{str(path)!r} cannot be read: {why}.") from error
        elif is_table(source):
            table = as_table(source)
            column = self.column or self.description.get("column")
            if column is None and len(table) > 1:
                raise InputError(f"specify the text column of {table.where}, one of: {', '.join(table)}.")
            column = need_column(str(column), table, "text") if column else next(iter(table))
            texts = [text or "" for text in table[column].texts()]
        elif path is not None or not hasattr(source, "__len__"):
            raise self._refused(source)
        else:
            texts = list(source)
            for n, text in enumerate(texts, 1):
                if not isinstance(text, str):
                    raise InputError(f"text {n} is a {type(text).__name__}; each must be a str.")
        return TextExamples(texts, np.zeros(len(texts)), **self.options)

    def sample(self, count: int, seed: int = 0) -> Any:
        """Words of the tokenizer's own, up to eight per text, with another seed up to sixteen and so on."""
        words = sorted(word for word in self.words.loaded.get_vocab() if word.isalpha()) or ["a"]
        rng = np.random.default_rng(seed)
        lengths = [8 * (seed + 1), *rng.integers(1, 8 * (seed + 1), count - 1).tolist()]
        return self.words.encode([" ".join(rng.choice(words, length)) for length in lengths])

    def portable(self) -> tuple[Mapping[str, Any], dict[str, bytes]]:
        """With the tokenizer's files: using the model needs neither a network nor the folder they were in."""
        with tempfile.TemporaryDirectory() as place:
            self.words.loaded.save_pretrained(place)
            files = {f"{TOKENIZER}/{p.name}": p.read_bytes() for p in Path(place).iterdir()}
        return {**self.description, "tokenizer": TOKENIZER}, files


@contextmanager
def offline() -> Iterator[None]:
    """Within the block transformers finds what is on this machine and asks nobody else."""
    try:
        from huggingface_hub import constants
    except ImportError:
        yield
        return
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


class Images(Reader):
    """Images as in evaluation: of a folder and all below it, of a list of files, or a single one."""

    accepts = "images: files, or a folder of them, or a list of Pillow's"
    root: Path | None = None
    """The folder that was opened."""

    def prepare(self) -> None:
        about = self.description
        self.to_tensor = ToTensor(about["size"], about["mean"], about["deviation"])

    def open(self, source: Any) -> Examples:
        several = [source] if isinstance(source, str | Path) or hasattr(source, "convert") else source
        if isinstance(several, Tensor | np.ndarray | Mapping) or not hasattr(several, "__iter__"):
            raise self._refused(source)
        images = list(several)
        if all(isinstance(each, str | Path) for each in images):
            images = [Path(each).expanduser() for each in images]
            if len(images) == 1 and images[0].is_dir():
                self.root, images = images[0], self._below(images[0])
            for path in images:
                if not path.is_file():
                    raise InputError(f"there is no image {str(path)!r}.")
        if not all(hasattr(each, "convert") or isinstance(each, Path) for each in images):
            raise self._refused(source)
        examples = ImageFiles(image_frame((image, "", "") for image in images), size=self.to_tensor.size)
        examples.to_tensor = self.to_tensor
        return examples

    def names(self, examples: Examples) -> list[str]:
        """Those of files, in a folder from there; images in memory have numbers."""
        paths = [examples.path(n) for n in range(len(examples))]
        if self.root is not None:
            return [str(Path(path).relative_to(self.root)) for path in paths]
        return paths if all(paths) else super().names(examples)

    def _below(self, root: Path) -> list[Path]:
        """The images in a folder and all below it, sorted; other files are mentioned."""
        every = [path for path in sorted(root.rglob("[!.]*")) if path.is_file()]
        images = [path for path in every if path.suffix.lower() in ENDINGS]
        if not images:
            raise InputError(f"there is no image in {str(root)!r} or its subfolders: {', '.join(ENDINGS)}.")
        if others := len(every) - len(images):
            self.notes.append(f"{others} files in {str(root)!r} are not images ({', '.join(ENDINGS)}).")
        return images


KINDS: dict[str, type[Reader]] = {"array": Arrays, "image": Images, "table": Tables, "text": Texts}
