"""What each penalty and gradient transform adds to a step of a plain PyTorch loop.

    python benchmarks/your_loop.py                               # ResNet-50, 3 domains × 32 images, on CUDA
    python benchmarks/your_loop.py --device cpu --model resnet18 --side 32 --rounds 3

The loop is a user's: one forward pass of a mixed batch with a vector of domain ids, a loss, `backward`,
`step`. Every round times one step of each method, in an order that rotates, and takes its ratio to the bare
step of the same round; "ratio" is the median over rounds. "memory" is the ratio of what a step holds at most.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from shoal import gradients, penalties
from shoal.vision import allow_torchvision

S, B, CLASSES = 3, 32, 7


def make_model(name: str) -> nn.Module:
    allow_torchvision()
    import torchvision

    torch.manual_seed(0)
    model: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES)
    return model


class Loop:
    """A model, an optimizer and one way to compute the loss."""

    def __init__(self, method: str, options: Any) -> None:
        self.method = method
        self.model = make_model(options.model).to(options.device).train()
        self.tap = shoal.models.FeatureExtractor(self.model)
        width = self.model.fc.in_features
        trained = list(self.model.parameters())
        self.weights = penalties.GroupWeights(S).to(options.device)
        self.discriminator = penalties.DomainDiscriminator(width, S).to(options.device)
        if method == "dann":
            trained += list(self.discriminator.parameters())
        self.optimizer: Any = torch.optim.Adam(trained, 5e-5, fused=options.device.startswith("cuda"))
        if method == "fish":
            self.optimizer = shoal.optim.Fish(self.optimizer, inner_steps=S, meta_lr=0.5)
        self.autocast = options.precision == "bf16"
        self.kind = options.device.split(":")[0]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.autocast):
            logits = self.model(x)
        return logits.float(), self.tap.features

    def step(self, x: Tensor, y: Tensor, domain: Tensor) -> None:
        getattr(self, "_" + self.method, self._penalised)(x, y, domain)

    def _descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _bare(self, x: Tensor, y: Tensor, domain: Tensor) -> None:
        self._descend(cross_entropy(self.forward(x)[0], y))

    def _penalised(self, x: Tensor, y: Tensor, domain: Tensor) -> None:
        logits, z = self.forward(x)
        each, blocks = cross_entropy(logits, y, reduction="none"), penalties.Blocks([B] * S)
        ways: dict[str, Callable[[], Tensor]] = {
            "coral": lambda: each.mean() + penalties.coral(z, domain),
            "mmd": lambda: each.mean() + penalties.mmd(z, domain),
            "irm": lambda: each.mean() + penalties.irm(logits, y, domain),
            "vrex": lambda: each.mean() + penalties.vrex(each, domain),
            "group_dro": lambda: penalties.group_dro(each, domain, self.weights),
            "fishr": lambda: each.mean() + penalties.fishr(logits, z, y, domain),
            "coral_blocks": lambda: each.mean() + penalties.coral(z, blocks),
            "irm_blocks": lambda: each.mean() + penalties.irm(logits, y, blocks),
            "dann": lambda: each.mean() + self.discriminator(z, domain),
        }
        self._descend(ways[self.method]())

    def _mixup(self, x: Tensor, y: Tensor, domain: Tensor) -> None:
        mixed, own, other, share = penalties.mixup(x, y, domain)
        logits, _ = self.forward(mixed)
        first, second = (cross_entropy(logits, t, reduction="none") for t in (own, other))
        self._descend((share * first + (1 - share) * second).mean())

    def _surgery(self, x: Tensor, y: Tensor, domain: Tensor, combine: Any) -> None:
        each = cross_entropy(self.forward(x)[0], y, reduction="none")
        self.optimizer.zero_grad()
        losses = gradients.losses_by_domain(each, domain)
        gradients.backward(losses, self.model.parameters(), combine=combine)
        self.optimizer.step()

    def _pcgrad(self, x: Tensor, y: Tensor, domain: Tensor) -> None:
        self._surgery(x, y, domain, gradients.pcgrad)

    def _and_mask(self, x: Tensor, y: Tensor, domain: Tensor) -> None:
        self._surgery(x, y, domain, gradients.and_mask)

    def _fish(self, x: Tensor, y: Tensor, domain: Tensor) -> None:
        for d in range(S):
            self._descend(cross_entropy(self.forward(x[domain == d])[0], y[domain == d]))

    _three_steps = _fish


METHODS = ("coral", "mmd", "irm", "vrex", "group_dro", "fishr", "dann", "mixup", "pcgrad", "and_mask")
METHODS += ("three_steps", "fish", "coral_blocks", "irm_blocks")


def seconds(loop: Loop, batch: Any) -> float:
    wait = torch.cuda.synchronize if batch[0].is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    loop.step(*batch)
    wait()
    return time.perf_counter() - start


def peak(loop: Loop, batch: Any) -> float:
    """GiB that a step holds at most, without what is there before it."""
    for _ in range(3):
        loop.step(*batch)
    if not batch[0].is_cuda:
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loop.step(*batch)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="resnet50", choices=["resnet18", "resnet50"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    options = parser.parse_args()
    draw = torch.Generator(device=options.device).manual_seed(1)
    size = (S * B, 3, options.side, options.side)
    x = torch.randn(size, device=options.device, generator=draw)
    y = torch.randint(CLASSES, (S * B,), device=options.device, generator=draw)
    domain = torch.arange(S, device=options.device).repeat_interleave(B)
    batch = (x, y, domain)
    where = torch.cuda.get_device_name() if x.is_cuda else "cpu"
    title = f"{options.model}, {S} domains × {B} at {options.side}², Adam, {options.precision}"
    print(f"{title}; {where}, torch {torch.__version__}, {options.rounds} rounds", flush=True)
    print(f"{'method':12} {'ms':>8} {'ratio':>7} {'memory':>7}")
    for first in range(0, len(options.methods), 4):
        names = ["bare", *options.methods[first : first + 4]]
        loops = {n: Loop(n, options) for n in names}
        held = {n: peak(loop, batch) for n, loop in loops.items()}
        times: dict[str, list[float]] = {n: [] for n in names}
        for number in range(options.rounds):
            for n in names[number % len(names) :] + names[: number % len(names)]:
                times[n].append(seconds(loops[n], batch))
        for n in names[bool(first) :]:
            ratio = statistics.median(a / b for a, b in zip(times[n], times["bare"], strict=True))
            took = 1000 * statistics.median(times[n])
            print(f"{n:12} {took:8.2f} {ratio:7.3f} {held[n] / held['bare']:7.2f}", flush=True)
        del loops
        gc.collect()
        if x.is_cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
