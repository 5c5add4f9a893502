"""``shoal.report``: one page of HTML from runs."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
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
    """A page of HTML that needs nothing else: open it, or send it. A notebook shows it."""

    path: Path
    """Where the page is."""
    runs: int
    notes: int
    """How many notes it has on what is missing or failed."""
    html: str

    def __str__(self) -> str:
        notes = f", {self.notes} note{'s' * (self.notes != 1)} on what is missing or failed" * bool(
            self.notes
        )
        size = f"{self.bytes / 1e6:.1f} MB"
        return f"{self.runs:,} run{'s' * (self.runs != 1)}{notes}. Written to {self.path} ({size})."

    @property
    def bytes(self) -> int:
        return len(self.html.encode(errors="replace"))

    def _repr_html_(self) -> str:
        from html import escape

        look = 'width="100%" height="700" style="border: 0"'
        return f'<iframe srcdoc="{escape(self.html)}" {look}></iframe><p>{escape(str(self))}</p>'

    def save(self, path: str | Path) -> Path:
        """Writes the page to another file."""
        try:
            write_atomically(Path(path), self.html.encode(errors="replace"))
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
    """Makes one page of HTML from runs: the recommendation, tables, curves, settings, mistakes.

    Args:
        folders: Folders of runs, of comparisons and of sweeps, or single records; records are found there and
            below.
        out: The file to write.
        title: Of the page; by default the names of the folders.
        samples: Show so many images per domain, mistakes first, of up to six runs that kept their weights.
        only: The identities of the runs to show; by default all.

    Returns:
        A :class:`Report`.

    Example:
        >>> import shoal
        >>> page = shoal.report("shoal-compare", "report.html")  # doctest: +SKIP
        >>> print(page)  # doctest: +SKIP
        72 runs. Written to report.html (0.6 MB).
    """
    from shoal.report import page
    from shoal.report.groups import grouped
    from shoal.training.folder import check_output

    paths, out = [Path(p) for p in ([folders] if isinstance(folders, str | Path) else folders)], Path(out)
    if out.is_dir():
        example = str(out / "report.html")
        raise InputError(f"out={str(out)!r} is a folder; give a file such as {example!r}.")
    if not out.parent.is_dir():
        raise InputError(f"out={str(out)!r}: there is no folder {str(out.parent)!r}.")
    runs, kept, troubles = collect(paths)
    check_output(out, [*filter(Path.is_file, paths), *(Path(run.path) for run in runs)], "out")
    if only is not None:
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
        if path.is_file():
            files = [path]
        else:
            results = load(path)
            files = [path / row["path"] for row in results.kept]
            troubles += [Trouble(f"Not shown: {why}") for why in results.broken.values()]
            troubles += [*_failed(path), *_unfinished(path)]
            kept += _kept(path, troubles)
        for file in files:
            try:
                run = Run(read_record(file), str(file), _command(file))
            except (InputError, OSError) as error:
                text = f"{str(file)!r} is no record of a run; give a folder or a record.json."
                raise InputError(text) from error
            if run.record.status == "failed":
                which = f"{run.record.config.name} on {run.record.config.dataset}, {file}"
                troubles.append(Trouble(f"Failed: {which}: {run.record.error}"))
            else:
                runs.setdefault(run.identity, run)
    if not runs:
        names = ", ".join(repr(str(path)) for path in paths)
        why = f" {troubles[0].words}" if troubles else ""
        raise InputError(f"there is no record of a run in {names} or below.{why}")
    return list(runs.values()), kept, troubles


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
    """What sweeps of earlier versions have written of runs that ended without a record."""
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
        except DAMAGED as error:
            found.append(Trouble(f"Not shown: {path}: {error}"))
    return found


def _kept(folder: Path, troubles: list[Trouble]) -> list[Kept]:
    from shoal.report import compare
    from shoal.report.groups import Trouble

    found = []
    for path in sorted(folder.rglob("compare-*.json")):
        try:
            content = read_json(path)
            if lacks := COMPARISON - set(content):
                raise KeyError(*sorted(lacks))
            compare.words(content)
            found.append((path.parent, content))
        except DAMAGED as error:
            troubles.append(Trouble(f"Not shown: {path} is not the result of a comparison ({error})."))
    return found


def _columns(paths: Iterable[Path], troubles: list[Trouble]) -> list[dict[str, Any]]:
    """The reports on columns that comparisons and runs keep, each once."""
    from shoal.report import columns
    from shoal.report.groups import Trouble

    found: dict[str, dict[str, Any]] = {}
    for folder in [path if path.is_dir() else path.parent for path in paths]:
        for path in sorted([*folder.rglob("columns.json"), *folder.rglob("inputs.json")]):
            try:
                content = read_json(path)
                if path.name == "inputs.json":
                    content = {"file": path.parent.name, "columns": content.get("columns_report") or []}
                if lacks := [key for column in content["columns"] for key in COLUMN - set(column)]:
                    raise KeyError(lacks[0])
                columns.table(content)
                columns.remarks(content)
            except DAMAGED as error:
                troubles.append(Trouble(f"Not shown: {path} is not a report on columns ({error!r})."))
                continue
            if content["columns"]:
                key = json.dumps(content["columns"], sort_keys=True)
                found.setdefault(key, {"file": path.parent.name, **content})
    return list(found.values())


def _samples(runs: Sequence[Run], number: int) -> list[dict[str, Any]]:
    """Of the runs that kept their weights, the first few."""
    found = []

    def add(path: str, error: str = "", strips: Sequence[Any] = ()) -> None:
        found.append({"path": path, "error": error, "strips": strips})

    folders = [r for r in runs if (Path(r.path).parent / "model.safetensors").exists()]
    for run in folders[:SAMPLED]:
        name = f"{run.record.config.name} on {run.record.config.dataset}: {Path(run.path).parent}"
        try:
            add(name, strips=_strips(run, number))
        except (InputError, OSError, RuntimeError, LookupError) as error:
            add(name, f"No images: {error}")
    if not folders:
        add("No images", "No run among these has kept its weights (model.safetensors).")
    elif len(folders) > SAMPLED:
        add(f"… {len(folders) - SAMPLED:,} more runs", "Their images are not shown.")
    return found


def _strips(run: Run, number: int) -> list[dict[str, Any]]:
    """A few images of every domain, mistakes first."""
    import torch

    from shoal.data.loader import collate_of
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
    strips = []
    for split in ("test", "validation" if "validation" in data.splits else "train"):
        domains: Any = data.splits.get(split)
        for d, name in enumerate(domains.names if domains is not None else ()):
            which = [int(i) for i in domains.indices_of(d)[:LOOKED]]
            if hasattr(examples, "batch"):
                x, y = examples.batch(torch.tensor(which, device=examples.device))
            else:
                x, y = tuple(collate_of(examples)([examples[i] for i in which]))
            if not isinstance(x, torch.Tensor) or x.ndim != 4 or x.shape[1] > 3 or data.classes is None:
                raise InputError("the examples are no images of classes.")
            with torch.inference_mode():
                outputs = model(x).argmax(-1).tolist()
            labels = y.tolist()
            order = sorted(range(len(which)), key=lambda i: outputs[i] == labels[i])[:number]
            images = []
            for i, png in zip(order, _pixels(x[order].float().numpy()), strict=True):
                wrong = outputs[i] != labels[i]
                words = f"is {labels[i]}" + f", taken for {outputs[i]}" * wrong
                images.append({"png": png, "wrong": wrong, "words": words})
            mistakes = sum(a != b for a, b in zip(outputs, labels, strict=True))
            kind = "held-out domain" if split == "test" else split
            words = f"{kind}; {mistakes} of {len(which)} wrong"
            strips.append({"domain": name, "words": words, "images": images})
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
    if x.shape[1] < 3:  # grey in all three colours, two channels as red and green
        x = np.concatenate([x, x[:, :1].repeat(2, 1) if x.shape[1] == 1 else np.zeros_like(x[:, :1])], 1)
    found = []
    for image in x:
        file = io.BytesIO()
        imsave(file, np.ascontiguousarray((255 * image.transpose(1, 2, 0)).astype(np.uint8)), format="png")
        found.append(base64.b64encode(file.getvalue()).decode())
    return found
