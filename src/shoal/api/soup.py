"""``shoal.soup``: the mean of the weights of several runs, as one model."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shoal.api.source import datasets_in, make_folder
from shoal.errors import InputError
from shoal.settings import Range, checked

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from shoal.data.batch import DomainData
    from shoal.experiments.record import RunRecord
    from shoal.report.tables import Table
    from shoal.soups import Measured
    from shoal.trained import Trained


@dataclass(frozen=True)
class Soup:
    """The result of :func:`soup`: the average of the weights of several runs, saved as a run folder.

    Attributes:
        folder: folder of the soup.
        record: record of the soup, with one evaluation.
        runs: folders of all runs.
        used: folders of the runs that were averaged, in the order in which they were added.
        rows: scores of every run, of the uniform soup and, if requested, of the greedy one.
    """

    folder: Path
    record: RunRecord
    """As any run has it, with one measurement."""
    runs: tuple[Path, ...]
    """All that were given."""
    used: tuple[Path, ...]
    """Those whose weights were averaged, in the order in which they were added."""
    rows: tuple[Measured, ...]
    """Scores of every run, of the uniform soup and, where it was asked for, of the greedy one."""

    @property
    def greedy(self) -> bool:
        """Whether the soup is greedy."""
        return bool(self.record.config.settings["greedy"])

    def table(self) -> Table:
        """Return a table of every run and soup: validation, test, and the worst test domain."""
        from shoal.experiments.record import judged
        from shoal.report.runs import number
        from shoal.report.tables import Table

        splits = [s for s in ("validation", "test") if any(s in row.scores for row in self.rows)]
        scores = {s: [row.scores[s].to_dict() for row in self.rows] for s in splits}
        heads = [f"{split} {judged(each[0])[0]}" for split, each in scores.items()]
        worst = [f"worst {scores['test'][0]['metric']}", "worst domain"] if "test" in scores else []
        table = Table(["weights", *["used"] * self.greedy, *heads, *worst])
        for n, row in enumerate(self.rows):
            cells = [{True: "yes", False: "no", None: ""}[row.used]] * self.greedy
            cells += [number(judged(each[n])[1]) for each in scores.values()]
            name, value = row.worst or ("–", None)
            table.add(row.name, *cells, *([number(value), name] if worst else []))
        return table

    def load(self, model: nn.Module | None = None, device: str = "cpu") -> Trained:
        """Load the model.

        Args:
            model: as in :func:`shoal.load`.
            device: device of the model.
        """
        from shoal.trained import load

        return load(self.folder, model, device=device)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as ``--json`` prints it."""
        return {
            "folder": str(self.folder),
            "greedy": self.greedy,
            "runs": [str(folder) for folder in self.runs],
            "used": [str(folder) for folder in self.used],
            "rows": [row.to_dict() for row in self.rows],
            "record": self.record.to_dict(),
        }

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per model, split and domain."""
        import pandas

        rows = [
            (row.name, split, domain, scores.metric, value)
            for row in self.rows
            for split, scores in row.scores.items()
            for domain, value in zip(scores.names, scores.values, strict=True)
        ]
        return pandas.DataFrame(rows, columns=["weights", "split", "domain", "metric", "score"])

    def __str__(self) -> str:
        done = f"{self.record.config.name}: {self.record.rule}. Saved in {self.folder}."
        if self.rows:
            return "\n".join([self.table().text(), "", done, *self._better()])
        why = "runs of shoal.fit do not save their data. In Python, pass it to shoal.soup as 'data'"
        return f"{done}\nThe soup was not evaluated: {why}."

    def _better(self) -> list[str]:
        """What to know where the soup is not worth it."""
        soup = self.rows[-1].scores.get("validation")
        runs = [row for row in self.rows if row.used is not None]
        better = [r.name for r in runs if soup and r.scores["validation"].better_than(soup)]
        return [f"Better on validation than the soup: {', '.join(better)}."] if better else []

    def _repr_html_(self) -> str:
        import html

        return self.table().html() if self.rows else f"<p>{html.escape(str(self))}</p>"


@checked
def soup(
    runs: str | Path | Sequence[str | Path],
    *,
    greedy: bool = False,
    out: str | Path | None = None,
    data: DomainData | Mapping[str, Mapping[str, Any]] | None = None,
    model: nn.Module | None = None,
    data_dir: str | Path | None = None,
    device: str | None = None,
    workers: Annotated[int, Range(0, 1000)] = 0,
    predictions: bool = False,
    progress: bool = True,
) -> Soup:
    """Average the selected weights of finished runs into one model. ::

        shoal.train("erm", "PACS", model="resnet50.tv_in1k", seeds=5, out="erm")
        soup = shoal.soup("erm", greedy=True, out="erm-soup")
        print(soup)
        model = soup.load()

    The Python equivalent of `shoal soup`. The runs must use the same model, data and held-out domains, and
    should have started from the same pretrained weights. BatchNorm statistics are recomputed on training
    data, unless they were frozen. The result is a run folder, accepted by every function and command that
    takes one.

    References: Wortsman et al., Model soups, ICML 2022 (greedy: recipe 1); Ramé et al., Diverse Weight
    Averaging for Out-of-Distribution Generalization, NeurIPS 2022.

    Args:
        runs: folders of finished runs, or of several seeds, written by `shoal train` or `shoal.fit`.
        greedy: add runs in the order of their validation scores, each only if the validation score of the
            soup does not decrease (default: average all runs).
        out: folder to write (default: a folder in runs/ named after the runs).
        data: data of runs of :func:`shoal.fit`, which do not save any: a :class:`~shoal.data.DomainData` or
            ``{"train": …, "validation": …, "test": …}``, as given to ``fit``. Without it, a uniform soup of
            such runs is not evaluated, and a greedy soup is not possible.
        model: for runs of your own network: an instance of it, which receives the weights of the soup.
        data_dir: folder that contains the datasets (default: $SHOAL_DATA).
        device: device, such as cpu, cuda or cuda:1 (default: cuda if available).
        workers: number of processes that load examples.
        predictions: write predictions in the format of the WILDS leaderboard.
        progress: show progress on stderr.
    """
    from shoal import soups
    from shoal.api.fit import as_domain_data
    from shoal.errors import check_names
    from shoal.experiments.record import PYTHON
    from shoal.training.processes import together
    from shoal.training.progress import Progress

    if together():
        raise InputError("soup runs in one process; run it without torchrun.")
    began = time.monotonic()
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    found = soups.read_ingredients([Path(path).expanduser() for path in paths])
    first = found[0].config
    if isinstance(data, Mapping):
        check_names("split of data:", data, ("train", "validation", "test"))
        data = as_domain_data(data.get("train", {}), data.get("validation"), data.get("test"))
    unseen = first.dataset == PYTHON and data is None
    if unseen and (greedy or predictions):
        what = "a greedy soup" if greedy else "predictions="
        raise InputError(
            f"{what} needs the data of the runs, and runs of shoal.fit do not save it. In Python, pass it to "
            "shoal.soup as 'data'."
        )
    if greedy and len(metrics := {run.config.metric for run in found}) > 1:
        names = ", ".join(sorted(str(each or "the dataset's own") for each in metrics))
        raise InputError(
            "a greedy soup requires runs that were selected by the same metric; these were selected by "
            f"{names}."
        )
    name = f"soup-{first.dataset}-{soups.digest_of(found)}" + "-greedy" * greedy
    folder = Path(out).expanduser() if out is not None else Path("runs") / name
    if os.path.lexists(folder):
        raise InputError(f"out={str(folder)!r} exists; choose another folder.")
    soups.warn_of_start(found)
    with _parent(folder, str(first.data_options.get("folder", ""))):
        training = None
        if unseen:
            mixed = soups.mix_unseen(found)
        else:
            shown = Progress("soup", len(found) * (2 if greedy else 1) + 1, progress)
            with datasets_in(data_dir):
                with shown.phase("reading data"):
                    training = soups.make_training(found, data, model, device, workers)
                mixed = soups.mix(found, training, greedy, shown)
        record = soups.make_record(found, mixed, greedy, training, began)
        with soups.new_folder(folder) as place:
            if predictions and training is not None:
                soups.predict(training, record.config, place)
            record = soups.write(place, found, mixed, record, training)
    used = tuple(found[n].folder for n in mixed.used)
    return Soup(folder, record, tuple(run.folder for run in found), used, tuple(mixed.rows))


@contextlib.contextmanager
def _parent(folder: Path, data: str) -> Iterator[None]:
    """Makes the folder that ``folder`` will be in, before the work; it goes again where the work fails."""
    parent = folder.parent
    made = not parent.exists()
    make_folder(parent, data, run=True)
    try:
        yield
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise
