"""CdSprites-N: accuracy against the number of training domains N.

``presets/cdsprites.yaml`` has the settings, and what all methods have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shoal.datasets import load
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.paper import columns, read
from shoal.paper.columns import Column
from shoal.paper.figures import SPLITS, cdsprites_figure, samples_figure
from shoal.paper.recipes import Variant
from shoal.paper.reproduce import Reproduction, Request

POINTS = 20
"""Evaluations per training."""
OF_THE_PAPER = ("adam", "idgm")
"""The other parts are controls of ours."""


def preset(kind: str) -> Any:
    """The ``sizes`` of experiments on this dataset, or the ``parts`` of this one, by name."""
    return read("presets/cdsprites.yaml")[kind]


def configs(
    methods: Iterable[Variant],
    number: int,
    seeds: Iterable[int],
    size: Mapping[str, Any],
    part: Mapping[str, Any] | None = None,
) -> list[RunConfig]:
    """Every method with every seed on ``number`` domains; a part may have ``data`` and ``run`` options."""
    if size["passes"] % (number * POINTS):
        raise InputError(f"passes={size['passes']} must be a multiple of {number * POINTS} for N={number}.")
    result, own = [], part or {}
    for seed in seeds:
        for method in methods:
            batches = 1 if method.algorithm == "erm" else number
            steps = size["updates"] * method.updates if method.updates else size["passes"] // batches
            options: dict[str, Any] = {
                "data_options": {"domains": number, **size["data"], **own.get("data", {}), "seed": seed},
                "settings": {**size["settings"].get(method.algorithm, {}), **method.settings},
                **{"domains_per_step": batches, "eval_every": steps // POINTS},
                **{"label": method.label, "draw": method.draw, "seed": seed},
                **{**size["run"], **own.get("run", {})},
            }
            result.append(RunConfig("cdsprites", method.algorithm, steps, **options))
    return result


def plan(name: str, size: Mapping[str, Any], seeds: Iterable[int], split: str = "test") -> dict[int, Column]:
    """The columns of a part by the number of domains; the paper's numbers are of a split."""
    part, result = preset("parts")[name], {}
    methods = [Variant(**row) for row in part["rows"] if row["label"] not in size["without"]]
    for number in part.get("numbers", size["numbers"]):
        paper = {
            claim["method"]: f"{claim['relation']} {claim['value']}"
            for claim in read("published/cdsprites.yaml")
            if (claim["part"], claim["domains"], claim["split"]) == (name, number, split)
            and claim["method"] not in size["without"]
        }
        runs = configs(methods, number, seeds, size, part)
        result[number] = Column("cdsprites", f"N = {number}", "accuracy", paper, runs)
    return result


def samples(options: Mapping[str, Any]) -> dict[str, Any]:
    """A few images of every domain, as arrays for the figures."""
    data = load("cdsprites", **{**options, "per_domain": 18})
    examples: Any = data.examples
    result = {}
    for split in ("train", "test"):
        domains = data.splits[split]
        for d, name in enumerate(domains.names):
            images, _ = examples.batch(torch.as_tensor(domains.indices_of(d)[:9]).long())
            result["held-out" if split == "test" else name] = images.permute(0, 2, 3, 1).numpy()
    return result


def reproduce(request: Request) -> Reproduction:
    size = preset("sizes")["quick" if request.quick else "full"]
    names = request.parts(preset("parts"))
    if request.quick and not request.only:
        names = ["adam"]
    seeds = range(request.seeds or size["seeds"])
    planned = {(name, split): plan(name, size, seeds, split) for name in names for split in SPLITS}
    records, failed = request.run(
        c for own in planned.values() for column in own.values() for c in column.runs
    )
    tables, data = {}, {}
    panels: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for (name, split), own in planned.items():
        entries = [
            {"domains": number, **column.entry(column.scores(records, split, last=True))}
            for number, column in own.items()
        ]
        heading = f"{name}, {SPLITS[split]}"
        tables[heading], data[heading] = columns.table(entries), entries
        panels[split] += entries if name in OF_THE_PAPER else []
    pixels, run = size["data"]["size"], size["run"]
    setting = (
        f"{pixels}×{pixels} images, Adam {run['lr']:g}, batches of {run['batch_size']}, {size['passes']:,} "
        f"minibatches per run (IDGM, equal updates: {size['updates']:,} updates).\n"
        f"Fish, Fish with random grouping and Reptile: ε = {size['settings']['fish']['meta_lr']:g}."
    )
    figures = {"cdsprites-samples": samples_figure(samples({"domains": 10, "size": pixels}))}
    figures |= {"cdsprites": cdsprites_figure(panels, setting)} if panels["test"] else {}
    return request.result(tables, {"tables": data}, {"setting": setting}, figures=figures, failed=failed)
