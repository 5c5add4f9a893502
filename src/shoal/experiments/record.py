"""What came out of a run, as plain data."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shoal.errors import InputError, check_names, unknown_name
from shoal.experiments.config import RunConfig, differences
from shoal.files import read_json
from shoal.training.metrics import mean_over_domains

SCHEMA = 2
"""Version of the records written here; those without a number are of version 1."""
PYTHON = "python"
"""The dataset of a run that `shoal.fit` did with data from Python."""
Measurement = dict[str, Any]
"""One evaluation: ``step``, ``passes``, ``loss``, and ``scores`` by split (see :class:`Scores.to_dict`)."""


@dataclass(frozen=True)
class RunRecord:
    """The record of a run: its configuration and all measurements, as plain data."""

    config: RunConfig
    """Configuration of the run."""
    status: str
    """``finished``, ``diverged`` (the loss became non-finite) or ``failed``; see ``error``."""
    history: tuple[Measurement, ...]
    """Evaluations during the training."""
    selected: int
    """Index in ``history`` of the selected evaluation; −1 if there is none."""
    rule: str
    """Selection rule."""
    seconds: float
    """Duration of the training."""
    environment: Mapping[str, str]
    """Device and versions of packages."""
    error: str = ""
    """Why the run diverged or failed."""
    warm_up: tuple[Measurement, ...] = ()
    """Evaluations during the warm start."""
    skipped: int = 0
    """Number of non-finite steps that were skipped."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Remarks on splits that are needed to interpret their scores."""
    agreement: tuple[Mapping[str, Any], ...] = ()
    """Gradient agreement during the training, if it was tracked (see :mod:`shoal.training.agreement`)."""
    interpolation: Mapping[str, Any] = field(default_factory=dict)
    """For WiSE-FT: ``alpha`` of the weights and, by alpha, the validation ``scores`` that selected it."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Checksums (SHA-256) of the files of the model next to the record."""
    traceback: str = ""
    """Traceback of a failed run."""
    schema: int = SCHEMA
    """Version of the format."""

    @property
    def chosen(self) -> Mapping[str, Any]:
        """The scores of each split at the selected step; empty without evaluations."""
        scores: Mapping[str, Any] = self.history[self.selected]["scores"] if self.history else {}
        return scores

    @property
    def headline(self) -> tuple[str, float | None] | None:
        """Return the name and value of the score on the held-out domains."""
        return selection_score(self.chosen["test"]) if "test" in self.chosen else None

    def score(self, split: str, *, last: bool = False) -> float:
        """Return the average over the examples of a split; NaN without evaluations.

        Args:
            split: name of the split.
            last: at the last step instead of the selected one.
        """
        return float(self._scores(split, last)["average"]) if self.history else float("nan")

    def measure(self, split: str, name: str, *, last: bool = False) -> float | None:
        """Return a metric of a split, ``None`` if it is undefined.

        Args:
            split: name of the split.
            name: name of the metric.
            last: at the last step instead of the selected one.
        """
        if not self.history:
            return None
        scores = self._scores(split, last)
        values = {scores["metric"]: scores["average"], **scores.get("metrics", {})}
        if name not in values:
            raise unknown_name("measure", name, values)
        return _finite(values[name])

    def _scores(self, split: str, last: bool) -> Mapping[str, Any]:
        scores: Mapping[str, Any] = self.history[-1 if last else self.selected]["scores"]
        if split not in scores:
            raise unknown_name("split", split, scores)
        found: Mapping[str, Any] = scores[split]
        return found

    def curve(self, split: str) -> tuple[list[int], list[float]]:
        """Return the numbers of minibatches and the averages over the course of training.

        Args:
            split: name of the split.
        """
        points = [m for m in self.history if split in m["scores"]]
        return [m["passes"] for m in points], [m["scores"][split]["average"] for m in points]

    def _repr_html_(self) -> str:
        """For notebooks: the scores at the selected step, of a split's first domains."""
        config = self.config
        title = f"{config.name} on {config.dataset}, seed {config.seed}: {self.status}"
        rows = [("split", "domain", "metric", "score")]
        for split, scores in self.chosen.items():
            names, metric = list(scores["domains"].items()), str(scores["metric"])
            shown = [("all", scores["average"]), *names[:10]]
            rows += [(split, n, metric, "–" if _finite(v) is None else f"{v:.4g}") for n, v in shown]
            rows += [(split, f"… {len(names) - 10:,} more", "", "")] * (len(names) > 10)
        return html_table(f"{title}. {self.rule}. {self.error}".rstrip(" ."), rows)

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunRecord:
        """Create a record from plain data, as :meth:`to_dict` returns it.

        A record written by `shoal.fit` gets a configuration from its options, see :data:`PYTHON`.

        Args:
            content: the data.

        Raises:
            InputError: a field is invalid.
        """
        content = check_record(content)
        config, lists = _mapping("config", content.get("config")), ("history", "warm_up", "agreement")
        made = _of_fit(content) if "options" in config else RunConfig.from_dict(config)
        tuples = {name: tuple(content.get(name, ())) for name in lists}
        return cls(**{"schema": 1, **content, **tuples, "config": made})


def html_table(caption: str, rows: Iterable[Iterable[object]]) -> str:
    """A table for notebooks; the first row has the names of columns."""
    cells = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
    head, *body = [f"<tr>{row}</tr>" for row in cells]
    head = head.replace("<td>", "<th>").replace("</td>", "</th>")
    words = html.escape(caption)
    return f"<table><caption>{words}</caption><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


def _of_fit(content: Mapping[str, Any]) -> RunConfig:
    """The configuration in a record of `shoal.fit`, of version 1."""
    config, options = content["config"], _mapping("options", content["config"]["options"])
    known = {f.name: str(f.type) for f in fields(RunConfig)}
    plain = {k: v for k, v in options.items() if k in known and type(v) in (str, int, float)}
    settings = options.get("settings")
    own = {
        "dataset": config.get("dataset", PYTHON),
        "algorithm": config.get("algorithm", "?"),
        "steps": options.get("steps", 0),
        "settings": settings if isinstance(settings, Mapping) else {},
    }
    unlike = ("optimizer", "schedule", "metric", "weights", "warm_start")
    return RunConfig.from_dict({k: v for k, v in plain.items() if k not in unlike} | own)


_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("status", "rule", "error", "traceback"), str),
    **dict.fromkeys(("history", "warm_up", "agreement"), (list, tuple)),
    **dict.fromkeys(("selected", "skipped", "schema"), int),
    **dict.fromkeys(("environment", "notes", "files", "interpolation"), Mapping),
    "seconds": (int, float),
}
_NEEDED = ("status", "history", "selected", "rule", "seconds", "environment")
_FIELDS = {"config", *_KINDS}
_SCORES = ("mean", "loss", "average")


def check_record(content: Any) -> Mapping[str, Any]:
    """``content`` if it is a run's record, whatever its configuration; else an InputError names the field."""
    content = _mapping("a record", content)
    if type(version := content.get("schema", 1)) is int and version > SCHEMA:
        raise InputError(f"it is of schema {version}, and this version of Shoal reads up to {SCHEMA}: update")
    if not content.keys() <= _FIELDS:
        check_names("field of a record:", content, sorted(_FIELDS))
    for name, kind in _KINDS.items():
        if name in content or name in _NEEDED:
            value = content.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise _wrong(name, value)
    _numbers("record", {name: content.get(name) for name in ("selected", "skipped", "seconds")})
    _check_interpolation(content.get("interpolation", {}))
    for name in ("environment", "notes", "files"):
        for value in content.get(name, {}).values():
            if not isinstance(value, str):
                raise _wrong(name, value)
    for point in (*content["history"], *content.get("warm_up", ())):
        _counts("measurement", point, "step", "passes")
        if type(point.get("loss")) is not float:
            _numbers("measurement", {"loss": point.get("loss")})
        check_scores(point.get("scores"))
    count, selected = len(content["history"]), content["selected"]
    if count and not -1 <= selected < count:
        raise InputError(f"selected is {selected}, of {count} measurements")
    if count == 0 and content["status"] == "finished":
        raise InputError("it is finished and has no measurements")
    for point in content.get("agreement", ()):
        _check_agreement(point)
    return content


def check_scores(content: Any) -> None:
    """Refuses what is not scores by split."""
    for split, scores in _mapping("scores", content).items():
        found = _mapping("scores", scores)
        measures = found.get("metrics") or {}
        if not _PLAIN.issuperset(map(type, map(found.get, _SCORES))):
            _numbers(f"score of {split!r}", {name: found.get(name) for name in _SCORES})
        _numbers("domains", found.get("domains"))
        if measures:
            _numbers("metrics", measures)
        for name, values in _mapping("by_domain", found.get("by_domain") or {}).items():
            _numbers(str(name), values)
        if not isinstance(found.get("metric"), str):
            raise _wrong("metric", found.get("metric"))
        if "average" not in found:
            raise _wrong("average", None)
        selects, sizes = found.get("selects"), found.get("sizes") or []
        if selects is not None and not (isinstance(selects, str) and selects in measures):
            raise _wrong("selects", selects)
        if not isinstance(sizes, (list, tuple)):
            raise _wrong("sizes", sizes)
        if sizes and not ({*map(type, sizes)} == {int} and 0 <= min(sizes) <= max(sizes) < 2**63):
            raise InputError(f"{_wrong('sizes', sizes)}, no whole numbers")


def _check_interpolation(content: Mapping[str, Any]) -> None:
    check_names("part of an interpolation:", content, ("alpha", "scores"))
    if content:
        _numbers("interpolation", {"alpha": content.get("alpha")})
        _numbers("scores", content.get("scores") or {})


def _check_agreement(point: Any) -> None:
    _counts("agreement", point, "step")
    means = ("mean_cosine", "mean_inner_product", "sign_agreement")
    _numbers("agreement", {name: point.get(name) for name in means})
    _numbers("layers", point.get("layers") or {})
    matrix = point.get("matrix") or ()
    names = (matrix if isinstance(matrix, Mapping) else point).get("domains") or ()
    rows = (matrix.get("values") or ()) if isinstance(matrix, Mapping) else matrix
    for what, value in (("domains", names), ("matrix", rows), *(("matrix", row) for row in rows or ())):
        if not isinstance(value, list | tuple):
            raise _wrong(what, value)
    for row in rows:
        _numbers("matrix", dict(enumerate(row)))


def _wrong(what: str, value: Any) -> InputError:
    text = repr(value)
    return InputError(f"{what} is {text if len(text) <= 40 else text[:39] + '…'}")


def _mapping(what: str, content: Any) -> Mapping[str, Any]:
    if type(content) is not dict and not isinstance(content, Mapping):
        raise _wrong(what, content)
    found: Mapping[str, Any] = content
    return found


_PLAIN = {float, type(None)}


def _numbers(what: str, content: Any) -> None:
    """Checks that these are numbers or ``None``."""
    values = _mapping(what, content)
    if _PLAIN.issuperset(map(type, values.values())):  # most are, and records are many
        return
    for name, value in values.items():
        plain = type(value) is float or value is None
        if not plain and not (type(value) is int and abs(value) < 2**63):
            raise InputError(f"{_wrong(str(name), value)}, no number, in {what}")


def _counts(what: str, content: Any, *names: str) -> None:
    """Checks that these are there, and whole numbers from 0."""
    content = _mapping(what, content)
    for name in names:
        value = content.get(name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise InputError(f"{_wrong(name, value)}, no whole number, in {what}")


def selection_score(scores: Mapping[str, Any]) -> tuple[str, float | None]:
    """The metric of a split and its value: the mean over domains, unless another metric selects; ``None`` if
    it has none."""
    if name := scores.get("selects"):
        return str(name), scores["metrics"][name]
    metric = str(scores["metric"])
    value = mean_over_domains(metric, scores["domains"].values())
    return metric, None if math.isnan(value) else value


def read_record(path: Path, config: RunConfig | None = None) -> RunRecord:
    """Read a record from a file.

    Args:
        path: record file.
        config: expected configuration.

    Raises:
        InputError: the file is not a record, or that of another configuration.
    """
    try:
        record = RunRecord.from_dict(read_json(path))
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(
            f"{str(path)!r} is not a run record ({summary(error)}); move or remove it."
        ) from error
    if config is not None and record.config.identity != config.identity:
        changes = differences(record.config, config)
        raise InputError(f"{str(path)!r} is the record of another run ({changes}); move or remove it.")
    return record


def summary(error: Exception) -> str:
    """The start of an error's message, on one line."""
    text = " ".join(str(error).split())
    return (text if len(text) <= 100 else text[:99] + "…").rstrip(".")


Row = dict[str, Any]
"""A run as a line of a table: values by the names of columns, without those it lacks."""

SHORT = {"data_options": "data", "model_options": "model", "optimizer_options": "optimizer"}
"""How columns call the options in a configuration: ``data.seed`` and so on."""


def row_of(record: RunRecord) -> Row:
    """All that tables need of a record. A run that diverged has no scores, as in a comparison."""
    config, row = record.config, Row()
    for name, value in vars(config).items():
        if isinstance(value, Mapping):
            row |= {f"{SHORT.get(name, name)}.{key}": content for key, content in value.items()}
        else:
            row[name] = value
    del row["label"]
    row["selects"] = row.pop("metric")
    row |= {
        "identity": config.identity,
        "name": config.name,
        "status": record.status,
        "rule": record.rule,
        "seconds": record.seconds,
        "skipped": record.skipped,
        "device": record.environment.get("device"),
        "error": record.error or None,
        "held_out": held_out_domains(record),
    }
    if record.history:
        scores = record.history[-1]["scores"]
        if scores:
            shown = scores["test" if "test" in scores else next(iter(scores))]
            row |= {"metric": str(shown["metric"]), "selects": shown.get("selects", row["selects"])}
        row["step"] = record.history[record.selected]["step"]
        if record.status == "finished":
            row |= _scores(record.history[record.selected], "") | _scores(record.history[-1], "_last")
    return {name: value for name, value in row.items() if value is not None}


def held_out_domains(record: RunRecord) -> str | None:
    """The domains that were asked for, else those of the test split if they are few."""
    config = record.config
    asked = config.data_options.get("held_out", config.protocol.get("held_out"))
    if asked is None and record.history:
        names = list(record.history[-1]["scores"].get("test", {}).get("domains", ()))
        asked = names if 0 < len(names) <= 3 else None
    if asked is None:
        return None
    return ", ".join(map(str, asked)) if isinstance(asked, list | tuple) else str(asked)


def _scores(measured: Measurement, ending: str) -> Row:
    """``test``, ``test.DOMAIN`` and ``test.MEASURE`` for every split; what is not finite is missing."""
    row: Row = {}
    for split, found in measured["scores"].items():
        row[split + ending] = _finite(found["average"])
        each = {**(found.get("metrics") or {}), **found["domains"]}
        row |= {f"{split}{ending}.{name}": _finite(score) for name, score in each.items()}
    return row


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def __getattr__(name: str) -> Any:  # the store was here before it had a module of its own
    if name == "Store":
        from shoal.experiments.store import Store

        return Store
    raise AttributeError(name)
