"""The mathematics of gradient matching, against double loops in float64."""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import shoal
from references import naive
from shoal.data import DomainBatchSampler
from shoal.errors import InputError
from shoal.gradients import (
    and_mask,
    backward,
    curvature,
    gip,
    gradient,
    idgm_backward,
    iga_backward,
    inner_product,
    losses_by_domain,
    match,
    moved,
    pcgrad,
    sand_mask,
)

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64, the same derivative by another route
DIFFERENCES = {"rtol": 1e-4, "atol": 1e-7}  # float64, a forward difference of length 1e-6

FORMS = pytest.mark.parametrize(
    ("normalize", "softening"),
    [(False, 0.0), (True, 0.0), (True, 0.3)],
    ids=["raw", "normalised", "softened"],
)
METHODS = pytest.mark.parametrize("method", ["exact", "finite-difference"])


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def convnet():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 4, 2),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def problem(make, domains, seed=0, dtype=torch.float64, batch=7, see=lambda output: output):
    """A model and one batch a domain, each with its own shift."""
    torch.manual_seed(seed)
    model = make().to(dtype)
    shape = (batch, 2, 8, 8) if isinstance(model[0], nn.Conv2d) else (batch, 4)
    batches = [
        (torch.randn(shape, dtype=dtype) * (1 + 0.2 * i) + 0.3 * i, torch.randint(0, 3, (batch,)))
        for i in range(domains)
    ]
    losses = [lambda x=x, y=y: cross_entropy(see(model(x)), y) for x, y in batches]
    return model, list(model.parameters()), losses


def assert_close(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def relative_error(found, expected):
    difference = [a.double() - b.double() for a, b in zip(found, expected, strict=True)]
    size = [b.double() for b in expected]
    return (inner_product(difference, difference) / inner_product(size, size)).sqrt().item()


def random_gradients(domains, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 2), (5,), ()]
    return [
        [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes] for _ in range(domains)
    ]


# The value


@pytest.mark.parametrize("domains", [2, 3, 5, 11])
def test_gip_is_the_mean_over_pairs(domains):
    gradients = random_gradients(domains)
    torch.testing.assert_close(gip(gradients), naive.mean_inner_product(gradients), **EXACT)
    torch.testing.assert_close(gip(gradients, normalize=True), naive.mean_cosine(gradients), **EXACT)


@pytest.mark.parametrize("normalize", [False, True])
def test_gip_can_be_differentiated(normalize):
    gradients = [[t.requires_grad_() for t in g] for g in random_gradients(3)]
    every = [t for g in gradients for t in g]
    value = naive.mean_cosine(gradients) if normalize else naive.mean_inner_product(gradients)
    found = torch.autograd.grad(gip(gradients, normalize=normalize), every)
    assert_close(found, torch.autograd.grad(value, every), **EXACT)


def test_a_zero_gradient_has_cosine_zero_and_no_nan():
    first, second, _ = random_gradients(3)
    zero = [torch.zeros_like(t) for t in first]
    every = [t.requires_grad_() for g in (first, zero, second) for t in g]
    value = gip([first, zero, second], normalize=True)
    torch.testing.assert_close(value, naive.mean_cosine([first, second]) / 3, **EXACT)
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(value, every))
    assert gip([zero, zero], normalize=True) == 0


def test_gradient_has_zeros_where_the_loss_does_not_reach():
    used, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    found = gradient((used**2).sum(), [used, unused])
    assert_close(found, [torch.full((2,), 2.0), torch.zeros(2)])


# Its gradient


@pytest.mark.parametrize("make", [mlp, convnet])
@pytest.mark.parametrize("domains", [2, 3, 5])
@FORMS
def test_exact_match_is_the_derivative_of_the_double_loop(make, domains, normalize, softening):
    _, params, losses = problem(make, domains)
    found = match(losses, params, normalize=normalize, softening=softening)
    values = [loss() for loss in losses]
    mean, value, slope = naive.match(values, params, normalize=normalize, softening=softening)
    assert_close(found.losses, torch.stack(values).detach(), rtol=0, atol=0)
    assert_close(found.mean, mean, **EXACT)
    torch.testing.assert_close(found.value, value, **EXACT)
    assert_close(found.slope, slope, **EXACT)
    assert not any(t.requires_grad for t in [found.losses, found.value, *found.mean, *found.slope])
    assert max(t.abs().max() for t in slope) > 1e-3  # the comparison is of something


@pytest.mark.parametrize("make", [mlp, convnet])
@pytest.mark.parametrize("domains", [2, 3, 5])
@FORMS
def test_finite_differences_match_the_double_loop(make, domains, normalize, softening):
    _, params, losses = problem(make, domains)
    found = match(
        losses, params, normalize=normalize, softening=softening, method="finite-difference", radius=1e-6
    )
    values = [loss() for loss in losses]
    mean, value, slope = naive.match(values, params, normalize=normalize, softening=softening)
    assert_close(found.mean, mean, **EXACT)
    torch.testing.assert_close(found.value, value, **EXACT)
    assert_close(found.slope, slope, **DIFFERENCES)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_error_of_finite_differences_is_proportional_to_the_radius(normalize):
    """So ``radius`` is the length of the displacement, whatever the length of v."""
    _, params, losses = problem(mlp, 3)
    exact = match(losses, params, normalize=normalize).slope
    errors = [
        relative_error(
            match(losses, params, normalize=normalize, method="finite-difference", radius=r).slope,
            exact,
        )
        for r in (1e-3, 1e-4)
    ]
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.05)


@METHODS
@FORMS
def test_a_domain_without_gradient(method, normalize, softening):
    """It contributes no cosine and no NaN, and to the raw form what the double loop says."""
    _, params, losses = problem(mlp, 2)
    nothing = lambda: sum((p * 0).sum() for p in params)  # noqa: E731
    found = match(
        [*losses, nothing], params, normalize=normalize, softening=softening, method=method, radius=1e-6
    )
    pair = match(losses, params, normalize=normalize, softening=softening, method=method, radius=1e-6)
    torch.testing.assert_close(found.value, pair.value / 3, **EXACT)
    assert_close(found.slope, [t / 3 for t in pair.slope], rtol=1e-6, atol=1e-9)
    alone = match([nothing, nothing], params, normalize=normalize, softening=softening, method=method)
    assert alone.value == 0
    assert all((t == 0).all() for t in alone.slope)


# Wrong input


def test_fewer_than_two_domains_are_refused():
    _, params, losses = problem(mlp, 1)
    with pytest.raises(InputError, match="at least 2 of them, got 1"):
        match(losses, params)
    with pytest.raises(InputError, match="at least 2 of them, got 0"):
        gip([])


# Finite differences in practice


@pytest.mark.parametrize("fails_at", [1, 3, 5, 6])  # in the first sweep; in the second at each domain but one
def test_finite_differences_put_the_parameters_back_when_a_loss_raises(fails_at):
    model, params, losses = problem(mlp, 3)
    before = copy.deepcopy(model.state_dict())
    calls = 0

    def counted(loss):
        def call():
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise ZeroDivisionError
            return loss()

        return call

    with pytest.raises(ZeroDivisionError):
        match([counted(loss) for loss in losses], params, method="finite-difference", model=model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# Losses in parts, and shares of several processes


def pieces_of(model, domains, cuts, batch=7):
    """Every domain's loss over slices of its batch."""
    torch.manual_seed(2)
    data = [(torch.randn(batch, 4).double() + 0.3 * i, torch.randint(0, 3, (batch,))) for i in range(domains)]
    ends = [0, *cuts, batch]
    spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
    return [
        [((s.stop - s.start) / batch, lambda x=x[s], y=y[s]: cross_entropy(model(x), y)) for s in spans]
        for x, y in data
    ]


@METHODS
@FORMS
def test_parts_make_up_the_whole(method, normalize, softening):
    model, params, _ = problem(mlp, 3)
    settings = {"normalize": normalize, "softening": softening, "method": method}
    whole = match([parts[0][1] for parts in pieces_of(model, 3, [])], params, **settings)
    for cuts in ([3], [1, 2, 5]):
        found = match(pieces_of(model, 3, cuts), params, **settings)
        assert_close([found.losses, found.value], [whole.losses, whole.value], **EXACT)
        assert_close(found.mean, whole.mean, **EXACT)
        assert_close(found.slope, whole.slope, **EXACT)


@METHODS
@FORMS
def test_shares_make_up_the_whole(method, normalize, softening):
    """Two threads, each with its part of every batch, meet wherever gradients become one."""
    model, params, _ = problem(mlp, 3)
    settings = {"normalize": normalize, "softening": softening, "method": method}
    whole = match([parts[0][1] for parts in pieces_of(model, 3, [])], params, **settings)
    models = [copy.deepcopy(model) for _ in range(2)]
    gate, lying, found = threading.Barrier(2, timeout=20), {}, {}
    shared = [pieces_of(m, 3, [3]) for m in models]

    def work(rank):
        def average(gradients):
            lying[rank] = [g * (3 / 7, 4 / 7)[rank] for g in gradients]
            gate.wait()
            total = [a + b for a, b in zip(lying[0], lying[1], strict=True)]
            gate.wait()
            return total

        losses = [parts[rank][1] for parts in shared[rank]]
        found[rank] = match(losses, list(models[rank].parameters()), average=average, **settings)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        assert_close(found[rank].mean, whole.mean, **EXACT)
        torch.testing.assert_close(found[rank].value, whole.value, **EXACT)
        assert_close(found[rank].slope, whole.slope, **EXACT)
    assert_close([found[0].losses * 3 / 7 + found[1].losses * 4 / 7], [whole.losses], **EXACT)


# Memory


class _Applied(nn.Module):
    def forward(self, x):
        return Watched.apply(x)


class Watched(torch.autograd.Function):
    """The identity, counting how many of its graph nodes are alive at once."""

    alive: ClassVar[weakref.WeakSet] = weakref.WeakSet()
    most = 0

    @staticmethod
    def forward(ctx, x):
        Watched.alive.add(ctx)
        Watched.most = max(Watched.most, len(Watched.alive))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Allocated(TorchDispatchMode):
    """The most bytes that tensors made in this block take at a time."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        old = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata in old:  # a view
                    continue
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


@METHODS
@pytest.mark.parametrize("normalize", [False, True])
def test_how_many_graphs_are_in_memory_at_a_time(method, normalize):
    """Exact second derivatives keep one per domain; finite differences, and losses in parts, one in all."""
    for parts in (False, True):
        Watched.alive, Watched.most = weakref.WeakSet(), 0
        _, params, losses = problem(mlp, 5, see=Watched.apply)
        given = [[(0.5, loss), (0.5, loss)] for loss in losses] if parts else losses
        match(given, params, method=method, normalize=normalize)
        assert Watched.most == (5 if method == "exact" and not parts else 1)
        assert len(Watched.alive) == 0

    peaks = []
    for domains in (2, 5):
        _, params, losses = problem(mlp, domains, batch=2000)
        with Allocated() as allocated:
            match(losses, params, method=method, normalize=normalize)
        peaks.append(allocated.most)
    with Allocated() as allocated:
        gradient(losses[0](), params)
    with Allocated() as together:
        gradient(torch.stack([loss() for loss in losses]).mean(), params)
    if method == "exact":
        assert peaks[1] < 1.7 * together.most
    else:
        assert peaks[1] == pytest.approx(peaks[0], rel=0.05)
        assert allocated.most <= peaks[0] < 4 * allocated.most


# Second passes: statistics and masks


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


def noisy_problem(domains=3):
    torch.manual_seed(1)
    model = Noisy().double()
    batches = [(torch.randn(9, 4).double() + i, torch.randint(0, 3, (9,))) for i in range(domains)]
    return model, list(model.parameters()), [lambda x=x, y=y: cross_entropy(model(x), y) for x, y in batches]


@METHODS
@FORMS
def test_the_second_pass_sees_the_same_masks_and_moves_no_statistics(method, normalize, softening):
    model, params, losses = noisy_problem()
    start = copy.deepcopy(model.state_dict())

    torch.manual_seed(5)
    values = [loss() for loss in losses]  # one pass, all graphs kept
    once, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    mean, value, slope = naive.match(values, params, normalize=normalize, softening=softening)

    model.load_state_dict(start)
    torch.manual_seed(5)
    found = match(
        losses, params, normalize=normalize, softening=softening, method=method, radius=1e-7, model=model
    )
    assert_close(found.mean, mean, **EXACT)
    torch.testing.assert_close(found.value, value, **EXACT)
    assert_close(found.slope, slope, **(EXACT if method == "exact" else DIFFERENCES))
    assert torch.equal(torch.get_rng_state(), random)
    assert model.passes == 3
    assert model.norm.num_batches_tracked == 3
    assert all(torch.equal(once[name], value) for name, value in model.state_dict().items())


# The variance of the gradients


@pytest.mark.parametrize("make", [mlp, convnet])
@pytest.mark.parametrize("domains", [2, 3, 5])
def test_the_variance_and_its_slope_are_those_of_the_double_loop(make, domains):
    _, params, losses = problem(make, domains)
    found = match(losses, params, measure="variance")
    values = [loss() for loss in losses]
    mean, value, slope = naive.variance(values, params)
    assert_close(found.losses, torch.stack(values).detach(), rtol=0, atol=0)
    assert_close(found.mean, mean, **EXACT)
    torch.testing.assert_close(found.value, value, **EXACT)
    assert_close(found.slope, slope, **EXACT)
    assert max(t.abs().max() for t in slope) > 1e-3
    near = match(losses, params, measure="variance", method="finite-difference", radius=1e-6)
    assert_close(near.slope, slope, **DIFFERENCES)
    torch.testing.assert_close(near.value, value, **EXACT)


@METHODS
def test_the_variance_of_identical_domains_is_zero_and_not_less(method):
    for seed in range(5):
        _, params, losses = problem(mlp, 1, seed=seed, dtype=torch.float32)
        found = match(losses * 3, params, measure="variance", method=method)
        assert 0 <= found.value < 1e-6
        assert all(t.abs().max() < 1e-5 for t in found.slope)


@METHODS
def test_parts_make_up_the_whole_of_the_variance(method):
    _, params, losses = problem(mlp, 3)
    whole = match(losses, params, measure="variance", method=method, radius=1e-6)
    halves = [[(0.25, loss), (0.75, loss)] for loss in losses]
    found = match(halves, params, measure="variance", method=method, radius=1e-6)
    torch.testing.assert_close(found.value, whole.value, **EXACT)
    assert_close(found.slope, whole.slope, **(EXACT if method == "exact" else DIFFERENCES))


# Moving the parameters, and curvature


def test_moved_parameters_are_elsewhere_and_come_back_to_the_bit():
    _, params, losses = problem(mlp, 1, dtype=torch.float32)
    start = [p.detach().clone() for p in params]
    direction = gradient(losses[0](), params)
    for by in (-0.3, torch.tensor(0.7)):
        with moved(params, direction, by):
            assert_close(
                [p.detach() for p in params], [s + by * g for s, g in zip(start, direction, strict=True)]
            )
            assert not torch.equal(params[0], start[0])
            params[1].data += 1  # whatever happens to them there
        assert_close([p.detach() for p in params], start, rtol=0, atol=0)
    assert all(p.requires_grad and p.is_leaf for p in params)


@pytest.mark.parametrize("domains", [1, 2, 3])
def test_curvature_is_the_hessian_of_the_mean_times_a_vector(domains):
    """The Hessian row by row."""
    _, params, losses = problem(mlp, domains)
    torch.manual_seed(1)
    v = [torch.randn_like(p) for p in params]
    mean = sum(loss() for loss in losses) / domains
    first = torch.cat([g.reshape(-1) for g in torch.autograd.grad(mean, params, create_graph=True)])
    rows = [torch.autograd.grad(g, params, retain_graph=True, allow_unused=True) for g in first]
    hessian = torch.stack(
        [
            torch.cat(
                [
                    (torch.zeros_like(p) if h is None else h).reshape(-1)
                    for h, p in zip(row, params, strict=True)
                ]
            )
            for row in rows
        ]
    )
    expected = hessian @ torch.cat([t.reshape(-1) for t in v])
    found = curvature(losses, params, v)
    torch.testing.assert_close(torch.cat([t.reshape(-1) for t in found]), expected, **EXACT)
    assert expected.abs().max() > 1e-2
    parts = [[(0.4, loss), (0.6, loss)] for loss in losses]
    assert_close(curvature(parts, params, v), found, **EXACT)


# In a loop of one's own: the same as in shoal.fit and as by explicit loops

STEPS, BATCH = 6, 8


def dataset(domains=4, examples=20):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(domains, examples, 4, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (domains, examples), generator=draw)
    shift = torch.arange(domains)[:, None, None]
    return x * (1 + 0.3 * shift) + 0.4 * shift, y


def network(*, norm=True):
    torch.manual_seed(3)
    middle = [nn.BatchNorm1d(6)] if norm else []  # no bias before it: Adam would blow rounding up
    return nn.Sequential(nn.Linear(4, 6, bias=not norm), *middle, nn.Tanh(), nn.Linear(6, 3)).double()


def adam(params):
    return torch.optim.Adam(params, 0.02)


class NaiveIDGM(naive.Reference):
    """The objective by autograd through double loops, then the trust ratio."""

    def gradient(self, batches):
        mean, _, slope = naive.match(self.each(batches), self.params, normalize=True)
        lengths = [sum((g**2).sum() for g in each).sqrt() for each in (mean, slope)]
        factor = min(2.0, float(0.9 * lengths[0] / lengths[1]))
        assert factor < 2.0  # the trust ratio is at work
        return [m - factor * s for m, s in zip(mean, slope, strict=True)]


LOOPS = {
    "pcgrad": ({}, partial(backward, combine=pcgrad), naive.PCGrad),
    "and-mask": (
        {"tau": 0.5},
        partial(backward, combine=partial(and_mask, tau=0.5)),
        partial(naive.Masked, tau=0.5),
    ),
    "sand-mask": (
        {"tau": 0.3, "k": 0.01},
        partial(backward, combine=partial(sand_mask, tau=0.3, k=0.01)),
        partial(naive.Masked, tau=0.3, k=0.01),
    ),
    "idgm": ({"gamma": 2.0}, partial(idgm_backward, gamma=2.0), NaiveIDGM),
    "iga": (
        {"weight": 5.0},
        partial(iga_backward, weight=5.0),
        partial(naive.IGA, weights=itertools.repeat(5.0)),
    ),
}


def steps_of(domains, examples):
    """What the sampler of a DataLoader yields, a step at a time: {domain: batch}."""
    x, y = dataset(domains, examples)
    ids = torch.arange(domains).repeat_interleave(examples)
    sampler = DomainBatchSampler(ids, BATCH, domains - 1, seed=5, steps=STEPS)
    loader = DataLoader(TensorDataset(x.flatten(0, 1), y.flatten(), ids), batch_sampler=sampler)
    for step in zip(*[iter(loader)] * (domains - 1), strict=True):
        yield {int(d[0]): (x, y) for x, y, d in step}


@pytest.mark.parametrize("domains", [3, 5])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_ones_own_ends_where_fit_does_and_where_explicit_loops_do(name, domains):
    settings, own_backward, reference = LOOPS[name]
    examples = 20
    x, y = dataset(domains, examples)

    fitted = network()
    train = {str(d): (x[d], y[d]) for d in range(domains)}
    shoal.fit(
        *(name, fitted, train),
        optimizer=adam,
        settings=settings,
        steps=STEPS,
        batch_size=BATCH,
        domains_per_step=domains - 1,
        seed=5,
        device="cpu",
        progress=False,
        select="last",
    )

    model = network()
    optimizer = adam(model.parameters())
    for batches in steps_of(domains, examples):
        optimizer.zero_grad()
        if own_backward.func is backward:
            losses = {d: cross_entropy(model(x), y) for d, (x, y) in batches.items()}
        else:
            losses = {d: lambda x=x, y=y: cross_entropy(model(x), y) for d, (x, y) in batches.items()}
        own_backward(losses, model)
        optimizer.step()

    slow = network()
    slow_optimizer, formula = adam(slow.parameters()), reference(slow, cross_entropy)
    for batches in steps_of(domains, examples):
        found = formula.gradient([(x, y, d) for d, (x, y) in batches.items()])
        for p, g in zip(slow.parameters(), found, strict=True):
            p.grad = g
        slow_optimizer.step()

    start = network().state_dict()
    for key, value in model.state_dict().items():
        twice = name == "iga" and key.startswith("1.")  # whose reference passes every batch twice
        if not twice or key in ("1.weight", "1.bias"):
            torch.testing.assert_close(slow.state_dict()[key], value, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(fitted.state_dict()[key], value, rtol=1e-10, atol=1e-10)
        assert not torch.equal(value, start[key])


COMBINES = pytest.mark.parametrize("combine", [pcgrad, and_mask, sand_mask])


@COMBINES
def test_one_pass_of_a_mixed_batch_is_as_good_as_one_pass_for_each_domain(combine):
    x, y = dataset()
    ids = torch.tensor([7, 2, 40, 3])
    apart, mixed = network(norm=False), network(norm=False)
    first = backward(
        {int(d): cross_entropy(apart(x[i]), y[i]) for i, d in sorted(enumerate(ids), key=lambda p: p[1])},
        apart,
        combine,
    )
    order = torch.randperm(y.numel())
    domain = ids.repeat_interleave(y.shape[1])[order]
    each = cross_entropy(mixed(x.flatten(0, 1)[order]), y.flatten()[order], reduction="none")
    losses = losses_by_domain(each, domain)
    assert list(losses) == [2, 3, 7, 40]
    second = backward(losses, mixed.parameters(), combine)
    assert_close(second, first, **EXACT)
    assert_close([p.grad for p in mixed.parameters()], [p.grad for p in apart.parameters()], **EXACT)


def three_losses(model, **options):
    x, y = dataset(3)
    return {d: cross_entropy(model(x[d]), y[d], **options) for d in range(3)}


def test_gradients_are_added_to_those_there_are_and_freed_graphs_stay_freed():
    model = network(norm=False)
    backward(three_losses(model), model, pcgrad)
    once = [p.grad.clone() for p in model.parameters()]
    losses = three_losses(model)
    backward(losses, torch.optim.SGD(model.parameters(), 0.1), pcgrad)
    assert_close([p.grad for p in model.parameters()], [2 * g for g in once], **EXACT)
    for loss in losses.values():
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_parameters_that_are_frozen_or_that_few_losses_reach():
    shared, first, nobody, frozen = (torch.ones(2, requires_grad=True) for _ in range(4))
    frozen.requires_grad_(False)
    seen = []

    def first_of(gradients):
        seen.extend(gradients)
        return gradients[0]

    losses = {"a": (shared * first * frozen).sum(), "b": (2 * shared).sum()}
    backward(losses, [shared, first, nobody, frozen, shared], first_of)
    assert_close(seen[1], [torch.full((2,), 2.0), torch.zeros(2), torch.zeros(2)])
    assert_close([shared.grad, first.grad], [torch.ones(2), torch.ones(2)])
    assert nobody.grad is None
    assert frozen.grad is None


@COMBINES
def test_losses_of_a_loss_scale(combine):
    plain, scaled = network(norm=False), network(norm=False)
    first = backward(three_losses(plain), plain, combine)
    losses = {d: loss * 1024 for d, loss in three_losses(scaled).items()}
    second = backward(losses, scaled, combine, scale=torch.tensor(1024.0))
    assert_close(second, first, **EXACT)
    expected = [p.grad * 1024 for p in plain.parameters()]
    assert_close([p.grad for p in scaled.parameters()], expected, **EXACT)
    if combine is not sand_mask:
        scaled.zero_grad()
        backward({d: loss * 1024 for d, loss in three_losses(scaled).items()}, scaled, combine)
        assert_close([p.grad for p in scaled.parameters()], expected, **EXACT)


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


def test_the_mean_of_several_processes_is_taken_before_gradients_are_combined():
    model = network(norm=False)
    calls = []

    def average(gradient):
        calls.append(gradient)
        return [g * (1 + len(calls)) for g in gradient]

    each = [gradient(loss, list(model.parameters())) for loss in three_losses(model).values()]
    backward(three_losses(model), model, pcgrad, average=average)
    expected = pcgrad([[g * (2 + i) for g in grads] for i, grads in enumerate(each)])
    assert len(calls) == 3
    assert_close([p.grad for p in model.parameters()], expected, **EXACT)


@pytest.mark.parametrize("params", ["module", "optimizer", "list"])
def test_second_passes_leave_no_trace_in_a_loop_of_ones_own(params):
    model = Noisy().double()
    x, y = dataset(3)
    losses = {d: lambda d=d: cross_entropy(model(x[d]), y[d]) for d in range(3)}
    given = {
        "module": {"params": model},
        "optimizer": {"params": adam(model.parameters()), "model": model},
        "list": {"params": model.parameters(), "model": model},
    }
    found = idgm_backward(losses, **given[params])
    assert model.passes == 3
    assert_close([p.grad for p in model.parameters()], found.gradient(-1.0, 0.9), **EXACT)


BAD_LOSSES = {
    "not a mapping": ([1, 2], "losses of backward must be"),
    "one domain": ({"a": 1}, "losses must contain at least 2 domains, got 1"),
    "no tensor": ({"a": 1.0, "b": 2.0}, "domain 'a' must be a tensor with one number, got 1.0"),
    "NaN": ({"a": 1, "b": float("nan")}, "the loss of domain 'b' is NaN"),
}


@pytest.mark.parametrize("case", BAD_LOSSES)
def test_losses_that_cannot_be_right(case):
    losses, message = BAD_LOSSES[case]
    weight = torch.ones(2, requires_grad=True)
    if isinstance(losses, dict) and case != "no tensor":
        losses = {d: (weight * v).sum() for d, v in losses.items()}
    with pytest.raises(InputError, match=message):
        backward(losses, [weight], pcgrad)
    assert weight.grad is None


@pytest.mark.parametrize("function", [partial(backward, combine=pcgrad), idgm_backward, iga_backward])
def test_params_that_cannot_be_right(function):
    model = network(norm=False)
    losses = three_losses(model)
    if function in (idgm_backward, iga_backward):
        losses = {d: lambda: cross_entropy(model(dataset()[0][0]), dataset()[1][0]) for d in range(2)}
    used = model.parameters()
    list(used)
    for params, message in [
        ([], "params has no tensor that requires a gradient, of 0. An iterator"),
        (used, "can be read only once"),
        ([torch.ones(2)], "params has no tensor that requires a gradient, of 1.$"),
        (model[0].weight, "params must be a module, an optimizer or the leaf tensors"),
        ([model[0].weight * 2], "params must be a module, an optimizer or the leaf tensors"),
        ("model", "params must be a module, an optimizer or the leaf tensors"),
        (3, "params must be"),
    ]:
        with pytest.raises(InputError, match=message):
            function(losses, params)


# Second derivatives by double backward


class Shared(nn.Module):
    """Weights used twice, a dictionary as input, an embedding, attention."""

    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(9, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.again, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        z = self.embed(x["words"]) + x["more"]
        z = z + self.attention(z, z, z, need_weights=False)[0]
        return self.out(self.again(self.again(z).tanh()).mean(1))


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Scaled(nn.Module):
    """Changes its buffer in place, and then multiplies by it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        return x * self.scale.mul_(0.9)


def images(*layers, channels=4):
    return nn.Sequential(nn.Conv2d(3, channels, 3, bias=False), *layers, nn.Flatten(), nn.LazyLinear(3))


SECOND = {
    "batch norm": lambda: images(
        nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.ReLU()
    ),
    "batch norm without affine": lambda: images(nn.BatchNorm2d(4, affine=False), nn.Tanh()),
    "batch norm without statistics": lambda: images(nn.BatchNorm2d(4, track_running_stats=False), nn.Tanh()),
    "batch norm in evaluation": lambda: images(nn.BatchNorm2d(4).eval(), nn.Tanh()),
    "dropout": lambda: images(nn.Tanh(), nn.Dropout(0.5), nn.BatchNorm2d(4), nn.Dropout2d(0.3)),
    "pooling": lambda: images(nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.GELU(), nn.AdaptiveAvgPool2d(2)),
    "layer norm": lambda: images(nn.LayerNorm(6), nn.Hardswish()),
    "grouped, strided and dilated": lambda: images(
        nn.Conv2d(4, 8, 3, stride=2, padding=2, dilation=2, groups=2, bias=False),
        nn.BatchNorm2d(8),
        nn.Tanh(),
    ),
    "padding by name": lambda: images(nn.Conv2d(4, 4, 3, padding="same"), nn.Tanh()),
    "one dimension": lambda: images(
        nn.Flatten(2), nn.Conv1d(4, 5, 3, padding=1), nn.BatchNorm1d(5), nn.Tanh()
    ),
    "three dimensions": lambda: images(
        nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), nn.Tanh()
    ),
    "frozen layer": lambda: images(nn.Conv2d(4, 4, 3).requires_grad_(False), nn.BatchNorm2d(4), nn.Tanh()),
    "channels last": lambda: images(nn.BatchNorm2d(4), nn.ReLU()),
    "group norm": lambda: images(nn.GroupNorm(2, 4), nn.Dropout(0.5), nn.Tanh()),
    "group norm without affine": lambda: images(nn.GroupNorm(2, 4, affine=False), nn.Tanh()),
    "instance norm": lambda: images(nn.InstanceNorm2d(4, affine=True), nn.Tanh()),
    "weight norm": lambda: images(
        nn.Dropout(0.5), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)), nn.Tanh()
    ),
    "spectral norm": lambda: images(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)), nn.BatchNorm2d(4), nn.Tanh()
    ),
    "group norm of single values": lambda: images(nn.Flatten(), nn.GroupNorm(144, 144), nn.Tanh()),
    "checkpoint": lambda: images(
        Checkpointed(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.GroupNorm(2, 4), nn.Tanh())
    ),
    "own function": lambda: images(nn.Dropout(0.5), nn.Tanh(), _Applied()),
    "words": Shared,
}


def second_order_problem(case, seed=0):
    torch.manual_seed(seed)
    model = SECOND[case]()
    x = torch.randn(2, 6, 3, 8, 8)
    y = torch.randint(3, (2, 6))
    inputs = [{"words": torch.randint(9, (6, 5)), "more": torch.randn(6, 5, 4).double()} for _ in x]
    if case != "words":
        inputs = list(x.double())
    if case != "words":
        model(x[0])  # lazy layers
    model.double()
    if case == "channels last":
        model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
            if p.ndim == 1:
                p[0] = 0  # as the last norm of a residual block begins
    params = [p for p in model.parameters() if p.requires_grad]
    return model, params, [lambda i=i: cross_entropy(model(inputs[i]), y[i]) for i in range(2)]


@pytest.mark.parametrize("case", SECOND)
def test_second_derivatives_are_what_torch_gives(case):
    model, params, losses = second_order_problem(case)
    state = copy.deepcopy(model.state_dict())
    v = [torch.randn_like(p) for p in params]
    expected = []
    with sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(4)
        for loss in losses:
            first = torch.autograd.grad(loss(), params, create_graph=True)
            expected.append(torch.autograd.grad(first, params, v, allow_unused=True))
    expected = [
        sum(torch.zeros_like(p) if h is None else h for h in each) / 2
        for p, *each in zip(params, *expected, strict=True)
    ]
    model.load_state_dict(state)
    torch.manual_seed(4)
    found = curvature(losses, params, v)
    assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert max(h.abs().max() for h in expected) > 1e-2
    assert all(f.stride() == p.stride() for f, p in zip(match(losses, params).slope, params, strict=True))


@pytest.mark.parametrize("case", SECOND)
def test_the_slope_of_the_gip_is_what_torch_gives(case):
    """Where first derivatives are taken twice, and the second time only for their graph."""
    model, params, losses = second_order_problem(case)
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(4)
    with sdpa_kernel(SDPBackend.MATH):
        one, two = (torch.autograd.grad(loss(), params, create_graph=True) for loss in losses)
        expected = torch.autograd.grad(inner_product(one, two), params, allow_unused=True)
    expected = [torch.zeros_like(p) if h is None else h for h, p in zip(expected, params, strict=True)]
    model.load_state_dict(state)
    torch.manual_seed(4)
    assert_close(match(losses, params).slope, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["exact", "finite-difference"])
def test_a_buffer_that_forward_changes_in_place(method):
    model = nn.Sequential(nn.Linear(4, 3), Scaled(), nn.Tanh())
    losses = {domain: lambda: model(torch.ones(2, 4)).square().mean() for domain in "ab"}
    if method == "exact":
        with pytest.raises(InputError, match=r"changed in place .* a buffer .* method=\"finite-difference\""):
            idgm_backward(losses, model)
    else:
        idgm_backward(losses, model, method=method)
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_parameters_stay_as_they_are():
    """Their values, gradients and versions too: a graph from before can still go backwards."""
    model, params, losses = second_order_problem("layer norm")
    before, start = losses[0](), copy.deepcopy(model.state_dict())
    match(losses, params, model=model)
    assert all(p.grad is None and p.is_leaf for p in params)
    assert all(torch.equal(p, start[name]) for name, p in model.named_parameters())
    before.backward()


def test_a_model_in_several_processes_is_refused(tmp_path: Path) -> None:
    """Its processes would each go their own way."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        x = torch.ones(3, 2)
        losses = {0: model(x).sum(), 1: model.module(2 * x).sum()}
        with pytest.raises(InputError, match=r"params=model\.module and average="):
            backward(losses, model, pcgrad)
        backward(losses, model.module, pcgrad)
    finally:
        torch.distributed.destroy_process_group()
