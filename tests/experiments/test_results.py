"""The table of all runs: its index, its queries, its groups."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import shoal
from shoal.errors import InputError
from shoal.experiments import store as stores
from shoal.experiments.config import RunConfig
from shoal.experiments.record import SCHEMA, Row, RunRecord, read_record, row_of
from shoal.experiments.results import COLUMNS, Results, load
from shoal.experiments.store import INDEX, Index, Store

ERM = RunConfig("digits", "erm", 100, data_options={"test": "15°"})
FISH = RunConfig(
    "digits", "fish", 200, settings={"meta_lr": 0.5}, optimizer_options={"lr": 0.01}, label="Fish"
)


def scores(test: float, metric: str = "accuracy") -> dict[str, Any]:
    def of(value: float, names: str) -> dict[str, Any]:
        return {"metric": metric, "average": value, "domains": dict.fromkeys(names.split(), value)}

    return {"train": of(0.9, "a b"), "validation": of(0.8, "a b"), "test": of(test, "15°")}


def made(config: RunConfig = ERM, test: float = 0.5, metric: str = "accuracy", **changes: Any) -> RunRecord:
    history = (
        {"step": 50, "passes": 50, "loss": 1.0, "scores": scores(test, metric)},
        {"step": 100, "passes": 100, "loss": 0.5, "scores": scores(test / 2, metric)},
    )
    usual = RunRecord(config, "finished", history, 0, "best on validation", 1.5, {"device": "cpu"})
    return replace(usual, **changes)


def seeds(config: RunConfig, number: int) -> list[RunRecord]:
    return [made(replace(config, seed=seed), test=0.5 + seed / 100) for seed in range(number)]


def save(folder: Path, *some: RunRecord) -> None:
    for one in some:
        Store(folder).save(one)


@pytest.fixture(autouse=True)
def always_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "INDEX_FROM", 1)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The records that were opened."""
    found: list[str] = []
    read = stores.read_row

    def counted(path: str) -> Row:
        found.append(Path(path).name)
        return read(path)

    monkeypatch.setattr(stores, "read_row", counted)
    return found


def naive(folder: Path) -> list[Row]:
    """The rows without an index, from every record there is."""
    paths = [p for p in folder.rglob("*.json") if p.name == "record.json" or len(p.stem) == 16]
    return [row_of(read_record(p)) | {"path": p.relative_to(folder).as_posix()} for p in sorted(paths)]


def same(found: Results, folder: Path) -> bool:
    return sorted(found.rows(), key=lambda r: r["path"]) == naive(folder)


class TestRow:
    def test_what_a_row_holds(self) -> None:
        row = row_of(made(FISH, notes={}))
        expected = {
            "dataset": "digits",
            "algorithm": "fish",
            "name": "Fish",
            "seed": 0,
            "steps": 200,
            "step": 50,
            "lr": 0.01,
            "batch_size": 32,
            "status": "finished",
            "rule": "best on validation",
            "seconds": 1.5,
            "device": "cpu",
            "metric": "accuracy",
            "test": 0.5,
            "test_last": 0.25,
            "validation": 0.8,
            "train": 0.9,
            "test.15°": 0.5,
            "train.b": 0.9,
            "settings.meta_lr": 0.5,
            "identity": FISH.identity,
            "left_out": "15°",
        }
        assert {name: row.get(name) for name in expected} == expected
        assert row_of(made(ERM))["data.test"] == "15°"
        assert not {"label", "clip", "error", "optimizer.lr"} & set(row)

    def test_every_plain_name_is_a_known_column(self) -> None:
        assert {name for name in row_of(made(FISH)) if "." not in name} <= set(COLUMNS)

    def test_a_run_that_diverged_has_no_scores(self) -> None:
        row = row_of(made(status="diverged", error="the loss is nan"))
        assert (row["status"], row["error"], row["metric"]) == ("diverged", "the loss is nan", "accuracy")
        assert not {"test", "test_last", "test.15°", "validation"} & set(row)
        assert "step" not in row_of(made(status="diverged", history=(), selected=-1))

    def test_a_score_that_is_not_finite_is_missing(self) -> None:
        row = row_of(made(test=math.nan))
        assert "test" not in row
        assert row["validation"] == 0.8


class TestIndex:
    def test_records_are_read_once(self, tmp_path: Path, reads: list[str]) -> None:
        save(tmp_path, *seeds(ERM, 5))
        first = load(tmp_path)
        assert len(reads) == 5
        assert (tmp_path / INDEX).exists()
        second = load(tmp_path)
        assert len(reads) == 5
        assert first == second
        assert same(second, tmp_path)

    def test_a_new_a_changed_and_a_removed_record(self, tmp_path: Path, reads: list[str]) -> None:
        some = seeds(ERM, 4)
        save(tmp_path, *some)
        load(tmp_path)
        reads.clear()
        save(tmp_path, made(FISH), replace(some[0], seconds=9.5))
        Store(tmp_path).path(some[1].config).unlink()
        found = load(tmp_path)
        assert sorted(reads) == sorted(f"{c.identity}.json" for c in (FISH, some[0].config))
        assert same(found, tmp_path)
        assert sorted(found.column("seconds")) == [1.5, 1.5, 1.5, 9.5]
        reads.clear()
        assert load(tmp_path) == found
        assert not reads

    def test_only_removed(self, tmp_path: Path) -> None:
        save(tmp_path, *seeds(ERM, 3))
        load(tmp_path)
        Store(tmp_path).path(ERM).unlink()
        assert len(load(tmp_path)) == 2
        assert len(Index(tmp_path).known() or ()) == 2

    @pytest.mark.skipif(os.name == "nt", reason="a listing there shows no inodes")
    def test_a_change_that_keeps_size_and_time(self, tmp_path: Path) -> None:
        save(tmp_path, made(test=0.25))
        path = Store(tmp_path).path(ERM)
        before = path.stat()
        assert load(tmp_path).column("test") == [0.25]
        save(tmp_path, made(test=0.75))
        os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
        assert load(tmp_path).column("test") == [0.75]

    @pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
    def test_half_an_index(self, share: float, tmp_path: Path, reads: list[str]) -> None:
        save(tmp_path, *seeds(ERM, 3))
        whole = load(tmp_path)
        content = (tmp_path / INDEX).read_bytes()
        (tmp_path / INDEX).write_bytes(content[: int(share * len(content))])
        reads.clear()
        assert load(tmp_path) == whole
        assert len(reads) == 3 or share == 0.999  # which cuts off nothing but empty space
        reads.clear()
        assert load(tmp_path) == whole
        assert not reads

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda path: path.write_bytes(path.read_bytes().replace(b"0.5", b"0.9")),
            lambda path: path.write_bytes(b"\xff\x00" * 1000),
            lambda path: path.write_text('{"format": 1}'),
            lambda path: statement(path, "DROP TABLE records"),
            lambda path: statement(path, "PRAGMA user_version = 1"),
            lambda path: statement(path, f"UPDATE records SET {checked('[' * 100_000)}"),
            lambda path: statement(path, f"UPDATE records SET {checked('[1, 2]')}"),
            lambda path: statement(path, f"UPDATE records SET {checked('1, 2')}"),
            lambda path: statement(path, "UPDATE records SET checksum = NULL, row = x'ff'"),
            lambda path: statement(path, "ALTER TABLE records DROP COLUMN row"),
        ],
    )
    def test_a_spoilt_index_is_made_anew(
        self, spoil: Callable[[Path], object], tmp_path: Path, reads: list[str]
    ) -> None:
        save(tmp_path, *seeds(ERM, 3))
        whole = load(tmp_path)
        content = (tmp_path / INDEX).read_bytes()
        spoil(tmp_path / INDEX)
        assert (tmp_path / INDEX).read_bytes() != content
        reads.clear()
        assert load(tmp_path) == whole
        assert len(reads) == 3
        assert load(tmp_path) == whole
        assert len(reads) == 3

    @pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
    def test_something_else_in_the_place_of_the_index(
        self, make: Callable[[Path], object], tmp_path: Path
    ) -> None:
        save(tmp_path, *seeds(ERM, 3))
        make(tmp_path / INDEX)
        for _ in range(2):
            assert same(load(tmp_path), tmp_path)

    @pytest.mark.parametrize("statement", ["DELETE", "INSERT"])
    def test_stopped_while_it_is_written(
        self, statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        some = seeds(ERM, 3)
        save(tmp_path, *some)
        load(tmp_path)
        before = Index(tmp_path).known()
        save(tmp_path, made(FISH))
        Store(tmp_path).path(some[0].config).unlink()
        connect = Index._connected

        class Stopping(sqlite3.Connection):
            def executemany(self, text: str, rows: Any) -> sqlite3.Cursor:
                cursor = super().executemany(text, rows)
                if text.startswith(statement):
                    raise KeyboardInterrupt
                return cursor

        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Stopping))
            with pytest.raises(KeyboardInterrupt):
                load(tmp_path)
        assert Index._connected is connect
        assert Index(tmp_path).known() == before
        assert same(load(tmp_path), tmp_path)

    @pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
    def test_killed_at_any_instant(self, tmp_path: Path) -> None:
        save(tmp_path, *seeds(ERM, 30))
        code = (
            "import os, sys\nfrom shoal.experiments import store\nstore.INDEX_FROM = 1\n"
            "print('begun', flush=True)\n"
            "while True:\n"
            "    store.Index(sys.argv[1]).read()\n"
            "    os.unlink(os.path.join(sys.argv[1], store.INDEX))\n"
        )
        for wait in (0.0, 0.011, 0.023):
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            time.sleep(wait)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            assert same(load(tmp_path), tmp_path)
            assert same(load(tmp_path), tmp_path)

    def test_where_it_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path, *seeds(ERM, 3))

        def refuse(self: Index) -> sqlite3.Connection:
            raise sqlite3.OperationalError("unable to open database file")

        monkeypatch.setattr(Index, "_connected", refuse)
        assert same(load(tmp_path), tmp_path)
        assert not (tmp_path / INDEX).exists()

    def test_while_another_process_writes_it(self, tmp_path: Path) -> None:
        save(tmp_path, *seeds(ERM, 3))
        load(tmp_path)
        save(tmp_path, made(FISH))
        with contextlib.closing(sqlite3.connect(tmp_path / INDEX)) as other:
            other.execute("BEGIN EXCLUSIVE")
            assert same(load(tmp_path), tmp_path)
        assert same(load(tmp_path), tmp_path)

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_without_the_right_to_write(self, tmp_path: Path) -> None:
        save(tmp_path, *seeds(ERM, 3))
        tmp_path.chmod(0o555)
        try:
            assert same(load(tmp_path), tmp_path)
            assert not (tmp_path / INDEX).exists()
        finally:
            tmp_path.chmod(0o755)

    def test_few_records_need_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stores, "INDEX_FROM", 4)
        save(tmp_path, *seeds(ERM, 3))
        assert len(load(tmp_path)) == 3
        assert not (tmp_path / INDEX).exists()
        save(tmp_path, made(FISH))
        load(tmp_path)
        assert (tmp_path / INDEX).exists()

    def test_a_copied_folder_with_its_index(self, tmp_path: Path) -> None:
        save(tmp_path / "one", *seeds(ERM, 3))
        load(tmp_path / "one")
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        save(tmp_path / "two", made(ERM, test=0.125))
        assert same(load(tmp_path / "two"), tmp_path / "two")

    def test_writers_and_readers_at_once(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=busy, args=(str(tmp_path), n)) for n in range(2)]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            found = load(tmp_path)
            assert not found.broken
            assert found.duplicates == 0
        assert [worker.exitcode for worker in workers] == [0, 0]
        assert len(load(tmp_path)) == 40
        assert same(load(tmp_path), tmp_path)


def statement(path: Path, text: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(text)


def checked(row: str) -> str:
    return f"checksum = {zlib.crc32(row.encode())}, row = '{row}'"


def busy(folder: str, number: int) -> None:
    """Saves records and reads the index between them."""
    stores.INDEX_FROM = 1
    for seed in range(20):
        Store(folder).save(made(replace(ERM, seed=100 * number + seed)))
        assert not Index(folder).read()[1]


class TestFinding:
    def test_stores_and_run_folders_at_any_depth(self, tmp_path: Path) -> None:
        save(tmp_path / "compare" / "runs", made(ERM))
        for seed in (1, 2):
            path = Store(tmp_path / "seeds", weights=True).path(replace(ERM, seed=seed))
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(made(replace(ERM, seed=seed)).to_dict()))
        (tmp_path / "a" / "b").mkdir(parents=True)
        (tmp_path / "a" / "b" / "record.json").write_text(json.dumps(made(FISH).to_dict()))
        for other in ("seeds.json", "x.plan.json", "compare-x.json", "results.json"):
            (tmp_path / other).write_text("[]")
        found = load(tmp_path)
        assert sorted(found.column("path")) == [
            "a/b/record.json",
            f"compare/runs/{ERM.identity}.json",
            "seeds/seed-1/record.json",
            "seeds/seed-2/record.json",
        ]
        assert (found.broken, found.duplicates) == ({}, 0)

    def test_of_duplicates_the_newest(self, tmp_path: Path) -> None:
        for name, test, at in (("old", 0.1, 10), ("new", 0.3, 30), ("middle", 0.2, 20)):
            save(tmp_path / name, made(ERM, test=test))
            os.utime(Store(tmp_path / name).path(ERM), (at, at))
        save(tmp_path / "old", made(FISH))
        for _ in range(2):
            found = load(tmp_path)
            assert (len(found), found.duplicates) == (2, 2)
            assert found.where('algorithm == "erm"').column("test") == [0.3]

    def test_a_label_makes_no_other_run(self, tmp_path: Path) -> None:
        save(tmp_path / "one", made(ERM))
        save(tmp_path / "two", made(replace(ERM, label="plain")))
        assert load(tmp_path).duplicates == 1

    @pytest.mark.skipif(os.name == "nt", reason="links need rights there")
    def test_a_link_that_leads_back(self, tmp_path: Path) -> None:
        save(tmp_path / "runs", made())
        (tmp_path / "runs" / "loop").symlink_to(tmp_path)
        (tmp_path / "runs" / "0123456789abcdef.json").symlink_to("nowhere")
        found = load(tmp_path)
        assert (len(found), found.duplicates) == (1, 0)

    def test_nothing(self, tmp_path: Path) -> None:
        found = load(tmp_path)
        assert (len(found), found.rows(), found.group(["algorithm"])) == (0, [], [])
        assert len(found.where("test > 0.5")) == 0
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", ["none", "file"])
    def test_no_folder(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match=f"no folder '.*{name}'"):
            load(tmp_path / name)

    @pytest.mark.parametrize(
        "content",
        [
            "",
            "{",
            "[]",
            "3",
            "null",
            "[" * 100_000,
            "\x00",
            '{"config": {}}',
            json.dumps(made().to_dict() | {"history": [1]}),
            json.dumps(made().to_dict() | {"history": "x"}),
            json.dumps(made().to_dict() | {"selected": 7}),
            json.dumps(made().to_dict() | {"environment": None}),
            json.dumps(made().to_dict() | {"surprise": 1}),
            json.dumps(made().to_dict() | {"schema": 3}),
            json.dumps(made().to_dict() | {"schema": "x"}),
            json.dumps(made().to_dict() | {"config": {"algorithm": "erm", "options": {"steps": 0}}}),
            json.dumps(made().to_dict() | {"config": {"algorithm": "erm", "options": 3}}),
        ],
    )
    def test_one_that_is_broken_is_named(self, content: str, tmp_path: Path) -> None:
        save(tmp_path, made(FISH))
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "record.json").write_text(content)
        for _ in range(2):
            found = load(tmp_path)
            assert found.column("algorithm") == ["fish"]
            assert list(found.broken) == ["bad/record.json"]
            assert found.broken["bad/record.json"].startswith("'bad/record.json' is not a run record (")
        (tmp_path / "bad" / "record.json").write_text(json.dumps(made().to_dict()))
        assert (len(load(tmp_path)), load(tmp_path).broken) == (2, {})


class TestSchema:
    def test_records_of_0_2_are_read(self, tmp_path: Path) -> None:
        content = made(FISH).to_dict()
        assert content.pop("schema") == SCHEMA
        del content["traceback"]
        (tmp_path / "record.json").write_text(json.dumps(content))
        record = read_record(tmp_path / "record.json")
        assert record == made(FISH, schema=1)
        assert len(load(tmp_path)) == 1

    def test_those_of_a_newer_version_name_it(self, tmp_path: Path) -> None:
        Store(tmp_path).save(made(FISH, schema=SCHEMA + 1))
        with pytest.raises(InputError, match=f"of schema {SCHEMA + 1}, and this version .* up to {SCHEMA}"):
            Store(tmp_path).find(FISH)
        assert f"schema {SCHEMA + 1}" in str(load(tmp_path).broken)

    def test_a_failed_run_is_shown_and_counts_for_no_mean(self, tmp_path: Path) -> None:
        save(tmp_path, *seeds(ERM, 2))
        Store(tmp_path).fail(replace(ERM, seed=2), "RuntimeError: no memory", "Traceback …")
        found = load(tmp_path)
        assert found.where('status == "failed"').column("error") == ["RuntimeError: no memory"]
        (group,) = found.group(["algorithm"])
        assert (group["runs"], group["diverged"], group["failed"]) == (3, 0, 1)
        assert group["mean"] == pytest.approx(0.505)

    def test_runs_of_fit_are_seen(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        for seed in (0, 1):
            data = {name: (torch.randn(20, 3), torch.randint(2, (20,))) for name in ("oslo", "lima")}
            shoal.fit(
                "erm",
                torch.nn.Linear(3, 2),
                data,
                test=data,
                steps=4,
                progress=False,
                folder=tmp_path / f"run-{seed}",
                device="cpu",
            )
        found = load(tmp_path)
        assert not found.broken
        assert found.column("dataset") == ["python"] * 2
        assert [name.lower() for name in found.column("algorithm")] == ["erm"] * 2
        assert found.column("steps") == [4, 4]
        assert all(0 <= value <= 1 for value in found.column("test"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("runs")
    save(folder, *seeds(ERM, 4), *seeds(FISH, 3))
    save(folder, made(replace(FISH, seed=9), status="diverged"))
    save(folder, made(replace(FISH, algorithm="irm", settings={"ramp": True, "parts": ["a", "b"]}, label="")))
    return load(folder)


WORDS = [
    *("seed", "test", "algorithm", "settings.parts", "settings.ramp", "None", "True", "3", "-1", "0.5", "1j"),
    *(
        "'fish'",
        "b'x'",
        "[1,'a']",
        "[",
        "]",
        "(",
        ")",
        "{",
        "}",
        ",",
        ".",
        ":",
        "*",
        "**",
        "+",
        "~",
        "@",
        ":=",
    ),
    *("==", "!=", "<", ">=", "in", "not", "and", "or", "is", "if", "else", "lambda", "...", "await"),
]


class TestQuery:
    @pytest.mark.parametrize(
        ("query", "holds"),
        [
            ('algorithm == "fish" and seed < 2', lambda r: r["algorithm"] == "fish" and r["seed"] < 2),
            ("seed in [0, 3] or lr > 0.005", lambda r: r["seed"] in (0, 3) or r["lr"] > 0.005),
            ("seed not in (0, 1)", lambda r: r["seed"] not in (0, 1)),
            ("0.5 < test <= 0.52", lambda r: 0.5 < r.get("test", 0) <= 0.52),
            ("not test > 0.5", lambda r: not r.get("test", 0) > 0.5),
            ("test == None", lambda r: "test" not in r),
            ("test is not None", lambda r: "test" in r),
            ("settings.meta_lr == 0.5", lambda r: r.get("settings.meta_lr") == 0.5),
            ("settings.meta_lr != 0.5", lambda r: r.get("settings.meta_lr") != 0.5),
            ('settings["meta_lr"] >= -1', lambda r: "settings.meta_lr" in r),
            ('test["15°"] > 0.51', lambda r: r.get("test.15°", 0) > 0.51),
            ('"is" in algorithm', lambda r: "is" in r["algorithm"]),
            ('"a" in settings.parts', lambda r: "a" in r.get("settings.parts", ())),
            ("settings.ramp", lambda r: r.get("settings.ramp", False)),
            ("settings.ramp == True", lambda r: r.get("settings.ramp", False)),
            ("test < validation", lambda r: "test" in r),
            ("clip == 3", lambda r: False),
            ("clip == patience", lambda r: False),
            ("seed in [None, 2]", lambda r: r["seed"] == 2),
            (" \n seed == 1.0 ", lambda r: r["seed"] == 1),
        ],
    )
    def test_keeps_what_python_would(
        self, query: str, holds: Callable[[Row], bool], results: Results
    ) -> None:
        assert results.where(query).rows() == [row for row in results.rows() if holds(row)]

    @pytest.mark.parametrize(
        ("query", "message"),
        [
            ("algoritm == 'fish'", "unknown column 'algoritm'. Did you mean 'algorithm'"),
            ("settings.metalr == 1", "Did you mean 'settings.meta_lr'"),
            ("zzzzzz == 1", "Common columns: dataset, algorithm"),
            ('seed == "1"', 'seed holds numbers, but "1" is text'),
            ("algorithm < 3", "algorithm holds text, but 3 is numbers"),
            ('seed in [1, "2"]', "seed holds numbers, but '2' is text"),
            ("settings.ramp == 1", "holds true or false"),
            ("test == algorithm", "test holds numbers, but algorithm holds text"),
            ("1 in seed", "nothing can be in seed"),
            ("seed in 3", "nothing can be in 3"),
            ("seed < None", "cannot be compared like that"),
            ("seed is 3", "cannot be compared like that"),
            ("seed == [3]", "cannot be compared like that"),
            ("seed", "does not say what to compare seed with"),
            ("seed ==", "cannot be read"),
            ("", "cannot be read"),
            ("seed = 3", "cannot be read"),
            ("seed + 1 == 2", "neither a column nor a value"),
            ("seed == 1j", "neither a column nor a value"),
            ("seed == -True", "neither a column nor a value"),
            ("len(algorithm) == 3", "neither a column nor a value"),
            ("__import__('os').system('true') == 0", "neither a column nor a value"),
            ("(lambda: 1)() == 1", "neither a column nor a value"),
            ("[x for x in (1,)] == 1", "neither a column nor a value"),
            ("f'{seed}' == '1'", "neither a column nor a value"),
            ("(seed := 3) == 3", "neither a column nor a value"),
            ("algorithm.__class__ == 'x'", "unknown column 'algorithm.__class__'"),
            ("algorithm['__class__'] == 'x'", "unknown column 'algorithm.__class__'"),
            ("''.__class__ == 'x'", "neither a column nor a value"),
            ("not " * 60 + "seed == 1", "nested too deeply"),
            ("(" * 3000 + "seed", "cannot be read"),
            ("seed == 1 or " * 2000 + "seed == 1", "at most 10,000 characters"),
        ],
    )
    def test_what_is_refused(self, query: str, message: str, results: Results) -> None:
        with pytest.raises(InputError) as caught:
            results.where(query)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    @given(st.text())
    @example('"\\d" == algorithm')
    @example("seed == 1\x00")
    @example("seed == '\ud800'")
    @example("1" * 5000 + " == seed")
    @example("-" * 2000 + "1 == seed")
    @example("-" * 9000 + "1 == seed")
    @example("a" + ".a" * 4000 + " == 1")
    @settings(deadline=None, max_examples=300)
    def test_any_text_is_taken_or_refused(self, results: Results, text: str) -> None:
        self.taken_or_refused(results, text)

    @given(
        st.lists(
            st.sampled_from(WORDS),
            max_size=12,
        ).map(" ".join)
    )
    @settings(deadline=None, max_examples=600, suppress_health_check=[HealthCheck.too_slow])
    def test_any_words_are_taken_or_refused(self, results: Results, text: str) -> None:
        self.taken_or_refused(results, text)

    def taken_or_refused(self, results: Results, text: str) -> None:
        with contextlib.suppress(InputError):
            assert len(results.where(text)) <= len(results)


class TestTable:
    def test_rows_and_columns(self, results: Results) -> None:
        assert len(results) == 9
        assert results.rows(["seed", "clip"])[0] == {"seed": 0, "clip": None}
        assert "clip" in results.columns
        assert "clip" not in results.filled()
        assert "settings.meta_lr" in results.filled()
        with pytest.raises(InputError, match="Did you mean 'seed'"):
            results.rows(["sed"])
        results.rows()[0]["seed"] = 77
        assert 77 not in results.column("seed")

    def test_in_an_order_of_its_own(self, results: Results) -> None:
        names = [(row["name"], row["seed"]) for row in results.rows()]
        assert names == sorted(names)

    @pytest.mark.parametrize("reverse", [False, True])
    def test_sorted_with_the_missing_last(self, reverse: bool, results: Results) -> None:
        found = results.sorted("test", reverse).column("test")
        known = [v for v in found if v is not None]
        assert known == sorted(known, reverse=reverse)
        assert found[len(known) :] == [None]

    def test_sorting_what_is_of_several_kinds(self) -> None:
        found = Results([{"x": "b"}, {"x": 2}, {}, {"x": [1]}, {"x": 1.5}]).sorted("x")
        assert found.column("x") == [1.5, 2, [1], "b", None]

    def test_groups_are_what_a_naive_count_gives(self, results: Results) -> None:
        rows = results.rows()
        expected = []
        for algorithm in sorted({row["algorithm"] for row in rows}):
            mine = [row for row in rows if row["algorithm"] == algorithm]
            tests = [row["test"] for row in mine if row["status"] == "finished"]
            expected.append(
                {
                    "algorithm": algorithm,
                    "runs": len(mine),
                    "seeds": len({row["seed"] for row in mine}),
                    "diverged": sum(row["status"] == "diverged" for row in mine),
                    "failed": 0,
                    "mean": pytest.approx(sum(tests) / len(tests)),
                    "sd": pytest.approx(statistics.stdev(tests)) if len(tests) > 1 else None,
                }
            )
        assert results.group(["algorithm"]) == expected
        assert [row["diverged"] for row in expected] == [0, 1, 0]

    def test_runs_of_a_seed_are_averaged_first(self) -> None:
        values = [(0, 0.1), (0, 0.5), (1, 0.6), (1, 0.8), (1, 0.7)]
        rows = [{"name": "x", "status": "finished", "seed": s, "test": v} for s, v in values]
        (group,) = Results(rows).group(["name"])
        assert (group["runs"], group["seeds"]) == (5, 2)
        assert group["mean"] == pytest.approx((0.3 + 0.7) / 2)
        assert group["sd"] == pytest.approx(statistics.stdev([0.3, 0.7]))

    def test_other_metrics_are_other_groups(self, tmp_path: Path) -> None:
        save(tmp_path, made(ERM, 0.5), made(replace(ERM, seed=1), 30.0, metric="mse"))
        groups = load(tmp_path).group(["algorithm"])
        assert [(g["metric"], g["mean"]) for g in groups] == [("accuracy", 0.5), ("mse", 30.0)]

    def test_without_pandas(self, results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(InputError, match=r"pip install 'shoal\[tables\]'"):
            results.to_frame()

    def test_a_frame_has_every_filled_column(self, results: Results) -> None:
        pandas = pytest.importorskip("pandas")
        frame = results.to_frame()
        assert isinstance(frame, pandas.DataFrame)
        assert list(frame.columns) == results.filled()
        for name in frame.columns:
            found = [None if pandas.api.types.is_scalar(v) and pandas.isna(v) else v for v in frame[name]]
            assert found == results.column(name)
        assert {name: frame[name].dtype.kind for name in ("seed", "test", "lr")} == {
            "seed": "i",
            "test": "f",
            "lr": "f",
        }
        assert list(results.to_frame(["test", "lr"])) == ["test", "lr"]
        assert results.to_frame(["clip"])["clip"].isna().all()
        assert len(Results([]).to_frame()) == 0
        with pytest.raises(InputError, match="Did you mean 'seed'"):
            results.to_frame(["sed"])

    def test_a_frame_groups_as_we_do(self, results: Results) -> None:
        pytest.importorskip("pandas")
        found = results.to_frame().groupby("algorithm")["test"].agg(["mean", "std"])
        for row in results.group(["algorithm"]):
            theirs = found.loc[row["algorithm"]]
            assert row["mean"] == pytest.approx(theirs["mean"])
            assert (row["sd"] or math.nan) == pytest.approx(theirs["std"], nan_ok=True)

    @pytest.mark.parametrize(
        "label", ["鱼 <script>alert(1)</script>", "two\nlines\r\x1b[31m", '"a", b', "é\u202e"]
    )
    def test_any_label_goes_through_the_index(self, label: str, tmp_path: Path) -> None:
        save(tmp_path, made(replace(ERM, label=label)))
        for _ in range(2):
            assert load(tmp_path).column("name") == [label]
            assert len(load(tmp_path).where(f"name == {label!r}")) == 1
