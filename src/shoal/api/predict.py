"""``shoal.predict``: the predictions of a trained model for new input."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shoal.api.result import Result, output_file, write_output
from shoal.errors import InputError
from shoal.settings import Count, Range, checked

if TYPE_CHECKING:
    import pandas

SHOWN = 10
"""Classes in the summary, and rows in a notebook."""


@dataclass(frozen=True, eq=False, repr=False)
class Predictions(Result):
    """The result of :func:`predict`; ``print`` shows it as CSV, or where it was saved.

    Attributes:
        names: name of each example: the number of its row, or its file.
        labels: predicted class of each example, or number in regression; (n,), or (n, labels).
        probabilities: array of shape (n, classes), or (n, labels); ``None`` unless requested.
        classes: names of the columns of ``probabilities``, if there are any.
        example: name of the column that names the examples, ``row`` or ``file``.
        notes: remarks on the input, such as columns that are not used.
        out: file that was written, if any.
    """

    names: Sequence[str]
    labels: Any
    probabilities: Any
    classes: tuple[str, ...]
    example: str = "row"
    notes: tuple[str, ...] = ()
    out: Path | None = None

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per example."""
        import pandas

        columns: dict[str, Any] = {self.example: self.names, "prediction": self.labels}
        if self.labels.ndim > 1:
            each = enumerate(columns.pop("prediction").T)
            columns |= {f"prediction {n}": column for n, column in each}
        own = [*columns]
        for n, name in enumerate(self.classes):
            columns[f"probability of {name}" if name in own else name] = self.probabilities[:, n].round(6)
        return pandas.DataFrame(columns)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with the rows unless they were written to a file."""
        rows = {"rows": self.to_frame().to_dict("records")} if self.out is None else {"out": str(self.out)}
        return {"predictions": len(self.names), "notes": list(self.notes), **rows}

    def to_csv(self) -> str:
        """Return the rows as CSV."""
        return self.to_frame().to_csv(index=False, lineterminator="\n")

    def __str__(self) -> str:
        if self.out is None:
            return self.to_csv().rstrip("\n")
        counts = ""
        if self.labels.ndim == 1 and self.labels.dtype.kind in "iU":
            common = Counter(self.labels.tolist()).most_common(SHOWN)
            counts = f" ({', '.join(f'{name} {count:,}' for name, count in common)})"
        return "\n".join([f"{len(self.names):,} predictions{counts}. Saved in {self.out}.", *self.notes])

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(max_rows=SHOWN, index=False))


@checked
def predict(
    model: Any,
    data: Any,
    *,
    out: str | Path | None = None,
    proba: bool = False,
    column: str | None = None,
    batch_size: Count = 256,
    workers: Annotated[int, Range(0, 1000)] = 0,
    device: str | None = None,
) -> Predictions:
    """Predict with a trained model. ::

        shoal.predict("runs/fish", "patients.csv", proba=True, out="predicted.csv")
        shoal.predict("runs/fish", new_patients).to_frame()

    Input is preprocessed as in training. A table must contain the columns that the model was trained on;
    other columns are ignored. On an error, nothing is written.

    Args:
        model: run folder, or model from :func:`shoal.load`.
        data: table (.csv, .parquet …), images or a folder of images, .txt file with one text per line, or
            .npy array of preprocessed inputs; in Python also a DataFrame, a list of text or files, or arrays.
        out: CSV file to write (default: none; the command prints the predictions).
        proba: add the probability of each class.
        column: text column of a table, for text models (default: as in training).
        batch_size: number of examples per batch.
        workers: number of processes that load examples.
        device: device, such as cpu, cuda or cuda:1 (default: cuda if available).
    """
    from shoal.trained import as_trained

    trained = as_trained(model, device)
    if proba and trained.about.task == "regression":
        raise InputError("this is a model for regression; there are no probabilities.", "proba")
    path = None if out is None else output_file(out, data)
    names, outputs, reader = trained.run(data, batch_size, workers, column)
    p = trained.probabilities(outputs).reshape(len(outputs), -1) if proba else None
    classes = () if p is None else trained.classes or tuple(map(str, range(p.shape[1])))
    example = "file" if trained.inputs.get("kind") == "image" else "row"
    found = Predictions(names, trained.labels(outputs), p, classes, example, tuple(reader.notes), path)
    if path is not None:
        write_output(path, found.to_csv().encode("utf-8", "surrogateescape"))
    for note in reader.warnings:
        warnings.warn(note, stacklevel=3)
    return found
