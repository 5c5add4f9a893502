"""Does any method help on natural shifts? Exhaustive comparisons of tables and text, and their summary.

    python benchmarks/natural.py run DATA --encoder MINILM --out runs/natural --jobs 14
    python benchmarks/natural.py table benchmarks/results/records/2026-11-19-natural.tar.gz

``DATA`` has gusto.csv.gz, vote2016.csv.gz, beijing.csv.gz, crisis_tweets.csv.gz and product_reviews.csv.gz;
heart is built in. Text becomes embeddings of a frozen encoder once. ``run`` does what is missing; the
``table`` is read off the records alone. The plan: results/2026-11-19-plan.md.
"""

from __future__ import annotations

import argparse
import json
import math
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

DATASETS = {
    "heart": ("", "", None, "accuracy"),
    "product_reviews": ("positive", "category", "text", "accuracy"),
    "gusto": ("day30", "regl", None, "AUC"),
    "beijing": ("PM2.5", "station", None, "mse"),
    "crisis_tweets": ("informative", "event", "text", "accuracy"),
    "vote2016": ("votetrump", "state", None, "accuracy"),
}
"""Label, domain, column of text and metric."""
ALGORITHMS = (
    "erm",
    "reweighted",
    "fish",
    "fish:regrouped",
    "coral",
    "groupdro",
    "vrex",
    "fishr",
    "hessian-alignment",
    "pgrad",
    "mixup",
)


def embedded(frame: pd.DataFrame, column: str, encoder: Path, device: str) -> pd.DataFrame:
    """The frame with the mean token embedding of its text, normalized, in place of the text."""
    import torch

    from shoal.vision import allow_torchvision

    allow_torchvision()  # transformers imports it
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder, local_files_only=True)
    model = AutoModel.from_pretrained(encoder, local_files_only=True).to(device).float().eval()
    parts = []
    texts = frame[column].fillna("").tolist()
    with torch.inference_mode():
        for start in range(0, len(texts), 256):
            batch = tokenizer(
                texts[start : start + 256], padding=True, truncation=True, max_length=256, return_tensors="pt"
            ).to(device)
            mask = batch["attention_mask"][..., None]
            mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            parts.append(torch.nn.functional.normalize(mean).cpu().numpy())
    numbers = pd.DataFrame(np.concatenate(parts), columns=[f"e{n:03d}" for n in range(parts[0].shape[1])])
    return pd.concat([frame.drop(columns=column).reset_index(drop=True), numbers], axis=1)


LINEAR = {"logistic-regression": "linear", "ridge-regression": "linear"}


def run(
    data: Path,
    encoder: Path | None,
    out: Path,
    jobs: int,
    device: str,
    names: list[str],
    seeds: int,
    trials: int,
) -> None:
    import shoal

    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        label, domain, text, metric = DATASETS[name]
        began = time.monotonic()
        source: Any = "heart"
        options: dict[str, Any] = {}
        if name != "heart":
            source = data / f"{name}.csv.gz"
            options = {"label": label, "domain": domain}
            if text is not None:
                frame = pd.read_csv(source).dropna(subset=[label, domain])
                source = out / f"{name}.parquet"
                if not source.exists():
                    assert encoder is not None
                    embedded(frame, text, encoder, device).to_parquet(source)
        shoal.compare(
            source if name == "heart" else str(source),
            **options,
            algorithms=ALGORITHMS,
            metric=metric,
            seeds=seeds,
            search=trials,
            exhaustive=True,
            device="cpu",
            jobs=jobs,
            out=out / name,
            progress=False,
        )
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def records(archive: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Dataset and content of each record."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.endswith(".json") and (file := tar.extractfile(member)):
                yield Path(member.name).parts[0], json.load(file)


def scores(archive: Path) -> pd.DataFrame:
    """One line for each dataset, row, seed and held-out domain, of the trial with the best validation score.

    Columns: dataset, row, seed, fold, domain, score (higher is better). A seed that some row lacks in some
    fold is left out.
    """
    trials = []
    for dataset, content in records(archive):
        config = content["config"]
        if content["status"] != "finished":
            continue
        found = content["history"][content["selected"]]["scores"]
        metric = DATASETS[dataset][3]
        sign = -1 if metric == "mse" else 1
        row = f"{config['algorithm']}:{config['draw']}" if config["draw"] else config["algorithm"]
        key = {"dataset": dataset, "row": LINEAR.get(row, row), "seed": config["seed"]}
        key["fold"] = json.dumps(config["data_options"].get("held_out"))
        validation = sign * _value(found["validation"], metric)
        for name in found["test"]["domains"]:
            score = sign * _value(found["test"], metric, name)
            trials.append({**key, "domain": name, "score": score, "validation": validation})
    frame = pd.DataFrame(trials)
    group = frame.groupby(["dataset", "row", "seed", "fold"])["validation"]
    best = frame[frame["validation"] == group.transform("max")]
    best = best.drop_duplicates(["dataset", "row", "seed", "fold", "domain"])
    runs = best.groupby(["dataset", "seed"])["domain"].transform("size")
    whole = best.groupby("dataset")["row"].transform("nunique") * best.groupby("dataset")["domain"].transform(
        "nunique"
    )
    return best[runs == whole]


def _value(scores: dict[str, Any], metric: str, domain: str | None = None) -> float:
    """The metric of a split, or of one of its domains."""
    if metric == scores["metric"]:
        return scores["mean"] if domain is None else scores["domains"][domain]
    if domain is None or len(scores["domains"]) == 1:
        return scores["metrics"][metric]
    return scores["by_domain"][metric][domain]


def interval(values: pd.Series, folds: pd.Series) -> dict[str, float]:
    """Mean over domains, 95 % interval over folds, p-value, and the difference seen with 80 % power."""
    sums = (values - values.mean()).groupby(folds).sum()
    count = len(sums)
    error = math.sqrt((sums**2).sum() * count / (count - 1)) / len(values)
    t = stats.t(count - 1)
    half = float(t.ppf(0.975)) * error
    p = float(2 * t.sf(abs(values.mean()) / error)) if error else 1.0
    return {
        "difference": values.mean(),
        "low": values.mean() - half,
        "high": values.mean() + half,
        "p": p,
        "detectable": float(t.ppf(0.975) + t.ppf(0.8)) * error,
    }


def verdicts(wide: pd.DataFrame, base: str = "erm") -> pd.DataFrame:
    """For each row its difference to ``base`` on one dataset, and a verdict after Holm's correction."""
    folds = pd.Series(wide.index.get_level_values("fold"), index=wide.index)
    found = pd.DataFrame({row: interval(wide[row] - wide[base], folds) for row in wide if row != base}).T
    order = found["p"].sort_values().index
    holm = np.maximum.accumulate([found["p"][r] * (len(order) - n) for n, r in enumerate(order)])
    found["adjusted"] = pd.Series(np.minimum(holm, 1), index=order)
    seen = found["adjusted"] <= 0.05
    better = np.where(found["difference"] > 0, "better", "worse")
    return found.assign(verdict=np.where(seen, better, "no difference seen"))


def summary(archive: Path) -> tuple[dict[str, pd.DataFrame], pd.DataFrame, dict[str, Any]]:
    """Tables by dataset, ranks of rows by dataset, and what is said of all datasets."""
    frame = scores(archive)
    tables, ranks, pairs = {}, {}, {}
    for name in [name for name in DATASETS if name in set(frame["dataset"])]:
        metric = DATASETS[name][3]
        unit = 1 if metric == "mse" else 100
        own = frame[frame["dataset"] == name].groupby(["row", "fold", "domain"])["score"].mean() * unit
        wide = own.unstack("row")
        means = wide.mean().sort_values(ascending=False)
        worst = wide.min()
        tables[name] = verdicts(wide).assign(mean=means, worst=worst).reindex(means.index)
        tables[name].loc["erm", ["mean", "worst"]] = means["erm"], worst["erm"]
        ranks[name] = means.rank(ascending=False)
        folds = pd.Series(wide.index.get_level_values("fold"), index=wide.index)
        pairs[name] = interval(wide["fish"] - wide["fish:regrouped"], folds)
    ranked = pd.DataFrame(ranks).dropna()
    test = stats.friedmanchisquare(*ranked.to_numpy())
    return tables, ranked, {"fish - fish:regrouped": pairs, "friedman": float(test.pvalue)}


def table(archive: Path) -> str:
    """The summary as Markdown; without an archive, that it was not run."""
    if not archive.exists():
        return "Not run: there are no records."
    tables, ranks, about = summary(archive)
    lines = []
    for name, found in tables.items():
        metric = DATASETS[name][3]
        lines += [f"\n### {name} ({'minus mse' if metric == 'mse' else metric + ', %'})\n"]
        lines += ["| row | mean | worst domain | less ERM | 95 % interval | verdict | seen with 80 % power |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row, x in found.iterrows():
            known = not math.isnan(x["difference"])
            rest = "– | – | – | –"
            if known:
                bounds = f"{x['low']:+.2f} to {x['high']:+.2f}"
                rest = f"{x['difference']:+.2f} | {bounds} | {x['verdict']} | {x['detectable']:.2f}"
            lines += [f"| {row} | {x['mean']:.2f} | {x['worst']:.2f} | {rest} |"]
    lines += [
        "\n### Ranks\n",
        f"| row | {' | '.join(ranks)} | mean | better than ERM | worse than ERM |",
        "|---" * (len(ranks.columns) + 4) + "|",
    ]
    said = pd.DataFrame({name: found["verdict"] for name, found in tables.items()})
    for row, values in ranks.loc[ranks.mean(axis=1).sort_values().index].iterrows():
        counts = " | ".join(str((said.loc[row] == word).sum()) for word in ("better", "worse"))
        lines += [f"| {row} | {' | '.join(f'{v:g}' for v in values)} | {values.mean():.2f} | {counts} |"]
    lines += [f"\nFriedman's test: p = {about['friedman']:.3f}.\n"]
    lines += ["| dataset | Fish less Fish with random grouping | 95 % interval |", "|---|---|---|"]
    for name, x in about["fish - fish:regrouped"].items():
        lines += [f"| {name} | {x['difference']:+.2f} | {x['low']:+.2f} to {x['high']:+.2f} |"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("data", type=Path)
    running.add_argument("--encoder", type=Path)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--jobs", type=int, default=2)
    running.add_argument("--device", default="cpu", help="of the encoder")
    running.add_argument("--only", nargs="+", choices=DATASETS, default=list(DATASETS))
    running.add_argument("--seeds", type=int, default=2)
    running.add_argument("--trials", type=int, default=2)
    commands.add_parser("table").add_argument("archive", type=Path)
    given = parser.parse_args()
    if given.command == "run":
        run(
            given.data,
            given.encoder,
            given.out,
            given.jobs,
            given.device,
            given.only,
            given.seeds,
            given.trials,
        )
    else:
        print(table(given.archive))


if __name__ == "__main__":
    main()
