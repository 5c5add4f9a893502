"""What new users met in comparisons and diagnoses of their own tables."""

from __future__ import annotations

import shlex
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_compare_rule import result

from shoal.api.source import find_source
from shoal.cli import main
from shoal.data import sets
from shoal.data.example import write_images
from shoal.errors import InputError
from shoal.experiments import baselines, compare
from shoal.experiments.config import RunConfig, differences
from shoal.experiments.diagnose import columns_of
from shoal.report import charts
from shoal.report import compare as each

Captured = pytest.CaptureFixture[str]


def test_equal_averages_are_equal_in_whatever_order_they_were_added() -> None:
    scores = {"groupdro": [0.8625, 0.9, 0.8625, 0.8625], "erm": [0.8625, 0.9125, 0.8375, 0.875]}
    scores |= {"logistic-regression": [0.8875, 0.9, 0.875, 0.825], "fish": [0.8, 0.8, 0.81, 0.8]}
    found = result({name: [[v] for v in values] for name, values in scores.items()})
    assert [row["rank"] for row in found["rows"]] == [1, 1, 1, 4]
    about = found["recommendation"]
    assert about["take"] == about["best"] == "logistic-regression"
    assert "-0.0" not in each.text(found)


def test_the_best_is_not_said_to_be_better_than_a_control_that_is_ahead() -> None:
    found = result({"fish:regrouped": [[0.9]] * 3, "erm": [[0.8]] * 3, "fish": [[0.7], [0.6], [0.7]]})
    why = each.recommended(found)[2]
    assert why.startswith(
        "It has the best average among algorithms other than controls, and no algorithm is simpler."
    )
    assert "The next best, fish, is worse by 13.3 percentage points, standard error 3.3" in why


def test_the_recommendation_comes_first_in_terminal_and_markdown() -> None:
    found = result({"erm": [[0.8]] * 3, "fish": [[0.7]] * 3})
    said = each.recommended(found)
    assert each.text(found).splitlines()[: len(said)] == said
    lines = each.markdown(found).splitlines()
    assert lines[2 : 2 + len(said)] == [f"- {line}" for line in said]


def test_the_units_of_an_error_are_said_with_it() -> None:
    found = result({"erm": [[0.8]] * 3}, "mse") | {"units": "errors are in units of x"}
    assert each.recommended(found)[1].endswith("it was 0.8000 (errors are in units of x).")


def test_rows_that_cannot_take_part_are_one_line_for_each_reason() -> None:
    found = result({"erm": [[0.8]]}) | {"unable": {"fish": "needs a", "coral": "needs a", "vrex": "needs b"}}
    lines = [line for line in each.words(found) if line.startswith("Not compared")]
    assert lines == ["Not compared: fish, coral (needs a).", "Not compared: vrex (needs b)."]


def test_one_far_off_row_leaves_the_others_their_scale() -> None:
    def row(mean: float) -> dict[str, Any]:
        return {"mean": mean, "low": mean - 0.02, "high": mean + 0.02, "values": {"a": mean - 0.03}}

    near = {"erm": row(-0.01), "fish": row(0.01), "coral": row(-0.03)}
    chart = charts.differences({**near, "majority": row(-0.4)}, "accuracy")
    at = {r["name"]: r["marks"][-1] for r in chart["rows"]}
    assert at["fish"]["x"] - at["coral"]["x"] > 25  # percent of the width
    assert "beyond" in at["majority"]["look"]
    assert chart["beyond"]
    assert not charts.differences(near, "accuracy")["beyond"]


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tables; a column of each kind; a domain with an escape sequence in its name."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("one.csv", "two.csv")):
        draw, lines = np.random.default_rng(number), ["age,sex,visit,smoker,site,ill"]
        for site in ("oslo", "lima", "red\x1b[31m"):
            for day, age in enumerate(draw.normal(50, 10, 30)):
                cells = (f"{age:.2f}", "mf"[day % 2], f"2024-0{1 + day % 9}-11", ("yes", "no")[day % 3 == 0])
                lines.append(",".join([*cells, site, "yes" if age + draw.normal(0, 10) > 50 else "no"]))
        Path(name).write_text("\n".join(lines))


OPTIONS = ["--label", "ill", "--domain", "site"]
SMALL = [
    *OPTIONS,
    "--algorithms",
    "erm",
    "--seeds",
    "1",
    "--search",
    "1",
    "--steps",
    "5",
    "--batch-size",
    "8",
]
SMALL += ["--device", "cpu", "--jobs", "1"]


@pytest.mark.usefixtures("patients")
def test_columns_of_every_kind_are_diagnosed() -> None:
    data = sets.load("table", file="one.csv", label="ill", domain="site", test="oslo")
    names = {part.name: part.names for part in columns_of(data, data.examples.x)}  # type: ignore[attr-defined]
    assert set(names) == {"age", "sex", "visit", "smoker"}
    assert names["sex"] == ("= f", "= m")


@pytest.mark.usefixtures("patients", "in_process")
def test_commands_for_two_tables_do_not_share_a_folder(capsys: Captured) -> None:
    folders = []
    for name in ("one.csv", "two.csv"):
        assert main(["compare", name, *SMALL, "--no-baselines", "--held-out", "oslo"]) == 0
        shown = capsys.readouterr().out
        commands = [line.strip() for line in shown.splitlines() if line.startswith("  shoal ")]
        assert [line.split()[1] for line in commands] == ["train", "predict", "score", "export"]
        folders.append(shlex.split(commands[0])[-1])
        assert main([*shlex.split(commands[0])[1:], "--device", "cpu"]) == 0
        assert main(["score", folders[-1], name]) == 0
        capsys.readouterr()
    assert folders[0] != folders[1]


@pytest.mark.usefixtures("patients", "in_process")
def test_progress_counts_all_runs_and_shows_no_escape_sequence(capsys: Captured) -> None:
    assert main(["compare", "one.csv", *SMALL]) == 0
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("[")]
    total = len(lines)
    assert lines[-1].startswith(f"[{total}/{total}] erm, held out: ")
    assert ", seed 0: accuracy " in lines[-1]
    assert "\x1b" not in shown.err + shown.out


def test_a_held_out_domain_of_one_class_is_named_with_the_results() -> None:
    found = result({"erm": [[0.8]] * 3}) | {"warned": {"d1": "all examples are of one class"}}
    assert "Warning, held-out domains: 'd1' (all examples are of one class)." in each.words(found)
    assert compare.Layout(("d1",), None, 2, 2).warned == {}


def test_what_is_neither_a_path_nor_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    for name, meant in (("photoz", "photos"), ("cdsprite", "cdsprites")):
        with pytest.raises(InputError, match=f"no file or folder '{name}'.* Did you mean '{meant}'"):
            find_source(name)


def test_what_differs_in_the_options_of_the_data_is_named() -> None:
    one = RunConfig("table", "erm", 60, {"file": "long/path/to/patients.csv", "label": "ill", "test": []})
    two = replace(one, data_options={**one.data_options, "test": "oslo"})
    assert differences(one, two) == "data_options test [], not 'oslo'"


def test_images_have_a_majority_class_to_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    monkeypatch.chdir(tmp_path)
    write_images("photos")
    for extra in range(3):
        copy = Path("photos/sketch/square") / f"more{extra}.png"
        shutil.copy(next(Path("photos/night/square").glob("*.png")), copy)
    record = baselines.run(RunConfig("image-folder", "majority", 1, {"folder": "photos", "test": "sketch"}))
    sizes = {path.name: len(list(path.iterdir())) for path in Path("photos/sketch").iterdir()}
    first = sorted(sizes)[0]  # the others' classes are equally frequent
    assert record.score("test") == pytest.approx(sizes[first] / sum(sizes.values()))


def test_a_folder_named_like_a_built_in_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the two is taken is said, and either can be named."""
    monkeypatch.chdir(tmp_path)
    Path("pacs").mkdir()
    with pytest.warns(UserWarning, match=r"'pacs' is taken as the built-in dataset; write './pacs' for"):
        assert find_source("pacs").dataset == "pacs"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_source("./pacs").dataset == "image-folder"
        assert find_source("pacs", data_options={"folder": "elsewhere"}).dataset == "pacs"
        assert find_source("vlcs").dataset == "vlcs"
