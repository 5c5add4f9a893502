"""The files of a trained model for those who use it: how to build and feed it, and its card."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch

from shoal.data.batch import DomainData, Task
from shoal.data.loader import seeded
from shoal.options import ModelOptions, TrainingOptions, declared
from shoal.terminal import in_markdown
from shoal.training.options import plain

if TYPE_CHECKING:
    from shoal.training.setup import Setup

SMALL = 30
"""Examples of a domain, below which its score says little."""
TASKS = {
    "multilabel": "several labels, each 0 or 1 (a logit above 0 is 1)",
    "ordinal": "{} classes in order",
    "regression": "regression",
}
SETTINGS = (*declared(ModelOptions), *declared(TrainingOptions), "holdout", "protocol")
"""What of a configuration the card lists, where it is set."""
COLUMN = ("column", "kind", "missing", "distinct", "becomes")
Content = Mapping[str, Any]


def model_files(
    setup: Setup,
    recipe: Content | None,
    record: Content,
    config: Content,
    calibration: Content | None = None,
) -> dict[str, bytes]:
    """The files of a model that was trained, by name, without its weights.

    ``recipe`` is the model's ``name`` and ``options``; ``None`` for a network of the user's own.
    ``calibration`` is that of :mod:`shoal.training.calibration`.
    """
    content, files = about(setup.data, setup.model, setup.task, recipe, calibration)
    return with_card(content, files, setup.data, record, config)


def about(
    data: DomainData, model: Any, task: Task, recipe: Content | None, calibration: Content | None = None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """How to build the trained model and to feed it, as plain data, and the files that this refers to."""
    with seeded(0):  # reading an example may draw random numbers
        x = data.examples.evaluation()[int(data.splits["train"].indices[0])][0]
    shape, numbers = list(data.input_shape), ""
    if isinstance(x, torch.Tensor):
        shape, numbers = shape or list(x.shape), str(x.dtype).removeprefix("torch.")
    described, files = dict(data.inputs), dict[str, bytes]()
    if described:
        from shoal.data.inputs import reader

        known, files = reader(described, data.input_shape).portable()
        described = dict(known)
    built: dict[str, Any] = {"class": f"{type(model).__module__}.{type(model).__qualname__}"}
    if recipe is not None:
        from shoal.models import settings_of

        # With the options that were left as they are: a later version may have other defaults.
        name = str(recipe["name"])
        defaults = {key: option.default for key, option in settings_of(name).items()}
        built = {"name": name, "options": plain({**defaults, **(recipe.get("options") or {})})}
        encoder: Any = getattr(getattr(getattr(model, "features", None), "body", None), "config", None)
        if hasattr(encoder, "to_json_string"):  # of transformers
            files["encoder/config.json"] = encoder.to_json_string().encode()
    content = {
        "format": 1,
        "inputs": described,
        "input_shape": shape,
        "numbers": numbers,
        "classes": task.classes,
        "class_names": list(data.class_names) if len(data.class_names) == task.classes else [],
        "model": built,
        "task": task.kind,
        "calibration": calibration,
    }
    return content, files


def with_card(
    content: Content, files: Mapping[str, bytes], data: DomainData, record: Content, config: Content
) -> dict[str, bytes]:
    """The files of a model: ``files``, how to build and feed it (``content``), and its card."""
    sizes = {
        split: dict(zip(map(str, domains.names), domains.sizes.tolist(), strict=True))
        for split, domains in data.splits.items()
    }
    return {
        **files,
        "inputs.json": json.dumps(content, default=dict, indent=1).encode(),
        "card.md": card(record, content, config, sizes).encode("utf-8", "backslashreplace"),
    }


def card(record: Content, content: Content, config: Content, sizes: Mapping[str, Mapping[str, int]]) -> str:
    """A model card in Markdown, from the content of record.json, inputs.json and config.yaml, and sizes."""
    import jinja2

    run, at = config.get("run") or {}, record["history"][record["selected"]]
    chosen, classes = run or config.get("options") or {}, content["classes"]
    algorithm = (run or config).get("algorithm", "?")
    settings = {"algorithm": algorithm} | {key: chosen.get(key) for key in SETTINGS}
    settings["model"] = content["model"].get("name") or content["model"].get("class", "?")
    scores, small = list[tuple[Any, ...]](), list[str]()
    for split, found in at["scores"].items():
        metrics = {found["metric"]: found["average"], **(found.get("metrics") or {})}
        counts = found.get("sizes") or []
        scores += [(split, "all", sum(counts), metric, value) for metric, value in metrics.items()]
        for (domain, value), count in zip(found["domains"].items(), counts, strict=True):
            scores.append((split, domain, count, found["metric"], value))
            small += [f"{domain} ({count})"] if count < SMALL else []
    environment = jinja2.Environment(keep_trailing_newline=True)
    environment.filters |= {"text": _text, "several": _several}
    text = resources.files("shoal.training").joinpath("card.md").read_text("utf-8")
    return environment.from_string(text).render(
        title=run.get("label") or algorithm,
        run=run,
        seed=chosen.get("seed"),
        settings=[(k.replace("_", " "), v) for k, v in settings.items() if v not in (None, False, {}, [])],
        command=config.get("command"),
        record=record,
        at=at,
        notes=record.get("notes") or {},
        content=content,
        task=TASKS.get(content.get("task", ""), "{} classes" if classes else "regression").format(classes),
        sizes=sizes,
        size_rows=[(s, name, count) for s, domains in sizes.items() for name, count in domains.items()],
        column_rows=[[c[key] for key in COLUMN] for c in content["inputs"].get("columns_report") or ()],
        scores=scores,
        small=list(dict.fromkeys(small)),
        held_out=[name for name in sizes.get("test", {}) if name not in sizes["train"]],
    )


def _text(value: Any) -> str:
    """A value in Markdown; of a mapping its pairs."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {each}" for name, each in value.items())
    if isinstance(value, float):
        value = f"{value:.4g}" if math.isfinite(value) else "–"
    return in_markdown("–" if value is None else f"{value:,}" if type(value) is int else value)


def _several(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(in_markdown, names[:most])) + more
