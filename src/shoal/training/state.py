"""What a checkpoint holds of a training, and how a training goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError
from shoal.training.checkpoint import Loaded
from shoal.training.history import Point

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from shoal.training.loop import Training

KERNELS = ("foreach", "fused", "capturable")


def state_of(training: Training) -> dict[str, Any]:
    """Everything that the rest of the training depends on, as plain data."""
    warming = training.warm is not None and training.step == 0
    return {
        "made with": _fingerprint(training),
        "warm start": _phase_state(training.warm, warming) if training.warm else None,
        "training": None if warming else _phase_state(training, True),
    }


def _phase_state(training: Training, whole: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        "step": training.step,
        "seconds": training.seconds_now,
        "skipped": training.skipped,
        "history": [point.to_dict() for point in training.history],
        "agreement": training.agreement,
        "best": training.history.index(training.best[0]) if training.best else None,
    }
    if whole:
        state |= {
            "algorithm": dict(training.algorithm.state_dict()),
            "optimizer": training.engine.optimizer.state_dict(),
            "helpers": {name: h.state_dict() for name, h in training.engine.helpers.items()},
            "schedule": training.schedule.state_dict() if training.schedule else None,
            "scale": training.engine.scale.state_dict() if training.engine.scale else None,
            "average": training.average.state_dict() if training.average else None,
            "since point": training.since_point.state_dict(),
            "since line": training.since_line.state_dict(),
        }
    return state


def load(training: Training, loaded: Loaded) -> None:
    """Puts a training where a checkpoint was made; refuses the checkpoint of another training."""
    was, now = loaded.state["made with"], _fingerprint(training)
    if different := [k for k in now if was.get(k) != now[k]]:
        changes = ", ".join(f"{k} was {was.get(k)!r}, now {now[k]!r}" for k in different)
        raise InputError(f"the checkpoint {loaded.path} is of another training: {changes}.")
    phases = ((training.warm, "warm start"), (training, "training"))
    for phase, name in phases:
        state = loaded.state[name]
        if phase is not None and state is not None:
            _load_phase(phase, state, loaded)


def _load_phase(training: Training, state: Mapping[str, Any], loaded: Loaded) -> None:
    training.step, training.seconds = state["step"], state["seconds"]
    training.skipped = list(state["skipped"])
    training.history = [Point.from_dict(point) for point in state["history"]]
    training.agreement = [dict(found) for found in state.get("agreement", [])]
    if "algorithm" not in state:  # a phase that is over
        return
    if state["best"] is not None and loaded.best is not None:
        weights = {k: v.to(training.device) for k, v in loaded.best.items()}
        training.best = (training.history[state["best"]], weights)
    try:
        training.algorithm.load_state_dict(state["algorithm"])
    except RuntimeError as error:
        raise InputError(f"the checkpoint {loaded.path} does not fit this model: {error}") from error
    _load_optimizer(training.engine.optimizer, state["optimizer"])
    for name, helper in training.engine.helpers.items():
        if name not in state.get("helpers", {}):
            raise InputError(f"the checkpoint {loaded.path} does not hold the optimizer of the {name}.")
        _load_optimizer(helper, state["helpers"][name])
    if training.schedule is not None:
        training.schedule.load_state_dict(state["schedule"])
    if training.engine.scale is not None:
        training.engine.scale.load_state_dict(state["scale"])
    if training.average is not None:
        training.average.load_state_dict(state["average"], training.engine.params)
    training.since_point.load_state_dict(state["since point"])
    training.since_line.load_state_dict(state["since line"])


def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Its moments and settings, but not how they were computed: that is this device's and this run's."""
    own = [{k: group[k] for k in KERNELS if k in group} for group in optimizer.param_groups]
    saved = state["param_groups"]
    groups = (
        [{**group, **mine} for group, mine in zip(saved, own, strict=True)]
        if len(saved) == len(own)
        else saved
    )
    optimizer.load_state_dict({**state, "param_groups": groups})


def _fingerprint(training: Training) -> dict[str, Any]:
    """What must be the same when a training goes on."""
    options, sampler = training.options, training.sampler
    return {
        "algorithm": type(training.algorithm).__name__,
        "settings": {k: str(v) for k, v in options.settings.items()},
        "draw": sampler.draw,
        "batch_size": sampler.batch_size,
        "domains_per_step": sampler.domains_per_step,
        "seed": options.seed,
        "precision": options.chosen_precision,
        "optimizer": type(getattr(training.engine.optimizer, "inner", training.engine.optimizer)).__name__,
        "lr": [float(g.get("initial_lr", g["lr"])) for g in training.engine.optimizer.param_groups],
        "clip": options.clip,
        "accumulate": options.accumulate,
        "select": training.select,
        "metric": training.selects.name if training.selects else None,
        "average": options.average,
        "schedule": type(training.schedule).__name__,
        "warm start": options.warm_start,
        "eval_every": training.eval_every,
        "domains": list(training.data.splits["train"].names)[:1000],
        "sizes": training.data.splits["train"].sizes.tolist()[:1000],
    }
