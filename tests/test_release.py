"""What is published: archives, an installation without extras, hints at extras, the version."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import shoal

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def run(*command: str | Path, cwd: Path, site: Path | None = None) -> str:
    """Its output; of the package in ``site``, and not of this checkout."""
    around = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "PYTHONPATH": str(site or "")}
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, cwd=cwd, env=around, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both archives in ``dist``, what they were made of, and the unpacked wheel in ``site``."""
    place = tmp_path_factory.mktemp("release")
    tree = place / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, tree)
    run("-m", "build", "--no-isolation", "--outdir", place / "dist", tree, cwd=place)
    (wheel,) = (place / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "site")
    return place


def test_archives_contain_every_file_of_the_package(release: Path) -> None:
    source = release / "tree" / "src"
    files = (p for p in (source / "shoal").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    package = {p.relative_to(source).as_posix() for p in files}
    held = {p.relative_to(release / "site").as_posix() for p in (release / "site").rglob("*") if p.is_file()}
    assert {name for name in held if ".dist-info/" not in name} == package
    assert "shoal/py.typed" in package
    about = Parser().parsestr(next((release / "site").glob("*.dist-info/METADATA")).read_text())
    assert (about["Name"], about["Version"]) == ("shoal", shoal.__version__)
    assert set(about.get_all("Provides-Extra", ())) == set(EXTRAS)
    with tarfile.open(next((release / "dist").glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", *(f"src/{name}" for name in package)} <= names


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


def test_the_wheel_runs(release: Path, tmp_path: Path) -> None:
    site = release / "site"
    assert run("-m", "shoal", "--version", cwd=tmp_path, site=site).strip() == shoal.__version__
    listed = json.loads(run("-m", "shoal", "list", "algorithms", "--json", cwd=tmp_path, site=site))
    assert {"erm", "fish", "idgm"} <= {one["name"] for one in listed["algorithms"]}
    block = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert block
    code = f"{block[1]}\nimport shoal; print(shoal.__file__)"
    assert Path(run("-c", code, cwd=tmp_path, site=site).splitlines()[-1]).is_relative_to(site)


# Without extras

OPTIONAL = """
    datasets lightning onnx onnxruntime onnxscript openpyxl peft pytorch_lightning ray tensorboard timm
    tokenizers torchvision transformers wandb wilds
"""
CALLS = {
    "images": "train erm cdsprites --model resnet18 --steps 1 --out images",
    "text": "train erm linear --model distilbert-base-uncased --steps 1 --out text",
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
    release: Path, tmp_path: Path
) -> None:
    found = json.loads(run("-c", SCRIPT, cwd=tmp_path, site=release / "site").splitlines()[-1])
    assert found["failed"] == ["shoal.integrations.lightning", "shoal.integrations.transformers"]
    assert found["first"][0] == 0, found["first"]
    for extra, (code, message) in found["hints"].items():
        assert code == 2, (extra, message)
        assert f"pip install 'shoal[{extra}]'" in message, (extra, message)
