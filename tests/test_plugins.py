"""Packages of others add algorithms, datasets and models by entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import algorithms
from shoal.algorithms import algorithm_class
from shoal.cli import main
from shoal.data import sets
from shoal.errors import InputError
from shoal.experiments import baselines
from shoal.experiments import compare as protocol
from shoal.experiments.config import RunConfig
from shoal.experiments.run import run
from shoal.registry import ALGORITHMS, DATASETS, MODELS
from shoal.training.recipes import recipes

SOURCE = Path(__file__).parents[1] / "src"

METHOD = '''
from typing import Annotated
from shoal.algorithms.base import Algorithm
from shoal.settings import Range, log10

class Other(Algorithm):
    """Not the one that is named."""

class Weighted(Algorithm):
    """The mean loss, times a weight."""

    family = "ours"
    reference = "Nobody 2026"

    def __init__(
        self, model, loss, task, *, weight: Annotated[float, Range(above=0, search=log10(-1, 1))] = 1.0
    ):
        super().__init__(model, loss, task)
        self.weight = weight

    def objective(self, outputs):
        losses = self.losses(outputs)
        return self.weight * losses.mean(), {"losses": losses.detach()}

class Last(Weighted):
    """The last class of the module."""
'''
DATA = '''
from shoal.data.sets import linear
SUMMARY, PAPER = "Points on a line.", "none"

def load(*, copies: int = 1):
    """The linear example."""
    return linear.load(per_domain=100 * copies)
'''
MODEL = """
from shoal.models import linear
def build(input_shape, classes):
    return linear.build(input_shape, classes)
"""
FILES = {"methods.py": METHOD, "points.py": DATA, "net.py": MODEL, "broken.py": "import nothing_at_all\n"}
ENTRIES = {
    "shoal.algorithms": {
        "My_Method": "strange.methods:Weighted",
        "my-module": "strange.methods",
        "my-broken": "strange.broken:Method",
        "my-number": "strange.points:SUMMARY",
        "iga": "strange.methods:Weighted",
        "majority": "strange.methods:Weighted",
        "fish:odd": "strange.methods:Weighted",
    },
    "shoal.datasets": {"my-data": "strange.points", "my-bad-data": "strange.methods"},
    "shoal.models": {"my-net": "strange.net"},
}


def install(folder: Path, package: str, entries: dict[str, dict[str, str]], version: str = "1.5") -> None:
    """What an installer leaves of a package: its metadata."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    groups = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for group, e in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ``sys.path`` with an installed package."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "strange").mkdir()
    for name, text in {"__init__.py": "", **FILES}.items():
        (folder / "strange" / name).write_text(text)
    install(folder, "strange-methods", ENTRIES)
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    yield site
    for name in [n for n in sys.modules if n.partition(".")[0] == "strange"]:
        del sys.modules[name]


def command(site: Path, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{site}", "OMP_NUM_THREADS": "1"}
    how: dict[str, Any] = {"capture_output": True, "text": True, "env": environment, "timeout": 300, **more}
    return subprocess.run([sys.executable, "-m", "shoal", *words], **how)


class TestTheCommandLine:
    """In processes of its own, as users have it."""

    def test_list_names_the_package_and_what_is_wrong(self, site: Path) -> None:
        done = command(site, "list", "algorithms")
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("my-method ")]
        assert "strange-methods 1.5" in line
        assert "Nobody 2026" in line
        problems = [line for line in done.stdout.splitlines() if line.startswith("Not available: ")]
        assert len(problems) == 5
        assert any("'my-broken'" in p and "No module named 'nothing_at_all'" in p for p in problems)
        assert all("strange-methods 1.5" in p for p in problems)
        assert "\nfish " in done.stdout

    def test_train_and_compare(self, site: Path, tmp_path: Path, capsys: Any) -> None:
        words = ("--steps", "4", "--device", "cpu")
        done = command(site, "train", "MY_method", "my_data", "--data", "copies=2", "--set", "weight=0.5",
                       "--model", "my-net", "--out", "run", *words, cwd=tmp_path)  # fmt: skip
        assert done.returncode == 0, done.stderr
        record = json.loads((tmp_path / "run" / "record.json").read_text())
        assert record["config"]["algorithm"] == "my-method"
        assert record["environment"]["strange-methods"] == "1.5"
        few = ("--seeds", "1", "--search", "1", "--no-baselines", "--jobs", "1", "--out", "all", "--json")
        named = ("my-data", "--algorithms", "my-method", "erm")
        done = command(site, "compare", *named, *few, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        rows = {row["algorithm"]: row for row in json.loads(done.stdout)["rows"]}
        assert rows.keys() == {"my-method", "erm"}
        assert all(row["rank"] is not None for row in rows.values())
        # Its records are read where the package is not installed.
        assert main(["results", str(tmp_path / "all"), "--json"]) == 0
        assert "my-method" in capsys.readouterr().out
        assert main(["train", "my-method", "linear"]) == 2
        assert capsys.readouterr().err.startswith("shoal: unknown algorithm 'my-method'.")


class TestNames:
    def test_are_normalised_and_sorted_among_the_own(self, installed: Path) -> None:
        assert {"my-method", "my-module", "fish"} <= set(ALGORITHMS.names())
        assert not {"majority", "fish:odd"} & set(ALGORITHMS.names())
        assert ALGORITHMS.names() == sorted(set(ALGORITHMS.names()))
        assert "my-data" in DATASETS.names()
        assert "my-net" in MODELS.names()

    def test_listing_them_imports_nothing(self, installed: Path) -> None:
        assert "my-method" in ALGORITHMS.names()
        assert not [n for n in sys.modules if n.partition(".")[0] == "strange"]
        code = "import sys; from shoal.registry import ALGORITHMS as a; "
        code += "print(*a.names(), 'torch' in sys.modules)"
        environment = os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{installed}"}
        how: dict[str, Any] = {"capture_output": True, "text": True, "env": environment, "check": True}
        names = subprocess.run([sys.executable, "-c", code], **how).stdout.split()
        assert "my-method" in names
        assert names[-1] == "False"

    def test_those_of_baselines_are_reserved(self) -> None:
        assert baselines.SPACES.keys() | recipes().keys() | {"all"} == ALGORITHMS.reserved

    def test_are_suggested(self, installed: Path) -> None:
        with pytest.raises(InputError, match=r"Did you mean 'my-method'\?.* my-method"):
            algorithm_class("my-methd")

    def test_are_completed(self, installed: Path, capsys: Any) -> None:
        assert main(["completion", "bash"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert any('"compare --algorithms")' in line and " my-method " in line for line in lines)
        assert any('"data check --dataset")' in line and " my-data " in line for line in lines)

    def test_installed_while_the_program_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(InputError, match="unknown dataset 'late-data'"):
            DATASETS.module("late-data")
        install(tmp_path, "late", {"shoal.datasets": {"late-data": "shoal.data.sets.linear"}})
        os.utime(tmp_path, (1, 1))  # as a clock would show that ticks more finely than this file system's
        assert DATASETS.module("late-data").SUMMARY


class TestAnEntryPoint:
    def test_is_a_class_or_a_module(self, installed: Path) -> None:
        assert algorithm_class("my-method").__name__ == "Weighted"
        assert algorithm_class("My_Module").__name__ == "Last"
        assert algorithms.MyMethod is algorithm_class("my-method")
        assert str(ALGORITHMS.package_of("my_method")) == "strange-methods 1.5"
        assert ALGORITHMS.package_of("fish") is None

    def test_is_a_dataset_and_a_model(self, installed: Path) -> None:
        data = sets.load("my_data", copies=3)
        assert len(data.examples) == 900
        with pytest.raises(InputError, match="copies"):
            sets.load("my-data", copy=3)
        record = run(RunConfig("my-data", "my-module", 5, model="my-net", settings={"weight": 2.0}), "cpu")
        assert record.status == "finished"
        assert record.environment["strange-methods"] == "1.5"
        assert "strange-methods" not in run(RunConfig("linear", "erm", 5), "cpu").environment

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("my-broken", "cannot be imported (strange.broken:Method): ModuleNotFoundError: No module named"),
            (
                "my-number",
                "'Points on a line.' is not, and does not define, a subclass of shoal.algorithms.Algorithm",
            ),
        ],
    )
    def test_that_is_no_algorithm(self, name: str, words: str, installed: Path) -> None:
        with pytest.raises(InputError) as caught:
            algorithm_class(name)
        assert words in str(caught.value)
        assert f"algorithm '{name}' of the package strange-methods 1.5" in str(caught.value)

    def test_that_is_no_dataset(self, installed: Path, capsys: Any) -> None:
        with pytest.raises(
            InputError, match=r"strange-methods 1\.5: strange.methods has no load and no SUMMARY"
        ):
            sets.load("my-bad-data")
        assert main(["list", "datasets", "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["problems"].keys() == {"my-bad-data"}
        (own,) = [entry for entry in content["datasets"] if "package" in entry]
        assert (own["name"], own["package"]) == ("my-data", "strange-methods 1.5")
        assert main(["list", "datasets", "my-bad-data"]) == 2
        assert main(["data", "check", "--dataset", "my-data", "."]) == 2  # tells which have folders
        assert "is not a folder of images; datasets that are: " in capsys.readouterr().err

    def test_cannot_take_a_name_of_shoals_own(self, installed: Path) -> None:
        with pytest.warns(UserWarning, match="algorithm 'iga' of the package strange-methods 1.5 is ignored"):
            assert algorithm_class("iga").__module__ == "shoal.algorithms.iga"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            algorithm_class("fish")

    def test_of_a_name_in_two_packages(
        self, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(
            tmp_path / "more", "other-methods", {"shoal.algorithms": {"my-method": "shoal.algorithms.erm"}}
        )
        install(tmp_path / "more", "Strange_Methods", ENTRIES, "1.4")  # hidden by 1.5, which comes before
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "more")])
        words = (
            "algorithm 'my-method' is defined by two packages, strange-methods 1.5 and other-methods 1.5; "
            "uninstall"
        )
        with pytest.raises(InputError, match=words):
            algorithm_class("my-method")
        assert algorithm_class("my-module")
        assert words in ALGORITHMS.problems()["my-method"]

    def test_in_damaged_metadata_hides_no_other(
        self, installed: Path, tmp_path: Path, monkeypatch: Any
    ) -> None:
        install(tmp_path / "more", "damaged", {})
        (tmp_path / "more" / "damaged-1.5.dist-info" / "entry_points.txt").write_text("[shoal.models]\nodd")
        monkeypatch.syspath_prepend(str(tmp_path / "more"))
        assert "my-net" in MODELS.names()


def test_all_algorithms_are_compared_without_the_broken(installed: Path) -> None:
    where = protocol.layout("my-data", {})
    found = protocol.unable(["erm-by-domain", "my-method", "my-broken"], where)
    assert found.keys() == {"my-broken"}
    assert "of the package strange-methods 1.5 cannot be imported" in found["my-broken"]
