"""The mathematics of gradient matching, against double loops in float64."""

from __future__ import annotations

import copy
import itertools
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from references import naive
from shoal.errors import InputError
from shoal.gradients import curvature, gip, gradient, inner_product, match, moved

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
def test_identical_domains_have_cosine_one_and_nothing_to_gain(method):
    _, params, losses = problem(mlp, 2)
    found = match([losses[0]] * 3, params, normalize=True, method=method)
    assert found.value.item() == pytest.approx(1, abs=1e-12)
    assert_close(found.slope, [torch.zeros_like(p) for p in params], rtol=0, atol=1e-7)


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


@METHODS
@FORMS
def test_parameters_that_some_losses_do_not_reach(method, normalize, softening):
    torch.manual_seed(0)
    shared, first, second = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    unused = torch.randn(2, dtype=torch.float64, requires_grad=True)
    params = [shared, first, second, unused]
    losses = [
        lambda: ((shared * first).sin() + shared**3).sum(),
        lambda: ((shared + second).tanh() + 0.1 * shared**2).sum(),
    ]
    found = match(losses, params, normalize=normalize, softening=softening, method=method, radius=1e-6)
    _, value, slope = naive.match(
        [loss() for loss in losses], params, normalize=normalize, softening=softening
    )
    torch.testing.assert_close(found.value, value, **EXACT)
    assert_close(found.slope, slope, **(EXACT if method == "exact" else DIFFERENCES))
    assert (found.slope[3] == 0).all()


@METHODS
@FORMS
def test_losses_linear_in_the_parameters_have_no_slope(method, normalize, softening):
    weights = [torch.tensor([1.0, 2.0, -1.0]), torch.tensor([0.5, 1.0, 1.0])]
    param = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    losses = [lambda w=w: (w * param).sum() for w in weights]
    found = match(losses, [param], normalize=normalize, softening=softening, method=method)
    expected = naive.mean_cosine([[w] for w in weights], softening) if normalize else weights[0] @ weights[1]
    torch.testing.assert_close(found.value, expected)
    assert (found.slope[0] == 0).all()


@METHODS
def test_one_linear_domain_among_curved_ones(method):
    _, params, losses = problem(mlp, 2)
    linear = lambda: sum(p.sum() for p in params)  # noqa: E731
    found = match([*losses, linear], params, method=method, radius=1e-6)
    _, _, slope = naive.match([*(loss() for loss in losses), linear()], params)
    assert_close(found.slope, slope, **(EXACT if method == "exact" else DIFFERENCES))


# Wrong input


def test_fewer_than_two_domains_are_refused():
    _, params, losses = problem(mlp, 1)
    with pytest.raises(InputError, match="at least 2 of them, got 1"):
        match(losses, params)
    with pytest.raises(InputError, match="at least 2 of them, got 0"):
        gip([])


@pytest.mark.parametrize("radius", [0, -1.0, float("nan")])
def test_a_radius_that_is_not_positive_is_refused(radius):
    _, params, losses = problem(mlp, 2)
    with pytest.raises(InputError, match=f"radius of match must be a number above 0.*, got {radius}"):
        match(losses, params, method="finite-difference", radius=radius)


def test_an_unknown_method_is_refused_with_the_nearest():
    _, params, losses = problem(mlp, 2)
    with pytest.raises(
        InputError, match=r"method .*, got 'finite_difference'. Did you mean 'finite-difference'\?"
    ):
        match(losses, params, method="finite_difference")


# Finite differences in practice


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_differences_leave_the_parameters_to_the_bit(dtype):
    _, params, losses = problem(convnet, 3, dtype=dtype)
    before = [p.detach().clone() for p in params]
    match(losses, params, method="finite-difference")
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert all(p.grad is None for p in params)


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


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_finite_differences_in_float32_are_close_with_the_default_radius(normalize, seed):
    _, params, losses = problem(convnet, 3, seed=seed, dtype=torch.float32, batch=16)
    found = match(losses, params, normalize=normalize, method="finite-difference").slope
    exact = match(losses, params, normalize=normalize).slope
    assert relative_error(found, exact) < 0.06  # the default's price for being right with ReLU
    short = match(losses, params, normalize=normalize, method="finite-difference", radius=2e-3).slope
    assert relative_error(short, exact) < 5e-3


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_finite_differences_raise_the_gip_of_a_relu_network(normalize, seed):
    """Kinks make the methods differ, the more the shorter the radius; a step along either helps alike."""

    def relu():
        return nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)
        )

    _, params, losses = problem(relu, 3, seed=seed, dtype=torch.float32, batch=16)
    start = [p.detach().clone() for p in params]

    def gain(method, **settings):
        found = match(losses, params, normalize=normalize, method=method, **settings)
        length = inner_product(found.slope, found.slope).sqrt()
        with torch.no_grad():
            for p, slope in zip(params, found.slope, strict=True):
                p.add_(slope, alpha=0.02 / length.item())
        after = gip([gradient(loss(), params) for loss in losses], normalize=normalize)
        with torch.no_grad():
            for p, before in zip(params, start, strict=True):
                p.copy_(before)
        return (after - found.value).item()

    assert gain("finite-difference") > 0.8 * gain("exact") > 0


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


@METHODS
def test_one_parts_graph_is_in_memory_at_a_time(method):
    Watched.alive, Watched.most = weakref.WeakSet(), 0
    model, params, _ = problem(mlp, 3)
    seen = nn.Sequential(model, _Applied())
    match(pieces_of(seen, 3, [2, 4]), params, method=method)
    assert Watched.most == 1
    assert len(Watched.alive) == 0


# Memory


class _Applied(nn.Module):
    def forward(self, x):
        return Watched.apply(x)


class Watched(torch.autograd.Function):
    """The identity, counting how many of its graph nodes are alive at once."""

    alive: weakref.WeakSet
    most = 0

    @staticmethod
    def forward(ctx, x):
        Watched.alive.add(ctx)
        Watched.most = max(Watched.most, len(Watched.alive))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Saved:
    """A tensor that a graph keeps for its backward pass."""

    alive = most = 0

    def __init__(self, tensor):
        self.tensor = tensor
        Saved.alive += 1
        Saved.most = max(Saved.most, Saved.alive)

    def __del__(self):
        Saved.alive -= 1


@METHODS
@pytest.mark.parametrize("normalize", [False, True])
def test_one_domains_graph_is_in_memory_at_a_time(method, normalize):
    Watched.alive, Watched.most = weakref.WeakSet(), 0
    _, params, losses = problem(mlp, 5, see=Watched.apply)
    match(losses, params, method=method, normalize=normalize)
    assert Watched.most == 1
    assert len(Watched.alive) == 0

    _, params, losses = problem(mlp, 5)
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        Saved.alive = Saved.most = 0
        first = gradient(losses[0](), params, create_graph=method == "exact")
        if method == "exact":
            torch.autograd.grad(first, params, [p.detach() for p in params])
        del first
        one = Saved.most
        Saved.alive = Saved.most = 0
        match(losses, params, method=method, normalize=normalize)
    assert Saved.most == one > 0
    assert Saved.alive == 0


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


def test_without_a_model_the_second_pass_leaves_its_trace():
    """What the test above guards against does happen."""
    model, params, losses = noisy_problem()
    match(losses, params)
    assert model.norm.num_batches_tracked == 6


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


def test_the_variance_refuses_what_it_has_no_meaning_for():
    _, params, losses = problem(mlp, 2)
    with pytest.raises(InputError, match="leave normalize out"):
        match(losses, params, measure="variance", normalize=True)
    with pytest.raises(
        InputError, match=r"measure of match must be .*, got 'varianc'. Did you mean 'variance'"
    ):
        match(losses, params, measure="varianc")
    with pytest.raises(InputError, match="at least 2"):
        match(losses[:1], params, measure="variance")


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


def test_moved_parameters_come_back_when_a_loss_raises():
    _, params, _ = problem(mlp, 1)
    start = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="no loss"), moved(params, start, 0.1):
        raise RuntimeError("no loss")
    assert_close([p.detach() for p in params], start, rtol=0, atol=0)


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


def test_a_linear_loss_has_no_curvature():
    weight, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    found = curvature([lambda: weight.sum(), lambda: (weight**2).sum()], [weight, unused], [weight, unused])
    assert_close(found, [torch.ones(3), torch.zeros(2)])
