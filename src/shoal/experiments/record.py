"""The result of a run, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NotRequired

from annotated_types import Ge, Lt
from pydantic import AfterValidator, ConfigDict, PlainValidator, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from shoal.errors import InputError, shown, unknown_name
from shoal.experiments.config import RunConfig
from shoal.files import finite, read_json
from shoal.training.metrics import mean_over_domains

SCHEMA = 3
"""Version of the format of records."""
PYTHON = "python"
"""The dataset of a run that `shoal.fit` did with data from Python."""

Number = Annotated[float, Strict()] | None
Count = Annotated[int, Strict(), Ge(0), Lt(2**63)]


class _Scores(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    metric: str
    average: Number
    domains: dict[str, Number]
    metrics: NotRequired[dict[str, Number]]
    by_domain: NotRequired[dict[str, dict[str, Number]]]
    selects: NotRequired[str]


class _Measurement(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    step: Count
    passes: Count
    loss: Number
    scores: dict[str, _Scores]


Measurement = Annotated[dict[str, Any], AfterValidator(TypeAdapter(_Measurement).validate_python)]
"""One evaluation: ``step``, ``passes``, ``loss``, and ``scores`` by split (see :class:`Scores.to_dict`)."""


@dataclass(frozen=True)
class RunRecord:
    """The record of a run: its configuration and all measurements, as plain data."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")  # applied when a file is read

    config: Annotated[RunConfig, PlainValidator(RunConfig.from_dict)]
    """Configuration of the run."""
    status: str
    """``finished``, ``diverged`` (the loss became non-finite) or ``failed``; see ``error``."""
    history: tuple[Measurement, ...]
    """Evaluations during the training."""
    selected: Annotated[int, Strict(), Ge(-1)]
    """Index in ``history`` of the selected evaluation; −1 if there is none."""
    rule: str
    """Selection rule."""
    seconds: Annotated[float, Strict()]
    """Duration of the training."""
    environment: Mapping[str, str]
    """Device and versions of packages."""
    error: str = ""
    """Why the run diverged or failed."""
    warm_up: tuple[Measurement, ...] = ()
    """Evaluations during the warm start."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Remarks on splits that are needed to interpret their scores."""
    agreement: tuple[dict[str, Any], ...] = ()
    """Gradient agreement during the training, if it was tracked (see :mod:`shoal.training.agreement`)."""
    interpolation: dict[str, Any] = field(default_factory=dict)
    """For WiSE-FT: ``alpha`` of the weights and, by alpha, the validation ``scores`` that selected it."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Checksums (SHA-256) of the files of the model next to the record."""
    traceback: str = ""
    """Traceback of a failed run."""
    schema: int = SCHEMA
    """Version of the format."""

    @property
    def scores(self) -> Mapping[str, Any]:
        """The scores of each split at the selected step; empty without evaluations."""
        return self.history[self.selected]["scores"] if self.history else {}

    @property
    def headline(self) -> tuple[str, float | None] | None:
        """The name and value of the score on the held-out domains."""
        return selection_score(self.scores["test"]) if "test" in self.scores else None

    def score(self, split: str, *, last: bool = False) -> float:
        """Return the score of a ``split`` by which steps and runs are selected; NaN where there is none.

        It is the mean over domains, or the metric that was chosen; at the ``last`` step, or the selected one.
        """
        value = selection_score(self._scores(split, last))[1] if self.history else None
        return math.nan if value is None else value

    def measure(self, split: str, name: str, *, last: bool = False) -> float | None:
        """Return the metric called ``name`` of a ``split``, ``None`` if it is undefined.

        It is that over all examples, at the ``last`` step or the selected one.
        """
        if not self.history:
            return None
        scores = self._scores(split, last)
        values = {scores["metric"]: scores["average"], **scores.get("metrics", {})}
        if name not in values:
            raise unknown_name("measure", name, values)
        value: float | None = finite(values[name])
        return value

    def _scores(self, split: str, last: bool) -> Mapping[str, Any]:
        scores: Mapping[str, Any] = self.history[-1]["scores"] if last else self.scores
        if split not in scores:
            raise unknown_name("split", split, scores)
        result: Mapping[str, Any] = scores[split]
        return result

    def curve(self, split: str) -> tuple[list[int], list[float | None]]:
        """Return the numbers of minibatches and the scores of a ``split`` over the course of training."""
        points = [m for m in self.history if split in m["scores"]]
        return [m["passes"] for m in points], [selection_score(m["scores"][split])[1] for m in points]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as record files contain it."""
        return {**self.__dict__, "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunRecord:
        """Create a record from the plain data (``content``) that :meth:`to_dict` returns."""
        version = content.get("schema") if isinstance(content, Mapping) else None
        if type(version) is int and version != SCHEMA:
            age, hint = ("a newer", "; update Shoal") if version > SCHEMA else ("an older", "")
            raise InputError(f"written by {age} version of Shoal, schema {version}, not {SCHEMA}{hint}")
        try:
            record = _adapter().validate_python(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "a record"
            raise InputError(f"{place} is {shown(first['input'])}: {first['msg']}") from error
        least = 0 if record.status == "finished" else -1
        if not least <= record.selected < len(record.history):
            raise InputError(f"selected is {record.selected}, of {len(record.history)} measurements")
        return record


@cache
def _adapter() -> TypeAdapter[RunRecord]:
    return TypeAdapter(RunRecord)


def selection_score(scores: Mapping[str, Any]) -> tuple[str, float | None]:
    """The metric that selects and its value in a split: the mean over domains, unless another metric selects.

    The value is ``None`` where it is undefined.
    """
    if name := scores.get("selects"):
        return str(name), scores.get("metrics", {}).get(name)
    metric = str(scores["metric"])
    value = mean_over_domains(metric, scores["domains"].values())
    return metric, None if math.isnan(value) else value


def read_record(path: Path, config: RunConfig | None = None) -> RunRecord:
    """Read the record in the file ``path``, which must be that of ``config``, if one is expected."""
    try:
        record = RunRecord.from_dict(read_json(path))
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        hint = "" if "newer version" in reason else "; move or remove it"
        raise InputError(f"{str(path)!r} is not a run record ({reason}){hint}.") from error
    if config is not None:
        record.config.check_same(config, f"{str(path)!r} is the record of")
    return record
