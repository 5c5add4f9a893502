"""A run of one or more trainings in sequence: how they are interrupted, saved and resumed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.errors import InputError
from shoal.options import TrainingOptions, declared
from shoal.tensors import like
from shoal.training.checkpoint import Loaded
from shoal.training.evaluate import snapshot
from shoal.training.formats import Choice
from shoal.training.history import Point
from shoal.training.journal import Journal
from shoal.training.options import plain, precision_of
from shoal.training.stopping import Interrupted, Signals

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from shoal.training.loop import Training
    from shoal.training.retraining import Plan

KERNELS = ("foreach", "fused", "capturable")
CHUNK = 50
"""Most steps between two looks up from the work, to read losses off the device."""
SECONDS = 0.5
"""About as long as that should take."""


class Session:
    """The trainings of a run in their order: a warm start, where there is one, the training itself, ``main``,
    and again both where it is repeated on all data.

    Of those before the one that is trained, a checkpoint holds what they measured; of that one everything
    that the rest of the run depends on.
    """

    def __init__(self, main: Training, journal: Journal | None, signals: Signals) -> None:
        self.main, self.journal, self.signals = main, journal, signals
        self.trainings = _with_warm(main)
        self.processes = main.processes
        self._ticks, self._next_tick, self._tick_began = 0, 0, 0.0

    @property
    def done(self) -> int:
        """Steps so far, those of all trainings."""
        return sum(training.state.step for training in self.trainings)

    def is_past(self, training: Training) -> bool:
        """Whether a later training has begun."""
        return any(t.state.step for t in self.trainings[self.trainings.index(training) + 1 :])

    def retrain(self, plan: Plan) -> list[Training]:
        """Goes on with a training on all data, and its warm start."""
        more = _with_warm(self.main.make_retraining(plan))
        self.trainings += more
        for training in more:
            training.use(self.main.choice)
        return more

    def checkpoint(self, training: Training) -> bool:
        """Whether one was written."""
        if self.journal is None:
            return False
        training.monitor.check_weights()
        best = training.selection.best
        kept = best and (best[0].step + self.done - training.state.step, best[1])
        at = self.trainings.index(training)
        state: dict[str, Any] = {"made with": _fingerprint(self.main), "warm start": None, "training": None}
        state["format"] = self.main.choice.state_dict()
        for number, each in enumerate(self.trainings[: at + 1]):
            state[_key(each)] = _phase_state(each, self.main.seconds_now, number == at)
        if self.main.options["retrain"]:
            state |= {"initial": self.main.initial, "plan": self.main.plan}
        return self.journal.checkpoint(self.done, state, kept)

    def use(self, choice: Choice) -> None:
        """Computes in this format, in all trainings."""
        for training in self.trainings:
            training.use(choice)

    def restore(self) -> bool:
        """Puts the trainings where the newest checkpoint was made, if there is one; refuses another run's."""
        loaded = self.journal.restore() if self.journal else None
        if loaded is None:
            if self.main.options["retrain"]:
                self.main.initial = {k: v.cpu() for k, v in snapshot(self.main.model).items()}
            return False
        was, now = loaded.state["made with"], _fingerprint(self.main)
        if different := [k for k in now if was.get(k) != now[k]]:
            changes = ", ".join(f"{k} was {was.get(k)!r}, now {now[k]!r}" for k in different)
            raise InputError(f"the checkpoint {loaded.path} belongs to another training: {changes}.")
        if "format" in loaded.state:
            self.use(Choice.from_state(loaded.state["format"]))
        self.main.initial = loaded.state.get("initial")
        self._load(self.trainings, loaded)
        if (plan := loaded.state.get("plan")) is not None:
            self._load(self.retrain(plan), loaded)
        return True

    def _load(self, trainings: Sequence[Training], loaded: Loaded) -> None:
        for training in trainings:
            if (state := loaded.state.get(_key(training))) is not None:
                self.main.seconds = max(self.main.seconds, state["seconds"])
                _load_phase(training, state, loaded)

    def agreed(self, chunk: int, due: bool) -> tuple[int, bool, bool]:
        """What all processes will do alike: the main one's pace and clock, and anybody's signal."""
        asked = self.signals.asked is not None
        if self.processes.count == 1:
            return chunk, due, asked
        mine = (chunk, float(due)) if self.processes.main else (0, 0.0)
        chunks, dues, askers = self.processes.numbers(*mine, float(asked))
        return int(chunks), dues > 0, askers > 0

    def count_ticks(self) -> None:
        """Batches are counted from here on, see :meth:`tick`."""
        self._ticks, self._next_tick, self._tick_began = 0, 0, time.monotonic()

    def tick(self, training: Training) -> None:
        """Raises Interrupted after a signal, in all processes alike, which come here equally often."""
        if self.journal is None:
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
            raise self.interrupted(training)

    def interrupted(self, training: Training) -> Interrupted:
        assert self.journal is not None
        number, step, saved = int(self.signals.asked or 15), training.state.step, self.journal.saved
        if saved is None and self.processes.main:
            return Interrupted(f"interrupted at step {step}; no checkpoint could be written.", number)
        where = "which is saved" if saved in (self.done, None) else f"the last saved step is {saved}"
        return Interrupted(
            f"interrupted at step {step}, {where}. Resume with: {self.journal.resume_hint}", number
        )


def _with_warm(training: Training) -> list[Training]:
    return [t for t in (training.warm, training) if t is not None]


def _key(training: Training) -> str:
    """What a checkpoint calls its state."""
    return "training" if training.phase == "train" else training.phase


def _phase_state(training: Training, seconds: float, whole: bool) -> dict[str, Any]:
    best = training.selection.best
    state: dict[str, Any] = {
        "step": training.state.step,
        "seconds": seconds,
        "history": [point.to_dict() for point in training.history],
        "agreement": training.agreement,
        "best": training.history.index(best[0]) if best else None,
    }
    if whole:
        state |= {
            "algorithm": dict(training.algorithm.state_dict()),
            "optimizer": training.engine.optimizer.state_dict(),
            "auxiliary": {name: h.state_dict() for name, h in training.engine.auxiliary.items()},
            "average": training.average.state_dict() if training.average else None,
            "start": training.selection.start,
            "callbacks": [callback.state_dict() for callback in training.callbacks.own],
            **{name: part.state_dict() for name, part in _parts(training).items() if part is not None},
        }
    return state


def _parts(training: Training) -> dict[str, Any]:
    """What else has a state, where it is there."""
    return {
        "schedule": training.schedule,
        "scale": training.engine.scale,
        "since point": training.monitor.since_point,
        "since line": training.monitor.since_line,
    }


def _load_phase(training: Training, state: Mapping[str, Any], loaded: Loaded) -> None:
    training.state.step = state["step"]
    training.history[:] = [Point.from_dict(point) for point in state["history"]]
    if training.tracking is not None:
        training.tracking.found = [dict(found) for found in state["agreement"]]
    if "algorithm" not in state:  # a training that is over
        return
    if state["best"] is not None and loaded.best is not None:
        weights = {k: v.to(training.device) for k, v in loaded.best.items()}
        training.selection.best = (training.history[state["best"]], weights)
    try:
        training.algorithm.load_state_dict(state["algorithm"])
    except RuntimeError as error:
        raise InputError(f"the checkpoint {loaded.path} does not fit this model: {error}") from error
    engine = training.engine
    _load_optimizer(engine.optimizer, state["optimizer"])
    for name, optimizer in engine.auxiliary.items():
        if name not in state.get("auxiliary", {}):
            raise InputError(f"the checkpoint {loaded.path} does not contain the optimizer of the {name}.")
        _load_optimizer(optimizer, state["auxiliary"][name])
    if state.get("start") is not None:
        training.selection.start = {k: v.to(training.device) for k, v in state["start"].items()}
    if training.average is not None:
        training.average.load_state_dict(state["average"], engine.params)
    for name, part in _parts(training).items():
        if part is not None:
            part.load_state_dict(state[name])
    for callback, kept in zip(training.callbacks.own, state["callbacks"], strict=False):
        callback.load_state_dict(kept)


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Its moments and settings, but not how they were computed: that is this device's and this run's."""
    own = [{k: group[k] for k in KERNELS if k in group} for group in optimizer.param_groups]
    saved = state["param_groups"]
    if len(saved) == len(own):
        saved = [{**group, **mine} for group, mine in zip(saved, own, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": saved})
    for p, entry in optimizer.state.items():  # checkpoints are contiguous, the parameters may not be
        same = {k: v for k, v in entry.items() if isinstance(v, Tensor) and v.shape == p.shape}
        entry.update({k: like(v, p) for k, v in same.items()})


def _fingerprint(training: Training) -> dict[str, Any]:
    """What must be the same when a training is resumed."""
    options, sampler, train = training.options, training.sampler, training.data.splits["train"]
    optimizer = training.engine.optimizer
    return {
        **{name: plain(options[name]) for name in declared(TrainingOptions)},  # type: ignore[literal-required]
        "loss": plain(options["loss"]),
        "algorithm": type(training.algorithm).__name__,
        "draw": sampler.draw,
        "batch_size": sampler.batch_size,
        "domains_per_step": sampler.domains_per_step,
        "precision": precision_of(options),
        "optimizer": type(getattr(optimizer, "inner", optimizer)).__name__,
        "lr": [float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups],
        "select": training.select,
        "metric": training.selects.name if training.selects else None,
        "eval_every": training.eval_every,
        "domains": list(train.names)[:1000],
        "sizes": train.sizes.tolist()[:1000],
    }
