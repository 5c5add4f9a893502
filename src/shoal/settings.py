"""What a setting may be, declared once: in the signature of what takes it, with its default. ::

    def __init__(self, *, tau: Annotated[float, Range(0, 1, search=uniform(0.5, 1))] = 1.0, depth: int = 3)

From the signature come the check of given values, the words that describe what is allowed, and the space of a
random search. A parameter without annotation takes the type of its default; one whose type is none of those
below takes anything.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union

from shoal.errors import LONGEST, InputError, check_names, nearest, shown

LARGEST_INT = 2**63 - 1
LARGEST_FLOAT = 3.4028234663852886e38
"""What tensors hold: 64 bits of whole numbers, and single precision."""

NOUNS = {bool: "true or false", Mapping: "a mapping", Callable: "a function", str: "text", Path: "a path"}
Made = TypeVar("Made", bound=Callable[..., Any])


Size = Literal["small", "large"]
"""Of the images: a search space may differ for large ones, which pretrained models are fine-tuned on."""


class Search(NamedTuple):
    """From what a random search draws a setting (see :mod:`shoal.experiments.search`)."""

    kind: str
    values: tuple[Any, ...]
    of: int | None = None
    """A whole number is drawn, and divided by this: 500 steps of 5,000 are a share of 0.1."""


def choice(*values: Any) -> Search:
    return Search("choice", values)


def _between(kind: str) -> Callable[[float, float], Search]:
    return lambda low, high: Search(kind, (low, high))


uniform, log10, log2 = map(_between, ("uniform", "log10", "log2"))
"""A number between two, or 10 or 2 to the power of one."""


class Range(NamedTuple):
    """The numbers that a setting may be: from ``least`` to ``most``, or ``above`` or ``below`` an end."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    what: str = ""
    """What the number is, such as "a fraction of the data"."""
    search: Search | None = None
    large: tuple[Any, Search] | None = None
    """The default and the search for large images, where they are not the same as for small ones."""
    multiple: int = 1

    def holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.multiple == 1 or not value % self.multiple)
        )

    def words(self) -> str:
        if self.least is not None and self.most is not None:
            return f" from {_number(self.least)} to {_number(self.most)}"
        ends = [(" of at least", self.least), (" above", self.above)]
        ends += [(" at most", self.most), (" below", self.below)]
        return " and".join(f"{words} {_number(end)}" for words, end in ends if end is not None)


class Text(NamedTuple):
    """The text that a setting may be: all that ``pattern`` matches, and that in ``words``."""

    pattern: str
    words: str


Count = Annotated[int, Range(1, 10**9)]
Few = Annotated[int, Range(1, 1000)]
"""Of what exists all at the same time, such as processes."""
Seed = Annotated[int, Range(0, LARGEST_INT)]
Head = Annotated[str, Text(r"head(:[1-9][0-9]{0,8})?", "'head' or 'head:STEPS'")]
"""A warm start that trains the head alone, for so many steps."""
Pixels = Annotated[int, Range(8, 10**4)]
"""The side of an image."""
Rate = Annotated[float, Range(above=0, most=1e6)]
"""A learning rate; with more, a step of Adam's is beyond single precision."""


class Kind(NamedTuple):
    """One of the types that a setting may have."""

    type: Any
    range: Range = Range()
    choices: tuple[Any, ...] = ()
    items: tuple[Kind, ...] = ()
    text: Text | None = None

    def take(self, value: Any) -> Any:
        """``value`` as a plain one of this kind; raises TypeError or ValueError where it is none."""
        wanted = self.type
        if wanted is Literal:
            if not any(type(value) is type(c) and value == c for c in self.choices):
                raise ValueError
            return value
        if wanted is bool:
            if isinstance(value, bool) or type(value).__name__ == "bool":  # NumPy's
                return bool(value)
            raise TypeError
        if wanted in (int, float):
            return self._number(value)
        if self.text is not None:
            if not (isinstance(value, str) and re.fullmatch(self.text.pattern, value)):
                raise ValueError
            return value
        if wanted is list:
            if not isinstance(value, (list, tuple)):
                raise TypeError
            return [_take(self.items, item) for item in value]
        if wanted is str and isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value):
            return str(int(value) if isinstance(value, Integral) else float(value))  # a domain called 3
        if not isinstance(value, wanted):
            raise TypeError
        if isinstance(value, (str, Path)) and "\0" in str(value):  # no name and no path has it
            raise ValueError
        return value

    def _number(self, value: Any) -> int | float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError
        found: int | float = self.type(value)  # OverflowError: a whole number beyond what a float can be
        largest = LARGEST_INT if self.type is int else LARGEST_FLOAT
        within = abs(found) <= largest or self.range.most is not None
        if (self.type is int and found != value) or not (within and math.isfinite(found)):  # 2.5, infinity
            raise ValueError
        if not self.range.holds(found):
            raise ValueError
        return found

    def words(self) -> str:
        if self.type is Literal:
            return " or ".join(map(repr, self.choices))
        if self.type is type(None):
            return "None (null on the command line)"
        if self.text is not None:
            return self.text.words
        if self.type is list:
            return f"a list of {' or '.join(item.words() for item in self.items) or 'values'}"
        if self.type in (int, float):
            noun = "a whole number" if self.type is int else "a number"
            noun = f"a multiple of {self.range.multiple}" if self.range.multiple > 1 else noun
            return f"{self.range.what or noun}{self.range.words()}"
        name = self.type.__name__
        return NOUNS.get(self.type) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


class Setting(NamedTuple):
    """One parameter of a signature."""

    name: str
    default: Any
    kinds: tuple[Kind, ...]
    """What it may be; nothing here: anything."""

    def words(self) -> str:
        """What it may be."""
        return allowed(self.kinds)

    def space(self, size: Size = "small") -> dict[str, Any] | None:
        """What a search draws it from, if any does."""
        for kind in self.kinds:
            default, search = self.default, kind.range.search
            if size == "large" and kind.range.large is not None:
                default, search = kind.range.large
            if search is not None:
                how: dict[str, Any] = {"whole": True} if kind.type is int else {}
                how |= {} if search.of is None else {"of": search.of}
                return {"default": default, search.kind: list(search.values), **how}
        return None


def check(
    function: Callable[..., Any], values: Mapping[str, Any], of: str, kind: str = "setting"
) -> dict[str, Any]:
    """``values`` for parameters of ``function``, as plain numbers and text.

    An InputError names what is wrong; ``of`` is whose they are.
    """
    declared = settings(function)
    check_names(f"{kind} of {of}:", values, declared)
    return {name: coerce(declared[name].kinds, value, f"{name} of {of}") for name, value in values.items()}


def coerce(kind: Any, value: Any, name: str) -> Any:
    """``value`` as the annotation ``kind`` wants it; an InputError calls it ``name``."""
    kinds = kind if isinstance(kind, tuple) else kinds_of(kind)
    try:
        return _take(kinds, value) if kinds else value
    except (TypeError, ValueError, OverflowError):
        message = f"{name} must be {allowed(kinds)}, got {shown(value)}.{_hint(kinds, value)}"
        raise InputError(message.lstrip()) from None


def allowed(kinds: Sequence[Kind]) -> str:
    return " or ".join(kind.words() for kind in kinds) or "anything"


def settings(function: Callable[..., Any]) -> dict[str, Setting]:
    """The parameters of a function, or of a class and the parents to which it passes keyword arguments on."""
    if not inspect.isclass(function):
        return {name: s for name, s in _declared(function).items() if name not in ("self", "cls")}
    found: dict[str, Setting] = {}
    for cls in function.__mro__:
        if "__init__" in vars(cls) and cls is not object:
            maker = vars(cls)["__init__"]
            makes, own = inspect.signature(maker).parameters.values(), _declared(maker, cls)
            found = {p.name: own[p.name] for p in makes if p.name in own and p.name != "self"} | found
            if not any(p.kind is p.VAR_KEYWORD for p in makes):
                break
    return found


def search_space(function: Callable[..., Any], size: Size = "small") -> dict[str, dict[str, Any]]:
    """What a random search draws the settings from, in the form of :mod:`shoal.experiments.search`."""
    spaces = {name: setting.space(size) for name, setting in settings(function).items()}
    return {name: space for name, space in spaces.items() if space is not None}


def checked(function: Made) -> Made:
    """Checks the arguments of a constructor, or of any function, whenever it is called."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Python's own words
        owner = type(args[0]).__name__ if "self" in bound.arguments else function.__name__
        declared = _declared(function)
        for name, value in bound.arguments.items():
            if name in declared:
                bound.arguments[name] = coerce(declared[name].kinds, value, f"{name} of {owner}")
        return function(*bound.args, **bound.kwargs)

    return wrapped  # type: ignore[return-value]


def plain_number(text: str) -> int | float | None:
    """The number that ``text`` is, written as Python and YAML write decimals; else None.

    No underscores, no digits of other scripts, no words for what is infinite.
    """
    text = text.strip()
    if re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
        return int(text)
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        return float(text)
    return None


def kinds_of(annotation: Any, range: Range = Range()) -> tuple[Kind, ...]:  # noqa: B008
    """What an annotation allows; nothing: anything."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        if text := next((a for a in args[1:] if isinstance(a, Text)), None):
            return (Kind(str, text=text),)
        return kinds_of(args[0], next((a for a in args[1:] if isinstance(a, Range)), range))
    if origin in (Union, types.UnionType):
        parts = [kinds_of(arg, range) for arg in args]
        return sum(parts, ()) if all(parts) else ()
    if origin is Literal:
        return (Kind(Literal, choices=args),)
    if annotation in (int, float):
        return (Kind(annotation, range),)
    if annotation in (bool, str, Path, type(None)):
        return (Kind(annotation),)
    if origin in (list, tuple, Sequence):
        alike = len({a for a in args if a is not ...}) == 1
        return (Kind(list, items=kinds_of(args[0]) if alike else ()),)
    if origin in (dict, Mapping):
        return (Kind(Mapping),)
    if origin in (Callable, Iterable):
        return (Kind(origin),)
    if inspect.isclass(annotation) and annotation not in (object, Any) and not origin:
        return () if getattr(annotation, "_is_protocol", False) else (Kind(annotation),)
    return ()


def _take(kinds: Sequence[Kind], value: Any) -> Any:
    if isinstance(value, Real) and not isinstance(value, Integral) and any(k.type is float for k in kinds):
        kinds = [k for k in kinds if k.type is not int]  # 1.0 may mean something else than 1
    for kind in kinds:
        try:
            return kind.take(value)
        except (TypeError, ValueError, OverflowError):
            continue
    if kinds:
        raise ValueError
    return value


@functools.cache
def _declared(function: Callable[..., Any], cls: type | None = None) -> dict[str, Setting]:
    names, found = _names(function, cls), {}
    for p in inspect.signature(function).parameters.values():
        if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        annotation = p.annotation
        if annotation is p.empty:
            numbers = isinstance(p.default, (int, float))
            kinds = kinds_of(bool if isinstance(p.default, bool) else int | float) if numbers else ()
        else:
            kinds = _kinds_of_text(annotation, names) if isinstance(annotation, str) else kinds_of(annotation)
        found[p.name] = Setting(p.name, p.default, kinds)
    return found


def _kinds_of_text(annotation: str, names: Mapping[str, Any]) -> tuple[Kind, ...]:
    try:
        written = types.SimpleNamespace(__annotations__={"it": annotation})
        return kinds_of(typing.get_type_hints(written, dict(names), include_extras=True)["it"])
    except Exception:  # a name that is imported for type checkers only
        return ()


def _names(function: Any, cls: type | None) -> Mapping[str, Any]:
    """The globals in which the annotations of a function are evaluated."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    module = sys.modules.get(getattr(cls or function, "__module__", ""))
    return getattr(function, "__globals__", None) or vars(module or types)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _hint(kinds: Sequence[Kind], value: Any) -> str:
    """What was probably meant, if that would be allowed."""
    if isinstance(value, str) and len(value) < LONGEST:
        words = [c for kind in kinds for c in kind.choices if isinstance(c, str)]
        if near := nearest(value, words):
            return f" Did you mean {near!r}?"
        meant: Any = plain_number(
            re.sub(r"(?<=[0-9]),(?=[0-9]+$)", ".", value.replace("_", "").strip("'\" "))
        )
    elif isinstance(value, float) and math.isfinite(value) and value == int(value):
        meant = int(value)
    else:
        text = any(kind.type is str for kind in kinds)
        return " To be read as text, no and null must be quoted." if text else ""
    try:
        return "" if meant is None else f" Did you mean {_take(kinds, meant)!r}?"
    except (TypeError, ValueError, OverflowError):
        return ""
