"""The model card, and the other files of a trained model for those who use it."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from shoal.options import ModelOptions, TrainingOptions, declared
from shoal.terminal import in_markdown

if TYPE_CHECKING:
    import jinja2

    from shoal.data.batch import DomainData

SMALL = 30
"""Examples of a domain, below which its score says little."""
TASKS = {
    "multilabel": "several labels, each 0 or 1 (a logit above 0 is 1)",
    "ordinal": "{} classes in order",
    "dense": "{} classes, one per position",
    "regression": "regression",
}
SETTINGS = (*declared(ModelOptions), *declared(TrainingOptions), "holdout", "protocol")
"""What of a configuration the card lists, where it is set."""


def with_card(
    content: Mapping[str, Any],
    files: Mapping[str, bytes],
    data: DomainData,
    record: Mapping[str, Any],
    config: Mapping[str, Any],
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


def card(
    record: Mapping[str, Any],
    content: Mapping[str, Any],
    config: Mapping[str, Any],
    sizes: Mapping[str, Mapping[str, int]],
) -> str:
    """A model card in Markdown, from the content of record.json, inputs.json and config.yaml, and sizes."""
    run, scores = config.get("run") or {}, record["history"][record["selected"]]["scores"]
    chosen = run or config.get("options") or {}
    name, classes = (run or config).get("algorithm", "?"), content["classes"]
    task = TASKS.get(content.get("task", ""), "{} classes" if classes else "regression").format(classes)
    rows: list[tuple[str, ...]] = []
    small: dict[str, None] = {}
    for split, found in scores.items():
        counts = found.get("sizes") or []
        metrics = {found["metric"]: found["average"], **(found.get("metrics") or {})}
        rows += [(split, "all", f"{sum(counts):,}", metric, _number(v)) for metric, v in metrics.items()]
        for (domain, value), count in zip(found["domains"].items(), counts, strict=True):
            rows.append((split, domain, f"{count:,}", found["metric"], _number(value)))
            small |= {f"{domain} ({count})": None} if count < SMALL else {}
    listed = {key: chosen[key] for key in SETTINGS if chosen.get(key) not in (None, False, {}, [])}
    listed = {
        "algorithm": name,
        **listed,
        "model": content["model"].get("name") or content["model"].get("class", "?"),
    }
    columns = content["inputs"].get("columns_report") or ()
    return _template().render(
        algorithm=run.get("label") or name,
        run=run,
        chosen=chosen,
        command=config.get("command"),
        record=record,
        at=record["history"][record["selected"]],
        notes=record.get("notes") or {},
        inputs=content["inputs"],
        shape=tuple(content["input_shape"]),
        model=content["model"],
        task=task,
        classes=content["class_names"],
        sizes=sizes,
        size_rows=[(s, n, f"{count:,}") for s, domains in sizes.items() for n, count in domains.items()],
        column_rows=[[c[k] for k in ("column", "kind", "missing", "distinct", "becomes")] for c in columns],
        score_rows=rows,
        settings=[
            (k.replace("_", " "), _pairs(v) if isinstance(v, Mapping) else v) for k, v in listed.items()
        ],
        held_out=[name for name in sizes.get("test", {}) if name not in sizes["train"]],
        small=list(small),
        metric=next((found["metric"] for found in scores.values()), ""),
    )


@functools.cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(keep_trailing_newline=True)
    environment.filters |= {"text": in_markdown, "several": _several, "pairs": _pairs, "code": _code}
    return environment.from_string(resources.files("shoal.training").joinpath("card.md").read_text("utf-8"))


def _several(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(in_markdown, names[:most])) + more


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _code(text: str) -> str:
    """A block of code, with a fence longer than any within."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"
