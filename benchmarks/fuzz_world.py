"""What fuzz.py works on: small tables, images and run folders, good ones and nasty ones, in one folder."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import random
import shlex
import signal
import stat
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ESCAPE = "\x1b]0;owned\x07\x1b[31mred"
TABLES = ("patients.csv", "numbers.csv", "nasty.csv", "patients.tsv", "patients.csv.gz", "patients.parquet")
# fmt: off
BAD_TABLES = (
    *("latin.csv", "bom.csv", "utf16.csv", "empty.csv", "header.csv", "ragged.csv", "random.csv", "nul.csv"),
    "wide.csv", "row.csv", "domain.csv", "class.csv", "unlabelled.csv", "quote.csv", "cell.csv",
    "bad.csv.gz", *("bad.parquet", "bad.xlsx", "bomb.csv.gz", "patients.xlsx", "same.csv", "infinite.csv"),
)
# fmt: on
COLUMNS = ("age", "blood", "smoker", "ward", "day", "note", "hospital", "ill", "cost")
SPECIAL = ("pipe.csv", "zero.csv", "folder.csv", "dangling.csv", "loop.csv", "link.csv")
"""Named as tables and none: a pipe nobody writes to, an endless device, a folder, links."""
OUTPUTS = ("sink", "device", "full", "link.csv", "dangling.csv", "loop.csv")
"""What is written through, or refused; never replaced."""
IMAGES = ("images", "bad-images", "flat-images", "one.png")
ARRAYS = ("array.npy", "bad.npy", "object.npy", "lines.txt", "weights.safetensors", "weights.pt", "pickle.pt")
PREDICTIONS = ("linear_split:test_seed:0_epoch:best_pred.csv", "heart_split:test_seed:x_epoch:best_pred.csv")
RUNS = ("table", "number", "image", "baseline", "seeds", "stopped", "fit", "stopped-fit", "compared", "swept")


def build(world: Path) -> None:
    """Everything, in ``world``; takes seconds. Imports what commands import, for the one who forks."""
    world.mkdir(parents=True, exist_ok=True)
    os.chdir(world)
    _tables()
    _nasty_tables()
    _images()
    _others()
    _special()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        with contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _runs()


def rows(count: int = 48, seed: int = 0) -> list[list[Any]]:
    draw = random.Random(seed)
    found = []
    for n in range(count):
        age = draw.gauss(50, 12)
        ill = age + draw.gauss(0, 5) > 50
        day = f"2021-{n % 12 + 1:02d}-{n % 28 + 1:02d}"
        words = f"the patient of bed {n} feels {draw.choice(['well', 'ill', 'so so'])} on day {n * 7 % 31}"
        blood = f"{draw.gauss(120, 9):.1f}" if n % 9 else ""
        place = ("oslo", "lima", "kyoto")[n % 3]
        cells = [f"{age:.2f}", blood, ("yes", "no")[n % 2], "abc"[n // 3 % 3], day, words, place]
        found.append([*cells, ("no", "yes")[ill], f"{9 * age + 100:.2f}"])
    return found


def _write(name: str, header: list[str], content: list[list[Any]], separator: str = ",") -> None:
    with open(name, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator).writerows([header, *content])


def _tables() -> None:
    import pandas

    header, content = list(COLUMNS), rows()
    _write("patients.csv", header, content)
    _write("same.csv", header, rows(seed=1))
    _write("patients.tsv", header, content, "\t")
    Path("patients.csv.gz").write_bytes(gzip.compress(Path("patients.csv").read_bytes()))
    _write("numbers.csv", ["a", "b", "hospital", "cost"], [[r[0], r[1], r[6], r[8]] for r in content])
    table = pandas.read_csv("patients.csv")
    table.to_parquet("patients.parquet")
    table.to_excel("patients.xlsx", index=False)
    names = ["age", "=cmd|' /C calc'!A0", ESCAPE, "ü\u202e", "<script>", "hospital", "ill"]
    odd = [
        "=1+1",
        ESCAPE,
        "<script>alert(1)</script>",
        "-",
        "NaN",
        "1e400",
        "١٢",
        "0x10",
        "\u2028",
        "'",
        "a" * 300,
    ]
    nasty = [
        [
            r[0],
            odd[n % 11],
            odd[n * 3 % 11],
            odd[n * 5 % 11],
            n % 5,
            ("o\x1b[2Jslo", "=lima", "kyo\nto")[n % 3],
            r[7],
        ]
        for n, r in enumerate(content)
    ]
    _write("nasty.csv", names, nasty)


def _nasty_tables() -> None:
    text, header = Path("patients.csv").read_text(), ",".join(COLUMNS)
    lines = text.splitlines()
    draw = random.Random(1)
    files: dict[str, bytes] = {
        "latin.csv": text.replace("oslo", "Tromsø").encode("latin-1"),
        "bom.csv": b"\xef\xbb\xbf" + text.encode(),
        "utf16.csv": text.encode("utf-16"),
        "empty.csv": b"",
        "header.csv": header.encode() + b"\n",
        "ragged.csv": "\n".join(line + ",x" * (n % 4) for n, line in enumerate(lines)).encode(),
        "random.csv": draw.randbytes(3000),
        "nul.csv": text.encode().replace(b"a", b"\0"),
        "wide.csv": "\n".join(
            ",".join([line, *(f"c{m}" if n == 0 else str(n * m) for m in range(300))])
            for n, line in enumerate(lines)
        ).encode(),
        "row.csv": "\n".join(lines[:2]).encode(),
        "domain.csv": text.replace("lima", "oslo").replace("kyoto", "oslo").encode(),
        "class.csv": text.replace(",yes,", ",no,").encode(),
        "unlabelled.csv": text.replace(",no,", ",,").encode(),
        "quote.csv": (text + '"never closed,1,2\n' + "x,y\n" * 50).encode(),
        "cell.csv": (text + "1," + "z" * 300_000 + "\n").encode(),
        "infinite.csv": text.replace("yes,a", "1e999,a").replace("no,b", "-inf,b").encode(),
        "bad.csv.gz": gzip.compress(text.encode())[:-20],
        "bomb.csv.gz": gzip.compress((header + "\n" + "1," * 3_000_000).encode()),
        "bad.parquet": Path("patients.parquet").read_bytes()[:-50] + draw.randbytes(50),
        "bad.xlsx": Path("patients.xlsx").read_bytes()[:2000],
    }
    for name, content in files.items():
        Path(name).write_bytes(content)


def _images() -> None:
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for domain in ("art", "photo", "sketch"):
        for label in ("cat", "dog"):
            for n in range(4):
                for root in ("images", "bad-images", "flat-images"):
                    folder = Path(root, *([label] if root.startswith("flat") else [domain, label]))
                    folder.mkdir(parents=True, exist_ok=True)
                    pixels = draw.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{n}.png")
    Image.fromarray(pixels).save("one.png")
    bad = Path("bad-images")
    whole = (bad / "art/cat/0.png").read_bytes()
    (bad / "art/cat/0.png").write_bytes(whole[:40])
    (bad / "art/dog/0.png").write_text("no image")
    (bad / "photo/cat/0.png").write_bytes(b"")
    (bad / "photo" / ESCAPE).mkdir()
    (bad / "photo" / ESCAPE / "=1.png").write_bytes(whole)
    os.mkfifo(bad / "sketch/cat/pipe.png")
    (bad / "sketch/dog/link.png").symlink_to("link.png")
    (bad / "sketch/dog/folder.png").mkdir()


def _others() -> None:
    import pickle

    import numpy as np
    import torch
    from safetensors.torch import save_file

    np.save("array.npy", np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32))
    Path("bad.npy").write_bytes(Path("array.npy").read_bytes()[:100])
    np.save("object.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    Path("lines.txt").write_text("a good day\nno\n\n" + ESCAPE + "\n")
    save_file({"weight": torch.zeros(2, 3)}, "weights.safetensors")
    torch.save({"weight": torch.zeros(2, 3)}, "weights.pt")
    Path("pickle.pt").write_bytes(pickle.dumps({"weight": Exception("a pickle")}))
    for name in PREDICTIONS:
        Path(name).write_text("0\n1\n" * 50)


def _special() -> None:
    """Root may make device nodes of its own; others have links to those of the system."""
    os.mkfifo("pipe.csv")
    os.mkfifo("sink")
    for name, numbers, instead in (
        ("zero.csv", (1, 5), "zero"),
        ("device", (1, 3), "null"),
        ("full", (1, 7), "full"),
    ):
        try:
            os.mknod(name, 0o666 | stat.S_IFCHR, os.makedev(*numbers))
        except PermissionError:
            os.symlink(f"/dev/{instead}", name)
    Path("folder.csv").mkdir()
    os.symlink("nowhere.csv", "dangling.csv")
    os.symlink("loop.csv", "loop.csv")
    os.symlink("patients.csv", "link.csv")


def parser() -> Any:
    """The command line's own parsers, in one."""
    from shoal.cli.app import program

    return program()


OWN = ["patients.csv", "--label", "ill", "--domain", "hospital"]
SHORT = ["--steps", "4", "--batch-size", "4", "--device", "cpu"]
COMPARED = ["compare", *OWN, *shlex.split("--algorithms erm fish --seeds 1 --search 1 --jobs 1"), *SHORT]
SWEPT = [
    *shlex.split("sweep linear --algorithms erm --seeds 1 --search 1"),
    *shlex.split("--steps 2 --device cpu --jobs 1"),
]


def _runs() -> None:
    from shoal.cli import main

    Path("runs").mkdir()
    table = [*OWN, *SHORT, "--eval-every", "2"]
    lines = {
        "table": ["train", "fish", *table, "--drop", "note", "--track-every", "2"],
        "number": [*shlex.split("train erm numbers.csv --label cost --domain hospital"), *SHORT],
        "image": [*shlex.split("train coral images --data size=32 --average sma"), *SHORT],
        "baseline": ["train", "logistic-regression", *OWN],
        "seeds": ["train", "erm", *table, "--seeds", "2", "--jobs", "1"],
        "compared": COMPARED,
        "swept": SWEPT,
    }
    for name, line in lines.items():
        code = main([*line, "--out", f"runs/{name}"])
        if code:
            sys.__stderr__.write(f"fuzz: building {name} ended with {code}: {' '.join(line)}\n")
    _stopped("runs/stopped", ["train", "fish", *table, "--checkpoint-every", "1", "--out", "x"])
    _by_fit("runs/fit", None)
    _by_fit("runs/stopped-fit", 3)


def _at(step: int) -> Callable[[int, str], None]:
    def tell(now: int, note: str) -> None:
        if now >= step:
            os.kill(os.getpid(), signal.SIGTERM)

    return tell


def _stopped(folder: str, line: list[str]) -> None:
    from shoal.api.train import HOW, configuration, defaults, train
    from shoal.cli.arguments import options_of
    from shoal.experiments.run import run
    from shoal.training import loop

    loop.CHUNK = 1
    args = parser().parse_args(line)
    options = {**defaults(), **options_of(args, train), "algorithm": args.algorithm, "data": args.dataset}
    with contextlib.suppress(KeyboardInterrupt):
        run(configuration(options)[0], "cpu", _at(3), Path(folder), {name: options[name] for name in HOW})


def _by_fit(folder: str, stop: int | None) -> None:
    import torch

    import shoal
    from shoal.models import build as build_model
    from shoal.training import loop

    loop.CHUNK = 1
    draw = torch.Generator().manual_seed(0)
    parts = {
        name: (torch.randn(12, 5, generator=draw), torch.arange(12) % 2) for name in ("oslo", "lima", "kyoto")
    }
    model = build_model("mlp", input_shape=(5,), classes=2, seed=0)
    with contextlib.suppress(KeyboardInterrupt):
        shoal.fit(
            *("fish", model, {n: parts[n] for n in ("oslo", "lima")}),
            **{
                "test": {"kyoto": parts["kyoto"]},
                "folder": folder,
                "steps": 4,
                "batch_size": 4,
                "device": "cpu",
            },
            **{"checkpoint_every": 1, "progress": _at(stop) if stop else False},
        )


def copy(source: Path, to: Path) -> None:
    """As it is: pipes, devices and links too, none of which is opened."""
    about = source.lstat()
    if stat.S_ISLNK(about.st_mode):
        os.symlink(os.readlink(source), to)
    elif stat.S_ISDIR(about.st_mode):
        to.mkdir(parents=True, exist_ok=True)
        for entry in os.scandir(source):
            copy(source / entry.name, to / entry.name)
    elif stat.S_ISFIFO(about.st_mode):
        os.mkfifo(to)
    elif stat.S_ISCHR(about.st_mode):
        os.mknod(to, about.st_mode, about.st_rdev)
    else:
        to.write_bytes(source.read_bytes())


def state(path: Path) -> Any:
    """What must be the same after a command that only reads: kinds, links and contents."""
    try:
        about = path.lstat()
    except (OSError, ValueError):
        return None
    if stat.S_ISLNK(about.st_mode):
        return "link", os.readlink(path)
    if stat.S_ISDIR(about.st_mode):
        return {entry.name: state(path / entry.name) for entry in os.scandir(path)}
    if not stat.S_ISREG(about.st_mode):
        return stat.S_IFMT(about.st_mode), about.st_rdev
    try:
        return hash(path.read_bytes())
    except OSError:
        return None


def strict_json(text: str) -> Any:
    """JSON as other programs read it, which do not know NaN."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)
