"""What an argument may be, declared once: in the signature of what takes it, with its default. ::

    def __init__(self, *, tau: Annotated[float, Range(0, 1, search=uniform(0.5, 1))] = 1.0, depth: int = 3)

pydantic checks values against the annotations; it is imported when it is needed. The hyperparameters of an
algorithm are the keyword arguments of its constructor; their search spaces are part of the annotations.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import annotated_types

from shoal.errors import InputError, check_names, nearest, shown

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
        ends = {"ge": self.least, "le": self.most, "gt": self.above, "lt": self.below}
        yield annotated_types.Interval(**ends)
        if self.multiple is not None:
            yield annotated_types.MultipleOf(self.multiple)


LARGEST = 2**63 - 1
Count = Annotated[int, Range(1, 10**9)]
Few = Annotated[int, Range(1, 1000)]
"""Of what exists all at the same time, such as processes."""
Seed = Annotated[int, Range(0, LARGEST)]
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
        value: value to check; numbers of NumPy become plain ones.
        name: name of the argument, for the error message.
        of: what it is an argument of, for the error message.
        strict: if ``False``, text is converted, as on the command line.

    Raises:
        InputError: the value is not of that type, or out of range.
    """
    from pydantic import ValidationError

    adapter = _adapter(annotation)
    try:
        return adapter.validate_python(value, strict=strict)
    except ValidationError as error:
        problem = error
    for plain in _plain(value):
        with contextlib.suppress(ValidationError):
            return adapter.validate_python(plain, strict=strict)
    message = f"must be {_expected(problem)}, got {shown(value)}.{_hint(problem, value)}"
    raise (InputError(f"{name} of {of} {message}") if of else InputError(message, name)) from None


def _plain(value: Any) -> Iterator[Any]:
    """What a value may stand for: numbers and arrays of NumPy and PyTorch, and names that are numbers."""
    if isinstance(value, (list, tuple)):
        yield [each.tolist() if hasattr(each, "tolist") else each for each in value]
    elif hasattr(value, "tolist"):
        yield value.tolist()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, Real) and not isinstance(value, bool):
        yield float(value)


PLAIN = (int, float, str, bool, Path, type(None), object, Any)
LISTS = (Sequence, Mapping, list, dict, tuple, typing.Union, types.UnionType)


@functools.lru_cache(maxsize=4096)
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(_checkable(annotation), config=ConfigDict(allow_inf_nan=False))


def _checkable(annotation: Any) -> Any:
    """The annotation as pydantic can check it: of classes such as ``nn.Module``, that it is an instance."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return Annotated[(_checkable(arguments[0]), *arguments[1:])]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_checkable, arguments))]  # noqa: UP007
    if origin is Mapping:  # a domain may be called 3
        values = arguments[1] if _is_plain(arguments[1]) else Any
        return typing.cast(Any, Mapping)[Any, values]
    if annotation in PLAIN or origin is Literal or _is_plain(annotation):
        return annotation
    if origin not in (None, *LISTS, type) and origin.__module__ != "collections.abc":
        return Any  # a generic class, such as Dataset[Any], which others imitate
    kind = origin or annotation
    if kind is Callable:
        return Callable[..., Any]
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return Any
    return _instance_of(kind)


def _is_plain(annotation: Any) -> bool:
    """Whether it is a list or mapping of numbers and text, and nothing else."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal or origin is None:
        return origin is Literal or annotation in PLAIN
    if origin is Annotated:
        return _is_plain(arguments[0])
    return origin in LISTS and all(_is_plain(part) for part in arguments if part is not ...)


def _instance_of(kind: type) -> Any:
    """pydantic would look into the fields of some classes; an instance is all that is asked for."""

    from pydantic import AfterValidator
    from pydantic_core import PydanticCustomError

    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise PydanticCustomError("is_instance_of", "{class}", {"class": kind.__name__})
        return value

    return Annotated[Any, AfterValidator(check)]


NOUNS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "True or False",
    "string": "text",
    "path": "a path",
    "mapping": "a mapping",
    "dict": "a mapping",
    "sequence": "a list",
    "list": "a list",
    "callable": "a function",
    "none": "None",
}
BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
    "multiple_of": ("a multiple of", "multiple_of"),
}


def _expected(error: ValidationError) -> str:
    """What would be valid, in words."""
    words = []
    for one in error.errors(include_url=False, include_input=False):
        kind, context = one["type"], one.get("ctx", {})
        if kind in BOUNDS:
            word, bound = BOUNDS[kind]
            words.append(
                f"{word} {context[bound]:,}"
                if isinstance(context[bound], int)
                else f"{word} {context[bound]:g}"
            )
        elif kind == "literal_error":
            words.append(str(context["expected"]))
        elif kind == "value_error":
            words.append(str(context["error"]))
        elif kind == "is_instance_of":
            words.append(NOUNS.get(context["class"].lower()) or f"of class {context['class']}")
        else:
            words.append(NOUNS.get(kind.split("_")[0]) or one["msg"].removeprefix("Input should be "))
    return " or ".join(dict.fromkeys(words))


def _hint(error: ValidationError, value: Any) -> str:
    """The nearest valid name, if names are."""
    expected = [str(e["ctx"]["expected"]) for e in error.errors() if e["type"] == "literal_error"]
    names = [name.strip("' ") for text in expected for name in text.replace(" or ", ", ").split(", ")]
    near = nearest(value, names) if isinstance(value, str) else None
    return f" Did you mean {near!r}?" if near else ""


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
            return str(error.args[0]).removeprefix("must be ").partition(", got")[0] + _bounds(
                self.annotation
            )
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


def _bounds(annotation: Any) -> str:
    for _, found in _ranges(annotation):
        ends = (("from", found.least), ("above", found.above), ("to", found.most), ("below", found.below))
        return "".join(f" {word} {end:g}" for word, end in ends if end is not None and abs(end) < 1e6)
    return ""


def settings(function: Callable[..., Any]) -> dict[str, Setting]:
    """The parameters of a function, or of a class and the parents to which it passes keyword arguments on."""
    if not inspect.isclass(function):
        return {name: s for name, s in _declared(function).items() if name not in ("self", "cls")}
    found: dict[str, Setting] = {}
    for cls in function.__mro__:
        if "__init__" in vars(cls) and cls is not object:
            parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
            own = _declared(vars(cls)["__init__"], cls)
            found = {p.name: own[p.name] for p in parameters if p.name in own and p.name != "self"} | found
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return found


@functools.cache
def _declared(function: Callable[..., Any], cls: type | None = None) -> dict[str, Setting]:
    names, found = _names(function, cls), {}
    for p in inspect.signature(function).parameters.values():
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            found[p.name] = Setting(p.name, p.default, _annotation(p, names))
    return found


def _annotation(parameter: inspect.Parameter, names: dict[str, Any]) -> Any:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        numbers = isinstance(parameter.default, (int, float)) and not isinstance(parameter.default, bool)
        return int | float if numbers else Any
    if not isinstance(annotation, str):
        return annotation
    try:
        holder = types.SimpleNamespace(__annotations__={"it": annotation})
        return typing.get_type_hints(holder, names, include_extras=True)["it"]
    except Exception:  # a name that is imported for type checkers only
        return Any


def _names(function: Any, cls: type | None) -> dict[str, Any]:
    """The globals in which the annotations of a function are evaluated."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    module = sys.modules.get(getattr(cls or function, "__module__", ""))
    return dict(getattr(function, "__globals__", None) or vars(module or types))


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
                bound.arguments[name] = coerce(declared[name].annotation, value, name, owner)
        return function(*bound.args, **bound.kwargs)

    return wrapped  # type: ignore[return-value]
