"""Averages against means over a list of all weights; every state, also in mid-segment, goes on to the bit."""

import copy
import io
import math
import random
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn

import shoal
from references import swad as naive
from shoal.errors import InputError
from shoal.training.averaging import EMA, SMA, SWAD, applied, refresh_batchnorm
from training import finetuning

SHAPES = [(3, 2), (), (0, 4), (5,)]
NAN, INF = math.nan, math.inf


def path(steps, dtype=torch.float64, seed=0, shapes=SHAPES):
    """The weights after each step of a pretended training: ``path(9)[0]`` are those after step 1."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=generator).to(dtype) for s in shapes] for _ in range(steps)]


def mean_of(weights):
    return [torch.stack([w.double() for w in tensors]).mean(0) for tensors in zip(*weights, strict=True)]


def same(a, b):
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a, b, tolerance=1e-12):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def leaves(state):
    if isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from leaves(value)
    else:
        yield state


def drive(average, weights, losses, spacing, steps=None):
    """Feeds steps, and the next of the losses after every ``spacing`` of them."""
    for step in steps or range(1, len(weights) + 1):
        average.update(step, weights[step - 1])
        if step % spacing == 0:
            average.evaluated(step, losses[step // spacing - 1])


def by_naive_form(losses, lengths, settings):
    """(weight of every step, span, done) of SWAD by its definition, from all losses at once."""
    segments, done = naive.released(losses, *settings)
    shares = naive.step_weights(segments, lengths[: len(losses)])
    steps = [step for step, share in enumerate(shares, 1) if share]
    return shares, (steps[0], steps[-1]) if steps else None, done


def exponential(weights, decay):
    mean = [w.double() for w in weights[0]]
    for t, now in enumerate(weights[1:], 2):
        share = min(decay, (1 + t) / (10 + t))
        mean = [share * m + (1 - share) * w.double() for m, w in zip(mean, now, strict=True)]
    return mean


@pytest.mark.parametrize("start", [0, 1, 2, 7, 50, 51])
def test_sma_is_the_mean_from_its_start_on(start):
    weights, average = path(50), SMA(start)
    for step, now in enumerate(weights, 1):
        average.update(step, now)
        average.evaluated(step, None)
        if step < start:
            assert average.weights() is None
            assert average.span is None
        else:
            close(average.weights(), mean_of(weights[max(start, 1) - 1 : step]))
            assert average.span == (max(start, 1), step)
    assert average.done is False


@pytest.mark.parametrize("decay", [0.1, 0.5, 0.9, 0.999])
def test_ema_is_the_formula(decay):
    weights, average = path(60), EMA(decay)
    for step, now in enumerate(weights, 1):
        average.update(step, now)
        close(average.weights(), exponential(weights[:step], decay), 1e-10)
        assert average.span == (1, step)


MAKERS = {"sma": lambda: SMA(1), "ema": lambda: EMA(0.9), "swad": lambda: SWAD(1, 1)}
every_average = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_averaged_in_single(dtype):
    weights = path(300, dtype)
    for average, expected in ((SMA(1), mean_of(weights)), (EMA(0.99), exponential(weights, 0.99))):
        drive(average, weights, [], 1000)
        assert {w.dtype for w in average.weights()} == {torch.float32}
        close(average.weights(), expected, 1e-5)


@every_average
def test_the_mean_of_one_step_is_its_weights_to_the_bit(make):
    [weights], average = path(1, torch.float32), make()
    drive(average, [weights], [1.0], 1)
    assert same(average.weights(), weights)


@every_average
def test_update_never_reads_a_value(make):
    """On the meta device there are none to read."""
    average = make()
    params = [nn.Parameter(torch.empty(4, device="meta")), torch.empty(3, device="meta", dtype=torch.float16)]
    for step in range(1, 12):
        average.update(step, params)
        average.evaluated(step, 1.0)
    assert [w.device.type for w in average.weights()] == ["meta", "meta"]


@every_average
def test_a_wholly_frozen_model_has_an_empty_mean(make):
    average = make()
    drive(average, [[]] * 5, [1.0] * 5, 1)
    assert average.weights() == []


# SWAD


LOSSES = st.one_of(st.integers(0, 40).map(lambda n: n / 8), st.sampled_from([NAN, INF, -INF]))
SETTINGS = {
    "losses": st.lists(LOSSES, max_size=18),
    "spacing": st.integers(1, 4),
    "extra": st.integers(0, 3),
    "converge": st.integers(1, 4),
    "tolerate": st.integers(1, 4),
    "ratio": st.sampled_from([0.5, 1.0, 1.1, 1.3, 2.0]),
}


@given(**SETTINGS)
@example([3, 2, 1, 2, 2, 1, 9, 9, 1, 9, 9, 9, 1, 1], 2, 1, 3, 3, 1.3)
@example([NAN, 1, INF, 1, -INF, NAN, NAN, 1], 1, 0, 2, 3, 1.0)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_swad_is_at_every_step_what_its_definition_says(losses, spacing, extra, converge, tolerate, ratio):
    weights = path(len(losses) * spacing + min(extra, spacing - 1))
    average = SWAD(converge, tolerate, ratio)
    over = False
    for step, now in enumerate(weights, 1):
        average.update(step, now)
        if step % spacing == 0:
            average.evaluated(step, losses[step // spacing - 1])
        known = losses[: step // spacing]
        shares, span, done = by_naive_form(known, [spacing] * len(known), (converge, tolerate, ratio))
        assert (average.span, average.done) == (span, done)
        assert average.started == (naive.start_of(known, converge, ratio)[0] is not None)
        if span is None:
            assert average.weights() is None
        else:
            pairs = [zip(shares, tensors, strict=False) for tensors in zip(*weights, strict=True)]
            close(average.weights(), [sum(share * w for share, w in pair) for pair in pairs])
        assert done or not over
        over = done


def units(count):
    """Weights that are the step's unit vector, so that a mean shows how much each step counts in it."""
    return [[row] for row in torch.eye(count, dtype=torch.float64)]


@pytest.mark.parametrize("usual", [True, False], ids=["default settings", "random settings"])
def test_swad_weighs_the_steps_of_a_thousand_trainings_as_the_naive_form_does(usual):
    draw, kinds = random.Random(1), set()
    for kind, losses in naive.sequences(1020):
        settings = (3, 6, 1.3)
        if not usual:
            settings = draw.randint(1, 5), draw.randint(1, 8), draw.choice([0.5, 1.0, 1.1, 1.3, 2.0])
        lengths = [draw.randint(1, 3) for _ in losses]
        average, weights, step = SWAD(*settings), units(sum(lengths)), 0
        for loss, length in zip(losses, lengths, strict=True):
            for _ in range(length):
                step += 1
                average.update(step, weights[step - 1])
            average.evaluated(step, loss)
        shares, span, done = by_naive_form(losses, lengths, settings)
        assert (average.span, average.done) == (span, done)
        [found] = average.weights()
        assert float((found - torch.tensor(shares, dtype=torch.float64)).abs().max()) < 1e-12
        kinds |= {(kind, average.started, done)}
    assert {(kind, True, True) for kind in ("valley", "noisy", "rising", "broken")} <= kinds
    assert ("falling", False, False) in kinds


@pytest.mark.parametrize(
    ("losses", "segments"),
    [
        ([5, 4, 3, 2, 1], [4]),  # no start: the last segment
        ([3, 2, 1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 2, 3]),  # limit 2.6: segment 0 is over it, then 4 to 9
        ([2.2, 2.1, 2.0, 1.9, 1.8, 1.7, 1.7, 1.7], [3, 4, 5, 3, 4, 5, 6, 7]),  # from two before the start on
        ([9.2, 9.1, 9, 1, 2, 2, 2, 9], [3, 4, 5, 6]),  # the last is over the limit; 3 was the substitute
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 1]),  # limit 2.6, from the first segment on
    ],
    ids=str,
)
def test_the_released_rule_by_hand(losses, segments):
    average = SWAD()
    drive(average, units(len(losses)), losses, 1)
    [found] = average.weights()
    expected = [segments.count(i) / len(segments) for i in range(len(losses))]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_evaluations_without_a_step_in_between_do_not_count():
    weights, average, plain = path(12), SWAD(2, 2), SWAD(2, 2)
    losses = [3.0, 1.0, 2.0, 9.0, 1.0, 9.0]
    average.evaluated(0, 0.0)
    for step, now in enumerate(weights, 1):
        average.update(step, now)
        if step % 2 == 0:
            average.evaluated(step, losses[step // 2 - 1])
            average.evaluated(step, 0.0)
    drive(plain, weights, losses, 2)
    assert (average.span, average.limit, average.done) == (plain.span, plain.limit, plain.done)
    assert same(average.weights(), plain.weights())


def test_swad_keeps_few_copies():
    most = 0
    for _, losses in naive.sequences(60):
        average = SWAD()
        for step, (now, loss) in enumerate(zip(path(len(losses)), losses, strict=True), 1):
            average.update(step, now)
            most = max(most, len(average._means()))
            average.evaluated(step, loss)
    assert most == max(average.converge, average.tolerate) + 2


def test_swad_refuses_to_go_without_validation():
    with pytest.raises(InputError, match="validation"):
        SWAD(1).evaluated(0, None)


# Saving and going on


@given(
    **SETTINGS,
    cut=st.integers(0, 1000),
    before_evaluation=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    give_params=st.booleans(),
    kind=st.sampled_from(["sma", "ema", "swad"]),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_goes_on_to_the_bit_from_a_file(
    losses, spacing, extra, converge, tolerate, ratio, cut, before_evaluation, dtype, give_params, kind
):
    weights = path(len(losses) * spacing + min(extra, spacing - 1), dtype)
    make = {
        "sma": lambda: SMA(converge * spacing),
        "ema": lambda: EMA(0.9),
        "swad": lambda: SWAD(converge, tolerate, ratio),
    }[kind]
    straight, average = make(), make()
    cut %= len(weights) + 1
    drive(straight, weights, losses, spacing)

    def pass_on(old, params):
        state = old.state_dict()
        assert all(x is None or isinstance(x, torch.Tensor | int | float | str) for x in leaves(state))
        new = make()
        drive(new, path(5, seed=9), [1.0] * 5, 1)  # what it did before must not matter
        new.load_state_dict(through_file(state), params if give_params else None)
        assert (new.span, new.done) == (old.span, old.done)
        assert kind != "swad" or new.limit == old.limit
        return new

    if cut == 0:
        average = pass_on(average, None)
    for step, now in enumerate(weights, 1):
        average.update(step, now)
        if step == cut and before_evaluation:
            average = pass_on(average, now)
        if step % spacing == 0:
            average.evaluated(step, losses[step // spacing - 1])
        if step == cut and not before_evaluation:
            average = pass_on(average, now)
    assert (average.span, average.done) == (straight.span, straight.done)
    assert (average.weights() is None) == (straight.weights() is None)
    assert same(average.weights() or [], straight.weights() or [])


@pytest.mark.parametrize("other", [SMA(2), EMA(), SWAD(3), SWAD(2, 6, 1.5)], ids=lambda a: str(vars(a)))
@pytest.mark.parametrize("saved", [SMA(1), EMA(0.5), SWAD(2)], ids=["sma", "ema", "swad"])
def test_a_state_with_other_settings_is_refused(saved, other):
    with pytest.raises(InputError, match="settings"):
        other.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("shapes", [SHAPES[1:], [(3, 2), (), (0, 4), (1,)]], ids=str)
def test_a_state_of_another_model_is_refused(shapes):
    average, other = SMA(1), SMA(1)
    average.update(1, path(1, shapes=shapes)[0])
    with pytest.raises(InputError, match=f"they are {len(shapes)} tensors, the model trains 4"):
        other.load_state_dict(average.state_dict(), path(1)[0])
    other.load_state_dict(average.state_dict())
    with pytest.raises(InputError, match="do not fit"):
        other.update(2, path(1)[0])


# Applying


class Stop(Exception):
    pass


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_applied_shows_the_weights_and_puts_back_every_bit(dtype, raises):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to(dtype)
    params = list(model.parameters())
    with torch.no_grad():
        params[0][0, 0], params[0][0, 1], params[1][0] = NAN, -0.0, INF
    bits = [p.detach().clone().view(torch.uint8) for p in params]
    weights = [torch.randn(p.shape) for p in params]
    try:
        with applied(params, weights):
            assert all(torch.equal(p, w.to(dtype)) for p, w in zip(params, weights, strict=True))
            with torch.no_grad():
                params[0].add_(1)  # whatever happens inside
            if raises:
                raise Stop
    except Stop:
        pass
    assert all(torch.equal(p.detach().view(torch.uint8), b) for p, b in zip(params, bits, strict=True))
    assert all(p.requires_grad and p.is_leaf for p in params)


@pytest.mark.parametrize("shapes", [SHAPES[1:], [(1, 2), (), (0, 4), (5,)]], ids=str)
def test_weights_of_another_model_are_not_applied(shapes):
    params = path(1)[0]
    before = [p.clone() for p in params]
    with pytest.raises(InputError, match="do not fit this model"), applied(params, path(1, shapes=shapes)[0]):
        pass
    assert same(params, before)


# BatchNorm


def inputs(count=4, sizes=(6, 3), features=3):
    generator = torch.Generator().manual_seed(0)
    return [2 * torch.randn(sizes[i % 2], features, generator=generator) + i for i in range(count)]


def network(**settings):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5, **settings), nn.Tanh(), nn.Linear(5, 4), nn.BatchNorm1d(4)
    )


def statistics(layer):
    return {n: b.clone() for n, b in layer.named_buffers()}


def assert_same_statistics(a, b):
    torch.testing.assert_close(dict(a), dict(b), rtol=0, atol=0)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_refresh_equals_torchs_update_bn(momentum):
    model = network(momentum=momentum)
    for x in inputs(3):
        model(x)
    reference = copy.deepcopy(model)
    weights = [p.detach().clone() for p in model.parameters()]
    update_bn(inputs(), reference)
    refresh_batchnorm(model, iter(inputs()))
    assert_same_statistics(model.state_dict(), reference.state_dict())
    assert model[1].num_batches_tracked == 4
    assert (model[1].momentum, model[4].momentum) == (momentum, 0.1)
    assert all(m.training for m in model.modules())
    assert same(list(model.parameters()), weights)
    model(inputs()[0]).sum().backward()  # gradients are on again
    assert model[0].weight.grad is not None


def test_frozen_layers_stay_as_they_are():
    model = network()
    for x in inputs(3):
        model(x)
    model[1].eval()
    before = statistics(model[1])
    reference = copy.deepcopy(model)
    refresh_batchnorm(model, inputs())
    assert_same_statistics(statistics(model[1]), before)
    assert [m.training for m in model] == [True, False, True, True, True]
    # Its statistics are also what it normalised with.
    update_bn([reference[:4](x).detach() for x in inputs()], reference[4])
    assert_same_statistics(statistics(model[4]), statistics(reference[4]))


def test_dropout_is_off_meanwhile():
    modes = []
    model = network()
    plain = copy.deepcopy(model)
    with_dropout = nn.Sequential(nn.Dropout(0.5), *model)
    with_dropout[0].register_forward_pre_hook(
        lambda m, _: modes.append((m.training, torch.is_grad_enabled()))
    )
    random = torch.get_rng_state()
    refresh_batchnorm(with_dropout, inputs())
    refresh_batchnorm(plain, inputs())
    assert_same_statistics(model.state_dict(), plain.state_dict())
    assert torch.equal(torch.get_rng_state(), random)
    assert modes == [(False, False)] * 4
    assert with_dropout[0].training


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 2),
        nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False)),
        nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval(),
        nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).eval()),
    ],
    ids=["none", "untracked", "evaluating", "frozen"],
)
def test_without_a_layer_to_refresh_the_batches_are_not_looked_at(model):
    def batches():
        raise AssertionError("looked at")
        yield

    before, modes = statistics(model), [m.training for m in model.modules()]
    refresh_batchnorm(model, batches())
    assert_same_statistics(statistics(model), before)
    assert [m.training for m in model.modules()] == modes


def failing_in_the_middle():
    yield from inputs(2)
    raise Stop


@pytest.mark.parametrize(
    ("batches", "error"),
    [
        (failing_in_the_middle, Stop),
        (lambda: [*inputs(2), torch.ones(4, 7)], RuntimeError),
        (list, InputError),
    ],
    ids=["batches", "model", "empty"],
)
def test_an_error_leaves_everything_as_it_was(batches, error):
    model = nn.Sequential(nn.Dropout(0.5), *network(momentum=0.3))
    for x in inputs(3):
        model(x)
    model[0].eval()
    before, modes = statistics(model), [m.training for m in model.modules()]
    with pytest.raises(error):
        refresh_batchnorm(model, batches())
    assert_same_statistics(statistics(model), before)
    assert [m.training for m in model.modules()] == modes
    assert (model[2].momentum, model[5].momentum) == (0.3, 0.1)


# Whole trainings


def training(average, batchnorm=False, **options):
    """A run, and the weights after every step of its main loop."""
    model, seen = finetuning.network(*[nn.BatchNorm1d(6)] * batchnorm), {}

    class Look(shoal.Callback):
        def on_step(self, state):
            seen[state.step] = [p.detach().clone() for p in model.parameters()]

    turned = finetuning.data(turned=True)  # so that the validation loss rises, for SWAD
    options = {"steps": 24, "eval_every": 1, "select": "last", "callbacks": [Look()]} | options
    run = finetuning.fit(options.pop("algorithm", "erm"), model, turned, average=average, **options)
    return run, list(seen.values())


@pytest.mark.parametrize("algorithm", ["erm", "fish", "idgm"])
@pytest.mark.parametrize("average", ["sma:3", "ema:0.8", "swad"])
def test_the_model_holds_the_mean_and_the_record_says_of_what(algorithm, average):
    run, seen = training(average, algorithm=algorithm, batchnorm=True)
    words = run.rule.split()
    first, last = int(words[-3]), int(words[-1])
    assert run.rule == f"last step, {average} of steps {first} to {last}"
    if average == "swad":
        losses = [p.scores["validation"].loss for p in run.history]
        steps = naive.released(losses)[0]
        assert (min(steps) + 1, max(steps) + 1) == (first, last)
        expected = mean_of([seen[step] for step in steps])
    else:
        assert (first, last) == (3 if average == "sma:3" else 1, 24)
        expected = exponential(seen, 0.8) if average == "ema:0.8" else mean_of(seen[2:])
    close(list(run.model.parameters()), expected, 1e-9)
    given = finetuning.data(turned=True)
    x, _ = given.examples.batch(torch.from_numpy(given.splits["train"].examples()).long())
    z = run.model.features[0](x).detach()
    torch.testing.assert_close(run.model.features[1].running_mean, z.mean(0), rtol=0, atol=1e-9)
    x, y = given.examples.batch(torch.from_numpy(given.splits["test"].examples()).long())
    loss = cross_entropy(run.model(x), y)
    assert run.scores("test").loss == pytest.approx(loss.item(), rel=1e-6)


def test_averaging_does_not_touch_the_training():
    (_, one), (_, other) = training(None), training("sma:3")
    assert all(same(a, b) for a, b in zip(one, other, strict=True))


def test_the_ratio_moves_the_end_of_swad():
    ends = [training(f"swad:{ratio}", steps=60)[0].last.step for ratio in (1.01, 1.3, 3.0)]
    assert ends[0] < ends[1] < ends[2] <= 60


def test_swad_without_a_start_or_with_few_evaluations_is_warned_of():
    with pytest.warns(UserWarning, match="2 evaluations"):
        run, _ = training("swad", steps=4, eval_every=2)
    assert "2 evaluations" in run.record["notes"]["average"]
    with pytest.warns(UserWarning, match="found no start in 10 evaluations"):
        run = finetuning.fit(
            "erm", average="swad", steps=10, eval_every=1, optimizer=partial(torch.optim.SGD, lr=1e-3)
        )
    assert run.rule == "last step, swad of steps 10 to 10 (swad found no start)"
