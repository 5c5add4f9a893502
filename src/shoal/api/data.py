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

from typing_extensions import Unpack

from shoal.api.result import Result
from shoal.api.source import IMAGE_FOLDER, OF_TABLE, listed_names
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


@dataclass(frozen=True)
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
    allowed = OF_TABLE if table else ("data_options",) if dataset is None else ()
    if wrong := [name for name in given if name not in allowed]:
        raise InputError(f"does not apply to the check of a {'table' if table else 'folder'}.", wrong[0])
    if table:
        return _check_table(data, given)
    module, folder = DATASETS.module(dataset or IMAGE_FOLDER), Path(data).expanduser()
    cores = workers or os.cpu_count() or 1
    processes, show = 0 if cores == 1 else cores, _progress(progress)
    if hasattr(module, "PUBLISHED"):
        return _check_wilds(module, folder, processes, show)
    if dataset is not None and not hasattr(module, "LAYOUT"):
        known = [*DATASETS.having("LAYOUT"), *DATASETS.having("PUBLISHED")]
        raise InputError(f"{dataset!r} has no folder to check; these have: {', '.join(known)}.", "dataset")
    options_of_data = given.get("data_options", {})
    return _check_images(getattr(module, "LAYOUT", None), folder, options_of_data, processes, show)


def _check_table(data: Any, options: Mapping[str, Any]) -> DataReport:
    from shoal.data.tables import check_table
    from shoal.report import columns

    name = Path(data).name if isinstance(data, (str, Path)) else "the table"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TableWarning)  # they are in the report
        report = {"file": name, **check_table(data, **options)}
    return DataReport(report, columns.text(report))


def _check_wilds(module: Any, folder: Path, workers: int, show: Callable[[str], None]) -> DataReport:
    """Counts the examples and domains of a dataset of WILDS, and reads all files there may be."""
    from joblib import Parallel, delayed

    from shoal.datasets.wilds import find
    from shoal.report.tables import Table

    published: Published = module.PUBLISHED
    place = find(published.name, folder)
    data = module.load(folder=str(place.place))
    examples: Any = data.examples
    parallel = Parallel(n_jobs=max(1, workers), return_as="generator", batch_size=64)
    unread = dict[str, str]()
    for i, why in enumerate(parallel(delayed(_problem)(examples, i) for i in range(len(examples)))):
        show(f"{i + 1:,} of {len(examples):,} files read")
        unread |= {} if why is None else {examples.path(i): why}
    here = {
        "examples": {name: len(domains.examples()) for name, domains in data.splits.items()},
        "domains": {name: len(domains) for name, domains in data.splits.items()},
    }

    def differences(version: str) -> list[str]:
        return [
            f"{split} has {here[what].get(split, 0):,} {what}, not {number:,}"
            for what in here
            for split, number in published.counts[version][what].items()
            if here[what].get(split, 0) != number
        ]

    counts = {what: dict(published.counts[place.version][what]) for what in here}
    source = published.counts[place.version]["source"]
    problems = differences(place.version) + [f"files that cannot be read: {len(unread):,}"] * bool(unread)
    table = Table(["split", "examples", "published", "domains", "published"])
    for split in dict.fromkeys([*here["examples"], *counts["examples"]]):
        numbers = [side[what].get(split) for what in here for side in (here, counts)]
        table.add(split, *("–" if n is None else f"{n:,}" for n in numbers))
    lines = [f"{published.title} {place.version} in {place.place}", table.text(), f"published: {source}", ""]
    lines += [f"{what}: {note}" for what, note in data.notes.items()]
    lines += _some("cannot be read:", (f"{path!r} ({why})" for path, why in unread.items()))
    lines += _some("problem:", problems)
    if not problems:
        lines.append("The counts match the published ones, and no problem was found in the files.")
    elif other := [v for v in published.counts if v != place.version and not differences(v)]:
        lines.append(f"These are the counts of version {', '.join(other)}.")
    content = {"folder": str(place.place), "version": place.version, **here, "published": counts}
    content |= {"source": source, "notes": dict(data.notes), "unreadable": unread, "problems": problems}
    return DataReport(content, "\n".join(lines))


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
    from shoal import datasets as sets
    from shoal.data.images import inspect_files, missing_classes, read_folders
    from shoal.report.tables import Table

    options = sets.check_options(IMAGE_FOLDER, options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="there is no image of class")  # it is in the report
        place, domains = (folder, None) if layout is None else layout.find(folder, lacking=True)
        files = read_folders(place, domains)
    paths = list(files["path"])
    found = inspect_files(paths, workers, lambda n: show(f"{n:,} of {len(files):,} images decoded"))
    names = [os.path.relpath(path, place) for path in paths]
    found = found.assign(name=names, domain=files["domain"], label=files["label"])
    table_of = files.groupby(["domain", "label"], observed=False).size().unstack()
    classes = {str(domain): {str(c): int(n) for c, n in row.items()} for domain, row in table_of.iterrows()}
    counts = {domain: sum(row.values()) for domain, row in classes.items()}
    duplicates: dict[str, list[list[str]]] = {"domains": [], "classes": [], "copies": []}
    copies = found[(found["digest"] != "") & found["digest"].duplicated(keep=False)]
    for _, same in copies.groupby("digest", sort=False):
        # In two domains an image leaks, in two classes it has a wrong label.
        several = [
            n for n, column in (("domains", "domain"), ("classes", "label")) if same[column].nunique() > 1
        ]
        duplicates[[*several, "copies"][0]].append(list(same["name"]))
    bad = found[found["problem"].notna()]
    unreadable = dict(zip(bad["name"], bad["problem"], strict=True))
    lacking, transparent = missing_classes(files), int(found["transparent"].sum())
    problems = _refused(folder, options) if layout is None else _unlike(layout, counts, classes)
    problems += [f"images that cannot be read: {len(unreadable):,}"] * bool(unreadable)
    for kind in ("domains", "classes"):
        problems += [f"images that are in several {kind}: {len(duplicates[kind]):,}"] * bool(duplicates[kind])
    published = {} if layout is None else dict(layout.counts)
    content = {
        **{"folder": str(place), "images": len(files), "domains": counts, "classes": classes},
        "lacking": [{"domain": domain, "class": label} for domain, label in lacking],
        **{"transparent": transparent, "unreadable": unreadable, "duplicates": duplicates},
        **{"problems": problems, "published": published},
        **({"source": layout.source} if layout else {}),
    }
    table = Table(["domain", "images", "classes", *(["published"] if published else [])])
    for domain in published or counts:
        present = sum(n > 0 for n in classes.get(domain, {}).values())
        number = [f"{published[domain]:,}"] if published else []
        table.add(domain, f"{counts.get(domain, 0):,}", str(present), *number)
    lines = [table.text(), *([f"published: {layout.source}"] if layout else []), ""]
    lines += _some("no image of", (f"{label!r} in {domain!r}" for domain, label in lacking))
    if transparent:
        lines.append(f"{transparent:,} images have transparent pixels, which become white")
    lines += _some("cannot be read:", (f"{name!r} ({why})" for name, why in unreadable.items()))
    for kind, groups in duplicates.items():
        words = "duplicate image:" if kind == "copies" else f"same image in several {kind}:"
        lines += _some(words, (" = ".join(map(repr, group)) for group in groups))
    lines += _some("problem:", problems)
    if not problems:
        lines.append(f"All {len(files):,} images can be read, and no problem was found.")
    elif layout is not None:
        lines.append(f"{layout.title} can be obtained {layout.how}.")
    return DataReport(content, "\n".join(lines))


def _refused(folder: Path, options: Mapping[str, Any]) -> list[str]:
    """Why training would refuse a folder of the user's own images, if it would."""
    from shoal import datasets as sets

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sets.load(IMAGE_FOLDER, **{**options, "folder": str(folder)})
    except InputError as error:
        return [f"the images cannot be trained on: {str(error).rstrip('.')}"]
    return []


def _unlike(layout: Layout, counts: Mapping[str, int], classes: Mapping[str, Mapping[str, int]]) -> list[str]:
    """How the images differ from what was published."""
    problems = [f"domain {name} is missing" for name in layout.domains if name not in counts]
    different = {d: n for d, n in layout.counts.items() if d in counts and counts[d] != n}
    problems += [f"{d} has {counts[d]:,} images, not {number:,}" for d, number in different.items()]
    there = len(next(iter(classes.values()), {}))
    problems += [f"there are {there} classes, not {layout.classes}"] * (there != layout.classes)
    return problems


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
    if plan:
        planned = [_plan(name, download, to) for name, download in downloads.items()]
        texts = [*(report.text for report in planned), UNTRIED]
        return DataReport({"plan": [report.content for report in planned]}, "\n\n".join(texts))
    reports, problems = list[DataReport](), list[str]()
    for name, download in downloads.items():
        try:
            reports.append(_fetch(name, download, to, _progress(progress)))
        except InputError as error:
            if len(downloads) == 1:
                raise
            problems.append(f"{name}: {error}")
    content = {"datasets": [report.content for report in reports], "problems": problems}
    return DataReport(content, "\n\n".join([*(report.text for report in reports), *problems]))


def _download(name: str) -> Download:
    from shoal.registry import DATASETS

    module = DATASETS.module(name)
    if hasattr(module, "DOWNLOAD"):
        found: Download = module.DOWNLOAD
        return found
    if hasattr(module, "PUBLISHED"):
        raise InputError(
            f"{name} cannot be downloaded: {module.PUBLISHED.down}. Pass the folder that "
            f"{module.PUBLISHED.folder} is in as data_dir."
        )
    known = ", ".join(DATASETS.having("DOWNLOAD"))
    raise InputError(f"dataset {name!r} cannot be downloaded; these can: {known}.")


def _plan(name: str, download: Download, to: Path) -> DataReport:
    from shoal.data.download import amount

    there = download.there(to)
    folder = str(there or to / download.home)
    state = "exists: nothing would be downloaded" if there else "would be downloaded"
    lines = [f"{name}, in {folder}, {state}"]
    for one in download.sources:
        size = amount(one.size) if one.size else "size unknown"
        kind, _, value = (one.checksum or "").partition(":")
        checksum = f"{kind} {value} ({one.checksum_from})" if kind else "no checksum is published"
        lines += [f"  {one.file}: {size}, {checksum}", *(f"    {url}" for url in one.urls)]
    files = [vars(source) for source in download.sources]
    content = {"dataset": name, "folder": folder, "there": there is not None, "files": files}
    return DataReport(content, "\n".join(lines))


def _fetch(name: str, download: Download, to: Path, show: Callable[[str], None]) -> DataReport:
    from shoal.data.download import amount
    from shoal.data.download import get as fetch
    from shoal.registry import DATASETS

    def on_progress(file: str, done: int, total: int | None) -> None:
        show(f"{file}: {amount(done)}{'' if total is None else f' of {amount(total)}'}")

    got = fetch(download, to, on_progress)
    words = ["shoal", "train", "erm", name, "--data-dir", str(to)]
    if hasattr(DATASETS.module(name), "LAYOUT"):
        words = ["shoal", "data", "check", str(got.folder), "--dataset", name]
    content = {"dataset": name, "folder": str(got.folder), "files": got.files, "notes": got.notes}
    content["next"] = following = shlex.join(words)
    state = (
        f"is now in {got.folder}." if got.files else f"is already in {got.folder}; nothing was downloaded."
    )
    lines = [f"{name} {state}"]
    for one in got.files:
        how = f"checked ({one['checked']})" if one["checked"] else "no checksum is published"
        lines.append(f"  {one['file']}: sha256 {one['sha256']}, {how}")
    return DataReport(
        content, "\n".join([*lines, *(f"  {note}." for note in got.notes), f"Next: {following}"])
    )


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
