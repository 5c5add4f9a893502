"""The mean of a training's weights, for any algorithm: it only looks at the parameters after each step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import InputError
from shoal.models.calling import call


@dataclass
class _Mean:
    """The running mean of the weights at ``count`` steps, from step ``first`` to step ``last``."""

    tensors: list[Tensor]
    first: int
    last: int
    count: int = 1
    loss: float = math.inf
    """The validation loss measured at ``last``, infinite where it was not a finite number."""

    def merge(self, later: _Mean) -> None:
        self.count += later.count
        self.last = later.last
        if self.tensors:  # foreach functions refuse empty lists
            torch._foreach_lerp_(self.tensors, later.tensors, later.count / self.count)

    def clone(self) -> _Mean:
        return _Mean([t.clone() for t in self.tensors], self.first, self.last, self.count, self.loss)

    def move(self, params: Sequence[Tensor]) -> None:
        """To where the parameters are, and laid out in memory as they are."""
        _check_fit(self.tensors, params)
        pairs = zip(self.tensors, params, strict=True)
        self.tensors = [torch.empty_like(p, dtype=t.dtype, requires_grad=False).copy_(t) for t, p in pairs]

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "tensors": [t.to("cpu", copy=True) for t in self.tensors]}

    @classmethod
    def from_state(cls, state: dict[str, Any] | None) -> _Mean | None:
        return None if state is None else cls(**state).clone()


def _added(mean: _Mean | None, step: int, params: Sequence[Tensor]) -> _Mean:
    """With the parameters of another step; the first are copied."""
    if mean is None:
        return _Mean([p.detach().to(_precision(p), copy=True) for p in params], step, step)
    mean.merge(_Mean([p.detach().to(_precision(p)) for p in params], step, step))
    return mean


def _precision(p: Tensor) -> torch.dtype:
    return p.dtype if p.dtype.itemsize >= 4 else torch.float32


def _check_fit(weights: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    if [w.shape for w in weights] != [p.shape for p in params]:
        raise InputError(
            f"the averaged weights do not fit this model: they are {len(weights)} tensors, the model "
            f"trains {len(params)}, and their shapes must be the same."
        )


class Average(ABC):
    """A mean of the weights of a training; half-precision ones are averaged in float32. Never waits."""

    done: bool = False
    """Nothing will be added any more, so that training may end."""
    _loaded: bool = False
    _mean: _Mean | None = None
    _settings: dict[str, Any]

    @abstractmethod
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        """Takes note of the trained parameters after ``step``, which counts from 1."""

    def evaluated(self, step: int, validation_loss: float | None) -> None:  # noqa: B027 (most take no note)
        """Takes note of an evaluation after ``step``, once ``update`` has seen the step."""

    def weights(self) -> list[Tensor] | None:
        """A copy of the mean so far, in the order of the parameters; None where there is none yet."""
        return None if self._mean is None else self._mean.clone().tensors

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last step in :meth:`weights`."""
        return None if self._mean is None else (self._mean.first, self._mean.last)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on, as copies on the CPU."""
        return {"settings": self._settings, "mean": self._mean and self._mean.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], params: Sequence[Tensor] | None = None) -> None:
        """Goes on from a saved state.

        Without ``params`` the tensors stay on the CPU until the next ``update``. Give them where weights are
        asked for, or an evaluation comes, before it: sums on another device may differ in the last bit.
        """
        if state["settings"] != self._settings:
            raise InputError(
                f"the average was saved with {state['settings']}, this one has {self._settings}; "
                "make it with the same settings."
            )
        self._load(state)
        self._loaded = True
        self._settle(params)

    def _load(self, state: dict[str, Any]) -> None:
        self._mean = _Mean.from_state(state["mean"])

    def _means(self) -> list[_Mean]:
        return [] if self._mean is None else [self._mean]

    def _settle(self, params: Sequence[Tensor] | None) -> None:
        if self._loaded and params is not None:
            for mean in self._means():
                mean.move(params)
            self._loaded = False


class SMA(Average):
    """Running mean of the weights from step ``start`` on (Arpit et al., Ensemble of Averages, 2022)."""

    def __init__(self, start: int) -> None:
        self.start = _whole("start", start, 0)
        self._settings = {"start": self.start}

    @torch.no_grad()
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        if step >= self.start:
            self._settle(params)
            self._mean = _added(self._mean, step, params)


class SWAD(Average):
    """Dense averaging between an overfit-aware start and end (Cha et al., SWAD: Domain Generalization by
    Seeking Flat Minima, 2021).

    The steps from one evaluation to the next are a segment, with the loss measured at its end. Averaging
    starts with the first of ``converge`` (N_s) segments in a row of which none later was better, and ends
    before ``tolerate`` (N_e) segments in a row that are all above a limit: ``ratio`` times the mean loss of
    those ``converge``. A loss that is not finite is above any limit, and left out of that mean. Until it is
    known whether a segment belongs to the mean it is kept apart, as a full copy of the trained weights: at
    most ``tolerate + 1`` copies.
    """

    def __init__(self, converge: int = 3, tolerate: int = 6, ratio: float = 1.3) -> None:
        self.converge = _whole("converge", converge, 1)
        self.tolerate = _whole("tolerate", tolerate, 1)
        if not 0 < ratio < math.inf:
            raise InputError(f"ratio must be above 0 and finite, got {ratio}.")
        self.ratio = ratio
        self.limit: float | None = None
        """The loss above which a segment is suspect; None before the start."""
        self._settings = {"converge": converge, "tolerate": tolerate, "ratio": ratio}
        self._segment: _Mean | None = None
        self._queue: list[_Mean] = []  # finished segments: candidates for the start, then those pending

    @torch.no_grad()
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        if not self.done:
            self._settle(params)
            self._segment = _added(self._segment, step, params)

    @torch.no_grad()
    def evaluated(self, step: int, validation_loss: float | None) -> None:
        """Ends a segment; an evaluation without a step since the last one changes nothing."""
        if validation_loss is None:
            raise InputError("SWAD starts and ends by the validation loss: give validation data, or use SMA.")
        if self._segment is None:
            return
        loss = float(validation_loss)
        self._segment.loss = loss if math.isfinite(loss) else math.inf
        self._queue.append(self._segment)
        self._segment = None
        if self._mean is None or self.limit is None:
            self._start()
        elif len(self._queue) < self.tolerate:
            return
        elif min(segment.loss for segment in self._queue) > self.limit:
            self._queue, self.done = [], True
        else:
            self._mean.merge(self._queue.pop(0))

    def _start(self) -> None:
        if len(self._queue) < self.converge:
            return
        first = self._queue.pop(0)
        finite = [m.loss for m in (first, *self._queue) if math.isfinite(m.loss)]
        if first.loss == min(finite, default=None):
            self.limit = self.ratio * (sum(finite) / len(finite))
            for segment in self._queue:
                first.merge(segment)
            self._mean, self._queue = first, []

    @torch.no_grad()
    def weights(self) -> list[Tensor] | None:
        if self._mean is None:
            return None
        whole = self._mean.clone()
        for segment in self._queue:
            whole.merge(segment)
        return whole.tensors

    @property
    def span(self) -> tuple[int, int] | None:
        return None if self._mean is None else (self._mean.first, [self._mean, *self._queue][-1].last)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "segment": self._segment and self._segment.state_dict(),
            "queue": [segment.state_dict() for segment in self._queue],
            "limit": self.limit,
            "done": int(self.done),
        }

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._segment = _Mean.from_state(state["segment"])
        self._queue = [_Mean(**segment).clone() for segment in state["queue"]]
        self.limit, self.done = state["limit"], bool(state["done"])

    def _means(self) -> list[_Mean]:
        return [m for m in (self._mean, self._segment, *self._queue) if m is not None]


def _whole(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    return value


@contextmanager
def applied(params: Sequence[Tensor], weights: Sequence[Tensor]) -> Iterator[None]:
    """Within the block the parameters hold ``weights``, which may be of another type or on another device."""
    _check_fit(weights, params)
    before = [p.detach().clone() for p in params]
    try:
        _copy(params, weights)
        yield
    finally:
        _copy(params, before)


@torch.no_grad()
def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(values))


def has_batchnorm(model: nn.Module) -> bool:
    """Whether :func:`refresh_batchnorm` would have something to do, with the modules' present modes."""
    return bool(_in_training(model))


def refresh_batchnorm(model: nn.Module, batches: Iterable[Any]) -> None:
    """Recomputes the running statistics of BatchNorm layers for the weights that the model holds now.

    They become the plain average over ``batches``, each an input ``x`` of ``model(x)``. Only layers in
    training mode that keep statistics are concerned; everything else is in evaluation mode meanwhile. Layers
    that no batch reaches keep their statistics, and so do all if there is an error.
    """
    layers = _in_training(model)
    if not layers:
        return
    modes = [(m, m.training) for m in model.modules()]
    momenta = [layer.momentum for layer in layers]
    before = [{n: b.clone() for n, b in layer.named_buffers(recurse=False)} for layer in layers]
    reached = [False] * len(layers)
    try:
        # Attributes, not train() and eval(): models override these to keep layers frozen, or to do more.
        for module, _ in modes:
            module.training = False
        for layer in layers:
            layer.training = True
            layer.momentum = None  # a cumulative average
            layer.reset_running_stats()
        seen = 0
        with torch.no_grad():
            for x in batches:
                call(model, x)
                seen += 1
        if not seen:
            raise InputError("BatchNorm's statistics are to be recomputed and there is no batch to do it on.")
        reached = [bool(layer.num_batches_tracked) for layer in layers]
    finally:
        for module, mode in modes:
            module.training = mode
        for layer, momentum, buffers, new in zip(layers, momenta, before, reached, strict=True):
            layer.momentum = momentum
            if not new:
                _copy([getattr(layer, n) for n in buffers], list(buffers.values()))


def _in_training(model: nn.Module) -> list[_BatchNorm]:
    return [
        m
        for m in model.modules()
        if isinstance(m, _BatchNorm) and m.training and m.track_running_stats and m.running_mean is not None
    ]
