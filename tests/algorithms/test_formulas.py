"""Every algorithm's steps against the formula of its paper, taken the slow way in float64."""

import copy
from collections.abc import Callable, Iterator
from itertools import chain, permutations, repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from references import naive
from shoal.algorithms import build
from shoal.algorithms.base import trained_parameters
from shoal.data import MetaBatch, Task
from shoal.errors import InputError
from shoal.gradients import inner_product
from shoal.models.feature_model import FeatureModel, linear_head
from shoal.paper.theorem import check_theorem
from shoal.training.engine import Engine

DOMAINS, S, WIDTH, CLASSES = 5, 3, 5, 3
VISITS = ([3, 0, 4], [4, 1, 3], [1, 3, 0])  # domain 2 never comes, and none of them in order
SIZES = (6, 5, 7)
CLOSE = {"rtol": 1e-10, "atol": 1e-11}

Maker = Callable[[Any], torch.optim.Optimizer]
Blocks = list[tuple[Tensor, Tensor, int]]
OPTIMIZERS: dict[str, Maker] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}
SGD, ADAM = OPTIMIZERS["sgd"], OPTIMIZERS["adam"]
both = pytest.mark.parametrize("maker", [SGD, ADAM], ids=["sgd", "adam"])


def network(classes: int | None = CLASSES, norm: bool = False) -> FeatureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        between = [nn.BatchNorm1d(6), nn.Dropout(0.3)] if norm else []
        features = nn.Sequential(nn.Linear(4, 6), *between, nn.Tanh(), nn.Linear(6, WIDTH), nn.Tanh())
        return FeatureModel(features, linear_head(WIDTH, classes)).double()


def blocks(step: int = 0, *, regression: bool = False, size: int | None = None) -> Blocks:
    """The data of a step as a reference takes it: x, y and the domain's number."""
    draw = torch.Generator().manual_seed(100 + step)
    found = []
    for d, n in zip(VISITS[step % len(VISITS)], SIZES, strict=True):
        x = (1 + 0.3 * d) * torch.randn(n, 4, generator=draw, dtype=torch.float64) + 0.4 * d
        y = torch.randint(CLASSES, (n,), generator=draw)
        found.append((x, x[:, 0] * (d - 2) + y if regression else y, d))
    return [(x[:size], y[:size], d) for x, y, d in found]


def meta(given: Blocks) -> MetaBatch:
    """The same as an algorithm takes it."""
    xs, ys, ds = zip(*given, strict=True)
    sizes = tuple(map(len, ys))
    domain = torch.repeat_interleave(torch.tensor(ds), torch.tensor(sizes))
    return MetaBatch(torch.cat(xs), torch.cat(ys), domain, sizes)


def on(
    name: str, model: nn.Module, maker: Maker, loss: Any = cross_entropy, **settings: Any
) -> tuple[Any, Engine]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        classes = CLASSES if loss is cross_entropy else None
        algorithm = build(name, model, loss, Task(DOMAINS, classes, features=WIDTH), **settings)
    auxiliary = algorithm.auxiliary_optimizers()
    optimizer = maker(trained_parameters(algorithm, auxiliary))
    algorithm.prepare(optimizer, optimizer.param_groups[0]["lr"])
    return algorithm, Engine(algorithm, optimizer, auxiliary=auxiliary)


def trained(
    name: str, maker: Maker, steps: int = 3, norm: bool = False, **settings: Any
) -> dict[str, Tensor]:
    model = network(norm=norm)
    _, engine = on(name, model, maker, **settings)
    for step in range(steps):
        torch.manual_seed(step)
        engine.step(meta(blocks(step)), step)
    return model.state_dict()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, **CLOSE)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


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
    chosen = {k: v for k, v in settings.items() if k in own}
    inner = algorithm.discriminator
    return naive.DANN(model, loss, repeat(settings["weight"]), inner.layers, inner.classes, **chosen)


class IDGM(naive.Reference):
    """1/S Σ L_i − γ GIP, by autograd through the double loop."""

    def __init__(self, model: nn.Module, loss: Any, gamma: float, normalize: bool) -> None:
        super().__init__(model, loss)
        self.gamma, self.normalize = gamma, normalize

    def objective(self, batches: Any) -> Tensor:
        losses = self.each(batches)
        flat = [torch.cat([g.flatten() for g in self.slopes(loss)]) for loss in losses]
        if self.normalize:
            flat = [g / g.norm() for g in flat]
        pairs = list(permutations(range(len(flat)), 2))
        gip = sum((flat[i] @ flat[j] for i, j in pairs), torch.zeros(())) / len(pairs)
        return naive.mean(losses) - self.gamma * gip

    def slopes(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, self.params, create_graph=True)


GAME = {"weight": 0.7, "width": 6}
LONG_GAME = GAME | {
    **{"discriminator_steps": 2, "gradient_penalty": 0.8, "discriminator_lr": 0.02},
    **{"beta1": 0.0, "depth": 2},
}
MLDG = ("beta", "inner_lr", "held_out", "order")
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "irm": ({"weight": 5.0, "start": 0}, penalised(naive.IRM)),
    "vrex": ({"weight": 5.0, "start": 0}, penalised(naive.VREx)),
    "coral": ({"weight": 5.0}, penalised(naive.CORAL)),
    "coral per domain": ({"weight": 5.0, "batch_norm": "per-domain"}, penalised(naive.CORAL)),
    "mmd": ({"weight": 5.0}, penalised(naive.MMD)),
    "iga": ({"weight": 5.0}, penalised(naive.IGA)),
    "idgm": ({"gamma": 0.4, "trust": None}, plain(IDGM, "gamma", normalize=True)),
    "idgm raw": ({"gamma": 0.4, "normalize": False, "trust": None}, plain(IDGM, "gamma", "normalize")),
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
    "erm": ({}, plain(naive.Pooled)),
    "erm-by-domain": ({}, plain(naive.MeanOfMeans)),
}
LIKE_ERM = ("erm", "erm-by-domain")
SINGLE = ("irm", "vrex", "mmd", "iga", "fishr", "groupdro", "dann", "cdann", "mixup", "eqrm")


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
        self.engine.broadcast = self.broadcast  # type: ignore[method-assign]

    def broadcast(self, tensor: Tensor) -> Tensor:
        self.drawn.append(tensor)
        return tensor

    def take(self, given: Blocks, step: int) -> None:
        log = self.engine.step(meta(given), step)
        assert torch.isfinite(log["losses"]).all()
        if isinstance(self.reference, naive.Mixup):
            self.reference.shares = self.drawn[-1].tolist()
        for p, g in zip(self.reference.params, self.reference.gradient(given), strict=True):
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
            for d, kept in enumerate(algorithm.variances.smoothed):
                close(kept, reference.kept.get(d, torch.zeros_like(kept)))


def erm(steps: int, maker: Maker, loss: Any = cross_entropy) -> dict[str, Tensor]:
    """Trained on the mean of the domains' means."""
    model = network(CLASSES if loss is cross_entropy else None)
    reference, optimizer = naive.MeanOfMeans(model, loss), maker(model.parameters())
    for step in range(steps):
        found = reference.gradient(blocks(step, regression=loss is mse_loss))
        for p, g in zip(reference.params, found, strict=True):
            p.grad = g
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("case", CASES)
class TestFormulas:
    @both
    def test_steps(self, case: str, maker: Maker) -> None:
        pair = Pair(case, maker)
        for step in range(3):
            pair.take(blocks(step), step)
            pair.check()
        if case not in LIKE_ERM:  # else the comparison is of nothing
            other, own = erm(3, maker), pair.algorithm.model.state_dict()
            assert max(float((v - other[k]).abs().max()) for k, v in own.items()) > 1e-4

    def test_steps_of_a_regression(self, case: str) -> None:
        if case.startswith("cdann"):
            with pytest.raises(InputError, match="supports classification and ordinal"):
                Pair(case, SGD, mse_loss)
            return
        pair = Pair(case, SGD, mse_loss)
        for step in range(2):
            pair.take(blocks(step, regression=True), step)
        pair.check()


@pytest.mark.parametrize("case", SINGLE)
def test_steps_of_single_examples(case: str) -> None:
    pair = Pair(case, SGD)
    for step in range(2):
        pair.take(blocks(step, size=1), step)
        pair.check()


class TestFish:
    @pytest.mark.parametrize("maker", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
    @pytest.mark.parametrize("inner_state", ["carry", "reset", 2])
    def test_against_a_copied_model(self, maker: Maker, inner_state: Any) -> None:
        reference = naive.CopyingFish(network(), maker, 0.3, "carry" if inner_state == 2 else inner_state)
        for step in range(5):
            if inner_state == 2 and step % 2 == 0:
                reference.saved = None
            reference.walk(blocks(step), lambda model, b: cross_entropy(model(b[0]), b[1]))
        close(trained("fish", maker, 5, meta_lr=0.3, inner_state=inner_state), reference.model.state_dict())

    def test_buffers_are_kept_or_interpolated(self) -> None:
        with pytest.raises(InputError, match=r"inner_state=2 requires Adam, AdamW or SGD without dampening"):
            trained("fish", torch.optim.NAdam, 1, inner_state=2)
        start, end = network(norm=True).state_dict(), trained("fish", SGD, 1, norm=True, meta_lr=1.0)
        kept, blended = (
            trained("fish", SGD, 1, norm=True, meta_lr=0.2, interpolate_buffers=b) for b in (False, True)
        )
        for name in ("features.1.running_mean", "features.1.running_var"):
            torch.testing.assert_close(kept[name], end[name], rtol=0, atol=0)
            close(blended[name], start[name] + 0.2 * (end[name] - start[name]))
        count = "features.1.num_batches_tracked"
        assert kept[count] == blended[count] == S
        close(kept["features.0.weight"], blended["features.0.weight"])

    @pytest.mark.parametrize("maker", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
    @pytest.mark.parametrize("inner_state", ["carry", "reset", 2])
    def test_smoothfish_with_gamma_1_is_fish(self, maker: Maker, inner_state: Any) -> None:
        common: dict[str, Any] = {"meta_lr": 0.3, "inner_state": inner_state}
        fish = trained("fish", maker, norm=True, **common)
        assert equal(trained("smoothfish", maker, norm=True, gamma=1.0, **common), fish)
        assert not equal(trained("smoothfish", maker, norm=True, gamma=0.5, **common), fish)

    @pytest.mark.parametrize("gamma", [0.0, 0.3, 0.8])
    def test_smoothfish_against_the_formula(self, gamma: float) -> None:
        """G = αSḡ + γ((θ − θ̃) − αSḡ), θ ← θ − εG; γ = 0 is ERM at rate εαS."""
        model = network()
        reference = naive.MeanOfMeans(model, cross_entropy)
        theta, mean = [p.detach().clone() for p in model.parameters()], reference.gradient(blocks())
        for block in blocks():
            for p, g in zip(model.parameters(), reference.gradient([block]), strict=True):
                p.data = p.data - 0.1 * g
        for p, t, g in zip(model.parameters(), theta, mean, strict=True):
            p.data = t - 0.3 * (0.1 * S * g + gamma * ((t - p.data) - 0.1 * S * g))
        close(trained("smoothfish", SGD, 1, gamma=gamma, meta_lr=0.3), model.state_dict())

    @pytest.mark.parametrize("domains", [2, 3, 4])
    def test_the_theorem(self, domains: int) -> None:
        found = check_theorem(domains)
        assert found.slope == pytest.approx(2, abs=0.2)
        assert found.one_minus_cos[-1] < 1e-6


class TestIDGM:
    @pytest.mark.parametrize("normalize", [False, True])
    def test_trust_bounds_the_matching_term(self, normalize: bool) -> None:
        mean = naive.MeanOfMeans(network(), cross_entropy).gradient(blocks())
        length = float(inner_product(mean, mean).sqrt())
        for trust in (0.1, 0.9):
            total = self.gradient(gamma=1e6, normalize=normalize, trust=trust)
            added = [m - t for m, t in zip(mean, total, strict=True)]
            assert float(inner_product(added, added).sqrt()) == pytest.approx(trust * length, rel=1e-9)
            assert float(inner_product(total, mean)) > 0  # descends on the mean loss
        free, bound = (self.gradient(gamma=1e-3, normalize=normalize, trust=t) for t in (None, 0.9))
        torch.testing.assert_close(free, bound, rtol=0, atol=0)

    def gradient(self, **settings: Any) -> list[Tensor]:
        algorithm, engine = on("idgm", network(), SGD, **settings)
        found: list[Tensor] = algorithm.gradient(meta(blocks()), engine, 0)[0]
        return found


NO_PENALTY = [
    *((name, {"weight": 0.0, "start": 0}) for name in ("irm", "vrex", "fishr", "coral", "mmd")),
    *((name, {"weight": 0.0, "start": 2}) for name in ("irm", "vrex")),
    *((name, {"weight": 9.0, "start": 3}) for name in ("fishr", "coral", "mmd", "iga", "dann")),
    ("iga", {"weight": 0.0}),
    ("dann", {"weight": 0.0}),
    ("cdann", {"weight": 0.0}),
    ("eqrm", {"start": 3, "quantile_lr": 1e-6}),
    ("groupdro", {"step_size": 0.0}),
    ("and-mask", {"tau": 0.0}),
    ("and-mask", {"tau": 1 / 3}),  # of three signs two agree
    ("sand-mask", {"tau": 0.0, "k": 1e12}),
]


class TestNothingAdded:
    """Without its penalty an algorithm is ERM on the mean of the domains' means."""

    @both
    @pytest.mark.parametrize(("name", "settings"), NO_PENALTY)
    def test_it_is_erm(self, name: str, settings: dict[str, Any], maker: Maker) -> None:
        torch.testing.assert_close(trained(name, maker, **settings), erm(3, maker), rtol=1e-9, atol=1e-11)

    @pytest.mark.parametrize(("held_out", "beta"), [(2, 2.0), (1, 0.5)])
    def test_mldg_without_a_virtual_step(self, held_out: int, beta: float) -> None:
        """L₁ + 2 (L₂ + L₃)/2, or (L₁ + L₂)/2 + L₃/2."""
        settings: dict[str, Any] = {"beta": beta, "inner_lr": 0.0, "held_out": held_out}
        own = trained("mldg", lambda p: torch.optim.SGD(p, 0.1 / (1 + beta)), **settings)
        close(own, erm(3, SGD))

    @both
    def test_sam_without_radius_and_eqrm_with_its_own_rate(self, maker: Maker) -> None:
        close(trained("sam", maker, rho=0.0), trained("erm", maker))
        rate = 0.1 if maker is SGD else 0.01
        same = trained("eqrm", maker, start=1, quantile_lr=rate)
        assert equal(same, trained("eqrm", maker, start=1))
        slow, frozen = (trained("eqrm", maker, start=1, quantile_lr=lr) for lr in (rate / 2, 1e-12))
        torch.testing.assert_close(frozen, trained("eqrm", maker, 1), rtol=0, atol=1e-9)
        assert not equal(slow, same)


class TestSchedules:
    @pytest.mark.parametrize(
        ("case", "weights"),
        [("irm", [1, 1, 3]), ("vrex", [1, 1, 3])]
        + [(case, [0, 0, 0.5]) for case in ("coral", "iga", "fishr", "dann")],
    )
    def test_the_weight_rises_after_the_start(self, case: str, weights: list[float]) -> None:
        pair, final = Pair(case, SGD), CASES[case][0]["weight"]
        pair.algorithm.schedule.start, pair.algorithm.schedule.ramp = 1, 2
        rise = weights if case in ("irm", "vrex") else [w * final for w in weights]
        pair.reference.weights = chain(rise, repeat(final))
        for step in range(4):
            pair.take(blocks(step), step)
        pair.check()


def test_both_passes_of_sagm_draw_their_own_dropout_masks() -> None:
    model, masks = network(norm=True), []
    model.features[2].register_forward_hook(lambda m, x, out: masks.append(out == 0))  # type: ignore[index]
    _, engine = on("sagm", model, SGD, rho=0.0, alpha=0.0)
    engine.step(meta(blocks()), 0)
    assert not torch.equal(*masks)


def test_the_rate_of_eqrm_after_its_start_is_a_share_of_every_parameters_own() -> None:
    moved = []
    for rate in (None, 0.02):
        model = network()
        params = list(model.parameters())
        groups = [{"params": params[:2], "lr": 0.001}, {"params": params[2:]}]
        algorithm = build("eqrm", model, cross_entropy, Task(DOMAINS, CLASSES), start=0, quantile_lr=rate)
        algorithm.prepare(optimizer := torch.optim.Adam(groups, 0.1), 0.1)
        Engine(algorithm, optimizer).step(meta(blocks()), 0)
        moved.append([a.detach() - b for a, b in zip(params, network().parameters(), strict=True)])
    close(moved[1], [0.2 * each for each in moved[0]])


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
