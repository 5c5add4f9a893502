"""How much the choice of BatchNorm's statistics, pooled over the domains or per domain, changes a step.

    SHOAL_DATA=… python benchmarks/batch_norm.py

ResNet-18 with random weights, 16 images at 64² from each of three domains of PACS, one gradient of each
algorithm that pools its domains, with penalties at their full weight (start=0). The change is
‖g_per-domain − g_pooled‖ / ‖g_pooled‖, mean and range over five draws of weights and images.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from shoal.algorithms import algorithm_class, build, registry, settings_of
from shoal.algorithms.base import trained_parameters
from shoal.data import DomainBatch, Task
from shoal.training.engine import Engine
from shoal.vision import allow_torchvision

DOMAINS, CLASSES, SIDE, EACH = ("art_painting", "cartoon", "photo"), 7, 64, 16


def batches(root: Path, seed: int) -> list[DomainBatch]:
    draw = torch.Generator().manual_seed(seed)
    found = []
    for number, name in enumerate(DOMAINS):
        folders = sorted(p for p in (root / name).iterdir() if p.is_dir())
        files = [(f, c) for c, folder in enumerate(folders) for f in sorted(folder.iterdir())]
        chosen = [files[i] for i in torch.randperm(len(files), generator=draw)[:EACH]]
        images = torch.stack([pixels(f) for f, _ in chosen])
        found.append(DomainBatch(images, torch.tensor([c for _, c in chosen]), number))
    return found


def pixels(file: Path) -> Tensor:
    image = Image.open(file).convert("RGB").resize((SIDE, SIDE))
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(SIDE, SIDE, 3)
    return (values.permute(2, 0, 1).float() / 255 - 0.45) / 0.25


def gradient(name: str, batch_norm: str, drawn: list[DomainBatch], seed: int) -> Tensor:
    from torchvision.models import resnet18

    torch.manual_seed(seed)
    model = resnet18(num_classes=CLASSES)
    settings: dict[str, Any] = {"batch_norm": batch_norm}
    taken = settings_of(algorithm_class(name))
    settings |= {k: v for k, v in {"start": 0, "features": "fc"}.items() if k in taken}
    task = Task(len(DOMAINS), CLASSES, features=model.fc.in_features)
    algorithm = build(name, model, nn.functional.cross_entropy, task, **settings).train()
    algorithm.check_input(drawn[0].x[:2])
    auxiliary = algorithm.auxiliary_optimizers()
    optimizer = torch.optim.SGD(trained_parameters(algorithm, auxiliary), 0.1)
    engine = Engine(algorithm.wrap(optimizer, len(DOMAINS)), auxiliary=auxiliary)
    found, _ = algorithm.gradient(drawn, engine)
    return torch.cat([g.flatten() for g in found])


def main() -> None:
    allow_torchvision()
    root = Path(os.environ["SHOAL_DATA"]) / "pacs"
    names = [n for n in registry.names() if "batch_norm" in settings_of(algorithm_class(n))]
    print(f"torch {torch.__version__}; change of a step's gradient, per domain against pooled")
    for name in names:
        changes = []
        for seed in range(5):
            drawn = batches(root, seed)
            pooled, apart = (gradient(name, kind, drawn, seed) for kind in ("pooled", "per-domain"))
            changes.append(float((apart - pooled).norm() / pooled.norm()))
        mean = 100 * statistics.mean(changes)
        print(
            f"  {name:10} {mean:6.0f} %   ({100 * min(changes):.0f} to {100 * max(changes):.0f})", flush=True
        )


if __name__ == "__main__":
    main()
