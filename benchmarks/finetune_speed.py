"""What fine-tuning an image backbone costs: bare steps in four formats, our loop, Fish, evaluation, loading.

    python benchmarks/finetune_speed.py                        # on CUDA, two minutes at most
    python benchmarks/finetune_speed.py --device cpu --tiny    # to try the script
    python benchmarks/finetune_speed.py --parts loop fish

ResNet-50 at 224² and MobileNetV2 at 128², random weights, Adam, a step on 3 × 32 images. "Bare" is forward,
backward and the optimizer's step on a batch that stays on the device. "Loop" is `shoal.fit` on uint8 images
in memory, its format left to the trial, without start-up and evaluation; "as DomainBed" is its published
loop: eager, float32, contiguous, minibatches put together by torch.cat, the loss read after every step.
Numbers are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shoal
from shoal.api.fit import as_domain_data
from shoal.models import FeatureModel
from shoal.training.formats import Choice, Format, channels_last, lay_out
from shoal.training.loop import Training
from shoal.training.options import complete
from shoal.vision import allow_torchvision

S, B, CLASSES = 3, 32, 7
FORMATS = [Format(m, p) for p, m in product(("fp32", "bf16"), ("contiguous", "channels-last"))]
PARTS = ("bare", "captured", "domainbed", "loop", "fish", "evaluate", "loading")


class Scaled(nn.Module):
    """A network of float images that takes uint8 ones."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.float().mul_(1 / 57.5).sub_(2.0))


class Bench:
    """One network, and the rows that were measured on it."""

    def __init__(self, name: str, side: int, given: Any) -> None:
        self.name, self.side, self.device, self.given = name, side, torch.device(given.device), given
        self.rounds, self.count, self.warm = (1, 1, 1) if given.tiny else (5, 10, 5)
        self.batch = 2 if given.tiny else B
        self.steps = 12 if given.tiny else 120
        self.rows: list[tuple[str, ...]] = []
        self.bare: dict[Format, float] = {}
        self.chosen = Format()

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def model(self) -> FeatureModel:
        allow_torchvision()
        from torchvision import models

        torch.manual_seed(0)
        network = getattr(models, self.name)(weights=None)
        last = "fc" if hasattr(network, "fc") else "classifier"
        head = getattr(network, last)
        width = (head if isinstance(head, nn.Linear) else head[-1]).in_features
        setattr(network, last, nn.Identity())
        return FeatureModel(Scaled(network), nn.Linear(width, CLASSES)).to(self.device)

    def images(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randint(0, 256, (count, 3, self.side, self.side), generator=draw, dtype=torch.uint8)
        return x, torch.arange(count) % CLASSES

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def autocast(self, chosen: Format) -> Any:
        half = chosen.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16) if half else nullcontext()

    def median(self, step: Callable[[], Any]) -> float:
        """Milliseconds of a call."""
        for _ in range(self.warm):
            step()
        found = []
        for _ in range(self.rounds):
            self.sync()
            began = time.perf_counter()
            for _ in range(self.count):
                step()
            self.sync()
            found.append(1000 * (time.perf_counter() - began) / self.count)
        return statistics.median(found)

    def row(self, what: str, how: Any, ms: float, images: int, beside: str = "") -> None:
        where = f"{self.name} {self.side}²"
        self.rows.append((where, what, str(how), f"{ms:.2f}", f"{1000 * images / ms:,.0f}", beside))
        print(" | ".join(self.rows[-1]), file=sys.stderr, flush=True)

    # Bare steps

    def stepper(self, chosen: Format, capture: bool = False, images: int = 0) -> Callable[[], Any]:
        model = self.model().train()
        x, y = (t.to(self.device) for t in self.images(images or S * self.batch))
        if chosen.memory_format == "channels-last":
            lay_out(model)
            x = channels_last(x)
        more = {"fused": True, "capturable": True} if capture else {"fused": True}
        optimizer = torch.optim.Adam(model.parameters(), 1e-4, **more)

        def step() -> Tensor:
            with self.autocast(chosen):
                output = model(x)
            loss = nn.functional.cross_entropy(output.float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        return step

    def part_bare(self) -> None:
        for chosen in FORMATS:
            self.bare[chosen] = self.median(self.stepper(chosen))
            ratio = f"{self.bare[FORMATS[0]] / self.bare[chosen]:.2f} × faster"
            self.row("bare step", chosen, self.bare[chosen], S * self.batch, ratio)

    def part_captured(self) -> None:
        if not self.cuda:
            return
        for chosen in FORMATS:
            ms = self.captured(chosen, S * self.batch)
            eager = f"eager {self.bare[chosen]:.2f}" if chosen in self.bare else ""
            self.row("bare step, captured", chosen, ms, S * self.batch, eager)

    def captured(self, chosen: Format, images: int) -> float:
        """Milliseconds of a bare step as a CUDA graph; of an eager one without CUDA."""
        step = self.stepper(chosen, capture=self.cuda, images=images)
        if not self.cuda:
            return self.median(step)
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for _ in range(3):
                step()
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        ms = self.median(graph.replay)
        del graph, step
        torch.cuda.empty_cache()
        return ms

    def part_domainbed(self) -> None:
        """As in DomainBed's train.py and ERM.update."""
        model = self.model().train()
        batches = [tuple(t.to(self.device) for t in self.images(self.batch, n)) for n in range(S)]
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-5, weight_decay=0.0)

        def step() -> float:
            every_x, every_y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
            loss = nn.functional.cross_entropy(model(every_x), every_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        self.row("as DomainBed", "contiguous fp32", self.median(step), S * self.batch)

    # Our loop

    def fit(self, algorithm: str, slots: int = S, **options: Any) -> tuple[float, Any]:
        """Milliseconds of a step, and what came out."""
        times: dict[int, float] = {}

        class Clock(shoal.Callback):
            def on_step(clock, state: Any) -> None:
                if state.step >= steps // 4 * (len(times) + 1):
                    self.sync()
                    times[state.step] = time.perf_counter()

        steps = self.steps
        data = {f"domain {n}": self.images(8 if self.given.tiny else 400, n) for n in range(S)}
        own: dict[str, Any] = {"memory_format": "auto", "precision": "auto", **options}
        result = shoal.fit(
            algorithm,
            self.model(),
            data,
            steps=steps,
            batch_size=self.batch,
            domains_per_step=slots,
            lr=1e-4,
            eval_every=steps,
            eval_limit=S,
            callbacks=[Clock()],
            progress=False,
            device=self.device,
            **own,
        )
        begin, end = min(times), max(step for step in times if step < steps)
        return 1000 * (times[end] - times[begin]) / (end - begin), result

    def part_loop(self) -> None:
        ms, result = self.fit("erm")
        found = result.record["environment"]
        self.chosen = Format(found["memory_format"], found["precision"])
        how = f"auto: {self.chosen}" + (", captured" if result.captured else "")
        beside = found.get("trial", "no trial")
        if self.bare:
            beside += f"; bare step in this format {self.bare[self.chosen]:.2f}"
        self.row("loop, ERM", how, ms, S * self.batch, beside)

    def part_fish(self) -> None:
        same = {"memory_format": self.chosen.memory_format, "precision": self.chosen.precision}
        eager = self.median(self.stepper(self.chosen, images=self.batch))
        plain = self.captured(self.chosen, self.batch)
        ms, result = self.fit("fish", **same)
        how = str(self.chosen) + (", captured" if result.captured else "")
        beside = f"{ms / (3 * plain):.2f} × three bare captured steps on {self.batch} images ({plain:.2f} ms)"
        beside += f", {ms / (3 * eager):.2f} × three eager ones ({eager:.2f} ms)"
        self.row("loop, Fish, S = 3", how, ms, S * self.batch, beside)

    def part_evaluate(self) -> None:
        count = 12 if self.given.tiny else 2048
        x, y = self.images(count)
        data = as_domain_data({"a": (x[:8], y[:8]), "b": (x[:8], y[:8])}, None, {"c": (x, y)})
        options = complete(steps=1, batch_size=2, device=self.device, progress=False)
        training = Training("erm", self.model(), data, options)
        training.use(Choice(self.chosen))
        times = []
        for _ in range(2 if self.given.tiny else 4):
            self.sync()
            began = time.perf_counter()
            training.evaluator(training.model)
            self.sync()
            times.append(time.perf_counter() - began)
        ours = count / statistics.median(times[1:])
        on_device = x.to(self.device)
        size = 4 if self.given.tiny else 256
        model = training.model.eval()

        def forward() -> None:
            with torch.inference_mode(), self.autocast(self.chosen):
                for at in range(0, count, size):
                    model(training.entering(on_device[at : at + size]))

        for _ in range(2):
            forward()
        times = []
        for _ in range(1 if self.given.tiny else 3):
            self.sync()
            began = time.perf_counter()
            forward()
            self.sync()
            times.append(time.perf_counter() - began)
        bare = count / statistics.median(times)
        beside = f"{ours / bare:.0%} of a bare forward with {size} per batch ({bare:,.0f} images/s)"
        how = f"{self.chosen}, {training.eval_batch} per batch"
        self.row("evaluation (of 1,000 images)", how, 1e6 / ours, 1000, beside)


# Loading


def photographs(folder: Path, count: int) -> None:
    """JPEGs of 500 × 375, noise with less of it at finer scales."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for n in range(count):
        total = np.zeros((375, 500, 3), np.float32)
        for cells in (4, 16, 64, 250):
            grid = draw.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
            total += np.asarray(Image.fromarray(grid).resize((500, 375), Image.Resampling.BILINEAR)) / cells
        total *= 255 / total.max()
        place = folder / f"domain{n % S}" / f"class{n % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(total.astype(np.uint8)).save(place / f"{n}.jpg", quality=90)


def loading(given: Any, rate: float) -> Iterator[tuple[str, ...]]:
    """Images a second from files to the device, with as many worker processes."""
    from shoal.data.images import image_data, read_folders, split_files
    from shoal.data.loader import MetaBatchLoader
    from shoal.data.sampler import DomainBatchSampler

    device, size = torch.device(given.device), 32 if given.tiny else 224
    workers, seconds = (1, 0.3) if given.tiny else (16, 6.0)
    with tempfile.TemporaryDirectory() as place:
        photographs(Path(place), 12 if given.tiny else 384)
        files = read_folders(place, {f"domain{n}": [f"domain{n}"] for n in range(S)})
        splits = split_files(files, [], 0)
        examples: Any = image_data(files, splits, options={"size": size, "augment": True}).examples
        ways = {
            "crop, resize; colours on the CPU": examples,
            "crop, resize; uint8, colours on the device": examples.on_device(),
            "resize; uint8, as evaluated": examples.evaluation().on_device(),
        }
        for what, way in ways.items():
            sampler = DomainBatchSampler(splits["train"], 2 if given.tiny else B, 1, steps=10**6)
            loader = MetaBatchLoader(way, sampler, workers=workers, device=device, stop=10**6)
            batches, done = iter(loader), 0
            for _ in range(2 * workers):
                next(batches)
            began = time.perf_counter()
            while time.perf_counter() - began < seconds:
                done += len(next(batches)[0].y)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found = done / (time.perf_counter() - began)
            del batches
            loader.close()
            beside = f"{found / rate:.2f} × the loop's rate" if rate else ""
            yield (
                f"JPEG 500×375 → {size}²",
                f"loading, {what}",
                f"{workers} workers",
                "",
                f"{found:,.0f}",
                beside,
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="networks and numbers that a CPU can do")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("needs a CUDA device, or --device cpu --tiny")
        return 1
    warnings.simplefilter("ignore")
    began, failed, rows = time.monotonic(), list[str](), list[tuple[str, ...]]()
    networks = {"resnet18": 32, "mobilenet_v2": 32} if given.tiny else {"resnet50": 224, "mobilenet_v2": 128}
    rate = 0.0
    for name, side in networks.items():
        bench = Bench(name, side, given)
        for part in (p for p in PARTS if p in given.parts and p != "loading"):
            try:
                getattr(bench, f"part_{part}")()
            except Exception as error:  # the other parts are still worth their numbers
                traceback.print_exc()
                failed.append(
                    f"{name}, {part}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                )
        rows += bench.rows
        loops = [float(row[4].replace(",", "")) for row in bench.rows if row[1].startswith("loop, ERM")]
        rate = rate or (loops[0] if loops else 0.0)
    if "loading" in given.parts:
        try:
            rows += loading(given, rate)
        except Exception as error:
            traceback.print_exc()
            failed.append(f"loading: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else "cpu"
    print(f"shoal {shoal.__version__}, torch {torch.__version__}, numpy {np.__version__}, {where}\n")
    print("| network | what | format | ms | images/s | beside |\n| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(f"\n{time.monotonic() - began:.0f} s in all.", *(f"\nfailed: {line}" for line in failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
