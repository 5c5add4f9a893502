"""SWAD beside the authors' own class, on random sequences of validation losses.

    python benchmarks/swad_released.py --swad CHECKOUT

CHECKOUT is a clone of github.com/khanrc/swad, of which ``domainbed/swad.py`` and
``domainbed/lib/swa_utils.py`` are run as they are, and fed as its trainer feeds them. The weights after step
t are the t-th unit vector, so that an average shows the weight of every step.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import platform
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import shoal
from references import swad as naive
from shoal.training.averaging import SWAD

FILES = ("domainbed/swad.py", "domainbed/lib/swa_utils.py")


class Weights(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(steps, dtype=torch.float64))

    def after(self, step: int) -> None:
        with torch.no_grad():
            self.vector.zero_()[step - 1] = 1


def theirs(losses: list[float], lengths: list[int], settings: dict[str, Any]) -> tuple[Tensor, bool]:
    """What khanrc/swad makes of a training, and whether it ended it."""
    module, utils = (importlib.import_module(name) for name in ("domainbed.swad", "domainbed.lib.swa_utils"))
    model = Weights(sum(lengths))
    silent = SimpleNamespace(logger=SimpleNamespace(error=lambda message: None))
    valley = module.LossValley(
        silent,
        n_converge=settings["converge"],
        n_tolerance=settings["tolerate"],
        tolerance_ratio=settings["ratio"] - 1,
    )
    segment, step = utils.AveragedModel(model), 0
    with contextlib.redirect_stdout(io.StringIO()):
        for loss, length in zip(losses, lengths, strict=True):
            for _ in range(length):
                step += 1
                model.after(step)
                segment.update_parameters(model, step=step)
            valley.update_and_evaluate(segment, 0.0, loss, None)
            if valley.dead_valley:
                break
            segment = utils.AveragedModel(model)
        return valley.get_final_model().module.vector.detach(), valley.dead_valley


def ours(losses: list[float], lengths: list[int], settings: dict[str, Any]) -> tuple[Tensor, bool]:
    average, model, step = SWAD(**settings), Weights(sum(lengths)), 0
    for loss, length in zip(losses, lengths, strict=True):
        for _ in range(length):
            step += 1
            model.after(step)
            average.update(step, [model.vector])
        average.evaluated(step, loss)
        if average.done:
            break
    [vector] = average.weights() or [torch.zeros(sum(lengths), dtype=torch.float64)]
    return vector, average.done


def compare(count: int, finite: bool, default: bool, seed: int) -> None:
    """Prints how many sequences agree."""
    draw, counts, largest = random.Random(seed), Counter[str](), 0.0
    for kind, losses in naive.sequences(count, seed, finite):
        if not finite and all(np.isfinite(losses)):
            continue
        lengths = [1] + [draw.randint(1, 4)] * (len(losses) - 1)  # the trainer evaluates after its first step
        settings: dict[str, Any] = {"converge": 3, "tolerate": 6, "ratio": 1.3}
        if not default:
            converge = draw.randint(1, 5)
            settings = {"converge": converge, "tolerate": converge + draw.randint(1, 4)}
            settings["ratio"] = draw.choice([1.1, 1.2, 1.5, 2.0])
        published, ended = theirs(losses, lengths, settings)
        vector, done = ours(losses, lengths, settings)
        difference = float((vector - published).abs().max())
        same = difference < 1e-12 and done == ended
        counts["sequences"] += 1
        counts["equal"] += same
        counts[f"different, {kind}"] += not same
        counts["ended early"] += ended
        largest = max(largest, difference if same else 0.0)
    which = "finite losses" if finite else "losses that are not all finite"
    print(f"{which}, {'default settings' if default else 'random settings'}:")
    print(f"  largest difference of a step's weight where equal: {largest:.1e}")
    for name, number in counts.items():
        if number:
            print(f"  {name}: {number:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--swad", type=Path, required=True, help="a clone of github.com/khanrc/swad")
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.path.insert(0, str(args.swad))
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign, assignment]
    versions = {"torch": torch, "numpy": np, "shoal": shoal}
    print(f"Python {platform.python_version()},", *(f"{n} {m.__version__}" for n, m in versions.items()))
    for name in FILES:
        text = (args.swad / name).read_text().encode()  # with any line ends
        print(f"{name}: {len(text):,} bytes, sha256 {hashlib.sha256(text).hexdigest()[:16]}")
    for finite, default in ((True, True), (True, False), (False, True)):
        compare(args.sequences, finite, default, args.seed)


if __name__ == "__main__":
    main()
