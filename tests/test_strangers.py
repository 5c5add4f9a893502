"""Runs, tables and images from strangers: whatever their files say, none of it is run, fetched or opened.

A canary is put in every field of every file of a run. Python's audit events show what a command does with it:
a file opened elsewhere, a connection, a process, a class that pickle looks up.
"""

from __future__ import annotations

import contextlib
import copy as copying
import csv
import gzip
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml

import shoal
from shoal.cli import main
from shoal.experiments.config import RunConfig
from shoal.experiments.run import run

SAMPLE = 18
"""Damaged folders of each kind of run in the fast test."""


# What is watched


class Watch:
    """What this process does while it is on, by Python's audit events; hooks cannot be taken off again."""

    PROCESS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
    NETWORK = (
        "socket.connect",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.bind",
        "urllib.Request",
    )

    def __init__(self) -> None:
        self.on = False
        self.bad: list[str] = []
        self.roots: tuple[str, ...] = ()
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            self.opened(args[0])
        elif event == "subprocess.Popen":
            if Path(os.fsdecode(args[0])).name not in (
                "git",
                "fc-list",
            ):  # for the record of a run, and for fonts
                self.bad.append(f"{event} {args!r}")
        elif event == "pickle.find_class" or event in self.PROCESS or event in self.NETWORK:
            self.bad.append(f"{event} {args!r}")
        elif event == "exec" and not self.own(getattr(args[0], "co_filename", "")):
            self.bad.append(f"{event} {args[0]!r}")

    def opened(self, path: Any) -> None:
        if not isinstance(path, str | bytes) or os.path.realpath(os.fsdecode(path)).startswith(self.roots):
            return
        self.bad.append(f"open {path!r}")

    def own(self, name: str) -> bool:
        return name.startswith("<") or os.path.realpath(name).startswith(CODE)


CODE = tuple(
    os.path.realpath(place)
    for place in {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, Path(shoal.__file__).parent}
    if place
)
SYSTEM = ("/proc", "/sys", "/dev/null", "/dev/urandom", "/etc", "/usr/share", "/usr/lib")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


# Canaries


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (f"import pathlib; pathlib.Path({str(self.target)!r}).touch()",)


class Canary:
    """Payloads that would make a file if anything ran them, and baits that nothing may open."""

    def __init__(self, folder: Path) -> None:
        self.dead, self.bait = folder / "dead", folder / "bait"
        self.bait.mkdir()
        self.bytes = pickle.dumps(Evil(self.dead))
        for name in ("pickle.pkl", "pytorch_model.bin", "weights.pth", "array.npy", "module.so"):
            (self.bait / name).write_bytes(self.bytes)
        torch.save({"state_dict": Evil(self.dead)}, self.bait / "torch.pt")
        (self.bait / "own.py").write_text(f"import pathlib; pathlib.Path({str(self.dead)!r}).touch()")
        (self.bait / "config.json").write_text(
            json.dumps({"model_type": "bert", "auto_map": {"AutoModel": "own.X"}})
        )

    def words(self) -> list[str]:
        touch, bait = f"touch {self.dead}", self.bait
        return [
            *(str(bait / name) for name in ("pickle.pkl", "torch.pt", "weights.pth", "array.npy")),
            *(str(bait), f"file://{bait}/pickle.pkl", "http://127.0.0.1:9/x", "https://huggingface.co/x/y"),
            *(f"local-dir:{bait}", "hf-hub:x/y", "stranger/model", f"{bait}/own.py", os.path.relpath(bait)),
            *(f"$({touch})", f"`{touch}`", f"; {touch}", f"| {touch}", f"=cmd|'/C {touch}'!A0"),
            *(f"__import__('os').system({touch!r})", f"!!python/object/apply:os.system [{touch!r}]"),
            "{{ ''.__class__.__mro__[1].__subclasses__() }}{% include '" + str(bait / "own.py") + "' %}",
            *("{0.__class__.__init__.__globals__}", "%(x)n%s%s%s", "<script>alert(1)</script>", "os:system"),
            *(
                "own.Model",
                "builtins.exec",
                "timm_wrapper",
                "vision-encoder-decoder",
                "\x1b]0;x\x07\x1b[2J",
                "\0",
            ),
        ]

    def values(self) -> list[Any]:
        bait = str(self.bait / "pytorch_model.bin")
        timm = {
            "model_type": "timm_wrapper",
            **{"architecture": "resnet18", "num_classes": 0, "num_labels": 2, "hidden_size": 8},
            **{"initializer_range": 0.02, "do_pooling": True, "model_args": {"checkpoint_path": bait}},
        }
        return [
            *self.words(),
            *(
                timm,
                {"auto_map": {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoTokenizer": ["own.T", None]}},
            ),
            *({"__reduce__": ["os.system", ["x"]]}, {"py/object": "os.system"}, {"_target_": "os.system"}),
            *(
                {"checkpoint_path": bait, "pretrained_cfg": {"file": bait, "url": "http://127.0.0.1:9"}},
                [bait],
            ),
        ]

    def keys(self) -> dict[str, Any]:
        bait = str(self.bait / "pytorch_model.bin")
        return {
            **dict.fromkeys(
                ("checkpoint_path", "pretrained_cfg_overlay", "_name_or_path", "name_or_path"), bait
            ),
            **dict.fromkeys(("vocab_file", "tokenizer_file", "merges_file", "transformers_weights"), bait),
            **dict.fromkeys(("gguf_file", "weights", "file", "folder", "cache_dir"), bait),
            **dict.fromkeys(
                ("attn_implementation", "_attn_implementation", "kernel_config"), "stranger/kernel"
            ),
            "auto_map": {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoTokenizer": ["own.T", "own.T"]},
            "custom_pipelines": {"x": {"impl": "own.P"}},
            "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "model_type": "timm_wrapper",
            "model_args": {"checkpoint_path": bait},
            "backbone_config": {"model_type": "timm_backbone", "backbone": "resnet18"},
            "text_config": {"model_type": "timm_wrapper"},
            "trust_remote_code": True,
            "init_inputs": [bait],
            "tokenizer_class": "own.T",
            "sp_model_kwargs": {"model_file": bait},
            "chat_template": self.words()[20],
        }

    def check(self) -> None:
        assert not self.dead.exists()


# Runs to damage


class Made(NamedTuple):
    folder: Path
    data: Path
    more: list[str]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("strangers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(place / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("MPLCONFIGDIR", str(place / "matplotlib"))
        yield place


def a_table(root: Path) -> Made:
    rng = np.random.default_rng(0)
    rows = [f"{rng.normal():.3f},{'ab'[n % 2]},{'xyz'[n % 3]},{'no' if n % 2 else 'yes'}" for n in range(40)]
    (root / "t.csv").write_text("\n".join(["age,ward,site,ill", *rows]))
    options = {"file": str(root / "t.csv"), "label": "ill", "domain": "site"}
    made(root / "table", RunConfig("table", "erm", 3, data_options=options, batch_size=4, eval_every=2))
    return Made(root / "table", root / "t.csv", ["--id", "site"])


def an_image_folder(root: Path) -> Made:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for domain in ("day", "night", "rain"):
        for kind in ("cat", "dog"):
            place = root / "images" / domain / kind
            place.mkdir(parents=True)
            for n in range(3):
                image.fromarray(rng.integers(0, 255, (9, 9, 3), dtype=np.uint8)).save(place / f"{n}.png")
    options = {"folder": str(root / "images"), "size": 8}
    made(root / "image run", RunConfig("image-folder", "erm", 3, data_options=options, batch_size=4))
    return Made(root / "image run", root / "images", [])


def a_text(root: Path) -> Made:
    pytest.importorskip("transformers")
    with contextlib.suppress(ImportError):
        import shim.sitecustomize  # noqa: F401
    from imitations.wilds_text import fake_amazon

    fake_amazon(root / "texts")
    options = {
        "folder": str(root / "texts"),
        "tokenizer": str(root / "texts" / "tiny-bert"),
        "max_tokens": 16,
    }
    made(
        root / "text run",
        RunConfig(
            *("amazon", "erm", 2), data_options=options, batch_size=4, domains_per_step=2, eval_limit=4
        ),
    )
    (root / "texts.csv").write_text("reviewText,overall\ngood book,5\njunk,1\n")
    return Made(root / "text run", root / "texts.csv", ["--column", "reviewText"])


def made(folder: Path, config: RunConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(config, "cpu", folder=folder)


@pytest.fixture(scope="module")
def table(root: Path) -> Made:
    return a_table(root)


@pytest.fixture(scope="module")
def image(root: Path) -> Made:
    return an_image_folder(root)


@pytest.fixture(scope="module")
def text(root: Path) -> Made:
    return a_text(root)


@pytest.fixture(scope="module", params=["table", "image", "text"])
def stranger(request: pytest.FixtureRequest) -> Made:
    made: Made = request.getfixturevalue(request.param)
    return made


# Damage


class Damage(NamedTuple):
    file: str
    what: str
    content: Callable[[], bytes]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every part of nested lists and mappings, these themselves included."""
    yield at
    if isinstance(value, dict):
        for key, part in list(value.items())[:40]:  # not every word of a vocabulary
            yield from places(part, (*at, key))
    elif isinstance(value, list):
        for n, part in enumerate(value[:3]):
            yield from places(part, (*at, n))


def put(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    tree = copying.deepcopy(tree)
    inside = tree
    for step in at[:-1]:
        inside = inside[step]
    inside[at[-1]] = value
    return tree


Each = Iterator[tuple[str, Callable[[], bytes]]]


def of_tree(content: Any, canary: Canary, dump: Callable[[Any], bytes]) -> Each:
    for at in places(content):
        for value in canary.values():
            yield f"{at} = {value!r}", partial(_dumped, dump, content, at, value)
        inside = content
        for step in at:
            inside = inside[step]
        if isinstance(inside, dict):
            for key, value in canary.keys().items():
                yield f"{at} has {key}", partial(_dumped, dump, content, at, {**inside, key: value})
            for word in canary.words():
                yield f"{at} has key {word!r}", partial(_dumped, dump, content, at, {**inside, word: word})


def _dumped(dump: Callable[[Any], bytes], content: Any, at: tuple[Any, ...], value: Any) -> bytes:
    return dump(put(content, at, value))


def of_yaml(content: Any, canary: Canary) -> Each:
    yield from of_tree(content, canary, lambda tree: yaml.safe_dump(tree).encode())
    for at in places(content):
        for tag in (
            f"!!python/object/apply:os.system ['touch {canary.dead}']",
            f"!!python/object/new:os.system ['touch {canary.dead}']",
            "!!python/name:os.system ''",
            "&a [*a]",
        ):
            yield f"{at} = {tag}", partial(_tagged, content, at, tag)


def _tagged(content: Any, at: tuple[Any, ...], tag: str) -> bytes:
    return yaml.safe_dump(put(content, at, "HERE")).replace("HERE", tag).encode()


def of_lines(lines: list[bytes], canary: Canary) -> Each:
    return of_tree(
        json.loads(lines[0]), canary, lambda tree: b"\n".join([json.dumps(tree).encode(), *lines[1:]])
    )


def damages(folder: Path, canary: Canary) -> list[Damage]:
    """A canary in every field, and in the place of every file; files that transformers would look for too."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, content = str(path.relative_to(folder)), path.read_bytes()
        if path.suffix == ".json":
            each = of_tree(json.loads(content), canary, lambda tree: json.dumps(tree).encode())
        elif path.suffix == ".yaml":
            each = of_yaml(yaml.safe_load(content), canary)
        elif path.suffix == ".jsonl":
            each = of_lines(content.splitlines(), canary)
        else:
            each = iter(())
        found += [Damage(name, what, new) for what, new in each]
        found += [
            Damage(name, "a pickle", lambda: canary.bytes),
            Damage(name, "of torch", lambda: saved(canary)),
        ]
        found += [Damage(name, "a word", word.encode) for word in canary.words()[:3]]
    for place in {path.parent.relative_to(folder) for path in folder.rglob("*") if path.is_file()}:
        for name in (
            "pytorch_model.bin",
            "adapter_config.json",
            "own.py",
            "vocab.txt",
            "chat_template.jinja",
        ):
            found.append(Damage(str(place / name), "new", lambda: canary.bytes))
        base = {"base_model_name_or_path": str(canary.bait), "peft_type": "LORA"}
        found.append(Damage(str(place / "adapter_config.json"), "an adapter", json.dumps(base).encode))
    return found


def saved(canary: Canary) -> bytes:
    return (canary.bait / "torch.pt").read_bytes()


# Commands


def commands(place: Path, given: Made, out: Path) -> dict[str, Callable[[], Any]]:
    def on(*words: str) -> Callable[[], Any]:
        return lambda: main(list(words))

    return {
        "load": lambda: shoal.load(place),
        "predict": on("predict", str(place), str(given.data), *given.more[:2], "--out", str(out / "p.csv")),
        "export": on("export", str(place), "--format", "safetensors", "--out", str(out / "e.safetensors")),
        "score": on("score", str(place), str(given.data)),
        "show": on("show", str(place)),
        "resume": on("resume", str(place), "--device", "cpu"),
        "report": on("report", str(place), "-o", str(out / "r.html")),
    }


def tried(damage: Damage, given: Made, names: list[str], folder: Path, watch: Watch, canary: Canary) -> None:
    place, out = folder / "run", folder / "out"
    for old in (place, out):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(given.folder, place)
    out.mkdir()
    (place / damage.file).write_bytes(damage.content())
    with contextlib.suppress(ValueError, TypeError, AttributeError, OSError):
        record = json.loads((place / "record.json").read_bytes())
        if record.pop("files", None):  # checksums, which a stranger would have made to fit
            (place / "record.json").write_text(json.dumps(record))
    if "resume" in names and damage.file == "config.yaml":
        (place / "record.json").unlink()  # so that there is something to do
    for name, command in commands(place, given, out).items():
        if name not in names:
            continue
        mine = (str(folder), str(given.data.parent), tempfile.gettempdir() + "/tmp", *CODE, *SYSTEM)
        # A run is resumed on the data that its configuration names, and only data can be read there.
        more = (str(canary.bait),) if name == "resume" else ()
        watch.roots, watch.bad = (*mine, *more), []
        try:
            watch.on = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code = command()
        except shoal.InputError:
            code = 2
        except SystemExit as stop:
            code = stop.code
        finally:
            watch.on = False
        case = f"{name} with {damage.file}: {damage.what}"
        assert not watch.bad, f"{case}: {watch.bad[:3]}"
        assert not canary.dead.exists(), case
        assert not isinstance(code, int) or code in (0, 1, 2), case


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path)


def work(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    place.mkdir()
    return place


def test_canaries_stay_alive(
    stranger: Made, canary: Canary, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = work(tmp_path)
    monkeypatch.chdir(folder)
    draw = random.Random(0)
    every = damages(stranger.folder, canary)
    by_file: dict[str, list[Damage]] = {}
    for one in every:
        by_file.setdefault(one.file, []).append(one)
    files = sorted(by_file)
    for n in range(SAMPLE):
        one = draw.choice(by_file[files[n % len(files)]])
        names = ["predict", draw.choice(["load", "export", "score", "show", "resume"])]
        tried(one, stranger, names, folder, watch, canary)


def test_what_is_watched_is_seen(canary: Canary, watch: Watch, tmp_path: Path) -> None:
    """Or the tests above could not fail."""
    watch.roots, watch.bad = (str(tmp_path / "work"), *CODE, *SYSTEM), []
    watch.on = True
    try:
        (canary.bait / "own.py").read_text()
        pickle.loads(canary.bytes)
        exec(compile("pass", str(canary.bait / "own.py"), "exec"))
        subprocess.run(["true"], check=True)
    finally:
        watch.on = False
    seen = " ".join(watch.bad)
    assert all(event in seen for event in ("open ", "pickle.find_class", "exec ", "subprocess.Popen"))
    assert canary.dead.exists()


def wrapper_of_timm(canary: Canary) -> dict[str, Any]:
    found = [v for v in canary.values() if isinstance(v, dict) and v.get("model_type") == "timm_wrapper"]
    return dict(found[0])


@pytest.mark.parametrize("name", ["load", "predict", "export", "score", "resume"])
def test_an_encoder_that_is_a_wrapper_of_timm(
    name: str, text: Made, canary: Canary, watch: Watch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """timm would unpickle what its ``checkpoint_path`` names."""
    content = json.dumps(wrapper_of_timm(canary)).encode()
    tried(Damage("encoder/config.json", "timm", lambda: content), text, [name], work(tmp_path), watch, canary)
    if name in ("predict", "export", "score"):
        assert "'timm_wrapper' is not a supported text encoder" in capsys.readouterr().err


def test_a_folder_of_a_model_that_is_a_wrapper_of_timm(
    text: Made, canary: Canary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(text.folder.parent / "texts" / "tiny-bert", tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(wrapper_of_timm(canary)))
    for more in ([], ["--model-set", "pretrained=false"]):
        words = ["train", "erm", "amazon", "--model", str(tmp_path / "m"), *more]
        words += [
            "--data",
            f"folder={text.folder.parent / 'texts'}",
            f"tokenizer={tmp_path / 'm'}",
            "max_tokens=16",
        ]
        assert main([*words, "--steps", "1", "--out", str(tmp_path / "out")]) == 2
        assert "is not a supported text encoder" in capsys.readouterr().err
    canary.check()


def test_a_model_of_the_hub_is_trusted_no_more(
    text: Made, canary: Canary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from shoal.data.hub import Source

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--some--body"
    place = repository / "snapshots" / ("0" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(text.folder.parent / "texts" / "tiny-bert", place)
    source = Source("some/body", "model", "--model DIR")
    assert len(source.tokenizer()) > 100
    assert source.config().dim == 32
    assert len(source.weights()) == 36
    (place / "config.json").write_text(json.dumps(wrapper_of_timm(canary)))
    with pytest.raises(
        shoal.InputError, match="the model of 'some/body' cannot be loaded: its architecture 'timm_wr"
    ):
        source.config()
    (place / "model.safetensors").rename(place / "pytorch_model.bin")
    with pytest.raises(shoal.InputError, match="not on this machine and there is no network"):
        source.weights()
    for index in ({"weight_map": {"x": "../../../../bait/pickle.pkl"}}, {"weight_map": ["x"]}, {}, []):
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
        monkeypatch.setattr(Source, "found", lambda self, file: p if (p := place / file).exists() else None)
        with pytest.raises(shoal.InputError, match="cannot be loaded"):
            source.weights()
    canary.check()


def test_weights_in_parts(text: Made, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from shoal.data.hub import Source

    shutil.copytree(text.folder.parent / "texts" / "tiny-bert", tmp_path / "m")
    whole = load_file(tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "model.safetensors").unlink()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    parts = [dict(list(whole.items())[:10]), dict(list(whole.items())[10:])]
    for name, part in zip(names, parts, strict=True):
        save_file(part, tmp_path / "m" / name)
    where = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    source = Source(str(tmp_path / "m"), "model", "")
    assert {k: v.tolist() for k, v in source.weights().items()} == {k: v.tolist() for k, v in whole.items()}
    (tmp_path / "m" / names[1]).unlink()
    with pytest.raises(shoal.InputError, match=f"there is no '{names[1]}'"):
        source.weights()


# Files that are none, and files that are too much


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


ENDINGS = (
    "csv",
    "tsv",
    "csv.gz",
    "parquet",
    "xlsx",
    "npy",
    "txt",
    "png",
    "json",
    "safetensors",
    "yaml",
    "zip",
)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder", "loop"])
def test_what_is_no_file_is_one_line(
    ending: str, kind: str, table: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"x.{ending}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    out = str(tmp_path / "out")
    of_table = ["--label", "a", "--domain", "b"]
    for words in (
        ["predict", str(table.folder), str(path)],
        ["score", str(table.folder), str(path)],
        ["compare", str(path), *of_table, "--out", out],
        ["train", "erm", "table", "--data", f"file={path}", "label=a", "domain=b", "--out", out],
        ["train", "erm", "rotated-digits", "--weights", str(path), "--steps", "1", "--out", out],
        ["report", str(path), "-o", str(tmp_path / "r.html")],
        ["data", "check", str(path), *of_table],
    ):
        with within(20):
            try:
                code = main(words)
            except SystemExit as stop:
                code = int(str(stop.code))
        err = capsys.readouterr().err
        assert code in (1, 2), words
        assert "Traceback" not in err, words
        assert 0 < len(err.strip().splitlines()) <= 3, (words, err)


@pytest.mark.parametrize(
    "name", ["inputs.json", "record.json", "model.safetensors", "config.yaml", "metrics.jsonl"]
)
def test_a_run_with_pipes_for_files(
    name: str, table: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(table.folder, tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    (tmp_path / "out").mkdir()
    for command in ("load", "predict", "export", "score"):
        with within(20), contextlib.suppress(shoal.InputError):
            commands(tmp_path / "run", table, tmp_path / "out")[command]()
        assert "Traceback" not in capsys.readouterr().err


def test_packed_files_cannot_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.data.reading import rows_of
    from shoal.data.sprites import read_archive

    monkeypatch.setattr("shoal.files.SMALL", 1000)
    monkeypatch.setattr("shoal.data.reading.SMALL", 100)
    table = tmp_path / "t.csv.gz"
    table.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 500_000))
    with pytest.raises(shoal.InputError, match="far larger than its header says"):
        for _ in rows_of(table).parts(["a"], 4096):  # type: ignore[union-attr]
            pass
    np.savez_compressed(tmp_path / "x.npz", imgs=np.zeros((1000, 64, 64), np.uint8))
    with pytest.raises(shoal.InputError, match="which is implausible for"):
        read_archive(tmp_path / "x.npz")
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for _ in range(300):
        book.active.append(["x" * 300] * 5)
    book.save(tmp_path / "x.xlsx")
    monkeypatch.setattr("shoal.files.BOMB", 5)
    with pytest.raises(shoal.InputError, match="which is implausible for"):
        rows_of(tmp_path / "x.xlsx")


def test_an_image_cannot_fill_the_memory(tmp_path: Path) -> None:
    from shoal.data.images import Unreadable, decode

    image = pytest.importorskip("PIL.Image")
    image.new("1", (20_000, 20_000)).save(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size < 100_000
    with pytest.raises(Unreadable, match="DecompressionBomb"):
        decode(str(tmp_path / "x.png"), 32)


def test_a_line_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.data.reading import rows_of

    monkeypatch.setattr("shoal.files.LONGEST", 10_000)
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3," + "x" * 20_000)
    with pytest.raises(shoal.InputError, match="has a line of 10,000 characters or more"):
        for _ in rows_of(tmp_path / "t.csv").parts(["a"], 4096):  # type: ignore[union-attr]
            pass


OPENS = re.compile(
    r"(?<![\w.])open\(|\.open\(|\.read_text\(|\.read_bytes\(|json\.loads?\(|yaml\.(safe_)?load|np\.load\(|torch\.load\("
    r"|ZipFile\(|gzip\.open|load_file\(|from_pretrained\(|ParquetFile\(|load_workbook\(|input_stream\(|pickle"
    r"|InferenceSession\("
)
ELSEWHERE = {
    "files.py": "the one place",
    **dict.fromkeys(
        (
            *("paper/published/__init__.py", "paper/presets/__init__.py", "cli/list.py"),
            *("models/weights.py", "training/recipes.py"),
        ),
        "of the package",
    ),
    **dict.fromkeys(
        ("experiments/baselines.py", "experiments/run.py", "report/groups.py"),
        "a key that was made just before",
    ),
    **dict.fromkeys(
        ("experiments/cluster.py", "experiments/store.py", "training/folder.py"),
        "claims and locks, written too",
    ),
    "registry.py": "metadata of installed packages, by importlib",
    "experiments/frozen.py": "its own cache: safetensors, after read_bytes",
    "terminal.py": "os.devnull",
    **dict.fromkeys(("training/tracking.py", "cli/app.py"), "written to"),
    **dict.fromkeys(("data/hub.py", "models/language.py"), "of checked files, and of copies"),
    "data/download.py": "what it writes itself",
    "data/unpack.py": "after check_regular; sizes are checked member by member",
    "data/images.py": "Pillow, after check_regular",
    "data/inputs.py": "NumPy, after check_regular",
    "data/reading.py": "pyarrow and openpyxl, after check_regular and check_zip",
    "data/sets/poverty.py": "NumPy, after check_zip",
    "data/sprites.py": "NumPy, after check_zip",
    "data/wilds.py": "NumPy, after check_regular",
    "data/text.py": "its own cache, and many reads of a file that was opened here before",
    "data/loader.py": "a word in a docstring",
    "export.py": "what it has just written",
    "sklearn.py": "a word in a comment",
    "training/checkpoint.py": "headers of files that were read whole",
    "training/predictions.py": "predictions that `shoal evaluate` is given",
    **dict.fromkeys(
        ("experiments/config.py", "experiments/record.py", "experiments/status.py", "training/journal.py"),
        "of runs",
    ),
}


def test_files_are_opened_in_one_place() -> None:
    """Through shoal.files, which refuses pipes and devices and bounds what is read; others have a reason."""
    root = Path(shoal.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        lines = [n for n, line in enumerate(path.read_text().splitlines(), 1) if OPENS.search(line)]
        if lines and name not in ELSEWHERE:
            found[name] = lines
    assert not found


RUNS_CODE = re.compile(
    r"^\s*(import|from) (pickle|marshal|shelve|joblib|dill)\b|allow_pickle=True|weights_only=False"
    r"|trust_remote_code=True|(?<![\w.])(?<!def )(eval|exec)\([^)]",
    re.M,
)


def test_nothing_unpickles() -> None:
    root = Path(shoal.__file__).parent
    assert not [str(path) for path in root.rglob("*.py") if RUNS_CODE.search(path.read_text())]


# What is written


NAMES = ("=1+2", "-1-2", "+49-170-1", "+cmd|'/C x'!A0", "-a", "@x", "\t=x", "\r=x", "＝x", "=HYPERLINK(1)")
PLAIN = ("-1.5", "+2.0 ± 0.1", "-3e-05", "-", "1=2", "a-b", "'=x", "", "−1")


def test_formulas_in_csv() -> None:
    from shoal.terminal import Csv, as_csv

    made = list(csv.reader(io.StringIO(as_csv([[*NAMES], [*PLAIN], [-1.5, 3, None, True]]), newline="")))
    assert made == [[f"'{name}" for name in NAMES], [*PLAIN], ["-1.5", "3", "", "True"]]
    raw = io.StringIO(newline="")
    Csv(raw, raw=True).write([NAMES])
    assert next(csv.reader(io.StringIO(raw.getvalue(), newline=""))) == [*NAMES]


def test_no_csv_is_written_elsewhere() -> None:
    root = Path(shoal.__file__).parent
    writers = {p.relative_to(root).as_posix() for p in root.rglob("*.py") if "csv.writer" in p.read_text()}
    assert writers == {"terminal.py"}


def test_predictions_of_rows_with_names_like_formulas(
    table: Made, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    ids = ["=1+2", "-7", "-x", "a\x1b[2Jb", "ü"]
    lines = [["age", "ward", "site"], *([str(n), "a", name] for n, name in enumerate(ids))]
    with (tmp_path / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    words = ["predict", str(table.folder), str(tmp_path / "new.csv"), "--id", "site"]
    for more, wanted in (([], ["'=1+2", "-7", "'-x", *ids[3:]]), (["--raw-csv"], ids)):
        assert main([*words, *more]) == 0
        found = capfdbinary.readouterr()
        rows = list(csv.reader(io.StringIO(found.out.decode(), newline="")))  # in a pipe, to the byte
        assert [row[0] for row in rows[1:]] == wanted
        assert main([*words, *more, "--out", str(tmp_path / "p.csv")]) == 0
        assert (tmp_path / "p.csv").read_bytes() == found.out
        warning = b"2 cells that a spreadsheet would evaluate as formulas were prefixed with an apostrophe"
        assert (warning in found.err) is (not more)
        capfdbinary.readouterr()
    assert main([*words, "--json"]) == 0
    assert [row["site"] for row in json.loads(capfdbinary.readouterr().out)["rows"]] == ids


@pytest.mark.slow
def test_canaries_stay_alive_in_every_field(
    stranger: Made, canary: Canary, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = work(tmp_path)
    monkeypatch.chdir(folder)
    for one in damages(stranger.folder, canary):
        tried(one, stranger, list(commands(folder, stranger, folder)), folder, watch, canary)
