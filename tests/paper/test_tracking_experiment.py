"""`shoal track`: the paper's two algorithms, written down naively beside ours."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.cli import main
from shoal.data.batch import DomainBatch
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import Store
from shoal.experiments.record import RunRecord
from shoal.experiments.run import prepare, run
from shoal.models import build
from shoal.paper import recipes, tracking

RECORDS = "*/" + 16 * "[0-9a-f]" + ".json"
TINY = ["--data", "size=32", "per_domain=40", "domains=3", "--model-set", "width=2"]


OPTIONS: Any = {
    "data_options": {"size": 32, "per_domain": 40, "domains": 3},
    "model_options": {"width": 2},
}


def config(**changes: Any) -> RunConfig:
    (made,) = tracking.plan("cdsprites", 1, **{"steps": 5, "batch_size": 8, **OPTIONS, **changes})
    return made


def track(config: RunConfig, every: int = 1) -> RunRecord:
    """Through the same door as every run."""
    return run(config, "cpu", how={"runner": tracking.RUNNER, "track_every": every})


def naive_gip(batches: Sequence[DomainBatch], model: nn.Module, normalise: bool) -> float:
    """The paper's function GIP, with two loops."""
    found = []
    for x, y, *_ in batches:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        found.append(
            torch.cat([p.grad.reshape(-1).double() for p in model.parameters() if p.grad is not None])
        )
    total = 0.0
    for i, a in enumerate(found):
        for j, b in enumerate(found):
            if i != j:
                total += float(a @ b / (a.norm() * b.norm())) if normalise else float(a @ b)
    return total / (len(found) * (len(found) - 1))


def naive_step(model: nn.Module, x: Tensor, y: Tensor, rate: float) -> None:
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p -= rate * p.grad


def test_iterations_are_those_of_the_papers_algorithm() -> None:
    rate, epsilon = 0.5, 0.3
    given = config(optimizer="sgd", lr=rate, settings={"meta_lr": epsilon, "inner_state": "carry"})
    alone = {"domains_per_step": 1, "settings": {}, "draw": "pooled"}
    fish, erm = prepare(given, "cpu"), prepare(replace(given, algorithm="erm", **alone), "cpu")
    pair = tracking.Pair(fish, erm)
    naive = [
        build("sprite-cnn", input_shape=(3, 32, 32), classes=2, seed=given.seed, width=2) for _ in range(2)
    ]
    theirs: dict[tuple[str, str, str], list[float]] = {}
    for step in range(5):
        plan = fish.sampler.plan(step)
        batches = [DomainBatch(*fish.examples.batch(torch.from_numpy(rows)), d) for d, rows in plan]
        assert sorted(b.domain for b in batches) == [0, 1, 2]  # type: ignore[type-var]

        def keep(when: str, batches: list[DomainBatch] = batches) -> None:
            for name, model in zip(("fish", "erm"), naive, strict=True):
                for kind in ("normalised", "raw"):
                    value = naive_gip(batches, model, kind == "normalised")
                    theirs.setdefault((name, when, kind), []).append(value)

        keep("before")
        start = [p.detach().clone() for p in naive[0].parameters()]
        for x, y, *_ in batches:
            naive_step(naive[0], x, y, rate)
        with torch.no_grad():
            for p, s in zip(naive[0].parameters(), start, strict=True):
                p.copy_(s + epsilon * (p - s))
        whole_x, whole_y = torch.cat([b.x for b in batches]), torch.cat([b.y for b in batches])
        split = tracking.rearranged(batches, given.seed, step)
        order = [_place(x, whole_x) for b in split for x in b.x]
        for rows in torch.tensor(order).split(8):
            naive_step(naive[1], whole_x[rows], whole_y[rows], rate)
        keep("after")

        pair.iterate(step, batches)
        for training, model in zip((fish, erm), naive, strict=True):
            for p, q in zip(training.model.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
    assert pair.read(4) == ""
    for (name, when, kind), values in theirs.items():
        measured = pair.sides[tracking.SIDES[name]].measured
        ours = [measured[step][when][tracking.KINDS[kind]] for step in range(5)]
        np.testing.assert_allclose(ours, values, atol=1e-6)
    assert len(theirs) == 8
    assert not np.allclose(theirs["fish", "after", "raw"], theirs["erm", "after", "raw"])


def _place(image: Tensor, among: Tensor) -> int:
    (found,) = (among == image).flatten(1).all(1).nonzero()[:1].tolist()
    return int(found[0])


def test_the_examples_are_the_same_and_mixed() -> None:
    x = torch.arange(60.0).view(60, 1)
    batches = [DomainBatch({"a": x[i : i + 20]}, x[i : i + 20, 0].long(), i) for i in (0, 20, 40)]
    split = tracking.rearranged(batches, 3, 7)
    assert [len(b.y) for b in split] == [20, 20, 20]
    assert sorted(torch.cat([b.y for b in split]).tolist()) == list(range(60))
    assert all(torch.equal(b.x["a"][:, 0].long(), b.y) for b in split)
    assert all(len({int(v) // 20 for v in b.y}) == 3 for b in split)
    again = tracking.rearranged(batches, 3, 7)
    assert all(torch.equal(a.y, b.y) for a, b in zip(split, again, strict=True))
    assert not torch.equal(split[0].y, tracking.rearranged(batches, 3, 8)[0].y)


def test_tracking_more_seldom_trains_the_same_and_a_result_is_plain_data() -> None:
    records = [track(config(), every) for every in (1, 2)]
    for record in records:
        json.dumps(record.to_dict(), default=dict, allow_nan=False)
        again = RunRecord.from_dict(json.loads(json.dumps(record.to_dict(), default=dict)))
        assert tracking.result_of(again) == tracking.result_of(record)
    often, seldom = map(tracking.result_of, records)
    assert records[0].headline == ("accuracy", often["scores"]["fish"][-1])
    assert records[0].agreement[3]["mean_cosine"] == often["fish"]["before"]["normalised"][3]
    assert often["iterations"] == [0, 1, 2, 3, 4]
    assert seldom["iterations"] == [0, 2, 4]
    assert often["fish"]["after"]["raw"][::2] == seldom["fish"]["after"]["raw"]
    assert often["scores"] == seldom["scores"]
    assert often["scores"]["iterations"] == [0, 1, 2, 3, 4, 5]
    assert often["scores"]["fish"][0] == often["scores"]["erm"][0]
    assert often["fish"]["before"]["raw"][0] == often["erm"]["before"]["raw"][0]


def test_the_constant_classifier() -> None:
    """Only its last layer has a gradient, and it says the same of every image."""
    labels = torch.tensor([0, 0, 0, 1])
    torch.testing.assert_close(tracking.constant_bias(labels, 2).softmax(0), torch.tensor([0.75, 0.25]))
    torch.testing.assert_close(tracking.constant_bias(torch.tensor([1.0, 3.0]), None), torch.tensor([2.0]))
    given = config(model_options={"width": 4}, batch_size=32)
    alone = {"domains_per_step": 1, "settings": {}, "draw": "pooled"}
    fish, erm = prepare(given, "cpu"), prepare(replace(given, algorithm="erm", **alone), "cpu")
    pair = tracking.Pair(fish, erm)
    before = {k: v.clone() for k, v in fish.model.state_dict().items()}
    found = {
        name: {**measured, "score": scores["average"]}
        for name, (measured, scores) in pair.constants().items()
    }
    right, wrong = found["constant classifier"], found["constant and wrong"]
    assert all(torch.equal(before[k], v) for k, v in fish.model.state_dict().items())
    truth = fish.data.examples.batch(torch.from_numpy(fish.data.splits["test"].examples()).long())[1]  # type: ignore[attr-defined]
    shares = [float((truth == c).float().mean()) for c in (0, 1)]
    assert any(right["score"] == pytest.approx(share, abs=1e-6) for share in shares)
    assert -1 <= right["mean_cosine"] <= 1
    assert wrong["mean_cosine"] > 0.9  # wrong everywhere in the same way
    assert wrong["mean_inner_product"] > abs(right["mean_inner_product"])
    assert tracking.last_linear(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) is None


def test_both_start_from_the_same_warm_weights() -> None:
    result = tracking.result_of(track(config(warm_start=3)))
    cold = tracking.result_of(track(config()))
    assert result["fish"]["before"]["raw"][0] == result["erm"]["before"]["raw"][0]
    assert result["fish"]["before"]["raw"][0] != cold["fish"]["before"]["raw"][0]


def test_a_loss_that_is_not_finite_is_said() -> None:
    found = track(config(optimizer="sgd", lr=1e30))
    assert found.status == "diverged"
    assert "non-finite by iteration" in found.error


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = [
        "track",
        "cdsprites",
        *TINY,
        "--steps",
        "4",
        "--batch-size",
        "8",
        "--seeds",
        "2",
        "--out",
        str(out),
    ]
    command += ["--device", "cpu"]
    assert main([*command, "--no-run"]) == 2
    assert "without --no-run" in capsys.readouterr().err
    assert main([*command, "--jobs", "1"]) == 0
    said = capsys.readouterr()
    assert "Fish" in said.out
    assert "constant classifier" in said.out
    assert "over 2 seeds" in said.out
    assert "2 runs to do" in said.err
    (folder,) = out.iterdir()
    configs = tracking.plan("cdsprites", 2, steps=4, batch_size=8, **OPTIONS)
    store = Store(folder)
    first, second = (store.path(c) for c in configs)
    names = {p.name for p in folder.iterdir() if p.is_file() and p.suffix != ".sqlite" and p.name[0] != "."}
    assert names == {first.name, second.name, "tracking.png", "tracking.svg"}
    kept = first.read_bytes()
    second.unlink()
    assert main([*command, "--no-run"]) == 0
    assert "1 of 2 seeds are missing" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr()
    assert "1 run to do, 1 already finished" in said.err
    assert len(json.loads(said.out)["results"]) == 2
    assert first.read_bytes() == kept
    # Other settings are kept apart, also from --no-run.
    assert main([*command, "--no-run", "--lr", "0.01"]) == 2
    first.write_text("{}")
    assert main([*command, "--no-run"]) == 2
    assert str(first) in capsys.readouterr().err


def test_a_rate_of_zero_is_refused_and_not_another_taken(
    wilds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config().optimizer_options["lr"] == 1e-3
    assert config(lr=0.0).optimizer_options["lr"] == 0
    command = ["track", "cdsprites", *TINY, "--steps", "2", "--seeds", "1", "--out", str(tmp_path / "out")]
    assert main([*command, "--lr", "0", "--device", "cpu"]) == 2
    assert "--lr must be a number above 0" in capsys.readouterr().err
    monkeypatch.setenv("SHOAL_DATA", str(wilds))
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    usual, none, some = (
        tracking.plan("camelyon17", 1, preset="paper", lr=lr)[0].optimizer_options for lr in (None, 0, 0.5)
    )
    assert usual["lr"] > 0
    assert (none["lr"], some["lr"]) == (0, 0.5)
    assert usual.keys() == none.keys() == some.keys()


@pytest.mark.parametrize(
    ("steps", "every", "said"),
    [
        (1000, 1, "over the last tenth of the iterations"),
        (10, 1, "over the last tenth of the iterations"),
        (5, 1, "at the last measurement (iteration 4 of 0 to 4)"),
        (20, 5, "at the last measurement (iteration 15 of 0 to 19)"),
        (3, 50, "at the last measurement (iteration 0 of 0 to 2)"),
        (5000, 20, "over the last 25 measurements (iterations 4,500 to 4,980 of 0 to 4,999)"),
    ],
)
def test_the_words_say_which_iterations_are_meant(steps: int, every: int, said: str) -> None:
    one = {
        "config": {"steps": steps},
        "iterations": list(range(0, steps, every)),
        "environment": {"device": "cpu"},
    }
    words = tracking.words([one, one])
    assert words.startswith(f"Gradients {said}, scores at the last; mean ± standard deviation over 2 seeds")
    other = {**one, "config": {"steps": steps + 1}}
    if every > 1:
        assert "over the last tenth of the measurements" in tracking.words([one, other])


def test_a_file_that_lacks_something_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = config(steps=2)
    store = Store(tracking.folder_of(tmp_path, [given], 1))
    record = track(given)
    store.save(record)
    assert tracking.result_of(store.found([given])[0]) == tracking.result_of(record)
    path = store.path(given)
    whole = path.read_text()
    command = ["track", "cdsprites", *TINY, "--steps", "2", "--batch-size", "8", "--seeds", "1", "--no-run"]

    def spoiled(*keys: Any, value: Any = None) -> str:
        content = json.loads(whole)
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        if value is None:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        return json.dumps(content)

    for text in (
        spoiled("agreement", 0, "models", "Fish", "before"),
        spoiled("agreement", 1, "models", "ERM", "after", "mean_inner_product"),
        spoiled("agreement", 1, "models", "ERM", "before", "mean_cosine", value=[0.5]),
        spoiled("agreement", 0, "models", "Fish", "before", "mean_inner_product", value="x"),
        spoiled("agreement", 0, "models"),
        spoiled("agreement", 0, "models", "constant and wrong"),
        spoiled("agreement", 0, "step", value=None),
        spoiled("agreement", value=2),
        spoiled("history", 1, "scores", "ERM"),
        spoiled("history", 1, "scores", "test", "metric"),
        spoiled("environment", "device", value=3),
        "[]",
    ):
        path.write_text(text)
        assert main([*command, "--out", str(tmp_path)]) == 2
        assert str(path.parent) in capsys.readouterr().err


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "new"
    assert main(["track", "cdsprites", *TINY, "--seeds", "1", "--no-run", "--out", str(out)]) == 2
    assert not out.exists()


def test_runs_that_differ_in_more_than_their_seed_are_kept_apart(tmp_path: Path) -> None:
    def folder(seeds: int, every: int = 1, **data: Any) -> str:
        configs = tracking.plan("cdsprites", seeds, data_options=data)
        return tracking.folder_of(tmp_path, configs, every).name

    assert folder(1) == folder(3) == folder(1, seed=0)
    assert len({folder(2), folder(2, 5), folder(2, seed=0), folder(2, seed=1), folder(2, domains=9)}) == 5


def test_any_dataset_and_any_optimizer(tmp_path: Path) -> None:
    command = [
        "track",
        "rotated-digits",
        "--steps",
        "2",
        "--batch-size",
        "4",
        "--domains-per-step",
        "3",
        "--seeds",
        "1",
    ]
    assert main([*command, "--optimizer", "sgd", "--out", str(tmp_path), "--json"]) == 0


LONG = ("civilcomments", "fmow", "iwildcam")


@pytest.mark.parametrize(
    "dataset",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in recipes.datasets()],
)
def test_wilds_recipes(
    dataset: str,
    wilds: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A preset's walk, ε and optimizer, and a warm start; the model is made small."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    given = ["--model", "small-cnn", "--data", "size=16"]
    if dataset in ("civilcomments", "amazon"):
        pytest.importorskip("transformers")
        tiny = str(wilds / "tiny-bert")
        given = ["--model", tiny, "--data", f"tokenizer={tiny}", "max_tokens=16"]
    command = ["track", dataset, "--preset", "paper", "--data-dir", str(wilds), *given, "--warm-start", "2"]
    command += ["--steps", "2", "--batch-size", "4", "--seeds", "1", "--eval-limit", "20", "--device", "cpu"]
    assert main([*command, "--out", str(tmp_path / "out"), "--json"]) == 0
    said = recipes.settings(dataset, "paper")
    (result,) = json.loads(capsys.readouterr().out)["results"]
    used = result["config"]
    assert used["data_options"].get("fold") == said.get("data_options", {}).get("fold")
    assert used["settings"]["meta_lr"] == said["epsilon"]
    assert (used["domains_per_step"], used["batch_size"], used["warm_start"]) == (said["walk"], 4, 2)
    assert used["optimizer"] == said["optimizer"]
    assert len(result["erm"]["after"]["normalised"]) == 2


def test_ctrl_c_keeps_finished_seeds(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "shoal",
        "track",
        "cdsprites",
        *TINY,
        "--batch-size",
        "8",
        "--seeds",
        "30",
    ]
    command += ["--steps", "10", "--jobs", "1", "--device", "cpu", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    until = time.monotonic() + 60
    while not list(tmp_path.glob(RECORDS)) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Finished runs are saved. The same command resumes." in said
    assert "Traceback" not in said
    assert list(tmp_path.glob(RECORDS))
