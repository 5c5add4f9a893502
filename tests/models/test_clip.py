"""Image towers of CLIP and SigLIP: the zero-shot head is the published one, and a start for training."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shoal
from imitations.wilds_text import fake_tokenizer
from shoal import datasets
from shoal.errors import InputError
from shoal.models import FeatureModel, build, options_of
from shoal.models.clip import NORMALIZATION

SHAPE, NAMES = (3, 32, 32), ["silly", "warm", "polite people"]
TOKENIZER = ("vocab.txt", "tokenizer_config.json")


pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, timm: Any) -> dict[str, str]:
    """Tiny random models of the real classes, with a tokenizer."""
    import transformers

    root, found = tmp_path_factory.mktemp("clip"), {}
    tokenizer = fake_tokenizer(root)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text = small | {
        "vocab_size": 512,
        "max_position_embeddings": 16,
        "eos_token_id": 3,
        "projection_size": 16,
    }
    vision = small | {"image_size": 32, "patch_size": 8}
    for kind, name in (("clip", "CLIP"), ("siglip", "Siglip")):
        more = {"projection_dim": 12} if kind == "clip" else {}
        config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **more)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(transformers, f"{name}Model")(config)
            for p in model.parameters():  # initial weights are so small that embeddings are alike
                p.data += 0.2 * torch.randn_like(p)
            model.logit_scale.data.fill_(1.5)
        model.save_pretrained(root / kind)
        for file in TOKENIZER:
            shutil.copy(tokenizer / file, root / kind)
        found[kind] = str(root / kind)
    return found


def made(folder: str, **options: Any) -> FeatureModel:
    given = {"class_names": NAMES, **options}
    return build(f"clip:{folder}", input_shape=SHAPE, classes=3, seed=0, **given)


def images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_the_zero_shot_head_is_the_models_own(kind: str, folders: dict[str, str]) -> None:
    """With one template the logits are those of the whole model."""
    import transformers

    from shoal.data.images import MEAN, STD

    model, x = made(folders[kind], prompts="a good {}").eval(), images()
    theirs = transformers.AutoModel.from_pretrained(folders[kind]).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[kind])
    tokens = tokenizer(
        [f"a good {n}" for n in NAMES], padding="max_length", max_length=16, return_tensors="pt"
    )
    mean, deviation = (torch.tensor(v).view(-1, 1, 1) for v in (MEAN, STD))
    own_mean, own_deviation = (torch.tensor(v).view(-1, 1, 1) for v in NORMALIZATION[kind])
    pixels = (x * deviation + mean - own_mean) / own_deviation
    with torch.no_grad():
        wanted = theirs(pixel_values=pixels, **{k: tokens[k] for k in ("input_ids", "attention_mask")})
        torch.testing.assert_close(model(x), wanted.logits_per_image, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.features(x), wanted.image_embeds, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.features(x).norm(dim=1), torch.ones(4))


def test_templates_are_averaged(folders: dict[str, str]) -> None:
    one, two, both = (
        made(folders["clip"], prompts=p).head.weight.detach()  # type: ignore[union-attr]
        for p in (["a {}"], ["the {} one"], ["a {}", "the {} one"])
    )
    scale = one.norm(dim=1, keepdim=True)
    mean = torch.nn.functional.normalize(one / scale + two / scale) * scale
    torch.testing.assert_close(both, mean)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_names": ["silly", "Silly ", "warm"]}, r"'silly' and 'Silly ' give equal prompts"),
        ({"class_names": ["warm", "日", "本"]}, "'日' and '本' give equal prompts"),  # unknown words
        ({"class_names": ["warm", "no " * 20 + "a", "no " * 20 + "b"]}, "give equal prompts"),  # truncated
        ({"class_names": None}, "class_names, one for each of 3 classes"),
        ({"prompts": ["a photo"]}, r"templates with \{\}"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, folders: dict[str, str]) -> None:
    with pytest.raises(InputError, match=message):
        made(folders["clip"], **options)


def test_bad_folders(folders: dict[str, str], tmp_path: Path) -> None:
    for name in ("clip", "no tokenizer", "another's"):
        shutil.copytree(folders["clip"], tmp_path / name)
    for file in TOKENIZER:
        (tmp_path / "no tokenizer" / file).unlink()
    with pytest.raises(InputError, match=r"the tokenizer of .* cannot be loaded"):
        made(str(tmp_path / "no tokenizer"))
    assert made(str(tmp_path / "no tokenizer"), zero_shot=False)(images()).shape == (4, 3)
    words = tmp_path / "another's" / "vocab.txt"
    words.write_text("".join(f"more{n}\n" for n in range(600)) + words.read_text())
    with pytest.raises(InputError, match="the tokenizer gives tokens that the text tower does not have"):
        made(str(tmp_path / "another's"))
    with pytest.raises(InputError, match=r"takes images \(3, 32, 32\), not \(3, 16, 16\); set size=32"):
        build(f"clip:{folders['clip']}", input_shape=(3, 16, 16), classes=2, seed=0)
    config = json.loads((tmp_path / "clip" / "config.json").read_text())
    (tmp_path / "clip" / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 9}))
    with pytest.raises(InputError, match="of kind 'bert'; such models are clip, "):
        made(str(tmp_path / "clip"))
    (tmp_path / "clip" / "config.json").write_text(json.dumps(config))
    (tmp_path / "clip" / "model.safetensors").unlink()
    with pytest.raises(InputError, match="cannot be loaded"):
        made(str(tmp_path / "clip"))
    assert "prompts" in options_of("clip:anything")


def test_from_zero_shot_to_an_exported_model(folders: dict[str, str], tmp_path: Path) -> None:
    """Names of classes come from the data; the run is loaded without the folder, and exported."""
    rng = np.random.default_rng(0)
    for domain, label, i in product("abc", ("silly", "warm"), range(6)):
        place = tmp_path / "pics" / domain / label
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(place / f"{i}.png")
    folder, out = tmp_path / "tower", tmp_path / "run"
    shutil.copytree(folders["clip"], folder)
    pics, name = tmp_path / "pics", f"clip:{folder}"
    options: dict[str, Any] = {"batch_size": 4, "device": "cpu", "progress": False, "steps": 1}
    data = datasets.load("image-folder", folder=str(pics), size=32)
    model = build(name, input_shape=SHAPE, classes=2, seed=0, class_names=["silly", "warm"]).eval()
    x, y = zip(*(data.examples[int(i)] for i in data.splits["test"].examples()), strict=True)
    accuracy = (model(torch.stack(x)).argmax(1) == torch.tensor(y)).double().mean().item()
    sizes: Any = {"size": 32}
    shoal.train("erm", pics, model=name, lr=1e-12, data_options=sizes, out=tmp_path / "z", **options)
    zero = shoal.load(tmp_path / "z")
    right = [word == label for label in ("silly", "warm") for word in zero.predict(pics / "c" / label)]
    assert sum(right) / len(right) == pytest.approx(accuracy)
    options["steps"] = 2
    shoal.train("fish", pics, model=name, data_options=sizes, out=out, **options)
    shutil.rmtree(folder)
    trained = shoal.load(out)
    assert len(trained.predict(pics / "a" / "warm")) == 6
    assert trained.export(tmp_path / "m.pt2").difference < 1e-4
