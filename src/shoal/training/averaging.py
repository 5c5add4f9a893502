"""Averages of weights: along a training, for any algorithm, and over several models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import InputError
from shoal.models.calling import call
from shoal.tensors import map_nest, widest

Mean = dict[str, Any]
"""The mean (``tensors``) of weights from step ``first`` to ``last``, which counts as ``count`` of them."""


def _mean(step: int, params: Sequence[Tensor]) -> Mean:
    """The weights of one step; half-precision ones in float32."""
    tensors = [p.detach().to(_precision(p), copy=True) for p in params]
    return {"tensors": tensors, "first": step, "last": step, "count": 1}


def _merge(mean: Mean, other: Mean) -> None:
    """Adds ``other`` to ``mean`` in place; a mean that counts for nothing is replaced."""
    mean["first"] = min(mean["first"], other["first"]) if mean["count"] else other["first"]
    mean["last"] = max(mean["last"], other["last"]) if mean["count"] else other["last"]
    mean["count"] += other["count"]
    _lerp(mean["tensors"], other["tensors"], other["count"] / mean["count"])


def _lerp(tensors: list[Tensor], to: list[Tensor], share: float) -> None:
    if share == 1:
        _copy(tensors, to)
    elif tensors:  # foreach functions refuse empty lists
        torch._foreach_lerp_(tensors, to, share)


def _cloned(mean: Mean) -> Mean:
    return {**mean, "tensors": [t.clone() for t in mean["tensors"]]}


def _precision(p: Tensor) -> torch.dtype:
    return p.dtype if p.dtype.itemsize >= 4 else torch.float32


class SMA:
    """Mean of the weights from step ``start`` on (Arpit et al., Ensemble of Averages, 2022), in float32 if
    they have half precision. The other averages of a training derive from it.

    Args:
        start: first step.
    """

    running = True
    """Whether the mean so far is what is evaluated and selected along the way."""

    def __init__(self, start: int = 1) -> None:
        self.start = start
        self.state: Any = {"mean": None, "done": False}
        """Everything that changes, as tensors and plain data."""

    def begin(self, model: nn.Module) -> None:
        """Before the first step: an averaged network is the model."""

    @property
    def buffers(self) -> list[Tensor] | None:
        """The buffers of the averaged network in the order of the model's, if it has some of its own."""
        return None

    def track(self, model: nn.Module, params: Sequence[Tensor], x: Any) -> None:
        """Passes a batch through the averaged network; before the start it has the model's own weights."""

    @property
    def done(self) -> bool:
        """Nothing will be added any more, so that the training may end."""
        return bool(self.state["done"])

    @torch.no_grad()
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        """Takes note of the trained parameters after ``step``, which counts from 1."""
        if step >= self.start:
            self._add("mean", step, params)

    def _add(self, name: str, step: int, params: Sequence[Tensor]) -> None:
        now = _mean(step, params)
        if self.state[name] is None:
            self.state[name] = now
        else:
            _merge(self.state[name], now)

    def evaluated(self, step: int, validation_loss: float | None) -> None:
        """Takes note of an evaluation after ``step``, once ``update`` has seen the step."""

    @property
    def started(self) -> bool:
        """Whether the rule has found where to start; if not, :meth:`weights` is a substitute, or None."""
        return self.state["mean"] is not None

    def _parts(self) -> list[Mean]:
        """What :meth:`weights` is the mean of, if the training ends now."""
        return [] if self.state["mean"] is None else [self.state["mean"]]

    @torch.no_grad()
    def weights(self) -> list[Tensor] | None:
        """A copy of the mean so far, in the order of the parameters; None where there is none yet."""
        if not (parts := self._parts()):
            return None
        whole = _cloned(parts[0])
        for part in parts[1:]:
            _merge(whole, part)
        return list(whole["tensors"])

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last step in :meth:`weights`."""
        parts = self._parts()
        return (min(p["first"] for p in parts), max(p["last"] for p in parts)) if parts else None

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to resume; its tensors change with the next step."""
        return self.state

    def load_state_dict(self, state: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        """Resumes from a saved state; ``params`` are the trained parameters."""
        device = params[0].device if params else None
        self.state = map_nest(lambda v: v.to(device) if isinstance(v, Tensor) else v, state)


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
        now, mean = _mean(step, params), self.state["mean"]
        if mean is None:
            self.state["mean"] = now
        else:
            _lerp(mean["tensors"], now["tensors"], 1 - min(self.decay, (1 + step) / (10 + step)))
            mean["last"] = step


class OnlineSMA(SMA):
    """SMA as in the released ERM++ (Teterwak et al., ERM++, 2025; its ``MovingAvg``).

    The weights of step ``start`` count twice. The statistics of BatchNorm belong to the averaged network,
    which passes every batch in training mode after the step, from the first one on: see :meth:`track`.
    """

    def __init__(self, start: int = 100) -> None:
        super().__init__(start)
        self.state["buffers"] = None

    @property
    def buffers(self) -> list[Tensor] | None:
        return self.state["buffers"]

    def update(self, step: int, params: Sequence[Tensor]) -> None:
        first = not self.started
        super().update(step, params)
        if first and self.started:
            self.state["mean"]["count"] = 2

    def begin(self, model: nn.Module) -> None:
        self.state["buffers"] = [b.clone() for b in model.buffers()]

    @torch.no_grad()
    def track(self, model: nn.Module, params: Sequence[Tensor], x: Any) -> None:
        own, weights = list(model.buffers()), self.weights() or [p.detach().clone() for p in params]
        with applied([*params, *own], [*weights, *self.state["buffers"]]):
            call(model, x)
            self.state["buffers"] = [b.clone() for b in own]


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
        # The segment now, the last segments Q, the limit (None before the start) and the last step of s.
        self.state |= {"segment": None, "queue": [], "limit": None, "from": 0}

    @property
    def started(self) -> bool:
        return self.state["limit"] is not None

    @torch.no_grad()
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        if not self.done:
            self._add("segment", step, params)

    @torch.no_grad()
    def evaluated(self, step: int, validation_loss: float | None) -> None:
        """Ends a segment; an evaluation without a step since the last one changes nothing."""
        if validation_loss is None:
            raise InputError("SWAD requires the validation loss: provide validation data, or use SMA.")
        if (segment := self.state["segment"]) is None:
            return
        loss = validation_loss if math.isfinite(validation_loss) else math.inf
        segment |= {"loss": loss, "count": 1}  # however many steps it has
        queue = [*self.state["queue"], segment][-self.tolerate :]
        self.state |= {"segment": None, "queue": queue}
        if not self.started:
            self._find_start(queue[-self.converge :])
        elif queue[0]["last"] >= self.state["from"]:
            if self._over(queue):
                self.state |= {"queue": [], "done": True}
            else:
                _merge(self.state["mean"], queue[0])

    def _find_start(self, window: Sequence[Mean]) -> None:
        """Starts if the first of the last ``converge`` segments is the best of them."""
        finite = [segment["loss"] for segment in window if math.isfinite(segment["loss"])]
        if len(window) < self.converge or window[0]["loss"] != min(finite, default=None):
            return
        self.state |= {"limit": self.ratio * (sum(finite) / len(finite)), "from": window[0]["last"]}
        before = self.state["queue"][: self.tolerate - self.converge + 1]
        over = [i for i, segment in enumerate(before) if self._over([segment])]
        self.state["mean"] = {**_cloned(window[0]), "count": 0}
        for segment in before[over[-1] + 2 if over else 1 :]:
            _merge(self.state["mean"], segment)

    def _over(self, segments: Sequence[Mean]) -> bool:
        return bool(min(segment["loss"] for segment in segments) > self.state["limit"])

    def _parts(self) -> list[Mean]:
        mean, rest = self.state["mean"], self.state["queue"][1:]
        if not self.started:
            return list(self.state["queue"][-1:])
        while rest and self._over(rest[-1:]):
            rest = rest[:-1]
        return [*([] if mean["count"] == 0 and rest else [mean]), *rest]


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


@contextmanager
def applied(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Within the block the tensors hold ``values``, which may be of another type or on another device."""
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


def refresh_batchnorm(model: nn.Module, batches: Iterable[Any]) -> None:
    """Recomputes the running statistics of BatchNorm layers for the weights that the model holds now.

    They become the plain average over ``batches``, each an input ``x`` of ``model(x)``, as with torch's
    ``update_bn``; but only layers in training mode are concerned, frozen ones stay as they are, and
    everything else is in evaluation mode meanwhile.
    """
    layers = batchnorm_in_training(model)
    modes, momenta = [(m, m.training) for m in model.modules()], [layer.momentum for layer in layers]
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


def batchnorm_in_training(model: nn.Module) -> list[_BatchNorm]:
    """The layers that :func:`refresh_batchnorm` concerns, with the modules' present modes."""
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    return [m for m in layers if m.training and m.track_running_stats and m.running_mean is not None]


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
            sums = {
                n: v.to(torch.promote_types(v.dtype, widest(v.device)), copy=True)
                for n, v in first.items()
                if _floating(v)
            }
            continue
        for name in dict.fromkeys([*first, *state]):
            a, b = first.get(name), state.get(name)
            if a is None or b is None or a.shape != b.shape or not (_floating(a, b) or _equal(a, b)):
                raise InputError(
                    f"states 1 and {count} cannot be averaged: {name!r} is in one of them only, has another "
                    "shape, or holds other whole numbers."
                )
        for name, total in sums.items():
            total += state[name].to(total)
    if not count:
        raise InputError("states is empty; it must contain at least one state dict.")
    return {n: (sums[n] / count).to(v.dtype) if _floating(v) else v.clone() for n, v in first.items()}


def _floating(*values: Tensor) -> bool:
    return all(value.is_floating_point() or value.is_complex() for value in values)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether whole numbers are the same; counters need not be."""
    return not (_floating(a) or _floating(b)) and (a.numel() == 1 or torch.equal(a, b.to(a)))


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
    if not _floating(end):
        return end.clone()
    start, kind = start.to(end.device, _precision(end)), end.dtype
    end = end.to(_precision(end))
    # Where both are equal also infinities stay, such as those of a mask.
    return torch.where(start == end, end, torch.lerp(start, end, alpha)).to(kind)
