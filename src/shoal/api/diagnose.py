"""``shoal.diagnose``: in what the domains of a dataset differ, before training on it."""

from __future__ import annotations

import html
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typing_extensions import Unpack

from shoal.api.report import report
from shoal.api.result import Result, messages, write_output
from shoal.api.source import TABLE, Source, datasets_in, find_source, make_folder
from shoal.errors import InputError
from shoal.files import dump_json
from shoal.options import DataOptions, as_flags, public
from shoal.settings import Range, Seed

if TYPE_CHECKING:
    import pandas

    from shoal.data.batch import DomainData


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """The result of :func:`diagnose`: tests, generalization gap and suggestions. ``print`` shows it.

    Attributes:
        result: the results as plain data: ``tests``, ``domains``, ``gaps``, ``columns``, ``gradients`` ….
        name: name of the data.
        compare: command that compares algorithms on these data.
        files: files that were written: ``diagnosis.json`` and the page.
    """

    result: Mapping[str, Any]
    name: str = ""
    compare: str = "shoal compare DATA"
    files: tuple[Path, ...] = ()

    @property
    def significant(self) -> tuple[str, ...]:
        """The tests that are significant after correction."""
        return tuple(self.result["significant"])

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain data, with the conclusions as ``reading``."""
        return {"dataset": self.name, **self.result, "reading": self.reading()}

    def reading(self) -> list[str]:
        """Return the conclusions, one or two sentences each."""
        from shoal.report import diagnose as view

        return view.reading(self.result, self.compare)

    def __str__(self) -> str:
        from shoal.report import diagnose as view

        text = view.text(self.result, self.compare)
        text += f"\n\nFinished in {self.result['seconds']:.0f} s."
        return f"{text} Saved: {', '.join(map(str, self.files))}." if self.files else text

    def _repr_html_(self) -> str:
        from shoal.report import diagnose as view

        tables = "\n".join(table.html() for table in view.tables(self.result))
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.reading())
        return f"{tables}\n<ul>{lines}</ul>"

    def to_frame(self, what: Literal["tests", "domains", "gaps", "columns"] = "tests") -> pandas.DataFrame:
        """Return a DataFrame of ``what``."""
        import pandas

        return pandas.json_normalize(self.result[what])


@public("label", "domain")
def diagnose(
    data: Any,
    *,
    seed: Seed = 0,
    max_examples: Annotated[int, Range(1, 5000)] = 1500,
    max_domains: Annotated[int, Range(2, 50)] = 12,
    out: str | Path | None = "shoal-diagnose",
    progress: bool = True,
    **options: Unpack[DataOptions],
) -> Diagnosis:
    """Test which shifts there are between domains, and estimate the generalization gap.

    This describes the data before training and does not evaluate a method: it uses all domains, including
    those of the test split. Results depend only on ``seed``. Rows of one entity (``group``) are not taken as
    independent.

        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> site = np.repeat(["oslo", "rome"], 40)
        >>> x = rng.normal(size=(80, 3)) + 2.0 * (site == "rome")[:, None]
        >>> found = diagnose((x, rng.integers(0, 2, 80), site), out=None, progress=False)
        >>> "inputs" in found.significant
        True

    Args:
        data: name of a dataset (`shoal list datasets`), table (.csv, .tsv, .csv.gz, .parquet, .xlsx), or
            folder of images arranged as folder/domain/class. In Python also what :func:`compare` takes, or a
            DomainData.
        seed: random seed.
        max_examples: maximum number of examples to sample.
        max_domains: maximum number of domains to sample.
        out: folder for diagnosis.json, columns.json and report.html. In Python also None: nothing is saved.
        progress: show progress on stderr.
        **options: options of the data, see :class:`~shoal.options.DataOptions`.
    """
    from shoal.experiments.diagnose import diagnose as run
    from shoal.experiments.progress import Progress
    from shoal.training.processes import together

    if together():
        raise InputError("diagnose runs in one process; run it without torchrun.")
    with datasets_in(options.get("data_dir")), messages(progress) as show:
        source, loaded = _load(data, options)
        if out is not None:
            make_folder(out, source.given, kind="diagnosis")
        show(*(source.notes() if progress else ()))
    state: tuple[float, None, str] = (0.0, None, "")

    def on_progress(phase: str, done: int, total: int) -> None:
        nonlocal state
        state = done / total, None, phase

    with Progress("diagnosis", lambda: state, progress):
        result = run(loaded, seed=seed, examples=max_examples, max_domains=max_domains, progress=on_progress)
    words = [*source.words, *as_flags({"data_dir": options["data_dir"]} if "data_dir" in options else {})]
    found = Diagnosis(result, Path(source.given).name, shlex.join(["shoal", "compare", *words]))
    if out is None:
        return found
    file = Path(out) / "diagnosis.json"
    write_output(file, dump_json(found.to_dict()))
    if columns := source.columns():
        write_output(file.with_name("columns.json"), dump_json(columns))
    return replace(found, files=(file, report(out).path))


def _load(data: Any, options: DataOptions) -> tuple[Source, DomainData]:
    """What names the data on a command line, and the data; of a table all domains, for none is held out."""
    from shoal import datasets as sets
    from shoal.data.batch import DomainData

    if isinstance(data, DomainData):
        return Source(TABLE, {}, "DATA"), data
    with tempfile.TemporaryDirectory() as folder:
        source = find_source(data, folder=folder, **options)
        none: dict[str, Any] = {"held_out": []} if source.dataset == TABLE else {}
        loaded = sets.load(source.dataset, **none | source.options)
    if isinstance(data, str | Path):
        return source, loaded
    given = {name: value for name, value in source.options.items() if name not in ("file", "digest")}
    return Source(TABLE, given, "DATA"), loaded
