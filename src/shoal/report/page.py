"""Runs → one page of HTML that needs nothing else: what was compared, tables, curves, every run."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import shoal
from shoal.bench.config import RunConfig
from shoal.bench.record import RunRecord, row_of
from shoal.errors import InputError
from shoal.report import figures
from shoal.report.compare import _hours, _spread, _troubles, chance_beyond, recommended, verdict, words
from shoal.report.groups import Group, Run, Trouble, called, listed, plain, strange, test_domains
from shoal.report.tables import _clean

BARS, PANELS, MATRICES = 12, 24, 6
"""How many pictures of a kind a group of runs gets."""
DOMAINS = 10
"""Domains of a split that are named with a run."""
LINES = 8
"""Domains trained on that have a learning curve each."""
GROUPS, COLUMNS = 20, 16
"""Groups with tables and pictures, domains in a table."""


@dataclass(frozen=True)
class Strip:
    """A few images of a domain, with what a model makes of them."""

    domain: str
    words: str
    images: Sequence[Mapping[str, Any]]
    """``png`` as base64, ``wrong``, and ``words`` on it."""


@dataclass(frozen=True)
class Samples:
    path: str
    strips: Sequence[Strip] = ()
    error: str = ""


@dataclass(frozen=True)
class Content:
    groups: Sequence[Group]
    samples: Sequence[Samples] = ()
    troubles: Sequence[Trouble] = ()
    title: str = "Runs"
    made: str = ""
    sources: Sequence[str] = field(default_factory=tuple)


def render(content: Content) -> str:
    """The page."""
    need_report()
    return filled("page.html", context(content))


def need_report() -> None:
    """Both packages are asked for at once, before anything is drawn."""
    if any(importlib.util.find_spec(name) is None for name in ("jinja2", "matplotlib")):
        raise InputError("a report needs jinja2 and matplotlib: pip install 'shoal[report]'.")


def filled(name: str, values: Mapping[str, Any]) -> str:
    """One of the templates in this folder; whatever goes into it is escaped."""
    import jinja2

    folder = Path(__file__).parent
    surroundings = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return surroundings.get_template(name).render(values)


def context(content: Content) -> dict[str, Any]:
    """All that the template says, as plain data; pictures are SVG."""
    runs = list({id(run): run for group in content.groups for run in group.runs}.values())  # some are in two
    records = [run.record for run in runs]
    states = {s: sum(r.status == s for r in records) for s in dict.fromkeys(r.status for r in records)}
    chosen = frozenset().union(*(g.chosen for g in content.groups))
    return {
        "title": _clean(content.title),
        "version": shoal.__version__,
        "made": content.made,
        "sources": [_clean(s) for s in content.sources],
        "counted": _counted(records, states),
        "groups": [_group(g, n) for n, g in enumerate(content.groups[:GROUPS])],
        "groups_left": max(0, len(content.groups) - GROUPS),
        "samples": [_samples(s) for s in content.samples],
        "runs": [_run(run, chosen) for run in runs],
        "any_chosen": bool(chosen),
        "troubles": [{"words": _clean(t.words), "more": _lines(t.more)} for t in content.troubles],
    }


def _counted(records: Sequence[RunRecord], states: Mapping[str, int]) -> str:
    said = ", ".join(f"{n:,} {state}" for state, n in states.items())
    took = _hours(sum(r.seconds for r in records))
    return _clean(f"{_many(len(records), 'run')} ({said}), {took} of training.")


def _lines(text: str) -> str:
    return "\n".join(map(_clean, text.splitlines()))


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def headline(group: Group) -> list[str]:
    """What was compared, on which unseen domains, by which rule, and what may be said of it."""
    result = group.result
    names = [row["algorithm"] for row in result["rows"]]
    unseen = listed(result["left_out"]) or "no domain with a score"
    one = "trial" if group.kind == "sweep" else "seed"
    seeds = _many(len(result["seeds"]), one)
    if group.kind == "runs":
        of = {"test": "", "validation": "validation examples of ", "train": "the training examples of "}
        unseen = of.get(result["split"], f"{result['split']} of ") + unseen
        what = f"{_many(len(group.runs), 'run')} of {listed(names)}, scored on {unseen}, {seeds}."
        return [_clean(what), "This is not a comparison: " + _why_not(result)]
    together = max((test_domains(r.record) for r in group.runs), key=len, default=[])
    where = "domains" if max(len(together), len(result["left_out"])) > 1 else "domain"
    if len(together) > 1 == len(result["left_out"]):
        unseen = listed(together)
    lines = [
        f"{listed(names)} were compared on the unseen {where} {unseen}, with {seeds}. {group.rule}",
        *_best(result, one),
        *recommended(result),
    ]
    return [_clean(line) for line in lines]


def _why_not(result: Mapping[str, Any]) -> str:
    if len(result["rows"]) < 2:
        return "there is one algorithm alone."
    if all(row["average"]["mean"] is None for row in result["rows"]):
        return "no run has a score."
    if not result["several"]:
        return "there is one algorithm alone, with several settings."
    return (
        "these runs do not share a validation split to choose by and a test split to judge by, so nothing "
        "is said about which algorithm is better."
    )


def _best(result: Mapping[str, Any], one: str) -> list[str]:
    ranked = [row for row in result["rows"] if row["rank"] is not None]
    if not ranked:
        return ["No algorithm has a score in every trial, so there is no best one."]
    best, baseline, metric = ranked[0], result["baseline"], figures.unit(result["metric"])[1]
    value = f"{_spread(best['average'])} {metric}, mean ± standard deviation"
    if len(result["seeds"]) == 1:
        value = f"{_spread(best['average'])} {metric}"
    lines = [f"Best on average: {best['algorithm']} ({value})."]
    if len(ranked) < len(result["rows"]):
        rest = listed(row["algorithm"] for row in result["rows"] if row["rank"] is None)
        lines.append(f"Without a score in every trial, and so without a rank: {rest}.")
        if best["algorithm"] == baseline:
            return lines
    if baseline is None:
        return [*lines, "ERM is not among them, so nothing is said about a gain over it."]
    if best["algorithm"] == baseline:
        return [*lines, f"No algorithm did better than {baseline} on average."]
    difference = best["difference"]
    if None in difference["values"]:
        return [*lines, f"{baseline} lacks some trials, so the two cannot be paired."]
    by = f"{_spread(difference, '+')} {metric} in pairs of the same {one}"
    if difference["se"] is None:
        return [*lines, f"It is {by} apart from {baseline}; one {one} cannot tell that from luck."]
    apart = abs(difference["mean"]) > 2 * difference["se"]
    if not apart:
        return [*lines, f"It cannot be told apart from {baseline}: {by}, no more than two standard errors."]
    freedom = len(difference["values"]) - 1
    chance = 100 * chance_beyond(2, freedom)
    best_of = f", and more often for the best of {len(ranked)}" if len(ranked) > 2 else ""
    said = f"It is ahead of {baseline} by more than two standard errors: {by}."
    said += f" Luck alone puts one so far ahead or behind {chance:.0f} times in 100{best_of}."
    if difference["se"] > 0:
        times = 1000 * chance_beyond(abs(difference["mean"]) / difference["se"], freedom)
        often = f"about {_many(round(times), 'time')}" if times >= 1 else "less than once"
        said += f" It makes so large a difference {often} in 1,000."
    return [*lines, said]


def _group(group: Group, number: int) -> dict[str, Any]:
    result, title = group.result, _clean(str(group.result.get("title") or group.result["dataset"]))
    one = "trial" if group.kind == "sweep" else "seed"
    more = words(result) if group.planned else [*verdict(result, one), *_troubles(result)]
    more = [line for line in more if line not in recommended(result)]
    units = dict.fromkeys(note for r in group.runs if (note := r.record.notes.get("units")))
    more += [f"{note[:1].upper()}{note[1:]}." for note in units]
    if group.kind == "runs":
        lost = {row["algorithm"]: n for row in result["rows"] if (n := row["runs_diverged"])}
        more = [f"Runs that diverged: {', '.join(f'{k} {n}' for k, n in lost.items())}."] if lost else []
    return {
        "id": f"g{number}",
        "title": title,
        "apart": _clean(group.apart),
        "headline": headline(group),
        "words": [_clean(line) for line in more],
        "table": _table(result),
        "metric": figures.unit(result["metric"])[1],
        "lower": result["lower_is_better"],
        "over": "trials" if group.kind == "sweep" else "seeds",
        **_pictures(group, f"g{number}"),
    }


def _table(result: Mapping[str, Any]) -> dict[str, Any]:
    several, baseline = len(result["left_out"]) > 1, result["baseline"]
    unit = figures.unit(result["metric"])[1]
    domains = result["left_out"][:COLUMNS]
    columns = [(_clean(str(n)), unit) for n in domains]
    columns += [("average", unit)] * several + [(f"against {baseline}", f"{unit}, in pairs")] * bool(baseline)
    rows = []
    for row in result["rows"]:
        cells = [_cell(row["domains"][n]) for n in domains] + [_cell(row["average"])] * several
        if baseline:
            itself = row["algorithm"] == baseline
            cells.append({"text": "–", "value": 0.0, "n": ""} if itself else _cell(row["difference"], "+"))
        rows.append(
            {
                "algorithm": _clean(str(row["algorithm"])),
                "cells": cells,
                "baseline": row["algorithm"] == baseline,
            }
        )
    return {"columns": columns, "rows": rows, "left": len(result["left_out"]) - len(domains)}


def _cell(values: Mapping[str, Any], sign: str = "") -> dict[str, Any]:
    """Mean ± deviation, of how many, and a number to sort by; or why there is nothing."""
    known, every = sum(v is not None for v in values["values"]), len(values["values"])
    if not known:
        why = [w for w in ("diverged", "undefined") if (values.get("trials") or {}).get(w)]
        return {"text": why[0] if why else "–", "value": None, "n": ""}
    of = f"n = {known}" if known == every else f"n = {known} of {every}"
    return {"text": _spread(values, sign), "value": values["mean"], "n": of}


class Drawn:
    """Pictures with names of their own on the page."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def __call__(self, figure: Any, title: str) -> Any:
        from markupsafe import Markup

        self.count += 1
        return Markup(figures.svg(figure, title, f"{self.name}p{self.count}"))


def _pictures(group: Group, name: str) -> dict[str, Any]:
    draw, result = Drawn(name), group.result
    metric, rows = result["metric"], result["rows"]
    domains = list(result["left_out"])
    places: list[str | None] = [*([None] if len(domains) > 1 else []), *domains[:BARS]]
    bars = []
    for place in places if metric is not None else []:
        where = "on average over the domains left out" if place is None else f"in {place}"
        title = f"{metric} of {len(rows)} algorithms {where}"
        bars.append(draw(figures.bars(rows, metric, place, result["baseline"]), title))
    shown = _shown(group)
    names = called(shown) if group.kind == "runs" else [run.record.config.name for run in shown]
    panels: dict[str, list[Run]] = {row["algorithm"]: [] for row in rows}
    for own, run in zip(names, shown, strict=True):
        panels.setdefault(own, []).append(run)
    drawn = next((m for runs in panels.values() for r in runs if (m := curves_metric(r.record))), metric)
    limits = _limits(panels) if drawn == "accuracy" else None
    curves = [
        draw(figure, f"{drawn} of {algorithm} by step and domain")
        for algorithm, runs in list(panels.items())[:PANELS]
        if (figure := learning_curves([r.record for r in runs], str(algorithm), limits)) is not None
    ]
    return {
        "bars": bars,
        "bars_left": max(0, len(domains) - BARS),
        "curves": curves,
        "curves_left": max(0, len(panels) - PANELS),
        "curves_metric": figures.unit(drawn)[1],
        "curves_of": "the runs that validation chose" if group.chosen else "all runs",
        **_agreement(group, draw),
    }


def _shown(group: Group) -> list[Run]:
    """The chosen runs, and all of an algorithm of which none was."""
    chosen = {id(r) for r in group.runs if r.identity in group.chosen}
    names = {r.record.config.name for r in group.runs if id(r) in chosen}
    return [r for r in group.runs if id(r) in chosen or r.record.config.name not in names]


def _limits(panels: Mapping[str, Sequence[Run]]) -> tuple[float, float] | None:
    """The same for all panels, so that they can be compared."""
    points = [m for runs in panels.values() for r in runs for m in r.record.history]
    scores = [s for m in points for s in m["scores"].values() if s["metric"] == "accuracy"]
    values = [v for s in scores for v in s["domains"].values() if v is not None and math.isfinite(v)]
    return (min(values) - 0.02, max(values) + 0.02) if values else None


def learning_curves(
    records: Sequence[RunRecord], title: str = "", limits: tuple[float, float] | None = None
) -> Any:
    """Scores of every domain by step, dashed for domains trained on; ``None`` if nothing was measured.

    Where the runs leave out different domains, or there are many, those trained on are one curve, their
    average. They are measured on validation, unless that is of other domains.
    """
    measured = [r for r in records if any(m["scores"] for m in r.history)]
    if not measured:
        return None
    metric = str(curves_metric(measured[0]))
    lines: dict[str, list[Any]] = {}
    seen: dict[str, list[Any]] = {}
    places = {tuple(r.history[-1]["scores"].get("test", {}).get("domains", ())) for r in measured}
    for record in measured:
        splits = record.history[-1]["scores"]
        of_training = "validation" if "validation" in splits and not strange(record) else "train"
        for name in splits.get("test", {}).get("domains", ()):
            lines.setdefault(name, []).append(_curve(record, "test", name, metric))
        if of_training not in splits:
            continue
        if len(places) > 1 or len(splits[of_training]["domains"]) > LINES:
            seen.setdefault(f"trained on ({of_training})", []).append(
                _curve(record, of_training, None, metric)
            )
        else:
            for name in splits[of_training]["domains"]:
                label = f"{name} ({of_training})"
                seen.setdefault(label, []).append(_curve(record, of_training, name, metric))
    return figures.curves(lines | seen, metric, title, list(seen), limits)


def curves_metric(record: RunRecord) -> str | None:
    """What curves are of: the loss's own measure, whatever else was to select."""
    return next((str(s["metric"]) for m in record.history for s in m["scores"].values()), None)


def _curve(
    record: RunRecord, split: str, domain: str | None, metric: str
) -> tuple[list[float], list[float | None]]:
    steps: list[float] = []
    values: list[float | None] = []
    for point in record.history:
        scores = point["scores"].get(split)
        if scores is not None and scores["metric"] == metric:
            steps.append(point["step"])
            values.append(scores["average"] if domain is None else scores["domains"].get(domain))
    return steps, values


AGREEMENT = {"mean_cosine": "mean cosine", "sign_agreement": "sign agreement"}


def agreement_of(record: RunRecord) -> list[Mapping[str, Any]]:
    """What a run has measured of its domains' gradients; nothing in most."""
    found = getattr(record, "agreement", None) or ()
    return [point for point in found if isinstance(point, Mapping) and "step" in point]


def _agreement(group: Group, draw: Drawn) -> dict[str, Any]:
    runs = [r for r in _shown(group) if agreement_of(r.record)]
    curves = []
    for key, label in AGREEMENT.items():
        lines = agreement_curves([r.record for r in runs], key)
        if lines:
            title = f"{label} of gradients"
            curves.append(draw(figures.curves(lines, label, title), f"{title} by step and algorithm"))
    matrices: list[Any] = []
    firsts = {r.record.config.name: r for r in reversed(runs)}  # one of each algorithm
    for run in reversed(firsts.values()):
        found = (
            (p["step"], m) for p in reversed(agreement_of(run.record)) if (m := cosines_of(run.record, p))
        )
        last = next(found, None)
        if last is None or len(matrices) == MATRICES:
            continue
        config, (step, (names, values)) = run.record.config, last
        title = f"{figures.short(config.name)}, seed {config.seed}, step {step:,}"
        picture = figures.matrix(names, values, title)
        said = f"cosines between domains' gradients, {config.name}, seed {config.seed}"
        matrices.append(draw(picture, said))
    return {"agreement": curves, "matrices": matrices}


def cosines_of(record: RunRecord, point: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]] | None:
    """The domains of a measurement, in the order of the training split, and a row for each."""
    content = point.get("matrix")
    within = isinstance(content, Mapping)
    names = list((content if within else point).get("domains") or ())  # type: ignore[union-attr]
    values = list((content["values"] if within else content) or ())  # type: ignore[index]
    if not names or len(values) != len(names) or any(len(row) != len(names) for row in values):
        return None
    splits = record.history[-1]["scores"] if record.history else {}
    known = list(splits.get("train", splits.get("validation", {})).get("domains", ()))
    place = {name: n for n, name in enumerate([*known, *(n for n in names if n not in known)])}
    order = sorted(range(len(names)), key=lambda i: place[names[i]])
    return [names[i] for i in order], [[values[i][j] for j in order] for i in order]


def agreement_curves(records: Iterable[RunRecord], key: str = "mean_cosine") -> dict[str, list[Any]]:
    """By algorithm, as :func:`shoal.report.figures.curves` takes them."""
    lines: dict[str, list[Any]] = {}
    for record in records:
        points = [p for p in agreement_of(record) if p.get(key) is not None]
        if points:
            lines.setdefault(record.config.name, []).append(
                ([p["step"] for p in points], [p[key] for p in points])
            )
    return lines


def _samples(found: Samples) -> dict[str, Any]:
    strips = [
        {"domain": _clean(s.domain), "words": _clean(s.words), "images": s.images} for s in found.strips
    ]
    return {"path": _clean(found.path), "strips": strips, "error": _clean(found.error)}


USUAL = {f.name: getattr(RunConfig("", "", 1), f.name) for f in fields(RunConfig)}


def _run(run: Run, chosen: frozenset[str]) -> dict[str, Any]:
    record, row = run.record, row_of(run.record)
    metric, test = row.get("metric", "score"), row.get("test")
    at, last = row.get("step"), record.config.steps
    return {
        "dataset": _clean(str(row["dataset"])),
        "algorithm": _clean(str(row["name"])),
        "seed": row["seed"],
        "left_out": _clean(row.get("left_out", "")) or "–",
        "test": None if test is None else f"{test:.3f}" if metric == "accuracy" else f"{test:.4g}",
        "value": test,
        "metric": _clean(metric),
        "step": at,
        "steps": last,
        "seconds": record.seconds,
        "status": _clean(record.status),
        "finished": record.status == "finished",
        "chosen": run.identity in chosen,
        "path": _clean(run.path),
        "rule": _clean(record.rule),
        "settings": _settings(record.config),
        "command": _clean(run.command),
        "python": "" if run.command else _clean(python(record.config)),
        "environment": _clean(", ".join(f"{k} {v}" for k, v in record.environment.items())),
        "error": _lines(record.error),
        "skipped": record.skipped,
        "scores": _scores(record),
        "notes": [_clean(f"{split}: {note}") for split, note in record.notes.items()],
    }


ALWAYS = ("dataset", "algorithm", "steps", "seed", "optimizer_options")


def _settings(config: RunConfig) -> list[tuple[str, str]]:
    """What is not at its default, options by option."""
    found = []
    for name, value in config.to_dict().items():
        if value == USUAL[name] and name not in ALWAYS:
            continue
        parts = {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
        found += [(_clean(k), _clean(plain(v))) for k, v in parts.items()]
    return found


def python(config: RunConfig) -> str:
    """The run as a call, for one whose command was not kept."""
    given = {k: v for k, v in config.to_dict().items() if v != USUAL[k]}
    said = ", ".join(f"{k}={v!r}" for k, v in given.items())
    from shoal.bench import baselines

    module = "baselines" if baselines.is_one(config) else "run"
    return f"shoal.bench.{module}.run(RunConfig({said}))"


def _scores(record: RunRecord) -> list[tuple[str, str]]:
    """By split, at the selected step: the average and the first domains."""
    if not record.history:
        return []
    found = []
    for split, scores in record.history[record.selected]["scores"].items():
        parts = [f"{scores['metric']} {_number(scores['average'])}"]
        parts += [
            f"{k} {_number(v)}" for k, v in (scores.get("metrics") or {}).items() if k != scores["metric"]
        ]
        names = list(scores["domains"].items())
        parts += [f"{n} {_number(v)}" for n, v in names[:DOMAINS] if len(names) > 1]
        parts += [f"… {len(names) - DOMAINS:,} more"] * (len(names) > DOMAINS)
        found.append((_clean(split), _clean(", ".join(parts))))
    return found


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"
