"""All the runs there are, as a table to ask: rows, queries, groups, a data frame."""

from __future__ import annotations

import ast
import difflib
import importlib
import json
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import PYTHON, Row, html_table
from shoal.experiments.statistics import mean_sd, spread  # noqa: F401  # it was here
from shoal.experiments.store import Index
from shoal.files import write_atomically
from shoal.terminal import as_csv, clean

SPLITS = ("train", "validation", "test", "oracle", "id_validation", "id_test")

_FIRST = "dataset algorithm name left_out seed status metric test validation train test_last validation_last"
_THEN = "train_last step steps lr batch_size rule seconds"
_LAST = "device skipped error identity path"
_CONFIG = [f.name for f in fields(RunConfig) if f.name != "label" and not str(f.type).startswith("Mapping")]
COLUMNS = tuple(dict.fromkeys([*f"{_FIRST} {_THEN}".split(), *_CONFIG, *_LAST.split()]))
"""The columns that there always are, if only with nothing in them.

Others are ``settings.X``, ``data.X``, ``model.X``, ``optimizer.X``; by domain ``test.X``, ``test_last.X``.
"""


def load(folder: str | Path) -> Results:
    """Load the records in a folder and its subfolders; see :func:`shoal.results`.

    Args:
        folder: folder with records.
    """
    if not Path(folder).is_dir():
        raise InputError(f"there is no folder {str(folder)!r}.")
    try:
        entries, broken = Index(folder).read()
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot be read: {error.strerror}.") from error
    newest: dict[str, tuple[int, str]] = {}
    for path, (stamp, row) in entries.items():
        which = path if row["dataset"] == PYTHON else row["identity"]
        newest[which] = max(newest.get(which, (-1, "")), (stamp[1], path))
    rows = [{**entries[path].row, "path": path} for _, path in newest.values()]
    rows.sort(key=lambda r: (str(r["dataset"]), str(r["name"]), r.get("left_out", ""), r["seed"], r["path"]))
    return Results(rows, len(entries) - len(rows), broken)


@dataclass(frozen=True)
class Results:
    """A table of runs.

    Values that a run does not have, such as hyperparameters of another algorithm, are missing.

    >>> runs = Results([{"name": "erm", "seed": 0, "test": 0.7}, {"name": "fish", "seed": 0, "test": 0.8}])
    >>> print(runs.where("test > 0.75"))
    name  seed  test
    fish  0     0.8
    >>> [(row["name"], row["mean"]) for row in runs.group(["name"])]
    [('erm', 0.7), ('fish', 0.8)]

    Args:
        kept: one mapping per run.
        duplicates: number of records that were ignored in favour of a newer one of the same run.
        broken: files that are not records, with the reason.
    """

    kept: Sequence[Row]
    duplicates: int = 0
    """Records that were passed over for a newer one of the same run."""
    broken: Mapping[str, str] = field(default_factory=dict)
    """Files that are no records, each with what is wrong."""

    def __len__(self) -> int:
        return len(self.kept)

    @cached_property
    def columns(self) -> list[str]:
        """The names of all columns: the common ones, then options and domains."""
        found: dict[str, None] = dict.fromkeys(COLUMNS)
        for row in self.kept:
            found.update(dict.fromkeys(row))
        return [*COLUMNS, *sorted(set(found) - set(COLUMNS))]

    def filled(self) -> list[str]:
        """Return the columns in which some run has a value."""
        present = {name for row in self.kept for name in row}
        return [name for name in self.columns if name in present]

    def column(self, name: str) -> list[Any]:
        """Return the values of a column, ``None`` if missing.

        Args:
            name: name of the column.
        """
        self.check(name)
        return [row.get(name) for row in self.kept]

    def rows(self, columns: Sequence[str] | None = None) -> list[Row]:
        """Return one mapping per run, without missing values.

        Args:
            columns: only these columns, with ``None`` for missing values.
        """
        if columns is None:
            return [dict(row) for row in self.kept]
        self.check(*columns)
        return [{name: row.get(name) for name in columns} for row in self.kept]

    def where(self, query: str) -> Results:
        """Return the runs that match a query, such as ``algorithm == "fish" and seed < 3 and test > 0.8``.

        A query compares columns with values by ``== != < <= > >= in`` and combines comparisons with ``and``,
        ``or``, ``not``. Write a name that is not a Python identifier as ``data["the name"]``. A comparison
        with a missing value is false, except ``!=`` and ``not in``; use ``== None`` to select missing values.

        Args:
            query: the query.
        """
        holds = _Query(self, query).condition
        return replace(self, kept=[row for row in self.kept if holds(row)])

    def sorted(self, by: str, reverse: bool = False) -> Results:
        """Sort by a column; runs without a value are last.

        Args:
            by: name of the column.
            reverse: sort in descending order.
        """
        self.check(by)
        return replace(self, kept=in_order(self.kept, by, reverse))

    def group(self, by: Sequence[str], value: str = "test") -> list[Row]:
        """Group runs and compute ``runs``, ``seeds``, ``diverged``, ``failed``, and ``mean`` and ``sd`` over
        seeds.

        Runs with the same seed are averaged first, so that ``sd`` is over seeds and not over hyperparameters.
        Different metrics are never averaged: they form separate groups.

        Args:
            by: columns to group by.
            value: column to average.
        """
        self.check(*by, value)
        metrics = {row["metric"] for row in self.kept if "metric" in row}
        keys = [*dict.fromkeys(by), *(["metric"] if len(metrics) > 1 and "metric" not in by else [])]
        groups: dict[str, list[Row]] = {}
        for row in self.kept:
            groups.setdefault(repr([row.get(key) for key in keys]), []).append(row)
        found = [{k: rows[0].get(k) for k in keys} | _summary(rows, value) for rows in groups.values()]
        for key in reversed(keys):
            found = in_order(found, key)
        return found

    def to_frame(self, columns: Sequence[str] | None = None) -> Any:
        """Return a pandas ``DataFrame`` with one row per run; requires ``shoal[tables]``.

        Missing values are NaN in numeric columns and ``None`` in others.

        Args:
            columns: columns (default: all with some value).
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise InputError("a DataFrame requires pandas: pip install 'shoal[tables]'") from error
        return pandas.DataFrame({n: self.column(n) for n in (self.filled() if columns is None else columns)})

    def usual(self) -> list[str]:
        """Return the columns in which the runs differ, and their scores."""
        several = [
            name
            for name in ("steps", "batch_size", "lr", "metric")
            if len({str(row.get(name)) for row in self.kept}) > 1
        ]
        present = set(self.filled())
        names = [
            "dataset",
            "name",
            "left_out",
            "seed",
            *several,
            "test",
            "validation",
            "test_last",
            "seconds",
        ]
        return [name for name in names if name in present or name in ("name", "test")]

    def _cells(self, most: int = 50) -> list[list[str]]:
        columns = self.usual()
        rows = [[cell(name, row) for name in columns] for row in self.kept[:most]]
        return [[clean(text) for text in row] for row in [columns, *rows]]

    def __str__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([*lines, *([f"… {len(self)} runs"] if len(self) >= len(cells) else [])])

    def _repr_html_(self) -> str:
        """For notebooks: the first runs."""
        return html_table(f"{len(self)} runs", self._cells())

    def save(self, path: str | Path, columns: Sequence[str] | None = None) -> None:
        """Write the runs to a CSV file.

        Args:
            path: file to write.
            columns: columns (default: all with some value).
        """
        save_csv(path, self.filled() if columns is None else columns, self.kept)

    def check(self, *names: str) -> None:
        """Check that columns exist.

        Args:
            *names: names of columns.

        Raises:
            InputError: a column does not exist.
        """
        for name in names:
            if name not in self._known:
                near = difflib.get_close_matches(name.lower(), self.columns, n=1, cutoff=0.5)
                hint = f"Did you mean {near[0]!r}?" if near else f"Common columns: {', '.join(COLUMNS)}."
                raise InputError(f"unknown column {name!r}. {hint}")

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.columns)

    def kind(self, name: str) -> str | None:
        """Return the kind of the values of a column, if they are all of one kind.

        Args:
            name: name of the column.
        """
        kinds = {_kind(value) for value in self.column(name) if value is not None}
        return kinds.pop() if len(kinds) == 1 else None


def cell(name: str, row: Mapping[str, Any]) -> str:
    """A value of a row as tables show it."""
    value = row.get(name)
    score = name.split(".")[0].removesuffix("_last") in SPLITS
    if value is None:
        return str(row["status"]) if score and row.get("status", "finished") != "finished" else "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return (
            number(value, row.get("metric")) if score else f"{value:{'.1f' if name == 'seconds' else '.4g'}}"
        )
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def number(value: float, metric: str | None) -> str:
    return f"{value:.3f}" if metric == "accuracy" else f"{value:.4g}"


def save_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows as CSV; lists and truth values as JSON."""
    values = ([row.get(name) for name in columns] for row in rows)
    lines = ([json.dumps(v) if isinstance(v, list | dict | bool) else v for v in row] for row in values)
    write_atomically(Path(path), as_csv([columns, *lines]).encode(errors="replace"))


def in_order(rows: Iterable[Row], by: str, reverse: bool = False) -> list[Row]:
    """Numbers before text; what is missing comes last either way."""
    rows = list(rows)
    known = [row for row in rows if row.get(by) is not None]
    known.sort(key=lambda row: _order(row[by]), reverse=reverse)
    return known + [row for row in rows if row.get(by) is None]


def _order(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, str(value))


def _summary(rows: Sequence[Row], value: str) -> Row:
    seeds: dict[Any, list[float]] = {}
    for row in rows:
        if isinstance(score := row.get(value), int | float):
            seeds.setdefault(row.get("seed"), []).append(score)
    mean, sd = mean_sd(fmean(scores) for scores in seeds.values())
    ended = Counter(row.get("status") for row in rows)
    return {
        "runs": len(rows),
        "seeds": len({row.get("seed") for row in rows}),
        "diverged": ended["diverged"],
        "failed": ended["failed"],
        "mean": mean,
        "sd": sd,
    }


NUMBERS, TEXT, TRUTH, LIST, NOTHING = "numbers", "text", "true or false", "lists", "nothing"
CHOICE = "a choice"
_EXAMPLE = 'write a query such as: algorithm == "fish" and seed < 3'
_DEEPEST, _LONGEST = 50, 10_000
Condition = Callable[[Row], bool]
_ORDERS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **{ast.Eq: operator.eq, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda part, whole: part in whole},
}
_NEGATED = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In}


def _kind(value: Any) -> str:
    for kind, types in ((TRUTH, bool), (NUMBERS, int | float), (TEXT, str)):
        if isinstance(value, types):
            return kind
    return NOTHING if value is None else LIST


class _Side(NamedTuple):
    """One side of a comparison; ``kind`` is ``None`` where any may come."""

    text: str
    kind: str | None
    value: Callable[[Row], Any]
    column: bool = False

    def check(self, other: _Side) -> None:
        """Refuses what is of another kind."""
        if self.kind and other.kind and self.kind != other.kind:
            parts = [f"{s.text} {'holds' if s.column else 'is'} {s.kind}" for s in (self, other)]
            raise InputError(f"{parts[0]}, but {parts[1]}: they cannot be compared.")


class _Query:
    """Builds a condition from the parts of Python's grammar that it knows; nothing is ever evaluated."""

    def __init__(self, results: Results, text: str) -> None:
        self.results, self.text = results, text.strip()
        if len(self.text) > _LONGEST:
            raise InputError(f"a query has at most {_LONGEST:,} characters.")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as on "\d"
                tree = ast.parse(self.text, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InputError(f"the query {_short(self.text)!r} cannot be read; {_EXAMPLE}") from error
        self.condition = self._condition(tree.body, 0)

    def _condition(self, node: ast.expr, depth: int) -> Condition:
        if depth > _DEEPEST:
            raise InputError("the query is nested too deeply.")
        if isinstance(node, ast.BoolOp):
            parts = [self._condition(part, depth + 1) for part in node.values]
            joined = all if isinstance(node.op, ast.And) else any
            return lambda row: joined(part(row) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._condition(node.operand, depth + 1)
            return lambda row: not inner(row)
        if isinstance(node, ast.Compare):
            sides = [self._side(part) for part in (node.left, *node.comparators)]
            pairs = [_compared(a, type(op), b) for a, op, b in zip(sides, node.ops, sides[1:], strict=False)]
            return lambda row: all(pair(row) for pair in pairs)
        side = self._side(node)
        if side.kind != TRUTH:
            raise InputError(f"the query does not say what to compare {side.text} with; {_EXAMPLE}")
        return lambda row: bool(side.value(row))

    def _side(self, node: ast.expr) -> _Side:
        text = _short(ast.get_source_segment(self.text, node) or "")
        if (name := _name(node)) is not None:
            self.results.check(name)
            return _Side(name, self.results.kind(name), lambda row: row.get(name), column=True)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            values = [_constant(part, text) for part in node.elts]
            return _Side(text, CHOICE, lambda row: values)
        value = _constant(node, text)
        return _Side(text, _kind(value), lambda row: value)


def _name(node: ast.expr) -> str | None:
    """``seed``, ``settings.meta_lr`` or ``data["a name"]`` as the name of a column."""
    parts: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            parts.append(str(node.slice.value))
        else:
            return None
        node = node.value
    return ".".join([node.id, *reversed(parts)])


def _constant(node: ast.expr, text: str) -> Any:
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    inner = node.operand if isinstance(node, ast.UnaryOp) and negative else node
    value: Any = inner.value if isinstance(inner, ast.Constant) else ...
    known = value is None or isinstance(value, bool | int | float | str)
    if not known or (negative and _kind(value) != NUMBERS):
        raise InputError(f"{text!r} is neither a column nor a value; {_EXAMPLE}")
    return -value if negative else value


def _compared(one: _Side, op: type[ast.cmpop], other: _Side) -> Condition:
    """Whether it holds in a row; ``in`` looks into a list of values, a column of lists, or text."""
    if op in _NEGATED:
        holds = _compared(one, _NEGATED[op], other)
        return lambda row: not holds(row)
    if op is ast.In and other.kind == CHOICE:
        for value in other.value({}):
            if value is not None:
                one.check(_Side(repr(value), _kind(value), lambda row: None))
        return lambda row: one.value(row) in other.value(row)
    if op is ast.In and (not other.column or other.kind in (NUMBERS, TRUTH)):
        raise InputError(f"nothing can be in {other.text}; write for example: seed in [0, 1]")
    kinds = {one.kind, other.kind}
    if NOTHING in kinds and op in (ast.Eq, ast.Is):
        return lambda row: one.value(row) is None and other.value(row) is None
    if op is ast.Is or (op is not ast.In and kinds & {NOTHING, CHOICE}):
        raise InputError(f"{one.text} and {other.text} cannot be compared like that; {_EXAMPLE}")
    if op is not ast.In or other.kind == TEXT:
        one.check(other)
    order = _ORDERS[op]

    def compare(row: Row) -> bool:
        a, b = one.value(row), other.value(row)
        try:
            return a is not None and b is not None and bool(order(a, b))
        except TypeError:  # a column of several kinds
            return False

    return compare


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:59] + "…"
