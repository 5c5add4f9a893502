"""Heart disease at a held-out hospital: Shoal's algorithms beside what scikit-learn users would take.

    SHOAL_DATA=~/data python benchmarks/heart.py > benchmarks/results/heart.md

Each of the four hospitals is held out in turn. All methods get the same columns (those of the dataset, scaled
by training patients) and all patients of the training hospitals. Shoal's share the network, the
optimizer, the batches' size and the number of steps, and every algorithm has its default settings;
scikit-learn's models have theirs. Nothing was chosen by results on a held-out hospital; the default network
was chosen by random splits of six tables, of which these patients, all hospitals mixed, are one.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

import numpy as np
import sklearn
import torch
from numpy.typing import NDArray
from scipy.stats import t as student
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, roc_auc_score

import shoal
from shoal.data.batch import DomainData
from shoal.datasets import heart
from shoal.sklearn import DomainClassifier

# The columns are scaled already; a second time would blow up those that are rare in training.
SAME: dict[str, Any] = {"standardize": False, "steps": 200, "batch_size": 32, "lr": 1e-3, "device": "cpu"}
BASE = "ERM"


def ours(algorithm: str, **more: Any) -> Callable[[int], Any]:
    return lambda seed: DomainClassifier(algorithm, random_state=seed, **SAME, **more)


METHODS: Mapping[str, Callable[[int], Any]] = {
    BASE: ours("erm"),
    "Fish": ours("fish"),
    "Fish, random grouping (control)": ours("fish", draw="regrouped"),
    "CORAL": ours("coral"),
    "IRM": ours("irm"),
    "GroupDRO": ours("groupdro"),
    "logistic regression": lambda seed: LogisticRegression(),
    "gradient boosting": lambda seed: HistGradientBoostingClassifier(random_state=seed),
}
MEASURES: Mapping[str, Callable[[Any, NDArray[Any], NDArray[Any]], float]] = {
    "AUC": lambda model, x, y: float(roc_auc_score(y, model.predict_proba(x)[:, 1])),
    "accuracy": lambda model, x, y: float(accuracy_score(y, model.predict(x))),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    began = time.monotonic()
    ill = heart.read().groupby("hospital")["ill"].agg([lambda column: (column == "yes").sum(), "size"])
    patients = ", ".join(f"{name} {count} of {size}" for name, count, size in ill.itertuples())
    found = {measure: np.empty((len(METHODS), len(heart.DOMAINS), seeds)) for measure in MEASURES}
    for h, hospital in enumerate(heart.DOMAINS):
        data = heart.load(held_out=hospital)
        for m, (method, make) in enumerate(METHODS.items()):
            print(f"{hospital}: {method}", file=sys.stderr)
            for seed in range(seeds):
                for measure, score in scores(data, make(seed)).items():
                    found[measure][m, h, seed] = score
    print(page(found, patients, seeds, time.monotonic() - began))
    return 0


def scores(data: DomainData, model: Any) -> dict[str, float]:
    """Of a model fitted to the other hospitals."""
    splits, examples = data.splits, data.examples
    names = splits["train"].names
    rows = [[s.indices_of(s.number(name)) for s in (splits["train"], splits["validation"])] for name in names]
    of = np.repeat(names, [sum(map(len, parts)) for parts in rows])
    groups = {"groups": of} if isinstance(model, DomainClassifier) else {}
    x, y = examples[np.concatenate([part for parts in rows for part in parts])]
    model.fit(x.numpy(), y.numpy(), **groups)
    x, y = examples[splits["test"].indices]
    return {name: measure(model, x.numpy(), y.numpy()) for name, measure in MEASURES.items()}


def page(found: Mapping[str, NDArray[np.float64]], patients: str, seeds: int, seconds: float) -> str:
    same = ", ".join(f"{name}={value}" for name, value in SAME.items())
    return "\n".join(
        [
            f"# Heart disease at a held-out hospital, {date.today()}",
            "",
            f"Command: `python benchmarks/heart.py --seeds {seeds}`, one thread of a CPU, {seconds:.0f} s. "
            f"Shoal {shoal.__version__}, torch {torch.__version__}, scikit-learn {sklearn.__version__}, "
            f"NumPy {np.__version__}, Python {platform.python_version()}.",
            "",
            f"Ill: {patients}. All methods get the same columns. Shoal's: network `tabular`, Adam, "
            f"{same}; the last step counts; default settings of every algorithm.",
            "",
            f"Mean ± standard deviation over {seeds} seeds (of weights and batches; the two models of "
            "scikit-learn draw nothing here). The difference to ERM is taken hospital by hospital, each the "
            "mean over seeds; its 95 % interval is Student's t over the four hospitals.",
            *(line for measure, values in found.items() for line in ["", *table_of(measure, values)]),
        ]
    )


def table_of(measure: str, values: NDArray[np.float64]) -> list[str]:
    """Lines of Markdown; ``values`` are (methods, hospitals, seeds)."""
    columns = [*heart.DOMAINS, "average", f"against {BASE}", "95 % interval"]
    lines = [f"| {measure} | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    base = values[list(METHODS).index(BASE)]
    for method, own in zip(METHODS, values, strict=True):
        cells = [spread(of_seeds) for of_seeds in [*own, own.mean(0)]]
        cells += ["–", "–"] if method == BASE else against(own, base)
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def spread(of_seeds: NDArray[np.float64]) -> str:
    deviation = of_seeds.std(ddof=1) if len(of_seeds) > 1 else 0.0
    return f"{100 * of_seeds.mean():.1f} ± {100 * deviation:.1f}"


def against(own: NDArray[np.float64], base: NDArray[np.float64]) -> list[str]:
    differences = 100 * (own - base).mean(1)
    n = len(differences)
    half = float(student.ppf(0.975, n - 1)) * differences.std(ddof=1) / math.sqrt(n)
    mean = differences.mean()
    return [f"{mean:+.1f}", f"{mean - half:+.1f} to {mean + half:+.1f}"]


if __name__ == "__main__":
    sys.exit(main())
