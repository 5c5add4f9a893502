"""The gradient family since 2021 against its formulas in float64."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import shoal
from algorithms.test_formulas import ADAM, SGD, S, blocks, close, meta, network, on
from references import family
from shoal.errors import InputError
from shoal.gradients import agr_rand, agr_sum

PAIRS = [(x, y) for x, y, _ in blocks()]


def domain_gradients(model: torch.nn.Module) -> list[list[torch.Tensor]]:
    params = list(model.parameters())
    return [list(torch.autograd.grad(cross_entropy(model(x), y), params)) for x, y in PAIRS]


def step(name: str, model: torch.nn.Module, maker=SGD, **settings: object) -> dict[str, torch.Tensor]:
    """The weights after one step; with SGD they show its gradient."""
    algorithm, engine = on(name, model, maker, **settings)
    algorithm.check_input(PAIRS[0][0][:2])
    torch.manual_seed(0)
    return engine.step(meta(blocks()), 0)


def after(model: torch.nn.Module, gradient: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p - 0.1 * g for p, g in zip(model.parameters(), gradient, strict=True)]


def test_agreement_rules() -> None:
    model = network()
    flat = [torch.cat([g.flatten() for g in gradients]) for gradients in domain_gradients(model)]
    mean, kept = family.agreement(flat)
    found = torch.cat([g.flatten() for g in agr_sum(domain_gradients(model))])
    close(found, mean)
    assert 0 < sum(kept) < len(kept)
    torch.manual_seed(1)
    noisy = torch.cat([g.flatten() for g in agr_rand(domain_gradients(model))])
    agree = torch.tensor(kept)
    close(noisy[agree], mean[agree])
    many = [[torch.cat([torch.tensor([2.0, -4.0]), s * torch.ones(20_000)])] for s in (1.0, -1.0)]
    drawn = agr_rand(many)[0]
    assert drawn[:2].tolist() == [2.0, -4.0]
    assert float(drawn[2:].std()) == pytest.approx(3.0, rel=0.05)  # the mean size of what agrees
    assert abs(float(drawn[2:].mean())) < 0.1


def test_agr_sum_takes_that_step() -> None:
    model = network()
    wanted = after(model, agr_sum(domain_gradients(model)))
    step("agr-sum", model)
    close(list(model.parameters()), wanted)


@pytest.mark.parametrize(("rho", "weight"), [(0.05, 0.1), (0.5, 2.0), (0.1, 0.0)])
def test_disam(rho: float, weight: float) -> None:
    model = network()
    wanted = after(model, family.disam(model, PAIRS, rho, weight))
    step("disam", model, rho=rho, weight=weight)
    close(list(model.parameters()), wanted)


@pytest.mark.parametrize("form", ["hgp", "diagonal"])
def test_hessian_alignment(form: str) -> None:
    model, weights = network(), {"hessian_weight": 0.7, "gradient_weight": 0.3}
    loss = family.hessian_alignment(model, model.head, PAIRS, form, *weights.values())
    wanted = after(model, list(torch.autograd.grad(loss, list(model.parameters()))))
    step("hessian-alignment", model, form=form, **weights)
    close(list(model.parameters()), wanted)


def test_pgrad_follows_its_trajectory() -> None:
    """One rollout, along all directions, from points that a plain loop visits."""
    model, meta_lr = network(), 0.3
    copy = network()
    optimizer = ADAM(copy.parameters())
    points = [torch.nn.utils.parameters_to_vector(copy.parameters()).detach().numpy()]
    for part in meta(blocks()).pieces(2):
        rotated = part.split() if len(points) == 1 else [*part.split()[1:], part.split()[0]]
        for block in rotated:
            optimizer.zero_grad()
            cross_entropy(copy(block.x), block.y).backward()
            optimizer.step()
            points.append(torch.nn.utils.parameters_to_vector(copy.parameters()).detach().numpy().copy())
    assert len(points) == 2 * S + 1
    wanted = points[0] - meta_lr * family.principal_update(points, 4)
    step("pgrad", model, ADAM, meta_lr=meta_lr, rollouts=2)
    np.testing.assert_allclose(
        torch.nn.utils.parameters_to_vector(model.parameters()).detach(), wanted, rtol=1e-9
    )


def test_what_cannot_be() -> None:
    data = {name: (torch.randn(8, 4), torch.arange(8) % 2) for name in "ab"}
    quiet = {"steps": 1, "progress": False, "device": "cpu"}
    head = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    model = shoal.models.FeatureModel(torch.nn.Linear(4, 3), head)
    with pytest.raises(InputError, match="one linear layer"):
        shoal.fit("hessian-alignment", model, data, **quiet)
