"""Means of weights: along a training, for any algorithm, and over several models."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import InputError
from shoal.models.calling import call
from shoal.tensors import widest


@dataclass
class _Mean:
    """The running mean of the weights at ``count`` steps, from step ``first`` to step ``last``."""

    tensors: list[Tensor]
    first: int
    last: int
    count: int = 1
    loss: float = math.inf
    """The validation loss measured at ``last``, infinite where it was not a finite number."""

    def merge(self, other: _Mean) -> None:
        """A mean that counts for nothing is replaced."""
        self.first, self.last = (
            (min(self.first, other.first), max(self.last, other.last))
            if self.count
            else (other.first, other.last)
        )
        self.count += other.count
        if self.count == other.count:
            _copy(self.tensors, other.tensors)
        elif self.tensors:  # foreach functions refuse empty lists
            torch._foreach_lerp_(self.tensors, other.tensors, other.count / self.count)

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
    running: ClassVar[bool] = True
    """Whether the mean so far is what is evaluated and selected along the way."""
    _loaded: bool = False
    _mean: _Mean | None = None
    _settings: dict[str, Any]

    @property
    def started(self) -> bool:
        """Whether the rule has found where to start; if not, :meth:`weights` is a substitute, or None."""
        return self._mean is not None

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
                "use the same settings."
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


class EMA(Average):
    """Exponential moving average of the weights: m_1 = θ_1, then m_t = d_t m_{t−1} + (1 − d_t) θ_t.

    d_t = min(``decay``, (1 + t) / (10 + t)), so that the first steps, which are far from the last, are soon
    forgotten; t is the number of the step (Polyak & Juditsky, Acceleration of Stochastic Approximation by
    Averaging, 1992; the warm-up is that of TensorFlow's ``ExponentialMovingAverage``).
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise InputError(f"decay must be between 0 and 1, got {decay}.")
        self.decay = float(decay)
        self._settings = {"decay": self.decay}

    @torch.no_grad()
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        self._settle(params)
        if self._mean is None:
            self._mean = _added(None, step, params)
            return
        mean, rate = self._mean, 1 - min(self.decay, (1 + step) / (10 + step))
        if mean.tensors:
            torch._foreach_lerp_(mean.tensors, [p.detach().to(_precision(p)) for p in params], rate)
        mean.last, mean.count = step, mean.count + 1


class SWAD(Average):
    """Dense averaging between an overfit-aware start and end (Cha et al., SWAD: Domain Generalization by
    Seeking Flat Minima, 2021).

    The steps from one evaluation to the next are a segment; ℓ_i is the validation loss at the end of segment
    i. Averaging starts at the first segment s with ℓ_s = min(ℓ_s, …, ℓ_t), t = s + N_s − 1; a segment is over
    the limit if ℓ_i > ``ratio`` · mean(ℓ_s, …, ℓ_t); averaging, and the training, end when the last N_e
    segments all are. N_s is ``converge``, N_e is ``tolerate``.

    As in the authors' program (khanrc/swad, ``LossValley``), which their results come from, it is a mean of
    segments' means, in which every segment counts as one, however many steps it has, and some count more than
    once. Let Q be the last N_e segments at any time.

    - At t, with N_e > N_s: of the first N_e − N_s + 1 segments of Q, which end with s where Q is full, those
      after the first, or after the one that follows the last over the limit. With N_e ≤ N_s: segments
      s + 1, …, s + N_s − N_e. If there are none the mean is segment s, until another is added.
    - At each later evaluation at which Q does not begin before s: the first of Q.
    - At the end, unless averaging has ended: those of Q after the first, up to the last one within the limit.
    - If there is no s: the last segment alone.

    A loss that is not finite is over any limit and left out of the mean loss. (In the released program NaN
    counts as the lowest loss, and averaging that starts there never ends.) At most max(N_s, N_e) + 2 copies
    of the trained weights are kept.
    """

    running = False

    def __init__(self, converge: int = 3, tolerate: int = 6, ratio: float = 1.3) -> None:
        self.converge = _whole("converge", converge, 1)
        self.tolerate = _whole("tolerate", tolerate, 1)
        if not 0 < ratio < math.inf:
            raise InputError(f"ratio must be above 0 and finite, got {ratio}.")
        self.ratio = ratio
        self.limit: float | None = None
        """The loss above which a segment is over the limit; None before the start."""
        self._settings = {"converge": converge, "tolerate": tolerate, "ratio": ratio}
        self._segment: _Mean | None = None
        self._queue: list[_Mean] = []  # finished segments that may still be added
        self._start = 0  # the last step of segment s

    @property
    def started(self) -> bool:
        return self.limit is not None

    @torch.no_grad()
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        if not self.done:
            self._settle(params)
            self._segment = _added(self._segment, step, params)

    @torch.no_grad()
    def evaluated(self, step: int, validation_loss: float | None) -> None:
        """Ends a segment; an evaluation without a step since the last one changes nothing."""
        if validation_loss is None:
            raise InputError("SWAD requires the validation loss: provide validation data, or use SMA.")
        if self._segment is None:
            return
        loss = float(validation_loss)
        self._segment.loss = loss if math.isfinite(loss) else math.inf
        self._queue.append(self._segment)
        self._segment = None
        self._add_segment()

    def _found_start(self, window: Sequence[_Mean]) -> bool:
        """Whether the first of the last ``converge`` segments is the best of them; then sets the limit."""
        finite = [segment.loss for segment in window if math.isfinite(segment.loss)]
        if len(window) < self.converge or window[0].loss != min(finite, default=None):
            return False
        self.limit = self.ratio * (sum(finite) / len(finite))
        self._start = window[0].last
        return True

    def _over(self, segments: Sequence[_Mean]) -> bool:
        assert self.limit is not None
        return min(segment.loss for segment in segments) > self.limit

    def _add_segment(self) -> None:
        self._queue[-1].count = 1  # a segment counts as one, however many steps it has
        del self._queue[: -max(self.tolerate, self.converge if self.limit is None else 0)]
        last = self._queue[-self.tolerate :]
        if self.limit is None:
            window = self._queue[-self.converge :]
            if self._found_start(window):
                self._mean = window[0].clone()
                self._mean.count = 0
                for segment in self._before(window, last):
                    self._mean.merge(segment)
                self._queue = last
        elif self._mean is not None and last[0].last >= self._start:
            if self._over(last):
                self._queue, self.done = [], True
            else:
                self._mean.merge(last[0])

    def _before(self, window: Sequence[_Mean], last: Sequence[_Mean]) -> Sequence[_Mean]:
        """What is added when the start is found."""
        surplus = self.tolerate - self.converge
        if surplus <= 0:
            return window[1 : 1 - surplus]
        early = last[: surplus + 1]
        over = [i for i, segment in enumerate(early) if self._over([segment])]
        return early[over[-1] + 2 if over else 1 :]

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
        return {
            **super().state_dict(),
            "segment": self._segment and self._segment.state_dict(),
            "queue": [segment.state_dict() for segment in self._queue],
            "limit": self.limit,
            "start": self._start,
            "done": int(self.done),
        }

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._segment = _Mean.from_state(state["segment"])
        self._queue = [_Mean(**segment).clone() for segment in state["queue"]]
        self.limit, self._start, self.done = state["limit"], state["start"], bool(state["done"])

    def _means(self) -> list[_Mean]:
        return [m for m in (self._mean, self._segment, *self._queue) if m is not None]


def _whole(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    return value


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
    first: dict[str, Tensor] | None = None
    sums: dict[str, Tensor] = {}
    count = 0
    for count, state in enumerate(states, 1):
        if first is None:
            first = {name: value.detach() for name, value in state.items()}
            kinds = {name: torch.promote_types(v.dtype, widest(v.device)) for name, v in first.items()}
            sums = {name: v.to(kinds[name], copy=True) for name, v in first.items() if _averaged(v)}
            continue
        if why := difference(first, state):
            raise InputError(f"states 1 and {count} cannot be averaged: {why}.")
        for name, total in sums.items():
            total += state[name].to(total)
    if first is None:
        raise InputError("states is empty; it must contain at least one state dict.")
    return {
        name: (sums[name] / count).to(value.dtype) if name in sums else value.clone()
        for name, value in first.items()
    }


def difference(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """What keeps two state dicts from being averaged: the first tensor that differs; else nothing."""
    for name in dict.fromkeys([*first, *other]):
        if name not in first or name not in other:
            return f"only one of them has {name!r}"
        a, b = first[name], other[name]
        if a.shape != b.shape:
            return f"{name!r} has shapes {tuple(a.shape)} and {tuple(b.shape)}"
        if _averaged(a) != _averaged(b):
            return f"{name!r} has types {a.dtype} and {b.dtype}"
        if not _averaged(a) and a.numel() > 1 and not torch.equal(a, b.to(a)):
            return f"{name!r} holds whole numbers that differ"
    return ""


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
    if not (end.is_floating_point() or end.is_complex()):
        return end.clone()
    start, kind = start.to(end.device, _precision(end)), end.dtype
    end = end.to(_precision(end))
    # Where both are equal also infinities stay, such as those of a mask.
    return torch.where(start == end, end, torch.lerp(start, end, alpha)).to(kind)


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
