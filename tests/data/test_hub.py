"""Arrays, datasets of torch and of Hugging Face as domains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import shoal
from imitations.wilds_text import fake_tokenizer
from shoal import models
from shoal.data import DomainData, from_arrays, from_dataset, from_hf
from shoal.errors import InputError


class TestOtherSources:
    def fitted(self, data: DomainData) -> Any:
        model = models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
        return shoal.fit("fish", model, data, steps=3, progress=False)

    @pytest.mark.parametrize("tensors", [True, False])
    def test_arrays(self, tensors: bool) -> None:
        x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3 + 1
        site = ["a", "b", "c"] * 20
        given = (torch.tensor(x), torch.tensor(y), site) if tensors else (x, y, np.array(site))
        data = from_arrays(*given, held_out="c")
        assert (data.class_names, data.classes, data.input_shape) == (("1", "2", "3"), 3, (4,))
        assert self.fitted(data).scores("test").names == ("c",)

    def test_arrays_of_pictures_and_of_quantities(self) -> None:
        data = from_arrays(np.zeros((12, 3, 16, 16), np.uint8), ["x", "y"] * 6, [0, 0, 1] * 4, held_out="1")
        assert (data.model, data.input_shape) == ("small-cnn", (3, 16, 16))
        quantity = from_arrays(np.zeros((40, 2)), np.linspace(0, 5, 40), [0, 1] * 20)
        assert isinstance(quantity.examples, torch.utils.data.Dataset)
        assert quantity.classes is None
        assert "test" not in quantity.splits

    @pytest.mark.parametrize(
        ("x", "says"),
        [
            (np.zeros((3, 2)), "x has 3 examples and y has 2"),
            (np.array([["a"], ["b"]]), "must be numbers"),
            (np.zeros(2), r"shape \(2,\)"),
        ],
    )
    def test_arrays_that_do_not_fit(self, x: Any, says: str) -> None:
        with pytest.raises(InputError, match=says):
            from_arrays(x, [0, 1], ["a", "b"])

    def test_a_dataset_of_torch(self) -> None:
        pairs = TensorDataset(torch.randn(30, 4), torch.arange(30) % 3)
        data = from_dataset(pairs, ["a", "b", "c"] * 10, held_out="a")
        assert (data.classes, data.input_shape, data.model) == (3, (4,), "tabular")
        assert self.fitted(data).scores("test").names == ("a",)
        with pytest.raises(InputError, match="30 examples and 3 domains"):
            from_dataset(pairs, ["a", "b", "c"])
        with pytest.raises(InputError, match=r"pair \(x, y\)"):
            from_dataset(TensorDataset(torch.randn(2, 4)), ["a", "b"])

    def test_hugging_face_tables(self) -> None:
        hub = pytest.importorskip("datasets")
        draw = np.random.default_rng(0)
        table = {
            "age": draw.normal(50, 10, 90),
            "colour": draw.choice(["red", "blue"], 90),
            "site": ["oslo", "lima", "kyoto"] * 30,
            "ill": draw.choice(["yes", "no"], 90),
        }
        numbered = hub.Features(
            {
                "age": hub.Value("float64"),
                "colour": hub.Value("string"),
                "site": hub.Value("string"),
                "ill": hub.ClassLabel(names=["well", "ill"]),
            }
        )
        content = {**table, "ill": (table["ill"] == "yes").astype(int)}
        whole = hub.Dataset.from_dict(content, features=numbered)
        data = from_hf(whole, label="ill", domain="site", held_out="oslo", drop=["colour"])
        assert data.class_names == ("ill", "well")
        assert data.input_shape == (1,)
        with pytest.raises(InputError, match=r"splits train; select one, such as dataset\['train'\]"):
            from_hf(hub.DatasetDict({"train": whole}), label="ill", domain="site")
        with pytest.raises(InputError, match="got ndarray"):
            from_hf(np.zeros(3), label="ill", domain="site")

    def test_hugging_face_pictures(self) -> None:
        hub, pil = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
        pictures = [
            pil.new("RGB" if n % 2 else "L", (12, 9), 40 if n % 2 == 0 else (n, 0, 0)) for n in range(12)
        ]
        content = {"image": pictures, "label": ["cat", "dog"] * 6, "place": ["in", "out", "sea"] * 4}
        whole = hub.Dataset.from_dict(content).cast_column("image", hub.Image())
        data = from_hf(whole, label="label", domain="place", held_out="out", size=16)
        assert (data.input_shape, data.class_names) == ((3, 16, 16), ("cat", "dog"))
        assert data.inputs["kind"] == "image"
        x, y = data.examples[1]
        assert (x.shape, x.dtype, int(y)) == ((3, 16, 16), torch.float32, 1)
        assert self.fitted(data).scores("test").names == ("out",)

    def test_hugging_face_text(self, tmp_path: Path) -> None:
        hub = pytest.importorskip("datasets")
        pytest.importorskip("transformers")
        fake_tokenizer(tmp_path)
        tiny = str(tmp_path / "tiny-bert")
        content = {
            "text": ["the good film", "it"] * 6,
            "label": ["up", "down"] * 6,
            "place": ["a", "b", "c"] * 4,
        }
        given = {"label": "label", "domain": "place", "held_out": "b", "text": "text", "tokenizer": tiny}
        data = from_hf(hub.Dataset.from_dict(content), **given, max_tokens=8)
        assert (data.model, data.input_shape, data.class_names) == (tiny, (8,), ("down", "up"))
        assert data.inputs["kind"] == "text"
        collate = data.examples.collate  # type: ignore[attr-defined]
        x, y = collate([data.examples[0], data.examples[1]])
        long, short = x["attention_mask"].sum(1).tolist()
        assert long > short
        assert y.tolist() == [1, 0]
        assert self.fitted(data).scores("test").names == ("b",)
