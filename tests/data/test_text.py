"""Text as token ids: what a tokenizer makes of it, padding, and tokenizers that are broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from imitations.wilds_text import fake_tokenizer
from shoal.data.text import TextExamples, load_tokenizer
from shoal.errors import InputError

TEXTS = ["good broken good", "", "the " * 40, "a fair one", "silly", "warm and kind people"]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(fake_tokenizer(tmp_path_factory.mktemp("tiny")))


def batch(examples: TextExamples, *indices: int) -> tuple[dict[str, Tensor], Tensor]:
    return examples.collate([examples[i] for i in indices])


@pytest.mark.parametrize(("pad_to", "length"), [(8, 16), (1, 16), ("max", 16)])
def test_batches_are_what_the_tokenizer_gives(pad_to: Any, length: int, tiny: str) -> None:
    examples = TextExamples(TEXTS, range(6), tokenizer=tiny, max_tokens=16, pad_to=pad_to)
    x, y = batch(examples, 2, 0, 1)
    assert y.tolist() == [2, 0, 1]
    assert x["input_ids"].shape == x["attention_mask"].shape == (3, length)
    tokenizer = load_tokenizer(tiny)
    for row, mask, i in zip(x["input_ids"], x["attention_mask"], (2, 0, 1), strict=True):
        own = tokenizer(TEXTS[i], truncation=True, max_length=16)["input_ids"]
        assert row[mask == 1].tolist() == own
        assert row[mask == 0].tolist() == [tokenizer.pad_token_id] * (length - len(own))
        assert mask.tolist() == sorted(mask.tolist(), reverse=True)
    short = batch(examples, 0)[0]["input_ids"].shape[1]
    assert short == {8: 8, 1: len(tokenizer(TEXTS[0])["input_ids"]), "max": 16}[pad_to]
    assert examples.known_labels().tolist() == list(range(6))


def corrupt(tiny: str, place: Path, damage: str) -> str:
    """A folder whose tokenizer.json is damaged."""
    shutil.copytree(tiny, place)
    load_tokenizer(tiny).save_pretrained(place)
    path = place / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = dict.fromkeys(content["model"]["vocab"], -5)
    path.write_text(path.read_text()[:-200] if damage == "not JSON" else json.dumps(content))
    return str(place)


@pytest.mark.parametrize("damage", ["not JSON", "negative"])
def test_a_strangers_tokenizer_with_a_broken_vocabulary(damage: str, tiny: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the tokenizer of .* cannot be loaded") as error:
        load_tokenizer(corrupt(tiny, tmp_path / "m", damage))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "/no/such/folder"}, "there is no folder '/no/such/folder'"),
        ({"tokenizer": "no-one/no-such-model"}, "cannot be loaded .*can be given instead"),
        ({"max_tokens": 2}, "max_tokens of TextExamples must be at least 4, got 2"),
        ({"pad_to": "most"}, "pad_to of TextExamples"),
        ({"labels": [1]}, "there are 6 texts and 1 labels"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str, tiny: str) -> None:
    with pytest.raises(InputError, match=message):
        batch(TextExamples(TEXTS, **{"labels": range(6), "tokenizer": tiny, **options}), 0)
