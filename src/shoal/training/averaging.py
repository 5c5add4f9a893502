"""Averages of weights: along a training, for any algorithm, and over several models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import InputError
from shoal.models.calling import call
from shoal.tensors import widest


@dataclass
class _Mean:
    """The mean of the weights at ``count`` steps; half-precision ones in float32."""

    tensors: list[Tensor]
    first: int
    last: int
    count: int = 1
    loss: float = math.inf
    """The validation loss measured at ``last``."""

    @classmethod
    def of(cls, step: int, params: Sequence[Tensor], mean: _Mean | None = None) -> _Mean:
        """The weights of a step, added to ``mean``."""
        own = cls([p.detach().to(_precision(p), copy=True) for p in params], step, step)
        if mean is not None:
            mean.merge(own)
        return mean or own

    def merge(self, other: _Mean) -> None:
        """A mean that counts for nothing is replaced."""
        self.first = min(self.first, other.first) if self.count else other.first
        self.last = max(self.last, other.last) if self.count else other.last
        self.count += other.count
        if self.count == other.count:
            _copy(self.tensors, other.tensors)
        elif self.tensors:  # foreach functions refuse empty lists
            torch._foreach_lerp_(self.tensors, other.tensors, other.count / self.count)

    def clone(self) -> _Mean:
        return replace(self, tensors=[t.clone() for t in self.tensors])


def _restored(state: Mapping[str, Any] | None, params: Sequence[Tensor]) -> Any:
    """A saved mean, where the parameters are and laid out in memory as they are."""
    if state is None:
        return None
    _check_fit(state["tensors"], params)
    pairs = zip(state["tensors"], params, strict=True)
    tensors = [torch.empty_like(p, dtype=t.dtype, requires_grad=False).copy_(t) for t, p in pairs]
    return _Mean(**{**state, "tensors": tensors})


def _precision(p: Tensor) -> torch.dtype:
    return p.dtype if p.dtype.itemsize >= 4 else torch.float32


def _check_fit(weights: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    if [w.shape for w in weights] != [p.shape for p in params]:
        raise InputError(
            f"the averaged weights do not fit this model: they are {len(weights)} tensors, the model "
            f"trains {len(params)}, and their shapes must be the same."
        )


class SMA:
    """Mean of the weights from step ``start`` on (Arpit et al., Ensemble of Averages, 2022), in float32 if
    they have half precision. The other averages of a training derive from it.

    Args:
        start: first step.
    """

    running = True
    """Whether the mean so far is what is evaluated and selected along the way."""
    done = False
    """Nothing will be added any more, so that the training may end."""

    def __init__(self, start: int = 1) -> None:
        self.start = start
        self._mean: _Mean | None = None

    @torch.no_grad()
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        """Takes note of the trained parameters after ``step``, which counts from 1."""
        if step >= self.start:
            self._mean = _Mean.of(step, params, self._mean)

    def evaluated(self, step: int, validation_loss: float | None) -> None:
        """Takes note of an evaluation after ``step``, once ``update`` has seen the step."""

    @property
    def started(self) -> bool:
        """Whether the rule has found where to start; if not, :meth:`weights` is a substitute, or None."""
        return self._mean is not None

    def weights(self) -> list[Tensor] | None:
        """A copy of the mean so far, in the order of the parameters; None where there is none yet."""
        return None if self._mean is None else self._mean.clone().tensors

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last step in :meth:`weights`."""
        return None if self._mean is None else (self._mean.first, self._mean.last)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to resume; its tensors change with the next step."""
        return {"mean": self._mean and vars(self._mean)}

    def load_state_dict(self, state: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        """Resumes from a saved state; ``params`` are the trained parameters."""
        self._mean = _restored(state["mean"], params)


class EMA(SMA):
    """Exponential moving average of the weights: m_1 = θ_1, then m_t = d_t m_{t−1} + (1 − d_t) θ_t.

    d_t = min(``decay``, (1 + t) / (10 + t)), so that the first steps, which are far from the last, are soon
    forgotten; t is the number of the step (Polyak & Juditsky, Acceleration of Stochastic Approximation by
    Averaging, 1992; the warm-up is that of TensorFlow's ``ExponentialMovingAverage``).
    """

    def __init__(self, decay: float = 0.999) -> None:
        super().__init__()
        self.decay = decay

    @torch.no_grad()
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        now, mean = _Mean.of(step, params), self._mean
        if mean is None:
            self._mean = now
        elif mean.tensors:
            rate = 1 - min(self.decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(mean.tensors, now.tensors, rate)
            mean.last, mean.count = step, mean.count + 1


class OnlineSMA(SMA):
    """SMA as in the released ERM++ (Teterwak et al., ERM++, 2025; its ``MovingAvg``).

    The weights of step ``start`` count twice. The statistics of BatchNorm belong to the averaged network,
    which passes every batch in training mode after the step, from the first one on: see :meth:`track`.
    """

    def __init__(self, start: int = 100) -> None:
        super().__init__(start)
        self.buffers: list[Tensor] | None = None
        """Those of the averaged network, in the order of the model's."""

    def update(self, step: int, params: Sequence[Tensor]) -> None:
        first = self._mean is None
        super().update(step, params)
        if first and self._mean is not None:
            self._mean.count = 2

    def begin(self, model: nn.Module) -> None:
        """Before the first step: the averaged network is the model."""
        self.buffers = [b.clone() for b in model.buffers()]

    @torch.no_grad()
    def track(self, model: nn.Module, params: Sequence[Tensor], x: Any) -> None:
        """Passes a batch through the averaged network; before the start it has the model's own weights."""
        assert self.buffers is not None
        own, weights = list(model.buffers()), self.weights() or [p.detach().clone() for p in params]
        with applied([*params, *own], [*weights, *self.buffers]):
            call(model, x)
            self.buffers = [b.clone() for b in own]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffers": self.buffers}

    def load_state_dict(self, state: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        super().load_state_dict(state, params)
        device = params[0].device
        self.buffers = None if state["buffers"] is None else [b.to(device) for b in state["buffers"]]


class SWAD(SMA):
    """Dense averaging between an overfit-aware start and end (Cha et al., SWAD: Domain Generalization by
    Seeking Flat Minima, 2021).

    The steps from one evaluation to the next are a segment; ℓ_i is the validation loss at the end of segment
    i, the mean over domains. Averaging starts at the first segment s with ℓ_s = min(ℓ_s, …, ℓ_t),
    t = s + N_s − 1; a segment is over the limit if ℓ_i > ``ratio`` · mean(ℓ_s, …, ℓ_t); averaging, and the
    training, end when the last N_e segments all are. N_s is ``converge``, N_e > N_s is ``tolerate``.

    As in the authors' program (khanrc/swad, ``LossValley``), it is a mean of segments' means, in which every
    segment counts as one, however many steps it has, and some count more than once. Let Q be the last N_e
    segments at any time.

    - At t: of the first N_e − N_s + 1 segments of Q, which end with s where Q is full, those after the first,
      or after the one that follows the last over the limit. If there are none the mean is segment s, until
      another is added.
    - At each later evaluation at which Q does not begin before s: the first of Q.
    - At the end, unless averaging has ended: those of Q after the first, up to the last one within the limit.
    - If there is no s: the last segment alone.

    A loss that is not finite is over any limit and left out of the mean loss (in the released program NaN
    counts as the lowest loss).
    """

    running = False

    def __init__(self, converge: int = 3, tolerate: int = 6, ratio: float = 1.3) -> None:
        super().__init__()
        self.converge, self.tolerate, self.ratio = converge, tolerate, ratio
        self.limit: float | None = None
        """The loss above which a segment is over the limit; None before the start."""
        self._segment: _Mean | None = None
        self._queue: list[_Mean] = []  # the last ``tolerate`` segments
        self._from = 0  # the last step of segment s

    @property
    def started(self) -> bool:
        return self.limit is not None

    @torch.no_grad()
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        if not self.done:
            self._segment = _Mean.of(step, params, self._segment)

    @torch.no_grad()
    def evaluated(self, step: int, validation_loss: float | None) -> None:
        """Ends a segment; an evaluation without a step since the last one changes nothing."""
        if validation_loss is None:
            raise InputError("SWAD requires the validation loss: provide validation data, or use SMA.")
        if self._segment is None:
            return
        segment, self._segment = self._segment, None
        segment.loss = validation_loss if math.isfinite(validation_loss) else math.inf
        segment.count = 1  # however many steps it has
        self._queue = [*self._queue, segment][-self.tolerate :]
        if self.limit is None:
            self._find_start(self._queue[-self.converge :])
        elif self._queue[0].last >= self._from:
            assert self._mean is not None
            if self._over(self._queue):
                self._queue, self.done = [], True
            else:
                self._mean.merge(self._queue[0])

    def _find_start(self, window: Sequence[_Mean]) -> None:
        """Starts if the first of the last ``converge`` segments is the best of them."""
        finite = [segment.loss for segment in window if math.isfinite(segment.loss)]
        if len(window) < self.converge or window[0].loss != min(finite, default=None):
            return
        self.limit, self._from = self.ratio * (sum(finite) / len(finite)), window[0].last
        before = self._queue[: self.tolerate - self.converge + 1]
        over = [i for i, segment in enumerate(before) if self._over([segment])]
        self._mean = window[0].clone()
        self._mean.count = 0
        for segment in before[over[-1] + 2 if over else 1 :]:
            self._mean.merge(segment)

    def _over(self, segments: Sequence[_Mean]) -> bool:
        assert self.limit is not None
        return min(segment.loss for segment in segments) > self.limit

    def _parts(self) -> list[_Mean]:
        """What :meth:`weights` is the mean of, if the training ends now."""
        if self.limit is None:
            return self._queue[-1:]
        rest = self._queue[1:]
        while rest and self._over(rest[-1:]):
            rest = rest[:-1]
        first = [] if self._mean is None or (self._mean.count == 0 and rest) else [self._mean]
        return first + rest

    @torch.no_grad()
    def weights(self) -> list[Tensor] | None:
        if not (parts := self._parts()):
            return None
        whole = parts[0].clone()
        for segment in parts[1:]:
            whole.merge(segment)
        return whole.tensors

    @property
    def span(self) -> tuple[int, int] | None:
        parts = self._parts()
        return (min(p.first for p in parts), max(p.last for p in parts)) if parts else None

    def state_dict(self) -> dict[str, Any]:
        segment, queue = self._segment and vars(self._segment), [vars(s) for s in self._queue]
        own = {"segment": segment, "queue": queue, "limit": self.limit, "from": self._from}
        return {**super().state_dict(), **own, "done": self.done}

    def load_state_dict(self, state: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        super().load_state_dict(state, params)
        self._segment = _restored(state["segment"], params)
        self._queue = [_restored(segment, params) for segment in state["queue"]]
        self.limit, self._from, self.done = state["limit"], state["from"], state["done"]


def make_average(name: str | None, steps: int) -> SMA | None:
    """What the option ``average`` means in a training of so many steps."""
    kind, _, number = (name or "").partition(":")
    if kind == "swad":
        return SWAD(ratio=float(number or 1.3))
    if kind == "ema":
        return EMA(float(number or 0.999))
    if kind == "online-sma":
        return OnlineSMA(int(number or 100))
    start = int(number or max(1, steps // 10)) if kind == "sma" else 0
    if start > steps:
        raise InputError(f"starts at step {start:,}, after the last of {steps:,}.", "average")
    return SMA(start) if kind == "sma" else None


@torch.no_grad()
def average_weights(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Average the weights of several models, θ = (θ_1 + … + θ_n) / n.

    Sums are computed in float64; the result has the dtypes and devices of the first state. Integers and
    booleans must be equal, except for scalars such as counters, which are those of the first. The states are
    read one at a time.

    >>> import torch
    >>> average_weights([{"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}])
    {'w': tensor([2.5000])}

    Args:
        states: state dicts.

    Returns:
        State dict of the average.

    Reference: Wortsman et al., Model soups, ICML 2022; Ramé et al., Diverse Weight Averaging for
    Out-of-Distribution Generalization, NeurIPS 2022.
    """
    first: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    count = 0
    for count, state in enumerate(states, 1):
        if count == 1:
            first = {name: value.detach() for name, value in state.items()}
            kinds = {name: torch.promote_types(v.dtype, widest(v.device)) for name, v in first.items()}
            sums = {name: v.to(kinds[name], copy=True) for name, v in first.items() if _averaged(v)}
            continue
        for name in dict.fromkeys([*first, *state]):
            if not (name in first and name in state and _same_kind(first[name], state[name])):
                raise InputError(
                    f"states 1 and {count} cannot be averaged: {name!r} is in one of them only, has another "
                    "shape, or holds other whole numbers."
                )
        for name, total in sums.items():
            total += state[name].to(total)
    if not count:
        raise InputError("states is empty; it must contain at least one state dict.")
    return {
        name: (sums[name] / count).to(value.dtype) if name in sums else value.clone()
        for name, value in first.items()
    }


def _same_kind(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors can be averaged; whole numbers, except for counters, must be equal."""
    if a.shape != b.shape or _averaged(a) != _averaged(b):
        return False
    return _averaged(a) or a.numel() == 1 or torch.equal(a, b.to(a))


def _averaged(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


@torch.no_grad()
def interpolate(start: Mapping[str, Tensor], end: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """(1 − α) ``start`` + α ``end``, of two state dicts of the same model.

    Floating tensors keep their type, and half-precision ones are interpolated in float32; integer buffers are
    those of ``end``. The statistics of BatchNorm need :func:`refresh_batchnorm` afterwards. ::

        start = copy.deepcopy(model.state_dict())
        ...  # fine-tune the model
        model.load_state_dict(interpolate(start, model.state_dict(), 0.5))

    Reference: Wortsman et al., Robust fine-tuning of zero-shot models (WiSE-FT), 2022.
    """
    if isinstance(alpha, bool) or not 0 <= alpha <= 1:
        raise InputError(f"alpha must be a number from 0 to 1, got {alpha!r}.")
    if {k: v.shape for k, v in start.items()} != {k: v.shape for k, v in end.items()}:
        raise InputError("start and end are of different models: names or shapes differ.")
    return {name: _between(start[name], to, alpha) for name, to in end.items()}


def _between(start: Tensor, end: Tensor, alpha: float) -> Tensor:
    if not _averaged(end):
        return end.clone()
    start, kind = start.to(end.device, _precision(end)), end.dtype
    end = end.to(_precision(end))
    # Where both are equal also infinities stay, such as those of a mask.
    return torch.where(start == end, end, torch.lerp(start, end, alpha)).to(kind)


@contextmanager
def applied(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Within the block the tensors hold ``values``, which may be of another type or on another device."""
    _check_fit(values, tensors)
    before = [t.detach().clone() for t in tensors]
    try:
        _copy(tensors, values)
        yield
    finally:
        _copy(tensors, before)


@torch.no_grad()
def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(values))


def has_batchnorm(model: nn.Module) -> bool:
    """Whether :func:`refresh_batchnorm` would have something to do, with the modules' present modes."""
    return bool(_in_training(model))


def refresh_batchnorm(model: nn.Module, batches: Iterable[Any]) -> None:
    """Recomputes the running statistics of BatchNorm layers for the weights that the model holds now.

    They become the plain average over ``batches``, each an input ``x`` of ``model(x)``, as with torch's
    ``update_bn``; but only layers in training mode are concerned, frozen ones stay as they are, and
    everything else is in evaluation mode meanwhile.
    """
    layers = _in_training(model)
    modes = [(m, m.training) for m in model.modules()]
    momenta = [layer.momentum for layer in layers]
    try:
        # Attributes, not train() and eval(): models override these to keep layers frozen, or to do more.
        for module, _ in modes:
            module.training = False
        for layer in layers:
            layer.training, layer.momentum = True, None  # a cumulative average
            layer.reset_running_stats()
        with torch.no_grad():
            for x in batches if layers else ():
                call(model, x)
    finally:
        for module, mode in modes:
            module.training = mode
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _in_training(model: nn.Module) -> list[_BatchNorm]:
    return [
        m
        for m in model.modules()
        if isinstance(m, _BatchNorm) and m.training and m.track_running_stats and m.running_mean is not None
    ]
