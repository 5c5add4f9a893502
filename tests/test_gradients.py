"""The mathematics of gradient matching, against double loops in float64."""

from __future__ import annotations

import copy
import sys
import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from references import naive
from shoal.errors import InputError
from shoal.gradients import (
    and_mask,
    backward,
    cosine_matrix,
    gip,
    gram_matrix,
    idgm_backward,
    losses_by_domain,
    match,
    mean_of_pairs,
    pcgrad,
    sand_mask,
    sign_agreement,
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64, the same derivative by another route
DIFFERENCES = {"rtol": 1e-4, "atol": 1e-7}  # float64, a forward difference of length 1e-6
METHODS = pytest.mark.parametrize("method", ["exact", "finite-difference"])
FORMS = pytest.mark.parametrize("measure", ["gip", "cosine"])
COMBINES = pytest.mark.parametrize("combine", [pcgrad, and_mask, sand_mask])


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def convnet():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.SiLU(), nn.Flatten(), nn.Linear(36, 3)
    )


def problem(make, domains, dtype=torch.float64):
    """A model and one batch per domain, each with its own shift: parameters and losses."""
    torch.manual_seed(0)
    model = make().to(dtype)
    shape = (7, 2, 8, 8) if make is convnet else (7, 4)
    x = [torch.randn(shape, dtype=dtype) * (1 + 0.2 * i) + 0.3 * i for i in range(domains)]
    y = [torch.randint(0, 3, (7,)) for _ in range(domains)]
    return list(model.parameters()), [lambda i=i: cross_entropy(model(x[i]), y[i]) for i in range(domains)]


def assert_close(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def random_gradients(domains):
    generator = torch.Generator().manual_seed(0)
    options = {"dtype": torch.float64, "generator": generator}
    return [[torch.randn(s, **options) for s in [(3, 2), (5,), ()]] for _ in range(domains)]


# Values


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("domains", [2, 11])
def test_gip_is_the_mean_over_pairs_and_so_is_its_derivative(domains, normalize):
    gradients = [[t.requires_grad_() for t in g] for g in random_gradients(domains)]
    every = [t for g in gradients for t in g]
    found, expected = gip(gradients, normalize=normalize), naive.mean_inner_product(gradients)
    matrix = gram_matrix(gradients)
    if normalize:
        expected, matrix = naive.mean_cosine(gradients), cosine_matrix(gradients)
    torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(mean_of_pairs(matrix), expected, **EXACT)
    assert_close(torch.autograd.grad(found, every), torch.autograd.grad(expected, every), **EXACT)


def test_sign_agreement():
    one, two = torch.tensor([1.0, -1.0, 2.0, 0.0]), torch.tensor([2.0, 1.0, 0.0, 0.0])
    assert sign_agreement([[one], [two]]).item() == pytest.approx((1 + 0 + 0.5) / 3)


def test_a_zero_gradient_has_cosine_zero_and_no_nan():
    first, second, _ = random_gradients(3)
    zero = [torch.zeros_like(t) for t in first]
    every = [t.requires_grad_() for g in (first, zero, second) for t in g]
    value = gip([first, zero, second], normalize=True)
    torch.testing.assert_close(value, naive.mean_cosine([first, second]) / 3, **EXACT)
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(value, every))
    assert (cosine_matrix([first, zero, second])[1] == 0).all()


# The gradient of the measure


@pytest.mark.parametrize("make", [mlp, convnet])
@pytest.mark.parametrize("measure", ["gip", "cosine", "variance"])
def test_match_is_the_derivative_of_the_double_loop(make, measure):
    params, losses = problem(make, 4)
    values = [loss() for loss in losses]
    if measure == "variance":
        mean, value, slope = naive.variance(values, params)
    else:
        mean, value, slope = naive.match(values, params, normalize=measure == "cosine")
    assert max(t.abs().max() for t in slope) > 1e-3  # the comparison is of something
    for method, near in (("exact", EXACT), ("finite-difference", DIFFERENCES)):
        found = match(losses, params, method=method, radius=1e-6, measure=measure)
        assert_close(found.losses, torch.stack(values).detach(), rtol=0, atol=0)
        assert_close([*found.mean, found.value], [*mean, value], **EXACT)
        assert_close(found.slope, slope, **near)
        assert not any(t.requires_grad for t in [found.losses, found.value, *found.mean, *found.slope])


@METHODS
@FORMS
def test_a_domain_without_gradient(method, measure):
    """It contributes no cosine and no NaN, and to the raw form what the double loop says."""
    params, losses = problem(mlp, 2)
    options = {"measure": measure, "method": method, "radius": 1e-6}
    nothing = lambda: sum((p * 0).sum() for p in params)  # noqa: E731
    found, pair = match([*losses, nothing], params, **options), match(losses, params, **options)
    torch.testing.assert_close(found.value, pair.value / 3, **EXACT)
    assert_close(found.slope, [t / 3 for t in pair.slope], rtol=1e-6, atol=1e-9)
    alone = match([nothing, nothing], params, **options)
    assert alone.value == 0
    assert all((t == 0).all() for t in alone.slope)


class Noisy(nn.Module):
    """All that a second pass could disturb: statistics, masks, a buffer that forward replaces."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes = self.passes + 1
        return self.second(self.dropout(self.norm(self.first(x)).tanh()))


@METHODS
@FORMS
def test_the_second_pass_sees_the_same_masks_and_moves_no_statistics(method, measure):
    torch.manual_seed(1)
    model = Noisy().double()
    batches = [(torch.randn(9, 4).double() + i, torch.randint(0, 3, (9,))) for i in range(3)]
    losses = [lambda x=x, y=y: cross_entropy(model(x), y) for x, y in batches]
    params, start = list(model.parameters()), copy.deepcopy(model.state_dict())

    torch.manual_seed(5)
    values = [loss() for loss in losses]  # one pass, all graphs kept
    once, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    mean, value, slope = naive.match(values, params, normalize=measure == "cosine")

    model.load_state_dict(start)
    torch.manual_seed(5)
    found = match(losses, params, measure=measure, method=method, radius=1e-7, model=model)
    assert_close([*found.mean, found.value], [*mean, value], **EXACT)
    assert_close(found.slope, slope, **(EXACT if method == "exact" else DIFFERENCES))
    assert torch.equal(torch.get_rng_state(), random)
    assert model.passes == 3
    assert model.norm.num_batches_tracked == 3
    assert all(torch.equal(once[name], value) for name, value in model.state_dict().items())


# Replacements of loss.backward(); the rules themselves are tested with the algorithms


def dataset(domains=4, examples=20):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(domains, examples, 4, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (domains, examples), generator=draw)
    shift = torch.arange(domains)[:, None, None]
    return x * (1 + 0.3 * shift) + 0.4 * shift, y


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def three_losses(model):
    x, y = dataset(3)
    return {d: cross_entropy(model(x[d]), y[d]) for d in range(3)}


def gradients_of(model):
    return [p.grad for p in model.parameters()]


def test_idgm_backward_is_the_objective_by_explicit_loops_then_the_trust_ratio():
    (x, y), model, twin = dataset(), network(), network()
    idgm_backward({d: lambda d=d: cross_entropy(model(x[d]), y[d]) for d in range(4)}, model, gamma=2.0)
    values = [cross_entropy(twin(x[d]), y[d]) for d in range(4)]
    mean, _, slope = naive.match(values, list(twin.parameters()), normalize=True)
    lengths = [sum((g**2).sum() for g in each).sqrt() for each in (mean, slope)]
    factor = float(0.9 * lengths[0] / lengths[1])
    assert factor < 2.0  # the trust ratio is at work
    expected = [m - factor * s for m, s in zip(mean, slope, strict=True)]
    assert_close(gradients_of(model), expected, rtol=1e-10, atol=1e-10)


@COMBINES
def test_one_pass_of_a_mixed_batch_is_as_good_as_one_pass_for_each_domain(combine):
    x, y = dataset()
    ids = torch.tensor([7, 2, 40, 3])
    apart, mixed = network(), network()
    each = {int(ids[i]): cross_entropy(apart(x[i]), y[i]) for i in ids.argsort().tolist()}
    first = backward(each, apart, combine)
    order = torch.randperm(y.numel())
    each = cross_entropy(mixed(x.flatten(0, 1)[order]), y.flatten()[order], reduction="none")
    losses = losses_by_domain(each, ids.repeat_interleave(y.shape[1])[order])
    assert list(losses) == [2, 3, 7, 40]
    second = backward(losses, mixed.parameters(), combine)
    for a, b in zip(first, second, strict=True):
        assert_close(a, b, **EXACT)
    assert_close(gradients_of(mixed), gradients_of(apart), **EXACT)
    assert_close(gradients_of(apart), combine(first), **EXACT)


class Weighted(nn.Module):
    """As the aggregators of torchjd: a vector from a matrix."""

    def forward(self, matrix):
        return torch.tensor([0.5, 0.2, 0.3], dtype=matrix.dtype) @ matrix


def test_rules_by_name_and_aggregators_of_a_matrix(monkeypatch):
    torchjd = types.SimpleNamespace(Weighted=Weighted)
    monkeypatch.setitem(sys.modules, "torchjd", types.SimpleNamespace(aggregation=torchjd))
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", torchjd)
    for combine in (Weighted(), "torchjd:Weighted"):
        model = network()
        gradients = backward(three_losses(model), model, combine)
        expected = [0.5 * a + 0.2 * b + 0.3 * c for a, b, c in zip(*gradients, strict=True)]
        assert_close(gradients_of(model), expected, **EXACT)
    with pytest.raises(InputError, match="Did you mean 'Weighted'"):
        backward(three_losses(model), model, "torchjd:Weigted")
    model.zero_grad()
    backward(three_losses(model), model, "and-mask")
    assert_close(gradients_of(model), and_mask(gradients), **EXACT)
    monkeypatch.setitem(sys.modules, "torchjd.aggregation", None)
    with pytest.raises(InputError, match=r"combine: torchjd:UPGrad needs torchjd: pip install"):
        backward(three_losses(model), model, "torchjd:UPGrad")


@COMBINES
def test_gradients_that_vanish_or_are_the_same(combine):
    zero = [[torch.zeros(3), torch.zeros(2, 2)]] * 2
    assert all((g == 0).all() for g in combine(zero))
    same = random_gradients(1) * 4
    assert_close(combine(same), same[0], rtol=1e-9, atol=1e-9)
    first, *_ = random_gradients(2)
    one = combine([first, [torch.zeros_like(g) for g in first]])
    assert all(g.isfinite().all() for g in one)
    if combine is pcgrad:
        assert_close(one, [g / 2 for g in first], **EXACT)


WEIGHT = torch.ones(2, requires_grad=True)
PAIR = {0: lambda: WEIGHT.sum(), 1: lambda: WEIGHT.sum()}
PARALLEL = object.__new__(nn.parallel.DistributedDataParallel)
WRONG = [
    (lambda: match([WEIGHT.sum], [WEIGHT]), "losses must be functions, of at least 2 domains"),
    (lambda: backward([1, 2], [WEIGHT], pcgrad), r"losses must map at least 2 domains .* got \[1, 2\]"),
    (lambda: backward({"a": WEIGHT.sum()}, [WEIGHT], pcgrad), "at least 2 domains"),
    (lambda: backward({d: f() for d, f in PAIR.items()}, [WEIGHT], lambda g: g[0] * 2), "one tensor per"),
    (lambda: backward({d: f() for d, f in PAIR.items()}, [WEIGHT], "pcgrd"), "combine: .*mean 'pcgrad'"),
    (lambda: match([WEIGHT.sum] * 2, [WEIGHT], measure="cos"), "unknown measure 'cos'"),
    (lambda: and_mask(random_gradients(2), tau=1.5), "must be from 0 to 1, got 1.5"),
    *((partial(idgm_backward, PAIR, p), "params must") for p in ([], iter([]), [WEIGHT * 2], PARALLEL)),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_input_that_cannot_be_right(case):
    call, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        call()
    assert WEIGHT.grad is None
