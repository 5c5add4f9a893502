"""``shoal.diagnose``: in what the domains of a dataset differ, before training on it."""

from __future__ import annotations

import html
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError
from shoal.experiments import diagnosis
from shoal.files import dump_json, write_atomically
from shoal.report import diagnose as view
from shoal.report import plots
from shoal.settings import coerce
from shoal.terminal import clear_line

if TYPE_CHECKING:
    from torch import nn

    from shoal.data.batch import DomainData


@dataclass(frozen=True)
class Diagnosis(diagnosis.Diagnosis):
    """The result of :func:`diagnose`: tests, generalization gap and suggestions. ``print`` shows it.

    Attributes:
        questions: the tests; ``alarms`` are the names of the significant ones.
        gaps: generalization gap of ERM per domain; ``average`` is their average.
        columns: differences per column.
        gradients: gradient agreement at the start and after training.
        name: name of the data.
        compare: call or command that compares algorithms on these data.
        without: the same without the suspect columns.
    """

    name: str = ""
    compare: str = ""
    """The call or command that compares algorithms on these data."""
    without: str = ""
    """The same without the columns that are suspect."""

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain data, with the conclusions as ``reading``."""
        content = {"dataset": self.name, **super().to_dict(), "reading": self.reading()}
        return {name: content[name] for name in content if name not in ("name", "compare", "without")}

    def reading(self) -> list[str]:
        """Return the conclusions, one or two sentences each."""
        return view.reading(super().to_dict(), self.compare, self.without)

    def __str__(self) -> str:
        return view.text(super().to_dict(), self.compare, self.without)

    def _repr_html_(self) -> str:
        tables = "\n".join(table.html() for table in view.tables(super().to_dict()))
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.reading())
        return f"{tables}\n<ul>{lines}</ul>"

    def to_frame(self, what: str = "questions") -> Any:
        """Return a DataFrame.

        Args:
            what: ``questions``, ``domains``, ``gaps`` or ``columns``.
        """
        try:
            import pandas
        except ImportError as error:
            raise InputError("a DataFrame requires pandas: pip install 'shoal[tables]'") from error
        names = ("questions", "domains", "gaps", "columns")
        if what not in names:
            raise InputError(f"what={what!r} is not valid; it must be one of {', '.join(names)}.")
        return pandas.json_normalize(super().to_dict()[what])

    def figure(self) -> Any:
        """Return a matplotlib figure: labels, confusion of domains, generalization gap, gradient cosines."""
        return view.figure(super().to_dict(), self.name)

    def save(self, path: str | Path) -> list[Path]:
        """Write ``diagnosis.json`` and, with matplotlib, the figure.

        Args:
            path: folder to write to.

        Returns:
            The files.
        """
        folder = _folder(path)
        try:
            write_atomically(folder / "diagnosis.json", dump_json(self.to_dict()))
            try:
                pictures = plots.save(self.figure(), folder / "diagnosis")
            except InputError as error:
                warnings.warn(f"no figure: {error}", stacklevel=2)
                pictures = []
        except OSError as error:
            raise InputError(f"out={str(path)!r}: {error.strerror or error}.") from error
        return [folder / "diagnosis.json", *pictures]


def diagnose(
    data: Any,
    *,
    label: str | None = None,
    domain: str | None = None,
    group: str | None = None,
    task: str | None = None,
    drop: Sequence[str] = (),
    kinds: Mapping[str, str] | None = None,
    decimal: str | None = None,
    day_first: bool | None = None,
    data_options: Mapping[str, Any] | None = None,
    model: str | Callable[[int], nn.Module] | None = None,
    steps: int = 150,
    seed: int = 0,
    batch_size: int = 32,
    lr: float = 1e-3,
    examples: int = 2000,
    max_domains: int = 12,
    budget: float | None = 120.0,
    out: str | Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> Diagnosis:
    """Test which shifts there are between domains, and estimate the generalization gap of ERM.

    This describes the data before training and does not evaluate a method: it uses all domains, including
    those of the test split. Results depend only on ``seed``, unless ``budget`` shortens the training runs.

        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> site = np.repeat(["oslo", "rome"], 40)
        >>> x = rng.normal(size=(80, 3)) + 2.0 * (site == "rome")[:, None]
        >>> found = diagnose((x, (x[:, 0] > 1).astype(int), site), steps=5, progress=False)
        >>> "inputs" in found.alarms
        True

    Args:
        data: name of a dataset (`shoal list datasets`), table (.csv, .tsv, .csv.gz, .parquet, .xlsx), or
            folder of images arranged as folder/domain/class. In Python also a DataFrame, a mapping of
            columns, arrays ``(X, y, domains)``, a Hugging Face dataset, or a :class:`~shoal.data.DomainData`.
        label: column to predict.
        domain: column with the domain of each row.
        group: column that identifies the entity of each row, such as a patient; rows of one entity stay in
            the same split.
        task: classification or regression (default: inferred from the label).
        drop: columns to ignore.
        kinds: kind of each column whose inferred kind is wrong, such as ``{"zip": "categorical"}``.
        decimal: decimal mark, for columns where it is ambiguous.
        day_first: whether 3/4/2020 is in April, for columns where it is ambiguous.
        data_options: options of the dataset.
        model: name of a model (default: the dataset's model; for images and text, a small network on fixed
            embeddings). In Python also a function that builds a model from a seed.
        steps: number of steps of each short training run.
        batch_size: number of examples per batch.
        lr: learning rate of Adam.
        examples: maximum number of examples to sample.
        max_domains: maximum number of domains to sample.
        budget: time budget in seconds; training runs are shortened to meet it. In Python ``None`` sets no
            budget.
        out: folder for diagnosis.json and the figure.
        device: device, such as cpu, cuda or cuda:1 (default: cuda if available).
        progress: show progress on stderr.
        seed: random seed.
    """
    from shoal.data.batch import Examples
    from shoal.experiments.diagnose import diagnose as run
    from shoal.models import build

    out, progress = coerce(str | Path | None, out, "out"), coerce(bool, progress, "progress")
    data_options = coerce(Mapping[str, Any] | None, data_options, "data_options")
    if out is not None:
        _folder(out)
    columns: dict[str, Any] = {
        "label": label,
        "domain": domain,
        "group": group,
        "task": task,
        "drop": list(drop) or None,
    }
    columns |= {"kinds": kinds, "decimal": decimal, "day_first": day_first}
    columns = {name: value for name, value in columns.items() if value is not None}
    loaded, name = _loaded(data, columns, dict(data_options or {}))
    if isinstance(loaded.examples, Examples):
        loaded = replace(loaded, examples=loaded.examples.unguarded())

    def make(seed: int) -> nn.Module:
        return build(str(model), input_shape=loaded.input_shape, classes=loaded.classes, seed=seed)

    if isinstance(model, str):
        make(seed)  # before any work: is there such a model, and does it take these inputs?
    given: dict[str, Any] = {"steps": steps, "seed": seed, "batch_size": batch_size, "lr": lr}
    given |= {"examples": examples, "max_domains": max_domains, "budget": budget, "device": device}
    tell = _progress() if progress else None
    result = run(loaded, make if isinstance(model, str) else model, tell=tell, **given)
    told = {**columns, **({"data_options": dict(data_options)} if data_options else {})}
    told |= {"model": model} if isinstance(model, str) else {}
    suspect = [*columns.get("drop", ()), *view.to_drop(result.to_dict())]
    found = Diagnosis(**vars(result), name=name, compare=_call(data, told))
    found = replace(found, without=_call(data, {**told, "drop": suspect}))
    if out is not None:
        found.save(out)
    return found


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out={str(path)!r} cannot be a folder: {error.strerror}.") from error
    return folder


def _call(data: Any, told: Mapping[str, Any]) -> str:
    first = repr(str(data)) if isinstance(data, str | Path) else "data"
    return f"shoal.compare({', '.join([first, *(f'{name}={value!r}' for name, value in told.items())])})"


def _loaded(data: Any, columns: Mapping[str, Any], options: dict[str, Any]) -> tuple[DomainData, str]:
    """The dataset and its name, whatever ``data`` is."""
    from shoal.data import from_arrays, from_hf, from_table, sets
    from shoal.data.batch import DomainData
    from shoal.data.reading import ending

    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if ending(path):
            # Scaled by all domains, for none is held out.
            return sets.load("table", **{"file": str(data), "test": [], **columns, **options}), path.name
        if columns:
            raise InputError(
                f"{next(iter(columns))}= is an option of tables, and {str(data)!r} is not a table."
            )
        if path.is_dir() and str(data).lower().replace("_", "-") not in sets.registry.names():
            return sets.load("image-folder", folder=str(data), **options), path.name
        return sets.load(str(data), **options), str(data)
    if isinstance(data, DomainData):
        return data, "data"
    if isinstance(data, tuple) and len(data) == 3:
        x, y, domains = data
        return from_arrays(x, y, domains, **columns, **options), "data"
    if missing := [name for name in ("label", "domain") if name not in columns]:
        raise InputError(f"the {missing[0]} column is missing: {missing[0]}='…'.")
    if type(data).__module__.partition(".")[0] == "datasets":
        return from_hf(data, **columns, **options), "data"
    return from_table(data, **columns, **options), "data"


def _progress() -> Callable[[str, int, int], None]:
    """On stderr: a bar on a terminal, elsewhere one line per phase."""
    phases: set[str] = set()

    def tell(phase: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            clear_line(sys.stderr)
            bar = f"[{'#' * (24 * done // max(total, 1)):-<24}] {phase}: {done:,} of {total:,}"
            sys.stderr.write(bar if done < total else "")
            sys.stderr.flush()
        elif phase not in phases:
            print(phase, file=sys.stderr, flush=True)
        phases.add(phase)

    return tell
