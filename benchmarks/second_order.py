"""Step time and peak memory of exact IDGM, IGA and finite differences, as ratios to ERM's step.

    python benchmarks/second_order.py                                 # a CNN and ResNet-18 with small images
    python benchmarks/second_order.py --device cuda --precision bf16  # ResNet-50, 3 domains of 32 images

A step is the gradient and an SGD update. ERM takes all domains' images in one pass. "torch's operators" is
the exact method without our convolutions and normalisations. The methods take turns; the fastest round of
each counts. Memory is what a step takes beyond model and data: on CUDA the allocator's peak, elsewhere the
most bytes that tensors hold at a time. With --check, the slopes of both are first compared in float64.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal import gradients
from shoal.vision import allow_torchvision

CLASSES = 7


class TorchsOwn(gradients.FastDoubleBackward):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class Allocated(TorchDispatchMode):
    """The most bytes that tensors made in this block hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        old = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in old:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


def cnn() -> nn.Module:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *block(3, 32),
        *block(32, 64),
        *block(64, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "cnn":
        return cnn()
    allow_torchvision()
    import torchvision

    model: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES)
    return model


class Bench:
    def __init__(self, name: str, args: argparse.Namespace, dtype: torch.dtype = torch.float32) -> None:
        self.device = torch.device(args.device)
        layout = torch.channels_last if args.channels_last else torch.contiguous_format
        self.model = network(name).to(self.device, dtype, memory_format=layout)
        self.params = list(self.model.parameters())
        draw = torch.Generator().manual_seed(1)
        shape = (args.batch, 3, args.size, args.size)
        self.batches = []
        for d in range(args.domains):
            x = (torch.randn(shape, generator=draw) + 0.3 * d).to(self.device, dtype, memory_format=layout)
            self.batches.append((x, torch.randint(CLASSES, (args.batch,), generator=draw).to(self.device)))
        x = torch.cat([x for x, _ in self.batches]).contiguous(memory_format=layout)
        self.pooled = x, torch.cat([y for _, y in self.batches])
        half = args.precision == "bf16" and dtype == torch.float32
        self.precision: Callable[[], Any] = (
            (lambda: torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False))
            if half
            else nullcontext
        )
        self.losses = [lambda x=x, y=y: self.loss(x, y) for x, y in self.batches]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self.precision():
            output = self.model(x)
        return cross_entropy(output.float() if output.dtype == torch.bfloat16 else output, y)

    def update(self, g: list[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_add_(self.params, g, alpha=-1e-6)

    def erm(self) -> None:
        self.update(gradients.gradient(self.loss(*self.pooled), self.params))

    def matching(self, torchs: bool = False, **settings: Any) -> gradients.Matching:
        """``torchs``: with torch's own double backward of convolutions and normalisations."""
        ours = gradients.FastDoubleBackward
        if torchs:
            gradients.FastDoubleBackward = TorchsOwn  # type: ignore[misc]
        try:
            return gradients.match(self.losses, self.params, model=self.model, **settings)
        finally:
            gradients.FastDoubleBackward = ours  # type: ignore[misc]

    def idgm(self, **settings: Any) -> None:
        self.update(self.matching(normalize=True, **settings).gradient(-0.1, 0.9))

    def iga(self, **settings: Any) -> None:
        self.update(self.matching(measure="variance", **settings).gradient(1.0))

    def methods(self) -> dict[str, Callable[[], None]]:
        return {
            "ERM": self.erm,
            "IDGM": self.idgm,
            "IDGM, torch's operators": lambda: self.idgm(torchs=True),
            "IDGM, finite differences": lambda: self.idgm(method="finite-difference"),
            "IGA": self.iga,
            "IGA, torch's operators": lambda: self.iga(torchs=True),
            "IGA, finite differences": lambda: self.iga(method="finite-difference"),
        }

    def seconds(self, step: Callable[[], None]) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            return time.perf_counter() - start
        start = time.process_time()  # others may use the machine
        step()
        return time.process_time() - start

    def memory(self, step: Callable[[], None]) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            return torch.cuda.max_memory_allocated() - before
        with Allocated() as allocated:
            step()
        return allocated.most


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def check(name: str, args: argparse.Namespace) -> float:
    """The largest relative difference between ours and torch's operators in float64."""
    bench = Bench(name, args, torch.float64)
    worst = 0.0
    for settings in ({"normalize": True}, {"measure": "variance"}):
        fast, slow = (bench.matching(torchs, **settings).slope for torchs in (False, True))
        apart = torch.cat([(a - b).flatten() for a, b in zip(fast, slow, strict=True)])
        worst = max(worst, float(apart.norm() / torch.cat([b.flatten() for b in slow]).norm()))
    return worst


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(name, args)
    steps = bench.methods()
    memory = {}
    for method, step in steps.items():
        step()  # to warm up
        memory[method] = bench.memory(step)
    if args.captured:
        steps = {method: captured(step) for method, step in steps.items()}
    times: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(args.rounds):
        for method, step in steps.items():
            times[method].append(bench.seconds(step))
    best = {method: min(each) for method, each in times.items()}
    return {
        method: {
            "seconds": best[method],
            "time ratio": best[method] / best["ERM"],
            "bytes": memory[method],
            "memory ratio": memory[method] / memory["ERM"],
        }
        for method in steps
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", help="cnn, or a model of torchvision")
    parser.add_argument("--domains", type=int, default=3)
    parser.add_argument("--batch", type=int, help="images per domain")
    parser.add_argument("--size", type=int, help="of an image")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--captured", action="store_true", help="replay steps as CUDA graphs")
    parser.add_argument("--no-tf32", action="store_true")
    parser.add_argument(
        "--check", action="store_true", help="compare our operators with torch's in float64 first"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the numbers")
    args = parser.parse_args()
    cuda = args.device.startswith("cuda")
    args.models = args.models or (["resnet50"] if cuda else ["cnn", "resnet18"])
    args.batch = args.batch or (32 if cuda else 8)
    args.size = args.size or (224 if cuda else 64)
    args.rounds = args.rounds or (20 if cuda else 5)
    torch.backends.cudnn.allow_tf32 = not args.no_tf32  # torch's default is to allow it for convolutions
    if not cuda:
        torch.set_num_threads(1)
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "arguments": {k: str(v) for k, v in vars(args).items()},
    }
    for name in args.models:
        print(
            f"{name}, {args.domains} x {args.batch} images of {args.size}², {args.precision}, {args.device}"
        )
        if args.check:
            print(
                f"  float64 slopes with torch's operators differ by {check(name, args):.1e} of their length"
            )
        results[name] = measure(name, args)
        for method, found in results[name].items():
            time_, memory = found["seconds"] * 1e3, found["bytes"] / 2**20
            ratios = (
                f"{found['time ratio']:5.2f} x ERM  {memory:8.0f} MiB  {found['memory ratio']:5.2f} x ERM"
            )
            print(f"  {method:26} {time_:8.1f} ms  {ratios}")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
