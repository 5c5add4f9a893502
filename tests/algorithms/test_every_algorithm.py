"""What every registered algorithm must pass. It names none of them: a new file in the folder is covered."""

import inspect
from pathlib import Path

import pytest
import torch
from every_algorithm import (
    TASK,
    B,
    ByHand,
    Counted,
    Halves,
    S,
    fit,
    network,
    network_of,
    same,
    toy,
    toy_of,
    two_halves,
)
from torch import Tensor, nn

import shoal
from nasty_values import NASTY
from shoal.algorithms import algorithm_class, build, registry, settings_of
from shoal.data.batch import TASKS
from shoal.errors import InputError
from shoal.models import FeatureModel
from shoal.settings import search_space


def test_a_file_in_the_folder_is_an_algorithm() -> None:
    files = {p.stem for p in Path(shoal.algorithms.__file__).parent.glob("*.py")} - {"__init__"}
    assert {n.replace("_", "-") for n in files - {"base", "penalty"}} == set(registry.names())
    assert len(registry.names()) > 1


def baseline(kind: str, train: dict[str, tuple[Tensor, Tensor]]) -> float:
    """What a constant prediction scores at best."""
    y = torch.cat([y for _, y in train.values()])
    if kind == "regression":
        return float(y.var(0).mean())
    if kind == "multilabel":
        return float(torch.maximum(y.mean(0), 1 - y.mean(0)).mean())
    columns = y.reshape(len(y), -1).T
    return float(sum(column.bincount().max() / len(y) for column in columns) / len(columns))


def each(weight: Tensor, y: Tensor) -> Tensor:
    """Weights in the shape of targets."""
    return weight.reshape(-1, *[1] * (y.ndim - 1)).expand_as(y)


@pytest.mark.parametrize("name", registry.names())
class TestEveryAlgorithm:
    def test_learns_a_toy_with_its_defaults(self, name: str) -> None:
        run = fit(name, network(), steps=40, lr=0.05, test={"unseen": toy(60)["domain 1"]})
        assert run.accuracy("train") > 0.9
        assert run.accuracy("unseen") > 0.9

    def test_the_seed_decides_everything(self, name: str) -> None:
        one, again, other = (fit(name, network(), seed=seed).model for seed in (0, 0, 1))
        assert same(one, again)
        assert not same(one, other)

    def test_keeps_its_state_where_it_is_saved(self, name: str) -> None:
        run = ByHand(name, network())
        before = run.plain_state()
        run.take(0, 1, 2)
        assert run.plain_state() == before

    def test_resumes_bit_for_bit(self, name: str) -> None:
        first = ByHand(name, network()).take(0, 1, 2)
        saved = first.state()
        fresh = ByHand(name, network(seed=5))
        fresh.load(saved)
        assert same(fresh.take(3, 4).algorithm, first.take(3, 4).algorithm)

    def test_takes_a_nest_of_tensors(self, name: str) -> None:
        model, whole = two_halves(), network()
        fit(name, model, {n: Halves(*d) for n, d in toy().items()})
        assert same(model, fit(name, whole).model)
        assert not same(model, two_halves())

    @pytest.mark.parametrize("kind", TASKS)
    def test_learns_each_task_it_is_for(self, name: str, kind: str) -> None:
        cls, train = algorithm_class(name), toy_of(kind)
        if kind not in cls.tasks:
            with pytest.raises(InputError, match=rf"supports .*, and this task is {kind}"):
                fit(name, network_of(kind), train, task=kind)
            return
        # Published weights are for cross-entropy.
        settings = {"weight": 1.0} if "weight" in settings_of(cls) else {}
        run = fit(name, network_of(kind), train, steps=40, lr=0.03, settings=settings, task=kind)
        assert run.algorithm.task.kind == kind
        scores, start = run.scores("train"), baseline(kind, train)
        if kind == "regression":
            assert (scores.metric, scores.average < 0.7 * start) == ("mse", True)
        else:
            assert (scores.metric, scores.average > 0.5 + 0.5 * start) == ("accuracy", True)

    @pytest.mark.parametrize("kind", TASKS)
    def test_takes_sample_weights_or_says_not(self, name: str, kind: str) -> None:
        """Examples of weight 0 are as if their targets were any others."""
        cls = algorithm_class(name)
        if kind not in cls.tasks:
            return
        weight = (torch.arange(48) % 3 > 0).float() * 2
        train = {n: (x, y, weight) for n, (x, y) in toy_of(kind).items()}
        if not cls.sample_weights:
            with pytest.raises(InputError, match=rf"{cls.__name__} does not take sample weights"):
                fit(name, network_of(kind), train, task=kind)
            return
        other = {n: (x, torch.where(each(weight, y) > 0, y, 0 * y), w) for n, (x, y, w) in train.items()}
        plain = {n: (x, y) for n, (x, y, _) in train.items()}
        runs = [fit(name, network_of(kind), given, task=kind).model for given in (train, other, plain)]
        assert same(*runs[:2])
        assert not same(runs[0], runs[2])

    def test_takes_a_single_example_a_batch(self, name: str) -> None:
        model = network(norm=False)
        run = fit(name, model, {n: (x[:1], y[:1]) for n, (x, y) in toy().items()}, batch_size=1)
        assert torch.isfinite(torch.tensor(run.last.loss))
        assert not same(model, network(norm=False))

    def test_leaves_frozen_parameters_alone(self, name: str) -> None:
        model, start = network(), network()
        model.features[0].requires_grad_(False)
        fit(name, model)
        assert same(model.features[0], start.features[0])
        assert not same(model.head, start.head)

    def test_every_forward_pass_updates_batchnorm(self, name: str) -> None:
        """Once an example; twice with two ordinary passes."""
        counted = Counted(16)
        model = FeatureModel(nn.Sequential(nn.Linear(4, 16), counted), nn.Linear(16, 2))
        run = ByHand(name, model).take(0, 1)
        times = int(counted.seen) // (2 * S * B)
        assert times == (2 if name in ("sam", "sagm", "disam") else 1)
        parts = 3 if name == "pgrad" else 1  # of each domain's batch
        assert int(counted.num_batches_tracked) in (2 * times, 2 * times * S * parts)
        assert run.algorithm.draw != "pooled" or int(counted.num_batches_tracked) == 2 * times

    def test_declares_itself(self, name: str) -> None:
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

    def test_refuses_a_setting_it_does_not_know(self, name: str) -> None:
        with pytest.raises(InputError, match=f"{algorithm_class(name).__name__}.*'zzz'"):
            fit(name, network(), settings={"zzz": 1})

    def test_any_value_of_a_setting_is_taken_or_refused(self, name: str) -> None:
        """What is taken can be trained with."""
        for setting in settings_of(algorithm_class(name)):
            refused = {}
            for label, value in NASTY.items():
                try:
                    ByHand(name, network(), **{setting: value}).take(0, finite=False)
                except InputError as error:
                    refused[label] = str(error)
            assert {"nan", "inf", "[]", "'0,5'", "odd"} <= set(refused)
            assert all(text.startswith(setting) and len(text) < 300 for text in refused.values())
