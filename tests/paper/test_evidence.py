"""The paper's claims: how records are judged, what the page says, and the command that makes it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.errors import InputError
from shoal.experiments.config import RunConfig
from shoal.experiments.execute import Store
from shoal.experiments.record import RunRecord
from shoal.paper import cdsprites, linear, recipes, tracking
from shoal.paper.commands import claims as command
from shoal.paper.evidence import experiments, rules, verdicts
from shoal.paper.evidence.records import Records, collect
from shoal.paper.evidence.verdicts import AGREES, DISAGREES, NOT_JUDGED, NOT_RUN, PARTLY, Check, Claim, Judged
from shoal.paper.published import claims
from shoal.paper.views import evidence as view
from shoal.paper.views.figures import PICTURES

CLAIMS = {claim.id: claim for claim in rules.every_claim()}
ENVIRONMENT = {"device": "cpu", "shoal": "0.1.0", "torch": "2.13"}
NASTY = "<script>alert(1)</script>"


ALL_PARTS = cdsprites.figure


def all_parts(*args: Any, **options: Any) -> dict[str, list[RunConfig]]:
    parts = ALL_PARTS(*args, **options)
    more = {"label": SEVERAL, "steps": 1500, "eval_every": 75}
    parts.setdefault(SEVERAL, [replace(c, **more) for c in parts["IDGM"]])
    return parts


@pytest.fixture(autouse=True, scope="module")
def without_data() -> Iterator[None]:
    """No dataset that needs files is there, whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SHOAL_DATA", raising=False)
        patch.setattr(cdsprites, "figure", all_parts)
        yield


def judged(name: str, *folders: Path) -> Judged:
    return rules.judge(CLAIMS[name], collect(folders))


def record(config: RunConfig, scores: Mapping[str, Any], status: str = "finished") -> RunRecord:
    point = {"step": config.steps, "passes": 1, "loss": 0.1, "scores": scores}
    return RunRecord(config, status, (point,), 0, "last step", 1.0, ENVIRONMENT)


def score(
    average: float, domains: Mapping[str, float] | None = None, metric: str = "accuracy"
) -> dict[str, Any]:
    return {"metric": metric, "average": average, "domains": dict(domains or {"all": average})}


PATTERN = {"ERM": 0.5, "Fish": 1.0, "Fish, random grouping": 0.5, "Reptile": 0.5, "IDGM": 0.95}
SEVERAL = "IDGM, equal updates"


def save_sprites(
    folder: Path,
    numbers: tuple[int, ...] = cdsprites.NUMBERS,
    seeds: int = 2,
    changes: Any = (),
    **given: Any,
) -> None:
    """As the paper has them, but for ``changes`` by (method, N)."""
    store = Store(folder / "cdsprites")
    for configs in cdsprites.figure(numbers, range(seeds), **given).values():
        for config in configs:
            usual = PATTERN.get(config.name, 0.5)
            if config.name == "ERM" and config.data_options["domains"] >= 40:
                usual = 0.96
            value = dict(changes).get((config.name, config.data_options["domains"]), usual)
            store.save(record(config, {"train": score(1.0), "test": score(value)}))


def test_the_claims_are_well_formed() -> None:
    assert len(CLAIMS) == len(rules.every_claim())
    text = resources.files("shoal.paper").joinpath("published/claims.yaml").read_text(encoding="utf-8")
    assert not re.findall(r"within [^2]\d* points", text)  # one tolerance
    commands = experiments.commands("out")
    for claim in CLAIMS.values():
        assert claim.judge in rules.JUDGES
        assert claim.needs in commands
        assert not claim.plot or claim.plot in PICTURES
        assert claim.rule
        assert claim.words


@pytest.mark.parametrize("name", list(CLAIMS))
def test_without_records_nothing_is_said_to_agree(name: str) -> None:
    found = rules.judge(CLAIMS[name], Records(), {CLAIMS[name].needs: "because"})
    assert found.verdict == NOT_RUN
    assert "because" in found.reason
    assert not found.used


@pytest.mark.parametrize(
    ("decisive", "premises", "verdict"),
    [
        ([True, True], [], AGREES),
        ([True], [True], AGREES),
        ([True], [False], PARTLY),
        ([True], [None], PARTLY),
        ([True, False], [True], PARTLY),
        ([True, False], [False], PARTLY),
        ([True, None], [], PARTLY),
        ([False, False], [], DISAGREES),
        ([False], [True, True, True], DISAGREES),
        ([False, None], [True], DISAGREES),
        ([None], [True], NOT_RUN),
        ([None], [False], NOT_RUN),
        ([], [True], NOT_RUN),
        ([None], [], NOT_RUN),
        ([], [], NOT_RUN),
    ],
)
def test_verdicts(decisive: list[bool | None], premises: list[bool | None], verdict: str) -> None:
    checks = [Check(f"d{n}", h) for n, h in enumerate(decisive)]
    checks += [Check(f"p{n}", h, premise=True) for n, h in enumerate(premises)]
    assert verdicts.verdict(checks) == verdict
    assert verdicts.verdict(checks[::-1]) == verdict


def test_the_reason_names_what_fails_and_what_is_missing() -> None:
    words = verdicts.reason([Check("a", True, True), Check("b", False), Check("c", None)])
    assert words == "Does not hold: b. No record: c. Premises that hold: a."
    numbers = [Check(f"{m}, N = {n}", m == "Fish") for n in (5, 10) for m in ("Fish", "ERM")]
    assert verdicts.reason(numbers) == "Holds: Fish, N = 5, 10. Does not hold: ERM, N = 5, 10."
    odd = [Check("ERM, N = 5: 2 diverged", False), Check("a", True)]
    assert verdicts.reason(odd) == "Holds: a. Does not hold: ERM, N = 5: 2 diverged."


@pytest.mark.parametrize(
    ("each", "holds"),
    [([True, True], True), ([True, False], False), ([None, False], False), ([True, None], None), ([], None)],
)
def test_checks_that_stand_or_fall_together(each: list[bool | None], holds: bool | None) -> None:
    found = verdicts.together("all", [Check("one", h) for h in each])
    words = {(True, False): "all (1 of 2)", (None, False): "all (0 of 1, 1 without a record)"}
    assert (found.holds, found.what) == (holds, words.get(tuple(each), "all"))


def test_a_number_that_changes_the_verdict(tmp_path: Path) -> None:
    save_sprites(tmp_path, changes={("ERM", 20): 0.985})
    found = judged("cdsprites-erm-random", tmp_path)
    assert found.verdict == PARTLY
    said = "Holds: ERM, N = 15. Does not hold: ERM, N = 20. Premises that hold: ERM, N = 5, 10."
    assert found.reason == said
    assert "98.5 (N=20)" in found.ours
    assert found.seeds == "2"
    assert found.planned == 20
    assert len(found.used) == 8


def test_missing_numbers_are_not_taken_for_granted(tmp_path: Path) -> None:
    save_sprites(tmp_path, numbers=(5, 10, 15))
    found = judged("cdsprites-erm-random", tmp_path)
    assert found.verdict == PARTLY
    assert "No record: ERM, N = 20." in found.reason
    assert judged("cdsprites-fish-20", tmp_path).verdict == NOT_RUN
    assert judged("reptile-test", tmp_path).verdict == NOT_RUN  # "regardless of N" is one statement


def test_a_diverged_run_has_no_score_and_is_counted(tmp_path: Path) -> None:
    save_sprites(tmp_path)
    config = next(c for c in cdsprites.figure([10], range(1))["Adam"] if c.name == "Fish")
    lost = record(config, {"train": score(0.1), "test": score(0.1)}, "diverged")
    Store(tmp_path / "cdsprites").save(lost)
    found = judged("grouping-cdsprites", tmp_path)
    assert found.verdict == PARTLY
    assert "Premises that do not: Fish, N = 10: 1 diverged." in found.reason
    row = next(r for r in found.rows if r[0] == "Fish")
    assert (row[2], row[4]) == ("100.0", "1 of 5, 1 diverged")


def test_only_for_many_domains_is_read_before_them(tmp_path: Path, capsys: Any) -> None:
    save_sprites(tmp_path, numbers=(30, 40), changes={("ERM", 30): 1.0})
    numbers = ["--numbers", "30", "40"]
    assert main(["reproduce", "cdsprites", *numbers, "--no-run", "--json", "--out", str(tmp_path)]) == 0
    every = json.loads(capsys.readouterr().out)["rows"]
    rows = [r for r in every if (r["part"], r["method"]) == ("Adam", "ERM")]
    assert [r["verdict"] for r in rows] == ["test disagrees", "test agrees"]
    assert ["only" in r["paper"] for r in rows] == [True, False]
    assert ("ERM", 30, 95) not in cdsprites.marks("test")  # a bound from above is no point of the figure


@pytest.mark.parametrize("odd", [{"domains": 0}, {"domains": "five"}, {"domains": None}, {"seed": 10**9}])
def test_records_of_impossible_runs_hide_no_other(tmp_path: Path, odd: dict[str, Any]) -> None:
    save_sprites(tmp_path)
    config = cdsprites.figure([10], range(1))["Adam"][0]
    changed = {"seed": odd["seed"]} if "seed" in odd else {"data_options": {**config.data_options, **odd}}
    before = judged("grouping-cdsprites", tmp_path)
    Store(tmp_path / "cdsprites").save(record(replace(config, **changed), {"test": score(0.1)}))
    assert judged("grouping-cdsprites", tmp_path).verdict == before.verdict


def test_one_record_has_one_reading(tmp_path: Path, capsys: Any) -> None:
    """The table of `shoal reproduce cdsprites` and the page of claims, of the same runs."""
    save_sprites(tmp_path, numbers=(10,), seeds=5, changes={("ERM", 10): 0.5225, ("Fish", 10): 0.982})
    for config in cdsprites.figure([10], range(2))["plain SGD"]:
        lost = record(config, {"train": score(0.7), "test": score(0.6)}, "diverged")
        Store(tmp_path / "cdsprites").save(lost)
    arguments = ["reproduce", "cdsprites", "--numbers", "10", "--no-run", "--json", "--out", str(tmp_path)]
    assert main(arguments) == 0
    entries = {(e["part"], e["method"]): e for e in json.loads(capsys.readouterr().out)["rows"]}
    said = {name: judged(name, tmp_path) for name in ("grouping-cdsprites", "control-sgd")}
    assert entries["Adam", "ERM"]["verdict"] == "test disagrees  train agrees"
    assert "Premises that do not: ERM, N = 10." in said["grouping-cdsprites"].reason
    assert entries["Adam", "Fish"]["verdict"] == "test agrees  train agrees"
    for part, name in (("Adam", "grouping-cdsprites"), ("plain SGD", "control-sgd")):
        for method in ("Fish", "Fish, random grouping", "ERM"):
            entry, row = entries[part, method], next(r for r in said[name].rows if r[0] == method)
            assert row[2] == cdsprites.percent(entry["test last"])
            assert row[4] == ("5" if part == "Adam" else "3 of 5, 2 diverged")
            assert (len(entry["seeds"]), len(entry["diverged"])) == ((5, 0) if part == "Adam" else (3, 2))


def test_the_same_number_is_said_once(tmp_path: Path) -> None:
    """Every number in the table of `shoal reproduce cdsprites` is also in a claim, in the same relation."""
    said = {
        (c["method"], n, c.get("split", "test"), c["relation"], c["value"])
        for claim in CLAIMS.values()
        if claim.judge == "sprites" and not claim.options.get("part")
        for c in claim.options["checks"]
        if "relation" in c
        for n in c.get("numbers") or cdsprites.NUMBERS
    }
    for c in claims("cdsprites"):
        assert (c["method"], c["domains"], c["split"], c["relation"], c["value"]) in said


def test_small_runs_are_shown_but_not_judged(tmp_path: Path) -> None:
    save_sprites(tmp_path, numbers=(10,), seeds=1, passes=200, size=32)
    found = judged("grouping-cdsprites", tmp_path)
    assert found.verdict == NOT_JUDGED
    assert "32×32 pixels and 200 passes" in found.reason
    assert "Fish 100.0 (N=10)" in found.ours
    assert "holds" not in found.columns
    save_sprites(tmp_path, numbers=(10,), seeds=1)
    assert judged("grouping-cdsprites", tmp_path).verdict == AGREES


def test_ten_seeds_at_one_n_and_five_at_others(tmp_path: Path) -> None:
    save_sprites(tmp_path, seeds=5)
    save_sprites(tmp_path, numbers=(10,), seeds=10)
    found = judged("cdsprites-fish-10", tmp_path)
    assert (found.verdict, found.seeds, found.planned) == (AGREES, "5 to 10", 35)
    assert [row[4] for row in found.rows] == ["10", *["5"] * 5]


def test_a_part_without_records_is_not_run(tmp_path: Path) -> None:
    save_sprites(tmp_path)
    store = Store(tmp_path / "cdsprites")
    for config in cdsprites.figure(cdsprites.NUMBERS, range(2)).get(SEVERAL, ()):
        (store.folder / f"{config.identity}.json").unlink()
    found = judged("cdsprites-idgm-10", tmp_path)
    assert found.verdict == NOT_RUN
    item = view.Item(CLAIMS["cdsprites-idgm-10"], found, "")
    beside = [row for row in item.rows if row[0] == "IDGM, equal minibatches"]
    assert [row[2] for row in beside] == ["95.0 ± 0.0"] * 6  # shown
    assert {row[-1] for row in beside} == {"not counted"}


def test_other_runs_on_cdsprites_do_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for config in cdsprites.demo([0]):
        store.save(record(config, {"train": score(1.0), "test": score(1.0)}))
    assert judged("grouping-cdsprites", tmp_path).verdict == NOT_RUN


def test_controls_are_read_from_their_own_part(tmp_path: Path) -> None:
    save_sprites(tmp_path)
    store = Store(tmp_path / "cdsprites")
    for config in cdsprites.figure([10], range(2))["plain SGD"]:
        store.save(record(config, {"train": score(1.0), "test": score(0.99)}))
    assert judged("control-sgd", tmp_path).verdict == DISAGREES
    assert judged("control-palette", tmp_path).verdict == AGREES
    assert judged("grouping-cdsprites", tmp_path).verdict == AGREES


def path(label: str, left: int | None, end: str) -> dict[str, Any]:
    train, test = (float(v) / 100 for v in end.split("/"))
    return {
        "row": {"label": label},
        "weight_decay": 0.0,
        "steps": [1, 100, 200],
        "weights": [[0.1, 0, 0, 0, 0.1]] * 3,
        "train": [0.93, 0.93, train],
        "test": [0.93, 0.93, test],
        "leaves_invariance": left,
    }


def save_linear(folder: Path, fish: str = "93/93", printed: float = 0.93) -> None:
    rows = [
        path("ERM", 100, "97/57"),
        path("IDGM, normalised, γ=0.1", None, "93/93"),
        path("IDGM, raw, γ=2.5", 200, "97/57"),
        path("IGA, λ=1", 100, "97/57"),
        path("IGA, λ=100", 200, "97/57"),
        path("Fish", 200, fish),
    ]
    (folder / "linear.json").write_text(json.dumps(rows))
    about = {"printed": {"ERM": [0.97, 0.57], "IDGM and Fish": [printed, 0.93]}, "environment": ENVIRONMENT}
    (folder / "linear-about.json").write_text(json.dumps(about))


def test_the_linear_example(tmp_path: Path) -> None:
    save_linear(tmp_path)
    assert judged("linear-table", tmp_path).verdict == AGREES
    assert judged("linear-printed", tmp_path).verdict == AGREES
    assert judged("linear-longer", tmp_path).verdict == AGREES
    assert judged("linear-iga", tmp_path).verdict == DISAGREES
    assert judged("linear-decay", tmp_path).verdict == NOT_RUN
    save_linear(tmp_path, fish="97/57", printed=0.9)
    found = judged("linear-table", tmp_path)
    assert found.verdict == PARTLY
    assert found.ours.endswith("Fish 97/57")
    assert (found.columns[-1], found.rows[0][-1]) == ("w₁ + b at the end", "+0.200")
    assert judged("linear-printed", tmp_path).verdict == PARTLY


@pytest.mark.parametrize(
    ("slope", "gap", "verdict"), [(2.0, 1e-6, AGREES), (1.5, 1e-6, PARTLY), (1.5, 0.5, DISAGREES)]
)
def test_the_theorem(tmp_path: Path, slope: float, gap: float, verdict: str) -> None:
    result = [{"domains": 2, "alphas": [0.1, 0.001], "one_minus_cos": [0.1, gap], "slope": slope}]
    (tmp_path / "theorem.json").write_text(json.dumps(result))
    found = judged("theorem", tmp_path)
    assert found.verdict == verdict
    assert f"{slope:.3f}" in found.ours


def save_cost(folder: Path, *ratios: float, network: str = "sprite-cnn") -> None:
    rows = [
        {"network": network, "how": f"way {n}", "method": m, "ratio_to_fish": r, "rounds": [r] * 3}
        for n, ratio in enumerate(ratios)
        for m, r in (("Fish", 1.0), ("IDGM, exact", ratio))
    ]
    (folder / "cost.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": rows}))


@pytest.mark.parametrize(("ratios", "verdict"), [((10, 8), AGREES), ((2.3, 8), PARTLY), ((2.3,), DISAGREES)])
def test_what_direct_matching_costs(tmp_path: Path, ratios: tuple[float, ...], verdict: str) -> None:
    save_cost(tmp_path, *ratios)
    found = judged("cost", tmp_path)
    assert found.verdict == verdict
    assert f"{ratios[0]:.1f} ×" in found.ours
    assert found.seeds == "3 rounds"


def track(config: RunConfig, fish: tuple[float, float], erm: tuple[float, float]) -> dict[str, Any]:
    """Cosines that go from one value to another, and fall a little by every update of ERM."""

    def side(ends: tuple[float, float], change: float) -> dict[str, Any]:
        values = [ends[0] + (ends[1] - ends[0]) * n / 19 for n in range(20)]
        after = [v + change for v in values]
        return {"before": {"normalised": values, "raw": values}, "after": {"normalised": after, "raw": after}}

    constant = {"normalised": 0.0, "raw": 0.0, "score": 0.5}
    return {
        "config": config.to_dict(),
        "iterations": list(range(20)),
        "domains": 15,
        "fish": side(fish, 0.0),
        "erm": side(erm, -0.01),
        "scores": {"metric": "accuracy", "iterations": [0, 20], "fish": [0.5, 0.9], "erm": [0.5, 0.5]},
        "constant": {**constant, "wrong": {**constant, "normalised": 1.0}},
        "environment": ENVIRONMENT,
    }


def save_tracks(folder: Path, *ends: Any, **changes: Any) -> None:
    folder = folder / "track" / "cdsprites-0"
    folder.mkdir(parents=True)
    for config in tracking.plan("cdsprites", 2, **changes):
        content = json.dumps(track(config, *ends), default=dict)
        (folder / f"seed-{config.seed}.json").write_text(content)


GIP = ("gip-rises", "gip-update", "gip-end")


def test_records_of_tracking_say_what_the_older_files_say(tmp_path: Path) -> None:
    """Seeds were files of their own; now they are records like those of any run."""
    save_tracks(tmp_path / "old", (0.1, 0.4), (0.3, 0.1))
    configs = tracking.plan("cdsprites", 2)
    store = Store(tracking.folder_of(tmp_path / "new", configs, 1))
    for config in configs:
        old = track(config, (0.1, 0.4), (0.3, 0.1))
        agreement = [{"step": step, "models": models(old, step)} for step in old["iterations"]]
        constants = {"constant classifier": old["constant"], "constant and wrong": old["constant"]["wrong"]}
        history = []
        for place, step in enumerate(old["scores"]["iterations"]):
            both = {"test": old["scores"]["fish"], "ERM": old["scores"]["erm"]}
            scores = {name: score(values[place]) for name, values in both.items()}
            scores |= {name: score(c["score"]) for name, c in constants.items()}
            history.append({"step": step, "passes": 15 * step, "loss": None, "scores": scores})
        for name, c in constants.items():
            values = {"mean_cosine": c["normalised"], "mean_inner_product": c["raw"]}
            agreement[0]["models"][name] = {"before": values}
        new = RunRecord(config, "finished", tuple(history), 1, "last step", 1.0, ENVIRONMENT)
        store.save(replace(new, agreement=tuple(agreement)))
        assert tracking.result_of(store.found([config])[0]) == json.loads(json.dumps(old, default=dict))
    before, after = (collect([tmp_path / name]) for name in ("old", "new"))
    assert not after.broken
    assert not after.runs
    for name in GIP:
        old_verdict, new_verdict = (rules.judge(CLAIMS[name], records) for records in (before, after))
        assert (new_verdict.verdict, new_verdict.rows) == (AGREES, old_verdict.rows)
        assert len(new_verdict.used) == 2


def models(old: Mapping[str, Any], step: int) -> dict[str, Any]:
    names = {"mean_cosine": "normalised", "mean_inner_product": "raw"}
    return {
        label: {
            when: {key: old[side][when][kind][step] for key, kind in names.items()}
            for when in ("before", "after")
        }
        for side, label in tracking.SIDES.items()
    }


@pytest.mark.parametrize(
    ("ends", "verdicts"),
    [
        (((0.1, 0.4), (0.3, 0.1)), (AGREES, AGREES, AGREES)),
        (((0.4, 0.1), (0.1, 0.4)), (DISAGREES, AGREES, DISAGREES)),
        (((0.4, 0.1), (0.5, 0.1)), (DISAGREES, AGREES, AGREES)),
        (((0.1, 0.4), (0.1, 0.3)), (PARTLY, AGREES, AGREES)),
        (((0.1, 0.4), (0.1, 0.45)), (DISAGREES, AGREES, DISAGREES)),
        (((0.4, 0.39), (0.1, 0.11)), (DISAGREES, AGREES, AGREES)),  # once "agrees": Fish falls, ERM rises
    ],
)
def test_tracked_gradients(tmp_path: Path, ends: Any, verdicts: tuple[str, ...]) -> None:
    save_tracks(tmp_path, *ends)
    records = collect([tmp_path])
    found = [rules.judge(CLAIMS[name], records) for name in GIP]
    assert tuple(f.verdict for f in found) == verdicts
    assert {f.seeds for f in found} == {"2"}
    assert [row[1] for row in found[0].rows] == ["Fish", "ERM", "constant classifier", "constant and wrong"]


def test_short_tracking_is_not_judged(tmp_path: Path) -> None:
    save_tracks(tmp_path, (0.1, 0.4), (0.3, 0.1), steps=20)
    assert judged("gip-end", tmp_path).verdict == NOT_JUDGED


def test_kept_records_give_the_table_of_the_results(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    shutil.unpack_archive(results / "records" / "2026-11-17.tar.gz", tmp_path, filter="data")
    found = collect([tmp_path])
    assert (len(found.runs), len(found.tracks), list(found.broken)) == (45, 2, [])
    lines = (results / "2026-11-17-evidence-2.md").read_text(encoding="utf-8").splitlines()
    table = [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("|")
    ]
    ours = {row[0].removesuffix(" (ours)"): row[2:5] for row in table if len(row) == 6}
    claimed = [claim for claim in CLAIMS.values() if claim.title in ours]
    assert len(claimed) == 10
    for claim in claimed:
        result = rules.judge(claim, found)
        verdict = f"{view.MARKS[result.verdict]} {result.verdict}"
        assert ours[claim.title] == [result.ours, result.seeds, verdict]


def as_in_fmow(model: str | None = None) -> dict[str, Any]:
    """What the preset says of a run."""
    known = recipes.settings("fmow", "paper")
    own = {"model": model or known["model"], "model_options": known["model_options"]}
    return {**own, "optimizer_options": known["optimizer_options"], "batch_size": known["batch"]}


def save_fmow(folder: Path, fish: float, erm: float, model: str | None = None) -> None:
    store = Store(folder / "wilds")
    for label, algorithm, value in (("Fish", "fish", fish), ("erm", "erm", erm)):
        for seed in range(3):
            config = RunConfig("fmow", algorithm, 10, label=label, seed=seed, **as_in_fmow(model))
            scores = {"test": score(0.5) | {"metrics": {"worst-group accuracy": value}}}
            store.save(record(config, scores))


def test_the_table_of_wilds(tmp_path: Path) -> None:
    save_fmow(tmp_path, 0.346, 0.25)
    found = judged("wilds", tmp_path)
    assert found.verdict == PARTLY
    assert "Holds: fmow, Fish." in found.reason
    assert "Premises that do not: fmow, erm." in found.reason
    assert "No record: poverty; camelyon17; civilcomments; iwildcam; amazon." in found.reason
    best = judged("wilds-best", tmp_path)
    assert best.verdict == PARTLY
    assert best.ours == "fmow +9.6 against erm"
    assert "No record: poverty; camelyon17; fmow against IRM, Coral, GroupDRO; civilcomments." in best.reason


def test_a_small_model_on_wilds_is_not_judged(tmp_path: Path) -> None:
    save_fmow(tmp_path, 0.346, 0.25, model="small-cnn")
    found = judged("wilds", tmp_path)
    assert found.verdict == NOT_JUDGED
    assert "fmow (small-cnn)" in found.reason


def save_sweep(folder: Path, value: float, steps: int = 5001) -> None:
    store = Store(folder / "domainbed" / "runs")
    names = ("a", "b", "c")
    for algorithm in ("erm", "fish"):
        for out in names:
            about = {"leave_out": [out], "trial": 0, "draw": 0}
            config = RunConfig("rotated-mnist", algorithm, steps, protocol=about)
            rest = {n: 0.9 for n in names if n != out}
            scores = {
                "train": score(0.9, rest),
                "validation": score(0.9, rest),
                "test": score(value, {out: value}),
            }
            store.save(record(config, scores))


def test_the_table_of_domainbed(tmp_path: Path) -> None:
    save_sweep(tmp_path, 0.975)
    found = judged("domainbed", tmp_path)
    assert found.verdict == PARTLY
    assert found.ours == "2 of 2 numbers agree"
    assert [row[2] for row in found.rows] == ["ERM", "Fish"]
    assert judged("domainbed-rank", tmp_path).verdict == NOT_RUN


def test_a_short_sweep_is_not_judged(tmp_path: Path) -> None:
    save_sweep(tmp_path, 0.975, steps=300)
    found = judged("domainbed", tmp_path)
    assert found.verdict == NOT_JUDGED
    assert "300 of 5,001 steps" in found.reason


def save_domainbed(folder: Path, changes: Mapping[tuple[str, str], float] | None = None) -> None:
    """The paper's own averages, as if each dataset had one domain left out."""
    store = Store(folder / "domainbed")
    for claim in claims("domainbed"):
        if claim["table"] == "DomainBed" and claim["names"]:
            name = claim["names"][0]
            for method, (printed, *_) in claim["values"].items():
                value = (changes or {}).get((name, method), printed) / 100
                about = {"leave_out": ["a"], "trial": 0, "draw": 0}
                config = RunConfig(name, method.lower(), 5001, protocol=about)
                rest = score(0.9, {"b": 0.9})
                store.save(
                    record(config, {"train": rest, "validation": rest, "test": score(value, {"a": value})})
                )


def test_the_ranks_of_domainbed(tmp_path: Path) -> None:
    save_domainbed(tmp_path)
    assert judged("domainbed", tmp_path).verdict == AGREES
    found = judged("domainbed-rank", tmp_path)
    assert found.ours == "Coral 67.19, Mixup 67.07, Fish 67.04"  # the printed columns themselves
    assert found.reason == "Holds: above ERM. Does not hold: rank 2."
    save_domainbed(tmp_path, {("pacs", "Mixup"): 80.0})
    assert judged("domainbed-rank", tmp_path).verdict == AGREES
    save_domainbed(tmp_path, {("pacs", "Fish"): 70.0})
    assert judged("domainbed-rank", tmp_path).verdict == DISAGREES
    assert "pacs, Fish" in judged("domainbed", tmp_path).reason.partition("Does not hold: ")[2]


def save_ablation(folder: Path, table: str, values: Mapping[str, float]) -> None:
    for label, value in values.items():
        config = RunConfig("fmow", "fish", 10, settings={"meta_lr": value}, label=label, **as_in_fmow())
        scores = {"test": score(0.5) | {"metrics": {"worst-group accuracy": value}}}
        Store(folder / table).save(record(config, scores))


def test_ablations(tmp_path: Path) -> None:
    save_ablation(tmp_path, "smoothfish", {"γ = 0": 0.1, "γ = 0.1": 0.33, "γ = 0.25": 0.345})
    assert judged("smoothfish", tmp_path).verdict == PARTLY
    assert "No record: camelyon17; civilcomments; iwildcam;" in judged("smoothfish", tmp_path).reason
    assert judged("smoothfish", tmp_path).ours == "fmow: within 1.5"
    save_ablation(tmp_path, "smoothfish", {"γ = 0.125": 0.39})
    assert judged("smoothfish", tmp_path).verdict == DISAGREES
    save_ablation(tmp_path, "warm-start", {"10 % of the data": 0.21, "converged": 0.4})
    found = judged("warm-start", tmp_path)
    assert found.verdict == PARTLY
    assert "Holds: fmow, 10 % of the data. Does not hold: fmow, converged." in found.reason
    save_ablation(tmp_path, "rates", {"α = 1": 0.21})  # the same run as one of the other table
    assert judged("rates", tmp_path).verdict == NOT_JUDGED
    save_ablation(tmp_path, "grouping", {"Fish": 0.34, "Fish, RG": 0.33})
    found = judged("grouping", tmp_path)
    assert found.verdict == PARTLY
    assert found.ours == "fmow +1.0 against Fish, RG"


def test_files_that_are_no_records_are_named(tmp_path: Path) -> None:
    (tmp_path / "theorem.json").write_text("{")
    (tmp_path / "linear.json").write_text('[{"row": 1}]')
    (tmp_path / f"{'a' * 16}.json").write_text("{}")
    (tmp_path / "seed-0.json").write_text("[1]")
    records = collect([tmp_path])
    assert len(records.broken) == 2
    assert rules.judge(CLAIMS["theorem"], records).verdict == NOT_RUN
    found = rules.judge(CLAIMS["linear-table"], records)
    assert found.verdict == NOT_JUDGED
    assert "cannot be read" in found.reason
    with pytest.raises(InputError, match="there is no folder"):
        collect([tmp_path / "nowhere"])


def test_files_nested_without_end_are_named(tmp_path: Path) -> None:
    for name in ("cost.json", "seed-0.json", f"{'a' * 16}.json"):
        (tmp_path / name).write_text("[" * 200_000)
    assert len(collect([tmp_path]).broken) == 3


@pytest.mark.parametrize("change", [{"config": []}, {"config": {"dataset": "cdsprites"}}, {"fish": None}])
def test_a_damaged_tracking_does_not_cost_the_others(tmp_path: Path, change: dict[str, Any]) -> None:
    save_tracks(tmp_path, (0.1, 0.4), (0.3, 0.1))
    before = rules.judge(CLAIMS["gip-end"], collect([tmp_path]))
    config = {"dataset": "cdsprites", "algorithm": "fish", "steps": 3}
    content = {"config": config, "fish": {}, "erm": {}, "scores": {}, "iterations": 3} | change
    (tmp_path / "seed-9.json").write_text(json.dumps(content))
    records = collect([tmp_path])
    assert [str(tmp_path / "seed-9.json") in text for text in records.broken] == [True]
    after = rules.judge(CLAIMS["gip-end"], records)
    assert (after.verdict, after.ours) == (before.verdict, before.ours)
    assert after.verdict == AGREES


def test_the_terminal_says_what_could_not_be_read(tmp_path: Path, made: Path, capsys: Any) -> None:
    for n in range(12):
        (tmp_path / f"{n:016x}.json").write_text("{")
    assert main(["reproduce", "--all", "--out", str(tmp_path), "--from", str(made)]) == 0
    said = capsys.readouterr().out
    assert said.count("is not a run record") == 10
    assert said.endswith("\n2 more notes are in the report.\n")


def test_a_run_in_two_folders_counts_once(tmp_path: Path) -> None:
    save_sprites(tmp_path / "a", numbers=(10,))
    save_sprites(tmp_path / "b", numbers=(10,))
    assert len(judged("grouping-cdsprites", tmp_path / "a", tmp_path / "b").used) == 6
    assert judged("grouping-cdsprites", tmp_path / "a").planned == 15


def test_what_stands_in_the_way() -> None:
    def loads(name: str) -> None:
        if name in ("pacs", "fmow"):
            raise InputError(f"no {name}; `shoal data get {name}` fetches it.")

    found = experiments.obstacles(["grouping", "theorem", "track"], loads, gpu=False)
    assert found["theorem"] == ""
    assert found["track"] == experiments.NO_GPU
    assert found["grouping"].startswith("Missing data: fmow, pacs. fmow: no fmow;")
    assert "`shoal data get fmow pacs` downloads" in found["grouping"]
    assert experiments.obstacles(["track"], loads, gpu=True) == {"track": ""}


class Reader(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def save_all(folder: Path) -> None:
    """Some of everything; the theorem and the linear example as they are computed, on a short path."""
    save_sprites(folder, numbers=(5, 10), changes={("Fish", 10): 0.9375})
    save_tracks(folder, (0.1, 0.4), (0.3, 0.1))
    save_cost(folder, 4.57)
    save_fmow(folder, 0.346, 0.25)
    save_sweep(folder, 0.975)
    rows = [linear.follow(row, 0.0, steps=12).to_dict() for row in linear.ROWS]
    (folder / "linear.json").write_text(json.dumps(rows))
    about = {"printed": linear.printed_accuracies(), "environment": ENVIRONMENT}
    (folder / "linear-about.json").write_text(json.dumps(about))
    assert main(["reproduce", "theorem", "--out", str(folder)]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evidence")
    save_all(folder)
    assert main(["reproduce", "--all", "--out", str(folder)]) == 0
    return folder


def test_the_page_says_what_records_say(made: Path) -> None:
    found = Reader((made / "evidence.html").read_text(encoding="utf-8"))
    assert "93.8 (N=10)" in found.text
    assert "4.6 × (sprite-cnn, way 0, cpu)" in found.text
    assert "34.6 ± 0.0" in found.text
    assert "ERM 93/93; IDGM and Fish 97/57" in found.text
    slopes = [r["slope"] for r in json.loads((made / "theorem.json").read_text())]
    assert all(f"{slope:.3f}" in found.text for slope in slopes)
    assert found.tags.count("svg") >= 8
    assert found.tags.count("section") == len(CLAIMS)
    assert len(set(found.ids)) == len(found.ids)
    assert all(link[0] == "#" and link[1:] in found.ids for link in found.links)
    for claim in CLAIMS.values():
        assert claim.title.split(":")[0] in found.text
        assert " ".join(claim.rule.split()) in found.text


def test_data_and_markdown_say_the_same(made: Path) -> None:
    rows = {row["id"]: row for row in json.loads((made / "evidence.json").read_text(encoding="utf-8"))}
    assert set(rows) == set(CLAIMS)
    assert rows["theorem"]["verdict"] == AGREES
    assert rows["linear-printed"]["verdict"] == DISAGREES
    assert rows["gip-end"]["verdict"] == AGREES
    assert rows["gip-end"]["records"]
    assert rows["smoothfish"]["verdict"] == NOT_RUN
    text = (made / "evidence.md").read_text(encoding="utf-8")
    assert rows["cost"]["ours"] in text
    assert text.count("\n## ") == len(CLAIMS)
    ours = sum(claim.ours for claim in CLAIMS.values())
    assert text.count("\nWhat it is: ") == ours > 0
    assert text.count("\nThe paper: ") == len(CLAIMS) - ours
    page = (made / "evidence.html").read_text(encoding="utf-8")
    assert page.count("<dt>What it is</dt>") == ours


def test_a_changed_record_changes_the_page(made: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    save_cost(folder, 11.25)
    assert main(["reproduce", "--all", "--out", str(folder), "--json"]) == 0
    claims = {c["id"]: c for c in json.loads(capsys.readouterr().out)["claims"]}
    assert claims["cost"]["verdict"] == AGREES
    assert "11.2 ×" in claims["cost"]["ours"]
    text = Reader((folder / "evidence.html").read_text(encoding="utf-8")).text
    assert "11.2 ×" in text
    assert "4.6 ×" not in text


def test_names_are_escaped(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / NASTY.replace("/", "")
    shutil.copytree(made, folder)
    save_cost(folder, 9.0, network=NASTY)
    assert main(["reproduce", "--all", "--out", str(folder)]) == 0
    html = (folder / "evidence.html").read_text(encoding="utf-8")
    assert "<script>alert" not in html
    assert Reader(html).tags.count("script") == 1
    assert NASTY in Reader(html).text
    lines = (folder / "evidence.md").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("    "))  # those are code, as it is typed
    assert "\\<script\\>alert" in text
    assert "<script>" not in text.replace("\\<script\\>", "")


def test_records_from_elsewhere(made: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "here"
    assert main(["reproduce", "--all", "--out", str(out), "--from", str(made), "--json"]) == 0
    claims = {c["id"]: c for c in json.loads(capsys.readouterr().out)["claims"]}
    assert claims["theorem"]["verdict"] == AGREES
    assert str(made) in claims["theorem"]["records"][0]
    assert f"--out {out}" in claims["cdsprites-train"]["command"]
    assert main(["reproduce", "--all", "--from", str(tmp_path / "nowhere"), "--out", str(out)]) == 2


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be run."""
    found: list[list[str]] = []

    def call(name: str, words: list[str], seconds: float) -> str:
        found.append([name, *words])
        return "no such network." if words[0] == "cost" else ""

    monkeypatch.setattr(command, "call", call)
    return found


def test_only_what_is_cheap_and_missing_is_run(made: Path, tmp_path: Path, called: list[list[str]]) -> None:
    assert main(["reproduce", "--all", "--out", str(tmp_path)]) == 0
    assert [c[:2] for c in called] == [["reproduce", "theorem"], ["reproduce", "linear"]]
    called.clear()
    assert main(["reproduce", "--all", "--out", str(tmp_path), "--from", str(made)]) == 0
    assert not called


def test_run_does_the_rest_and_says_what_failed(tmp_path: Path, called: list[list[str]], capsys: Any) -> None:
    save_sprites(tmp_path / "gpu", numbers=(10,))
    sources = ["--from", str(tmp_path / "gpu"), "--device", "cpu", "--json"]
    assert main(["reproduce", "--all", "--run", "--out", str(tmp_path / "out"), *sources]) == 0
    names = [c[1] if c[0] == "reproduce" else c[0] for c in called]
    assert names == ["theorem", "linear", "cost", "track", "cdsprites"]
    copied = list((tmp_path / "out" / "cdsprites").glob("*.json"))
    assert len(copied) == len(list((tmp_path / "gpu" / "cdsprites").glob("*.json")))
    shown = json.loads(capsys.readouterr().out)
    assert shown["notes"] == ["cost: no such network."]
    cost = next(c for c in shown["claims"] if c["id"] == "cost")
    assert "did not finish: no such network." in cost["reason"]


def test_a_budget_stops_what_is_running(tmp_path: Path, capsys: Any) -> None:
    began = time.monotonic()
    assert main(["reproduce", "--all", "--out", str(tmp_path), "--budget", "0.002", "--json"]) == 0
    assert time.monotonic() - began < 60
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert notes[0].startswith("theorem: stopped after 0.002 minutes, the time budget")
    assert notes[1] == "linear: the time budget was used up before it started."


def test_a_job_says_what_was_wrong(capsys: Any) -> None:
    jobs = [("a", "reproduce", ["cost", "--networks", "sprite"]), ("b", "reproduce", ["cost", "--help"])]
    failed = command.do_jobs(jobs, None)
    assert list(failed) == ["a"]
    assert "sprite-cnn" in failed["a"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "budget",
    ["0.001", pytest.param("1e-12", marks=pytest.mark.slow), pytest.param("0.01", marks=pytest.mark.slow)],
)
def test_the_page_is_written_with_any_budget(tmp_path: Path, budget: str) -> None:
    """In a process that has imported nothing yet: half of torch is worse than none."""
    command = [sys.executable, "-m", "shoal", "reproduce", "--all", "--budget", budget, "--device", "cpu"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "the time budget was used up" in done.stdout
    assert (tmp_path / "evidence.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "an experiment (linear, cdsprites"),
        (["--all", "theorem"], "--all is an option of --all"),
        (["--out", "x", "theorem"], "--out is an option of --all, and must come after its name"),
        (["--all", "--budget", "0"], "--budget must be a number above 0"),
        (["--all", "--budget", "nan"], "--budget must be a number above 0"),
        (["--all", "--budget", "inf"], "--budget must be a number above 0, got 'inf'"),
        (["--all", "--data-dir", "nowhere"], "there is no folder"),
    ],
)
def test_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_without_jinja2_the_rest_is_written(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["reproduce", "--all", "--out", str(tmp_path), "--from", str(made)]) == 0
    assert "pip install 'shoal[report]'" in capsys.readouterr().err
    assert (tmp_path / "evidence.md").exists()
    assert not (tmp_path / "evidence.html").exists()


def test_a_claim_may_be_ours() -> None:
    claim = Claim(
        "x", "Title", "s", "w", "–", "linear", "linear_paths", "r", {"values": {}, "within": 1}, ours=True
    )
    item = view.Item(claim, Judged(), "shoal reproduce linear")
    assert view.summary([item]).rows[0][0] == "Title (ours)"


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=3000 --enable-logging=stderr --dump-dom"
)
LOOK = """<script>
const table = document.querySelector("table.summary tbody");
const rows = () => [...table.rows].map(r => r.cells[4].innerText.trim());
document.querySelector("table.summary").tHead.rows[0].cells[4].firstElementChild.click();
const drawn = [...document.querySelectorAll("svg.plot")].map(p => p.getBoundingClientRect());
document.body.dataset.said = JSON.stringify([
  rows(), drawn.filter(b => b.width > 100 && b.height > 50).length, drawn.length,
  document.documentElement.scrollWidth <= innerWidth,
]);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [500, pytest.param(1280, marks=pytest.mark.slow)])
def test_in_a_browser(made: Path, tmp_path: Path, width: int) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        (made / "evidence.html").read_text(encoding="utf-8").replace("</body>", LOOK), encoding="utf-8"
    )
    flags = [*FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"]
    done = subprocess.run(
        [str(CHROMIUM), *flags, page.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    said = re.search(r'data-said="([^"]*)"', done.stdout)
    assert said is not None
    verdicts, shown, drawn, fits = json.loads(said[1].replace("&quot;", '"'))
    assert len(verdicts) == len(CLAIMS)
    assert sum(a != b for a, b in pairwise(verdicts)) == len(set(verdicts)) - 1  # sorted: like beside like
    assert shown == drawn >= 8
    assert fits
