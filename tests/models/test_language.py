"""Encoders of text: what the published classifiers compute, padding that counts for nothing, and training."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import pad

from imitations.wilds_text import fake_tokenizer
from shoal import models
from shoal.errors import InputError
from shoal.models import FeatureModel

pytestmark = pytest.mark.usefixtures("timm", "offline")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fake_tokenizer(tmp_path_factory.mktemp("texts")))


def texts(*lengths: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 200, (len(lengths), max(lengths)), generator=draw)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def built(name: str, classes: int | None = 3, seed: int = 0, **options: Any) -> FeatureModel:
    return models.build(name, input_shape=(64,), classes=classes, seed=seed, **options)


def folder_of(place: Path, kind: str, **more: Any) -> str:
    """A model's folder without weights."""
    place.mkdir()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    (place / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 210, **sizes, **more}))
    return str(place)


@pytest.mark.parametrize("kind", ["distilbert", "bert"])
def test_the_published_classifier(kind: str, tiny: str, tmp_path: Path) -> None:
    import transformers

    name = tiny if kind == "distilbert" else folder_of(tmp_path / "bert", "bert")
    model: Any = built(name, classes=2, pretrained=kind == "distilbert")
    config = transformers.AutoConfig.from_pretrained(name, num_labels=2)
    made: Any = transformers.AutoModelForSequenceClassification.from_config(config)
    getattr(made, kind).load_state_dict(model.features.body.state_dict())
    if kind == "distilbert":
        made.pre_classifier.load_state_dict(model.features.layer.state_dict())
    made.classifier.load_state_dict(model.head[1].state_dict())
    torch.testing.assert_close(model.eval()(texts(9, 4)), made.eval()(**texts(9, 4)).logits)
    assert model.head[0].p == made.dropout.p == {"distilbert": 0.2, "bert": 0.1}[kind]
    assert built(name, classes=None, pretrained=False)(texts(7, 3, 5)).shape == (3,)


def test_padding_counts_for_nothing(tmp_path: Path, tiny: str) -> None:
    for model in (built(tiny), built(folder_of(tmp_path / "m", "roberta"), pretrained=False)):
        x, expected = texts(9, 4, 6), model.double().eval()(texts(9, 4, 6))
        for length, filler in ((12, 0), (64, 17)):  # whatever stands where the mask is 0
            more = (0, length - 9)
            ids, mask = pad(x["input_ids"], more, value=filler), pad(x["attention_mask"], more)
            longer = model({"input_ids": ids, "attention_mask": mask})
            torch.testing.assert_close(longer, expected, rtol=0, atol=1e-10)
        whole = model({"input_ids": x["input_ids"], "attention_mask": torch.ones_like(x["input_ids"])})
        assert not torch.allclose(whole, expected)  # the mask counts


def test_weights_are_those_of_the_file_and_new_layers_follow_the_seed(tiny: str) -> None:
    stored, (a, b) = load_file(Path(tiny, "model.safetensors")), (built(tiny, seed=seed) for seed in (0, 1))
    for model in (a, b):
        for name, value in model.features.body.state_dict().items():  # type: ignore[union-attr, operator]
            assert torch.equal(value, stored[name]), name
    assert not torch.equal(a.head[1].weight, b.head[1].weight)  # type: ignore[index]
    random = [
        nn.utils.parameters_to_vector(built(tiny, seed=s, pretrained=False).parameters()) for s in (0, 0, 1)
    ]
    assert torch.equal(random[0], random[1])
    assert not torch.equal(random[0], random[2])


def test_pickled_weights_are_not_read(tmp_path: Path, tiny: str) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save(load_file(Path(tiny, "model.safetensors")), tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be loaded"):
        built(str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2}, "is not a text encoder"),
        ("bert", {"max_position_embeddings": 40}, "40 tokens, not 64"),
        ("roberta", {"max_position_embeddings": 64}, "62 tokens, not 64"),
    ],
)
def test_models_that_do_not_fit(kind: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        built(folder_of(tmp_path / "m", kind, **more), pretrained=False)


def test_bad_names_options_and_inputs(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"'distilbert-base-uncasd'. Did you mean 'distilbert-base-unc"):
        built("distilbert-base-uncasd")
    with pytest.raises(InputError, match=r"unknown option of model '.*tiny-bert': 'width'"):
        built(tiny, width=3)
    with pytest.raises(InputError, match="takes text, input_shape"):
        models.build(tiny, input_shape=(3, 8, 8), classes=2, seed=0)
    model = built(tiny)
    with pytest.raises(InputError, match="takes a mapping with input_ids"):
        model(torch.zeros(2, 3))
    ids = torch.full((1, 4), 10**6)
    with pytest.raises(InputError, match=r"the token 1000000, .*do not belong together"):
        model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'shoal\[text\]'"):
        built("bert-base-uncased")
