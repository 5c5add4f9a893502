"""`shoal sweep`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.arguments import (
    add_data,
    add_data_dir,
    add_device,
    add_model,
    count,
    data_options,
    executor_of,
    few,
    in_data_dir,
    make_folder,
    model_options,
    number,
    positive,
)
from shoal.cli.showing import show
from shoal.errors import InputError, check_names

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig

SUMMARY = "Compare algorithms on datasets by DomainBed's protocol."
EXAMPLE = (
    "Every domain is left out in turn; each trial splits the data anew and tries the default settings and "
    "random draws. Example: shoal sweep rotated-mnist --algorithms erm fish --seeds 3. "
    "The same command again does what is missing, failed runs included."
)
ENGINES = ("local", "ray")
TABLES = ("md", "tex", "csv", "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("datasets", nargs="*", metavar="DATA", help="see `shoal list datasets`")
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help="see `shoal list algorithms`")
    add_data(parser, "the datasets'")
    add_data_dir(parser)
    parser.add_argument("--seeds", type=few, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--search", type=few, default=20, metavar="K", help="draws, the defaults first (default: 20)"
    )
    parser.add_argument(
        "--rules",
        nargs="+",
        default=["training", "oracle"],
        metavar="RULE",
        help="how settings are chosen: training, leave-one-out (many more runs), oracle "
        "(default: training oracle)",
    )
    parser.add_argument("--steps", type=count, default=5001, help="(default: %(default)s)")
    parser.add_argument(
        "--eval-every", type=count, metavar="K", help="(default: 100, large images 300, DomainNet 1,000)"
    )
    add_model(parser, "each dataset's own")
    parser.add_argument("--precision", help="fp32, bf16 or fp16 (default: fp32)")
    parser.add_argument(
        "--domainbed", type=Path, metavar="DIR", help="tables of DomainBed's own sweep folder"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("shoal-sweep"), metavar="DIR", help="(default: %(default)s)"
    )
    parser.add_argument("--plan", action="store_true", help="only say how many runs there are")
    parser.add_argument("--no-run", action="store_true", help="only show the runs that are there")
    add_device(parser)
    parser.add_argument(
        "--jobs", type=few, metavar="P", help="runs side by side (default: one a core, or one a GPU)"
    )
    parser.add_argument(
        "--engine", choices=ENGINES, default="local", help="processes of this machine, or a Ray cluster"
    )
    parser.add_argument(
        "--address", help="Ray: 'auto', HOST:PORT or ray://HOST:PORT (default: one on this machine)"
    )
    parser.add_argument(
        "--gpus-per-run", type=number, metavar="G", help="Ray: such as 0.25 (default: 1, on the CPU 0)"
    )
    parser.add_argument("--cpus-per-run", type=positive, metavar="C", help="Ray: (default: 1)")


@in_data_dir
def run(given: Any) -> int:
    from shoal.experiments import selection
    from shoal.experiments.display import run_shown
    from shoal.experiments.execute import Outcome, Store

    check_names("rule", given.rules, selection.RULES)
    if given.domainbed:
        _theirs(given)
        return 0
    executor = executor_of(given)
    configs = planned(given)
    store = Store(given.out / "runs")
    missing = len({c.identity for c in store.missing(configs)})
    if given.plan:
        text = f"{len(configs):,} runs, of which {missing:,} are still to do."
        show({"runs": len(configs), "missing": missing}, text, given)
        return 0
    make_folder(given.out)
    outcome = Outcome(store.found(configs)) if given.no_run else run_shown(configs, store, executor)
    found = selection.sweep(configs, outcome.usable())
    troubles = [f"failed: {why} ({store.folder / i}.json)" for i, why in outcome.failed.items()]
    again = ["The same command does these again, from their last checkpoints."]
    finish(found, given, [*troubles[:9], *again, *troubles[9:]] if troubles else [])
    return int(bool(troubles))


def planned(given: Any) -> list[RunConfig]:
    from shoal.algorithms import registry as algorithms
    from shoal.data.sets import registry as datasets
    from shoal.experiments import protocol

    if not given.datasets or not given.algorithms:
        raise InputError("say which: shoal sweep rotated-mnist --algorithms erm fish.")
    for name in given.algorithms:
        algorithms.module(name.partition(":")[0])
    for name in given.datasets:
        datasets.module(name)
    options = data_options(given)
    return protocol.plan(
        dict.fromkeys(given.datasets, options),
        given.algorithms,
        trials=given.seeds,
        draws=given.search,
        pairs="leave-one-out" in given.rules,
        steps=given.steps,
        eval_every=given.eval_every,
        **model_options(given),
        precision=given.precision,
    )


def _theirs(given: Any) -> None:
    from shoal.experiments.domainbed import read

    found, troubles = read(given.domainbed)
    make_folder(given.out)
    finish(found, given, troubles)


def finish(found: Any, given: Any, troubles: list[str]) -> None:
    """Tables by every rule, shown and written down."""
    from shoal.experiments import selection
    from shoal.files import write_atomically
    from shoal.report import domainbed as view

    shown, content = [], {}
    for rule in given.rules:
        results = list(selection.every_result(found, rule))
        content[rule] = results
        tables = [view.dataset_table(r) for r in results]
        tables += [view.overall_table(results)] if len(results) > 1 else []
        lines = view.words(results)
        forms: dict[str, list[str]] = {
            "md": [t.markdown() for t in tables],
            "tex": [t.latex() for t in tables],
            "csv": [t.csv() for t in tables],
            "html": [t.html() for t in tables],
        }
        for ending in TABLES:
            text = "\n\n".join([*forms[ending], *(lines if ending == "md" else [])])
            write_atomically(given.out / f"sweep-{rule}.{ending}", f"{text}\n".encode())
        shown.append("\n\n".join([f"{rule}:", *(t.text() for t in tables), "\n".join(lines)]))
    write_atomically(given.out / "sweep.json", json.dumps(content).encode())
    names = ", ".join(f"sweep-{rule}.{{{','.join(TABLES)}}}" for rule in given.rules)
    text = "\n\n".join([*shown, *troubles[:10], f"Saved in {given.out}: {names}, sweep.json."])
    show({"rules": content, "troubles": troubles}, text, given)
