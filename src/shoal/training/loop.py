"""One training, from checked input to the selected weights."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.algorithms import Algorithm, algorithm_class, build
from shoal.algorithms.base import Log, trained_parameters
from shoal.data.batch import DomainData, widest
from shoal.data.loader import MetaBatchLoader, seed_all, seeded
from shoal.data.sampler import DomainBatchSampler, key
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.training.agreement import Agreement, Tracking
from shoal.training.averaging import SMA, applied, has_batchnorm, refresh_batchnorm
from shoal.training.capture import GatheredSteps, LoadedSteps, draws, why_not
from shoal.training.engine import Engine, check_precision
from shoal.training.evaluate import Evaluator, known_labels, snapshot
from shoal.training.examine import check_comparison, check_loss, check_scored, examine
from shoal.training.history import Point, Window
from shoal.training.journal import Journal
from shoal.training.metrics import check_output, chosen
from shoal.training.options import Options
from shoal.training.processes import Processes
from shoal.training.progress import Progress, losses_note, scores_note
from shoal.training.state import load, state_of
from shoal.training.stopping import Diverged, Interrupted, Signals
from shoal.training.world import world

CHUNK = 50
"""Most steps between two looks up from the work, to read losses off the device."""
SECONDS = 0.5
"""About as long as that should take."""
CHECKPOINT_SECONDS = 300.0
HOPELESS = 100
"""So many steps in a row that are not finite, and nothing is left to skip to."""
COLLAPSED = 20
"""Steps from which on a training that is worse than a constant guess is said to be."""
WORLD = 31  # what a key is for
EVALUATION_NUMBERS, ON_CPU = 2**26, 2**22
"""The most that a batch may become in any operation of an evaluation; on the CPU, what its caches like."""
TRAIN_SAMPLE = 5000
"""Examples of the training domains that are evaluated, unless the user says how many."""
EVALUATIONS = (10, 5, 4, 2, 1)
"""How many there may be by default: divisors of most numbers of steps."""
CHEAP = 2000
"""So many examples may be evaluated in the shortest training."""
REFRESH_BATCHES = 100


class Training:
    """Trains ``model`` in place, in chunks; everything is checked when it is made, before any training."""

    def __init__(
        self,
        algorithm: str | type[Algorithm],
        model: nn.Module,
        data: DomainData,
        options: Options,
        label: str | None = None,
        parent: Training | None = None,
    ) -> None:
        cls = algorithm_class(algorithm)
        self.options = options
        self.data = data
        self.parent = parent
        self.processes: Processes = parent.processes if parent else Processes(options.device)
        self.device = self.processes.device
        self.model = model.to(self.device)
        self.label = label or (algorithm if isinstance(algorithm, str) else cls.__name__)
        self.phase = "warm start" if parent else "train"
        examples: Any = data.examples
        self.gathers = hasattr(examples, "batch")
        """Examples are in memory, and a batch of them is gathered where they are."""
        self.examples: Any = examples.to(self.device) if self.gathers else examples
        self.splits: list[str] = [s for s in options.eval_splits if s in data.splits]
        self.select = options.select or ("best" if "validation" in self.splits else "last")
        watches = self.select == "best" or options.patience or options.warm_start == "plateau"
        if (watches or options.average == "swad") and "validation" not in self.splits:
            raise InputError(
                "select='best', average='swad', warm_start='plateau' and patience need validation data; "
                "give some."
            )
        self.progress = self._make_progress()
        self.signals: Signals | None = None
        self.journal: Journal | None = None

        # Reading examples may draw random numbers.
        with seeded(options.seed), self.progress.phase("reading data"):
            own_loss = options.loss is not None
            found = examine(self.model, data, self.examples, self.device, options.classes, own_loss)
            self.task = replace(found.task, steps=options.steps)
            self.loss = options.loss or found.loss
            self.algorithm = build(algorithm, self.model, self.loss, self.task, **options.settings).to(
                self.device
            )
            self.algorithm.check_input(found.x)
            if self.splits:
                check_scored(found)
            classification = self.task.is_classification
            self.metrics, self.selects = chosen(options.metric, data.measures, classification)
            if any(m.needs in ("class", "output") for m in self.metrics):
                check_output(self.metrics, tuple(found.output.shape))
        self.sampler = DomainBatchSampler(
            data.splits["train"],
            options.batch_size,
            options.domains_per_step,
            draw=options.draw or self.algorithm.draw,
            seed=options.seed,
            steps=options.steps,
        )
        check_comparison(self.algorithm, data, self.sampler)
        self.algorithm.check_step(self.sampler.domains_per_step)
        if options.loss is not None:
            check_loss(self.loss, found, self._needs_mean())
        self.engine = self._make_engine()
        self.algorithm.autocast = self.engine.autocast
        self.schedule = options.make_schedule(self.engine.optimizer)
        self.average = options.make_average()
        self.evaluator = self._make_evaluator(found.numbers)
        self.eval_every = options.eval_every or self._usual_eval_every()
        self.unroll = self._unroll()
        self.warm = self._warm_training() if options.warm_start is not None else None
        if options.compile and not parent:
            for module in _called(self.model, self.algorithm):
                _compile(module)
        self._refreshing: MetaBatchLoader | None = None
        self.tracking = self._make_tracking()

        self.step = 0
        self.history: list[Point] = []
        self.agreement: list[dict[str, Any]] = []
        """What was tracked; only the newest measurement has its matrix, the log has all of them."""
        self.best: tuple[Point, dict[str, Tensor]] | None = None
        self.final: tuple[Point, dict[str, Tensor]] | None = None
        self.seconds, self._began = 0.0, time.monotonic()
        self.skipped: list[int] = []
        self.since_point, self.since_line = Window(), Window()
        self._unread: list[tuple[int, list[list[int | None]], Log]] = []
        self._line_began, self._line_step, self._pace = 0.0, 0, 0.0
        self._shown: dict[str, float] = {}
        self._ticks, self._next_tick, self._tick_began = 0, 0, 0.0
        self._show: Callable[[str, int, int], None] = lambda text, done, total: None

    def _make_progress(self, step: int = 0) -> Progress:
        shown = self.options.progress is True and self.processes.main
        return Progress(self.label, self.options.steps, shown, start=step)

    def _needs_mean(self) -> str | None:
        """What needs a loss that is the mean of its examples' losses."""
        if self.options.accumulate > 1:
            return f"accumulate={self.options.accumulate}"
        if self.processes.count > 1:
            return f"training in {self.processes.count} processes"
        return type(self.algorithm).__name__ if self.algorithm.mean_of_examples else None

    def _make_engine(self) -> Engine:
        options = self.options
        check_precision(options.chosen_precision, self.algorithm)
        if options.compile and self.algorithm.second_order:
            raise InputError(
                f"{type(self.algorithm).__name__} differentiates twice, which compiled models cannot; "
                "leave compile out."
            )
        if options.batch_size < self.processes.count:
            raise InputError(
                f"batch_size={options.batch_size} is split over {self.processes.count} processes; "
                f"it must be at least {self.processes.count}."
            )
        mine = len(range(self.processes.index, options.batch_size, self.processes.count))
        least = options.batch_size // self.processes.count  # the same answer in all of them
        if options.accumulate > least:
            raise InputError(
                f"accumulate={options.accumulate} pieces of {least} examples; it must be at most {least}."
            )
        helpers = self.algorithm.helpers()
        optimizer = options.make_optimizer(trained_parameters(self.algorithm, helpers))
        return Engine(
            self.algorithm.wrap(optimizer, self.sampler.domains_per_step),
            self.processes,
            share=mine / options.batch_size,
            precision=options.chosen_precision,
            clip=options.clip,
            accumulate=options.accumulate,
            on_nan=options.on_nan,
            helpers=helpers,
        )

    def _make_evaluator(self, numbers: int) -> Evaluator:
        """Of all splits that are to be measured along the way."""
        most = ON_CPU if self.device.type == "cpu" else EVALUATION_NUMBERS
        self._eval_batch = self.options.eval_batch or max(1, min(1024, most // numbers))
        limits = {"train": TRAIN_SAMPLE} if "train" in self.splits else {}
        if self.options.eval_limit is not None:
            limits = dict.fromkeys(self.splits, self.options.eval_limit)
        return self.evaluator_of(self.splits, limits)

    def _usual_eval_every(self) -> int:
        """As many evaluations as pass no more examples through the model than the training does."""
        options, sampler = self.options, self.sampler
        trained = options.steps * sampler.domains_per_step * sampler.batch_size
        each = sum(map(len, self.evaluator.which.values()))
        asked = options.patience is not None or options.average == "swad"  # evaluations are part of them
        fits = [n for n in EVALUATIONS if asked or n * each <= max(trained, CHEAP)]
        return -(-options.steps // max([1, *fits]))

    def evaluator_of(self, splits: Sequence[str], limits: Mapping[str, int] | None) -> Evaluator:
        options = self.options
        plain = self.examples.evaluation() if hasattr(self.examples, "evaluation") else self.examples
        return Evaluator(
            plain,
            {split: self.data.splits[split] for split in splits},
            classification=self.task.is_classification,
            loss=self.loss,
            batch_size=self._eval_batch,
            workers=options.workers,
            limits=limits,
            processes=self.processes,
            autocast=self.engine.autocast,
            metrics=self.metrics,
            selects=self.selects,
            uncounted=self.data.uncounted,
            watch=self._watch,
        )

    def _make_tracking(self) -> Tracking | None:
        options = self.options
        if options.track_every is None:
            return None
        capture = self.unroll > 0 and self.gathers and not draws(self.algorithm)
        return Tracking(
            Agreement(self.algorithm, self.engine, layers=options.track_layers, capture=capture),
            self.data.splits["train"],
            self.sampler,
            self.examples,
            every=options.track_every,
            count=options.track_domains,
            workers=options.workers,
            share=(self.processes.index, self.processes.count),
        )

    def _warm_training(self) -> Training:
        steps, one_pass = self.options.warm_steps(len(self.data.splits["train"].examples()))
        plateau = self.options.warm_start == "plateau"
        options = replace(
            self.options,
            steps=steps,
            domains_per_step=1,
            settings={},
            draw=None,
            warm_start=None,
            schedule=None,
            average=None,
            average_start=None,
            track_every=None,
            track_layers=False,
            track_domains=None,
            patience=5 if plateau else None,
            select="best" if plateau else "last",
            eval_every=max(1, one_pass // 10) if plateau else steps,
        )
        return Training("erm", self.model, self.data, options, label="warm start", parent=self)

    def _unroll(self) -> int:
        """How many steps a CUDA graph is to hold; 0 for none."""
        options = self.options
        if options.capture is False:
            return 0
        reason = why_not(self.algorithm, self.engine)
        if self.schedule is not None:
            reason = reason or "a schedule changes the learning rate between steps"
        if reason and options.capture:
            raise InputError(f"capture=True cannot be had: {reason}.")
        if reason:
            return 0
        if draws(self.algorithm) or self.average or not self.gathers:
            return 1
        # About ten batches to a graph, so that launching it pays also where a step is a single batch.
        batches = max(1, 10 // self.sampler.domains_per_step)
        regular = (options.log_every, options.checkpoint_every or 0, options.track_every or 0)
        return math.gcd(options.steps, self.eval_every, batches, *regular)

    @property
    def due(self) -> bool:
        """Whether this step is to be evaluated and is not yet, as after an evaluation that was abandoned."""
        at = self.step % self.eval_every == 0 or self.step >= self.options.steps
        return at and self.step > (self.history[-1].step if self.history else 0)

    @property
    def finished(self) -> bool:
        over = self.step >= self.options.steps or self._stale() or bool(self.average and self.average.done)
        return over and not self.due

    def run(self, journal: Journal | None = None) -> None:
        """Trains to the end, going on from the newest checkpoint of ``journal`` where there is one."""
        with Signals(journal is not None) as signals, world(self.device, self.options.deterministic):
            for _ in self.stages(journal, signals):
                pass

    def stages(self, journal: Journal | None, signals: Signals) -> Iterator[None]:
        """The same in turns, so that several trainings can share a device: each gives it a step to do.

        Random numbers are a function of the step, so that the others' do not matter; see :func:`world`.
        """
        turns = self._stages(journal, signals)
        while True:
            self._began = time.monotonic()
            try:
                next(turns)
            except StopIteration:
                return
            finally:
                self.seconds += time.monotonic() - self._began
            yield

    def _stages(self, journal: Journal | None, signals: Signals) -> Iterator[None]:
        for each in (self, self.warm):
            if each is not None:
                each.journal, each.signals = journal, signals
        loaded = journal.restore() if journal else None
        if loaded:
            load(self, loaded)
        try:
            if self.warm is not None and self.step == 0:
                if not self.warm.finished:
                    yield from self.warm._train(journal, signals)
                self.warm.restore_selected()
            if not self.finished:
                yield from self._train(journal, signals)
            self._finish()
        finally:
            self._end_workers()

    def _end_workers(self) -> None:
        """Processes that read examples for evaluations stay until here, and not until Python ends."""
        for each in (self, self.warm):
            for loader in (each.evaluator.loader, each._refreshing) if each is not None else ():
                if loader is not None:
                    loader.close()

    def _train(self, journal: Journal | None, signals: Signals) -> Iterator[None]:
        options, main = self.options, self.processes.main
        progress = self.progress = self._make_progress(self.step)
        tell = options.progress if main and callable(options.progress) else progress.update
        self.model.train()
        advance = self._gathered() if self.unroll and self.gathers else self._loaded()
        chunk, saved = 1, time.monotonic()
        self._line_began, self._line_step = time.monotonic(), self.step
        try:
            while not self.finished:
                began, first = time.monotonic(), self.step
                if not self.due:
                    with progress.phase(self._beginning()):
                        yield from self._advance(advance, self._next_stop(chunk), signals)
                    self._tracked(journal)
                    self._read()
                    if self.step % options.log_every == 0:
                        self._log(journal)
                measured = self.due
                if measured:
                    self._measure(journal)
                tell(self.step, self._note())
                pace = (self.step - first) / max(time.monotonic() - began, 1e-9)
                due = options.checkpoint_every is None and time.monotonic() - saved > CHECKPOINT_SECONDS
                chunk, due_, asked = self._agreed(
                    max(1, min(CHUNK, int(pace * SECONDS))), due, signals.asked is not None
                )
                at_step = options.checkpoint_every and self.step % options.checkpoint_every == 0
                regular = measured and (options.checkpoint_every is None or self.finished)
                if journal and (asked or due_ or at_step or regular):
                    self._checkpoint(journal)
                    saved = time.monotonic()
                if journal and asked and not (self.finished and not self.parent):
                    raise self._interrupted(journal)
        finally:
            progress.close()
            if self.tracking is not None:
                self.tracking.close()

    def _beginning(self) -> str:
        """What may make the first steps slow."""
        if self.seconds_now > 60 or not (self.options.compile or self.unroll):
            return ""
        return "compiling the model" if self.options.compile else "capturing steps"

    def _watch(self, split: str, done: int, total: int) -> None:
        """Between two batches of an evaluation."""
        self._show(f"evaluating {split}", done, total)
        self._tick()

    def _tick(self) -> None:
        """Raises Interrupted after a signal, in all processes alike, which come here equally often."""
        if self.journal is None or self.signals is None:
            return
        asked = self.signals.asked is not None
        if self.processes.count > 1:
            self._ticks += 1
            if self._ticks < self._next_tick:
                return
            pace = self._ticks / max(time.monotonic() - self._tick_began, 1e-9)
            wait = max(1, min(CHUNK, int(pace * SECONDS)))
            waits, askers = self.processes.numbers(wait if self.processes.main else 0, float(asked))
            self._next_tick, asked = self._ticks + int(waits), askers > 0
        if asked:
            raise self._interrupted(self.journal)

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Batches in this block are counted from here on, see :meth:`_tick`."""
        self._ticks, self._next_tick, self._tick_began = 0, 0, time.monotonic()
        with self.progress.phase(what) as self._show:
            yield

    def _next_stop(self, chunk: int) -> int:
        """The next step at which something is to be done, ``chunk`` steps from here at the latest."""
        options, step = self.options, self.step
        if self.unroll:
            chunk = max(self.unroll, chunk - chunk % self.unroll)
        every = [self.eval_every, options.log_every, options.checkpoint_every or options.steps]
        return min(options.steps, step + chunk, *(step + n - step % n for n in every))

    def _advance(
        self, advance: Iterator[tuple[int, list[Any], Log]], stop: int, signals: Signals
    ) -> Iterator[None]:
        rank = self.processes.index
        seeds = key(self.options.seed, WORLD, np.arange(self.step, stop), rank).tolist()
        first = self.step
        while self.step < stop and not (signals.asked and self.processes.count == 1 and self.step > first):
            # Random numbers are a function of the step, so that nothing of them has to be remembered.
            seed_all(seeds[self.step - first], self.device)
            taken, domains, log = next(advance)
            self._unread.append((self.step, domains, log))
            self.step += taken
            self.progress.step = self.step
            if self.schedule is not None:
                with warnings.catch_warnings():  # a step that was skipped is not one that was forgotten
                    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                    self.schedule.step()
            if self.average is not None:
                self.average.update(self.step, self.engine.params)
            yield

    def _loaded(self) -> Iterator[tuple[int, list[Any], Log]]:
        loader = MetaBatchLoader(
            self.examples,
            self.sampler,
            workers=self.options.workers,
            device=self.device,
            start=self.step,
            stop=self.options.steps,
            share=(self.processes.index, self.processes.count),
        )
        captured = LoadedSteps(self.algorithm, self.engine) if self.unroll else None
        for batches in loader:
            if self.tracking is not None:
                self.tracking(self.step, batches)
            log = captured.run(batches) if captured else self.engine.step(self.algorithm, batches)
            yield 1, [[b.domain for b in batches]], {k: v[None] for k, v in log.items()}

    def _gathered(self) -> Iterator[tuple[int, list[Any], Log]]:
        """Strides of ``unroll`` steps, which hit every step at which something is to be done.

        A training that was stopped between two of them first takes single steps to where the next begins.
        """
        step = self.step
        aside = -step % self.unroll
        for unroll, count in ((1, aside), (self.unroll, (self.options.steps - step - aside) // self.unroll)):
            captured = GatheredSteps(self.algorithm, self.engine, self.examples, self.sampler, unroll)
            for _ in range(count):
                if self.tracking is not None:
                    self.tracking(step)
                yield unroll, *captured.run(step)
                step += unroll

    def _agreed(self, chunk: int, due: bool, asked: bool) -> tuple[int, bool, bool]:
        """What all processes will do alike: the main one's pace and clock, and anybody's signal."""
        if self.processes.count == 1:
            return chunk, due, asked
        mine = (chunk, float(due)) if self.processes.main else (0, 0.0)
        chunks, dues, askers = self.processes.numbers(*mine, float(asked))
        return int(chunks), dues > 0, askers > 0

    def _tracked(self, journal: Journal | None) -> None:
        """Writes down what was measured of the gradients' agreement."""
        for found in self.tracking.read() if self.tracking is not None else []:
            if self.agreement:
                self.agreement[-1].pop("matrix", None)
            self.agreement.append(dict(found))
            if journal is not None:
                seconds = round(self.seconds_now, 3)
                journal.line({"phase": "agreement", **found, "seconds": seconds})

    def _read(self) -> None:
        """Losses and norms of the steps since the last reading: the one place that waits for the device."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        every = torch.cat([log["losses"] for _, _, log in unread])
        (losses,) = self.engine.average([every.to(widest(every.device))])
        norms = [log["norms"] for _, _, log in unread if "norms" in log]
        rows = losses.tolist()
        norm_rows = torch.cat(norms).tolist() if norms else [[] for _ in rows]
        judged = [log["objective"] for _, _, log in unread if "objective" in log]
        objectives = torch.cat(judged)[:, None].tolist() if judged else [[] for _ in rows]
        known = ("losses", "norms", "objective")
        own = [k for k, v in unread[0][2].items() if k not in known and v.ndim == 1]
        columns = {k: torch.cat([log[k] for _, _, log in unread]).tolist() for k in own}
        mores = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        steps = [first + u for first, domains, _ in unread for u in range(len(domains))]
        numbers = [d for _, domains, _ in unread for d in domains]
        mores = mores or [{} for _ in rows]
        for step, domains, row, norm_row, objective, more in zip(
            steps, numbers, rows, norm_rows, objectives, mores, strict=True
        ):
            watched = {"losses": row, "norms": norm_row, "objective": objective}
            if bad := self._first_bad(domains, {k: watched[k] for k in self.engine.watched}):
                self._not_finite(step, *bad)
            else:
                finite = [n for n in norm_row if math.isfinite(n)]
                self.since_point.add(domains, row, finite, more)
                self.since_line.add(domains, row, finite, more)
        if self.engine.scale is not None and not float(self.engine.scale.value) > 2.0**-20:
            self._diverged(self.step, None, "gradient", "was not finite with any loss scale (use bf16)")

    def _first_bad(
        self, domains: list[int | None], watched: Mapping[str, list[float]]
    ) -> tuple[str | None, str, float] | None:
        for what, values in watched.items():
            for slot, value in enumerate(values):
                if not math.isfinite(value):
                    domain = domains[slot] if len(domains) == len(values) else None
                    name = None if domain is None else self.data.splits["train"].names[domain]
                    return name, {"losses": "loss", "norms": "gradient"}.get(what, what), value
        return None

    def _not_finite(self, step: int, domain: str | None, what: str, value: float) -> None:
        """``step`` counts from 0."""
        self.skipped.append(step + 1)
        if self.options.on_nan == "stop":
            self._diverged(step + 1, domain, what, f"turned {value}")
        if self.skipped[-HOPELESS:] == list(range(step + 2 - HOPELESS, step + 2)):
            self._diverged(step + 1, domain, what, f"was {value} in {HOPELESS} steps in a row")

    def _diverged(
        self, step: int, domain: str | None, what: str, happened: str, applied: bool = False
    ) -> None:
        where = f" of domain {domain!r}" if domain is not None else ""
        fate = "" if applied else ", which was not applied"
        skip = "" if applied else ", or skip such steps (on_nan='skip')"
        raise Diverged(
            f"{self.label}: the {what}{where} {happened} at step {step}{fate}; lower the learning rate or "
            f"the weight of the penalty, clip gradients{skip}.",
            self.history,
            step,
            domain,
            what,
        )

    def _log(self, journal: Journal | None) -> None:
        window, self.since_line = self.since_line, Window()
        names = self.data.splits["train"].names
        losses = {names[d]: total / n for d, (total, n) in sorted(window.domains.items())}
        self._shown = losses
        now = time.monotonic()
        examples = (self.step - self._line_step) * self.sampler.domains_per_step * self.sampler.batch_size
        self._pace = examples / max(now - self._line_began, 1e-9)
        self._line_began, self._line_step = now, self.step
        if journal is None:
            return
        norm = {"gradient_norm": window.norm / window.norms} if window.norms else {}
        own = {name: total / window.steps for name, total in window.more.items()}
        journal.line(
            {
                "phase": self.phase,
                "step": self.step,
                "loss": window.mean,
                "losses": losses,
                **own,
                "lr": float(self.engine.optimizer.param_groups[0]["lr"]),
                **norm,
                "skipped": len(self.skipped),
                "examples_per_second": round(self._pace, 1),
                "seconds": round((self.parent or self).seconds_now, 3),
            }
        )

    def _measure(self, journal: Journal | None) -> None:
        self._check_weights()
        try:
            with self._averaged(), self._watched("evaluating"):
                scores = self.evaluator(self.model)
                passes = self.step * self.sampler.domains_per_step
                point = Point(self.step, passes, self.since_point.mean, scores)
                if self.select == "best" and (
                    self.best is None or scores["validation"].better_than(self.best[0].scores["validation"])
                ):
                    self.best = (point, snapshot(self.model))
        except Interrupted:  # the evaluation is repeated when the training is resumed
            if journal is not None:
                self._checkpoint(journal)
                raise self._interrupted(journal) from None
            raise
        self.since_point = Window()
        self._warn_of_collapse(point)
        self.history.append(point)
        if self.average is not None:
            validation = scores.get("validation")
            self.average.evaluated(self.step, validation.loss if validation else None)
        if journal is not None:
            journal.line(
                {
                    "phase": self.phase,
                    "step": self.step,
                    "scores": point.to_dict()["scores"],
                    "seconds": round((self.parent or self).seconds_now, 3),
                }
            )

    def _warn_of_collapse(self, point: Point) -> None:
        """Once, where after a tenth of the steps a constant guess would do better on the training domains.

        A healthy training may be that bad at its start, or with classes of very different size. So the loss
        too must be above that of a model which knows nothing but how frequent the classes are, and not on
        its way down: no lower than at the evaluation before, or well above what it was in training.
        """
        if self.parent or not self.processes.main or "train" not in point.scores or self.constant is None:
            return
        majority, margin, entropy = self.constant

        def below(point: Point, before: Point | None) -> bool:
            now = point.scores["train"]
            loss = math.inf if now.loss is None or math.isnan(now.loss) else now.loss
            last = before.scores["train"].loss if before else None
            stuck = (last is not None and loss >= last) or loss > 1.1 * point.loss
            worse = self.options.loss is not None or loss > entropy
            begun = point.step >= max(COLLAPSED, self.options.steps / 10)
            return begun and stuck and worse and now.average < majority - margin

        every = [None, *self.history, point]
        *earlier, now = (below(p, before) for before, p in pairwise(every) if p is not None)
        if now and not any(earlier):
            rate = self.engine.optimizer.param_groups[0]["lr"]
            warnings.warn(
                f"after {point.step:,} of {self.options.steps:,} steps the accuracy on the training domains "
                f"is {point.scores['train'].average:.1%}; always guessing the most frequent class gives "
                f"{majority:.1%}. Lower the learning rate ({rate:g}), or check the labels.",
                stacklevel=2,
            )

    @cached_property
    def constant(self) -> tuple[float, float, float] | None:
        """On the training examples that are evaluated: how good the best constant guess is, two standard
        errors of that, and the classes' entropy. ``None`` where labels are not known without reading."""
        labels = known_labels(self.examples) if self.task.is_classification else None
        which = self.evaluator.which["train"]
        if labels is None or (own := labels[which]).min() < 0:
            return None
        shares = np.bincount(own) / len(own)
        largest, some = float(shares.max()), shares[shares > 0]
        return largest, 2 * math.sqrt(largest * (1 - largest) / len(own)), -float((some * np.log(some)).sum())

    @contextmanager
    def _averaged(self, always: bool = False) -> Iterator[None]:
        """Within the block the model holds the running mean of its weights, if it is to be judged by it."""
        judged = self.average is not None and (always or isinstance(self.average, SMA))
        weights = self.average.weights() if self.average and judged else None
        if weights is None:
            yield
            return
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        try:
            with applied(self.engine.params, weights):
                if has_batchnorm(self.model):
                    self._refresh()
                yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def _refresh(self) -> None:
        """BatchNorm's statistics from training data under the present weights."""
        if self._refreshing is None:
            train, size = self.data.splits["train"], self.options.batch_size
            sampler = DomainBatchSampler(train, size, 1, draw="pooled", seed=self.options.seed)
            self._refreshing = MetaBatchLoader(
                self.examples,
                sampler,
                workers=self.options.workers,
                device=self.device,
                stop=min(REFRESH_BATCHES, sampler.steps),
                share=(self.processes.index, self.processes.count),
            )
        with self.engine.autocast(), self._watched("averaging BatchNorm statistics"):
            refresh_batchnorm(self.model, self._refresh_inputs(self._refreshing))
        if self.processes.count > 1:
            buffers = [b for b in self.model.buffers() if b.is_floating_point()]
            with torch.no_grad():
                for buffer, mean in zip(buffers, self.engine.average(buffers), strict=True):
                    buffer.copy_(mean)

    def _refresh_inputs(self, batches: MetaBatchLoader) -> Iterator[Any]:
        for number, (batch,) in enumerate(batches):
            self._show("averaging BatchNorm statistics", number, len(batches))
            self._tick()
            yield batch.x

    def _finish(self) -> None:
        """With averaged weights, what they are in the end."""
        if self.average is None or self.average.span is None:
            return
        sma = isinstance(self.average, SMA)
        if sma and self.best is not None:
            return
        self.model.train()
        with self._averaged(always=True):
            point = self.history[-1]
            if not sma:
                with self._watched("evaluating"):
                    point = replace(point, scores=self.evaluator(self.model))
            self.final = (point, snapshot(self.model))

    def _stale(self) -> bool:
        if self.options.patience is None or not self.history:
            return False
        best = 0
        for i, point in enumerate(self.history):
            if point.scores["validation"].better_than(self.history[best].scores["validation"]):
                best = i
        return len(self.history) - 1 - best >= self.options.patience

    def _note(self) -> str:
        parts = []
        if self._shown:
            parts.append(losses_note(self._shown, 30))
        elif self.history:
            parts.append(f"loss {self.history[-1].loss:.3f}")
        if self._pace:
            parts.append(f"{self._pace:,.0f} examples/s")
        if self.history:
            parts += [scores_note(split, s) for split, s in self.history[-1].scores.items()]
        return "  ".join(parts)

    @property
    def selected(self) -> tuple[Point, str]:
        """The point whose weights count, and the rule that chose it."""
        if not self.history:
            raise RuntimeError("this training has not run yet.")
        averaged = self.average.span if self.average else None
        mean = f", {self.options.average} of steps {averaged[0]} to {averaged[1]}" if averaged else ""
        unfound = f" ({self.options.average} found no start)" if self.average and not averaged else ""
        if self.final is not None:
            return self.final[0], f"last step{mean}"
        if self.best is not None:
            by = f" by {self.selects.name}" if self.selects else ""
            return self.best[0], f"best on validation{by}" + (", sma" if averaged else unfound)
        return self.history[-1], "last step" + unfound

    def restore_selected(self) -> Point:
        """Puts the selected weights into the model, ready to predict, and says where they come from."""
        point, _ = self.selected
        self.model.eval()
        if kept := self.final or self.best:
            self.model.load_state_dict(kept[1])
        return point

    @property
    def seconds_now(self) -> float:
        """Spent in this training's turns, the present one included."""
        return self.seconds + time.monotonic() - self._began

    # Checkpoints

    def _checkpoint(self, journal: Journal) -> None:
        self._check_weights()
        best = self.best and (self.best[0].step + self._done - self.step, self.best[1])
        journal.checkpoint(self._done, state_of(self.parent or self), best)

    @property
    def _done(self) -> int:
        """Steps so far, those of the warm start among them."""
        root = self.parent or self
        return root.step + (root.warm.step if root.warm else 0)

    def _check_weights(self) -> None:
        if not bool(torch.stack([p.isfinite().all() for p in self.engine.params]).all()):
            self._diverged(self.step, None, "weights", "were no longer finite", applied=True)

    def _interrupted(self, journal: Journal) -> Interrupted:
        number = int((self.signals.asked if self.signals else None) or 15)
        if journal.saved is None and self.processes.main:
            return Interrupted(f"stopped at step {self.step}; no checkpoint could be written.", number)
        saved = "which is saved" if journal.saved in (self._done, None) else f"saved is step {journal.saved}"
        return Interrupted(f"stopped at step {self.step}, {saved}. Go on with: {journal.going_on}", number)


def _called(model: nn.Module, algorithm: Algorithm) -> list[nn.Module]:
    """The modules that an algorithm calls."""
    if algorithm.needs_features and isinstance(model, FeatureModel):
        return [model.features, model.head]
    return [model]


def _compile(model: nn.Module) -> None:
    """As ``model.compile()``, which leaves torch's own containers, such as ``nn.Sequential``, as they are."""
    call = model._call_impl
    model._compiled_call_impl = torch.compile(lambda *inputs, **named: call(*inputs, **named))
