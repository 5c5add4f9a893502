"""Run folders from strangers: whatever their files say, none of it is executed, downloaded or opened.

Payloads are put in fields of the files of a run. Python's audit events show what is done with them: a file
opened elsewhere, a connection, a process, a class that pickle looks up.
"""

from __future__ import annotations

import contextlib
import copy
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import shoal
from shoal.errors import InputError
from trained_models import image_model, patients, table_model, text_model, write_csv, write_images

DAMAGES = 12
"""Damaged copies of each kind of run."""
CODE = tuple(
    os.path.realpath(place)
    for place in {*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, Path(shoal.__file__).parent}
)
SYSTEM = ("/proc", "/sys", "/dev/null", "/dev/urandom", "/etc", "/usr/share", "/usr/lib")
NEVER = (
    *("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"),
    *("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "urllib.Request"),
)


class Watch:
    """Forbidden things that this process does while it is on; audit hooks cannot be removed."""

    def __init__(self) -> None:
        self.roots: tuple[str, ...] | None = None
        self.forbidden: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.roots is None:
            return
        path = args[0] if event == "open" else None
        if event == "exec":
            path = getattr(args[0], "co_filename", None)
        allowed = self.roots if event == "open" else CODE
        elsewhere = (
            isinstance(path, str | bytes)
            and not os.fsdecode(path).startswith("<")
            and not os.path.realpath(os.fsdecode(path)).startswith(allowed)
        )
        if event in NEVER or elsewhere:
            self.forbidden.append(f"{event} {args!r}")

    @contextlib.contextmanager
    def on(self, *roots: Path) -> Iterator[list[str]]:
        """Within the block only files in ``roots``, of Python and of the system may be opened."""
        self.forbidden = []
        self.roots = (*map(str, roots), tempfile.gettempdir() + "/tmp", *CODE, *SYSTEM)
        try:
            yield self.forbidden
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
        self.ran, bait = folder / "ran", folder / "bait"
        bait.mkdir()
        self.bytes = pickle.dumps(Evil(self.ran))
        for name in ("pickle.pkl", "pytorch_model.bin", "array.npy"):
            (bait / name).write_bytes(self.bytes)
        torch.save({"state_dict": Evil(self.ran)}, bait / "torch.pt")
        (bait / "own.py").write_text(f"import pathlib; pathlib.Path({str(self.ran)!r}).touch()")
        self.torch, self.own, file = bait / "torch.pt", bait / "own.py", str(bait / "pytorch_model.bin")
        self.timm: dict[str, Any] = {"model_type": "timm_wrapper", "architecture": "resnet18"}
        self.timm |= {"num_classes": 0, "num_labels": 2, "hidden_size": 8, "initializer_range": 0.02}
        self.timm |= {"do_pooling": True, "model_args": {"checkpoint_path": file}}
        touch = f"touch {self.ran}"
        template = f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{% include '{bait}/own.py' %}}"
        self.values: list[Any] = [
            *(*map(str, bait.iterdir()), str(bait), f"file://{bait}/pickle.pkl", "http://127.0.0.1:9/x"),
            *(f"local-dir:{bait}", "hf-hub:x/y", "stranger/model", f"$({touch})", template, "os:system"),
            *(f"__import__('os').system({touch!r})", "timm_wrapper", "\x1b[2J", "\0", [file], self.timm),
            *({"auto_map": {"AutoModel": "own.M"}}, {"_target_": "os.system"}),
        ]
        names = ("checkpoint_path", "_name_or_path", "vocab_file", "tokenizer_file", "weights", "folder")
        own = {"AutoConfig": "own.C", "AutoModel": "own.M", "AutoTokenizer": ["own.T", "own.T"]}
        self.keys: dict[str, Any] = {**dict.fromkeys(names, file), "auto_map": own, **self.timm}
        self.keys |= {"attn_implementation": "stranger/kernel", "trust_remote_code": True}
        self.keys |= {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
        self.keys |= {"tokenizer_class": "own.T"}


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


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every part of nested lists and mappings, these themselves included."""
    yield at
    parts = list(value.items())[:40] if isinstance(value, dict) else ()  # not every word of a vocabulary
    for key, part in list(enumerate(value[:3])) if isinstance(value, list) else parts:
        yield from places(part, (*at, key))


def damaged(path: Path, payload: Payload, draw: random.Random) -> bytes:
    """The content of a file with a payload in one of its fields, or a payload in its place."""
    if path.suffix != ".json" or draw.random() < 0.1:
        return draw.choice([payload.bytes, payload.torch.read_bytes()])
    whole = {"root": copy.deepcopy(json.loads(path.read_bytes()))}
    *steps, last = ("root", *draw.choice(list(places(whole["root"]))))
    inside: Any = whole
    for step in steps:
        inside = inside[step]
    if isinstance(inside[last], dict) and draw.random() < 0.5:
        key, value = draw.choice(list(payload.keys.items()))
        inside[last][key] = value
    else:
        inside[last] = draw.choice(payload.values)
    return json.dumps(whole["root"]).encode()


def use(place: Path, run: Run, folder: Path, watch: Watch, payload: Payload) -> list[str]:
    """Load, predict, score and export a run; returns the messages of errors."""
    record = place / "record.json"
    with contextlib.suppress(ValueError, TypeError, AttributeError):  # damaged itself
        record.write_text(json.dumps({**json.loads(record.read_bytes()), "files": {}}))  # fitting checksums
    actions = (
        lambda: shoal.load(place),
        lambda: shoal.predict(place, run.data, out=folder / "p.csv"),
        lambda: shoal.score(place, run.data),
        lambda: shoal.export(place, folder / "e.safetensors"),
    )
    messages = []
    for action in actions:
        with watch.on(folder, run.data.parent) as forbidden, warnings.catch_warnings(action="ignore"):
            try:
                action()
            except InputError as error:
                messages.append(str(error))
        assert not forbidden
        assert not payload.ran.exists()
    return messages


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize("kind", ["table", "image", "text"])
def test_no_payload_runs(kind: str, runs: dict[str, Run], payload: Payload, watch: Watch, work: Path) -> None:
    draw, run = random.Random(0), runs[kind]
    files = sorted(p for p in run.folder.rglob("*") if p.is_file() and "checkpoints" not in p.parts)
    for number in range(DAMAGES):
        place = shutil.copytree(run.folder, work / f"run-{number}")
        file = files[number % len(files)].relative_to(run.folder)
        (place / file).write_bytes(damaged(place / file, payload, draw))
        (place / file.with_name("pytorch_model.bin")).write_bytes(payload.bytes)
        use(place, run, work, watch, payload)


def test_an_encoder_that_is_a_wrapper_of_timm(
    runs: dict[str, Run], payload: Payload, watch: Watch, work: Path
) -> None:
    """timm would unpickle what its ``checkpoint_path`` names."""
    place = shutil.copytree(runs["text"].folder, work / "run")
    (place / "encoder/config.json").write_text(json.dumps(payload.timm))
    messages = use(place, runs["text"], work, watch, payload)
    assert len(messages) == 4
    assert all("'timm_wrapper'" in message for message in messages)


def test_what_is_watched_is_seen(payload: Payload, watch: Watch, tmp_path: Path) -> None:
    """Or the tests above could not fail."""
    with watch.on(tmp_path / "work") as forbidden:
        payload.own.read_text()
        pickle.loads(payload.bytes)
        exec(compile("pass", str(payload.own), "exec"))
        subprocess.run(["true"], check=True)
    seen = " ".join(forbidden)
    assert all(event in seen for event in ("open ", "pickle.find_class", "exec ", "subprocess.Popen"))
    assert payload.ran.exists()


def test_nothing_unpickles() -> None:
    runs_code = re.compile(
        r"^\s*(import|from) (pickle|marshal|shelve|dill)\b|joblib\.load|allow_pickle=True|weights_only=False"
        r"|trust_remote_code=True|(?<![\w.])(?<!def )(eval|exec)\([^)]",
        re.M,
    )
    root = Path(shoal.__file__).parent
    assert not [str(path) for path in root.rglob("*.py") if runs_code.search(path.read_text())]
