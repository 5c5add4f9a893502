"""``shoal data``: check data before training, download datasets, write example data."""

from __future__ import annotations

import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.filesize import decimal
from typing_extensions import Unpack

from shoal.api.result import Result
from shoal.api.source import IMAGE_FOLDER, TABLE_NAMES, listed_names
from shoal.errors import InputError, TableWarning
from shoal.options import DataOptions, public
from shoal.settings import Few

if TYPE_CHECKING:
    from shoal.data.download import Download
    from shoal.datasets.folders import Layout
    from shoal.datasets.wilds import Published

UNTRIED = "URLs and checksums are as published or recorded by others; they were not tested for this release."
SHOWN = 10
"""Findings of each kind that a text shows; ``to_dict`` has all of them."""
SECONDS = 5
"""Between two lines of progress."""


@dataclass(frozen=True, repr=False)
class DataReport(Result):
    """What :func:`check`, :func:`get` and :func:`example` found or did.

    Attributes:
        content: the report as plain data.
        text: text that ``print`` shows.
    """

    content: Mapping[str, Any]
    text: str

    @property
    def problems(self) -> list[str]:
        return list(self.content.get("problems", ()))

    def to_dict(self) -> dict[str, Any]:
        return dict(self.content)

    def __str__(self) -> str:
        return self.text


@public()
def check(
    data: Any,
    *,
    dataset: str | None = None,
    workers: Few | None = None,
    progress: bool = True,
    **options: Unpack[DataOptions],
) -> DataReport:
    """Check a table or a folder of images before training.

    For a table: the kind of each column, the numbers of missing and distinct values, the features, and
    warnings (non-numeric values, identifiers, possible leakage, duplicate rows). For a folder of images: all
    images are decoded and counted, and duplicates are found. For a WILDS dataset: the examples and domains of
    each split are counted, and all files are read.

    Args:
        data: table (.csv, .tsv, .csv.gz, .parquet, .xlsx), folder of images, or folder of a dataset. In
            Python also a DataFrame or a mapping of columns.
        dataset: published dataset to compare a folder with (default: none, your own images).
        workers: number of processes (default: one per core).
        progress: show progress on stderr.
        **options: how to read the data, see :class:`~shoal.options.DataOptions`.
    """
    from shoal.api.source import form_of
    from shoal.registry import DATASETS

    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    table = (form := form_of(data)) not in ("image folder", "name")
    if table and dataset is not None:
        raise InputError("is for folders, and the data are a table.", "dataset")
    if form == "name":
        raise InputError(f"there is no file or folder {str(data)!r}.")
    allowed = TABLE_NAMES if table else ("data_options",) if dataset is None else ()
    if wrong := [name for name in given if name not in allowed]:
        raise InputError(f"does not apply to the check of a {'table' if table else 'folder'}.", wrong[0])
    if table:
        return _check_table(data, given)
    module, folder = DATASETS.module(dataset or IMAGE_FOLDER), Path(data).expanduser()
    workers, show = workers or os.cpu_count() or 1, _progress(progress)
    if hasattr(module, "PUBLISHED"):
        return _check_wilds(module, folder, workers, show)
    if dataset is not None and not hasattr(module, "LAYOUT"):
        known = [*DATASETS.having("LAYOUT"), *DATASETS.having("PUBLISHED")]
        raise InputError(f"{dataset!r} has no folder to check; these have: {', '.join(known)}.", "dataset")
    return _check_images(
        getattr(module, "LAYOUT", None), folder, given.get("data_options", {}), workers, show
    )


def _check_table(data: Any, options: Mapping[str, Any]) -> DataReport:
    from shoal.data.tables import check_table
    from shoal.report import columns

    name = Path(data).name if isinstance(data, (str, Path)) else "the table"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # they are in the report
        report = {"file": name, **check_table(data, **options)}
    return DataReport(report, columns.text(report))


def _check_wilds(module: Any, folder: Path, workers: int, show: Callable[[str], None]) -> DataReport:
    """Compares the numbers of examples and domains with the published ones, and reads all files."""
    from joblib import Parallel, delayed

    from shoal.datasets.wilds import find
    from shoal.report.tables import Table

    published: Published = module.PUBLISHED
    place = find(published.name, folder)
    data = module.load(folder=str(place.place))
    examples: Any = data.examples
    parallel, unread = Parallel(n_jobs=workers, return_as="generator", batch_size=64), dict[str, str]()
    for i, why in enumerate(parallel(delayed(_problem)(examples, i) for i in range(len(examples)))):
        show(f"{i + 1:,} of {len(examples):,} files read")
        unread |= {} if why is None else {examples.path(i): why}
    here = {
        "examples": {name: len(domains.examples()) for name, domains in data.splits.items()},
        "domains": {name: len(domains) for name, domains in data.splits.items()},
    }
    counts = published.counts[place.version]
    problems, table = [], Table(["split", "examples", "published", "domains", "published"])
    for split in dict.fromkeys([*here["examples"], *counts["examples"]]):
        row = []
        for what, found in here.items():
            number, expected = found.get(split, 0), counts[what].get(split)
            row += [f"{number:,}", "–" if expected is None else f"{expected:,}"]
            if expected not in (None, number):
                problems.append(f"{split} has {number:,} {what}, not {expected:,}")
        table.add(split, *row)
    problems += [f"files that cannot be read: {len(unread):,}"] * bool(unread)
    content = {"folder": str(place.place), "version": place.version, **here, "source": counts["source"]}
    content |= {"published": {what: dict(counts[what]) for what in here}, "notes": dict(data.notes)}
    lines = [f"{published.title} {place.version} in {place.place}", table.text()]
    lines += [f"published: {counts['source']}", ""]
    lines += [f"{what}: {note}" for what, note in data.notes.items()]
    lines += _some("cannot be read:", (f"{path!r} ({why})" for path, why in unread.items()))
    sound = "The counts match the published ones, and no problem was found in the files."
    lines += _some("problem:", problems) or [sound]
    return DataReport({**content, "unreadable": unread, "problems": problems}, "\n".join(lines))


def _problem(examples: Any, index: int) -> str | None:
    """Why an example cannot be read from its file, or ``None`` if it can."""
    try:
        examples[index] if examples.path(index) else None
    except InputError as error:
        return str(error)
    return None


def _check_images(
    layout: Layout | None,
    folder: Path,
    options: Mapping[str, Any],
    workers: int,
    show: Callable[[str], None],
) -> DataReport:
    """Decodes all images; those of a published dataset are compared with what was published."""
    import pandas as pd

    from shoal import datasets as sets
    from shoal.data.images import inspect_files, missing_classes, read_folders
    from shoal.report.tables import Table

    options = sets.check_options(IMAGE_FOLDER, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes that are missing in a domain are in the report
        place, domains = (folder, None) if layout is None else layout.find(folder, lacking=True)
        files = read_folders(place, domains)
        problems = _refused(folder, options) if layout is None else []
    paths = list(files["path"])
    found = inspect_files(paths, workers, lambda n: show(f"{n:,} of {len(files):,} images decoded"))
    names = [os.path.relpath(path, place) for path in paths]
    found = found.assign(name=names, domain=files["domain"], label=files["label"])
    classes = pd.crosstab(files["domain"], files["label"], dropna=False)
    counts = {str(domain): int(number) for domain, number in classes.sum(axis=1).items()}
    published = {} if layout is None else dict(layout.counts)
    if layout is not None:
        problems += [f"domain {name} is missing" for name in layout.domains if name not in counts]
        differ = {d: n for d, n in published.items() if d in counts and counts[d] != n}
        problems += [f"{d} has {counts[d]:,} images, not {n:,}" for d, n in differ.items()]
        if (there := len(classes.columns)) != layout.classes:
            problems.append(f"there are {there} classes, not {layout.classes}")
    bad = found[found["problem"].notna()]
    unreadable = dict(zip(bad["name"], bad["problem"], strict=True))
    problems += [f"images that cannot be read: {len(unreadable):,}"] * bool(unreadable)
    duplicates: dict[str, list[list[str]]] = {"domains": [], "classes": [], "copies": []}
    copies = found[(found["digest"] != "") & found["digest"].duplicated(keep=False)]
    for _, same in copies.groupby("digest", sort=False):
        # In two domains an image leaks, in two classes it has a wrong label.
        kind = "domains" if same["domain"].nunique() > 1 else "classes" if same["label"].nunique() > 1 else ""
        duplicates[kind or "copies"].append(list(same["name"]))
    for kind in ("domains", "classes"):
        problems += [f"images that are in several {kind}: {len(duplicates[kind]):,}"] * bool(duplicates[kind])
    lacking, transparent = missing_classes(files), int(found["transparent"].sum())
    content = {
        **{"folder": str(place), "images": len(files), "domains": counts},
        "classes": {str(domain): row.to_dict() for domain, row in classes.iterrows()},
        "lacking": [{"domain": domain, "class": label} for domain, label in lacking],
        **{"transparent": transparent, "unreadable": unreadable, "duplicates": duplicates},
        **{"problems": problems, "published": published},
    }
    table = Table(["domain", "images", "classes", *(["published"] if published else [])])
    for domain, number in counts.items():
        expected = [f"{published[domain]:,}"] if published else []
        table.add(domain, f"{number:,}", str((classes.loc[domain] > 0).sum()), *expected)
    lines = [table.text(), *([f"published: {layout.source}"] if layout else []), ""]
    lines += _some("no image of", (f"{label!r} in {domain!r}" for domain, label in lacking))
    if transparent:
        lines.append(f"{transparent:,} images have transparent pixels, which become white")
    lines += _some("cannot be read:", (f"{name!r} ({why})" for name, why in unreadable.items()))
    for kind, groups in duplicates.items():
        words = "duplicate image:" if kind == "copies" else f"same image in several {kind}:"
        lines += _some(words, (" = ".join(map(repr, group)) for group in groups))
    lines += _some("problem:", problems) or [
        f"All {len(files):,} images can be read, and no problem was found."
    ]
    if problems and layout is not None:
        lines.append(f"{layout.title} can be obtained {layout.how}.")
    return DataReport(content, "\n".join(lines))


def _refused(folder: Path, options: Mapping[str, Any]) -> list[str]:
    """Why training would refuse a folder of the user's own images, if it would."""
    from shoal import datasets as sets

    try:
        sets.load(IMAGE_FOLDER, **{**options, "folder": str(folder)})
    except InputError as error:
        return [f"the images cannot be trained on: {str(error).rstrip('.')}"]
    return []


def _some(words: str, items: Iterable[str]) -> list[str]:
    lines = [f"{words} {item}" for item in items]
    more = [f"… {len(lines) - SHOWN:,} more; use --json for all"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


def _progress(shown: bool) -> Callable[[str], None]:
    """Shows progress on stderr, a line every few seconds."""
    last = time.monotonic()

    def show(text: str) -> None:
        nonlocal last
        if shown and time.monotonic() - last > SECONDS:
            last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    return show


@public()
def get(
    datasets: Sequence[str],
    *,
    out: str | Path | None = None,
    plan: bool = False,
    progress: bool = True,
) -> DataReport:
    """Download, verify and unpack datasets; the same call resumes an interrupted download.

    Where no checksum is published, that of the download is printed. WILDS datasets cannot be downloaded:
    their server has been down since August 2026.

    Args:
        datasets: names of datasets (`shoal list datasets`).
        out: folder to download to (default: $SHOAL_DATA, or data).
        plan: list the files and URLs and download nothing.
        progress: show progress on stderr.
    """
    from shoal.data.download import VARIABLE

    to = Path(out or os.environ.get(VARIABLE) or "data").expanduser()
    downloads = {name: _download(name) for name in listed_names(datasets)}
    contents, texts, problems = list[Mapping[str, Any]](), list[str](), list[str]()
    for name, download in downloads.items():
        try:
            content, text = _plan(name, download, to) if plan else _fetch(name, download, to, progress)
        except InputError as error:
            if len(downloads) == 1:
                raise
            problems.append(f"{name}: {error}")
            continue
        contents.append(content)
        texts.append(text)
    texts += [UNTRIED] if plan else problems
    return DataReport({"plan" if plan else "datasets": contents, "problems": problems}, "\n\n".join(texts))


def _download(name: str) -> Download:
    from shoal.registry import DATASETS

    module = DATASETS.module(name)
    if hasattr(module, "PUBLISHED"):
        raise InputError(
            f"{name} cannot be downloaded: {module.PUBLISHED.down}. Pass the folder that "
            f"{module.PUBLISHED.folder} is in as data_dir."
        )
    if not hasattr(module, "DOWNLOAD"):
        known = ", ".join(DATASETS.having("DOWNLOAD"))
        raise InputError(f"dataset {name!r} cannot be downloaded; these can: {known}.")
    found: Download = module.DOWNLOAD
    return found


def _plan(name: str, download: Download, to: Path) -> tuple[dict[str, Any], str]:
    there = download.there(to)
    folder = str(there or to / download.home)
    state = "exists: nothing would be downloaded" if there else "would be downloaded"
    lines = [f"{name}, in {folder}, {state}"]
    for one in download.sources:
        size = decimal(one.size) if one.size else "size unknown"
        checksum = f"{one.checksum} ({one.checksum_from})" if one.checksum else "no checksum is published"
        lines += [f"  {one.file}: {size}, {checksum}", *(f"    {url}" for url in one.urls)]
    files = [vars(source) for source in download.sources]
    content = {"dataset": name, "folder": folder, "there": there is not None, "files": files}
    return content, "\n".join(lines)


def _fetch(name: str, download: Download, to: Path, progress: bool) -> tuple[dict[str, Any], str]:
    from shoal.data.download import get as fetch
    from shoal.registry import DATASETS

    show = _progress(progress)
    got = fetch(download, to, lambda file, done, total: show(f"{file}: {decimal(done)}"))
    words = ["shoal", "train", "erm", name, "--data-dir", str(to)]
    if hasattr(DATASETS.module(name), "LAYOUT"):
        words = ["shoal", "data", "check", str(got.folder), "--dataset", name]
    state = "now" if got.files else "already"
    lines = [f"{name} is {state} in {got.folder}{'' if got.files else '; nothing was downloaded'}."]
    for one in got.files:
        how = f"checked ({one['checked']})" if one["checked"] else "no checksum is published"
        lines.append(f"  {one['file']}: sha256 {one['sha256']}, {how}")
    lines += [*(f"  {note}." for note in got.notes), f"Next: {shlex.join(words)}"]
    content = {"dataset": name, "folder": str(got.folder), "files": got.files, "notes": got.notes}
    return {**content, "next": shlex.join(words)}, "\n".join(lines)


@public()
def example(kind: Literal["table", "images"], *, out: str | Path | None = None) -> DataReport:
    """Write a small generated table or folder of images to try Shoal with, the same on every machine.

    Args:
        kind: a table of 600 patients from five hospitals, or a folder of 240 images in four domains and three
            classes.
        out: new file or folder (default: patients.csv or photos).
    """
    from shoal.datasets.example import write_images, write_table

    if kind == "table":
        path, flags = write_table(out or "patients.csv"), ["--label", "ill", "--domain", "hospital"]
        text = f"A table of generated patients is now in {path}."
    else:
        path, flags = write_images(out or "photos"), []
        text = f"A folder of generated images is now in {path}."
    following = shlex.join(["shoal", "data", "check", str(path), *flags])
    return DataReport({"path": str(path), "next": following}, f"{text}\nNext: {following}")
