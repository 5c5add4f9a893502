"""What the engine adds to every algorithm, against loops written by hand."""

import copy
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset

import shoal
from references import swad as naive_swad
from references.naive import CopyingFish
from shoal.algorithms import algorithm_class, build, registry
from shoal.algorithms.base import trained_parameters
from shoal.algorithms.erm import ERM
from shoal.algorithms.sam import SAM
from shoal.api.fit import as_domain_data
from shoal.data import DomainBatch, DomainBatchSampler, Task, TensorData, concatenate
from shoal.data.batch import pieces
from shoal.data.loader import seed_all, seeded
from shoal.data.sampler import key
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.training.capture import why_not
from shoal.training.checkpoint import Checkpoints
from shoal.training.engine import Engine, LossScale
from shoal.training.loop import Training
from shoal.training.options import Options
from shoal.training.stepping import WORLD
from shoal.training.stopping import Diverged

S, B = 3, 8
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Settings with which a penalty counts from the first step on, and not for much more than the loss.
ACTIVE: dict[str, dict[str, Any]] = {
    "eqrm": {"start": 0, "quantile": 0.9},
    "fishr": {"start": 0, "weight": 1.0},
    "gga": {"start": 0, "length": 2.0, "trials": 4, "radius": 0.1},
    "iga": {"weight": 0.1},
    "irm": {"start": 0, "weight": 3.0},
    "vrex": {"start": 0, "weight": 3.0},
}
# Every rule of an update, those with several forms in all of them.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, ACTIVE.get(name, {})) for name in registry.names()},
    "idgm by differences": ("idgm", {"method": "finite-difference"}),
    "idgm of products": ("idgm", {"normalize": False, "trust": None, "gamma": 0.1}),
    "iga by differences": ("iga", {"method": "finite-difference", "weight": 0.1}),
    "eqrm, later": ("eqrm", {"start": 3, "quantile_lr": 0.02}),
    "irm, later": ("irm", {"start": 3, "ramp": 2, "weight": 3.0}),
    "mldg, exact": ("mldg", {"order": "exact"}),
    "mixup of features": ("mixup", {"where": "features"}),
    "dann, rough": ("dann", {"discriminator_steps": 2, "gradient_penalty": 0.5, "ramp": 4}),
    "cdann, in turns": ("cdann", {"form": "domainbed", "gradient_penalty": 0.5}),
}
# One of each kind, for what need not be tried with all.
KINDS = ["erm", "fish", "idgm", "smoothfish", "reptile", "coral", "dann", "groupdro", "fishr", "mixup", "irm"]
EVERY_WAY = pytest.mark.parametrize(("name", "settings"), WAYS.values(), ids=WAYS.keys())


def data(examples: int = 40) -> dict[str, tuple[Tensor, Tensor]]:
    """Three domains; the first feature tells the class and the second, exactly, the domain."""
    draw = torch.Generator().manual_seed(3)
    y = torch.arange(examples) % 2
    noise = [torch.randn(examples, generator=draw) for _ in range(S)]
    return {
        f"d{d}": (torch.stack([4.0 * y - 2 + noise[d], torch.full((examples,), 1.0 * d)], 1), y)
        for d in range(S)
    }


def doubled(parts: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (x.double(), y) for name, (x, y) in parts.items()}


def network(*between: nn.Module, seed: int = 0) -> FeatureModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FeatureModel(nn.Sequential(nn.Linear(2, 8), *between, nn.Tanh()), nn.Linear(8, 2))


def training(name: Any, model: nn.Module, train: Any = None, **options: Any) -> Training:
    given = {"steps": 6, "batch_size": B, "optimizer": sgd, "device": "cpu", "progress": False} | options
    given.setdefault("settings", ACTIVE.get(name, {}))
    parts = as_domain_data(train or data(), given.pop("validation", None), None)
    return Training(name, model, parts, Options(**given))


def trained(name: Any, model: nn.Module, train: Any = None, **options: Any) -> Training:
    """To its end, with a look at every step's numbers after it unless ``log_every`` says otherwise."""
    made = training(name, model, train, **{"log_every": 1} | options)
    made.run()
    return made


def sgd(params: Any) -> torch.optim.Optimizer:
    return SGD(params, 0.1)


def batches(draw: str, step: int, size: int = B) -> list[DomainBatch]:
    examples, domains = concatenate(data())
    assert isinstance(examples, TensorData)
    plan = DomainBatchSampler(domains, size, S, draw=draw).plan(step)  # type: ignore[arg-type]
    return [DomainBatch(*examples.batch(torch.from_numpy(i)), d) for d, i in plan]


def mixed(step: int) -> DomainBatch:
    """What ERM takes at a step."""
    drawn = batches("pooled", step)
    return DomainBatch(torch.cat([b.x for b in drawn]), torch.cat([b.y for b in drawn]), None)


def loss_of(
    model: nn.Module, batch: DomainBatch, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Tensor:
    with autocast():
        output = model(batch.x)
    return cross_entropy(output.float(), batch.y)


def half(dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype)


def assert_same(a: nn.Module, b: nn.Module, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=tolerance, atol=tolerance)


def differ(a: nn.Module, b: nn.Module) -> bool:
    return any(not torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


class Altered:
    """Cross-entropy, changed by ``how`` in the calls ``at`` (counted from 0) of a training."""

    def __init__(self, how: Callable[[Tensor], Tensor], at: Any) -> None:
        self.how, self.at, self.calls = how, at, 0

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # evaluation
            return cross_entropy(output, y)
        self.calls += 1
        if self.calls - 1 not in self.at:
            return cross_entropy(output, y)
        if self.how is infinite_gradient:
            output = output * 1.0
            output.register_hook(lambda g: g * math.inf)
            return cross_entropy(output, y)
        return self.how(cross_entropy(output, y))


def nan(loss: Tensor) -> Tensor:
    return loss * math.nan


def infinite(loss: Tensor) -> Tensor:
    """With a gradient that is finite."""
    return loss + math.inf


def infinite_gradient(loss: Tensor) -> Tensor:
    """Of a loss that is finite."""
    raise AssertionError


def overflowing(loss: Tensor) -> Tensor:
    """Too much for fp16 at the first loss scale."""
    return loss * 1e3


# Precision


# All in bf16. In fp16 one of each kind, and those that it is refused to.
HALVES = [
    (name, precision)
    for name in registry.names()
    for precision in HALF
    if precision == "bf16" or name in KINDS or algorithm_class(name).second_order
]


@pytest.mark.parametrize(("name", "precision"), HALVES)
def test_half_precision_learns(name: str, precision: str) -> None:
    model = network(nn.BatchNorm1d(8))
    steps, rate = (60, 0.03) if name == "sand-mask" else (40, 0.05)
    options: dict[str, Any] = {"precision": precision, "steps": steps, "optimizer": partial(Adam, lr=rate)}
    if precision == "fp16" and algorithm_class(name).second_order:
        with pytest.raises(InputError, match=r"precision='fp16'.*second derivatives.*'bf16' or 'fp32'"):
            training(name, model, **options)
        return
    done = trained(name, model, **options)
    assert max(point.scores["train"].average for point in done.history[-3:]) > 0.9
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}
    state = [t for s in done.engine.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    assert {t.dtype for t in state} == {torch.float32}
    half, full = network(nn.BatchNorm1d(8)), network(nn.BatchNorm1d(8))
    trained(name, half, **options | {"steps": 3})
    trained(name, full, **options | {"steps": 3, "precision": "fp32"})
    assert differ(half, full)


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[bool, torch.dtype]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((self.training, x.dtype))
        return x


@pytest.mark.parametrize(("name", "precision"), HALVES)
def test_the_model_computes_in_half_and_the_loss_in_full(name: str, precision: str) -> None:
    if precision == "fp16" and algorithm_class(name).second_order:
        return
    watching, losses = Watching(), set()

    def loss(output: Tensor, y: Tensor) -> Tensor:
        losses.add(output.dtype)
        return cross_entropy(output, y)

    made = training(name, network(watching), loss=loss, precision=precision, average="sma", average_start=1)
    watching.seen.clear()  # the trial pass before
    made.run()
    assert watching.seen == {(True, HALF[precision]), (False, HALF[precision])}
    assert losses == {torch.float32}


@pytest.mark.parametrize("around", [nullcontext, half], ids=["alone", "within autocast"])
@pytest.mark.parametrize("precision", ["bf16", None])
def test_copies_in_half_precision_are_never_stale(precision: str | None, around: Any) -> None:
    """Torch keeps copies of weights to the end of the outermost autocast; a walk changes them in between."""
    autocast = nullcontext if precision is None and around is nullcontext else half
    model = network()
    reference = CopyingFish(network(), partial(SGD, lr=0.5), 0.5)
    with around():
        found = trained("fish", model, precision=precision, optimizer=partial(SGD, lr=0.5), eval_every=2)
        inside = model(mixed(0).x)
    for step in range(6):
        reference.walk(batches("domains", step), partial(loss_of, autocast=autocast))
    assert_same(model, reference.model)
    with around():
        assert torch.equal(inside, model(mixed(0).x))
    assert torch.is_autocast_cache_enabled()
    assert found.history[-1].scores["train"].average > 0.9


def test_the_launchers_precision_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    launched, told, full = network(), network(), network()
    trained("erm", launched)
    trained("erm", full, precision="fp32")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    trained("erm", told, precision="bf16")
    assert_same(launched, told)
    assert differ(launched, full)


# The loss scale of fp16


def test_a_step_that_overflows_is_left_out_as_torch_does() -> None:
    alter = {2, 3, 5}
    model, plain = network(), network()
    done = trained("erm", model, precision="fp16", loss=Altered(overflowing, alter), steps=8)
    optimizer, scaler = SGD(plain.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scales = []
    for step in range(8):
        optimizer.zero_grad()
        loss = loss_of(plain, mixed(step), partial(half, torch.float16))
        scaler.scale(overflowing(loss) if step in alter else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert_same(model, plain)
    assert done.engine.scale is not None
    assert float(done.engine.scale.value) == scales[-1] == 2.0**13
    assert done.skipped == []


@pytest.mark.parametrize("name", registry.names())
def test_an_overflow_costs_a_step_and_no_more(name: str) -> None:
    """Whatever an algorithm does with the gradient that overflowed."""
    if algorithm_class(name).second_order:
        return
    model = network()
    forgetful = {"settings": {**ACTIVE["fishr"], "ema": 0.0}} if name == "fishr" else {}
    each = calls(name)
    bad = Altered(overflowing, range(2 * each, 3 * each))
    weights: dict[int, list[Tensor]] = {}

    def follow(step: int, note: str) -> None:
        weights[step] = [p.detach().clone() for p in model.parameters()]

    done = trained(name, model, precision="fp16", loss=bad, eval_every=1, progress=follow, **forgetful)
    moved = [
        any(not torch.equal(a, b) for a, b in zip(weights[n], weights[n + 1], strict=True))
        for n in range(1, 6)
    ]
    assert moved == [True, False, True, True, True]
    assert done.skipped == []
    assert not done.engine.stopped
    assert done.engine.scale is not None
    assert float(done.engine.scale.value) < 2.0**16
    assert all(bool(p.isfinite().all()) for p in done.algorithm.parameters())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_penalty_that_is_not_finite_stops_the_training(precision: str) -> None:
    """Though all losses are finite."""

    class Broken(algorithm_class("vrex")):  # type: ignore[misc]
        def penalty(self, outputs: Any, losses: Tensor) -> Tensor:
            found: Tensor = super().penalty(outputs, losses)
            return found * math.nan if int(self.weight.count) == 2 else found

    with pytest.raises(Diverged, match="at step 3, which was not applied"):
        trained(Broken, network(), precision=precision)
    skipping = trained(Broken, network(), precision=precision, on_nan="skip", steps=3)
    assert skipping.skipped == [3]


@pytest.mark.parametrize("slot", range(S))
def test_a_walk_goes_on_after_an_overflow(slot: int) -> None:
    """Unlike one that is not finite, which takes the walk along."""
    model = network()
    done = trained("fish", model, precision="fp16", loss=Altered(overflowing, {S + slot}), steps=4)
    reference = CopyingFish(network(), sgd, 0.5)
    for step in range(4):
        walk: list[DomainBatch | None] = list(batches("domains", step))
        if step == 1:
            walk[slot] = None
        reference.walk(walk, partial(loss_of, autocast=partial(half, torch.float16)))
    assert_same(model, reference.model, 1e-6)
    assert done.engine.scale is not None
    assert float(done.engine.scale.value) == 2.0**15
    assert done.skipped == []


def test_the_scale_moves_as_torchs() -> None:
    mine, torchs = LossScale(torch.device("cpu")), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    weight = nn.Parameter(torch.zeros(()))
    optimizer = SGD([weight], 0.1)
    values = set()
    for step in range(4600):
        bad = step in (1500, 1501, 3503)
        weight.grad = torch.scalar_tensor(math.inf if bad else 1.0)
        torchs.scale(torch.zeros(()))
        torchs.step(optimizer)
        torchs.update()
        mine.update(torch.tensor(bad))
        assert float(mine.value) == torchs.get_scale()
        values.add((step, float(mine.value)))
    assert {v for s, v in values if s in (1499, 1501, 3500, 3501, 3503)} == {2.0**16, 2.0**14, 2.0**15}
    other = LossScale(torch.device("cpu"))
    other.load_state_dict(copy.deepcopy(mine.state_dict()))
    for scale in (mine, other):
        for _ in range(2000):
            scale.update(torch.tensor(False))
    assert float(other.value) == float(mine.value) == 2.0**15


def test_no_scale_helps_a_gradient_that_is_always_infinite() -> None:
    model = network()
    with pytest.raises(Diverged, match="not finite with any loss scale") as caught:
        trained("erm", model, precision="fp16", loss=Altered(infinite_gradient, range(100)), steps=100)
    assert caught.value.step == 36
    assert caught.value.quantity == "gradient"
    assert_same(model, network())


# Clipping


@pytest.mark.parametrize("name", ["erm", "fish"])
def test_clipping_as_torch_does(name: str) -> None:
    clip = 0.3
    before: list[float] = []

    def clipped(model: nn.Module, optimizer: Any = None) -> None:
        before.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))

    model, plain = network(), network()
    trained(name, model, clip=clip, optimizer=partial(Adam, lr=0.05))
    if name == "fish":
        reference = CopyingFish(plain, partial(Adam, lr=0.05), 0.5)
        for step in range(6):
            reference.walk(batches("domains", step), loss_of, before_step=clipped)
    else:
        optimizer = Adam(plain.parameters(), 0.05)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(plain, mixed(step)).backward()
            clipped(plain)
            optimizer.step()
    assert min(before) < clip < max(before)
    assert_same(model, plain, 1e-5)


# Two parameters of which torch gives the very same tensor as gradient


def head() -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(2, 2)


class Sum(nn.Module):
    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([[0.1, -0.2], [0.3, 0.4]]))
        self.b = nn.Parameter(torch.zeros(2, 2))
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear
        return linear(x, self.a) + linear(x, self.b) if self.apart else linear(x, self.a + self.b)


SHARED = {
    f"{way}-{next(iter(options), 'none')}": (*WAYS[way], options)
    for options in ({}, {"accumulate": 2}, {"clip": 0.01}, {"precision": "fp16"})
    for way in (KINDS if options else WAYS)
}


@pytest.mark.parametrize(("name", "settings", "options"), SHARED.values(), ids=SHARED.keys())
def test_parameters_that_share_a_gradient(
    name: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    half = "precision" in options
    if half and (algorithm_class(name).second_order or settings.get("order") == "exact"):
        return
    kind = torch.float32 if half else torch.float64
    train = {n: (x.to(kind), y) for n, (x, y) in data().items()}
    one, other, start = (FeatureModel(Sum(apart), head()).to(kind) for apart in (False, True, False))
    for model in (one, other):
        trained(name, model, train, settings=settings, **options)
        assert differ(model, start)
    assert_same(one, other, 1e-2 if half else 1e-8)


# Pieces


@EVERY_WAY
def test_any_number_of_pieces_gives_the_same_weights(name: str, settings: dict[str, Any]) -> None:
    """And the same of whatever else is trained or kept, a discriminator and its optimizer's moments say."""
    whole = network().double()
    one = trained(name, whole, doubled(data()), settings=settings)
    assert differ(whole, network().double())
    for count in (3, B):
        other = trained(name, network().double(), doubled(data()), settings=settings, accumulate=count)
        assert_same(one.algorithm, other.algorithm, 1e-10)
        assert other.history[-1].loss == pytest.approx(one.history[-1].loss, rel=1e-10)
        for mine, its in zip(one.engine.auxiliary.values(), other.engine.auxiliary.values(), strict=True):
            torch.testing.assert_close(mine.state_dict(), its.state_dict(), rtol=1e-10, atol=1e-10)


class Masked(nn.Dropout):
    """Dropout that takes note of its masks; on by the name of the pass, with a gradient or without."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.passes: list[tuple[bool, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.training:
            self.passes.append((torch.is_grad_enabled(), (output != 0).detach()))
        return output


class Tracked(nn.BatchNorm1d):
    """BatchNorm that also adds up, in a buffer, the examples that pass in training."""

    def __init__(self) -> None:
        super().__init__(8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x) if self.training else 0
        return super().forward(x)


WHOLE = ["cdann", "coral", "dann", "fishr", "groupdro", "irm", "mmd", "vrex"]
"""Whose objective is of whole batches: pieces pass twice."""


def test_whole_objectives_are_named() -> None:
    """Those that leave the gradient to the engine and are no mean over examples, and discriminators."""
    found = [
        n
        for n in registry.names()
        if not (cls := algorithm_class(n)).additive
        and (
            cls.trains_discriminator
            or (
                cls.gradient is shoal.algorithms.Algorithm.gradient
                and cls.step is shoal.algorithms.Algorithm.step
            )
        )
    ]
    assert sorted(found) == WHOLE


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_the_second_pass_sees_the_masks_of_the_first(name: str, count: int) -> None:
    masked, steps = Masked(), 3
    made = training(name, network(masked), accumulate=count, steps=steps)
    masked.passes.clear()
    made.run()
    each = 2 * count
    assert len(masked.passes) == steps * each
    drawn = []
    for at in range(0, steps * each, each):
        first, second = masked.passes[at : at + count], masked.passes[at + count : at + each]
        assert not any(grad for grad, _ in first)
        assert all(grad for grad, _ in second)
        for (_, a), (_, b) in zip(first, second, strict=True):
            assert torch.equal(a, b)
            drawn.append(a)
    assert any(not torch.equal(a, b) for a, b in itertools.pairwise(drawn) if a.shape == b.shape)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_every_piece_moves_the_statistics_once(name: str, count: int) -> None:
    tracked, steps = Tracked(), 3
    trained(name, network(tracked), accumulate=count, steps=steps)
    assert int(tracked.num_batches_tracked) == steps * count
    assert int(tracked.seen) == steps * S * B
    # The running mean is that of passes over the pieces in their order, each once.
    plain, by_hand = network(Tracked()), network()
    made = training(name, plain, accumulate=count, steps=1)
    made.run()
    mean = torch.zeros(8)
    parts = [pieces(b, count) for b in batches(algorithm_class(name).draw, 0)]
    for piece in zip(*parts, strict=True):
        with torch.no_grad():
            passed = by_hand.features[0](torch.cat([b.x for b in piece]))
        mean = 0.9 * mean + 0.1 * passed.mean(0)
    torch.testing.assert_close(plain.features[1].running_mean, mean)


def test_with_dropout_the_gradient_is_that_of_the_masks_that_were_drawn() -> None:
    """The slope taken back through the second pass is the objective's own, masks held fixed."""
    parts = doubled(data())
    found = network(masked := Masked()).double()
    made = training("coral", found, parts, accumulate=2, steps=1, settings={"weight": 3.0})
    masked.passes.clear()
    made.run()
    kept = iter([m for grad, m in masked.passes if not grad])

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.where(next(kept), 2.0, 0.0)

    plain = network(Fixed()).double()
    algorithm = build("coral", plain, cross_entropy, Task(S, 2, 8), weight=3.0)
    drawn = [DomainBatch(b.x.double(), b.y, b.domain) for b in batches("domains", 0)]
    outputs = [algorithm.forward_batches(piece) for piece in zip(*(pieces(b, 2) for b in drawn), strict=True)]
    whole = [
        a._replace(**{k: torch.cat([getattr(a, k), getattr(b, k)]) for k in ("output", "y", "features")})
        for a, b in zip(*outputs, strict=True)
    ]
    loss, _ = algorithm.objective(whole)
    optimizer = sgd(plain.parameters())
    loss.backward()
    optimizer.step()
    for p, q in zip(found.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10)


class Halves(Dataset):
    """Examples as {"left": …, "right": (…,)}, through no tensor interface."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.double(), y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return {"left": self.x[i, :1], "right": (self.x[i, 1:],)}, self.y[i]


class Joined(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: dict[str, Any]) -> Tensor:
        found: Tensor = self.net(torch.cat([x["left"], *x["right"]], 1))
        return found


def two_halves() -> FeatureModel:
    model = network().double()
    return FeatureModel(Joined(model.features), model.head)


@pytest.mark.parametrize("name", KINDS)
def test_pieces_of_a_nest_of_tensors(name: str) -> None:
    settings = ACTIVE.get(name, {})
    train = {n: Halves(*d) for n, d in data().items()}
    whole, cut = two_halves(), two_halves()
    trained(name, whole, train, settings=settings, steps=3)
    trained(name, cut, train, settings=settings, steps=3, accumulate=3)
    assert_same(whole, cut, 1e-10)


class Noting(nn.Module):
    """Takes note of how many examples, of which domains, pass in training."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.sizes: list[int] = []
        self.domains: list[set[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.sizes.append(len(x))
            self.domains.append(set(x[:, 1].tolist()))
        found: Tensor = self.net(x)
        return found


@EVERY_WAY
def test_pieces_are_small_and_of_one_domain(name: str, settings: dict[str, Any]) -> None:
    cls = algorithm_class(name)
    for count in (3, 5, B):
        model = network()
        noting = model.features = Noting(model.features)
        trained(name, model, settings=settings, accumulate=count, steps=1)
        if issubclass(cls, (ERM, SAM)):  # one batch of all examples, cut
            assert max(noting.sizes) == math.ceil(S * B / count)
        elif cls.passes == "together":  # a piece of every domain at once
            assert max(noting.sizes) == S * math.ceil(B / count)
        else:
            assert max(noting.sizes) == math.ceil(B / count)
            if name != "mixup" or settings:
                assert {len(d) for d in noting.domains} == {1}


def test_cutting() -> None:
    for size, count in itertools.product(range(1, 20), range(1, 20)):
        batch = DomainBatch({"x": torch.arange(size), "more": [torch.arange(size)]}, torch.arange(size), 4)
        cut = pieces(batch, count)
        assert len(cut) == min(size, count)
        assert max(len(p.y) for p in cut) == math.ceil(size / count)
        for read in (lambda p: p.y, lambda p: p.x["x"], lambda p: p.x["more"][0]):
            assert torch.equal(torch.cat([read(p) for p in cut]), torch.arange(size))
        assert {p.domain for p in cut} == {4}


def test_more_pieces_than_examples_are_refused() -> None:
    with pytest.raises(InputError, match="accumulate=9 pieces of 8 examples; it must be at most 8"):
        training("erm", network(), accumulate=9)


# Steps that are not finite

BAD = pytest.mark.parametrize("how", [nan, infinite, infinite_gradient])
SLOTS = {"fish": S, "reptile": S, "smoothfish": 2 * S, "idgm": S, "iga": S}
"""Calls of the loss per step of those that take a domain at a time, SmoothFish twice."""


@cache
def calls(name: str) -> int:
    """Of the loss, in a step."""
    loss = Altered(nan, ())
    trained(name, network(), loss=loss, steps=1)
    return loss.calls


def altered(name: str, how: Callable[[Tensor], Tensor], step: int, slot: int = 1) -> Altered:
    """A loss that is bad in this slot of a step, where there are slots, and otherwise in all of the step."""
    each = calls(name)
    if name not in SLOTS:
        return Altered(how, range(each * step, each * (step + 1)))
    assert each == SLOTS[name]
    return Altered(how, {each * step + slot, each * step + slot + S} if each > S else {each * step + slot})


def finite(state: Any) -> bool:
    tensors = [v for entry in state.values() for v in entry.values() if isinstance(v, Tensor)]
    return all(bool(t.isfinite().all()) for t in tensors)


@BAD
@pytest.mark.parametrize("name", registry.names())
def test_stops_and_leaves_the_weights_before(name: str, how: Callable[[Tensor], Tensor]) -> None:
    """Also where nobody looked at the numbers before many more steps were taken."""
    step = 5
    model = network()
    going = training(
        name, model, loss=altered(name, how, step), steps=15, eval_every=15, optimizer=partial(Adam, lr=0.01)
    )
    with pytest.raises(Diverged) as caught:
        going.run()
    drawn = batches(algorithm_class(name).draw, step)
    assert caught.value.step == step + 1
    lost = how is not infinite_gradient
    if name != "mldg" or lost:  # whose virtual step may lead to a loss that is not finite
        assert caught.value.quantity == ("loss" if lost else "gradient")
        number = drawn[1 if name in SLOTS else 0].domain if lost or name in ("fish", "reptile") else None
        assert caught.value.domain == (None if number is None else f"d{number}")
    assert f"at step {step + 1}, which was not applied" in str(caught.value)
    before = network()
    trained(name, before, steps=step, optimizer=partial(Adam, lr=0.01))
    assert_same(model, before)
    for optimizer in (going.engine.optimizer, *going.engine.auxiliary.values()):
        assert finite(optimizer.state)


class ByHand:
    """The same algorithm in a loop of our own, in which steps can be left out."""

    def __init__(self, name: str, model: nn.Module, optimizer: Callable[[Any], Any], **options: Any) -> None:
        with seeded(0):
            self.algorithm = build(name, model, cross_entropy, Task(S, 2, 8), **ACTIVE.get(name, {})).train()
        auxiliary = self.algorithm.auxiliary_optimizers()
        own = optimizer(trained_parameters(self.algorithm, auxiliary))
        self.engine = Engine(self.algorithm.wrap(own, S), auxiliary=auxiliary, **options)

    def take(self, *steps: int) -> "ByHand":
        with seeded(0):
            for step in steps:
                seed_all(key(0, WORLD, np.arange(step, step + 1), 0).tolist()[0])
                self.engine.step(self.algorithm, batches(self.algorithm.draw, step))
        return self


@BAD
@pytest.mark.parametrize("name", registry.names())
def test_skips_as_if_the_step_had_not_been(name: str, how: Callable[[Tensor], Tensor]) -> None:
    model, plain = network(nn.BatchNorm1d(8)), network(nn.BatchNorm1d(8))
    done = trained(name, model, loss=altered(name, how, 2), steps=6, on_nan="skip")
    assert done.skipped == [3]
    reference = ByHand(name, plain, sgd)
    reference.take(0, 1, 3, 4, 5)
    for mine, its in zip(done.engine.auxiliary.values(), reference.engine.auxiliary.values(), strict=True):
        torch.testing.assert_close(mine.state_dict(), its.state_dict(), rtol=0, atol=0)
    assert_same(model, plain)  # the buffers too
    torch.testing.assert_close(done.algorithm.state_dict(), reference.algorithm.state_dict(), rtol=0, atol=0)
    assert [p.step for p in done.history][-1] == 6
    assert math.isfinite(done.history[2].loss) or name  # a window without a step has no loss


@BAD
@pytest.mark.parametrize("optimizer", [partial(Adam, lr=0.01), partial(SGD, lr=0.1, momentum=0.9)])
def test_erm_skips_against_a_plain_loop(how: Callable[[Tensor], Tensor], optimizer: Any) -> None:
    model, plain = network(nn.BatchNorm1d(8)), network(nn.BatchNorm1d(8))
    done = trained("erm", model, loss=Altered(how, {0, 3}), steps=6, on_nan="skip", optimizer=optimizer)
    by_hand = optimizer(plain.parameters())
    for step in (1, 2, 4, 5):
        by_hand.zero_grad()
        loss_of(plain, mixed(step)).backward()
        by_hand.step()
    assert_same(model, plain)
    states = [o.state_dict()["state"] for o in (done.engine.optimizer, by_hand)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert done.skipped == [1, 4]


@pytest.mark.parametrize("slot", range(S))
@BAD
def test_fish_drops_the_whole_walk(how: Callable[[Tensor], Tensor], slot: int) -> None:
    model = network()
    done = trained("fish", model, loss=altered("fish", how, 1, slot), steps=4, on_nan="skip")
    reference = CopyingFish(network(), sgd, 0.5)
    for step in (0, 2, 3):
        reference.walk(batches("domains", step), loss_of)
    assert_same(model, reference.model)
    assert done.skipped == [2]


@pytest.mark.parametrize("name", registry.names())
def test_moments_stay_finite_when_steps_are_skipped(name: str) -> None:
    done = trained(
        name,
        network(),
        loss=altered(name, infinite_gradient, 1),
        on_nan="skip",
        optimizer=partial(Adam, lr=0.01),
    )
    for optimizer in (done.engine.optimizer, *done.engine.auxiliary.values()):
        assert finite(optimizer.state)
    assert all(bool(t.isfinite().all()) for t in done.algorithm.state_dict().values())
    assert done.skipped == [2]


def test_a_hundred_in_a_row_are_hopeless() -> None:
    model = network()
    with pytest.raises(Diverged, match="was nan in 100 steps in a row at step 105") as caught:
        trained("erm", model, loss=Altered(nan, range(5, 200)), steps=200, on_nan="skip", log_every=50)
    assert (caught.value.step, caught.value.quantity) == (105, "loss")
    before = network()
    trained("erm", before, steps=5)
    assert_same(model, before)
    bad = set(range(5, 104)) | set(range(105, 204))
    assert len(trained("erm", network(), loss=Altered(nan, bad), steps=205, on_nan="skip").skipped) == 198


def test_skipped_steps_are_in_the_record(tmp_path: Path) -> None:
    shoal.fit(
        "fish", network(), data(), folder=tmp_path, loss=Altered(nan, {4, 10}), on_nan="skip",
        steps=6, batch_size=B, log_every=1, progress=False,
    )  # fmt: skip
    assert json.loads((tmp_path / "record.json").read_text())["skipped"] == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines if "lr" in line] == [0, 1, 1, 2, 2, 2]


class TooFar(SGD):
    """Its ``last``-th step goes further than numbers reach, with a gradient that is finite."""

    def __init__(self, params: Any, last: int) -> None:
        super().__init__(params, 0.1)
        self.left = last

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.left -= 1
        if self.left == 0:
            for p in self.param_groups[0]["params"]:
                p.detach().mul_(1e38).mul_(1e38)


@pytest.mark.parametrize("name", KINDS)
def test_weights_that_are_not_finite_are_never_saved(name: str, tmp_path: Path) -> None:
    each = {"fish": S, "reptile": S, "smoothfish": 2 * S}.get(name, 1)
    with pytest.raises(Diverged, match="the weights became non-finite at step 5") as caught:
        shoal.fit(
            name, network(), data(), folder=tmp_path, validation=data(), steps=10, batch_size=B, keep=9,
            optimizer=partial(TooFar, last=5 * each), checkpoint_every=1, eval_every=2, progress=False,
        )  # fmt: skip
    assert caught.value.quantity == "weights"
    saved = Checkpoints(tmp_path / "checkpoints").load()
    assert saved is not None
    assert saved.step == 4
    for state in (saved.state["training"]["algorithm"], saved.best):
        assert all(bool(t.isfinite().all()) for t in state.values())
    assert not (tmp_path / "model.safetensors").exists()
    assert not (tmp_path / "record.json").exists()


def test_weights_that_are_not_finite_are_never_returned() -> None:
    with pytest.raises(Diverged, match="the weights became non-finite at step 5"):
        trained("erm", network(), steps=5, optimizer=partial(TooFar, last=5))


# Helpers: an algorithm's own optimizers


def adversarial(name: str = "dann", **options: Any) -> ByHand:
    return ByHand(name, network(), sgd, **options)


def judges(run: ByHand) -> list[Tensor]:
    return [p.detach().clone() for p in run.algorithm.discriminator.parameters()]  # type: ignore[operator]


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_helpers_step_is_its_own(on_nan: str) -> None:
    run = adversarial(on_nan=on_nan)
    optimizer = run.engine.auxiliary["discriminator"]
    other = copy.deepcopy(run.algorithm.discriminator)
    by_hand = Adam(other.parameters(), 1e-3, betas=(0.5, 0.9))
    model = copy.deepcopy(run.algorithm.model)
    gradients = [torch.full_like(p, 0.3) for p in judges(run)]
    run.engine.apply(gradients, auxiliary="discriminator")
    for p, g in zip(other.parameters(), gradients, strict=True):
        p.grad = g
    by_hand.step()
    assert_same(run.algorithm.discriminator, other)
    assert_same(run.algorithm.model, model)
    torch.testing.assert_close(optimizer.state_dict()["state"], by_hand.state_dict()["state"], rtol=0, atol=0)
    assert not run.engine.optimizer.state
    assert all(p.grad is None for p in run.algorithm.parameters())
    assert not run.engine.stopped


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_helpers_gradient_that_is_not_finite_is_left_out_and_stops_nothing(value: float) -> None:
    run = adversarial(on_nan="stop")
    optimizer = run.engine.auxiliary["discriminator"]
    before = judges(run)
    gradients = [torch.full_like(p, 0.3) for p in before]
    gradients[-1][0] = value
    run.engine.apply(gradients, auxiliary="discriminator")
    torch.testing.assert_close(judges(run), before, rtol=0, atol=0)
    assert not optimizer.state
    assert all(p.grad is None for p in run.algorithm.parameters())
    assert not run.engine.stopped
    run.take(0)
    assert not run.engine.stopped
    assert any(not torch.equal(a, b) for a, b in zip(judges(run), before, strict=True))


def test_after_a_stop_no_helper_moves() -> None:
    run = adversarial(on_nan="stop").take(0)
    run.engine.apply([torch.full_like(p, math.nan) for p in run.engine.params])
    assert run.engine.stopped
    before, model = judges(run), copy.deepcopy(run.algorithm.model)
    run.take(1)
    torch.testing.assert_close(judges(run), before, rtol=0, atol=0)
    assert_same(run.algorithm.model, model)


@pytest.mark.parametrize("name", [n for n in registry.names() if algorithm_class(n).trains_discriminator])
def test_what_helpers_train_the_users_optimizer_does_not(name: str) -> None:
    made: list[Any] = []

    def maker(params: Any) -> torch.optim.Optimizer:
        made.append(list(params))
        return torch.optim.AdamW(made[-1], 0.05, weight_decay=100.0)

    done = trained(name, network(), optimizer=maker, clip=1e-9)
    own = {id(p) for p in done.algorithm.discriminator.parameters()}  # type: ignore[operator]
    users = {id(p) for p in done.engine.params}
    assert own
    assert not own & users
    assert users == {id(p) for p in made[0]} == {id(p) for p in done.model.parameters()}
    assert own | users == {id(p) for p in done.algorithm.parameters()}
    # Its own Adam moves each weight by about its rate a step, which neither clipping nor decay has changed.
    fresh = training(name, network()).algorithm
    moved = max(
        float((a - b).detach().abs().max())
        for a, b in zip(
            done.algorithm.discriminator.parameters(), fresh.discriminator.parameters(), strict=True
        )  # type: ignore[operator]
    )
    assert 1e-3 < moved < 2 * 6e-3
    assert {int(s["step"]) for s in done.engine.auxiliary["discriminator"].state.values()} == {6}


def test_others_have_no_helpers() -> None:
    for name in registry.names():
        made = training(name, network())
        assert bool(made.engine.auxiliary) is algorithm_class(name).trains_discriminator
        assert len(made.engine.params) == len(list(made.model.parameters()))


def test_a_discriminator_learns_in_the_trainings_own_steps() -> None:
    """As its Adam does by hand, on the features that the model had at each step."""
    run = ByHand("dann", network(), sgd)
    plain = ByHand("dann", network(), sgd)
    other: Any = plain.algorithm.discriminator
    by_hand = Adam(other.parameters(), 1e-3, betas=(0.5, 0.9))
    for step in range(3):
        drawn = batches("domains", step)
        with torch.no_grad():
            features = torch.cat([run.algorithm.model.features(b.x) for b in drawn])  # type: ignore[operator]
        by_hand.zero_grad()
        numbers = torch.tensor([b.domain for b in drawn]).repeat_interleave(B)
        cross_entropy(other.layers(features), numbers).backward()
        by_hand.step()
        run.take(step)
        assert_same(run.algorithm.discriminator, other, 1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_a_captured_step_needs_helpers_that_can_skip(fused: bool) -> None:
    class Quick(algorithm_class("dann")):  # type: ignore[misc]
        def auxiliary_optimizers(self) -> dict[str, torch.optim.Optimizer]:
            return {"discriminator": Adam(self.discriminator.parameters(), 1e-3, fused=fused)}

    algorithm = Quick(network(), cross_entropy, Task(S, 2, 8))
    auxiliary = algorithm.auxiliary_optimizers()
    engine = Engine(Adam(trained_parameters(algorithm, auxiliary), fused=True), auxiliary=auxiliary)
    assert why_not(algorithm, engine) == "the model is not on a CUDA device"
    engine.device = torch.device("cuda")  # as if
    reason = why_not(algorithm, engine)
    assert reason is None if fused else "its optimizer cannot skip a step" in str(reason)


def test_a_captured_step_repeats_no_masks() -> None:
    for name, count, layer, free in (
        ("coral", 1, nn.Dropout(), True),
        ("coral", 2, nn.Identity(), True),
        ("erm", 2, nn.Dropout(), True),
        ("coral", 2, nn.Dropout(), False),
        ("sam", 1, nn.Dropout(), False),
    ):
        algorithm = build(name, network(layer), cross_entropy, Task(S, 2, 8))
        engine = Engine(Adam(algorithm.parameters(), fused=True), accumulate=count)
        engine.device = torch.device("cuda")  # as if
        reason = why_not(algorithm, engine)
        assert reason is None if free else "must repeat the dropout masks" in str(reason)


# What processes agree on


class Two:
    """Stands for two processes, of which this is one: the other's part of every sum is given."""

    count = 2

    def __init__(self, index: int, others: list[Tensor]) -> None:
        self.index, self.main, self.others = index, index == 0, others
        self.sent: list[Tensor] = []

    def sum(self, tensors: Any) -> list[Tensor]:
        self.sent = [t.clone() for t in tensors]
        return [a + b for a, b in zip(tensors, self.others, strict=True)]


def test_all_agree_with_the_first() -> None:
    first, second = torch.tensor([1.0, -2.0]), torch.tensor([5.0, math.nan])
    params = [nn.Parameter(torch.zeros(2))]
    leader: Any = Two(0, [torch.zeros(2)])
    found = Engine(SGD(params, 0.1), leader, share=0.5).agree(first)
    assert torch.equal(found, first)
    assert torch.equal(leader.sent[0], first)
    follower: Any = Two(1, [first])
    found = Engine(SGD(params, 0.1), follower, share=0.5).agree(second)
    assert torch.equal(found, first)
    assert torch.equal(follower.sent[0], torch.zeros(2))
    assert torch.equal(second[:1], torch.tensor([5.0]))  # its own is left as it was
    assert Engine(SGD(params, 0.1)).agree(second) is second


# Schedules


class Rates(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1)
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


@pytest.mark.parametrize("name", ["erm", "fish", "reptile"])
@pytest.mark.parametrize(
    "schedule", [lambda o: CosineAnnealingLR(o, 6), lambda o: StepLR(o, 2, 0.5)], ids=["cosine", "step"]
)
def test_rates_as_torchs_scheduler_says(name: str, schedule: Any) -> None:
    made: list[Rates] = []

    def maker(params: Any) -> Rates:
        made.append(Rates(params))
        return made[-1]

    trained(name, network(), optimizer=maker, schedule=schedule)
    other = SGD([nn.Parameter(torch.zeros(1))], 0.1)
    planner, plan = schedule(other), []
    for _ in range(6):
        plan += [other.param_groups[0]["lr"]] * (1 if name == "erm" else S)
        other.step()
        planner.step()
    assert made[0].rates == plan
    assert len(set(plan)) > 2


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda o: ReduceLROnPlateau(o), "ReduceLROnPlateau"),
        (lambda o: None, "schedule must return a torch scheduler, got NoneType"),
        (CosineAnnealingLR(SGD([nn.Parameter(torch.zeros(1))], 0.1), 3), "schedule must be a function"),
    ],
    ids=["plateau", "none", "instance"],
)
def test_schedules_that_cannot_be_are_refused(schedule: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        training("erm", network(), schedule=schedule)


# Averages


class Followed:
    """The weights after every step, as the progress callback sees them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights: dict[int, list[Tensor]] = {}

    def __call__(self, step: int, note: str) -> None:
        self.weights[step] = [p.detach().double() for p in self.model.parameters()]

    def mean(self, steps: Iterable[int]) -> list[Tensor]:
        return [torch.stack(ps).mean(0) for ps in zip(*(self.weights[s] for s in steps), strict=True)]


def assert_statistics_are_fresh(model: FeatureModel, inputs: Iterator[Tensor]) -> None:
    """BatchNorm's are those of the data under the weights that the model holds."""
    with torch.no_grad():
        outputs = [model.features[0](x) for x in inputs]
    mean = torch.stack([o.mean(0) for o in outputs]).mean(0)
    variance = torch.stack([o.var(0) for o in outputs]).mean(0)
    torch.testing.assert_close(model.features[1].running_mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.features[1].running_var, variance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", ["sma", "swad", "swad-paper"])
@pytest.mark.parametrize("name", ["erm", "fish", "idgm"])
def test_averaged_weights(name: str, average: str) -> None:
    model = network(nn.BatchNorm1d(8))
    followed = Followed(model)
    options: dict[str, Any] = {"average_start": 3} if average == "sma" else {}
    turned = {name: (x, 1 - y) for name, (x, y) in data(24).items()}  # so that the loss rises, for SWAD
    run = shoal.fit(
        name, model, data(), validation=turned, average=average, steps=12, batch_size=B, select="last",
        eval_every=1, log_every=1, progress=followed, optimizer=partial(SGD, lr=0.3), **options,
    )  # fmt: skip
    words = run.rule.split()
    first, last = int(words[-3]), int(words[-1])
    assert run.rule == f"last step, {average} of steps {first} to {last}"
    assert (first == 3 and last == 12) if average == "sma" else (1 <= first < last <= 12)
    steps: Iterable[int] = range(first, last + 1)
    if average == "swad":
        losses = [p.scores["validation"].loss for p in run.history]
        steps = [segment + 1 for segment in naive_swad.released(losses)[0]]
        assert (min(steps), max(steps)) == (first, last)
        assert len(set(steps)) < len(steps)
    for p, mean in zip(model.parameters(), followed.mean(steps), strict=True):
        torch.testing.assert_close(p.detach().double(), mean, rtol=1e-5, atol=1e-6)
    examples, domains = concatenate(data())
    assert isinstance(examples, TensorData)
    sampler = DomainBatchSampler(domains, B, 1, draw="pooled")
    drawn = (sampler.plan(step)[0][1] for step in range(sampler.steps))
    assert_statistics_are_fresh(model, (examples.x[torch.from_numpy(i)] for i in drawn))
    # And it is these weights that were judged.
    assert not model.training
    x, y = (torch.cat(parts) for parts in zip(*turned.values(), strict=True))
    with torch.no_grad():
        output = model(x)
    assert run.accuracy("validation") == pytest.approx(float((output.argmax(1) == y).float().mean()))
    assert run.scores("validation").loss == pytest.approx(float(cross_entropy(output, y)), rel=1e-5)


def test_averaging_does_not_touch_the_training() -> None:
    one, other = network(nn.BatchNorm1d(8)), network(nn.BatchNorm1d(8))
    weights = []
    for model, options in ((one, {}), (other, {"average": "sma"})):
        followed = Followed(model)
        trained("fish", model, progress=followed, eval_every=1, **options)
        weights.append(followed.weights[6])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_capture_on_a_cpu_is_refused() -> None:
    with pytest.raises(InputError, match="capture=True is not possible: the model is not on a CUDA device"):
        training("fish", network(), capture=True)


# Evaluation


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network(nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.seen: set[tuple[bool, bool]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((self.training, torch.is_inference_mode_enabled()))
        return self.net(x)


def test_evaluates_in_inference_mode() -> None:
    model = Modes()
    made = training("fish", model, eval_every=2)
    model.seen.clear()
    made.run()
    assert model.seen == {(True, False), (False, True)}


class Read(Dataset):
    """Writes down which process reads."""

    def __init__(self, x: Tensor, y: Tensor, log: Path) -> None:
        self.x, self.y, self.log = x, y, log

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return self.x[i], self.y[i]


def test_workers_stay_between_evaluations(tmp_path: Path) -> None:
    log = tmp_path / "readers"
    train = {name: Read(x, y, log) for name, (x, y) in data(12).items()}
    trained("fish", network(), train, steps=4, eval_every=1, workers=1)
    readers = set(map(int, log.read_text().split())) - {os.getpid()}
    assert len(readers) == 2  # one for the training and one for all four evaluations


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_any_batch_in_evaluation_gives_the_same_scores(size: int) -> None:
    found, usual = (
        trained("fish", network(nn.BatchNorm1d(8)), validation=data(24), **options).history[-1].scores
        for options in ({"eval_batch": size}, {})
    )
    for split in ("train", "validation"):
        assert found[split].values == usual[split].values
        assert found[split].average == usual[split].average
        assert found[split].loss == pytest.approx(usual[split].loss, rel=1e-6)


# Compiled models


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_a_compiled_model_trains_alike() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    model, plain = network(), network()
    trained("fish", model, compile=True, steps=3)
    assert counters["stats"]["unique_graphs"] > 0
    trained("fish", plain, steps=3)
    assert_same(model, plain, 1e-5)
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("name", [n for n in registry.names() if algorithm_class(n).second_order])
def test_second_order_methods_are_not_compiled(name: str) -> None:
    with pytest.raises(InputError, match="uses second derivatives, which compiled models do not support"):
        training(name, network(), compile=True)
