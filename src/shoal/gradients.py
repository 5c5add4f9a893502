"""Compare and combine the gradients of several domains, in any training loop.

In your loop, replace ``loss.backward()`` by::

    losses = losses_by_domain(cross_entropy(model(x), y, reduction="none"), domain)  # or any {domain: loss}
    backward(losses, model, combine=pcgrad)  # or and_mask, sand_mask, partial(and_mask, tau=0.8), your own

For the methods that need second derivatives, pass functions that compute the losses::

    losses = {d: lambda x=x, y=y: cross_entropy(model(x), y) for d, (x, y) in batches.items()}
    idgm_backward(losses, model, gamma=1.0)  # or iga_backward

The gradients of S domains are S lists of tensors, with one tensor per parameter. Let g_i be the gradient of
domain i's *mean* loss (with a sum, the inner product would grow with the square of the batch size). Then

    GIP  = 1/(S(S−1)) Σ_{i≠j} g_i·g_j                      the mean pairwise inner product
    cos  = 1/(S(S−1)) Σ_{i≠j} ĝ_i·ĝ_j,  ĝ = g/‖g‖          its normalised form, the mean pairwise cosine

both computed in time linear in S, from ‖Σ g_i‖² = Σ ‖g_i‖² + Σ_{i≠j} g_i·g_j.

Reference: Shi et al., Gradient Matching for Domain Generalization, 2021. The paper prints a factor 2/(S(S−1))
before a sum over ordered pairs, which is twice the mean; this module computes the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from shoal.double_backward import FastDoubleBackward
from shoal.errors import InputError
from shoal.replay import leaves_no_trace, random_state
from shoal.settings import Range, checked, shown

Gradient = list[Tensor]
Method = Literal["exact", "finite-difference"]
Measure = Literal["gip", "variance"]


@checked
def gradient(
    loss: Tensor, params: Sequence[Tensor], *, create_graph: bool = False, retain_graph: bool | None = None
) -> Gradient:
    """Compute the gradient of ``loss``, with zeros for parameters that it does not depend on.

    Args:
        loss: tensor with one number.
        params: parameters to differentiate with respect to.
        create_graph: keep the graph of the gradient, for second derivatives.
        retain_graph: keep the graph of the loss (default: as ``create_graph``).

    Returns:
        One tensor per parameter.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise InputError(f"loss must be one number that depends on parameters, got {shown(loss)}.")
    params = _parameters(params)
    grads = torch.autograd.grad(
        loss, params, create_graph=create_graph, retain_graph=retain_graph, allow_unused=True
    )
    return [_dense(g, p) for g, p in zip(grads, params, strict=True)]


def _dense(g: Tensor | None, p: Tensor) -> Tensor:
    """Zeros for none, and the whole of a sparse one, as an nn.Embedding(…, sparse=True) has."""
    return torch.zeros_like(p) if g is None else g if g.layout == torch.strided else g.to_dense()


def inner_product(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Compute the inner product a·b over all tensors.

    Args:
        a: list of tensors, such as a gradient.
        b: list of tensors with the same shapes.

    Returns:
        Tensor with one number.
    """
    _check_alike([a, b])
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


@checked
def gip(gradients: Sequence[Sequence[Tensor]], *, normalize: bool = False) -> Tensor:
    """Compute the mean pairwise inner product of S ≥ 2 gradients.

    >>> gip([[torch.tensor([1.0, 0.0])], [torch.tensor([2.0, 2.0])]])
    tensor(2.)

    Args:
        gradients: gradients of the domains, each a list with one tensor per parameter.
        normalize: compute the mean cosine similarity instead; a zero gradient has cosine 0 with every other.

    Returns:
        Tensor with one number.
    """
    count = _pairs(len(gradients))
    _check_alike(gradients)
    if normalize:
        gradients = [
            [_over(x, norm) for x in g] for g, norm in zip(gradients, map(_norm, gradients), strict=True)
        ]
    total = [torch.stack(tensors).sum(0) for tensors in zip(*gradients, strict=True)]
    squares = torch.stack([inner_product(g, g) for g in gradients]).sum()
    return (inner_product(total, total) - squares) / count


@checked
def gram_matrix(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """Compute all inner products g_i·g_j of S gradients.

    The extra memory is S times the size of the largest tensor.

    Args:
        gradients: gradients of the domains, each a list with one tensor per parameter.

    Returns:
        Tensor (S, S).
    """
    _check_alike(gradients)
    return torch.stack([_grams(same) for same in zip(*gradients, strict=True)]).sum(0)


@checked
def gram_matrices(gradients: Sequence[Sequence[Tensor]], groups: Sequence[str]) -> dict[str, Tensor]:
    """Compute the inner products of each group of tensors.

    The sum of these matrices is :func:`gram_matrix`.

    Args:
        gradients: gradients of the domains, each a list with one tensor per parameter.
        groups: name of the group of each tensor, such as its layer.

    Returns:
        Tensor (S, S) for each group.
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
    """Convert inner products to cosine similarities; a zero gradient has cosine 0 with every other.

    Args:
        gram: inner products (…, S, S), as from :func:`gram_matrix`.

    Returns:
        Tensor (…, S, S).
    """
    _check_square(gram)
    norm = gram.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    factor = torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1), 0)
    return gram * factor[..., :, None] * factor[..., None, :]


def cosine_matrix(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """Compute the cosine similarities between all S gradients.

    >>> cosine_matrix([[torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 2.0])]])
    tensor([[1., 0.],
            [0., 1.]])

    Args:
        gradients: gradients of the domains, each a list with one tensor per parameter.

    Returns:
        Tensor (S, S).
    """
    return cosines(gram_matrix(gradients))


@checked
def mean_of_pairs(matrix: Tensor) -> Tensor:
    """Compute the mean of the off-diagonal entries; of inner products, this is :func:`gip`.

    Args:
        matrix: inner products or cosines (…, S, S).

    Returns:
        Tensor (…).
    """
    count = _pairs(_check_square(matrix))
    return (matrix.sum((-2, -1)) - matrix.diagonal(dim1=-2, dim2=-1).sum(-1)) / count


@checked
def sign_agreement(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """Compute |1/S Σ_i sign g_i|, averaged over parameters: 1 if all domains agree on every sign.

    Parameters whose gradient is zero in all domains, such as embeddings of words not in the batch, are not
    counted. For random signs the expectation is about √(2/(πS)), and 1/2 for S = 2, so compare only values
    with the same S.

    Args:
        gradients: gradients of the domains, each a list with one tensor per parameter.

    Returns:
        Tensor with one number.

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


@checked
def pcgrad(gradients: Sequence[Sequence[Tensor]]) -> Gradient:
    """Average the gradients after projecting each onto the normal plane of those it conflicts with.

    For each i, j runs over i+1, i+2, …, i−1 (cyclically). If the inner product with g_j is negative, the
    component along g_j is removed:

        g_i ← g_i − min(0, g_i·g_j)/‖g_j‖² g_j

    >>> pcgrad([[torch.tensor([1.0, 0.0])], [torch.tensor([-1.0, 1.0])]])
    [tensor([0.2500, 0.7500])]

    Args:
        gradients: gradients of the domains, each a list with one tensor per parameter.

    Returns:
        One tensor per parameter.

    Reference: Yu et al., Gradient Surgery for Multi-Task Learning, NeurIPS 2020, which takes the sum, in
    random order, instead of the mean.
    """
    _check_several(gradients)
    # A projected gradient is a combination of the original ones, so their products are all one needs.
    gram = gram_matrix(gradients)
    count = len(gram)
    mixture = torch.eye(count, dtype=gram.dtype, device=gram.device)
    lengths = gram.diagonal()
    places = torch.arange(count, device=gram.device)
    for turn in range(1, count):
        other = (places + turn) % count
        products = (mixture @ gram)[places, other]
        conflict = (products < 0) & (lengths[other] > 0)
        mixture[places, other] -= torch.where(conflict, products / lengths[other], 0)
    weights = mixture.mean(0)
    return [
        torch.tensordot(weights.to(same[0]), torch.stack(same), 1) for same in zip(*gradients, strict=True)
    ]


@checked
def and_mask(gradients: Sequence[Sequence[Tensor]], tau: Annotated[float, Range(0, 1)] = 1.0) -> Gradient:
    """Average the gradients and set components to zero where the S gradients disagree in sign.

    A component is kept where the absolute mean of its S signs is at least τ. Each tensor is then divided by
    the fraction of its components that is kept.

    >>> and_mask([[torch.tensor([1.0, 1.0])], [torch.tensor([3.0, -1.0])]])
    [tensor([4., 0.])]

    Args:
        gradients: gradients of the domains, each a list with one tensor per parameter.
        tau: threshold τ: with 1 all signs must agree, with 0 everything is kept.

    Returns:
        One tensor per parameter.

    Reference: Parascandolo et al., Learning Explanations that are Hard to Vary, ICLR 2021.
    """
    _check_several(gradients)

    def mask(each: Tensor) -> Tensor:
        # Counted: on CUDA the mean of 41 ones is below 1.
        return (each.sign().sum(0).abs() >= tau * len(each) - 1e-6).to(each.dtype)

    return _masked(gradients, mask)


@checked
def sand_mask(
    gradients: Sequence[Sequence[Tensor]],
    tau: Annotated[float, Range(0, below=1)] = 0.5,
    k: Annotated[float, Range(above=0)] = 10.0,
) -> Gradient:
    """Average the gradients, multiplied by max(0, tanh(k/σ² (a − τ))) and divided by the mean of that mask.

    For each component, a is the absolute mean of the S signs and σ² the variance of the S gradients. Unlike
    ``pcgrad`` and ``and_mask``, the result depends on the scale of the loss.

    >>> sand_mask([[torch.tensor([1.0, 1.0])], [torch.tensor([3.0, -1.0])]])
    [tensor([4., 0.])]

    Args:
        gradients: gradients of the domains, each a list with one tensor per parameter.
        tau: threshold τ of the sign agreement.
        k: steepness of the mask.

    Returns:
        One tensor per parameter.

    Reference: Shahtalebi et al., SAND-mask: An Enhanced Gradient Masking Strategy for the Discovery of
    Invariances in Domain Generalization, 2021.
    """
    _check_several(gradients)

    def mask(each: Tensor) -> Tensor:
        agreement = each.sign().mean(0).abs()
        return torch.tanh(k * (agreement - tau) / each.var(0).clamp(min=1e-30)).clamp(min=0)

    return _masked(gradients, mask)


def _masked(gradients: Sequence[Sequence[Tensor]], mask: Callable[[Tensor], Tensor]) -> Gradient:
    """Of each tensor the mean, masked and divided by the mask's mean; zero where nothing is left."""
    masked = []
    for same in zip(*gradients, strict=True):
        each = torch.stack(same)
        kept = mask(each)
        masked.append(each.mean(0) * kept / (kept.mean() + 1e-10))
    return masked


Domain = Hashable
Trainable = nn.Module | Optimizer | Iterable[Tensor]
"""What to compute gradients for: a module, an optimizer or tensors."""
Combine = Callable[[list[Gradient]], Sequence[Tensor]]
"""Combines S gradients into one. Each gradient is a list with one tensor per parameter."""


class Combined(NamedTuple):
    """The result of :func:`backward`.

    Attributes:
        losses: losses (S,) in the order of the mapping.
        cosines: cosine similarities (S, S) between the gradients of the domains.
    """

    losses: Tensor
    cosines: Tensor


@checked
def losses_by_domain(losses: Tensor, domain: Tensor) -> dict[int, Tensor]:
    """Compute the mean loss of each domain in a mixed batch.

    >>> losses_by_domain(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7, 4, 7]))
    {4: tensor(2.), 7: tensor(2.)}

    Args:
        losses: loss of each example, (B,).
        domain: domain index of each example, (B,).

    Returns:
        The mean loss of each domain index in the batch, sorted by index.
    """
    if losses.ndim != 1 or not len(losses) or not losses.is_floating_point():
        raise InputError(
            f"losses must be a vector with one number per example, got shape {tuple(losses.shape)} of "
            f'{losses.dtype}; most losses of torch give one with reduction="none".'
        )
    if domain.is_floating_point() or domain.is_complex():
        raise InputError(f"domain must hold whole numbers, got {domain.dtype}.")
    if domain.shape != losses.shape:
        raise InputError(
            f"domain must have the shape of losses, {tuple(losses.shape)}, got {tuple(domain.shape)}."
        )
    if domain.device != losses.device:
        raise InputError(f"domain is on {domain.device} and losses on {losses.device}; move one of them.")
    return {int(d): losses[domain == d].mean() for d in domain.unique()}


@checked
def backward(
    losses: Mapping[Domain, Tensor],
    params: Trainable,
    combine: Combine,
    *,
    scale: Annotated[float, Range(above=0)] | Tensor = 1.0,
    average: Callable[[Gradient], Gradient] | None = None,
) -> Combined:
    """Replace ``loss.backward()``: combine the gradients of the domains and add the result to ``.grad``.

    ::

        optimizer.zero_grad()
        losses = {d: cross_entropy(model(x), y) for d, (x, y) in batches.items()}
        backward(losses, model, combine=pcgrad)
        optimizer.step()

    The losses may come from one forward pass per domain, or from one forward pass of a mixed batch
    (:func:`losses_by_domain`), which is slower because each of the S backward passes goes through the whole
    batch. As with ``Tensor.backward``, the gradient is added to ``.grad``, parameters that no loss depends on
    are not changed, and the graphs are freed. Gradient clipping and any optimizer work as usual. If the
    gradient of one domain is infinite, the result is not finite and a GradScaler skips the step.

    With several processes, DistributedDataParallel does not average these gradients, and the processes would
    diverge without an error. Compute the losses with ``model.module`` and pass ``average``, which averages
    each domain's gradient over processes before ``combine`` is called.

    Args:
        losses: the mean loss of each domain, for at least two domains.
        params: a module, an optimizer or tensors; tensors that do not require a gradient are ignored.
        combine: combines S gradients into one: :func:`pcgrad`, :func:`and_mask`, :func:`sand_mask` or a
            your own function; ``functools.partial(and_mask, tau=0.8)`` passes settings. A gradient is zero
            for parameters that the domain's loss does not depend on.
        scale: the factor by which the losses were multiplied, as with a GradScaler. ``combine`` receives
            unscaled gradients, and ``.grad`` is scaled. PCGrad and AND-mask do not depend on it.
        average: a function that averages a list of tensors over processes and returns the list.

    Returns:
        The losses and the cosines between the gradients.
    """
    trained = _trained(params)
    _check_losses(losses, trained)
    values = torch.stack([loss.detach().reshape(()) for loss in losses.values()]) / scale
    _check_numbers(losses, values)
    reached = [False] * len(trained)
    gradients: list[Gradient] = []
    for loss, retain in zip(losses.values(), _shared(list(losses.values())), strict=True):
        found = torch.autograd.grad(loss, trained, retain_graph=retain, allow_unused=True)
        reached = [r or g is not None for r, g in zip(reached, found, strict=True)]
        whole = [_dense(g, p) for g, p in zip(found, trained, strict=True)]
        if isinstance(scale, Tensor) or scale != 1:
            whole = [g / scale for g in whole]
        gradients.append(whole if average is None else list(average(whole)))
    if not any(reached):
        raise InputError("losses do not depend on any of params; are these the parameters of another model?")
    total = combine(gradients)
    right = isinstance(total, (list, tuple)) and all(isinstance(g, Tensor) for g in total)
    if not right or [g.shape for g in total] != [p.shape for p in trained]:
        raise InputError("combine must return a list with one tensor per parameter, each of its shape.")
    cosine = cosine_matrix(gradients)
    _add_to_grad(
        [(p, g * scale) for p, g, r in zip(trained, total, reached, strict=True) if r or average is not None]
    )
    return Combined(values, cosine)


def _trained(params: Trainable) -> list[Tensor]:
    """The tensors that require a gradient, each once."""
    if isinstance(params, nn.parallel.DistributedDataParallel):
        raise InputError(
            "params is a DistributedDataParallel, which does not average these gradients: take the "
            "losses from model.module, and give params=model.module and average=…"
        )
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, Optimizer):
        params = [p for group in params.param_groups for p in group["params"]]
    every = [None] if isinstance(params, (Tensor, str)) else list(params)
    if not all(isinstance(p, Tensor) and p.is_leaf for p in every):
        raise InputError(
            "params must be a module, an optimizer or the leaf tensors that an optimizer trains."
        )
    trained = [p for p in dict.fromkeys(every) if p is not None and p.requires_grad]
    if not trained:
        hint = "" if every else " An iterator, as of model.parameters(), can be read only once."
        raise InputError(f"params has no tensor that requires a gradient, of {len(every)}.{hint}")
    return trained


def _check_losses(losses: Mapping[Domain, Tensor], params: Sequence[Tensor]) -> None:
    if len(losses) < 2:
        raise InputError(f"losses must contain at least 2 domains, got {len(losses)}.")
    for domain, loss in losses.items():
        _check_loss(domain, loss, params)
    if len({loss.device for loss in losses.values()}) > 1:
        raise InputError("losses must all be on one device.")


def _check_loss(domain: Domain, loss: object, params: Sequence[Tensor]) -> None:
    which = f"losses: the loss of domain {shown(domain)}"
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
        raise InputError(f"{which} must be a tensor with one number, got {what}.")
    if not loss.requires_grad:
        raise InputError(f"{which} does not depend on any parameter; was it computed without gradients?")
    devices = sorted({str(p.device) for p in params})
    if str(loss.device) not in devices:
        raise InputError(f"{which} is on {loss.device}, params are on {', '.join(devices)}.")


def _check_numbers(losses: Mapping[Domain, object], values: Tensor) -> None:
    """Refuses losses that are not numbers. Infinite ones happen with a loss scale, which skips the step."""
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    wrong = [domain for domain, bad in zip(losses, values.isnan().tolist(), strict=True) if bad]
    if wrong:
        raise InputError(f"losses: the loss of domain {shown(wrong[0])} is NaN.")


def _shared(losses: Sequence[Tensor]) -> list[bool]:
    """Of each loss, whether a later one needs some of its graph; the others' can be freed on the way."""
    later: set[object] = set()
    shared = []
    for loss in reversed(losses):
        own, rest = set(), [loss.grad_fn]
        while rest:
            node = rest.pop()
            if node is not None and node.next_functions and node not in own:  # the last ones are parameters
                own.add(node)
                rest += [before for before, _ in node.next_functions]
        shared.append(not own.isdisjoint(later))
        later |= own
    return shared[::-1]


@torch.no_grad()
def _add_to_grad(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """As ``Tensor.backward`` does. Copies, since gradients may share memory and ``.grad`` is written to."""
    for p, g in pairs:
        if p.grad is None:
            p.grad = torch.empty_like(p).copy_(g)
        else:
            p.grad += g


class Matching(NamedTuple):
    """The result of :func:`match`.

    Attributes:
        losses: losses (S,).
        mean: mean gradient.
        value: the measure: the GIP, or the variance.
        slope: gradient of the measure.
    """

    losses: Tensor
    mean: Gradient
    value: Tensor
    slope: Gradient

    def gradient(self, weight: float | Tensor, trust: float | None = None) -> Gradient:
        """The gradient of the mean loss + ``weight`` times the measure.

        With ``trust``, the norm of the second term is limited to this multiple of the mean gradient's norm.
        """
        # Not by as_tensor: a copy to the device cannot be captured.
        weight = weight.to(self.value) if isinstance(weight, Tensor) else torch.full_like(self.value, weight)
        if trust is not None:
            length, whole = (
                torch.linalg.vector_norm(torch.stack(torch._foreach_norm(g))) for g in (self.slope, self.mean)
            )
            limit = trust * whole / length
            weight = torch.where(length > 0, weight.sign() * torch.minimum(weight.abs(), limit), weight)
        return list(torch._foreach_add(self.mean, torch._foreach_mul(self.slope, weight)))


@checked
def idgm_backward(
    losses: Mapping[Domain, Callable[[], Tensor]],
    params: Trainable,
    *,
    gamma: Annotated[float, Range(0)] = 1.0,
    normalize: bool = True,
    trust: Annotated[float, Range(above=0)] | None = 0.9,
    method: Method = "exact",
    softening: Annotated[float, Range(0)] = 0.0,
    model: nn.Module | None = None,
    average: Callable[[Gradient], Gradient] | None = None,
) -> Matching:
    """Replace ``loss.backward()``: add the gradient of the objective of IDGM to ``.grad``.

        1/S Σ_i L_i − γ/(S(S−1)) Σ_{i≠j} g_i·g_j    (with ``normalize``, cosines instead of inner products)

    ::

        losses = {d: lambda x=x, y=y: cross_entropy(model(x), y) for d, (x, y) in batches.items()}
        idgm_backward(losses, model, gamma=0.5)

    Each loss is a function: finite differences call it twice. Exact second derivatives call it once, and keep
    the graphs of all domains in memory. The losses must not be multiplied by a loss scale: use bf16 instead
    of fp16. Otherwise it works like :func:`backward`, except that parameters that no loss depends on get
    zeros.

    Args:
        losses: for each domain, a function that computes its mean loss with the current parameters.
        params: a module, an optimizer or tensors.
        gamma: γ.
        normalize: match cosines instead of inner products, as the paper does in its experiments.
        trust: the largest norm of the matching term's gradient, relative to that of the mean gradient. Below
            1, every step descends on the mean loss; ``None`` sets no limit, as in the paper.
        method: as in :func:`match`.
        softening: as in :func:`match`.
        model: the module whose dropout masks are the same in both passes, and whose buffers, such as
            BatchNorm statistics, only the first pass updates. By default ``params``, if it is a module.
        average: as in :func:`backward`.

    Returns:
        The losses, the mean gradient, the mean cosine or inner product, and its gradient.

    Reference: Shi et al., Gradient Matching for Domain Generalization, 2021. The trust ratio is ours.
    """
    trained = _trained(params)
    with _computed_anew():
        found = match(
            _closures(losses, trained),
            trained,
            normalize=normalize,
            method=method,
            softening=softening,
            model=_model(model, params),
            average=average,
        )
    _check_numbers(losses, found.losses)
    _add_to_grad(zip(trained, found.gradient(-gamma, trust), strict=True))
    return found


@checked
def iga_backward(
    losses: Mapping[Domain, Callable[[], Tensor]],
    params: Trainable,
    *,
    weight: Annotated[float, Range(0)] = 1000.0,
    method: Method = "exact",
    model: nn.Module | None = None,
    average: Callable[[Gradient], Gradient] | None = None,
) -> Matching:
    """Replace ``loss.backward()``: add the gradient of the objective of IGA to ``.grad``.

        1/S Σ_i L_i + λ/S Σ_i ‖g_i − ḡ‖²,    λ = ``weight``

    Args:
        losses: for each domain, a function that computes its mean loss with the current parameters.
        params: a module, an optimizer or tensors.
        weight: λ.
        method: as in :func:`match`.
        model: as in :func:`idgm_backward`.
        average: as in :func:`backward`.

    Returns:
        The losses, the mean gradient, the variance of the gradients, and its gradient.

    Reference: Koyama and Yamaguchi, When is invariance useful in an out-of-distribution generalization
    problem?, 2020.
    """
    trained = _trained(params)
    with _computed_anew():
        found = match(
            _closures(losses, trained),
            trained,
            measure="variance",
            method=method,
            model=_model(model, params),
            average=average,
        )
    _check_numbers(losses, found.losses)
    _add_to_grad(zip(trained, found.gradient(weight), strict=True))
    return found


def _model(model: nn.Module | None, params: Trainable) -> nn.Module | None:
    return params if model is None and isinstance(params, nn.Module) else model


@contextmanager
def _computed_anew() -> Iterator[None]:
    """Says what is wrong where functions of losses share what one of them has used up."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise InputError(
            "losses: every function must call the model itself, such as lambda: loss(model(x), y); these use "
            "outputs that were computed before, whose graph is gone."
        ) from error


def _closures(
    losses: Mapping[Domain, Callable[[], Tensor]], params: Sequence[Tensor]
) -> list[Callable[[], Tensor]]:
    """The functions, each of which checks what it returns."""
    if len(losses) < 2:
        raise InputError(f"losses must contain at least 2 domains, got {len(losses)}.")
    for domain, function in losses.items():
        if not callable(function):
            raise InputError(
                f"losses: domain {shown(domain)} must have a function that computes its loss, such as "
                f"lambda: loss(model(x), y); got {shown(function)}."
            )

    def closure(domain: Domain, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def loss() -> Tensor:
            value = function()
            _check_loss(domain, value, params)
            return value

        return loss

    return [closure(domain, function) for domain, function in losses.items()]


Parts = Sequence[tuple[float, Callable[[], Tensor]]]
"""A domain's mean loss as a weighted sum of parts; only one part's graph is in memory at a time."""


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
    """Compute the mean gradient, the GIP and its gradient.

    The gradient of the GIP is Σ_i H_i v_i, with H_i the Hessian of the loss of domain i and v_i = ∂GIP/∂g_i:

        raw          v_i = 2/(S(S−1)) Σ_{j≠i} g_j
        normalised   v_i = 2/(S(S−1)) (I − u_i u_iᵀ)/n_i Σ_{j≠i} u_j,   u_i = g_i/n_i,  n_i = √(‖g_i‖² + δ²)

    With δ = 0, the normalised form is the cosine, whose gradient grows without bound as ‖g_i‖ → 0; a gradient
    so short that 1/‖g_i‖⁴ overflows (3e-10 in float32) is treated as zero.

    The exact method computes one Hessian-vector product per domain by double backward. It calls each loss
    once and keeps the graphs of all domains in memory, about as much as one pass of all batches together; a
    loss that is split into :data:`Parts` is computed again instead, part by part. Finite differences compute
    (∇L_i(θ + r v_i/‖v_i‖) − g_i)·‖v_i‖/r from first-order gradients only, with one graph in memory at a time,
    and move and restore the parameters in place. With smooth activations the default r is within a few per
    cent of exact, and the error is proportional to r. This does not hold for ReLU, whose kinks the exact form
    ignores: each kink crossed adds a jump divided by r, so a tiny r yields noise. Both methods keep S
    gradients in memory.

    Args:
        losses: functions that compute the mean loss of each domain with the current parameters.
        params: parameters to differentiate with respect to.
        measure: ``"gip"``, or ``"variance"`` for the trace of the covariance of the gradients,
            1/S Σ_i ‖g_i − ḡ‖², with v_i = 2/S (g_i − ḡ).
        normalize: use cosines instead of inner products.
        method: ``"exact"`` or ``"finite-difference"``.
        softening: δ in the normalised form.
        radius: r of finite differences (default: 0.03, or the square root of the machine epsilon times
            1 + ‖θ‖ if that is larger).
        model: module whose second pass uses the dropout masks of the first and does not update buffers.
        average: function that averages a gradient over processes which hold parts of the batch of each
            domain; called before any non-linear operation.

    Returns:
        The losses, the mean gradient, the measure and its gradient.
    """
    count = _pairs(len(losses))
    params = _parameters(params)
    if measure == "variance" and normalize:
        raise InputError("the variance is defined for gradients that are not normalized; remove normalize.")
    # Either measure is c/2 (r ‖Σu‖² − Σ‖u‖²), so that v_i = c (r Σu − u_i) before any normalising.
    r, c = (1.0, 2.0 / count) if measure == "gip" else (1.0 / len(losses), -2.0 / len(losses))
    domains: list[Parts] = [[(1.0, loss)] if callable(loss) else loss for loss in losses]
    layout = Layout(params)

    again = [i for i, parts in enumerate(domains) if method != "exact" or [w for w, _ in parts] != [1]]
    before = None if model is None or not again else random_state(model)
    values, gradients, graphs = [], [], dict[int, _Graph]()
    for i, parts in enumerate(domains):
        if i not in again:
            with _differentiable_twice() as mode:
                value = parts[0][1]()
                # The gradient's own graph takes as much memory again: but for the last, made when needed.
                last = i == len(domains) - 1
                g = gradient(value, params, create_graph=last, retain_graph=True)
            graphs[i] = _Graph(value, mode, g if last else None)
            value = value.detach()
        else:
            value, g = _first_order(parts, params)
        values.append(value)
        gradients.append(layout.join(g if average is None else average(g)))
        del value, g
    lengths = [torch.dot(g, g) for g in gradients]
    one = torch.ones_like(lengths[0])
    # Below ``least``, squares of 1/‖g‖² overflow: the domain counts as one without a gradient.
    least = torch.finfo(one.dtype).tiny ** 0.5
    squared = [n + softening**2 for n in lengths]
    inverse = [_over(one, torch.where(n > least, n, 0).sqrt()) if normalize else one for n in squared]
    total = torch.zeros_like(gradients[0])
    mean = torch.zeros_like(total) if normalize else total
    for whole, factor in zip(gradients, inverse, strict=True):
        total.addcmul_(whole, factor)
        if normalize:
            mean += whole
    squares = torch.stack([n * f**2 for n, f in zip(lengths, inverse, strict=True)]).sum()

    def direction(i: int) -> Tensor:
        whole, factor = gradients[i], inverse[i]
        along = torch.zeros_like(one)
        if normalize:
            along = r * factor * torch.dot(whole, total) - factor**2 * lengths[i]
        return (total * (c * r * factor)).addcmul_(whole, -c * factor**2 * (1 + along))

    value = (r * torch.dot(total, total) - squares) * (c / 2)
    slope = torch.zeros_like(total)
    while graphs:
        i, graph = graphs.popitem()  # the last first, since it takes the most memory
        slope += layout.join(graph.hessian_product(params, layout.split(direction(i))))
        del graph
    with nullcontext() if model is None or not again else leaves_no_trace(model, since=before):
        if method == "exact":
            for i in again:
                v = layout.split(direction(i))
                for weight, function in domains[i]:
                    slope.add_(layout.join(_hessian_product(function, params, v)), alpha=weight)
        else:
            length = torch.linalg.vector_norm(layout.join(params))
            rounding = (1 + length) * torch.finfo(params[0].dtype).eps ** 0.5
            radius = rounding.clamp(min=0.03) if radius is None else radius
            for i, parts in enumerate(domains):
                way = direction(i)
                size = torch.linalg.vector_norm(way)
                with moved(params, layout.split(_over(way, size)), radius):
                    _, there = _first_order(parts, params)
                slope.addcmul_(layout.join(there).sub_(gradients[i]), size / radius)
    slope = slope if average is None else layout.join(average(layout.split(slope)))
    if measure == "variance":
        value = value.clamp(min=0)  # rounding
    return Matching(torch.stack(values), layout.split(mean / len(losses)), value, layout.split(slope))


class _Graph(NamedTuple):
    """A loss, the mode in which it was computed, and its gradient, or ``None`` if that has no graph."""

    loss: Tensor
    mode: FastDoubleBackward
    gradient: Gradient | None

    def hessian_product(self, params: Sequence[Tensor], v: Sequence[Tensor]) -> Gradient:
        try:
            with sdpa_kernel(SDPBackend.MATH):  # for checkpointed modules, computed again here
                if self.gradient is not None:
                    return _derivative_along(self.gradient, params, v)
                self.mode.graph_only = True  # its values are known
                return _derivative_along(gradient(self.loss, params, create_graph=True), params, v)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise InputError(
                "exact second derivatives keep the graphs of all domains, and the forward pass of a later "
                "domain changed in place a tensor that an earlier one's graph needs, such as a buffer of the "
                'model. Use a copy of it in forward (buffer.clone()), or method="finite-difference".'
            ) from error


class Layout:
    """Convert lists of tensors to one vector and back, to replace many small operations by a few large ones.

    Elements are in memory order, so that a channels-last parameter has a channels-last gradient.

    Args:
        params: tensors that define the shapes.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.dtypes = [p.dtype for p in params]
        strides = [p.stride() for p in params]
        self.orders = [sorted(range(len(s)), key=lambda d: -s[d]) for s in strides]
        self.back = [[order.index(d) for d in range(len(order))] for order in self.orders]
        self.shapes = [[p.shape[d] for d in order] for p, order in zip(params, self.orders, strict=True)]
        self.sizes = [p.numel() for p in params]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        each = zip(tensors, self.orders, strict=True)
        return torch.cat([t.detach().permute(order).reshape(-1) for t, order in each])

    def split(self, vector: Tensor) -> Gradient:
        each = zip(vector.split(self.sizes), self.shapes, self.back, self.dtypes, strict=True)
        return [part.view(shape).permute(back).to(dtype) for part, shape, back, dtype in each]


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


def _check_several(gradients: Sequence[Sequence[Tensor]]) -> None:
    if len(gradients) < 2:
        raise InputError(f"gradients must contain at least 2 domains, got {len(gradients)}.")
    _check_alike(gradients)


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


def _over(x: Tensor, by: Tensor) -> Tensor:
    """x/by, and zero where ``by`` is zero."""
    return x * torch.where(by > 0, 1 / torch.where(by > 0, by, 1), 0)


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


@contextmanager
def moved(params: Sequence[Tensor], direction: Sequence[Tensor], by: float | Tensor) -> Iterator[None]:
    """Within the block, replace the parameters θ by θ + by · direction; restore them exactly afterwards.

    If the direction is not finite, for example because a gradient overflowed in half precision, the
    parameters are not moved.

    Args:
        params: parameters θ.
        direction: list with one tensor per parameter.
        by: step size.
    """
    layout = Layout(params)
    start, way = layout.join(params), layout.join(direction)
    there = torch.where(way.isfinite().all(), start + way * by, start)
    try:
        with torch.no_grad():
            torch._foreach_copy_(list(params), layout.split(there))
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(params), layout.split(start))


@checked
def curvature(
    losses: Sequence[Callable[[], Tensor] | Parts], params: Sequence[Tensor], v: Sequence[Tensor]
) -> Gradient:
    """Compute the Hessian-vector product H v, with one graph in memory at a time.

    Args:
        losses: functions that compute the mean loss of each domain; H is the Hessian of their mean.
        params: parameters to differentiate with respect to.
        v: list with one tensor per parameter.

    Returns:
        One tensor per parameter.
    """
    if len(v) != len(params):
        raise InputError(f"v must have one tensor per parameter, {len(params)}; got {len(v)}.")
    params = _parameters(params)
    total = [torch.zeros_like(p) for p in params]
    for loss in losses:
        parts: Parts = [(1.0, loss)] if callable(loss) else loss
        for weight, part in parts:
            torch._foreach_add_(total, _hessian_product(part, params, v), alpha=weight / len(losses))
    return total


@contextmanager
def _differentiable_twice() -> Iterator[FastDoubleBackward]:
    """In this block, losses are computed such that second derivatives exist and cost little.

    Differentiate them in it, too: checkpointed modules are computed again then, and must save the same.
    """
    with sdpa_kernel(SDPBackend.MATH), FastDoubleBackward() as mode:  # no other attention has any
        yield mode


def _hessian_product(loss: Callable[[], Tensor], params: Sequence[Tensor], v: Sequence[Tensor]) -> Gradient:
    """H v of one loss."""
    with _differentiable_twice():
        return _derivative_along(gradient(loss(), params, create_graph=True), params, v)


def _derivative_along(g: Gradient, params: Sequence[Tensor], v: Sequence[Tensor]) -> Gradient:
    """∂(g·v)/∂θ, through the graph of the gradient."""
    curved = [(x, w) for x, w in zip(g, v, strict=True) if x.requires_grad]
    if not curved:  # a loss linear in the parameters
        return [torch.zeros_like(p) for p in params]
    outputs, vectors = zip(*curved, strict=True)
    products = torch.autograd.grad(outputs, params, vectors, allow_unused=True)
    return [torch.zeros_like(p) if h is None else h for h, p in zip(products, params, strict=True)]
