"""The paper's theorem: what Fish adds to plain training points along the gradient of the inner product.

With G_f = E[θ − θ̃] − αSḠ, the expectation over all S! orders of the domains, and G_g = −∂GIP/∂θ, the angle
between them falls in proportion to α, so 1 − cos falls with α². The paper's expansion has a + where a −
belongs, and another constant; neither changes the direction. The network must be smooth, hence tanh.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import factorial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.gradients import gradient, inner_product, match
from shoal.paper.figures import theorem_figure
from shoal.paper.reproduce import Reproduction, Request

ALPHAS = tuple(float(a) for a in np.logspace(-1, -4, 13))


class TheoremResult(NamedTuple):
    domains: int
    alphas: tuple[float, ...]
    one_minus_cos: tuple[float, ...]
    slope: float
    """Of log(1 − cos) against log α, over the smaller half of the rates: 2 by the theorem."""


def check_theorem(domains: int, alphas: Sequence[float] = ALPHAS, seed: int = 0) -> TheoremResult:
    """Enumerates all orders of ``domains`` full-batch domains on a small tanh network, in float64."""
    draw: Any = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    params: list[Tensor] = list(model.parameters())
    with torch.no_grad():
        for p in params:
            p.copy_(torch.randn(p.shape, **draw))
    data = [(torch.randn(16, 3, **draw), torch.randn(16, 1, **draw)) for _ in range(domains)]
    start = [p.detach().clone() for p in params]

    def loss(d: int) -> Tensor:
        x, y = data[d]
        return nn.functional.mse_loss(model(x), y)

    matching = match([lambda d=d: loss(d) for d in range(domains)], params)  # type: ignore[misc]
    target = [-g for g in matching.slope]
    gaps = []
    orders = list(permutations(range(domains)))
    for alpha in alphas:
        moved = [torch.zeros_like(p) for p in params]
        for order in orders:
            with torch.no_grad():
                torch._foreach_copy_(params, start)
            for d in order:
                step = gradient(loss(d), params)
                with torch.no_grad():
                    torch._foreach_add_(params, step, alpha=-alpha)
            with torch.no_grad():
                apart = [(s - p) / len(orders) for s, p in zip(start, params, strict=True)]
                torch._foreach_add_(moved, apart)
        rest = [w - alpha * domains * m for w, m in zip(moved, matching.mean, strict=True)]
        gaps.append(_one_minus_cos(rest, target))
    half = len(alphas) // 2
    slope = float(np.polyfit(np.log(alphas[half:]), np.log(gaps[half:]), 1)[0])
    return TheoremResult(domains, tuple(alphas), tuple(gaps), slope)


def _one_minus_cos(a: list[Tensor], b: list[Tensor]) -> float:
    """‖â − b̂‖²/2, which keeps its digits where 1 − cos would lose them."""
    na, nb = inner_product(a, a).sqrt(), inner_product(b, b).sqrt()
    apart = [x / na - y / nb for x, y in zip(a, b, strict=True)]
    return float(inner_product(apart, apart) / 2)


def reproduce(request: Request) -> Reproduction:
    results = [check_theorem(domains)._asdict() for domains in (2, 3, 4)]
    table = [
        {
            "domains S": r["domains"],
            "orders": factorial(r["domains"]),
            **{f"1 − cos at α={ALPHAS[i]:g}": f"{r['one_minus_cos'][i]:.1e}" for i in (0, -1)},
            "slope": f"{r['slope']:.3f}",
            "paper": "cos → 1, slope 2",
        }
        for r in results
    ]
    return request.result({"": table}, {"rows": results}, figures={"theorem": theorem_figure(results)})
