"""Run folders from strangers: whatever their files say, none of it is executed, downloaded or opened.

A payload is put in every field of every file of a run. Python's audit events show what is done with it: a
file opened elsewhere, a connection, a process, a class that pickle looks up.
"""

from __future__ import annotations

import contextlib
import copy as copying
import gzip
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import shoal
from shoal.api.export import export
from shoal.api.predict import predict
from shoal.api.score import score
from shoal.errors import InputError
from trained_models import image_model, patients, table_model, text_model, write_csv, write_images

SAMPLE = 18
"""Damaged folders of each kind of run in the fast test."""
CODE = tuple(
    os.path.realpath(place)
    for place in {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, Path(shoal.__file__).parent}
    if place
)
SYSTEM = ("/proc", "/sys", "/dev/null", "/dev/urandom", "/etc", "/usr/share", "/usr/lib")


class Watch:
    """What this process does while it is on, by Python's audit events; hooks cannot be removed."""

    NEVER = (
        *("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"),
        *("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "urllib.Request"),
    )

    def __init__(self) -> None:
        self.roots: tuple[str, ...] | None = None
        self.bad: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.roots is None:
            return
        path = (
            args[0] if event == "open" else getattr(args[0], "co_filename", "<>") if event == "exec" else None
        )
        elsewhere = (
            isinstance(path, str | bytes)
            and not os.fsdecode(path).startswith("<")
            and not os.path.realpath(os.fsdecode(path)).startswith(self.roots if event == "open" else CODE)
        )
        if event in self.NEVER or elsewhere:
            self.bad.append(f"{event} {args!r}")

    @contextlib.contextmanager
    def on(self, *roots: Path) -> Iterator[list[str]]:
        """Within the block only files in ``roots``, of Python and of the system may be opened."""
        self.bad, self.roots = [], (*map(str, roots), tempfile.gettempdir() + "/tmp", *CODE, *SYSTEM)
        try:
            yield self.bad
        finally:
            self.roots = None


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (f"import pathlib; pathlib.Path({str(self.target)!r}).touch()",)


class Payload:
    """Values that would make the file ``ran`` if anything executed them, and baits that nothing may open."""

    def __init__(self, folder: Path) -> None:
        self.ran, self.bait = folder / "ran", folder / "bait"
        self.bait.mkdir()
        self.bytes = pickle.dumps(Evil(self.ran))
        for name in ("pickle.pkl", "pytorch_model.bin", "weights.pth", "array.npy", "module.so"):
            (self.bait / name).write_bytes(self.bytes)
        torch.save({"state_dict": Evil(self.ran)}, self.bait / "torch.pt")
        (self.bait / "own.py").write_text(f"import pathlib; pathlib.Path({str(self.ran)!r}).touch()")
        auto = {"model_type": "bert", "auto_map": {"AutoModel": "own.X"}}
        (self.bait / "config.json").write_text(json.dumps(auto))
        self.file = str(self.bait / "pytorch_model.bin")
        self.timm = {
            **{"model_type": "timm_wrapper", "architecture": "resnet18", "num_classes": 0, "num_labels": 2},
            **{"hidden_size": 8, "initializer_range": 0.02, "do_pooling": True},
            "model_args": {"checkpoint_path": self.file},
        }

    def words(self) -> list[str]:
        touch, bait = f"touch {self.ran}", self.bait
        return [
            *(str(bait / name) for name in ("pickle.pkl", "torch.pt", "weights.pth", "array.npy", "own.py")),
            *(str(bait), f"file://{bait}/pickle.pkl", "http://127.0.0.1:9/x", "https://huggingface.co/x/y"),
            *(f"local-dir:{bait}", "hf-hub:x/y", "stranger/model", os.path.relpath(bait)),
            *(f"$({touch})", f"`{touch}`", f"; {touch}", f"=cmd|'/C {touch}'!A0"),
            *(f"__import__('os').system({touch!r})", f"!!python/object/apply:os.system [{touch!r}]"),
            "{{ ''.__class__.__mro__[1].__subclasses__() }}{% include '" + str(bait / "own.py") + "' %}",
            *("{0.__class__.__init__.__globals__}", "%(x)n%s%s%s", "os:system", "own.Model", "builtins.exec"),
            *("timm_wrapper", "vision-encoder-decoder", "\x1b]0;x\x07\x1b[2J", "\0"),
        ]

    def values(self) -> list[Any]:
        auto = {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoTokenizer": ["own.T", None]}
        objects = [
            {"__reduce__": ["os.system", ["x"]]},
            {"py/object": "os.system"},
            {"_target_": "os.system"},
        ]
        timm = {
            "checkpoint_path": self.file,
            "pretrained_cfg": {"file": self.file, "url": "http://127.0.0.1:9"},
        }
        return [*self.words(), self.timm, {"auto_map": auto}, *objects, timm, [self.file]]

    def keys(self) -> dict[str, Any]:
        files = ("checkpoint_path", "pretrained_cfg_overlay", "_name_or_path", "name_or_path", "vocab_file")
        files += ("tokenizer_file", "merges_file", "transformers_weights", "gguf_file", "weights", "file")
        kernels = ("attn_implementation", "_attn_implementation", "kernel_config")
        return {
            **dict.fromkeys((*files, "folder", "cache_dir"), self.file),
            **dict.fromkeys(kernels, "stranger/kernel"),
            "auto_map": {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoTokenizer": ["own.T", "own.T"]},
            "custom_pipelines": {"x": {"impl": "own.P"}},
            "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
            **{"model_type": "timm_wrapper", "model_args": {"checkpoint_path": self.file}},
            "backbone_config": {"model_type": "timm_backbone", "backbone": "resnet18"},
            **{"trust_remote_code": True, "init_inputs": [self.file], "tokenizer_class": "own.T"},
            "sp_model_kwargs": {"model_file": self.file},
        }


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    return Payload(tmp_path)


class Run(NamedTuple):
    folder: Path
    data: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("strangers")
    table = write_csv(root / "t.csv", patients(1, 40))
    images = write_images(root / "images", 2)
    texts = write_csv(root / "texts.csv", {"reviewText": ["good book", "junk"], "overall": [5, 1]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(root / "cache"))
        return {
            "table": Run(table_model(root / "table", steps=3), table),
            "image": Run(image_model(root / "image", images), images),
            "text": Run(text_model(root / "text", root / "texts"), texts),
        }


class Damage(NamedTuple):
    file: str
    what: str
    content: Callable[[], bytes]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every part of nested lists and mappings, these themselves included."""
    yield at
    parts = list(value.items())[:40] if isinstance(value, dict) else ()  # not every word of a vocabulary
    parts = list(enumerate(value[:3])) if isinstance(value, list) else parts
    for key, part in parts:
        yield from places(part, (*at, key))


def put(tree: Any, at: tuple[Any, ...], value: Any) -> bytes:
    """The JSON of ``tree`` with ``value`` there."""
    inside = whole = {"root": copying.deepcopy(tree)}
    *path, last = "root", *at
    for step in path:
        inside = inside[step]
    inside[last] = value
    return json.dumps(whole["root"]).encode()


def damages(folder: Path, payload: Payload) -> Iterator[Damage]:
    """A payload in every field and in the place of every file; files that transformers would look for too."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and "checkpoints" not in p.parts)
    for path in files:
        name, content = str(path.relative_to(folder)), path.read_bytes()
        tree = json.loads(content) if path.suffix == ".json" else None
        for at in places(tree) if tree else ():
            values, inside = {repr(value): value for value in payload.values()}, tree
            for step in at:
                inside = inside[step]
            if isinstance(inside, dict):
                values |= {f"with {key}": {**inside, key: v} for key, v in payload.keys().items()}
                values |= {f"with key {word!r}": {**inside, word: word} for word in payload.words()}
            for what, value in values.items():
                yield Damage(name, f"{at} {what}", partial(put, tree, at, value))
        for what, new in (("pickle", payload.bytes), ("torch", (payload.bait / "torch.pt").read_bytes())):
            yield Damage(name, what, partial(bytes, new))
    for place in {path.parent.relative_to(folder) for path in files}:
        for name in ("pytorch_model.bin", "own.py", "vocab.txt", "chat_template.jinja"):
            yield Damage(str(place / name), "new", partial(bytes, payload.bytes))
        base = {"base_model_name_or_path": str(payload.bait), "peft_type": "LORA"}
        yield Damage(str(place / "adapter_config.json"), "an adapter", partial(json.dumps(base).encode))


def uses(place: Path, run: Run, out: Path) -> dict[str, Callable[[], Any]]:
    return {
        "load": partial(shoal.load, place),
        "predict": partial(predict, place, run.data, out=out / "p.csv"),
        "export": partial(export, place, out / "e.safetensors"),
        "score": partial(score, place, run.data),
    }


def check(
    damage: Damage, run: Run, names: list[str], folder: Path, watch: Watch, payload: Payload
) -> list[str]:
    """Use a damaged copy of a run; returns the messages of the errors."""
    place, out, messages = folder / "run", folder / "out", []
    for old in (place, out):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(run.folder, place)
    out.mkdir()
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        record = json.loads((place / "record.json").read_bytes())
        record["files"] = {}  # checksums, which a stranger would have made to fit
        (place / "record.json").write_text(json.dumps(record))
    (place / damage.file).write_bytes(damage.content())
    for name in names:
        case = f"{name} with {damage.file}: {damage.what}"
        with watch.on(folder, run.data.parent) as bad, warnings.catch_warnings(action="ignore"):
            try:
                uses(place, run, out)[name]()
            except InputError as error:
                messages.append(str(error))
            except Exception as error:
                pytest.fail(f"{case}: {error!r}")
        assert not bad, f"{case}: {bad[:3]}"
        assert not payload.ran.exists(), case
    return messages


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize("kind", ["table", "image", "text"])
def test_no_payload_runs(kind: str, runs: dict[str, Run], payload: Payload, watch: Watch, work: Path) -> None:
    draw, by_file = random.Random(0), dict[str, list[Damage]]()
    for one in damages(runs[kind].folder, payload):
        by_file.setdefault(one.file, []).append(one)
    files = sorted(by_file)
    for n in range(SAMPLE):
        names = ["predict", draw.choice(["load", "export", "score"])]
        check(draw.choice(by_file[files[n % len(files)]]), runs[kind], names, work, watch, payload)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["table", "image", "text"])
def test_no_payload_runs_in_any_field(
    kind: str, runs: dict[str, Run], payload: Payload, watch: Watch, work: Path
) -> None:
    for one in damages(runs[kind].folder, payload):
        check(one, runs[kind], ["load", "predict", "export", "score"], work, watch, payload)


def test_what_is_watched_is_seen(payload: Payload, watch: Watch, tmp_path: Path) -> None:
    """Or the tests above could not fail."""
    with watch.on(tmp_path / "work") as bad:
        (payload.bait / "own.py").read_text()
        pickle.loads(payload.bytes)
        exec(compile("pass", str(payload.bait / "own.py"), "exec"))
        subprocess.run(["true"], check=True)
    seen = " ".join(bad)
    assert all(event in seen for event in ("open ", "pickle.find_class", "exec ", "subprocess.Popen"))
    assert payload.ran.exists()


def test_an_encoder_that_is_a_wrapper_of_timm(
    runs: dict[str, Run], payload: Payload, watch: Watch, work: Path
) -> None:
    """timm would unpickle what its ``checkpoint_path`` names."""
    damage = Damage("encoder/config.json", "timm", json.dumps(payload.timm).encode)
    messages = check(damage, runs["text"], ["load", "predict", "export", "score"], work, watch, payload)
    assert len(messages) == 4
    assert all("'timm_wrapper' is not a supported text encoder" in message for message in messages)


def test_a_model_of_the_hub_is_trusted_no_more(
    runs: dict[str, Run], payload: Payload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from shoal.data.hub import Source

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--some--body"
    place = repository / "snapshots" / ("0" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(runs["text"].folder.parent / "texts" / "tiny-bert", place)
    source = Source("some/body", "model", "--model DIR")
    assert len(source.tokenizer()) > 100
    assert len(source.weights()) == 36
    (place / "config.json").write_text(json.dumps(payload.timm))
    with pytest.raises(InputError, match="its architecture 'timm_wr"):
        source.config()
    (place / "model.safetensors").rename(place / "pytorch_model.bin")
    with pytest.raises(InputError, match="not on this machine and there is no network"):
        source.weights()
    for index in ({"weight_map": {"x": "../../../../bait/pickle.pkl"}}, {"weight_map": ["x"]}, {}, []):
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
        monkeypatch.setattr(Source, "found", lambda self, file: p if (p := place / file).exists() else None)
        with pytest.raises(InputError, match="cannot be loaded"):
            source.weights()
    assert not payload.ran.exists()


def test_weights_in_parts(runs: dict[str, Run], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from shoal.data.hub import Source

    place = shutil.copytree(runs["text"].folder.parent / "texts" / "tiny-bert", tmp_path / "m")
    whole = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    where = {key: names[n % 2] for n, key in enumerate(whole)}
    for name in names:
        save_file({key: value for key, value in whole.items() if where[key] == name}, place / name)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    found = Source(str(place), "model", "").weights()
    assert {key: value.tolist() for key, value in found.items()} == {k: v.tolist() for k, v in whole.items()}


def test_arrays_are_not_unpickled(payload: Payload, tmp_path: Path) -> None:
    data = {"a": (torch.randn(9, 3), torch.arange(9) % 2)}
    run = shoal.fit("erm", torch.nn.Linear(3, 2), data, steps=2, progress=False, device="cpu")
    with pytest.raises(InputError, match="not an array that can be read"):
        run.trained().predict(payload.bait / "array.npy")
    assert not payload.ran.exists()


def test_packed_files_cannot_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.data.images import Unreadable, decode
    from shoal.data.reading import rows_of

    monkeypatch.setattr("shoal.files.SMALL", 1000)
    monkeypatch.setattr("shoal.data.reading.SMALL", 100)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 500_000))
    with pytest.raises(InputError, match="far larger than its header says"):
        list(rows_of(tmp_path / "t.csv.gz").parts(["a"], 4096))  # type: ignore[union-attr]
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 89_478_485)  # Pillow's own, which other packages change
    image.new("1", (20_000, 20_000)).save(tmp_path / "x.png")
    with pytest.raises(Unreadable, match="DecompressionBomb"):
        decode(str(tmp_path / "x.png"), 32)


def test_nothing_unpickles() -> None:
    runs_code = re.compile(
        r"^\s*(import|from) (pickle|marshal|shelve|dill)\b|joblib\.load|allow_pickle=True|weights_only=False"
        r"|trust_remote_code=True|(?<![\w.])(?<!def )(eval|exec)\([^)]",
        re.M,
    )
    root = Path(shoal.__file__).parent
    assert not [str(path) for path in root.rglob("*.py") if runs_code.search(path.read_text())]


def test_formulas_in_csv() -> None:
    from shoal.terminal import as_csv

    formulas = ["=1+2", "-1-2", "+cmd|'/C x'!A0", "-a", "@x", "＝x"]
    plain = ["-1.5", "+2.0 ± 0.1", "-3e-05", "-", "1=2", "a-b"]
    first, second = as_csv([formulas, plain]).splitlines()
    assert first == ",".join(f"'{text}" for text in formulas)
    assert second == ",".join(plain)
