"""`shoal evaluate`."""

from __future__ import annotations

import argparse
import inspect
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import add_data_dir, add_options, in_data_dir, values
from shoal.cli.showing import show
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.data.batch import DomainData
    from shoal.training.predictions import Named

SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Each file contains one prediction per line, in the order of the examples of the split. Its name "
        "follows the pattern camelyon17_split:test_seed:0_epoch:best_pred.csv; `shoal train --predictions` "
        "writes such files. For several seeds or folds, means and standard deviations are shown."
    )
    parser.add_argument("predictions", nargs="+", type=Path, metavar="FILE", help="prediction files (.csv)")
    parser.add_argument("--dataset", metavar="NAME", help="name of the dataset (default: from the file name)")
    parser.add_argument(
        "--split", help="split, such as val, test, id_val or id_test (default: from the file name)"
    )
    add_options(parser, ("data_options",))
    add_data_dir(parser)


@in_data_dir
def run(args: Any) -> None:
    options = values(args.data, "--data")
    loaded: dict[str, DomainData] = {}
    results = [_evaluate(path, _named(path, args), options, loaded) for path in args.predictions]
    splits: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        splits.setdefault((result["dataset"], result["split"]), []).append(result)
    summary = [_summary(*split, files) for split, files in splits.items()]
    show({"files": results, "summary": summary}, "\n\n".join(map(_text, splits.values())), args)


def _evaluate(
    path: Path, named: Named, options: Mapping[str, Any], loaded: dict[str, DomainData]
) -> dict[str, Any]:
    """The scores of one file; ``loaded`` keeps the last dataset for the next file."""
    from shoal.data import sets
    from shoal.training import predictions

    takes = inspect.signature(sets.registry.module(named.dataset).load).parameters
    fold = {"fold": named.which} if named.kind == "fold" and "fold" in takes else {}
    own = {**fold, **options}
    if (key := repr((named.dataset, sorted(own.items())))) not in loaded:
        loaded.clear()
        loaded[key] = sets.load(named.dataset, **own)
    split, _ = predictions.split_of(loaded[key], named.split)
    predicted = predictions.read(path, loaded[key].classes)
    try:
        scores, others = predictions.evaluate(loaded[key], split, predicted)
    except InputError as error:
        raise InputError(f"{str(path)!r}: {error}") from error
    groups = {
        metric: {g: v if math.isfinite(v) else None for g, v in zip(scores.names, each.tolist(), strict=True)}
        for metric, each in others.items()
    }
    about = {"file": str(path), "dataset": named.dataset, "split": split, named.kind: named.which}
    return {**about, **scores.to_dict(), "groups": groups}


def _named(path: Path, args: Any) -> Named:
    """The dataset and split of a file, from its name unless they are options."""
    from shoal.training.predictions import Named, parse_name

    parsed = parse_name(path.name)
    if parsed is None:
        if not (args.dataset and args.split):
            raise InputError(
                f"{str(path)!r} does not follow the pattern fmow_split:test_seed:0_epoch:best_pred.csv; use "
                "--dataset and --split."
            )
        return Named(args.dataset, args.split, "file", path.name)
    return Named(args.dataset or parsed.dataset, args.split or parsed.split, parsed.kind, parsed.which)


def _text(files: Sequence[Mapping[str, Any]]) -> str:
    """The metrics and then the groups of one split, over its files."""
    from shoal.report.runs import mean_and_deviation, number
    from shoal.report.tables import Table
    from shoal.training.metrics import why_missing

    first, names = files[0], [_which(f) for f in files]
    several = len(files) > 1
    summary = "mean ± sd" if several else "value"
    metrics = Table(["measure", summary, *(names if several else ())])
    for name in first["metrics"]:
        cells = [f["metrics"][name] for f in files]
        metrics.add(name, mean_and_deviation(cells), *(map(number, cells) if several else ()))
    by_group = {first["metric"]: [f["domains"] for f in files]}
    by_group |= {name: [f["groups"][name] for f in files] for name in first["groups"]}
    groups = Table(["group", "examples", *(f"{n}, {summary}" if several else n for n in by_group)])
    for name, size in list(zip(first["domains"], first["sizes"], strict=False))[:SHOWN]:
        cells = [mean_and_deviation([v.get(name) for v in each]) for each in by_group.values()]
        groups.add(name, f"{size:,}", *cells)
    more = len(first["domains"]) - SHOWN
    rest = f"\n… {more:,} more groups (use --json for all)" if more > 0 else ""
    rest += "".join(f"\n{why}" for f in files for why in why_missing(_which(f), f["metrics"]))
    which = f"{len(files)} files" if several else names[0]
    title = f"{first['dataset']}, split {first['split']}, {which}"
    return f"{title}\n\n{metrics.text()}\n\n{groups.text()}{rest}"


def _which(result: Mapping[str, Any]) -> str:
    return next((f"{kind} {result[kind]}" for kind in ("seed", "fold") if kind in result), result["file"])


def _summary(dataset: str, split: str, files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over the files of a split; ``sd`` is that of a sample, with n − 1."""
    measures = {}
    for name in files[0]["metrics"]:
        known = [f["metrics"][name] for f in files if f["metrics"][name] is not None]
        whole = len(known) == len(files)
        measures[name] = {
            "mean": statistics.mean(known) if whole else None,
            "sd": statistics.stdev(known) if whole and len(known) > 1 else None,
        }
    return {"dataset": dataset, "split": split, "files": len(files), "measures": measures}
