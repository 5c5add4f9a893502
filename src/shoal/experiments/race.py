"""A race: every row once, then more trials and seeds only for rows that can still be recommended.

How many trials and seeds there are depends on the data and on the arguments, not on the machine: the most of
:data:`SIZES` that take about ten minutes on two cores. After each stage the table is complete, and rows leave
(:func:`shoal.experiments.recommend.leaving`). In an exhaustive comparison no row leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.algorithms import display_name, split_draw
from shoal.experiments import baselines
from shoal.experiments.compare import LeaveDomainsOut, is_control, results
from shoal.experiments.config import RunConfig
from shoal.experiments.recommend import leaving
from shoal.experiments.record import RunRecord

SECONDS, CORES = 600.0, 2
"""For which a race is sized, unless a budget is given."""
SIZES = ((1, 1), (1, 2), (2, 2), (3, 2), (3, 3))
"""Numbers of seeds and of hyperparameter trials."""
STAY = {"hyperparameters": 4, "seeds": 3}
"""How many algorithms an estimate assumes to be left."""
START = 5.0
"""Seconds in which the processes of a stage start."""


@dataclass(frozen=True)
class Times:
    """Estimated seconds of one core per run, by which a race is sized."""

    network: float
    """With ERM; the mean over algorithms is 1.5 times that."""
    fit: float
    """Of a baseline."""

    @classmethod
    def of_table(cls, rows: int, domains: int, base: RunConfig) -> Times:
        """Of a network of the default size on so many training rows: measured on a core at 2.9 GHz."""
        each_step = base.batch_size * (base.domains_per_step or (domains if domains <= 16 else 5))
        return cls(0.3 + 0.7 * base.steps * (2e-3 + 2.5e-6 * each_step), 0.3 + 2e-5 * rows)

    def of(self, row: str) -> float:
        return self.fit if row in baselines.SPACES else 1.5 * self.network


@dataclass(frozen=True)
class Stage:
    """A part of a race, which adds seeds or hyperparameter trials to the rows that have not left."""

    name: str
    rows: tuple[str, ...]
    seeds: int
    search: int


@dataclass
class Race:
    """A comparison in stages: :meth:`plan` gives the runs of a stage, and :meth:`close` its table.

    >>> base = RunConfig("heart", "erm", 100)
    >>> race = Race(LeaveDomainsOut(base, ["erm", "fish"], ["va", "cleveland"], seeds=2, search=3))
    >>> [(stage.name, stage.seeds, stage.search) for stage in race.stages]
    [('algorithms', 1, 1), ('hyperparameters', 1, 3), ('seeds', 2, 3)]
    """

    protocol: LeaveDomainsOut
    """The largest plan: all rows, seeds and trials."""
    exhaustive: bool = False
    """No row leaves."""
    levels: dict[str, Stage] = field(default_factory=dict)
    """The last stage of each row."""
    left: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Rows that have left: after which ``stage``, by which row they are beaten, and ``how``."""

    @property
    def stages(self) -> list[Stage]:
        seeds, search, rows = self.protocol.seeds, self.protocol.search, tuple(self.protocol.rows)
        fits = tuple(row for row in rows if row in baselines.SPACES)
        every = {
            Stage("baselines", fits, 1, 1): 0 < len(fits) < len(rows),
            Stage("algorithms", rows, 1, 1): True,
            Stage("hyperparameters", rows, 1, search): search > 1,
            Stage("seeds", rows, seeds, search): seeds > 1,
        }
        return [stage for stage, needed in every.items() if needed]

    def plan(self, stage: Stage) -> list[RunConfig]:
        """The runs of a stage, with those that its rows had before."""
        return self._runs({row: stage for row in stage.rows if display_name(row) not in self.left})

    @property
    def configs(self) -> list[RunConfig]:
        """All runs of the table after the last stage that was closed."""
        return self._runs(self.levels)

    def _runs(self, levels: Mapping[str, Stage]) -> list[RunConfig]:
        """Fold by fold, as the rows of a fold share their data."""
        configs = []
        for seeds, search in dict.fromkeys((stage.seeds, stage.search) for stage in levels.values()):
            rows = [r for r, stage in levels.items() if (stage.seeds, stage.search) == (seeds, search)]
            configs += replace(self.protocol, rows=rows, seeds=seeds, search=search).plan()
        return configs

    def close(
        self,
        stage: Stage,
        found: Callable[[Sequence[RunConfig]], Iterable[RunRecord]],
        failed: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The table after a stage, from the records that are ``found`` of its runs and of those before; then
        rows leave that can no longer be recommended, with their controls."""
        self.levels |= {row: stage for row in stage.rows if display_name(row) not in self.left}
        configs, number = self.configs, self.stages.index(stage) + 1
        result = results(configs, found(configs), failed, {n: a["how"] for n, a in self.left.items()})
        names, left = [each.name for each in self.stages], dict(self.left)
        result["race"] = {"stages": names, "done": number, "left": left, "exhaustive": self.exhaustive}
        result["race"]["ended"] = None
        result["identities"] = sorted({config.identity for config in configs})
        if not self.exhaustive and stage.name != "baselines":  # these are few, and fast
            incomplete = [r["algorithm"] for r in result["rows"] if r["rank"] is None and not r["control"]]
            lost: dict[str, tuple[str | None, str]] = dict.fromkeys(incomplete, (None, "incomplete"))
            lost |= leaving(result["rows"], result["lower_is_better"])
            controls = {name: split_draw(name)[0] for name in map(display_name, self.protocol.rows)}
            lost |= {n: (of, "control") for n, of in controls.items() if is_control(n) and n != of in lost}
            new = {name: {"stage": number, "by": by, "how": how} for name, (by, how) in lost.items()}
            self.left = new | self.left
        return result

    def seconds(self, stage: Stage, times: Times | None, jobs: int = CORES) -> float:
        """The estimated duration of a stage with so many runs in parallel; 0 where nothing is known."""
        if times is None:
            return 0.0
        earlier = self.stages[: self.stages.index(stage)]
        before = {row: each.seeds * each.search for each in earlier for row in each.rows}
        networks = [row for row in stage.rows if row not in baselines.SPACES]
        if not self.exhaustive:
            networks = networks[: STAY.get(stage.name, len(networks))]
        rows = [*(row for row in stage.rows if row in baselines.SPACES), *networks]
        runs = {
            row: len(self.protocol.folds) * (stage.seeds * stage.search - before.get(row, 0)) for row in rows
        }
        work = sum(count * times.of(row) for row, count in runs.items())
        return START + work / max(1, min(jobs, sum(runs.values())))


def sized(
    race: Race, times: Times | None, seeds: int | None, search: int | None, minutes: float | None
) -> Race:
    """The race with the most seeds and trials of :data:`SIZES` that fit; ``seeds`` and ``search`` are fixed
    where they are given. Where the time of a run is not known, or the race is exhaustive, with the most."""
    chosen, limit = race, SECONDS if minutes is None else 60 * minutes
    free = times is None or (race.exhaustive and minutes is None)
    for number, (most_seeds, most_trials) in enumerate(SIZES):
        protocol = replace(race.protocol, seeds=seeds or most_seeds, search=search or most_trials)
        larger = replace(race, protocol=protocol)
        if free or not number or sum(larger.seconds(s, times) for s in larger.stages) <= limit:
            chosen = larger
    return chosen
