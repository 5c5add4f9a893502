"""Encoders of text: what the published classifiers compute, padding that counts for nothing, and training."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import shoal
from imitations.wilds_text import fake_amazon, fake_civilcomments, fake_tokenizer
from shoal import algorithms, models
from shoal.data import MetaBatch, MetaBatchLoader, Task
from shoal.data.hub import Source
from shoal.data.sampler import DomainBatchSampler
from shoal.data.sets import load
from shoal.errors import InputError
from shoal.models import FeatureModel, language
from shoal.training.engine import Engine
from shoal.training.evaluate import Evaluator

pytestmark = pytest.mark.usefixtures("timm")  # whose torchvision transformers imports, where there is one
SHAPE = (64,)


@pytest.fixture(autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path_factory.getbasetemp() / "text cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    fake_tokenizer(folder)
    return folder


@pytest.fixture
def tiny(root: Path) -> str:
    return str(root / "tiny-bert")


def texts(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 200, (len(lengths), max(lengths)), generator=draw)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def longer(x: dict[str, Tensor], length: int, filler: int = 0) -> dict[str, Tensor]:
    more = (0, length - x["input_ids"].shape[1])
    return {
        "input_ids": pad(x["input_ids"], more, value=filler),
        "attention_mask": pad(x["attention_mask"], more),
    }


def built(name: str, classes: int | None = 3, seed: int = 0, **options: Any) -> FeatureModel:
    return models.build(name, input_shape=SHAPE, classes=classes, seed=seed, **options)


def folder_of(place: Path, kind: str, **more: Any) -> str:
    """A model's folder without weights."""
    place.mkdir()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = {"model_type": kind, "vocab_size": 210, **sizes, **more}
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


# What they compute


def test_shapes(tiny: str) -> None:
    x = texts(7, 3, 5)
    model = built(tiny)
    assert model.training
    assert model(x).shape == (3, 3)
    assert model.features(x).shape == (3, 32)
    assert built(tiny, classes=None)(x).shape == (3,)


def test_distilbert_is_the_published_classifier(tiny: str) -> None:
    from transformers import DistilBertForSequenceClassification

    model = built(tiny, classes=2).eval()
    theirs = DistilBertForSequenceClassification.from_pretrained(tiny, num_labels=2).eval()
    theirs.distilbert.load_state_dict(model.features.body.state_dict())  # type: ignore[union-attr, arg-type]
    theirs.pre_classifier.load_state_dict(model.features.layer.state_dict())  # type: ignore[union-attr]
    theirs.classifier.load_state_dict(model.head[1].state_dict())  # type: ignore[index]
    torch.testing.assert_close(model(texts(9, 4)), theirs(**texts(9, 4)).logits)
    assert model.head[0].p == theirs.dropout.p == 0.2  # type: ignore[index]


def test_bert_is_the_published_classifier(tmp_path: Path) -> None:
    from transformers import AutoConfig, BertForSequenceClassification

    name = folder_of(tmp_path / "bert", "bert")
    model = built(name, classes=2, pretrained=False).eval()
    theirs = BertForSequenceClassification(AutoConfig.from_pretrained(name, num_labels=2)).eval()
    theirs.bert.load_state_dict(model.features.body.state_dict())  # type: ignore[union-attr, arg-type]
    theirs.classifier.load_state_dict(model.head[1].state_dict())  # type: ignore[index]
    torch.testing.assert_close(model(texts(9, 4)), theirs(**texts(9, 4)).logits)
    assert model.head[0].p == theirs.dropout.p == 0.1  # type: ignore[index]


@pytest.mark.parametrize("kind", ["roberta", "albert", "electra", "tiny"])
def test_padding_counts_for_nothing(kind: str, tmp_path: Path, tiny: str) -> None:
    model = built(tiny) if kind == "tiny" else built(folder_of(tmp_path / "m", kind), pretrained=False)
    model = model.double().eval()
    x = texts(9, 4, 6)
    expected = model(x)
    for length, filler in ((12, 0), (40, 0), (64, 17)):  # whatever stands where the mask is 0
        torch.testing.assert_close(model(longer(x, length, filler)), expected, rtol=0, atol=1e-10)
    alone = model({k: v[1:2, :4] for k, v in x.items()})
    torch.testing.assert_close(alone, expected[1:2], rtol=0, atol=1e-10)
    whole = model({"input_ids": x["input_ids"], "attention_mask": torch.ones_like(x["input_ids"])})
    assert not torch.allclose(whole, expected)  # the mask counts


def test_known_names_need_no_files() -> None:
    """Their sizes are those of the published models."""

    def made(name: str) -> nn.Module:
        source = Source(name, "model", "")
        return language._random(source, language._config(source, pretrained=False), None)

    with torch.device("meta"):
        body, bert = made("distilbert-base-uncased"), made("google-bert/bert-base-uncased")
    assert sum(p.numel() for p in body.parameters()) == 66_362_880
    assert sum(p.numel() for p in bert.parameters()) == 109_482_240


def test_the_seed_decides(tiny: str) -> None:
    def weights(seed: int, **options: Any) -> Tensor:
        return nn.utils.parameters_to_vector(built(tiny, seed=seed, **options).parameters())

    torch.manual_seed(7)
    first, drawn = weights(0, pretrained=False), torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(first, weights(0, pretrained=False))
    assert not torch.equal(first, weights(1, pretrained=False))
    assert torch.equal(weights(0), weights(0))
    a, b = built(tiny, seed=0), built(tiny, seed=1)
    assert torch.equal(*(m.features.body.embeddings.word_embeddings.weight for m in (a, b)))  # type: ignore[union-attr]
    assert not torch.equal(a.head[1].weight, b.head[1].weight)  # type: ignore[index]


def test_weights_go_round(tiny: str, tmp_path: Path) -> None:
    model = built(tiny)
    stored = load_file(Path(tiny, "model.safetensors"))
    for name, value in model.features.body.state_dict().items():  # type: ignore[union-attr, operator]
        assert torch.equal(value, stored[name]), name
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    other = built(tiny, seed=5, pretrained=False)
    x = texts(5, 8)
    assert not torch.equal(other.eval()(x), model.eval()(x))
    other.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert torch.equal(other(x), model(x))


def test_options(tiny: str) -> None:
    assert models.options_of(tiny) == [
        *("pretrained", "dropout", "attention", "lora", "lora_alpha", "lora_dropout", "lora_targets")
    ]
    assert models.options_of("distilbert-base-uncased") == models.options_of(tiny)
    assert built(tiny, dropout=0.5).head[0].p == 0.5  # type: ignore[index]
    with pytest.raises(InputError, match=r"dropout must be at least 0 and below 1, got 1\.5"):
        built(tiny, dropout=1.5)
    with pytest.raises(InputError, match=r"unknown option of model '.*tiny-bert': 'width'"):
        built(tiny, width=3)


# What is refused


def test_unknown_names_have_near_misses() -> None:
    with pytest.raises(
        InputError, match=r"unknown model 'distilbert-base-uncasd'. Did you mean 'distilbert-base-unc"
    ):
        built("distilbert-base-uncasd")
    with pytest.raises(InputError, match=r"unknown model 'sprit-cnn'. Did you mean 'sprite-cnn'"):
        built("sprit-cnn")
    assert "language" not in models.registry.names()


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("import pathlib; pathlib.Path('was-run').touch()",)


def test_no_strangers_code_is_run(tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "m"
    shutil.copytree(tiny, place)
    (place / "model.safetensors").unlink()
    (place / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Evil()}))
    with pytest.raises(InputError, match="cannot be loaded"):
        built(str(place))
    torch.save({"x": Evil()}, place / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be loaded"):
        built(str(place))
    config = json.loads((place / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (place / "config.json").write_text(json.dumps(config))
    (place / "own.py").write_text("import pathlib; pathlib.Path('was-run').touch()")
    for pretrained in (True, False):
        with pytest.raises(InputError, match="cannot be loaded"):
            built(str(place), pretrained=pretrained)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        (
            "gpt2",
            {"n_embd": 16, "n_layer": 1, "n_head": 2},
            "'gpt2' is not a supported text encoder",
        ),
        ("t5", {"d_model": 16, "d_kv": 8}, "'t5' is not a supported text encoder"),
        ("vit", {}, "'vit' is not a supported text encoder"),
        ("bert", {"is_decoder": True}, "is a left-to-right model"),
        ("bert", {"vocab_size": 2**40}, "vocab_size in config.json is 1099511627776"),
        ("bert", {"num_hidden_layers": 2**20}, "num_hidden_layers in config.json is 1048576"),
        ("bert", {"hidden_act": "/tmp/x"}, "hidden_act in config.json is '/tmp/x'"),
        ("bert", {"hidden_act": {"a": 1}}, "hidden_act in config.json is"),
        ("bert", {"max_position_embeddings": 40}, "40 tokens, not 64"),
        ("roberta", {"max_position_embeddings": 64}, "62 tokens, not 64"),
    ],
)
def test_models_that_do_not_fit(kind: str, more: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        built(folder_of(tmp_path / "m", kind, **more), pretrained=False)


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'shoal\[text\]'"):
        built("bert-base-uncased")
    assert "dropout" in models.options_of("bert-base-uncased")


def test_importing_models_imports_no_transformers() -> None:
    code = "import sys, shoal.models, shoal.data.text; print('transformers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "False"


# Batches of different lengths

LENGTHS = ((7, 4, 5, 6), (12, 3, 8, 2), (3, 3, 2, 1))
WAYS: dict[str, dict[str, Any]] = {
    "erm": {},
    "erm-by-domain": {},
    "fish": {"meta_lr": 0.5},
    "irm": {"start": 0, "weight": 3.0},
    "coral": {},
    "groupdro": {},
    "fishr": {"start": 0, "weight": 1.0},
    "sam": {},
    "mixup": {"where": "features"},
    "idgm": {},
}


def batch(length: int) -> MetaBatch:
    """Texts of three domains, all padded to ``length``."""
    parts = [longer(texts(*lengths, seed=d), length) for d, lengths in enumerate(LENGTHS)]
    x = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    y = torch.cat([torch.tensor([0, 1, 2, d]) for d in range(3)])
    return MetaBatch(x, y, torch.arange(3).repeat_interleave(4), (4,) * 3)


def after(name: str, given: MetaBatch, model: FeatureModel, **options: Any) -> dict[str, Tensor]:
    """The weights after two steps."""
    torch.manual_seed(0)
    made = algorithms.build(name, model, cross_entropy, Task(3, 3, features=32), **WAYS[name])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = Engine(made, optimizer, auxiliary=made.auxiliary_optimizers(), **options)
    for step in range(2):
        engine.step(given, step)
    return model.state_dict()


@pytest.mark.parametrize("name", WAYS)
def test_a_step_does_not_depend_on_the_padding(name: str, tiny: str) -> None:
    def model() -> FeatureModel:
        return built(tiny, attention="eager").double().eval()  # without dropout, which depends on shapes

    expected = after(name, batch(20), model())
    found = after(name, batch(12), model())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    start = model().state_dict()
    assert any((found[k] - start[k]).abs().max() > 1e-3 for k in start)
    if name == "erm":  # and in pieces
        pieces = after(name, batch(12), model(), accumulate=2)
        torch.testing.assert_close(pieces, expected, rtol=0, atol=1e-6)


# End to end, on imitations


@pytest.fixture(scope="module")
def imitations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imitations")
    fake_civilcomments(folder)
    fake_amazon(folder)
    return folder


@pytest.mark.parametrize(("algorithm", "dataset"), [("erm", "civilcomments"), ("fish", "amazon")])
def test_training(algorithm: str, dataset: str, imitations: Path) -> None:
    data = load(dataset, folder=str(imitations), tokenizer=str(imitations / "tiny-bert"), max_tokens=64)
    model = models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
    run = shoal.fit(
        algorithm,
        model,
        data,
        steps=24,
        batch_size=8,
        domains_per_step=5,
        optimizer=lambda params: torch.optim.Adam(params, 3e-3),
        device="cpu",
        progress=False,
        eval_limit=40,
    )
    assert run.accuracy(data.splits["test"].names[0]) >= 0
    scored = Evaluator(data.examples, {"train": data.splits["train"]}, task=data.task, batch_size=64)
    untrained = models.build(data.model, input_shape=data.input_shape, classes=data.classes, seed=0)
    assert scored(model)["train"].average > scored(untrained)["train"].average + 0.05


def test_fixed_lengths_have_one_shape(imitations: Path) -> None:
    options = {"folder": str(imitations), "tokenizer": str(imitations / "tiny-bert"), "max_tokens": 64}

    def shapes(**more: Any) -> set[Any]:
        data = load("amazon", **options, **more)
        sampler = DomainBatchSampler(data.splits["train"], 4, 3, seed=0)
        loader = MetaBatchLoader(data.examples, sampler, stop=8)
        return {batch.x["input_ids"].shape for batch in loader}

    assert shapes(pad_to="max") == {(12, 64)}
    assert len(shapes()) > 1  # steps of many shapes run one by one
