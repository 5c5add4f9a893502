"""What penalties do to a training, where they could break, and what is refused before it begins."""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal
from references import naive
from shoal.algorithms import build
from shoal.algorithms.base import Algorithm, DomainOutput, trained_parameters
from shoal.algorithms.penalty import PenaltyWeight
from shoal.data import DomainBatch, Task
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.training.engine import Engine

NEW = (
    "irm",
    "vrex",
    "groupdro",
    "mixup",
    "mldg",
    "coral",
    "mmd",
    "dann",
    "cdann",
    "reweighted",
    "iga",
    "fishr",
    "and-mask",
    "sand-mask",
    "pcgrad",
    "sam",
    "erm-by-domain",
)
AT_ONCE: dict[str, dict[str, Any]] = {name: {"start": 0} for name in ("irm", "vrex", "fishr")}
"""Settings with which the penalty counts from the first step."""
WIDTH = 8


def network(width: int = WIDTH, activation: nn.Module | None = None, seed: int = 0) -> FeatureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        features = nn.Sequential(nn.Linear(4, width), activation or nn.Tanh())
        return FeatureModel(features, nn.Linear(width, 2))


def domains(step: int = 0, size: int = 32, count: int = 2, dtype: Any = torch.float32) -> list[DomainBatch]:
    """A feature that tells the class everywhere; one that does so with another strength, sign and scale in
    each domain; one that tells the domain; and noise, of more in each."""
    draw = torch.Generator().manual_seed(1000 + step)
    found = []
    for d in range(count):
        y = torch.randint(2, (size,), generator=draw)
        label, noise = 2.0 * y - 1, torch.randn(size, 4, generator=draw)
        own = label * (2.0 if d == 0 else -0.5)
        x = torch.stack([label, own, torch.full_like(label, 1.5 * d), torch.zeros(size)], 1)
        x = x + noise * torch.tensor([1.0, 0.5, 0.3, 1.0 + d])
        found.append(DomainBatch(x.to(dtype), y, d))
    return found


def on(
    name: str, model: nn.Module, lr: float = 0.1, *, count: int = 2, loss: Any = cross_entropy, **given: Any
) -> tuple[Any, Engine]:
    """With an optimizer, and all that it draws when it is made drawn from the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        algorithm: Algorithm = build(name, model, loss, Task(count, 2, features=WIDTH), **given)
    auxiliary = algorithm.auxiliary_optimizers()
    optimizer = torch.optim.SGD(trained_parameters(algorithm, auxiliary), lr)
    return algorithm, Engine(algorithm.wrap(optimizer, count), auxiliary=auxiliary)


# Where they could break


def one_class(step: list[DomainBatch]) -> list[DomainBatch]:
    return [step[0]._replace(y=torch.zeros_like(step[0].y)), *step[1:]]


SITUATIONS: dict[str, Callable[[list[DomainBatch]], list[DomainBatch]]] = {
    "identical domains": lambda step: [step[0]._replace(domain=b.domain) for b in step],
    "constant inputs": lambda step: [b._replace(x=torch.ones_like(b.x)) for b in step],
    "zeros": lambda step: [b._replace(x=torch.zeros_like(b.x)) for b in step],
    "one example": lambda step: [b._replace(x=b.x[:1], y=b.y[:1]) for b in step],
    "one class in a domain": one_class,
    "one class": lambda step: [b._replace(y=torch.zeros_like(b.y)) for b in step],
    "huge inputs": lambda step: [b._replace(x=b.x * 1e4) for b in step],
}


@pytest.mark.parametrize("name", NEW)
class TestNumbers:
    @pytest.mark.parametrize("situation", SITUATIONS)
    @pytest.mark.parametrize("activation", [nn.Tanh(), nn.Identity()], ids=["tanh", "linear"])
    def test_gradients_are_finite(self, name: str, situation: str, activation: nn.Module) -> None:
        model = network(activation=activation)
        algorithm, engine = on(name, model, count=3, **AT_ONCE.get(name, {}))
        for step in range(2):
            found, log = algorithm.gradient(SITUATIONS[situation](domains(step, 6, 3)), engine)
            assert all(g.isfinite().all() for g in found)
            assert all(value.isfinite().all() for value in log.values())
        assert all(b.isfinite().all() for b in algorithm.buffers())
        assert all(p.isfinite().all() for p in algorithm.parameters())

    def test_without_any_gradient_it_stands_still(self, name: str) -> None:
        flat = lambda output, y: (output * 0).sum()  # noqa: E731
        weightless = {"weight": 0.0} if name in ("coral", "mmd", "dann", "cdann") else {}
        algorithm, engine = on(name, network(), count=3, loss=flat, **AT_ONCE.get(name, {}), **weightless)
        found, _ = algorithm.gradient(domains(0, 6, 3), engine)
        assert all(not g.any() for g in found)


class TestSameFeaturesEverywhere:
    @pytest.mark.parametrize("name", ["and-mask", "sand-mask", "pcgrad", "groupdro"])
    def test_a_step_of_one_batch_is_ordinary(self, name: str) -> None:
        algorithm, engine = on(name, network(), count=1)
        found, _ = algorithm.gradient(domains()[:1], engine)
        expected = naive.MeanOfMeans(algorithm.model, cross_entropy).gradient(domains()[:1])
        torch.testing.assert_close(found, expected)

    def test_a_step_of_one_batch_has_no_pairs(self) -> None:
        for name in ("coral", "mmd", "vrex", "fishr"):
            algorithm, engine = on(name, network(), **AT_ONCE.get(name, {}))
            found, log = algorithm.gradient(domains()[:1], engine)
            assert float(log["penalty"]) == 0
            assert all(g.isfinite().all() for g in found)


def views_of(features: list[Tensor]) -> list[DomainOutput]:
    return [DomainOutput(None, torch.zeros(len(z)), d, z) for d, z in enumerate(features)]


class TestPrecision:
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("offset", [0.0, 100.0])
    @pytest.mark.parametrize("name", ["mmd", "coral"])
    def test_float32_is_near_float64(self, name: str, offset: float, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        features = [torch.randn(16, 16, generator=draw) + offset + 0.3 * d for d in range(3)]
        algorithm, _ = on(name, network(), count=3)
        reference = {"mmd": naive.MMD.discrepancy, "coral": coral_of}[name]
        expected = float(reference([z.double() for z in features]))
        assert expected > 0.1
        assert float(algorithm.penalty(views_of(features), None)) == pytest.approx(expected, abs=1e-4)

    def test_mmd_of_features_that_have_come_near(self) -> None:
        """A difference of squares loses what the narrow kernels look at."""
        draw = torch.Generator().manual_seed(0)
        middle = 10 * torch.randn(16, 16, generator=draw) + 100
        features = [middle + 1e-3 * d * torch.randn(16, 16, generator=draw) for d in range(3)]
        algorithm, _ = on("mmd", network(), count=3)
        expected = float(naive.MMD.discrepancy([z.double() for z in features]))
        assert float(algorithm.penalty(views_of(features), None)) == pytest.approx(expected, rel=0.01)

    @pytest.mark.parametrize("name", ["mmd", "coral", "irm", "vrex", "fishr"])
    def test_in_bf16_the_penalty_is_computed_in_float32(self, name: str) -> None:
        model = network()
        algorithm, _ = on(name, model, count=3, **AT_ONCE.get(name, {}))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        engine = Engine(optimizer, precision="bf16")
        algorithm.autocast = engine.autocast
        seen: list[tuple[list[DomainOutput], Tensor, bool]] = []
        penalty = algorithm.penalty

        def watched(outputs: list[DomainOutput], losses: Tensor) -> Tensor:
            found: Tensor = penalty(outputs, losses)
            seen.append((outputs, found.detach(), torch.is_autocast_enabled("cpu")))
            return found

        algorithm.penalty = watched
        algorithm.step(domains(0, 12, 3), engine)
        ((outputs, found, half),) = seen
        assert not half
        assert found.dtype == torch.float32
        for each in outputs:
            assert each.output.dtype == torch.float32
            torch.testing.assert_close(each.output, each.output.bfloat16().float(), rtol=0, atol=0)
        if name in ("mmd", "coral"):
            features = [v.features.detach() for v in outputs]
            assert {z.dtype for z in features} == {torch.float32}
            assert all(torch.equal(z, z.bfloat16().float()) for z in features)  # the model ran in bf16
            reference = {"mmd": naive.MMD.discrepancy, "coral": coral_of}[name]
            assert float(found) == pytest.approx(float(reference([z.double() for z in features])), abs=1e-4)


def coral_of(features: list[Tensor]) -> Tensor:
    reference = naive.CORAL(FeatureModel(nn.Identity(), nn.Identity()), cross_entropy)
    return reference.penalty([(z, z[:, 0], d) for d, z in enumerate(features)])


class Noise(nn.Module):
    """Multiplies every example with a number it draws, and remembers which example got which."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[dict[float, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(len(x), 1, dtype=x.dtype) + 0.5
        self.drawn.append(dict(zip(x[:, 0].tolist(), noise[:, 0].tolist(), strict=True)))
        return x * noise


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("name", "given"),
    [("sam", {}), ("iga", {}), ("iga", {"method": "finite-difference"}), ("mldg", {"order": "exact"})],
)
def test_a_repeated_pass_draws_the_same_numbers(name: str, given: dict[str, Any], accumulate: int) -> None:
    noise = Noise()
    inner = network().double()
    model = FeatureModel(nn.Sequential(noise, inner.features), inner.head)
    algorithm = build(name, model, cross_entropy, Task(3, 2, features=WIDTH), **given)
    engine = Engine(torch.optim.SGD(model.parameters(), 0.1), accumulate=accumulate)
    algorithm.step(domains(0, 6, 3, torch.float64), engine)
    met: dict[float, set[float]] = {}
    passes = 0
    for drawn in noise.drawn:
        for example, number in drawn.items():
            passes += 1
            met.setdefault(example, set()).add(number)
    once = name == "iga" and not given  # its graphs are kept
    assert passes == (6 + 12 + 6 if name == "mldg" else 18 if once else 36)
    assert all(len(numbers) == 1 for numbers in met.values())


# The weight


class TestPenaltyWeight:
    @pytest.mark.parametrize(
        ("weight", "start", "ramp", "before", "expected"),
        [
            (10.0, 2, 0, 1.0, [1, 1, 10, 10, 10, 10]),
            (10.0, 0, 0, 1.0, [10, 10, 10, 10, 10, 10]),
            (9.0, 1, 4, 1.0, [1, 1, 3, 5, 7, 9]),
            (0.5, 3, 0, 1.0, [0.5] * 6),
            (0.5, 1, 3, 1.0, [0.5] * 6),
            (0.0, 3, 2, 1.0, [0] * 6),
        ],
    )
    def test_rises_from_before(
        self, weight: float, start: int, ramp: int, before: float, expected: list[float]
    ) -> None:
        schedule = PenaltyWeight(weight, start, ramp, before)
        assert [float(schedule.next()) for _ in range(6)] == expected

    def test_shares_of_a_training(self) -> None:
        schedule = PenaltyWeight(10.0, start=0.25, ramp=0.5, before=2.0, steps=8)
        assert [float(schedule.next()) for _ in range(8)] == [2, 2, 2, 4, 6, 8, 10, 10]
        assert PenaltyWeight(1.0, start=0.1).start == 500  # where nobody says how long
        assert PenaltyWeight(1.0, start=1, steps=8).start == 1
        assert PenaltyWeight(1.0, start=1.0, steps=8).start == 8

    @settings(max_examples=60, deadline=None)
    @given(st.floats(0, 1e5), st.integers(0, 6), st.integers(0, 6), st.floats(0, 10))
    def test_never_falls_and_stays_below_the_weight(
        self, weight: float, start: int, ramp: int, before: float
    ) -> None:
        schedule = PenaltyWeight(weight, start, ramp, before)
        values = [float(schedule.next()) for _ in range(start + ramp + 3)]
        assert values == sorted(values)
        assert values[-1] == pytest.approx(weight)
        assert values[-1] <= weight * (1 + 1e-12)
        assert all(v == min(before, weight) for v in values[:start])


# What is refused


def token_model() -> FeatureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FeatureModel(nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Tanh()), nn.Linear(40, 2))


def token_domains() -> dict[str, tuple[Tensor, Tensor]]:
    """Of five tokens the first tells the class: below or above ten."""
    draw = torch.Generator().manual_seed(0)
    found = {}
    for d in range(3):
        x = torch.randint(20, (60, 5), generator=draw)
        found[f"domain {d}"] = x, (x[:, 0] >= 10).long()
    return found


class Dict(nn.Module):
    """A linear layer whose output comes in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(x)}


class DictLinear(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": super().forward(x)}


def dict_loss(output: dict[str, Tensor], y: Tensor) -> Tensor:
    return cross_entropy(output["logits"], y)


class TestMessages:
    def test_mixup_of_whole_numbers_is_refused_before_it_trains(self) -> None:
        model = token_model()
        start = copy.deepcopy(model.state_dict())
        with pytest.raises(InputError, match=r"whole numbers.*where='features'.*'fish'"):
            shoal.fit("mixup", model, token_domains(), steps=5, progress=False)
        torch.testing.assert_close(model.state_dict(), start, rtol=0, atol=0)

    def test_mixup_of_features_learns_from_whole_numbers(self) -> None:
        run = shoal.fit(
            "mixup",
            token_model(),
            token_domains(),
            steps=150,
            lr=0.02,
            settings={"where": "features"},
            progress=False,
        )
        assert run.accuracy("train") > 0.95

    @pytest.mark.parametrize("name", ["fishr", "dann", "cdann"])
    def test_state_that_does_not_fit(self, name: str) -> None:
        model = FeatureModel(nn.Linear(4, 64), nn.Linear(64, 10))
        start = time.perf_counter()
        with pytest.raises(InputError, match=r"for each of 10,000,000 domains: [\d,]+ numbers each, .* GiB"):
            build(name, model, cross_entropy, Task(10_000_000, 10, features=64))
        assert time.perf_counter() - start < 1

    def test_a_dict_of_outputs(self) -> None:
        algorithm = build("irm", Dict(), dict_loss, Task(2, 2))
        engine = Engine(torch.optim.SGD(algorithm.parameters(), 0.1))
        with pytest.raises(InputError, match="IRM needs a model whose output is one tensor, got dict"):
            algorithm.step(domains(), engine)
        model = FeatureModel(nn.Linear(4, 8), DictLinear(8, 2))
        fishr = build("fishr", model, dict_loss, Task(2, 2, features=8))
        with pytest.raises(InputError, match="Fishr needs a model whose output is one tensor, got dict"):
            fishr.step(domains(), engine)

    @pytest.mark.parametrize(
        ("head", "message"),
        [
            (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), "Sequential with 2 of them"),
            (nn.Sequential(nn.Tanh(), nn.Linear(8, 2)), "Sequential with 1 of them"),
            (nn.Sequential(nn.Flatten()), "Sequential with 0 of them"),
            (nn.Sequential(nn.Linear(8, 2), nn.Dropout(0.1)), "Sequential with 1 of them"),
            (Dict(), "Dict with 0 of them"),
        ],
    )
    def test_fishr_needs_a_linear_head(self, head: nn.Module, message: str) -> None:
        model = FeatureModel(nn.Linear(4, 8), head)
        with pytest.raises(InputError, match=f"one linear layer; this one is {message}.*into the features"):
            build("fishr", model, cross_entropy, Task(2, 2, features=8))

    def test_fishr_takes_what_only_reshapes(self) -> None:
        plain = FeatureModel(nn.Linear(4, 8), nn.Linear(8, 2))
        shaped = FeatureModel(
            nn.Sequential(copy.deepcopy(plain.features), nn.Unflatten(1, (2, 2, 2))),
            nn.Sequential(nn.Flatten(), nn.Dropout(0.0), copy.deepcopy(plain.head)),
        )
        found = []
        for model in (plain, shaped):
            algorithm, engine = on("fishr", model, **AT_ONCE["fishr"])
            found.append(algorithm.gradient(domains(), engine)[0])
        torch.testing.assert_close(found[0], found[1])

    @pytest.mark.parametrize("held_out", [3, 7])
    def test_mldg_that_would_hold_out_every_domain(self, held_out: int) -> None:
        algorithm, _ = on("mldg", network(), count=3, held_out=held_out)
        with pytest.raises(
            InputError, match=f"held_out of MLDG must be below 3, the domains per step; got {held_out}"
        ):
            algorithm.check_step(3)

    def test_mldg_holds_one_of_two_domains_out(self) -> None:
        model, twin = network(), network()
        algorithm, engine = on("mldg", model)
        with pytest.warns(UserWarning, match=r"MLDG holds out 1 of 2 domains per step; held_out=2 would"):
            algorithm.check_step(2)
        other, its_engine = on("mldg", twin, held_out=1)
        other.check_step(2)
        for each, own in ((algorithm, engine), (other, its_engine)):
            each.step(domains(0, 6, 2), own)
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
        with pytest.raises(InputError, match="held_out of MLDG must be below 1, the domains per step; got 1"):
            other.check_step(1)

    @pytest.mark.parametrize("name", [n for n in NEW if n not in ("reweighted", "sam", "erm-by-domain")])
    def test_one_domain_is_nothing_to_compare(self, name: str) -> None:
        b = domains()[0]
        with pytest.raises(InputError, match=r"compares domains and there is only one.*'alone'"):
            shoal.fit(name, network(), {"alone": (b.x, b.y)}, steps=1, progress=False)
