"""What is published: archives, an installation with the core alone, hints at extras, types, the version.

Archives are built and installed once, in a copy of the tree and without a network. The environment has links
to what the core requires and to nothing else that is installed here, least of all this checkout.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shoal

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
NOT_CALLED = {"docs", "all", "dev", "tensorboard"}
"""Extras for people who work on Shoal, sums of others, and a log that is written where it can be."""
OPTIONAL = """
    PIL datasets jinja2 lightning matplotlib onnx onnxruntime onnxscript pandas peft pyarrow
    pytorch_lightning ray scipy sklearn tensorboard timm tokenizers torchvision transformers wandb wilds
"""
STRAY = (".carry/notes.py", "runs/one/record.json", "src/shoal/__pycache__/cli.pyc", "dist/old.whl")
"""Lies about in a tree that is worked in, and must not be published."""
SECONDS = 120.0


def run(*command: str | Path, cwd: Path, expect: int = 0, seconds: float = SECONDS) -> str:
    """Its output; in an environment that shows nothing of this checkout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SHOAL_DATA", "MYPYPATH")
    around = {name: value for name, value in os.environ.items() if name not in hidden}
    around |= {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=around, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == expect, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def required(names: list[str]) -> dict[str, Distribution]:
    """What is installed here of these requirements and, in turn, of theirs."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(name) for name in names]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in found or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # such as the CUDA libraries of a torch that was built otherwise
            continue
        waiting += [Requirement(line) for line in found[name].requires or ()]
    return found


def link(names: list[str], site: Path) -> None:
    """These packages, and what they require, from this environment into ``site``."""
    for one in required(names).values():
        tops = {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(one.locate_file(top))


@dataclass(frozen=True)
class Release:
    tree: Path
    """The copy that was built."""
    wheel: Path
    sdist: Path
    environment: Path

    @property
    def bin(self) -> Path:
        return self.environment / "bin"

    @property
    def site(self) -> Path:
        return next(self.environment.glob("lib/python*/site-packages"))

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            return Parser().parsestr(archive.read(name).decode())


def make(place: Path) -> None:
    tree = place / "tree"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=leave)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, tree)
    for name in STRAY:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("x")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place / "dist", tree, cwd=place)
    install(place)


def install(place: Path) -> None:
    environment = place / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=place)
    [wheel] = (place / "dist").glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install")
    run(*pip, "--no-index", "--no-deps", "--no-compile", "--quiet", wheel, cwd=place)
    link(PROJECT["dependencies"], next(environment.glob("lib/python*/site-packages")))


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Made once, by whichever of several test processes is first."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    place = shared / "release"
    with (shared / "release.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "made").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            make(place)
            (place / "made").touch()
    [wheel], [sdist] = (place / "dist").glob("*.whl"), (place / "dist").glob("*.tar.gz")
    return Release(place / "tree", wheel, sdist, place / "environment")


# Archives


def package(tree: Path) -> set[str]:
    """Every file of the package, as a wheel calls it."""
    source = tree / "src"
    files = (p for p in (source / "shoal").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(source).as_posix() for p in files}


def test_a_wheel_holds_every_file_of_the_package_and_nothing_else(release: Release) -> None:
    with zipfile.ZipFile(release.wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == package(release.tree)
    assert {".py", ".yaml", ".html", ".typed"} == {Path(name).suffix for name in held}


def test_a_source_archive_holds_the_package_and_nothing_that_lies_about(release: Release) -> None:
    with tarfile.open(release.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in package(release.tree)} <= held
    assert {"README.md", "LICENSE", "pyproject.toml"} <= held
    assert not held & set(STRAY)


def test_what_a_wheel_says_of_itself(release: Release) -> None:
    said = release.metadata()
    assert (said["Name"], said["Version"]) == ("shoal", shoal.__version__)
    assert set(said.get_all("Provides-Extra", ())) == set(EXTRAS)
    assert said["License-File"] == "LICENSE"
    core = [Requirement(line) for line in said.get_all("Requires-Dist", ()) if "extra ==" not in line]
    assert {one.name for one in core} == {"torch", "numpy", "safetensors", "filelock", "pyyaml"}


# The version


def test_the_version_is_written_in_one_place() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", shoal.__version__)


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## (\d+)\.(\d+)\.(\d+)", text, re.MULTILINE)
    versions = [tuple(map(int, title)) for title in titles]
    assert ".".join(titles[0]) == shoal.__version__
    assert versions == sorted(set(versions), reverse=True)


def test_what_is_required_directly_is_pinned_and_the_pin_is_allowed() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(n): v for n, _, v in (li.partition("==") for li in lines if "==" in li)}
    lists = (PROJECT["dependencies"], *EXTRAS.values())
    wanted = [Requirement(line) for some in lists for line in some]
    others = [one for one in wanted if one.name != "shoal"]
    assert not {one.name for one in others if canonicalize_name(one.name) not in pins}
    refused = [one for one in others if not one.specifier.contains(pins[canonicalize_name(one.name)])]
    assert not refused


# The core alone


def first_block() -> str:
    found = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    assert found
    return found[1]


def test_the_installed_wheel_is_what_runs(release: Release, tmp_path: Path) -> None:
    where = run(release.bin / "python", "-c", "import shoal; print(shoal.__file__)", cwd=tmp_path)
    assert Path(where.strip()) == release.site / "shoal" / "__init__.py"
    assert run(release.bin / "shoal", "--version", cwd=tmp_path) == f"shoal {shoal.__version__}\n"
    assert "Exit codes:" in run(release.bin / "shoal", "--help", cwd=tmp_path)
    listed = run(release.bin / "shoal", "list", "algorithms", "--json", cwd=tmp_path)
    assert {"erm", "fish", "idgm"} <= {one["name"] for one in json.loads(listed)["algorithms"]}


def test_the_first_block_of_the_readme_runs(release: Release, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(first_block(), encoding="utf-8")
    run(release.bin / "python", "block.py", cwd=tmp_path)


WITHOUT = f"""
import importlib.machinery, importlib.util, sys

BLOCKED = {OPTIONAL!r}.split()

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else super().find_spec(name, path, target)

at = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[at] = Without
assert not any(map(importlib.util.find_spec, BLOCKED))
"""
"""As if these were not installed: to import them fails and ``find_spec`` finds nothing."""

CORE = """
import contextlib, io, json, pkgutil
import shoal, shoal.cli

failed = {}
names = [m.name for m in pkgutil.walk_packages(shoal.__path__, "shoal.") if m.name != "shoal.__main__"]
for name in names:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = str(error)

import torch
def site(n):
    return torch.randn(n, 4), torch.randint(2, (n,))
fit = shoal.fit("fish", torch.nn.Linear(4, 2), train={"a": site(40), "b": site(40)}, test={"c": site(40)},
                steps=5, batch_size=8)
listed = {}
for what in ("algorithms", "datasets"):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert shoal.cli.main(["list", what]) == 0
    listed[what] = said.getvalue()
print(json.dumps({"names": names, "failed": failed, "step": fit.last.step, "accuracy": fit.accuracy("c"),
                  "listed": listed}))
"""


def test_the_core_needs_no_extra(release: Release, tmp_path: Path) -> None:
    found = json.loads(run(release.bin / "python", "-c", WITHOUT + CORE, cwd=tmp_path))
    # These are for another package each, and say so.
    others = ["shoal.integrations.lightning", "shoal.integrations.transformers", "shoal.sklearn"]
    assert list(found["failed"]) == others
    assert {"shoal.api.fit", "shoal.report.page", "shoal.data.sets.heart"} <= set(found["names"])
    assert found["step"] == 5
    assert 0 <= found["accuracy"] <= 1
    assert "fish" in found["listed"]["algorithms"]
    assert "cdsprites" in found["listed"]["datasets"]


CALLS = [
    ("plots", "from shoal.report.figures import matrix; matrix(['a', 'b'], [[1.0, 0.0], [0.0, 1.0]])"),
    ("digits", "command('train erm rotated-digits --steps 1 --out digits')"),
    ("sklearn", "import shoal.sklearn"),
    ("sklearn", "from shoal.experiments.baselines import lacking; raise InputError(lacking())"),
    ("images", "command('data check pictures')"),
    ("timm", "command('train erm cdsprites --model resnet18 --steps 1 --out timm')"),
    ("text", "command('train erm linear --model distilbert-base-uncased --steps 1 --out text')"),
    ("lora", "command('train erm linear --model bert-base-uncased --model-set lora=2 --steps 1 --out lora')"),
    ("hf", "from shoal.data import from_hf; from_hf([], label='y', domain='d')"),
    ("stats", "command('diagnose linear')"),
    ("tables", "command('compare table.parquet --label y --domain d')"),
    ("tables", "from shoal.experiments.results import load; load('runs').to_frame()"),
    ("onnx", "command('export runs/one --format onnx --out model.onnx')"),
    ("ray", "command('sweep --engine ray linear --algorithms erm')"),
    ("report", "command('report runs')"),
]
"""What cannot be done without which extra."""

HINTS = f"""
import contextlib, io, json
import shoal.cli
from shoal import InputError
from pathlib import Path

def command(line):
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        code = shoal.cli.main(line.split())
    assert code == 2, (line, code, said.getvalue())
    raise InputError(said.getvalue().removesuffix("\\n"))

Path("pictures/art/dog").mkdir(parents=True)
Path("pictures/art/dog/1.png").write_bytes(b"")
Path("table.parquet").write_bytes(b"PAR1")
with contextlib.redirect_stdout(io.StringIO()):
    assert shoal.cli.main("train erm linear --steps 2 --out runs/one".split()) == 0
said = []
for extra, call in {CALLS!r}:
    try:
        exec(call)
        said.append(["nothing", ""])
    except BaseException as error:
        said.append([type(error).__name__, str(error)])
print(json.dumps(said))
"""


def test_every_extra_has_a_call_that_hints_at_it() -> None:
    assert {extra for extra, _ in CALLS} == set(EXTRAS) - NOT_CALLED


def test_what_is_lacking_is_said_in_one_line_with_its_extra(release: Release, tmp_path: Path) -> None:
    found = json.loads(run(release.bin / "python", "-c", WITHOUT + HINTS, cwd=tmp_path))
    wrong = []
    for (extra, call), (kind, text) in zip(CALLS, found, strict=True):
        expected = "ImportError" if call.startswith("import ") else "InputError"
        if kind != expected or "\n" in text or f"pip install 'shoal[{extra}]'" not in text:
            wrong.append(f"{call}: {kind}: {text}")
    assert not wrong, "\n".join(wrong)


# Types

TYPED = """
from collections.abc import Sequence
from typing import Any, assert_type

import shoal
from shoal.algorithms import Algorithm, algorithm_class
from shoal.data import DomainBatchSampler, DomainData, Domains, from_arrays, hold_out
from shoal.optim import Fish
from shoal.sklearn import DomainClassifier
from shoal.training.options import Options


def ours(network: Any, x: Any, y: Any, hospital: Sequence[str]) -> float:
    data = from_arrays(x, y, hospital, test=["oslo"])
    assert_type(data, DomainData)
    assert_type(data.splits["train"], Domains)
    run = shoal.fit("fish", network, train=data, steps=5, settings={"meta_lr": 0.5})
    assert_type(run, shoal.Fit)
    assert_type(run.accuracy("oslo"), float)
    return run.accuracy("oslo")


def yours(optimizer: Any, hospital: Sequence[int]) -> Fish:
    for batch in DomainBatchSampler(hospital, batch_size=4, domains_per_step=2):
        assert_type(batch, list[int])
    return Fish(optimizer, inner_steps=4, meta_lr=0.5)


def estimator() -> DomainClassifier:
    return DomainClassifier("fish", steps=10)


def later(folder: str) -> shoal.Trained:
    try:
        return shoal.load(folder)
    except shoal.InputError as error:
        raise SystemExit(str(error)) from error


assert_type(algorithm_class("fish"), type[Algorithm])
assert_type(Options(steps=10).steps, int)
"""
MISTAKEN = """
import shoal
from shoal.optim import Fish

name: str = shoal.fit("erm", None, train={}).accuracy("oslo")
Fish(None, inner_steps="four")
"""
MISTAKES = {5: "Incompatible types in assignment", 6: 'Argument "inner_steps"'}
"""By line. Were there no py.typed, all of it would be Any and nothing be found."""
SETTINGS = """[mypy]
strict = True
[mypy-sklearn.*]
ignore_missing_imports = True
"""
UNREAD = """[mypy-torch.*]
follow_imports = skip
ignore_missing_imports = True
"""
"""torch is taken as untyped: reading it takes mypy three times as long as all the rest."""


def check_types(release: Release, place: Path, settings: str) -> None:
    """``mypy --strict`` finds the mistakes in a user's two files and nothing else, as installed."""
    for name, text in (("typed.py", TYPED), ("mistaken.py", MISTAKEN), ("mypy.ini", settings)):
        (place / name).write_text(text)
    mypy = (sys.executable, "-m", "mypy", "--no-error-summary", "--python-executable", release.bin / "python")
    found = run(*mypy, "typed.py", "mistaken.py", cwd=place, expect=1, seconds=600).splitlines()
    assert all(line.startswith("mistaken.py:") for line in found), found
    for number, text in MISTAKES.items():
        assert any(line.startswith(f"mistaken.py:{number}: error: {text}") for line in found), found


def test_users_see_types(release: Release, tmp_path: Path) -> None:
    check_types(release, tmp_path, SETTINGS + UNREAD)


# In minutes


@pytest.mark.slow
def test_users_see_types_beside_those_of_torch(release: Release, tmp_path: Path) -> None:
    check_types(release, tmp_path, SETTINGS)


@pytest.mark.slow
def test_pip_installs_it_into_an_empty_environment(release: Release, tmp_path: Path) -> None:
    """Needs an index of packages."""
    run(sys.executable, "-m", "venv", "environment", cwd=tmp_path)
    python = tmp_path / "environment" / "bin" / "python"
    constraints = ("-c", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", *constraints, release.wheel, cwd=tmp_path, seconds=1200)
    where = run(python, "-c", "import shoal; print(shoal.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "environment")
    (tmp_path / "block.py").write_text(first_block(), encoding="utf-8")
    run(python, "block.py", cwd=tmp_path)
    installed = json.loads(run(python, "-m", "pip", "list", "--format", "json", cwd=tmp_path))
    optional = {"scikit-learn", "matplotlib", "pandas", "pyarrow", "pillow", "timm", "transformers", "ray"}
    assert not optional & {one["name"].lower() for one in installed}
