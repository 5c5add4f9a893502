"""The verbs an algorithm trains with: devices, precision, several processes and the optimizer step, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from shoal.algorithms.base import Algorithm, DomainOutput, Forward, Log, Loss, Objective
from shoal.data.batch import DomainBatch, pieces
from shoal.errors import InputError, shown
from shoal.gradients import gradient
from shoal.losses import find_terms
from shoal.optim import Walks, inner_of, step_unless
from shoal.replay import leaves_no_trace, random_state
from shoal.tensors import like
from shoal.training.miro import Miro
from shoal.training.processes import Processes

if TYPE_CHECKING:  # which imports the options, and these this module
    from shoal.training.fine_tuning import L2SP

Precision = Literal["fp32", "bf16", "fp16"]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class Engine:
    """Owns the optimizer step, so that algorithms say *what* is applied and never how.

    Each of several ``processes`` holds ``share`` of every batch, taken in ``accumulate`` pieces. With fp16
    losses are scaled. A step whose loss or gradient is not finite is never applied, and Fish drops the walk
    it belongs to; no other is applied after it.
    On CUDA this is decided on the device (an optimizer without a fused form waits for it). ``auxiliary`` are
    the algorithm's own optimizers (see :meth:`Algorithm.auxiliary_optimizers`). ``loss`` is the algorithm's:
    where its examples count differently (class weights, ``ignore_index``, sample weights), a piece of a batch
    is divided by what the whole batch is divided by, so that pieces add up to the loss of the whole. ``miro``
    is a penalty on the features of every forward pass that a gradient is taken of. The gradient of ``l2_sp``
    is added to all that is applied, in each of Fish's inner steps too, before clipping.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        processes: Processes | None = None,
        *,
        share: float = 1.0,
        precision: Precision = "fp32",
        clip: float | None = None,
        accumulate: int = 1,
        auxiliary: Mapping[str, Optimizer] | None = None,
        loss: Loss | None = None,
        miro: Miro | None = None,
        l2_sp: L2SP | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.miro, self.l2_sp = miro, l2_sp
        self.terms = None if loss is None else find_terms(loss)
        self.walk = optimizer if isinstance(optimizer, Walks) else None
        self.auxiliary = dict(auxiliary or {})
        self.params = _parameters(optimizer)
        self.device = self.params[0].device
        self.together = processes or Processes.alone(self.device)
        self.processes = self.together.count
        self.share = share
        self.clip = None if clip is None else float(clip)  # a tensor cannot be divided into 2**64
        self.accumulate = accumulate
        self.stopped = torch.zeros((), dtype=torch.bool, device=self.device)
        self.compute_in(precision)
        self.scale = LossScale(self.device) if precision == "fp16" else None
        # With a loss scale an infinite gradient is nothing unusual, and says nothing of the objective.
        self.watched = ("losses", "objective") if self.scale else ("losses", "norms")
        self._norms: list[Tensor] = []
        self._bad_loss: Tensor | None = None
        if self.device.type == "cuda":
            for each in (optimizer, *self.auxiliary.values()):
                _use_fused(each)

    def compute_in(self, precision: Precision) -> None:
        """Sets the precision of forward passes; fp16 needs the loss scale of an engine made for it."""
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if precision in HALF:
            # Weights change within a step, so their half-precision copies must not outlive their use.
            self.autocast = partial(torch.autocast, self.device.type, HALF[precision], cache_enabled=False)

    def begin(self) -> None:
        """Forgets what passes before this step have found."""
        self._norms, self._bad_loss = [], None

    def step(self, algorithm: Algorithm, batches: Sequence[DomainBatch]) -> Log:
        """One step of ``algorithm``; its log, with the ``norms`` of what was applied."""
        self.begin()
        log = _checked(algorithm, algorithm.step(batches, self))
        if self._norms:
            log["norms"] = torch.stack(self._norms)
        if self.scale is not None:
            bad = torch.zeros_like(self.stopped) if self._bad_loss is None else self._bad_loss
            log["objective"] = torch.where(bad, math.nan, 0.0)
        if self.processes > 1:
            floating = [b for b in self._buffers(algorithm) if b.is_floating_point()]
            for buffer, mean in zip(floating, self.average(floating), strict=True):
                buffer.copy_(mean)
        return log

    def _buffers(self, algorithm: Algorithm) -> list[Tensor]:
        """Those that a step may change: pretrained weights, which are kept to compare with, stay."""
        kept = {b for part in (self.miro, self.l2_sp) if part is not None for b in part.buffers()}
        return [b for b in algorithm.buffers() if b not in kept]

    def _anywhere(self, bad: Tensor) -> Tensor:
        """Whether it is so in any of the processes."""
        return bad if self.processes == 1 else self.together.sum([bad.float()])[0] > 0

    def forget(self) -> None:
        """Puts aside a step that was begun and never done."""
        self.begin()
        for optimizer in (self.optimizer, *self.auxiliary.values()):
            optimizer.zero_grad(set_to_none=True)
        if self.walk is not None:
            self.walk.restart()

    def parts(self, batches: Sequence[DomainBatch]) -> list[tuple[float, list[DomainBatch]]]:
        if self.accumulate == 1 and self.processes == 1:
            return [(1.0, list(batches))]
        cut = list(zip(*(pieces(batch, self.accumulate) for batch in batches), strict=True))
        sizes = [sum(len(b.y) for b in part) for part in cut]
        weights = [n / sum(sizes) for n in sizes]
        wholes = self._normalizers(batches)
        if wholes is None:
            return [(weight, list(part)) for weight, part in zip(weights, cut, strict=True)]
        return [
            (
                weight,
                [b._replace(normalizer=n * (weight * self.share)) for b, n in zip(part, wholes, strict=True)],
            )
            for weight, part in zip(weights, cut, strict=True)
        ]

    def _normalizers(self, batches: Sequence[DomainBatch]) -> Tensor | None:
        """What the loss of each whole batch is divided by, (S,); ``None`` where that is its size."""
        weighted = any(b.weight is not None for b in batches)
        if self.terms is None or (self.terms.plain and not weighted):
            return None
        wholes = torch.stack([self.terms.normalizer(b.y, b.weight) for b in batches])
        return self.together.sum([wholes])[0] if self.processes > 1 else wholes

    def gradients(
        self,
        algorithm: Algorithm,
        batches: Sequence[DomainBatch],
        *,
        objective: Objective | None = None,
        forward: Forward | None = None,
        additive: bool | None = None,
    ) -> tuple[list[Tensor], Log]:
        objective, forward = objective or algorithm.objective, forward or algorithm.forward_batches
        apart = algorithm.additive if additive is None else additive
        if apart or (self.processes == 1 and self.accumulate == 1):
            total, merged = self._sum_of_parts(objective, forward, batches)
        else:
            total, merged = self._of_the_whole(algorithm, objective, forward, batches)
        if self.scale is not None:
            total = list(torch._foreach_mul(total, 1 / self.scale.value))
        return total, merged

    def _collecting(self) -> AbstractContextManager[None]:
        """Forward passes in this block are compared with the pretrained model's, where that is asked for."""
        return nullcontext() if self.miro is None else self.miro.collecting()

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scale is None else loss * self.scale.value

    def _sum_of_parts(
        self, objective: Objective, forward: Forward, batches: Sequence[DomainBatch]
    ) -> tuple[list[Tensor], Log]:
        total: list[Tensor] = []
        merged: Log = {}
        for weight, part in self.parts(batches):
            with self._collecting():
                outputs = forward(part)
            loss, log = _valued(objective, outputs)
            if self.miro is not None:
                loss = loss + self.miro.take()
            self._bad_loss = _or(self._bad_loss, ~loss.detach().isfinite())
            found = gradient(self._scaled(loss), self.params)
            if not total:
                total, merged = found, log
                if weight != 1:  # not in place: two parameters may share a gradient
                    total = list(torch._foreach_mul(found, weight))
                    merged = {k: v * weight for k, v in log.items()}
            else:
                torch._foreach_add_(total, found, alpha=weight)
                merged = {k: merged[k] + v * weight for k, v in log.items()}
            del loss, found, outputs
        if self.processes > 1:
            assert self._bad_loss is not None
            *total, count = self.average([*total, self._bad_loss.to(total[0].dtype)])
            self._bad_loss = count > 0
        return total, merged

    def _of_the_whole(
        self, algorithm: Algorithm, objective: Objective, forward: Forward, batches: Sequence[DomainBatch]
    ) -> tuple[list[Tensor], Log]:
        """An objective of whole batches, of which this process has a share and sees a piece at a time.

        Outputs of all pieces are gathered from all processes; the objective's slope with respect to them goes
        back through the model piece by piece, in a second pass: only one piece's graph is in memory.
        """
        pieces = [part for _, part in self.parts(batches)]
        once = len(pieces) == 1
        before = random_state(algorithm.model)
        with self._collecting() if once else torch.no_grad():
            seen = [forward(piece) for piece in pieces]
        leaves, outputs = self._gathered(seen)
        loss, log = _valued(objective, outputs)
        self._bad_loss = _or(self._bad_loss, ~loss.detach().isfinite())
        slopes = gradient(self._scaled(loss), [*leaves, *self.params])
        # What the objective takes from parameters directly, all processes alike have found.
        total = [g / self.processes for g in slopes[len(leaves) :]]
        mine = [g[self._mine] for g in slopes[: len(leaves)]]
        at = [0] * len(leaves)
        with nullcontext() if once else leaves_no_trace(algorithm.model, since=before):
            for number, piece in enumerate(pieces):
                if not once:
                    with self._collecting():
                        again = forward(piece)
                tensors = _tensors(seen[number] if once else again)
                ends = [a + len(t) for a, t in zip(at, tensors, strict=True)]
                parts = [g[a:b] for g, a, b in zip(mine, at, ends, strict=True)]
                at = ends
                pairs = [(t, g) for t, g in zip(tensors, parts, strict=True) if t.requires_grad]
                if self.miro is not None:
                    share = sum(len(b.y) for b in piece) / sum(len(b.y) for p in pieces for b in p)
                    penalty = self._scaled(self.miro.take() * (share * self.share))
                    pairs.append((penalty, torch.ones_like(penalty)))
                found = torch.autograd.grad(
                    [t for t, _ in pairs], self.params, [g for _, g in pairs], allow_unused=True
                )
                total = [t if g is None else t + g for t, g in zip(total, found, strict=True)]
        if self.processes > 1:
            *total, count = self.together.sum([*total, self._bad_loss.to(total[0].dtype)])
            self._bad_loss = count > 0
        return total, log

    @property
    def _mine(self) -> slice:
        """The rows of a whole batch that this process has."""
        return slice(self.together.index, None, self.processes)

    def _gathered(self, seen: Sequence[Sequence[DomainOutput]]) -> tuple[list[Tensor], list[DomainOutput]]:
        """Outputs of whole batches from those of pieces, and the tensors in them that slopes are for."""
        joined = [torch.cat(same) for same in zip(*map(_tensors, seen), strict=True)]
        targets = [torch.cat([v.y for v in same]) for same in zip(*seen, strict=True)]
        if weighted := all(v.weight is not None for v in seen[0]):
            targets += [
                torch.cat([v.weight for v in same if v.weight is not None])
                for same in zip(*seen, strict=True)
            ]
        if self.processes > 1:
            wholes = []
            for part in (*joined, *targets):
                size = round(len(part) / self.share)
                whole = part.new_zeros(size, *part.shape[1:])
                whole[self._mine] = part.detach()
                wholes.append(whole)
            wholes = self.together.sum(wholes)
            joined, targets = wholes[: len(joined)], wholes[len(joined) :]
        leaves = [t.detach().requires_grad_() for t in joined]
        rest = iter(leaves)
        outputs = []
        weights: Sequence[Tensor | None] = targets[len(seen[0]) :] if weighted else [None] * len(seen[0])
        for each, y, weight in zip(seen[0], targets, weights, strict=False):
            flat, shape = tree_flatten((each.output, each.features))
            output, features = tree_unflatten([next(rest) if _spread(t) else t for t in flat], shape)
            outputs.append(DomainOutput(output, y, each.domain, features, weight))
        return leaves, outputs

    def average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.processes == 1:
            return list(tensors)
        return self.together.sum([t * self.share for t in tensors])

    def agree(self, tensor: Tensor) -> Tensor:
        if self.processes == 1:
            return tensor
        return self.together.sum([tensor if self.together.main else torch.zeros_like(tensor)])[0]

    @torch.no_grad()
    def apply(
        self,
        gradients: Sequence[Tensor],
        losses: Tensor | None = None,
        auxiliary: str | None = None,
        *,
        shift: Sequence[Tensor] | None = None,
    ) -> None:
        if auxiliary is not None:
            self._step_auxiliary(self.auxiliary[auxiliary], gradients)
            return
        if losses is not None and self._bad_loss is None:  # `gradients` has not looked at them
            self._bad_loss = self._anywhere(~losses.isfinite().all())
        found = list(gradients)
        if [g.shape for g in found] != [p.shape for p in self.params]:
            raise InputError(
                f"there are {len(found)} gradients for {len(self.params)} parameters, or they have other "
                "shapes; the algorithm must give one for each of engine.params, in their order."
            )
        if self.l2_sp is not None:
            found = self.l2_sp.added(self.params, found)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(found)))
        self._norms.append(norm)
        bad = ~norm.isfinite()
        # With a loss scale, a gradient that overflows costs its own step and no more.
        fatal = _or(self._bad_loss, torch.zeros_like(bad) if self.scale else bad)
        self.stopped |= fatal
        fatal = self.stopped.clone()
        bad = bad | fatal
        if self.clip is not None:
            found = list(torch._foreach_mul(found, (self.clip / norm).clamp(max=1.0)))
        for p, g in zip(self.params, found, strict=True):
            p.grad = like(g, p) if g.ndim == 4 else g  # fused optimizers ask for the same layout
        if shift is not None:
            for p, u in zip(self.params, shift, strict=True):
                p.add_(u * ~bad)
        if self.walk is not None:
            self.walk.spoil(fatal)
        step_unless(self.optimizer, bad)
        if self.scale is not None:
            overflow = ~norm.isfinite()
            self.scale.update(overflow if self._bad_loss is None else overflow & ~self._bad_loss)
        self.optimizer.zero_grad(set_to_none=True)

    def _step_auxiliary(self, optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
        """A step of an auxiliary optimizer; where its gradient is not finite, the model's loss soon tells."""
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
        for p, g in zip(_parameters(optimizer), gradients, strict=True):
            p.grad = g
        step_unless(optimizer, ~norm.isfinite() | self.stopped)
        optimizer.zero_grad(set_to_none=True)


class LossScale:
    """A power of two that losses are multiplied with: halved after an overflow, doubled after 2,000 steps."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), 2.0**16, device=device)
        self.steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, bad: Tensor) -> None:
        torch._amp_update_scale_(self.value, self.steps, bad.float(), 2.0, 0.5, 2000)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value.copy_(state["value"])
        self.steps.copy_(state["steps"])


def _valued(objective: Objective, outputs: Sequence[DomainOutput]) -> tuple[Tensor, Log]:
    """What an objective returns, if it is what it must be."""
    found: Any = objective(outputs)
    if isinstance(found, tuple) and len(found) == 2:
        loss, log = found
        if isinstance(loss, Tensor) and loss.numel() == 1 and isinstance(log, Mapping):
            return loss, dict(log)
    raise InputError(
        f"{getattr(objective, '__qualname__', 'the objective')} must return a pair: the loss as a tensor "
        f"with one number, and the log as a dict of tensors; got {shown(found)}."
    )


def _checked(algorithm: Algorithm, log: Any) -> Log:
    """The log of a step, if it is one."""
    name = type(algorithm).__name__
    losses = log.get("losses") if isinstance(log, Mapping) else None
    if not isinstance(losses, Tensor) or losses.ndim != 1 or not len(losses):
        raise InputError(
            f"{name} must log 'losses', a tensor with one number per batch, such as "
            f"{{'losses': self.losses(outputs).detach()}}; got {shown(log)}."
        )
    for key, value in log.items():
        if not isinstance(value, Tensor) or value.ndim > 1:
            raise InputError(
                f"{name} logs {key!r}, which must be a tensor with one number; got {shown(value)}."
            )
    return dict(log)


def check_precision(precision: str, algorithm: Algorithm) -> None:
    if precision == "fp16" and algorithm.second_order:
        raise InputError(
            f"precision='fp16' scales losses, which {type(algorithm).__name__}'s second derivatives do not "
            "survive; use 'bf16' or 'fp32'."
        )


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _spread(tensor: Any) -> bool:
    """Whether it has a row for each example and a slope."""
    return isinstance(tensor, Tensor) and tensor.ndim > 0 and tensor.is_floating_point()


def _tensors(outputs: Sequence[DomainOutput]) -> list[Tensor]:
    return [t for v in outputs for t in tree_flatten((v.output, v.features))[0] if _spread(t)]


def _or(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a | b


def _use_fused(optimizer: Optimizer) -> None:
    """Where the user left the implementation to torch, take the one that can skip a step on the device."""
    inner = inner_of(optimizer)
    groups = inner.param_groups
    undecided = all(g.get("fused") is None and g.get("foreach") is None for g in groups)
    if type(inner) in FUSED and undecided and not inner.state:
        for group in groups:
            group["fused"] = True
        inner._step_supports_amp_scaling = True  # type: ignore[attr-defined]
