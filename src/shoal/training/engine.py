"""What an algorithm trains with: devices, precision, several processes and the optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from shoal.algorithms.base import Algorithm, Forward, Gradient, Log, Objective, Outputs, full_precision
from shoal.data.batch import MetaBatch
from shoal.errors import InputError, shown
from shoal.gradients import gradient
from shoal.models.calling import call
from shoal.tensors import like
from shoal.training.processes import Processes

if TYPE_CHECKING:
    from shoal.training.miro import Miro

NORM_EVERY = 10
"""Steps between two measurements of the gradient's norm, unless it is clipped or in a CUDA graph."""


class Engine:
    """Computes gradients and applies them, so that algorithms say *what* is applied and never how.

    Several ``processes`` have equal parts of every block. Gradients are averaged over them as lists of
    tensors; the model is not wrapped. ``accumulate`` is the number of pieces in which the gradient of a mean
    over examples is computed; ``auxiliary`` are the algorithm's own optimizers.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        optimizer: Optimizer,
        processes: Processes | None = None,
        *,
        precision: Literal["fp32", "bf16"] = "fp32",
        clip: float | None = None,
        accumulate: int = 1,
        auxiliary: Mapping[str, Optimizer] | None = None,
    ) -> None:
        self.algorithm, self.optimizer, self.auxiliary = algorithm, optimizer, dict(auxiliary or {})
        self.params: list[Tensor] = _parameters(optimizer)
        self.device = self.params[0].device
        self.processes = processes or Processes(self.device)
        self.alone = self.processes.count == 1
        self.clip, self.accumulate = clip, accumulate
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if precision == "bf16":
            # Weights change within a step, so their half-precision copies must not outlive their use.
            self.autocast = partial(torch.autocast, self.device.type, torch.bfloat16, cache_enabled=False)
        self.extra_loss: Miro | None = None
        """A term that is added to the loss of every forward pass that a gradient is taken of."""
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
            log["norm"] = torch.stack(self._norms).mean()
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
                algorithm.extractor.attach()  # until the training ends
                output = call(model, batch.x)
                features = algorithm.extractor.take()
        if features is not None:
            features = full_precision(features)
        return Outputs(full_precision(output), features, batch)

    def mean_gradient(
        self, batch: MetaBatch, objective: Objective | None = None, forward: Forward | None = None
    ) -> tuple[Gradient, Log]:
        if self.accumulate == 1 and self.alone:
            loss, log = self._loss(batch, objective or self._mean_loss, forward)
            return gradient(loss, self.params), log
        pieces, total, log = batch.pieces(self.accumulate), list[Tensor](), {}
        for piece, scale in zip(pieces, self._scales(batch, pieces), strict=True):
            part = len(piece) / len(batch)
            mean = objective or partial(self._mean_loss, scale=scale / part)
            loss, values = self._loss(piece, mean, forward)
            each = gradient(loss * part, self.params)
            total = list(torch._foreach_add(total, each)) if total else each
            log = {name: log.get(name, 0.0) + value * part for name, value in values.items()}
            del loss, each  # the graph, before the next one is made
        return self.processes.mean(total), log

    def gradient(self, batch: MetaBatch, objective: Objective) -> tuple[Gradient, Log]:
        if self.accumulate > 1:
            raise InputError(cannot_accumulate(self.algorithm, self.accumulate))
        loss, log = self._loss(batch, lambda out: objective(self.gather(out)))
        return self.processes.mean(gradient(loss, self.params)), log

    def _loss(
        self, batch: MetaBatch, objective: Objective, forward: Forward | None = None
    ) -> tuple[Tensor, Log]:
        """The objective, with the extra loss of the same forward pass, and its log."""
        with nullcontext() if self.extra_loss is None else self.extra_loss.collecting():
            out = (forward or self.forward)(batch)
        match objective(out):
            case (Tensor() as loss, dict() as log) if loss.numel() == 1:
                return (loss if self.extra_loss is None else loss + self.extra_loss.take()), log
            case other:
                got = shown(other)
                raise InputError(f"objective must return a pair, the loss, one number, and a log; got {got}.")

    def _mean_loss(self, out: Outputs, scale: Tensor | None = None) -> tuple[Tensor, Log]:
        """The mean over blocks of their mean losses, each times ``scale``."""
        if scale is None and len(out.batch.sizes) == 1:
            loss = self.algorithm.mean_loss(out)
            return loss, {"losses": loss.detach().reshape(1)}
        losses = self.algorithm.losses(out)
        return (losses if scale is None else losses * scale).mean(), {"losses": losses.detach()}

    def _scales(self, batch: MetaBatch, pieces: Sequence[MetaBatch]) -> list[Tensor]:
        """The weight of the mean loss of each block of each piece in that of the whole block."""
        terms = self.algorithm.terms
        if terms is None or (terms.plain and batch.weight is None):
            sizes = batch.y.new_tensor([piece.sizes for piece in pieces], dtype=self.params[0].dtype)
            return list(sizes / sizes.sum(0))
        # By what each mean is divided, such as a sum of sample weights.
        sums = [[terms.normalizer(b.y, b.weight) for b in piece.split()] for piece in pieces]
        normalizers = torch.stack([torch.stack(each) for each in sums])
        (mean,) = self.processes.mean([normalizers.sum(0)])
        return list(normalizers / mean)

    def gather(self, out: Outputs) -> Outputs:
        if self.alone:
            return out

        def whole(value: Any) -> Any:
            return _AllRows.apply(value, self.processes) if _has_rows(value) else value

        rows, batch = self.processes.rows, out.batch
        sizes = tuple(n * self.processes.count for n in batch.sizes)
        weight = None if batch.weight is None else rows(batch.weight)
        everything = MetaBatch(None, rows(batch.y), rows(batch.domain), sizes, weight)
        return Outputs(tree_map(whole, out.output), tree_map(whole, out.features), everything)

    def average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.processes.mean(tensors)

    def broadcast(self, tensor: Tensor) -> Tensor:
        return self.processes.broadcast(tensor)

    def average_buffers(self) -> None:
        """Replace floating-point buffers, such as BatchNorm's statistics, by their means over processes."""
        if not self.alone:
            buffers = [b for b in self.algorithm.model.buffers() if b.is_floating_point()]
            with torch.no_grad():
                for buffer, mean in zip(buffers, self.average(buffers), strict=True):
                    buffer.copy_(mean)

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


class _AllRows(torch.autograd.Function):
    """The rows of all processes. Gradients are means over processes afterwards, hence the factor."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        return processes.rows(part)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        return slopes[ctx.processes.index :: ctx.processes.count] * ctx.processes.count, None


def cannot_accumulate(algorithm: Algorithm, accumulate: int) -> str:
    """What to say where an objective cannot be computed piece by piece."""
    return (
        f"accumulate={accumulate} splits batches into pieces, which needs an objective that is a mean over "
        f"examples; that of {type(algorithm).__name__} is not. Use a smaller batch_size."
    )


def _check_log(algorithm: Algorithm, log: Any) -> None:
    losses = log.get("losses") if isinstance(log, dict) else None
    right = isinstance(losses, Tensor) and losses.ndim == 1 and len(losses) > 0
    if not right or not all(isinstance(value, Tensor) and value.ndim < 2 for value in log.values()):
        raise InputError(
            f"{type(algorithm).__name__} must log 'losses', a tensor with one number per domain, such as "
            f"{{'losses': self.losses(out).detach()}}, and otherwise single numbers; got {shown(log)}."
        )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _has_rows(value: Any) -> bool:
    """Whether it is a tensor with a row of floating-point numbers for each example."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.is_floating_point()


def _joined(parts: Sequence[Outputs], batch: MetaBatch) -> Outputs:
    """The outputs of single blocks as those of the meta-batch."""

    def join(*same: Any) -> Any:
        return torch.cat(same) if _has_rows(same[0]) else same[0]

    output = tree_map(join, *(part.output for part in parts))
    return Outputs(output, tree_map(join, *(part.features for part in parts)), batch)


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
