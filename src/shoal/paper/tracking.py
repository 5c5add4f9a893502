"""The paper's tracking of the gradient inner product: Fish and ERM on the same batches from one start.

Each iteration draws a minibatch of each of S domains, for both. Fish's inner loop takes them one after the
other; ERM takes S steps on the same examples, shuffled together and split again into S: that is Fish with
ε = 1 on regrouped batches. The mean cosine and inner product between the gradients of the minibatches are
measured before and after every update. Both have the same optimizer and learning rate.

Beside them are two classifiers that ignore their input: the network with zero weights in its last layer and
its bias at the logarithms of the labels' frequencies (in regression, at their mean), or with the first output
1 higher (in regression, a standard deviation). The second is wrong in every domain in the same way, so that
its gradients agree almost perfectly: agreement alone is no sign of learning.

Reference: Shi et al., Gradient Matching for Domain Generalization, 2021, its two algorithms in the appendix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import check_names
from shoal.experiments.config import RunConfig
from shoal.experiments.record import RunRecord, selection_score
from shoal.experiments.run import prepare
from shoal.experiments.statistics import mean_sd, plus_minus
from shoal.models.features import find_head
from shoal.paper import cdsprites, read, recipes
from shoal.paper.columns import shown, unit
from shoal.paper.figures import tracking_figure
from shoal.paper.recipes import Variant
from shoal.paper.reproduce import Reproduction, Request

if TYPE_CHECKING:
    import pandas

METHODS = (
    Variant("Fish"),
    Variant("ERM", settings={"meta_lr": 1.0, "inner_state": "carry"}, draw="regrouped"),
)
EVALUATIONS, EVAL_LIMIT = 20, 5000
QUICK_EVERY = 4  # iterations between measurements in a quick run
CONSTANT_STEPS = 20  # iterations on whose minibatches the constant classifiers are measured
KINDS = ["mean_cosine", "mean_inner_product"]
DOMAINS = 15  # of CdSprites


def plan(dataset: str, request: Request) -> list[RunConfig]:
    """Both methods with every seed."""
    if dataset == "cdsprites":
        size = cdsprites.preset("sizes")["tracking-quick" if request.quick else "tracking"]
        configs = cdsprites.configs(METHODS, DOMAINS, range(request.seeds or size["seeds"]), size)
    else:
        configs = recipes.runs(dataset, METHODS, request.preset, request.seeds, request.quick)
    every = [max(1, c.steps // EVALUATIONS) for c in configs]
    limits = [c.eval_limit or EVAL_LIMIT for c in configs]
    return [
        replace(config, select="last", eval_every=n, eval_limit=limit)
        for config, n, limit in zip(configs, every, limits, strict=True)
    ]


def constants(config: RunConfig, device: str | None) -> dict[str, dict[str, Any]]:
    """Agreement and scores of the constant classifiers."""
    trainer = prepare(replace(config, warm_start=None), device, options={"track_every": 1}).trainer
    training, track = trainer.setup, trainer.tracking
    task = training.task
    steps = min(CONSTANT_STEPS, config.steps)
    batches = list(training.loader(training.sampler, 0, steps))
    head: Any = find_head(training.model, batches[0].x)
    labels = torch.cat([batch.y for batch in batches])
    bias = constant_bias(labels, task.classes)
    wrong = bias.clone()
    wrong[0] += 1.0 if task.classes is not None else float(labels.float().std())
    result = {}
    for name, value in {"constant classifier": bias, "constant and wrong": wrong}.items():
        with torch.no_grad():
            head.weight.zero_()
            head.bias.copy_(value)
        training.model.train()
        assert track is not None
        measured = [track.measure(step, track.batch(step)) for step in range(steps)]
        means = {kind: mean_sd(point[kind] for point in measured)[0] for kind in KINDS}
        scores = training.evaluator(training.model)["test"].to_dict()
        result[name] = {**means, "score": selection_score(scores)[1]}
    return result


def constant_bias(labels: Tensor, classes: int | None) -> Tensor:
    """Logits of the labels' frequencies, a class that did not occur counted as half an example."""
    if classes is None:
        return labels.float().mean(0).reshape(-1)
    counts = torch.bincount(labels.reshape(-1), minlength=classes).float().clamp(min=0.5)
    return (counts / counts.sum()).log()


# Tables


def frames(records: Sequence[RunRecord]) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """What was measured, one row per seed, iteration, model and before or after; and the held-out scores."""
    import pandas

    measured, scores = [], []
    for record in records:
        about = {"seed": record.config.seed, "model": record.config.name}
        for point in record.agreement:
            for when, values in (("before", point), ("after", point["after"])):
                kinds = {kind: values[kind] for kind in KINDS}
                measured.append({**about, "iteration": point["step"], "when": when, **kinds})
        for point in record.history:
            value = selection_score(point["scores"]["test"])[1]
            scores.append({**about, "iteration": point["step"], "score": value})
    kinds = dict.fromkeys(KINDS, float)
    return pandas.DataFrame(measured).astype(kinds), pandas.DataFrame(scores).astype({"score": float})


def summary(measured: pandas.DataFrame, scores: pandas.DataFrame) -> dict[str, dict[str, list[float]]]:
    """By model, one value per seed: mean agreement over the first and the last tenth, and the last score.

    ``change`` is how much an update changes the cosine, on average over all of training.
    """
    step, result = measured["iteration"], {}
    parts = (measured[step <= step.quantile(0.1)], measured[step >= step.quantile(0.9)], measured)
    first, last, whole = (part.groupby(["model", "when", "seed"])[KINDS].mean() for part in parts)
    final = scores.groupby(["model", "seed"])["score"].last()
    for model in scores["model"].unique():
        values = {
            "start": first.loc[model, "after"]["mean_cosine"],
            "before": last.loc[model, "before"]["mean_cosine"],
            "after": last.loc[model, "after"]["mean_cosine"],
            "change": (whole.loc[model, "after"] - whole.loc[model, "before"])["mean_cosine"],
            "inner product": last.loc[model, "after"]["mean_inner_product"],
            "score": final.loc[model],
        }
        result[str(model)] = {name: own.tolist() for name, own in values.items()}
    return result


def table(models: Mapping[str, Any], fixed: Mapping[str, Any], metric: str) -> list[dict[str, str]]:
    """A row per model; a constant one is the same throughout."""
    for name, values in fixed.items():
        same = {when: [values["mean_cosine"]] for when in ("start", "before", "after")}
        same |= {"change": [0.0], "inner product": [values["mean_inner_product"]], "score": [values["score"]]}
        models = {**models, name: same}
    return [
        {
            "": model,
            "cosine, start": plus_minus(values["start"], 3),
            "before": plus_minus(values["before"], 3),
            "after, end": plus_minus(values["after"], 3),
            "change by an update": plus_minus(values["change"], 4),
            "inner product, end": f"{np.mean(values['inner product']):.2e}",
            f"held-out {unit(metric)}": shown(values["score"], metric),
        }
        for model, values in models.items()
    ]


def reproduce(request: Request) -> Reproduction:
    names = request.datasets or ("cdsprites",)
    check_names("dataset of tracking:", names, ["cdsprites", *recipes.datasets()])
    plans = {name: plan(name, request) for name in names}
    options = {"track_every": QUICK_EVERY if request.quick else 1, "track_after": True}
    records, failed = request.run((c for configs in plans.values() for c in configs), options)
    failed += [f"diverged: {r.config.name}: {r.error}" for r in records.values() if r.status != "finished"]
    tables, figures, data = {}, {}, {}
    for name, configs in plans.items():
        found = [records[c.identity] for c in configs if c.identity in records]
        finished = [record for record in found if record.status == "finished"]
        if not finished:
            continue
        metric = selection_score(finished[0].history[-1]["scores"]["test"])[0]
        fixed, (measured, scores) = constants(configs[0], request.device), frames(finished)
        models = summary(measured, scores)
        data[name] = {**models, "constants": fixed}
        title = f"{name}, {configs[0].domains_per_step} domains per iteration"
        tables[title] = table(models, fixed, metric)
        file = "tracking" if name == "cdsprites" else f"tracking-{name}"
        figures[file] = tracking_figure(measured, scores, fixed, title, metric)
    paper = "\n".join(f"  {claim['method']}: {claim['words']}" for claim in read("published/tracking.yaml"))
    return request.result(tables, data, {"paper": paper}, figures=figures, failed=failed)
