"""What only a CUDA device can show: captured steps equal eager ones, guards, precisions, exact resume, many
runs at once, speed.

python benchmarks/cuda_checks.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products

import torch
from torch import Tensor, nn

from shoal.algorithms import algorithm_class, registry, settings_of
from shoal.api.fit import Fit, fit
from shoal.data.batch import DomainData, TensorData
from shoal.datasets import load
from shoal.datasets.cdsprites import latent_grid, render
from shoal.experiments.execute import execute
from shoal.experiments.store import Store
from shoal.models import FeatureModel, build
from shoal.paper.cdsprites import configs, preset
from shoal.paper.recipes import Variant
from shoal.training.loop import Training
from shoal.training.options import complete
from shoal.training.stepping import Stepper
from shoal.training.stopping import Diverged, Interrupted

WALK = {"meta_lr": 0.1, "inner_state": "reset"}
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("erm", {}, 1),
    ("fish", WALK, 10),
    ("fish", {"meta_lr": 0.3, "inner_state": "carry"}, 10),
    ("reptile", WALK, 10),
    ("smoothfish", {"gamma": 0.5, **WALK}, 10),
    ("idgm", {}, 10),
    ("idgm", {"method": "finite-difference"}, 10),
]
CASES += [
    (name, {"start": 2, "weight": 1.0} if "start" in settings_of(algorithm_class(name)) else {}, 4)
    for name in registry.names()
    if name not in [case[0] for case in CASES]
]
CASES.append(("mldg", {"order": "exact"}, 4))
failures = 0


def report(label: str, fine: bool, more: str = "") -> None:
    global failures
    failures += not fine
    print(f"  {label:68} {'ok' if fine else 'FAILED'}  {more}", flush=True)


@lru_cache
def sprites() -> DomainData:
    return load("cdsprites", domains=10, size=64, per_domain=500)


def network(dropout: bool = False) -> nn.Module:
    model = build("sprite-cnn", input_shape=(3, 64, 64), classes=2, seed=0)
    if not dropout:
        return model
    torch.manual_seed(0)
    features = nn.Sequential(
        nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.3), nn.Flatten()
    )
    return FeatureModel(features, nn.Linear(4096, 2))


def repeats(case: tuple[str, dict[str, Any], int]) -> bool:
    """Whether it needs the same dropout masks twice, and is then not captured."""
    name, settings, _ = case
    return (
        algorithm_class(name).repeats_passes
        or settings.get("order") == "exact"
        or (settings.get("method") == "finite-difference")
    )


def trained(
    case: tuple[str, dict[str, Any], int], passes: int, model: nn.Module | None = None, **more: Any
) -> Fit:
    algorithm, settings, slots = case
    given: dict[str, Any] = {
        "steps": passes // slots,
        "batch_size": 64,
        "domains_per_step": slots,
        "settings": settings,
        "eval_every": passes // slots,
        "eval_limit": 50,
        "select": "last",
        "progress": False,
    }
    return fit(algorithm, model or network(), more.pop("data", None) or sprites(), **{**given, **more})


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()])


def captured_equals_eager() -> None:
    print("\ncaptured steps against eager ones, deterministic kernels, after 120 passes: equal bits")
    for case in CASES:
        for dropout in (False, True):
            if dropout and repeats(case):
                continue  # not captured: dropout masks have to be repeated
            runs = [
                trained(case, 120, network(dropout), capture=c, deterministic=True, eval_every=4)
                for c in (False, True)
            ]
            a, b = (weights_of(r.model) for r in runs)
            label = f"{case[0]} {case[1]}{', BatchNorm and dropout' if dropout else ''}"
            report(label, bool((a == b).all()), "" if (a == b).all() else f"{float((a - b).abs().max()):.1e}")


def without_waiting() -> None:
    print("\na step without waiting for the device (any synchronisation raises)")
    for case in CASES:
        for precision in ("fp32", "bf16", "fp16"):
            if precision == "fp16" and (algorithm_class(case[0]).second_order or "exact" in case[1].values()):
                continue
            name, settings, slots = case
            options = complete(
                steps=9, batch_size=64, domains_per_step=slots, settings=settings, capture=False,
                precision=precision, clip=1.0, progress=False,  # type: ignore[arg-type]
            )  # fmt: skip
            training = Training(name, network(), sprites(), options)
            training.model.train()
            steps = Stepper(training, training.state, training.callbacks)._loaded()
            for _ in range(3):
                next(steps)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                next(steps)
                fine, more = True, ""
            except RuntimeError as error:
                fine, more = False, str(error).splitlines()[0]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            report(f"{name} {settings} {precision}", fine, more)


def guards() -> None:
    print("\na step that is not finite: not applied, and named")
    data = sprites()
    examples: Any = data.examples
    every = examples.batch(torch.arange(len(examples)))
    for case in CASES:
        if algorithm_class(case[0]).draws_numbers:
            continue  # Mixup may take next to nothing of the example that is not finite
        for capture in (False, True):
            name, settings, slots = case
            options = complete(
                steps=24, batch_size=64, domains_per_step=slots, settings=settings, progress=False
            )
            probe = Training(name, network(), data, options)
            poisoned = int(probe.sampler.plan(13)[-1][1][5])  # one example, drawn at the 14th step
            x, y = every[0].clone(), every[1]
            x[poisoned] = 3e38
            split = {k: v for k, v in data.splits.items() if k == "train"}
            sick = DomainData(TensorData(x, y), split, 2, data.input_shape, data.model)
            plan = probe.sampler.plan
            first = next(s + 1 for s in range(24) if any(poisoned in rows for _, rows in plan(s)))
            model, stop = network(), None
            try:
                trained(case, 24 * slots, model, data=sick, capture=capture, steps=24)
            except Diverged as error:
                stop = error
            finite = all(bool(p.isfinite().all()) for p in model.parameters())
            named = f"step {stop.step}, {stop.quantity} of {stop.domain}" if stop else "not stopped"
            right = stop is not None and stop.step == first and finite
            report(f"{name} {settings}{', captured' if capture else ''}", right, f"{named}; expected {first}")


def precisions() -> None:
    print("\nprecisions: mean loss of the first 60 passes, beside fp32's; weights stay in float32")
    for case in CASES:
        usual = trained(case, 60).last.loss
        for precision in ("bf16", "fp16"):
            if precision == "fp16" and (algorithm_class(case[0]).second_order or "exact" in case[1].values()):
                continue
            run = trained(case, 60, precision=precision)
            fine = abs(run.last.loss - usual) < 0.01 and all(
                p.dtype == torch.float32 for p in run.model.parameters()
            )
            report(f"{case[0]} {case[1]} {precision}", fine, f"loss {run.last.loss:.4f}, fp32 {usual:.4f}")


def resumes() -> None:
    print("\nstopped at step 9 and resumed, deterministic kernels: equal bits and history")
    for case in CASES:
        for capture in (False, True):
            for dropout in (False, True):
                if dropout and capture and repeats(case):
                    continue
                if case[2] == 4 and dropout is capture:
                    continue  # half of the combinations is enough

                def go(
                    folder: str | None, stop: int = 0, case: Any = case, dropout: bool = dropout,
                    capture: bool = capture, **more: Any,
                ) -> Fit:  # fmt: skip
                    def told(step: int, note: str) -> None:
                        if stop and step >= stop:
                            os.kill(os.getpid(), signal.SIGTERM)

                    return trained(
                        case, 20 * case[2], network(dropout), folder=folder, capture=capture, eval_every=4,
                        deterministic=True, progress=told if stop else False, warm_start=8, **more,
                    )  # fmt: skip

                with tempfile.TemporaryDirectory() as folder:
                    whole = go(None)
                    try:
                        go(folder, 9)
                        report("was not stopped", False)
                    except Interrupted:
                        pass
                    again = go(folder, resume=True)
                same = torch.equal(weights_of(whole.model), weights_of(again.model))
                same &= whole.history == again.history
                label = (
                    f"{case[0]} {case[1]}{', captured' if capture else ''}{', dropout' if dropout else ''}"
                )
                report(label, same)


def side_by_side() -> None:
    print("\na long run beside many short ones, ten at a time, deterministic kernels: each as alone")
    size = preset("sizes")["full"]
    size = {**size, "data": {"size": 64, "per_domain": 500}, "run": {**size["run"], "eval_limit": 50}}
    runs = configs([Variant("Reptile", "reptile")], 30, [0], {**size, "passes": 6000})
    runs += configs([Variant("Fish"), Variant("ERM", "erm")], 10, range(9), {**size, "passes": 200})
    found = []
    for together in (1, 10):
        with tempfile.TemporaryDirectory() as folder:
            began, how = time.monotonic(), {"deterministic": True}
            found.append(execute(runs, Store(Path(folder)), jobs=together, options=how).records)
            print(f"  {together} at a time: {time.monotonic() - began:.1f} s", flush=True)
    for alone, beside in zip(*found, strict=True):
        report(f"{alone.config.name}, seed {alone.config.seed}", alone.history == beside.history)


def speeds() -> None:
    print("\ninner steps a second, 64×64, batch 64, through the whole loop (1,200 passes, capture included)")
    for case in CASES:
        passes = 1200
        slow, fast = (passes / trained(case, passes, capture=c).seconds for c in (False, True))
        found = f"eager {slow:6.0f}  captured {fast:6.0f}  ratio {fast / slow:4.2f}"
        print(f"  {case[0]:12} {case[1]!s:48} {found}", flush=True)


TWO = """
import os, sys, torch, torch.distributed as dist
os.environ["ACCELERATE_TORCH_DEVICE"] = "cuda:0"
dist.init_process_group("gloo")
sys.path.insert(0, sys.argv[1])
import cuda_checks
for number, found in enumerate(cuda_checks.plain_runs("cuda:0")):
    torch.save(found, f"{sys.argv[2]}/{number}-{dist.get_rank()}.pt")
"""


def plain_runs(device: str | None = None) -> list[Tensor]:
    """Weights after four steps of plain SGD: Adam would blow rounding up to whole steps."""
    torch.backends.cudnn.allow_tf32 = False  # its rounding is coarser than what is to be seen here
    sgd = {"optimizer": lambda p: torch.optim.SGD(p, 0.05), "deterministic": True, "capture": False}
    return [weights_of(trained(case, 4 * case[2], device=device, **sgd).model).cpu() for case in CASES]


def two_processes() -> None:
    print("\ntwo processes on one device (gloo), each with half of every batch, against one with all")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "two.py"
        script.write_text(TWO)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(script), str(Path(__file__).parent), folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "Error" in line]
            report("two processes", False, "\n".join([*errors, done.stderr[:3000]]))
            return
        for number, (case, alone) in enumerate(zip(CASES, plain_runs(), strict=True)):
            found = [torch.load(f"{folder}/{number}-{rank}.pt", weights_only=True) for rank in (0, 1)]
            apart = float((found[0] - alone).abs().max())
            fine = torch.equal(found[0], found[1]) and apart < 3e-5
            report(f"{case[0]} {case[1]}", fine, f"largest difference of a weight {apart:.1e}")


def main() -> int:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    latents = latent_grid((0, 1))
    chosen = latents[torch.randperm(len(latents), generator=torch.Generator().manual_seed(0))[:20_000]]
    differ = int((render(chosen, 64) != render(chosen, 64, device="cuda").cpu()).sum())
    report("sprites drawn on CUDA equal the CPU's, 20,000 images", differ == 0)
    parts: list[Callable[[], None]] = [
        captured_equals_eager, without_waiting, guards, precisions, resumes, side_by_side, two_processes,
        speeds,
    ]  # fmt: skip
    wanted = sys.argv[1:]
    for part in parts:
        if not wanted or part.__name__ in wanted:
            part()
    print(f"\n{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
