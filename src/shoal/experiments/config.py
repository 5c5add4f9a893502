"""Everything that decides how a run ends, as plain data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.errors import InputError, check_names, shown
from shoal.files import dump_yaml, read_yaml, write_atomically
from shoal.training.metrics import metric

# torch.optim classes by the names used in configurations.
OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}
SCHEDULES = ("cosine", "linear")
_KINDS: Mapping[str, Any] = {
    "str": (str, "text"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "list[str]": (list, "a list"),
    "Mapping[str, Any]": (Mapping, "a mapping"),
    "None": (type(None), "nothing"),
}
"""What the types of fields are in a file, and in words."""


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one run.

    Runs with equal configurations give equal records, up to rounding of the device. The options have the same
    meaning as in :func:`shoal.train`, unless described otherwise here.

    Args:
        dataset: name of the dataset.
        algorithm: name of the algorithm.
        steps: number of training steps, each on ``domains_per_step`` batches; :attr:`passes` is their
            product.
        data_options: options of the dataset.
        settings: hyperparameters of the algorithm.
        model: name of the model (default: that of the dataset).
        model_options: options of the model.
        optimizer: ``adam``, ``adamw`` or ``sgd``.
        optimizer_options: options of the optimizer, such as ``{"lr": 0.001}``.
        head_lr: learning rate of the head.
        layer_decay: layer-wise learning rate decay.
        batch_size: number of examples per batch.
        domains_per_step: number of domains per step.
        draw: how batches are sampled.
        seed: random seed of the initial weights and the batches.
        warm_start: warm start with ERM, or of the head.
        warm_select: weights of the warm start to continue from, ``best`` or ``last``.
        eval_every: number of steps between evaluations.
        eval_limit: maximum number of examples per split to evaluate on.
        select: weights to keep, ``best`` or ``last``.
        patience: number of evaluations without improvement after which training stops.
        precision: precision of the forward pass.
        clip: maximum norm of the gradient.
        accumulate: number of micro-batches per batch.
        schedule: learning rate schedule: ``cosine`` or ``linear``, to zero; ``step:0.96:1000`` multiplies the
            learning rate by 0.96 every 1,000 steps; ``warmup:50`` and ``warmup:50,cosine`` increase it
            linearly over the first 50 steps.
        average: averaging of the weights, ``sma``, ``ema``, ``swad`` or ``swad-paper``.
        average_start: step at which ``sma`` starts.
        average_ratio: threshold ratio of ``swad``.
        average_decay: decay of ``ema``.
        wise_ft: interpolation with the initial weights.
        miro: weight of the MIRO penalty.
        l2_sp: weight of the L2-SP penalty.
        l2_sp_head: weight decay of the head, with ``l2_sp``.
        retrain: train again on training and validation examples.
        on_nan: ``stop`` at a non-finite step, or ``skip`` it.
        weights: file of initial weights (default: random initialization).
        holdout: fraction of every training domain that is held out for validation, instead of the validation
            split of the dataset.
        protocol: split of DomainBed: ``leave_out`` is a list of one or two domains, ``trial`` the number of
            the split, ``draw`` the number of the hyperparameter trial (default: 0); see
            :mod:`shoal.experiments.protocol`.
        metric: metric for selection, see :mod:`shoal.training.metrics` (default: that of the dataset).
        eval_splits: splits to evaluate (default: all).
        memory_format: ``contiguous`` (the default), ``channels-last`` or ``auto``, which is decided by a
            trial on CUDA, as a precision of ``auto`` is. The decision is part of the record and not of the
            identity of the run.
        label: name of the run in tables; not part of its identity.
    """

    dataset: str
    algorithm: str
    steps: int
    data_options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    optimizer_options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    head_lr: float | None = None
    layer_decay: float | None = None
    batch_size: int = 32
    domains_per_step: int | None = None
    draw: str | None = None
    seed: int = 0
    warm_start: int | float | str | None = None
    warm_select: str | None = None
    eval_every: int | None = None
    eval_limit: int | None = None
    select: str | None = None
    patience: int | None = None
    precision: str | None = None
    clip: float | None = None
    accumulate: int = 1
    schedule: str | None = None
    average: str | None = None
    average_start: int | None = None
    average_ratio: float | None = None
    average_decay: float | None = None
    wise_ft: float | str | None = None
    miro: float | None = None
    l2_sp: float | None = None
    l2_sp_head: float | None = None
    retrain: bool = False
    on_nan: str = "stop"
    weights: str | None = None
    holdout: float | None = None
    protocol: Mapping[str, Any] = field(default_factory=dict)
    metric: str | None = None
    eval_splits: list[str] | None = None
    memory_format: str | None = None
    label: str = ""

    def __post_init__(self) -> None:
        check_names("optimizer", [self.optimizer], OPTIMIZERS)
        if self.after_warmup is not None and self.decay is None:
            check_names("schedule", [self.after_warmup], SCHEDULES)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise InputError(f"seed must be a whole number of at least 0, got {self.seed!r}.")
        if self.holdout is not None and not (isinstance(self.holdout, float) and 0 < self.holdout < 1):
            raise InputError(
                f"holdout must be a fraction between 0 and 1, such as 0.2; got {shown(self.holdout)}."
            )
        for name, (types, words) in _TYPES.items():
            value = getattr(self, name)
            if value is None and value is _DEFAULTS.get(name, 0):
                continue
            if not isinstance(value, types) or isinstance(value, bool) != (bool in types):
                raise InputError(f"{name} must be {words}, got {repr(value)[:40]}.")
            if isinstance(value, int) and abs(value) >= 2**63:
                raise InputError(f"{name} is out of range: {str(value)[:40]}.")
            if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
                raise InputError(f"{name} must have names as keys, got {str(dict(value))[:40]}.")
        if self.steps < 1:
            raise InputError(f"steps must be at least 1, got {self.steps}.")
        if self.metric is not None:
            object.__setattr__(self, "metric", metric(self.metric).name)
        if self.protocol:
            self._check_protocol()

    def _check_protocol(self) -> None:
        check_names("part of a protocol:", self.protocol, ("leave_out", "trial", "draw"))
        names = self.protocol.get("leave_out")
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            raise InputError(f"leave_out must be a list of domains' names, got {names!r}.")
        if not 1 <= len(names) <= 2 or len(set(names)) < len(names):
            raise InputError(f"leave_out must name one domain or two different ones, got {list(names)!r}.")
        for part in ("trial", "draw"):
            number = self.protocol.get(part, 0 if part == "draw" else None)
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise InputError(f"{part} must be a whole number of at least 0, got {number!r}.")
        if self.holdout is not None:
            raise InputError(
                "holdout and a protocol both split the training domains; specify only one of them."
            )
        if "test" in self.data_options:
            raise InputError("a protocol holds domains out itself; do not set the dataset's option test.")

    @property
    def warmup(self) -> int:
        """Over how many steps the learning rate rises to its full value."""
        first = str(self.schedule).partition(",")[0]
        kind, _, steps = first.partition(":")
        if kind != "warmup":
            return 0
        if not (steps.isdecimal() and int(steps) > 0):
            raise InputError(f"schedule={self.schedule!r}; a warmup is warmup:STEPS, such as warmup:50.")
        return int(steps)

    @property
    def after_warmup(self) -> str | None:
        """The schedule without its warm-up."""
        return (str(self.schedule).partition(",")[2] or None) if self.warmup else self.schedule

    @property
    def decay(self) -> tuple[float, int] | None:
        """The factor and the number of steps of a schedule ``step:FACTOR:EVERY``."""
        kind, *rest = str(self.after_warmup).split(":")
        if kind != "step":
            return None
        try:
            factor, every = float(rest[0]), int(rest[1])
        except (IndexError, ValueError):
            factor, every = 0.0, 0
        if len(rest) != 2 or not 0 < factor <= 1 or every < 1:
            raise InputError(
                f"schedule={self.schedule!r}; it must be step:FACTOR:EVERY, such as step:0.96:1000."
            )
        return factor, every

    @property
    def name(self) -> str:
        return self.label or self.algorithm

    @cached_property
    def identity(self) -> str:
        """A short name for what is run, the same on every machine: changes whenever a field does.

        Fields at their defaults do not count: one that comes with a later version changes no name. Nor do
        those that say the default (:data:`SAME_AS_NONE`).
        """
        content = {name: getattr(self, name) for name in _TYPES}
        content |= {name: None for name, usual in SAME_AS_NONE.items() if content[name] == usual}
        content = {k: v for k, v in content.items() if k in REQUIRED or v != _DEFAULTS[k]}
        content.pop("label", None)
        text = json.dumps(content, sort_keys=True, default=dict)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunConfig:
        if not isinstance(content, Mapping):
            raise InputError(f"a run configuration must be a mapping, got {content!r}.")
        if not content.keys() <= _TYPES.keys():
            check_names("field of a run configuration:", content, _TYPES)
        if missing := set(REQUIRED) - set(content):
            raise InputError(f"a run configuration lacks {', '.join(sorted(missing))}.")
        config = cls(**content)
        try:
            _ = config.identity
        except (TypeError, ValueError) as error:  # a date in YAML, for instance
            raise InputError(f"a run configuration must be plain data ({error}).") from error
        return config


REQUIRED = ("dataset", "algorithm", "steps")
SAME_AS_NONE = {"precision": "fp32", "memory_format": "contiguous"}
"""By field: the value that is meant where there is none."""
_DEFAULTS: dict[str, Any] = {}
_TYPES: dict[str, tuple[Any, str]] = {}
"""By field: what it may be in a file, and that in words."""
for _field in fields(RunConfig):
    _kinds = str(_field.type).split(" | ")
    _words = " or ".join(_KINDS[kind][1] for kind in _kinds if kind != "None")
    _TYPES[_field.name] = tuple(_KINDS[kind][0] for kind in _kinds), _words
_DEFAULTS |= asdict(RunConfig("", "", 1))


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
    return read_started(folder)[0]


def read_started(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration of the run in ``folder``, and its options that change no result."""
    content = read_file(folder)
    if "run" not in content:
        raise InputError(
            f"{str(folder)!r} was not written by `shoal train`; to resume it, call shoal.fit with "
            "resume=True."
        )
    try:
        return RunConfig.from_dict(content["run"]), check_how(content.get("how") or {})
    except InputError as error:
        raise InputError(f"{str(folder / 'config.yaml')!r}: {error}") from error


def check_how(how: Any) -> dict[str, Any]:
    if not isinstance(how, Mapping):
        raise InputError(f"how must be a mapping, got {str(how)[:40]!r}.")
    return {str(name): value for name, value in how.items()}


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


def change_config(folder: Path, config: RunConfig) -> None:
    content = {**read_file(folder), "run": config.to_dict()}
    write_atomically(folder / "config.yaml", dump_yaml(content).encode())
