"""What an argument may be, declared once: in the signature of what takes it, with its default. ::

    def __init__(self, *, tau: Annotated[float, Range(0, 1, search=uniform(0.5, 1))] = 1.0, depth: int = 3)

pydantic checks values against the annotations. The hyperparameters of an algorithm are the keyword arguments
of its constructor; what a random search samples them from is part of the annotations.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import annotated_types
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from shoal.errors import InputError, check_names, did_you_mean, shown

Function = TypeVar("Function", bound=Callable[..., Any])
Size = Literal["small", "large"]
"""Of the images: a search space may differ for large ones, which pretrained models are fine-tuned on."""
Search = Mapping[str, Any]
"""Of what a random search samples (see :mod:`shoal.experiments.search`)."""


def choice(*values: Any) -> Search:
    return {"choice": list(values)}


def uniform(low: float, high: float) -> Search:
    return {"uniform": [low, high]}


def log10(low: float, high: float) -> Search:
    """10 to the power of a uniform number."""
    return {"log10": [low, high]}


def log2(low: float, high: float) -> Search:
    """2 to the power of a uniform number."""
    return {"log2": [low, high]}


@dataclass(frozen=True)
class Range(annotated_types.GroupedMetadata):
    """The numbers that an argument may be: from ``least`` to ``most``, or ``above`` or ``below`` an end."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    search: Search | None = field(default=None, hash=False)
    large: tuple[Any, Search] | None = field(default=None, hash=False)
    """The default and the search for large images, where they are not the same as for small ones."""
    multiple: int | None = None

    def __iter__(self) -> Iterator[Any]:
        yield annotated_types.Interval(ge=self.least, le=self.most, gt=self.above, lt=self.below)
        if self.multiple is not None:
            yield annotated_types.MultipleOf(self.multiple)

    def __str__(self) -> str:
        ends = {"from": self.least, "above": self.above, "to": self.most, "below": self.below}
        return " ".join(f"{k} {v:g}" for k, v in ends.items() if v is not None and abs(v) < 1e6)


def valid_if(test: Callable[[Any], Any], words: str) -> AfterValidator:
    """For an annotation: values for which ``test`` is true, which are ``words`` in error messages."""

    def check(value: Any) -> Any:
        if not test(value):
            raise ValueError(words)
        return value

    return AfterValidator(check)


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
    adapter, problems = _adapter(annotation), []
    for candidate in (value, *_plain(value)):
        try:
            return adapter.validate_python(candidate, strict=strict)
        except ValidationError as error:
            problems.append(error)
    choices = [str(c) for kind in _parts(annotation, Literal) for c in typing.get_args(kind)]
    text = f"must be {_expected(problems[0])}, got {shown(value)}.{did_you_mean(value, choices)}"
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
        is_instance = valid_if(
            lambda value: isinstance(value, annotation), f"an instance of {annotation.__name__}"
        )
        return Annotated[Any, is_instance]
    return Any  # a generic class or protocol, such as Dataset[Any], which others imitate


WORDS = {
    **{"greater than or equal to": "at least", "less than or equal to": "at most", "greater than": "above"},
    **{"less than": "below", "a valid integer": "a whole number", "a valid string": "text"},
    **{"a valid number": "a number", "a valid boolean": "True or False", "an instance of Path": "a path"},
    **{"a valid ": "a ", "Input should be ": "", "Value error, ": "", "callable": "a function"},
}
"""Of pydantic's messages, shorter."""


def _expected(error: ValidationError) -> str:
    """What would be valid, in words."""
    found = []
    for one in error.errors(include_url=False, include_input=False):
        text = one["msg"].partition(",")[0] if "int" in one["type"] else one["msg"]
        for long, short in WORDS.items():
            text = text.replace(long, short)
        found.append(text)
    return " or ".join(dict.fromkeys(found))


def _parts(annotation: Any, wanted: Any) -> Iterator[Any]:
    """The parts of an annotation that are ``wanted[…]``."""
    if typing.get_origin(annotation) is wanted:
        yield annotation
    else:
        for part in typing.get_args(annotation):
            yield from _parts(part, wanted)


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
            return " ".join([words, *[str(found) for _, found in self._ranges()][:1]]).rstrip()
        return "anything"

    def space(self, size: Size = "small") -> dict[str, Any] | None:
        """Its default and what a random search samples it from, if any does."""
        for kind, found in self._ranges():
            default, search = self.default, found.search
            if size == "large" and found.large is not None:
                default, search = found.large
            if search is not None:
                return {"default": default, **search, **({"whole": True} if kind is int else {})}
        return None

    def _ranges(self) -> Iterator[tuple[type, Range]]:
        """The number types in the annotation, with their ranges."""
        for kind, *metadata in map(typing.get_args, _parts(self.annotation, Annotated)):
            yield from ((kind, each) for each in metadata if isinstance(each, Range))


def settings(function: Callable[..., Any]) -> dict[str, Setting]:
    """The parameters of a function, or of a class and the parents to which it passes keyword arguments on."""
    if not inspect.isclass(function):
        return _declared(function)
    found: dict[str, Setting] = {}
    for init in (vars(cls)["__init__"] for cls in function.__mro__[:-1] if "__init__" in vars(cls)):
        found = _declared(init) | found
        if _variadic(init) is None:
            break
    return found


@functools.cache
def _declared(function: Callable[..., Any]) -> dict[str, Setting]:
    """The named parameters of a function, without ``self``."""
    return {
        p.name: Setting(p.name, p.default, _annotation(p, function))
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in ("self", "cls")
    }


def _variadic(function: Callable[..., Any]) -> inspect.Parameter | None:
    """The parameter ``**options``."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return next((p for p in parameters if p.kind is p.VAR_KEYWORD), None)


def _annotation(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        number = isinstance(parameter.default, (int, float)) and not isinstance(parameter.default, bool)
        return int | float if number else Any
    if not isinstance(annotation, str):
        return annotation
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return eval(annotation, getattr(inspect.unwrap(function), "__globals__", {}))
    except Exception:  # a name that is imported for type checkers only
        return Any


@functools.cache
def options_type(function: Callable[..., Any]) -> type | None:
    """The ``TypedDict`` of a function that takes ``**options: Unpack[…]``; ``None`` for others."""
    if (variadic := _variadic(function)) is None or "Unpack[" not in str(variadic.annotation):
        return None
    found: type = typing.get_args(_annotation(variadic, function))[0]
    return found


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
    """Check the arguments of a function or a constructor, by name and by type, whenever it is called."""
    signature, variadic = inspect.signature(function), _variadic(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        options = options_type(function)
        found = {} if options is None else typing.get_type_hints(options, include_extras=True)
        return found | {name: setting.annotation for name, setting in _declared(function).items()}

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        of = type(args[0]).__name__ if "self" in signature.parameters else ""
        if variadic is None or options_type(function):
            for name in kwargs.keys() - hints().keys():
                near = did_you_mean(name, hints())
                raise InputError(f"{of or function.__name__} has no option {shown(name)}.{near}")
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"{of or function.__name__}: {error}.") from None

        def good(name: str, value: Any) -> Any:
            return coerce(hints()[name], value, name, of) if name in hints() else value

        for name, value in bound.arguments.items():
            if variadic is not None and name == variadic.name:
                bound.arguments[name] = {key: good(key, each) for key, each in value.items()}
            else:
                bound.arguments[name] = good(name, value)
        return function(*bound.args, **bound.kwargs)

    return wrapped  # type: ignore[return-value]
