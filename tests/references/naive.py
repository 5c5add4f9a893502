"""What Shoal computes, written the slow and obvious way: double loops, whole graphs, copied models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Gradients = Sequence[Sequence[Tensor]]


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.dot(torch.cat([x.reshape(-1) for x in a]), torch.cat([y.reshape(-1) for y in b]))


def mean_inner_product(gradients: Gradients) -> Tensor:
    """1/(S(S−1)) Σ_{i≠j} g_i·g_j over ordered pairs."""
    total, pairs = 0.0, 0
    for i, a in enumerate(gradients):
        for j, b in enumerate(gradients):
            if i != j:
                total, pairs = total + dot(a, b), pairs + 1
    return total / pairs


def mean_cosine(gradients: Gradients) -> Tensor:
    """The same of g/‖g‖."""
    return mean_inner_product([[x / dot(g, g).sqrt() for x in g] for g in gradients])


def match(
    losses: Sequence[Tensor], params: Sequence[Tensor], *, normalize: bool = False
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """ḡ, the GIP (or cosine) and its gradient, by autograd through the double loop over all S graphs."""
    gradients = [_gradient(loss, params, create_graph=True) for loss in losses]
    value = mean_cosine(gradients) if normalize else mean_inner_product(gradients)
    slope = [torch.zeros_like(p) for p in params]
    if value.requires_grad:
        slope = _gradient(value, params)
    mean = [sum(g[n] for g in gradients).detach() / len(gradients) for n in range(len(params))]
    return mean, value.detach(), slope


def variance(losses: Sequence[Tensor], params: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """ḡ, the trace of the covariance of the gradients and its gradient, a component at a time."""
    gradients = [_flat(_gradient(loss, params, create_graph=True)) for loss in losses]
    value = torch.zeros((), dtype=params[0].dtype)
    for component in zip(*[g.unbind() for g in gradients], strict=True):
        middle = sum(component) / len(component)
        value = value + sum((c - middle) ** 2 for c in component) / len(component)
    average = [sum(_gradient(loss, params)[n] for loss in losses) / len(losses) for n in range(len(params))]
    return average, value.detach(), _gradient(value, params)


def _gradient(loss: Tensor, params: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    grads = torch.autograd.grad(loss, params, create_graph=create_graph, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)]


class CopyingFish:
    """Fish as the paper's algorithm box has it: copy the model, walk the copy, blend, load back.

    ``optimizer_of(parameters)`` makes the walking optimizer; with ``carry`` its state goes from copy to copy.
    A batch of ``None`` stands for a step that was skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_of: Callable[[list[nn.Parameter]], Optimizer],
        meta_lr: float,
        inner_state: str = "carry",
    ) -> None:
        self.model, self.optimizer_of = model, optimizer_of
        self.meta_lr, self.inner_state = meta_lr, inner_state
        self.saved: dict | None = None

    def walk(
        self,
        batches: Sequence,
        loss: Callable[[nn.Module, object], Tensor],
        before_step: Callable[[nn.Module, Optimizer], None] = lambda model, optimizer: None,
    ) -> None:
        """One walk over ``batches``: S inner steps on a copy, then θ ← lerp(θ, θ̃, ε)."""
        fast = copy.deepcopy(self.model)
        optimizer = self.optimizer_of(list(fast.parameters()))
        if self.inner_state == "carry" and self.saved is not None:
            optimizer.load_state_dict(self.saved)
        for batch in batches:
            optimizer.zero_grad()
            if batch is not None:
                loss(fast, batch).backward()
                before_step(fast, optimizer)
                optimizer.step()
        self.saved = copy.deepcopy(optimizer.state_dict())
        with torch.no_grad():
            blended = [
                torch.lerp(slow, walked, self.meta_lr)
                for slow, walked in zip(self.model.parameters(), fast.parameters(), strict=True)
            ]
            for slow, new in zip(self.model.parameters(), blended, strict=True):
                slow.copy_(new)


Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Sequence[tuple[Tensor, Tensor, int]]
"""The batches of one step: x, y and the domain's number."""


class Reference:
    """The gradient that an algorithm's paper prints, by autograd over the graph of the whole step.

    ``weights`` are the penalty's, one a step.
    """

    def __init__(self, model: nn.Module, loss: Loss, weights: Iterable[float] = ()) -> None:
        self.model, self.loss, self.weights = model, loss, iter(weights)
        self.params = list(model.parameters())

    def each(self, batches: Batches) -> list[Tensor]:
        return [self.loss(self.model(x), y) for x, y, *_ in batches]

    def penalty(self, batches: Batches) -> Tensor:
        raise NotImplementedError

    def objective(self, batches: Batches) -> Tensor:
        return mean(self.each(batches)) + next(self.weights) * self.penalty(batches)

    def gradient(self, batches: Batches) -> list[Tensor]:
        return _gradient(self.objective(batches), self.params)

    def apart(self, batches: Batches) -> list[Tensor]:
        """One flat gradient a domain."""
        return [_flat(_gradient(loss, self.params)) for loss in self.each(batches)]

    def unflat(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self.params])
        return [part.reshape(p.shape) for part, p in zip(parts, self.params, strict=True)]


def mean(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total / len(values)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


class MeanOfMeans(Reference):
    def objective(self, batches: Batches) -> Tensor:
        return mean(self.each(batches))


class Pooled(Reference):
    """Every example counts the same, whatever domain it comes from."""

    def objective(self, batches: Batches) -> Tensor:
        return mean([self.loss(self.model(x[[i]]), y[[i]]) for x, y, *_ in batches for i in range(len(y))])


class SAM(Pooled):
    def __init__(self, model: nn.Module, loss: Loss, rho: float) -> None:
        super().__init__(model, loss)
        self.rho = rho

    def gradient(self, batches: Batches) -> list[Tensor]:
        up = super().gradient(batches)
        length = sum(float((g**2).sum()) for g in up) ** 0.5
        start = [p.detach().clone() for p in self.params]
        for p, g in zip(self.params, up, strict=True):
            p.data = p.data + self.rho / length * g
        there = super().gradient(batches)
        for p, s in zip(self.params, start, strict=True):
            p.data = s
        return there


class SAGM(Pooled):
    def __init__(self, model: nn.Module, loss: Loss, rho: float, alpha: float) -> None:
        super().__init__(model, loss)
        self.rho, self.alpha = rho, alpha

    def gradient(self, batches: Batches) -> list[Tensor]:
        here = super().gradient(batches)
        length = sum(float((g**2).sum()) for g in here) ** 0.5
        start = [p.detach().clone() for p in self.params]
        for p, g in zip(self.params, here, strict=True):
            p.data = p.data + self.rho * g / length - self.alpha * g
        there = super().gradient(batches)
        for p, s in zip(self.params, start, strict=True):
            p.data = s
        return [(a + b) / 2 for a, b in zip(here, there, strict=True)]


def quantile_of(losses: Sequence[Tensor], quantile: float) -> Tensor:
    """The root k of F(k) = α by bisection, and its slope −(∂F/∂L_i)/(∂F/∂k), by autograd of F."""

    def distribution(at: Tensor, each: Sequence[Tensor]) -> Tensor:
        count, middle = len(each), mean(each)
        sigma = (sum((x - middle) ** 2 for x in each) / (count - 1)) ** 0.5
        width = 1.06 * sigma * count ** (-1 / 5)
        return mean([(1 + torch.erf((at - x) / width / 2**0.5)) / 2 for x in each])

    values = [loss.detach().clone().requires_grad_() for loss in losses]
    low, high = float(min(losses).detach()) - 100, float(max(losses).detach()) + 100
    for _ in range(100):
        middle = (low + high) / 2
        below = bool(distribution(torch.tensor(middle, dtype=values[0].dtype), values) < quantile)
        low, high = (middle, high) if below else (low, middle)
    root = torch.tensor(low, dtype=values[0].dtype, requires_grad=True)
    at, *slopes = torch.autograd.grad(distribution(root, values), [root, *values])
    return root.detach() - sum(
        slope / at * (loss - loss.detach()) for slope, loss in zip(slopes, losses, strict=True)
    )


class EQRM(Reference):
    def __init__(self, model: nn.Module, loss: Loss, quantile: float) -> None:
        super().__init__(model, loss)
        self.quantile = quantile

    def objective(self, batches: Batches) -> Tensor:
        return quantile_of(self.each(batches), self.quantile)


def irm(outputs: Sequence[Tensor], targets: Sequence[Tensor], loss: Loss) -> Tensor:
    """The product of two halves' slopes by a factor of the output, domain by domain."""
    squares = []
    for output, y in zip(outputs, targets, strict=True):
        slopes = []
        for half in (0, 1):
            which = [i for i in range(len(y)) if i % 2 == half] or [0]
            w = torch.ones(1, dtype=output.dtype, requires_grad=True)
            value = loss(w * output[which], y[which])
            slopes.append(torch.autograd.grad(value, w, create_graph=True)[0])
        squares.append(slopes[0] * slopes[1])
    return mean(squares).sum()


class IRM(Reference):
    def penalty(self, batches: Batches) -> Tensor:
        return irm([self.model(x) for x, *_ in batches], [y for _, y, *_ in batches], self.loss)


def variance_of_losses(losses: Sequence[Tensor]) -> Tensor:
    return mean([(loss - mean(losses)) ** 2 for loss in losses])


class VREx(Reference):
    def penalty(self, batches: Batches) -> Tensor:
        return variance_of_losses(self.each(batches))


class IGA(Reference):
    def penalty(self, batches: Batches) -> Tensor:
        gradients = [_flat(_gradient(loss, self.params, create_graph=True)) for loss in self.each(batches)]
        middle = mean(gradients)
        return mean([((g - middle) ** 2).sum() for g in gradients])


def coral(features: Sequence[Tensor]) -> Tensor:
    d, every = features[0].shape[1], [_moments(z) for z in features]
    found = []
    for i in range(len(every)):
        for j in range(i):
            (m, c), (n, e) = every[i], every[j]
            apart = sum((m[a] - n[a]) ** 2 for a in range(d)) / d
            found.append(apart + sum((c[a][b] - e[a][b]) ** 2 for a in range(d) for b in range(d)) / d**2)
    return mean(found)


def _moments(z: Tensor) -> tuple[list[Tensor], list[list[Tensor]]]:
    n, d = z.shape
    middle = [mean([z[i, a] for i in range(n)]) for a in range(d)]
    parts = [z[:, a] - middle[a] for a in range(d)]
    return middle, [[sum(parts[a] * parts[b]) / max(n - 1, 1) for b in range(d)] for a in range(d)]


class CORAL(Reference):
    def penalty(self, batches: Batches) -> Tensor:
        return coral([self.model.features(x) for x, *_ in batches])


def mmd(features: Sequence[Tensor]) -> Tensor:
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return sum(torch.exp(-(10.0**power) * ((x - y) ** 2).sum()) for power in range(-3, 4))

    def similar(a: Tensor, b: Tensor) -> Tensor:
        return mean([kernel(x, y) for x in a for y in b])

    pairs = [(features[i], features[j]) for i in range(len(features)) for j in range(i)]
    return mean([similar(a, a) + similar(b, b) - 2 * similar(a, b) for a, b in pairs])


class MMD(Reference):
    def penalty(self, batches: Batches) -> Tensor:
        return mmd([self.model.features(x) for x, *_ in batches])


class Fishr(Reference):
    """The gradients of the last layer one example at a time."""

    def __init__(self, model: nn.Module, loss: Loss, weights: Iterable[float], ema: float) -> None:
        super().__init__(model, loss, weights)
        (self.last,) = [m for m in model.head.modules() if isinstance(m, nn.Linear)]
        self.ema, self.kept = ema, dict[int, Tensor]()

    def variances(self, x: Tensor, y: Tensor) -> Tensor:
        last = list(self.last.parameters())
        each = []
        for i in range(len(y)):
            loss = self.loss(self.model(x[[i]]), y[[i]])
            each.append(_flat(_gradient(loss, last, create_graph=True)))
        middle = mean(each)
        return mean([(g - middle) ** 2 for g in each])

    def penalty(self, batches: Batches) -> Tensor:
        smooth = []
        for x, y, d, *_ in batches:
            found = self.variances(x, y)
            old = self.kept.get(d, torch.zeros_like(found))
            smooth.append(self.ema * old + (1 - self.ema) * found)
            self.kept[d] = smooth[-1].detach()
        smooth = [s / (1 - self.ema) for s in smooth]
        return mean([((s - mean(smooth)) ** 2).mean() for s in smooth])


class GroupDRO(Reference):
    """Σ q_d L_d T/S with q_d ∝ exp(η Σ L_d)."""

    def __init__(self, model: nn.Module, loss: Loss, domains: int, step_size: float) -> None:
        super().__init__(model, loss)
        self.step_size, self.q = step_size, [1 / domains] * domains

    def objective(self, batches: Batches) -> Tensor:
        losses = {d: loss for loss, (_, _, d, *_) in zip(self.each(batches), batches, strict=True)}
        for d, loss in losses.items():
            self.q[d] *= math.exp(self.step_size * float(loss.detach()))
        self.q = [q / sum(self.q) for q in self.q]
        return sum(self.q[d] * loss for d, loss in losses.items()) * len(self.q) / len(losses)


class Mixup(Reference):
    """``shares`` holds the λ of each pair, for the step that comes."""

    def __init__(self, model: nn.Module, loss: Loss, where: str = "input") -> None:
        super().__init__(model, loss)
        self.where, self.shares = where, list[float]()

    def objective(self, batches: Batches) -> Tensor:
        found = []
        for i, share in enumerate(self.shares):
            (x, y, *_), (u, v, *_) = batches[i], batches[(i + 1) % len(batches)]
            size = min(len(y), len(v))
            if self.where == "input":
                output = self.model(share * x[:size] + (1 - share) * u[:size])
            else:
                z, w = self.model.features(x[:size]), self.model.features(u[:size])
                output = self.model.head(share * z + (1 - share) * w)
            found.append(share * self.loss(output, y[:size]) + (1 - share) * self.loss(output, v[:size]))
        return mean(found)


class MLDG(Reference):
    """F(θ) + β G(θ − α∇F(θ)), through the virtual step or not."""

    def __init__(
        self, model: nn.Module, loss: Loss, beta: float, inner_lr: float, held_out: int, order: str
    ) -> None:
        super().__init__(model, loss)
        self.beta, self.inner_lr, self.held_out, self.order = beta, inner_lr, held_out, order

    def gradient(self, batches: Batches) -> list[Tensor]:
        names = [n for n, _ in self.model.named_parameters()]
        kept, held = batches[: len(batches) - self.held_out], batches[len(batches) - self.held_out :]
        f = mean(self.each(kept))
        slopes = _gradient(f, self.params, create_graph=True)
        there = [p - self.inner_lr * g for p, g in zip(self.params, slopes, strict=True)]
        if self.order == "first":  # the virtual point is taken for a constant, and ∇G for the gradient at θ
            there = [t.detach().requires_grad_() for t in there]
        moved = dict(zip(names, there, strict=True))
        g = mean([self.loss(torch.func.functional_call(self.model, moved, (x,)), y) for x, y, *_ in held])
        if self.order == "exact":
            return _gradient(f + self.beta * g, self.params)
        apart = _gradient(g, there)
        return [a + self.beta * b for a, b in zip(_gradient(f, self.params), apart, strict=True)]


class PCGrad(Reference):
    def gradient(self, batches: Batches) -> list[Tensor]:
        gradients = self.apart(batches)
        projected = []
        for i, g in enumerate(gradients):
            mine = g.clone()
            for turn in range(1, len(gradients)):
                other = gradients[(i + turn) % len(gradients)]
                product = torch.dot(mine, other)
                if product < 0:
                    mine = mine - product / torch.dot(other, other) * other
            projected.append(mine)
        return self.unflat(mean(projected))


class Masked(Reference):
    """AND-mask (with ``k`` None) or SAND-mask, a component at a time; 1e-10 is of the authors' code."""

    def __init__(self, model: nn.Module, loss: Loss, tau: float, k: float | None = None) -> None:
        super().__init__(model, loss)
        self.tau, self.k = tau, k

    def gradient(self, batches: Batches) -> list[Tensor]:
        each = [self.unflat(g) for g in self.apart(batches)]
        found = []
        for tensors in zip(*each, strict=True):
            columns = list(zip(*[t.reshape(-1).tolist() for t in tensors], strict=True))
            masks = [self.mask(column) for column in columns]
            left = sum(masks) / len(masks) + 1e-10
            means = [sum(column) / len(column) for column in columns]
            values = [m * g / left for m, g in zip(masks, means, strict=True)]
            found.append(torch.tensor(values, dtype=torch.float64).reshape(tensors[0].shape))
        return found

    def mask(self, values: Sequence[float]) -> float:
        count = len(values)
        agreement = abs(sum((v > 0) - (v < 0) for v in values)) / count
        if self.k is None:
            return float(agreement >= self.tau)
        middle = sum(values) / count
        variance = sum((v - middle) ** 2 for v in values) / (count - 1)
        return max(0.0, math.tanh(self.k / variance * (agreement - self.tau)))


class DANN(Reference):
    """Trains a copy of the discriminator with an Adam of its own; CDANN with ``classes``, an embedding.

    An example's weight in the discriminator's loss is 1/N, or 1 over its class's size and the classes'
    number.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        weights: Iterable[float],
        discriminator: nn.Module,
        classes: nn.Embedding | None = None,
        *,
        discriminator_steps: int = 1,
        gradient_penalty: float = 0.0,
        discriminator_lr: float = 1e-3,
        beta1: float = 0.5,
    ) -> None:
        super().__init__(model, loss, weights)
        self.discriminator, self.classes = copy.deepcopy(discriminator), copy.deepcopy(classes)
        self.discriminator_steps, self.gradient_penalty = discriminator_steps, gradient_penalty
        own = [*self.discriminator.parameters(), *(self.classes.parameters() if self.classes else ())]
        self.adam = torch.optim.Adam(own, lr=discriminator_lr, betas=(beta1, 0.9))

    def seen(self, batches: Batches) -> list[tuple[Tensor, int, int]]:
        """The features, class and domain of every example."""
        return [(z, int(y[i]), d) for x, y, d, *_ in batches for i, z in enumerate(self.model.features(x))]

    def example_loss(self, z: Tensor, y: int, d: int) -> Tensor:
        evidence = z if self.classes is None else z + self.classes.weight[y]
        return -torch.log_softmax(self.discriminator(evidence), -1)[d]

    def discriminator_loss(self, seen: Sequence[tuple[Tensor, int, int]]) -> Tensor:
        if self.classes is None:
            return mean([self.example_loss(*example) for example in seen])
        present = sorted({y for _, y, _ in seen})
        return mean([mean([self.example_loss(*e) for e in seen if e[1] == y]) for y in present])

    def penalty(self, batches: Batches) -> Tensor:
        return -self.discriminator_loss(self.seen(batches))

    def objective(self, batches: Batches) -> Tensor:
        seen = [(z.detach().requires_grad_(), y, d) for z, y, d in self.seen(batches)]
        for _ in range(self.discriminator_steps):
            total = self.discriminator_loss(seen)
            slopes = [torch.autograd.grad(self.example_loss(*e), e[0], create_graph=True)[0] for e in seen]
            total = total + self.gradient_penalty * mean([(s**2).sum() for s in slopes])
            self.adam.zero_grad()
            total.backward()
            self.adam.step()
        return super().objective(batches)


def standard_error(values: Sequence[float]) -> float:
    middle = sum(values) / len(values)
    variance = sum((v - middle) ** 2 for v in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))
