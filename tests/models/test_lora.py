"""LoRA adapters: what they compute, what is trained, and a run from training to a file without peft."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shoal
from imitations.wilds_text import fake_amazon, fake_tokenizer
from shoal.errors import InputError
from shoal.experiments.config import read_config
from shoal.models import FeatureModel, build, lora
from shoal.models.calling import call
from shoal.vision import allow_torchvision

allow_torchvision()  # which peft imports, by transformers
peft: Any = pytest.importorskip("peft", reason="peft is not installed", exc_type=ModuleNotFoundError)
pytestmark = pytest.mark.usefixtures("timm", "offline")
VIT, IMAGES = "test_vit", (3, 160, 160)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A DistilBERT's folder."""
    return str(fake_tokenizer(tmp_path_factory.mktemp("lora")))


def vit(**options: Any) -> FeatureModel:
    return build(VIT, input_shape=IMAGES, classes=3, seed=0, **{"lora": 4, **options})


def images(count: int = 2) -> Tensor:
    return torch.randn(count, *IMAGES, generator=torch.Generator().manual_seed(1))


def words(count: int = 3) -> dict[str, Tensor]:
    ids = torch.randint(5, 200, (count, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def adapted(model: nn.Module) -> list[str]:
    """The layers with adapters."""
    return [
        name.removesuffix(".base_layer") for name, _ in model.named_modules() if name.endswith(".base_layer")
    ]


def perturb(model: nn.Module) -> None:
    """Adapters that do something: B starts at zero."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=draw))


@pytest.mark.parametrize(("kind", "alpha", "scale"), [("vit", None, 2.0), ("text", 3.0, 0.75)])
def test_the_formula(kind: str, alpha: float | None, scale: float, tiny: str) -> None:
    """W + (alpha / r) B A by hand in a model without adapters; so is the merged model, and with B = 0 W."""
    name, shape, x = (VIT, IMAGES, images().double()) if kind == "vit" else (tiny, (64,), words())
    model = build(name, input_shape=shape, classes=3, seed=0, lora=4, lora_alpha=alpha).double().eval()
    plain = build(name, input_shape=shape, classes=3, seed=1).double().eval()
    for factor in (0.0, 1.0):
        if factor:
            perturb(model)
        weights = model.state_dict()
        by_hand = {k.replace(".base_layer.", "."): v.clone() for k, v in weights.items() if "lora_" not in k}
        for key, a in weights.items():
            if ".lora_A." in key:
                b = weights[key.replace("lora_A", "lora_B")]
                by_hand[f"{key.partition('.lora_A.')[0]}.weight"] += factor * scale * b @ a
        plain.load_state_dict(by_hand)
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-10)
    whole = lora.merged(model)
    assert not adapted(whole)
    torch.testing.assert_close(whole.state_dict(), plain.state_dict(), rtol=0, atol=1e-12)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert lora.merged(plain) is plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": 0}, "lora .*got 0"),
        ({"lora_targets": ["qkv", "query"]}, r"must be .* \(qkv, proj, fc1, fc2\), got \['qkv', 'query'\]"),
        ({"name": "resnet18", "input_shape": (3, 32, 32)}, "lora_targets must be .*it has none"),
        ({}, r"peft is not installed: pip install 'shoal\[peft\]'\.$"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not options:
        monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=message):
        build(**{"name": VIT, "input_shape": IMAGES, "classes": 3, "seed": 0, "lora": 4, **options})


def test_a_run_from_training_to_a_file(tmp_path: Path) -> None:
    """The base stays bit-identical, and what is exported needs no adapters."""
    fake_amazon(tmp_path)
    tiny, run = tmp_path / "tiny-bert", tmp_path / "run"
    shoal.train(
        *("fish", "amazon"),
        data_options={"folder": str(tmp_path), "max_tokens": 32, "tokenizer": str(tiny)},
        model=str(tiny),
        model_options={"lora": 2, "lora_targets": ["q_lin", "k_lin"]},
        **{"steps": 2, "batch_size": 4, "domains_per_step": 2, "eval_limit": 8},
        **{"device": "cpu", "out": run, "progress": False},
    )
    assert read_config(run).lr == 2e-4
    start = build(str(tiny), input_shape=(32,), classes=5, seed=0, lora=2, lora_targets=["q_lin", "k_lin"])
    weights, trained = load_file(run / "model.safetensors"), trained_names(start)
    assert all(torch.equal(weights[n], v) for n, v in start.state_dict().items() if n not in trained)
    assert any(not torch.equal(weights[n], start.state_dict()[n]) for n in trained)
    model = shoal.load(run)
    made = model.export(tmp_path / "m.safetensors")
    assert "lora" not in json.dumps(json.loads(made.about.read_text())["model"]["options"])
    assert not any("lora_" in n or "base_layer" in n for n in load_file(made.path))
    assert len(model.predict(["a good book", "no"])) == 2


def test_a_peft_model_of_the_users_own(tmp_path: Path) -> None:
    """It is trained, loaded and exported; one of transformers passes on whatever it is given."""
    import transformers

    def own() -> Any:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        config = {"r": 2, "target_modules": ["0", "2"], "modules_to_save": ["4"]}
        return peft.get_peft_model(body, peft.LoraConfig(**config))

    draw, model = torch.Generator().manual_seed(5), own()
    data = {name: (torch.randn(12, 4, generator=draw), torch.arange(12) % 2) for name in "abc"}
    first, trained = {k: v.clone() for k, v in model.state_dict().items()}, trained_names(model)
    options: dict[str, Any] = {"steps": 3, "batch_size": 4, "lr": 0.05, "progress": False, "device": "cpu"}
    shoal.fit("fish", model, data, folder=tmp_path / "run", **options)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(first[k], v)}
    assert changed
    assert changed <= set(trained)
    made, x = shoal.load(tmp_path / "run", model=own()).export(tmp_path / "m.pt2"), data["a"][0]
    with torch.no_grad():
        found = torch.export.load(made.path).module()(x)
        torch.testing.assert_close(found, model.eval()(x), rtol=0, atol=1e-5)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=210, **sizes))
    wrapped = peft.get_peft_model(bert, peft.LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["query"]))
    more = {**words(), "token_type_ids": torch.zeros_like(words()["input_ids"])}  # of a tokenizer
    torch.testing.assert_close(call(wrapped.eval(), more), bert.eval()(**more).logits)
