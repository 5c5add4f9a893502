"""Convolutions and normalisations whose second derivatives cost as little as their arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: True)
"""Those that are set. torch 2.6 cannot tell; its own functions are used there."""


class FastDoubleBackward(TorchFunctionMode):
    """In this block, some functions are replaced by ones that are differentiated twice at less cost.

    The values and the first derivatives are the same. For second derivatives torch computes a convolution's
    weight gradient as a convolution with a kernel as large as the image, and takes some thirty elementwise
    operations for a batch normalisation.

    Torch's own functions are left where hooks on saved tensors are set, as in ``torch.utils.checkpoint``: it
    calls the module again in the backward pass, outside of this block, and expects it to save the same.
    """

    graph_only: bool = False
    """Set it once first derivatives are known: those by convolutions' parameters are then zeros, with a graph
    to differentiate. Not by weights that are computed from parameters, as weight normalisation does: there
    second derivatives depend on the first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _saved_tensor_hooks(False):
            return func(*args, **kwargs or {})
        if func in CONVOLUTIONS:
            return CONVOLUTIONS[func](self, *args, **kwargs or {})
        return REPLACED.get(func, func)(*args, **kwargs or {})


def _convolution(plain: Callable[..., Tensor], dimensions: int) -> Callable[..., Tensor]:
    def several(value: int | Sequence[int]) -> list[int]:
        return [value] * dimensions if isinstance(value, int) else list(value)

    def convolution(
        mode: FastDoubleBackward,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        if isinstance(padding, str) or input.ndim != dimensions + 2:
            return plain(input, weight, bias, stride, padding, dilation, groups)
        leaves = weight.is_leaf and (bias is None or bias.is_leaf)
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        layout = (several(stride), several(padding), several(dilation), False, [0] * dimensions, groups)
        y: Tensor = _Convolution.apply(input, weight, bias, layout, mode if leaves else None)
        return y

    return convolution


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        layout: tuple[Any, ...],
        mode: FastDoubleBackward | None,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.layout, ctx.mode = layout, mode
        return aten.convolution(x, w, b, *layout)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        graph_only = ctx.mode is not None and ctx.mode.graph_only
        graph_only = graph_only and torch.is_grad_enabled()  # not where second derivatives get here
        rest = ctx.layout, list(ctx.needs_input_grad[:3]), graph_only
        return *_ConvolutionBackward.apply(g, *ctx.saved_tensors, *rest), None, None


class _ConvolutionBackward(Function):
    """The gradients by x, w and b of y = x * w + b, given that by y. Each is linear in two of x, w and g."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        x: Tensor,
        w: Tensor,
        layout: tuple[Any, ...],
        wanted: list[bool],
        graph_only: bool,
    ) -> Any:
        ctx.save_for_backward(g, x, w)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        if not graph_only:
            return aten.convolution_backward(g, x, w, w.shape[:1], *layout, wanted)
        by_x, _, _ = aten.convolution_backward(g, x, w, None, *layout, [wanted[0], False, False])
        zero = g.new_zeros(())
        return by_x, *(
            zero.expand(t) if y else None for t, y in zip((w.shape, w.shape[:1]), wanted[1:], strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_x: Tensor | None, by_w: Tensor | None, by_b: Tensor | None) -> Any:
        g, x, w = ctx.saved_tensors
        need_g, need_x, need_w = ctx.needs_input_grad[:3]
        parts, dx, dw = [], None, None
        if need_g and by_x is not None:
            parts.append(aten.convolution(by_x, w, None, *ctx.layout))
        if need_g and by_w is not None:
            parts.append(aten.convolution(x, by_w, by_b, *ctx.layout))
        elif need_g and by_b is not None:
            parts.append(by_b.reshape(-1, *[1] * (g.ndim - 2)).expand_as(g))
        if need_x and by_w is not None:
            dx = aten.convolution_backward(g, x, by_w, None, *ctx.layout, [True, False, False])[0]
        if need_w and by_x is not None:
            dw = aten.convolution_backward(g, by_x, w, None, *ctx.layout, [False, True, False])[1]
        dg = None if not parts else parts[0] if len(parts) == 1 else parts[0].add_(parts[1])
        return dg, dx, dw, None, None, None


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
    if training and input.numel() == input.shape[1]:  # torch's error: there is no variance of one value
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    dtype = input.dtype if running_mean is None else running_mean.dtype
    if weight is None:
        weight = torch.ones(input.shape[1], dtype=dtype, device=input.device)
    if bias is None:
        bias = torch.zeros_like(weight)
    y: Tensor = _BatchNorm.apply(input, weight, bias, running_mean, running_var, training, momentum, eps)
    return y


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    narrow = input.dtype if input.dtype in (torch.bfloat16, torch.float16) else None
    wide = input if narrow is None else input.float()  # as torch does inside
    if input.is_cuda and torch.is_autocast_enabled("cuda"):
        narrow = None  # there torch's results are wide, too
    rows = wide.reshape(1, input.shape[0] * num_groups, -1)
    if rows.shape[-1] == 1:  # allowed, unlike a batch normalisation of one value
        return functional.group_norm(input, num_groups, weight, bias, eps)
    normed = _batch_norm(rows, None, None, training=True, eps=eps).reshape(input.shape)
    shape = [1, -1, *[1] * (input.ndim - 2)]
    normed = normed if weight is None else normed * weight.reshape(shape)
    normed = normed if bias is None else normed + bias.reshape(shape)
    return normed if narrow is None else normed.to(narrow)


class _BatchNorm(Function):
    """y = γ x̂ + β with x̂ = s (x − m); in training m = mean x and s = 1/√(var x + ε)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        y, mean, scale = aten.native_batch_norm(
            x, weight, bias, running_mean, running_var, training, momentum, eps
        )
        if not training:
            assert running_mean is not None
            assert running_var is not None
            mean, scale = running_mean.clone(), (running_var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.training = training
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return *_BatchNormBackward.apply(g, *ctx.saved_tensors, ctx.training), *[None] * 5


class _BatchNormBackward(Function):
    """∂L/∂x = γ s P g, ∂L/∂γ = Σ x̂ g and ∂L/∂β = Σ g, given g = ∂L/∂y.

    In training P z = z − mean z − x̂ mean(x̂ z), otherwise P z = z.
    """

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, training: bool
    ) -> Any:
        gx, gweight, gbias = _sums(g, x, weight, mean, scale, training, True)
        ctx.save_for_backward(g, x, weight, mean, scale, gweight, gbias)
        ctx.training = training
        return gx, gweight, gbias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, c: Tensor, by_weight: Tensor, by_bias: Tensor) -> Any:
        """Of Φ = c·γ s P g + Σ_channels (by_weight Σ x̂ g + by_bias Σ g).

        With a = Σ x̂ g, A = Σ x̂ c, b = Σ g, B = Σ c and n the elements per channel, c·P g is
        q = c·g − bB/n − aA/n. All derivatives are combinations of g, c, x and constants, channel by channel.
        """
        g, x, weight, mean, s, a, b = ctx.saved_tensors
        shape, other = [1, -1, *[1] * (x.ndim - 2)], [d for d in range(x.ndim) if d != 1]
        q = (c * g).sum(other, dtype=s.dtype)

        def combined(*terms: tuple[Tensor, Tensor], normed: Tensor, constant: Tensor) -> Tensor:
            """Σ factor · tensor + normed · x̂ + constant."""
            every = [*terms, (x, normed * s)]
            result = (constant - normed * s * mean).to(x.dtype).reshape(shape)
            for place, (tensor, factor) in enumerate(every):
                factor = factor.to(x.dtype).reshape(shape)
                if place:
                    result.addcmul_(tensor, factor)
                else:
                    result = torch.addcmul(result, tensor, factor)
            return result

        if not ctx.training:
            dg = combined((c, weight * s), normed=by_weight, constant=by_bias)
            return dg, g * (s * by_weight).to(g.dtype).reshape(shape), s * q, None, None, None
        n = x.numel() // x.shape[1]
        _, A, B = _sums(c, x, weight, mean, s, True, False)
        q = q - (b * B + a * A) / n
        of_c = weight * s
        dg = combined((c, of_c), normed=by_weight - of_c * A / n, constant=by_bias - of_c * B / n)
        # Φ depends on x through x̂ in P, with h = ∂Φ/∂x̂ = from_g g + from_c c, and through the outer s.
        from_g, from_c = by_weight - of_c * A / n, -of_c * a / n
        dx = combined(
            (g, s * from_g),
            (c, s * from_c),
            normed=-s * (from_g * a + from_c * A + of_c * q) / n,
            constant=-s * (from_g * b + from_c * B) / n,
        )
        return dg, dx, s * q, None, None, None


def _sums(
    z: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, training: bool, projected: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """γ s P z (if ``projected``), Σ x̂ z and Σ z."""
    result: tuple[Tensor, Tensor, Tensor] = aten.native_batch_norm_backward(
        *(z, x, weight, mean, scale**-2, mean, scale, training, 0.0, [projected, True, True])
    )
    return result


CONVOLUTIONS: Mapping[Any, Callable[..., Tensor]] = {
    torch.conv1d: _convolution(torch.conv1d, 1),
    torch.conv2d: _convolution(torch.conv2d, 2),
    torch.conv3d: _convolution(torch.conv3d, 3),
}
REPLACED: Mapping[Any, Callable[..., Tensor]] = {
    functional.batch_norm: _batch_norm,
    functional.group_norm: _group_norm,
}
