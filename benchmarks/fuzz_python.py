"""Calls of the public functions for fuzz.py, as Python expressions that can be pasted and repeated.

Arguments come from the functions' own signatures: a parameter that is not listed below gets values by its
annotation. One or two arguments of a call are wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import linecache
import random
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# fmt: off
NASTY = (
    "None", "0", "-1", "1", "10**30", "2**63", "1.5", "-0.5", "float('nan')", "float('inf')",
    "-float('inf')", "1e308", "'x'", "''", "b'x'", "'\\x1b[31mred'", "'a' * 300", "'-1'", "'\\ud800'",
    "'nan'", "'../x'", "'\\x00'", "True", "False", "[]", "{}", "()", "[1, 2]", "{'a': 1}", "[None]",
    "[[1], [2, 3]]", "['a', 1, None]", "{1: 2}", "set()", "{1, 2}", "object()", "print", "int", "type",
    "...", "1j", "range(3)", "iter([1, 2])", "(i for i in range(3))", "lambda *a, **k: None", "np.int64(2)",
    "np.float32(0.5)", "np.bool_(True)", "np.array(3)", "np.array([])", "np.ones((3, 2))",
    "np.array(['a', 'b'])", "np.array([1, None], dtype=object)", "np.ones(24)", "np.full((24, 5), np.nan)",
    "np.zeros((24, 5, 0))", "np.ones((0, 5))", "torch.tensor(1.0)", "torch.tensor([])",
    "torch.full((24,), float('nan'))", "torch.ones(24, 5)", "torch.ones(2, 2).to_sparse()",
    "torch.ones(24, device='meta')", "torch.ones(24, dtype=torch.complex64)", "torch.arange(24)",
    "torch.ones(24, 5).half()", "torch.device('meta')", "torch.float32", "torch.nn.Linear(3, 2)",
    "torch.optim.SGD", "nn.MSELoss()", "nn.CrossEntropyLoss", "datetime.date(2020, 1, 1)", "Decimal('1.5')",
    "Fraction(1, 2)", "Path('missing')", "Path('patients.csv')", "'patients.csv'", "pandas.DataFrame()",
    "pandas.Series([1, 2])", "pandas.DataFrame({'a': [1, 2]})", "pandas.NA", "np.datetime64('2020-01-01')",
    "Odd()", "[Odd()]", "{'oslo': None}", "{'oslo': (X, Y)}", "{'oslo': []}", "{'': (X, Y)}",
    "{'oslo': (X, Y), 'lima': (X[:3], Y)}", "'runs/table'", "Path('pipe.csv')", "'zero.csv'", "'images'",
    "[10**400]", "-2**31", "2**31", "[[]]", "'cuda:99'", "'meta'",
)
# fmt: on
"""What nobody should be given."""
BY_ANNOTATION = {
    "bool": ("True", "False"),
    "int": ("1", "2", "3", "0"),
    "float": ("0.5", "1.0", "0.01"),
    "str": ("'x'", "'oslo'"),
    "None": ("None",),
}
NETWORK = "network()"
PARTS = "{'oslo': (X, Y), 'lima': (X + 1, Y)}"
TABLE = (
    "'patients.csv'",
    "pandas.read_csv('patients.csv')",
    "dict(age=list(range(24)), ill=[0, 1] * 12, hospital=['a', 'b', 'c'] * 8)",
)


@dataclass(frozen=True)
class Subject:
    """A function to call, what it cannot do without, and what is done with what it gives."""

    name: str
    valid: Mapping[str, Sequence[str]]
    required: tuple[str, ...] = ()
    more: str = "{}"
    """What is done with the result, ``{}``."""
    spread: Callable[[], Mapping[str, Any]] | None = None
    """Parameters that go through ``**options``."""
    allowed: tuple[str, ...] = ()
    """Names of errors that are right beside InputError: scikit-learn's contract for its estimators."""
    of: str = ""
    """Whose signature it has, where it is a method of what is loaded from a folder."""

    def parameters(self) -> dict[str, str]:
        """Name and annotation of each."""
        every = inspect.signature(evaluate(self.of or self.name)).parameters.values()
        found = {
            p.name: str(p.annotation)
            for p in every
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"
        }
        if self.spread is not None:
            return found | {name: str(a) for name, a in self.spread().items()}
        if any(p.kind is p.VAR_KEYWORD for p in every):
            found |= {name: "Any" for name in self.valid if name not in found}
        return found


def _options() -> dict[str, Any]:
    from shoal.training.options import Options

    return {f.name: f.type for f in dataclasses.fields(Options)}


OPTIONS: dict[str, Sequence[str]] = {
    "steps": ("1", "2", "3"),
    "batch_size": ("2", "4"),
    "settings": ("{}", "{'meta_lr': 0.5}", "None"),
    "optimizer": ("None", "lambda p: torch.optim.SGD(p, 0.1)"),
    "loss": ("None", "nn.functional.cross_entropy"),
    "classes": ("None", "2"),
    "draw": ("None", "'pooled'"),
    "warm_start": ("None", "1", "0.5", "'head:2'"),
    "eval_splits": ("('train',)", "['test']"),
    "metric": ("None", "'accuracy'", "'AUC'"),
    "device": ("'cpu'",),
    "workers": ("0",),
    "schedule": ("None", "lambda o: torch.optim.lr_scheduler.StepLR(o, 1)"),
    "select": ("None", "'last'"),
    "precision": ("None", "'fp32'", "'bf16'"),
    "average": ("None", "'sma'", "'ema'"),
    "average_start": ("None",),
    "average_ratio": ("None",),
    "average_decay": ("None",),
    "retrain": ("False", "True"),
    "wise_ft": ("None", "0.5", "'validation'"),
    "miro": ("None", "0.1"),
    "l2_sp": ("None", "0.1"),
    "l2_sp_head": ("None",),
    "head_lr": ("None", "0.1"),
    "layer_decay": ("None", "0.5"),
    "on_nan": ("'stop'", "'skip'"),
    "compile": ("False",),
    "progress": ("False",),
    "predictions": ("False",),
    "track_domains": ("None",),
    "track_layers": ("False",),
    "capture": ("None", "False"),
    "accumulate": ("1", "2"),
    "patience": ("None", "1"),
    "seed": ("0", "1", "-1"),
}
OF_DATA: dict[str, Sequence[str]] = {
    "test": ("None", "'a'", "['oslo']", "[]"),
    "task": ("None", "'classification'"),
    "validation": ("0.2", "0.5"),
    "seed": ("0", "1"),
    "x": ("X", "X.numpy()"),
    "y": ("Y", "Y.tolist()", "['yes', 'no'] * 12"),
    "domains": ("G", "['oslo', 'lima', 'a'] * 8", "G.numpy()"),
    "dataset": ("TensorDataset(X, Y)", "list(zip(X, Y))"),
    "classes": ("None", "2", "['no', 'yes']"),
    "label": ("'ill'",),
    "domain": ("'hospital'",),
    "group": ("None",),
    "columns": ("None", "['age']"),
    "drop": ("()", "['note']"),
    "kinds": ("None", "{'age': 'numeric'}"),
    "decimal": ("None", "'.'", "','"),
    "day_first": ("None", "True"),
    "table": TABLE,
}
ESTIMATOR: dict[str, Sequence[str]] = {
    "algorithm": ("'erm'", "'fish'", "'coral'"),
    "model": ("None", "'mlp'"),
    "settings": ("None", "{}"),
    "steps": ("2",),
    "batch_size": ("4",),
    "domains_per_step": ("None", "2"),
    "draw": ("None",),
    "lr": ("0.01",),
    "optimizer": ("'adam'", "'sgd'"),
    "validation": ("None", "0.3"),
    "patience": ("None",),
    "random_state": ("0", "None"),
    "device": ("'cpu'",),
    "verbose": ("0",),
}
GRADIENTS = "[[torch.randn(3), torch.randn(2, 2)] for _ in range(3)]"
OF_GRADIENTS: dict[str, Sequence[str]] = {
    "gradients": (GRADIENTS,),
    "a": ("[torch.ones(3)]",),
    "b": ("[torch.ones(3)]",),
    "groups": ("['a', 'b']",),
    "gram": ("torch.eye(3)",),
    "matrix": ("torch.eye(3)",),
    "loss": ("(W ** 2).sum()",),
    "losses": ("[lambda: (W ** 2).sum(), lambda: W.sum() ** 3]",),
    "params": ("[W]",),
    "v": ("[torch.ones(4)]",),
    "measure": ("'gip'", "'variance'"),
    "method": ("'exact'", "'finite-difference'"),
    "softening": ("0.0", "0.1"),
    "radius": ("None", "0.01"),
    "model": ("None",),
    "average": ("None",),
}
FRAMES: dict[str, Sequence[str]] = {
    "data": TABLE[:2],
    "label": ("'ill'",),
    "domain": ("'hospital'",),
    "held_out": ("None", "['kyoto']"),
}
RUNS: dict[str, Sequence[str]] = {
    "steps": ("1", "2"),
    "device": ("'cpu'",),
    "jobs": ("1",),
    "engine": ("'local'",),
    "out": ("'out'",),
    "progress": ("False",),
    "search": ("1",),
    "seeds": ("1",),
    "budget": ("None",),
    "wandb": ("None",),
}
OF_RUNS = ("steps", "device", "jobs", "out", "progress")
SUBJECTS = (
    Subject(
        "shoal.fit",
        {
            **OPTIONS,
            "algorithm": ("'fish'", "'erm'", "'irm'", "'coral'"),
            "model": (NETWORK,),
            "train": (PARTS,),
        }
        | {
            "validation": ("None", PARTS),
            "test": ("None", "{'kyoto': (X, Y)}"),
            "task": ("None", "'classification'"),
        }
        | {"folder": ("None", "'out'"), "resume": ("False",), "wandb": ("None",)},
        ("algorithm", "model", "train", "steps", "batch_size", "device", "progress"),
        "{}.score('train')",
        _options,
    ),
    Subject("Options", OPTIONS, ("steps",)),
    Subject(
        "shoal.load",
        {"folder": ("'runs/table'", "Path('runs/image')", "'runs/fit'")} | {"model": ("None",)},
        ("folder",),
    ),
    Subject(
        "MODEL.predict",
        {"source": TABLE[:2], "column": ("None",), "workers": ("0",)},
        ("source",),
        of="shoal.Trained.predict",
    ),
    Subject(
        "IMAGES.predict",
        {"source": ("'images'", "['one.png']"), "column": ("None",), "workers": ("0",)},
        ("source",),
        of="shoal.Trained.predict",
    ),
    Subject(
        "FITTED.predict_proba",
        {"source": ("X", "X.numpy()"), "column": ("None",), "workers": ("0",)},
        ("source",),
        of="shoal.Trained.predict",
    ),
    Subject(
        "shoal.score",
        {
            "model": ("'runs/table'", "MODEL"),
            "data": TABLE[:2],
            "device": ("'cpu'",),
            "workers": ("0",),
            "column": ("None",),
        }
        | {
            "label": ("None", "'ill'"),
            "domain": ("None", "'hospital'"),
            "bad_images": ("'stop'",),
            "seed": ("0",),
        },
        ("model", "data"),
        "str({})",
    ),
    Subject(
        "shoal.compare",
        {**FRAMES, **RUNS, "algorithms": ("['erm']", "('fish',)"), "folds": ("None", "2"), "run": ("False",)},
        (*OF_RUNS, "data", "label", "domain", "algorithms", "run", "search", "seeds"),
        "str({})",
    ),
    Subject(
        "shoal.train",
        {**FRAMES, **RUNS, "algorithm": ("'erm'", "'fish'", "'majority'"), "seeds": ("None",)},
        (*OF_RUNS, "algorithm", "data", "label", "domain"),
        "str({})",
    ),
    Subject(
        "shoal.diagnose",
        {**FRAMES, **RUNS, "examples": ("40",), "budget": ("1.0",), "lr": ("1e-3",)},
        ("data", "label", "domain", "steps", "examples", "budget", "device", "progress"),
        "str({})",
    ),
    Subject(
        "shoal.sweep",
        {**RUNS, "datasets": ("'linear'", "['linear']"), "algorithms": ("['erm']",), "run": ("False",)},
        (*OF_RUNS, "datasets", "algorithms", "run", "search", "seeds"),
        "str({})",
    ),
    Subject("shoal.results", {"folder": ("'runs'", "Path('runs/compared')")}, ("folder",), "str({})"),
    Subject(
        "shoal.report", {"folders": ("'runs/fit'", "['runs']"), "out": ("'o.html'",)}, ("folders", "out")
    ),
    Subject("data.from_table", OF_DATA, ("table", "label", "domain")),
    Subject("check_table", OF_DATA, ("table",)),
    Subject("data.from_arrays", OF_DATA, ("x", "y", "domains")),
    Subject("data.from_dataset", OF_DATA, ("dataset", "domains")),
    Subject(
        "data.Domains.from_labels", {"labels": ("G", "['a', 'b'] * 12")}, ("labels",), "{}.select(0).names"
    ),
    Subject("data.Domains.from_sizes", {"sizes": ("{'a': 3, 'b': 4}",)}, ("sizes",)),
    Subject("data.Domains.from_indices", {"indices": ("{'a': [0, 1], 'b': [1, 2]}",)}, ("indices",)),
    Subject("DOMAINS.select", {"names_or_numbers": ("0", "['0', '1']", "[1]")}, ("names_or_numbers",)),
    Subject("DOMAINS.number", {"name": ("'0'", "'1'")}, ("name",)),
    Subject("DOMAINS.indices_of", {"d": ("0", "1")}, ("d",)),
    Subject("data.leave_out", {"domains": ("DOMAINS",), "names": ("'0'", "[0, 1]")}, ("domains", "names")),
    Subject(
        "data.hold_out",
        {"domains": ("DOMAINS",), "share": ("0.2", "0.5"), "seed": ("0", "1")},
        ("domains", "share", "seed"),
    ),
    Subject(
        "data.DomainBatchSampler",
        {
            "domains": ("G", "DOMAINS"),
            "batch_size": ("2", "4"),
            "domains_per_step": ("None", "2"),
            "steps": ("None", "3"),
        }
        | {
            "draw": ("'domains'", "'pooled'", "'balanced'"),
            "share": ("(0, 1)", "(1, 2)"),
            "pieces": ("1", "2"),
            "seed": ("0", "5"),
        },
        ("domains", "batch_size"),
        "list(itertools.islice({}, 3))",
    ),
    Subject("SAMPLER.plan", {"step": ("0", "7")}, ("step",)),
    Subject(
        "SAMPLER.set_step",
        {"step": ("0", "7"), "batch": ("0", "1")},
        ("step",),
        "({}, list(itertools.islice(SAMPLER, 2)))",
    ),
    Subject(
        "SAMPLER.set_epoch", {"epoch": ("0", "7")}, ("epoch",), "({}, list(itertools.islice(SAMPLER, 2)))"
    ),
    Subject("data.concatenate", {"datasets": (PARTS,)}, ("datasets",)),
    Subject(
        "optim.Fish",
        {
            "inner": ("torch.optim.SGD([W], 0.1)", "torch.optim.Adam([W])"),
            "inner_steps": ("1", "2"),
            "meta_lr": ("0.5", "1.0"),
        }
        | {"inner_state": ("'carry'", "'reset'")},
        ("inner", "inner_steps"),
        "{}.step()",
    ),
    *(
        Subject(
            f"estimator.{name}",
            {**ESTIMATOR, "X": ("X.numpy()",), "Y": ("Y.numpy()",), "groups": ("G.numpy()", "None")},
            ("steps", "batch_size", "device"),
            allowed=("ValueError", "TypeError"),
            more="{}",
        )
        for name in ("classifier", "regressor")
    ),
    *(
        Subject(f"gradients.{name}", OF_GRADIENTS, required)
        for name, required in {
            "gip": ("gradients",),
            "gram_matrix": ("gradients",),
            "gram_matrices": ("gradients", "groups"),
            "cosine_matrix": ("gradients",),
            "sign_agreement": ("gradients",),
            "inner_product": ("a", "b"),
            "cosines": ("gram",),
            "mean_of_pairs": ("matrix",),
            "gradient": ("loss", "params"),
            "match": ("losses", "params"),
            "curvature": ("losses", "params", "v"),
        }.items()
    ),
    Subject(
        "models.build",
        {
            "name": ("'mlp'", "'linear'", "'tabular'"),
            "input_shape": ("(5,)", "[5]"),
            "classes": ("2", "None"),
            "seed": ("0",),
        }
        | {"width": ("16",), "depth": ("1",), "dropout": ("0.1",)},
        ("name", "input_shape", "classes", "seed"),
        "{}(X)",
    ),
    Subject("metrics.metric", {"wanted": ("'accuracy'", "'AUC'", "'mse'")}, ("wanted",)),
    Subject(
        "sets.load",
        {"name": ("'linear'", "'coloured-digits'"), "test": ("'+90%'",), "seed": ("0",)},
        ("name",),
    ),
    Subject(
        "algorithms.build",
        {
            "algorithm": ("'fish'", "'irm'", "'groupdro'"),
            "model": (NETWORK,),
            "loss": ("nn.functional.cross_entropy",),
        }
        | {
            "task": ("data.Task(classes=2, domains=2)",),
            "meta_lr": ("0.5",),
            "weight": ("1.0",),
            "eta": ("0.1",),
        },
        ("algorithm", "model", "loss", "task"),
    ),
)


class Odd:
    """Whatever is asked of it fails in its own way."""

    def __len__(self) -> int:
        raise RuntimeError("an odd object has no length")

    def __iter__(self) -> Any:
        raise RuntimeError("an odd object cannot be iterated")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __repr__(self) -> str:
        return "Odd()"


@functools.cache
def names() -> dict[str, Any]:
    """What expressions may use."""
    import datetime
    import decimal
    import fractions
    import itertools
    from pathlib import Path

    import numpy as np
    import pandas
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import shoal
    import shoal.data
    from shoal import algorithms, gradients, models, optim
    from shoal.data import sets
    from shoal.data.own import check_table
    from shoal.training import metrics
    from shoal.training.options import Options

    torch.manual_seed(0)
    x, g = torch.randn(24, 5), torch.arange(24) % 3
    domains = shoal.data.Domains.from_labels(g)
    return {
        **{"shoal": shoal, "data": shoal.data, "models": models, "optim": optim, "gradients": gradients},
        **{
            "algorithms": algorithms,
            "metrics": metrics,
            "sets": sets,
            "Options": Options,
            "estimator": _Estimators,
        },
        **{
            "torch": torch,
            "nn": nn,
            "np": np,
            "pandas": pandas,
            "itertools": itertools,
            "TensorDataset": TensorDataset,
        },
        **{
            "Path": Path,
            "datetime": datetime,
            "Decimal": decimal.Decimal,
            "Fraction": fractions.Fraction,
            "Odd": Odd,
        },
        **{
            "X": x,
            "Y": torch.arange(24) % 2,
            "G": g,
            "W": torch.ones(4, requires_grad=True),
            "DOMAINS": domains,
        },
        **{"SAMPLER": shoal.data.DomainBatchSampler(g, 2), "check_table": check_table},
        "network": lambda: models.build("mlp", input_shape=(5,), classes=2, seed=0),
    }


class _Estimators:
    """Made, fitted and asked in one call."""

    @staticmethod
    def classifier(X: Any = None, Y: Any = None, groups: Any = None, **options: Any) -> Any:
        from shoal.sklearn import DomainClassifier

        return _Estimators.used(DomainClassifier(**options), X, Y, groups)

    @staticmethod
    def regressor(X: Any = None, Y: Any = None, groups: Any = None, **options: Any) -> Any:
        from shoal.sklearn import DomainRegressor

        return _Estimators.used(DomainRegressor(**options), X, Y, groups)

    @staticmethod
    def used(estimator: Any, X: Any, Y: Any, groups: Any) -> Any:
        own = names()
        X = own["X"].numpy() if X is None else X
        return estimator.fit(X, own["Y"].numpy() if Y is None else Y, groups).predict(X)


FOLDERS = {"MODEL": "runs/table", "IMAGES": "runs/image", "FITTED": "runs/fit"}


@functools.cache
def _load(word: str) -> Any:
    import shoal

    return shoal.load(FOLDERS[word])


def evaluate(expression: str) -> Any:
    loaded = {word: _load(word) for word in FOLDERS if f"{word}." in expression or f"={word}" in expression}
    return eval(expression, {**names(), **loaded})


@functools.cache
def _parameters(number: int) -> dict[str, str]:
    return SUBJECTS[number].parameters()


def call(draw: random.Random) -> tuple[int, str]:
    """The number of a subject, and a call of it."""
    weights = [
        8 if s.name == "shoal.fit" else 3 if s.name in ("shoal.score", "data.from_table") else 1
        for s in SUBJECTS
    ]
    number = draw.choices(range(len(SUBJECTS)), weights)[0]
    subject, parameters = SUBJECTS[number], _parameters(number)
    chosen = dict.fromkeys(subject.required, "")
    chosen |= {name: "" for name in parameters if name in subject.valid and draw.random() < 0.1}
    chosen = {name: draw.choice(_valid(subject, name, parameters.get(name, ""))) for name in chosen}
    for _ in range(draw.choice((0, 1, 1, 1, 1, 2))):
        chosen[draw.choice(list(parameters))] = draw.choice(NASTY)
    given = ", ".join(f"{name}={value}" for name, value in chosen.items())
    return number, subject.more.format(f"{subject.name}({given})")


def _valid(subject: Subject, name: str, annotation: str) -> Sequence[str]:
    if name in subject.valid:
        return subject.valid[name]
    for part, values in BY_ANNOTATION.items():
        if part in annotation:
            return values
    return ("None",)


def run(number: int, expression: str) -> dict[str, Any] | None:
    """What is wrong with how a call ends, if anything."""
    from shoal.errors import InputError
    from shoal.training.stopping import Diverged

    with warnings.catch_warnings(), contextlib.suppress(InputError, Diverged):
        warnings.simplefilter("ignore")
        try:
            evaluate(expression)
        except (InputError, Diverged) as error:
            text = str(error)
            if len(text) > 1000 or text.count("\n") > 2:
                return {"kind": "a long message", "error": text[:300], "where": "message"}
        except BaseException as error:
            if type(error).__name__ in SUBJECTS[number].allowed or _ours(error):
                return None
            return {"kind": type(error).__name__, "error": str(error)[:300], **frames(error)}
    return None


def _ours(error: BaseException) -> bool:
    """A TypeError that we raise on purpose, by a statement of ours."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return isinstance(error, TypeError) and "/shoal/" in last.filename and line.startswith("raise")


def frames(error: BaseException) -> dict[str, Any]:
    """The last line of ours that an error came through, and the traceback's end."""
    every = traceback.extract_tb(error.__traceback__)
    ours = [f for f in every if "/shoal/" in f.filename and "/benchmarks/" not in f.filename]
    where = (
        f"{ours[-1].filename.rpartition('/shoal/')[2]}:{ours[-1].lineno} {ours[-1].name}"
        if ours
        else "outside"
    )
    shown = [
        f"{f.filename.rpartition('/src/')[2].rpartition('site-packages/')[2]}:{f.lineno} {f.name}"
        for f in every[-8:]
    ]
    return {"where": where, "traceback": shown}
