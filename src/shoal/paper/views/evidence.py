"""The paper's claims and what records say of them, as one page of HTML, as Markdown and as a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import shoal
from shoal.paper.evidence import NOT_RUN, VERDICTS, Cell, Claim, Judged, Kept, Sprites, shares
from shoal.paper.views import plots
from shoal.paper.views.cdsprites import marks
from shoal.report import figures
from shoal.report.page import Drawn, filled, need_report
from shoal.report.tables import Table, clean

MARKS = {"agrees": "✓", "partly": "◐", "disagrees": "✗", "not judged": "·", "not run": "–"}
"""Beside the word, so that a verdict does not hang on its colour."""
LONGEST = 60
"""Characters of a cell on a terminal."""


@dataclass(frozen=True)
class Item:
    """A claim, what was found, and what to type for more records."""

    claim: Claim
    judged: Judged
    command: str

    def to_dict(self) -> dict[str, Any]:
        said = {k: v for k, v in vars(self.claim).items() if k not in ("options", "plot")}
        return {**said, **self.judged.to_dict(), "command": self.command, "made": about(self.judged.used)}


@dataclass(frozen=True)
class Content:
    items: Sequence[Item]
    made: str = ""
    sources: Sequence[str] = ()
    notes: Sequence[str] = ()
    """What could not be read, failed or was stopped."""


def counted(items: Iterable[Item]) -> dict[str, int]:
    found = [item.judged.verdict for item in items]
    return {word: n for word in VERDICTS if (n := found.count(word))}


def about(used: Sequence[Kept]) -> str:
    """How many records, from when, on which devices and with which versions."""
    if not used:
        return ""
    every = {kept.path: kept for kept in used}.values()
    days = sorted({time.strftime("%Y-%m-%d", time.gmtime(kept.written)) for kept in every})
    surroundings = [e for kept in every if (e := _environment(kept.content))]
    parts = [
        f"{len(every):,} file{'s' * (len(every) != 1)} of {days[0]}" + (f" to {days[-1]}" if days[1:] else "")
    ]
    for name, word in (("device", "on"), ("shoal", "shoal"), ("torch", "torch")):
        values = sorted({str(e[name]) for e in surroundings if e.get(name)})
        parts += [f"{word} {' and '.join(values)}"] * bool(values)
    return ", ".join(parts)


def _environment(content: Any) -> Mapping[str, Any]:
    found = (
        content.get("environment") if isinstance(content, Mapping) else getattr(content, "environment", None)
    )
    return found if isinstance(found, Mapping) else {}


def summary(items: Iterable[Item], longest: int | None = None) -> Table:
    """One row a claim; with ``longest`` cells are cut, for a terminal."""
    table = Table(["claim", "the paper", "ours", "seeds", "verdict", "where"])
    for item in items:
        claim, found = item.claim, item.judged
        name = f"{claim.title} (ours)" if claim.ours else claim.title
        cells = (
            name,
            claim.paper,
            found.ours,
            found.seeds,
            f"{MARKS[found.verdict]} {found.verdict}",
            claim.section,
        )
        table.add(*(_cut(c, longest) for c in cells))
    return table


def terminal(items: Iterable[Item]) -> Table:
    """What fits beside each other."""
    table = Table(["claim", "the paper", "ours", "seeds", "verdict"])
    for item in items:
        found = item.judged
        cells = (
            item.claim.id,
            item.claim.paper,
            found.ours,
            found.seeds,
            f"{MARKS[found.verdict]} {found.verdict}",
        )
        table.add(*(_cut(c, LONGEST if n == 2 else LONGEST // 2) for n, c in enumerate(cells)))
    return table


def _cut(text: str, longest: int | None) -> str:
    return text if longest is None or len(text) <= longest else text[: longest - 1] + "…"


def markdown(content: Content) -> str:
    parts = [
        "# The paper's claims, checked",
        f"{summed_up(content.items)} Made {content.made} with shoal {shoal.__version__}.",
        summary(content.items).markdown(),
    ]
    for item in content.items:
        claim, found = item.claim, item.judged
        title = Table([f"{claim.title}: {found.verdict}"]).markdown().splitlines()[0].strip("| ")
        rows = {
            "The paper": f"{claim.words} ({claim.section})",
            "How it is judged": claim.rule,
            "Verdict": f"{found.verdict}. {found.reason}",
            "Records": _records(found) or "none",
        }
        parts += [
            f"## {title}",
            *(f"{k}: {_escaped(v)}" for k, v in rows.items()),
            f"    {clean(item.command)}",
        ]
        if _rows(found):
            table = Table(found.columns)
            for row in _rows(found):
                table.add(*row)
            parts.append(table.markdown())
    parts += ["## Notes", *(f"- {_escaped(note)}" for note in content.notes)] if content.notes else []
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Text in Markdown, whatever is in it."""
    return Table([text]).markdown().splitlines()[0].removeprefix("| ").removesuffix(" |")


def summed_up(items: Sequence[Item]) -> str:
    """How many claims have which verdict."""
    many = ", ".join(f"{word} {n}" for word, n in counted(items).items())
    return f"Of {len(items)} claims: {many}."


def _records(found: Judged) -> str:
    made = about(found.used)
    there = len({kept.path for kept in found.used})
    if found.planned and found.verdict != NOT_RUN:
        return f"{min(there, found.planned)} of {found.planned} runs are there; {made}" if made else ""
    return made if found.verdict != NOT_RUN else ""


def render(content: Content) -> str:
    """The page; it needs no other file."""
    need_report()
    return filled("evidence.html", context(content))


def context(content: Content) -> dict[str, Any]:
    return {
        "title": "The paper's claims, checked",
        "version": shoal.__version__,
        "made": content.made,
        "sources": [clean(s) for s in content.sources],
        "counts": [(word, n, MARKS[word]) for word, n in counted(content.items).items()],
        "items": [_item(item, f"e{n}") for n, item in enumerate(content.items)],
        "notes": [clean(note) for note in content.notes],
    }


def _rows(found: Judged) -> Sequence[Sequence[str]]:
    """A table of nothing but what is missing is left out."""
    return () if found.verdict == NOT_RUN else found.rows


def _item(item: Item, name: str) -> dict[str, Any]:
    claim, found = item.claim, item.judged
    said = {k: clean(str(v)) for k, v in vars(claim).items() if isinstance(v, str)}
    draw = Drawn(name)
    pictures = PICTURES[claim.plot](found.data) if claim.plot and found.data else []
    return said | {
        "is_ours": claim.ours,
        "verdict": found.verdict,
        "mark": MARKS[found.verdict],
        "kind": found.verdict.replace(" ", "-"),
        "measured": clean(found.ours),
        "seeds": clean(found.seeds),
        "reason": clean(found.reason),
        "why": clean(_cut(found.reason, LONGEST + 20)) if found.verdict == NOT_RUN else "",
        "columns": [clean(c) for c in found.columns],
        "rows": [[clean(c) for c in row] for row in _rows(found)],
        "records": clean(_records(found)),
        "command": clean(item.command),
        "pictures": [draw(figure, title) for figure, title in pictures],
    }


# Pictures; each is a list of figures with their titles

Pictures = list[tuple[Any, str]]


def linear(paths: Mapping[str, Any]) -> Pictures:
    """Where w₁ + b falls below 0 the prediction leaves the invariant feature."""
    with figures._style():
        figure, axes = figures._panel(3.4)
        for number, (name, path) in enumerate(list(paths.items())[: figures.MOST]):
            w = np.array(path["weights"])
            colour, style = figures.PALETTE[number], figures.LINES[number % 2]
            axes.plot(
                path["steps"], w[:, 0] + w[:, 4], color=colour, linestyle=style, label=figures.short(name, 32)
            )
        axes.axhline(0, color=figures.INK, linewidth=0.8)
        axes.set(title="above 0 the prediction is invariant", xlabel="step", ylabel="w₁ + b", xscale="log")
        axes.set_ylim(-1.2, 1.6)  # where it matters; some begin far above
        _plain_ticks(axes.xaxis)
        _legend(figure, axes)
    return [(figure, "the sum of the invariant weight and the bias, by step and method")]


def theorem(results: Sequence[Mapping[str, Any]]) -> Pictures:
    with figures._style():
        figure, axes = figures._panel(3.0)
        for number, r in enumerate(results):
            label = f"S = {r['domains']}, slope {r['slope']:.3f}"
            axes.loglog(
                r["alphas"],
                r["one_minus_cos"],
                "o-",
                color=figures.PALETTE[number],
                markersize=3,
                label=label,
            )
        x = np.array(results[0]["alphas"])
        line = results[0]["one_minus_cos"][-1] / 3 * (x / x[-1]) ** 2
        axes.loglog(x, line, ":", color=figures.INK, linewidth=1, label="slope 2")
        axes.set(title="both axes logarithmic", xlabel="inner learning rate α", ylabel="1 − cos")
        _plain_ticks(axes.xaxis)
        _plain_ticks(axes.yaxis)
        _legend(figure, axes)
    return [(figure, "one minus the cosine, by the inner learning rate")]


def sprites(found: Sprites, split: str) -> Pictures:
    methods = dict.fromkeys(c.name for part in ("Adam", "IDGM") for c in found.parts.get(part, ()))
    series: dict[str, dict[int, list[float]]] = {}
    for method in methods:
        for number in found.numbers:
            if values := found.values(found.runs(method, number), split):
                series.setdefault(method, {})[number] = [v / 100 for v in values]
    if not series:
        return []
    with figures._style():
        figure, axes = figures._panel(3.4)
        title = f"{'training domains' if split == 'train' else 'the unseen domain'}; ×: the paper"
        plots.against_domains(series, marks(split), title, axes)
        _legend(figure, axes)
    return [(figure, f"{split} accuracy by the number of domains and method")]


def cost(rows: Sequence[Mapping[str, Any]]) -> Pictures:
    """A picture for each network and way of running it."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name = ", ".join(str(row[key]) for key in ("network", "how", "device") if row.get(key))
        groups.setdefault(name, []).append(row)
    return [(_times(name, own), f"time of a step in Fish's, {name}") for name, own in groups.items()]


def _times(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    with figures._style():
        figure, axes = figures._panel(1.1 + 0.25 * len(rows))
        for place, row in enumerate(rows):
            ratio = float(row["ratio_to_fish"])
            axes.barh(place, ratio, 0.7, color=figures.PALETTE[1 if "IDGM" in row["method"] else 0])
            axes.text(ratio, place, f" {ratio:.1f} ×", va="center", fontsize=8)
        axes.axvline(10, color=figures.INK, linestyle=":", linewidth=1)
        axes.set_yticks(range(len(rows)), [figures.short(r["method"]) for r in rows])
        axes.set(xlabel="steps of Fish; dotted: IDGM in the paper", ylim=(len(rows) - 0.4, -0.6))
        axes.set_title(figures.short(name, 48))
        axes.margins(x=0.15)
    return figure


def tracking(by_dataset: Mapping[str, Sequence[Mapping[str, Any]]]) -> Pictures:
    found: Pictures = []
    for dataset, results in by_dataset.items():
        found.append((_cosines(dataset, results), f"mean cosine between domains' gradients on {dataset}"))
        found.append((_scores(dataset, results), f"score in the unseen domain of {dataset}, by iteration"))
    return found


def _cosines(dataset: str, results: Sequence[Mapping[str, Any]]) -> Any:
    with figures._style():
        figure, axes = figures._panel(3.2)
        for method, name in (("Fish", "fish"), ("ERM", "erm")):
            for when, line in (("before", ":"), ("after", "-")):
                curves = [
                    plots._smooth(r["iterations"], r[name][when]["normalised"], np.nanmean) for r in results
                ]
                plots._band(axes, curves, plots.COLOURS[method], line, f"{method}, {when} the update")
        constants = [r["constant"] for r in results if r.get("constant")]
        lines = (
            ("constant classifier", "--", constants),
            ("constant and wrong", "-.", [c["wrong"] for c in constants]),
        )
        for label, line, every in lines:
            known = [c["normalised"] for c in every if c["normalised"] is not None]
            if known:
                level = float(np.mean(known))
                axes.axhline(level, color=figures.PALETTE[7], linewidth=1.1, linestyle=line, label=label)
        axes.set(title=figures.short(dataset), xlabel="iteration", ylabel="normalised GIP (mean cosine)")
        _legend(figure, axes)
    return figure


def _scores(dataset: str, results: Sequence[Mapping[str, Any]]) -> Any:
    metric = results[0]["scores"]["metric"]
    with figures._style():
        figure, axes = figures._panel(3.2)
        for method, name in (("Fish", "fish"), ("ERM", "erm")):
            curves = [(r["scores"]["iterations"], plots._floats(r["scores"][name])) for r in results]
            scaled = [(x, y * plots._scale(metric)) for x, y in curves]
            plots._band(axes, scaled, plots.COLOURS[method], "-", method)
        unit = f"{metric} (%)" if plots._scale(metric) == 100 else metric
        axes.set(title=f"{figures.short(dataset)}, unseen domain", xlabel="iteration", ylabel=unit)
        _legend(figure, axes)
    return figure


def dots(cells: Sequence[Cell]) -> Pictures:
    """A picture a dataset: ours as dots with a deviation, the paper's as crosses."""
    found: Pictures = []
    for dataset in dict.fromkeys(c.dataset for c in cells):
        own = [c for c in cells if c.dataset == dataset and (c.values or c.paper)]
        if not own:
            continue
        with figures._style():
            figure, axes = figures._panel(1.2 + 0.24 * len(own))
            for place, cell in enumerate(own):
                if cell.values:
                    spread = np.std(cell.values, ddof=1) if len(cell.values) > 1 else 0
                    axes.errorbar(cell.mean, place, xerr=spread, fmt="o", color=figures.PALETTE[0], capsize=3)
                if cell.paper:
                    axes.plot(cell.paper[0], place, "x", color=figures.PALETTE[1], markersize=7)
            axes.plot([], [], "o", color=figures.PALETTE[0], label="ours")
            axes.plot([], [], "x", color=figures.PALETTE[1], label="the paper")
            axes.set_yticks(range(len(own)), [figures.short(c.row) for c in own])
            unit = f"{own[0].metric} (%)" if shares(own[0].metric) else own[0].metric
            axes.set(title=figures.short(dataset), xlabel=unit, ylim=(len(own) - 0.4, -0.6))
            axes.grid(axis="x", color=figures.FAINT, linewidth=0.6)
            _legend(figure, axes)
        found.append((figure, f"{own[0].metric} on {dataset}, ours and the paper's"))
    return found


def _plain_ticks(axis: Any) -> None:
    """Powers of ten as text: mathematics does not survive on a page."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Any, axes: Any) -> None:
    plots._tidy(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=2)


PICTURES: Mapping[str, Callable[[Any], Pictures]] = {
    "linear": linear,
    "theorem": theorem,
    "sprites_train": lambda found: sprites(found, "train"),
    "sprites_test": lambda found: sprites(found, "test"),
    "cost": cost,
    "tracking": tracking,
    "dots": dots,
}
"""By the name that ``claims.yaml`` calls them."""
