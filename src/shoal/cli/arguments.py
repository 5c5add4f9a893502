"""Reading what was typed."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from shoal.errors import InputError, TableWarning, nearest, unknown_name
from shoal.files import finite
from shoal.settings import Count, Range, Rate, Seed, coerce, plain_number, shown

Result = TypeVar("Result")

SCHEMA = 1
"""Of what --json prints."""
TABLE, OF_FOLDER = "table", "image-folder"
"""Which dataset reads a file or a folder of the user's."""
KINDS = ("numeric", "boolean", "date", "categorical", "text")
_SHOWN: set[str] = set()
"""What is printed as a report, so that it is not said as warnings too."""
OPTIMIZERS = ("adam", "adamw", "sgd")
PRECISIONS = ("fp32", "bf16", "fp16")
DRAWS = ("domains", "one-domain", "pooled", "balanced", "regrouped")
"""Named here too, for what knows them imports torch."""
TOLD = ("label", "domain", "group", "task", "decimal", "drop")


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
        "--config", default=missing, metavar="FILE", help="YAML with options of this command; typed ones win"
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
        raise InputError(f"--config {shown(path)} must hold NAME: VALUE lines, such as `steps: 1000`.")
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


def as_json(content: Mapping[str, Any]) -> str:
    """What --json prints, with the version of its format."""
    return json.dumps(finite({**content, "schema": SCHEMA}), default=dict, allow_nan=False)


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
few = typed(Annotated[int, Range(1, 1000)])
"""Of what is made all at once, such as processes or plans of runs."""
seed = typed(Seed)
rate = typed(Rate)
positive = typed(Annotated[float, Range(above=0)])
number = typed(Annotated[float, Range(0)])
workers = typed(Annotated[int, Range(0, 1000)])
warm_start = typed(
    Annotated[int, Range(1, 10**9, what="a number of steps")]
    | Annotated[float, Range(above=0, most=1, what="a share of the data")]
    | Literal["plateau"]
)


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
            raise InputError(f"{option} gives {shown(name)} twice; give it once.")
        try:
            found[name] = _as_written(parse_yaml(text), text)
        except ValueError as error:
            raise InputError(
                f"{option} {shown(pair)}: this value cannot be read; text with marks such as [ or : needs "
                "quotes."
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


def add_data(parser: argparse._ActionsContainer, whose: str) -> None:
    """The options of datasets; :func:`data_options` reads them."""
    parser.add_argument(
        "--data", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=f"{whose} options"
    )
    parser.add_argument(
        "--bad-images", choices=("stop", "skip"), help="at a picture that cannot be read (default: stop)"
    )


def data_options(given: Any) -> dict[str, Any]:
    """The dataset's options, --bad-images among them."""
    options = values(given.data, "--data")
    if given.bad_images is not None:
        if options.get("bad", given.bad_images) != given.bad_images:
            raise InputError(f"--bad-images {given.bad_images}, but --data bad={options['bad']}; give one.")
        options["bad"] = given.bad_images
    return options


def add_model(parser: argparse._ActionsContainer, default: str) -> None:
    """The options of models; :func:`model_options` reads them."""
    parser.add_argument(
        "--model",
        help=f"one of Shoal's, of timm's, or a text encoder: its name or folder (default: {default})",
    )
    parser.add_argument(
        "--model-set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="the model's options",
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="start from these: safetensors, or a .pt that holds weights only; for timm's models with timm's "
        "or torchvision's names",
    )
    parser.add_argument(
        "--freeze-backbone",
        action="store_true",
        help="train only the head, on features that are computed once (images are not augmented)",
    )


def add_rate(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--lr", type=rate, help="learning rate (default: 0.001; 5e-05 with a warm-up for pretrained models)"
    )
    parser.add_argument(
        "--schedule",
        help="how it changes: constant, cosine, linear, step:0.96:1000, warmup:50, or warmup:50,cosine",
    )


def show_chosen(given: Any) -> None:
    """Says which learning rate was chosen for the model, where it was."""
    if (chosen := getattr(given, "chosen", "")) and not given.json:
        print(f"{chosen[0].upper()}{chosen[1:]}.", file=sys.stderr, flush=True)


def model_options(given: Any) -> dict[str, Any]:
    """The fields of a run's configuration that describe its model."""
    options = values(given.model_set, "--model-set")
    if given.freeze_backbone:
        if not options.get("frozen", True):
            raise InputError("--freeze-backbone, but --model-set frozen=false; give one of them.")
        if given.model is None:
            raise InputError("--freeze-backbone needs one of timm's models: --model mobilenetv2_100.")
        options["frozen"] = True
    return {"model": given.model, "model_options": options, "weights": given.weights}


def add_source(parser: argparse.ArgumentParser) -> None:
    """What to look at: a dataset by name, or the user's own; :func:`source` reads it."""
    parser.add_argument(
        "dataset",
        metavar="DATA",
        help="a dataset (see `shoal list datasets`), a table (.csv, .tsv, .csv.gz, .parquet, .xlsx), "
        "or a folder of images as folder/domain/class",
    )
    add_data(parser, "the dataset's")
    add_data_dir(parser)
    add_table(parser)


def add_table(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "a table of your own", "`shoal data check FILE` shows what each column is taken for."
    )
    group.add_argument("--label", metavar="COLUMN", help="the column to predict")
    group.add_argument("--domain", metavar="COLUMN", help="the column that tells where a row is from")
    group.add_argument(
        "--group",
        metavar="COLUMN",
        help="the column that names the entity of a row, such as a patient: rows of one entity stay on one "
        "side of every split",
    )
    group.add_argument("--task", help="classification or regression (default: as the label looks)")
    add_columns(group)


def add_columns(group: argparse._ActionsContainer) -> None:
    """What columns hold; it wins over what their cells look like."""
    group.add_argument(
        "--drop", nargs="+", action="extend", default=[], metavar="COLUMN", help="columns not to use"
    )
    for kind in KINDS:
        group.add_argument(
            f"--{kind}",
            nargs="+",
            action="extend",
            default=[],
            metavar="COLUMN",
            help=f"columns to take as {kind}",
        )
    group.add_argument("--decimal", choices=(".", ","), help="the decimal mark, where columns leave it open")
    group.add_argument(
        "--day-first",
        action=argparse.BooleanOptionalAction,
        help="whether 3/4/2020 is in April, where columns leave it open",
    )


def source(given: Any) -> tuple[str, dict[str, Any]]:
    """The dataset's name and options; of a file or folder, those that read it."""
    _SHOWN.clear()
    options = data_options(given)
    told = _of_table(given)
    path = Path(given.dataset).expanduser()
    if path.is_file() or path.suffix:
        from shoal.data.reading import ENDINGS, ending

        if ending(path):
            from shoal.data.sets.table import digest_of

            if named := {"file", "digest"} & options.keys():
                raise InputError(f"--data {min(named)}=…: the file is {given.dataset!r}, as it was named.")
            # The digest makes a changed file another dataset: its runs are not taken for the old one's.
            options = {"file": str(given.dataset), "digest": digest_of(path), **told, **options}
            given.table_options = options
            _SHOWN.update([] if given.json else ["columns"])  # by show_columns, before training
            return TABLE, options
        if path.is_file():
            raise InputError(f"{given.dataset!r} is no table by its ending; these are: {', '.join(ENDINGS)}.")
    if told:
        first = next(iter(given_table(given)))
        raise InputError(
            f"{first} belongs to a table, and {given.dataset!r} is no .csv, .parquet or .xlsx file."
        )
    if _is_folder(given.dataset, path):
        given.images = path if "size" not in options else None
        return OF_FOLDER, {"folder": str(given.dataset), **options}
    return given.dataset, options


def show_columns(given: Any, folder: Path | None = None) -> None:
    """Shows what the columns of a table are taken for, before training; and writes it to a folder.

    Of images it says to which size they are resized, where nothing was said.
    """
    if (images := getattr(given, "images", None)) is not None and not given.json:
        from shoal.data.images import SIZE, usual_size

        wide, high = usual_size(images)
        note = f"Images are resized to {SIZE} × {SIZE} pixels (most are {wide} × {high})"
        print(f"{note}; --data size=N changes it.", file=sys.stderr, flush=True)
    options = getattr(given, "table_options", {})
    if "label" not in options or "domain" not in options or "columns" in options:
        return
    from shoal.data.own import check_table
    from shoal.files import dump_json, write_atomically
    from shoal.report import columns

    path, names = Path(options["file"]), ("label", "domain", "group", "kinds", "decimal", "day_first", "task")
    known = {name: options[name] for name in names if name in options}
    report = {"file": path.name, **check_table(path, drop=_listed(options.get("drop")), **known)}
    if not given.json:
        print(f"{columns.text(report)}\n", file=sys.stderr, flush=True)
    if folder is not None:
        write_atomically(folder / "columns.json", dump_json(report))


def _listed(names: Any) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names or ())


def _is_folder(name: str, path: Path) -> bool:
    """A folder, unless a dataset is called so; ./name and name/ are always folders."""
    if not path.is_dir():
        return False
    from shoal.data import sets

    return name.lower().replace("_", "-") not in sets.registry.names()


def kinds_of(given: Any) -> dict[str, str]:
    """The kinds of columns that were typed."""
    kinds: dict[str, str] = {}
    for kind in KINDS:
        for name in getattr(given, kind):
            if kinds.setdefault(name, kind) != kind:
                raise InputError(f"--{kinds[name]} {name} and --{kind} {name}: a column has one kind.")
    return kinds


def _of_table(given: Any) -> dict[str, Any]:
    """The options of the table that were typed."""
    kinds = kinds_of(given)
    told = {name: value for name in TOLD if (value := getattr(given, name))}
    told |= {"kinds": kinds} if kinds else {}
    return told if given.day_first is None else {**told, "day_first": given.day_first}


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
        if str(message) not in seen and not (_SHOWN and issubclass(category, TableWarning)):
            seen.add(str(message))
            print(f"shoal: {message}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.filterwarnings("ignore", "Glyph ")  # of pictures: names in a script that the font lacks
        warnings.showwarning = show
        yield


def add_data_dir(parser: argparse._ActionsContainer) -> None:
    """For commands that load datasets; their ``run`` is then decorated with :func:`in_data_dir`."""
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where datasets are (default: $SHOAL_DATA)"
    )


def in_data_dir(run: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Runs a command where datasets are looked for in --data-dir, by its worker processes too.

    It is no option of the dataset: the same run is the same one wherever its files are.
    """

    @functools.wraps(run)
    def wrapped(given: Any) -> Result:
        with _variable(given.data_dir):
            return run(given)

    return wrapped


@contextlib.contextmanager
def _variable(folder: Path | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    from shoal.data.folders import VARIABLE

    folder = folder.expanduser()
    if not folder.is_dir():
        raise InputError(f"--data-dir: there is no folder {str(folder)!r}.")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder.resolve())
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def make_folder(path: Path, data: str | None = None, run: bool = False) -> None:
    """Makes the folder that results will go to, now rather than after the work.

    One in the folder of ``data`` is refused, where it would be read as data; and, unless for a ``run``, that
    of one.
    """
    real = Path(os.path.realpath(path))
    if data and Path(data).is_dir() and Path(os.path.realpath(data)) in (real, *real.parents):
        raise InputError(f"--out {str(path)!r} is in the folder of the data, {data!r}; choose another.")
    if not run and (path / "config.yaml").exists():
        raise InputError(f"--out {str(path)!r} holds a single run; choose another folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {shown(str(path))} cannot be a folder: {error.strerror}.") from error
    if not os.access(path, os.W_OK):
        raise InputError(f"--out {str(path)!r} cannot be written to.")


def add_running(parser: argparse.ArgumentParser) -> None:
    """The options of commands that run many trainings."""
    add_device(parser)
    parser.add_argument(
        "--jobs", type=few, metavar="P", help="runs in parallel (default: one per core; ten on CUDA)"
    )


def add_device(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--device", type=device, help="cpu, cuda, cuda:1 … (default: cuda where there is one)"
    )


def add_execution(parser: argparse._ActionsContainer) -> None:
    """Where and how many runs are done in parallel; :func:`executor_of` reads it."""
    add_device(parser)
    parser.add_argument(
        "--jobs", type=few, metavar="J", help="runs in parallel (default: one per core, or ten on CUDA)"
    )
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="processes on this machine (default), or a Ray cluster",
    )
    parser.add_argument(
        "--address", help="Ray: 'auto', HOST:PORT or ray://HOST:PORT (default: one on this machine)"
    )
    parser.add_argument(
        "--gpus-per-run", type=number, metavar="G", help="Ray: such as 0.25 (default: 1, on the CPU 0)"
    )
    parser.add_argument("--cpus-per-run", type=positive, metavar="C", help="Ray: (default: 1)")


def executor_of(given: Any) -> Any:
    """The executor that the options of :func:`add_execution` name."""
    from shoal.experiments.execute import make_executor

    names = ("device", "jobs", "address", "gpus_per_run", "cpus_per_run")
    return make_executor(given.engine, **{name: getattr(given, name) for name in names})
