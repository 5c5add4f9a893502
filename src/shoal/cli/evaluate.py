"""`shoal evaluate`."""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import add_data_dir, in_data_dir, values
from shoal.cli.showing import show
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.data.batch import DomainData
    from shoal.report.tables import Table
    from shoal.training.predictions import Named

SUMMARY = "Score files of predictions, as those of WILDS' leaderboard."
SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A file has one prediction a line, in the order of the split's examples, and is called such as "
        "camelyon17_split:test_seed:0_epoch:best_pred.csv; `shoal train --predictions` writes such. Files of "
        "several seeds or folds give means and standard deviations."
    )
    parser.add_argument("predictions", nargs="+", type=Path, metavar="FILE", help="one or more .csv files")
    parser.add_argument("--dataset", help="see `shoal list datasets` (default: as the file is called)")
    parser.add_argument("--split", help="val, test, id_val, id_test … (default: as the file is called)")
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=VALUE", help="the dataset's options")
    add_data_dir(parser)


@in_data_dir
def run(given: Any) -> None:
    from shoal.training import predictions

    options = values(given.data, "--data")
    loaded: dict[str, DomainData] = {}
    found: list[dict[str, Any]] = []
    for path in given.predictions:
        named = _named(path, given)
        own = _options(named, options)
        key = repr((named.dataset, sorted(own.items())))
        if key not in loaded:
            loaded = {key: _load(named.dataset, own)}
        data = loaded[key]
        split, _ = predictions.split_of(data, named.split)
        predicted = predictions.read(path, data.classes)
        try:
            scores, others = predictions.evaluate(data, split, predicted)
        except InputError as error:
            raise InputError(f"{str(path)!r}: {error}") from error
        content = scores.to_dict()
        content["groups"] = {
            name: {
                g: v if math.isfinite(v) else None for g, v in zip(scores.names, each.tolist(), strict=True)
            }
            for name, each in others.items()
        }
        found.append(
            {"file": str(path), "dataset": named.dataset, "split": split, named.kind: named.which} | content
        )
    kinds = list(dict.fromkeys((f["dataset"], f["split"]) for f in found))
    parts = [_text([f for f in found if (f["dataset"], f["split"]) == kind]) for kind in kinds]
    show({"files": found, "summary": [_summary(found, *kind) for kind in kinds]}, "\n\n".join(parts), given)


def _named(path: Path, given: Any) -> Named:
    """What a file is of, by its name unless it is given."""
    from shoal.training.predictions import Named, parse_name

    said = parse_name(path.name)
    if said is None and not (given.dataset and given.split):
        raise InputError(
            f"{str(path)!r} is not called such as fmow_split:test_seed:0_epoch:best_pred.csv; say --dataset "
            "and --split."
        )
    kind, which = (said.kind, said.which) if said else ("file", path.name)
    return Named(given.dataset or said.dataset, given.split or said.split, kind, which)  # type: ignore[union-attr]


def _options(named: Named, options: Mapping[str, Any]) -> dict[str, Any]:
    """The dataset's, with the fold that a file's name says."""
    from shoal.data import sets

    takes = inspect.signature(sets.registry.module(named.dataset).load).parameters
    fold = {"fold": named.which} if named.kind == "fold" and "fold" in takes else {}
    return {**fold, **options}


def _load(dataset: str, options: Mapping[str, Any]) -> DomainData:
    from shoal.data import sets

    return sets.load(dataset, **options)


def _text(found: Sequence[Mapping[str, Any]]) -> str:
    """The measures and then the groups of one split, over its files."""
    from shoal.report.runs import mean_and_deviation, number
    from shoal.report.tables import Table
    from shoal.training.metrics import why_missing

    each = [_which(f) for f in found] if len(found) > 1 else []
    summary = "mean ± sd" if each else "value"

    def row(table: Table, names: Sequence[str], cells: Sequence[float | None]) -> None:
        table.add(*names, mean_and_deviation(cells), *(map(number, cells) if each else ()))

    first = found[0]
    measures = Table(["measure", summary, *each])
    for name in first["metrics"]:
        row(measures, [name], [f["metrics"][name] for f in found])
    by_group = {first["metric"]: [f["domains"] for f in found]}
    by_group |= {name: [f["groups"][name] for f in found] for name in first["groups"]}
    groups = Table(["group", "examples", *(f"{n}, {summary}" if each else n for n in by_group)])
    names = list(first["domains"])
    for n, name in enumerate(names[:SHOWN]):
        cells = [mean_and_deviation([v.get(name) for v in values]) for values in by_group.values()]
        groups.add(name, f"{first['sizes'][n]:,}", *cells)
    more = len(names) - SHOWN
    rest = f"\n… {more:,} more groups (all of them with --json)" if more > 0 else ""
    rest += "".join(f"\n{why}" for f in found for why in why_missing(_which(f), f["metrics"]))
    files = f", {len(found)} files" if each else f", {_which(first)}"
    return f"{first['dataset']}, split {first['split']}{files}\n\n{measures.text()}\n\n{groups.text()}{rest}"


def _which(found: Mapping[str, Any]) -> str:
    return next((f"{kind} {found[kind]}" for kind in ("seed", "fold") if kind in found), found["file"])


def _summary(found: Sequence[Mapping[str, Any]], dataset: str, split: str) -> dict[str, Any]:
    """Over the files of a split; ``sd`` is that of a sample, with n − 1."""
    import statistics

    mine = [f["metrics"] for f in found if (f["dataset"], f["split"]) == (dataset, split)]
    measures = {}
    for name in mine[0]:
        known = [m[name] for m in mine if m[name] is not None]
        whole = len(known) == len(mine)
        measures[name] = {
            "mean": statistics.mean(known) if whole else None,
            "sd": statistics.stdev(known) if whole and len(known) > 1 else None,
        }
    return {"dataset": dataset, "split": split, "files": len(mine), "measures": measures}
