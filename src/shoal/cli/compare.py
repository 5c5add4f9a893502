"""`shoal compare`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from shoal.cli.arguments import (
    OPTIMIZERS,
    PRECISIONS,
    add_model,
    add_rate,
    add_running,
    add_source,
    count,
    few,
    given_table,
    in_data_dir,
    make_folder,
    model_options,
    show_chosen,
    show_columns,
    source,
    warnings_in_words,
)
from shoal.cli.showing import draw, show
from shoal.errors import InputError, check_names

if TYPE_CHECKING:
    from shoal.experiments.compare import Layout
    from shoal.experiments.config import RunConfig
    from shoal.experiments.store import Store

SUMMARY = "Find out which algorithm works in a held-out domain."
EXAMPLE = (
    "Every domain is held out in turn. Every algorithm gets the same random search, its defaults first, "
    "of which each seed takes the best on validation examples of the training domains; on data of your own "
    "each seed draws another validation split, the same for all. On rows of numbers, scikit-learn's gradient "
    "boosting and a linear model take part in the same way. Recommended is the simplest row within one "
    "standard error of the best. "
    "Examples: shoal compare patients.csv --label ill --domain hospital; "
    "shoal compare rotated-digits --algorithms erm fish idgm --seeds 5. "
    "The same command again resumes a comparison that was stopped, and shows one that is finished."
)


USUAL = {"steps": 1000, "batch": 32}
"""Unless the dataset's module suggests others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    add_source(parser)
    parser.add_argument(
        "--algorithms",
        nargs="+",
        metavar="NAME",
        help="which, or all (default: all, for data of your own a few and controls); "
        "fish:regrouped is the control of Fish with random grouping",
    )
    parser.add_argument(
        "--no-baselines", action="store_true", help="without gradient boosting and the other baselines"
    )
    parser.add_argument(
        "--held-out",
        nargs="+",
        action="extend",
        default=[],
        metavar="DOMAIN",
        help="domains to hold out, one at a time (default: each that can be scored, or the dataset's own "
        "test domain); a name with a dash in front needs an equals sign: --held-out=-90%%",
    )
    parser.add_argument(
        "--criterion",
        choices=("mean", "worst"),
        default="mean",
        help="rank and recommend by the average over held-out domains or by the worst one (default: mean)",
    )
    parser.add_argument("--seeds", type=few, default=3, metavar="N", help="seeds 0 to N−1 (default: 3)")
    parser.add_argument(
        "--search",
        type=few,
        default=3,
        metavar="K",
        help="hyperparameter trials per row and seed: the defaults, then random search (default: 3)",
    )
    _add_training(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="(default: shoal-compare, with a folder in it for each file or folder of yours)",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="write the plan of runs and stop; later commands with this --out must match it",
    )
    parser.add_argument(
        "--no-run", action="store_true", help="show the results of finished runs and run nothing"
    )
    add_running(parser)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("every run")
    usual = ", ".join(f"{name} {value}" for name, value in USUAL.items())
    group.description = f"Defaults are {usual}; for a table both go by its size."
    group.add_argument("--steps", type=count, help="meta-steps")
    group.add_argument("--batch-size", type=count, help="examples per batch")
    group.add_argument(
        "--domains-per-step", type=count, metavar="S", help="domains per step (default: all up to 16, else 5)"
    )
    add_model(group, "the dataset's own")
    group.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="(default: %(default)s)")
    add_rate(group)
    group.add_argument(
        "--metric",
        help='selects on validation and is compared: AUC, "macro F1" … (default: the dataset\'s own)',
    )
    group.add_argument("--eval-every", type=count, metavar="K", help="steps (default: a tenth of all)")
    group.add_argument(
        "--eval-limit", type=count, metavar="N", help="score about N examples of a split (default: all)"
    )
    group.add_argument("--precision", choices=PRECISIONS, help="(default: fp32)")


@in_data_dir
def run(given: Any) -> int:
    from shoal.training.processes import together

    if together():
        raise InputError("compare runs whole trainings in parallel; start it without torchrun.")
    with warnings_in_words():
        return _run(given)


def _run(given: Any) -> int:
    from shoal.experiments.store import Store
    from shoal.files import check_output

    configs, notes = planned(given)
    dataset = configs[0].dataset
    given.out = given.out or _folder(given, dataset)
    plan = given.out / f"{dataset}.plan.json"
    check_plan(plan, configs)
    store = Store(given.out / "runs")
    make_folder(given.out, given.dataset)
    check_output(given.out / f"compare-{dataset}.csv", [given.dataset])
    try:
        if not given.plan and not given.no_run and store.missing(configs):
            show_columns(given, given.out)
        return _work(configs, notes, plan, store, given)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        kept = "Finished runs are kept; the same command goes on from there."
        raise InputError(f"{str(given.out)!r}: {error.strerror or error}. {kept}") from error


def _work(
    configs: Sequence[RunConfig], notes: dict[str, dict[str, str]], plan: Path, store: Store, given: Any
) -> int:
    """Writes the plan, or runs it and shows what came out."""
    if given.plan:
        write_plan(plan, configs, store, given)
        return 0
    failed: dict[str, str] = {}
    if not given.no_run:
        for name, why in notes["unable"].items():
            print(f"{name} is not compared: {why}.", file=sys.stderr)
        if store.missing(configs):
            print(_counted(configs, store, given), file=sys.stderr, flush=True)
        failed = run_each(configs, store, given)
    finish(configs, store, {**notes, "failed": failed}, given)
    return int(bool(failed))


def _is_own(given: Any, dataset: str) -> bool:
    """Whether a file or folder was given, and not a dataset's name."""
    return bool(dataset != given.dataset.lower().replace("_", "-"))


def _folder(given: Any, dataset: str) -> Path:
    """Of a dataset the folder of all; a file or folder of the user's has its own in it."""
    out = Path("shoal-compare")
    return out / (Path(given.dataset).resolve().stem or "data") if _is_own(given, dataset) else out


def planned(given: Any) -> tuple[list[RunConfig], dict[str, dict[str, str]]]:
    """Every run there will be, and with their reasons the rows that are ``unable`` to take part, the
    domains that are ``excluded`` from being held out, and those held out whose score says little."""
    from shoal.algorithms import registry
    from shoal.data import sets
    from shoal.data.sampler import Draw
    from shoal.experiments import baselines, compare
    from shoal.experiments.config import RunConfig
    from shoal.experiments.search import with_rate

    asked = given.algorithms or []
    check_names("draw", [how for n in asked if (how := compare.parted(n)[1])], get_args(Draw))
    named([n for n in asked if n != "all"], registry)
    dataset, options = source(given)
    (dataset,) = named([dataset], sets.registry)
    where = compare.layout(dataset, options, given.held_out, given.metric)
    _check_domains(given.domains_per_step, where)
    usual = {**USUAL, **where.usual}
    asked = asked or usual["algorithms"]
    everyone, chosen = "all" in asked, [n for n in asked if n != "all"]
    algorithms = list(dict.fromkeys([*(registry.names() if everyone else []), *named(chosen, registry)]))
    steps = given.steps or usual["steps"]
    base = RunConfig(
        dataset=dataset,
        algorithm=compare.parted(algorithms[0])[0],
        steps=steps,
        data_options=options,
        **model_options(given),
        optimizer=given.optimizer,
        batch_size=given.batch_size or usual["batch"],
        domains_per_step=given.domains_per_step,
        eval_every=given.eval_every or max(1, steps // 10),
        eval_limit=given.eval_limit,
        precision=given.precision,
        holdout=where.holdout,
        metric=given.metric,
    )
    base, given.chosen = with_rate(base, given.lr, given.schedule)
    unable = compare.unable(algorithms, where)
    able = [name for name in algorithms if name not in unable]
    configs = compare.plan(base, able, where.left_out, range(given.seeds), given.search)
    refused = compare.refused(configs, given.device)
    if refused and (not everyone or len(refused) == len(able)):
        raise next(iter(refused.values()))
    unable |= {name: str(why).rstrip(".") for name, why in refused.items()}
    if not (configs := [c for c in configs if c.name not in unable]):
        raise InputError("; ".join(f"{name} {why}" for name, why in unable.items()) + ": nothing to compare.")
    show_chosen(given)
    for line in [*where.said, *compare.try_each(configs, given.device)]:
        print(f"{line[:1].upper()}{line[1:]}.", file=sys.stderr)
    if where.flat and not given.no_baselines:
        if why := baselines.lacking():
            unable |= {n: why for n in baselines.names(where.classes) if n != compare.MAJORITY}
        seeds = range(given.seeds)
        found = compare.plan_baselines(base, where.classes, where.left_out, seeds, given.search)
        configs += [c for c in found if c.name not in unable]
    return configs, {"unable": unable, "excluded": dict(where.excluded), "warned": dict(where.warned)}


def named(given: Sequence[str], registry: Any) -> list[str]:
    """Names as the registry spells them, each once; a wrong one is refused."""
    for name in given:
        registry.module(name.partition(":")[0])
    return list(dict.fromkeys(name.lower().replace("_", "-") for name in given))


def _check_domains(each_step: int | None, where: Layout) -> None:
    if each_step is not None and each_step > where.domains:
        raise InputError(f"--domains-per-step {each_step}, but there are {where.domains} to train on.")


def check_plan(path: Path, configs: Sequence[RunConfig]) -> None:
    """Refuses other runs than those of a plan that was written before."""
    from shoal.files import read_json

    if not path.exists():
        return
    try:
        runs = read_json(path)
        if not isinstance(runs, list):
            raise TypeError("it holds no list")
        before = {run["identity"] for run in runs}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{str(path)!r} is not a plan ({error}); move it away.") from error
    now = {config.identity for config in configs}
    if before != now:
        raise InputError(
            f"{str(path)!r} holds another plan: {len(now - before)} of these {len(now)} runs are not in it, "
            f"and {len(before - now)} of its {len(before)} are not among these. "
            "Give the options it was written with, another --out, or remove it."
        )


def write_plan(path: Path, configs: Sequence[RunConfig], store: Store, given: Any) -> None:
    from shoal.files import dump_json, write_atomically

    content = [{"identity": c.identity, "config": c.to_dict()} for c in configs]
    write_atomically(path, dump_json(content))
    text = f"{_counted(configs, store, given)} Written to {path}."
    show({"plan": str(path), "runs": len(configs)}, text, given)


def _counted(configs: Sequence[RunConfig], store: Store, given: Any) -> str:
    """How many runs there are, of what, and how many are not there yet."""
    rows = len({c.name for c in configs})
    domains = len({c.data_options.get("test") for c in configs})
    return (
        f"{_many(len(configs), 'run')}: {_many(rows, 'row')}, {_many(domains, 'held-out domain')}, "
        f"{_many(given.seeds, 'seed')}, {_many(given.search, 'hyperparameter trial')} each; "
        f"{len(store.missing(configs)):,} still to do."
    )


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def run_each(configs: Sequence[RunConfig], store: Store, given: Any) -> dict[str, str]:
    """Runs what is missing; returns the rows in which a run failed, and how."""
    from shoal.experiments.display import run_shown
    from shoal.experiments.execute import make_executor

    failed = run_shown(configs, store, make_executor(device=given.device, jobs=given.jobs)).failed
    return {c.name: failed[c.identity] for c in configs if c.identity in failed}


def finish(configs: Sequence[RunConfig], store: Store, more: dict[str, Any], given: Any) -> None:
    """Writes the results down and shows them."""
    from shoal.experiments import compare
    from shoal.files import dump_json, write_atomically
    from shoal.report import compare as view

    result = compare.results(configs, store.found(configs), criterion=given.criterion) | more
    result["identities"] = sorted({c.identity for c in configs})
    own = _is_own(given, configs[0].dataset)
    if own:
        result["title"] = Path(given.dataset).name
    name = f"compare-{configs[0].dataset}"
    contents = {
        "md": view.markdown(result),
        "csv": view.as_csv(result),
        "json": dump_json(result).decode(),
    }
    for ending, content in contents.items():
        write_atomically(given.out / f"{name}.{ending}", content.encode(errors="backslashreplace"))
    pictures = draw(lambda: view.figure(result), given.out / name)
    written = ", ".join(f"{name}.{ending}" for ending in contents)
    text = f"{view.text(result)}\n\nSaved in {given.out}: {written}."
    if own:
        text += f"\n{_page(given.out, result['identities'])}{_next(configs, result, given)}"
    show(result, text, given, pictures)


def _page(out: Path, runs: Sequence[str]) -> str:
    """What is said of the report of these runs, which is made if it can be.

    Others may lie in the folder, such as those of the file before it was changed.
    """
    from shoal.cli import report

    try:
        return f"A page to open or send: {report.write([out], out / 'report.html', only=runs)['report']}."
    except InputError as error:
        return f"No page was made: {error}"


def _next(configs: Sequence[RunConfig], result: dict[str, Any], given: Any) -> str:
    """Commands that train the recommended row on every domain, then predict, score and export."""
    from shoal.experiments.compare import usual_settings
    from shoal.trained import train_command

    about = result["recommendation"] or {}
    if not about.get("majority", {"better": True})["better"]:  # then nothing is recommended
        return ""
    take = about.get("take") or about.get("begin")
    if (chosen := usual_settings(configs, result["trials"], take)) is None:
        return ""
    config, times, trials = chosen
    data = {k: v for k, v in config.data_options.items() if k not in ("test", "seed")}
    whole = replace(config, data_options=data, seed=0, holdout=None, select="best")
    command = train_command(replace(whole, data_options={}))
    given_data = [*given_table(given), *(["--data", *given.data] if given.data else [])]
    given_data += ["--bad-images", given.bad_images] if given.bad_images else []
    given_data += ["--data-dir", str(given.data_dir)] if given.data_dir else []
    old = ["shoal", "train", config.algorithm, config.dataset]
    words = shlex.split(command.splitlines()[0])[len(old) :]
    words = [*old[:-1], given.dataset, *given_data, "--held-out", "none", *words]
    folder = words[-1] = f"runs/{config.algorithm}-{whole.identity[:8]}"  # another file has another folder
    kind = Path(given.dataset).suffix if Path(given.dataset).is_file() else ""
    lines = [shlex.join(words), shlex.join(["shoal", "predict", folder, f"NEW{kind}"])]
    lines += [shlex.join(["shoal", "score", folder, f"LABELLED{kind}"])]
    lines += [shlex.join(["shoal", "export", folder])]
    how = f"with the hyperparameters chosen in {times} of {_many(trials, 'split')}"
    said = f"To train {take} on every domain, {how}, then to predict, score and export:"
    return "\n" + "\n  ".join([said, *lines])
