"""What an argument may be, declared once: in the signature of what takes it, with its default. ::

    def __init__(self, *, tau: Annotated[float, Range(0, 1, search=uniform(0.5, 1))] = 1.0, depth: int = 3)

pydantic checks values against the annotations; it is imported when it is needed. The hyperparameters of an
algorithm are the keyword arguments of its constructor; their search spaces are part of the annotations.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import annotated_types

from shoal.errors import InputError, check_names, did_you_mean, shown

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

Function = TypeVar("Function", bound=Callable[..., Any])
Size = Literal["small", "large"]
"""Of the images: a search space may differ for large ones, which pretrained models are fine-tuned on."""


class Search(NamedTuple):
    """From what a random search samples a hyperparameter (see :mod:`shoal.experiments.search`)."""

    kind: str
    values: tuple[Any, ...]
    of: int | None = None
    """A whole number is sampled, and divided by this: 500 steps of 5,000 are a fraction of 0.1."""


def choice(*values: Any) -> Search:
    return Search("choice", values)


def uniform(low: float, high: float) -> Search:
    return Search("uniform", (low, high))


def log10(low: float, high: float) -> Search:
    """10 to the power of a uniform number."""
    return Search("log10", (low, high))


def log2(low: float, high: float) -> Search:
    """2 to the power of a uniform number."""
    return Search("log2", (low, high))


@dataclass(frozen=True)
class Range(annotated_types.GroupedMetadata):
    """The numbers that an argument may be: from ``least`` to ``most``, or ``above`` or ``below`` an end."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    search: Search | None = None
    large: tuple[Any, Search] | None = None
    """The default and the search for large images, where they are not the same as for small ones."""
    multiple: int | None = None

    def __iter__(self) -> Iterator[Any]:
        yield annotated_types.Interval(ge=self.least, le=self.most, gt=self.above, lt=self.below)
        if self.multiple is not None:
            yield annotated_types.MultipleOf(self.multiple)


Count = Annotated[int, Range(1, 10**9)]
Few = Annotated[int, Range(1, 1000)]
"""Of what exists all at the same time, such as processes."""
Seed = Annotated[int, Range(0, 2**63 - 1)]
Pixels = Annotated[int, Range(8, 10**4)]
"""The side of an image."""
Positive = Annotated[float, Range(above=0, below=1e30)]
Rate = Annotated[float, Range(above=0, most=1e6)]
"""A learning rate; with more, a step of Adam's is beyond single precision."""
Fraction = Annotated[float, Range(above=0, most=1)]


def coerce(annotation: Any, value: Any, name: str, of: str = "", *, strict: bool = True) -> Any:
    """``value`` as the annotation wants it.

    Args:
        annotation: type, with ranges.
        value: value to check; numbers and arrays of NumPy and PyTorch become plain ones, and a number becomes
            text where only text is possible, such as the name of a domain.
        name: name of the argument, for the error message.
        of: what it is an argument of, for the error message.
        strict: if ``False``, text is converted, as on the command line.

    Raises:
        InputError: the value is not of that type, or out of range.
    """
    from pydantic import ValidationError

    adapter, problem = _adapter(annotation), None
    for candidate in (value, *_plain(value)):
        try:
            return adapter.validate_python(candidate, strict=strict)
        except ValidationError as error:
            problem = problem or error
    assert problem is not None
    text = f"must be {_expected(problem)}, got {shown(value)}.{_hint(problem, value)}"
    raise (InputError(f"{name} of {of} {text}") if of else InputError(text, name)) from None


def _plain(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        yield [each.tolist() if hasattr(each, "tolist") else each for each in value]
    elif hasattr(value, "tolist"):
        yield value.tolist()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield str(value)


@functools.lru_cache(maxsize=4096)
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(_checkable(annotation), config=ConfigDict(allow_inf_nan=False))


def _checkable(annotation: Any) -> Any:
    """The annotation with what pydantic cannot check, or would look into too deeply, made simpler."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return Annotated[(_checkable(parts[0]), *parts[1:])]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_checkable, parts))]  # noqa: UP007
    if origin is Mapping:  # a domain may be called 3
        return typing.cast(Any, Mapping)[Any, _checkable(parts[1])]
    if origin in (Sequence, list, tuple):
        return typing.cast(Any, origin)[tuple(p if p is ... else _checkable(p) for p in parts)]
    if origin is Callable or annotation is Callable:
        return Callable[..., Any]
    if annotation in (int, float, str, bool, Path, type(None), object, Any) or origin is Literal:
        return annotation
    if origin is None and isinstance(annotation, type) and not getattr(annotation, "_is_protocol", False):
        return Annotated[Any, _Instance(annotation)]
    return Any  # a generic class or protocol, such as Dataset[Any], which others imitate


@dataclass(frozen=True)
class _Instance:
    """That a value is an instance of a class; pydantic's own InstanceOf looks into dataclasses."""

    cls: type

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.is_instance_schema(self.cls)


NOUNS = {"int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "True or False"}
NOUNS |= {"string": "text", "path": "a path", "mapping": "a mapping", "dict": "a mapping", "none": "None"}
NOUNS |= {"sequence": "a list", "list": "a list", "callable": "a function"}
BOUNDS = {"greater_than_equal": "at least", "greater_than": "above", "less_than_equal": "at most"}
BOUNDS |= {"less_than": "below", "multiple_of": "a multiple of"}


def _expected(error: ValidationError) -> str:
    """What would be valid, in words."""
    words = []
    for one in error.errors(include_url=False, include_input=False):
        kind, context = one["type"], one.get("ctx", {})
        if kind in BOUNDS:
            (bound,) = context.values()
            words.append(
                f"{BOUNDS[kind]} {bound:,}" if isinstance(bound, int) else f"{BOUNDS[kind]} {bound:g}"
            )
        elif kind == "is_instance_of":
            words.append(NOUNS.get(context["class"].lower()) or f"of class {context['class']}")
        else:
            said = one["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            words.append(NOUNS.get(kind.split("_")[0]) or said)
    return " or ".join(dict.fromkeys(words))


def _hint(error: ValidationError, value: Any) -> str:
    expected = [str(e["ctx"]["expected"]) for e in error.errors() if e["type"] == "literal_error"]
    return did_you_mean(value, [n.strip("' ") for e in expected for n in e.replace(" or ", ", ").split(", ")])


class Setting(NamedTuple):
    """One parameter of a signature."""

    name: str
    default: Any
    annotation: Any

    def words(self) -> str:
        """What it may be."""
        try:
            coerce(self.annotation, object(), self.name)
        except InputError as error:
            words = str(error.args[0]).removeprefix("must be ").partition(", got")[0]
            for _, found in list(_ranges(self.annotation))[:1]:
                ends = {"from": found.least, "above": found.above, "to": found.most, "below": found.below}
                words += "".join(f" {k} {v:g}" for k, v in ends.items() if v is not None and abs(v) < 1e6)
            return words
        return "anything"

    def space(self, size: Size = "small") -> dict[str, Any] | None:
        """What a random search samples it from, if any does."""
        for kind, found in _ranges(self.annotation):
            default, search = self.default, found.search
            if size == "large" and found.large is not None:
                default, search = found.large
            if search is not None:
                more: dict[str, Any] = {"whole": True} if kind is int else {}
                more |= {} if search.of is None else {"of": search.of}
                return {"default": default, search.kind: list(search.values), **more}
        return None


def _ranges(annotation: Any) -> Iterator[tuple[type, Range]]:
    """The number types in an annotation, with their ranges."""
    if typing.get_origin(annotation) is Annotated:
        kind, *more = typing.get_args(annotation)
        yield from ((kind, each) for each in more if isinstance(each, Range))
    else:
        for part in typing.get_args(annotation):
            yield from _ranges(part)


def settings(function: Callable[..., Any]) -> dict[str, Setting]:
    """The parameters of a function, or of a class and the parents to which it passes keyword arguments on."""
    if not inspect.isclass(function):
        return {name: s for name, s in _declared(function).items() if name not in ("self", "cls")}
    found: dict[str, Setting] = {}
    for cls in function.__mro__:
        if "__init__" in vars(cls) and cls is not object:
            own = {name: s for name, s in _declared(vars(cls)["__init__"], cls).items() if name != "self"}
            found = own | found
            kinds = {p.kind for p in inspect.signature(vars(cls)["__init__"]).parameters.values()}
            if inspect.Parameter.VAR_KEYWORD not in kinds:
                break
    return found


@functools.cache
def _declared(function: Callable[..., Any], cls: type | None = None) -> dict[str, Setting]:
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    module = sys.modules.get(getattr(cls or inner, "__module__", ""))
    names = dict(getattr(inner, "__globals__", None) or vars(module or types))
    return {
        p.name: Setting(p.name, p.default, _annotation(p, names))
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


def _annotation(parameter: inspect.Parameter, names: dict[str, Any]) -> Any:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        number = isinstance(parameter.default, (int, float)) and not isinstance(parameter.default, bool)
        return int | float if number else Any
    if not isinstance(annotation, str):
        return annotation
    try:
        holder = types.SimpleNamespace(__annotations__={"it": annotation})
        return typing.get_type_hints(holder, names, include_extras=True)["it"]
    except Exception:  # a name that is imported for type checkers only
        return Any


def check(
    function: Callable[..., Any], values: Mapping[str, Any], of: str, kind: str = "setting"
) -> dict[str, Any]:
    """``values`` for parameters of ``function``, checked; ``of`` is whose they are."""
    declared = settings(function)
    check_names(f"{kind} of {of}:", values, declared)
    return {name: coerce(declared[name].annotation, value, name, of) for name, value in values.items()}


def search_space(function: Callable[..., Any], size: Size = "small") -> dict[str, dict[str, Any]]:
    """What a random search samples the settings from, in the form of :mod:`shoal.experiments.search`."""
    spaces = {name: setting.space(size) for name, setting in settings(function).items()}
    return {name: space for name, space in spaces.items() if space is not None}


def checked(function: Function) -> Function:
    """Check the arguments of a constructor, or of any function, whenever it is called."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound, declared = signature.bind(*args, **kwargs), _declared(function)
        owner = type(args[0]).__name__ if "self" in bound.arguments else function.__name__
        for name, value in bound.arguments.items():
            if name in declared and name != "self":
                bound.arguments[name] = coerce(declared[name].annotation, value, name, owner)
        return function(*bound.args, **bound.kwargs)

    return wrapped  # type: ignore[return-value]
