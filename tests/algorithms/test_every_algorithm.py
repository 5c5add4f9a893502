"""What every registered algorithm must pass. It names none of them: a new file in the folder is covered."""

import inspect
from typing import Any

import pytest
import torch
from every_algorithm import TASK, B, ByHand, Counted, S, fit, network, network_of, same, toy, toy_of
from torch import Tensor, nn

from shoal.algorithms import algorithm_class, build, check_settings, registry, settings_of
from shoal.data.batch import TASKS
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.settings import search_space

EVERY = pytest.mark.parametrize("name", registry.names())


@EVERY
def test_learns_a_toy_with_its_defaults_and_the_seed_decides_everything(name: str) -> None:
    test = {"unseen": toy(60)["domain 1"]}
    one, again, other = (fit(name, network(), steps=40, lr=0.05, test=test, seed=seed) for seed in (0, 0, 1))
    assert one.accuracy("train") > 0.9
    assert one.accuracy("unseen") > 0.9
    assert same(one.model, again.model)
    assert not same(one.model, other.model)


@EVERY
def test_its_state_is_what_is_saved(name: str) -> None:
    """Attributes do not change, and a run that is resumed from buffers and parameters is the same."""
    first = ByHand(name, network())
    before = first.plain_state()
    saved = first.take(0, 1, 2).state()
    assert first.plain_state() == before
    fresh = ByHand(name, network(seed=5))
    fresh.load(saved)
    assert same(fresh.take(3, 4).algorithm, first.take(3, 4).algorithm)


@EVERY
def test_takes_a_nest_of_tensors_and_single_examples(name: str) -> None:
    halves, whole, single = network(joined=True), network(), network(norm=False)
    fit(name, halves, {n: ({"left": x[:, :2], "right": x[:, 2:]}, y) for n, (x, y) in toy().items()})
    assert same(halves, fit(name, whole).model)
    run = fit(name, single, {n: (x[:1], y[:1]) for n, (x, y) in toy().items()}, batch_size=1)
    assert torch.isfinite(torch.tensor(run.last.loss))
    assert not same(single, network(norm=False))


def baseline(kind: str, train: dict[str, tuple[Tensor, Tensor]]) -> float:
    """What a constant prediction scores at best."""
    y = torch.cat([y for _, y in train.values()])
    if kind == "regression":
        return float(y.var(0).mean())
    columns = y.reshape(len(y), -1).long().T
    return float(sum(column.bincount().max() / len(y) for column in columns) / len(columns))


@EVERY
@pytest.mark.parametrize("kind", TASKS)
def test_learns_each_task_it_is_for_with_weights_of_examples_if_it_takes_them(name: str, kind: str) -> None:
    """Examples of weight 0 are as if their targets were any others."""
    cls, train = algorithm_class(name), toy_of(kind)
    if kind not in cls.tasks:
        with pytest.raises(InputError, match=rf"supports .*, and this task is {kind}"):
            fit(name, network_of(kind), train, task=kind)
        return
    # Published weights are for cross-entropy.
    settings = {"weight": 1.0} if "weight" in settings_of(cls) else {}
    scores = fit(name, network_of(kind), train, steps=40, lr=0.03, settings=settings, task=kind).scores(
        "train"
    )
    start = baseline(kind, train)
    good = scores.average < 0.7 * start if kind == "regression" else scores.average > 0.5 + 0.5 * start
    assert (scores.metric, good) == ("mse" if kind == "regression" else "accuracy", True)

    counts = torch.arange(48) % 3 > 0
    weighted: Any = {n: (x, y, counts * 2.0) for n, (x, y) in train.items()}
    if not cls.sample_weights:
        with pytest.raises(InputError, match=rf"{cls.__name__} does not take sample weights"):
            fit(name, network_of(kind), weighted, task=kind)
        return
    zeroed = lambda y: y * counts.to(y).reshape(-1, *[1] * (y.ndim - 1))  # noqa: E731
    other = {n: (x, zeroed(y), w) for n, (x, y, w) in weighted.items()}
    runs = [fit(name, network_of(kind), given, task=kind).model for given in (weighted, other, train)]
    assert same(*runs[:2])
    assert not same(runs[0], runs[2])


@EVERY
def test_frozen_parameters_and_batchnorm(name: str) -> None:
    """Every forward pass updates BatchNorm, once an example; twice with two ordinary passes."""
    counted = Counted(16)
    model = FeatureModel(nn.Sequential(nn.Linear(4, 16), counted), nn.Linear(16, 2))
    model.features[0].requires_grad_(False)  # type: ignore[index]
    before = model.features[0].weight.clone()  # type: ignore[index]
    run = ByHand(name, model).take(0, 1)
    assert torch.equal(model.features[0].weight, before)  # type: ignore[index]
    times = int(counted.seen) // (2 * S * B)
    assert times == (2 if name in ("sam", "sagm", "disam") else 1)
    parts = 3 if name == "pgrad" else 1  # of each domain's batch
    assert int(counted.num_batches_tracked) in (2 * times, 2 * times * S * parts)
    assert run.algorithm.draw != "pooled" or int(counted.num_batches_tracked) == 2 * times


@EVERY
def test_declares_itself_and_its_settings(name: str) -> None:
    cls = algorithm_class(name)
    assert "Reference: " in (cls.__doc__ or "")
    assert ":`" not in (cls.__doc__ or "").splitlines()[0]  # `shoal list algorithms` prints that line
    assert cls.reference
    assert cls.family
    settings = settings_of(cls)
    assert inspect.Parameter.empty not in settings.values()
    build(name, network(), nn.functional.cross_entropy, TASK, **settings)
    for setting, space in search_space(cls).items():
        assert space["default"] == settings[setting]
    for setting in settings:
        with pytest.raises(InputError, match=setting):
            check_settings(cls, {setting: object()})
    with pytest.raises(InputError, match=f"{cls.__name__}.*'zzz'"):
        check_settings(cls, {"zzz": 1})
