"""What the engine adds to every algorithm, against loops written by hand."""

import copy
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset

import shoal
from references.naive import CopyingFish
from shoal.algorithms import algorithm_class, build, registry
from shoal.data import DomainBatch, DomainBatchSampler, Task, TensorData, concatenate
from shoal.data.batch import pieces
from shoal.errors import InputError
from shoal.training.checkpoint import Checkpoints
from shoal.training.engine import Engine, LossScale
from shoal.training.fit import _as_domain_data
from shoal.training.loop import Training
from shoal.training.options import Options
from shoal.training.stopping import Diverged

S, B = 3, 8
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Every rule of an update, second-order ones in all their forms.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in registry.names()},
    "idgm by differences": ("idgm", {"method": "finite-difference"}),
    "idgm of products": ("idgm", {"normalize": False, "trust": None, "gamma": 0.1}),
}
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


def network(*between: nn.Module, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 8), *between, nn.Tanh(), nn.Linear(8, 2))


def training(name: str, model: nn.Module, train: Any = None, **options: Any) -> Training:
    given = {"steps": 6, "batch_size": B, "optimizer": sgd, "device": "cpu", "progress": False} | options
    parts = _as_domain_data(train or data(), given.pop("validation", None), None)
    return Training(name, model, parts, Options.checked(**given))


def trained(name: str, model: nn.Module, train: Any = None, **options: Any) -> Training:
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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", registry.names())
def test_half_precision_learns(name: str, precision: str) -> None:
    model = network(nn.BatchNorm1d(8))
    options: dict[str, Any] = {"precision": precision, "steps": 60, "optimizer": partial(Adam, lr=0.03)}
    if precision == "fp16" and algorithm_class(name).second_order:
        with pytest.raises(InputError, match=r"precision='fp16'.*second derivatives.*'bf16' or 'fp32'"):
            training(name, model, **options)
        return
    done = trained(name, model, **options)
    assert done.history[-1].scores["train"].average > 0.9
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32, torch.int64}
    state = [t for s in done.engine.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    assert {t.dtype for t in state} == {torch.float32}
    full = network(nn.BatchNorm1d(8))
    trained(name, full, **options | {"precision": "fp32"})
    assert differ(model, full)


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[bool, torch.dtype]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((self.training, x.dtype))
        return x


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", registry.names())
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


class Sum(nn.Module):
    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([[0.1, -0.2], [0.3, 0.4]]))
        self.b = nn.Parameter(torch.zeros(2, 2))
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear
        return linear(x, self.a) + linear(x, self.b) if self.apart else linear(x, self.a + self.b)


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2}, {"clip": 0.01}, {"precision": "fp16"}],
    ids=lambda o: next(iter(o), "none"),
)
@EVERY_WAY
def test_parameters_that_share_a_gradient(
    name: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    if "precision" in options and algorithm_class(name).second_order:
        return
    one, other = Sum(), Sum(apart=True)
    for model in (one, other):
        trained(name, model, settings=settings, **options)
        assert differ(model, Sum())
    assert_same(one, other, 1e-2 if "precision" in options else 1e-5)


# Pieces


@pytest.mark.parametrize("count", [2, 3, B])
@EVERY_WAY
def test_any_number_of_pieces_gives_the_same_weights(name: str, settings: dict[str, Any], count: int) -> None:
    whole, cut = network().double(), network().double()
    one = trained(name, whole, doubled(data()), settings=settings)
    other = trained(name, cut, doubled(data()), settings=settings, accumulate=count)
    assert_same(whole, cut, 1e-10)
    assert other.history[-1].loss == pytest.approx(one.history[-1].loss, rel=1e-10)
    assert differ(whole, network().double())


class Halves(Dataset):
    """Examples as {"left": …, "right": (…,)}, through no tensor interface."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x.double(), y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return {"left": self.x[i, :1], "right": (self.x[i, 1:],)}, self.y[i]


class TwoHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network().double()

    def forward(self, x: dict[str, Any]) -> Tensor:
        return self.net(torch.cat([x["left"], *x["right"]], 1))


@EVERY_WAY
def test_pieces_of_a_nest_of_tensors(name: str, settings: dict[str, Any]) -> None:
    train = {n: Halves(*d) for n, d in data().items()}
    whole, cut = TwoHalves(), TwoHalves()
    trained(name, whole, train, settings=settings, steps=3)
    trained(name, cut, train, settings=settings, steps=3, accumulate=3)
    assert_same(whole, cut, 1e-10)


class Noting(nn.Module):
    """Takes note of how many examples, of which domains, pass in training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.sizes: list[int] = []
        self.domains: list[set[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.sizes.append(len(x))
            self.domains.append(set(x[:, 1].tolist()))
        return self.net(x)


@pytest.mark.parametrize("count", [2, 3, 5, B])
@EVERY_WAY
def test_pieces_are_small_and_of_one_domain(name: str, settings: dict[str, Any], count: int) -> None:
    model = Noting()
    trained(name, model, settings=settings, accumulate=count, steps=2)
    together = S if algorithm_class(name).draw == "pooled" else 1  # batches that go through the model at once
    assert max(model.sizes) == together * math.ceil(B / count)
    if together == 1:
        assert {len(d) for d in model.domains} == {1}


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

PASSES = {"erm": 1, "fish": S, "reptile": S, "smoothfish": 2 * S, "idgm": 2 * S}
"""Calls of the loss a step; SmoothFish and IDGM go over the domains twice."""
BAD = pytest.mark.parametrize("how", [nan, infinite, infinite_gradient])


def altered(name: str, how: Callable[[Tensor], Tensor], step: int, slot: int = 1) -> Altered:
    each = PASSES.get(name, 1)
    slot = slot if each > 1 else 0
    return Altered(how, {each * step + slot, each * step + slot + S} if each > S else {each * step + slot})


def finite(state: Any) -> bool:
    tensors = [v for entry in state.values() for v in entry.values() if isinstance(v, Tensor)]
    return all(bool(t.isfinite().all()) for t in tensors)


@BAD
@pytest.mark.parametrize("name", PASSES)
def test_stops_and_leaves_the_weights_before(name: str, how: Callable[[Tensor], Tensor]) -> None:
    """Also where nobody looked at the numbers before many more steps were taken."""
    step = 20
    model = network()
    going = training(
        name, model, loss=altered(name, how, step), steps=60, eval_every=60, optimizer=partial(Adam, lr=0.01)
    )
    with pytest.raises(Diverged) as caught:
        going.run()
    drawn = batches(algorithm_class(name).draw, step)
    known = name in ("fish", "reptile") or (name in ("idgm", "smoothfish") and how is not infinite_gradient)
    assert caught.value.step == step + 1
    assert caught.value.quantity == ("gradient" if how is infinite_gradient else "loss")
    assert caught.value.domain == (f"d{drawn[1].domain}" if known else None)
    assert f"at step {step + 1}, which was not applied" in str(caught.value)
    before = network()
    trained(name, before, steps=step, optimizer=partial(Adam, lr=0.01))
    assert_same(model, before)
    assert finite(going.engine.optimizer.state)


class ByHand:
    """The same algorithm in a loop of our own, in which steps can be left out."""

    def __init__(self, name: str, model: nn.Module, optimizer: Callable[[Any], Any]) -> None:
        self.algorithm = build(name, model, cross_entropy, Task(S, 2)).train()
        self.engine = Engine(self.algorithm.wrap(optimizer(self.algorithm.parameters()), S))

    def take(self, *steps: int) -> None:
        for step in steps:
            self.engine.step(self.algorithm, batches(self.algorithm.draw, step))


@BAD
@pytest.mark.parametrize("name", PASSES)
def test_skips_as_if_the_step_had_not_been(name: str, how: Callable[[Tensor], Tensor]) -> None:
    model, plain = network(nn.BatchNorm1d(8)), network(nn.BatchNorm1d(8))
    done = trained(name, model, loss=altered(name, how, 2), steps=6, on_nan="skip")
    assert done.skipped == [3]
    reference = ByHand(name, plain, sgd)
    reference.take(0, 1, 3, 4, 5)
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


@pytest.mark.parametrize("name", PASSES)
def test_moments_stay_finite_when_steps_are_skipped(name: str) -> None:
    done = trained(
        name,
        network(),
        loss=altered(name, infinite_gradient, 1),
        on_nan="skip",
        optimizer=partial(Adam, lr=0.01),
    )
    assert finite(done.engine.optimizer.state)
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


@pytest.mark.parametrize("name", PASSES)
def test_weights_that_are_not_finite_are_never_saved(name: str, tmp_path: Path) -> None:
    each = 1 if name == "idgm" else PASSES[name]
    with pytest.raises(Diverged, match="the weights were no longer finite at step 5") as caught:
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
    with pytest.raises(Diverged, match="the weights were no longer finite at step 5"):
        trained("erm", network(), steps=5, optimizer=partial(TooFar, last=5))


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

    def mean(self, first: int, last: int) -> list[Tensor]:
        return [
            torch.stack(ps).mean(0)
            for ps in zip(*(self.weights[s] for s in range(first, last + 1)), strict=True)
        ]


def assert_statistics_are_fresh(model: nn.Sequential, inputs: Iterator[Tensor]) -> None:
    """BatchNorm's are those of the data under the weights that the model holds."""
    with torch.no_grad():
        outputs = [model[0](x) for x in inputs]
    mean = torch.stack([o.mean(0) for o in outputs]).mean(0)
    variance = torch.stack([o.var(0) for o in outputs]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model[1].running_var, variance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("average", ["sma", "swad"])
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
    for p, mean in zip(model.parameters(), followed.mean(first, last), strict=True):
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
    with pytest.raises(InputError, match="capture=True cannot be had: the model is not on a CUDA device"):
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
    with pytest.raises(InputError, match="differentiates twice, which compiled models cannot"):
        training(name, network(), compile=True)
