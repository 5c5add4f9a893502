"""Everything that decides the result of a run, as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from shoal.errors import InputError, check_names, shown
from shoal.files import read_yaml
from shoal.options import ModelOptions, TrainingOptions, declared
from shoal.settings import Range, coerce
from shoal.training.metrics import metric

REQUIRED = ("dataset", "algorithm", "steps")
OPTIONS = {**declared(ModelOptions), **declared(TrainingOptions)}
FIELDS: dict[str, tuple[Any, Any]] = {
    "dataset": (str, None),
    "algorithm": (str, None),
    "steps": (OPTIONS["steps"].type, None),
    "data_options": (Mapping[str, Any], {}),
    "holdout": (Annotated[float, Range(above=0, below=1)] | None, None),
    "protocol": (Mapping[str, Any], {}),
    "label": (str, ""),
    **{
        name: (option.type, option.default)
        for name, option in OPTIONS.items()
        if name not in ("steps", "freeze_backbone")  # a frozen backbone is one of ``model_options``
    },
}
"""The type and default of each field: options of a run, and what else decides its result."""


def _check(config: Any) -> None:
    for name, (kind, default) in FIELDS.items():
        value = getattr(config, name)
        if callable(value):
            raise InputError(f"a run that is saved takes names, not {shown(value)}; use shoal.fit.")
        value = str(value) if isinstance(value, Path) else value
        if name in REQUIRED or value != default:
            object.__setattr__(config, name, coerce(kind, value, name))
    if config.metric is not None:
        object.__setattr__(config, "metric", metric(config.metric).name)
    if config.protocol and (config.holdout is not None or "held_out" in config.data_options):
        raise InputError("a protocol splits the data itself; set neither holdout nor held_out.", "protocol")


_Fields: Any = make_dataclass(
    "_Fields",
    [
        (name, kind)
        if name in REQUIRED
        else (name, kind, field(default_factory=dict) if default == {} else field(default=default))
        for name, (kind, default) in FIELDS.items()
    ],
    namespace={"__post_init__": _check},
    frozen=True,
)


class RunConfig(_Fields):
    """The configuration of one run: plain data that decides its result, up to rounding of the device.

    Its fields are the options of :class:`~shoal.options.TrainingOptions` and
    :class:`~shoal.options.ModelOptions`, and these:

    Args:
        dataset: name of the dataset.
        algorithm: name of the algorithm.
        steps: number of training steps.
        data_options: options of the dataset.
        holdout: fraction of every training domain that is held out for validation, instead of the validation
            split of the dataset.
        protocol: split of DomainBed: ``held_out`` is a list of one or two domains, ``seed`` the seed of the
            split, ``trial`` the number of the hyperparameter trial (default: 0); see
            :mod:`shoal.experiments.protocol`.
        label: name of the run in tables; not part of its identity.
    """

    @property
    def name(self) -> str:
        return self.label or str(self.algorithm)

    def describe(self) -> str:
        """Which run it is among others, in words."""
        names = [self.held_out] if isinstance(self.held_out, str) else list(self.held_out or ())
        listed = " and ".join(map(str, names)) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
        return f"{self.name} on {self.dataset}, {f'{listed} held out, ' * bool(names)}seed {self.seed}"

    @cached_property
    def identity(self) -> str:
        """A short name of the configuration, the same on every machine, which changes with every field.

        Fields at their defaults do not count, so that a field of a later version changes no identity.
        """
        content = {name: value for name, value in self.given().items() if name != "label"}
        text = json.dumps(content, sort_keys=True, default=dict)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def held_out(self) -> Any:
        """The domain that is held out, or a list of several; ``None``: the dataset's test split."""
        return self.data_options.get("held_out", self.protocol.get("held_out"))

    def given(self) -> dict[str, Any]:
        """Return the fields that are not at their defaults."""
        return {k: v for k, v in self.to_dict().items() if k in REQUIRED or v != FIELDS[k][1]}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        values = {name: getattr(self, name) for name in FIELDS}
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunConfig:
        """Create a configuration from the plain data (``content``) that :meth:`to_dict` returns."""
        if not isinstance(content, Mapping):
            raise InputError(f"a run configuration must be a mapping, got {shown(content)}.")
        check_names("field of a run configuration:", content, FIELDS)
        if missing := set(REQUIRED) - set(content):
            raise InputError(f"a run configuration lacks {', '.join(sorted(missing))}.")
        config = RunConfig(**content)
        try:
            _ = config.identity
        except (TypeError, ValueError) as error:  # a date in YAML, for instance
            raise InputError(f"a run configuration must be plain data ({error}).") from error
        return config

    def check_same(self, other: RunConfig, what: str) -> None:
        """Refuse another configuration; ``what`` is where this one was found."""
        if other.identity != self.identity:
            pairs = [(name, value, getattr(other, name)) for name, value in self.to_dict().items()]
            texts = [f"{name} {shown(one)}, not {shown(two)}" for name, one, two in pairs if one != two]
            raise InputError(f"{what} another run ({', '.join(texts[:3])}); choose another folder.")


def read_config(folder: Path) -> RunConfig:
    """Read the configuration of the run in ``folder``."""
    path = folder / "config.yaml"
    try:
        content = read_yaml(path)
        if isinstance(content, dict) and "run" not in content:
            raise InputError("not written by `shoal train`; use shoal.fit with resume=True")
        return RunConfig.from_dict(content["run"] if isinstance(content, dict) else content)
    except FileNotFoundError:
        raise InputError(f"{str(folder)!r} contains no run: there is no config.yaml in it.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(f"{str(path)!r} cannot be read: {reason}.") from error


def check_same_run(folder: Path, config: RunConfig) -> None:
    """Refuse ``config`` if the folder contains another run."""
    path = folder / "config.yaml"
    if path.exists() or path.is_symlink():
        read_config(folder).check_same(config, f"{str(folder)!r} contains")
