"""What lies beside a trained model for those who use it: how to feed it, and a card that says what it is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.options import ModelOptions, TrainingOptions, declared
from shoal.terminal import in_markdown as escaped
from shoal.training.summary import about, example_of

if TYPE_CHECKING:
    from shoal.data.batch import DomainData
    from shoal.training.setup import Setup

MOST = 50
"""Rows of a table of domains; more are counted."""
SMALL = 30
"""Examples of a domain, below which its score says little."""
SETTINGS = (*declared(ModelOptions), *declared(TrainingOptions), "holdout", "protocol")
"""What of a configuration the card lists, where it is set."""


def beside(
    training: Setup, recipe: Mapping[str, Any] | None, record: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, bytes]:
    """The files to put beside the weights of a finished training, by name."""
    content, files = about(
        training.data, training.model, recipe, training.task.classes, *example_of(training)
    )
    content["task"] = training.task.kind
    return files_beside(content, files, training.data, record, config)


def files_beside(
    content: Mapping[str, Any],
    files: Mapping[str, bytes],
    data: DomainData,
    record: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, bytes]:
    """``files``, with how to build and feed the model (``content``) and its card."""
    sizes = {
        split: dict(zip(map(str, domains.names), domains.sizes.tolist(), strict=True))
        for split, domains in data.splits.items()
    }
    return {
        **files,
        "inputs.json": json.dumps(content, default=dict, indent=1).encode(),
        "card.md": card(record, content, config, sizes).encode("utf-8", "backslashreplace"),
    }


def code(text: str) -> str:
    """A block of code, with a fence longer than any within."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def card(
    record: Mapping[str, Any],
    content: Mapping[str, Any],
    config: Mapping[str, Any],
    sizes: Mapping[str, Mapping[str, int]],
) -> str:
    """A model card in Markdown, from the content of record.json, inputs.json and config.yaml, and sizes."""
    run = config.get("run") or {}
    algorithm = run.get("label") or run.get("algorithm") or config.get("algorithm", "?")
    on = f" on {escaped(run['dataset'])}" if "dataset" in run else ""
    at = record["history"][record["selected"]]
    sections = {
        f"# {escaped(algorithm)}{on}": _use(content),
        "## Data": _data(run, record, sizes),
        **({"## Columns": columns} if (columns := _columns(content["inputs"])) else {}),
        "## Results": _results(record, at),
        "## Training": _training(record, config, content["model"]),
        "## Limitations": _limits(record, config, at, sizes),
    }
    return "\n\n".join(f"{title}\n\n{text}" for title, text in sections.items()) + "\n"


def _use(content: Mapping[str, Any]) -> str:
    own = content["model"].get("class")
    kind = content["inputs"].get("kind")
    task = content.get("task", "classification")
    what = "regression" if content["classes"] is None else f"{content['classes']} classes"
    if task in ("multilabel", "ordinal", "dense"):
        what = {
            "multilabel": "several labels, each 0 or 1 (a logit above 0 is 1)",
            "ordinal": f"{what} in order",
            "dense": f"{what}, one per position",
        }[task]
    names = [escaped(name) for name in content["class_names"]]
    more = f": {_several(names, 20)}" if names else ""
    given = ", model=YOUR_MODEL" if own else ""
    takes = {"table": '"new.csv"', "image": '"pictures/"', "text": '["a text"]'}.get(str(kind), "x")
    lines = [
        f"A model for {escaped(kind or 'array')} input of shape {tuple(content['input_shape'])}, "
        f"{what}{more}.",
        code(f"import shoal\n\nmodel = shoal.load(FOLDER{given})\nmodel.predict({takes})").replace(
            "```\n", "```python\n", 1
        ),
    ]
    if own:
        lines.append(f"Its class is {escaped(own)}, which is not saved here; pass an instance to shoal.load.")
    return "\n\n".join(lines)


def _columns(inputs: Mapping[str, Any]) -> str:
    """What the columns of a table were taken for, and what is doubtful in them."""
    report = inputs.get("columns_report") or ()
    names = ("column", "kind", "missing", "distinct", "becomes")
    rows = [tuple(str(about[name]) for name in names) for about in report[:MOST]]
    doubts = [f"- {escaped(c['column'])}: {escaped(line)}." for c in report for line in c["warnings"]]
    parts = [_table(names, rows), *(["\n".join(doubts)] if doubts else [])] if rows else []
    return "\n\n".join(parts)


def _data(run: Mapping[str, Any], record: Mapping[str, Any], sizes: Mapping[str, Mapping[str, int]]) -> str:
    lines = []
    if run.get("dataset"):
        options = escaped(_pairs(run.get("data_options") or {}))
        lines.append(f"Dataset {escaped(run['dataset'])}{f' with {options}' if options else ''}.")
    lines.append(
        f"Held-out domains: {_several([escaped(n) for n in held_out_domains(sizes)], 20) or 'none'}."
    )
    rows = [
        (split, name, f"{count:,}") for split, domains in sizes.items() for name, count in domains.items()
    ]
    totals = ", ".join(
        f"{escaped(split)} {sum(domains.values()):,} in {len(domains):,}" for split, domains in sizes.items()
    )
    lines += [f"Examples and domains of each split: {totals}.", _table(("split", "domain", "examples"), rows)]
    lines += [f"Of {escaped(split)}: {escaped(note)}." for split, note in (record.get("notes") or {}).items()]
    return "\n\n".join(lines)


def held_out_domains(sizes: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The domains that are tested on and were not trained on."""
    return [name for name in sizes.get("test", {}) if name not in sizes["train"]]


def _results(record: Mapping[str, Any], at: Mapping[str, Any]) -> str:
    rows: list[Sequence[str]] = []
    for split, found in at["scores"].items():
        counts = found.get("sizes") or []
        measures = {found["metric"]: found["average"], **(found.get("metrics") or {})}
        rows += [(split, "all", f"{sum(counts):,}", name, _number(v)) for name, v in measures.items()]
        each = zip(found["domains"].items(), counts, strict=True)
        rows += [(split, name, f"{n:,}", found["metric"], _number(value)) for (name, value), n in each]
    where = f"Weights of step {at['step']:,} ({escaped(record['rule'])})."
    return f"{where}\n\n{_table(('split', 'domain', 'examples', 'measure', 'value'), rows)}"


def _training(record: Mapping[str, Any], config: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    chosen = config.get("run") or config.get("options") or {}
    listed = {"algorithm": (config.get("run") or config).get("algorithm", "?")}
    listed |= {name: chosen[name] for name in SETTINGS if chosen.get(name) not in (None, {}, [])}
    listed = {name: value for name, value in listed.items() if value is not False}
    listed["model"] = model.get("name") or model.get("class", "?")
    rows = [(name.replace("_", " "), _pairs(v) if isinstance(v, dict) else v) for name, v in listed.items()]
    lines = [_table(("setting", "value"), rows)]
    versions = _pairs(record.get("environment") or {})
    lines.append(f"Training took {record['seconds']:.1f} s. Versions: {escaped(versions)}.")
    if command := config.get("command"):
        lines += ["To repeat it:", code(str(command))]
    return "\n\n".join(lines)


def _limits(
    record: Mapping[str, Any],
    config: Mapping[str, Any],
    at: Mapping[str, Any],
    sizes: Mapping[str, Mapping[str, int]],
) -> str:
    unseen = [escaped(name) for name in held_out_domains(sizes)]
    chosen = config.get("run") or config.get("options") or {}
    lines = []
    if unseen:
        lines.append(
            f"Performance on new domains was measured only on {_several(unseen, 5)}; "
            "other domains may be harder."
        )
    else:
        lines.append("No domain was held out, so the performance on new domains is unknown.")
    if "seed" in chosen:
        lines.append(
            f"This is one run, with seed {escaped(chosen['seed'])}: another seed gives different scores."
        )
    if str(record["rule"]).startswith("best"):
        note = (record.get("notes") or {}).get("validation", "")
        lines.append(
            "The weights were selected on the validation scores, which are therefore optimistic"
            f"{f'; validation is {escaped(note)}' if note else ''}."
        )
    small = [
        f"{escaped(name)} ({n})"
        for found in at["scores"].values()
        for name, n in zip(found["domains"], found.get("sizes") or [], strict=True)
        if n < SMALL
    ]
    if small:
        some = _several(list(dict.fromkeys(small)), 5)
        lines.append(f"Scores of domains with fewer than {SMALL} examples are unreliable: {some}.")
    if at["scores"] and next(iter(at["scores"].values()))["metric"] == "accuracy":
        lines.append("Its probabilities are not calibrated.")
    return "\n".join(f"- {line}" for line in lines)


def _several(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    every = list(rows)
    lines = [columns, ["---"] * len(columns), *([escaped(c) for c in row] for row in every[:MOST])]
    if len(every) > MOST:
        lines.append([f"… {len(every) - MOST:,} more", *[""] * (len(columns) - 1)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
