"""CdSprites-N: accuracy against the number of training domains N.

``presets/cdsprites.yaml`` has the settings, and why they are the same for all methods.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord
from shoal.experiments.statistics import plus_minus
from shoal.paper.published import published, read
from shoal.paper.recipes import Variant

if TYPE_CHECKING:
    from shoal.paper.reproduce import Reproduction, Request

POINTS = 20
"""Evaluations per training."""
OF_THE_PAPER = ("adam", "idgm")
"""The other parts are controls of ours."""
SCORES = {
    "train last": "train, last",
    "test last": "test, last",
    "test selected": "test, selected (oracle-like)",
}


def preset(kind: str) -> dict[str, dict[str, Any]]:
    """The ``sizes`` of experiments on this dataset, or the ``parts`` of this one, by name."""
    found: dict[str, dict[str, Any]] = read("presets/cdsprites.yaml")[kind]
    return found


def rows(part: str, size: Mapping[str, Any]) -> list[Variant]:
    """The methods of a part, in a size of the experiment."""
    return [
        Variant(**row) for row in preset("parts")[part]["rows"] if row["label"] not in size.get("without", ())
    ]


def configs(
    methods: Iterable[Variant],
    number: int,
    seeds: Iterable[int],
    size: Mapping[str, Any],
    *,
    data: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
) -> list[RunConfig]:
    """Every method with every seed on ``number`` domains, with the same number of passes.

    ``data`` and ``run`` replace options of the dataset and fields of the runs.
    """
    if size["passes"] % (number * POINTS):
        raise InputError(f"passes={size['passes']} must be a multiple of {number * POINTS} for N={number}.")
    result = []
    for seed in seeds:
        for method in methods:
            batches = 1 if method.algorithm == "erm" else number
            steps = size["passes"] // batches
            options: dict[str, Any] = {
                "data_options": {"domains": number, **size["data"], **(data or {}), "seed": seed},
                "settings": {**size["settings"].get(method.algorithm, {}), **method.settings},
                "domains_per_step": batches,
                "eval_every": steps // POINTS,
                **size["run"],
                **(run or {}),
            }
            own = {"label": method.label, "draw": method.draw, "seed": seed}
            result.append(RunConfig("cdsprites", method.algorithm, steps, **own, **options))
    return result


class Row(NamedTuple):
    """A row of the table: the runs of all seeds, read at step ``at``."""

    part: str
    method: str
    domains: int
    at: int
    runs: list[RunConfig]


def plan(names: Sequence[str], size: Mapping[str, Any], seeds: Sequence[int]) -> list[Row]:
    """The rows of the given parts."""
    result = []
    for name in names:
        part = preset("parts")[name]
        for number in part.get("numbers", size["numbers"]):
            for method in rows(name, size):
                changes = {key: part.get(key) for key in ("data", "run")}
                runs = configs([method], number, seeds, size, **changes)
                lengths = {method.label: runs[0].steps}
                if method.label == "IDGM":  # rows with different numbers of updates share their runs
                    lengths = _updates(name, number, size) | (lengths if name == "idgm" else {})
                    every = math.gcd(*lengths.values(), next(iter(size["updates"].values())) // 10)
                    runs = [replace(c, steps=max(lengths.values()), eval_every=every) for c in runs]
                result += [Row(name, label, number, at, runs) for label, at in lengths.items()]
    return result


def _updates(part: str, number: int, size: Mapping[str, Any]) -> dict[str, int]:
    """Numbers of updates of IDGM, by row; the last is for N = 10 in the paper's part."""
    equal, long = size["updates"].items()
    return dict([equal, long] if (part, number) == ("idgm", 10) else [equal])


def entry(row: Row, records: Mapping[str, RunRecord]) -> dict[str, Any]:
    """A row as plain data: accuracies at its last step and at the step that validation selects.

    A run that diverged before has no score, not even that of its last evaluation.
    """
    runs = [records[c.identity] for c in row.runs if c.identity in records]
    histories = {r.config.seed: [m for m in r.history if m["step"] <= row.at] for r in runs}
    scored = {seed: own for seed, own in histories.items() if own and own[-1]["step"] == row.at}
    best = [max(own, key=lambda m: m["scores"]["validation"]["average"]) for own in scored.values()]
    last = [own[-1] for own in scored.values()]
    claims = published("cdsprites") if row.part in OF_THE_PAPER else []
    own = [c for c in claims if (c["method"], c["domains"]) == (row.method, row.domains)]
    return {
        "part": row.part,
        "method": row.method,
        "domains": row.domains,
        "seeds": list(scored),
        "diverged": [seed for seed in histories if seed not in scored],
        "train last": [m["scores"]["train"]["average"] for m in last],
        "test last": [m["scores"]["test"]["average"] for m in last],
        "test selected": [m["scores"]["test"]["average"] for m in best],
        "paper": "  ".join(f"{c['split']}: {c['words']}" for c in own),
    }


def percent(values: Iterable[float]) -> str:
    """Mean ± standard deviation over seeds, in percent."""
    return plus_minus([100 * v for v in values])


def shown(entry: Mapping[str, Any]) -> dict[str, object]:
    """A row of the table."""
    diverged = f", {len(entry['diverged'])} diverged" if entry["diverged"] else ""
    about = {"part": entry["part"], "method": entry["method"], "N": entry["domains"]}
    scores = {title: percent(entry[name]) for name, title in SCORES.items()}
    return {**about, "seeds": f"{len(entry['seeds'])}{diverged}", **scores, "paper": entry["paper"] or "–"}


def series(entries: Iterable[Mapping[str, Any]], split: str) -> dict[str, dict[int, list[float]]]:
    """By method and N the accuracies at the last step, for the figure."""
    result: dict[str, dict[int, list[float]]] = {}
    for e in entries:
        if e["part"] in OF_THE_PAPER and e[f"{split} last"]:
            result.setdefault(e["method"], {})[e["domains"]] = e[f"{split} last"]
    return result


def samples(options: Mapping[str, Any], each: int = 9) -> dict[str, Any]:
    """A few images of every domain, as arrays for the figures."""
    import torch

    from shoal.data.sets import load

    data = load("cdsprites", **{**options, "per_domain": 2 * each})
    examples: Any = data.examples
    result = {}
    for split in ("train", "test"):
        domains = data.splits[split]
        for d, name in enumerate(domains.names):
            images, _ = examples.batch(torch.as_tensor(domains.indices_of(d)[:each]).long())
            result["held-out" if split == "test" else name] = images.permute(0, 2, 3, 1).numpy()
    return result


def reproduce(request: Request) -> Reproduction:
    from shoal.paper.figures import cdsprites_figure, samples_figure

    size = preset("sizes")["quick" if request.quick else "full"]
    names = request.parts(preset("parts"))
    if request.quick and not request.only:
        names = ["adam"]
    planned = plan(names, size, range(request.seeds or size["seeds"]))
    records, failed = request.run(config for row in planned for config in row.runs)
    entries = [entry(row, records) for row in planned]
    pixels, run = size["data"]["size"], size["run"]
    setting = (
        f"{pixels}×{pixels} images, Adam {run['lr']:g}, batches of {run['batch_size']}, {size['passes']:,} "
        f"minibatches per run (IDGM, equal updates: {size['updates']['IDGM, equal updates']:,} updates).\n"
        f"Fish, Fish with random grouping and Reptile: ε = {size['settings']['fish']['meta_lr']:g}."
    )
    train, test = (series(entries, split) for split in ("train", "test"))
    figures = {"cdsprites-samples": samples_figure(samples({"domains": 10, "size": pixels}))}
    figures |= {"cdsprites": cdsprites_figure(train, test, setting)} if train else {}
    table, text = [shown(e) for e in entries], {"setting": setting}
    return request.result({"": table}, {"rows": entries}, text, figures=figures, failed=failed)
