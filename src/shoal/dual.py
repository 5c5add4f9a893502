"""Functions whose second derivatives torch takes slowly, or not at all, in forward mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Dual(TorchFunctionMode):
    """In this block, some functions are replaced for the sake of the derivative of their derivative.

    For batch normalisation torch has none of cuDNN's kernel, and takes some thirty elementwise operations for
    its own. Written as

        y = γ x̂ + β,   x̂ = s (x − mean x),   s = 1/√(var x + ε)

    its derivative along ẋ is γ s P ẋ with P z = z − mean z − x̂ mean(x̂ z), which is its own transpose, so that
    the kernel of the backward pass computes both. The others have none, or (``mse_loss``) one that fails.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = REPLACED.get(func, func)(*args, **kwargs or {})
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and each.requires_grad:
                tangent = forward_ad.unpack_dual(each).tangent
                if tangent is not None and tangent.requires_grad and not tangent._is_view():
                    tangent.detach_()  # nobody wants third derivatives, whose graph takes memory
        return result


def _mse_loss(input: Tensor, target: Tensor, *rest: Any, **options: Any) -> Tensor:
    if any(v is not None for v in rest) or any(v is not None for k, v in options.items() if k != "reduction"):
        return functional.mse_loss(input, target, *rest, **options)
    square = (input - target) ** 2
    reduction = options.get("reduction", "mean")
    return square if reduction == "none" else square.mean() if reduction == "mean" else square.sum()


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    dtype = input.dtype if running_mean is None else running_mean.dtype
    if weight is None:
        weight = torch.ones(input.shape[1], dtype=dtype, device=input.device)
    if bias is None:
        bias = torch.zeros_like(weight)
    y: Tensor = _Forward.apply(input, weight, bias, running_mean, running_var, momentum, eps)
    return y


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    rows = input.reshape(1, input.shape[0] * num_groups, -1)
    normed = _batch_norm(rows, None, None, training=True, eps=eps).reshape(input.shape)
    shape = [1, -1, *[1] * (input.ndim - 2)]
    normed = normed if weight is None else normed * weight.reshape(shape)
    return normed if bias is None else normed + bias.reshape(shape)


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    return functional.silu(input, inplace) if inplace else input * input.sigmoid()


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        y, mean, scale = torch.native_batch_norm(
            x, weight, bias, running_mean, running_var, True, momentum, eps
        )
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.save_for_forward(x, weight, mean, scale)
        return y

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dweight: Tensor, dbias: Tensor, *rest: Any) -> Tensor:
        x, weight, mean, scale = ctx.saved_tensors
        return _projected(dx, x, weight, mean, scale)[0] + _affine(x, dweight, dbias, mean, scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return *_Backward.apply(g, *ctx.saved_tensors), None, None, None, None


class _Backward(torch.autograd.Function):
    """∂L/∂x = γ s P g, ∂L/∂γ = Σ x̂ g and ∂L/∂β = Σ g."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> Any:
        gx, gweight, gbias = _projected(g, x, weight, mean, scale)
        ctx.save_for_forward(g, x, weight, mean, scale, gweight)
        return gx, gweight, gbias

    @staticmethod
    def jvp(ctx: Any, dg: Tensor, dx: Tensor, dweight: Tensor, *rest: Any) -> Any:
        g, x, weight, mean, scale, gweight = ctx.saved_tensors
        count = x.numel() // x.shape[1]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        dnormed, along, _ = _projected(dx, x, torch.ones_like(weight), mean, scale)  # of x̂, and Σ x̂ ẋ
        turned = (dnormed * g).sum([d for d in range(x.ndim) if d != 1], dtype=scale.dtype)
        # Of γ s P g, term by term: g, γ s, and in P once each x̂.
        first, dgweight, dgbias = _projected(dg, x, weight, mean, scale)
        second = _projected(g, x, dweight - weight * scale * along / count, mean, scale)[0]
        third = _affine(x, -weight * scale * turned / count, torch.zeros_like(weight), mean, scale)
        factor = (weight * scale * gweight / count).reshape(shape).to(x.dtype)
        return first + second + third - dnormed * factor, dgweight + turned, dgbias


def _projected(
    z: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """γ s P z, Σ x̂ z and Σ z."""
    return torch.ops.aten.native_batch_norm_backward(
        z, x, weight, None, None, mean, scale, True, 0.0, [True, True, True]
    )


def _affine(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """``weight`` x̂ + ``bias``."""
    return torch.native_batch_norm(x, weight, bias, mean, scale**-2, False, 0.0, 0.0)[0]


REPLACED = {
    functional.batch_norm: _batch_norm,
    functional.group_norm: _group_norm,
    functional.mse_loss: _mse_loss,
    functional.silu: _silu,
}
