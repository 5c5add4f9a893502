"""``shoal.fit`` from input to selected weights."""

import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shoal
from shoal.errors import InputError


def domain(number: int, examples: int = 40) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    y = torch.arange(examples) % 2
    x = torch.stack([4.0 * y - 2, torch.full((examples,), float(number))], 1)
    return x + torch.randn(examples, 2, generator=draw), y


def split(*numbers: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {f"d{n}": domain(n) for n in numbers}


def network(*, dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 2))


def fit(
    algorithm: Any = "fish", model: nn.Module | None = None, train: Any = None, **options: Any
) -> shoal.Fit:
    given: dict[str, Any] = {"steps": 10, "batch_size": 8, "lr": 0.01, "device": "cpu", "progress": False}
    train = split(0, 1, 2) if train is None else train
    return shoal.fit(algorithm, network() if model is None else model, train, **given | options)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)


class Noisy(Dataset[Any]):
    """A plain dataset with a random transform."""

    def __init__(self, number: int) -> None:
        self.x, self.y = domain(number)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.rand(2) + torch.as_tensor(np.random.rand(2)) + random.random()
        return self.x[i] + 0.01 * noise.float(), int(self.y[i])


NOISY: dict[str, Any] = {"a": Noisy(0), "b": Noisy(1)}


def test_scores_by_name() -> None:
    x, y = domain(1)
    run = fit(validation=split(3), test={"d1": (x, 1 - y), "d5": domain(5)}, steps=60)
    point = run.selected
    assert run.accuracy("d3") == point.scores["validation"]["d3"]
    assert run.accuracy("d0") == point.scores["train"]["d0"]
    # A name in several splits means the test's domain.
    assert run.accuracy("d1") == point.scores["test"]["d1"] != point.scores["train"]["d1"]
    assert run.accuracy("test") == run.scores().average == run.scores("test").average
    with pytest.raises(InputError, match=r"domain or split 'd9'.*Known: .*d5"):
        run.accuracy("d9")
    with pytest.raises(InputError, match=r"split 'tets'\. Did you mean 'test'"):
        run.scores("tets")
    assert "Fish, best on validation" in repr(run)


def test_a_result_predicts_is_saved_loaded_pickled_and_shown(tmp_path: Path) -> None:
    run = fit(test=split(3), eval_every=5)
    x, y = domain(3)
    found = run.predict(x)
    assert float((found == y.numpy()).mean()) == pytest.approx(run.accuracy("d3"))
    assert run.save(tmp_path / "kept") == tmp_path / "kept"
    again = shoal.load(tmp_path / "kept", model=network())
    for other in (again, pickle.loads(pickle.dumps(run))):
        assert (other.predict(x.numpy()) == found).all()
    with pytest.raises(InputError, match="kept"):
        run.save(tmp_path / "kept")
    frame = run.to_frame()
    assert list(frame.columns) == ["step", "selected", "split", "domain", "metric", "value"]
    assert frame[frame.selected & (frame.domain == "d3")].value.item() == run.accuracy("d3")
    assert "<td>d3</td>" in run._repr_html_()


class TestIsolation:
    def test_neither_evaluations_nor_workers_change_a_training(self) -> None:
        runs = [
            fit(model=network(dropout=0.5), train=NOISY, test={"t": Noisy(5)}, **options)
            for options in ({"eval_every": 1}, {"eval_every": 10}, {"eval_every": 10, "workers": 2})
        ]
        for run in runs[1:]:
            assert_same(run.model, runs[0].model)
        assert runs[1].last.loss == runs[2].last.loss

    def test_random_state_outside_is_untouched(self) -> None:
        torch.manual_seed(11)
        np.random.seed(11)
        random.seed(11)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        fit(model=network(dropout=0.5), train=NOISY, warm_start=3)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.random.get_state()[1].tolist() == before[1]
        assert random.getstate() == before[2]

    def test_an_import_and_a_training_on_tensors_need_no_other_library(self) -> None:
        code = """if True:
            import sys, torch, shoal
            shoal.fit
            assert "torch._dynamo" not in sys.modules  # as slow as all of torch
            x, y = torch.randn(40, 3), torch.arange(40) % 2
            data = {"a": (x, y), "b": (x, y)}
            shoal.fit("fish", torch.nn.Linear(3, 2), data, steps=3, device="cpu", progress=False)
            heavy = {"pandas", "sklearn", "scipy", "matplotlib", "jinja2", "rich", "lightgbm", "pyarrow"}
            print(heavy & set(sys.modules))
            """
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "set()\n"


class TestSelection:
    @pytest.mark.parametrize("select", ["best", "last"])
    def test_patience(self, select: str) -> None:
        given: dict[str, Any] = {"validation": split(3), "steps": 60, "eval_every": 2, "select": select}
        scores = [p.scores["validation"].average for p in fit(**given).history]
        run = fit(**given, patience=4)
        best = scores.index(max(scores[: len(run.history)]))
        assert best > 0
        assert len(run.history) == best + 5 < len(scores)
        assert run.selected.step == (run.history[best] if select == "best" else run.last).step


class TestWarmStart:
    def test_is_erm_first_and_then_a_fresh_optimizer(self) -> None:
        one = fit(model=network(dropout=0.2), warm_start=7)
        model = network(dropout=0.2)
        fit("erm", model, steps=7, domains_per_step=1)
        fit(model=model)
        assert_same(one.model, model)
