"""The algorithms against their formulas, and against each other where they must coincide."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from references.naive import CopyingFish
from shoal.algorithms import algorithm_class, build
from shoal.data import DomainBatch, Task
from shoal.errors import InputError
from shoal.gradients import inner_product
from shoal.paper.theorem import check_theorem
from shoal.training.engine import Engine

S, B, ALPHA, EPSILON = 3, 6, 0.05, 0.3
Maker = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "sgd": lambda p: torch.optim.SGD(p, ALPHA),
    "momentum": lambda p: torch.optim.SGD(p, ALPHA, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
}
ZERO_STATE: dict[str, Maker] = {
    "momentum": OPTIMIZERS["momentum"],
    "adam": OPTIMIZERS["adam"],
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}
"""Optimizers with moments that begin at zero."""
every_optimizer = pytest.mark.parametrize("maker", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def network(*, noisy: bool = False, double: bool = True) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        middle = [nn.BatchNorm1d(8), nn.Dropout(0.3)] if noisy else []
        model = nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 2))
    return model.double() if double else model


def batches(step: int = 0, double: bool = True) -> list[DomainBatch]:
    draw = torch.Generator().manual_seed(100 + step)
    x = torch.randn(S, B, 4, generator=draw, dtype=torch.float64 if double else torch.float32)
    y = torch.randint(2, (S, B), generator=draw)
    return [DomainBatch(x[d] + d, y[d], d) for d in range(S)]


def algorithm_on(name: str, model: nn.Module, maker: Maker, **settings: Any) -> tuple[Any, Engine]:
    algorithm = build(name, model, nn.functional.cross_entropy, Task(S, 2), **settings)
    return algorithm, Engine(algorithm.wrap(maker(model.parameters()), S))


def trained(
    name: str, maker: Maker, steps: int = 3, noisy: bool = False, double: bool = True, **settings: Any
) -> dict[str, Tensor]:
    model = network(noisy=noisy, double=double)
    algorithm, engine = algorithm_on(name, model, maker, **settings)
    for step in range(steps):
        torch.manual_seed(step)
        algorithm.step(batches(step, double), engine)
    return model.state_dict()


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def assert_differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert any(not torch.equal(a[k], b[k]) for k in a)


def domain_loss(model: nn.Module, batch: DomainBatch) -> Tensor:
    return nn.functional.cross_entropy(model(batch.x), batch.y)


def gradients(model: nn.Module, **graph: bool) -> list[list[Tensor]]:
    params = list(model.parameters())
    return [list(torch.autograd.grad(domain_loss(model, b), params, **graph)) for b in batches()]


class TestFish:
    @every_optimizer
    def test_at_meta_lr_1_it_is_the_inner_optimizer(self, maker: Maker) -> None:
        model = network(noisy=True, double=False)
        optimizer = maker(model.parameters())
        for step in range(3):
            torch.manual_seed(step)
            for batch in batches(step, double=False):
                optimizer.zero_grad()
                domain_loss(model, batch).backward()
                optimizer.step()
        walked = trained("fish", maker, noisy=True, double=False, meta_lr=1.0, inner_state="carry")
        assert_equal(walked, model.state_dict())

    def test_resetting_differs_from_carrying_where_there_is_a_state(self) -> None:
        reset, carried = (
            [trained("fish", OPTIMIZERS[o], inner_state=i) for o in ("sgd", "adam")]
            for i in ("reset", "carry")
        )
        assert_equal(reset[0], carried[0])
        assert_differ(reset[1], carried[1])

    @pytest.mark.parametrize("every", [1, 2, 3, 100])
    @pytest.mark.parametrize("inner", ZERO_STATE)
    def test_a_state_that_is_reset_every_so_many_steps(self, inner: str, every: int) -> None:
        """Against a new optimizer for a copy of the model, as in the authors' program at every epoch."""
        reference = CopyingFish(network(), ZERO_STATE[inner], EPSILON)
        for step in range(7):
            if step % every == 0:
                reference.saved = None
            reference.walk(batches(step), domain_loss)
        walked = trained("fish", ZERO_STATE[inner], 7, meta_lr=EPSILON, inner_state=every)
        torch.testing.assert_close(walked, reference.model.state_dict(), rtol=0, atol=1e-12)
        if every == 1:
            reset = trained("fish", ZERO_STATE[inner], 7, meta_lr=EPSILON, inner_state="reset")
            torch.testing.assert_close(walked, reset, rtol=0, atol=1e-12)
        carried = trained("fish", ZERO_STATE[inner], 7, meta_lr=EPSILON, inner_state="carry")
        assert (every > 7) == all(torch.equal(walked[k], carried[k]) for k in walked)

    def test_forgetting_spares_the_slow_weights(self) -> None:
        model = network()
        algorithm, engine = algorithm_on("fish", model, ZERO_STATE["adam"], meta_lr=EPSILON)
        algorithm.step(batches(), engine)
        state = engine.optimizer.state  # the slow weights are among the moments now
        for due in (False, True):
            algorithm.walks.forget(torch.tensor(due))
            moments = [entry["exp_avg"] for entry in engine.optimizer.state.values()]
            assert all(bool(m.any()) is not due for m in moments)
        for p in model.parameters():
            torch.testing.assert_close(state[p]["slow"], p.detach(), rtol=0, atol=0)

    @pytest.mark.parametrize(
        "maker", [torch.optim.NAdam, partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)]
    )
    def test_a_state_that_does_not_begin_at_zero_is_not_reset_by_number(self, maker: Maker) -> None:
        with pytest.raises(InputError, match=r"inner_state=2 requires Adam, AdamW or SGD without dampening"):
            trained("fish", maker, 1, inner_state=2)

    def test_buffers_walk_or_interpolate(self) -> None:
        start = network(noisy=True).state_dict()
        end = trained("fish", OPTIMIZERS["sgd"], 1, noisy=True, meta_lr=1.0)
        walk, blended = (
            trained("fish", OPTIMIZERS["sgd"], 1, noisy=True, meta_lr=EPSILON, buffers=b)
            for b in ("walk", "interpolate")
        )
        for name in ("1.running_mean", "1.running_var"):
            torch.testing.assert_close(walk[name], end[name], rtol=0, atol=0)
            torch.testing.assert_close(blended[name], start[name] + EPSILON * (end[name] - start[name]))
        assert walk["1.num_batches_tracked"] == blended["1.num_batches_tracked"] == S
        torch.testing.assert_close(walk["0.weight"], blended["0.weight"], rtol=0, atol=0)


class TestSmoothFish:
    def test_gamma_1_is_fish_whose_state_is_reset_by_number(self) -> None:
        common: dict[str, Any] = {"meta_lr": EPSILON, "inner_state": 2}
        fish = trained("fish", ZERO_STATE["adam"], 5, **common)
        assert_equal(trained("smoothfish", ZERO_STATE["adam"], 5, gamma=1.0, **common), fish)
        carried = {**common, "inner_state": "carry"}
        half = trained("smoothfish", ZERO_STATE["adam"], 5, gamma=0.5, **common)
        assert_differ(half, trained("smoothfish", ZERO_STATE["adam"], 5, gamma=0.5, **carried))

    @every_optimizer
    @pytest.mark.parametrize("inner_state", ["carry", "reset"])
    def test_gamma_1_is_fish(self, maker: Maker, inner_state: str) -> None:
        common: dict[str, Any] = {"meta_lr": EPSILON, "inner_state": inner_state}
        fish = trained("fish", maker, noisy=True, double=False, **common)
        assert_equal(trained("smoothfish", maker, noisy=True, double=False, gamma=1.0, **common), fish)
        assert_differ(trained("smoothfish", maker, noisy=True, double=False, gamma=0.5, **common), fish)

    @pytest.mark.parametrize("gamma", [0.0, 0.3, 0.8])
    def test_gamma_against_the_formula(self, gamma: float) -> None:
        """G = αSḡ + γ((θ − θ̃) − αSḡ), θ ← θ − εG; γ = 0 is ERM at rate εαS."""
        model = network()
        params = list(model.parameters())
        theta = [p.detach().clone() for p in params]
        mean = [torch.stack(g).mean(0) for g in zip(*gradients(model), strict=True)]
        for batch in batches():
            for p, g in zip(params, torch.autograd.grad(domain_loss(model, batch), params), strict=True):
                p.data = p.data - ALPHA * g
        for p, t, g in zip(params, theta, mean, strict=True):
            plain = ALPHA * S * g
            p.data = t - EPSILON * (plain + gamma * ((t - p.data) - plain))
        found = trained("smoothfish", OPTIMIZERS["sgd"], 1, gamma=gamma, meta_lr=EPSILON)
        torch.testing.assert_close(found, model.state_dict(), rtol=1e-12, atol=1e-14)

    def test_gamma_0_feeds_the_same_optimizer_the_gradients_at_the_start(self) -> None:
        model = network()
        start = copy.deepcopy(model.state_dict())
        optimizer = OPTIMIZERS["adam"](model.parameters())
        for g in gradients(model):
            for p, x in zip(model.parameters(), g, strict=True):
                p.grad = x
            optimizer.step()
        expected = {k: torch.lerp(start[k], v, EPSILON) for k, v in model.state_dict().items()}
        found = trained("smoothfish", OPTIMIZERS["adam"], 1, gamma=0.0, meta_lr=EPSILON)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def naive_gip(model: nn.Module, normalize: bool) -> Tensor:
    """The mean over ordered pairs, with its graph."""
    flat = [torch.cat([t.flatten() for t in g]) for g in gradients(model, create_graph=True)]
    if normalize:
        flat = [g / g.norm() for g in flat]
    pairs = list(permutations(range(S), 2))
    return sum((flat[i] @ flat[j] for i, j in pairs), torch.zeros(())) / len(pairs)


def idgm_gradient(model: nn.Module, **settings: Any) -> list[Tensor]:
    algorithm, engine = algorithm_on("idgm", model, OPTIMIZERS["sgd"], **settings)
    found: list[Tensor] = algorithm.gradient(batches(), engine)[0]
    return found


def mean_gradient(model: nn.Module) -> list[Tensor]:
    return [torch.stack(g).mean(0) for g in zip(*gradients(model), strict=True)]


def norm(g: list[Tensor]) -> float:
    return float(inner_product(g, g).sqrt())


class TestIDGM:
    @every_optimizer
    def test_gamma_0_is_erm_on_the_mean_of_domain_means(self, maker: Maker) -> None:
        found, plain = trained("idgm", maker, gamma=0.0), trained("erm", maker)
        torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-11)

    @pytest.mark.parametrize("normalize", [False, True])
    @pytest.mark.parametrize("gamma", [0.4, 3.0])
    def test_against_autograd(self, normalize: bool, gamma: float) -> None:
        model = network()
        mean_loss = torch.stack([domain_loss(model, b) for b in batches()]).mean()
        objective = mean_loss - gamma * naive_gip(model, normalize)
        expected = list(torch.autograd.grad(objective, list(model.parameters())))
        found = idgm_gradient(model, gamma=gamma, normalize=normalize, trust=None)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        near = idgm_gradient(model, gamma=gamma, normalize=normalize, trust=None, method="finite-difference")
        term, error = (
            [a - b for a, b in zip(g, expected, strict=True)] for g in (mean_gradient(model), near)
        )
        assert 0 < norm(error) < 0.1 * norm(term)  # the default radius is wide, for ReLU's sake

    @pytest.mark.parametrize("normalize", [False, True])
    @pytest.mark.parametrize("trust", [0.1, 0.5, 0.9, 0.999])
    def test_trust_bounds_the_matching_term(self, normalize: bool, trust: float) -> None:
        model = network()
        mean = mean_gradient(model)
        total = idgm_gradient(model, gamma=1e6, normalize=normalize, trust=trust)
        added = [m - t for m, t in zip(mean, total, strict=True)]
        assert norm(added) == pytest.approx(trust * norm(mean), rel=1e-9)
        assert float(inner_product(total, mean)) > 0  # descends on the mean loss
        slope = torch.autograd.grad(naive_gip(model, normalize), list(model.parameters()))
        cosine = float(inner_product(added, slope)) / norm(added) / norm(list(slope))
        assert cosine == pytest.approx(1, abs=1e-9)

    def test_trust_that_does_not_bind_changes_nothing(self) -> None:
        free, bound = (idgm_gradient(network(), gamma=1e-3, trust=t) for t in (None, 0.9))
        torch.testing.assert_close(free, bound, rtol=0, atol=0)

    def test_where_all_gradients_vanish_it_stands_still(self) -> None:
        model = network()
        algorithm, engine = algorithm_on("idgm", model, OPTIMIZERS["sgd"])
        algorithm.loss = lambda output, y: (output * 0).sum()
        found, log = algorithm.gradient(batches(), engine)
        assert all(not g.any() for g in found)
        assert float(log["gip"]) == 0

    def test_the_term_starts_late_and_the_count_is_saved(self) -> None:
        late: dict[str, Any] = {"start": 2, "gamma": 5.0}
        assert_equal(
            trained("idgm", OPTIMIZERS["sgd"], 2, **late), trained("idgm", OPTIMIZERS["sgd"], 2, gamma=0.0)
        )
        assert_differ(
            trained("idgm", OPTIMIZERS["sgd"], 3, **late), trained("idgm", OPTIMIZERS["sgd"], 3, gamma=0.0)
        )
        model = network()
        algorithm, engine = algorithm_on("idgm", model, OPTIMIZERS["sgd"], **late)
        for step in range(2):
            algorithm.step(batches(step), engine)
        resumed, engine = algorithm_on("idgm", network(), OPTIMIZERS["sgd"], **late)
        resumed.load_state_dict(algorithm.state_dict())
        resumed.step(batches(2), engine)
        assert_equal(resumed.model.state_dict(), trained("idgm", OPTIMIZERS["sgd"], 3, **late))


@pytest.mark.parametrize("domains", [2, 3, 4])
def test_theorem(domains: int) -> None:
    found = check_theorem(domains)
    assert found.slope == pytest.approx(2, abs=0.2)
    assert found.one_minus_cos[-1] < 1e-6


def seen_by(algorithm: str, steps: int = 6, **options: Any) -> list[list[DomainBatch]]:
    """The meta-batches that a training gives to an algorithm."""
    seen: list[list[DomainBatch]] = []

    class Watched(algorithm_class(algorithm)):  # type: ignore[misc]
        def step(self, batches: Any, engine: Any) -> Any:
            seen.append(list(batches))
            return super().step(batches, engine)

    train = {f"{d}": (torch.arange(40.0)[:, None] + 100 * d, torch.arange(40) % 2) for d in range(S)}
    model = nn.Linear(1, 2)
    shoal.fit(Watched, model, train, steps=steps, batch_size=4, lr=1e-6, progress=False, **options)
    return seen


def origin(batch: DomainBatch) -> set[int]:
    return set((batch.x[:, 0] // 100).long().tolist())


def test_reptile_stays_in_one_domain_a_step() -> None:
    steps = seen_by("reptile")
    assert all(len(batches) == S for batches in steps)
    visited = [set.union(*map(origin, batches)) for batches in steps]
    assert all(len(v) == 1 for v in visited)
    assert set.union(*visited[:S]) == set(range(S))


def test_fish_visits_every_domain_each_step() -> None:
    steps = seen_by("fish")
    for batches in steps:
        assert [origin(b) for b in batches] == [{b.domain} for b in batches]
        assert {b.domain for b in batches} == set(range(S))
    assert len({tuple(b.domain for b in batches) for batches in steps}) > 1  # not always in the same order


def test_random_grouping_changes_the_grouping_and_nothing_else() -> None:
    mixed = 0
    for grouped, regrouped in zip(seen_by("fish"), seen_by("fish", draw="regrouped"), strict=True):
        a, b = (torch.cat([batch.x for batch in step]).sort(dim=0).values for step in (grouped, regrouped))
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert [len(batch.y) for batch in regrouped] == [4] * S
        assert all(batch.domain is None for batch in regrouped)
        mixed += sum(len(origin(batch)) > 1 for batch in regrouped)
    assert mixed > S
