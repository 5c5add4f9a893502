"""Run folders for fuzz.py: real ones with one to three files damaged, and what to do with them."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import fuzz_world as world

DEEP: Any = 1
for _ in range(900):
    DEEP = [DEEP]
# fmt: off
LEAVES: tuple[Any, ...] = (
    None, -1, 0, 1, 2**63, 10**30, 1e308, float("nan"), float("inf"), "", "x", "\x1b[31mred\x07", "<script>",
    True, False, [], {}, [1, "a", None], {"a": 1}, [[1]], "a" * 100_000, "../../etc/passwd", "=1+1",
    "ü\u202e", 0.5, -0.5, "nan", DEEP, "1", "cuda", "none", "zero.csv", "pipe.csv", "\ud800", "\x00",
    {"__class__": "x"}, list(range(1000)), "é" * 300,
)
# fmt: on
PLACES = ("fresh", "new")


def mutate(folder: Path, others: list[Path], draw: random.Random) -> list[str]:
    """Damages ``folder`` in one to three places; says how."""
    return [_mutate(folder, others, draw) for _ in range(draw.choice((1, 1, 1, 2, 3)))]


def _files(folder: Path) -> list[Path]:
    found = sorted(
        p for p in folder.rglob("*") if p.is_file() and not p.is_symlink() and "tensorboard" not in p.parts
    )
    # What is read most is damaged most.
    return [p for p in found for _ in range(4 if p.suffix in (".json", ".yaml", ".jsonl") else 1)]


def _mutate(folder: Path, others: list[Path], draw: random.Random) -> str:
    files = _files(folder)
    if not files:
        return "nothing left"
    path = draw.choice(files)
    name = str(path.relative_to(folder))
    ways = [
        _flip,
        _cut,
        _empty,
        _delete,
        _garbage,
        _folder,
        _pipe,
        _loop,
        _device,
        _swap,
        _rename,
        _locked,
        _append,
    ]
    weights = [3, 3, 1, 2, 1, 1, 1, 1, 0.5, 2, 1, 0.5, 1]
    if path.suffix in (".json", ".yaml", ".jsonl"):
        ways, weights = [*ways, _leaf, _key], [*weights, 16, 8]
    how = draw.choices(ways, weights)[0]
    try:
        return f"{name}: {how(path, folder, others, draw)}"
    except OSError as error:
        return f"{name}: not possible ({error.strerror})"


def _flip(path: Path, folder: Path, others: list[Path], draw: random.Random) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return "empty"
    where = [draw.randrange(len(content)) for _ in range(draw.choice((1, 1, 8, 100)))]
    for n in where:
        content[n] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return f"bits flipped at {where[:4]}"


def _cut(path: Path, folder: Path, others: list[Path], draw: random.Random) -> str:
    content = path.read_bytes()
    keep = draw.randrange(len(content) + 1)
    path.write_bytes(content[:keep])
    return f"cut at {keep} of {len(content)}"


def _empty(path: Path, *given: Any) -> str:
    path.write_bytes(b"")
    return "emptied"


def _delete(path: Path, folder: Path, others: list[Path], draw: random.Random) -> str:
    path.unlink()
    return "deleted"


def _garbage(path: Path, folder: Path, others: list[Path], draw: random.Random) -> str:
    garbage = (
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b"{}",
        b"1",
        b'"a"',
        b"{" * 5000,
        b"[" * 5000,
        b"a: &a [*a]\n",
    )
    content = draw.choice((*garbage, draw.randbytes(500), b"a: *b", b"\n" * 50, b"- !!python/name:os.system"))
    path.write_bytes(content)
    return f"is now {content[:20]!r}"


def _folder(path: Path, *given: Any) -> str:
    path.unlink()
    path.mkdir()
    return "is a folder"


def _pipe(path: Path, *given: Any) -> str:
    path.unlink()
    os.mkfifo(path)
    return "is a pipe"


def _loop(path: Path, folder: Path, others: list[Path], draw: random.Random) -> str:
    path.unlink()
    to = draw.choice((path.name, "nowhere", "..", str(Path.cwd() / "device")))
    path.symlink_to(to)
    return f"is a link to {to}"


def _device(path: Path, *given: Any) -> str:
    path.unlink()
    world.copy(Path.cwd() / "zero.csv", path)
    return "is /dev/zero"


def _swap(path: Path, folder: Path, others: list[Path], draw: random.Random) -> str:
    """The same file of another run, or another file of this one."""
    name = path.relative_to(folder)
    choices = [other / name for other in others if (other / name).is_file()]
    choices += [p for p in _files(folder) if p != path][:5]
    if not choices:
        return "no other"
    source = draw.choice(choices)
    path.write_bytes(source.read_bytes())
    return f"has the content of {os.path.relpath(source, folder)}"


def _rename(path: Path, folder: Path, others: list[Path], draw: random.Random) -> str:
    to = path.with_name(draw.choice(("x", path.name + ".bak", "record.json", "config.yaml", "\x1b[31m.json")))
    if to.is_dir():
        return "not renamed"
    path.rename(to)
    return f"renamed to {to.name!r}"


def _locked(path: Path, *given: Any) -> str:
    path.chmod(0)
    return "no permissions"


def _append(path: Path, folder: Path, others: list[Path], draw: random.Random) -> str:
    with path.open("ab") as file:
        file.write(draw.choice((b"\0" * 50, b"\n{}\n", b"x", b"\n\n", b'{"step": 1}\n')))
    return "has more at its end"


def _parts(path: Path, draw: random.Random) -> tuple[Any, int | None]:
    """What the file holds, and of a file with a document per line which line."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        lines = text.splitlines()
        n = draw.randrange(len(lines))
        return json.loads(lines[n]), n
    return (json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)), None


def _save(path: Path, content: Any, line: int | None) -> None:
    if path.suffix == ".yaml":
        try:
            text = yaml.safe_dump(content, allow_unicode=True, sort_keys=False)
        except (yaml.YAMLError, RecursionError):
            text = json.dumps(content)
    else:
        text = json.dumps(content)
    if line is not None:
        lines = path.read_text().splitlines()
        lines[line] = text
        text = "\n".join(lines) + "\n"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def _places(nest: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in it, those of long lists only at their beginning."""
    entries = (
        nest.items() if isinstance(nest, dict) else enumerate(nest[:3]) if isinstance(nest, list) else ()
    )
    for key, value in entries:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _holder(nest: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        nest = nest[key]
    return nest


def _leaf(path: Path, folder: Path, others: list[Path], draw: random.Random) -> str:
    """Another value anywhere, mostly near the top."""
    try:
        content, line = _parts(path, draw)
        places = list(_places(content))
        if not places:
            return "no leaves"
        depth = min(len(p) for p in draw.choices(places, k=2))
        place = draw.choice([p for p in places if len(p) == depth])
        value = draw.choice(LEAVES)
        _holder(content, place)[place[-1]] = value
        _save(path, content, line)
    except (ValueError, yaml.YAMLError, RecursionError):
        return "unreadable already"
    return f"{'.'.join(map(str, place))} = {repr(value)[:40] if value is not DEEP else 'deep'}"


def _key(path: Path, folder: Path, others: list[Path], draw: random.Random) -> str:
    """A key removed, added or called otherwise."""
    try:
        content, line = _parts(path, draw)
        places = list(_places(content))
        if not places:
            return "no keys"
        place = draw.choice(places)
        holder = _holder(content, place)
        what = draw.choice(("removed", "renamed", "added"))
        if what == "added" and isinstance(holder, dict):
            holder[draw.choice(("nonsense", "", "\x1b[31m", "a" * 300, "__class__"))] = draw.choice(
                LEAVES[:20]
            )
        elif what == "renamed" and isinstance(holder, dict):
            holder[str(place[-1]) + "x"] = holder.pop(place[-1])
        else:
            del holder[place[-1]]
        _save(path, content, line)
    except (ValueError, yaml.YAMLError, RecursionError):
        return "unreadable already"
    return f"{'.'.join(map(str, place))} {what}"


def uses(kind: str, folder: str, draw: random.Random) -> list[list[str]]:
    """Three things to do with a run folder; ``load`` is Python's."""
    data = {"number": "numbers.csv", "image": "images", "fit": "array.npy", "stopped-fit": "array.npy"}.get(
        kind, "same.csv"
    )
    json_ = ["--json"] * (draw.random() < 0.3)
    model = folder if kind not in ("seeds",) else f"{folder}/seed-0"
    every = [
        (4, ["show", folder, *json_]),
        (3, ["resume", folder, "--device", "cpu", "--jobs", "1", *json_]),
        (3, ["predict", model, data, "--out", "out.csv", "--device", "cpu", *json_]),
        (2, ["score", model, data, "--device", "cpu", *json_]),
        (1, ["export", model, "--format", "safetensors", "--out", "exported", *json_]),
        (1, ["report", folder, "--out", "out.html", *json_]),
        (2, ["results", folder, *json_]),
        (1, ["results", folder, "--query", "test > 0.1", "--csv", "out2.csv"]),
        (3, ["load", model]),
    ]
    if kind == "compared":
        every.append((3, [*world.COMPARED, "--no-run", "--out", folder]))
    if kind == "swept":
        every.append((3, [*world.SWEPT, "--no-run", "--out", folder]))
    if kind in ("table", "stopped"):
        line = ["train", "fish", *world.OWN, *world.SHORT, "--eval-every", "2", "--out", folder]
        every.append((2, line))
    return [draw.choices([u for _, u in every], [w for w, _ in every])[0] for _ in range(3)]
