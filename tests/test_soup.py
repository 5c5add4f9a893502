"""``shoal.soup`` and `shoal soup`."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shoal
from shoal import soups
from shoal.cli import main
from shoal.data import sets
from shoal.training.averaging import average_weights
from shoal.training.evaluate import Scores

SHORT: dict[str, Any] = {"steps": 20, "batch_size": 16, "eval_every": 10, "device": "cpu", "progress": False}
PLACES = {"north": 0.0, "<script>alert(1)</script>": 0.5, "a b": 1.0, "=cmd": 2.0}
QUIET: dict[str, Any] = {"device": "cpu", "progress": False}


def table(path: Path, seed: int = 0, rows: int = 80) -> Path:
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["a", "b", "y", "place"])
        for place, shift in PLACES.items():
            for _ in range(rows):
                y = draw.random() < 0.5
                out.writerow([draw.gauss(y, 1) + shift, draw.gauss(-y, 1), "yes" if y else "no", place])
    return path


def train(data: Path, out: Path, seed: int = 0, algorithm: str = "erm", **more: Any) -> Path:
    own = {"label": "y", "domain": "place", "held_out": ["a b", "=cmd"], "lr": 0.02, **SHORT, **more}
    shoal.train(algorithm, data, seed=seed, out=out, **own)
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs on one table, in a folder with a space."""
    folder = tmp_path_factory.mktemp("with space")
    data = table(folder / "my data.csv")
    start = train(data, folder / "start")
    for seed in range(4):
        train(data, folder / f"run {seed}", seed, weights=start / "model.safetensors", lr=0.01 * 3**seed)
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> list[Path]:
    """A copy of the four runs, to be spoiled."""
    for seed in range(4):
        shutil.copytree(made / f"run {seed}", tmp_path / f"run {seed}")
    return [tmp_path / f"run {seed}" for seed in range(4)]


def naive(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.as_tensor(np.mean([s[name].double().numpy() for s in states], 0)).to(value.dtype)
        for name, value in states[0].items()
    }


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def left(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


class TestAverageWeights:
    @pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_it_is_the_mean_in_float64(self, kind: torch.dtype) -> None:
        states = [{"w": torch.randn(5, 3).to(kind), "b": torch.randn(()).to(kind)} for _ in range(7)]
        found, want = average_weights(iter(states)), naive(states)
        for name, value in found.items():
            assert value.dtype == kind
            torch.testing.assert_close(
                value, want[name], rtol=0 if kind != torch.float64 else 1e-15, atol=1e-16
            )

    def test_what_is_near_the_end_of_the_range_does_not_overflow(self) -> None:
        state = {"w": torch.tensor([60000.0], dtype=torch.float16)}
        assert average_weights([state] * 4)["w"].item() == 60000.0

    def test_one_state_stays_what_it_is(self) -> None:
        state = {"w": torch.randn(3), "n": torch.tensor(3)}
        found = average_weights([state])
        assert all(torch.equal(found[k], v) and found[k] is not v for k, v in state.items())

    def test_counts_are_the_first_and_other_whole_numbers_must_be_equal(self) -> None:
        def state(count: int, ids: list[int]) -> dict[str, Tensor]:
            return {
                "count": torch.tensor(count),
                "ids": torch.tensor(ids),
                "mask": torch.tensor([True, False]),
            }

        found = average_weights([state(3, [0, 1]), state(9, [0, 1])])
        assert found["count"].item() == 3
        assert found["ids"].tolist() == [0, 1]
        assert found["mask"].dtype == torch.bool
        with pytest.raises(shoal.InputError, match="states 1 and 2 cannot be averaged: 'ids' holds whole"):
            average_weights([state(3, [0, 1]), state(9, [1, 0])])

    def test_complex_numbers(self) -> None:
        found = average_weights([{"w": torch.tensor([1 + 2j])}, {"w": torch.tensor([3 - 2j])}])
        assert found["w"].tolist() == [2 + 0j]

    def test_neither_gradients_nor_the_input_are_touched(self) -> None:
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        before = [{k: v.clone() for k, v in m.state_dict().items()} for m in models]
        found = average_weights([dict(m.named_parameters()) for m in models])
        assert not any(v.requires_grad for v in found.values())
        for model, was in zip(models, before, strict=True):
            assert all(torch.equal(v, was[k]) for k, v in model.state_dict().items())

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"w": torch.zeros(3)}, r"'w' has shapes \(2,\) and \(3,\)"),
            ({"v": torch.zeros(2)}, "only one of them has 'w'"),
            ({"w": torch.zeros(2), "v": torch.zeros(2)}, "only one of them has 'v'"),
            ({"w": torch.zeros(2, dtype=torch.int64)}, "'w' has types torch.float32 and torch.int64"),
        ],
    )
    def test_what_does_not_fit_is_named(self, other: dict[str, Tensor], message: str) -> None:
        with pytest.raises(shoal.InputError, match=message):
            average_weights([{"w": torch.zeros(2)}, other])

    def test_nothing_has_no_mean(self) -> None:
        with pytest.raises(shoal.InputError, match="states is empty"):
            average_weights([])


def scores(value: float, metric: str = "accuracy") -> Scores:
    return Scores(metric, ("d",), (value,), (10,), value)


class TestGreedy:
    @pytest.mark.parametrize("seed", range(20))
    @pytest.mark.parametrize("metric", ["accuracy", "mse"])
    def test_it_is_the_recipe(self, seed: int, metric: str) -> None:
        draw = random.Random(seed)
        single = [draw.randrange(6) / 5 for _ in range(6)]  # with ties
        soup = {
            frozenset(s): draw.randrange(6) / 5
            for n in range(2, 7)
            for s in itertools.combinations(range(6), n)
        }
        sign = 1 if metric == "accuracy" else -1
        order = sorted(range(6), key=lambda n: (-sign * single[n], n))
        want, best = [order[0]], single[order[0]]
        for n in order[1:]:
            value = soup[frozenset([*want, n])]
            if sign * value >= sign * best:
                want, best = [*want, n], value
        found = soups.choose(
            [scores(v, metric) for v in single], lambda s: scores(soup[frozenset(s)], metric)
        )
        assert found == want

    def test_a_score_that_is_not_a_number_is_never_added(self) -> None:
        single = [scores(math.nan), scores(0.2), scores(0.1)]
        assert soups.choose(single, lambda s: scores(math.nan if 0 in s else 0.3)) == [1, 2]

    def test_runs_are_added_as_a_naive_program_adds_them(self, made: Path, tmp_path: Path) -> None:
        folders = [made / f"run {n}" for n in (2, 0, 3, 1)]
        soup = shoal.soup(folders, greedy=True, out=tmp_path / "soup", **QUIET)
        config = soup.record.config
        data = sets.load("table", **config.data_options)
        model, examples = shoal.load(folders[0]).model, data.splits["validation"].examples()
        x, y = data.examples.batch(torch.as_tensor(examples))  # type: ignore[attr-defined]

        def accuracy(parts: Sequence[Path]) -> float:
            model.load_state_dict(naive([weights(p) for p in parts]))
            with torch.no_grad():
                return float((model(x).argmax(1) == y).double().mean())

        single = {p: accuracy([p]) for p in folders}
        for row, path in zip(soup.rows, folders, strict=False):
            assert row.scores["validation"].average == pytest.approx(single[path])
        first, *rest = sorted(folders, key=lambda p: -single[p])
        used, best = [first], single[first]
        for path in rest:
            if (value := accuracy([*used, path])) >= best:
                used, best = [*used, path], value
        assert list(soup.used) == used
        assert soup.rows[-1].scores["validation"].average == pytest.approx(best)
        want = naive([weights(p) for p in used])
        assert all(torch.equal(v, want[k]) for k, v in weights(soup.folder).items())
        assert [row.used for row in soup.rows] == [p in used for p in folders] + [None, None]


class TestSoup:
    def test_the_uniform_soup_is_the_mean(self, made: Path, tmp_path: Path) -> None:
        folders = [made / f"run {n}" for n in range(4)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            soup = shoal.soup(folders, out=tmp_path / "soup", **QUIET)
        want = naive([weights(f) for f in folders])
        found = weights(soup.folder)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[k], v) for k, v in want.items())
        assert soup.record.environment["weights"].startswith("model.safetensors, sha256 ")
        assert "run 0" in soup._repr_html_()

    def test_runs_score_as_their_records_say(self, made: Path, tmp_path: Path) -> None:
        soup = shoal.soup([made / "run 0", made / "run 1"], out=tmp_path / "soup", **QUIET)
        for row in soup.rows[:2]:
            record = json.loads((Path(row.name) / "record.json").read_text())
            for split, found in row.scores.items():
                was = record["history"][record["selected"]]["scores"][split]
                assert found.average == pytest.approx(was["average"])
        test = soup.rows[0].scores["test"]
        assert soup.rows[0].worst == min(zip(test.names, test.values, strict=True), key=lambda pair: pair[1])

    def test_the_folder_is_one_of_a_run(self, made: Path, tmp_path: Path, capsys: Any) -> None:
        out = tmp_path / "my soup"
        soup = shoal.soup([made / "run 0", made / "run 1"], out=out, predictions=True, **QUIET)
        model = shoal.load(out)
        assert set(model.predict({"a": [0.0, 1.0], "b": [1.0, 0.0]})) <= {"yes", "no"}
        assert model.export(tmp_path / "model.pt2").difference < 1e-4
        found = shoal.score(out, made / "my data.csv")
        assert "north" in str(found)
        assert shoal.results(out).column("name")[0] == "soup of erm"
        assert main(["show", str(out)]) == 0
        assert "mean of 2 runs (uniform soup)" in capsys.readouterr().out
        assert main(["resume", str(out), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["config"] == soup.record.to_dict()["config"]
        files = sorted((out / "predictions").glob("*.csv"))
        assert len(files) == 2
        options = ["--data", *(f"{k}={json.dumps(v)}" for k, v in soup.record.config.data_options.items())]
        assert main(["evaluate", *map(str, files), "--json", *options]) == 0
        summary = {s["split"]: s["measures"] for s in json.loads(capsys.readouterr().out)["summary"]}
        assert summary["test"]["accuracy"]["mean"] == pytest.approx(soup.record.score("test"))
        card = (out / "card.md").read_text()
        assert "soup of erm on table" in card
        assert "<script>" not in card

    def test_a_report_takes_it(self, made: Path, tmp_path: Path) -> None:
        pytest.importorskip("jinja2")
        pytest.importorskip("matplotlib")
        shoal.soup([made / "run 0", made / "run 1"], out=tmp_path / "soup", **QUIET)
        page = shoal.report([made, tmp_path], tmp_path / "report.html")
        assert "soup of erm" in page.html
        assert "<script>alert(1)" not in page.html

    def test_a_soup_can_be_averaged_again(self, made: Path, tmp_path: Path) -> None:
        for n in (0, 2):
            shoal.soup([made / f"run {n}", made / f"run {n + 1}"], out=tmp_path / str(n), **QUIET)
        again = shoal.soup([tmp_path / "0", tmp_path / "2"], out=tmp_path / "again", **QUIET)
        want = naive([weights(made / f"run {n}") for n in range(4)])
        for name, value in weights(again.folder).items():
            torch.testing.assert_close(value, want[name])

    @pytest.mark.filterwarnings("ignore:the records of these runs")
    def test_several_seeds_are_taken_from_their_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        shoal.train("erm", "linear", **SHORT, seeds=3, jobs=1, out="seeds")
        with pytest.warns(UserWarning, match="do not show that they started from pretrained weights"):
            soup = shoal.soup("seeds", **QUIET)
        assert [p.name for p in soup.runs] == ["seed-0", "seed-1", "seed-2"]
        assert soup.folder.parent == Path("runs")
        assert "uniform soup" in str(soup)
        want = naive([weights(Path("seeds") / f"seed-{n}") for n in range(3)])
        assert all(torch.equal(v, want[k]) for k, v in weights(soup.folder).items())
        with pytest.raises(shoal.InputError, match="no validation split"):
            shoal.soup("seeds", greedy=True, **QUIET)
        shutil.rmtree("seeds/seed-1")
        with pytest.raises(shoal.InputError, match=r"'seeds' is not finished \(seed-1\): shoal resume seeds"):
            shoal.soup("seeds", out="other", **QUIET)

    def test_runs_may_differ_in_algorithm_and_hyperparameters(self, made: Path, tmp_path: Path) -> None:
        start = made / "start" / "model.safetensors"
        fish = train(made / "my data.csv", tmp_path / "fish", 8, "fish", weights=start, steps=10)
        soup = shoal.soup([made / "run 0", fish], out=tmp_path / "soup", **QUIET)
        config = soup.record.config
        assert (config.name, config.batch_size, config.optimizer_options) == ("soup", 16, {})
        other = train(
            made / "my data.csv", tmp_path / "other", 8, weights=made / "run 1" / "model.safetensors"
        )
        with pytest.warns(UserWarning, match="list different initial weights"):
            shoal.soup([made / "run 0", other], out=tmp_path / "warned", **QUIET)


Spoil = Callable[[list[Path], Path], list[Path]]


def edited(folder: Path, file: str, change: Callable[[Any], None]) -> None:
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


def reweighted(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    state = weights(folder)
    change(state)
    save_file(state, folder / "model.safetensors")
    edited(folder, "record.json", lambda record: record["files"].pop("model.safetensors"))


def described(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    edited(folder, "inputs.json", change)
    edited(folder, "record.json", lambda record: record["files"].pop("inputs.json"))


class TestErrors:
    """All of them before any work: nothing is written."""

    @pytest.fixture(autouse=True)
    def no_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def work(*args: Any, **more: Any) -> None:
            raise AssertionError("work began")

        monkeypatch.setattr(soups, "make_training", work)

    @pytest.fixture
    def refused(self, tmp_path: Path) -> Callable[..., None]:
        def refuse(folders: Any, message: str, **options: Any) -> None:
            before = left(tmp_path)
            with pytest.raises(shoal.InputError, match=message):
                shoal.soup(folders, **{"out": tmp_path / "new" / "soup", **QUIET, **options})
            assert left(tmp_path) == before

        return refuse

    def test_fewer_than_two(self, runs: list[Path], refused: Callable[..., None]) -> None:
        refused([], "at least two runs, got 0")
        refused(runs[0], "at least two runs, got 1")

    def test_the_same_run_twice(self, runs: list[Path], refused: Callable[..., None], tmp_path: Path) -> None:
        refused([runs[0], runs[1], tmp_path / "." / "run 0"], "run 0' is listed twice")
        (tmp_path / "link").symlink_to(runs[0])
        refused([runs[0], tmp_path / "link"], "link' is listed twice")
        shutil.copytree(runs[0], tmp_path / "copy")
        refused([runs[0], runs[1], tmp_path / "copy"], "run 0' and .*copy' have the same weights")

    def test_no_run(self, runs: list[Path], refused: Callable[..., None], tmp_path: Path) -> None:
        refused([runs[0], tmp_path / "nowhere"], "there is no folder .*nowhere")
        refused([runs[0], tmp_path], "contains several runs; use one of them")

    def test_an_unfinished_run(self, runs: list[Path], refused: Callable[..., None]) -> None:
        (runs[1] / "record.json").unlink()
        refused(runs, "run 1' is not finished")
        (runs[1] / "model.safetensors").unlink()
        refused(runs, "run 1' is not finished: shoal resume")

    def test_a_run_that_diverged(self, runs: list[Path], refused: Callable[..., None]) -> None:
        edited(runs[1], "record.json", lambda record: record.update(status="diverged"))
        refused(runs, "run 1' diverged; a soup requires finished runs")

    def test_a_baseline(
        self, made: Path, runs: list[Path], refused: Callable[..., None], tmp_path: Path
    ) -> None:
        pytest.importorskip("sklearn")
        own = {"label": "y", "domain": "place", "held_out": ["a b", "=cmd"], "progress": False}
        shoal.train("gradient-boosting", made / "my data.csv", out=tmp_path / "trees", **own)
        refused([runs[0], tmp_path / "trees"], "trees' is the baseline gradient-boosting")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"held_out": ["a b"]}, "differ in their held-out domains: 'a b, =cmd' and 'a b'"),
            ({"data_options": {"seed": 1}}, r"differ in their data options \(seed\): None and 1"),
            ({"drop": ["b"]}, r"differ in their data options \(drop\): None and \['b'\]"),
            ({"model_options": {"width": 8}}, r"differ in their model options \(width\): \d+ and 8"),
            ({"model": "linear"}, "differ in their model: 'tabular' and 'linear'"),
        ],
    )
    def test_other_data_or_another_model(
        self,
        made: Path,
        runs: list[Path],
        refused: Callable[..., None],
        tmp_path: Path,
        change: dict[str, Any],
        message: str,
    ) -> None:
        train(made / "my data.csv", tmp_path / "other", **change)
        refused([*runs, tmp_path / "other"], message)

    def test_another_dataset(self, runs: list[Path], refused: Callable[..., None], tmp_path: Path) -> None:
        shoal.train("erm", "linear", out=tmp_path / "linear", **SHORT)
        refused([runs[0], tmp_path / "linear"], "differ in their dataset: 'table' and 'linear'")

    def test_another_content_of_the_file(
        self, runs: list[Path], refused: Callable[..., None], tmp_path: Path
    ) -> None:
        train(table(tmp_path / "my data.csv", seed=1), tmp_path / "other")
        refused([runs[0], tmp_path / "other"], r"differ in their data options \(digest\)")

    def test_other_classes(self, runs: list[Path], refused: Callable[..., None]) -> None:
        described(runs[1], lambda about: about.update(class_names=["ja", "nein"]))
        refused(runs, r"differ in their classes: \('no', 'yes'\) and \('ja', 'nein'\)")

    def test_another_preprocessing(self, runs: list[Path], refused: Callable[..., None]) -> None:
        described(runs[1], lambda about: about["inputs"].update(kind="other"))
        refused(runs, r"differ in their preprocessing \(inputs\)")

    def test_another_architecture(self, runs: list[Path], refused: Callable[..., None]) -> None:
        name = next(iter(weights(runs[1])))
        reweighted(runs[1], lambda state: state.update({name: torch.zeros(7)}))
        refused(runs, f"run 0' and .*run 1' have different architectures: '{name}' has shapes")
        reweighted(runs[2], lambda state: state.update(extra=torch.zeros(1)))
        refused([runs[0], runs[2]], "different architectures: only one of them has 'extra'")

    def test_damaged_weights(self, runs: list[Path], refused: Callable[..., None]) -> None:
        (runs[1] / "model.safetensors").write_bytes(b"x" * 100)
        refused(runs, "model.safetensors' is damaged")
        name = next(iter(weights(runs[2])))
        reweighted(runs[2], lambda state: state[name].fill_(math.inf))
        refused([runs[0], runs[2]], f"run 2' are damaged: '{name}' is not finite")

    @pytest.mark.parametrize("file", ["inputs.json", "model.safetensors"])
    def test_a_missing_file(self, runs: list[Path], refused: Callable[..., None], file: str) -> None:
        (runs[1] / file).unlink()
        refused(runs, "cannot be read: No such file|is not finished|has diverged|no weights")

    def test_the_folder_exists(self, runs: list[Path], refused: Callable[..., None], tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        refused(runs, "out=.*there' exists; choose another folder", out=tmp_path / "there")
        refused(runs, "out=.*run 0' exists", out=runs[0])
        refused(runs, "cannot be a folder", out=runs[0] / "config.yaml" / "soup")

    def test_runs_selected_by_different_metrics(
        self, made: Path, runs: list[Path], refused: Callable[..., None], tmp_path: Path
    ) -> None:
        train(made / "my data.csv", tmp_path / "auc", metric="AUC")
        refused(
            [runs[0], tmp_path / "auc"],
            "selected by the same metric; these were selected by AUC, the dataset",
            greedy=True,
        )


@pytest.mark.filterwarnings("ignore:the records of these runs")
def test_data_that_have_changed_are_refused(tmp_path: Path) -> None:
    for seed in range(2):
        shoal.train("erm", "linear", **SHORT, seed=seed, out=tmp_path / str(seed))
        edited(
            tmp_path / str(seed),
            "record.json",
            lambda record: [p["scores"]["test"].update(sizes=[1]) for p in record["history"]],
        )
    with pytest.raises(
        shoal.InputError, match=r"the data are not those of the run in .*0': the test split has"
    ):
        shoal.soup([tmp_path / "0", tmp_path / "1"], out=tmp_path / "new" / "soup", **QUIET)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]


class FrozenNorm(nn.Sequential):
    """Keeps BatchNorm in eval mode."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self[1].training = False
        return self


def network(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def domains() -> dict[str, dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, Any]] = {}
    for split, names in (("train", "ab"), ("validation", "ab"), ("test", "c")):
        for n, name in enumerate(names):
            y = torch.arange(64) % 2
            x = torch.randn(64, 3, generator=draw) + y[:, None] + n
            found.setdefault(split, {})[name] = (x, y)
    return found


class TestFit:
    def fitted(self, folder: Path, kind: type[nn.Sequential] = nn.Sequential) -> list[Path]:
        for seed in range(3):
            options: dict[str, Any] = {"steps": 20, "batch_size": 16, "device": "cpu", "progress": False}
            shoal.fit("erm", network(kind), **domains(), seed=seed, folder=folder / str(seed), **options)
        return [folder / str(seed) for seed in range(3)]

    @pytest.mark.filterwarnings("ignore:the records of these runs")
    def test_without_data_it_is_not_evaluated(self, tmp_path: Path, capsys: Any) -> None:
        folders = self.fitted(tmp_path)
        with pytest.warns(UserWarning, match="BatchNorm statistics are averages over the runs"):
            soup = shoal.soup(folders, out=tmp_path / "soup", **QUIET)
        assert "was not evaluated" in str(soup)
        assert "was not evaluated" in soup._repr_html_()
        want = naive([weights(f) for f in folders])
        want["1.num_batches_tracked"] = weights(folders[0])["1.num_batches_tracked"]
        assert all(torch.equal(v, want[k]) for k, v in weights(soup.folder).items())
        assert soup.load(network()).predict(torch.zeros(4, 3)).shape == (4,)
        assert main(["show", str(soup.folder)]) == 0
        assert "soup of erm" in capsys.readouterr().out
        assert shoal.results(soup.folder).column("name")[0] == "soup of erm"
        for options in ({"greedy": True}, {"predictions": True}):
            with pytest.raises(shoal.InputError, match=r"runs of shoal\.fit do not save it"):
                shoal.soup(folders, out=tmp_path / "new", **options, **QUIET)

    def test_with_data_batchnorm_gets_the_statistics_of_the_mean(self, tmp_path: Path) -> None:
        folders, model = self.fitted(tmp_path), network()
        with pytest.warns(UserWarning, match="do not show that they started"):
            soup = shoal.soup(
                folders,
                out=tmp_path / "soup",
                data=domains(),
                model=model,
                predictions=True,
                greedy=True,
                **QUIET,
            )
        assert len(soup.used) > 1
        assert "greedy soup" in str(soup)
        assert len(list((soup.folder / "predictions").glob("data_split:*.csv"))) == 2
        found = weights(soup.folder)
        parts = naive([weights(f) for f in soup.used])
        for name in ("0.weight", "0.bias", "1.weight", "3.weight"):
            torch.testing.assert_close(found[name], parts[name], rtol=0, atol=1e-7)
        x = torch.cat([x for x, _ in domains()["train"].values()]).double()
        hidden = x @ parts["0.weight"].double().T + parts["0.bias"].double()
        torch.testing.assert_close(found["1.running_mean"].double(), hidden.mean(0), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found["1.running_mean"], parts["1.running_mean"], atol=1e-3)
        assert all(torch.equal(v, found[k]) for k, v in model.state_dict().items())

    def test_frozen_statistics_stay(self, tmp_path: Path) -> None:
        folders = self.fitted(tmp_path, FrozenNorm)
        with pytest.warns(UserWarning, match="do not show that they started"):
            soup = shoal.soup(
                folders, out=tmp_path / "soup", data=domains(), model=network(FrozenNorm), **QUIET
            )
        assert weights(soup.folder)["1.running_mean"].tolist() == [0.0] * 8

    @pytest.mark.filterwarnings("ignore:the records of these runs")
    def test_other_data_and_other_models_are_refused(self, tmp_path: Path) -> None:
        folders, more = self.fitted(tmp_path), {"out": tmp_path / "soup", **QUIET}
        short = domains()
        short["test"] = {name: (x[:32], y[:32]) for name, (x, y) in short["test"].items()}
        with pytest.raises(shoal.InputError, match="data are not those of the run"):
            shoal.soup(folders, data=short, model=network(), **more)
        with pytest.raises(shoal.InputError, match="own network"):
            shoal.soup(folders, data=domains(), **more)
        with pytest.raises(shoal.InputError, match="unknown split of data: 'tset'"):
            shoal.soup(folders, data={"tset": {}}, **more)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1", "2"]


class TestCommand:
    def test_what_is_shown(
        self, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(made)
        names = ["run 0", "run 1", "run 2", "run 3"]
        assert main(["soup", *names, "--greedy", "--device", "cpu", "--out", str(tmp_path / "soup")]) == 0
        shown = capsys.readouterr()
        head, _, *rows = shown.out.splitlines()
        columns = "weights used validation accuracy test accuracy worst accuracy worst domain"
        assert head.split() == columns.split()
        assert [row.split("  ")[0] for row in rows[:6]] == [*names, "uniform soup", "greedy soup"]
        assert f"runs (greedy soup). Saved in {tmp_path / 'soup'}." in shown.out
        assert "started from" not in shown.err

    def test_json(self, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
        monkeypatch.chdir(made)
        assert (
            main(["soup", "run 0", "run 1", "--json", "--device", "cpu", "--out", str(tmp_path / "soup")])
            == 0
        )
        shown = capsys.readouterr()
        assert not shown.err
        found = json.loads(shown.out)
        assert found["runs"] == found["used"] == ["run 0", "run 1"]
        assert [row["name"] for row in found["rows"]] == ["run 0", "run 1", "uniform soup"]
        assert found["rows"][-1]["worst"]["domain"] in ("a b", "=cmd")
        assert found["record"]["rule"] == "mean of 2 runs (uniform soup)"
        assert found["folder"] == str(tmp_path / "soup")

    def test_errors_name_options(self, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.chdir(made)
        assert main(["soup", "run 0"]) == 2
        assert capsys.readouterr().err == "shoal: a soup requires at least two runs, got 1.\n"
        assert main(["soup", "run 0", "run 1", "--out", "run 2"]) == 2
        assert capsys.readouterr().err == "shoal: --out 'run 2' exists; choose another folder.\n"

    @pytest.mark.parametrize("at", ["evaluating", "writing", "at the end"])
    def test_ctrl_c_leaves_nothing(
        self, runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, at: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        usual, written = soups.write_atomically, []

        def write(path: Path, content: bytes) -> None:
            written.append(path)
            if at == "writing" and len(written) == 3:
                raise KeyboardInterrupt
            usual(path, content)
            if at == "at the end" and path.name == "record.json":
                raise KeyboardInterrupt

        def refuse(*args: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(soups, "write_atomically", write)
        if at == "evaluating":
            monkeypatch.setattr(soups.Evaluation, "scores", refuse)
        before = left(tmp_path)
        assert main(["soup", "run 0", "run 1", "--device", "cpu", "--out", "deep/soup"]) == 130
        assert capsys.readouterr().err.endswith("shoal: interrupted. Nothing was written.\n")
        assert left(tmp_path) == before
