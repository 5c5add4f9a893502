"""Runs, tables and images from strangers: whatever their files say, none of it is run, fetched or opened.

A canary is put in every field of every file of a run. Python's audit events show what a command does with it:
a file opened elsewhere, a connection, a process, a class that pickle looks up.
"""

from __future__ import annotations

import contextlib
import copy as copying
import json
import os
import pickle
import random
import shutil
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
from shoal.bench.config import RunConfig
from shoal.bench.run import run
from shoal.cli import main

SAMPLE = 36
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
            if Path(os.fsdecode(args[0])).name != "git":  # of the record of a run
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
            "architecture": "resnet18",
            "model_args": {"checkpoint_path": bait},
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
    from shoal.data.fake_text import fake_amazon

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


KINDS: dict[str, Callable[[Path], Made]] = {"table": a_table, "image": an_image_folder, "text": a_text}


@pytest.fixture(scope="module", params=KINDS)
def stranger(request: pytest.FixtureRequest, root: Path) -> Made:
    return KINDS[request.param](root)


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


@pytest.mark.slow
def test_canaries_stay_alive_in_every_field(
    stranger: Made, canary: Canary, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = work(tmp_path)
    monkeypatch.chdir(folder)
    for one in damages(stranger.folder, canary):
        tried(one, stranger, list(commands(folder, stranger, folder)), folder, watch, canary)
