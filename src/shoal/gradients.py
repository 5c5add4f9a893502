"""How well gradients agree, and how to make them agree better.

Gradients of S domains are S lists of tensors, one tensor a parameter. With g_i the gradient of domain i's
*mean* loss (a sum would scale the inner product with the square of the batch size),

    GIP  = 1/(S(S−1)) Σ_{i≠j} g_i·g_j                      the mean pairwise inner product
    cos  = 1/(S(S−1)) Σ_{i≠j} ĝ_i·ĝ_j,  ĝ = g/‖g‖          its normalised form, the mean pairwise cosine

both in time linear in S, from ‖Σ g_i‖² = Σ ‖g_i‖² + Σ_{i≠j} g_i·g_j.

Reference: Shi et al., Gradient Matching for Domain Generalization, 2021. Its printed factor 2/(S(S−1)) before
a sum over ordered pairs is twice the mean; the mean is what is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import InputError
from shoal.replay import leaves_no_trace, random_state
from shoal.settings import Range, checked, shown

Gradient = list[Tensor]
Method = Literal["exact", "finite-difference"]
Measure = Literal["gip", "variance"]


@checked
def gradient(loss: Tensor, params: Sequence[Tensor], *, create_graph: bool = False) -> Gradient:
    """The gradient of ``loss``, with zeros for parameters that it does not reach."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise InputError(f"loss must be one number that depends on parameters, got {shown(loss)}.")
    params = _parameters(params)
    grads = torch.autograd.grad(loss, params, create_graph=create_graph, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)]


def inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """a·b over all tensors, as one scalar."""
    _check_alike([a, b])
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


@checked
def gip(gradients: Sequence[Sequence[Tensor]], *, normalize: bool = False) -> Tensor:
    """The mean pairwise inner product of S ≥ 2 gradients; with ``normalize``, their mean cosine.

    A zero gradient has cosine 0 with every other.

    >>> gip([[torch.tensor([1.0, 0.0])], [torch.tensor([2.0, 2.0])]])
    tensor(2.)
    """
    count = _pairs(len(gradients))
    _check_alike(gradients)
    if normalize:
        gradients = [_divide(g, _norm(g)) for g in gradients]
    total = [torch.stack(tensors).sum(0) for tensors in zip(*gradients, strict=True)]
    squares = torch.stack([inner_product(g, g) for g in gradients]).sum()
    return (inner_product(total, total) - squares) / count


@checked
def gram_matrix(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """All inner products g_i·g_j, (S, S); one tensor of each gradient at a time is put side by side."""
    _check_alike(gradients)
    return torch.stack([_grams(same) for same in zip(*gradients, strict=True)]).sum(0)


@checked
def gram_matrices(gradients: Sequence[Sequence[Tensor]], groups: Sequence[str]) -> dict[str, Tensor]:
    """The same for each group of tensors: ``groups[p]`` names the one that tensor p belongs to.

    They add up to :func:`gram_matrix`.
    """
    _check_alike(gradients)
    if len(groups) != len(gradients[0]):
        raise InputError(f"groups names {len(groups)} tensors, and a gradient has {len(gradients[0])}.")
    found: dict[str, Tensor] = {}
    for group, same in zip(groups, zip(*gradients, strict=True), strict=True):
        part = _grams(same)
        found[group] = found[group] + part if group in found else part
    return found


def _grams(same: Sequence[Tensor]) -> Tensor:
    rows = torch.stack([g.reshape(-1) for g in same])
    return rows @ rows.T


@checked
def cosines(gram: Tensor) -> Tensor:
    """Inner products (…, S, S) as cosines; a zero gradient has cosine 0 with every other."""
    _check_square(gram)
    norm = gram.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    factor = torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1), 0)
    return gram * factor[..., :, None] * factor[..., None, :]


def cosine_matrix(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """The cosines between all S gradients, (S, S).

    >>> cosine_matrix([[torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 2.0])]])
    tensor([[1., 0.],
            [0., 1.]])
    """
    return cosines(gram_matrix(gradients))


@checked
def mean_of_pairs(matrix: Tensor) -> Tensor:
    """The mean over pairs i ≠ j of (…, S, S), as :func:`gip` from inner products or cosines."""
    count = _pairs(_check_square(matrix))
    return (matrix.sum((-2, -1)) - matrix.diagonal(dim1=-2, dim2=-1).sum(-1)) / count


@checked
def sign_agreement(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """|1/S Σ_i sign g_i|, a mean over parameters: 1 where all domains pull every one of them the same way.

    Parameters whose gradient is zero in all domains, such as embeddings of words that did not occur, do not
    count. For S random signs it is about √(2/(πS)), and 1/2 for S = 2: compare like with like.

    Reference: Parascandolo et al., Learning explanations that are hard to vary, 2021, whose AND-mask keeps
    the parameters where this is at least τ.
    """
    _pairs(len(gradients))
    _check_alike(gradients)
    total: list[Tensor] = []
    reached: list[Tensor] = []
    for same in zip(*gradients, strict=True):
        signs = torch.stack([g.sign() for g in same])
        total.append(signs.mean(0).abs().sum())
        reached.append((signs != 0).any(0).sum())
    return torch.stack(total).sum() / torch.stack(reached).sum().clamp(min=1)


class Matching(NamedTuple):
    """What one sweep over the domains yields: losses (S,), ḡ, the measure's value and its gradient."""

    losses: Tensor
    mean: Gradient
    value: Tensor
    slope: Gradient


Parts = Sequence[tuple[float, Callable[[], Tensor]]]
"""A domain's mean loss as a weighted sum, so that one part's graph is in memory at a time."""


@checked
def match(
    losses: Sequence[Callable[[], Tensor] | Parts],
    params: Sequence[Tensor],
    *,
    measure: Measure = "gip",
    normalize: bool = False,
    method: Method = "exact",
    softening: Annotated[float, Range(0)] = 0.0,
    radius: Annotated[float, Range(above=0)] | None = None,
    model: nn.Module | None = None,
    average: Callable[[Gradient], Gradient] | None = None,
) -> Matching:
    """Mean gradient, GIP and the gradient of the GIP of S domains, one domain's graph in memory at a time.

    ``losses[i]()`` computes domain i's mean loss at the current parameters; it is called twice. The gradient
    of the GIP is Σ_i H_i v_i, with H_i the Hessian of domain i's loss and v_i = ∂GIP/∂g_i:

        raw          v_i = 2/(S(S−1)) Σ_{j≠i} g_j
        normalised   v_i = 2/(S(S−1)) (I − u_i u_iᵀ)/n_i Σ_{j≠i} u_j,   u_i = g_i/n_i,  n_i = √(‖g_i‖² + δ²)

    ``measure="variance"`` takes the trace of the gradients' covariance in its place, 1/S Σ_i ‖g_i − ḡ‖², for
    which v_i = 2/S (g_i − ḡ).

    δ is ``softening``: with 0 the normalised form is the cosine itself, whose gradient grows without bound as
    ‖g_i‖ → 0. ``method="exact"`` takes one Hessian-vector product a domain; ``"finite-difference"`` takes
    (∇L_i(θ + r v_i/‖v_i‖) − g_i)·‖v_i‖/r with first-order gradients alone, keeps S gradients instead of a
    second-order graph, and moves and restores the parameters in place; r is ``radius`` (default: 0.03, or the
    square root of the precision times 1 + ‖θ‖ if that is more). With smooth activations the default is within
    a few per cent of exact, a smaller r proportionally nearer. Not so with ReLU, whose kinks the exact form
    does not see: each one crossed adds a jump divided by r, so that a tiny r yields noise.

    With ``model`` given, the second sweep sees the first one's dropout masks and leaves its buffers alone.
    A loss may come in :data:`Parts`. Where several processes hold a share of every domain's batch,
    ``average`` makes their gradients one, before anything non-linear is done with them.
    """
    count = _pairs(len(losses))
    params = _parameters(params)
    if measure == "variance" and normalize:
        raise InputError("the variance is of gradients as they are; leave normalize out.")
    # Either measure is c/2 (r ‖Σu‖² − Σ‖u‖²), so that v_i = c (r Σu − u_i) before any normalising.
    r, c = (1.0, 2.0 / count) if measure == "gip" else (1.0 / len(losses), -2.0 / len(losses))
    domains: list[Parts] = [[(1.0, loss)] if callable(loss) else loss for loss in losses]
    keep = method == "finite-difference" or average is not None or any(len(parts) > 1 for parts in domains)

    before = None if model is None else random_state(model)
    values, scales, kept = [], [], []
    mean = [torch.zeros_like(p) for p in params]
    total = mean if not normalize else [torch.zeros_like(p) for p in params]
    squares = torch.zeros((), dtype=params[0].dtype, device=params[0].device)
    for parts in domains:
        value, g = _first_order(parts, params)
        g = g if average is None else average(g)
        values.append(value)
        scale = (inner_product(g, g) + softening**2).sqrt() if normalize else torch.ones_like(squares)
        u = _divide(g, scale)
        squares += inner_product(u, u)
        torch._foreach_add_(mean, g)
        if normalize:
            torch._foreach_add_(total, u)
        scales.append(scale)
        if keep:
            kept.append(g)

    def direction(i: int, g: Sequence[Tensor]) -> Gradient:
        u = _divide(g, scales[i])
        v = [r * t - x for t, x in zip(total, u, strict=True)]
        if normalize:
            along = inner_product(u, v)
            v = _divide([a - x * along for a, x in zip(v, u, strict=True)], scales[i])
        torch._foreach_mul_(v, c)
        return v

    value = (r * inner_product(total, total) - squares) * (c / 2)
    slope = [torch.zeros_like(p) for p in params]
    with nullcontext() if model is None else leaves_no_trace(model, since=before):
        if method == "exact":
            for i, parts in enumerate(domains):
                for weight, loss in parts:
                    g = gradient(loss(), params, create_graph=True)
                    v = direction(i, kept[i] if keep else [x.detach() for x in g])
                    torch._foreach_add_(slope, _vector_product(g, v, params), alpha=weight)
                    del g  # holds the graph, which must not live beside the next one's
        else:
            _add_differences(slope, domains, params, kept, direction, radius)
    slope = slope if average is None else average(slope)
    if measure == "variance":
        value = value.clamp(min=0)  # rounding
    torch._foreach_div_(mean, float(len(losses)))
    return Matching(torch.stack(values), mean, value, slope)


def _parameters(params: Sequence[Tensor]) -> Sequence[Tensor]:
    right = isinstance(params, Sequence) and all(isinstance(p, Tensor) and p.requires_grad for p in params)
    if not params or not right:
        raise InputError(f"params must be a list of tensors that require gradients, got {shown(params)}.")
    return params


def _check_alike(gradients: Sequence[Sequence[Tensor]]) -> None:
    """Refuses what is not one or more lists of tensors with the same shapes."""
    lists = gradients and all(isinstance(g, Sequence) and g for g in gradients)
    if not lists or not all(isinstance(x, Tensor) for g in gradients for x in g):
        raise InputError(f"gradients must be lists of tensors, one per parameter, got {shown(gradients)}.")
    if len({tuple(x.shape for x in g) for g in gradients}) > 1:
        raise InputError("gradients must have the same number of tensors, with the same shapes.")


def _check_square(matrix: Tensor) -> int:
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.layout != torch.strided:
        raise InputError(f"a dense matrix (…, S, S) is needed, got {shown(matrix)}.")
    return matrix.shape[-1]


def _pairs(domains: int) -> int:
    if domains < 2:
        raise InputError(f"an inner product between domains needs at least 2 of them, got {domains}.")
    return domains * (domains - 1)


def _norm(g: Sequence[Tensor]) -> Tensor:
    """‖g‖; its derivative at 0 is 0, where that of the square root would be NaN."""
    square = inner_product(g, g)
    return torch.where(square > 0, torch.where(square > 0, square, 1).sqrt(), 0)


def _divide(g: Sequence[Tensor], by: Tensor) -> Gradient:
    """g/by, and zero where ``by`` is zero."""
    factor = torch.where(by > 0, 1 / torch.where(by > 0, by, 1), 0)
    return [x * factor for x in g]


def _first_order(parts: Parts, params: Sequence[Tensor]) -> tuple[Tensor, Gradient]:
    """A domain's loss and gradient; no graph outlives its part."""
    value, total = None, None
    for weight, loss in parts:
        part = loss()
        g = gradient(part, params)
        if value is None or total is None:
            value, total = part.detach() * weight, g
            if weight != 1:  # not in place: two parameters may share a gradient
                total = list(torch._foreach_mul(g, weight))
        else:
            value = value + part.detach() * weight
            torch._foreach_add_(total, g, alpha=weight)
        del part
    assert value is not None
    assert total is not None
    return value, total


def _add_differences(
    slope: Gradient,
    domains: Sequence[Parts],
    params: Sequence[Tensor],
    gradients: Sequence[Gradient],
    direction: Callable[[int, Gradient], Gradient],
    radius: float | None,
) -> None:
    """Adds Σ H_i v_i by forward differences of length ``radius``; the parameters end where they began."""
    length = _norm([p.detach() for p in params])
    rounding = (1 + length) * torch.finfo(params[0].dtype).eps ** 0.5
    r = rounding.clamp(min=0.03) if radius is None else radius
    for i, parts in enumerate(domains):
        v = direction(i, gradients[i])
        size = inner_product(v, v).sqrt()
        with moved(params, _divide(v, size), r):
            _, there = _first_order(parts, params)
        torch._foreach_add_(slope, [(a - b) * (size / r) for a, b in zip(there, gradients[i], strict=True)])


@contextmanager
def moved(params: Sequence[Tensor], direction: Sequence[Tensor], by: float | Tensor) -> Iterator[None]:
    """In this block the parameters are θ + by · direction; afterwards they are exactly what they were.

    A direction that is not finite, as of a gradient that overflowed in half precision, leads nowhere.
    """
    start = [p.detach().clone() for p in params]
    finite = torch.stack([x.isfinite().all() for x in direction]).all()
    there = [torch.where(finite, s + x * by, s) for s, x in zip(start, direction, strict=True)]
    try:
        with torch.no_grad():
            torch._foreach_copy_(list(params), there)
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(params), start)


@checked
def curvature(
    losses: Sequence[Callable[[], Tensor] | Parts], params: Sequence[Tensor], v: Sequence[Tensor]
) -> Gradient:
    """H v, with H the Hessian of the mean of these losses; one graph in memory at a time."""
    if len(v) != len(params):
        raise InputError(f"v must have one tensor per parameter, {len(params)}; got {len(v)}.")
    total = [torch.zeros_like(p) for p in params]
    for loss in losses:
        parts: Parts = [(1.0, loss)] if callable(loss) else loss
        for weight, part in parts:
            g = gradient(part(), params, create_graph=True)
            product = _vector_product(g, list(v), params)
            torch._foreach_add_(total, product, alpha=weight / len(losses))
            del g
    return total


def _vector_product(g: Gradient, v: Gradient, params: Sequence[Tensor]) -> Gradient:
    """∂(g·v)/∂params for a gradient taken with its graph: H v."""
    curved = [(x, w) for x, w in zip(g, v, strict=True) if x.requires_grad]
    if not curved:  # a loss linear in the parameters
        return [torch.zeros_like(p) for p in params]
    outputs, vectors = zip(*curved, strict=True)
    products = torch.autograd.grad(outputs, params, vectors, allow_unused=True)
    return [torch.zeros_like(p) if h is None else h for h, p in zip(products, params, strict=True)]
