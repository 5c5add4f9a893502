"""A dataset of Hugging Face's ``datasets`` as :class:`~shoal.data.DomainData`: images, text, or a table."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from shoal.data.arrays import numbered
from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.data.images import ImageFiles, image_frame
from shoal.data.splits import SHARE, Names, split, split_notes
from shoal.data.tables import from_table, need_column
from shoal.data.text import DISTILBERT, MaxTokens, TextExamples
from shoal.errors import InputError, check_names
from shoal.settings import Pixels, checked


@checked
def from_hf(
    dataset: Any,
    *,
    label: str,
    domain: str,
    held_out: Names = None,
    text: str | None = None,
    image: str | None = None,
    tokenizer: str | None = None,
    max_tokens: MaxTokens = 128,
    size: Pixels = 64,
    validation: float = SHARE,
    seed: int = 0,
    **options: Any,
) -> DomainData:
    """Load a Hugging Face ``datasets.Dataset`` (a single split): images, text for an encoder, or a table.

    Args:
        dataset: dataset to load.
        label: column to predict.
        domain: column with the domain of each example.
        held_out: held-out domains (default: none; train on all domains).
        text: column with text for an encoder.
        image: column with images (default: the column of type Image, if there is exactly one).
        tokenizer: name or folder of the model whose tokenizer is applied to ``text``; also the default model.
        max_tokens: maximum number of tokens; longer text is truncated.
        size: height and width that images are resized to.
        validation: fraction of each training domain that is held out for validation.
        seed: random seed of the validation split.
        **options: without ``text`` and ``image``, options of :func:`from_table`.
    """
    columns, images = _columns(dataset), image_columns(dataset)
    if text is not None and image is not None:
        raise InputError(f"text={text!r} and image={image!r}; only one of them can be the input.")
    if text is None and image is None:
        if len(images) != 1:
            options |= {"held_out": held_out, "validation": validation, "seed": seed}
            return from_table(as_mapping(dataset), label=label, domain=domain, **options)
        image = images[0]
    check_names("option of from_hf:", options, ())
    for name, what in ((label, "label"), (domain, "domain"), (text or image or "", "input")):
        need_column(name, columns, what)
    y, names = numbered(_values(dataset, label), f"column {label!r}")
    splits = split(Domains.from_labels(_values(dataset, domain)), held_out, validation, seed)
    about: dict[str, Any] = {"splits": splits, "classes": len(names) or None, "class_names": names}
    about["notes"] = split_notes(splits, y.numpy() if names else None, names)
    if text is None:
        pixels, shape = HubImages(dataset, str(image), y, size), (3, size, size)
        description = pixels.to_tensor.description
        return DomainData(pixels, **about, input_shape=shape, model="small-cnn", inputs=description)
    model, texts = str(tokenizer or DISTILBERT), _values(dataset, text)
    for row, value in enumerate(texts, 1):
        if not isinstance(value, str):
            raise InputError(f"column {text!r} has {value!r} in row {row}; it must be text.")
    words = TextExamples(texts, y.numpy(), tokenizer=model, max_tokens=max_tokens)
    description = words.description(text)
    return DomainData(words, **about, input_shape=(max_tokens,), model=model, inputs=description)


class HubImages(ImageFiles):
    """A column of images, each decoded and resized to a square when it is read, as image files are."""

    def __init__(self, rows: Any, column: str, labels: Any, size: int) -> None:
        from datasets import Image

        if column not in image_columns(rows):
            kind = rows.features[column]
            raise InputError(f"column {column!r} is of type {kind}, not images; cast it to datasets.Image().")
        names = (f"row {n + 1} of column {column!r}" for n in range(len(labels)))
        super().__init__(image_frame((name, "", "") for name in names), size=size)
        self.labels = labels.numpy()
        self.rows, self.column = rows.with_format(None).cast_column(column, Image(decode=False)), column

    def open(self, index: int) -> Any:
        value = self.rows[int(index)][self.column] or {"bytes": b""}
        return str(value["path"]) if value["bytes"] is None else io.BytesIO(value["bytes"])


def is_hf(data: Any) -> bool:
    """Whether it is a dataset of Hugging Face, or a dictionary of its splits."""
    several = data.values() if isinstance(data, Mapping) else [data]
    return any(hasattr(each, "features") and hasattr(each, "column_names") for each in several)


def image_columns(dataset: Any) -> list[str]:
    return [name for name, kind in dataset.features.items() if type(kind).__name__ == "Image"]


def as_mapping(dataset: Any) -> dict[str, list[Any]]:
    """The columns of a dataset as plain values."""
    return {name: _values(dataset, name) for name in _columns(dataset)}


def _columns(dataset: Any) -> list[str]:
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, dataset))
        raise InputError(f"this has the splits {names}; select one, such as dataset['train'].")
    if not is_hf(dataset):
        got = f"got {type(dataset).__name__}. Other data: from_table, from_arrays, from_dataset."
        raise InputError(f"a Dataset of Hugging Face is needed (pip install 'shoal[text]'), {got}")
    if not hasattr(dataset, "__len__"):
        raise InputError("a streaming dataset cannot be split by domain; load it without streaming.")
    return list(dataset.column_names)


def _values(dataset: Any, name: str) -> list[Any]:
    """A column as plain values; numbers that stand for names become these."""
    values = dataset.with_format(None)[name][:]
    names = getattr(dataset.features[name], "names", None)
    return [None if v is None or v < 0 else names[v] for v in values] if names else list(values)
