"""What ``import shoal`` offers: lazy names, typed functions, docstrings that describe every argument."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import algorithms
from shoal.cli import main

MODULES = ("algorithms", "data", "gradients", "integrations.lightning", "integrations.transformers", "models")
MODULES += ("penalties", "sklearn")
"""Modules with public functions and classes, beside those of ``shoal`` itself and these names."""
NAMES = (
    *(
        "optim.Fish",
        "training.averaging.average_weights",
        "training.metrics.Metric",
        "training.metrics.Outcome",
    ),
    *("training.metrics.metric", "training.callbacks.Callback", "experiments.config.read_config"),
    *("experiments.execute.execute", "experiments.record.RunRecord", "experiments.record.read_record"),
    *("experiments.run.run", "experiments.store.Store", "api.data.check", "api.data.get", "api.data.example"),
    *("api.listing.listing", "paper.demo.demo", "paper.reproduce.reproduce"),
)


def fresh(code: str) -> list[str]:
    """What a new Python prints."""
    environment = os.environ | {"PYTHONPATH": str(Path(shoal.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.split()


def test_every_public_name_is_there() -> None:
    for name in shoal.__all__:
        assert name in dir(shoal)
        assert getattr(getattr(shoal, name), "__name__", name).rpartition(".")[2] == name
    for name in algorithms.registry.names():
        cls = algorithms.algorithm_class(name)
        assert getattr(algorithms, cls.__name__) is cls
    with pytest.raises(AttributeError, match="no attribute 'Fush'"):
        _ = algorithms.Fush
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = shoal.trian


def test_report_is_the_function_whatever_was_imported() -> None:
    code = "import shoal; from shoal.report.tables import Table; print(shoal.report.__name__, Table.__name__)"
    assert fresh(code) == ["report", "Table"]


def documented() -> list[tuple[str, Any]]:
    """Every public function and class, once, by its full name."""
    found = {f"shoal.{name}": getattr(shoal, name) for name in shoal.__all__}
    found |= {f"shoal.algorithms.{n}": algorithms.algorithm_class(n) for n in algorithms.registry.names()}
    for name in MODULES:
        try:
            module = importlib.import_module(f"shoal.{name}")
        except ImportError:  # an integration whose library is not installed
            continue
        own = [n for n, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
        names = getattr(module, "__all__", None) or own
        found |= {f"shoal.{name}.{n}": getattr(module, n) for n in names if n[0] != "_" and not n.isupper()}
    for name in NAMES:
        module_name, _, own_name = name.rpartition(".")
        found[f"shoal.{name}"] = getattr(importlib.import_module(f"shoal.{module_name}"), own_name)
    kept = {
        id(each): (name, each)
        for name, each in found.items()
        if inspect.isfunction(each) or inspect.isclass(each)
    }
    return list(kept.values())


def described(each: Any, name: str) -> bool:
    """Whether a docstring mentions an argument, or a field of a class has one; those of its bases count."""
    for one in each.__mro__ if inspect.isclass(each) else [each]:
        if not one.__module__.startswith("shoal"):
            continue
        text = f"{sys.modules[one.__module__].__doc__} {one.__doc__}"
        field = rf'^ +{name}: [^\n]*(\n +[^\n"]*)*\n +"""'
        if re.search(rf"\b{name}\b", text) or re.search(field, inspect.getsource(one), re.MULTILINE):
            return True
    return False


@pytest.mark.parametrize(
    ("name", "each"), documented(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_docstrings_describe_every_argument(name: str, each: Any) -> None:
    summary = (each.__doc__ or "").partition("\n")[0]
    assert summary.endswith((".", ". ::", ":"))
    if "Protocol" in [base.__name__ for base in getattr(each, "__mro__", ())]:
        return
    taken = inspect.signature(inspect.unwrap(each)).parameters
    if inspect.isclass(each) and issubclass(each, algorithms.Algorithm):
        taken = {**taken, **algorithms.settings_of(each)}
    assert not [n for n in taken if n[0] != "_" and n not in ("args", "kwargs") and not described(each, n)]


def test_the_function_and_the_command_do_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"steps": 6, "batch_size": 8, "eval_every": 2, "device": "cpu"}
    run = shoal.train("erm", "linear", **options, progress=False, out=tmp_path / "a")
    words = shoal.options.as_flags({**options, "out": tmp_path / "b"})
    assert main(["train", "erm", "linear", *words]) == 0
    shown = capsys.readouterr().out
    assert str(run).splitlines()[:-1] == shown.rstrip("\n").splitlines()[:-1]
    one, other = ((tmp_path / n / "model.safetensors").read_bytes() for n in "ab")
    assert one == other
    assert "<table" in run._repr_html_()
    assert run.load().predict(np.zeros((1, 4), "float32")).shape == (1,)


@pytest.mark.parametrize(
    ("options", "python", "flag"),
    [
        ({"steps": 0}, "steps must be", "--steps must be"),
        ({"freeze_backbone": True}, "freeze_backbone: ", "--freeze-backbone: "),
    ],
)
def test_errors_name_arguments_in_python_and_flags_on_the_command_line(
    options: dict[str, Any], python: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with pytest.raises(shoal.InputError, match=re.escape(python)):
        shoal.train("erm", "linear", **options, out=out)
    assert main(["train", "erm", "linear", *shoal.options.as_flags({**options, "out": out})]) == 2
    assert flag in capsys.readouterr().err
    assert not out.exists()
