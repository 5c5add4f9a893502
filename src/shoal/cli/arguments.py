"""Reading what was typed."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from shoal.api.source import OF_TABLE, TABLE, Source, datasets_in, find_source
from shoal.api.source import make_folder as make_folder
from shoal.api.train import EXECUTION, train
from shoal.api.train import model_options as checked_options
from shoal.errors import InputError, TableWarning, nearest, unknown_name
from shoal.files import finite
from shoal.settings import Count, Few, Range, Rate, Seed, Setting, coerce, plain_number, settings, shown

Result = TypeVar("Result")

SCHEMA = 1
"""Of what --json prints."""
KINDS = ("numeric", "boolean", "date", "categorical", "text")
_SHOWN: set[str] = set()
"""What is printed as a report, so that it is not said as warnings too."""
OPTIMIZERS = ("adam", "adamw", "sgd")
"""Named here too, for what knows them imports torch."""
TOLD = ("label", "domain", "group", "task", "decimal", "drop")
OF_COLUMNS = ("drop", "kinds", "decimal", "day_first")
FLAGS = {"data_options": "--data", "settings": "--set", "model_options": "--model-set"}
"""Options that public functions take as mappings under another name."""
PYTHON_NAMES = {
    "algorithm": "ALGORITHM",
    "data": "DATA",
    "data_options": "--data",
    "model_options": "--model-set",
    "settings": "--set",
}
"""What the public functions call otherwise than the command line."""
METAVARS = {
    **dict.fromkeys(("label", "domain", "group", "drop"), "COLUMN"),
    **dict.fromkeys(("out", "data_dir"), "DIR"),
    **{"weights": "FILE", "held_out": "DOMAIN", "eval_splits": "SPLIT", "wandb": "PROJECT"},
    **{"clip": "NORM", "average_start": "STEP", "domains_per_step": "S", "jobs": "J", "warm_start": "W"},
    **{
        "budget": "MINUTES",
        "gpus_per_run": "G",
        "cpus_per_run": "C",
        "average_ratio": "RATIO",
        "average_decay": "D",
        "wise_ft": "ALPHA",
        "miro": "WEIGHT",
        "l2_sp": "ALPHA",
        "l2_sp_head": "BETA",
        "head_lr": "LR",
        "layer_decay": "D",
    },
}


class Parser(argparse.ArgumentParser):
    """Options in full, none of them empty; errors in one or two lines, with the nearest name there is."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **more})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = super().parse_known_args(args, namespace)
        if rest and not subcommands(self):
            option = rest[0].partition("=")[0] if rest[0][:1] == "-" else None
            near = nearest(option, self._option_string_actions) if option else None
            self.error(f"unknown argument {shown(rest[0])}." + (f" Did you mean {near}?" if near else ""))
        return parsed, rest

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        if not text and action.nargs in (None, "?"):
            raise argparse.ArgumentError(action, "is empty.")
        return super()._get_value(action, text)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            if isinstance(action, argparse._SubParsersAction):
                raise argparse.ArgumentError(None, str(unknown_name("command", value, known)))
            near = nearest(value, known)
            hint = f" Did you mean {near!r}?" if near else ""
            words = " or ".join(map(repr, known))
            raise argparse.ArgumentError(action, f"must be {words}, got {shown(value)}.{hint}")

    def error(self, message: str) -> NoReturn:
        named, plain = re.subn(r"^argument ([^:]+): (?=must|is|')|^(?=unknown)", r"\1 ", message)
        more = "" if plain else f"\n`{self.prog} --help` lists all arguments."
        raise InputError(named.lstrip()[:600] + more)


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands within a command, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def add_common(parser: argparse.ArgumentParser) -> None:
    """What every command takes."""
    missing = argparse.SUPPRESS  # a command within a command must not reset what its parent read
    parser.add_argument("--json", action="store_true", default=missing, help="print JSON instead of tables")
    parser.add_argument(
        "--config",
        default=missing,
        metavar="FILE",
        help="YAML file with options of this command; options on the command line take precedence",
    )


def with_config(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """``words`` and, from the YAML file in --config, the options that are not among them."""
    path, own = None, list(words)
    end = own.index("--") if "--" in own else len(own)
    for place, word in enumerate(own[:end]):
        parser = subcommands(parser).get(word, parser)
        name, equals, value = word.partition("=")
        if name == "--config":
            path = value if equals else next(iter(own[place + 1 : end]), None)
    if not path:
        return own
    typed_names = {word.partition("=")[0] for word in own[:end]}
    known = {flag[2:]: a for a in parser._actions for flag in a.option_strings if flag[:2] == "--"}
    more: list[str] = []
    for key, value in _read_config(path).items():
        name = str(key).removeprefix("--").replace("_", "-")
        action = known.get(name)
        if action is None or name in ("help", "config"):
            near = nearest(name, known)
            hint = f" Did you mean {near!r}?" if near else f" `{parser.prog} --help` lists them."
            raise InputError(f"--config {shown(path)}: {shown(key)} is not an option of this command.{hint}")
        if not typed_names & set(action.option_strings):
            more += _as_words(f"--{name}", action, value, path)
    return [*own[:end], *more, *own[end:]]


def _read_config(path: str) -> dict[Any, Any]:
    from shoal.files import read_yaml

    try:
        content = read_yaml(Path(path).expanduser())
    except OSError as error:
        raise InputError(f"--config {shown(path)} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        first = " ".join(str(error).split())[:200]
        raise InputError(f"--config {shown(path)} is not YAML: {first}.") from error
    if not isinstance(content, dict):
        raise InputError(f"--config {shown(path)} must contain NAME: VALUE lines, such as `steps: 1000`.")
    return content


def _as_words(flag: str, action: argparse.Action, value: Any, path: str) -> list[str]:
    """An option of a config file as it would be typed."""
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InputError(f"--config {shown(path)}: {flag[2:]} must be true or false, got {shown(value)}.")
        off = f"--no-{flag[2:]}"
        return [flag] if value else [off] if off in action.option_strings else []
    if isinstance(value, dict):
        items = [f"{name}={json.dumps(each, default=str)}" for name, each in value.items()]
    else:
        items = [_typed(each) for each in (value if isinstance(value, list) else [value])]
    if action.nargs in (None, "?"):
        if len(items) != 1:
            raise InputError(f"--config {shown(path)}: {flag[2:]} takes one value, got {shown(value)}.")
        return [f"{flag}={items[0]}"]
    return [flag, *items]


def _typed(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict | list) else str(value)


def as_options(message: str, names: Iterable[str]) -> str:
    """An error of a Python function in the words of the command line: ``held_out=`` is ``--held-out``.

    Names within quotes, and NAME=VALUE pairs of options such as --set, stay as they are.
    """
    flags = {name: f"--{name.replace('_', '-')}" for name in names} | PYTHON_NAMES

    def flag(found: re.Match[str]) -> str:
        if re.search(r"--(data|set|model-set)( \S+=\S*)* $", message[: found.start()]):
            return found[0]
        return flags[found[1]] + ("" if message[found.end() :][:1] in ("", " ", ":", ",") else " ")

    known = "|".join(map(re.escape, flags))
    message = message.replace("with bad='skip'", "with --bad-images skip")
    return re.sub(rf"(?<![\w'\"=.,\[-])(?<!\w\()({known})=", flag, message)


def as_json(content: Mapping[str, Any]) -> str:
    """What --json prints, with the version of its format."""
    return json.dumps(finite({"schema": SCHEMA, **content}), default=dict, allow_nan=False)


def typed(kind: Any) -> Callable[[str], Any]:
    """Reads an argument as what an annotation allows (see :mod:`shoal.settings`)."""

    def read(text: str) -> Any:
        number = plain_number(text)
        try:
            return coerce(kind, text if number is None else number, "")
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


count = typed(Count)
few = typed(Few)
seed = typed(Seed)
rate = typed(Rate)
positive = typed(Annotated[float, Range(above=0)])
number = typed(Annotated[float, Range(0)])
workers = typed(Annotated[int, Range(0, 1000)])


def device(text: str) -> str:
    """The name of a device that there is."""
    if text != "cpu":
        from shoal.training.processes import pick_device, together

        try:
            if not together():
                pick_device(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("device=")) from error
    return text


def values(pairs: Sequence[str], option: str) -> dict[str, Any]:
    """``name=value`` pairs; values are read as YAML: numbers, true, null, [1, 2], and else text."""
    from shoal.files import parse_yaml

    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name or not text.strip():
            raise InputError(f"{option} takes NAME=VALUE pairs, got {shown(pair)}.")
        if name in found:
            raise InputError(f"{option} sets {shown(name)} twice; set it once.")
        try:
            found[name] = _as_written(parse_yaml(text), text)
        except ValueError as error:
            raise InputError(
                f"{option} {shown(pair)}: this value cannot be read; text with characters such as [ or : "
                "must "
                "be quoted."
            ) from error
    return found


def _as_written(value: Any, text: str) -> Any:
    """YAML would make 1 of 01, 90 of 1:30 and dates of others: only plain decimals are numbers here."""
    import datetime

    text = text.strip()
    if isinstance(value, list):
        return [v.isoformat() if isinstance(v, datetime.date) else v for v in value]
    if isinstance(value, datetime.date):
        return text
    if isinstance(value, int) and not isinstance(value, bool):
        return value if str(value) == text.lstrip("+") else text
    if value == text and (number := plain_number(text)) is not None:  # YAML reads 1e-3 as text
        return number if str(number) == text.lstrip("+") else float(number)
    return value


def add_options(
    parser: argparse._ActionsContainer, names: Iterable[str], function: Callable[..., Any] | None = None
) -> None:
    """Options for arguments of a public function (:func:`shoal.train`), by their Python names.

    Types, choices and defaults are those of its signature, and help is what its docstring says.
    """
    function = function or train
    declared, explained = settings(function), argument_help(function)
    for name in names:
        if name == "kinds":
            for kind in KINDS:
                _add_list(parser, f"--{kind}", "COLUMN", f"columns to read as {kind}")
        else:
            _add_option(parser, declared[name], explained[name].replace("%", "%%"))


def argument_help(function: Callable[..., Any]) -> dict[str, str]:
    """What the docstring of a function says of each argument."""
    arguments = (inspect.getdoc(function) or "").partition("\nArgs:\n")[2]
    found = re.finditer(r"^    (\w+): (.*(?:\n        .*)*)", arguments, re.MULTILINE)
    return {m[1]: " ".join(m[2].split()).partition(" In Python ")[0].removesuffix(".") for m in found}


def _add_list(parser: argparse._ActionsContainer, flag: str, metavar: str | None, text: str) -> None:
    parser.add_argument(flag, nargs="+", action="extend", default=[], metavar=metavar, help=text)


def _add_option(parser: argparse._ActionsContainer, setting: Setting, text: str) -> None:
    name, default = setting.name, setting.default
    flag, metavar = _flag(name), METAVARS.get(name)
    kinds = tuple(kind for kind in setting.kinds if kind.type is not type(None))
    types = {kind.type for kind in kinds}
    if types & {list, Mapping}:
        _add_list(parser, flag, metavar or "NAME=VALUE", text)
        return
    if types == {bool}:
        switch: Any = argparse.BooleanOptionalAction if default is None else "store_true"
        parser.add_argument(flag, action=switch, help=text)
        return
    if default is not None and "default" not in text:
        text = f"{text} (default: %(default)s)"
    more: dict[str, Any] = {"default": default, "help": text}
    if types == {Literal}:
        more["choices"] = [choice for kind in kinds for choice in kind.choices]
    else:
        plain = {name: device} if name == "device" else {}
        more["type"] = plain.get(name) or (Path if Path in types else str if types <= {str} else typed(kinds))
        more["metavar"] = metavar or ("N" if int in types else None)
    parser.add_argument(flag, **more)


def _flag(name: str) -> str:
    return FLAGS.get(name) or f"--{name.replace('_', '-')}"


def options_of(args: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a public function that were typed."""
    found: dict[str, Any] = {}
    for name in settings(function):
        value = getattr(args, _flag(name)[2:].replace("-", "_"), None)
        if name == "kinds":
            found[name] = kinds_of(args)
        elif name in FLAGS:
            found[name] = values(value or [], FLAGS[name])
        elif value is not None and value != []:
            found[name] = value
    return found


def _adder(*names: str) -> Callable[..., None]:
    return lambda parser, *_: add_options(parser, names)


add_data = _adder("data_options", "bad_images")
add_data_dir = _adder("data_dir")
"""For commands that load datasets; their ``run`` is then decorated with :func:`in_data_dir`."""
add_model = _adder("model", "model_options", "weights", "freeze_backbone")
add_device = _adder("device")
add_execution = _adder(*EXECUTION)
"""Where runs are executed and how many in parallel; :func:`executor_of` reads it."""


def data_options(args: Any) -> dict[str, Any]:
    """The dataset's options, --bad-images among them."""
    options, bad = values(args.data, "--data"), args.bad_images
    if bad is not None and options.setdefault("bad", bad) != bad:
        raise InputError(f"--bad-images {bad} contradicts --data bad={options['bad']}; specify only one.")
    return options


def model_options(args: Any) -> dict[str, Any]:
    """The fields of a run's configuration that describe its model."""
    options = values(args.model_set, "--model-set")
    chosen = checked_options(args.model, options, args.freeze_backbone)
    return {"model": args.model, "model_options": chosen, "weights": args.weights}


def add_source(parser: argparse.ArgumentParser) -> None:
    """What to look at: a dataset by name, or the user's own; :func:`source` reads it."""
    parser.add_argument("dataset", metavar="DATA", help=argument_help(train)["data"])
    add_options(parser, ("data_options", "bad_images", "data_dir"))
    add_table(parser)


def add_table(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("table", "`shoal data check FILE` shows how each column is read.")
    add_options(group, ("label", "domain", "group", "task", *OF_COLUMNS))


def source(args: Any) -> tuple[str, dict[str, Any]]:
    """The dataset's name and options; of a file or folder, those that read it."""
    _SHOWN.clear()
    table = {name: getattr(args, name) for name in OF_TABLE if name != "kinds"}
    options = values(args.data, "--data")
    found = find_source(
        args.dataset, data_options=options, bad_images=args.bad_images, kinds=kinds_of(args), **table
    )
    args.source = found
    if found.dataset == TABLE and not args.json:
        _SHOWN.add("columns")  # by show_columns, before training
    return found.dataset, found.options


def show_columns(args: Any, folder: Path | None = None) -> None:
    """Shows what the columns of a table are taken for, before training; and writes it to a folder."""
    found: Source | None = getattr(args, "source", None)
    if found is None:
        return
    if not args.json:
        print(*found.notes(), sep="\n", end="\n" * bool(found.notes()), file=sys.stderr, flush=True)
    if folder is not None and (report := found.columns()) is not None:
        from shoal.files import dump_json, write_atomically

        write_atomically(folder / "columns.json", dump_json(report))


def kinds_of(args: Any) -> dict[str, str]:
    """The kinds of columns that were typed."""
    kinds: dict[str, str] = {}
    for kind in KINDS:
        for name in getattr(args, kind):
            if kinds.setdefault(name, kind) != kind:
                raise InputError(
                    f"--{kinds[name]} {name} and --{kind} {name}: a column can have only one kind."
                )
    return kinds


def given_table(given: Any) -> list[str]:
    """The words that say it again on a command line, options first."""
    words = []
    for name in (*TOLD, *KINDS):
        value = getattr(given, name)
        if value:
            words += [f"--{name}", *(value if isinstance(value, list) else [value])]
    if given.day_first is not None:
        words.append("--day-first" if given.day_first else "--no-day-first")
    return words


@contextlib.contextmanager
def warnings_in_words() -> Iterator[None]:
    """Warnings as lines of ours, each once; without the place in the program that they came from."""
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        text = str(message.args[0] if isinstance(message, TableWarning) else message)
        if text not in seen and not (_SHOWN and issubclass(category, TableWarning)):
            seen.add(text)
            print(f"shoal: {text}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.filterwarnings("ignore", "Glyph ")  # of pictures: names in a script that the font lacks
        warnings.showwarning = show
        yield


def in_data_dir(run: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Runs a command where datasets are looked for in --data-dir, by its worker processes too."""

    @functools.wraps(run)
    def wrapped(args: Any) -> Result:
        with datasets_in(args.data_dir):
            return run(args)

    return wrapped


def executor_of(args: Any) -> Any:
    """The executor that the options of :func:`add_execution` name."""
    from shoal.experiments.execute import make_executor

    return make_executor(**{name: getattr(args, name) for name in EXECUTION})
