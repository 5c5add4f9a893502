"""What people see while runs go on, and at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.train import Run
from shoal.cli.arguments import as_json
from shoal.errors import InputError
from shoal.experiments.display import Display as Status

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig
    from shoal.experiments.record import RunRecord, Store
    from shoal.experiments.status import RunStatus


def run_all(
    configs: Sequence[RunConfig],
    store: Store,
    given: Any,
    how: dict[str, Any] | None = None,
    status: Status | None = None,
) -> list[RunRecord]:
    """Runs what is missing; ``status`` is that of a longer list of which these are a part."""
    from shoal.experiments import pool

    status = status or Status(configs, len(store.missing(configs)))
    return pool.run_all(
        configs,
        store,
        device=given.device,
        jobs=given.jobs,
        how=how,
        tell=status.tell,
        done=status.done,
    )


def run_seeds(configs: Sequence[RunConfig], folder: Path, how: dict[str, Any], given: Any) -> int:
    """The same run with several seeds, each in a folder of its own; the plan is kept for `shoal resume`."""
    from shoal.experiments.record import RunFolders
    from shoal.training.stopping import Interrupted

    store = RunFolders(folder)
    store.plan(configs, how)
    try:
        records = run_all(configs, store, given, how)
    except InputError:
        store.forget_plan()
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it was made for these runs, and nothing is in it
        raise
    except KeyboardInterrupt as stop:
        number = getattr(stop, "signal", None) or signal.SIGINT
        raise Interrupted(f"stopped. Go on with: shoal resume {folder}", number) from stop
    return show_result(Run(records, folder), given)


def show_result(result: Run, given: Any) -> int:
    """What came out of one run or of several seeds; the exit code."""
    if result.finished:
        show(result.to_dict(), str(result), given)
    elif main_process():
        skip = f"To skip such steps: shoal resume {result.folder} --on-nan skip"
        print(*(f"shoal: {problem}" for problem in result.problems[:2]), skip, sep="\n", file=sys.stderr)
    return int(bool(result.problems))


def describe_run(status: RunStatus) -> str:
    """How far a run is, in a few lines."""
    from shoal.report.runs import scores_table

    config = status.config
    run, environment = config.get("run") or {}, config.get("environment") or {}
    what = (
        f"{run['algorithm']} on {run['dataset']}"
        if run
        else f"{config.get('algorithm')} (started from Python)"
    )
    processes = environment.get("processes", "1")
    together = f", {processes} processes" if processes != "1" else ""
    lines = [
        f"{what}, seed {run['seed']}" if run else what,
        f"{status.state}: step {status.step:,} of {status.steps:,}, {status.seconds:.1f} s on "
        f"{environment.get('device', '?')}{together}, torch {environment.get('torch', '?')}",
    ]
    if git := config.get("git"):
        lines.append(f"commit {git.get('commit', '')[:12]}" + (" with changes" if git.get("changed") else ""))
    if status.error:
        lines.append(status.error)
    if status.scores:
        lines += ["", scores_table(status.scores).text(), "", f"({status.rule})"]
    if status.checkpoint and status.state in ("stopped", "running"):
        lines.append(f"Newest checkpoint: {status.checkpoint}")
    if status.state == "stopped":
        going_on = f"shoal resume {status.folder}" if run else "call shoal.fit again with resume=True"
        lines.append(f"Go on with: {going_on}")
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
