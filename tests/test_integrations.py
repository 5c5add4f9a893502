"""Shoal in other people's loops: the page about it runs, and its loops end with the weights of shoal.fit."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.models.feature_model import FeatureModel
from shoal.vision import allow_torchvision

pytestmark = pytest.mark.filterwarnings("ignore")  # as in test_examples.py
PAGE = Path(__file__).parents[1] / "docs" / "guides" / "loops.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What its blocks leave behind."""
    allow_torchvision()
    for package in ("lightning", "transformers", "accelerate"):
        pytest.importorskip(package)
    text, world = PAGE.read_text(encoding="utf-8"), {"__name__": "docs"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        for block in BLOCK.finditer(text):
            line = text[: block.start()].count("\n") + 1
            exec(compile("\n" * line + block[1], str(PAGE), "exec"), world)
    return SimpleNamespace(**world)


def own(
    page: SimpleNamespace, algorithm: str, model: nn.Module, data: Any = None, **options: Any
) -> nn.Module:
    """The same training in Shoal's own loop."""
    same: dict[str, Any] = {"steps": 10, "batch_size": 8, "seed": 5, "device": "cpu", "progress": False}
    # Not by its name, for which fit takes the fused one, which rounds in another way.
    same["optimizer"] = partial(torch.optim.Adam, lr=0.01, fused=False)
    return shoal.fit(algorithm, model, data or page.hospitals, **(same | options)).model


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


FISH = {"settings": {"meta_lr": 0.5}}


def test_plain_fish(page: SimpleNamespace) -> None:
    found = own(page, "fish", page.network(), **FISH)
    assert difference(page.classifier.network, found) == 0
    assert difference(found, page.network()) > 0.01


def test_fsdp_fish(page: SimpleNamespace) -> None:
    whole = [p.full_tensor() for p in page.sharded.parameters()]
    found = own(page, "fish", page.network(), **FISH)
    assert all(torch.equal(a, b) for a, b in zip(whole, found.parameters(), strict=True))


class Split(FeatureModel):
    """The page's network, as the algorithms take it that need features."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__(network[:2], network[2])


def test_coral(page: SimpleNamespace) -> None:
    model = Split(page.network())
    found = own(page, "coral", model, settings={"weight": 1.0})
    assert difference(page.coral_model, found) < 1e-6  # sums in another order
    assert difference(page.coral_model, own(page, "erm", page.network())) > 1e-3


def test_vrex(page: SimpleNamespace) -> None:
    whole = [p.full_tensor() for p in page.vrex_model.parameters()]
    found = own(page, "vrex", page.network(), settings={"weight": 10.0, "start": 0})
    assert max(float((a - b).abs().max()) for a, b in zip(whole, found.parameters(), strict=True)) < 1e-6


class Logits(nn.Module):
    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=tokens).logits


def notes(page: SimpleNamespace) -> dict[str, Any]:
    x, y = (torch.stack([note[k] for note in page.notes]) for k in ("input_ids", "labels"))
    return {"kyoto": (x[:40], y[:40]), "lima": (x[40:70], y[40:70]), "oslo": (x[70:], y[70:])}


def plain_adamw(params: Any) -> torch.optim.Optimizer:
    """As the Trainer makes it."""
    return torch.optim.AdamW(params, 0.01, weight_decay=0.0, fused=False)


def test_huggingface_irm(page: SimpleNamespace) -> None:
    options = {"settings": {"weight": 10.0, "start": 0}, "optimizer": plain_adamw}
    found = own(page, "irm", Logits(page.bert()).double(), notes(page), **options)
    model = in_double(page)
    assert difference(model, found) < 1e-10
    assert difference(page.irm_bert, page.bert()) > 0.01


def in_double(
    page: SimpleNamespace, more: Any = None, folder: Any = "runs", checkpoint: Any = None, **settings: Any
) -> nn.Module:
    """The page's training with a penalty in float64, where the order of sums hardly matters."""
    parts = settings.get("gradient_accumulation_steps", 1)
    settings = {"max_steps": 10, "per_device_train_batch_size": 24 // parts, **page.options, **settings}
    model = page.bert().double()
    arguments = {"train_dataset": page.notes, "domains": page.hospital, "penalty": page.irm_penalty}
    page.DomainTrainer(
        model, page.TrainingArguments(str(folder), **settings), **arguments | (more or {})
    ).train(resume_from_checkpoint=checkpoint)
    return model


def test_training_with_a_penalty_resumes(page: SimpleNamespace, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 7}
    whole = in_double(page, folder=tmp_path, **saving)
    resumed = in_double(page, folder=tmp_path, checkpoint=str(tmp_path / "checkpoint-7"))
    assert difference(whole, resumed) == 0
