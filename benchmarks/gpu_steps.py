"""Steps of Shoal's trainer on CUDA beside the bare PyTorch steps of the same run.

Bare steps are forward, backward and a fused Adam over a batch that stays where it is, captured once as a CUDA
graph, with and without ``torch.compile``; Shoal's include drawing the batch. Prints milliseconds and ratios,
then checks that captured steps equal eager ones in float64, and that trainings that were interrupted equal
those that were not, bit for bit. ::

    python benchmarks/gpu_steps.py                   # about eight minutes on one H200
    python benchmarks/gpu_steps.py --parts checks    # networks sprites fit checks
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal import models
from shoal.training.stopping import Interrupted

PARTS = ("sprites", "fit", "checks", "networks")
NETWORKS = {"resnet50": 224, "mobilenet_v2": 128}
S, B, CLASSES = 3, 32, 7
DEVICE = torch.device("cuda")


def network(name: str) -> nn.Module:
    from torchvision import models as vision

    torch.manual_seed(0)
    return getattr(vision, name)(weights=None, num_classes=CLASSES).to(DEVICE)


def sprites_network() -> nn.Module:
    return models.build("sprite-cnn", input_shape=(3, 64, 64), classes=2, seed=0).to(DEVICE)


def images(count: int, side: int, classes: int = CLASSES, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(count, 3, side, side, generator=generator, device=DEVICE)
    return x, torch.arange(count, device=DEVICE) % classes


def domains(count: int, size: int, side: int, classes: int = CLASSES) -> dict[str, tuple[Tensor, Tensor]]:
    return {f"domain {n}": images(size, side, classes, n) for n in range(count)}


def bare(model: nn.Module, x: Tensor, y: Tensor, *, half: bool, compiled: bool) -> float:
    """Milliseconds of a captured step."""
    model.train()
    if half:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    call: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=True, capturable=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
            output = call(x)
        nn.functional.cross_entropy(output.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return median(graph.replay)


def median(step: Callable[[], Any], rounds: int = 7, count: int = 20) -> float:
    for _ in range(5):
        step()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / count)
    return 1000 * statistics.median(times)


class Clock(shoal.Callback):
    """Times stretches of steps."""

    def __init__(self, every: int) -> None:
        self.every, self.times = every, list[float]()

    def on_step(self, state: Any) -> None:
        if state.step % self.every == 0:
            torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    @property
    def milliseconds(self) -> float:
        """Of a step; the first stretches warm up, compile and capture."""
        gaps = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        return 1000 * statistics.median(gaps[2:]) / self.every


def ours(
    algorithm: str, model: nn.Module, data: Any, *, batch: int, slots: int, every: int = 20, **options: Any
) -> float:
    """Milliseconds of a step of ``shoal.fit``."""
    clock, steps = Clock(every), 10 * every
    sizes: dict[str, Any] = {"steps": steps, "batch_size": batch, "domains_per_step": slots, "lr": 1e-4}
    quiet: dict[str, Any] = {"eval_every": steps, "eval_limit": 2, "progress": False, "device": "cuda"}
    run = shoal.fit(algorithm, model, data, callbacks=[clock], capture=True, **sizes, **quiet, **options)
    assert run.captured
    return clock.milliseconds


def row(what: str, found: float, wanted: float, limit: float) -> None:
    ratio = found / wanted
    print(f"| {what} | {found:.3f} | {wanted:.3f} | {ratio:.3f} | {limit} |", flush=True)


def networks() -> None:
    half = {"precision": "bf16", "memory_format": "channels-last"}
    for name, side in NETWORKS.items():
        x, y = images(S * B, side)
        data = domains(S, 200, side)
        for compiled, limit in ((False, 1.03), (True, 1.05)):
            how = f"{name}, {side}², bf16, captured" + (" and compiled" if compiled else "")
            whole = bare(network(name), x, y, half=True, compiled=compiled)
            found = ours("erm", network(name), data, batch=B, slots=S, compile=compiled, **half)
            row(f"ERM, {how}", found, whole, limit)
            part = bare(network(name), x[:B].clone(), y[:B], half=True, compiled=compiled)
            found = ours("fish", network(name), data, batch=B, slots=S, compile=compiled, **half)
            row(f"Fish, S = 3, {how}", found, 3 * part, 1.05)
            torch.compiler.reset()
            torch.cuda.empty_cache()


def sprites() -> None:
    x, y = images(64, 64, 2)
    data = domains(15, 300, 64, 2)
    for compiled in (False, True):
        how = "captured and compiled" if compiled else "captured"
        step = bare(sprites_network(), x, y, half=False, compiled=compiled)
        found = ours("erm", sprites_network(), data, batch=64, slots=1, every=100, compile=compiled)
        row(f"ERM, CdSprites network, 64 images, fp32, {how}", found, step, 1.1)
        found = ours("fish", sprites_network(), data, batch=64, slots=15, compile=compiled)
        row(f"Fish, CdSprites network, 15 × 64, fp32, {how}", found, 15 * step, 1.1)
        torch.compiler.reset()


def fit() -> None:
    """600 steps of MobileNetV2 with six evaluations, from call to result, against an eager loop."""
    data, test = domains(S, 400, 96), images(400, 96, seed=9)
    x, y = (torch.cat(parts) for parts in zip(*data.values(), strict=True))

    def loop() -> None:
        model, generator = network("mobilenet_v2"), torch.Generator(DEVICE).manual_seed(0)
        optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=True)
        for step in range(1, 601):
            rows = torch.randint(len(x), (S * B,), generator=generator, device=DEVICE)
            nn.functional.cross_entropy(model.train()(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 100 == 0:
                with torch.inference_mode():
                    for inputs, labels in (*data.values(), test):
                        (model.eval()(inputs).argmax(1) == labels).float().mean().item()

    def timed(function: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began)

    def call(**options: Any) -> Callable[[], Any]:
        given = {"steps": 600, "batch_size": B, "domains_per_step": S, "lr": 1e-4, "eval_every": 100}
        held_out = {"new": test}
        quiet = {"progress": False, "device": "cuda"}
        return lambda: shoal.fit(
            "erm", network("mobilenet_v2"), data, test=held_out, **given, **quiet, **options
        )

    timed(loop)
    whole = timed(loop)
    row("fit, 600 steps and 6 evaluations, default (fp32)", timed(call()), whole, 0.6)
    half: dict[str, Any] = {"precision": "bf16", "memory_format": "channels-last"}
    row("the same, bf16 and channels-last", timed(call(**half)), whole, 0.6)
    row("the same, capture=False", timed(call(capture=False)), whole, 1.0)


class Stop(shoal.Callback):
    """Interrupts a training at a step, as a preempted job is."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, state: Any) -> None:
        if state.step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def checks() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    data = {k: (x.double(), y) for k, (x, y) in domains(4, 60, 16, 2).items()}

    def net() -> nn.Module:
        torch.manual_seed(0)
        parts = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten())
        return nn.Sequential(*parts, nn.Linear(8 * 14 * 14, 2)).double()

    def train(algorithm: str, **options: Any) -> list[Tensor]:
        given: dict[str, Any] = {
            "steps": 40,
            "batch_size": 16,
            "domains_per_step": 3,
            "lr": 1e-3,
            "deterministic": True,
        }
        run = shoal.fit(algorithm, net(), data, progress=False, device="cuda", **given, **options)
        captured.append(run.captured)
        return [t.detach().clone() for t in run.model.state_dict().values()]

    captured = list[bool]()
    print("\n| algorithm | captured | largest difference to eager | interrupted = uninterrupted |")
    print("| --- | --- | --- | --- |")
    for number, algorithm in enumerate(shoal.algorithms.registry.names()):
        try:
            eager = train(algorithm, capture=False)
            graph = train(algorithm)
        except shoal.InputError as error:
            print(f"| {algorithm} | – | {str(error)[:80]} | – |")
            continue
        difference = max(
            float((a - b).abs().max()) for a, b in zip(eager, graph, strict=True) if a.is_floating_point()
        )
        resumed = "–"
        if number % 2 == 0:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder) / "run"
                with suppress(Interrupted):
                    train(algorithm, folder=place, callbacks=[Stop(7 + number)])
                again = train(algorithm, folder=place, resume=True)
                resumed = str(all(torch.equal(a, b) for a, b in zip(graph, again, strict=True)))
        print(f"| {algorithm} | {captured[-1]} | {difference:.1e} | {resumed} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    began = time.monotonic()
    print(f"shoal {shoal.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    print("| what | ms | bare, ms | ratio | target |\n| --- | --- | --- | --- | --- |")
    for part in given.parts:
        globals()[part]()
        print(f"({part}: {time.monotonic() - began:.0f} s so far)", flush=True)


if __name__ == "__main__":
    main()
