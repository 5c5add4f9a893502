"""Penalties for domain generalization, as plain functions of one mixed batch, for any training loop.

A mixed batch holds B examples from several domains. The tensor ``domain``, of shape (B,), holds the domain
index of each example: integers, in any order. A penalty returns a scalar to add to the loss:

    z = backbone(x)
    logits = head(z)
    loss = cross_entropy(logits, y) + shoal.penalties.coral(z, domain)

To get the features of a model that does not return them, use :class:`shoal.models.FeatureExtractor`. The
algorithms of :mod:`shoal.algorithms` call these same functions. A domain may have a single example in the
batch, or none. Half-precision inputs are converted to float32 and autocast is disabled, so that a penalty is
never computed in half precision; float64 inputs stay float64.

**Batches.** A penalty that compares domains needs examples from at least two domains in each batch, and
several examples per domain for means, covariances and variances to be useful estimates. With few domains a
shuffled loader provides them. :class:`shoal.data.DomainBatchSampler` with ``batch_size=n,
domains_per_step=s, mixed=True`` guarantees it: n examples from each of s domains in every batch.
:class:`shoal.data.WithDomain` adds ``domain`` to the batch.

**BatchNorm.** In one forward pass of a mixed batch, BatchNorm computes its statistics over all domains
pooled. A separate forward pass for each domain normalises the domains separately, which removes differences
in mean and scale before a penalty can measure them. Published code does either, and the choice matters: for
an untrained ResNet-18 on PACS it changes the gradient of a step by 108 % to 137 %. In :func:`shoal.fit`,
``batch_norm="pooled"`` (the default) or ``"per-domain"`` selects one; in your own loop your forward pass
does. Evaluation uses the running statistics in both cases.

**Avoiding GPU synchronization.** To group the examples, a penalty reads the values of ``domain``, so every
call waits for the GPU once. If the examples are already ordered by domain, pass :class:`Blocks` instead of
the tensor. Nothing is then copied back to the host, and CUDA graphs can capture the step; nor are values
checked for NaN or for the range of domain indices. The mixed batches of ``DomainBatchSampler`` are ordered
by domain, in blocks of ``batch_size`` examples::

    penalty = coral(z, Blocks([n] * s))
    loss = group_dro(losses, Blocks([n] * s, ids=domain[::n]), weights)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated, Any, NamedTuple, ParamSpec

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal.errors import InputError, shown
from shoal.settings import Range, checked, coerce
from shoal.tensors import map_nest, widest

P = ParamSpec("P")
Loss = Callable[[Any, Tensor], Tensor]
GAMMAS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
HALF = (torch.float16, torch.bfloat16)


def _eagerly(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Within what torch.compile compiles, which knows no second derivatives, this runs as it is written."""
    eager: Callable[P, Tensor] = torch.compiler.disable(function)
    return eager


class Blocks(NamedTuple):
    """The domains of a batch that is ordered by domain, instead of a tensor ``domain``.

    The first ``sizes[0]`` examples come from one domain, the next ``sizes[1]`` from another, and so on. The
    penalties then do not wait for the GPU.

    Args:
        sizes: the number of examples of each domain in the batch.
        ids: the domain index of each block, a tensor (S,), for :class:`GroupWeights`,
            :class:`FishrVariances` and :class:`DomainDiscriminator`; by default 0, 1, …

    >>> features = torch.tensor([[0.0], [2.0], [1.0], [3.0]])
    >>> coral(features, Blocks([2, 2]))
    tensor(1.)
    """

    sizes: Sequence[int]
    ids: Tensor | None = None


Domain = Tensor | Blocks
Quantile = Annotated[float, Range(above=0, below=1)]


def coral(features: Tensor, domain: Domain) -> Tensor:
    """The distance between the domains' feature means and covariances (CORAL).

    The mean over pairs of domains of ‖μ_i − μ_j‖²/d + ‖C_i − C_j‖²/d², with d features.

    Args:
        features: (B, …), flattened to (B, d).
        domain: (B,), the domain index of each example, or :class:`Blocks`.

    >>> coral(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([7, 5, 7, 5]))
    tensor(1.)

    Reference: Sun and Saenko, Deep CORAL: Correlation Alignment for Deep Domain Adaptation, ECCV 2016; the
    means as in Koh et al., WILDS, 2021.
    """
    blocks, (features,) = _grouped(domain, {"features": features})
    with _full_precision(features) as (features,):
        groups = features.flatten(1).split(blocks.sizes)
        means = torch.stack([z.mean(0) for z in groups])
        # C = AᵀA, with A the centred rows over √(n − 1).
        roots = [(z - m) * max(len(z) - 1, 1) ** -0.5 for z, m in zip(groups, means, strict=True)]
        if (d := means.shape[1]) <= len(features):
            covariances = torch.stack([a.T @ a for a in roots])
            return _mean_over_pairs(means) + _mean_over_pairs(covariances)
        # ⟨C_i, C_j⟩ = ‖A_i A_jᵀ‖² needs no matrix of d². In float64, for it is a difference of squares.
        every = torch.cat(roots).to(widest(features.device))
        squares = (every @ every.T).square()
        products = _cells(squares, blocks.sizes, torch.sum)
        return _mean_over_pairs(means) + (_mean_distance(products) / d**2).to(features.dtype)


def _mean_over_pairs(x: Tensor) -> Tensor:
    """The mean over pairs of rows of the mean square of their difference, from distances to the middle."""
    if len(x) < 2:
        return x.new_zeros(()) * x.sum()
    return 2 / (len(x) - 1) * (x - x.mean(0)).square().flatten(1).mean(1).sum()


def _cells(matrix: Tensor, sizes: Sequence[int], of: Callable[[Tensor], Tensor]) -> Tensor:
    """One number of each block of a matrix (B, B), for pairs of domains."""
    rows = [row.split(list(sizes), dim=1) for row in matrix.split(list(sizes))]
    return torch.stack([torch.stack([of(cell) for cell in row]) for row in rows])


def _mean_distance(products: Tensor) -> Tensor:
    """The mean over pairs of ‖v_i − v_j‖² = ⟨v_i, v_i⟩ + ⟨v_j, v_j⟩ − 2⟨v_i, v_j⟩, from all products."""
    own, count = products.diagonal(), len(products)
    apart = own[:, None] + own[None] - 2 * products  # zero on the diagonal
    return apart.sum() / max(count * (count - 1), 1)


def mmd(features: Tensor, domain: Domain) -> Tensor:
    """The squared maximum mean discrepancy between the domains' features, averaged over pairs (MMD).

    For two domains it is mean k(x, x') + mean k(y, y') − 2 mean k(x, y), with the kernel
    k(x, y) = Σ_γ exp(−γ‖x − y‖²) for γ = 0.001, 0.01, …, 1000.

    Args:
        features: (B, …), flattened to (B, d).
        domain: (B,), the domain index of each example, or :class:`Blocks`.

    >>> mmd(torch.tensor([[0.0], [100.0], [0.0], [100.0]]), torch.tensor([0, 0, 1, 1]))
    tensor(0.)

    Reference: Li et al., Domain Generalization with Adversarial Feature Learning, CVPR 2018; Gretton et al.,
    A Kernel Two-Sample Test, 2012.
    """
    blocks, (features,) = _grouped(domain, {"features": features})
    with _full_precision(features) as (features,):
        # The narrow kernels look at differences that a difference of float32 squares would lose.
        every = features.flatten(1).to(widest(features.device))
        every = every - every.mean(0).detach()
        squares = every.square().sum(1)
        distances = (squares[:, None] + squares[None] - 2 * every @ every.T).clamp(min=0)
        kernel = torch.stack([torch.exp(-gamma * distances) for gamma in GAMMAS]).sum(0)
        return _mean_distance(_cells(kernel, blocks.sizes, torch.mean)).to(features.dtype)


@_eagerly
def irm(logits: Tensor, y: Tensor, domain: Domain, *, loss: Loss = cross_entropy) -> Tensor:
    """The squared gradient of each domain's loss with respect to a scalar factor of the logits (IRMv1).

        1/S Σ_i (∂L_i(w·f)/∂w at w=1)²

    The square is estimated without bias, as the product of the gradients on two halves of a domain's
    examples (those at even and at odd positions), so the penalty may be negative. One domain is enough.

    Args:
        logits: (B, …), the model's output.
        y: (B, …), the targets.
        domain: (B,), the domain index of each example, or :class:`Blocks`.
        loss: ``loss(logits, y)`` returns the mean over examples.

    >>> irm(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])).item()
    0.0

    Reference: Arjovsky et al., Invariant Risk Minimization, 2019.
    """
    blocks, (logits, y) = _grouped(domain, {"logits": logits, "y": y}, least=1)
    with _full_precision(logits, y) as given, _graph(*given) as (finish, (logits, y)):

        def slope(output: Tensor, target: Tensor) -> Tensor:
            scale = torch.ones((), dtype=output.dtype, device=output.device, requires_grad=True)
            value = _mean_loss(loss, output * scale, target)
            return torch.autograd.grad(value, scale, create_graph=True)[0]

        squares = []
        for output, target in zip(logits.split(blocks.sizes), y.split(blocks.sizes), strict=True):
            if len(target) == 1:
                squares.append(slope(output, target).square())
            else:
                squares.append(slope(output[::2], target[::2]) * slope(output[1::2], target[1::2]))
        return finish(torch.stack(squares).mean())


def vrex(losses: Tensor, domain: Domain) -> Tensor:
    """The variance of the domains' mean losses (V-REx): 1/S Σ_i (L_i − L̄)².

    Args:
        losses: (B,), one per example, such as ``cross_entropy(logits, y, reduction="none")``.
        domain: (B,), the domain index of each example, or :class:`Blocks`.

    >>> vrex(torch.tensor([1.0, 3.0, 4.0, 4.0]), torch.tensor([0, 0, 1, 1]))
    tensor(1.)

    Reference: Krueger et al., Out-of-Distribution Generalization via Risk Extrapolation, ICML 2021.
    """
    blocks, (losses,) = _grouped(domain, {"losses": losses})
    with _full_precision(losses) as (losses,):
        return _means(losses, blocks).var(correction=0)


def miro(features: Tensor, pretrained: Tensor, variance: Tensor) -> Tensor:
    """How far features are from those of the pretrained model (MIRO), ½ mean((z − z₀)²/σ² + log σ²).

    A bound on the mutual information of both, up to a constant. Use the sum over several layers, and learn σ²
    with the model, at ten times its learning rate; it begins at 0.1. ::

        variance = softplus(b) + 1e-5  # one for each channel
        loss = cross_entropy(logits, y) + 0.1 * miro(z, z0, variance)

    Args:
        features: z, of any shape.
        pretrained: z₀, the features of a frozen copy of the pretrained model on the same inputs.
        variance: σ², positive, of a shape that broadcasts to ``features``, such as (1, c, 1, 1).

    >>> miro(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0]), torch.tensor([1.0]))
    tensor(0.2500)

    Reference: Cha et al., Domain Generalization by Mutual-Information Regularization with Pre-trained Models,
    ECCV 2022.
    """
    if features.shape != pretrained.shape:
        raise InputError(
            f"features and pretrained must have the same shape, got {tuple(features.shape)} and "
            f"{tuple(pretrained.shape)}."
        )
    with _full_precision(features, pretrained, variance) as (z, other, spread):
        return ((z - other).square() / spread + spread.log()).mean() / 2


def _means(losses: Tensor, blocks: Blocks) -> Tensor:
    return torch.stack([each.mean() for each in losses.split(blocks.sizes)])


class GroupWeights(nn.Module):
    """The state of :func:`group_dro`: one weight per domain, in a buffer. Save it with the model.

    Each call of ``group_dro`` updates the weights, unless ``weights.eval()`` was called. Several processes
    each update their own copy: average ``log_weights`` over processes after each step.

    Args:
        domains: the total number of domains; domain indices are 0 to ``domains − 1``.
        step_size: η, the step size of the weights; with 0 they stay equal.
        dtype: the dtype of the log weights; use float32 on devices without float64.
    """

    log_weights: Tensor

    @checked
    def __init__(
        self,
        domains: Annotated[int, Range(1)],
        step_size: Annotated[float, Range(0)] = 0.01,
        *,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.step_size = step_size
        self.register_buffer("log_weights", torch.zeros(domains, dtype=dtype))


def group_dro(losses: Tensor, domain: Domain, weights: GroupWeights) -> Tensor:
    """The weighted loss of GroupDRO, Σ_d q_d L_d, to minimise instead of the mean loss.

    Domains with a high loss get a higher weight: q_d ∝ exp(η Σ L_d), summed over the batches that contain the
    domain. If a batch contains S of T domains, the loss is multiplied by T/S, so that its expectation is the
    loss over all domains.

    Args:
        losses: (B,), one per example, such as ``cross_entropy(logits, y, reduction="none")``.
        domain: (B,), the domain index of each example, from 0, or :class:`Blocks`.
        weights: the state, on the same device; each call updates it.

    >>> group_dro(torch.tensor([1.0, 3.0]), torch.tensor([0, 1]), GroupWeights(2, step_size=0.0))
    tensor(2.)

    Reference: Sagawa et al., Distributionally Robust Neural Networks for Group Shifts, ICLR 2020.
    """
    _check_state("weights", weights, GroupWeights, losses)
    kept = weights.log_weights
    blocks, (losses,) = _grouped(domain, {"losses": losses}, least=1, known=len(kept))
    with _full_precision(losses) as (losses,):
        each, ids = _means(losses, blocks), _ids(blocks, losses.device)
        with torch.no_grad():
            if weights.training:
                kept.index_add_(0, ids, weights.step_size * each.to(kept.dtype))
                kept -= kept.logsumexp(0)
            share = kept.softmax(0)[ids].to(each.dtype)
        return (share * each).sum() * (len(kept) / len(each))


@_eagerly
def quantile_risk(losses: Tensor, domain: Domain, quantile: Quantile = 0.75) -> Tensor:
    """The α-quantile of the domains' mean losses, to minimise instead of the mean loss (EQRM).

    The distribution of the S losses is a kernel density estimate with Gaussian kernels of width h. The result
    k solves

        1/S Σ_i Φ((k − L_i)/h) = α,    h = 1.06 σ S^(−1/5)

    with σ the sample standard deviation of the L_i (the normal reference rule). Its derivative is that of
    this equation. Above α = 1/2 the quantile grows with the spread of the losses. One domain's quantile is
    its loss, that of equal losses their mean.

    Args:
        losses: (B,), one per example, such as ``cross_entropy(logits, y, reduction="none")``.
        domain: (B,), the domain index of each example, or :class:`Blocks`.
        quantile: α: the share of domains, like those of the batch, whose loss is to be below the result.

    >>> quantile_risk(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 1, 2]), quantile=0.5)
    tensor(2.)

    Reference: Eastwood et al., Probable Domain Generalization via Quantile Risk Minimization, NeurIPS 2022.
    """
    quantile = coerce(Quantile, quantile, "quantile")
    blocks, (losses,) = _grouped(domain, {"losses": losses}, least=1)
    with _full_precision(losses) as (losses,):
        each = _means(losses, blocks).to(widest(losses.device))
        mean = each.mean()
        square = (each - mean).square().sum() / max(1, len(each) - 1)
        spread = torch.where(square > 0, square, 1).sqrt()
        found = mean + spread * _kernel_quantile((each - mean) / spread, quantile)
        return torch.where(square > 0, found, mean).to(losses.dtype)


def _kernel_quantile(points: Tensor, quantile: float) -> Tensor:
    """The quantile of standardised points: of a sum of normal distributions of the width of their rule.

    It lies between that of the lowest and that of the highest kernel. Every round of the search looks at 256
    places at a time: bisection, eight halvings at once. The slope of the root is that of the equation it
    solves, dk/du_i = φ_i/Σφ, where φ_i is the density of kernel i at k.
    """
    width = 1.06 * len(points) ** -0.2
    with torch.no_grad():
        low = points.min() + width * NormalDist().inv_cdf(quantile)
        step = points.max() - points.min()
        places = torch.arange(256, dtype=points.dtype, device=points.device)
        for _ in range(7):
            step = step / len(places)
            tried = low + step * places
            below = torch.special.ndtr((tried[:, None] - points) / width).mean(1) <= quantile
            low = low + step * (below.sum() - 1).clamp(min=0)
        share = (-((low - points) / width).square() / 2).softmax(0)
    found: Tensor = low + (share * (points - points.detach())).sum()
    return found


class FishrVariances(nn.Module):
    """The state of :func:`fishr`: a moving average of each domain's gradient variances, in a buffer.

    Save it with the model. Each call of ``fishr`` updates the domains in the batch, unless
    ``variances.eval()`` was called. Several processes each update their own copy: average ``smoothed`` over
    processes after each step.

    Args:
        domains: the total number of domains; domain indices are 0 to ``domains − 1``.
        features: the number of inputs of the last layer.
        outputs: the number of outputs of the last layer.
        bias: whether the last layer has a bias.
        ema: κ, the decay of the moving average.
        dtype: the dtype of the buffer.
    """

    smoothed: Tensor

    @checked
    def __init__(
        self,
        domains: Annotated[int, Range(1)],
        features: Annotated[int, Range(1)],
        outputs: Annotated[int, Range(1)],
        *,
        bias: bool = True,
        ema: Annotated[float, Range(0, below=1)] = 0.95,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.bias, self.ema = bias, ema
        self.register_buffer("smoothed", torch.zeros(domains, outputs * (features + bias), dtype=dtype))


@_eagerly
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
    features and r is the gradient with respect to its logits. The variances therefore need no backward pass
    per example:

        Var(W) = mean(r²)(z²)ᵀ − (mean r zᵀ)²,   Var(b) = mean r² − (mean r)²

    The penalty is the mean squared deviation of the domains' variances v_d from their mean. With
    ``variances`` it uses moving averages over batches, m_d ← κ m_d + (1 − κ) v_d, divided by 1 − κ so that
    the gradient with respect to v_d does not depend on κ.

    Args:
        logits: (B, …), the output of the last layer, which must be linear.
        features: (B, …), the input of the last layer, flattened to (B, d).
        y: (B, …), the targets.
        domain: (B,), the domain index of each example, or :class:`Blocks`; with ``variances``, from 0.
        loss: ``loss(logits, y)`` returns the mean over examples.
        variances: the state; without it, only this batch is used.
        bias: whether the last layer has a bias; ignored if ``variances`` is passed, which has its own.

    >>> z = torch.tensor([[1.0], [2.0], [1.0], [2.0]])
    >>> fishr(z @ torch.ones(1, 2), z, torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])).item()
    0.0

    Reference: Rame et al., Fishr: Invariant Gradient Variances for Out-of-Distribution Generalization, ICML
    2022.
    """
    if variances is not None:
        _check_state("variances", variances, FishrVariances, features)
        bias = variances.bias
    known = None if variances is None else len(variances.smoothed)
    every = {"features": features, "logits": logits, "y": y}
    blocks, (features, logits, y) = _grouped(domain, every, known=known)
    with (
        _full_precision(features, logits, y) as given,
        _graph(*given) as (finish, (features, logits, y)),
    ):
        kind = torch.promote_types(features.dtype, logits.dtype)
        features, logits = features.to(kind), logits.to(kind)
        split = [t.split(blocks.sizes) for t in (logits, features, y)]
        each = [_gradient_variances(loss, o, z, t, bias) for o, z, t in zip(*split, strict=True)]
        found = torch.stack(each)
        if variances is not None:
            found = _smoothed(found, variances, _ids(blocks, found.device))
        return finish((found - found.mean(0)).square().mean())


def _gradient_variances(loss: Loss, logits: Tensor, features: Tensor, y: Tensor, bias: bool) -> Tensor:
    """Of the examples' gradients of the last layer, weights and then biases."""
    z, count = features.flatten(1), len(features)
    output = logits if logits.requires_grad else logits.detach().requires_grad_()
    (slope,) = torch.autograd.grad(_mean_loss(loss, output, y), output, create_graph=True)
    r = slope.reshape(count, -1) * count  # the loss is a mean
    weights = r.square().T @ z.square() / count - (r.T @ z / count).square()
    return torch.cat([weights.flatten(), r.var(0, correction=0)]) if bias else weights.flatten()


def _smoothed(found: Tensor, variances: FishrVariances, ids: Tensor) -> Tensor:
    kept = variances.smoothed
    if kept.shape[1] != found.shape[1]:
        raise InputError(
            f"variances has {kept.shape[1]} numbers per domain, and these features and logits have "
            f"{found.shape[1]}: create it with FishrVariances(domains, features, outputs)."
        )
    smooth = torch.lerp(found, kept[ids].to(found.dtype), variances.ema)
    if variances.training:
        with torch.no_grad():
            kept.index_copy_(0, ids, smooth.detach().to(kept.dtype))
    return smooth / (1 - variances.ema)


class DomainDiscriminator(nn.Module):
    """A multilayer perceptron that predicts the domain from the features, for DANN and CDANN.

    Calling it as ``discriminator(features, domain)`` returns its loss behind a gradient-reversal layer.
    Minimising that loss trains the discriminator to predict the domain, while the model receives the gradient
    times −λ and learns features from which the domain cannot be predicted. One optimizer trains both:

        discriminator = DomainDiscriminator(512, domains=4)
        optimizer = Adam([*model.parameters(), *discriminator.parameters()])
        loss = cross_entropy(head(z), y) + discriminator(z, domain)

    :meth:`loss` returns the same value without the reversal, for separate optimizers.

    With ``classes`` it is the discriminator of CDANN, called as ``discriminator(features, domain, y)``: it
    also receives the class, as a learned vector that is added to the features, and every class has the same
    weight in its loss. The domains may then differ in their class frequencies.

    Args:
        features: the number of features per example; the ``width`` of a
            :class:`~shoal.models.FeatureExtractor` after the first forward pass.
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

    @checked
    def __init__(
        self,
        features: Annotated[int, Range(1)],
        domains: Annotated[int, Range(1)],
        *,
        width: Annotated[int, Range(1)] = 256,
        depth: Annotated[int, Range(1)] = 3,
        dropout: Annotated[float, Range(0, below=1)] = 0.0,
        classes: Annotated[int, Range(1)] | None = None,
        weight: Annotated[float, Range(0)] = 1.0,
    ) -> None:
        super().__init__()
        self.features, self.domains, self.weight = features, domains, weight
        widths = [features, *[width] * (depth - 1)]
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], domains))
        self.classes = None if classes is None else nn.Embedding(classes, features)

    def forward(self, features: Tensor, domain: Domain, y: Tensor | None = None) -> Tensor:
        """The loss behind the gradient reversal; the classes ``y`` are for one created with ``classes``."""
        blocks, features, y = self._grouped(features, domain, y)
        reverse: Callable[[Tensor, float], Tensor] = _Reversed.apply
        return self._mean(reverse(features, self.weight), blocks, y)

    def loss(
        self,
        features: Tensor,
        domain: Domain,
        y: Tensor | None = None,
        *,
        gradient_penalty: float | Tensor = 0.0,
    ) -> Tensor:
        """The cross-entropy of the predicted domains, plus ``gradient_penalty`` times a penalty.

        It is the mean over examples or, if the discriminator was created with ``classes``, the mean of the
        means of the classes in the batch. The penalty is the mean over examples of ‖∂CE/∂z‖², with z an
        example's features; it keeps the discriminator smooth. Both are of the same forward pass.
        """
        blocks, features, y = self._grouped(features, domain, y)
        if not gradient_penalty:
            return self._mean(features, blocks, y)
        return self._penalised(features, blocks, y, gradient_penalty)

    @_eagerly
    def _penalised(self, features: Tensor, blocks: Blocks, y: Tensor | None, by: float | Tensor) -> Tensor:
        given = [features] if y is None else [features, y]
        with _full_precision(*given) as given, _graph(*given) as (finish, (z, *rest)):
            y = rest[0] if rest else None
            z = z if z.requires_grad else z.detach().requires_grad_()
            each = self._losses(z, blocks, y)
            (slope,) = torch.autograd.grad(each.sum(), z, create_graph=True)
            penalty = slope.flatten(1).square().sum(1).mean()
            return finish(self._weighted(each, y) + by * penalty)

    def _mean(self, features: Tensor, blocks: Blocks, y: Tensor | None) -> Tensor:
        with _full_precision(features) as (features,):
            return self._weighted(self._losses(features, blocks, y), y)

    def _weighted(self, each: Tensor, y: Tensor | None) -> Tensor:
        if self.classes is None or y is None:
            weights = torch.full_like(each, 1 / len(each), dtype=widest(each.device))
        else:
            counts = y.new_zeros(self.classes.num_embeddings).index_add(0, y, torch.ones_like(y))
            weights = 1 / (counts[y] * (counts > 0).sum()).to(widest(y.device))
        return (weights.to(each.dtype) * each).sum()

    def _losses(self, features: Tensor, blocks: Blocks, y: Tensor | None) -> Tensor:
        """One per example."""
        z = features.flatten(1).to(next(self.parameters()).dtype)
        if self.classes is not None and y is not None:
            z = z + self.classes(y)
        ids = _ids(blocks, z.device)
        domain = torch.cat([n.expand(size) for n, size in zip(ids, blocks.sizes, strict=True)])
        return cross_entropy(self.layers(z), domain, reduction="none")

    def _grouped(
        self, features: Tensor, domain: Domain, y: Tensor | None
    ) -> tuple[Blocks, Tensor, Tensor | None]:
        if (y is None) != (self.classes is None):
            raise InputError(
                "y is missing: DomainDiscriminator(…, classes=…) takes discriminator(features, domain, y)."
                if y is None
                else "y is for a DomainDiscriminator(…, classes=…), and this one has no classes; remove it."
            )
        given = {"features": features} if y is None else {"features": features, "y": y}
        blocks, (features, *rest) = _grouped(domain, given, least=1, known=self.domains)
        if features[0].numel() != self.features:
            raise InputError(
                f"features must have {self.features} numbers per example, as the discriminator was made for, "
                f"got {features[0].numel()}."
            )
        if y is not None and self.classes is not None:
            if y.ndim != 1 or y.is_floating_point() or y.dtype == torch.bool:
                raise InputError(f"y must be classes, whole numbers (B,), got {_described(y)}.")
            wrong = None if isinstance(domain, Blocks) else _outside(y, self.classes.num_embeddings)
            if wrong is not None:
                raise InputError(
                    f"y has the class {wrong}, and the discriminator was made for classes from 0 to "
                    f"{self.classes.num_embeddings - 1}."
                )
        return blocks, features, rest[0] if rest else None


class _Reversed(torch.autograd.Function):
    """The identity, with −λ times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * gradient, None


@checked
def mixup(
    x: Any,
    y: Tensor,
    domain: Domain,
    *,
    alpha: Annotated[float, Range(above=0)] = 0.2,
    shares: Tensor | None = None,
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Mixes the examples of each domain with those of another, λ x_i + (1 − λ) x_j (inter-domain Mixup).

    Each domain is paired with the next, in the order in which they appear in the batch, and the last with the
    first. Each pair of domains gets one λ from Beta(α, α). If one of the two has more examples, the surplus
    is not used in that pair. Pass the mixed inputs to the model, and mix the losses as well:

        x, y, y_other, share = mixup(x, y, domain)
        logits = model(x)
        losses, others = (cross_entropy(logits, t, reduction="none") for t in (y, y_other))
        loss = (share * losses + (1 - share) * others).mean()

    Args:
        x: (B, …), or a nested list, tuple or dict of such tensors; features if inputs cannot be mixed. uint8
            images stay uint8.
        y: (B, …), the targets.
        domain: (B,), the domain index of each example, or :class:`Blocks`.
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
    map_nest(lambda part: parts.append(part) if isinstance(part, Tensor) and part.ndim else None, x)
    if not parts:
        raise InputError(f"x must be a tensor (B, …) or a nest of them, got {shown(x)}.")
    given = {"y": y} | {f"x[{n}]" if n else "x": part for n, part in enumerate(parts)}
    blocks, (y, *parts) = _grouped(domain, given)
    count = len(blocks.sizes)
    if shares is None:
        shares = mixup_shares(count, alpha, y.device)
    elif not isinstance(shares, Tensor) or shares.shape != (count,) or shares.device != y.device:
        raise InputError(f"shares must be a tensor ({count},), one λ per domain, got {_described(shares)}.")
    others = [*range(1, count), 0]
    sizes = [min(blocks.sizes[a], blocks.sizes[b]) for a, b in enumerate(others)]

    def own(values: Tensor) -> list[Tensor]:
        return [v[:n] for v, n in zip(values.split(blocks.sizes), sizes, strict=True)]

    def other(values: Tensor) -> list[Tensor]:
        each = values.split(blocks.sizes)
        return [each[b][:n] for b, n in zip(others, sizes, strict=True)]

    def mixed(values: Tensor) -> Tensor:
        triples = zip(other(values), own(values), shares, strict=True)
        if values.dtype == torch.uint8:  # images: rounded, since a model may take floats for another scale
            found = [torch.lerp(b.float(), a.float(), share.float()) for b, a, share in triples]
            return torch.cat(found).round().to(torch.uint8)
        return torch.cat([torch.lerp(b, a, share.to(a.dtype)) for b, a, share in triples])

    ordered = iter(parts)
    x = map_nest(lambda p: mixed(next(ordered)) if isinstance(p, Tensor) and p.ndim else p, x)
    share = torch.cat([s.expand(n) for s, n in zip(shares, sizes, strict=True)])
    share = share.to(torch.promote_types(parts[0].dtype, torch.float32))
    return x, torch.cat(own(y)), torch.cat(other(y)), share


def mixup_shares(count: int, alpha: float, device: torch.device) -> Tensor:
    """Sample from Beta(α, α).

    The values are X/(X + Y) of two samples from Gamma(α), computed from their logarithms, because samples
    with a small α are often below the smallest floating-point number. Gamma(α) is Gamma(α + 1) times U^(1/α).

    Args:
        count: number of values.
        alpha: α.
        device: device of the values.
    """
    alphas = torch.full((count, 2), alpha, dtype=widest(device), device=device)
    logs = torch._standard_gamma(alphas + 1).log() + torch.rand_like(alphas).log() / alphas
    return torch.sigmoid(logs[:, 0] - logs[:, 1])


# What all of them check, and how examples are grouped


def _grouped(
    domain: Domain, tensors: Mapping[str, Tensor], *, least: int = 2, known: int | None = None
) -> tuple[Blocks, list[Tensor]]:
    """The tensors with their examples ordered by domain, as the domains first appear, and those domains.

    With ``known``, the domains' numbers must be from 0 to that. Targets, called ``y``, may be anything; the
    others hold finite floating-point numbers.
    """
    first = next(iter(tensors))
    for name, values in tensors.items():
        _check_tensor(name, values, first, tensors[first])
    count, device = len(tensors[first]), tensors[first].device
    if isinstance(domain, Blocks):
        _check_blocks(domain, count, first, device, known)
        return Blocks(list(domain.sizes), domain.ids), list(tensors.values())
    _check_domain(domain, count, first, device)
    ids, start, place, sizes = np.unique(
        domain.detach().cpu().numpy(), return_index=True, return_inverse=True, return_counts=True
    )
    if len(ids) < least:
        raise InputError(
            f"domain has one domain only, {ids[0]}, in this batch of {count}: examples of at least 2 are "
            "compared. Shuffle domains together, or use a shoal.data.DomainBatchSampler(…, mixed=True)."
        )
    if known is not None and (ids[0] < 0 or ids[-1] >= known):
        raise InputError(
            f"domain has the number {ids[0] if ids[0] < 0 else ids[-1]}, and the state was made for {known} "
            f"domains, domains={known}: numbers must be from 0 to {known - 1}."
        )
    for name, values in tensors.items():
        if name != "y" and not bool(torch.isfinite(values.detach()).all()):
            raise InputError(
                f"{name} has values that are not finite (NaN or infinity). Skip this batch, or find the "
                "cause: often a learning rate that is too high, or float16 overflow."
            )
    turn = start.argsort()
    order = torch.from_numpy(turn.argsort()[place].argsort(kind="stable")).to(device)
    blocks = Blocks(sizes[turn].tolist(), torch.from_numpy(ids[turn].astype(np.int64)).to(device))
    return blocks, [values[order] for values in tensors.values()]


def _check_tensor(name: str, values: Any, first: str, other: Tensor) -> None:
    if not isinstance(values, Tensor):
        raise InputError(f"{name} must be a tensor with one row per example, got {shown(values)}.")
    if values.ndim == 0:
        hint = ': compute them with reduction="none"' if name == "losses" else ""
        raise InputError(f"{name} must have one value or row per example, got a single number{hint}.")
    if name == "losses" and values.ndim != 1:
        raise InputError(f"losses must be one number per example, (B,), got {_described(values)}.")
    images = name.startswith("x") and values.dtype == torch.uint8
    if name != "y" and not (values.is_floating_point() or images):
        hint = {
            "features": ": pass what the model computes before its last layer, not inputs or token ids",
            "x": ", which has nothing between its values: mix features in place of token ids",
        }.get(name.partition("[")[0], "")
        raise InputError(f"{name} must be floating-point numbers, got {values.dtype}{hint}.")
    if values.numel() == 0:
        raise InputError(f"{name} is empty: its shape is {tuple(values.shape)}.")
    if len(values) != len(other):
        raise InputError(f"{name} has {len(values)} examples, and {first} has {len(other)}.")
    if values.device != other.device:
        raise InputError(f"{name} is on {values.device}, and {first} on {other.device}.")


def _check_blocks(domain: Blocks, count: int, first: str, device: torch.device, known: int | None) -> None:
    """By shape; to look at the ids would wait for the device."""
    sizes, ids = domain
    whole = isinstance(sizes, Sequence) and all(isinstance(n, (int, np.integer)) and n >= 1 for n in sizes)
    if not whole or not sizes or sum(sizes) != count:
        raise InputError(
            f"domain: the sizes of Blocks must be positive and add up to {count}, as {first} has; "
            f"got {shown(sizes)}."
        )
    if ids is not None and (
        not isinstance(ids, Tensor)
        or ids.shape != (len(sizes),)
        or ids.dtype not in (torch.int64, torch.int32)
        or ids.device != device
    ):
        raise InputError(
            f"domain: the ids of Blocks must be a tensor ({len(sizes)},) of int64 on {device}, one number "
            f"per size; got {_described(ids)}."
        )
    if ids is None and known is not None and len(sizes) > known:
        raise InputError(f"domain has {len(sizes)} blocks, and the state was made for {known} domains.")


def _check_domain(domain: Any, count: int, first: str, device: torch.device) -> None:
    if not isinstance(domain, Tensor):
        raise InputError(f"domain must be a tensor (B,) of whole numbers, got {shown(domain)}.")
    if domain.is_floating_point() or domain.is_complex() or domain.dtype == torch.bool:
        raise InputError(f"domain must be whole numbers, one per example, got {domain.dtype}: domain.long().")
    if domain.shape != (count,):
        raise InputError(
            f"domain must have one number per example, ({count},) as {first} has, got {tuple(domain.shape)}."
        )
    if domain.device != device:
        raise InputError(
            f"domain is on {domain.device}, and {first} on {device}: domain.to({str(device)!r})."
        )
    if domain.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InputError(
            "domain must be read while a CUDA graph is captured: order the examples by domain, and pass "
            "shoal.penalties.Blocks(sizes) in its place."
        )


def _check_state(name: str, state: Any, kind: type[nn.Module], values: Any) -> None:
    if not isinstance(state, kind):
        raise InputError(f"{name} must be a shoal.penalties.{kind.__name__}, got {shown(state)}.")
    device = next(state.buffers()).device
    if isinstance(values, Tensor) and values.device != device:
        raise InputError(f"{name} is on {device}, and the batch on {values.device}: move it with .to(…).")


def _described(values: Any) -> str:
    if isinstance(values, Tensor):
        return f"a tensor {tuple(values.shape)} of {values.dtype} on {values.device}"
    return shown(values)


def _outside(y: Tensor, count: int) -> int | None:
    least, most = (int(v) for v in y.aminmax())
    return least if least < 0 else most if most >= count else None


def _ids(blocks: Blocks, device: torch.device) -> Tensor:
    return torch.arange(len(blocks.sizes), device=device) if blocks.ids is None else blocks.ids


def _mean_loss(loss: Loss, output: Tensor, y: Tensor) -> Tensor:
    if not callable(loss):
        raise InputError(f"loss must be a function of logits and y, got {shown(loss)}.")
    value = loss(output, y)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InputError(
            f"loss must return a mean over examples, one number, got {_described(value)}: "
            'leave out reduction="none".'
        )
    if not value.requires_grad:
        raise InputError("loss must return a number that depends on the logits that it is given.")
    return value


@contextmanager
def _full_precision(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Half-precision tensors as float32, and no autocast in this block."""
    kind = tensors[0].device.type
    full = [t.float() if t.dtype in HALF else t for t in tensors]
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        yield full
        return
    with torch.autocast(kind, enabled=False):
        yield full


@contextmanager
def _graph(*tensors: Tensor) -> Iterator[tuple[Callable[[Tensor], Tensor], list[Tensor]]]:
    """Derivatives can be taken in this block, under ``torch.no_grad()`` too: the result has no graph then.

    So they can in inference mode, by copies: tensors that were made in it are in no graph.
    """
    wanted = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        own = [t.clone() if t.is_inference() else t for t in tensors]
        yield lambda result: result if wanted else result.detach(), own
