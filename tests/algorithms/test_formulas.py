"""Every algorithm's steps against the formula of its paper, taken the slow way in float64."""

import copy
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from references import naive
from shoal.algorithms import build
from shoal.algorithms.base import Algorithm, trained_parameters
from shoal.data import DomainBatch, Task
from shoal.gradients import and_mask, pcgrad
from shoal.models.feature_model import FeatureModel, linear_head
from shoal.training.engine import Engine

DOMAINS, S, WIDTH, CLASSES = 5, 3, 5, 3
VISITS = ([3, 0, 4], [4, 1, 3], [1, 3, 0])  # domain 2 never comes, and none of them in order
SIZES = (6, 5, 7)
CLOSE = {"rtol": 1e-9, "atol": 1e-11}

Maker = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
every_optimizer = pytest.mark.parametrize("maker", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def network(classes: int | None = CLASSES) -> FeatureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        features = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, WIDTH), nn.Tanh())
        return FeatureModel(features, linear_head(WIDTH, classes)).double()


def batches(step: int = 0, *, regression: bool = False) -> list[DomainBatch]:
    draw = torch.Generator().manual_seed(100 + step)
    found = []
    for d, size in zip(VISITS[step % len(VISITS)], SIZES, strict=True):
        x = (1 + 0.3 * d) * torch.randn(size, 4, generator=draw, dtype=torch.float64) + 0.4 * d
        y = torch.randint(CLASSES, (size,), generator=draw)
        found.append(DomainBatch(x, x[:, 0] * (d - 2) + y if regression else y, d))
    return found


def on(
    name: str, model: nn.Module, maker: Maker, loss: Any = cross_entropy, **settings: Any
) -> tuple[Any, Engine]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        classes = CLASSES if loss is cross_entropy else None
        algorithm = build(name, model, loss, Task(DOMAINS, classes, features=WIDTH), **settings)
    auxiliary = algorithm.auxiliary_optimizers()
    trained = maker(trained_parameters(algorithm, auxiliary))
    return algorithm, Engine(algorithm.wrap(trained, S), auxiliary=auxiliary)


def penalised(cls: Any) -> Any:
    return lambda algorithm, model, loss, settings: cls(model, loss, repeat(settings["weight"]))


def plain(cls: Any, *names: str, **more: Any) -> Any:
    return lambda algorithm, model, loss, settings: cls(
        model, loss, **{n: settings[n] for n in names}, **more
    )


def fishr(algorithm: Any, model: nn.Module, loss: Any, settings: dict[str, Any]) -> naive.Reference:
    return naive.Fishr(model, loss, repeat(settings["weight"]), settings["ema"])


def adversarial(algorithm: Any, model: nn.Module, loss: Any, settings: dict[str, Any]) -> naive.Reference:
    own = ("discriminator_steps", "gradient_penalty", "discriminator_lr", "beta1")
    classes = algorithm.discriminator.classes
    chosen = {k: v for k, v in settings.items() if k in own}
    return naive.DANN(
        model, loss, repeat(settings["weight"]), algorithm.discriminator.layers, classes, **chosen
    )


GAME = {"weight": 0.7, "width": 6}
LONG_GAME = GAME | {
    "discriminator_steps": 2,
    "gradient_penalty": 0.8,
    "discriminator_lr": 0.02,
    "beta1": 0.0,
    "depth": 2,
}
MLDG = ("beta", "inner_lr", "held_out", "order")
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "irm": ({"weight": 5.0, "start": 0}, penalised(naive.IRM)),
    "vrex": ({"weight": 5.0, "start": 0}, penalised(naive.VREx)),
    "coral": ({"weight": 5.0}, penalised(naive.CORAL)),
    "mmd": ({"weight": 5.0}, penalised(naive.MMD)),
    "iga": ({"weight": 5.0}, penalised(naive.IGA)),
    "fishr": ({"weight": 5.0, "start": 0, "ema": 0.8}, fishr),
    "fishr without smoothing": ({"weight": 5.0, "start": 0, "ema": 0.0}, fishr),
    "groupdro": ({"step_size": 0.5}, plain(naive.GroupDRO, "step_size", domains=DOMAINS)),
    "mixup": ({"alpha": 0.7}, plain(naive.Mixup)),
    "mixup of features": ({"alpha": 0.7, "where": "features"}, plain(naive.Mixup, "where")),
    "mldg": ({"beta": 0.7, "inner_lr": 0.4, "held_out": 1, "order": "first"}, plain(naive.MLDG, *MLDG)),
    "mldg of two": (
        {"beta": 0.7, "inner_lr": 0.4, "held_out": 2, "order": "first"},
        plain(naive.MLDG, *MLDG),
    ),
    "mldg exact": ({"beta": 0.7, "inner_lr": 0.4, "held_out": 1, "order": "exact"}, plain(naive.MLDG, *MLDG)),
    "dann": (GAME, adversarial),
    "dann in full": (LONG_GAME, adversarial),
    "cdann": (GAME, adversarial),
    "cdann in full": (LONG_GAME, adversarial),
    "and-mask": ({"tau": 1.0}, plain(naive.Masked, "tau")),
    "sand-mask": ({"tau": 0.5, "k": 10.0}, plain(naive.Masked, "tau", "k")),
    "sand-mask with a soft edge": ({"tau": 0.1, "k": 1e-3}, plain(naive.Masked, "tau", "k")),
    "pcgrad": ({}, plain(naive.PCGrad)),
    "eqrm": ({"quantile": 0.9, "start": 0}, plain(naive.EQRM, "quantile")),
    "sam": ({"rho": 0.3}, plain(naive.SAM, "rho")),
    "sagm": ({"rho": 0.3, "alpha": 0.2}, plain(naive.SAGM, "rho", "alpha")),
    "erm-by-domain": ({}, plain(naive.MeanOfMeans)),
    "reweighted": ({}, plain(naive.Pooled)),
}
SAME_AS_ERM = ("erm-by-domain", "reweighted")
every_case = pytest.mark.parametrize("case", CASES)


class Pair:
    """An algorithm and its reference, on models that begin alike."""

    def __init__(self, case: str, maker: Maker, loss: Any = cross_entropy) -> None:
        settings, reference = CASES[case]
        model = network(CLASSES if loss is cross_entropy else None)
        twin = copy.deepcopy(model)
        self.algorithm, self.engine = on(case.split()[0], model, maker, loss, **settings)
        self.reference = reference(self.algorithm, twin, loss, settings)
        self.optimizer = maker(twin.parameters())
        self.drawn: list[Tensor] = []
        self.engine.agree = self.agree  # type: ignore[method-assign]

    def agree(self, tensor: Tensor) -> Tensor:
        self.drawn.append(tensor if tensor.ndim == 1 else tensor[:, 0])
        return tensor

    def take(self, meta_batch: list[DomainBatch]) -> None:
        self.algorithm.step(meta_batch, self.engine)
        if isinstance(self.reference, naive.Mixup):
            self.reference.shares = self.drawn[-1].tolist()
        for p, g in zip(self.reference.params, self.reference.gradient(meta_batch), strict=True):
            p.grad = g
        self.optimizer.step()

    def check(self) -> None:
        algorithm, reference = self.algorithm, self.reference
        close(algorithm.model.state_dict(), reference.model.state_dict())
        if isinstance(reference, naive.DANN):
            close(algorithm.discriminator.layers.state_dict(), reference.discriminator.state_dict())
            if reference.classes is not None:
                close(algorithm.discriminator.classes.state_dict(), reference.classes.state_dict())
        if isinstance(reference, naive.GroupDRO):
            close(algorithm.weights.log_weights.exp(), torch.tensor(reference.q, dtype=torch.float64))
        if isinstance(reference, naive.Fishr):
            for d in range(DOMAINS):
                never = torch.zeros_like(algorithm.variances.smoothed[d])
                close(algorithm.variances.smoothed[d], reference.kept.get(d, never))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, **CLOSE)


def differ(a: nn.Module, b: nn.Module, by: float = 1e-4) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs) > by


def erm(steps: int, maker: Maker, loss: Any = cross_entropy) -> nn.Module:
    """Trained on the mean of the domains' means."""
    model = network(CLASSES if loss is cross_entropy else None)
    reference, optimizer = naive.MeanOfMeans(model, loss), maker(model.parameters())
    for step in range(steps):
        found = reference.gradient(batches(step, regression=loss is mse_loss))
        for p, g in zip(reference.params, found, strict=True):
            p.grad = g
        optimizer.step()
    return model


def trained(name: str, maker: Maker, steps: int = 3, **settings: Any) -> nn.Module:
    model = network()
    algorithm, engine = on(name, model, maker, **settings)
    for step in range(steps):
        algorithm.step(batches(step), engine)
    return model


@every_case
class TestFormulas:
    @every_optimizer
    def test_steps(self, case: str, maker: Maker) -> None:
        pair = Pair(case, maker)
        for step in range(3):
            pair.take(batches(step))
            pair.check()
        if case not in SAME_AS_ERM:
            assert differ(pair.algorithm.model, erm(3, maker))  # else the comparison is of nothing

    def test_steps_of_a_regression(self, case: str) -> None:
        if case.startswith("cdann"):
            return  # refused, see test_penalties
        pair = Pair(case, OPTIMIZERS["sgd"], mse_loss)
        for step in range(2):
            pair.take(batches(step, regression=True))
        pair.check()
        if case not in SAME_AS_ERM:
            assert differ(pair.algorithm.model, erm(2, OPTIMIZERS["sgd"], mse_loss))

    def test_the_order_of_the_domains_in_a_step(self, case: str) -> None:
        pair = Pair(case, OPTIMIZERS["sgd"])
        pair.take(batches(0)[::-1])
        pair.check()

    def test_domains_that_are_tensors(self, case: str) -> None:
        """As within a captured step."""
        pair = Pair(case, OPTIMIZERS["sgd"])
        again = Pair(case, OPTIMIZERS["sgd"])
        for step in range(2):
            torch.manual_seed(step)
            pair.algorithm.step(batches(step), pair.engine)
            torch.manual_seed(step)
            again.algorithm.step(
                [b._replace(domain=torch.tensor(b.domain)) for b in batches(step)], again.engine
            )
        found, expected = again.algorithm.state_dict(), pair.algorithm.state_dict()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "case", ["irm", "vrex", "mmd", "iga", "fishr", "groupdro", "dann", "cdann", "mixup", "eqrm"]
)
def test_steps_of_single_examples(case: str) -> None:
    pair = Pair(case, OPTIMIZERS["sgd"])
    for step in range(2):
        pair.take([b._replace(x=b.x[:1], y=b.y[:1]) for b in batches(step)])
        pair.check()


class TestNothingAdded:
    """Without its penalty an algorithm is ERM on the mean of the domains' means."""

    @every_optimizer
    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            *((name, {"weight": 0.0, "start": 0}) for name in ("irm", "vrex", "fishr", "coral", "mmd")),
            *((name, {"weight": 0.0, "start": 2}) for name in ("irm", "vrex")),
            *((name, {"weight": 9.0, "start": 3}) for name in ("fishr", "coral", "mmd", "iga", "dann")),
            ("iga", {"weight": 0.0}),
            ("dann", {"weight": 0.0}),
            ("cdann", {"weight": 0.0}),
            ("groupdro", {"step_size": 0.0}),
            ("and-mask", {"tau": 0.0}),
            ("and-mask", {"tau": 1 / 3}),  # of three signs two agree
            ("sand-mask", {"tau": 0.0, "k": 1e12}),
            ("mldg", {"beta": 2.0, "inner_lr": 0.0}),
            ("mldg", {"beta": 0.5, "inner_lr": 0.0, "held_out": 1, "order": "exact"}),
            ("erm-by-domain", {}),
        ],
    )
    def test_it_is_erm(self, name: str, settings: dict[str, Any], maker: Maker) -> None:
        found, expected = trained(name, maker, **settings), erm(3, maker)
        if name == "mldg":  # L₁ + 2 (L₂ + L₃)/2, or (L₁ + L₂)/2 + L₃/2
            if maker is not OPTIMIZERS["sgd"]:
                return
            found = trained(name, lambda p: torch.optim.SGD(p, 0.1 / (1 + settings["beta"])), **settings)
        close(found.state_dict(), expected.state_dict())

    @every_optimizer
    def test_sam_without_radius_is_pooled_erm(self, maker: Maker) -> None:
        close(trained("sam", maker, rho=0.0).state_dict(), trained("reweighted", maker).state_dict())

    @pytest.mark.parametrize("order", ["first", "exact"])
    def test_mldg_without_beta_leaves_the_held_out_domains_alone(self, order: str) -> None:
        maker, model = OPTIMIZERS["sgd"], network()
        reference, optimizer = naive.MeanOfMeans(model, cross_entropy), maker(model.parameters())
        for p, g in zip(reference.params, reference.gradient(batches()[:1]), strict=True):
            p.grad = g
        optimizer.step()
        close(trained("mldg", maker, 1, beta=0.0, order=order).state_dict(), model.state_dict())

    def test_mixup_that_mixes_nothing(self) -> None:
        """λ is 0 or 1: each pair is one of its two batches."""
        model = network()
        algorithm, engine = on("mixup", model, OPTIMIZERS["sgd"])
        own = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
        engine.agree = lambda drawn: own if drawn.ndim == 1 else torch.stack([own, 1 - own], 1)
        equal = [b._replace(x=b.x[:5], y=b.y[:5]) for b in batches()]
        found, _ = algorithm.gradient(equal, engine)
        expected = naive.MeanOfMeans(model, cross_entropy).gradient([equal[0], equal[2], equal[2]])
        close(found, expected)


class TestSchedule:
    @pytest.mark.parametrize("case", ["irm", "vrex"])
    def test_until_the_start_the_weight_is_one(self, case: str) -> None:
        reference = {"irm": naive.IRM, "vrex": naive.VREx}[case]
        pair = Pair(case, OPTIMIZERS["sgd"])
        pair.algorithm.weight.start, pair.algorithm.weight.ramp = 1, 2
        pair.reference = reference(pair.reference.model, cross_entropy, chain([1, 1, 3], repeat(5)))
        for step in range(5):
            pair.take(batches(step))
        pair.check()

    @pytest.mark.parametrize("case", ["coral", "iga", "fishr", "dann"])
    def test_until_the_start_there_is_none(self, case: str) -> None:
        pair = Pair(case, OPTIMIZERS["sgd"])
        weight = CASES[case][0]["weight"]
        pair.algorithm.weight.start, pair.algorithm.weight.ramp = 1, 2
        pair.reference.weights = chain([0, 0, weight / 2], repeat(weight))
        for step in range(4):
            pair.take(batches(step))
        pair.check()


class TestStateOfDomains:
    def test_groupdro_stays_finite_at_a_large_step_size(self) -> None:
        """The weights are kept as logarithms: exp(1000) would be infinite."""
        algorithm, engine = on("groupdro", network(), OPTIMIZERS["sgd"], step_size=1000.0)
        for step in range(3):
            found, _ = algorithm.gradient(batches(step), engine)
            assert all(g.isfinite().all() for g in found)

    def test_a_layer_without_biases_has_no_variances_of_them(self) -> None:
        model = network()
        model.head = nn.Linear(WIDTH, CLASSES, bias=False).double()
        algorithm, engine = on("fishr", model, OPTIMIZERS["sgd"], start=0, weight=5.0, ema=0.8)
        reference = naive.Fishr(model, cross_entropy, repeat(5.0), 0.8)
        close(algorithm.gradient(batches(), engine)[0], reference.gradient(batches()))
        assert algorithm.variances.smoothed.shape == (DOMAINS, WIDTH * CLASSES)

    def test_a_batch_that_mixes_domains_goes_by_its_place(self) -> None:
        mixed = [b._replace(domain=None) for b in batches()]
        algorithm, engine = on("fishr", network(), OPTIMIZERS["sgd"], start=0)
        algorithm.step(mixed, engine)
        assert algorithm.variances.smoothed.any(1).tolist() == [True, True, True, False, False]

    @pytest.mark.parametrize("name", ["dann", "cdann"])
    def test_the_users_optimizer_leaves_the_discriminator_alone(self, name: str) -> None:
        algorithm, engine = on(name, network(), OPTIMIZERS["sgd"])
        theirs = {id(p) for p in engine.params}
        assert theirs == {id(p) for p in algorithm.model.parameters()}
        assert not theirs & {id(p) for p in algorithm.discriminator.parameters()}


class TestMasks:
    @pytest.mark.parametrize("tau", [0.0, 0.4, 0.5, 0.6, 1.0])
    def test_of_four_domains(self, tau: float) -> None:
        """The mean of four signs is 0, ½ or 1 in size."""
        model, four = network(), batches(0) + batches(1)[1:2]
        signs = torch.stack(naive.MeanOfMeans(model, cross_entropy).apart(four)).sign().sum(0).abs()
        assert set(signs.tolist()) == {0, 2, 4}
        for name, more in (("and-mask", {}), ("sand-mask", {"k": 1e-3})):
            if (name, tau) == ("sand-mask", 1.0):
                continue
            algorithm, engine = on(name, model, OPTIMIZERS["sgd"], tau=tau, **more)
            found, _ = algorithm.gradient(four, engine)
            close(found, naive.Masked(model, cross_entropy, tau, **more).gradient(four))

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_threshold_is_met_whatever_the_rounding(self, dtype: torch.dtype, device: str) -> None:
        """With k more signs of S for than against, τ = k/S lets a component pass and a larger τ does not."""
        for count in range(2, 64):
            for more in range(count % 2 or 2, count + 1, 2):
                each = -torch.ones(count, 2, dtype=dtype, device=device)
                each[: (count + more) // 2] = 1
                gradients = [[g] for g in each]
                assert and_mask(gradients, tau=more / count)[0].all()
                if more < count:
                    assert not and_mask(gradients, tau=(more + 0.1) / count)[0].any()


class TestPCGrad:
    @pytest.mark.parametrize("count", [2, 3, 5, 8])
    def test_surgery_of_random_gradients(self, count: int) -> None:
        conflicts = 0
        for seed in range(20):
            draw = torch.Generator().manual_seed(seed)
            g = torch.randn(count, 4, generator=draw, dtype=torch.float64)
            projected = []
            for i in range(count):
                mine = g[i].clone()
                for turn in range(1, count):
                    other = g[(i + turn) % count]
                    if mine @ other < 0:
                        mine -= (mine @ other) / (other @ other) * other
                        conflicts += 1
                projected.append(mine)
            close(pcgrad([[row] for row in g])[0], torch.stack(projected).mean(0))
        assert conflicts > 10

    def test_a_zero_gradient_conflicts_with_none(self) -> None:
        g = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 1.0]])
        torch.testing.assert_close(pcgrad([[row] for row in g])[0], torch.tensor([0.5, 1.5]) / 3)
        tiny = torch.tensor([[1e10, 0.0], [-1e-25, 0.0]])  # its square is 0 in float32, its product is not
        gram = tiny @ tiny.T
        assert gram[1, 1] == 0 > gram[0, 1]
        assert pcgrad([[row] for row in tiny])[0].tolist() == [0.5e10, 0.0]


class TestMixing:
    @pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
    def test_shares_follow_the_beta_distribution(self, alpha: float) -> None:
        shares = drawn_shares(alpha)
        spread = 1 / (4 * (2 * alpha + 1))  # its variance; a sixth of a per cent of noise
        assert float(shares.mean()) == pytest.approx(0.5, abs=5 * (spread / len(shares)) ** 0.5)
        assert float(shares.var()) == pytest.approx(spread, rel=0.1)


def drawn_shares(alpha: float, steps: int = 1000) -> Tensor:
    """What Mixup draws in many steps."""
    model = nn.Linear(1, 2)
    algorithm: Algorithm = build("mixup", model, cross_entropy, Task(2, 2), alpha=alpha)
    engine, found = Engine(torch.optim.SGD(model.parameters(), 0.1)), []

    def agree(tensor: Tensor) -> Tensor:
        found.append(tensor if tensor.ndim == 1 else tensor[:, 0])
        return tensor

    engine.agree = agree  # type: ignore[method-assign]
    engine.gradients = lambda *_, **__: ([], {})  # type: ignore[method-assign, assignment]
    torch.manual_seed(0)
    domains = [DomainBatch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), d) for d in range(2)]
    for _ in range(steps):
        algorithm.gradient(domains, engine)
    return torch.cat(found)


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
