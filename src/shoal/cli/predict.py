"""`shoal predict`."""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shoal.cli.arguments import add_device, as_json, count, warnings_in_words, workers
from shoal.errors import InputError
from shoal.files import replacing, same_file
from shoal.terminal import Csv, clear_line, exact

if TYPE_CHECKING:
    from shoal.trained import Trained

PREDICTION = "prediction"
SHOWN = 5
EVERY = 0.5  # seconds between two lines of progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example:\n  shoal predict runs/fish patients.csv --out predictions.csv --proba\n\n"
        "A table must contain the columns that the model was trained on; other columns are ignored. Images "
        "are preprocessed as in evaluation. On an error, no file is written."
    )
    parser.add_argument("model", type=Path, help="run folder written by `shoal train`")
    parser.add_argument(
        "data",
        nargs="+",
        type=Path,
        help="table (.csv, .parquet …), images or a folder of images, .txt file with one text per line, or "
        ".npy array of preprocessed inputs",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.csv", help="file to write (default: print to stdout)"
    )
    parser.add_argument("--proba", action="store_true", help="add the probability of each class")
    parser.add_argument(
        "--id", metavar="COLUMN", help="column of a table that identifies rows (default: row numbers)"
    )
    parser.add_argument(
        "--raw-csv",
        action="store_true",
        help="write text unchanged; by default, non-numeric text that starts with = + - or @ is prefixed "
        "with an apostrophe, because spreadsheets would evaluate it as a formula",
    )
    parser.add_argument("--column", metavar="COLUMN", help="text column of a table, for text models")
    add_reading(parser)
    add_device(parser)


def add_reading(parser: argparse.ArgumentParser) -> None:
    """How new data are read, of commands that use a trained model."""
    bad = "whether to stop at an image that cannot be read, or skip it (default: %(default)s)"
    parser.add_argument("--bad-images", choices=("stop", "skip"), default="stop", help=bad)
    size = "number of examples per batch (default: %(default)s)"
    parser.add_argument("--batch-size", type=count, default=256, metavar="N", help=size)
    number = "number of processes that load examples (default: %(default)s)"
    parser.add_argument("--workers", type=workers, default=0, metavar="N", help=number)


@warnings_in_words()
def run(given: Any) -> None:
    from shoal.trained import load
    from shoal.training.folder import check_output, files_of
    from shoal.training.processes import pick_device
    from shoal.training.stopping import Interrupted

    inputs = [*given.data, *files_of(given.model)]
    if given.out is not None:
        check_output(given.out, inputs, "--out")
    model = load(given.model, device=pick_device(given.device))
    if given.proba and model.about.classes is None:
        raise InputError("--proba: this is a regression model and has no class probabilities.")
    if given.id == PREDICTION:
        raise InputError(f"--id {given.id}: the output already has a column of this name; rename yours.")
    try:
        with _written(given.out, given.json, inputs) as file:
            result = _predicted(model, file, given)
    except KeyboardInterrupt as stop:
        number = getattr(stop, "signal", None) or signal.SIGINT
        raise Interrupted("interrupted. No file was written or changed.", number) from stop
    if given.json:
        print(as_json(result))
        return
    notes = result["notes"]
    more = [f"… and {len(notes) - SHOWN:,} more notes (use --json for all)"] * (len(notes) > SHOWN)
    for note in [*notes[:SHOWN], *more]:
        print(f"shoal: {note}", file=sys.stderr)
    if given.out is not None:
        classes = ", ".join(f"{name} {number:,}" for name, number in list(result["classes"].items())[:10])
        summary = f"{result['predictions']:,} predictions{f' ({classes})' if classes else ''}"
        stream = sys.stderr if same_file(given.out, "/dev/stdout") else sys.stdout
        print(f"{summary}. Saved in {given.out}.", file=stream)


@contextlib.contextmanager
def _written(path: Path | None, machine: bool, inputs: Sequence[Path]) -> Iterator[TextIO | None]:
    """A file that takes its name when all is in it; or the terminal's, where there is none."""
    if path is None:
        with contextlib.nullcontext() if machine else exact(sys.stdout) as out:
            yield out
        return
    try:
        # Names of files may be bytes that are not UTF-8; they come out as they are.
        with replacing(path, inputs) as raw:
            file = io.TextIOWrapper(raw, "utf-8", errors="surrogateescape", newline="")
            try:
                yield file
                file.flush()
            finally:
                with contextlib.suppress(OSError):
                    file.detach()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(f"--out {str(path)!r} cannot be written: {error.strerror or error}.") from error


def _predicted(model: Trained, file: TextIO | None, given: Any) -> dict[str, Any]:
    """Writes a line per example and says how many there were, of what."""
    from shoal.trained import probabilities

    source: Any = given.data[0] if len(given.data) == 1 else given.data
    reader = model.reader(bad=given.bad_images, column=given.column, names=given.id)
    row = "file" if model.inputs.get("kind") == "image" else "row"
    columns = [given.id or row, PREDICTION]
    wanted = model.classes if given.proba else ()
    titles = [*columns, *(f"probability of {name}" if name in columns else name for name in wanted)]
    table = Csv(file, raw=given.raw_csv) if file is not None else None
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    done, shown = 0, time.monotonic()
    for batch, outputs in model.outputs(reader, source, given.batch_size, given.workers):
        labels = model.labels(outputs).tolist()
        each = probabilities(outputs).round(6).tolist() if given.proba else [[]] * len(labels)
        lines = [[name, label, *more] for name, label, more in zip(batch.names, labels, each, strict=True)]
        if table:
            table.write([titles, *lines] if not done else lines)
        for line in [] if table else lines:
            values = {"probabilities": dict(zip(wanted, line[2:], strict=True))} if wanted else {}
            rows.append({columns[0]: line[0], PREDICTION: line[1], **values})
        counts.update(map(str, labels) if model.about.classes is not None else ())
        done += len(lines)
        if sys.stderr.isatty() and time.monotonic() - shown > EVERY:
            shown = time.monotonic()
            clear_line(sys.stderr)
            print(f"{done:,} predicted", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty() and done:
        clear_line(sys.stderr)
    if not done:
        raise InputError("the input is empty.")
    if table and table.marked:
        reader.notes.append(
            f"{table.marked:,} cells that a spreadsheet would evaluate as formulas were prefixed with an "
            "apostrophe; "
            "--raw-csv writes them unchanged."
        )
    result = {"model": str(given.model), "predictions": done, "classes": dict(counts.most_common())}
    result |= {"notes": reader.notes, "out": str(given.out) if given.out else None}
    return result | ({"rows": rows} if table is None else {})
