"""The model card, and the other files of a trained model for those who use it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from shoal.options import ModelOptions, TrainingOptions, declared
from shoal.terminal import in_markdown

if TYPE_CHECKING:
    from shoal.data.batch import DomainData

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
        counts = found.get("sizes") or []
        metrics = {found["metric"]: found["average"], **(found.get("metrics") or {})}
        scores += [
            (split, "all", f"{sum(counts):,}", metric, _number(value)) for metric, value in metrics.items()
        ]
        for (domain, value), count in zip(found["domains"].items(), counts, strict=True):
            scores.append((split, domain, f"{count:,}", found["metric"], _number(value)))
            small += [f"{domain} ({count})"] if count < SMALL else []
    environment = jinja2.Environment(keep_trailing_newline=True)
    environment.filters |= {"text": _text, "several": _several, "code": _code}
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
        size_rows=[(s, n, f"{count:,}") for s, domains in sizes.items() for n, count in domains.items()],
        column_rows=[[c[key] for key in COLUMN] for c in content["inputs"].get("columns_report") or ()],
        scores=scores,
        small=list(dict.fromkeys(small)),
        held_out=[name for name in sizes.get("test", {}) if name not in sizes["train"]],
    )


def _text(value: Any) -> str:
    """A value in Markdown; of a mapping its pairs."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {each}" for name, each in value.items())
    return in_markdown(value)


def _several(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(in_markdown, names[:most])) + more


def _code(text: str) -> str:
    """A block of code, with a fence longer than any within."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"
