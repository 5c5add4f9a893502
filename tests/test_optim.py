"""Fish against a Fish that copies the model, to the last bit."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from references.naive import CopyingFish
from shoal.errors import InputError
from shoal.optim import Fish


class Eager(SGD):
    """Fills its state when it is made, as Adagrad does in some versions of torch."""

    def __init__(self, params, **options):
        super().__init__(params, 0.1, momentum=0.9, **options)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["momentum_buffer"] = torch.full_like(p, 0.25)


OPTIMIZERS = {
    "sgd": lambda p, **k: SGD(p, 0.1, weight_decay=0.01, **k),
    "momentum": lambda p, **k: SGD(p, 0.05, momentum=0.9, dampening=0.3, **k),
    "adam": lambda p, **k: Adam(p, 0.01, amsgrad=True, **k),
    "adamw": lambda p, **k: AdamW(p, 0.01, weight_decay=0.1, **k),
    "adagrad": lambda p, **k: Adagrad(p, 0.05, initial_accumulator_value=0.1, **k),
    "rmsprop": lambda p, **k: RMSprop(p, 0.01, momentum=0.5, centered=True, **k),
    "eager": Eager,
}
STATES = pytest.mark.parametrize("inner_state", ["carry", "reset"])


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def make_batches(count, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, 3, generator=draw), torch.randn(6, 2, generator=draw) + i) for i in range(count)]


def loss_of(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    a, b = (list(x.parameters()) if isinstance(x, nn.Module) else x for x in (a, b))
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def loops(batches, steps):
    return [batches[i : i + steps] for i in range(0, len(batches), steps)]


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# The inner loop


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4),
    inner_steps=st.integers(1, 5),
    meta_lr=st.floats(1e-3, 1),
    rounds=st.integers(1, 4),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    foreach=st.booleans(),
    inner_state=st.sampled_from(["carry", "reset"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_equals_a_fish_that_copies_the_model(
    shapes, inner_steps, meta_lr, rounds, name, foreach, inner_state, dtype, seed
):
    generator = torch.Generator().manual_seed(seed)
    model = nn.ParameterList([torch.randn(s, generator=generator).to(dtype) for s in shapes])
    targets = torch.randn(rounds * inner_steps, generator=generator).tolist()
    distance = lambda params, target: sum(((p - target) ** 2).sum() for p in params)  # noqa: E731
    make = lambda params: OPTIMIZERS[name](params, foreach=foreach)  # noqa: E731
    reference = CopyingFish(copy.deepcopy(model), make, meta_lr, inner_state)
    fish = Fish(make(model.parameters()), inner_steps, meta_lr, inner_state)
    for inner_loop in loops(targets, inner_steps):
        for target in inner_loop:
            fish.zero_grad()
            distance(model, target).backward()
            fish.step()
        reference.walk(inner_loop, distance)
        assert same(model, reference.model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_meta_lr_one_is_the_inner_optimizer_and_reset_is_another(name):
    batches, ends = make_batches(7), []
    for inner_state in ("carry", "reset", None):
        model = make_model()
        inner = OPTIMIZERS[name](model.parameters())
        train(model, Fish(inner, 3, 1, inner_state) if inner_state else inner, batches)
        ends.append(weights(model))
    assert same(ends[0], ends[2])
    assert same(ends[1], ends[2]) == (name == "sgd")


def test_the_extra_memory_is_one_copy_of_the_trained_weights():
    model = make_model()
    model[0].bias.requires_grad_(False)
    fish = Fish(Adam(model.parameters(), 0.01), 2)
    train(model, fish, make_batches(5))
    slow = lambda: [e["slow"] for e in fish.state.values() if "slow" in e]  # noqa: E731
    assert sum(map(torch.numel, slow())) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    stores = [s.data_ptr() for s in slow()]
    train(model, fish, make_batches(4))
    assert [s.data_ptr() for s in slow()] == stores  # the same memory in every inner loop


def test_clipping_and_weights_changed_from_outside_between_inner_loops():
    model, batches = make_model(), make_batches(6)
    clip = lambda model, _=None: nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # noqa: E731
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS["adam"], 0.5)
    fish = Fish(OPTIMIZERS["adam"](model.parameters()), 3)
    for inner_loop in loops(batches, 3):
        for batch in inner_loop:
            fish.zero_grad()
            loss_of(model, batch).backward()
            assert clip(model) > 0.5  # it does clip
            fish.step()
        reference.walk(inner_loop, loss_of, before_step=clip)
        assert same(model, reference.model)
        for each in (model, reference.model):
            each.load_state_dict(make_model(seed=9).state_dict())


# Frozen, thawed and added parameters


def test_frozen_parameters_stay_to_the_bit():
    model = make_model()
    model[0].weight.requires_grad_(False)
    unreached = nn.Parameter(torch.randn(7))
    before = model[0].weight.clone(), unreached.detach().clone(), model[2].weight.detach().clone()
    fish = Fish(AdamW([*model.parameters(), unreached], 0.1, weight_decay=0.5), 2, 0.1)
    train(model, fish, make_batches(7))
    assert torch.equal(model[0].weight, before[0])
    assert torch.equal(unreached, before[1])
    assert not torch.equal(model[2].weight, before[2])
    frozen = make_model().requires_grad_(False)
    Fish(SGD(frozen.parameters(), 0.1), 1).step()
    assert same(frozen, make_model())


@pytest.mark.parametrize("added", [False, True])
def test_parameters_that_come_in_within_an_inner_loop_join_at_the_next(added):
    """Until then the inner optimizer moves them, and no interpolation takes that back."""
    model, batches = make_model(), make_batches(5)
    newcomer = model[0].weight.requires_grad_(False)
    others = [p for p in model.parameters() if p is not newcomer]
    plain = copy.deepcopy(model)
    fish = Fish(SGD(others if added else [*others, newcomer], 0.1), 3)
    train(model, fish, batches[:1])
    newcomer.requires_grad_(True)
    if added:
        fish.add_param_group({"params": [newcomer], "lr": 0.05})
    # The reference: the same three inner steps without interpolation.
    train(plain, SGD(plain.parameters(), 0.1), batches[:1])
    rate = 0.05 if added else 0.1
    plain[0].weight.requires_grad_(True)
    rest = [p for p in plain.parameters() if p is not plain[0].weight]
    train(plain, SGD([{"params": rest}, {"params": [plain[0].weight], "lr": rate}], 0.1), batches[1:3])
    train(model, fish, batches[1:3])
    assert torch.equal(newcomer, plain[0].weight)
    assert not torch.equal(model[2].weight, plain[2].weight)
    start = newcomer.detach().clone()
    train(model, fish, batches[3:5])
    with fish.slow_weights():
        assert torch.equal(newcomer, start)


# Schedulers


@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_schedulers_on_fish(optimizer):
    """They set the inner rates, momentum and betas as they would without it."""
    model, batches = make_model(), make_batches(9)
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS[optimizer], 0.5)
    fish = Fish(OPTIMIZERS[optimizer](model.parameters()), 3)
    scheduler = OneCycleLR(fish, max_lr=0.1, total_steps=12)
    # A scheduler's settings per step, recorded on an optimizer that trains nothing.
    other = OPTIMIZERS[optimizer]([nn.Parameter(torch.zeros(1))])
    plan, planner = [], OneCycleLR(other, max_lr=0.1, total_steps=12)
    for _ in batches:
        plan.append({k: v for k, v in other.param_groups[0].items() if k in ("lr", "momentum", "betas")})
        other.step()
        planner.step()
    plan = iter(plan)
    for inner_loop in loops(batches, 3):
        for batch in inner_loop:
            train(model, fish, [batch])
            scheduler.step()
        reference.walk(inner_loop, loss_of, before_step=lambda _, o: o.param_groups[0].update(next(plan)))
        assert same(model, reference.model)


# Saving and resuming


@STATES
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("saved_after", [3, 4, 5])  # between inner loops and at both places within one
def test_resumes_to_the_bit_from_a_file(name, inner_state, saved_after):
    model, batches = make_model(), make_batches(10)
    fish = Fish(OPTIMIZERS[name](model.parameters()), 3, 0.3, inner_state)
    scheduler = CosineAnnealingLR(fish, 20)
    train(model, fish, batches[:saved_after])
    scheduler.step()
    saved = through_file([each.state_dict() for each in (model, fish, scheduler)])
    train(model, fish, batches[saved_after:])

    resumed = make_model(seed=5)
    other = Fish(OPTIMIZERS[name](resumed.parameters()), 3, 0.7)  # meta_lr and inner_state come from the file
    train(resumed, other, make_batches(4, seed=2))  # what it did before must not matter
    for each, state in zip((resumed, other, CosineAnnealingLR(other, 20)), saved, strict=True):
        each.load_state_dict(state)
    assert (other.position, other.meta_lr, other.inner_state) == (saved_after % 3, 0.3, inner_state)
    with other.slow_weights():
        theta = weights(resumed)
    train(resumed, other, batches[saved_after:])
    assert same(model, resumed)
    assert not same(theta, resumed)


def test_states_that_are_not_whole():
    """A plain state starts a new inner loop; a loop without its start is refused, and nothing is loaded."""
    model, plain = make_model(), make_model(1)
    fish, inner = Fish(Adam(model.parameters(), 0.1), 3), Adam(plain.parameters(), 0.2)
    train(model, fish, make_batches(2))
    train(plain, inner, make_batches(2))
    other = Fish(Adam(make_model().parameters(), 0.5), 4)
    bare = {n: {k: v for k, v in e.items() if k != "slow"} for n, e in fish.state_dict()["state"].items()}
    with pytest.raises(InputError, match=r"2 steps into an inner loop of 3, and .*state\[p\]\['slow'\]"):
        other.load_state_dict({**fish.state_dict(), "state": bare})
    assert other.param_groups[0]["lr"] == 0.5
    fish.load_state_dict(inner.state_dict())
    assert (fish.position, fish.inner_steps, fish.param_groups[0]["lr"]) == (0, 3, 0.2)
    assert torch.equal(fish.state[model[0].weight]["exp_avg"], inner.state[plain[0].weight]["exp_avg"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@STATES
def test_copies_go_on_alike_and_apart(copied, inner_state):
    model, batches = make_model(), make_batches(8)
    fish = Fish(Adagrad(model.parameters(), 0.1), 3, 0.3, inner_state)
    scheduler = StepLR(fish, 100)  # hangs a step of its own on the optimizer
    train(model, fish, batches[:4])
    scheduler.step()
    twin, other = copied((model, fish))
    assert other.position == 1
    before = weights(twin)
    train(model, fish, batches[4:])
    assert same(twin, before)
    train(twin, other, batches[4:])
    assert same(twin, model)


# Loss scaling and closures


@pytest.mark.parametrize("unscale", [False, True], ids=["by step", "by unscale_"])
@STATES
@pytest.mark.parametrize("poisoned", [(), (0,), (1,), (3, 4, 5)], ids=str)
def test_loss_scaler(poisoned, inner_state, unscale):
    """Scales are powers of two, so unscaled gradients are the same to the bit. A skipped step counts."""
    model, batches = make_model(), make_batches(9)
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS["adam"], 0.5, inner_state)
    fish = Fish(OPTIMIZERS["adam"](model.parameters()), 3, 0.5, inner_state)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for n, batch in enumerate(batches):
        fish.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if n in poisoned:
            next(model.parameters()).grad.view(-1)[0] = float("inf")
        if unscale:
            scaler.unscale_(fish)
        scaler.step(fish)
        scaler.update()
    for inner_loop in loops([None if n in poisoned else b for n, b in enumerate(batches)], 3):
        reference.walk(inner_loop, loss_of)
    assert same(model, reference.model)
    assert fish.position == 0
    assert scaler.get_scale() == 2.0 ** (10 - len(poisoned))
    assert not {"grad_scale", "found_inf"} & set(vars(fish))


@STATES
@pytest.mark.parametrize("make", [OPTIMIZERS["adam"], lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4)])
def test_closures(make, inner_state):
    model, batches = make_model(), make_batches(6)
    plain = copy.deepcopy(model)
    fish, inner = Fish(make(model.parameters()), 3, 0.5, inner_state), make(plain.parameters())

    def closure_of(model, optimizer, batch):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        return closure

    for inner_loop in loops(batches, 3):
        start = weights(plain)
        if inner_state == "reset":
            inner = make(plain.parameters())
        for batch in inner_loop:
            loss = fish.step(closure=closure_of(model, fish, batch))
            assert torch.equal(loss, inner.step(closure_of(plain, inner, batch)))
        with torch.no_grad():
            for p, slow in zip(plain.parameters(), start, strict=True):
                p.copy_(torch.lerp(slow, p, 0.5))
        assert same(model, plain)


# θ within an inner loop


def test_slow_weights_shows_theta_and_puts_the_inner_weights_back():
    model, batches = make_model(), make_batches(6)
    plain = copy.deepcopy(model)
    fish = Fish(Adam(model.parameters(), 0.1), 3)
    train(model, fish, batches[:3])
    theta = weights(model)
    with fish.slow_weights():
        assert same(model, theta)  # between inner loops they are the weights
    train(model, fish, batches[3:5])
    fast = weights(model)
    with contextlib.suppress(ZeroDivisionError), fish.slow_weights():
        assert same(model, theta)
        with pytest.raises(RuntimeError, match=r"step\(\) was called inside slow_weights\(\)"):
            fish.step()
        with pytest.raises(RuntimeError, match=r"state_dict\(\) was called inside slow_weights\(\)"):
            fish.state_dict()  # beside a model that holds θ it would go on from the wrong place
        raise ZeroDivisionError
    assert same(model, fast)
    assert not same(theta, fast)
    assert fish.position == 2
    train(model, fish, batches[5:])
    train(plain, Fish(Adam(plain.parameters(), 0.1), 3), batches)
    assert same(model, plain)


def test_hooks_fire_once_a_step():
    model, seen = make_model(), []
    fish = Fish(SGD(model.parameters(), 0.1), 2)
    fish.register_step_pre_hook(lambda optimizer, *_: seen.append(("before", optimizer.position)))
    handle = fish.register_step_post_hook(lambda optimizer, *_: seen.append(("after", optimizer.position)))
    fish.inner.register_step_post_hook(lambda *_: seen.append("inner"))
    train(model, fish, make_batches(2))
    assert seen == [("before", 0), "inner", ("after", 1), ("before", 1), "inner", ("after", 0)]
    handle.remove()
    train(model, fish, make_batches(1))
    assert seen[6:] == [("before", 0), "inner"]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"inner": bad} for bad in ("adam", SGD, Fish(SGD([nn.Parameter(torch.zeros(1))], 0.1), 2))),
        *({"inner_steps": bad} for bad in (0, 1.5, True, "3", None)),
        *({"meta_lr": bad} for bad in (0, 1.5, float("nan"))),
        {"inner_state": "cary"},
    ],
)
def test_wrong_settings_are_refused(wrong):
    right = {"inner": SGD([nn.Parameter(torch.zeros(1))], 0.1), "inner_steps": 2}
    with pytest.raises(InputError, match=f"{next(iter(wrong))} (of Fish )?must"):
        Fish(**right | wrong)
