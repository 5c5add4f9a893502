"""Averages against means over a list of all weights; every state, also in mid-segment, goes on to the bit."""

import copy
import io
import math
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import update_bn

from references import swad as naive
from shoal.errors import InputError
from shoal.training.averaging import SMA, SWAD, applied, has_batchnorm, refresh_batchnorm

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


def paper(*settings):
    return SWAD(*settings, rule="paper")


def by_naive_form(losses, lengths, rule, settings):
    """(weight of every step, span, done) of SWAD by its definition, from all losses at once."""
    segments, done = getattr(naive, rule)(losses, *settings)
    shares = naive.step_weights(segments, lengths[: len(losses)], rule == "paper")
    steps = [step for step, share in enumerate(shares, 1) if share]
    return shares, (steps[0], steps[-1]) if steps else None, done


# SMA


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


@pytest.mark.parametrize(
    ("dtype", "kept", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-5),
        (torch.float16, torch.float32, 1e-5),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [lambda: SMA(1), lambda: paper(1)], ids=["sma", "swad"])
def test_half_precision_is_averaged_in_single(make, dtype, kept, tolerance):
    weights, average = path(400, dtype), make()
    drive(average, weights, [1.0] * 40, 10)
    assert {w.dtype for w in average.weights()} == {kept}
    close(average.weights(), mean_of(weights), tolerance)


@pytest.mark.parametrize("make", [lambda: SMA(1), lambda: paper(1)], ids=["sma", "swad"])
def test_the_mean_of_one_step_is_its_weights_to_the_bit(make):
    [weights], average = path(1, torch.float32), make()
    drive(average, [weights], [1.0], 1)
    assert same(average.weights(), weights)


def test_types_and_layouts_may_be_mixed():
    weights = [
        [w[0], w[1].to(torch.bfloat16), w[2].to(memory_format=torch.channels_last), w[3].float().t()]
        for w in path(9, shapes=[(3,), (2, 2), (2, 3, 4, 4), (2, 5)])
    ]
    average = SMA(1)
    drive(average, weights, [], 100)
    assert [w.dtype for w in average.weights()] == [
        torch.float64,
        torch.float32,
        torch.float64,
        torch.float32,
    ]
    assert average.weights()[2].is_contiguous(memory_format=torch.channels_last)
    close(average.weights(), mean_of(weights), 1e-5)


@pytest.mark.parametrize("make", [lambda: SMA(1), lambda: paper(1, 2)], ids=["sma", "swad"])
def test_update_never_reads_a_value(make):
    """On the meta device there are none to read."""
    average = make()
    params = [nn.Parameter(torch.empty(4, device="meta")), torch.empty(3, device="meta", dtype=torch.float16)]
    for step in range(1, 12):
        average.update(step, params)
        average.evaluated(step, 1.0)
    assert average.span == (1, 11)
    assert [w.device.type for w in average.weights()] == ["meta", "meta"]


@pytest.mark.parametrize("make", [lambda: SMA(1), lambda: paper(1)], ids=["sma", "swad"])
def test_parameters_in_training(make):
    """Gradients are none of its business, and the mean follows neither the parameters nor its copies."""
    model, average = nn.Linear(3, 2), make()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, 0.1)
    seen = []
    for step in range(1, 6):
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        average.update(step, params)
        average.evaluated(step, 1.0)
        seen.append([p.detach().clone() for p in params])
        for w in average.weights():
            assert not w.requires_grad
            w.zero_()
    close(average.weights(), mean_of(seen), 1e-5)


@pytest.mark.parametrize("make", [lambda: SMA(1), lambda: paper(1, 1)], ids=["sma", "swad"])
def test_a_wholly_frozen_model_has_an_empty_mean(make):
    average = make()
    drive(average, [[]] * 5, [1.0] * 5, 1)
    assert average.weights() == []
    assert average.span == (1, 5)
    with applied([], average.weights()):
        pass


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


@given(**SETTINGS, rule=st.sampled_from(["released", "paper"]))
@example([3, 2, 1, 2, 2, 1, 9, 9, 1, 9, 9, 9, 1, 1], 2, 1, 3, 3, 1.3, "paper")
@example([3, 2, 1, 2, 2, 1, 9, 9, 1, 9, 9, 9, 1, 1], 2, 1, 3, 3, 1.3, "released")
@example([NAN, 1, INF, 1, -INF, NAN, NAN, 1], 1, 0, 2, 3, 1.0, "released")
@settings(max_examples=200, deadline=None, derandomize=True)
def test_swad_is_at_every_step_what_its_definition_says(
    losses, spacing, extra, converge, tolerate, ratio, rule
):
    weights = path(len(losses) * spacing + min(extra, spacing - 1))
    average = SWAD(converge, tolerate, ratio, rule)
    over = False
    for step, now in enumerate(weights, 1):
        average.update(step, now)
        if step % spacing == 0:
            average.evaluated(step, losses[step // spacing - 1])
        known = losses[: step // spacing]
        shares, span, done = by_naive_form(known, [spacing] * len(known), rule, (converge, tolerate, ratio))
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
@pytest.mark.parametrize("rule", ["released", "paper"])
def test_swad_weighs_the_steps_of_a_thousand_trainings_as_the_naive_form_does(rule, usual):
    draw, kinds = random.Random(1), set()
    for kind, losses in naive.sequences(1020):
        settings = (3, 6, 1.3)
        if not usual:
            settings = draw.randint(1, 5), draw.randint(1, 8), draw.choice([0.5, 1.0, 1.1, 1.3, 2.0])
        lengths = [draw.randint(1, 3) for _ in losses]
        average, weights, step = SWAD(*settings, rule), units(sum(lengths)), 0
        for loss, length in zip(losses, lengths, strict=True):
            for _ in range(length):
                step += 1
                average.update(step, weights[step - 1])
            average.evaluated(step, loss)
        shares, span, done = by_naive_form(losses, lengths, rule, settings)
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


def test_the_papers_rule_by_hand():
    weights = path(26)
    losses = [5, 3, 4, 2, 2, 3, 3, 4, 2, 4, 4, 4, 1]  # starts with the 4th, ends before the 10th
    average = SWAD(converge=3, tolerate=3, ratio=10 / 7, rule="paper")
    spans = []
    for i, loss in enumerate(losses):
        for step in (2 * i + 1, 2 * i + 2):
            average.update(step, weights[step - 1])
        average.evaluated(2 * i + 2, loss)
        spans.append((average.span, average.started, average.done))
    assert spans[:5] == [((1, 2 * i), False, False) for i in range(1, 6)]
    assert average.limit == pytest.approx(10 / 3)
    assert spans[5:11] == [((7, 2 * i), True, False) for i in range(6, 12)]
    assert spans[11:] == [((7, 18), True, True)] * 2
    close(average.weights(), mean_of(weights[6:18]))


def test_by_the_papers_rule_segments_of_the_converge_window_count_towards_the_end():
    average = paper()
    drive(average, path(7), [0.1, 1, 1, 1, 1, 1, 1], 1)  # limit 0.91
    assert (average.span, average.done) == ((1, 1), True)


def test_by_the_papers_rule_the_mean_is_over_all_steps_where_there_is_no_start():
    weights, average = path(10), paper()
    drive(average, weights, [5, 4, 3, 2, 1], 2)
    assert (average.span, average.started) == ((1, 10), False)
    close(average.weights(), mean_of(weights))


def test_by_the_papers_rule_segments_weigh_as_their_steps():
    weights, average = path(15), paper(2, 2)
    for step, now in enumerate(weights, 1):
        average.update(step, now)
        if step in (1, 6, 7, 10, 14):
            average.evaluated(step, 1.0)
    assert average.span == (1, 14)
    close(average.weights(), mean_of(weights[:14]))  # step 15 has not been evaluated


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


def test_nothing_changes_once_done():
    weights, average = path(20), SWAD(1, 2, 1.0)
    drive(average, weights[:3], [1.0, 2.0, 2.0], 1)
    before = average.weights()
    assert average.done
    assert same(before, weights[0])
    drive(average, weights, [0.0] * 20, 1, range(4, 20))
    assert average.done
    assert average.span == (1, 1)
    assert same(average.weights(), before)
    assert len(average._means()) == 1


@pytest.mark.parametrize("rule", ["released", "paper"])
@pytest.mark.parametrize(("converge", "tolerate"), [(3, 6), (6, 3), (1, 1), (4, 4)])
def test_the_memory_is_what_the_docstring_says(converge, tolerate, rule):
    most = 0
    for _, losses in naive.sequences(60):
        average = SWAD(converge, tolerate, 1.3, rule)
        for step, now in enumerate(path(2 * len(losses)), 1):
            average.update(step, now)
            most = max(most, len(average._means()))
            if step % 2 == 0:
                average.evaluated(step, losses[step // 2 - 1])
                most = max(most, len(average._means()))
    bound = max(converge, tolerate) + (2 if rule == "released" else 1)
    assert most == bound if tolerate >= converge else most <= bound


@pytest.mark.parametrize("when", [0, 1, 5])
def test_swad_refuses_to_go_without_validation(when):
    average = SWAD(1)
    drive(average, path(when), [1.0] * when, 1)
    with pytest.raises(InputError, match=r"SWAD .* validation data"):
        average.evaluated(when, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda bad=bad: SMA(bad), "start must be a whole number of at least 0")
            for bad in (-1, 1.5, True)
        ),
        *((lambda bad=bad: SWAD(bad), "converge must be a whole number of at least 1") for bad in (0, "3")),
        *(
            (lambda bad=bad: SWAD(3, bad), "tolerate must be a whole number of at least 1")
            for bad in (0, 2.0)
        ),
        *((lambda bad=bad: SWAD(rule=bad), "rule must be 'released' or 'paper'") for bad in ("Paper", None)),
        *((lambda bad=bad: SWAD(3, 6, bad), "ratio must be above 0 and finite") for bad in (0, -1, NAN, INF)),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


# Saving and going on


@given(
    **SETTINGS,
    cut=st.integers(0, 1000),
    before_evaluation=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    give_params=st.booleans(),
    kind=st.sampled_from(["sma", "released", "paper"]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_goes_on_to_the_bit_from_a_file(
    losses, spacing, extra, converge, tolerate, ratio, cut, before_evaluation, dtype, give_params, kind
):
    weights = path(len(losses) * spacing + min(extra, spacing - 1), dtype)
    sma = kind == "sma"
    make = lambda: SMA(converge * spacing) if sma else SWAD(converge, tolerate, ratio, kind)  # noqa: E731
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
        assert sma or new.limit == old.limit
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


@pytest.mark.parametrize("rule", ["released", "paper"])
def test_resumed_after_any_evaluation_is_as_uninterrupted(rule):
    for _, losses in naive.sequences(24, seed=3):
        weights, straight = path(len(losses), torch.float32), SWAD(rule=rule)
        resumed = []
        for step, (now, loss) in enumerate(zip(weights, losses, strict=True), 1):
            for average in (straight, *resumed):
                average.update(step, now)
                average.evaluated(step, loss)
            new = SWAD(rule=rule)
            new.load_state_dict(straight.state_dict(), now)
            resumed.append(new)
        for average in resumed:
            assert (average.span, average.done) == (straight.span, straight.done)
            assert same(average.weights(), straight.weights())


@pytest.mark.parametrize(
    "make", [lambda: SMA(1), lambda: SWAD(1, 2), lambda: SWAD(6)], ids=["sma", "swad", "late"]
)
def test_a_saved_state_follows_neither_who_wrote_nor_who_read_it(make):
    weights, average = path(12), make()
    drive(average, weights[:5], [1.0] * 5, 1)
    average.update(6, weights[5])
    state = average.state_dict()
    before = copy.deepcopy(state)
    average.evaluated(6, 1.0)
    drive(average, weights, [1.0] * 12, 1, range(7, 10))
    for params in (None, weights[0]):
        other = make()
        other.load_state_dict(state, params)
        other.evaluated(6, 1.0)
        drive(other, weights, [1.0] * 12, 1, range(7, 10))
        assert same(other.weights(), average.weights())
    pairs = list(zip(leaves(state), leaves(before), strict=True))
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_a_loaded_mean_moves_to_where_the_parameters_are():
    average = paper(1, 3)
    drive(average, path(5), [1.0] * 2, 2)
    other = paper(1, 3)
    other.load_state_dict(average.state_dict())
    assert {w.device.type for w in other.weights()} == {"cpu"}
    other.update(6, [torch.empty(s, device="meta", dtype=torch.float64) for s in SHAPES])
    tensors = [t for m in other._means() for t in m.tensors]
    assert {t.device.type for t in tensors} == {"meta"}
    assert len(other._means()) == 3
    other.update(7, [torch.empty(s, device="meta", dtype=torch.float64) for s in SHAPES])
    assert all(t is u for t, u in zip(tensors, (t for m in other._means() for t in m.tensors), strict=True))


def test_a_loaded_mean_takes_the_layout_of_the_parameters():
    params = [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    average = SMA(1)
    average.update(1, params)
    state = average.state_dict()
    state["mean"]["tensors"] = [t.contiguous() for t in state["mean"]["tensors"]]
    average.load_state_dict(state, params)
    assert average.weights()[0].stride() == params[0].stride()
    assert same(average.weights(), params)


@pytest.mark.parametrize(
    "other", [SMA(2), SWAD(3), SWAD(2, 5), SWAD(2, 6, 1.5), paper(2)], ids=lambda a: str(vars(a))
)
@pytest.mark.parametrize("saved", [SMA(1), SWAD(2)], ids=["sma", "swad"])
def test_a_state_with_other_settings_is_refused(saved, other):
    with pytest.raises(InputError, match=r"saved with \{.*\}, this one has \{.*\}"):
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


def test_applied_within_applied():
    params, first, second = path(3)
    outside = [p.clone() for p in params]
    with applied(params, first):
        with applied(params, second):
            assert same(params, second)
        assert same(params, first)
    assert same(params, outside)


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


def test_the_first_layers_statistics_are_the_plain_average_over_the_batches():
    model = nn.BatchNorm1d(3)
    model(torch.full((2, 3), 100.0))
    refresh_batchnorm(model, inputs())
    torch.testing.assert_close(model.running_mean, torch.stack([x.mean(0) for x in inputs()]).mean(0))
    torch.testing.assert_close(model.running_var, torch.stack([x.var(0) for x in inputs()]).mean(0))


def test_images_and_other_norms():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.InstanceNorm2d(2))
    reference = copy.deepcopy(model)
    batches = [torch.randn(3, 1, 5, 5) + i for i in range(3)]
    refresh_batchnorm(model, batches)
    update_bn(batches, reference)
    assert_same_statistics(model.state_dict(), reference.state_dict())


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
    assert not has_batchnorm(model)
    assert_same_statistics(statistics(model), before)
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)], ids=repr)
def test_has_batchnorm(layer):
    assert has_batchnorm(nn.Sequential(nn.Identity(), nn.Sequential(layer)))


def test_a_layer_without_statistics_beside_one_with():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3))
    refresh_batchnorm(model, inputs())
    assert model[0].running_mean is None
    assert (model[0].momentum, model[0].training) == (0.1, True)
    assert model[1].num_batches_tracked == 4


class KeepsFrozen(nn.Module):
    """Puts a layer back to evaluation whenever modes are set, as detection models do."""

    def __init__(self):
        super().__init__()
        self.frozen, self.free, self.calls = nn.BatchNorm1d(3), nn.BatchNorm1d(3), 0

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        self.calls += 1
        return self

    def forward(self, x):
        return self.free(self.frozen(x))


def test_models_with_a_train_of_their_own():
    model = KeepsFrozen().train()
    before, calls = statistics(model.frozen), model.calls
    refresh_batchnorm(model, inputs())
    assert_same_statistics(statistics(model.frozen), before)
    assert model.free.num_batches_tracked == 4
    assert (model.training, model.free.training, model.frozen.training) == (True, True, False)
    assert model.calls == calls


class Auxiliary(nn.Module):
    """A head that is passed through in training alone."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x):
        return (self.norm(x), self.head(x)) if self.training else self.norm(x)


def test_layers_that_no_batch_reaches_keep_their_statistics():
    model = Auxiliary()
    model(inputs()[1])
    before = statistics(model.head)
    refresh_batchnorm(model, inputs())
    assert_same_statistics(statistics(model.head), before)
    assert model.head.momentum == 0.1
    assert model.norm.num_batches_tracked == 4


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


def test_averaged_weights_with_their_own_statistics():
    """All of it together: train, average, apply, refresh, predict, go back."""
    model, average = network(), SMA(3)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, 0.5)
    seen = []
    for step in range(1, 9):
        optimizer.zero_grad()
        (model(inputs()[step % 4]) - 1).square().mean().backward()
        optimizer.step()
        average.update(step, params)
        seen.append([p.detach().clone() for p in params])
    reference = copy.deepcopy(model)
    with applied(list(reference.parameters()), [m.float() for m in mean_of(seen[2:])]):
        update_bn(inputs(), reference)
        expected = reference.eval()(inputs()[0]).detach()
    with applied(params, average.weights()):
        refresh_batchnorm(model, inputs())
        torch.testing.assert_close(model.eval()(inputs()[0]), expected, rtol=1e-4, atol=1e-5)
    assert same(params, seen[-1])
