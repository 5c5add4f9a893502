"""Flags from typed arguments: what cyclopts needs to make a command of a public function."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import yaml
from cyclopts import Group, Parameter
from docstring_parser import parse

from shoal.errors import InputError
from shoal.options import (
    DataOptions,
    ExecutionOptions,
    LogOptions,
    ModelOptions,
    ParallelOptions,
    TrainingOptions,
    declared,
    options_of,
)
from shoal.settings import coerce

TITLES: Mapping[str, Sequence[type]] = {
    "Data": (DataOptions,),
    "Model": (ModelOptions,),
    "Training": (TrainingOptions,),
    "Running": (ExecutionOptions, ParallelOptions),
    "Logging": (LogOptions,),
}
FIRST, OWN, *REST = (Group(name, sort_key=n) for n, name in enumerate(("Most used", "Options", *TITLES)))
ROLE = re.compile(r":\w+:`~?([^`]+)`|``([^`]+)``|`([^`]+)`")


def command(function: Callable[..., Any], name: str, first: Sequence[str] = ()) -> Callable[..., Any]:
    """``function`` as a command called ``name``; the help begins with the flags ``first``.

    Arguments without a default are positional, others and declared options are flags. Only what was typed is
    passed on, so that the function sees what was given.
    """
    original = inspect.unwrap(function)
    hints, docstring = typing.get_type_hints(original, include_extras=True), inspect.getdoc(original) or ""
    helps = {p.arg_name: _sentence(p.description or "") for p in parse(docstring).params}
    kinds: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(original).parameters.values():
        if each.kind is each.VAR_KEYWORD:
            for option in options_of(function).values():
                kinds[option.name] = option.type
                if name in option.commands.split():
                    group = FIRST if option.name in first else _group_of(option.name)
                    default = False if option.default is False else None
                    help = _sentence(option.describe())
                    parameters.append(_flag(option.name, option.type, group, help, default))
        elif each.name != "progress":
            kinds[each.name] = hints[each.name]
            words, free = _words(hints[each.name]), each.default is each.empty
            if each.kind is each.KEYWORD_ONLY or not (free or typing.get_origin(words) is list):
                group, help = FIRST if each.name in first else OWN, helps[each.name]
                if each.default not in (None, (), each.empty) and not isinstance(each.default, bool):
                    shown = ", ".join(each.default) if isinstance(each.default, tuple) else each.default
                    help = f"{help.rstrip('.')} (default: {shown})."
                parameters.append(_flag(each.name, hints[each.name], group, help, each.default))
            else:
                about = Parameter(help=helps[each.name], show_default=False)
                annotation: Any = Annotated[words if free else words | None, about]
                own = each.replace(kind=each.POSITIONAL_ONLY, annotation=annotation)
                parameters.append(own if free else own.replace(default=None))
    place = {n: i for i, n in enumerate(first)}
    parameters.sort(key=lambda p: (p.kind, place.get(p.name, len(place))))
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    together = len(names) > 1 and _words(hints[names[0]]) == list[str]
    if together:  # all words but the last are the first argument
        shown = f"{names[0].upper()}... {names[1].upper()}"
        help = f"{helps[names[0]]} Then: {helps[names[1]][:1].lower()}{helps[names[1]][1:]}"
        annotation = Annotated[list[str], Parameter(name=shown, help=help)]
        parameters[:2] = [parameters[0].replace(annotation=annotation)]

    def call(*args: Any, **flags: Any) -> Any:
        if together:
            *words, last = args[0]
            if not words:
                raise InputError(f"requires {names[0].upper()} and {names[1].upper()}, got only {last!r}.")
            args = (words if len(words) > 1 else words[0], last)
        values = [_value(kinds[n], value, n) for n, value in zip(names, args, strict=False)]
        try:
            return function(*values, **{n: _value(kinds[n], value, n) for n, value in flags.items()})
        except InputError as error:
            if error.option in names:  # it is no flag
                error.args, error.option = (f"{error.option.upper()}: {error.args[0]}",), None
            raise

    paragraphs = [p for p in docstring.partition("\nArgs:")[0].split("\n\n") if not p.startswith(" ")]
    call.__name__ = name
    call.__doc__ = "\n\n".join(_sentence(p).removesuffix(" ::") for p in paragraphs)
    call.kinds = kinds  # type: ignore[attr-defined]  # of all options, those without a flag included
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _flag(name: str, kind: Any, group: Group, help: str, default: Any = None) -> inspect.Parameter:
    words, metavar = _words(kind), None
    if words == dict[str, str]:
        help = f"{help} Written as --{name.replace('_', '-')}.NAME VALUE."
    if words is str:
        numbers = {*_leaves(kind)} - {types.NoneType}
        metavar = "N" if numbers == {int} else "X" if numbers == {float} else "TEXT"
    about = Parameter(
        group=group,
        help=help,
        metavar="NAME..." if words == list[str] else metavar,
        negative=None if words is bool and default is not False else "",
        show_default=False,
        required=default is inspect.Parameter.empty,
    )
    # The default is that nothing was typed: this is not passed on.
    annotation, kind = Annotated[words | None, about], inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _words(kind: Any) -> Any:
    """The type that cyclopts reads: how many words a flag takes, and which are valid.

    Numbers stay text: :func:`_value` converts and checks them as it does in Python.
    """
    leaves = list(_leaves(kind))
    origins = [typing.get_origin(leaf) for leaf in leaves]
    if Mapping in origins:
        return dict[str, str]
    if bool in leaves:
        return bool
    several = Sequence in origins
    items = [leaf for part in leaves for leaf in _leaves(*typing.get_args(part)[:1])] if several else []
    choices = [
        choice
        for leaf in (*leaves, *items)
        if typing.get_origin(leaf) is Literal
        for choice in typing.get_args(leaf)
    ]
    word = Literal[tuple(choices)] if choices and str not in leaves else str
    return list[word] if several else word  # type: ignore[valid-type]


def _leaves(kind: Any = None) -> Iterator[Any]:
    """The types of a union, without ranges."""
    if typing.get_origin(kind) is Annotated:
        yield from _leaves(typing.get_args(kind)[0])
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for part in typing.get_args(kind):
            yield from _leaves(part)
    else:
        yield kind


def _group_of(name: str) -> Group:
    kinds = zip(REST, TITLES.values(), strict=True)
    return next(group for group, options in kinds if any(name in declared(each) for each in options))


def _value(kind: Any, value: Any, name: str) -> Any:
    """What was typed, as the argument's type wants it."""
    if isinstance(value, dict):  # names of options may be typed with dashes, those of columns are as they are
        keys = {key: key if name == "kinds" else key.replace("-", "_") for key in value}
        return {keys[key]: _scalar(each) if isinstance(each, str) else each for key, each in value.items()}
    return coerce(kind, value, name, strict=False)


def _scalar(text: str) -> Any:
    """A number, true, false, null or a list as YAML has them; otherwise the text as it is."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{text!r} is not valid YAML: {error}") from None
    try:
        return float(text) if isinstance(value, str) else value  # YAML 1.1 reads 1e-3 as text
    except ValueError:
        return text


def _sentence(text: str) -> str:
    """A description in one paragraph that begins with a capital letter, without roles of documentation."""
    text = ROLE.sub(lambda found: found[1] or found[2] or found[3], " ".join(text.split()))
    text = text.partition(" In Python")[0]
    return f"{text[:1].upper()}{text[1:]}"
