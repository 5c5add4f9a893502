"""`shoal data`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.commands.arguments import count
from shoal.commands.showing import show
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.data.images import Findings
    from shoal.data.tree import FileList, Layout

SUMMARY = "Look at the pictures of a dataset: what is there, missing, broken or twice there."
OWN = "image-folder"
SHOWN = 10  # of each kind of finding; --json has them all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Example: shoal data check ~/data/PACS --dataset pacs"
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="decode every picture, count and compare",
        description="Decodes every picture, counts them, and looks for equal ones.",
        epilog="Exit code 0: all is well; 1: pictures are missing or cannot be read, counts differ from the "
        "published ones, or the same picture is in two domains or classes; 2: there is nothing to check.",
        formatter_class=parser.formatter_class,
    )
    check.add_argument("folder", type=Path, metavar="DIR", help="the dataset's folder, or the one it is in")
    check.add_argument(
        "--dataset", default=OWN, metavar="NAME", help="whose pictures they should be (default: yours)"
    )
    check.add_argument("--workers", type=count, metavar="N", help="processes (default: one a core)")
    check.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
    check.set_defaults(action=check_pictures)


def run(given: Any) -> int:
    code: int = given.action(given)
    return code


def check_pictures(given: Any) -> int:
    from shoal.data.images import inspect_files

    layout = _layout(given.dataset)
    files = _files(layout, given.folder)
    workers = given.workers or os.cpu_count() or 1
    found = inspect_files(files, 0 if workers == 1 else workers, _Progress(len(files)))
    report = findings(files, layout, found)
    show(report, describe(report, layout), given)
    return int(bool(report["wrong"]))


def _layout(name: str) -> Layout | None:
    from shoal.data.sets import registry

    module = registry.module(name)
    layout: Layout | None = getattr(module, "LAYOUT", None)
    if layout is None and registry.module(OWN) is not module:
        known = [n for n in registry.names() if hasattr(registry.module(n), "LAYOUT")]
        raise InputError(f"--dataset {name} is not in folders of pictures; these are: {', '.join(known)}.")
    return layout


def _files(layout: Layout | None, folder: Path) -> FileList:
    import warnings

    from shoal.data.tree import read_tree

    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="there is no picture of class")  # it is in the report
        return read_tree(folder) if layout is None else read_tree(*layout.find(folder))


class _Progress:
    """How many pictures were decoded, on stderr: a live line on a terminal, a line a tenth elsewhere."""

    def __init__(self, total: int) -> None:
        self.total, self.tenth, self.terminal = total, 0, sys.stderr.isatty()

    def __call__(self, done: int) -> None:
        text = f"{done:,} of {self.total:,} pictures decoded"
        if self.terminal:
            print(f"\r\x1b[K{text}", end="\n" if done == self.total else "", file=sys.stderr, flush=True)
        elif 10 * done // self.total > self.tenth:
            self.tenth = 10 * done // self.total
            print(text, file=sys.stderr, flush=True)


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
            lines.append(f"{layout.title} can be got from {layout.page}.")
    return "\n".join(lines)


def _some(words: str, items: list[str]) -> list[str]:
    more = [f"… {len(items) - SHOWN:,} more; --json has them all"] if len(items) > SHOWN else []
    return [f"{words} {item}" for item in items[:SHOWN]] + more
