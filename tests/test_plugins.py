"""Packages of others add algorithms, datasets and models by entry points."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal.algorithms import algorithm_class
from shoal.api.listing import listing
from shoal.errors import InputError
from shoal.experiments.store import Store

METHOD = '''
from typing import Annotated
from shoal.algorithms.base import Algorithm
from shoal.settings import Range, log10

class Weighted(Algorithm):
    """The mean loss, times a weight."""

    family = "ours"
    reference = "Nobody 2026"
    weight: Annotated[float, Range(above=0, search=log10(-1, 1))] = 1.0

    def objective(self, outputs, step):
        losses = self.losses(outputs)
        return self.weight * losses.mean(), {"losses": losses.detach()}

class Last(Weighted):
    """The last class of the module."""
'''
DATA = '''
from shoal.datasets import linear
SUMMARY, PAPER = "Points on a line.", "none"

def load(*, copies: int = 1):
    """The linear example."""
    return linear.load(per_domain=100 * copies)
'''
MODEL = """
from shoal.models.small import linear
def build(input_shape, classes):
    return linear(input_shape, classes)
"""
FILES = {"methods.py": METHOD, "points.py": DATA, "net.py": MODEL, "broken.py": "import nothing_at_all\n"}
ENTRIES = {
    "shoal.algorithms": {
        "My_Method": "strange.methods:Weighted",
        "my-module": "strange.methods",
        "my-broken": "strange.broken:Method",
        "my-number": "strange.points:SUMMARY",
        "iga": "strange.methods:Weighted",
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


def test_trained_and_compared_like_shoals_own(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"steps": 4, "device": "cpu", "progress": False}
    few = {"settings": {"weight": 0.5}, "data_options": {"copies": 2}, "model": "my-net"}
    run = shoal.train("MY_method", "my_data", **few, **options, out="run")
    assert run.record.config.algorithm == "my-method"
    assert run.record.environment["strange-methods"] == "1.5"
    assert "strange-methods" not in shoal.train("erm", "linear", **options, out="own").record.environment
    names = ["my-method", "erm"]
    few = {"seeds": 1, "search": 1, "baselines": False, "jobs": 1}
    compared = shoal.compare("my-data", algorithms=names, **few, **options, out="all")
    assert set(compared.to_frame().index) == {"my-method", "erm"}
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(installed)])
    assert "my-method" in set(Store("all").frame()["algorithm"])  # where the package is not installed
    with pytest.raises(InputError, match="unknown algorithm 'my-method'"):
        shoal.train("my-method", "linear", **options)


def test_list_names_the_package_and_what_is_wrong(installed: Path) -> None:
    found = listing(["algorithms"])
    (own,) = [each for each in found.algorithms if each["name"] == "my-method"]
    assert (own["package"], own["paper"]) == ("strange-methods 1.5", "Nobody 2026")
    assert "iga" in [each["name"] for each in found.algorithms]
    assert found.unavailable.keys() == {"my-broken", "my-number"}
    assert "No module named 'nothing_at_all'" in found.unavailable["my-broken"]
    assert all("strange-methods 1.5" in why for why in found.unavailable.values())
    found = listing(["datasets"])
    assert found.unavailable.keys() == {"my-bad-data"}
    assert [each["name"] for each in found.datasets if "package" in each] == ["my-data"]


FEW = {"seeds": 1, "search": 2, "baselines": False, "steps": 4, "device": "cpu", "jobs": 1}


@pytest.fixture
def method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with two algorithms, and a table."""
    monkeypatch.chdir(tmp_path)
    Path("my_method.py").write_text(METHOD)
    rows = [f"{n % 7},{n % 5},{'abc'[n % 3]},{'yes' if n % 2 else 'no'}" for n in range(90)]
    Path("t.csv").write_text("\n".join(["x,z,site,ill", *rows]))
    return tmp_path / "my_method.py"


def test_a_class_from_a_file_is_compared(method: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In worker processes, which load it from the file; a changed file is another algorithm."""
    monkeypatch.syspath_prepend(str(method.parent))
    module = importlib.import_module("my_method")
    options = {"label": "ill", "domain": "site", "progress": False, **FEW}
    found = shoal.compare("t.csv", algorithms=["erm", module.Weighted], exhaustive=True, **options)
    assert set(found.to_frame().index) == {"erm", "Weighted"}
    assert not found.failed
    own = [r.config for r in found.records if r.config.name == "Weighted"]
    assert {c.algorithm.partition("@")[0] for c in own} == {"my_method.py:Weighted"}
    assert len({c.settings.get("weight") for c in own}) == 2  # its hyperparameter is searched
    method.write_text(METHOD.replace("times a weight", "with a weight"))
    assert algorithm_class("my_method.py:Weighted").__doc__ == "The mean loss, with a weight."
    with pytest.raises(InputError, match="has changed"):
        algorithm_class(own[0].algorithm)


@pytest.mark.parametrize("name", ["none.py", "my_method.py:Wieghted", "broken.py", "no.such:Method"])
def test_a_file_that_cannot_be_used(name: str, method: Path) -> None:
    Path("broken.py").write_text("import nothing_at_all")
    with pytest.raises(InputError, match=r"none\.py|Wieghted|broken\.py|no\.such"):
        shoal.compare("t.csv", label="ill", domain="site", algorithms=name)
    assert not Path("shoal-compare").exists()
