"""Fish against a Fish that copies the model, to the last bit."""

from __future__ import annotations

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
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from references.naive import CopyingFish
from shoal.errors import InputError
from shoal.optim import Fish, can_skip, copy_where, step_unless

OPTIMIZERS = {
    "sgd": lambda p, **k: SGD(p, 0.1, weight_decay=0.01, **k),
    "momentum": lambda p, **k: SGD(p, 0.05, momentum=0.9, dampening=0.3, **k),
    "nesterov": lambda p, **k: SGD(p, 0.05, momentum=0.9, nesterov=True, **k),
    "adam": lambda p, **k: Adam(p, 0.01, **k),
    "amsgrad": lambda p, **k: Adam(p, 0.01, amsgrad=True, **k),
    "adamw": lambda p, **k: AdamW(p, 0.01, weight_decay=0.1, **k),
    "adagrad": lambda p, **k: Adagrad(p, 0.05, initial_accumulator_value=0.1, **k),
    "rmsprop": lambda p, **k: RMSprop(p, 0.01, momentum=0.5, centered=True, **k),
}


class Eager(SGD):
    """Fills its state when it is made, as Adagrad does in some versions of torch."""

    def __init__(self, params, **settings):
        super().__init__(params, 0.1, momentum=0.9, **settings)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["momentum_buffer"] = torch.full_like(p, 0.25)


OPTIMIZERS["eager"] = Eager
STATES = pytest.mark.parametrize("inner_state", ["carry", "reset"])


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def make_batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(6, 3, generator=generator), torch.randn(6, 2, generator=generator) + i)
        for i in range(count)
    ]


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


def walks(batches, steps):
    return [batches[i : i + steps] for i in range(0, len(batches), steps)]


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# The walk


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@STATES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_a_fish_that_copies_the_model(name, inner_state, foreach):
    make = lambda params: OPTIMIZERS[name](params, foreach=foreach)  # noqa: E731
    model, batches = make_model(), make_batches(12)
    reference = CopyingFish(copy.deepcopy(model), make, 0.3, inner_state)
    fish = Fish(make(model.parameters()), inner_steps=3, meta_lr=0.3, inner_state=inner_state)
    start = weights(model)
    for walk in walks(batches, 3):
        train(model, fish, walk)
        reference.walk(walk, loss_of)
        assert same(model, reference.model)
    assert not same(model, start)


def test_carry_and_reset_differ():
    ends = []
    for inner_state in ("carry", "reset"):
        model = make_model()
        train(model, Fish(Adam(model.parameters(), 0.01), 2, inner_state=inner_state), make_batches(4))
        ends.append(weights(model))
    assert not same(*ends)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_meta_lr_one_is_the_inner_optimizer(name):
    model, batches = make_model(), make_batches(7)
    plain = copy.deepcopy(model)
    train(model, Fish(OPTIMIZERS[name](model.parameters()), inner_steps=3, meta_lr=1), batches)
    train(plain, OPTIMIZERS[name](plain.parameters()), batches)
    assert same(model, plain)


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4),
    inner_steps=st.integers(1, 5),
    meta_lr=st.floats(1e-3, 1),
    rounds=st.integers(1, 4),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    inner_state=st.sampled_from(["carry", "reset"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_shapes_steps_and_rates(shapes, inner_steps, meta_lr, rounds, name, inner_state, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    model = nn.ParameterList([torch.randn(s, generator=generator).to(dtype) for s in shapes])
    targets = torch.randn(rounds * inner_steps, generator=generator).tolist()
    distance = lambda params, target: sum(((p - target) ** 2).sum() for p in params)  # noqa: E731
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS[name], meta_lr, inner_state)
    fish = Fish(OPTIMIZERS[name](model.parameters()), inner_steps, meta_lr, inner_state)
    for walk in walks(targets, inner_steps):
        for target in walk:
            fish.zero_grad()
            distance(model, target).backward()
            fish.step()
        reference.walk(walk, distance)
    assert same(model, reference.model)


def test_several_groups_with_their_own_rates():
    def make(params):
        params = list(params)
        return SGD([{"params": params[:2], "lr": 0.2}, {"params": params[2:], "momentum": 0.9}], lr=0.01)

    model, batches = make_model(), make_batches(6)
    reference = CopyingFish(copy.deepcopy(model), make, 0.5)
    fish = Fish(make(model.parameters()), 3)
    assert [g["lr"] for g in fish.param_groups] == [0.2, 0.01]
    train(model, fish, batches)
    for walk in walks(batches, 3):
        reference.walk(walk, loss_of)
    assert same(model, reference.model)


def test_the_extra_memory_is_one_copy_of_the_trained_weights():
    model = make_model()
    model[0].bias.requires_grad_(False)
    fish = Fish(Adam(model.parameters(), 0.01), 2)
    train(model, fish, make_batches(5))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(e["slow"].numel() for e in fish.state.values() if "slow" in e) == trained
    stores = [e["slow"].data_ptr() for e in fish.state.values()]
    train(model, fish, make_batches(4))
    assert [e["slow"].data_ptr() for e in fish.state.values()] == stores  # the same memory from walk to walk


def test_weights_changed_from_outside_between_walks_are_where_the_next_starts():
    model, batches = make_model(), make_batches(6)
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS["adam"], 0.5)
    fish = Fish(OPTIMIZERS["adam"](model.parameters()), 3)
    other = make_model(seed=9).state_dict()
    train(model, fish, batches[:3])
    reference.walk(batches[:3], loss_of)
    model.load_state_dict(other)
    reference.model.load_state_dict(other)
    train(model, fish, batches[3:])
    reference.walk(batches[3:], loss_of)
    assert same(model, reference.model)


def test_gradient_clipping():
    model, batches = make_model(), make_batches(6)
    clip = lambda model, _=None: nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # noqa: E731
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS["adam"], 0.5)
    fish = Fish(OPTIMIZERS["adam"](model.parameters()), 3)
    for walk in walks(batches, 3):
        for batch in walk:
            fish.zero_grad()
            loss_of(model, batch).backward()
            assert clip(model) > 0.5  # it does clip
            fish.step()
        reference.walk(walk, loss_of, before_step=clip)
    assert same(model, reference.model)


# Frozen, thawed and added parameters


@pytest.mark.parametrize("meta_lr", [0.1, 0.5, 0.9])
def test_frozen_parameters_stay_to_the_bit(meta_lr):
    model = make_model()
    model[0].weight.requires_grad_(False)
    unreached = nn.Parameter(torch.randn(7))
    before = model[0].weight.clone(), unreached.detach().clone(), model[2].weight.detach().clone()
    fish = Fish(AdamW([*model.parameters(), unreached], 0.1, weight_decay=0.5), 2, meta_lr)
    train(model, fish, make_batches(7))
    assert torch.equal(model[0].weight, before[0])
    assert torch.equal(unreached, before[1])
    assert unreached.grad is None
    assert not torch.equal(model[2].weight, before[2])


def test_a_wholly_frozen_model_stands_still():
    model = make_model().requires_grad_(False)
    before = weights(model)
    fish = Fish(SGD(model.parameters(), 0.1), 3)
    for _ in range(4):
        fish.step()
    with fish.slow_weights():
        assert same(model, before)
    assert fish.position == 1
    assert same(model, before)


def thaw(model, fish):
    model[0].weight.requires_grad_(True)


def add(model, fish):
    model[0].weight.requires_grad_(True)
    fish.add_param_group({"params": [model[0].weight], "lr": 0.05})


@pytest.mark.parametrize("join", [thaw, add])
def test_parameters_that_come_in_mid_walk_join_at_the_next(join):
    """Until then the inner optimizer moves them, and no blend takes that back."""
    model, batches = make_model(), make_batches(7)
    newcomer = model[0].weight.requires_grad_(False)
    others = [p for p in model.parameters() if p is not newcomer]
    plain = copy.deepcopy(model)
    fish = Fish(SGD([*others, newcomer] if join is thaw else others, 0.1), 3)
    train(model, fish, batches[:1])
    join(model, fish)
    assert sum("slow" in entry for entry in fish.state.values()) == 3
    # The reference: the same three inner steps without a blend.
    train(plain, SGD(plain.parameters(), 0.1), batches[:1])
    rate = 0.1 if join is thaw else 0.05
    plain[0].weight.requires_grad_(True)
    rest = [p for p in plain.parameters() if p is not plain[0].weight]
    train(plain, SGD([{"params": rest}, {"params": [plain[0].weight], "lr": rate}], 0.1), batches[1:3])

    train(model, fish, batches[1:3])
    assert torch.equal(newcomer, plain[0].weight)
    assert not torch.equal(model[2].weight, plain[2].weight)

    start = newcomer.detach().clone()
    train(model, fish, batches[3:5])
    assert sum("slow" in entry for entry in fish.state.values()) == 4
    with fish.slow_weights():
        assert torch.equal(newcomer, start)
    fish.zero_grad()
    loss_of(model, batches[5]).backward()
    walked = newcomer.detach() - rate * newcomer.grad
    fish.step()
    torch.testing.assert_close(newcomer.detach(), start.lerp(walked, 0.5))


# Learning-rate schedulers


SCHEDULERS = {
    "step": lambda o: StepLR(o, 2, gamma=0.5),
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "lambda": lambda o: LambdaLR(o, lambda k: 1 / (k + 1)),
    "onecycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=12),
}


@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_on_fish(name, optimizer):
    """On Fish they set the inner rates as they would without it (OneCycleLR momentum and betas too)."""
    model, batches = make_model(), make_batches(9)
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS[optimizer], 0.5)
    fish = Fish(OPTIMIZERS[optimizer](model.parameters()), 3)
    scheduler = SCHEDULERS[name](fish)
    # A scheduler's settings per step, recorded on an optimizer that trains nothing.
    other = OPTIMIZERS[optimizer]([nn.Parameter(torch.zeros(1))])
    plan, planner = [], SCHEDULERS[name](other)
    for _ in batches:
        plan.append({k: v for k, v in other.param_groups[0].items() if k in ("lr", "momentum", "betas")})
        other.step()
        planner.step()
    plan = iter(plan)
    for walk in walks(batches, 3):
        for batch in walk:
            train(model, fish, [batch])
            scheduler.step()
        reference.walk(walk, loss_of, before_step=lambda _, o: o.param_groups[0].update(next(plan)))
        assert same(model, reference.model)


def test_reduce_on_plateau():
    model = make_model()
    fish = Fish(SGD(model.parameters(), 0.1), 2)
    scheduler = ReduceLROnPlateau(fish, factor=0.5, patience=0)
    for value in (1.0, 1.0, 0.5, 0.5):
        train(model, fish, make_batches(1))
        scheduler.step(value)
    assert fish.inner.param_groups[0]["lr"] == pytest.approx(0.025)


# Saving and going on


@STATES
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("saved_after", [3, 4, 5])  # between walks and at both places within one
def test_goes_on_to_the_bit_from_a_file(name, inner_state, saved_after):
    model, batches = make_model(), make_batches(10)
    fish = Fish(OPTIMIZERS[name](model.parameters()), 3, 0.3, inner_state)
    train(model, fish, batches[:saved_after])
    saved = through_file({"model": model.state_dict(), "fish": fish.state_dict()})
    train(model, fish, batches[saved_after:])

    resumed = make_model(seed=5)
    other = Fish(OPTIMIZERS[name](resumed.parameters()), 3, 0.7)  # meta_lr and inner_state come from the file
    train(resumed, other, make_batches(4, seed=2))  # what it did before must not matter
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["fish"])
    assert (other.position, other.meta_lr, other.inner_state) == (saved_after % 3, 0.3, inner_state)
    with other.slow_weights():
        theta = weights(resumed)
    train(resumed, other, batches[saved_after:])
    assert same(model, resumed)
    assert not same(theta, resumed)
    reference = CopyingFish(make_model(), OPTIMIZERS[name], 0.3, inner_state)
    for walk in walks(batches[:9], 3):
        reference.walk(walk, loss_of)
    with other.slow_weights():
        assert same(resumed, reference.model)


def test_training_does_not_change_a_state_that_was_loaded():
    model = make_model()
    fish = Fish(SGD(model.parameters(), 0.1), 2)
    train(model, fish, make_batches(1))
    state = through_file(fish.state_dict())
    before = copy.deepcopy(state)
    other = make_model()
    loaded = Fish(SGD(other.parameters(), 0.1), 2)
    for _ in range(2):
        loaded.load_state_dict(state)
        train(other, loaded, make_batches(2))
        torch.testing.assert_close(state["state"], before["state"], rtol=0, atol=0)
        assert state["param_groups"] == before["param_groups"]


def test_a_saved_state_keeps_its_slow_weights_when_training_goes_on():
    model = make_model()
    fish = Fish(Adam(model.parameters(), 0.1), 3)
    train(model, fish, make_batches(1))
    assert len(fish.state) == 4
    state = fish.state_dict()
    train(model, fish, make_batches(1))
    assert all("slow" in entry for entry in state["state"].values())


def test_scheduler_and_fish_resume_together():
    def start(seed):
        model = make_model(seed)
        fish = Fish(Adam(model.parameters(), 0.1), 3)
        return model, fish, CosineAnnealingLR(fish, 10)

    def run(model, fish, scheduler, batches):
        for batch in batches:
            train(model, fish, [batch])
            scheduler.step()

    batches = make_batches(8)
    model, *rest = start(0)
    run(model, *rest, batches[:4])
    saved = through_file([model.state_dict(), *(r.state_dict() for r in rest)])
    run(model, *rest, batches[4:])
    resumed = start(1)
    for thing, state in zip(resumed, saved, strict=True):
        thing.load_state_dict(state)
    run(*resumed, batches[4:])
    assert same(model, resumed[0])


def test_a_plain_state_of_the_inner_optimizer_begins_a_walk():
    batches = make_batches(9)
    model = make_model()
    plain = Adam(model.parameters(), 0.01)
    train(model, plain, batches[:3])
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS["adam"], 0.5)
    reference.saved = copy.deepcopy(plain.state_dict())
    fish = Fish(Adam(model.parameters(), 0.5), 3)
    train(model, fish, batches[:1])
    model.load_state_dict(reference.model.state_dict())
    fish.load_state_dict(through_file(plain.state_dict()))
    assert fish.position == 0
    for walk in walks(batches[3:], 3):
        train(model, fish, walk)
        reference.walk(walk, loss_of)
    assert same(model, reference.model)


@pytest.mark.parametrize("saved_after", [2, 3])
def test_settings_come_from_the_state_as_lr_does(saved_after):
    model, batches = make_model(), make_batches(8)
    fish = Fish(SGD(model.parameters(), 0.1, momentum=0.9), 3, 0.3, "reset")
    train(model, fish, batches[:saved_after])
    resumed = copy.deepcopy(model)
    other = Fish(SGD(resumed.parameters(), 0.5, momentum=0.9), 4, 0.6)
    other.load_state_dict(through_file(fish.state_dict()))
    assert (other.inner_steps, other.meta_lr, other.inner_state) == (3, 0.3, "reset")
    assert other.param_groups[0]["lr"] == 0.1
    assert other.position == saved_after % 3
    train(model, fish, batches[saved_after:])
    train(resumed, other, batches[saved_after:])
    assert same(model, resumed)


def test_settings_can_be_changed_between_walks():
    model, batches = make_model(), make_batches(5)
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS["adam"], 0.5)
    fish = Fish(OPTIMIZERS["adam"](model.parameters()), 2)
    train(model, fish, batches[:2])
    reference.walk(batches[:2], loss_of)
    fish.inner_steps, fish.meta_lr, reference.meta_lr = 3, 0.2, 0.2
    train(model, fish, batches[2:])
    reference.walk(batches[2:], loss_of)
    assert same(model, reference.model)


def test_a_walk_without_its_start_is_refused_and_nothing_loaded():
    model = make_model()
    fish = Fish(SGD(model.parameters(), 0.1), 3)
    train(model, fish, make_batches(2))
    other = Fish(SGD(make_model().parameters(), 0.5), 4)
    with pytest.raises(InputError, match=r"2 steps into an inner loop of 3, and .*state\[p\]\['slow'\]"):
        other.load_state_dict({**fish.state_dict(), "state": {}})
    assert other.param_groups[0]["lr"] == 0.5
    assert (other.position, other.inner_steps) == (0, 4)


@pytest.mark.parametrize("position", [0, 2])
def test_a_state_of_an_earlier_version_is_refused_and_nothing_loaded(position):
    model = make_model()
    fish = Fish(SGD(model.parameters(), 0.5), 3)
    old = SGD(make_model().parameters(), 0.1).state_dict()
    with pytest.raises(InputError, match=r"Shoal 0\.2 or earlier"):
        fish.load_state_dict({**old, "fish": {"position": position, "slow": {}}})
    assert fish.param_groups[0]["lr"] == 0.5


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


# Loss scaling


def scaled_training(model, fish, scaler, batches, unscale, poisoned=()):
    for n, batch in enumerate(batches):
        fish.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if n in poisoned:
            next(model.parameters()).grad.view(-1)[0] = float("inf")
        if unscale:
            scaler.unscale_(fish)
        scaler.step(fish)
        scaler.update()


@pytest.mark.parametrize("unscale", [False, True], ids=["by step", "by unscale_"])
@STATES
@pytest.mark.parametrize("poisoned", [(), (0,), (1,), (2,), (3, 4, 5)], ids=str)
def test_loss_scaler(poisoned, inner_state, unscale):
    """Scales are powers of two, so unscaled gradients are the same to the bit. A skipped step counts."""
    model, batches = make_model(), make_batches(9)
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS["adam"], 0.5, inner_state)
    fish = Fish(OPTIMIZERS["adam"](model.parameters()), 3, 0.5, inner_state)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled_training(model, fish, scaler, batches, unscale, poisoned)
    for walk in walks([None if n in poisoned else b for n, b in enumerate(batches)], 3):
        reference.walk(walk, loss_of)
    assert same(model, reference.model)
    assert fish.position == 0
    assert scaler.get_scale() == 2.0 ** (10 - len(poisoned))
    assert not {"grad_scale", "found_inf"} & set(vars(fish))


@pytest.mark.parametrize("unscale", [False, True], ids=["by step", "by unscale_"])
def test_gradients_after_a_scaled_step_are_unscaled(unscale):
    model, [batch] = make_model(), make_batches(1)
    expected = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
    fish = Fish(SGD(model.parameters(), 0.1), 3)
    scaled_training(model, fish, torch.amp.GradScaler("cpu", init_scale=3000.0), [batch], unscale)
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_a_disabled_scaler_changes_nothing():
    model, batches = make_model(), make_batches(4)
    plain = copy.deepcopy(model)
    fish = Fish(SGD(model.parameters(), 0.1), 2)
    scaled_training(model, fish, torch.amp.GradScaler("cpu", enabled=False), batches, True)
    train(plain, Fish(SGD(plain.parameters(), 0.1), 2), batches)
    assert same(model, plain)


# Walks and steps that are to leave no mark


@pytest.mark.parametrize("at", [0, 1, 2])
@STATES
def test_a_spoilt_walk_leads_nowhere_and_the_next_one_is_a_walk(inner_state, at):
    model, batches = make_model(), make_batches(9)
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS["sgd"], 0.5, inner_state)
    fish = Fish(OPTIMIZERS["sgd"](model.parameters()), 3, 0.5, inner_state)
    train(model, fish, batches[:3])
    before = weights(model)
    for n, batch in enumerate(batches[3:6]):
        fish.spoil(torch.tensor(n == at))
        train(model, fish, [batch])
    assert same(model, before)
    assert fish.position == 0
    train(model, fish, batches[6:])
    for walk in (batches[:3], batches[6:]):
        reference.walk(walk, loss_of)
    assert same(model, reference.model)


def test_a_spoilt_walk_is_one_after_a_file_too():
    model, batches = make_model(), make_batches(3)
    start = weights(model)
    fish = Fish(SGD(model.parameters(), 0.1), 3)
    fish.spoil(torch.tensor(True))
    train(model, fish, batches[:2])
    saved = through_file({"model": model.state_dict(), "fish": fish.state_dict()})
    resumed = make_model(seed=5)
    other = Fish(SGD(resumed.parameters(), 0.1), 3)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["fish"])
    train(resumed, other, batches[2:])
    assert same(resumed, start)
    train(resumed, other, batches)
    assert not same(resumed, start)


def test_a_walk_that_is_not_spoilt_is_one_after_all():
    model, batches = make_model(), make_batches(3)
    plain = copy.deepcopy(model)
    fish = Fish(SGD(model.parameters(), 0.1), 3)
    for batch in batches:
        fish.spoil(torch.tensor(False))
        train(model, fish, [batch])
    train(plain, Fish(SGD(plain.parameters(), 0.1), 3), batches)
    assert same(model, plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_unless(name):
    model, batches = make_model(), make_batches(4)
    plain = copy.deepcopy(model)
    optimizer, by_hand = (OPTIMIZERS[name](m.parameters()) for m in (model, plain))
    for n, batch in enumerate(batches):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        step_unless(optimizer, torch.tensor(n == 1))
        if n != 1:
            train(plain, by_hand, [batch])
    assert same(model, plain)
    state = optimizer.state_dict()["state"]
    torch.testing.assert_close(state, by_hand.state_dict()["state"], rtol=0, atol=0)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_step_of_a_walk_unless(bad):
    """It counts, so that a walk remains S batches."""
    model, batches = make_model(), make_batches(6)
    reference = CopyingFish(copy.deepcopy(model), OPTIMIZERS["adam"], 0.5)
    fish = Fish(OPTIMIZERS["adam"](model.parameters()), 3)
    for n, batch in enumerate(batches):
        fish.zero_grad()
        loss_of(model, batch).backward()
        step_unless(fish, torch.tensor(n == bad))
        assert not hasattr(fish, "found_inf")
    for walk in walks([None if n == bad else b for n, b in enumerate(batches)], 3):
        reference.walk(walk, loss_of)
    assert same(model, reference.model)


def test_which_optimizers_skip_on_the_device():
    params = list(make_model().parameters())
    assert can_skip(Adam(params, fused=True))
    assert can_skip(Fish(Adam(params, fused=True), 2))
    assert not can_skip(RMSprop(params))
    assert not can_skip(Fish(RMSprop(params), 2))


@pytest.mark.parametrize("condition", [True, False])
def test_copying_everything_or_nothing(condition):
    to, values = [torch.zeros(2), torch.zeros((), dtype=torch.int64)], [torch.ones(2), torch.tensor(3)]
    copy_where(torch.tensor(condition), to, values)
    assert torch.equal(to[0], torch.full((2,), float(condition)))
    assert int(to[1]) == 3 * condition
    copy_where(torch.tensor(True), [], [])


# Closures


def closure_of(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("as_keyword", [False, True])
def test_closures(as_keyword):
    model, batches = make_model(), make_batches(4)
    plain = copy.deepcopy(model)
    fish = Fish(Adam(model.parameters(), 0.01), 2)
    for batch in batches:
        expected = loss_of(model, batch)
        closure = closure_of(model, fish, batch)
        loss = fish.step(closure=closure) if as_keyword else fish.step(closure)
        assert torch.equal(loss, expected)
    train(plain, Fish(Adam(plain.parameters(), 0.01), 2), batches)
    assert same(model, plain)


class Plain(torch.optim.Optimizer):
    """Calls the closure as it finds things, as optimizers without ``enable_grad`` do."""

    def step(self, closure=None):
        loss = closure()
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                p -= 0.1 * p.grad
        return loss


def test_a_closure_has_gradients_whatever_the_inner_optimizer_does():
    model, batches = make_model(), make_batches(4)
    plain = copy.deepcopy(model)
    fish = Fish(Plain(model.parameters(), {}), 2)
    for batch in batches:
        fish.step(closure_of(model, fish, batch))
    train(plain, Fish(SGD(plain.parameters(), 0.1), 2), batches)
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=1e-7)


@STATES
def test_lbfgs_walks(inner_state):
    make = lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4)  # noqa: E731
    model, batches = make_model(), make_batches(6)
    plain = copy.deepcopy(model)
    fish = Fish(make(model.parameters()), 3, 0.5, inner_state)
    inner = make(plain.parameters())
    for walk in walks(batches, 3):
        start = weights(plain)
        if inner_state == "reset":
            inner = make(plain.parameters())
        for batch in walk:
            fish.step(closure_of(model, fish, batch))
            inner.step(closure_of(plain, inner, batch))
        with torch.no_grad():
            for p, slow in zip(plain.parameters(), start, strict=True):
                p.copy_(torch.lerp(slow, p, 0.5))
        assert same(model, plain)


def test_a_step_that_raises_does_not_count():
    model, batches = make_model(), make_batches(4)
    plain = copy.deepcopy(model)
    fish = Fish(SGD(model.parameters(), 0.1), 2)

    def broken():
        raise ZeroDivisionError

    for batch in batches:
        with pytest.raises(ZeroDivisionError):
            fish.step(broken)
        fish.step(closure_of(model, fish, batch))
    train(plain, Fish(SGD(plain.parameters(), 0.1), 2), batches)
    assert same(model, plain)


# Looking at θ in mid-walk


class Stop(Exception):
    pass


@pytest.mark.parametrize("raises", [False, True])
def test_slow_weights_shows_theta_and_puts_the_walk_back(raises):
    model, batches = make_model(), make_batches(6)
    plain = copy.deepcopy(model)
    fish = Fish(Adam(model.parameters(), 0.1), 3)
    train(model, fish, batches[:3])
    theta = weights(model)
    train(model, fish, batches[3:5])
    walked = weights(model)
    try:
        with fish.slow_weights():
            assert same(model, theta)
            with pytest.raises(RuntimeError, match=r"step\(\) was called inside slow_weights\(\)"):
                fish.step()
            with pytest.raises(RuntimeError, match=r"state_dict\(\) was called inside slow_weights\(\)"):
                fish.state_dict()  # beside a model that holds θ it would go on from the wrong place
            if raises:
                raise Stop
    except Stop:
        pass
    assert same(model, walked)
    assert not same(theta, walked)
    assert fish.position == 2
    train(model, fish, batches[5:])
    train(plain, Fish(Adam(plain.parameters(), 0.1), 3), batches)
    assert same(model, plain)


def test_slow_weights_within_slow_weights():
    model = make_model()
    theta = weights(model)
    fish = Fish(SGD(model.parameters(), 0.1), 3)
    train(model, fish, make_batches(1))
    walked = weights(model)
    with fish.slow_weights():
        with fish.slow_weights():
            assert same(model, theta)
        assert same(model, theta)
        with pytest.raises(RuntimeError, match="inside slow_weights"):
            fish.step()
    assert same(model, walked)


def test_slow_weights_between_walks_are_the_weights():
    model = make_model()
    fish = Fish(SGD(model.parameters(), 0.1), 2)
    before = weights(model)
    with fish.slow_weights():
        assert same(model, before)
    train(model, fish, make_batches(2))
    blended = weights(model)
    with fish.slow_weights():
        assert same(model, blended)
    assert same(model, blended)
    assert not same(blended, before)


# An optimizer like any other


def test_hooks_fire_once_a_step():
    model, seen = make_model(), []
    fish = Fish(SGD(model.parameters(), 0.1), 2)
    fish.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(("before", optimizer.position)))
    handle = fish.register_step_post_hook(
        lambda optimizer, args, kwargs: seen.append(("after", optimizer.position))
    )
    fish.inner.register_step_post_hook(lambda optimizer, args, kwargs: seen.append("inner"))
    train(model, fish, make_batches(2))
    assert seen == [("before", 0), "inner", ("after", 1), ("before", 1), "inner", ("after", 0)]
    handle.remove()
    train(model, fish, make_batches(1))
    assert seen[6:] == [("before", 0), "inner"]


def test_hooks_on_states_fire():
    model, seen = make_model(), []
    fish = Fish(SGD(model.parameters(), 0.1), 2)
    for whose, optimizer in (("inner", fish.inner), ("fish", fish)):
        note = lambda *_, whose=whose: seen.append(whose)  # noqa: E731
        optimizer.register_state_dict_pre_hook(note)
        optimizer.register_load_state_dict_post_hook(note)
    fish.register_state_dict_post_hook(lambda optimizer, state: {**state, "extra": 1})
    assert fish.state_dict()["extra"] == 1
    assert seen == ["fish", "inner"]
    other = Fish(SGD(make_model().parameters(), 0.7), 3).state_dict()
    fish.register_load_state_dict_pre_hook(lambda optimizer, state: other)
    fish.load_state_dict(fish.state_dict())
    assert (fish.param_groups[0]["lr"], fish.inner_steps) == (0.7, 3)
    assert seen == ["fish", "inner"] * 2 + ["inner", "fish"]


class Curious(torch.optim.Optimizer):
    """Finds its state in ways that a key of another would upset."""

    def __init__(self, params, **_):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if p not in self.state:
                self.state[p] = {"sum": torch.zeros_like(p)}
            (total,) = self.state[p].values()
            p -= 0.1 * total.add_(p.grad)


OTHERS = {
    "curious": Curious,
    "adafactor": lambda p, **k: torch.optim.Adafactor(p, 0.1, **k),
    "adam, fused": lambda p, **_: Adam(p, 0.01, fused=True),
    "sgd, fused": lambda p, **_: SGD(p, 0.05, momentum=0.9, fused=True),
}
if hasattr(torch.optim, "Muon"):
    OTHERS["muon"] = lambda p, **_: torch.optim.Muon([q for q in p if q.ndim == 2], 0.1)


@STATES
@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHERS])
def test_looking_at_the_state_changes_nothing(name, inner_state):
    """The slow weights are in it, and the inner optimizer never meets them."""
    make = {**OPTIMIZERS, **OTHERS}[name]
    model, batches = make_model(), make_batches(8)
    model.unreached = nn.Parameter(torch.ones(2, 2))  # an optimizer keeps nothing for it
    reference = CopyingFish(copy.deepcopy(model), make, 0.3, inner_state)
    fish = Fish(make(model.parameters()), 2, 0.3, inner_state)
    trained = [p for group in fish.param_groups for p in group["params"]]
    for walk in walks(batches, 2):
        theta = [p.detach().clone() for p in trained]
        for batch in walk:
            train(model, fish, [batch])
            # At a walk's end both are the new θ.
            expected = theta if fish.position else trained
            assert same([fish.state[p]["slow"] for p in trained], expected)
        reference.walk(walk, loss_of)
        assert same(model, reference.model)
        copy.deepcopy(fish)
        pickle.dumps(fish)


def test_a_state_that_is_written_from_outside_counts():
    """As trainers do that move it to another device."""
    model, batches = make_model(), make_batches(3)
    fish = Fish(Adam(model.parameters(), 0.1), 3)
    train(model, fish, batches[:2])
    for p, entry in fish.state.items():
        fish.state[p] = {k: v.clone() + (k == "slow") for k, v in entry.items()}
    with fish.slow_weights():
        start = weights(model)
    train(model, fish, batches[2:])
    plain = make_model()
    train(plain, Adam(plain.parameters(), 0.1), batches)
    expected = [s.lerp(p, 0.5) for s, p in zip(start, plain.parameters(), strict=True)]
    assert same(model, [p.detach() for p in expected])
    torch.testing.assert_close([s - 1 for s in start], weights(make_model()))


def test_a_group_added_in_mid_walk_is_saved_with_it():
    model, batches = make_model(), make_batches(7)
    first, last = model[0], model[2]

    def start(model):
        return Fish(Adam(model[0].parameters(), 0.01), 3)

    fish = start(model)
    train(model, fish, batches[:1])
    fish.add_param_group({"params": last.parameters(), "lr": 0.05})
    train(model, fish, batches[1:2])
    saved = through_file({"model": model.state_dict(), "fish": fish.state_dict()})
    train(model, fish, batches[2:])
    resumed = make_model(seed=5)
    other = start(resumed)
    other.add_param_group({"params": resumed[2].parameters()})
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["fish"])
    train(resumed, other, batches[2:])
    assert same(model, resumed)
    assert set(first.parameters()) < set(fish.state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("how", [{"fused": True}, {"capturable": True}, {"foreach": True}], ids=str)
def test_variants_on_cuda(how):
    model = make_model().double().cuda()
    plain = copy.deepcopy(model)
    batches = [(x.double().cuda(), y.double().cuda()) for x, y in make_batches(7)]
    train(model, Fish(AdamW(model.parameters(), 0.01, **how), 3), batches)
    train(plain, Fish(AdamW(plain.parameters(), 0.01, foreach=False), 3), batches)
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=1e-12)


def test_groups_state_and_defaults_are_the_inner_optimizers():
    model = make_model()
    inner = Adam(model.parameters(), 0.1, betas=(0.8, 0.9))
    fish = Fish(inner, 2)
    assert isinstance(fish, torch.optim.Optimizer)
    assert fish.param_groups is inner.param_groups
    assert fish.state is inner.state
    assert fish.defaults["betas"] == (0.8, 0.9)
    fish.param_groups[0]["lr"] = 0.3
    assert inner.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    model = make_model()
    fish = Fish(SGD(model.parameters(), 0.1), 2)
    loss_of(model, make_batches(1)[0]).backward()
    fish.zero_grad(set_to_none=set_to_none)
    assert all(p.grad is None if set_to_none else (p.grad == 0).all() for p in model.parameters())


def test_repr_shows_the_settings_and_the_inner_optimizer():
    text = repr(Fish(SGD([nn.Parameter(torch.zeros(1))], 0.125), 4, 0.25, "reset"))
    assert text.startswith("Fish(SGD (")
    assert "lr: 0.125" in text
    assert text.endswith("inner_steps=4, meta_lr=0.25, inner_state='reset')")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inner": "adam"}, "inner of Fish must be an Optimizer, got 'adam'"),
        ({"inner": SGD}, "inner of Fish must be an Optimizer, got <class"),
        (
            {"inner": Fish(SGD([nn.Parameter(torch.zeros(1))], 0.1), 2)},
            "inner of Fish must not be a Fish: pass the wrapped optimizer",
        ),
        *(
            ({"inner_steps": bad}, f"inner_steps of Fish must be a whole number of at least 1, got {bad!r}")
            for bad in (0, -2, 1.5, True, "3", None)
        ),
        *(
            ({"meta_lr": bad}, f"meta_lr of Fish must be a number above 0 and at most 1, got {bad}")
            for bad in (0, -1, 1.5, float("nan"), float("inf"))
        ),
        ({"inner_state": "cary"}, "inner_state of Fish must be 'carry' or 'reset', got 'cary'"),
    ],
    ids=lambda x: next(f"{k}={v!r}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_wrong_settings_are_refused(arguments, message):
    inner = SGD([nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(InputError) as refused:
        Fish(**{"inner": inner, "inner_steps": 2, **arguments})
    assert message in str(refused.value)
