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
    hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    docstring = inspect.getdoc(inspect.unwrap(function)) or ""
    helps = {p.arg_name: _sentence(p.description or "") for p in parse(docstring).params}
    kinds: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(inspect.unwrap(function)).parameters.values():
        if each.kind is each.VAR_KEYWORD:
            for option in options_of(function).values():
                kinds[option.name] = option.type
                if name in option.commands.split():
                    group = FIRST if option.name in first else _group_of(option.name)
                    default = False if option.default is False else None
                    parameters.append(_flag(option.name, option.type, group, option.describe(), default))
        elif each.name != "progress":
            kinds[each.name] = hints[each.name]
            several = any(typing.get_origin(leaf) is Sequence for leaf in _leaves(hints[each.name]))
            if each.kind is each.KEYWORD_ONLY or (each.default is not each.empty and not several):
                group = FIRST if each.name in first else OWN
                help = _with_default(helps[each.name], each.default)
                parameters.append(_flag(each.name, hints[each.name], group, help, each.default))
            else:
                about = Parameter(help=helps[each.name], show_default=False)
                words: Any = _words(hints[each.name])
                if each.default is not each.empty:
                    each, words = each.replace(default=None), words | None
                parameters.append(each.replace(kind=each.POSITIONAL_ONLY, annotation=Annotated[words, about]))
    place = {n: i for i, n in enumerate(first)}
    parameters.sort(key=lambda p: (p.kind, place.get(p.name, len(place))))
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    together = len(names) > 1 and _words(hints[names[0]]) == list[str]
    if together:  # all words but the last are the first argument
        parameters[:2] = [_several_then_one(*(helps[n] for n in names), *names)]

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

    call.__name__, call.__doc__ = name, _description(docstring)
    call.kinds = kinds  # type: ignore[attr-defined]  # of all options, those without a flag included
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _several_then_one(help: str, help_of_last: str, name: str, last: str) -> inspect.Parameter:
    shown = f"{name.upper()}... {last.upper()}"
    about = Parameter(name=shown, help=f"{help} Then: {help_of_last[:1].lower()}{help_of_last[1:]}")
    annotation = Annotated[list[str], about]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, annotation=annotation)


def _flag(name: str, kind: Any, group: Group, help: str, default: Any = None) -> inspect.Parameter:
    words = _words(kind)
    if words == dict[str, str]:
        help = f"{help} Written as --{name.replace('_', '-')}.NAME VALUE."
    about = Parameter(
        group=group,
        help=help,
        metavar=_metavar(kind, words),
        negative=None if words is bool and default is not False else "",
        show_default=False,
        required=default is inspect.Parameter.empty,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,  # what is not typed is not passed on
        annotation=Annotated[words | None, about],
    )


def _words(kind: Any) -> Any:
    """The type that cyclopts reads: how many words a flag takes, and which are valid.

    Numbers stay text: :func:`_value` converts and checks them as it does in Python.
    """
    leaves = list(_leaves(kind))
    if any(typing.get_origin(leaf) is Mapping for leaf in leaves):
        return dict[str, str]
    choices = [c for leaf in leaves if typing.get_origin(leaf) is Literal for c in typing.get_args(leaf)]
    several = any(typing.get_origin(leaf) is Sequence for leaf in leaves)
    if several and not choices:
        items = [leaf for part in leaves for leaf in _leaves(*typing.get_args(part)[:1] or (part,))]
        choices = [c for leaf in items if typing.get_origin(leaf) is Literal for c in typing.get_args(leaf)]
    if bool in leaves:
        return bool
    word = Literal[tuple(choices)] if choices and str not in leaves else str
    return list[word] if several else word  # type: ignore[valid-type]


def _leaves(kind: Any) -> Iterator[Any]:
    """The types of a union, without ranges."""
    if typing.get_origin(kind) is Annotated:
        yield from _leaves(typing.get_args(kind)[0])
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for part in typing.get_args(kind):
            yield from _leaves(part)
    else:
        yield kind


def _metavar(kind: Any, words: Any) -> str | None:
    if words == list[str]:
        return "NAME..."
    if words is not str:
        return None
    leaves = set(_leaves(kind)) - {type(None)}
    return {frozenset({int}): "N", frozenset({float}): "X"}.get(frozenset(leaves), "TEXT")


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
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            return text
    return value


def _sentence(text: str) -> str:
    """A description in one paragraph that begins with a capital letter, without roles of documentation."""
    text = ROLE.sub(lambda found: found[1] or found[2] or found[3], " ".join(text.split()))
    text = text.partition(" In Python")[0]
    return f"{text[:1].upper()}{text[1:]}"


def _with_default(text: str, default: Any) -> str:
    if isinstance(default, bool) or default in (None, (), inspect.Parameter.empty):
        return text
    shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{text.rstrip('.')} (default: {shown})."


def _description(docstring: str) -> str:
    """The text before the arguments, without Python code."""
    paragraphs = [p for p in docstring.partition("\nArgs:")[0].split("\n\n") if not p.startswith(" ")]
    return "\n\n".join(_sentence(p).removesuffix(" ::") for p in paragraphs)
