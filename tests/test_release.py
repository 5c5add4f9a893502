"""What is published: archives, an installation without extras, hints at extras, the version.

Archives are built and installed once, in a copy of the tree and without a network. The environment has links
to what Shoal requires and to nothing else that is installed here, least of all this checkout.
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
from email.parser import Parser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import shoal

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def run(*command: str | Path, cwd: Path, expect: int = 0, seconds: float = 300) -> str:
    """Its output; in an environment that shows nothing of this checkout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SHOAL_DATA", "MYPYPATH")
    around = {name: value for name, value in os.environ.items() if name not in hidden}
    around |= {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=around, capture_output=True, text=True, timeout=seconds)
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
    bin: Path
    """Of an environment in which the wheel is installed."""


def make(place: Path) -> None:
    tree = place / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, tree)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place / "dist", tree, cwd=place)
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
    return Release(place / "tree", wheel, sdist, place / "environment" / "bin")


def test_archives_contain_every_file_of_the_package(release: Release) -> None:
    source = release.tree / "src"
    files = (p for p in (source / "shoal").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    package = {p.relative_to(source).as_posix() for p in files}
    with zipfile.ZipFile(release.wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == package
        assert "shoal/py.typed" in package
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        about = Parser().parsestr(archive.read(name).decode())
    assert (about["Name"], about["Version"]) == ("shoal", shoal.__version__)
    assert set(about.get_all("Provides-Extra", ())) == set(EXTRAS)
    with tarfile.open(release.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in package} <= held
    assert {"README.md", "LICENSE", "pyproject.toml"} <= held


def test_the_version_is_written_in_one_place_and_begins_the_changelog() -> None:
    assert "version" not in PROJECT
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = [Version(title) for title in re.findall(r"^## (\d+\.\d+\.\d+)", text, re.MULTILINE)]
    assert str(versions[0]) == Version(shoal.__version__).base_version
    assert versions == sorted(set(versions), reverse=True)


def test_what_is_required_directly_is_pinned_and_the_pin_is_allowed() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(n): v for n, _, v in (li.partition("==") for li in lines if "==" in li)}
    lists = (PROJECT["dependencies"], *EXTRAS.values())
    others = [one for some in lists for one in map(Requirement, some) if one.name != "shoal"]
    assert not {one.name for one in others if canonicalize_name(one.name) not in pins}
    assert not [one for one in others if not one.specifier.contains(pins[canonicalize_name(one.name)])]


def first_block() -> str:
    found = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    assert found
    return found[1]


def test_the_installed_wheel_runs(release: Release, tmp_path: Path) -> None:
    assert run(release.bin / "shoal", "--version", cwd=tmp_path).strip() == shoal.__version__
    listed = json.loads(run(release.bin / "shoal", "list", "algorithms", "--json", cwd=tmp_path))
    assert {"erm", "fish", "idgm"} <= {one["name"] for one in listed["algorithms"]}
    code = f"{first_block()}\nimport shoal; print(shoal.__file__)"
    where = run(release.bin / "python", "-c", code, cwd=tmp_path).splitlines()[-1]
    assert Path(where).is_relative_to(release.bin.parent)


# Without extras

OPTIONAL = """
    datasets lightning onnx onnxruntime onnxscript openpyxl peft pytorch_lightning ray tensorboard timm
    tokenizers torchvision transformers wandb wilds
"""
CALLS = {
    "images": "train erm cdsprites --model resnet18 --steps 1 --out images",
    "text": "train erm linear --model distilbert-base-uncased --steps 1 --out text",
    "peft": "train erm linear --model bert-base-uncased --model-options.lora 2 --steps 1 --out lora",
    "excel": "compare table.xlsx --label y --domain d",
    "onnx": "export run --out model.onnx",
    "ray": "sweep linear --algorithms erm --engine ray",
    "wandb": "train erm linear --steps 1 --wandb project --out wandb",
}
"""A command that needs an extra."""
SCRIPT = f"""
import contextlib, importlib.machinery, importlib.util, io, json, pkgutil, sys
from pathlib import Path

BLOCKED = {OPTIONAL!r}.split()

class Without(importlib.machinery.PathFinder):  # as if these were not installed
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
assert not any(map(importlib.util.find_spec, BLOCKED))
import shoal, shoal.cli

failed = []
for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
    try:
        importlib.import_module(module.name) if module.name != "shoal.__main__" else None
    except ImportError:
        failed.append(module.name)

def command(line):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        return [shoal.cli.main(line.split()), err.getvalue()]

first = command("train erm linear --steps 2 --out run")
Path("table.xlsx").write_bytes(b"PK")
hints = {{extra: command(line) for extra, line in {CALLS!r}.items()}}
print(json.dumps({{"failed": failed, "first": first, "hints": hints}}))
"""


def test_without_extras_shoal_works_and_names_the_extra_that_is_missing(
    release: Release, tmp_path: Path
) -> None:
    found = json.loads(run(release.bin / "python", "-c", SCRIPT, cwd=tmp_path).splitlines()[-1])
    assert found["failed"] == ["shoal.integrations.lightning", "shoal.integrations.transformers"]
    assert found["first"][0] == 0, found["first"]
    for extra, (code, message) in found["hints"].items():
        assert code == 2, (extra, message)
        assert f"pip install 'shoal[{extra}]'" in message, (extra, message)
