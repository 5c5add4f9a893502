"""What people see while runs go on, and at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError
from shoal.files import finite

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig
    from shoal.experiments.record import RunRecord
    from shoal.experiments.status import RunStatus


def run_seeds(configs: Sequence[RunConfig], folder: Path, how: dict[str, Any], args: Any) -> int:
    """Runs the seeds that are missing and shows the table of all."""
    from shoal.experiments import display
    from shoal.experiments.execute import make_executor

    names = ("engine", "device", "jobs", "address", "gpus_per_run", "cpus_per_run")
    options = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    records = display.run_seeds(configs, folder, how, make_executor(**options))
    show_seeds(records, folder, args)
    return int(any(record.status == "failed" for record in records))


def run_all(configs: Sequence[RunConfig], store: Any, args: Any) -> list[RunRecord]:
    """Runs what is missing, in parallel, with a display."""
    from shoal.experiments.display import run_shown
    from shoal.experiments.execute import make_executor

    return run_shown(configs, store, make_executor(device=args.device, jobs=args.jobs)).usable()


def show_run(record: RunRecord, folder: Path, args: Any) -> None:
    """What came out of one run."""
    from shoal.report.runs import run_table
    from shoal.training.metrics import why_missing

    if record.status != "finished":
        raise InputError(f"{record.error} To skip and go on: shoal resume {folder} --on-nan skip")
    at, config = record.history[record.selected], record.config
    skipped = f" {record.skipped} steps were not finite and were skipped." if record.skipped else ""
    predictions = ", with predictions" if (folder / "predictions").is_dir() else ""
    text = (
        f"{run_table(record.to_dict()).text()}\n\n{config.name} on {config.dataset}, {record.rule} "
        f"(step {at['step']:,}), {record.seconds:.1f} s.{skipped} Saved in {folder}{predictions}."
    )
    scores = at["scores"].items()
    dashes = [line for split, of in scores for line in why_missing(split, of.get("metrics") or {})]
    show(record.to_dict(), "\n".join([text + _note(record), *dashes]), args)


def _note(record: RunRecord) -> str:
    """What a reader must know of the validation data that chose the weights."""
    note = record.notes.get("validation", "")
    return f"\nValidation is {note}." if note and record.rule.startswith("best") else ""


def show_seeds(records: Sequence[RunRecord], folder: Path, args: Any) -> None:
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
    show({"records": [r.to_dict() for r in records]}, "\n".join([text + _note(finished[0]), *lost]), args)


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
    if git := config.get("git"):
        lines.append(f"commit {git.get('commit', '')[:12]}" + (" with changes" if git.get("changed") else ""))
    if status.error:
        lines.append(status.error)
    if status.scores:
        lines += ["", scores_table(status.scores).text(), "", f"({status.rule})"]
    if status.checkpoint and status.state in ("stopped", "running", "failed"):
        lines.append(f"Newest checkpoint: {status.checkpoint}")
    if status.state in ("stopped", "failed"):
        resume = f"shoal resume {status.folder}" if run else "call shoal.fit again with resume=True"
        lines.append(f"Go on with: {resume}")
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
        print(json.dumps(finite(content), default=dict, allow_nan=False))
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
