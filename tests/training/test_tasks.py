"""Each task that can be trained for: losses in pieces, weights, metrics and refusals, against plain loops."""

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import shoal
from shoal.data import TensorData
from shoal.errors import InputError
from shoal.losses import find_terms
from shoal.training import metrics

N = 24


def inputs() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(N, 4, generator=draw, dtype=torch.float64) for name in "ab"}


def targets(task: str, x: Tensor) -> Tensor:
    if task in ("classification", "ordinal"):
        return (x[:, :3]).argmax(1)
    if task == "dense":
        return (x[:, :4].reshape(-1, 2, 2) > 0).long()
    if task == "multilabel":
        return (x[:, :3] > 0).double()
    if task == "binary":
        return (x[:, 0] > 0).double()
    return x[:, :2] - x[:, 2:]


OUTPUTS = {"classification": 3, "ordinal": 3, "dense": 8, "multilabel": 3, "binary": 1, "regression": 2}
NAMES = {"binary": "multilabel"}
"""What the task is called."""
USUAL: dict[str, Any] = {
    "classification": F.cross_entropy,
    "ordinal": F.cross_entropy,
    "dense": F.cross_entropy,
    "multilabel": F.binary_cross_entropy_with_logits,
    "binary": F.binary_cross_entropy_with_logits,
    "regression": F.mse_loss,
}
WEIGHTED: dict[str, Any] = {
    "classification": lambda: nn.CrossEntropyLoss(
        torch.tensor([1.0, 5.0, 0.2]).double(), label_smoothing=0.1
    ),
    "ordinal": lambda: functools.partial(F.cross_entropy, weight=torch.tensor([1.0, 5.0, 0.2]).double()),
    "dense": lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 7.0]).double(), ignore_index=255),
    "multilabel": lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]).double()),
    "binary": lambda: nn.BCEWithLogitsLoss(),
    "regression": lambda: nn.SmoothL1Loss(),
}


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def network(task: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        last: nn.Module = {"dense": nn.Unflatten(1, (2, 2, 2)), "binary": Squeezed()}.get(task, nn.Identity())
        layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, OUTPUTS[task]), last)
        return layers.double()


def examples(task: str, weighted: bool = False) -> dict[str, tuple[Tensor, ...]]:
    found: dict[str, tuple[Tensor, ...]] = {}
    draw = torch.Generator().manual_seed(7)
    for name, x in inputs().items():
        y = targets(task, x)
        if task == "dense":
            y[::3, 0] = 255
            y[1, 1, 1] = 255
        w = torch.rand(N, generator=draw, dtype=torch.float64) * 5
        w[::4] = 0
        found[name] = (x, y, w) if weighted else (x, y)
    return found


def fit(of: str, algorithm: str = "erm", train: Any = None, **options: Any) -> shoal.Fit:
    given: dict[str, Any] = {"steps": 5, "batch_size": 7, "progress": False, "device": "cpu"}
    given |= {"optimizer": lambda p: torch.optim.SGD(p, 0.3), "task": NAMES.get(of, of)}
    given |= {"loss": WEIGHTED[of]()} if of == "dense" else {}
    train = examples(of) if train is None else train
    return shoal.fit(algorithm, options.pop("model", None) or network(of), train, **given | options)


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x - y).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "sample-weights"])
@pytest.mark.parametrize("task", OUTPUTS)
class TestPieces:
    def test_accumulate_changes_nothing(self, task: str, weighted: bool) -> None:
        train = examples(task, weighted)
        for algorithm in ("erm", "erm-by-domain", "vrex", "idgm"):
            runs = [
                fit(task, algorithm, train, loss=WEIGHTED[task](), accumulate=pieces).model
                for pieces in (1, 3)
            ]
            assert distance(*runs) < 1e-10
            assert distance(runs[0], network(task)) > 1e-3

    def test_the_loss_is_the_one_of_a_plain_loop(self, task: str, weighted: bool) -> None:
        """One step on all data at once, as a few lines of torch would take it."""
        train, model, loss = examples(task, weighted), network(task), WEIGHTED[task]()
        run = fit(task, "erm-by-domain", train, loss=loss, steps=1, batch_size=N)
        total = torch.zeros((), dtype=torch.float64)
        for x, y, *w in train.values():
            total = total + naive(loss, model(x), y, w[0] if w else None) / 2
        total.backward()
        expected = [p.detach() - 0.3 * p.grad for p in model.parameters() if p.grad is not None]
        for p, wanted in zip(run.model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.detach(), wanted, rtol=0, atol=1e-10)

    def test_evaluation_is_a_loop_over_examples(self, task: str, weighted: bool) -> None:
        train, loss = examples(task, weighted), WEIGHTED[task]()
        run = fit(task, train=train, test=train, loss=loss, eval_batch=5)
        x, y, *_ = (torch.cat(parts) for parts in zip(*train.values(), strict=True))
        with torch.no_grad():
            output = run.model(x)
            by_domain = [
                naive(loss, run.model(x), y, w[0] if w else None).item() for x, y, *w in train.values()
            ]
        assert run.scores().loss == pytest.approx(np.mean(by_domain), abs=1e-10)
        assert run.scores().average == pytest.approx(naive_points(task, output, y), abs=1e-6)


def naive(loss: Any, output: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """Σ w l / Σ w c, an example at a time; l and c by torch's own sum of one example."""
    total, whole = torch.zeros((), dtype=torch.float64), 0.0
    for i in range(len(y)):
        w = 1.0 if weight is None else float(weight[i])
        one = y[i : i + 1]
        if isinstance(loss, functools.partial):
            classes, ignored, summed = loss.keywords["weight"], None, functools.partial(loss, reduction="sum")
        else:
            classes, ignored = getattr(loss, "weight", None), getattr(loss, "ignore_index", None)
            kept, loss.reduction = loss.reduction, "sum"
            summed = loss
        total = total + w * summed(output[i : i + 1], one)
        if not isinstance(loss, functools.partial):
            loss.reduction = kept
        for label in one.reshape(-1).tolist():
            if ignored is None or label != ignored:
                whole += w * (1.0 if classes is None else float(classes[int(label)]))
    return total / whole


def naive_points(task: str, output: Tensor, y: Tensor) -> float:
    if task == "regression":
        return float((output - y).square().mean())
    right, count = 0, 0
    chosen = output.sigmoid().round() if task in ("multilabel", "binary") else output.softmax(1).argmax(1)
    for a, b in zip(chosen.reshape(-1).tolist(), y.reshape(-1).tolist(), strict=True):
        if b != 255:
            right, count = right + (a == b), count + 1
    return right / count


TOGETHER = [
    (task, name) for task in ("classification", "dense", "multilabel") for name in ("erm", "vrex", "idgm")
]


def trained_alike() -> list[list[float]]:
    """Weights after a few steps with class weights, ignored labels, sample weights and pieces."""
    found = []
    for task, name in TOGETHER:
        run = fit(
            task, name, examples(task, True), loss=WEIGHTED[task](), accumulate=2, test=examples(task, True)
        )
        flat = torch.cat([p.detach().flatten() for p in run.model.parameters()]).tolist()
        found.append([*flat, run.scores().loss or 0.0, run.scores().average])
    return found


def test_two_processes_are_as_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_tasks\n"
        f"path = pathlib.Path({str(tmp_path)!r}) / f\"found-{{os.environ['RANK']}}.json\"\n"
        "path.write_text(json.dumps(test_tasks.trained_alike()))\n"
    )
    source = str(Path(shoal.__file__).parents[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source},
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    alone = trained_alike()
    for n in range(2):
        found = json.loads((tmp_path / f"found-{n}.json").read_text())
        for one, other in zip(alone, found, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-7)
            np.testing.assert_allclose(one[:-2], other[:-2], rtol=0, atol=1e-10)


@pytest.mark.parametrize("task", OUTPUTS)
def test_a_batch_larger_than_the_data_and_one_example(task: str) -> None:
    assert math.isfinite(fit(task, batch_size=3 * N).last.loss)
    one = {name: tuple(part[1:2] for part in parts) for name, parts in examples(task).items()}
    assert math.isfinite(fit(task, train=one, batch_size=1).last.loss)


@pytest.mark.parametrize("task", OUTPUTS)
def test_every_metric_and_file_of_a_task(task: str, tmp_path: Path) -> None:
    kind, train = NAMES.get(task, task), examples(task)
    known = [m.name for m in metrics.METRICS.values() if not m.tasks or kind in m.tasks]
    assert len(known) > 3
    for n, name in enumerate(known):
        run = fit(task, train=train, test=train, metric=name, steps=2, folder=tmp_path / str(n))
        assert run.scores().selects == (None if name == metrics.default_metric(kind) else name)
        assert math.isfinite(run.score("test"))
    others = [m.name for m in metrics.METRICS.values() if m.tasks and kind not in m.tasks]
    with pytest.raises(InputError, match=f"this is {kind}; choose from: .*loss"):
        fit(task, metric=others[0])
    run = fit(task, train=train, test=train, folder=tmp_path / "whole", predictions=True)
    assert "<table>" in run._repr_html_()
    json.dumps(run.record, default=dict)
    x, y = train["a"][:2]
    found = run.predict(x)
    with torch.no_grad():
        output = run.model(x)
    expected = output if kind == "regression" else (output > 0) if kind == "multilabel" else output.argmax(1)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    if kind == "multilabel":
        np.testing.assert_allclose(run.trained().predict_proba(x), output.sigmoid(), atol=1e-6)
    lines = next((tmp_path / "whole" / "predictions").glob("*test*")).read_text().splitlines()
    assert len(lines) == 2 * N
    assert len(lines[0].split(",")) == y[0].numel()
    again = shoal.load(tmp_path / "whole", model=network(task))
    np.testing.assert_allclose(again.predict(x), found)


class TestRecognised:
    def test_by_the_loss_and_said_in_the_notes(self) -> None:
        run = fit("multilabel", task=None, loss=nn.BCEWithLogitsLoss())
        assert run.algorithm.task.kind == "multilabel"
        assert "binary cross-entropy" in run.record["notes"]["task"]
        whole = {name: (x, y.long()) for name, (x, y) in examples("multilabel").items()}
        again = fit("multilabel", train=whole, task=None, loss=nn.BCEWithLogitsLoss())
        assert distance(run.model, again.model) < 1e-6

    def test_dense_by_its_shapes(self) -> None:
        assert fit("dense", task=None).algorithm.task.kind == "dense"

    def test_several_whole_numbers_are_never_guessed(self) -> None:
        whole = {name: (x, y.long()) for name, (x, y) in examples("multilabel").items()}
        with pytest.raises(InputError, match="task='multilabel'"):
            fit("multilabel", train=whole, task=None)

    def test_one_logit_needs_a_binary_loss(self) -> None:
        whole = {name: (x, y.long()) for name, (x, y) in examples("binary").items()}
        with pytest.raises(InputError, match=r"one output per class.*BCEWithLogitsLoss"):
            fit("binary", train=whole, task=None)
        assert fit("binary", train=whole).algorithm.task.kind == "multilabel"

    def test_sequences_have_a_class_per_position(self) -> None:
        x = torch.randn(N, 4)
        model = nn.Sequential(nn.Linear(4, 15), nn.Unflatten(1, (3, 5)))
        y = torch.randint(3, (N, 5))
        run = fit("dense", train={"a": (x, y), "b": (x, y)}, model=model, task=None, loss=None)
        with torch.no_grad():
            right = (run.model(x).argmax(1) == y).double().mean()
        assert run.accuracy("train") == pytest.approx(float(right), abs=1e-6)


REFUSED: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "class weights": (
        *("classification", lambda x, y: (x, y)),
        *({"loss": nn.CrossEntropyLoss(torch.ones(2).double())}, "2 class weights and there are 3 classes"),
    ),
    "pos_weight": (
        *("multilabel", lambda x, y: (x, y)),
        *({"loss": nn.BCEWithLogitsLoss(pos_weight=torch.ones(7))}, r"loss cannot take outputs \(2, 3\)"),
    ),
    "labels of 2": (
        *(
            "multilabel",
            lambda x, y: (x, 2 * y),
            {},
            "of domain.* has the label 2.0; .*each must be 0 or 1",
        ),
    ),
    "probabilities": (
        *("multilabel", lambda x, y: (x, y), {"loss": nn.BCELoss()}, "BCELoss, of probabilities"),
    ),
    "dense of another size": (
        *(
            "dense",
            lambda x, y: (x, y[:, :1]),
            {},
            r"output has shape \(2, 2, 2, 2\).* must be \(2, 2, 1, 2\)",
        ),
    ),
    "dense beyond the classes": (
        *("dense", lambda x, y: (x, 2 * y), {"loss": None}, r"labels range from 0 to 510; with classes=2"),
    ),
    "dense of one label": ("dense", lambda x, y: (x, y[:, 0, 0]), {}, "needs a label per position"),
    "ordinal of numbers": ("ordinal", lambda x, y: (x, y + 0.5), {}, "labels must be whole numbers"),
    "negative weights": ("regression", lambda x, y: (x, y, x[:, 0]), {}, "has the weight -.*at least 0"),
    "NaN weights": ("regression", lambda x, y: (x, y, x[:, 0] * math.nan), {}, "has the weight nan"),
    "no weight": ("regression", lambda x, y: (x, y, 0 * x[:, 0]), {}, "every sample weight is 0"),
    "wide weights": ("regression", lambda x, y: (x, y, x), {}, r"of shape \(24, 4\); they must be 24"),
    "weights and another loss": (
        *("regression", lambda x, y: (x, y, x[:, 0].abs())),
        *({"loss": lambda a, b: (a - b).square().mean()}, "sample weights need a loss whose terms are known"),
    ),
    "a loss of one's own in pieces": (
        *("regression", lambda x, y: (x, y)),
        *(
            {"loss": lambda a, b: (a - b).square().sum(), "accumulate": 2},
            "accumulate=2 needs a loss that is",
        ),
    ),
    "numbers in place of classes": (
        *("classification", lambda x, y: (x, y), {"loss": nn.MSELoss()}, "MSELoss and the labels are whole"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_training(case: str) -> None:
    task, change, options, message = REFUSED[case]
    train = {name: change(*parts) for name, parts in examples(task).items()}
    model = network(task)
    with pytest.raises(InputError, match=message):
        fit(task, train=train, model=model, **options)
    assert distance(model, network(task)) == 0


class Dicts(Dataset):
    """Examples with their weights under the name that says so."""

    def __init__(self, x: Tensor, y: Tensor, w: Tensor) -> None:
        self.parts = x, y, w

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, i: int) -> dict[str, Any]:
        return dict(zip(("x", "y", "sample_weight"), (part[i] for part in self.parts), strict=True))


class TestSampleWeights:
    def test_a_weight_of_zero_leaves_an_example_out(self) -> None:
        train = examples("regression", weighted=True)
        train = {name: (x, y, (w > 0).double()) for name, (x, y, w) in train.items()}
        spoilt = {n: (torch.where(w[:, None] > 0, x, 9.0), y, w) for n, (x, y, w) in train.items()}
        a, b = (fit("regression", "fish", t, domains_per_step=2).model for t in (train, spoilt))
        assert distance(a, b) < 1e-12

    def test_in_dicts(self) -> None:
        train = examples("classification", weighted=True)
        one = fit("classification", train=train)
        with_float = {name: Dicts(x, y, w) for name, (x, y, w) in train.items()}
        assert distance(one.model, fit("classification", train=with_float).model) < 1e-6
        assert distance(one.model, fit("classification").model) > 1e-3

    def test_in_tensor_data(self) -> None:
        train = examples("classification", weighted=True)
        one = fit("classification", train=train)
        other = fit("classification", train={name: TensorData(*parts) for name, parts in train.items()})
        assert distance(one.model, other.model) == 0

    def test_a_third_part_of_examples_is_not_taken_for_one(self) -> None:
        train = {n: list(zip(*parts, strict=True)) for n, parts in examples("classification", True).items()}
        with pytest.warns(UserWarning, match="not used.*'sample_weight'"):
            run = fit("classification", train=train)
        assert distance(run.model, fit("classification").model) < 1e-12


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(torch.cat([a, b], 1))


class Joined(nn.Module):
    """Takes everything as one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.two = Two()

    def forward(self, x: Any) -> Tensor:
        parts = list(x.values()) if isinstance(x, dict) else x
        return self.two(*parts)


def test_several_inputs() -> None:
    """By place or by name where ``forward`` takes several, else as one argument: the same training."""

    def trained(model: nn.Module, by_name: bool) -> list[Tensor]:
        torch.manual_seed(0)
        train = {
            n: [
                ({"a": p[:2], "b": p[2:]} if by_name else (p[:2], p[2:]), c)
                for p, c in zip(x, y, strict=True)
            ]
            for n, (x, y) in examples("classification").items()
        }
        two = next(m for m in model.modules() if isinstance(m, Two)).double()
        nn.init.constant_(two.layer.weight, 0.1)
        nn.init.zeros_(two.layer.bias)
        return list(fit("classification", train=train, model=model).model.parameters())

    first, *others = [trained(make(), named) for make in (Two, Joined) for named in (False, True)]
    for other in others:
        torch.testing.assert_close(first, other, rtol=0, atol=0)


@pytest.mark.parametrize("weighted", [False, True])
def test_several_inputs_as_arrays(weighted: bool) -> None:
    """Arrays with all examples each are the same as a list of examples."""

    def trained(data: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        train = {n: data(*parts) for n, parts in examples("classification", weighted).items()}
        return list(fit("classification", train=train, model=Two().double()).model.parameters())

    def rows(x: Tensor, y: Tensor, *w: Tensor) -> list[dict[str, Any]]:
        columns = {"x": zip(x[:, :2], x[:, 2:], strict=True), "y": y}
        columns |= {"sample_weight": w[0]} if w else {}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    first, *others = map(
        trained,
        [
            rows,
            lambda x, *rest: ((x[:, :2], x[:, 2:]), *rest),
            lambda x, *rest: ([x[:, :2], x[:, 2:]], *rest),
            lambda x, *rest: ({"a": x[:, :2], "b": x[:, 2:]}, *rest),
        ],
    )
    for other in others:
        torch.testing.assert_close(first, other, rtol=0, atol=0)
    arrays = {
        n: ([x[:, :2].numpy(), x[:, 2:].numpy()], y) for n, (x, y) in examples("classification").items()
    }
    run = fit("classification", train=arrays, model=Two())
    a, b = arrays["a"][0]
    expected = run.model(torch.tensor(a).float(), torch.tensor(b).float()).argmax(1)
    for several in ((a, b), [a, b], {"a": a, "b": b}):
        assert run.predict(several, batch_size=5).tolist() == expected.tolist()
    for wrong, message in (
        ((a, b[1:]), "24, 23 examples; the numbers must be equal"),
        ((a, 3), "not a tuple"),
    ):
        with pytest.raises(InputError, match=message):
            run.predict(wrong)


@pytest.mark.parametrize("wrong", [torch.zeros(3, 2), None, "text", [[1.0]] * 5])
def test_several_arrays_that_do_not_fit(wrong: Any) -> None:
    train = {n: ({"a": x[:, :2], "b": wrong}, y) for n, (x, y) in examples("classification").items()}
    with pytest.raises(InputError, match=r"each must be an array of \d+ examples, as y has; got"):
        fit("classification", train=train, model=Two())


def test_a_wrong_number_of_inputs() -> None:
    train = {n: [((p[:2], p[2:]), c) for p, c in zip(x.float(), y, strict=True)]
             for n, (x, y) in examples("classification").items()}  # fmt: skip
    train = {n: [((*x, x[0]), y) for x, y in rows] for n, rows in train.items()}
    with pytest.raises(InputError, match=r"passed as several arguments where forward needs more than one"):
        fit("classification", train=train, model=Two())


class TestMetrics:
    def test_iou_over_pixels(self) -> None:
        train = examples("dense")
        run = fit("dense", train=train, test=train, metric="mean IoU")
        x, y = (torch.cat(parts) for parts in zip(*train.values(), strict=True))
        with torch.no_grad():
            chosen = run.model(x).argmax(1)
        each = []
        for c in range(2):
            a, b = (chosen == c) & (y != 255), y == c
            each.append(float((a & b).sum() / (a | b).sum()))
        assert run.score("test") == pytest.approx(sum(each) / 2)


def test_terms_are_those_of_torch() -> None:
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(6, 3, 2, generator=draw).double()
    y = torch.randint(3, (6, 2), generator=draw)
    y[0, 0] = y[2] = -1
    weight = torch.tensor([0.5, 2.0, 3.0]).double()
    for loss in (
        nn.CrossEntropyLoss(weight, ignore_index=-1, label_smoothing=0.2),
        functools.partial(F.cross_entropy, weight=weight, ignore_index=-1),
        functools.partial(F.nll_loss, weight=weight, ignore_index=-1),
    ):
        terms = find_terms(loss)
        assert terms is not None
        torch.testing.assert_close(terms.mean(output, y), loss(output, y), rtol=0, atol=1e-12)
    shares = output.softmax(1)
    terms = find_terms(nn.CrossEntropyLoss(weight))
    assert terms is not None
    torch.testing.assert_close(terms.mean(output, shares), nn.CrossEntropyLoss(weight)(output, shares))
    for unknown in (nn.CrossEntropyLoss(reduction="sum"), lambda a, b: a, nn.CTCLoss()):
        assert find_terms(unknown) is None
