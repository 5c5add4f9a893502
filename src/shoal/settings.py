"""What an argument may be, declared once, with its default: in the signature of the function that takes it.

The hyperparameters of an algorithm are annotated attributes of its class, and what a random search samples
them from is part of the annotation::

    tau: Annotated[float, Range(0, 1, search=uniform(0.5, 1))] = 1.0

pydantic checks values against the annotations.
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
from pydantic import AfterValidator, ConfigDict, InstanceOf, TypeAdapter, ValidationError

from shoal.errors import InputError, check_names, did_you_mean, shown

Function = TypeVar("Function", bound=Callable[..., Any])
Size = Literal["small", "large"]
"""Of the images: a search space may differ for large ones, which pretrained models are fine-tuned on."""
Search = Mapping[str, Any]
"""Of what a random search samples (see :mod:`shoal.experiments.search`)."""
PLAIN = (int, float, str, bool, Path, type(None), object, Any, Callable)


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

    def __iter__(self) -> Iterator[Any]:
        yield annotated_types.Interval(ge=self.least, le=self.most, gt=self.above, lt=self.below)

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
    errors = []
    for candidate in (value, *_plain(value)):
        try:
            return _adapter(annotation).validate_python(candidate, strict=strict)
        except ValidationError as error:
            errors.append(error)
    choices = [str(c) for kind in _parts(annotation, Literal) for c in typing.get_args(kind)]
    text = f"must be {_expected(errors[0])}, got {shown(value)}.{did_you_mean(value, choices)}"
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
    if annotation in PLAIN or origin in (Callable, Literal):
        return annotation
    if isinstance(annotation, type) and origin is None and not getattr(annotation, "_is_protocol", False):
        return typing.cast(Any, InstanceOf)[annotation]
    return Any  # a generic class or protocol, such as Dataset[Any], which others imitate


def _expected(error: ValidationError) -> str:
    """What would be valid, in pydantic's words."""
    found = []
    for each in error.errors(include_url=False, include_input=False):
        text = each["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        text = text.partition(", got ")[0].partition(", unable ")[0]
        found.append(text.replace("greater than or equal to", "at least").replace("greater than", "above"))
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
            words = words.replace("valid number", "number").replace("a valid integer", "an integer")
            words = words.replace("a valid boolean", "true or false")
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
    """The named parameters of a function; of a class its annotated attributes that have a default.

    Those are the hyperparameters of an algorithm, with inherited ones.
    """
    if inspect.isclass(function):
        classes = [each for each in reversed(function.__mro__) if not each.__module__.startswith("torch.")]
        return {
            name: Setting(name, vars(cls)[name], annotation)
            for cls in classes
            for name, annotation in inspect.get_annotations(cls, eval_str=True).items()
            if name in vars(cls) and typing.get_origin(annotation) is not typing.ClassVar
        }
    hints, options = _hints(function), options_type(function)
    named = {
        p.name: Setting(p.name, p.default, hints.get(p.name, Any))
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in ("self", "cls")
    }
    others = {} if options is None else typing.get_type_hints(options, include_extras=True)
    return named | {name: Setting(name, None, hint) for name, hint in others.items()}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    whole = inspect.unwrap(getattr(function, "func", function))  # `func` of a functools.partial
    return typing.get_type_hints(whole, include_extras=True)


@functools.cache
def options_type(function: Callable[..., Any]) -> type | None:
    """The ``TypedDict`` of a function that takes ``**options: Unpack[…]``; ``None`` for others."""
    found = _hints(function).get("options")
    return typing.get_args(found)[0] if "Unpack[" in str(found) else None


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
    signature = inspect.signature(function)
    variadic = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)

    @functools.cache
    def hints() -> dict[str, Any]:
        return {name: setting.annotation for name, setting in settings(function).items()}

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        of, known = type(args[0]).__name__ if "self" in signature.parameters else "", hints()
        if variadic is None or options_type(function):
            check_names(f"option of {of or function.__name__}:", kwargs, known)
        given = signature.bind(*args, **kwargs).arguments
        given |= given.pop(variadic or "", {})
        good = {n: coerce(known[n], v, n, of) if n in known else v for n, v in given.items()}
        return function(**good)

    return wrapped  # type: ignore[return-value]
