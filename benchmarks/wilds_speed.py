"""Steps a second of ERM and Fish by the recipes for WILDS, on random inputs of the official sizes.

    python benchmarks/wilds_speed.py                        # on CUDA, all six, fp32 and bf16
    python benchmarks/wilds_speed.py fmow --device cpu --rounds 2 --batch 2    # to try the script

Every round times one meta-step of Fish and, beside it, the S plain optimizer steps that it consists of; their
ratio is the median over rounds. Hours are those of the whole schedule at this speed, the warm start included
(where it lasts until validation stops improving, as long as in the authors' program), and evaluation and
reading data left out; an epoch counts as a pass over the examples, since that of `authors-code` depends on
the domains' sizes. Memory is the most that torch's allocator held.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal import models
from shoal.algorithms import build
from shoal.algorithms.base import trained_parameters
from shoal.data import DomainBatch, Task
from shoal.paper import recipes
from shoal.training.capture import LoadedSteps, why_not
from shoal.training.engine import Engine
from shoal.training.options import OPTIMIZERS

# Input, classes and training examples, as in the paper's table of datasets.
OFFICIAL: dict[str, tuple[tuple[int, ...], int | None, int]] = {
    "poverty": ((8, 224, 224), None, 10_000),
    "camelyon17": ((3, 96, 96), 2, 302_436),
    "fmow": ((3, 224, 224), 62, 76_863),
    "civilcomments": ((300,), 2, 269_038),
    "iwildcam": ((3, 448, 448), 186, 142_202),
    "amazon": ((512,), 5, 1_000_124),
}
WORDS = 30_000


def official(dataset: str, said: dict[str, Any]) -> tuple[tuple[int, ...], int | None, int]:
    """With images of the recipe's own size, where it says one."""
    shape, classes, examples = OFFICIAL[dataset]
    if size := said.get("data_options", {}).get("size"):
        shape = (shape[0], size, size)
    return shape, classes, examples


COLUMNS = [
    *[
        "dataset",
        "model",
        "precision",
        "S × batch",
        "input",
        "ERM steps/s",
        "Fish steps/s",
        "Fish : S plain steps",
        "GB",
    ],
    *["hours of ERM", "hours of Fish", "seeds", "steps"],
]


class Stepper:
    def __init__(self, name: str, dataset: str, said: dict[str, Any], given: Any, precision: str) -> None:
        shape, classes, _ = official(dataset, said)
        options = {k: v for k, v in said["model_options"].items() if k != "pretrained"}
        if "pretrained" in said["model_options"]:
            options["pretrained"] = False
        model = models.build(said["model"], input_shape=shape, classes=classes, seed=0, **options)
        model = model.to(given.device).train()
        loss = nn.functional.mse_loss if classes is None else nn.functional.cross_entropy
        walk = said["walk"] if name == "fish" else 1
        settings: dict[str, Any] = {}
        if name == "fish":
            state = 1000 if said.get("inner_state") == "epoch" else "carry"
            settings = {"meta_lr": said["epsilon"], "inner_state": state, **said["settings"].get("fish", {})}
        self.algorithm = build(name, model, loss, Task(walk, classes), **settings).to(given.device)
        optimizer = self._optimizer(said, given.device)
        self.engine = Engine(self.algorithm.wrap(optimizer, walk), precision=precision)
        self.algorithm.autocast = self.engine.autocast
        self.reason = why_not(self.algorithm, self.engine)
        captured = LoadedSteps(self.algorithm, self.engine) if self.reason is None else None
        self.run = captured.run if captured else lambda b: self.engine.step(self.algorithm, b)

    def _optimizer(self, said: dict[str, Any], device: str) -> Optimizer:
        kind = OPTIMIZERS[said["optimizer"]]
        options = {"lr": said["lr"], **said.get("optimizer_options", {})}
        made: Optimizer = kind(trained_parameters(self.algorithm, {}), **options)
        return made


def batches(dataset: str, said: dict[str, Any], given: Any) -> list[DomainBatch]:
    shape, classes, _ = official(dataset, said)
    size = given.batch or said["batch"]
    draw = torch.Generator(device=given.device).manual_seed(0)
    place: dict[str, Any] = {"device": given.device, "generator": draw}
    found = []
    for d in range(said["walk"]):
        if len(shape) == 1:
            ids = torch.randint(1000, WORDS, (size, *shape), **place)
            x: Any = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        else:
            x = torch.randn(size, *shape, **place)
        y = torch.randn(size, **place) if classes is None else torch.randint(classes, (size,), **place)
        found.append(DomainBatch(x, y, d))
    return found


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(work: Any, device: str) -> float:
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


def measure(dataset: str, preset: str, precision: str, given: Any) -> str:
    said = recipes.settings(dataset, preset)
    data, walk = batches(dataset, said, given), said["walk"]
    if given.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    fish = Stepper("fish", dataset, said, given, precision)
    erm = Stepper("erm", dataset, said, given, precision)

    def plain() -> None:
        for batch in data:
            erm.run([batch])

    for _ in range(5):  # the first few steps are not captured yet
        fish.run(data)
        plain()
    floors, steps = [], []
    for _ in range(given.rounds):
        floors.append(timed(plain, given.device))
        steps.append(timed(lambda: fish.run(data), given.device))
    ratio = statistics.median(s / f for s, f in zip(steps, floors, strict=True))
    one, meta = statistics.median(floors) / walk, statistics.median(steps)
    examples, size = OFFICIAL[dataset][2], given.batch or said["batch"]
    passes = math.ceil(examples / size)
    warm = said.get("warm_start", 0)
    warm = warm if isinstance(warm, int) else recipes.settings(dataset, "authors-code").get("warm_start", 0)
    hours = said["epochs"] * passes * one / 3600
    fish_hours = (warm * one + said["epochs"] * passes / walk * meta) / 3600
    memory = torch.cuda.max_memory_allocated() / 1e9 if given.device.startswith("cuda") else 0.0
    seeds = said["seeds"]
    how = "captured" if fish.reason is None else "step by step"
    shape = "×".join(map(str, official(dataset, said)[0]))
    return (
        f"| {dataset} | {said['model']} | {precision} | {walk} × {size} | {shape} | {1 / one:.1f} | "
        f"{1 / meta:.2f} | {ratio:.3f} | {memory:.1f} | {hours:.1f} | {fish_hours:.1f} | {seeds} | {how} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", choices=[*OFFICIAL, []], help="(default: all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="authors-code", choices=("paper", "authors-code"))
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int)
    given = parser.parse_args()
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else "cpu"
    print(f"{where}, torch {torch.__version__}, preset {given.preset}, {given.rounds} rounds")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for dataset in given.which or OFFICIAL:
        for precision in given.precision:
            print(measure(dataset, given.preset, precision, given), flush=True)
            gc.collect()
            if given.device.startswith("cuda"):
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
