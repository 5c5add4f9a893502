"""Averages of weights: along a training, for any algorithm, and over several models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import InputError
from shoal.models.calling import call
from shoal.tensors import widest
from shoal.training.evaluate import evaluating

Mean = dict[str, Any]
"""The mean (``tensors``) of weights from step ``first`` to ``last``, which counts as ``count`` of them."""


def make_average(name: str | None, steps: int) -> RunningMean | SWAD | None:
    """What the option ``average`` means in a training of so many steps.

    ``sma`` is the mean of the weights from a step on (Arpit et al., Ensemble of Averages, 2022).

    ``ema`` is m_1 = θ_1, then m_t = d_t m_{t−1} + (1 − d_t) θ_t with d_t = min(decay, (1 + t) / (10 + t)), so
    that the first steps, which are far from the last, are soon forgotten (Polyak & Juditsky, Acceleration of
    Stochastic Approximation by Averaging, 1992; the warm-up is that of TensorFlow's
    ``ExponentialMovingAverage``).

    ``online-sma`` is as in the released ERM++ (Teterwak et al., ERM++, 2025; its ``MovingAvg``): the weights
    of the first step count twice, and the averaged network tracks statistics of BatchNorm of its own.
    """
    kind, _, number = (name or "").partition(":")
    if kind == "swad":
        return SWAD(ratio=float(number or 1.3))
    if kind == "ema":
        decay = float(number or 0.999)
        return RunningMean(1, lambda step: 1 - min(decay, (1 + step) / (10 + step)))
    if kind == "online-sma":
        first = int(number or 100)
        return RunningMean(first, lambda step: 1 / (step - first + 2), online=True)
    if kind == "sma":
        start = int(number or max(1, steps // 10))
        if start > steps:
            raise InputError(f"starts at step {start:,}, after the last of {steps:,}.", "average")
        return RunningMean(start, lambda step: 1 / (step - start + 1))
    return None


class RunningMean:
    """m ← m + share(t) (θ_t − m) from step ``start`` on, in float32 if the weights have half precision.

    With ``online`` the averaged network passes every batch in training mode after the step, from the first
    one on, and has the statistics of BatchNorm that it finds so.
    """

    def __init__(self, start: int, share: Callable[[int], float], online: bool = False) -> None:
        self.start, self.share, self.online = start, share, online
        self.state: dict[str, Any] = {"mean": None, "buffers": None}

    @torch.no_grad()
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        """Takes note of the trained parameters after ``step``, which counts from 1."""
        if step >= self.start:
            self.state["mean"] = _with(self.state["mean"], params, step, self.share(step))

    def mean(self) -> Mean | None:
        """The mean so far; ``None`` where there is none yet."""
        found: Mean | None = self.state["mean"]
        return found

    @property
    def started(self) -> bool:
        return self.state["mean"] is not None

    @torch.no_grad()
    def track(self, model: nn.Module, params: Sequence[Tensor], x: Any) -> None:
        """Passes a batch through the averaged network, which is the model before the start."""
        buffers, mean = list(model.buffers()), self.mean()
        weights = mean["tensors"] if mean else [p.clone() for p in params]
        with applied([*params, *buffers], [*weights, *(self.state["buffers"] or buffers)]):
            call(model, x)
            self.state["buffers"] = [b.clone() for b in buffers]


class SWAD:
    """Dense averaging between an overfit-aware start and end (Cha et al., SWAD: Domain Generalization by
    Seeking Flat Minima, 2021), as in the authors' program (khanrc/swad, ``LossValley``).

    The steps from one evaluation to the next are a segment; ℓ_i is the validation loss at the end of segment
    i, the mean over domains. Averaging starts at the first segment s with ℓ_s = min(ℓ_s, …, ℓ_t),
    t = s + N_s − 1; a segment is over the limit if ℓ_i > ``ratio`` · mean(ℓ_s, …, ℓ_t); averaging, and the
    training, end when the last N_e segments all are. N_s is ``converge``, N_e > N_s is ``tolerate``.

    The result is the mean of segments' means, in which some segments count more than once. Let Q be the last
    N_e segments at any time. At t the first N_e − N_s + 1 segments of Q count, but for the first, or for all
    up to the one that follows the last over the limit; if that leaves none, segment s stands in until another
    counts. At each later evaluation at which Q does not begin before s, the first of Q counts. At the end,
    unless averaging has ended, those of Q after the first count, up to the last one within the limit. Without
    s the result is the last segment alone. A loss that is not finite is over any limit and left out of the
    mean loss (in the released program NaN counts as the lowest loss).
    """

    def __init__(self, converge: int = 3, tolerate: int = 6, ratio: float = 1.3) -> None:
        self.converge, self.tolerate, self.ratio = converge, tolerate, ratio
        # The segment now, Q, the limit (None before the start), segment s, and the mean of those that count.
        self.state: dict[str, Any] = {"segment": None, "queue": [], "limit": None, "start": None}
        self.state |= {"mean": None, "done": False}

    @property
    def done(self) -> bool:
        """Nothing will be added any more, so that the training may end."""
        return bool(self.state["done"])

    @property
    def started(self) -> bool:
        """Whether there is a segment s; if not, the mean is a substitute."""
        return self.state["limit"] is not None

    @torch.no_grad()
    def update(self, step: int, params: Sequence[Tensor]) -> None:
        segment = self.state["segment"]
        if not self.done:
            share = 1.0 if segment is None else 1 / (step - segment["first"] + 1)
            self.state["segment"] = _with(segment, params, step, share)

    @torch.no_grad()
    def evaluated(self, validation_loss: float | None) -> None:
        """Ends a segment; an evaluation without a step since the last one changes nothing."""
        state = self.state
        if validation_loss is None:
            raise InputError("SWAD requires the validation loss: provide validation data, or use SMA.")
        if (segment := state["segment"]) is None:
            return
        segment["loss"] = validation_loss if math.isfinite(validation_loss) else math.inf
        queue = [*state["queue"], segment][-self.tolerate :]
        state |= {"segment": None, "queue": queue}
        if not self.started:
            self._find_start(queue[-self.converge :])
        elif queue[0]["last"] >= state["start"]["last"]:
            if all(map(self._over, queue)):
                state |= {"queue": [], "done": True}
            else:
                state["mean"] = _merged([state["mean"], queue[0]])

    def _find_start(self, window: Sequence[Mean]) -> None:
        """Starts if the first of the last ``converge`` segments is the best of them."""
        state = self.state
        finite = [segment["loss"] for segment in window if math.isfinite(segment["loss"])]
        if len(window) < self.converge or window[0]["loss"] != min(finite, default=None):
            return
        state |= {"limit": self.ratio * (sum(finite) / len(finite)), "start": window[0]}
        before = state["queue"][: self.tolerate - self.converge + 1]
        over = [i for i, segment in enumerate(before) if self._over(segment)]
        state["mean"] = _merged(before[over[-1] + 2 if over else 1 :])

    def _over(self, segment: Mean) -> bool:
        return bool(segment["loss"] > self.state["limit"])

    @torch.no_grad()
    def mean(self) -> Mean | None:
        """The mean if the training ends now."""
        state = self.state
        if not self.started:
            return state["queue"][-1] if state["queue"] else None
        rest = state["queue"][1:]
        while rest and self._over(rest[-1]):
            rest = rest[:-1]
        return _merged([state["mean"], *rest]) or state["start"]


def _with(mean: Mean | None, params: Sequence[Tensor], step: int, share: float) -> Mean:
    """A mean that is moved, in place, by a share of the way to the weights after a step; or a new one."""
    dtypes = [p.dtype if p.dtype.itemsize >= 4 else torch.float32 for p in params]
    now = [p.detach().to(dtype, copy=True) for p, dtype in zip(params, dtypes, strict=True)]
    if mean is None:
        return {"tensors": now, "first": step, "last": step, "count": 1}
    torch._foreach_lerp_(mean["tensors"], now, share)
    return mean | {"last": step}


def _merged(means: Sequence[Mean | None]) -> Mean | None:
    """The mean of several, each by its count, in new tensors; ``None`` if there are none."""
    known = [mean for mean in means if mean is not None]
    if not known:
        return None
    tensors, count = [t.clone() for t in known[0]["tensors"]], known[0]["count"]
    for mean in known[1:]:
        count += mean["count"]
        torch._foreach_lerp_(tensors, mean["tensors"], mean["count"] / count)
    first, last = min(m["first"] for m in known), max(m["last"] for m in known)
    return {"tensors": tensors, "count": count, "first": first, "last": last}


@contextmanager
def applied(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Within the block the tensors hold ``values``, which may be of another type or on another device."""
    before = [t.detach().clone() for t in tensors]
    with torch.no_grad():
        torch._foreach_copy_(list(tensors), list(values))
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(tensors), before)


def batchnorm_in_training(model: nn.Module) -> list[_BatchNorm]:
    """The layers that :func:`refresh_batchnorm` concerns, with the modules' present modes."""
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    return [m for m in layers if m.training and m.track_running_stats and m.running_mean is not None]


@torch.no_grad()
def refresh_batchnorm(model: nn.Module, batches: Iterable[Any]) -> None:
    """Recomputes the running statistics of BatchNorm layers for the weights that the model holds now.

    They become the plain average over ``batches``, each an input ``x`` of ``model(x)``, as with torch's
    ``update_bn``; but only layers in training mode are concerned, frozen ones stay as they are, and
    everything else is in evaluation mode meanwhile.
    """
    momentum = {layer: layer.momentum for layer in batchnorm_in_training(model)}
    with evaluating(model):
        for layer in momentum:
            layer.training, layer.momentum = True, None  # the average over all batches
            layer.reset_running_stats()
        try:
            for x in batches if momentum else ():
                call(model, x)
        finally:
            for layer, value in momentum.items():
                layer.momentum = value


@torch.no_grad()
def average_weights(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Average the weights of several models, θ = (θ_1 + … + θ_n) / n.

    Sums are computed in float64; the result has the types of the first state, and its integers.

    >>> import torch
    >>> average_weights([{"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}])
    {'w': tensor([2.5000])}

    Args:
        states: state dicts, of which one is read at a time.

    Returns:
        State dict of the average.

    Reference: Wortsman et al., Model soups, ICML 2022; Ramé et al., Diverse Weight Averaging for
    Out-of-Distribution Generalization, NeurIPS 2022.
    """
    first: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    count = 0
    for count, state in enumerate(states, 1):
        first = first or dict(state)
        for name in {**first, **state}:
            a, b = first.get(name), state.get(name)
            if a is None or b is None or a.shape != b.shape or a.is_floating_point() != b.is_floating_point():
                raise InputError(f"states 1 and {count} cannot be averaged: {name!r} is not alike in both.")
            if a.is_floating_point():
                wide = b.to(a.device, widest(a.device))
                sums[name] = sums[name] + wide if name in sums else wide
    if not count:
        raise InputError("states is empty; it must contain at least one state dict.")
    return {n: (sums[n] / count).to(v.dtype) if n in sums else v.clone() for n, v in first.items()}


@torch.no_grad()
def interpolate(start: Mapping[str, Tensor], end: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """(1 − α) ``start`` + α ``end``, of two state dicts of the same model; integers are those of ``end``.

    The statistics of BatchNorm need :func:`refresh_batchnorm` afterwards. ::

        start = copy.deepcopy(model.state_dict())
        ...  # fine-tune the model
        model.load_state_dict(interpolate(start, model.state_dict(), 0.5))

    Reference: Wortsman et al., Robust fine-tuning of zero-shot models (WiSE-FT), 2022.
    """
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha must be a number from 0 to 1, got {alpha!r}.")
    if {k: v.shape for k, v in start.items()} != {k: v.shape for k, v in end.items()}:
        raise InputError("start and end are of different models: names or shapes differ.")
    if alpha in (0, 1):
        return {name: value.clone() for name, value in (end if alpha else start).items()}
    pairs = {name: (start[name].to(value.device), value) for name, value in end.items()}
    return {
        n: (1 - alpha) * a + alpha * b if b.is_floating_point() else b.clone() for n, (a, b) in pairs.items()
    }
