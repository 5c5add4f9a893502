"""Compare and combine the gradients of several domains, in any training loop.

:func:`backward` and :func:`idgm_backward` replace ``loss.backward()``. The gradients of S domains are S lists
of tensors, with one tensor per parameter. Let g_i be the gradient of domain i's *mean* loss (with a sum, the
inner product would grow with the square of the batch size). Then

    GIP  = 1/(S(S−1)) Σ_{i≠j} g_i·g_j                      the mean pairwise inner product
    cos  = 1/(S(S−1)) Σ_{i≠j} ĝ_i·ĝ_j,  ĝ = g/‖g‖          its normalised form, the mean pairwise cosine

both computed in time linear in S, from ‖Σ g_i‖² = Σ ‖g_i‖² + Σ_{i≠j} g_i·g_j.

Reference: Shi et al., Gradient Matching for Domain Generalization, 2021, whose printed factor 2/(S(S−1))
before a sum over ordered pairs is twice the mean.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.errors import InputError, check_names, shown, unknown_name
from shoal.replay import preserve_state, random_state

Gradient = list[Tensor]
Gradients = Sequence[Sequence[Tensor]]
Measure = Literal["gip", "cosine", "variance"]
Method = Literal["exact", "finite-difference"]
Trainable = nn.Module | Iterable[Tensor]
Average = Callable[[Gradient], Gradient]
"""Averages a list of tensors over processes."""
Combine = Callable[[list[Gradient]], Sequence[Tensor]]
"""Combines the gradients of S domains into one."""


def gradient(loss: Tensor, params: Sequence[Tensor], *, create_graph: bool = False) -> Gradient:
    """Compute the gradient of ``loss`` for ``params``, with zeros for those that it does not depend on.

    With ``create_graph``, the graph of the gradient is kept, for second derivatives.
    """
    _check_loss(loss)
    grads = torch.autograd.grad(loss, list(params), allow_unused=True, create_graph=create_graph)
    return _dense(grads, params)


def inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Compute the inner product a·b of two lists of tensors with the same shapes, such as gradients."""
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


def gip(gradients: Gradients, *, normalize: bool = False) -> Tensor:
    """Compute the mean pairwise inner product of S ≥ 2 gradients, or their mean cosine (``normalize``).

    A gradient of length zero (below 3e-10 in float32, where derivatives overflow) has cosine 0 with others.

    >>> gip([[torch.tensor([1.0, 0.0])], [torch.tensor([2.0, 2.0])]])
    tensor(2.)
    """
    total = [same.sum(0) for same in _stacked(gradients)]
    squares = torch.stack([inner_product(g, g) for g in gradients])
    if normalize:
        long_enough = squares > torch.finfo(squares.dtype).tiny ** 0.5
        scales = torch.where(long_enough, torch.where(long_enough, squares, 1).rsqrt(), 0)
        total = [torch.tensordot(scales.to(same), same, 1) for same in _stacked(gradients)]
        squares = squares * scales.square()
    return (inner_product(total, total) - squares.sum()) / (len(gradients) * (len(gradients) - 1))


def gram_matrix(gradients: Gradients) -> Tensor:
    """Compute all inner products of gradients, (S, S); the extra memory is S times the largest tensor."""
    rows = (same.reshape(len(same), -1) for same in _stacked(gradients))
    return torch.stack([r @ r.T for r in rows]).sum(0)


def cosines(gram: Tensor) -> Tensor:
    """Convert inner products ``gram`` (…, S, S) to cosines; that of a zero gradient is 0."""
    norm = gram.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    factor = torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1), 0)
    return gram * factor[..., :, None] * factor[..., None, :]


def cosine_matrix(gradients: Gradients) -> Tensor:
    """Compute the cosine similarities between all S gradients, (S, S).

    >>> cosine_matrix([[torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 2.0])]])
    tensor([[1., 0.],
            [0., 1.]])
    """
    return cosines(gram_matrix(gradients))


def mean_of_pairs(matrix: Tensor) -> Tensor:
    """Compute the mean off-diagonal entry of ``matrix`` (…, S, S); of inner products, this is :func:`gip`."""
    count = matrix.shape[-1]
    pairs = matrix.sum((-2, -1)) - matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    return pairs / (count * (count - 1))


def sign_agreement(gradients: Gradients) -> Tensor:
    """Compute |1/S Σ_i sign g_i|, averaged over parameters: 1 if all gradients agree on every sign.

    Parameters whose gradient is zero in all domains are not counted. For random signs the expectation is
    about √(2/(πS)), and 1/2 for S = 2, so compare only values with the same S.

    Reference: Parascandolo et al., Learning Explanations that are Hard to Vary, ICLR 2021.
    """
    signs = [same.sign() for same in _stacked(gradients)]
    total = torch.stack([s.mean(0).abs().sum() for s in signs]).sum()
    return total / torch.stack([(s != 0).any(0).sum() for s in signs]).sum().clamp(min=1)


def _stacked(gradients: Gradients) -> Iterator[Tensor]:
    """For each parameter the gradients of all domains, (S, …)."""
    if len(gradients) < 2:
        raise InputError(f"gradients of at least 2 domains are compared, got {len(gradients)}.")
    return map(torch.stack, zip(*gradients, strict=True))


def _check_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise InputError(f"loss must be one number that depends on parameters, got {shown(loss)}.")


def _dense(grads: Sequence[Tensor | None], params: Sequence[Tensor]) -> Gradient:
    """With zeros for ``None``; sparse ones, as of ``nn.Embedding(…, sparse=True)``, as dense ones."""
    found = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)]
    return [g if g.layout == torch.strided else g.to_dense() for g in found]


# Rules that combine S gradients into one


def pcgrad(gradients: Gradients) -> Gradient:
    """Average the gradients after projecting each onto the normal plane of those it conflicts with.

    For each i, j runs over i+1, i+2, …, i−1 (cyclically). If the inner product with g_j is negative, the
    component along g_j is removed:

        g_i ← g_i − min(0, g_i·g_j)/‖g_j‖² g_j

    >>> pcgrad([[torch.tensor([1.0, 0.0])], [torch.tensor([-1.0, 1.0])]])
    [tensor([0.2500, 0.7500])]

    Reference: Yu et al., Gradient Surgery for Multi-Task Learning, NeurIPS 2020, which takes the sum, in
    random order, instead of the mean.
    """
    # A projected gradient is a combination of the original ones, so the Gram matrix is all one needs.
    gram = gram_matrix(gradients)
    count, squares = len(gram), gram.diagonal()
    mixture = torch.eye(count, dtype=gram.dtype, device=gram.device)
    rows = torch.arange(count, device=gram.device)
    for offset in range(1, count):
        other = (rows + offset) % count
        products = (mixture @ gram)[rows, other]
        conflict = (products < 0) & (squares[other] > 0)
        mixture[rows, other] -= torch.where(conflict, products / squares[other], 0)
    weights = mixture.mean(0)
    return [torch.tensordot(weights.to(same), same, 1) for same in _stacked(gradients)]


def and_mask(gradients: Gradients, tau: float = 1.0) -> Gradient:
    """Average the gradients and set components to zero where the S gradients disagree in sign.

    A component is kept where the absolute mean of its S signs is at least ``tau``: with 1 all signs must
    agree, with 0 everything is kept. Each tensor is then divided by the fraction of its components that is
    kept.

    >>> and_mask([[torch.tensor([1.0, 1.0])], [torch.tensor([3.0, -1.0])]])
    [tensor([4., 0.])]

    Reference: Parascandolo et al., Learning Explanations that are Hard to Vary, ICLR 2021.
    """
    if not 0 <= tau <= 1:
        raise InputError(f"must be from 0 to 1, got {tau}.", "tau")
    # Counted, because on CUDA the mean of 41 ones is below 1.
    return _masked(gradients, lambda each: each.sign().sum(0).abs() >= tau * len(each) - 1e-6)


def sand_mask(gradients: Gradients, tau: float = 0.5, k: float = 10.0) -> Gradient:
    """Average the gradients, multiplied by max(0, tanh(k/σ² (a − τ))) and divided by the mean of that mask.

    For each component, a is the absolute mean of the S signs and σ² the variance of the S gradients; ``tau``
    is the threshold τ and ``k`` the steepness. The result depends on the scale of the loss.

    >>> sand_mask([[torch.tensor([1.0, 1.0])], [torch.tensor([3.0, -1.0])]])
    [tensor([4., 0.])]

    Reference: Shahtalebi et al., SAND-mask: An Enhanced Gradient Masking Strategy for the Discovery of
    Invariances in Domain Generalization, 2021.
    """
    if not 0 <= tau < 1 or k <= 0:
        raise InputError(f"tau must be from 0 to below 1 and k above 0, got tau={tau}, k={k}.")

    def mask(each: Tensor) -> Tensor:
        agreement = each.sign().mean(0).abs()
        return torch.tanh(k * (agreement - tau) / each.var(0).clamp(min=1e-30)).clamp(min=0)

    return _masked(gradients, mask)


def _masked(gradients: Gradients, mask: Callable[[Tensor], Tensor]) -> Gradient:
    """The mean of each tensor, masked and divided by the mask's mean; zero where nothing is left."""
    pairs = [(each.mean(0), mask(each).to(each.dtype)) for each in _stacked(gradients)]
    return [mean * m / (m.mean() + 1e-10) for mean, m in pairs]


def agr_sum(gradients: Gradients) -> Gradient:
    """Average the gradients and set components to zero where the S gradients disagree in sign.

    >>> agr_sum([[torch.tensor([1.0, 1.0])], [torch.tensor([3.0, -1.0])]])
    [tensor([2., 0.])]

    Reference: Mansilla et al., Domain Generalization via Gradient Surgery, ICCV 2021 (which takes the sum).
    """
    return [g.mean(0) * (g.sign().sum(0).abs() == len(g)) for g in _stacked(gradients)]


def agr_rand(gradients: Gradients) -> Gradient:
    """Average the gradients and draw components from N(0, σ²) where the S gradients disagree in sign.

    σ is the mean absolute value of the components that are kept.

    Reference: Mansilla et al., Domain Generalization via Gradient Surgery, ICCV 2021 (which takes the sum).
    """
    agree = [g.sign().sum(0).abs() == len(g) for g in _stacked(gradients)]
    kept = agr_sum(gradients)
    count = torch.stack([a.sum() for a in agree]).sum().clamp_min(1)
    scale = torch.stack([k.abs().sum() for k in kept]).sum() / count
    return [torch.where(a, k, scale * torch.randn_like(k)) for a, k in zip(agree, kept, strict=True)]


RULES = {rule.__name__.replace("_", "-"): rule for rule in (pcgrad, and_mask, sand_mask, agr_sum, agr_rand)}


# Replacements of loss.backward() with first derivatives


def losses_by_domain(losses: Tensor, domain: Tensor) -> dict[int, Tensor]:
    """Compute the mean loss of each domain in a mixed batch, sorted by domain index.

    >>> losses_by_domain(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7, 4, 7]))
    {4: tensor(2.), 7: tensor(2.)}

    Args:
        losses: loss of each example, (B,).
        domain: domain index of each example, (B,).
    """
    if losses.ndim != 1 or domain.shape != losses.shape:
        shapes = f"{tuple(losses.shape)} and {tuple(domain.shape)}"
        raise InputError(f'losses and domain must be (B,), got {shapes}; reduction="none" gives losses.')
    return {int(d): losses[domain == d].mean() for d in domain.unique()}


def backward(
    losses: Mapping[Hashable, Tensor],
    params: Trainable,
    combine: str | Combine | nn.Module,
    *,
    average: Average | None = None,
) -> list[Gradient]:
    """Replace ``loss.backward()``: combine the gradients of the domains and add the result to ``.grad``.

    ::

        losses = {d: cross_entropy(model(x), y) for d, (x, y) in batches.items()}
        backward(losses, model, combine=pcgrad)  # or "and-mask", your own function, an aggregator of torchjd

    One forward pass of a mixed batch (:func:`losses_by_domain`) is slower than one per domain, because each
    of the S backward passes goes through the whole batch. With several processes, compute the losses with
    ``model.module`` and pass ``average``: DistributedDataParallel does not average these gradients.

    Args:
        losses: the mean loss of each domain, for at least two domains.
        params: a module or tensors; tensors that do not require a gradient are ignored.
        combine: a rule of this module or its name, or your own function of the list of gradients. A module,
            such as an aggregator of ``torchjd``, is called with the matrix (S, P) of all gradients and
            returns a vector (P,); ``"torchjd:UPGrad"`` is ``torchjd.aggregation.UPGrad()``.
        average: averages each domain's gradient, a list of tensors, over processes before ``combine``.

    Returns:
        The gradients of the domains, such as for :func:`cosine_matrix`.
    """
    trained, rule = _trained(params), _rule(combine)
    _check_domains(losses)
    each = [
        torch.autograd.grad(loss, trained, retain_graph=retain, allow_unused=True)
        for loss, retain in zip(losses.values(), _needed_later(list(losses.values())), strict=True)
    ]
    gradients = [(average or list)(_dense(found, trained)) for found in each]
    total = rule(gradients)
    if [g.shape for g in total] != [p.shape for p in trained]:
        raise InputError("combine must return a list with one tensor per parameter, each of its shape.")
    reached = [any(g is not None for g in same) for same in zip(*each, strict=True)]
    _add_to_grad((p, g) for p, g, r in zip(trained, total, reached, strict=True) if r)
    return gradients


def _rule(combine: str | Combine | nn.Module) -> Combine:
    if isinstance(combine, str):
        combine = RULES[combine] if combine in RULES else _aggregator(combine)
    if isinstance(combine, nn.Module):
        return lambda gradients: _split(combine(torch.stack([*map(_join, gradients)])), gradients[0])
    return combine


def _aggregator(name: str) -> nn.Module:
    package, _, which = name.partition(":")
    if package != "torchjd":
        raise unknown_name("rule", name, RULES, "combine")
    try:
        aggregation = importlib.import_module("torchjd.aggregation")
    except ImportError as error:
        raise InputError(f"{name} needs torchjd: pip install 'shoal[torchjd]'.", "combine") from error
    if not hasattr(aggregation, which):
        raise unknown_name("aggregator of torchjd", which, dir(aggregation), "combine")
    made: nn.Module = getattr(aggregation, which)()
    return made


def _trained(params: Trainable) -> list[Tensor]:
    """The tensors that require a gradient, each once."""
    if isinstance(params, nn.parallel.DistributedDataParallel):
        raise InputError(
            "must not be a DistributedDataParallel, which does not average these gradients: take losses and "
            "parameters from model.module, and pass average=…",
            "params",
        )
    every = list(params.parameters() if isinstance(params, nn.Module) else params)
    trained = [p for p in dict.fromkeys(every) if p.is_leaf and p.requires_grad]
    if not trained:
        raise InputError(
            f"must be a module or leaf tensors that require a gradient, got {shown(params)} (an iterator can "
            "be read only once).",
            "params",
        )
    return trained


def _check_domains(losses: Mapping[Hashable, Any]) -> None:
    if not isinstance(losses, Mapping) or len(losses) < 2:
        raise InputError(f"losses must map at least 2 domains to their losses, got {shown(losses)}.")


def _needed_later(losses: Sequence[Tensor]) -> list[bool]:
    """For each loss, whether a later one shares part of its graph; the graphs of others can be freed."""
    for loss in losses:
        _check_loss(loss)
    later: set[object] = set()
    shared = []
    for loss in reversed(losses):
        nodes, pending = set(), [loss.grad_fn]
        while pending:
            node = pending.pop()
            if node is not None and node.next_functions and node not in nodes:  # leaves have no next ones
                nodes.add(node)
                pending += [function for function, _ in node.next_functions]
        shared.append(bool(nodes & later))
        later |= nodes
    return shared[::-1]


@torch.no_grad()
def _add_to_grad(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """As ``Tensor.backward`` does. Copies, since gradients may share memory and ``.grad`` is written to."""
    for p, g in pairs:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad += g


# Second derivatives


class Matching(NamedTuple):
    """The result of :func:`match`: losses (S,), mean gradient, value of the measure and its slope."""

    losses: Tensor
    mean: Gradient
    value: Tensor
    slope: Gradient

    def gradient(self, weight: float | Tensor, trust: float | None = None) -> Gradient:
        """The gradient of the mean loss + ``weight`` times the measure.

        With ``trust``, the norm of the second term is limited to this multiple of the mean gradient's norm.
        """
        # Not by as_tensor: a CUDA graph cannot capture a copy to the device.
        weight = weight.to(self.value) if isinstance(weight, Tensor) else torch.full_like(self.value, weight)
        if trust is not None:
            slope, mean = (torch.linalg.vector_norm(_join(g)) for g in (self.slope, self.mean))
            limited = weight.sign() * torch.minimum(weight.abs(), trust * mean / slope)
            weight = torch.where(slope > 0, limited, weight)
        return list(torch._foreach_add(self.mean, torch._foreach_mul(self.slope, weight)))


def match(
    losses: Collection[Callable[[], Tensor]],
    params: Sequence[Tensor],
    *,
    measure: Measure = "gip",
    method: Method = "exact",
    radius: float | None = None,
    model: nn.Module | None = None,
    average: Average | None = None,
) -> Matching:
    """Compute the mean gradient, a measure of how well the gradients match, and the measure's gradient.

    The latter is Σ_i H_i v_i, with H_i the Hessian of the loss of domain i and v_i = ∂measure/∂g_i:

        gip        v_i = 2/(S(S−1)) Σ_{j≠i} g_j
        cosine     v_i = 2/(S(S−1)) (I − ĝ_i ĝ_iᵀ)/‖g_i‖ Σ_{j≠i} ĝ_j       grows without bound as ‖g_i‖ → 0
        variance   v_i = 2/S (g_i − ḡ)                                      of 1/S Σ_i ‖g_i − ḡ‖²

    The exact method keeps the graphs of all domains in memory. Finite differences,
    (∇L_i(θ + r v_i/‖v_i‖) − g_i)·‖v_i‖/r, keep one. With smooth activations they are within a few per cent of
    exact; with ReLU, whose kinks the exact form ignores, each kink crossed adds a jump divided by r.

    Args:
        losses: functions that compute the mean loss of each domain with the current parameters.
        params: parameters to differentiate with respect to.
        measure: ``"gip"``, ``"cosine"`` or ``"variance"``.
        method: ``"exact"`` or ``"finite-difference"``.
        radius: r (default: 0.03, or the square root of the machine epsilon times 1 + ‖θ‖ if that is larger).
        model: module whose second pass (by finite differences) uses the dropout masks of the first and does
            not update buffers.
        average: averages a gradient over processes which hold parts of the batch of each domain.
    """
    if len(losses) < 2 or not all(map(callable, losses)):
        raise InputError(f"losses must be functions, of at least 2 domains, got {shown(losses)}.")
    check_names("measure", [measure], get_args(Measure))
    check_names("method", [method], get_args(Method))
    exact, params, mean_of = method == "exact", list(params), average or list
    state = None if exact or model is None else random_state(model)
    values, graphs, rows = [], [], []
    with sdpa_kernel(SDPBackend.MATH) if exact else nullcontext():  # other attention has one derivative only
        for loss in losses:
            value = loss()
            g = gradient(value, params, create_graph=exact)
            values.append(value.detach())
            rows.append(_join(mean_of([t.detach() for t in g])).requires_grad_())
            graphs.append(g if exact else [])
            del value, g
        with torch.enable_grad():
            mean = torch.stack(rows).mean(0)
            if measure == "variance":
                measured = torch.stack([(row - mean).square().sum() for row in rows]).mean()
            else:
                measured = gip([[row] for row in rows], normalize=measure == "cosine")
            directions = list(torch.autograd.grad(measured, rows))
        slope = torch.zeros_like(rows[0], requires_grad=False)
        while exact and graphs:
            slope += _join(_directional(graphs.pop(), params, _split(directions.pop(), params)))
    if not exact:
        length = torch.linalg.vector_norm(_join(params).detach())
        rounding = (1 + length) * torch.finfo(length.dtype).eps ** 0.5
        r = rounding.clamp(min=0.03) if radius is None else radius
        with nullcontext() if model is None else preserve_state(model, since=state):
            for loss, row, v in zip(losses, rows, directions, strict=True):
                size = torch.linalg.vector_norm(v)
                with moved(params, _split(v / torch.where(size > 0, size, 1), params), r):
                    slope += (_join(gradient(loss(), params)) - row.detach()) * (size / r)
    found = mean_of(_split(slope, params))
    return Matching(torch.stack(values), _split(mean.detach(), params), measured.detach(), found)


def idgm_backward(
    losses: Mapping[Hashable, Callable[[], Tensor]],
    params: Trainable,
    *,
    gamma: float = 1.0,
    normalize: bool = True,
    trust: float | None = 0.9,
    method: Method = "exact",
    model: nn.Module | None = None,
    average: Average | None = None,
) -> Matching:
    """Replace ``loss.backward()``: add the gradient of the objective of IDGM to ``.grad``.

        1/S Σ_i L_i − γ/(S(S−1)) Σ_{i≠j} g_i·g_j    (with ``normalize``, cosines instead of inner products)

    ::

        losses = {d: lambda x=x, y=y: cross_entropy(model(x), y) for d, (x, y) in batches.items()}
        idgm_backward(losses, model, gamma=0.5)

    Args:
        losses: for each domain, a function that computes its mean loss with the current parameters.
        params: a module or tensors.
        gamma: γ.
        normalize: match cosines instead of inner products, as the paper does in its experiments.
        trust: the largest norm of the matching term's gradient, relative to that of the mean gradient. Below
            1, every step descends on the mean loss; ``None`` sets no limit, as in the paper.
        method, average: as in :func:`match`.
        model: as in :func:`match`; by default ``params``, if that is a module.

    Reference: Shi et al., Gradient Matching for Domain Generalization, 2021. The trust ratio is ours.
    """
    _check_domains(losses)
    trained = _trained(params)
    measure: Measure = "cosine" if normalize else "gip"
    model = params if model is None and isinstance(params, nn.Module) else model
    found = match(losses.values(), trained, measure=measure, method=method, model=model, average=average)
    _add_to_grad(zip(trained, found.gradient(-gamma, trust), strict=True))
    return found


def curvature(
    losses: Sequence[Callable[[], Tensor]], params: Sequence[Tensor], v: Sequence[Tensor]
) -> Gradient:
    """Compute H v, with H the Hessian of the mean of ``losses`` for ``params``; one graph at a time."""
    total = [torch.zeros_like(p) for p in params]
    for loss in losses:
        with sdpa_kernel(SDPBackend.MATH):
            product = _directional(gradient(loss(), params, create_graph=True), params, v)
        torch._foreach_add_(total, product, alpha=1 / len(losses))
    return total


@contextmanager
def moved(params: Sequence[Tensor], direction: Sequence[Tensor], by: float | Tensor) -> Iterator[None]:
    """Within the block, ``params`` θ are θ + ``by`` · ``direction``; they are restored exactly afterwards."""
    start = [p.detach().clone() for p in params]
    try:
        with torch.no_grad():
            torch._foreach_add_(list(params), torch._foreach_mul(list(direction), by))
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(params), start)


def _directional(g: Gradient, params: Sequence[Tensor], v: Sequence[Tensor]) -> Gradient:
    """∂(g·v)/∂θ, through the graph of the gradient."""
    pairs = [(x, w) for x, w in zip(g, v, strict=True) if x.requires_grad]
    if not pairs:  # a loss that is linear in the parameters
        return [torch.zeros_like(p) for p in params]
    outputs, vectors = zip(*pairs, strict=True)
    return _dense(torch.autograd.grad(outputs, list(params), vectors, allow_unused=True), params)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _split(vector: Tensor, params: Sequence[Tensor]) -> Gradient:
    parts = vector.split([p.numel() for p in params])
    return [part.view(p.shape).to(p.dtype) for part, p in zip(parts, params, strict=True)]
