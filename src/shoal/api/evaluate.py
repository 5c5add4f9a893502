"""``shoal.evaluate``: the scores of predictions in the format of the WILDS leaderboard."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.result import Result
from shoal.errors import InputError
from shoal.settings import checked

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Evaluation(Result):
    """The result of :func:`evaluate`.

    Attributes:
        files: for each file its name, dataset and split, and metrics over the split, by domain and by group.
    """

    files: tuple[Mapping[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        return {"files": list(self.files)}

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per dataset, split and metric: mean and sd over the files."""
        import pandas

        keys = ["dataset", "split", "metric"]
        rows = [(f["dataset"], f["split"], *metric) for f in self.files for metric in f["metrics"].items()]
        frame = pandas.DataFrame(rows, columns=[*keys, "value"]).astype({"value": float})
        values = frame.groupby(keys, sort=False)["value"]
        return values.agg(mean="mean", sd="std", files="size").reset_index()

    def __str__(self) -> str:
        return str(self.to_frame().to_string(index=False, float_format="{:.3f}".format, na_rep="–"))


@checked
def evaluate(
    predictions: str | Path | Sequence[str | Path],
    *,
    dataset: str | None = None,
    split: str | None = None,
    data_options: Mapping[str, Any] | None = None,
    data_dir: str | Path | None = None,
) -> Evaluation:
    """Score prediction files in the format of the WILDS leaderboard. ::

        shoal.evaluate("runs/camelyon17/predictions/camelyon17_split:test_seed:0_epoch:best_pred.csv")

    Each file contains one prediction per line, in the order of the examples of the split;
    ``shoal.train(…, predictions=True)`` writes such files. Over several seeds or folds, means are shown.

    Args:
        predictions: prediction file, or several.
        dataset: name of the dataset (default: from the file name).
        split: split, such as val, test, id_val or id_test (default: from the file name).
        data_options: options of the dataset (default: the fold in the file name).
        data_dir: folder that contains the datasets (default: $SHOAL_DATA).
    """
    from shoal import datasets as sets
    from shoal.api.source import datasets_in
    from shoal.training import predictions as written

    files, loaded, data = list[dict[str, Any]](), ("", dict[str, Any]()), None
    with datasets_in(data_dir):
        for path in map(Path, [predictions] if isinstance(predictions, str | Path) else predictions):
            named = written.parse_name(path.name) or written.Named("", "", "file", path.name)
            name, part = dataset or named.dataset, split or named.split
            if not (name and part):
                raise InputError(f"of {str(path)!r} must be set, as its name does not tell it.", "split")
            known = inspect.signature(sets.registry.module(name).load).parameters
            fold = {"fold": named.which} if named.kind == "fold" and "fold" in known else {}
            options = {**fold, **(data_options or {})}
            if data is None or loaded != (name, options):
                loaded, data = (name, options), sets.load(name, **options)
            part, _ = written.split_of(data, part)
            scores, groups = written.evaluate(data, part, written.read(path, data.classes))
            by_group = {n: dict(zip(scores.names, each.tolist(), strict=True)) for n, each in groups.items()}
            about = {"file": str(path), "dataset": name, "split": part, named.kind: named.which}
            files.append({**about, **scores.to_dict(), "groups": by_group})
    return Evaluation(tuple(files))
