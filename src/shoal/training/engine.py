"""What an algorithm trains with: devices, precision, several processes and the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from shoal.algorithms.base import Algorithm, Forward, Gradient, Log, Objective, Outputs, full_precision
from shoal.data.batch import MetaBatch
from shoal.errors import InputError, shown
from shoal.gradients import gradient
from shoal.models.calling import call
from shoal.tensors import like
from shoal.training.processes import Processes

Precision = Literal["fp32", "bf16"]
NORM_EVERY = 10
"""Steps between two measurements of the gradient's norm, unless it is clipped or in a CUDA graph."""


class ExtraLoss(Protocol):
    """A term that is added to the loss of every forward pass that a gradient is taken of."""

    def collecting(self) -> AbstractContextManager[None]: ...
    def take(self) -> Tensor: ...


class Engine:
    """Computes gradients and applies them, so that algorithms say *what* is applied and never how.

    Each of several ``processes`` has the fraction ``share`` of every block. Gradients are averaged over
    processes as lists of tensors; the model is not wrapped.

    Args:
        algorithm: the algorithm, with its model and loss.
        optimizer: optimizer of the model.
        processes: the processes that train together.
        share: fraction of a block that this process has.
        precision: precision of forward passes.
        clip: maximum norm of a gradient.
        accumulate: number of pieces in which the gradient of a mean over examples is computed.
        auxiliary: the algorithm's own optimizers.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        optimizer: Optimizer,
        processes: Processes | None = None,
        *,
        share: float = 1.0,
        precision: Precision = "fp32",
        clip: float | None = None,
        accumulate: int = 1,
        auxiliary: Mapping[str, Optimizer] | None = None,
    ) -> None:
        self.algorithm, self.optimizer, self.auxiliary = algorithm, optimizer, dict(auxiliary or {})
        self.params: list[Tensor] = _parameters(optimizer)
        self.device = self.params[0].device
        self.processes = processes or Processes.alone(self.device)
        self.share, self.clip, self.accumulate = share, clip, accumulate
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if precision == "bf16":
            # Weights change within a step, so their half-precision copies must not outlive their use.
            self.autocast = partial(torch.autocast, self.device.type, torch.bfloat16, cache_enabled=False)
        self.extra_loss: ExtraLoss | None = None
        self.gradient_hooks: list[Callable[[Sequence[Any], Sequence[Tensor]], list[Tensor]]] = []
        self._norms: list[Tensor] = []
        self._measures = True
        for each in (optimizer, *self.auxiliary.values()):
            _use_fused(each)

    def step(self, batch: MetaBatch, step: int | Tensor) -> Log:
        """One step of the algorithm; its log, now and then with the mean ``norm`` of its gradients."""
        self._norms = []
        self._measures = isinstance(step, Tensor) or step % NORM_EVERY == 0
        log = self.algorithm.step(batch, self, step)
        _check_log(self.algorithm, log)
        if self._norms:
            log["norm"] = self._norms[0] if len(self._norms) == 1 else torch.stack(self._norms).mean()
        if self.processes.count > 1:
            self.average_buffers()
        return log

    def forward(self, batch: MetaBatch, part: nn.Module | None = None) -> Outputs:
        algorithm = self.algorithm
        if algorithm.per_domain and len(batch.sizes) > 1:
            return _joined([self.forward(block, part) for block in batch.split()], batch)
        model: Any = algorithm.model if part is None else part
        features = None
        with self.autocast():
            if part is not None or not algorithm.needs_features:
                output = call(model, batch.x)
            elif algorithm.extractor is None:
                features = model.features(batch.x)
                output = model.head(features)
            else:
                algorithm.extractor.attach()  # also before and after a training
                output = call(model, batch.x)
                features = algorithm.extractor.take()
        if features is not None:
            features = full_precision(features)
        return Outputs(full_precision(output), features, batch)

    def mean_gradient(
        self, batch: MetaBatch, objective: Objective | None = None, forward: Forward | None = None
    ) -> tuple[Gradient, Log]:
        if self.accumulate == 1 and self.processes.count == 1:
            loss, log, extra = self._loss(batch, objective or self._mean_loss, forward)
            return gradient(loss if extra is None else loss + extra, self.params), log
        pieces = batch.pieces(self.accumulate)
        total: Gradient = []
        log = {}
        for piece, scale in zip(pieces, self._scales(batch, pieces), strict=True):
            part = len(piece) / len(batch)  # of what this process has
            loss, values, extra = self._loss(
                piece, objective or partial(self._mean_loss, scale=scale), forward
            )
            if objective is not None:
                loss = loss * (part * self.share)
            if extra is not None:
                loss = loss + extra * (part * self.share)
            each = gradient(loss, self.params)
            total = list(torch._foreach_add(total, each)) if total else each
            log = {name: log.get(name, 0.0) + value * part for name, value in values.items()}
            del loss, each  # the graph, before the next one is made
        return self.processes.sum(total), log

    def gradient(self, batch: MetaBatch, objective: Objective) -> tuple[Gradient, Log]:
        if self.accumulate > 1:
            raise InputError(cannot_accumulate(self.algorithm, self.accumulate))
        if self.processes.count == 1:
            return self.mean_gradient(batch, objective)
        with nullcontext() if self.extra_loss is None else self.extra_loss.collecting():
            out = self.forward(batch)
        whole, inputs = self._gathered(out)
        loss, log = _checked_loss(objective(whole))
        slopes = gradient(loss, [*inputs, *self.params])
        rows = self._rows(batch)
        pairs = [(t, g[rows]) for t, g in zip(_floating(out), slopes, strict=False) if t.requires_grad]
        if self.extra_loss is not None:
            extra = self.extra_loss.take() * self.share
            pairs.append((extra, torch.ones_like(extra)))
        through, their_slopes = zip(*pairs, strict=True)
        own = torch.autograd.grad(through, self.params, their_slopes, allow_unused=True)
        # What the objective takes from parameters directly is the same in all processes.
        direct = [g / self.processes.count for g in slopes[len(inputs) :]]
        total = [d if g is None else d + g for d, g in zip(direct, own, strict=True)]
        return self.processes.sum(total), log

    def _loss(
        self, batch: MetaBatch, objective: Objective, forward: Forward | None
    ) -> tuple[Tensor, Log, Tensor | None]:
        """The objective, its log, and the extra loss of the same forward pass."""
        if self.extra_loss is None:
            out = (forward or self.forward)(batch)
            return *_checked_loss(objective(out)), None
        with self.extra_loss.collecting():
            out = (forward or self.forward)(batch)
        return *_checked_loss(objective(out)), self.extra_loss.take()

    def _mean_loss(self, out: Outputs, scale: Tensor | None = None) -> tuple[Tensor, Log]:
        """The mean over blocks of their mean losses, each times ``scale``."""
        if scale is None and len(out.batch.sizes) == 1:
            loss = self.algorithm.mean_loss(out)
            return loss, {"losses": loss.detach().reshape(1)}
        losses = self.algorithm.losses(out)
        return (losses if scale is None else losses * scale).mean(), {"losses": losses.detach()}

    def _scales(self, batch: MetaBatch, pieces: Sequence[MetaBatch]) -> list[Tensor]:
        """By what the mean loss of each block of each piece counts in that of the whole block."""
        terms = self.algorithm.terms
        if terms is None or (terms.plain and batch.weight is None):
            sizes = batch.y.new_tensor([piece.sizes for piece in pieces], dtype=self.params[0].dtype)
            return list(sizes / sizes.sum(0) * self.share)
        normalizers = torch.stack(
            [torch.stack([terms.normalizer(b.y, b.weight) for b in piece.split()]) for piece in pieces]
        )
        (whole,) = self.processes.sum([normalizers.sum(0)])
        return list(normalizers / whole)

    def gather(self, out: Outputs) -> Outputs:
        return out if self.processes.count == 1 else self._gathered(out)[0]

    def _gathered(self, out: Outputs) -> tuple[Outputs, list[Tensor]]:
        """The outputs of the whole meta-batch, and the tensors in them that have a gradient."""
        rows, batch = self._rows(out.batch), out.batch
        floating, weights = _floating(out), [] if batch.weight is None else [batch.weight]
        wholes = []
        for part in (*floating, batch.y, batch.domain, *weights):
            whole = part.new_zeros(round(len(part) / self.share), *part.shape[1:])
            whole[rows] = part.detach()
            wholes.append(whole)
        wholes = self.processes.sum(wholes)
        inputs = [t.requires_grad_() for t in wholes[: len(floating)]]
        y, domain, *weight = wholes[len(floating) :]
        sizes = tuple(round(n / self.share) for n in batch.sizes)
        output, features = _with_floating(out, inputs)
        return Outputs(output, features, MetaBatch(None, y, domain, sizes, *weight)), inputs

    def _rows(self, batch: MetaBatch) -> Tensor:
        """Where the examples of this process are in the whole meta-batch: every n-th of each block."""
        index, count = self.processes.index, self.processes.count
        rows, start = [], 0
        for size in batch.sizes:
            whole = round(size / self.share)
            rows.append(torch.arange(start + index, start + whole, count))
            start += whole
        return torch.cat(rows).to(batch.y.device)

    def average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self.processes.count == 1:
            return list(tensors)
        return self.processes.sum([t * self.share for t in tensors])

    def average_buffers(self) -> None:
        """Replace floating-point buffers, such as BatchNorm's statistics, by their means over processes."""
        buffers = [b for b in self.algorithm.model.buffers() if b.is_floating_point()]
        if buffers and self.processes.count > 1:
            with torch.no_grad():
                torch._foreach_copy_(buffers, self.average(buffers))

    def broadcast(self, tensor: Tensor) -> Tensor:
        if self.processes.count == 1:
            return tensor
        return self.processes.sum([tensor if self.processes.main else torch.zeros_like(tensor)])[0]

    def apply(self, gradient: Sequence[Tensor], auxiliary: str | None = None) -> None:
        optimizer = self.optimizer if auxiliary is None else self.auxiliary[auxiliary]
        params, gradients = self.params if auxiliary is None else _parameters(optimizer), list(gradient)
        if len(gradients) != len(params):
            raise InputError(
                f"there are {len(gradients)} gradients for {len(params)} parameters; the algorithm must give "
                "one for each of engine.params, in their order."
            )
        if auxiliary is None:
            for hook in self.gradient_hooks:
                gradients = hook(params, gradients)
            if self._measures or self.clip is not None:
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
                self._norms.append(norm)
                if self.clip is not None:
                    gradients = list(torch._foreach_mul(gradients, (self.clip / norm).clamp(max=1.0)))
        for p, g in zip(params, gradients, strict=True):
            p.grad = like(g, p) if g.ndim == 4 else g  # fused optimizers ask for the same layout
        optimizer.step()
        for p in params:
            p.grad = None


def cannot_accumulate(algorithm: Algorithm, accumulate: int) -> str:
    """What to say where an objective cannot be computed piece by piece."""
    return (
        f"accumulate={accumulate} splits batches into pieces, which needs an objective that is a mean over "
        f"examples; that of {type(algorithm).__name__} is not. Use a smaller batch_size."
    )


def _checked_loss(result: Any) -> tuple[Tensor, Log]:
    """What an objective returns, if it is what it must be."""
    if isinstance(result, tuple) and len(result) == 2:
        loss, log = result
        if isinstance(loss, Tensor) and loss.numel() == 1 and isinstance(log, dict):
            return loss, log
    raise InputError(
        "objective must return a pair: the loss as a tensor with one number, and the log as a dict of "
        f"tensors; got {shown(result)}."
    )


def _check_log(algorithm: Algorithm, log: Any) -> None:
    name = type(algorithm).__name__
    losses = log.get("losses") if isinstance(log, dict) else None
    if not isinstance(losses, Tensor) or losses.ndim != 1 or not len(losses):
        raise InputError(
            f"{name} must log 'losses', a tensor with one number per domain, such as "
            f"{{'losses': self.losses(out).detach()}}; got {shown(log)}."
        )
    for key, value in log.items():
        if not isinstance(value, Tensor) or value.ndim > 1:
            raise InputError(
                f"{name} logs {key!r}, which must be a tensor with one number; got {shown(value)}."
            )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _joined(parts: Sequence[Outputs], batch: MetaBatch) -> Outputs:
    """The outputs of single blocks as those of the meta-batch."""
    each = zip(*map(_floating, parts), strict=True)
    output, features = _with_floating(parts[0], [torch.cat(same) for same in each])
    return Outputs(output, features, batch)


def _has_rows(value: Any) -> bool:
    """Whether it is a tensor with a row of floating-point numbers for each example."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.is_floating_point()


def _floating(out: Outputs) -> list[Tensor]:
    return [t for t in tree_flatten((out.output, out.features))[0] if _has_rows(t)]


def _with_floating(out: Outputs, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    """The output and the features of ``out`` with these tensors in place of those of :func:`_floating`."""
    flat, shape = tree_flatten((out.output, out.features))
    rest = iter(tensors)
    output, features = tree_unflatten([next(rest) if _has_rows(t) else t for t in flat], shape)
    return output, features


def _use_fused(optimizer: Optimizer) -> None:
    """The fast implementation, where the user left it to torch; on CUDA one that a graph can contain."""
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    supported = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in params)
    supported = supported and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    undecided = all(g.get("fused") is None and g.get("foreach") is None for g in groups)
    for group in groups:
        if supported and undecided and not optimizer.state:
            group["fused"] = True
        if "capturable" in group and params[0].is_cuda and not optimizer.state:
            group["capturable"] = True
