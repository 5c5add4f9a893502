"""Everything that decides how a run ends, as plain data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from shoal.errors import InputError, check_names, shown
from shoal.files import read_yaml
from shoal.options import ModelOptions, TrainingOptions, declared
from shoal.settings import Range, coerce
from shoal.training.metrics import metric

OWN: Mapping[str, tuple[Any, Any]] = {
    "dataset": (str, None),
    "algorithm": (str, None),
    "steps": (declared(TrainingOptions)["steps"].type, None),
    "data_options": (Mapping[str, Any], {}),
    "holdout": (Annotated[float, Range(above=0, below=1)] | None, None),
    "protocol": (Mapping[str, Any], {}),
    "label": (str, ""),
}
"""Fields that are not options of a training, and those that must be given: their types and defaults."""
REQUIRED = ("dataset", "algorithm", "steps")
FIELDS = {
    **OWN,
    **{
        name: (each.type, each.option.default)
        for name, each in {**declared(ModelOptions), **declared(TrainingOptions)}.items()
        if name not in ("steps", "freeze_backbone")  # a frozen backbone is an option of the model
    },
}
SAME_AS_NONE = {"precision": "fp32", "memory_format": "contiguous", "schedule": "constant"}
"""By field: the value that is meant where there is none."""


class _RunConfig:
    """The configuration of one run: plain data that decides how it ends, up to rounding of the device.

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

    if TYPE_CHECKING:

        def __init__(self, dataset: str, algorithm: str, steps: int, *args: Any, **fields: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

        __dataclass_fields__: ClassVar[dict[str, Any]]

    def __post_init__(self) -> None:
        for name, (kind, default) in FIELDS.items():
            value = getattr(self, name)
            if name in REQUIRED or (value is not default and value != default):
                object.__setattr__(self, name, coerce(kind, _named(value), name))
        if self.metric is not None:
            object.__setattr__(self, "metric", metric(self.metric).name)
        if self.protocol:
            self._check_protocol()

    def _check_protocol(self) -> None:
        check_names("part of a protocol:", self.protocol, ("held_out", "seed", "trial"))
        names = self.protocol.get("held_out")
        if not isinstance(names, (list, tuple)) or not 1 <= len(set(names)) == len(names) <= 2:
            raise InputError(f"held_out must name one domain or two different ones, got {shown(names)}.")
        for part in ("seed", "trial"):
            coerce(Annotated[int, Range(0)], self.protocol.get(part, 0), part)
        if self.holdout is not None:
            raise InputError("a protocol splits the training domains itself.", "holdout")
        if "held_out" in self.data_options:
            raise InputError(
                "a protocol holds domains out itself; do not set it for the dataset.", "held_out"
            )

    @property
    def name(self) -> str:
        return self.label or str(self.algorithm)

    @cached_property
    def identity(self) -> str:
        """A short name for what is run, the same on every machine: changes whenever a field does.

        Fields at their defaults do not count: one that comes with a later version changes no name. Nor do
        those that say the default (:data:`SAME_AS_NONE`).
        """
        content = {k: v for k, v in self.given().items() if k != "label" and SAME_AS_NONE.get(k) != v}
        text = json.dumps(content, sort_keys=True, default=dict)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def given(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        fields = self.to_dict()
        return {k: v for k, v in fields.items() if k in REQUIRED or v != FIELDS[k][1]}

    def to_dict(self) -> dict[str, Any]:
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in _values(self).items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunConfig:
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


def _named(value: Any) -> Any:
    """Functions and classes cannot be written down: only names can."""
    if callable(value):
        raise InputError(f"a run that is saved takes names, not {shown(value)}; use shoal.fit.")
    return str(value) if isinstance(value, Path) else value


def _values(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in FIELDS}


if TYPE_CHECKING:
    RunConfig = _RunConfig
else:
    RunConfig = make_dataclass(
        "RunConfig",
        [
            (name, kind, field(default_factory=dict) if default == {} else field(default=default))
            if name not in REQUIRED
            else (name, kind)
            for name, (kind, default) in FIELDS.items()
        ],
        bases=(_RunConfig,),
        frozen=True,
    )
    RunConfig.__module__, RunConfig.__doc__ = __name__, _RunConfig.__doc__


def read_file(folder: Path) -> dict[str, Any]:
    """The config.yaml of the run in ``folder``."""
    path = folder / "config.yaml"
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        raise InputError(f"{str(folder)!r} contains no run: there is no config.yaml in it.") from None
    except InputError:
        raise
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(f"{str(path)!r} cannot be read: {why}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{str(path)!r} is not the configuration of a run.")
    return content


def read_config(folder: Path) -> RunConfig:
    """Read the configuration of the run in a folder.

    Args:
        folder: run folder.
    """
    content = read_file(folder)
    if "run" not in content:
        raise InputError(f"{str(folder)!r} was not written by `shoal train`; use shoal.fit with resume=True.")
    try:
        return RunConfig.from_dict(content["run"])
    except InputError as error:
        raise InputError(f"{str(folder / 'config.yaml')!r}: {error}") from error


def check_same_run(folder: Path, config: RunConfig) -> None:
    """Refuses ``config`` where the folder holds another run."""
    if not os.path.lexists(folder / "config.yaml"):
        return
    began = read_config(folder)
    if began.identity != config.identity:
        changes = differences(began, config)
        raise InputError(f"{str(folder)!r} contains another run ({changes}); choose another folder.")


def differences(there: RunConfig, asked: RunConfig) -> str:
    """In words, of two configurations; at most three of them."""
    pairs = [(k, there.to_dict()[k], v) for k, v in asked.to_dict().items()]
    # Of mappings, such as the options of the data, what differs in them.
    parts = [
        (f"{k} {part}", old.get(part), new.get(part))
        for k, old, new in pairs
        if isinstance(old, dict) and isinstance(new, dict)
        for part in {**old, **new}
    ]
    whole = [(k, old, new) for k, old, new in pairs if not (isinstance(old, dict) and isinstance(new, dict))]
    every = [f"{k} {shown(old)}, not {shown(new)}" for k, old, new in [*whole, *parts] if old != new]
    return ", ".join(every[:3]) + (f", and {len(every) - 3} more" if len(every) > 3 else "")
