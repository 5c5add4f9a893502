"""The paper's linear example: which feature does a linear classifier trust, and when?

Logistic loss, exact expectations, float64, zero start, plain SGD. All methods have the same effective
learning rate, 1 per step: ERM, IDGM and IGA directly, Fish and its relatives with α = 10, ε = 0.05 over two
inner steps (εαS = 1). Weight decay acts inside the inner steps.

A linear model has its gradients and Hessians in closed form, so that all weight decays are computed together
in NumPy. A test compares every method with the algorithm of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shoal.data.sampler import DomainBatchSampler, Draw
from shoal.paper import read
from shoal.paper.figures import isometric_figure, linear_figure
from shoal.paper.reproduce import Reproduction, Request

Array = np.ndarray[Any, np.dtype[np.float64]]
STEPS, EARLY = 1000, 100
EVERY, POINTS = 2, 80
"""Accuracies are computed every 2 steps; at most 80 points are kept for the figure, by a logarithmic axis."""
DECAYS = (0.0, 0.004, 0.008, 0.012)
SHOWN = 0.008
"""The weight decay at which the end points of the methods differ."""


class Domain(NamedTuple):
    """Its distinct examples with a column of ones for the bias, their labels and their shares."""

    x: Array
    y: Array
    share: Array

    def derivatives(self, weights: Array) -> tuple[Array, Array]:
        """Gradients (D, 5) and Hessians (D, 5, 5) of the expected logistic loss at D weights."""
        p = 1 / (1 + np.exp(-weights @ self.x.T))
        curvature = self.share * p * (1 - p)
        return (self.share * (p - self.y)) @ self.x, (curvature[:, None, :] * self.x.T) @ self.x

    def gradient(self, weights: Array) -> Array:
        return self.derivatives(weights)[0]

    def accuracy(self, weights: Array) -> Array:
        return ((weights @ self.x.T > 0) == self.y) @ self.share


def _domain(own: int) -> Domain:
    """The domain whose second kind of example has feature number ``own``."""
    x = np.zeros((4, 5))
    x[:, 4] = 1
    x[1:, 0] = 1
    x[1, own] = 1
    return Domain(x, np.array([0.0, 1, 1, 0]), np.array([0.5, 0.4, 0.03, 0.07]))


TRAINING, TEST = (_domain(1), _domain(2)), _domain(3)
MIXTURE = Domain(*(np.concatenate(parts) for parts in zip(*TRAINING, strict=True)))
MIXTURE = MIXTURE._replace(share=MIXTURE.share / 2)

Step = Callable[[Array, Array, Sequence[int]], Array]
"""Weights (D, 5), weight decays (D, 1) and the order of the domains → weights after a step."""


def erm(w: Array, decay: Array, order: Sequence[int]) -> Array:
    return w - MIXTURE.gradient(w) - decay * w


def _matching(
    w: Array,
    decay: Array,
    order: Sequence[int],
    *,
    weight: float,
    measure: str = "cosine",
    trust: float = np.inf,
) -> Array:
    """A step on mean loss + weight × measure, whose gradient is Σ_i H_i v_i with v_i = ∂measure/∂g_i."""
    (g, h), (g2, h2) = (domain.derivatives(w) for domain in TRAINING)
    if measure == "variance":
        v = (g - g2) / 2
        v2 = -v
    elif measure == "inner product":
        v, v2 = g2, g
    else:
        n, n2 = (np.linalg.norm(a, axis=1, keepdims=True) for a in (g, g2))
        u, u2 = g / n, g2 / n2
        cosine = (u * u2).sum(1, keepdims=True)
        v, v2 = (u2 - cosine * u) / n, (u - cosine * u2) / n2
    slope = (h @ v[..., None] + h2 @ v2[..., None])[..., 0]
    mean = (g + g2) / 2
    limit = trust * np.linalg.norm(mean, axis=1) / np.linalg.norm(slope, axis=1)
    factor = np.sign(weight) * np.minimum(abs(weight), limit)
    return w - mean - factor[:, None] * slope - decay * w


def _inner_loop(w: Array, decay: Array, order: Sequence[int], *, mixed: bool = False) -> Array:
    """Fish's step; ``mixed``: on batches of the mixture in place of the domains."""
    inner = w
    for d in order:
        inner = inner - 10.0 * ((MIXTURE if mixed else TRAINING[d]).gradient(inner) + decay * inner)
    return w + 0.05 * (inner - w)


METHODS: Mapping[str, tuple[Step, Draw]] = {
    "ERM": (erm, "domains"),
    "IDGM, normalised, γ=0.1": (partial(_matching, weight=-0.1), "domains"),
    "IDGM, raw, γ=2.5": (partial(_matching, weight=-2.5, measure="inner product"), "domains"),
    "IDGM, normalised, trust 0.9": (partial(_matching, weight=-1.0, trust=0.9), "domains"),
    "IGA, λ=1": (partial(_matching, weight=1.0, measure="variance"), "domains"),
    "IGA, λ=100": (partial(_matching, weight=100.0, measure="variance"), "domains"),
    "Fish": (_inner_loop, "domains"),
    "Fish, random grouping": (partial(_inner_loop, mixed=True), "domains"),
    "Reptile": (_inner_loop, "one-domain"),
}
"""By name the step, and which domains it takes."""


def follow(method: str, decays: Sequence[float] = DECAYS, steps: int = STEPS, seed: int = 0) -> Array:
    """Weights (steps + 1, decays, 5) of a method that starts at zero."""
    step, draw = METHODS[method]
    sampler = DomainBatchSampler([0, 1], 1, 2, draw=draw, seed=seed, steps=1)
    numbers = sampler.plans(1, steps + 1)[0]
    orders: list[list[int]] = [[]] * steps if numbers is None else numbers.tolist()
    decay = np.array(decays)[:, None]
    path = [np.zeros((len(decays), 5))]
    for order in orders:
        path.append(step(path[-1], decay, order))
    return np.stack(path)


def accuracies(weights: Array) -> tuple[Array, Array]:
    """On the training domains and on the held-out one."""
    return np.mean([d.accuracy(weights) for d in TRAINING], axis=0), TEST.accuracy(weights)


def state(weights: Array) -> str:
    """Train and test accuracy in percent, such as ``97/57``."""
    return "/".join(f"{100 * accuracy:.0f}" for accuracy in accuracies(weights))


def measure(method: str) -> list[dict[str, Any]]:
    """The path of a method for each weight decay, as plain data."""
    paths, steps = follow(method), np.arange(EVERY, STEPS + 1, EVERY)
    kept = steps[np.unique(np.geomspace(1, len(steps), POINTS).astype(int)) - 1]
    result = []
    for decay, path in zip(DECAYS, paths.swapaxes(0, 1), strict=True):
        test = accuracies(path)[1]
        row: dict[str, Any] = {"method": method, "weight_decay": decay}
        row["states"] = {step: state(path[step]) for step in (EARLY, STEPS)}
        row["invariant_until"] = int(max(steps[test[steps] > 0.9], default=0))
        row |= {"w1+b": float(path[-1, 0] + path[-1, 4]), "weights": path[-1].round(6).tolist()}
        shown = {"weights": path[kept].round(4).tolist(), "test": test[kept].round(4).tolist()}
        result.append({**row, "path": {"steps": kept.tolist(), **shown}})
    return result


def printed() -> dict[str, str]:
    """Train and test accuracy that the weights printed in the paper give."""
    weights = read("published/linear.yaml")["weights"]
    return {name: state(np.array(values)) for name, values in weights.items()}


def reproduce(request: Request) -> Reproduction:
    rows = [row for method in METHODS for row in measure(method)]
    by = {(row["method"], row["weight_decay"]): row for row in rows}
    paper, table, until = read("published/linear.yaml")["states"], [], {}
    for method in METHODS:
        free, known = by[method, 0.0], "–" if "random" in method else paper.get(method.split(",")[0], "–")
        last = free["invariant_until"]
        until[method] = "the end" if last == STEPS else str(last or "never")
        row = {"method": method, "paper": known, f"step {EARLY}": free["states"][EARLY]}
        row |= {f"step {STEPS}": free["states"][STEPS], "93/93 until step": until[method]}
        row |= {f"decay {decay:g}": by[method, decay]["states"][STEPS] for decay in DECAYS[1:]}
        table.append({**row, f"w1+b at decay {SHOWN:g}": f"{by[method, SHOWN]['w1+b']:+.3f}"})
    names = {"linear": 0.0, f"linear-decay-{SHOWN:g}".replace(".", "_"): SHOWN}
    figures = {name: linear_figure({m: by[m, d]["path"] for m in METHODS}, d) for name, d in names.items()}
    both = {"ERM": "ERM", "IDGM": "IDGM, normalised, γ=0.1"}
    figures["linear-isometric"] = isometric_figure(
        {
            d: {k: by[m, d]["path"] | {"state": by[m, d]["states"][STEPS]} for k, m in both.items()}
            for d in names.values()
        }
    )
    nearest = min(METHODS, key=lambda method: abs(by[method, SHOWN]["w1+b"]))
    found = "; ".join(f"{name}: {states}" for name, states in printed().items())
    values = {"until": until, "decay": SHOWN, "nearest": nearest, "margin": by[nearest, SHOWN]["w1+b"]}
    heading = f"Train/test accuracy in percent, without weight decay and with it at step {STEPS}"
    data = {"rows": rows, "printed": printed()}
    return request.result({heading: table}, data, {**values, "printed": found}, figures=figures)
