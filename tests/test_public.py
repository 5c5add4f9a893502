"""What ``import shoal`` offers, and ``shoal.train``."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import algorithms
from shoal.cli import main

SOURCE = Path(shoal.__file__).parents[1]
SHORT: dict[str, Any] = {"steps": 6, "batch_size": 8, "eval_every": 2, "device": "cpu", "progress": False}
LINEAR = [
    "train",
    "erm",
    "linear",
    "--steps",
    "6",
    "--batch-size",
    "8",
    "--eval-every",
    "2",
    "--device",
    "cpu",
]


def fresh(code: str) -> list[str]:
    """What a new Python prints."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize("name", shoal.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert name in dir(shoal)
    found = getattr(shoal, name)
    assert getattr(found, "__name__", name).rpartition(".")[2] == name or name == "__version__"


def test_public_functions_are_typed_and_documented() -> None:
    for name in (
        "fit",
        "load",
        "score",
        "compare",
        "diagnose",
        "sweep",
        "report",
        "results",
        "soup",
        "train",
    ):
        function = getattr(shoal, name)
        parameters = inspect.signature(function).parameters.values()
        assert not [p for p in parameters if p.kind is p.VAR_KEYWORD], name
        assert all(p.annotation is not p.empty for p in parameters), name
        assert "::" in function.__doc__ or ">>>" in function.__doc__, name


MODULES = (
    *("algorithms", "data", "export", "gradients", "integrations.lightning", "integrations.transformers"),
    *("models", "optim", "penalties", "sklearn", "training.averaging", "training.callbacks"),
    *("training.metrics", "training.options", "experiments.config", "experiments.execute"),
    *("experiments.record", "experiments.results", "experiments.run", "experiments.store"),
)
"""Modules with public functions and classes, beside those of ``shoal`` itself."""
OF_EXPERIMENTS = (
    *("RunConfig", "RunRecord", "Store", "execute", "load", "make_executor", "read_config"),
    *("read_record", "run"),
)
PARTLY = {
    "export": ("export",),
    "optim": ("Fish",),
    "training.averaging": ("average_weights",),
    "training.callbacks": ("Callback",),
    "training.options": ("Options",),
}
"""Of modules whose other names are internal."""


def documented() -> list[tuple[str, Any]]:
    """Every public function and class, once, by its full name."""
    found = {f"shoal.{name}": getattr(shoal, name) for name in shoal.__all__}
    found |= {f"shoal.algorithms.{n}": algorithms.algorithm_class(n) for n in algorithms.registry.names()}
    for name in MODULES:
        try:
            module = importlib.import_module(f"shoal.{name}")
        except ImportError:  # an integration whose library is not installed
            continue
        names = PARTLY.get(name) or getattr(module, "__all__", None)
        if name.startswith("experiments."):
            names = [
                n for n in OF_EXPERIMENTS if getattr(vars(module).get(n), "__module__", "") == module.__name__
            ]
        own = [n for n, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
        found |= {
            f"{module.__name__}.{n}": getattr(module, n)
            for n in names or own
            if n[0] != "_" and not n.isupper()
        }
    kept = {
        id(each): (name, each)
        for name, each in found.items()
        if inspect.isfunction(each) or inspect.isclass(each)
    }
    return list(kept.values())


@cache
def classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Those at its top level: to look for the source of each anew is to parse the file as often."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {each.name: each for each in body if isinstance(each, ast.ClassDef)}


@cache
def described_by(one: Any) -> set[str]:
    """The arguments that its own docstring describes, and documented fields of a class."""
    names: set[str] = set()
    sections = re.split(r"^(?:Args|Attributes):\n", inspect.cleandoc(one.__doc__ or ""), flags=re.MULTILINE)
    for text in sections[1:]:
        for entry in re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*): \S", text, re.MULTILINE):
            names |= {name.strip(" *") for name in entry.split(",")}
    if inspect.isclass(one) and one.__module__.startswith("shoal"):
        for field, text_of in pairwise(classes_of(one.__module__)[one.__qualname__].body):
            if isinstance(field, ast.AnnAssign) and isinstance(text_of, ast.Expr):
                names.add(ast.unparse(field.target))
    return names


def described(each: Any) -> set[str]:
    """The arguments that a docstring describes; of a class also those of its bases, and documented fields."""
    return set().union(*map(described_by, each.__mro__ if inspect.isclass(each) else [each]))


@pytest.mark.parametrize(
    ("name", "each"), documented(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_docstrings_describe_every_argument(name: str, each: Any) -> None:
    summary = (each.__doc__ or "").partition("\n")[0]
    assert summary, f"{name} has no summary line"
    assert summary.endswith((".", ". ::", ":")), (
        f"the summary of {name} is no sentence in one line: {summary}"
    )
    if "Protocol" in [base.__name__ for base in getattr(each, "__mro__", ())]:
        return
    taken = [
        p for p in inspect.signature(each).parameters if not p.startswith("_") and p not in ("args", "kwargs")
    ]
    assert [p for p in taken if p not in described(each)] == [], f"{name} does not describe these in Args"


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    code = "import sys, shoal; dir(shoal); print('torch' in sys.modules); shoal.optim.Fish"
    assert fresh(f"{code}; shoal.data.from_table; print('torch' in sys.modules)") == ["False", "True"]


def test_report_is_the_function_whatever_was_imported() -> None:
    code = "import shoal; from shoal.report.tables import Table; print(shoal.report.__name__, Table.__name__)"
    assert fresh(code) == ["report", "Table"]


@pytest.mark.parametrize("name", algorithms.registry.names())
def test_algorithms_are_imported_by_the_name_of_their_class(name: str) -> None:
    cls = algorithms.algorithm_class(name)
    assert getattr(algorithms, cls.__name__) is cls


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Fush'"):
        _ = algorithms.Fush
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = shoal.trian


class TestTrain:
    def test_the_function_and_the_command_are_the_same(self, tmp_path: Path, capsys: Any) -> None:
        run = shoal.train("erm", "linear", **SHORT, out=tmp_path / "a")
        assert main([*LINEAR, "--out", str(tmp_path / "b")]) == 0
        shown = capsys.readouterr().out
        assert str(run).splitlines()[:-1] == shown.rstrip("\n").splitlines()[:-1]
        one, other = ((tmp_path / n / "model.safetensors").read_bytes() for n in "ab")
        assert one == other
        assert run.record.status == "finished"
        assert "<table" in run._repr_html_()
        assert run.load().predict(np.zeros((1, 4), "float32")).shape == (1,)
        run.save(tmp_path / "run.json")
        assert json.loads((tmp_path / "run.json").read_text())["config"]["algorithm"] == "erm"

    def test_several_seeds(self, tmp_path: Path) -> None:
        pytest.importorskip("pandas")
        run = shoal.train("erm", "linear", **SHORT, seeds=2, jobs=1, out=tmp_path / "runs")
        assert [r.config.seed for r in run.records] == [0, 1]
        assert "over 2 seeds" in str(run)
        frame = run.to_frame()
        assert list(frame.columns) == ["seed", "split", "domain", "metric", "score"]
        assert set(frame["seed"]) == {0, 1}
        again = shoal.train("erm", "linear", **SHORT, seeds=2, jobs=1, out=tmp_path / "runs")
        assert str(again) == str(run)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"steps": 0}, "steps of train must be a whole number from 1"),
            ({"optimizer": "adm"}, "Did you mean 'adam'"),
            ({"settings": {"meta_l": 1}}, "unknown setting of ERM"),
            (
                {"held_out": "D9", "data_options": {"test": "D1"}},
                "held_out= and data_options= test=… set the",
            ),
            ({"label": "y"}, "label= is an option of tables"),
            ({"freeze_backbone": True}, "freeze_backbone= requires a timm model"),
        ],
    )
    def test_errors_name_python_arguments(
        self, options: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        with pytest.raises(shoal.InputError, match=message):
            shoal.train("erm", "linear", **{**SHORT, **options}, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_errors_of_the_command_name_options(self, capsys: Any) -> None:
        for words, message in (
            ("--label y", "--label is an option of tables"),
            ("--held-out D9 --data test=D1", "--held-out and --data test=… set the same option"),
            ("--freeze-backbone", "--freeze-backbone requires a timm model, such as --model mobilenetv2_100"),
            (
                "--bad-images skip --data bad=stop",
                "--bad-images skip contradicts --data bad=stop; specify only one",
            ),
        ):
            assert main([*LINEAR, *words.split()]) == 2
            assert message in capsys.readouterr().err


class TestConfig:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def config_of(self, text: str, *words: str) -> dict[str, Any]:
        Path("options.yaml").write_text(text)
        short = ["--config", "options.yaml", "--device", "cpu", "--out", "run", "--json"]
        shutil.rmtree("run", ignore_errors=True)
        assert main(["train", "fish", "linear", *short, *words]) == 0
        return dict(json.loads(Path("run/record.json").read_text())["config"])

    def test_options_of_a_file(self) -> None:
        text = (
            "steps: 4\nbatch-size: 8\neval_every: 2\nset: {meta_lr: 0.2, buffers: walk}\nlr: 1e-2\nseed: null"
        )
        config = self.config_of(text)
        assert (config["steps"], config["batch_size"], config["seed"]) == (4, 8, 0)
        assert config["settings"] == {"meta_lr": 0.2, "buffers": "walk"}
        assert config["optimizer_options"] == {"lr": 0.01}

    def test_what_is_typed_wins(self) -> None:
        text = "steps: 4\nset: [meta_lr=0.2]\neval_every: 2\ndeterministic: false"
        config = self.config_of(text, "--steps=6", "--set", "meta_lr=0.3")
        assert (config["steps"], config["settings"]) == (6, {"meta_lr": 0.3})

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("stepz: 4", "'stepz' is not an option of this command. Did you mean 'steps'?"),
            ("config: other.yaml", "'config' is not an option of this command"),
            ("steps: [1, 2]", "steps takes one value, got [1, 2]"),
            ("steps: x", "--steps must be a whole number"),
            ("compile: 3", "compile must be true or false, got 3"),
            ("- steps", "must contain NAME: VALUE lines"),
            ("{", "is not YAML"),
            (None, "'options.yaml' cannot be read: No such file"),
        ],
    )
    def test_what_is_wrong(self, text: str | None, message: str, capsys: Any) -> None:
        if text is not None:
            Path("options.yaml").write_text(text)
        assert main(["train", "fish", "linear", "--config", "options.yaml"]) == 2
        shown = capsys.readouterr()
        assert message in shown.err
        assert len(shown.err.splitlines()) <= 3
        assert not shown.out

    def test_a_command_within_a_command(self, capsys: Any) -> None:
        Path("options.yaml").write_text("plan: true\nto: there\njson: true")
        assert main(["data", "get", "pacs", "--config", "options.yaml"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["plan"][0]["folder"] == "there/PACS"
        assert content["schema"] == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_commands_and_options(shell: str, capsys: Any) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("train", "compare", "domains-per-step", "bf16", "keep-archive"):
        assert word in script
    if shell != "zsh" and (program := shutil.which(shell)):
        assert subprocess.run([program, "-n"], input=script, text=True).returncode == 0


def test_bash_completes(capsys: Any) -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("there is no bash")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in ("shoal", *words))
        code = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}; _shoal; echo "${{COMPREPLY[@]}}"'
        return subprocess.run([bash, "-c", code], capture_output=True, text=True, check=True).stdout.split()

    assert completed("tra") == ["train", "track"]
    assert completed("train", "--batch") == ["--batch-size"]
    assert completed("train", "fish", "linear", "--precision", "") == ["fp32", "bf16", "fp16", "auto"]
    assert completed("data", "get", "pacs", "--mir") == ["--mirror"]


def test_only_the_module_of_the_command_is_imported() -> None:
    code = "import sys; from shoal.cli import main; main(['list', 'datasets', 'nothing', '--json'])"
    names = "[m for m in sys.modules if m.startswith(('shoal.cli.', 'shoal.paper'))]"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*{names})"], capture_output=True, text=True, env=environment
    )
    assert set(done.stdout.split()) == {f"shoal.cli.{m}" for m in ("app", "arguments", "list", "showing")}


def test_help_names_groups_and_exit_codes(capsys: Any) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for text in ("Start here:", "Your data:", "Runs:", "The paper:", "  130 ", "  143 "):
        assert text in shown
