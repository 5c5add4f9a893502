"""`shoal data`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import OF_COLUMNS, add_common, add_options, few, kinds_of, warnings_in_words
from shoal.cli.showing import show
from shoal.errors import InputError
from shoal.terminal import clear_line

if TYPE_CHECKING:
    from shoal.data.download import Download, Got
    from shoal.data.images import Findings
    from shoal.data.tree import FileList, Layout
    from shoal.data.wilds import Published

OWN = "image-folder"
UNTRIED = "URLs and checksums are as published or recorded by others; they were not tested for this release."
SHOWN = 10  # of each kind of finding; --json has them all
DUPLICATES = {
    "domains": "same image in several domains:",
    "classes": "same image in several classes:",
    "copies": "duplicate image:",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Examples:\n"
        "  shoal data example table\n"
        "  shoal data check patients.csv --label ill --domain hospital\n"
        "  shoal data get pacs --to ~/data\n"
        "  shoal data check ~/data/PACS --dataset pacs"
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="check a table, a folder of images, or a downloaded dataset",
        description="Check data before training. For a table: show the kind of each column, the numbers of "
        "missing and distinct values, the features, and warnings (non-numeric values, identifiers, possible "
        "leakage, duplicate rows). For a folder of images: decode and count all images, and find "
        "duplicates. For a WILDS dataset: count the examples and domains of each split, and read all files.",
        epilog="Exit code 0: the table was read, or no problem was found in the images; 1: images are "
        "missing or unreadable, counts differ from the published ones, or the same image is in several "
        "domains or classes; 2: there is nothing to check.",
        formatter_class=parser.formatter_class,
    )
    what = "table (.csv, .tsv, .csv.gz, .parquet, .xlsx), folder of images, or folder of a dataset"
    check.add_argument("folder", type=Path, metavar="DATA", help=what)
    add_options(check.add_argument_group("table"), ("label", "domain", "group", "task", *OF_COLUMNS))
    check.add_argument(
        "--dataset",
        default=OWN,
        metavar="NAME",
        help="dataset to compare with (default: none, your own images)",
    )
    check.add_argument("--workers", type=few, metavar="N", help="number of processes (default: one per core)")
    check.set_defaults(action=check_data)
    get = actions.add_parser(
        "get",
        help="download, verify and unpack datasets",
        description="Download, verify and unpack datasets. The same command resumes an interrupted download.",
        epilog=f"{UNTRIED} If no checksum is published, that of the first download is saved next to it and "
        "later downloads are compared with it.",
        formatter_class=parser.formatter_class,
    )
    get.add_argument("names", nargs="+", metavar="NAME", help="names of datasets (`shoal list datasets`)")
    get.add_argument(
        "--to", type=Path, metavar="DIR", help="folder to download to (default: $SHOAL_DATA, or data)"
    )
    get.add_argument(
        "--mirror", metavar="URL", help="http or file URL, or folder, with files of the same names"
    )
    sums = "checksum that replaces the published one; FILE=HEX if there are several files"
    get.add_argument("--sha256", action="append", default=[], metavar="HEX", help=sums)
    get.add_argument("--keep-archive", action="store_true", help="keep the archives in DIR/downloads")
    get.add_argument("--plan", action="store_true", help="list the files and URLs and exit")
    get.set_defaults(action=get_datasets)
    example = actions.add_parser(
        "example",
        help="write a small generated table or folder of images to try Shoal with",
        description="Write generated data, the same on every machine: a table of 600 patients from five "
        "hospitals, or a folder of 240 images in four domains and three classes.",
        formatter_class=parser.formatter_class,
    )
    example.add_argument("what", choices=["table", "images"], help="kind of data to write")
    default = "new file or folder (default: patients.csv or photos)"
    example.add_argument("--out", type=Path, metavar="PATH", help=default)
    example.set_defaults(action=write_example)
    for action in (check, get, example):
        add_common(action)


def run(args: Any) -> int:
    code: int = args.action(args)
    return code


def write_example(args: Any) -> int:
    from shoal.data import example

    if args.what == "table":
        path = example.write_table(args.out or "patients.csv")
        options = ["--label", "ill", "--domain", "hospital"]
        text = f"A table of generated patients is now in {path}."
    else:
        path, options = example.write_images(args.out or "photos"), []
        text = f"A folder of generated images is now in {path}."
    following = shlex.join(["shoal", "data", "check", str(path), *options])
    show({"path": str(path), "next": following}, f"{text}\nNext: {following}", args)
    return 0


def check_data(args: Any) -> int:
    from shoal.data.reading import ENDINGS, ending
    from shoal.data.sets import registry

    if ending(args.folder):
        return check_columns(args)
    module = registry.module(args.dataset)
    published, layout = getattr(module, "PUBLISHED", None), getattr(module, "LAYOUT", None)
    if published is None and layout is None and registry.module(OWN) is not module:
        known = [*registry.having("LAYOUT"), *registry.having("PUBLISHED")]
        raise InputError(
            f"--dataset {args.dataset} is not a folder of images; datasets that are: {', '.join(known)}."
        )
    if args.folder.is_file():
        tables = ", ".join(ENDINGS)
        raise InputError(f"{str(args.folder)!r} is not a table ({tables}) or a folder of images.")
    if not args.folder.is_dir():
        raise InputError(f"there is no folder {str(args.folder)!r}.")
    report, text = check_images(layout, args) if published is None else check_published(published, args)
    show(report, text, args)
    return int(bool(report["wrong"]))


@warnings_in_words()
def check_columns(args: Any) -> int:
    """Shows what the columns of a table are taken for."""
    from shoal.data.own import check_table
    from shoal.report import columns

    names = ("label", "domain", "group", "task", "drop", "decimal", "day_first")
    options = {name: getattr(args, name) for name in names}
    report = {"file": args.folder.name, **check_table(args.folder, kinds=kinds_of(args), **options)}
    show(report, columns.text(report), args)
    return 0


def check_published(published: Published, args: Any) -> tuple[dict[str, Any], str]:
    """Counts the examples and domains of a dataset of WILDS, and reads all files there may be."""
    from shoal.data import sets
    from shoal.data.batch import InMemory
    from shoal.data.wilds import find, unreadable
    from shoal.report.tables import Table

    place = find(published, args.folder)
    data = sets.load(args.dataset, folder=str(place.folder), version=place.version)
    examples: Any = data.examples
    bad: dict[int, str] = {}
    if not isinstance(examples, InMemory):
        bad = unreadable(examples, _workers(args), _counted(len(examples), "examples read"))
    here = {
        "examples": {name: len(domains.examples()) for name, domains in data.splits.items()},
        "domains": {name: len(domains) for name, domains in data.splits.items()},
    }
    kinds = ("examples", "domains")
    known = {v: {what: dict(getattr(c, what)) for what in kinds} for v, c in published.counts.items()}
    differing = {version: _differences(here, counts) for version, counts in known.items()}
    wrong = differing[place.version] + [f"files that cannot be read: {len(bad):,}"] * bool(bad)
    same = [version for version, differences in differing.items() if not differences]
    unread = {examples.path(i): why for i, why in bad.items()}
    counts, source = known[place.version], published.counts[place.version].source
    report = {"folder": str(place.folder), "version": place.version, **here, "published": counts}
    report |= {"source": source, "same_as": same, "wrong": wrong}
    report |= {"notes": dict(data.notes), "unreadable": unread}
    table = Table(["split", "examples", "published", "domains", "published"])
    for split in dict.fromkeys([*here["examples"], *counts["examples"]]):
        numbers = [side[what].get(split) for what in here for side in (here, counts)]
        table.add(split, *("–" if n is None else f"{n:,}" for n in numbers))
    lines = [f"{published.title} {place.version} in {place.folder}", table.text(), f"published: {source}", ""]
    lines += [f"{what}: {note}" for what, note in data.notes.items()]
    lines += _some("cannot be read:", [f"{path!r} ({why})" for path, why in unread.items()])
    if not wrong:
        return report, "\n".join(
            [*lines, "The counts match the published ones, and no problem was found in the files."]
        )
    lines += _some("problem:", wrong)
    if other := [version for version in same if version != place.version]:
        lines.append(f"These are the counts of version {', '.join(other)}.")
    return report, "\n".join([*lines, f"{published.title} can be obtained {published.how}."])


def _differences(here: dict[str, dict[str, int]], published: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{split} has {here[what].get(split, 0):,} {what}, not {number:,}"
        for what, counts in published.items()
        for split, number in counts.items()
        if here[what].get(split, 0) != number
    ]


def check_images(layout: Layout | None, args: Any) -> tuple[dict[str, Any], str]:
    from shoal.data.images import inspect_files
    from shoal.data.tree import read_tree

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="there is no image of class")  # in the report
        files = read_tree(args.folder) if layout is None else read_tree(*layout.find(args.folder))
    found = inspect_files(files, _workers(args), _counted(len(files), "images decoded"))
    report = findings(files, layout, found)
    return report, describe(report, layout)


def findings(files: FileList, layout: Layout | None, found: Findings) -> dict[str, Any]:
    """What was found, for machines; ``wrong`` lists what makes the exit code 1."""
    table = dict(zip(files.domains, files.counts().tolist(), strict=True))
    counts = {domain: sum(row) for domain, row in table.items()}
    groups = [{"kind": _kind(files, group), "files": [*map(files.name, group)]} for group in found.duplicates]
    report: dict[str, Any] = {
        "folder": files.root,
        "images": len(files),
        "domains": counts,
        "classes": {domain: dict(zip(files.classes, row, strict=True)) for domain, row in table.items()},
        "lacking": [{"domain": domain, "class": label} for domain, label in files.missing()],
        "unreadable": {files.name(i): why for i, why in found.unreadable.items()},
        "duplicates": groups,
    }
    wrong = []
    if layout is not None:
        report["published"], report["source"] = dict(layout.counts), layout.source
        wrong = _against_published(report, layout)
    if found.unreadable:
        wrong.append(f"images that cannot be read: {len(found.unreadable):,}")
    for kind in ("domains", "classes"):
        if number := sum(group["kind"] == kind for group in groups):
            wrong.append(f"images that are in several {kind}: {number:,}")
    return {**report, "wrong": wrong}


def _kind(files: FileList, group: list[int]) -> str:
    """How equal images differ: being in two domains, or two classes, is leakage or a wrong label."""
    if len({int(files.groups[i]) for i in group}) > 1:
        return "domains"
    return "classes" if len({int(files.labels[i]) for i in group}) > 1 else "copies"


def _against_published(report: dict[str, Any], layout: Layout) -> list[str]:
    counts, by_class = report["domains"], report["classes"]
    classes: dict[str, int] = next(iter(by_class.values()), {})
    wrong = [f"domain {name} is missing" for name in layout.domains if name not in counts]
    differences = layout.differences(counts)
    if all(differences.values()):
        for domain, number in differences[layout.source].items():
            if domain in counts:
                wrong.append(f"{domain} has {counts[domain]:,} images, not {number:,}")
    if len(classes) != layout.classes:
        wrong.append(f"there are {len(classes)} classes, not {layout.classes}")
    for domain, labels in layout.by_class.items() if differences[layout.source] else ():
        for label, number in labels.items():
            if (there := by_class.get(domain, {}).get(label, number)) != number:
                wrong.append(f"{domain} has {there:,} images of {label}, not {number:,}")
    return wrong


def describe(report: dict[str, Any], layout: Layout | None) -> str:
    from shoal.report.tables import Table

    published = report.get("published", {})
    table = Table(["domain", "images", "classes", *(["published"] if layout else [])])
    for domain in published or report["domains"]:
        classes = sum(n > 0 for n in report["classes"].get(domain, {}).values())
        row = [domain, f"{report['domains'].get(domain, 0):,}", str(classes)]
        table.add(*row, *([f"{published[domain]:,}"] if layout else []))
    lines = [table.text(), *([f"published: {report['source']}"] if layout else []), ""]
    lines += _some("no image of", [f"{x['class']!r} in {x['domain']!r}" for x in report["lacking"]])
    lines += _some("cannot be read:", [f"{name!r} ({why})" for name, why in report["unreadable"].items()])
    for kind, words in DUPLICATES.items():
        groups = [" = ".join(map(repr, g["files"])) for g in report["duplicates"] if g["kind"] == kind]
        lines += _some(words, groups)
    if not report["wrong"]:
        lines.append(f"All {report['images']:,} images can be read, and no problem was found.")
    lines += _some("problem:", report["wrong"])
    if report["wrong"] and layout is not None:
        lines.append(f"{layout.title} can be obtained {layout.how}.")
    return "\n".join(lines)


def _some(words: str, items: list[str]) -> list[str]:
    more = [f"… {len(items) - SHOWN:,} more; use --json for all"] if len(items) > SHOWN else []
    return [f"{words} {item}" for item in items[:SHOWN]] + more


def _workers(args: Any) -> int:
    """Worker processes; 0 for this one."""
    workers = args.workers or os.cpu_count() or 1
    return 0 if workers == 1 else workers


def _counted(total: int, what: str) -> Callable[[int], None]:
    progress = _Progress()
    return lambda done: progress("", done, total, f"{done:,} of {total:,} {what}")


class _Progress:
    """The progress of something on stderr: a live line on a terminal, one line per tenth elsewhere."""

    STEP = 10**8  # where the end is not known

    def __init__(self) -> None:
        self.what, self.tenth, self.terminal = "", 0, sys.stderr.isatty()
        self.next, self.open = 0.0, False

    def __call__(self, what: str, done: int, total: int | None, text: str) -> None:
        if what != self.what:
            self.end()
            self.what, self.tenth, self.next = what, 0, 0.0
        if self.terminal:
            if done == total or time.monotonic() >= self.next:
                clear_line(sys.stderr)
                print(text, end="", file=sys.stderr, flush=True)
                self.next, self.open = time.monotonic() + 0.1, True
            if done == total:
                self.end()
        elif (tenth := 10 * done // total if total else done // self.STEP) > self.tenth:
            self.tenth = tenth
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leaves the live line as it is."""
        if self.open:
            print(file=sys.stderr, flush=True)
        self.open = False


def get_datasets(args: Any) -> int:
    from shoal.data.folders import VARIABLE

    downloads = {name: _download(name) for name in dict.fromkeys(args.names)}
    sums = checksums(args.sha256, list(downloads.values()))
    to = (args.to or Path(os.environ.get(VARIABLE) or "data")).expanduser()
    if args.plan:
        plans = [_plan(name, download, to, args.mirror, sums) for name, download in downloads.items()]
        show({"plan": plans}, "\n\n".join([*map(describe_plan, plans), UNTRIED]), args)
        return 0
    reports, troubles = [], []
    for name, download in downloads.items():
        try:
            reports.append(_report(name, download, _fetched(download, to, sums, args), to))
        except InputError as error:
            if len(downloads) == 1:
                raise
            troubles.append(f"{name}: {error}")
            print(f"shoal: {troubles[-1]}", file=sys.stderr, flush=True)
    show({"datasets": reports, "troubles": troubles}, "\n\n".join(map(describe_got, reports)), args)
    return 2 if troubles else 0


def _download(name: str) -> Download:
    from shoal.data.sets import registry

    download: Download | None = getattr(registry.module(name), "DOWNLOAD", None)
    if download is None:
        known = ", ".join(registry.having("DOWNLOAD"))
        raise InputError(f"dataset {name!r} cannot be downloaded; these can: {known}.")
    return download


def checksums(values: Sequence[str], downloads: Sequence[Download]) -> dict[str, str]:
    """What --sha256 says, by file."""
    files = [source.file for download in downloads for source in download.sources]
    found = {}
    for text in values:
        file, _, value = text.rpartition("=")
        if not re.fullmatch("[0-9a-fA-F]{64}", value):
            raise InputError(f"--sha256 takes 64 hexadecimal digits, got {value!r}.")
        short, every = f"{value[:8]}…", ", ".join(files)
        if not file and len(files) > 1:
            raise InputError(
                f"--sha256 {short}: there are several files; use FILE={short} with one of {every}."
            )
        if file and file not in files:
            raise InputError(f"--sha256: {file!r} is not a file of this dataset; the files are: {every}.")
        found[file or files[0]] = value
    return found


def _fetched(download: Download, to: Path, sums: dict[str, str], args: Any) -> Got:
    from shoal.data.download import get
    from shoal.data.unpack import amount
    from shoal.training.stopping import Interrupted

    progress = _Progress()

    def tell(file: str, doing: str, done: int, total: int | None) -> None:
        known = amount if doing == "fetched" else "{:,}".format
        of = f" of {known(total)}" if total is not None else ""
        progress(f"{doing} {file}", done, total, f"{file}: {known(done)}{of} {doing}")

    def say(text: str) -> None:
        progress.end()
        print(text, file=sys.stderr, flush=True)

    try:
        return get(download, to, mirror=args.mirror, sha256=sums, keep=args.keep_archive, tell=tell, say=say)
    except KeyboardInterrupt as stop:
        number = getattr(stop, "signal", None) or signal.SIGINT
        text = "interrupted. The same command resumes the download."
        raise Interrupted(text, number) from stop
    finally:
        progress.end()


def _plan(
    name: str, download: Download, to: Path, mirror: str | None, sums: dict[str, str]
) -> dict[str, Any]:
    from shoal.data.download import addresses

    there = download.found_in(to)
    files = [
        {
            "file": source.file,
            "urls": list(addresses(source, mirror)),
            "bytes": source.size or source.about,
            "exact": source.size is not None,
            "checksum": f"sha256:{own}" if (own := sums.get(source.file)) else source.checksum or None,
            "said_by": "--sha256" if own else source.said_by or None,
        }
        for source in download.sources
    ]
    folder = str(there or to / download.home)
    return {"dataset": name, "folder": folder, "there": there is not None, "files": files}


def describe_plan(plan: dict[str, Any]) -> str:
    from shoal.data.unpack import amount

    there = "exists: nothing would be downloaded" if plan["there"] else "would be downloaded"
    lines = [f"{plan['dataset']}, in {plan['folder']}, {there}"]
    for one in plan["files"]:
        about = "" if one["exact"] else "about "
        size = f"{about}{amount(one['bytes'])}" if one["bytes"] else "size unknown"
        kind, _, value = (one["checksum"] or "").partition(":")
        checksum = f"{kind} {value} ({one['said_by']})" if kind else "no checksum is published"
        lines += [f"  {one['file']}: {size}, {checksum}", *(f"    {url}" for url in one["urls"])]
    return "\n".join(lines)


def _report(name: str, download: Download, got: Got, to: Path) -> dict[str, Any]:
    words = ["shoal", "train", "erm", name, "--data-dir", str(to)]
    if download.layout is not None:
        words = ["shoal", "data", "check", str(got.folder), "--dataset", name]
    report = {"dataset": name, "folder": str(got.folder), "files": got.files, "notes": got.notes}
    return {**report, "next": shlex.join(words)}


def describe_got(report: dict[str, Any]) -> str:
    done = "is now in {folder}." if report["files"] else "is already in {folder}; nothing was downloaded."
    lines = [f"{report['dataset']} {done.format(**report)}"]
    for one in report["files"]:
        how = f"checked ({one['checked']})" if one["checked"] else "no checksum is published: recorded"
        lines.append(f"  {one['file']}: sha256 {one['sha256']}, {how}")
    return "\n".join([*lines, *(f"  {note}." for note in report["notes"]), f"Next: {report['next']}"])
