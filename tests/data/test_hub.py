"""Datasets of Hugging Face: tables, images and text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from imitations.wilds_text import fake_tokenizer
from shoal import models
from shoal.data import DomainData, from_hf
from shoal.errors import InputError

hub = pytest.importorskip("datasets")
PLACES = ["in", "out", "sea"] * 4


def scored_groups(data: DomainData) -> tuple[str, ...]:
    """The groups that are scored after a few steps."""
    model = models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
    names: tuple[str, ...] = shoal.fit("fish", model, data, steps=3, progress=False).scores("test").names
    return names


def test_tables() -> None:
    draw = np.random.default_rng(0)
    table = {"age": draw.normal(50, 10, 90), "colour": draw.choice(["red", "blue"], 90)}
    table |= {"site": ["oslo", "lima", "kyoto"] * 30, "ill": draw.integers(0, 2, 90)}
    number, text = hub.Value("float64"), hub.Value("string")
    kinds = {"age": number, "colour": text, "site": text, "ill": hub.ClassLabel(names=["well", "ill"])}
    whole = hub.Dataset.from_dict(table, features=hub.Features(kinds))
    data = from_hf(whole, label="ill", domain="site", held_out="oslo", drop=["colour"])
    assert (data.class_names, data.input_shape) == (("ill", "well"), (1,))
    with pytest.raises(InputError, match=r"splits train; select one, such as dataset\['train'\]"):
        from_hf(hub.DatasetDict({"train": whole}), label="ill", domain="site")
    with pytest.raises(InputError, match="got ndarray"):
        from_hf(np.zeros(3), label="ill", domain="site")
    with pytest.raises(InputError, match=r"'age' is of type .*float64.*, not images"):
        from_hf(whole, label="ill", domain="site", image="age")
    with pytest.raises(InputError, match="only one of them can be the input"):
        from_hf(whole, label="ill", domain="site", image="age", text="colour")


def test_images() -> None:
    pil = pytest.importorskip("PIL.Image")
    images = [pil.new("RGB" if n % 2 else "L", (12, 9), (n, 0, 0) if n % 2 else 40) for n in range(12)]
    content = {"image": images, "label": ["cat", "dog"] * 6, "place": PLACES}
    whole = hub.Dataset.from_dict(content).cast_column("image", hub.Image())
    data = from_hf(whole, label="label", domain="place", held_out="out", size=16)
    assert (data.input_shape, data.class_names, data.inputs["kind"]) == ((3, 16, 16), ("cat", "dog"), "image")
    x, y = data.examples[1]
    assert (x.shape, x.dtype, int(y)) == ((3, 16, 16), torch.float32, 1)
    assert scored_groups(data) == ("out",)
    rows = [
        {"bytes": b"no image", "path": None},
        *whole.cast_column("image", hub.Image(decode=False))["image"][1:],
    ]
    broken = hub.Dataset.from_dict({**content, "image": rows}).cast_column("image", hub.Image())
    with pytest.raises(InputError, match="the image \"row 1 of column 'image'\" cannot be read"):
        from_hf(broken, label="label", domain="place").examples[0]


def test_text(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fake_tokenizer(tmp_path)
    tiny = str(tmp_path / "tiny-bert")
    content = {"text": ["the good film", "it"] * 6, "label": ["up", "down"] * 6, "place": PLACES}
    options: dict[str, Any] = {"label": "label", "domain": "place", "text": "text", "tokenizer": tiny}
    data = from_hf(hub.Dataset.from_dict(content), **options, held_out="out", max_tokens=8)
    assert (data.model, data.input_shape, data.class_names) == (tiny, (8,), ("down", "up"))
    assert data.inputs["kind"] == "text"
    x, y = data.examples.batch([0, 1])
    long, short = x["attention_mask"].sum(1).tolist()
    assert long > short
    assert y.tolist() == [1, 0]
    assert scored_groups(data) == ("out",)
    content["text"][4] = None  # type: ignore[call-overload]
    with pytest.raises(InputError, match="column 'text' has None in row 5; it must be text"):
        from_hf(hub.Dataset.from_dict(content), **options)
