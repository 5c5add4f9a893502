"""LoRA adapters: what they compute, what is trained, and a run from training to a file without peft."""

from __future__ import annotations

import json
import subprocess
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
from shoal.experiments.run import prepare, start_from
from shoal.models import FeatureModel, build, lora
from shoal.models.calling import call
from shoal.vision import allow_torchvision

allow_torchvision()  # which peft imports, by transformers
peft: Any = pytest.importorskip("peft", reason="peft is not installed", exc_type=ModuleNotFoundError)
pytestmark = pytest.mark.usefixtures("timm")
VIT, IMAGES = "test_vit", (3, 160, 160)


@pytest.fixture(autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path_factory.getbasetemp() / "lora cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A DistilBERT's folder."""
    pytest.importorskip("transformers")
    return str(fake_tokenizer(tmp_path_factory.mktemp("lora")))


def bert(place: Path, kind: str = "bert", weights: bool = False) -> str:
    """An encoder's folder, without weights, or with random ones of all but a pooler."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.AutoConfig.for_model(kind, vocab_size=210, **sizes)
    if weights:
        model = transformers.AutoModel.from_config(config, add_pooling_layer=False)
        model.save_pretrained(place)
    else:
        config.save_pretrained(place)
    return str(place)


def vit(**options: Any) -> FeatureModel:
    return build(VIT, input_shape=IMAGES, classes=3, seed=0, **{"lora": 4, **options})


def images(count: int = 2) -> Tensor:
    return torch.randn(count, *IMAGES, generator=torch.Generator().manual_seed(1))


def words(count: int = 3) -> dict[str, Tensor]:
    ids = torch.randint(5, 200, (count, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


def base_of(model: nn.Module) -> dict[str, Tensor]:
    """Everything that stays as it is: weights without gradients, and buffers."""
    names = set(trained_names(model))
    return {k: v.detach().clone() for k, v in model.state_dict().items() if k not in names}


def assert_base(model: nn.Module, before: dict[str, Tensor]) -> None:
    torch.testing.assert_close(base_of(model), before, rtol=0, atol=0, equal_nan=True)


def perturb(model: nn.Module) -> None:
    """Adapters that do something: B starts at zero."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.1 * torch.randn(p.shape, generator=draw))


# What is computed


@pytest.mark.parametrize("kind", ["vit", "distilbert", "bert"])
@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (3.0, 0.75)])
def test_the_formula(kind: str, alpha: float | None, scale: float, tiny: str, tmp_path: Path) -> None:
    """W + (alpha / r) B A, put by hand into a model without adapters."""
    names = {"vit": VIT, "distilbert": tiny, "bert": bert(tmp_path / "b")}
    shape, x = (IMAGES, images().double()) if kind == "vit" else ((64,), words())
    options = {"input_shape": shape, "classes": 3, "seed": 0, "pretrained": False}
    model = build(names[kind], **options, lora=4, lora_alpha=alpha).double().eval()
    plain = build(names[kind], **options).double().eval()
    perturb(model)
    weights = model.state_dict()
    by_hand = {k.replace(".base_layer.", "."): v.clone() for k, v in weights.items() if ".lora_" not in k}
    for name, a in weights.items():
        if ".lora_A." in name:
            layer, b = name.partition(".lora_A.")[0], weights[name.replace("lora_A", "lora_B")]
            for row in range(len(b)):
                for r in range(4):
                    by_hand[f"{layer}.weight"][row] += scale * b[row, r] * a[r]
    plain.load_state_dict(by_hand)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-10)


def test_it_starts_as_the_same_function(tiny: str) -> None:
    for name, shape, x in ((VIT, IMAGES, images()), (tiny, (64,), words())):
        options: dict[str, Any] = {"input_shape": shape, "classes": 3, "seed": 0}
        plain, adapted = build(name, **options).eval(), build(name, **options, lora=2).eval()
        whole: Any = [m.features.body for m in (plain, adapted)]
        outputs = [body(x) if name == VIT else body(**x).last_hidden_state for body in whole]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["vit", "text"])
def test_merged_is_the_same_and_has_no_adapters(name: str, tiny: str) -> None:
    model = vit() if name == "vit" else build(tiny, input_shape=(64,), classes=3, seed=0, lora=4)
    x = images() if name == "vit" else words()
    perturb(model)
    model.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    whole = lora.merged(model)
    assert not lora.adapted(whole)
    torch.testing.assert_close(whole(x), model(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    plain = vit(lora=None) if name == "vit" else build(tiny, input_shape=(64,), classes=3, seed=0)
    assert list(whole.state_dict()) == list(plain.state_dict())
    assert lora.merged(plain) is plain


# What is trained


def test_adapters_and_the_head_are_trained(tiny: str, tmp_path: Path) -> None:
    model = vit(dropout=0.2)
    assert {n.split(".")[-3] for n in trained_names(model) if "lora" in n} == {"lora_A", "lora_B"}
    assert [n for n in trained_names(model) if "lora" not in n] == ["head.1.weight", "head.1.bias"]
    assert all(".qkv.lora_" in n for n in trained_names(model) if "lora" in n)
    text = build(tiny, input_shape=(64,), classes=3, seed=0, lora=4)
    own = [n for n in trained_names(text) if "lora" not in n]
    assert own == ["features.layer.weight", "features.layer.bias", "head.1.weight", "head.1.bias"]
    assert {n.split(".")[-4] for n in trained_names(text) if "lora" in n} == {"q_lin", "v_lin"}
    # RoBERTa's published weights have no pooler: it is new.
    roberta = build(
        bert(tmp_path / "r", "roberta", weights=True), input_shape=(64,), classes=3, seed=0, lora=4
    )
    own = [n for n in trained_names(roberta) if "lora" not in n]
    assert own[:2] == [f"features.body.pooler.dense.{p}" for p in ("weight", "bias")]
    assert len(own) == 4


def test_targets(tmp_path: Path) -> None:
    def layers(targets: Any) -> set[str]:
        return {n.removeprefix("blocks.") for n in lora.adapted(vit(lora_targets=targets).features.body)}  # type: ignore[arg-type]

    assert layers("qkv") == layers(None) == {f"{n}.attn.qkv" for n in range(6)}
    assert layers(["attn.proj", "blocks.1.mlp.fc2"]) == {*(f"{n}.attn.proj" for n in range(6)), "1.mlp.fc2"}
    assert layers("proj") == {f"{n}.attn.proj" for n in range(6)}  # patch_embed.proj is a convolution
    with_dropout = lora.adapted(vit(lora_dropout=0.3))["features.body.blocks.0.attn.qkv"]
    assert with_dropout.lora_dropout["default"].p == 0.3


def refused(match: str, name: str = VIT, shape: tuple[int, ...] = IMAGES, **options: Any) -> None:
    with pytest.raises(InputError, match=match):
        build(name, input_shape=shape, classes=3, seed=0, **{"lora": 4, **options})


def test_what_cannot_be(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused("lora .*got 0", lora=0)
    refused("lora_alpha", lora_alpha=0)
    refused("lora_dropout", lora_dropout=1)
    refused("lora_alpha=3.0 requires lora=", lora=None, lora_alpha=3)
    refused("trains none; specify only one", frozen=True)
    refused("freeze_batchnorm=False", freeze_batchnorm=False)
    refused("no linear layer 'query'; choose from qkv, proj, fc1, fc2", lora_targets=["qkv", "query"])
    refused("no usual ones; choose from qkv", lora_targets=[])
    refused("it has no linear layers", "resnet18", (3, 32, 32))
    refused("no usual ones; choose from fc1, fc2", "mixer_s32_224", (3, 224, 224))
    refused("weight of 'blocks.0.attn.qkv' without calling", "beit_base_patch16_224", (3, 224, 224))
    refused("no linear layer 'qkv'; choose from q_lin, k_lin", tiny, (64,), lora_targets="qkv")
    monkeypatch.setattr(lora.importlib.util, "find_spec", lambda name: None)
    refused(r"^LoRA requires peft: pip install 'shoal\[lora\]'\.$")
    with pytest.raises(InputError, match="LoRA requires peft"):  # whatever the data, which are not read
        shoal.train("fish", "amazon", model_options={"lora": 4}, steps=1)
    vit(lora=None)


# Files of weights


def test_weights_in_a_file(tmp_path: Path) -> None:
    """Under timm's names, ours without adapters, and ours with them."""
    other = build(VIT, input_shape=IMAGES, classes=3, seed=7).eval()
    file, x = str(tmp_path / "w.pt"), images()
    torch.save(other.features.body.state_dict(), file)  # type: ignore[union-attr]
    model = vit().eval()
    start_from(model, file)
    torch.testing.assert_close(model.features(x), other.features(x), rtol=0, atol=1e-6)
    assert len(lora.adapted(model)) == 6
    torch.save(other.state_dict(), file)
    model = vit().eval()
    start_from(model, file)
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=1e-6)
    perturb(model)
    torch.save(model.state_dict(), file)
    again = vit().eval()
    start_from(again, file)
    assert torch.equal(again(x), model(x))
    torch.save({"a": torch.zeros(2)}, file)
    with pytest.raises(InputError, match="do not fit"):
        start_from(model, file)
    assert len(lora.adapted(model)) == 6


# From training to a file


WITHOUT_PEFT = """
import sys, torch
sys.modules["peft"] = None
model = torch.export.load(sys.argv[1]).module()
saved = torch.load(sys.argv[2])
with torch.no_grad():
    print(float((model(*saved["x"]) - saved["y"]).abs().max()))
"""


def check_run(folder: Path, x: Any, tmp_path: Path, *formats: str) -> None:
    """The base is bit-identical, and the trained model is exported with its adapters merged."""
    start = prepare(read_config(folder), "cpu").model
    weights = load_file(folder / "model.safetensors")
    moved = {n for n, v in start.state_dict().items() if not torch.equal(weights[n], v)}
    assert moved == set(trained_names(start))
    model = shoal.load(folder)
    assert lora.adapted(model)
    parts = list(x.values()) if isinstance(x, dict) else [x]
    with torch.no_grad():
        wanted = model(x)
    for name in formats:
        made = model.export(tmp_path / name)
        assert made.difference < 1e-5
        about = json.loads(made.about.read_text())["model"]
        assert "lora" not in json.dumps(about["options"])
    assert not any("lora_" in n or "base_layer" in n for n in load_file(tmp_path / "m.safetensors"))
    if "m.pt2" not in formats:
        return
    torch.save({"x": parts, "y": wanted}, tmp_path / "wanted.pt")
    call = [sys.executable, "-c", WITHOUT_PEFT, str(tmp_path / "m.pt2"), str(tmp_path / "wanted.pt")]
    shown = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    assert float(shown) < 1e-5


def test_a_text_run(tmp_path: Path) -> None:
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
    check_run(run, words(), tmp_path, "m.onnx", "m.safetensors")
    assert len(shoal.load(run).predict(["a good book", "no"])) == 2


# A model of the user's own


def own_model(**config: Any) -> Any:
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    config = {"r": 2, "target_modules": ["0", "3"], "modules_to_save": ["5"], **config}
    model = peft.get_peft_model(body, peft.LoraConfig(**config))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.track_running_stats = False  # which would change in training, as statistics do
    return model


def domains() -> dict[str, tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(3, 40, 4, generator=draw)
    return {name: (x[d] + 0.3 * d, (x[d, :, 0] > 0).long()) for d, name in enumerate("abc")}


def fit(algorithm: str, model: nn.Module, **options: Any) -> shoal.Fit:
    parts = domains()
    sets = {"train": {k: parts[k] for k in "ab"}, "validation": {"c": parts["c"]}}
    usual: dict[str, Any] = {"steps": 10, "batch_size": 8, "device": "cpu", "progress": False, "lr": 0.05}
    return shoal.fit(algorithm, model, **{**sets, **usual, "eval_every": 1, **options})


@pytest.mark.parametrize("algorithm", ["fish", "coral", "dann", "idgm", "mldg"])
def test_every_algorithm_trains_adapters_alone(algorithm: str) -> None:
    model = own_model()
    before, first = base_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    fit(algorithm, model, select="last", settings={"held_out": 1} if algorithm == "mldg" else {})
    assert_base(model, before)
    assert any(not torch.equal(first[k], v) for k, v in model.state_dict().items() if "lora_B" in k)


def test_it_is_loaded_and_exported(tmp_path: Path) -> None:
    model = own_model()
    fit("fish", model, folder=tmp_path / "run")
    loaded = shoal.load(tmp_path / "run", model=own_model())
    made = loaded.export(tmp_path / "m.pt2")
    x = domains()["a"][0]
    with torch.no_grad():
        found = torch.export.load(made.path).module()(x)
        torch.testing.assert_close(found, model.eval()(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("task_type", [None, "SEQ_CLS"])
def test_a_model_of_transformers(task_type: str | None) -> None:
    """Which a PeftModel calls with whatever it is given; tokenizers give more than ids and a mask."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    body = transformers.BertForSequenceClassification(config)
    model = peft.get_peft_model(body, peft.LoraConfig(r=2, task_type=task_type, target_modules=["query"]))
    before = base_of(model)
    draw = torch.Generator().manual_seed(0)
    x = {"input_ids": torch.randint(5, 50, (12, 6), generator=draw)}
    x |= {
        "attention_mask": torch.ones_like(x["input_ids"]),
        "token_type_ids": torch.zeros_like(x["input_ids"]),
    }
    wanted = body.eval()(**x).logits
    torch.testing.assert_close(call(model.eval(), x), wanted)
    examples = [({k: v[i] for k, v in x.items()}, i % 2) for i in range(12)]
    shoal.fit("fish", model, {"a": examples, "b": examples}, steps=2, batch_size=4, progress=False, lr=0.1)
    assert_base(model, before)
    assert not torch.allclose(call(model, x), wanted)
