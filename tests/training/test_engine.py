"""What the engine adds to every algorithm, against loops written by hand."""

import itertools
import math
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal.training.loop import Training
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset

import shoal
from references.naive import CopyingFish
from shoal.algorithms import algorithm_class, build, registry
from shoal.algorithms.erm import ERM
from shoal.algorithms.sam import SAM
from shoal.api.fit import as_domain_data
from shoal.data import DomainBatch, DomainBatchSampler, Task, TensorData, concatenate
from shoal.data.batch import pieces
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.training.capture import why_not
from shoal.training.checkpoint import Checkpoints
from shoal.training.engine import Engine
from shoal.training.options import complete
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
    return Training(name, model, parts, complete(**given))


def trained(name: Any, model: nn.Module, train: Any = None, **options: Any) -> Training:
    made = training(name, model, train, **options)
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

    made = training(name, network(watching), loss=loss, precision=precision, average="sma:1")
    watching.seen.clear()  # the trial pass before
    made.run()
    assert watching.seen == {(True, HALF[precision]), (False, HALF[precision])}
    assert losses == {torch.float32}


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


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_penalty_that_is_not_finite_stops_the_training(precision: str) -> None:
    """Though all losses are finite."""

    class Broken(algorithm_class("vrex")):  # type: ignore[misc]
        def penalty(self, outputs: Any, losses: Tensor) -> Tensor:
            found: Tensor = super().penalty(outputs, losses)
            return found * math.nan if int(self.weight.count) == 2 else found

    with pytest.raises(Diverged, match="at step 3, which was not applied"):
        trained(Broken, network(), precision=precision)


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
    for options in ({}, {"accumulate": 2}, {"clip": 0.01})
    for way in (KINDS if options else WAYS)
}


@pytest.mark.parametrize(("name", "settings", "options"), SHARED.values(), ids=SHARED.keys())
def test_parameters_that_share_a_gradient(
    name: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    train = doubled(data())
    one, other, start = (FeatureModel(Sum(apart), head()).double() for apart in (False, True, False))
    for model in (one, other):
        trained(name, model, train, settings=settings, **options)
        assert differ(model, start)
    assert_same(one, other, 1e-8)


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
            name, network(), data(), folder=tmp_path, validation=data(), steps=10, batch_size=B,
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


# Helpers: an algorithm's own optimizers


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
    ("name", "factors"),
    [
        ("constant", [1] * 6),
        ("linear", [1 - step / 6 for step in range(6)]),
        ("cosine", [(1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)]),
        ("step:0.5:2", [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ("warmup:4", [0.25, 0.5, 0.75, 1, 1, 1]),
        ("warmup:2,linear", [0.5, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
    ],
)
def test_schedules_by_name(name: str, factors: list[float]) -> None:
    made: list[Rates] = []
    trained("erm", network(), optimizer=lambda p: made.append(Rates(p)) or made[-1], schedule=name)
    assert made[0].rates == pytest.approx([0.1 * factor for factor in factors])


@pytest.mark.parametrize(
    "schedule", [lambda o: ReduceLROnPlateau(o), lambda o: None], ids=["plateau", "none"]
)
def test_schedules_that_cannot_be_are_refused(schedule: Any) -> None:
    with pytest.raises(InputError, match=r"^schedule"):
        training("erm", network(), schedule=schedule)


# Averages


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
