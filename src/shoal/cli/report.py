"""`shoal report`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import add_data_dir, count, in_data_dir
from shoal.cli.showing import show
from shoal.errors import InputError
from shoal.files import read_json, read_text

if TYPE_CHECKING:
    from shoal.report.groups import Kept, Run, Trouble
    from shoal.report.page import Samples, Strip

SUMMARY = "Make one page of HTML from runs: tables, curves, settings, mistakes."
EXAMPLE = (
    "RUNS are folders of runs, of comparisons and of sweeps, or single records. "
    "Example: shoal report shoal-compare -o report.html. The file needs nothing else: open it, or send it. "
    "Needs jinja2 and matplotlib: pip install 'shoal[report]'."
)
SAMPLED = 6
"""Runs of which images are shown."""
LOOKED = 256
"""Examples of a domain among which mistakes are looked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUNS", help="records are found there and below"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="what to write (default: %(default)s)",
    )
    parser.add_argument("--title", help="of the page (default: the names of RUNS)")
    parser.add_argument(
        "--samples",
        type=count,
        metavar="N",
        help=f"show N images a domain, mistakes first, of up to {SAMPLED} runs that kept their weights",
    )
    add_data_dir(parser)


@in_data_dir
def run(given: Any) -> None:
    _check_out(given.out)
    about = write(given.runs, given.out, given.title, given.samples)
    runs, notes = about["runs"], about["notes"]
    said = f", {notes} note{'s' * (notes != 1)} on what is missing or failed" if notes else ""
    size = f"{about['bytes'] / 1e6:.1f} MB"
    show(about, f"{runs:,} run{'s' * (runs != 1)}{said}. Written to {given.out} ({size}).", given)


def write(
    paths: Sequence[Path],
    out: Path,
    title: str | None = None,
    samples: int | None = None,
    only: Collection[str] | None = None,
) -> dict[str, Any]:
    """Makes the page of what is in ``paths``, or of those runs in them whose identities ``only`` holds."""
    from shoal.files import write_atomically
    from shoal.report import page
    from shoal.report.groups import grouped
    from shoal.training.folder import check_output

    runs, kept, troubles = collect(paths)
    inputs = [*(path for path in paths if path.is_file()), *(Path(run.path) for run in runs)]
    check_output(out, inputs, "--out")
    if only is not None:
        runs = [r for r in runs if r.identity in only]
        kept = [(folder, result) for folder, result in kept if result.get("identities") == list(only)]
    groups = grouped(runs, kept, troubles)
    names = ", ".join(str(path) for path in paths)
    if title is None and len(groups) == 1 and (own := groups[0].result.get("title")):
        names = str(own)
    content = page.Content(
        groups,
        columns=_columns(paths, troubles),
        samples=_samples(runs, samples) if samples else (),
        troubles=troubles,
        title=title or f"Report on {names}",
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    made = page.render(content).encode(errors="replace")
    try:
        write_atomically(out, made)
    except OSError as error:
        raise InputError(f"--out {str(out)!r} cannot be written: {error.strerror}.") from error
    return {"report": str(out), "runs": len(runs), "bytes": len(made), "notes": len(troubles)}


def _check_out(out: Path) -> None:
    if out.is_dir():
        raise InputError(f"--out {str(out)!r} is a folder; give a file such as {str(out / 'report.html')!r}.")
    if not out.parent.is_dir():
        raise InputError(f"--out {str(out)!r}: there is no folder {str(out.parent)!r}.")


def collect(paths: Iterable[Path]) -> tuple[list[Run], list[Kept], list[Trouble]]:
    """Every run once, results of comparisons as they were written, and what else a reader must know."""
    from shoal.report.groups import Trouble

    runs: dict[str, Run] = {}
    kept: list[Kept] = []
    troubles: list[Trouble] = []
    for path in paths:
        if path.is_file():
            found = [_from_file(path)]
        else:
            found, broken = _from_folder(path)
            troubles += [Trouble(f"Not shown: {why}") for why in broken]
            troubles += [*_failed(path), *_unfinished(path)]
            kept += _kept(path, troubles)
        for one in found:
            runs.setdefault(one.identity, one)
    if not runs:
        names = ", ".join(repr(str(path)) for path in paths)
        why = f" {troubles[0].words}" if troubles else ""
        raise InputError(f"there is no record of a run in {names} or below.{why}")
    return list(runs.values()), kept, troubles


def _from_file(path: Path) -> Run:
    from shoal.experiments.record import read_record
    from shoal.report.groups import Run

    try:
        return Run(read_record(path), str(path), _command(path))
    except (InputError, OSError) as error:
        raise InputError(f"{str(path)!r} is no record of a run; give a folder or a record.json.") from error


def _from_folder(folder: Path) -> tuple[list[Run], Iterable[str]]:
    from shoal.experiments.record import read_record
    from shoal.experiments.results import load
    from shoal.report.groups import Run

    results = load(folder)
    paths = [folder / row["path"] for row in results.kept]
    return [Run(read_record(path), str(path), _command(path)) for path in paths], results.broken.values()


def _command(path: Path) -> str:
    """As it was typed, which a run's folder keeps and a store of records does not."""
    from shoal.experiments.config import read_file

    if path.name != "record.json" or not (path.parent / "config.yaml").exists():
        return ""
    try:
        return str(read_file(path.parent).get("command") or "")
    except (InputError, OSError):
        return ""


def _failed(folder: Path) -> list[Trouble]:
    """What sweeps have written of runs that ended without a record."""
    from shoal.report.groups import Trouble

    found = []
    for path in sorted(folder.rglob("failed/*.txt")):
        text = read_text(path, errors="replace")
        last = (text.strip().splitlines() or [""])[-1]
        found.append(Trouble(f"Failed: {path}: {last[:200]}", text[-8000:]))
    return found


def _unfinished(folder: Path) -> list[Trouble]:
    from shoal.experiments.status import RunStatus, runs_in
    from shoal.report.groups import Trouble

    found = []
    for path in runs_in(folder):
        if (path / "record.json").exists():
            continue
        try:
            status = RunStatus.of(path)
            found.append(Trouble(f"Not finished: {path}: {status.line}", status.error))
        except (InputError, OSError, ValueError, LookupError, TypeError) as error:
            found.append(Trouble(f"Not shown: {path}: {error}"))
    return found


def _kept(folder: Path, troubles: list[Trouble]) -> list[Kept]:
    from shoal.report import compare
    from shoal.report.groups import Trouble

    found = []
    for path in sorted(folder.rglob("compare-*.json")):
        try:
            content = read_json(path)
            lacks = {"dataset", "rows", "trials", "left_out", "seeds", "steps", "runs"} - set(content)
            if lacks:
                raise KeyError(*sorted(lacks))
            compare.words(content)
            found.append((path.parent, content))
        except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
            troubles.append(Trouble(f"Not shown: {path} is not the result of a comparison ({error})."))
    return found


COLUMN = {"column", "kind", "missing", "distinct", "examples", "becomes", "warnings"}


def _columns(paths: Iterable[Path], troubles: list[Trouble]) -> list[dict[str, Any]]:
    """The reports on columns that comparisons and runs keep, each once."""
    from shoal.report import columns
    from shoal.report.groups import Trouble

    found: dict[str, dict[str, Any]] = {}
    for folder in [path if path.is_dir() else path.parent for path in paths]:
        for path in sorted([*folder.rglob("columns.json"), *folder.rglob("inputs.json")]):
            try:
                report = read_json(path)
                if path.name == "inputs.json":
                    report = {"file": path.parent.name, "columns": report.get("columns_report") or []}
                if lacks := [key for column in report["columns"] for key in COLUMN - set(column)]:
                    raise KeyError(lacks[0])
                columns.table(report)
                columns.remarks(report)
            except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
                troubles.append(Trouble(f"Not shown: {path} is not a report on columns ({error!r})."))
                continue
            if report["columns"]:
                key = json.dumps(report["columns"], sort_keys=True)
                found.setdefault(key, {"file": path.parent.name, **report})
    return list(found.values())


def _samples(runs: Sequence[Run], number: int) -> list[Samples]:
    """Of the runs that kept their weights, the first few."""
    from shoal.report.page import Samples

    folders = [r for r in runs if (Path(r.path).parent / "model.safetensors").exists()]
    found = []
    for one in folders[:SAMPLED]:
        name = f"{one.record.config.name} on {one.record.config.dataset}: {Path(one.path).parent}"
        try:
            found.append(Samples(name, _strips(one, number)))
        except (InputError, OSError, RuntimeError, LookupError) as error:
            found.append(Samples(name, error=f"No images: {error}"))
    if not folders:
        found.append(
            Samples("No images", error="No run among these has kept its weights (model.safetensors).")
        )
    elif len(folders) > SAMPLED:
        found.append(Samples(f"… {len(folders) - SAMPLED:,} more runs", error="Their images are not shown."))
    return found


def _strips(run: Run, number: int) -> list[Strip]:
    import torch

    from shoal.data.loader import collate_of
    from shoal.experiments.run import prepare
    from shoal.report.page import Strip
    from shoal.training.checkpoint import load_weights
    from shoal.training.folder import check_files

    training = prepare(run.record.config, "cpu", begun=True)
    model, data = training.model, training.data
    check_files(Path(run.path).parent, run.record.files)
    model.load_state_dict(load_weights(str(Path(run.path).parent / "model.safetensors")))
    model.eval()
    examples: Any = data.examples
    held_out = "validation" if "validation" in data.splits else "train"
    strips = []
    for split in ("test", held_out):
        domains = data.splits.get(split)
        for d, name in enumerate(domains.names if domains is not None else ()):
            which = [int(i) for i in domains.indices_of(d)[:LOOKED]]  # type: ignore[union-attr]
            if hasattr(examples, "batch"):
                x, y = examples.batch(torch.tensor(which, device=examples.device))
            else:
                x, y = tuple(collate_of(examples)([examples[i] for i in which]))
            if not isinstance(x, torch.Tensor) or x.ndim != 4 or x.shape[1] > 3 or data.classes is None:
                raise InputError("the examples are no images of classes.")
            with torch.inference_mode():
                taken = model(x).argmax(-1)
            wrong = (taken != y).tolist()
            order = sorted(range(len(which)), key=lambda i: not wrong[i])[:number]
            pixels = _pixels(x[order].float().numpy())
            images = [
                {
                    "png": pixels[n],
                    "wrong": wrong[i],
                    "words": f"is {int(y[i])}, taken for {int(taken[i])}" if wrong[i] else f"is {int(y[i])}",
                }
                for n, i in enumerate(order)
            ]
            kind = "held-out domain" if split == "test" else split
            strips.append(Strip(name, f"{kind}; {sum(wrong)} of {len(which)} wrong", images))
    return strips


def _pixels(x: Any) -> list[str]:
    """Images (n, c, h, w) as PNG in base64; values outside of [0, 1] are stretched to it."""
    import base64
    import io

    import numpy as np
    from matplotlib.image import imsave

    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 1:
        x = (x - low) / max(high - low, 1e-12)
    missing = 3 - x.shape[1]
    if missing:
        more = x[:, :1].repeat(2, 1) if missing == 2 else np.zeros_like(x[:, :1])
        x = np.concatenate([x, more], 1)
    found = []
    for image in x:
        file = io.BytesIO()
        imsave(file, np.ascontiguousarray((255 * image.transpose(1, 2, 0)).astype(np.uint8)), format="png")
        found.append(base64.b64encode(file.getvalue()).decode())
    return found
