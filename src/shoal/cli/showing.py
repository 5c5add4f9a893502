"""What people see while runs go on, and at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.train import Run
from shoal.cli.arguments import as_json, as_options, executor_of
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig
    from shoal.experiments.record import RunRecord
    from shoal.experiments.status import RunStatus


def run_seeds(configs: Sequence[RunConfig], folder: Path, how: dict[str, Any], args: Any) -> int:
    """Runs the seeds that are missing and shows the table of all."""
    from shoal.experiments import display

    return show_result(Run(display.run_seeds(configs, folder, how, executor_of(args)), folder), args)


def run_all(configs: Sequence[RunConfig], store: Any, args: Any) -> list[RunRecord]:
    """Runs what is missing, in parallel, with a display."""
    from shoal.experiments.display import run_shown
    from shoal.experiments.execute import make_executor

    return run_shown(configs, store, make_executor(device=args.device, jobs=args.jobs)).usable()


def show_result(result: Run, args: Any) -> int:
    """What came out of one run or of several seeds; the exit code."""
    if result.finished:
        show(result.to_dict(), str(result), args)
    elif main_process():
        skip = f"To skip such steps: shoal resume {result.folder} --on-nan skip"
        hints = [skip] * any(r.status == "diverged" for r in result.records)
        problems = [f"shoal: {as_options(problem, ['on_nan'])}" for problem in result.problems[:2]]
        print(*problems, *hints, sep="\n", file=sys.stderr)
    return int(bool(result.problems))


def describe_run(status: RunStatus) -> str:
    """How far a run is, in a few lines."""
    from shoal.report.runs import scores_table

    config = status.config
    run, environment = config.get("run") or {}, config.get("environment") or {}
    python = f"{config.get('algorithm')} (started from Python)"
    processes = environment.get("processes", "1")
    together = f", {processes} processes" if processes != "1" else ""
    lines = [
        f"{run['algorithm']} on {run['dataset']}, seed {run['seed']}" if run else python,
        f"{status.state}: step {status.step:,} of {status.steps:,}, {status.seconds:.1f} s on "
        f"{environment.get('device', '?')}{together}, torch {environment.get('torch', '?')}",
    ]
    if weights := environment.get("weights"):
        lines.append(f"initial weights: {weights}")
    if git := config.get("git"):
        lines.append(
            f"commit {git.get('commit', '')[:12]}" + (" with local changes" if git.get("changed") else "")
        )
    if status.error:
        lines.append(status.error)
    if status.scores:
        lines += ["", scores_table(status.scores).text(), "", f"({status.rule})"]
    if status.checkpoint and status.state in ("stopped", "running", "failed"):
        lines.append(f"Latest checkpoint: {status.checkpoint}")
    if status.state in ("stopped", "failed"):
        resume = f"shoal resume {status.folder}" if run else "call shoal.fit with resume=True"
        lines.append(f"Resume with: {resume}")
    return "\n".join(lines)


def samples(options: dict[str, Any], each: int = 9) -> dict[str, Any]:
    """A few images of every domain of CdSprites, as arrays for the plots."""
    import torch

    from shoal.data.sets import load

    data = load("cdsprites", **{**options, "per_domain": 2 * each})
    found = {}
    for split in ("train", "test"):
        domains = data.splits[split]
        for d, name in enumerate(domains.names):
            rows = torch.as_tensor(domains.indices_of(d)[:each]).long()
            images, _ = data.examples.batch(rows)  # type: ignore[attr-defined]
            found["unseen" if split == "test" else name] = images.permute(0, 2, 3, 1).numpy()
    return found


def main_process() -> bool:
    """Of several processes that train together, the one that speaks."""
    return int(os.environ.get("RANK", "0")) == 0 or int(os.environ.get("WORLD_SIZE", "1")) == 1


def show(content: dict[str, Any], text: str, given: Any, pictures: Sequence[Path] = ()) -> None:
    if not main_process():
        return
    if given.json:
        print(as_json(content))
        return
    print(text)
    if pictures:
        print("\nFigures: " + ", ".join(str(p) for p in pictures))


def draw(make: Callable[[], Any], path: Path) -> list[Path]:
    from shoal.report import plots

    try:
        return plots.save(make(), path)
    except InputError as error:
        print(f"shoal: no figure: {error}", file=sys.stderr)
        return []
