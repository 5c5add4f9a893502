"""Imports point one way, and what must start fast does not import torch."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "shoal"
LAYERS = (
    (
        "errors",
        "files",
        "terminal",
        "settings",
        "registry",
        "replay",
        "double_backward",
        "tensors",
        "gradients",
        "penalties",
        "losses",
        "vision",
    ),
    ("optim",),
    ("data",),
    ("models",),
    ("algorithms",),
    ("training",),
    ("experiments",),
    ("trained", "export", "soups"),
    ("report",),
    ("scoring",),
    ("api",),
    ("cli", "sklearn", "integrations"),
    ("paper",),
)
EXEMPT = ("__init__", "__main__")
FILES = sorted(p.relative_to(SOURCE).as_posix() for p in SOURCE.rglob("*.py"))
LAYERED = [f for f in FILES if Path(f).parts[0].removesuffix(".py") not in EXEMPT]


def layer(part: str) -> int:
    found = [n for n, parts in enumerate(LAYERS) if part in parts]
    assert found, f"{part!r} is in no layer: give it one here and in the design"
    return found[0]


def imports(text: str, package: str) -> Iterator[str]:
    """The full name of everything a module's source imports, anywhere in it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def broken(text: str, file: str) -> list[str]:
    """The imports in ``file`` that point to a later layer."""
    path = Path(file)
    own = layer(path.parts[0].removesuffix(".py"))
    package = ".".join(["shoal", *path.parent.parts])
    own_imports = [name.split(".") for name in imports(text, package)]
    # `import shoal` is for its version; what hangs below it is named in full.
    parts = {p[1]: ".".join(p) for p in own_imports if p[0] == "shoal" and len(p) > 1 and p[1][0] != "_"}
    return [name for part, name in parts.items() if layer(part) > own]


def test_the_files_are_found() -> None:
    assert {"gradients.py", "optim.py", "data/sets/cdsprites.py", "cli/app.py"} <= set(LAYERED)
    assert "__init__.py" not in LAYERED


@pytest.mark.parametrize("file", LAYERED)
def test_imports_point_to_earlier_layers(file: str) -> None:
    assert not broken((SOURCE / file).read_text(encoding="utf-8"), file)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("import shoal.training.loop", "algorithms/fish.py"),
        ("from shoal.training import fit", "algorithms/fish.py"),
        ("from shoal import cli", "experiments/run.py"),
        ("from ..training import fit", "data/loader.py"),
        ("from .. import experiments", "data/loader.py"),
        ("def f():\n    from shoal.data import batch", "optim.py"),
        ("if TYPE_CHECKING:\n    from shoal.optim import Fish", "gradients.py"),
    ],
)
def test_a_wrong_import_would_be_found(text: str, file: str) -> None:
    assert broken(text, file)


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("from shoal.data.batch import Task", "algorithms/fish.py"),
        ("import shoal\nfrom shoal import __version__", "experiments/run.py"),
        ("from . import base", "algorithms/fish.py"),
        ("import torch", "gradients.py"),
    ],
)
def test_a_right_import_is_let_through(text: str, file: str) -> None:
    assert not broken(text, file)


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("report/")])
def test_report_names_no_torch(file: str) -> None:
    names = imports((SOURCE / file).read_text(encoding="utf-8"), "shoal.report")
    assert not [n for n in names if n.split(".")[0] in ("torch", "accelerate")]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120, check=True
    )


def test_report_is_imported_without_torch() -> None:
    modules = [f.removesuffix(".py").replace("/", ".") for f in FILES if f.startswith("report/")]
    names = [f"shoal.{m}".removesuffix(".__init__") for m in modules]
    code = (
        f"import sys, importlib\nfor n in {names}: importlib.import_module(n)\nprint('torch' in sys.modules)"
    )
    assert python("-c", code).stdout.strip() == "False"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_the_command_line_starts_without_torch(arguments: list[str]) -> None:
    done = python("-X", "importtime", "-m", "shoal", *arguments)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "shoal.cli" in imported
    assert not imported & {"torch", "numpy", "sklearn", "matplotlib"}
    assert "shoal" in done.stdout


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, shoal\nprint('torch' in sys.modules)\nshoal.fit\nprint('torch' in sys.modules)"
    assert python("-c", code).stdout.split() == ["False", "True"]
