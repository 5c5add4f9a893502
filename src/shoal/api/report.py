"""``shoal.report``: one page of HTML from runs."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError
from shoal.files import read_json, read_text, write_atomically
from shoal.settings import Count, checked

if TYPE_CHECKING:
    from shoal.report.groups import Kept, Run, Trouble

SAMPLED = 6
"""Runs of which images are shown."""
LOOKED = 256
"""Examples of a domain among which mistakes are looked for."""
DAMAGED = (ValueError, TypeError, LookupError, AttributeError, OSError)
COLUMN = {"column", "kind", "missing", "distinct", "examples", "becomes", "warnings"}
COMPARISON = {"dataset", "rows", "trials", "left_out", "seeds", "steps", "runs"}


@dataclass(frozen=True)
class Report:
    """The result of :func:`report`: a self-contained HTML page.

    Attributes:
        path: file of the page.
        runs: number of runs.
        notes: number of notes on missing or failed runs.
        html: content of the page.
    """

    path: Path
    """Where the page is."""
    runs: int
    notes: int
    """How many notes it has on what is missing or failed."""
    html: str

    def __str__(self) -> str:
        runs = f"{self.runs:,} run{'s' * (self.runs != 1)}"
        notes = f", {self.notes} note{'s' * (self.notes != 1)} on missing or failed runs"
        size = f"{len(self._bytes) / 1e6:.1f} MB"
        return f"{runs}{notes if self.notes else ''}. Saved in {self.path} ({size})."

    @property
    def _bytes(self) -> bytes:
        return self.html.encode(errors="replace")

    def _repr_html_(self) -> str:
        frame = f'<iframe srcdoc="{escape(self.html)}" width="100%" height="700" style="border: 0"></iframe>'
        return f"{frame}<p>{escape(str(self))}</p>"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as ``--json`` prints it."""
        return {"report": str(self.path), "runs": self.runs, "bytes": len(self._bytes), "notes": self.notes}

    def save(self, path: str | Path) -> Path:
        """Write the page to another file.

        Args:
            path: file to write.
        """
        try:
            write_atomically(Path(path), self._bytes)
        except OSError as error:
            raise InputError(f"out={str(path)!r} cannot be written: {error.strerror}.") from error
        return Path(path)


@checked
def report(
    folders: str | Path | Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    title: str | None = None,
    samples: Count | None = None,
    only: Collection[str] | None = None,
) -> Report:
    """Write an HTML report of runs: recommendation, tables, curves, hyperparameters, errors.

    Args:
        folders: folders of runs, comparisons or sweeps (searched recursively), or single records.
        out: file to write.
        title: title of the page (default: the names of the folders).
        samples: number of images to show per domain, errors first, for up to six runs with saved weights.
        only: identities of the runs to show (default: all).

    Returns:
        Report: the page and its path.

    Examples:
        >>> import shoal
        >>> _ = shoal.sweep("linear", "erm", seeds=1, search=1, steps=2, out="tiny", progress=False)
        >>> shoal.report("tiny").runs
        3
    """
    from shoal.report import page
    from shoal.report.groups import grouped
    from shoal.training.folder import check_output

    paths, out = [Path(p) for p in ([folders] if isinstance(folders, str | Path) else folders)], Path(out)
    if out.is_dir():
        example = str(out / "report.html")
        raise InputError(f"out={str(out)!r} is a folder; specify a file, such as {example!r}.")
    if not out.parent.is_dir():
        raise InputError(f"out={str(out)!r}: there is no folder {str(out.parent)!r}.")
    runs, kept, troubles = collect(paths)
    check_output(out, [*filter(Path.is_file, paths), *(Path(run.path) for run in runs)], "out")
    if only is not None:
        if not isinstance(only, Collection) or not all(isinstance(name, str) for name in only):
            raise InputError("only= must be a list of run identities, as strings.")
        runs = [r for r in runs if r.identity in only]
        kept = [(folder, result) for folder, result in kept if result.get("identities") == list(only)]
    groups = grouped(runs, kept, troubles)
    names = ", ".join(str(path) for path in paths)
    if len(groups) == 1 and (own := groups[0].result.get("title")):
        names = str(own)
    content = page.Content(
        groups,
        columns=_columns(paths, troubles),
        samples=_samples(runs, samples) if samples else (),
        troubles=troubles,
        title=title or f"Report on {names}",
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    result = Report(out, len(runs), len(troubles), page.render(content))
    result.save(out)
    return result


def collect(paths: Iterable[Path]) -> tuple[list[Run], list[Kept], list[Trouble]]:
    """Every run once, results of comparisons as they were written, and what else a reader must know."""
    from shoal.experiments.record import read_record
    from shoal.experiments.results import load
    from shoal.report.groups import Run, Trouble

    runs: dict[str, Run] = {}
    kept: list[Kept] = []
    troubles: list[Trouble] = []
    for path in paths:
        files = [path]
        if not path.is_file():
            results = load(path)
            files = [path / row["path"] for row in results.kept]
            troubles += [Trouble(f"Not shown: {why}") for why in results.broken.values()]
            troubles += _unfinished(path)
            compared = _read(path, "compare-*.json", "the result of a comparison", _comparison, troubles)
            kept += [(file.parent, content) for file, content in compared]
        for file in files:
            try:
                run = Run(read_record(file), str(file), _command(file))
            except (InputError, OSError) as error:
                text = f"{str(file)!r} is not a record of a run; specify a folder or a record.json file."
                raise InputError(text) from error
            if run.record.status == "failed":
                which = f"{run.record.config.name} on {run.record.config.dataset}, {file}"
                more = getattr(run.record, "traceback", "")
                troubles.append(Trouble(f"Failed: {which}: {run.record.error}", more))
            else:
                runs.setdefault(run.identity, run)
    if not runs:
        names = ", ".join(repr(str(path)) for path in paths)
        why = f" {troubles[0].words}" if troubles else ""
        raise InputError(f"there is no record of a run in {names} or its subfolders.{why}")
    return list(runs.values()), kept, troubles


def _read(
    folder: Path, pattern: str, what: str, check: Callable[[Any, Path], Any], troubles: list[Trouble]
) -> list[tuple[Path, Any]]:
    """What is in the JSON files of a folder; those that are something else are noted."""
    from shoal.report.groups import Trouble

    found = []
    for path in sorted(folder.rglob(pattern)):
        try:
            found.append((path, check(read_json(path), path)))
        except DAMAGED as error:
            troubles.append(Trouble(f"Not shown: {path} is not {what} ({error!r})."))
    return found


def _comparison(content: Any, path: Path) -> Any:
    """Refuses what the page cannot show."""
    from shoal.report import compare

    if lacks := COMPARISON - set(content):
        raise KeyError(*sorted(lacks))
    compare.words(content)
    return content


def _column_report(content: Any, path: Path) -> Any:
    """In one form, whichever file it is of."""
    from shoal.report import columns

    own = content.get("columns_report") or [] if path.name == "inputs.json" else content["columns"]
    if lacks := [key for column in own for key in COLUMN - set(column)]:
        raise KeyError(lacks[0])
    content = {"file": path.parent.name, **content, "columns": own}
    columns.table(content)
    columns.remarks(content)
    return content


def _command(path: Path) -> str:
    """As it was typed, which a run's folder keeps and a store of records does not."""
    from shoal.experiments.config import read_file

    if path.name != "record.json" or not (path.parent / "config.yaml").exists():
        return ""
    try:
        return str(read_file(path.parent).get("command") or "")
    except (InputError, OSError):
        return ""


def _unfinished(folder: Path) -> list[Trouble]:
    """Runs without a record, and what sweeps of earlier versions wrote of those that failed."""
    from shoal.experiments.status import RunStatus, runs_in
    from shoal.report.groups import Trouble

    found = []
    for path in sorted(folder.rglob("failed/*.txt")):
        text = read_text(path, errors="replace")
        last = (text.strip().splitlines() or [""])[-1]
        found.append(Trouble(f"Failed: {path}: {last[:200]}", text[-8000:]))
    for path in (p for p in runs_in(folder) if not (p / "record.json").exists()):
        try:
            status = RunStatus.of(path)
            found.append(Trouble(f"Not finished: {path}: {status.line}", status.error))
        except DAMAGED as error:
            found.append(Trouble(f"Not shown: {path}: {error}"))
    return found


def _columns(paths: Iterable[Path], troubles: list[Trouble]) -> list[dict[str, Any]]:
    """The reports on columns that comparisons and runs keep, each once."""
    found: dict[str, dict[str, Any]] = {}
    for folder in [path if path.is_dir() else path.parent for path in paths]:
        for pattern in ("columns.json", "inputs.json"):
            for _, content in _read(folder, pattern, "a report on columns", _column_report, troubles):
                if content["columns"]:
                    found.setdefault(json.dumps(content["columns"], sort_keys=True), content)
    return list(found.values())


def _samples(runs: Sequence[Run], number: int) -> list[dict[str, Any]]:
    """Of the runs that kept their weights, the first few."""
    found: list[tuple[str, str, Sequence[Any]]] = []
    folders = [r for r in runs if (Path(r.path).parent / "model.safetensors").exists()]
    for run in folders[:SAMPLED]:
        name = f"{run.record.config.name} on {run.record.config.dataset}: {Path(run.path).parent}"
        try:
            found.append((name, "", _strips(run, number)))
        except (InputError, OSError, RuntimeError, LookupError) as error:
            found.append((name, f"No images: {error}", ()))
    if not folders:
        found.append(("No images", "None of these runs has saved weights (model.safetensors).", ()))
    elif len(folders) > SAMPLED:
        found.append((f"… {len(folders) - SAMPLED:,} more runs", "Their images are not shown.", ()))
    return [dict(zip(("path", "error", "strips"), parts, strict=True)) for parts in found]


def _strips(run: Run, number: int) -> list[dict[str, Any]]:
    """A few images of every domain, mistakes first."""
    import torch

    from shoal.data.batch import batch_of
    from shoal.experiments.run import prepare
    from shoal.training.checkpoint import load_weights
    from shoal.training.folder import check_files

    folder = Path(run.path).parent
    training = prepare(run.record.config, "cpu", begun=True)
    model, data = training.model, training.data
    check_files(folder, run.record.files)
    model.load_state_dict(load_weights(str(folder / "model.safetensors")))
    model.eval()
    examples: Any = data.examples
    splits = {"test": "held-out domain"} | {s: s for s in ("validation", "train") if s in data.splits}
    places = [
        (split, d) for split in list(splits)[:2] if split in data.splits for d in data.splits[split].names
    ]
    strips = []
    for split, name in places:
        domains = data.splits[split]
        which = [int(i) for i in domains.indices_of(domains.number(name))[:LOOKED]]
        x, y = batch_of(examples, which)
        if not isinstance(x, torch.Tensor) or x.ndim != 4 or x.shape[1] > 3 or data.classes is None:
            raise InputError("the examples are not images with class labels.")
        with torch.inference_mode():
            pairs = list(zip(model(x).argmax(-1).tolist(), y.tolist(), strict=True))
        order = sorted(range(len(pairs)), key=lambda i: pairs[i][0] == pairs[i][1])[:number]
        images = []
        for i, png in zip(order, _pixels(x[order].float().numpy()), strict=True):
            output, label = pairs[i]
            words = f"label {label}, predicted {output}" if output != label else f"label {label}"
            images.append({"png": png, "wrong": output != label, "words": words})
        mistakes = f"{sum(a != b for a, b in pairs)} of {len(pairs)} wrong"
        strips.append({"domain": name, "words": f"{splits[split]}; {mistakes}", "images": images})
    return strips


def _pixels(x: Any) -> list[str]:
    """Images (n, c, h, w) as PNG in base64; values outside of [0, 1] are stretched to it."""
    import numpy as np
    from matplotlib.image import imsave

    low, high = float(x.min()), float(x.max())
    if low < 0 or high > 1:
        x = (x - low) / max(high - low, 1e-12)
    if x.shape[1] < 3:  # grey in all three colours, two channels as red and green
        x = np.concatenate([x, x[:, :1].repeat(2, 1) if x.shape[1] == 1 else np.zeros_like(x[:, :1])], 1)
    found = []
    for image in (255 * x.transpose(0, 2, 3, 1)).astype(np.uint8):
        file = io.BytesIO()
        imsave(file, np.ascontiguousarray(image), format="png")
        found.append(base64.b64encode(file.getvalue()).decode())
    return found
