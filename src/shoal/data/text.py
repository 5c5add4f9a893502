"""Text: encoders' tokenizers by transformers, and examples that are tokenised a batch at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import Examples
from shoal.errors import InputError
from shoal.settings import Range, checked
from shoal.vision import load

T = TypeVar("T")
MULTIPLE = 8
DISTILBERT = "distilbert-base-uncased"
MaxTokens = Annotated[int, Range(4, 10**6)]
PadTo = Annotated[int, Range(1, 10**6)] | Literal["max"]


def is_folder(name: str) -> bool:
    """Whether a model's name is that of a model's folder here, or can be nothing but a path."""
    path = Path(name)
    return name.startswith((".", "~")) or path.is_absolute() or (path / "config.json").is_file()


def from_hub(what: str, name: str, read: Callable[..., T]) -> T:
    """``read(name, **options)`` with files of a folder, of the cache, or else of the Hugging Face Hub.

    Code that comes with them is not executed. Whatever is wrong with them is an InputError.
    """
    advice = "; a folder with config.json, weights and tokenizer can be given instead"
    if is_folder(name):
        name, advice = str(Path(name).expanduser()), ""
        if not Path(name).is_dir():
            raise InputError(f"there is no folder {name!r}.")
    try:
        try:
            return read(name, trust_remote_code=False, local_files_only=True)
        except OSError:
            if not advice:
                raise
            return read(name, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit, InputError):
        raise
    except BaseException as error:  # tokenizers panics, which is no Exception
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(f"the {what} of {name!r} cannot be loaded ({first[:200]}){advice}.") from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, by the model's name or by the folder that its files are in."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # which the loader's processes are instead
    transformers = load("transformers", "text")

    def read(name: str, **options: Any) -> Any:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        ids = tokenizer("A text: the vocabulary may be broken, which only its use shows.")["input_ids"]
        if not ids or min(ids) < 0:
            raise ValueError(f"it makes {ids!r} of a text")
        if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
            raise ValueError("it has no vocabulary")
        return tokenizer

    return from_hub("tokenizer", name, read)


class TextExamples(Examples):
    """Text and labels; :meth:`collate` tokenises a batch.

    Args:
        texts: the texts, such as a list or a column of a dataset of Hugging Face; empty ones are allowed.
        labels: label of each text.
        tokenizer: of which model, by name or folder; it is loaded when the first text is needed.
        max_tokens: what is longer is cut off.
        pad_to: batches are padded to a multiple of this, or with ``"max"`` all to ``max_tokens``: steps then
            all have the same shapes.
    """

    @checked
    def __init__(
        self,
        texts: Any,
        labels: Any,
        *,
        tokenizer: str,
        max_tokens: MaxTokens = 512,
        pad_to: PadTo = MULTIPLE,
    ) -> None:
        if len(texts) != len(labels):
            raise InputError(f"there are {len(texts)} texts and {len(labels)} labels; give one for each.")
        self.texts, self.labels, self.tokenizer = texts, np.asarray(labels), tokenizer
        self.max_tokens, self.pad_to = max_tokens, pad_to

    def __len__(self) -> int:
        return len(self.labels)

    def known_labels(self) -> NDArray[Any]:
        return self.labels

    def __getitem__(self, index: int) -> tuple[str, Any]:
        return str(self.texts[int(index)] or ""), self.labels[index].item()

    @cached_property
    def loaded(self) -> Any:
        """The tokenizer itself."""
        return load_tokenizer(self.tokenizer)

    def encode(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Token ids and a mask that is 0 at padding, (B, L) each."""
        filler = int(self.loaded.pad_token_id or 0)
        tokens = self.loaded(list(texts), truncation=True, max_length=self.max_tokens)["input_ids"]
        rows = [ids or [filler] for ids in tokens]  # a model cannot attend to nothing
        length, longest = self.max_tokens, max(map(len, rows))
        if self.pad_to != "max":
            length = max(longest, min(length, -(-longest // int(self.pad_to)) * int(self.pad_to)))
        ids = torch.tensor([row + [filler] * (length - len(row)) for row in rows])
        mask = torch.arange(length) < torch.tensor(list(map(len, rows)))[:, None]
        return {"input_ids": ids, "attention_mask": mask.long()}

    def collate(self, items: Sequence[tuple[str, Any]]) -> tuple[dict[str, Tensor], Tensor]:
        texts, labels = zip(*items, strict=True)
        return self.encode(texts), torch.tensor(labels)

    def description(self, column: str = "") -> dict[str, Any]:
        """How a text becomes what a model takes, as plain data; see :mod:`shoal.data.inputs`."""
        about = {"kind": "text", "tokenizer": self.tokenizer, "max_tokens": self.max_tokens}
        return {**about, "pad_to": self.pad_to, **({"column": column} if column else {})}
