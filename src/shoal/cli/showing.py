"""What people see while runs go on, and at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def run_seeds(configs: Sequence[RunConfig], folder: Path, how: dict[str, Any], given: Any) -> None:
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
    show_seeds(records, folder, given)


def show_run(record: RunRecord, folder: Path, given: Any) -> None:
    """What came out of one run."""
    from shoal.report.runs import run_table

    if record.status == "diverged":
        raise InputError(f"{record.error} To skip and go on: shoal resume {folder} --on-nan skip")
    at, config = record.history[record.selected], record.config
    skipped = f" {record.skipped} steps were not finite and were skipped." if record.skipped else ""
    text = (
        f"{run_table(record.to_dict()).text()}\n\n{config.name} on {config.dataset}, {record.rule} "
        f"(step {at['step']:,}), {record.seconds:.1f} s.{skipped} Saved in {folder}{_predictions(folder)}."
    )
    show(record.to_dict(), "\n".join([text + _note(record), *_missing(at["scores"])]), given)


def _predictions(folder: Path) -> str:
    return ", with predictions" if (folder / "predictions").is_dir() else ""


def _missing(scores: dict[str, Any]) -> list[str]:
    """Why some measures are shown as a dash."""
    from shoal.training.metrics import why_missing

    return [
        line for split, found in scores.items() for line in why_missing(split, found.get("metrics") or {})
    ]


def _note(record: RunRecord) -> str:
    """What a reader must know of the validation data that chose the weights."""
    note = record.notes.get("validation", "")
    return f"\nValidation is {note}." if note and record.rule.startswith("best") else ""


def show_seeds(records: Sequence[RunRecord], folder: Path, given: Any) -> None:
    from shoal.report.runs import seeds_table

    finished = [r for r in records if r.status == "finished"]
    lost = [f"seed {r.config.seed}: {r.error}" for r in records if r.status != "finished"]
    if not finished:
        raise InputError("no run came to its end. " + " ".join(lost[:2]))
    config = finished[0].config
    seconds = sum(r.seconds for r in records)
    rules = {r.rule for r in finished}  # which steps were averaged may differ
    rule = rules.pop() if len(rules) == 1 else f"{finished[0].rule.split(',')[0]}, {config.average}"
    text = (
        f"{seeds_table([r.to_dict() for r in finished]).text()}\n\n{config.name} on {config.dataset}, "
        f"{rule}, mean ± standard deviation over {len(finished)} seeds; "
        f"{seconds:.1f} s of training. Saved in {folder}."
    )
    show({"records": [r.to_dict() for r in records]}, "\n".join([text + _note(finished[0]), *lost]), given)


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
