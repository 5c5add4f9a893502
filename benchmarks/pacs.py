"""Which recipe for a pretrained model? PACS, MobileNetV2 with ImageNet weights, each domain held out in turn.

    python benchmarks/pacs.py plan
    python benchmarks/pacs.py run --data pacs.tar --weights mobilenet_v2-b0353104.pth --out runs/pacs
    python benchmarks/pacs.py table runs/pacs

``run`` does what is missing in ``--out``, in the order of the plan, for ``--seconds``; the same command
resumes. It needs torch, torchvision, numpy and Pillow. ``--data`` is the folder ``domain/class/image``, or a
tar of it.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tarfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
STEPS, BATCH, EVERY, RATE = 600, 32, 30, 1e-4
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Method:
    name: str
    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    batchnorm: bool = False
    """Whether BatchNorm's statistics are trained."""
    tier: int = 1
    rate: float = RATE
    search: str = ""
    """The method whose random search this is a trial of."""


SWAD = {"average": "swad"}
PLUS = {"warm_start": "head", "average": "sma", "retrain": True}
METHODS = (
    Method("ERM", "erm", options=SWAD),
    Method("Fish", "fish", {"meta_lr": 0.5}, SWAD),
    Method("Fish, random grouping", "fish", {"meta_lr": 0.5}, {**SWAD, "draw": "regrouped"}),
    Method("CORAL", "coral", options=SWAD),
    Method("MIRO", "erm", options={**SWAD, "miro": 0.1}),
    Method("ERM++", "erm", options=PLUS, batchnorm=True),
    Method("LP-FT", "erm", options={**SWAD, "warm_start": "head"}, tier=2),
    Method("ERM, BatchNorm trained", "erm", options=SWAD, batchnorm=True, tier=2),
    Method("ERM++, BatchNorm frozen", "erm", options=PLUS, tier=2),
    Method("ERM++ and MIRO", "erm", options={**PLUS, "miro": 0.1}, tier=2),
    Method("Fish++", "fish", {"meta_lr": 0.5}, PLUS, tier=2),
    Method("SAGM", "sagm", options=SWAD, tier=3),
    Method("SAM", "sam", options=SWAD, tier=3),
    Method("GGA", "gga", options=SWAD, tier=3),
    Method("GroupDRO", "groupdro", options=SWAD, tier=3),
    Method("Mixup", "mixup", options=SWAD, tier=3),
    Method("Fishr", "fishr", options=SWAD, tier=3),
)


def trials(count: int = 3) -> list[Method]:
    """Random search: the same draws of the learning rate for each, and one hyperparameter of its own."""
    draws = np.random.default_rng(0).uniform(size=(count, 2))
    found = []
    for i, (a, b) in enumerate(draws, 1):
        rate, at = float(10 ** (-4.5 + a)), {"rate": float(10 ** (-4.5 + a)), "tier": 4}
        weight = float(10 ** (-3 + 2 * b))
        found += [
            Method(f"ERM, trial {i}", "erm", {}, SWAD, search="ERM", **at),
            Method(f"Fish, trial {i}", "fish", {"meta_lr": float(0.1 + 0.9 * b)}, SWAD, search="Fish", **at),
            Method(f"MIRO, trial {i}", "erm", {}, {**SWAD, "miro": weight}, search="MIRO", **at),
            Method(f"CORAL, trial {i}", "coral", {"weight": 100 * weight}, SWAD, search="CORAL", **at),
        ]
        assert 3e-5 < rate < 4e-4
    return found


METHODS += tuple(trials())


@dataclass(frozen=True)
class Task:
    method: Method
    held_out: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.method.name} | {self.held_out} | {self.seed}"


def plan() -> list[Task]:
    """Tier by tier, so that what is cut off by the clock is the last tier."""
    order = itertools.product(sorted({m.tier for m in METHODS}), SEEDS, METHODS, DOMAINS)
    return [Task(m, d, seed) for tier, seed, m, d in order if m.tier == tier]


def decoded(path: str, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All images (N, 3, size, size) as uint8, their classes and domains, sorted by name."""
    from PIL import Image

    found: list[tuple[str, bytes]] = []
    if os.path.isdir(path):
        files = sorted(Path(path).glob("*/*/*.*"))
        found = [("/".join(p.parts[-3:]), p.read_bytes()) for p in files]
    else:
        with tarfile.open(path) as tar:
            for member in tar:
                if member.isfile():
                    content = tar.extractfile(member)
                    assert content is not None
                    found.append(("/".join(member.name.split("/")[-3:]), content.read()))
        found.sort()
    x = np.empty((len(found), 3, size, size), np.uint8)
    for i, (_, content) in enumerate(found):
        image = Image.open(io.BytesIO(content)).convert("RGB")
        if image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        x[i] = np.asarray(image).transpose(2, 0, 1)
    names = [name.split("/") for name, _ in found]
    y = np.array([CLASSES.index(c) for _, c, _ in names])
    return x, y, np.array([DOMAINS.index(d) for d, _, _ in names])


def front() -> Any:
    """Augments and normalises images where the model is: a random crop, mirror image, colours, grey."""
    import torch
    from torch import Tensor, nn

    class Front(nn.Module):
        draws_numbers = True

        def __init__(self) -> None:
            super().__init__()
            shape = (1, 3, 1, 1)
            self.register_buffer("mean", 255 * torch.tensor([0.485, 0.456, 0.406]).view(shape))
            self.register_buffer("deviation", 255 * torch.tensor([0.229, 0.224, 0.225]).view(shape))
            self.register_buffer("luma", torch.tensor([0.299, 0.587, 0.114]).view(shape))

        def forward(self, x: Tensor) -> Tensor:
            images = x.float()
            if self.training:
                images = self.augmented(images)
            return (images - self.mean) / self.deviation

        def augmented(self, x: Tensor) -> Tensor:
            u = torch.rand(9, len(x), device=x.device)
            area, ratio = 0.7 + 0.3 * u[0], torch.exp((2 * u[1] - 1) * np.log(4 / 3))
            w, h = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
            mirrored = torch.where(u[2] < 0.5, -1.0, 1.0)
            zero = torch.zeros_like(w)
            rows = [torch.stack([w * mirrored, zero, (2 * u[3] - 1) * (1 - w)], 1)]
            rows.append(torch.stack([zero, h, (2 * u[4] - 1) * (1 - h)], 1))
            grid = nn.functional.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
            x = nn.functional.grid_sample(x, grid, padding_mode="border", align_corners=False)
            light, contrast, colour = ((0.7 + 0.6 * v).view(-1, 1, 1, 1) for v in (u[5], u[6], u[7]))
            x = x * light
            grey = self.grey(x)
            x = contrast * x + (1 - contrast) * grey.mean((1, 2, 3), keepdim=True)
            grey = self.grey(x)
            x = colour * x + (1 - colour) * grey
            return torch.where((u[8] < 0.1).view(-1, 1, 1, 1), grey, x).clamp(0, 255)

        def grey(self, x: Tensor) -> Tensor:
            return (x * self.luma).sum(1, keepdim=True)

    return Front()


def build(weights: str, batchnorm: bool, seed: int) -> Any:
    import torch
    from torch import nn

    from shoal.models import FeatureModel
    from shoal.vision import allow_torchvision

    allow_torchvision()
    from torchvision.models import mobilenet_v2

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = front()
            net = mobilenet_v2(weights=None)
            net.load_state_dict(torch.load(weights, weights_only=True))
            self.features = net.features

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            for m in () if batchnorm else self.modules():
                if isinstance(m, nn.BatchNorm2d):
                    m.eval()
            return self

        def forward(self, x: Any) -> Any:
            return self.features(self.front(x)).mean((2, 3))

    torch.manual_seed(seed)
    return FeatureModel(Body(), nn.Linear(1280, len(CLASSES)))


_DATA: dict[str, Any] = {}


def started(path: str, device: str, weights: str) -> None:
    import torch

    torch.set_num_threads(1)
    with np.load(path) as kept:
        x, y, d = kept["x"], kept["y"], kept["d"]
    _DATA.update(x=torch.from_numpy(x).to(device), y=torch.from_numpy(y).to(device), d=d)
    _DATA.update(device=device, weights=weights)


def done(task: Task, steps: int) -> dict[str, Any]:
    """One run: scores of the best weights on validation and of the average, from the same training."""
    import torch

    import shoal
    from shoal.data import DomainData, Domains
    from shoal.data.batch import TensorData
    from shoal.data.splits import hold_out_examples

    method = task.method
    names = [d for d in DOMAINS if d != task.held_out]
    of = {d: np.flatnonzero(_DATA["d"] == DOMAINS.index(d)) for d in DOMAINS}
    train, validation = hold_out_examples(
        Domains.from_indices({d: of[d] for d in names}), 0.2, seed=task.seed
    )
    test = Domains.from_indices({task.held_out: of[task.held_out]})
    splits = {"train": train, "validation": validation, "test": test}
    shape = tuple(_DATA["x"].shape[1:])
    data = DomainData(TensorData(_DATA["x"], _DATA["y"]), splits, len(CLASSES), shape, model="")
    began = time.monotonic()
    fit = shoal.fit(
        method.algorithm,
        build(_DATA["weights"], method.batchnorm, task.seed),
        data,
        steps=steps,
        batch_size=BATCH,
        domains_per_step=len(names),
        settings=method.settings,
        optimizer=torch.optim.Adam,
        lr=method.rate,
        seed=task.seed,
        eval_every=max(1, steps * EVERY // STEPS),
        eval_batch=1024,
        memory_format="channels-last",
        device=_DATA["device"],
        progress=False,
        **method.options,
    )
    curve = [(p.step, p.scores["validation"].average, p.scores["test"].average) for p in fit.history]
    best = max(curve, key=lambda point: point[1])
    return {
        "key": task.key,
        **{"method": method.name, "held_out": task.held_out, "seed": task.seed},
        "best": {"step": best[0], "validation": best[1], "test": best[2]},
        "last": {"step": curve[-1][0], "validation": curve[-1][1], "test": curve[-1][2]},
        "final": {"rule": fit.rule, "step": fit.selected.step, "test": fit.selected.scores["test"].average},
        "curve": curve,
        "captured": fit.captured,
        "seconds": round(time.monotonic() - began, 1),
        "steps": steps,
    }


def safely(asked: tuple[Task, int]) -> dict[str, Any]:
    import traceback

    try:
        return done(*asked)
    except Exception:
        return {"key": asked[0].key, "error": traceback.format_exc()}


def run(args: argparse.Namespace) -> None:
    import torch

    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "results.jsonl"
    there = {r["key"] for r in read(out)}
    tasks = [t for t in plan() if t.key not in there and t.method.tier <= args.tiers]
    if args.only:
        tasks = [t for t in tasks if t.method.name in args.only]
    tasks = tasks[: args.most]
    packed = args.packed or str(out / "pacs.npz")
    if not os.path.exists(packed):
        x, y, d = decoded(args.data, args.size)
        if args.each:
            some = np.concatenate([np.flatnonzero((d == i) & (y == c))[: args.each]
                                   for i in range(len(DOMAINS)) for c in range(len(CLASSES))])  # fmt: skip
            x, y, d = x[some], y[some], d[some]
        np.savez(packed, x=x, y=y, d=d)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    print(
        f"{len(there)} runs are there, {len(tasks)} to do, torch {torch.__version__} on {device}", flush=True
    )
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.jobs, started, (packed, device, args.weights)) as pool, kept.open("a") as file:
        for result in pool.imap_unordered(safely, [(t, args.steps) for t in tasks]):
            if "error" in result:
                print(f"FAILED {result['key']}\n{result['error'][-1500:]}", flush=True)
            else:
                file.write(json.dumps(result) + "\n")
                file.flush()
                best, final = result["best"]["test"], result["final"]["test"]
                line = f"{result['key']}: best {best:.3f} final {final:.3f} ({result['seconds']} s)"
                print(f"{time.monotonic() - began:5.0f} s  {line}", flush=True)
            if time.monotonic() - began > args.seconds:
                print("time is up", flush=True)
                pool.terminate()
                break


def read(out: Path) -> list[dict[str, Any]]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(results: list[dict[str, Any]]) -> dict[str, dict[tuple[str, int], float]]:
    """By row of the table: held-out accuracy in percent by domain and seed."""
    found: dict[str, dict[tuple[str, int], float]] = {}
    for r in results:
        at = r["held_out"], r["seed"]
        averaged = "swad" in r["final"]["rule"]
        if averaged:
            found.setdefault(r["method"], {})[at] = 100 * r["best"]["test"]
            found.setdefault(f"{r['method']} + SWAD", {})[at] = 100 * r["final"]["test"]
        else:
            found.setdefault(r["method"], {})[at] = 100 * r["final"]["test"]
    return found


DIFFERENCES = (
    ("Fish + SWAD", "ERM + SWAD"),
    ("Fish, random grouping + SWAD", "ERM + SWAD"),
    ("CORAL + SWAD", "ERM + SWAD"),
    ("LP-FT + SWAD", "ERM + SWAD"),
    ("SAGM + SWAD", "ERM + SWAD"),
    ("GroupDRO + SWAD", "ERM + SWAD"),
    ("MIRO + SWAD", "ERM + SWAD"),
    ("ERM++", "ERM + SWAD"),
    ("ERM++, BatchNorm frozen", "ERM + SWAD"),
    ("ERM++, BatchNorm frozen", "ERM++"),
    ("ERM", "ERM, BatchNorm trained"),
    ("Fish++", "ERM++, BatchNorm frozen"),
    ("Fish + SWAD", "ERM++, BatchNorm frozen"),
    ("Fish", "Fish, random grouping"),
    ("Fish + SWAD", "Fish, random grouping + SWAD"),
)


def table(args: argparse.Namespace) -> None:
    from shoal.experiments.statistics import mean_interval

    results = read(Path(args.out))
    trial = {m.name for m in METHODS if m.search}
    found = rows([r for r in results if r["method"] not in trial])
    print("| method | " + " | ".join(DOMAINS) + " | mean | seeds | less ERM, clustered by domain (95 %) |")
    print("|---|" + "---|" * (len(DOMAINS) + 3))
    base = found["ERM"]
    for name, cells in found.items():
        means = []
        for d in DOMAINS:
            values = [v for (domain, _), v in cells.items() if domain == d]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            means.append(f"{statistics.mean(values):.1f}{spread}" if values else "–")
        seeds = sorted({s for _, s in cells if all((d, s) in cells for d in DOMAINS)})
        by_seed = [statistics.mean(cells[d, s] for d in DOMAINS) for s in seeds]
        whole = f"{statistics.mean(by_seed):.1f}" if by_seed else "–"
        whole += f" ± {statistics.stdev(by_seed):.1f}" if len(by_seed) > 1 else ""
        both, paired = [k for k in cells if k in base], "–"
        if name != "ERM" and len(both) > 1:
            gap = mean_interval([cells[k] - base[k] for k in both], [domain for domain, _ in both])
            paired = f"{gap.mean:+.1f} ({gap.low:+.1f} to {gap.high:+.1f})"
        print(f"| {name} | " + " | ".join(means) + f" | {whole} | {len(seeds)} | {paired} |")
    print("\n| difference | mean | 95 % interval, clustered by domain | pairs |\n|---|---|---|---|")
    for one, other in DIFFERENCES:
        both = [k for k in found.get(one, {}) if k in found.get(other, {})]
        if len(both) > 1:
            differences = [found[one][k] - found[other][k] for k in both]
            gap = mean_interval(differences, [domain for domain, _ in both])  # seeds share a domain
            interval = f"{gap.low:+.2f} to {gap.high:+.2f}"
            print(f"| {one}, less {other} | {gap.mean:+.2f} | {interval} | {len(both)} |")
    searched(results)


def searched(results: list[dict[str, Any]]) -> None:
    """By method: held-out accuracy of the default, and of the trial that was best on validation."""
    print(
        "\n| method | trials | held-out domains and seeds | default | selected | + SWAD | selected + SWAD |"
    )
    print("|---|---|---|---|---|---|---|")
    by = {r["key"]: r for r in results}
    names = sorted({m.search for m in METHODS if m.search})
    trials = [[m for m in METHODS if m.search == name] for name in names]
    for count in range(1, len(trials[0]) + 1):
        at = [
            (d, s)
            for d, s in itertools.product(DOMAINS, SEEDS)
            if all(Task(m, d, s).key in by for each in trials for m in each[:count])
        ]
        for name, each in zip(names, trials, strict=True) if at else ():
            default = next(m for m in METHODS if m.name == name)
            cells: list[list[float]] = []
            for d, s in at:
                tried = [by[Task(m, d, s).key] for m in [default, *each[:count]]]
                best = max(tried, key=lambda r: r["best"]["validation"])
                ends = [tried[0]["best"], best["best"], tried[0]["final"], best["final"]]
                cells.append([100 * end["test"] for end in ends])
            means = [f"{statistics.mean(column):.1f}" for column in zip(*cells, strict=True)]
            print(f"| {name} | {count + 1} | {len(at)} | " + " | ".join(means) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan")
    add = commands.add_parser("run").add_argument
    add("--data")
    add("--packed", help="the decoded images (default: made in --out)")
    add("--weights", required=True)
    add("--out", required=True)
    add("--seconds", type=float, default=1e9)
    add("--jobs", type=int, default=4)
    add("--steps", type=int, default=STEPS)
    add("--size", type=int, default=112)
    add("--tiers", type=int, default=3)
    add("--only", nargs="+", metavar="METHOD")
    add("--most", type=int)
    add("--each", type=int, help="images per class and domain, to try it")
    add("--device")
    commands.add_parser("table").add_argument("out")
    args = parser.parse_args()
    if args.command == "plan":
        print(json.dumps([asdict(m) for m in METHODS], indent=1))
        print(f"{len(plan())} runs: every method, {len(DOMAINS)} held-out domains, {len(SEEDS)} seeds")
    else:
        {"run": run, "table": table}[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
