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
    ("errors", "files", "terminal", "registry", "settings", "options"),
    ("replay", "tensors", "vision", "gradients", "penalties", "losses"),
    ("optim",),
    ("data",),
    ("datasets",),
    ("models",),
    ("algorithms",),
    ("training",),
    ("experiments",),
    ("report",),
    ("trained", "api"),
    ("sklearn", "integrations"),
    ("paper",),
    ("cli",),
)
FILES = sorted(p.relative_to(SOURCE).as_posix() for p in SOURCE.rglob("*.py"))
LAYERED = [f for f in FILES if f not in ("__init__.py", "__main__.py")]


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
    names = [name.split(".") for name in imports(text, ".".join(["shoal", *path.parent.parts]))]
    # `import shoal` is for its version; what hangs below it is named in full.
    parts = {p[1]: ".".join(p) for p in names if p[0] == "shoal" and len(p) > 1 and p[1][0] != "_"}
    return [name for part, name in parts.items() if layer(part) > own]


@pytest.mark.parametrize("file", LAYERED)
def test_imports_point_to_earlier_layers(file: str) -> None:
    assert not broken((SOURCE / file).read_text(encoding="utf-8"), file)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120, check=True
    )


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = python("-X", "importtime", "-m", "shoal", *arguments)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "shoal.cli" in imported
    assert not imported & {"torch", "numpy", "pandas", "scipy", "sklearn", "matplotlib"}
    assert done.stdout


def test_the_package_options_and_reports_are_imported_without_torch() -> None:
    modules = [f.removesuffix(".py").replace("/", ".") for f in FILES if f.startswith("report/")]
    names = ["shoal", "shoal.options", *(f"shoal.{m}".removesuffix(".__init__") for m in modules)]
    code = f"import sys, importlib, shoal\nfor n in {names}: importlib.import_module(n)"
    assert python("-c", f"{code}\nprint('torch' in sys.modules)").stdout.strip() == "False"
