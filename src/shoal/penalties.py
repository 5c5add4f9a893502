"""Penalties for domain generalization, as plain functions of one mixed batch, for any training loop.

A mixed batch holds B examples of several domains in any order. ``domain`` (B,) is the domain index of each;
``features`` (B, …) are flattened to (B, d), ``logits`` (B, …) are the model's output, ``y`` the targets, and
``losses`` (B,) are such as ``cross_entropy(logits, y, reduction="none")``. A penalty returns a scalar to add
to the loss::

    z = backbone(x)  # for a model that does not return features: shoal.models.FeatureExtractor
    logits = head(z)
    loss = cross_entropy(logits, y) + shoal.penalties.coral(z, domain)

Half-precision inputs are converted to float32, without autocast. Penalties that compare domains need several
examples of at least two domains in each batch, as :class:`shoal.data.DomainBatchSampler` yields them with
``mixed=True``. One forward pass of a mixed batch computes BatchNorm's statistics over all domains; one pass
per domain removes differences in mean and scale before a penalty can measure them. Published code does
either, and it matters: for an untrained ResNet-18 on PACS it changes the gradient by 108 % to 137 %.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal.errors import InputError
from shoal.tensors import map_nest, widest

P = ParamSpec("P")
Loss = Callable[[Any, Tensor], Tensor]
GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
HALF = (torch.float16, torch.bfloat16)


def _penalty(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """In float32 or float64, with second derivatives, which torch.compile does not know.

    ``torch.compiler.disable`` as a decorator would import the compiler: it takes longer than importing torch.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if torch.compiler.is_compiling():
            run: Callable[P, Tensor] = torch.compiler.disable(call)
            return run(*args, **kwargs)

        def full(value: Any) -> Any:
            return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value

        named: dict[str, Any] = {name: full(value) for name, value in kwargs.items()}
        kind = next(v.device.type for v in [*args, *named.values()] if isinstance(v, Tensor))
        with torch.enable_grad(), torch.autocast(kind, enabled=False):
            result = function(*map(full, args), **named)
        return result if torch.is_grad_enabled() else result.detach()

    return call


class Blocks(NamedTuple):
    """The domains of a batch that is ordered by domain, instead of a tensor ``domain``.

    A tensor is read by every call, which then waits for the GPU; CUDA graphs need this form.

    Args:
        sizes: the number of examples of each domain in the batch, in order.
        ids: the domain index of each block, a tensor (S,), for penalties with a state; by default 0, 1, …

    >>> features = torch.tensor([[0.0], [2.0], [1.0], [3.0]])
    >>> coral(features, Blocks([2, 2]))
    tensor(1.)
    """

    sizes: Sequence[int]
    ids: Tensor | None = None


Domain = Tensor | Blocks


@_penalty
def coral(features: Tensor, domain: Domain) -> Tensor:
    """The distance between the domains' feature means and covariances (CORAL).

    The mean over pairs of domains of ‖μ_i − μ_j‖²/d + ‖C_i − C_j‖²/d², with d features.

    >>> coral(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([7, 5, 7, 5]))
    tensor(1.)

    Reference: Sun and Saenko, Deep CORAL: Correlation Alignment for Deep Domain Adaptation, ECCV 2016; the
    means as in Koh et al., WILDS, 2021.
    """
    sizes, _, features = _grouped(domain, features)
    groups = features.flatten(1).split(sizes)
    means = torch.stack([z.mean(0) for z in groups])
    centred = [z - mean for z, mean in zip(groups, means, strict=True)]
    covariances = torch.stack([c.T @ c / max(len(c) - 1, 1) for c in centred])

    def mean_over_pairs(x: Tensor) -> Tensor:  # from the distances to the middle
        return 2 / max(len(x) - 1, 1) * (x - x.mean(0)).square().flatten(1).mean(1).sum()

    return mean_over_pairs(means) + mean_over_pairs(covariances)


@_penalty
def mmd(features: Tensor, domain: Domain) -> Tensor:
    """The squared maximum mean discrepancy between the domains' features, averaged over pairs (MMD).

    For two domains it is mean k(x, x') + mean k(y, y') − 2 mean k(x, y), with the kernel
    k(x, y) = Σ_γ exp(−γ‖x − y‖²) for γ = 0.001, 0.01, …, 1000.

    >>> mmd(torch.tensor([[0.0], [100.0], [0.0], [100.0]]), torch.tensor([0, 0, 1, 1]))
    tensor(0.)

    Reference: Li et al., Domain Generalization with Adversarial Feature Learning, CVPR 2018; Gretton et al.,
    A Kernel Two-Sample Test, 2012.
    """
    sizes, _, features = _grouped(domain, features)
    # The narrow kernels look at differences that a difference of float32 squares would lose.
    every = features.flatten(1).to(widest(features.device))
    every = every - every.mean(0).detach()
    squares = every.square().sum(1)
    distances = (squares[:, None] + squares[None] - 2 * every @ every.T).clamp(min=0)
    kernel = torch.stack([torch.exp(-gamma * distances) for gamma in GAMMAS]).sum(0)
    means = torch.stack([cell.mean() for row in kernel.split(sizes) for cell in row.split(sizes, dim=1)])
    same, count = means.reshape(len(sizes), -1).diagonal(), len(sizes)
    return (2 * (count * same.sum() - means.sum()) / max(count * (count - 1), 1)).to(features.dtype)


@_penalty
def irm(logits: Tensor, y: Tensor, domain: Domain, *, loss: Loss = cross_entropy) -> Tensor:
    """The squared gradient of each domain's loss with respect to a scalar factor of the logits (IRMv1).

        1/S Σ_i (∂L_i(w·f)/∂w at w=1)²

    The square is estimated without bias, as the product of the gradients on two halves of a domain's
    examples (those at even and at odd positions), so the penalty may be negative. One domain is enough.
    ``loss(logits, y)`` returns the mean over examples.

    >>> irm(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])).item()
    0.0

    Reference: Arjovsky et al., Invariant Risk Minimization, 2019.
    """
    sizes, _, logits, y = _grouped(domain, logits, y, least=1)

    def slope(output: Tensor, target: Tensor) -> Tensor:
        scale = torch.ones((), dtype=output.dtype, device=output.device, requires_grad=True)
        value = _mean_loss(loss, output * scale, target)
        return torch.autograd.grad(value, scale, create_graph=True)[0]

    squares = []
    for output, target in zip(logits.split(sizes), y.split(sizes), strict=True):
        if len(target) == 1:
            squares.append(slope(output, target).square())
        else:
            squares.append(slope(output[::2], target[::2]) * slope(output[1::2], target[1::2]))
    return torch.stack(squares).mean()


@_penalty
def vrex(losses: Tensor, domain: Domain) -> Tensor:
    """The variance of the domains' mean losses (V-REx): 1/S Σ_i (L_i − L̄)².

    >>> vrex(torch.tensor([1.0, 3.0, 4.0, 4.0]), torch.tensor([0, 0, 1, 1]))
    tensor(1.)

    Reference: Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, ICML 2021.
    """
    return _domain_losses(losses, domain, least=2)[0].var(correction=0)


@_penalty
def miro(features: Tensor, pretrained: Tensor, variance: Tensor) -> Tensor:
    """How far features are from those of the pretrained model (MIRO), ½ mean((z − z₀)²/σ² + log σ²).

    Use the sum over several layers, and learn σ² with the model, at ten times its learning rate; it begins at
    0.1, such as ``variance = softplus(b) + 1e-5``, with one b for each channel.

    Args:
        features: z, of any shape.
        pretrained: z₀, the features of a frozen copy of the pretrained model on the same inputs.
        variance: σ², positive, of a shape that broadcasts to ``features``, such as (1, c, 1, 1).

    >>> miro(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0]), torch.tensor([1.0]))
    tensor(0.2500)

    Reference: Cha et al., Domain Generalization by Mutual-Information Regularization with Pre-trained Models,
    ECCV 2022.
    """
    return ((features - pretrained).square() / variance + variance.log()).mean() / 2


class GroupWeights(nn.Module):
    """The state of :func:`group_dro`: one weight per domain, in a buffer, updated in training mode.

    Save it with the model. With several processes, average ``log_weights`` after each step.

    Args:
        domains: the total number of domains; domain indices are 0 to ``domains − 1``.
        step_size: η, the step size of the weights; with 0 they stay equal.
        dtype: the dtype of the log weights; use float32 on devices without float64.
    """

    log_weights: Tensor

    def __init__(self, domains: int, step_size: float = 0.01, *, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.step_size = step_size
        self.register_buffer("log_weights", torch.zeros(domains, dtype=dtype))


@_penalty
def group_dro(losses: Tensor, domain: Domain, weights: GroupWeights) -> Tensor:
    """The weighted loss of GroupDRO, Σ_d q_d L_d, to minimise instead of the mean loss.

    Domains with a high loss get a higher weight: q_d ∝ exp(η Σ L_d), summed over the batches that contain the
    domain. If a batch contains S of T domains, the loss is multiplied by T/S, so that its expectation is the
    loss over all domains. ``losses`` and ``domain`` are the batch, ``weights`` hold the q_d.

    >>> group_dro(torch.tensor([1.0, 3.0]), torch.tensor([0, 1]), GroupWeights(2, step_size=0.0))
    tensor(2.)

    Reference: Sagawa et al., Distributionally Robust Neural Networks for Group Shifts, ICLR 2020.
    """
    log_weights = weights.log_weights
    each, ids = _domain_losses(losses, domain, known=len(log_weights))
    with torch.no_grad():
        if weights.training:
            log_weights.index_add_(0, ids, weights.step_size * each.to(log_weights.dtype))
            log_weights -= log_weights.logsumexp(0)
        weight = log_weights.softmax(0)[ids].to(each.dtype)
    return (weight * each).sum() * (len(log_weights) / len(each))


@_penalty
def quantile_risk(losses: Tensor, domain: Domain, quantile: float = 0.75) -> Tensor:
    """The α-quantile of the domains' mean losses, to minimise instead of the mean loss (EQRM).

    The distribution of the S losses is a kernel density estimate with Gaussian kernels of width h. The result
    k solves

        1/S Σ_i Φ((k − L_i)/h) = α,    h = 1.06 σ S^(−1/5)

    with σ the sample standard deviation of the L_i. One domain's quantile is its loss, that of equal losses
    their mean.

    Args:
        losses, domain: the batch.
        quantile: α: the share of domains, like those of the batch, whose loss is to be below the result.

    >>> quantile_risk(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 2]), quantile=0.5)
    tensor(2.)

    Reference: Eastwood et al., Probable Domain Generalization via Quantile Risk Minimization, NeurIPS 2022.
    """
    if not 0 < quantile < 1:
        raise InputError(f"must be above 0 and below 1, got {quantile}.", "quantile")
    means, _ = _domain_losses(losses, domain)
    each = means.to(widest(means.device))
    mean, width = each.mean(), 1.06 * len(each) ** -0.2
    variance = (each - mean).square().sum() / max(1, len(each) - 1)
    scale = torch.where(variance > 0, variance, 1).sqrt()
    points = (each - mean) / scale
    with torch.no_grad():
        low, high = points.min() - 40 * width, points.max() + 40 * width
        for _ in range(64):  # bisection
            middle = (low + high) / 2
            below = torch.special.ndtr((middle - points) / width).mean() < quantile
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        # The slope of the root is that of the equation: dk/du_i = φ_i/Σφ, with φ_i the kernel's density at k.
        share = (-((low - points) / width).square() / 2).softmax(0)
    root = low + (share * (points - points.detach())).sum()
    return torch.where(variance > 0, mean + scale * root, mean).to(means.dtype)


class FishrVariances(nn.Module):
    """The state of :func:`fishr`: a moving average of each domain's gradient variances, in a buffer.

    Each call in training mode updates the domains in the batch. Save it with the model, and with several
    processes average ``smoothed`` after each step.

    Args:
        domains: the total number of domains; domain indices are 0 to ``domains − 1``.
        features: the number of inputs of the last layer.
        outputs: the number of outputs of the last layer.
        bias: whether the last layer has a bias.
        ema: κ, the decay of the moving average, below 1.
        dtype: the dtype of the buffer.
    """

    smoothed: Tensor

    def __init__(
        self,
        domains: int,
        features: int,
        outputs: int,
        *,
        bias: bool = True,
        ema: float = 0.95,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.bias, self.ema = bias, ema
        self.register_buffer("smoothed", torch.zeros(domains, outputs * (features + bias), dtype=dtype))


@_penalty
def fishr(
    logits: Tensor,
    features: Tensor,
    y: Tensor,
    domain: Domain,
    *,
    loss: Loss = cross_entropy,
    variances: FishrVariances | None = None,
    bias: bool = True,
) -> Tensor:
    """The difference between domains in the variance of the last layer's per-example gradients (Fishr).

    The gradient of one example's loss with respect to the weights of a linear layer is r zᵀ, where z are its
    features and r is the gradient with respect to its logits:

        Var(W) = mean(r²)(z²)ᵀ − (mean r zᵀ)²,   Var(b) = mean r² − (mean r)²

    The penalty is the mean squared deviation of the domains' variances v_d from their mean. With
    ``variances`` it uses moving averages over batches, m_d ← κ m_d + (1 − κ) v_d, divided by 1 − κ so that
    the gradient with respect to v_d does not depend on κ.

    Args:
        logits: the output of the last layer, which must be linear.
        features: the input of the last layer.
        y, domain: the targets and domain indices; these are from 0 with ``variances``.
        loss: ``loss(logits, y)`` returns the mean over examples.
        variances: the state; without it, only this batch is used.
        bias: whether the last layer has a bias; ignored if ``variances`` is passed, which has its own.

    >>> z = torch.tensor([[1.0], [2.0], [1.0], [2.0]])
    >>> fishr(z @ torch.ones(1, 2), z, torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])).item()
    0.0

    Reference: Rame et al., Fishr: Invariant Gradient Variances for Out-of-Distribution Generalization, ICML
    2022.
    """
    bias = bias if variances is None else variances.bias
    known = None if variances is None else len(variances.smoothed)
    sizes, ids, features, logits, y = _grouped(domain, features, logits, y, known=known)
    dtype = torch.promote_types(features.dtype, logits.dtype)
    split = [t.split(sizes) for t in (logits.to(dtype), features.to(dtype), y)]
    found = torch.stack([_gradient_variances(loss, o, z, t, bias) for o, z, t in zip(*split, strict=True)])
    if variances is not None:
        before = variances.smoothed
        smooth = torch.lerp(found, before[ids].to(found.dtype), variances.ema)
        if variances.training:
            before.index_copy_(0, ids, smooth.detach().to(before.dtype))
        found = smooth / (1 - variances.ema)
    return (found - found.mean(0)).square().mean()


def _gradient_variances(loss: Loss, logits: Tensor, features: Tensor, y: Tensor, bias: bool) -> Tensor:
    """Of the examples' gradients of the last layer, weights and then biases."""
    count, kind = len(features), widest(features.device)
    output = logits if logits.requires_grad else logits.detach().requires_grad_()
    (slope,) = torch.autograd.grad(_mean_loss(loss, output, y), output, create_graph=True)
    # In float64, for it is a difference of squares. The loss is a mean, hence the factor.
    r, z = slope.reshape(count, -1).to(kind) * count, features.flatten(1).to(kind)
    found = (r.square().T @ z.square() / count - (r.T @ z / count).square()).flatten()
    return (torch.cat([found, r.var(0, correction=0)]) if bias else found).to(features.dtype)


class DomainDiscriminator(nn.Module):
    """A multilayer perceptron that predicts the domain from the features, for DANN and CDANN.

    Calling it returns its loss behind a gradient-reversal layer: minimising that trains the discriminator,
    while the model receives the gradient times −λ. :meth:`loss` is without the reversal. ::

        discriminator = DomainDiscriminator(512, domains=4)
        optimizer = Adam([*model.parameters(), *discriminator.parameters()])
        loss = cross_entropy(head(z), y) + discriminator(z, domain)

    With ``classes`` it is that of CDANN, ``discriminator(features, domain, y)``: a learned vector of the
    class is added to the features, and every class has the same weight in its loss.

    Args:
        features: the number of features per example.
        domains: the total number of domains; domain indices are 0 to ``domains − 1``.
        width: the width of the hidden layers.
        depth: the number of linear layers.
        dropout: of the hidden layers.
        classes: the number of classes, for CDANN.
        weight: λ; an attribute, which may be changed during training.

    >>> discriminator = DomainDiscriminator(8, domains=3)
    >>> discriminator(torch.randn(6, 8), torch.tensor([0, 1, 2, 0, 1, 2])).shape
    torch.Size([])

    Reference: Ganin et al., Domain-Adversarial Training of Neural Networks, JMLR 2016; Li et al., Deep Domain
    Generalization via Conditional Invariant Adversarial Networks, ECCV 2018 (with classes).
    """

    def __init__(
        self,
        features: int,
        domains: int,
        *,
        width: int = 256,
        depth: int = 3,
        dropout: float = 0.0,
        classes: int | None = None,
        weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.domains, self.weight = domains, weight
        widths = [features, *[width] * (depth - 1)]
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], domains))
        self.classes = None if classes is None else nn.Embedding(classes, features)

    def forward(self, features: Tensor, domain: Domain, y: Tensor | None = None) -> Tensor:
        """The loss behind the gradient reversal; the classes ``y`` are for one created with ``classes``."""
        reverse: Callable[[Tensor, float], Tensor] = _Reversed.apply
        return self.loss(reverse(features, self.weight), domain, y)

    @_penalty
    def loss(
        self, features: Tensor, domain: Domain, y: Tensor | None = None, *, gradient_penalty: Any = 0.0
    ) -> Tensor:
        """The cross-entropy of the predicted domains, plus ``gradient_penalty`` times a penalty.

        It is the mean over examples or, with ``classes``, the mean of the means of the classes in the batch.
        The penalty is the mean over examples of ‖∂CE/∂z‖², with z an example's features.
        """
        if (y is None) != (self.classes is None):
            raise InputError("must be passed if the discriminator has classes, and only then.", "y")
        labels = [] if y is None else [y]
        sizes, ids, z, *labels = _grouped(domain, features, *labels, least=1, known=self.domains)
        if gradient_penalty and not z.requires_grad:
            z = z.detach().requires_grad_()
        hidden = z.flatten(1).to(next(self.parameters()).dtype)
        weights = torch.ones_like(hidden[:, 0])
        for label in labels:  # of an example, one over the size of its class
            hidden = hidden + self.classes(label)  # type: ignore[misc]
            weights = weights / (label[:, None] == label).sum(1)
        numbers = torch.cat([n.expand(size) for n, size in zip(ids, sizes, strict=True)])
        each = cross_entropy(self.layers(hidden), numbers, reduction="none")
        total = (weights * each).sum() / weights.sum()
        if gradient_penalty:
            (slope,) = torch.autograd.grad(each.sum(), z, create_graph=True)
            total = total + gradient_penalty * slope.flatten(1).square().sum(1).mean()
        return total


class _Reversed(torch.autograd.Function):
    """The identity, with −λ times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * gradient, None


def mixup(
    x: Any, y: Tensor, domain: Domain, *, alpha: float = 0.2, shares: Tensor | None = None
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Mixes the examples of each domain with those of another, λ x_i + (1 − λ) x_j (inter-domain Mixup).

    Each domain is paired with the next, in the order in which they appear in the batch, and the last with the
    first; the surplus of the larger one is not used. Each pair has one λ from Beta(α, α). Mix the losses too:

        x, y, y_other, share = mixup(x, y, domain)
        losses, others = (cross_entropy(model(x), t, reduction="none") for t in (y, y_other))
        loss = (share * losses + (1 - share) * others).mean()

    Args:
        x: (B, …), or a nested list, tuple or dict of such tensors; uint8 images stay uint8.
        y, domain: the targets and domain indices.
        alpha: α; the smaller, the less is mixed.
        shares: the λ of each pair, (S,), instead of random ones.

    Returns:
        The mixed inputs, the targets of the first and of the second example of each pair, and λ.

    >>> x, domain = torch.tensor([[0.0], [10.0]]), torch.tensor([0, 1])
    >>> mixup(x, torch.tensor([0, 1]), domain, shares=torch.tensor([0.75, 0.5]))[0]
    tensor([[2.5000],
            [5.0000]])

    Reference: Xu et al., Adversarial Domain Adaptation with Domain Mixup, AAAI 2020; Zhang et al., mixup:
    Beyond Empirical Risk Minimization, ICLR 2018; Verma et al., Manifold Mixup, ICML 2019 (for features).
    """
    parts: list[Tensor] = []
    map_nest(parts.append, x)
    if not all(part.is_floating_point() or part.dtype == torch.uint8 for part in parts):
        raise InputError(
            "x must hold floating-point numbers or uint8 images; in place of token ids, mix features."
        )
    sizes, _, order, *_ = _grouped(domain, torch.arange(len(y), device=y.device), y, *parts)
    if shares is None:
        shares = mixup_shares(len(sizes), alpha, y.device)
    examples = order.split(sizes)
    pairs = list(zip(examples, [*examples[1:], examples[0]], strict=True))
    counts = [min(len(a), len(b)) for a, b in pairs]
    first, second = (
        torch.cat([pair[which][:n] for pair, n in zip(pairs, counts, strict=True)]) for which in (0, 1)
    )
    share = torch.cat([s.expand(n) for s, n in zip(shares, counts, strict=True)])

    def mixed(values: Tensor) -> Tensor:
        image = values.dtype == torch.uint8  # rounded, since a model may take floats for another scale
        a, b = (values[place].float() if image else values[place] for place in (first, second))
        result = torch.lerp(b, a, share.to(a.dtype).reshape(-1, *[1] * (a.ndim - 1)))
        return result.round().to(torch.uint8) if image else result

    share_dtype = torch.promote_types(parts[0].dtype, torch.float32)
    return map_nest(mixed, x), y[first], y[second], share.to(share_dtype)


def mixup_shares(count: int, alpha: float, device: torch.device) -> Tensor:
    """Sample ``count`` numbers from Beta(``alpha``, ``alpha``) on a ``device``."""
    if not alpha > 0:
        raise InputError(f"must be above 0, got {alpha}.", "alpha")
    alphas = torch.full((count, 2), alpha, dtype=widest(device), device=device)
    return torch._sample_dirichlet(alphas)[:, 0]


def _domain_losses(
    losses: Tensor, domain: Domain, *, least: int = 1, known: int | None = None
) -> tuple[Tensor, Tensor]:
    """The domains' mean losses, (S,), and the domains' numbers."""
    if losses.ndim != 1:
        raise InputError(f'losses must be (B,), got {tuple(losses.shape)}: reduction="none" gives them.')
    sizes, ids, losses = _grouped(domain, losses, least=least, known=known)
    return torch.stack([each.mean() for each in losses.split(sizes)]), ids


def _grouped(domain: Domain, *tensors: Tensor, least: int = 2, known: int | None = None) -> Any:
    """The sizes and numbers of the domains as they first appear, then the tensors in that order."""
    rows = (sum(domain.sizes),) if isinstance(domain, Blocks) else tuple(domain.shape)
    shapes = [tuple(t.shape) for t in tensors]
    if rows == (0,) or any(shape[:1] != rows for shape in shapes):
        raise InputError(f"domain must have one number per example, got {rows} for tensors {shapes}.")
    device = tensors[0].device
    if isinstance(domain, Blocks):
        ids = torch.arange(len(domain.sizes), device=device) if domain.ids is None else domain.ids
        return list(domain.sizes), ids, *tensors
    numbers, start, place, sizes = np.unique(
        domain.numpy(force=True), return_index=True, return_inverse=True, return_counts=True
    )
    if len(numbers) < least:
        raise InputError(
            f"domain is {numbers[0]} in this whole batch of {rows[0]}, and domains are compared: shuffle "
            "domains together, or use a shoal.data.DomainBatchSampler(…, mixed=True)."
        )
    if known is not None and (numbers[0] < 0 or numbers[-1] >= known):
        raise InputError(f"domain must be from 0 to {known - 1}, got {numbers[0]} to {numbers[-1]}.")
    appeared = start.argsort()
    order = torch.from_numpy(appeared.argsort()[place].argsort(kind="stable")).to(device)
    ids = torch.from_numpy(numbers[appeared].astype(np.int64)).to(device)
    return sizes[appeared].tolist(), ids, *(values[order] for values in tensors)


def _mean_loss(loss: Loss, output: Tensor, y: Tensor) -> Tensor:
    value = loss(output, y)
    if value.numel() != 1 or not value.requires_grad:
        raise InputError(
            f"loss must return a mean over examples, one number that depends on the logits, got shape "
            f'{tuple(value.shape)}: leave out reduction="none".'
        )
    return value
