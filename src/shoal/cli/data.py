"""`shoal data`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import (
    add_columns,
    few,
    kinds_of,
    seed,
    warnings_in_words,
)
from shoal.cli.showing import show
from shoal.errors import InputError
from shoal.terminal import clear_line

if TYPE_CHECKING:
    from shoal.data.download import Download, Got, Source
    from shoal.data.images import Findings
    from shoal.data.tree import FileList, Layout
    from shoal.data.wilds import Place, Published

SUMMARY = "Check a table or a folder of images before training; fetch datasets."
OWN = "image-folder"
UNTRIED = "Addresses and checksums are as others published or recorded them; for this version none was tried."
SHOWN = 10  # of each kind of finding; --json has them all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Examples: shoal data check patients.csv --label ill --domain hospital; "
        "shoal data get pacs --to ~/data; shoal data check ~/data/PACS --dataset pacs"
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="what a table's columns are taken for; or decode every image, count and compare",
        description="Of a table: the kind of every column, missing and distinct cells, what a model sees of "
        "it, and what is doubtful (cells that are no numbers, identifiers, possible leakage, repeated rows). "
        "Of a folder: decodes every image, counts them, and looks for equal ones. Of a dataset of WILDS: "
        "counts examples and domains of every split and reads every file.",
        epilog="Exit code 0: a table was read, or all is well with the images; 1: some are missing or cannot "
        "be read, counts differ from the "
        "published ones, or the same picture is in two domains or classes; 2: there is nothing to check.",
        formatter_class=parser.formatter_class,
    )
    check.add_argument(
        "folder",
        type=Path,
        metavar="DATA",
        help="a table (.csv, .csv.gz, .parquet, .xlsx), a folder of images, or the folder a dataset is in",
    )
    table = check.add_argument_group("a table")
    table.add_argument("--label", metavar="COLUMN", help="the column to predict: looks for leakage")
    table.add_argument("--domain", metavar="COLUMN", help="the column that tells where a row is from")
    table.add_argument("--group", metavar="COLUMN", help="the column that names the entity of a row")
    table.add_argument("--task", help="classification or regression (default: as the label looks)")
    add_columns(table)
    check.add_argument(
        "--dataset", default=OWN, metavar="NAME", help="whose pictures they should be (default: yours)"
    )
    check.add_argument("--workers", type=few, metavar="N", help="processes (default: one a core)")
    check.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    check.set_defaults(action=check_data)
    fake = actions.add_parser(
        "fake",
        help="write small imitations of datasets, to try things on",
        description="Writes small imitations of the datasets of WILDS in their official layouts: what is "
        "easy to learn in training domains does not hold in test ones, something fainter holds everywhere.",
        formatter_class=parser.formatter_class,
    )
    fake.add_argument("what", choices=["wilds"], help="which collection")
    fake.add_argument("folder", type=Path, metavar="DIR", help="where their folders are made")
    fake.add_argument("--only", nargs="+", metavar="NAME", help="these datasets (default: all)")
    fake.add_argument("--seed", type=seed, default=0, metavar="N", help="(default: 0)")
    fake.add_argument("--size", default="small", metavar="SIZE", help="small or medium (default: small)")
    fake.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    fake.set_defaults(action=fake_datasets)
    get = actions.add_parser(
        "get",
        help="fetch datasets, check and unpack them",
        description="Fetches datasets. What was stopped goes on with the same command.",
        epilog=f"{UNTRIED} Where there is no checksum, that of the first download is written beside it and "
        "later ones are compared.",
        formatter_class=parser.formatter_class,
    )
    get.add_argument("names", nargs="+", metavar="NAME", help="see `shoal list datasets`")
    get.add_argument("--to", type=Path, metavar="DIR", help="(default: $SHOAL_DATA, or data)")
    get.add_argument("--mirror", metavar="URL", help="has files of the same names; http, file or a folder")
    get.add_argument(
        "--sha256",
        action="append",
        default=[],
        metavar="HEX",
        help="what a file must have, instead of the published checksum; of several files FILE=HEX",
    )
    get.add_argument("--keep-archive", action="store_true", help="leave archives in DIR/downloads")
    get.add_argument("--plan", action="store_true", help="only say what would be fetched from where")
    get.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    get.set_defaults(action=get_datasets)


def run(given: Any) -> int:
    code: int = given.action(given)
    return code


def check_data(given: Any) -> int:
    from shoal.data.reading import ending
    from shoal.data.sets import registry

    if ending(given.folder):
        return check_columns(given)
    published: Published | None = getattr(registry.module(given.dataset), "PUBLISHED", None)
    return check_pictures(given) if published is None else check_published(published, given)


@warnings_in_words()
def check_columns(given: Any) -> int:
    """Shows what the columns of a table are taken for."""
    from shoal.data.own import check_table
    from shoal.report import columns

    options = {
        n: getattr(given, n) for n in ("label", "domain", "group", "task", "drop", "decimal", "day_first")
    }
    report = {"file": given.folder.name, **check_table(given.folder, kinds=kinds_of(given), **options)}
    show(report, columns.text(report), given)
    return 0


def fake_datasets(given: Any) -> int:
    from shoal.data import fake

    fake.times(given.size)
    makers = {name: fake.maker(name) for name in dict.fromkeys(given.only or fake.WILDS)}
    folder = given.folder.expanduser()
    made = {name: str(make(folder, given.seed, given.size)) for name, make in makers.items()}
    lines = [f"{name} is in {place}" for name, place in made.items()]
    use = ["shoal", "train", "erm", next(iter(made)), "--data-dir", str(folder)]
    lines.append(f"None of it is real. Next: {shlex.join(use)}")
    show({"made": made}, "\n".join(lines), given)
    return 0


def check_published(published: Published, given: Any) -> int:
    """Counts the examples and domains of a dataset of WILDS, and reads all files there may be."""
    from shoal.data import sets
    from shoal.data.wilds import find, unreadable

    if not given.folder.is_dir():
        raise InputError(f"there is no folder {str(given.folder)!r}.")
    place = find(published, given.folder)
    data = sets.load(given.dataset, folder=str(place.folder), version=place.version)
    examples: Any = data.examples
    counts = {name: len(domains.examples()) for name, domains in data.splits.items()}
    groups = {name: len(domains) for name, domains in data.splits.items()}
    bad: dict[int, str] = {}
    if hasattr(examples, "problem"):
        workers, progress = given.workers or os.cpu_count() or 1, _Progress()

        def tell(done: int) -> None:
            progress("", done, len(examples), f"{done:,} of {len(examples):,} examples read")

        bad = unreadable(examples, 0 if workers == 1 else workers, tell)
    report = published_findings(published, place, counts, groups)
    report["notes"] = dict(data.notes)
    report["unreadable"] = {examples.path(i): why for i, why in bad.items()}
    if bad:
        report["wrong"].append(f"files that cannot be read: {len(bad):,}")
    show(report, describe_published(report, published), given)
    return int(bool(report["wrong"]))


def published_findings(
    published: Published, place: Place, counts: dict[str, int], groups: dict[str, int]
) -> dict[str, Any]:
    """What is there beside what was published; ``same_as`` names the versions whose counts these are."""
    said = published.counts[place.version]
    wrong = []
    for what, found, known in (("examples", counts, said.examples), ("domains", groups, said.domains)):
        wrong += [
            f"{split} has {found.get(split, 0):,} {what}, not {number:,}"
            for split, number in known.items()
            if found.get(split, 0) != number
        ]
    same = [
        version
        for version, known in published.counts.items()
        if all(counts.get(split) == number for split, number in known.examples.items())
        and all(groups.get(split) == number for split, number in known.domains.items())
    ]
    return {
        "folder": str(place.folder),
        "version": place.version,
        "examples": counts,
        "domains": groups,
        "published": {"examples": dict(said.examples), "domains": dict(said.domains)},
        "source": said.source,
        "same_as": same,
        "wrong": wrong,
    }


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def describe_published(report: dict[str, Any], published: Published) -> str:
    from shoal.report.tables import Table

    said, table = report["published"], Table(["split", "examples", "published", "domains", "published"])
    for split in dict.fromkeys([*report["examples"], *said["examples"]]):
        table.add(
            split,
            *(
                _number(where[what].get(split))
                for what in ("examples", "domains")
                for where in (report, said)
            ),
        )
    lines = [f"{published.title} {report['version']} in {report['folder']}", table.text()]
    lines += [f"published: {report['source']}", ""]
    lines += [f"{what}: {note}" for what, note in report["notes"].items()]
    lines += _some("cannot be read:", [f"{path!r} ({why})" for path, why in report["unreadable"].items()])
    if not report["wrong"]:
        return "\n".join([*lines, "Counts are those published, and nothing is wrong with the files."])
    other = [version for version in report["same_as"] if version != report["version"]]
    lines += _some("wrong:", report["wrong"])
    if other:
        lines.append(f"These are the counts of version {', '.join(other)}.")
    return "\n".join([*lines, f"{published.title} can be got {published.how}."])


def check_pictures(given: Any) -> int:
    from shoal.data.images import inspect_files

    layout = _layout(given.dataset)
    files = _files(layout, given.folder)
    workers = given.workers or os.cpu_count() or 1
    progress, total = _Progress(), len(files)

    def tell(done: int) -> None:
        progress("", done, total, f"{done:,} of {total:,} pictures decoded")

    found = inspect_files(files, 0 if workers == 1 else workers, tell)
    report = findings(files, layout, found)
    show(report, describe(report, layout), given)
    return int(bool(report["wrong"]))


def _layout(name: str) -> Layout | None:
    from shoal.data.sets import registry

    module = registry.module(name)
    layout: Layout | None = getattr(module, "LAYOUT", None)
    if layout is None and registry.module(OWN) is not module:
        kinds = ("LAYOUT", "PUBLISHED")
        known = [n for kind in kinds for n in registry.names() if hasattr(registry.module(n), kind)]
        raise InputError(f"--dataset {name} is not in folders of pictures; these are: {', '.join(known)}.")
    return layout


def _files(layout: Layout | None, folder: Path) -> FileList:
    import warnings

    from shoal.data.tree import read_tree

    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="there is no image of class")  # it is in the report
        return read_tree(folder) if layout is None else read_tree(*layout.find(folder))


class _Progress:
    """How far something is, on stderr: a live line on a terminal, a line a tenth elsewhere."""

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


def get_datasets(given: Any) -> int:
    from shoal.data.folders import VARIABLE

    downloads = {name: _download(name) for name in dict.fromkeys(given.names)}
    sums = checksums(given.sha256, list(downloads.values()))
    to = (given.to or Path(os.environ.get(VARIABLE) or "data")).expanduser()
    if given.plan:
        plans = [_plan(name, download, to, given.mirror, sums) for name, download in downloads.items()]
        show({"plan": plans}, "\n\n".join([*map(describe_plan, plans), UNTRIED]), given)
        return 0
    reports, troubles = [], []
    for name, download in downloads.items():
        try:
            reports.append(_report(name, download, _fetched(download, to, sums, given), to))
        except InputError as error:
            if len(downloads) == 1:
                raise
            troubles.append(f"{name}: {error}")
            print(f"shoal: {troubles[-1]}", file=sys.stderr, flush=True)
    show({"datasets": reports, "troubles": troubles}, "\n\n".join(map(describe_got, reports)), given)
    return 2 if troubles else 0


def _download(name: str) -> Download:
    from shoal.data.sets import registry

    download: Download | None = getattr(registry.module(name), "DOWNLOAD", None)
    if download is None:
        known = [n for n in registry.names() if hasattr(registry.module(n), "DOWNLOAD")]
        raise InputError(f"dataset {name!r} is not fetched; these are: {', '.join(known)}.")
    return download


def checksums(given: Sequence[str], downloads: Sequence[Download]) -> dict[str, str]:
    """What --sha256 says, by file."""
    files = [source.file for download in downloads for source in download.sources]
    found = {}
    for text in given:
        file, _, value = text.rpartition("=")
        if not re.fullmatch("[0-9a-fA-F]{64}", value):
            raise InputError(f"--sha256 takes 64 hexadecimal digits, got {value!r}.")
        if not file and len(files) > 1:
            raise InputError(
                f"--sha256 {value[:8]}…: of which file? Say FILE={value[:8]}…, one of {', '.join(files)}."
            )
        if file and file not in files:
            raise InputError(f"--sha256: {file!r} is not fetched; these are: {', '.join(files)}.")
        found[file or files[0]] = value
    return found


def _fetched(download: Download, to: Path, sums: dict[str, str], given: Any) -> Got:
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
        return get(
            download, to, mirror=given.mirror, sha256=sums, keep=given.keep_archive, tell=tell, say=say
        )
    except KeyboardInterrupt as stop:
        number = getattr(stop, "signal", None) or signal.SIGINT
        text = "stopped. What came is kept; the same command goes on from there."
        raise Interrupted(text, number) from stop
    finally:
        progress.end()


def _plan(
    name: str, download: Download, to: Path, mirror: str | None, sums: dict[str, str]
) -> dict[str, Any]:
    there = download.found_in(to)
    files = [_planned(source, mirror, sums.get(source.file)) for source in download.sources]
    return {
        "dataset": name,
        "folder": str(there or to / download.home),
        "there": there is not None,
        "files": files,
    }


def _planned(source: Source, mirror: str | None, sha256: str | None) -> dict[str, Any]:
    from shoal.data.download import addresses

    kind, _, value = source.checksum.partition(":")
    return {
        "file": source.file,
        "urls": list(addresses(source, mirror)),
        "bytes": source.size or source.about,
        "exact": source.size is not None,
        "checksum": f"sha256:{sha256}" if sha256 else f"{kind}:{value}" if kind else None,
        "said_by": "--sha256" if sha256 else source.said_by or None,
    }


def describe_plan(plan: dict[str, Any]) -> str:
    from shoal.data.unpack import amount

    there = "is there: nothing would be fetched" if plan["there"] else "would be fetched"
    lines = [f"{plan['dataset']}, in {plan['folder']}, {there}"]
    for one in plan["files"]:
        size = (
            f"{'' if one['exact'] else 'about '}{amount(one['bytes'])}" if one["bytes"] else "size not known"
        )
        kind, _, value = (one["checksum"] or "").partition(":")
        checksum = f"{kind} {value} ({one['said_by']})" if kind else "no checksum is published"
        lines += [f"  {one['file']}: {size}, {checksum}", *(f"    {url}" for url in one["urls"])]
    return "\n".join(lines)


def _report(name: str, download: Download, got: Got, to: Path) -> dict[str, Any]:
    use = ["shoal", "train", "erm", name, "--data-dir", str(to)]
    check = ["shoal", "data", "check", str(got.folder), "--dataset", name]
    return {
        "dataset": name,
        "folder": str(got.folder),
        "files": got.files,
        "notes": got.notes,
        "next": shlex.join(check if download.layout is not None else use),
    }


def describe_got(report: dict[str, Any]) -> str:
    if not report["files"]:
        lines = [f"{report['dataset']} is in {report['folder']}; nothing was fetched."]
    else:
        lines = [f"{report['dataset']} is now in {report['folder']}."]
    for one in report["files"]:
        how = f"checked ({one['checked']})" if one["checked"] else "no checksum is published: written down"
        lines.append(f"  {one['file']}: sha256 {one['sha256']}, {how}")
    return "\n".join([*lines, *(f"  {note}." for note in report["notes"]), f"Next: {report['next']}"])


def findings(files: FileList, layout: Layout | None, found: Findings) -> dict[str, Any]:
    """What was found, for machines; ``wrong`` says in words what makes the exit code 1."""
    counts = dict(zip(files.domains, files.counts().sum(1).tolist(), strict=True))
    groups = [{"kind": _kind(files, group), "files": list(map(files.name, group))}
              for group in found.duplicates]  # fmt: skip
    report: dict[str, Any] = {
        "folder": files.root,
        "pictures": len(files),
        "domains": counts,
        "classes": {
            domain: dict(zip(files.classes, row, strict=True))
            for domain, row in zip(files.domains, files.counts().tolist(), strict=True)
        },
        "lacking": [{"domain": domain, "class": label} for domain, label in files.missing()],
        "unreadable": {files.name(i): why for i, why in found.unreadable.items()},
        "duplicates": groups,
    }
    wrong = []
    if layout is not None:
        report["published"], report["source"] = dict(layout.counts), layout.source
        wrong = _against_published(files, layout, counts)
    if found.unreadable:
        wrong.append(f"pictures that cannot be read: {len(found.unreadable):,}")
    for kind in ("domains", "classes"):
        if number := sum(group["kind"] == kind for group in groups):
            wrong.append(f"pictures that are in several {kind}: {number:,}")
    return {**report, "wrong": wrong}


def _kind(files: FileList, group: list[int]) -> str:
    """In what equal pictures differ: being in two domains, or two classes, is leakage or a wrong label."""
    if len({int(files.groups[i]) for i in group}) > 1:
        return "domains"
    return "classes" if len({int(files.labels[i]) for i in group}) > 1 else "copies"


def _against_published(files: FileList, layout: Layout, counts: dict[str, int]) -> list[str]:
    wrong = [f"domain {name} is missing" for name in layout.domains if name not in counts]
    differences = layout.differences(counts)
    if all(differences.values()):
        for domain, said in differences[layout.source].items():
            if domain in counts:
                wrong.append(f"{domain} has {counts[domain]:,} pictures, not {said:,}")
    if len(files.classes) != layout.classes:
        wrong.append(f"there are {len(files.classes)} classes, not {layout.classes}")
    row = dict(zip(files.domains, files.counts(), strict=True))
    for domain, classes in layout.by_class.items() if differences[layout.source] else ():
        for label, said in classes.items():
            if domain in row and label in files.classes:
                there = int(row[domain][files.classes.index(label)])
                if there != said:
                    wrong.append(f"{domain} has {there:,} pictures of {label}, not {said:,}")
    return wrong


def describe(report: dict[str, Any], layout: Layout | None) -> str:
    from shoal.report.tables import Table

    published = report.get("published", {})
    table = Table(["domain", "pictures", "classes", *(["published"] if layout else [])])
    for domain in published or report["domains"]:
        classes = sum(n > 0 for n in report["classes"].get(domain, {}).values())
        row = [domain, f"{report['domains'].get(domain, 0):,}", str(classes)]
        table.add(*row, *([f"{published[domain]:,}"] if layout else []))
    source = [f"published: {report['source']}"] if layout else []
    lines = [table.text(), *source, ""]
    lines += _some("no picture of", [f"{x['class']!r} in {x['domain']!r}" for x in report["lacking"]])
    lines += _some("cannot be read:", [f"{name!r} ({why})" for name, why in report["unreadable"].items()])
    said = {"domains": "same picture in several domains:", "classes": "same picture in several classes:",
            "copies": "same picture twice:"}  # fmt: skip
    for kind, words in said.items():
        groups = [" = ".join(map(repr, g["files"])) for g in report["duplicates"] if g["kind"] == kind]
        lines += _some(words, groups)
    if not report["wrong"]:
        lines.append(f"All {report['pictures']:,} pictures can be read, and nothing is wrong with them.")
    else:
        lines += _some("wrong:", report["wrong"])
        if layout is not None:
            lines.append(f"{layout.title} can be got {layout.how}.")
    return "\n".join(lines)


def _some(words: str, items: list[str]) -> list[str]:
    more = [f"… {len(items) - SHOWN:,} more; --json has them all"] if len(items) > SHOWN else []
    return [f"{words} {item}" for item in items[:SHOWN]] + more
