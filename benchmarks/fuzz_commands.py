"""Command lines for fuzz.py, made from the command line's own parsers.

Each option's values follow from its type and choices, so that a new option is tried without being listed
here; the tables below only add what is valid for options that take text.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fuzz_world as world

# fmt: off
NETWORKS = (
    "erm", "fish", "coral", "dann", "irm", "mixup", "groupdro", "fishr", "mldg", "smoothfish", "sam", "vrex",
)
# fmt: on
BASELINES = ("majority", "logistic-regression", "ridge-regression", "gradient-boosting")
SETS: dict[str, list[str]] = {
    "linear": [],
    "coloured-digits": [],
    "rotated-digits": [],
    "cdsprites": ["--data", "domains=2", "size=32", "per_domain=20"],
}
"""Built-in datasets, as small as they come."""
QUERIES = (
    "test > 0.5",
    'algorithm == "fish"',
    "seed == 0 and steps < 10",
    "not (test > 0)",
    "steps == 4 or seed == 1",
)
VALID: dict[str, Sequence[str]] = {
    "optimizer": ("adam", "adamw", "sgd"),
    "schedule": ("cosine", "linear", "step:0.5:1"),
    "precision": ("fp32", "bf16"),
    "average": ("sma", "ema", "swad", "swad-paper"),
    "select": ("best", "last"),
    "metric": ("accuracy", "worst-group accuracy", "AUC", "mse", "macro F1"),
    "on_nan": ("stop", "skip"),
    "draw": ("domains", "pooled", "balanced", "regrouped", "one-domain"),
    "wise_ft": ("0.5", "validation"),
    "miro": ("0.1",),
    "warm_start": ("1", "2", "0.5", "plateau", "head", "head:2"),
    "task": ("classification", "regression"),
    "device": ("cpu",),
    "model": ("mlp", "linear", "small-cnn", "tabular"),
    "eval_splits": ("train", "validation", "test", "id_validation", "oracle"),
    "leave_out": ("oslo", "none", "kyoto"),
    "held_out": ("oslo", "kyoto"),
    "rules": ("training", "oracle", "leave-one-out"),
    "algorithms": ("erm", "fish", "coral"),
    "datasets": ("linear", "coloured-digits"),
    "title": ("A title", "<script>alert(1)</script>", world.ESCAPE, "ü"),
    "query": QUERIES,
    "sort": ("test", "seed", "algorithm"),
    "columns": ("algorithm", "seed", "test", "dataset"),
    "split": ("test", "validation", "train"),
    "dataset": ("linear", "heart"),
    "size": ("small", "32", "64"),
    "only": ("camelyon17", "poverty"),
    "networks": ("linear",),
    "parts": ("Adam",),
    "numbers": ("2", "3"),
    "names": ("erm", "fish"),
    "lr": ("0.01", "1e-3", "1"),
    "budget": ("1", "5"),
    "epochs": ("0.01",),
    "meta_lr": ("0.5", "1"),
    "clip": ("1", "0.1"),
    "seed": ("0", "1", "-1", "12345"),
    "workers": ("0",),
    "domains_per_step": ("2",),
    "jobs": ("1",),
    "data_dir": ("folder.csv",),
    "weights": ("weights.safetensors", "weights.pt"),
    "domainbed": ("folder.csv",),
    "from": ("runs/compared",),
    "address": ("127.0.0.1:1",),
    "mirror": ("folder.csv", "nowhere"),
    "sha256": ("0" * 64,),
}
AVOIDED = {"compile", "run_too", "all", "wandb", "engine"}
"""They compile for minutes, start clusters or run the paper's experiments."""
WORK = {
    "steps",
    "seeds",
    "search",
    "rounds",
    "passes",
    "examples",
    "samples",
    "numbers",
    "epochs",
}
"""So many are really done: a huge number is no error, and ends when time is up."""
KEPT = WORK | {"no_run", "plan", "jobs", "budget", "only", "mirror", "data"}
"""Without these a line would take minutes."""
OF_TABLES = {"task", "decimal", "day_first", "leave_out", "held_out"}
OF_NETWORKS = {
    "steps",
    "batch_size",
    "domains_per_step",
    "model",
    "model_set",
    "weights",
    "draw",
    "warm_start",
    "seeds",
    "optimizer",
    "lr",
} | {
    *(
        "schedule",
        "clip",
        "accumulate",
        "precision",
        "average",
        "average_start",
        "average_ratio",
        "average_decay",
        "wise_ft",
        "miro",
        "retrain",
        "select",
        "patience",
        "on_nan",
        "workers",
    ),
    *(
        "eval_every",
        "eval_splits",
        "predictions",
        "log_every",
        "track_every",
        "track_layers",
        "checkpoint_every",
        "keep",
    ),
    *("deterministic", "jobs", "metric", "head_lr", "layer_decay"),
}
HOLDS = {
    "numeric": ("age", "blood"),
    "boolean": ("smoker",),
    "date": ("day",),
    "categorical": ("ward", "smoker"),
    "text": ("note",),
    "drop": ("note", "day", "cost"),
    "id": ("age", "ward"),
    "group": ("ward", "day"),
    "column": ("note",),
    "label": ("ill",),
    "domain": ("hospital",),
}
"""What the columns of patients.csv can be taken as."""
PROCESSES = {"workers", "jobs"}
HELD = {
    **{name: {"out": "patients.csv"} for name in ("linear", "cost", "theorem", "demo")},
    "reproduce": {"no_run": "", "out": "patients.csv"},
}
"""Whole experiments: they are told to write into a file, or not to run, and only their errors are tried."""
OUT = {"out", "csv", "to", "all_out"}

HUGE = ("9" * 20, "1" + "0" * 30, str(2**63), str(2**64), "9" * 5000)
INTS = ("0", "-1", "1.5", "x", "", "1e1", "nan", "inf", "１", "1_0", "0x10", " 3 ", "-0", "+2", "--", "-")
# fmt: off
FLOATS = (
    "0", "-1", "nan", "inf", "-inf", "1e400", "1e-400", "0,5", "x", "", "1e308", "１.5", "1_0", "--", ".",
)
# fmt: on
# fmt: off
TEXTS = (
    "", " ", "x", "none", "None", "null", "a" * 300, "a" * 5000, "../missing", ".", "\x1b[31mred\x1b[0m",
    "ü", "\udcff", "a\nb", "%s %d {0} {x}", "$(id)", "'; --", "=1+1", "<script>", "\u202eabc", "-1", "--",
    "--out", "*", "nan", "cuda", "cuda:99", "meta", "mps", "xla", "cpu:7", "cpu:-1", "fp8", "step:x:y",
    "step:1:0", "step:-1:5", "step::", "step:0.5", "inf", "1e400", "0", "-5", "1e3", "true", "[1, 2]",
    "worst-group", "__class__", "a.b.c", "a=b", "=", "💥" * 50,
)
# fmt: on
# fmt: off
YAML = (
    "0,5", "x", "-1", "0", "1e400", "nan", ".nan", ".inf", "-.inf", "[1, 2]", "[]", "{a: b}", "{}", "null",
    "~", "true", "9" * 30, "1e308", "!!python/object/apply:os.system [id]", "[*a]", "&a [*a]", "", "=",
    "2020-01-01", "'", '"', "a" * 500, "[[[[[1]]]]]", "1:30", "0o7", "\x1b[31m", "2020-13-45", "|", "- a",
    "1_000", "0x10", "[" * 200, "[a, 1, null]", "1.5",
)
# fmt: on
NAMES = (
    *world.COLUMNS,
    "",
    "missing",
    " age ",
    "AGE",
    "=cmd|' /C calc'!A0",
    world.ESCAPE,
    "a" * 300,
    "ill,age",
    "0",
    "ü\u202e",
)
# fmt: off
OUTS = (
    "out", "out/deeper/still", "out.csv", "out.json", "out.html", "patients.csv/x", "", ".", "..", "a" * 300,
    "runs", *("\x1b[31mred", "ü\udcff", "runs/table", "/proc/x/y", "a\nb", "images", *world.OUTPUTS),
)
# fmt: on
# fmt: off
QUERIES_BAD = (
    "(", ")", "test >", "__import__('os').system('id')", "test.__class__", "1 / 0", "9 ** 9 ** 9", "'a' < 1",
    "test == 'x'", "lambda: 1", "[x for x in y]", "missing == 1", "seed in 3", "a and", "not",
    "(" * 300 + ")" * 300, "1 < 2 < 'a'", "-'a'", "seed = 1", "test > nan", "seed[0]", "{}", "{**x}",
    "f'{seed}'", "...", "test if seed else 1", "\x1b[31m", "ä > 1", "1e400",
)
# fmt: on


@dataclass
class Part:
    """An option with its values, or a positional argument."""

    action: argparse.Action | None
    values: list[str]
    flag: str = ""

    def words(self) -> list[str]:
        return [self.flag, *self.values] if self.flag else list(self.values)


@dataclass
class Line:
    command: tuple[str, ...]
    parts: list[Part]
    valid: bool
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """Positional arguments first: an option that takes several values would swallow them."""
        ordered = [p for p in self.parts if not p.flag] + [p for p in self.parts if p.flag]
        return [*self.command, *(word for part in ordered for word in part.words())]

    @property
    def long(self) -> bool:
        """Whether it may rightly work for ever."""
        work = [p for p in self.parts if p.action is not None and p.action.dest in WORK]
        return any(not v.isdecimal() or len(v) > 2 for p in work for v in p.values)

    def inputs(self) -> list[str]:
        """The words that name what a command reads."""
        return [v for p in self.parts if p.action is None or p.action.dest not in OUT for v in p.values]


@functools.cache
def commands() -> dict[tuple[str, ...], list[argparse.Action]]:
    """The actions of every command and subcommand, with those of the commands above it."""
    found: dict[tuple[str, ...], list[argparse.Action]] = {}

    def walk(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> None:
        below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        own = [
            a
            for a in parser._actions
            if not isinstance(a, (argparse._HelpAction, argparse._SubParsersAction))
        ]
        if path:
            found[path] = own
        for group in below:
            for name, one in group.choices.items():
                walk(one, (*path, name))

    walk(world.parser(), ())
    return found


def line(draw: random.Random, path: tuple[str, ...] | None = None) -> Line:
    """One command line: every second valid in each part, the others with one or two parts broken."""
    if path is None:
        weights = [_weight(path) for path in commands()]
        path = draw.choices(list(commands()), weights)[0]
    made = _valid(path, draw)
    for _ in range(draw.choice((0, 0, 0, 1, 1, 2))):
        _break(made, draw)
        made.valid = False
    for dest, value in HELD.get(path[0], HELD.get(path[-1], {})).items():
        made.parts += [
            Part(a, [value] * (a.nargs != 0), a.option_strings[-1])
            for a in commands()[path]
            if a.dest == dest
        ]
    return made


def _weight(path: tuple[str, ...]) -> float:
    return {
        "train": 9.0,
        "compare": 3,
        "predict": 5,
        "score": 4,
        "resume": 3,
        "results": 3,
        "diagnose": 1.5,
    }.get(
        path[0],
        0.1
        if path[0] in ("reproduce", "demo")
        else 0.5
        if path[0] in ("track", "sweep") or path == ("data",)
        else 1.5,
    )


def _valid(path: tuple[str, ...], draw: random.Random) -> Line:
    actions = commands()[path]
    context: dict[str, Any] = {"command": path[0]}
    recipe = RECIPES.get(path, RECIPES.get(path[:1], lambda draw, context: {}))
    wanted = recipe(draw, context)
    parts = []
    for action in actions:
        if action.dest in wanted:
            values = wanted[action.dest]
            values = [values] if isinstance(values, str) else list(values)
        elif action.option_strings and action.dest not in AVOIDED | OUT and draw.random() < _share(action):
            found = _value(action, draw, context)
            if found is None:
                continue
            values = found
        else:
            continue
        flag = draw.choice(action.option_strings) if action.option_strings else ""
        parts.append(Part(action, values, flag))
    return Line(path, parts, True, context)


def _share(action: argparse.Action) -> float:
    return 0.25 if action.dest == "json" else 0.05


def _value(action: argparse.Action, draw: random.Random, context: dict[str, Any]) -> list[str] | None:
    """Values that the option takes; ``None`` where nothing says what these are."""
    if action.nargs == 0:
        return []
    several = draw.randint(1, 2) if action.nargs in ("+", "*") else 1
    if action.metavar == "NAME=VALUE":
        pairs = _settings(action.dest, context)
        return [f"{name}={value}" for name, value in draw.sample(pairs, min(several, len(pairs)))] or None
    if action.metavar == "COLUMN":
        fitting = context.get("columns", {}).get(action.dest, ())
        return draw.sample(fitting, min(several, len(fitting))) or None
    if action.dest in OF_NETWORKS and context.get("algorithm") in BASELINES:
        return None
    if (action.dest in OF_TABLES and context.get("data") != "table") or (
        action.dest == "bad_images" and context.get("data") == "table"
    ):
        return None
    if action.choices:
        return [str(draw.choice(list(action.choices))) for _ in range(several)]
    if action.dest in VALID:
        known = VALID[action.dest]
        return draw.sample(known, min(several, len(known)))
    kind = _kind(action)
    if kind is int:
        return [draw.choice(("1", "2", "3")) for _ in range(several)]
    return [draw.choice(("0.1", "1", "0.5"))] if kind is float else None


def _kind(action: argparse.Action) -> type:
    """What the option's type makes of text that is a number."""
    if action.type is None:
        return str
    for text in ("2", "0.5"):
        with contextlib.suppress(Exception):
            return type(action.type(text))  # type: ignore[operator]
    return str


@functools.cache
def _defaults(kind: str, name: str) -> list[tuple[str, Any]]:
    """The settings of an algorithm, or the options of a dataset or model, with their defaults."""
    from shoal import models
    from shoal.algorithms import algorithm_class, registry, settings_of
    from shoal.data import sets

    try:
        if kind == "set":
            return sorted(settings_of(algorithm_class(name)).items()) if name in registry.names() else []
        if kind == "model_set":
            every: Any = inspect.signature(models.registry.module(name or "mlp").build).parameters
        else:
            every = inspect.signature(sets.registry.module(name).load).parameters
    except ValueError:
        return []
    return [(p.name, p.default) for p in every.values() if p.default is not inspect.Parameter.empty]


def _settings(dest: str, context: dict[str, Any]) -> list[tuple[str, Any]]:
    name = {"set": "algorithm", "model_set": "model"}.get(dest, "data")
    found = _defaults(dest, context.get(name, ""))
    return [(n, "null" if v is None else str(v).lower() if isinstance(v, bool) else v) for n, v in found]


def _break(made: Line, draw: random.Random) -> None:
    """Breaks one part, or adds one that is broken."""
    how = draw.choices(
        ("value", "option", "drop", "input", "unknown", "twice", "stray", "bare"),
        (6, 6, 1, 4, 0.5, 1, 0.5, 0.5),
    )[0]
    parts, actions = made.parts, commands()[made.command]
    with_values = [p for p in parts if p.values and p.action is not None]
    if how == "value" and with_values:
        part = draw.choice(with_values)
        part.values[draw.randrange(len(part.values))] = _nasty(part.action, draw, made.context)
    elif how == "drop" and (small := [p for p in parts if p.action is None or p.action.dest not in KEPT]):
        parts.remove(draw.choice(small))
    elif how == "input" and (files := [p for p in with_values if _reads(p.action)]):
        part = draw.choice(files)
        part.values[draw.randrange(len(part.values))] = _anything(draw)
    elif how == "twice" and with_values:
        part = draw.choice(with_values)
        parts.append(Part(part.action, [_nasty(part.action, draw, made.context)], part.flag))
    elif how == "unknown":
        parts.append(
            Part(
                None, [draw.choice(TEXTS)], draw.choice(("--nonsense", "--", "-x", "--da", "--s", "--\x1b["))
            )
        )
    elif how == "stray":
        parts.append(Part(None, [draw.choice(TEXTS)]))
    elif how == "bare" and with_values:
        draw.choice(with_values).values.clear()
    else:
        options = [a for a in actions if a.option_strings and a.nargs != 0 and a.dest not in AVOIDED]
        if options:
            action = draw.choice(options)
            values = [_nasty(action, draw, made.context)]
            parts.append(Part(action, values, draw.choice(action.option_strings)))


def _reads(action: argparse.Action | None) -> bool:
    return action is not None and action.dest in (
        "dataset",
        "data",
        "model",
        "folder",
        "runs",
        "predictions",
        "weights",
    )


def _anything(draw: random.Random) -> str:
    runs = [f"runs/{name}" for name in world.RUNS]
    inside = [
        f"runs/{n}/{f}"
        for n in ("table", "stopped")
        for f in ("record.json", "config.yaml", "model.safetensors")
    ]
    names = [
        *world.TABLES,
        *world.BAD_TABLES,
        *world.SPECIAL,
        *world.IMAGES,
        *world.ARRAYS,
        *world.PREDICTIONS,
    ]
    return draw.choice(
        [
            *names,
            *runs,
            *inside,
            "runs",
            ".",
            "",
            "missing",
            "missing.csv",
            "a" * 300,
            "a" * 300 + ".csv",
            *TEXTS,
        ]
    )


def _nasty(action: argparse.Action | None, draw: random.Random, context: dict[str, Any]) -> str:
    assert action is not None
    if action.dest in OUT:
        return draw.choice(OUTS)
    if action.metavar == "NAME=VALUE":
        pairs = _settings(action.dest, context)
        name = draw.choice(
            [*(n for n, _ in pairs), *(n for n, _ in pairs), "nonsense", "", "__class__", "test", "file"]
        )
        return draw.choice(
            (
                f"{name}={draw.choice(YAML)}",
                f"{name}={draw.choice(YAML)}",
                f"{name}={draw.choice(TEXTS)}",
                name,
            )
        )
    if action.metavar == "COLUMN":
        return draw.choice(NAMES)
    if action.dest == "query":
        return draw.choice(QUERIES_BAD)
    if _reads(action):
        return _anything(draw)
    kind = _kind(action)
    if kind is int:
        pool = (*INTS, *HUGE) if action.dest not in PROCESSES else INTS
        return draw.choice(pool)
    if kind is float:
        return draw.choice((*FLOATS, "9" * 400))
    if issubclass(kind, Path):
        return _anything(draw)
    return draw.choice((*TEXTS, *YAML, *(str(c) + "x" for c in action.choices or ())))


# What makes a command valid: the arguments it cannot do without, small enough to end soon

Wanted = dict[str, Any]


def _table(draw: random.Random, context: dict[str, Any]) -> Wanted:
    name = draw.choices(world.TABLES, (6, 2, 2, 1, 1, 1))[0]
    context["data"] = "table"
    context["columns"] = HOLDS if name.startswith("patients") else {}
    return {"dataset": name, "label": "cost" if name == "numbers.csv" else "ill", "domain": "hospital"}


def _data(draw: random.Random, context: dict[str, Any]) -> Wanted:
    what = draw.choices(("table", "images", "set"), (6, 1, 2))[0]
    if what == "table":
        return _table(draw, context)
    if what == "images":
        context["data"] = "image-folder"
        return {"dataset": "images", "data": ["size=32"]}
    context["data"] = name = draw.choice(list(SETS))
    return {"dataset": name, **({"data": SETS[name][1:]} if SETS[name] else {})}


def _train(draw: random.Random, context: dict[str, Any]) -> Wanted:
    if draw.random() < 0.15:
        context["algorithm"] = name = draw.choice(BASELINES)
        return {"algorithm": name, **_table(draw, context), "out": "out"}
    context["algorithm"] = name = draw.choice(NETWORKS)
    wanted = {
        "algorithm": name,
        **_data(draw, context),
        "steps": draw.choice("1234"),
        "batch_size": draw.choice("2458"),
    }
    wanted |= {"device": "cpu"} | ({"out": "out"} if draw.random() < 0.8 else {})
    return wanted | ({"seeds": "2", "jobs": "1"} if draw.random() < 0.05 else {})


def _compare(draw: random.Random, context: dict[str, Any]) -> Wanted:
    how = draw.random()
    data = _data(draw, context) if how < 0.6 else _table(draw, context)
    wanted: Wanted = {**data, "algorithms": draw.sample(("erm", "fish", "irm", "vrex"), 2), "out": "out"}
    wanted |= {"seeds": "1", "search": "1", "steps": "2", "batch_size": "4", "jobs": "1", "device": "cpu"}
    return wanted | (
        {"plan": []} if how < 0.6 else {"no_run": [], "out": "runs/compared"} if how < 0.8 else {}
    )


def _diagnose(draw: random.Random, context: dict[str, Any]) -> Wanted:
    return {
        **_table(draw, context),
        "steps": "1",
        "examples": "24",
        "budget": "2",
        "out": "out",
        "device": "cpu",
    }


def _run(draw: random.Random, *names: str) -> str:
    return f"runs/{draw.choice(names or ('table', 'number', 'image', 'baseline', 'stopped', 'seeds'))}"


def _predict(draw: random.Random, context: dict[str, Any]) -> Wanted:
    pairs = [("table", "same.csv"), ("number", "numbers.csv"), ("image", "images"), ("fit", "array.npy")]
    pairs += [("baseline", "same.csv"), ("image", "one.png"), ("seeds/seed-0", "patients.csv")]
    pairs += [
        ("table", name)
        for name in ("patients.tsv", "patients.parquet", "patients.csv.gz", "bom.csv", "patients.xlsx")
    ]
    name, data = draw.choice(pairs)
    context["columns"] = HOLDS if name in ("table", "baseline", "seeds/seed-0") else {}
    return {
        "model": f"runs/{name}",
        "data": [data],
        "device": "cpu",
        **({"out": "out.csv"} if draw.random() < 0.5 else {}),
    }


def _score(draw: random.Random, context: dict[str, Any]) -> Wanted:
    wanted = _predict(draw, context)
    return {**wanted, "data": wanted["data"][0], **({"out": "out.json"} if "out" in wanted else {})}


def _sweep(draw: random.Random, context: dict[str, Any]) -> Wanted:
    wanted: Wanted = {"datasets": ["linear"], "algorithms": ["erm", "fish"], "seeds": "1", "search": "1"}
    wanted |= {"steps": "1", "jobs": "1", "device": "cpu", "out": "out"}
    how = draw.random()
    return wanted | ({"plan": []} if how < 0.6 else {"no_run": [], "out": "runs/swept"} if how < 0.95 else {})


def _track(draw: random.Random, context: dict[str, Any]) -> Wanted:
    context["data"] = name = draw.choice(("linear", "cdsprites"))
    data = {"data": SETS[name][1:]} if SETS[name] else {}
    small = {
        "seeds": "1",
        "steps": "1",
        "batch_size": "4",
        "domains_per_step": "2",
        "jobs": "1",
        "device": "cpu",
        "out": "out",
    }
    return {"dataset": name, **data, **small, **({"no_run": []} if draw.random() < 0.5 else {})}


def _check(draw: random.Random, context: dict[str, Any]) -> Wanted:
    if draw.random() < 0.3:
        return {"folder": "images", "workers": "1"}
    wanted = _table(draw, context)
    return {"folder": wanted["dataset"], **({"label": wanted["label"]} if draw.random() < 0.5 else {})}


def _results(draw: random.Random, context: dict[str, Any]) -> Wanted:
    wanted: Wanted = {"folder": draw.choice((_run(draw), "runs", "runs/compared"))}
    wanted |= {"query": draw.choice(QUERIES)} if draw.random() < 0.4 else {}
    wanted |= {"columns": draw.sample(VALID["columns"], 2)} if draw.random() < 0.3 else {}
    return wanted | ({"group": ["algorithm"]} if draw.random() < 0.3 else {})


RECIPES: dict[tuple[str, ...], Callable[[random.Random, dict[str, Any]], Wanted]] = {
    ("train",): _train,
    ("compare",): _compare,
    ("diagnose",): _diagnose,
    ("predict",): _predict,
    ("score",): _score,
    ("sweep",): _sweep,
    ("track",): _track,
    ("results",): _results,
    ("resume",): lambda draw, context: {"folder": _run(draw), "device": "cpu", "jobs": "1"},
    ("show",): lambda draw, context: {"folder": draw.choice((_run(draw), "runs", "runs/compared"))},
    ("export",): lambda draw, context: {
        **{
            "model": _run(draw, "table", "number", "image", "fit"),
            "format": draw.choice(("safetensors", "safetensors", "torch-export")),
            "out": "out",
        }
    },
    ("soup",): lambda draw, context: {"runs": [_run(draw), _run(draw)], "out": "out", "device": "cpu"},
    ("report",): lambda draw, context: {
        "runs": [draw.choice((_run(draw), "runs", "runs/compared"))],
        "out": "out.html",
    },
    ("completion",): lambda draw, context: {"shell": draw.choice(("bash", "zsh", "fish"))},
    ("list",): lambda draw, context: {"what": draw.choice(("algorithms", "datasets")), "names": []},
    ("evaluate",): lambda draw, context: {"predictions": [world.PREDICTIONS[0]]},
    ("data", "check"): _check,
    ("data", "example"): lambda draw, context: {"what": draw.choice(("table", "images")), "out": "out"},
    ("data", "get"): lambda draw, context: {
        "names": [draw.choice(("heart", "pacs"))],
        "to": "out",
        "mirror": "folder.csv",
        "plan": [],
    },
}


def needed(words: Sequence[str], root: Path) -> list[str]:
    """The things of the world that a line names; run folders come with the data that they were trained on."""
    names = [entry.name for entry in root.iterdir() if entry.name not in ("runs", "modules")]
    found = {name for name in names if any(name in word for word in words)}
    for word in words:
        if word.startswith("runs") or word in (".", ".."):
            below = word.split("/")[1:2]
            found |= {f"runs/{n}" for n in (below if below and below[0] in world.RUNS else world.RUNS)}
            found |= {"patients.csv", "numbers.csv", "images"}
    if "link.csv" in found:
        found.add("patients.csv")
    return sorted(found)
