"""``shoal.soup``: means of weights, the greedy recipe, and runs that do not fit together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import shoal
from shoal import datasets as sets
from shoal.errors import InputError
from shoal.training.averaging import average_weights
from trained_models import patients, write_csv, write_images

SHORT: dict[str, Any] = {"steps": 10, "batch_size": 16, "eval_every": 5, "device": "cpu", "progress": False}
QUIET: dict[str, Any] = {"device": "cpu"}


def train(data: Path, out: Path, seed: int = 0, **more: Any) -> Path:
    own = {"label": "ill", "domain": "site", "held_out": ["kyoto", "lima"], "drop": ["grade", "stay"]}
    with warnings.catch_warnings(action="ignore"):
        shoal.train("erm", data, seed=seed, out=out, **{**own, "lr": 0.02, **SHORT, **more})
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs on one table, from the same initial weights, in a folder with a space."""
    folder = tmp_path_factory.mktemp("with space")
    data = write_csv(folder / "my data.csv", patients(0, 300, ("oslo", "bergen", "kyoto", "lima")))
    start = train(data, folder / "start")
    for seed in range(4):
        train(data, folder / f"run {seed}", seed, weights=start / "model.safetensors", lr=0.01 * 3**seed)
    return folder


def mean(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.as_tensor(np.mean([s[name].double().numpy() for s in states], 0)).to(value.dtype)
        for name, value in states[0].items()
    }


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_the_average_is_the_mean_in_float64(kind: torch.dtype) -> None:
    states = [{"w": torch.randn(5, 3).to(kind), "b": torch.randn(()).to(kind)} for _ in range(7)]
    assert_equal(average_weights(iter(states)), mean(states))
    first = {"count": torch.tensor(3), "ids": torch.tensor([0, 1])}  # whole numbers are those of the first
    assert_equal(average_weights([first, {**first, "count": torch.tensor(9)}]), first)


def test_greedy_runs_are_added_as_a_naive_program_adds_them(made: Path, tmp_path: Path) -> None:
    folders = [made / f"run {n}" for n in (2, 0, 3, 1)]
    soup = shoal.soup(folders, greedy=True, out=tmp_path / "soup", **QUIET)
    data = sets.load("table", **soup.record.config.data_options)
    model, examples = shoal.load(folders[0]).model, data.splits["validation"].examples()
    x, y = data.examples.batch(torch.as_tensor(examples))  # type: ignore[attr-defined]

    def accuracy(parts: Sequence[Path]) -> float:
        model.load_state_dict(mean([weights(p) for p in parts]))
        with torch.no_grad():
            return float((model(x).argmax(1) == y).double().mean())

    single = {p: accuracy([p]) for p in folders}
    for path in folders:
        assert soup.scores[str(path)]["validation"].average == pytest.approx(single[path])
    first, *rest = sorted(folders, key=lambda p: -single[p])
    used, best = [first], single[first]
    for path in rest:
        if (value := accuracy([*used, path])) >= best:
            used, best = [*used, path], value
    assert list(soup.used) == used
    assert soup.scores["greedy soup"]["validation"].average == pytest.approx(best)
    assert_equal(weights(soup.folder), mean([weights(p) for p in used]))


def test_the_uniform_soup_is_the_mean_and_a_run(made: Path, tmp_path: Path) -> None:
    folders = [made / f"run {n}" for n in range(4)]
    with warnings.catch_warnings(action="error"):
        soup = shoal.soup(folders, out=tmp_path / "my soup", **QUIET)
    assert_equal(weights(soup.folder), mean([weights(f) for f in folders]))
    assert "uniform soup" in str(soup)
    assert len(soup.scores) == 5
    assert json.loads(json.dumps(soup.to_dict(), default=dict))["used"] == list(map(str, folders))
    model = soup.load()
    assert set(model.predict(patients(1, 9))) <= {"yes", "no"}
    assert model.score(made / "my data.csv").overall.rows == 300
    assert soup.record.config.name == "soup of erm"
    again = shoal.soup([soup.folder, folders[0]], out=tmp_path / "again", **QUIET)
    assert_equal(weights(again.folder), mean([weights(soup.folder), weights(folders[0])]))


def refused(folders: Any, message: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message):
        shoal.soup(folders, out=tmp_path / "soup", **QUIET)
    assert sorted(tmp_path.rglob("*")) == before


def test_too_few(made: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made / "run 0")
    for runs in ([], made / "run 0", [made / "run 0", tmp_path / "link"]):
        refused(runs, "^runs: .*two or more different runs", tmp_path)
    refused([made / "run 0", tmp_path / "nowhere"], "there is no folder .*nowhere", tmp_path)
    refused([made / "run 0", made], "use one of the runs in it", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held_out": ["kyoto"]}, "differ in data held_out"),
        ({"model_options": {"width": 8}}, r"differ in model option width: \d+ and 8"),
        ({"model": "linear"}, "differ in model: 'tabular' and 'linear'"),
    ],
)
def test_other_data_or_another_model(
    made: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    other = train(made / "my data.csv", tmp_path / "other", **change)
    refused([made / "run 0", other], message, tmp_path)


def test_batchnorm_gets_the_statistics_of_the_mean(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images", count=3)
    own: dict[str, Any] = {"model": "test_resnet", "held_out": "rain", "data_options": {"size": 32}}
    own |= {**SHORT, "steps": 2}
    with warnings.catch_warnings(action="ignore"):
        folders = [shoal.train("erm", images, seed=n, out=tmp_path / str(n), **own).folder for n in range(2)]
        soup = shoal.soup(folders, out=tmp_path / "soup", **QUIET)
    parts, found = mean([weights(f) for f in folders]), weights(soup.folder)
    name = next(n for n in found if n.endswith("running_mean"))
    assert not torch.allclose(found[name], parts[name])
    data = sets.load("image-folder", **soup.record.config.data_options)
    examples: Any = data.examples
    x, _ = examples.evaluation().batch(torch.as_tensor(data.splits["train"].examples()))
    model = soup.load().model
    before: list[Tensor] = []
    layer = model.get_submodule(name.removesuffix(".running_mean"))
    layer.register_forward_hook(lambda module, args, output: before.append(args[0]))
    with torch.no_grad():
        model(x)
    torch.testing.assert_close(found[name], before[0].mean((0, 2, 3)), rtol=0.1, atol=0.1)
