"""Installs wheel and sdist in empty environments, with the core alone and with each extra, and uses them.

    python benchmarks/release.py --pythons python3.11 python3.12 --uv uv

Each environment gets the wheel (the sdist once per Python), nothing else but what it requires, and runs a few
commands in an empty folder. `--lowest` resolves every direct requirement to its lowest version instead.
Prints a table. Needs `uv` and `build`, and a network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from shoal.data import DomainBatchSampler
from shoal.optim import Fish
x, y, site = torch.randn(600, 8), torch.randint(2, (600,)), torch.randint(4, (600,))
model = torch.nn.Linear(8, 2)
sampler = DomainBatchSampler(site, batch_size=32, domains_per_step=4)
optimizer = Fish(torch.optim.AdamW(model.parameters(), 1e-3), inner_steps=4, meta_lr=0.5)
for xb, yb in DataLoader(TensorDataset(x, y), batch_sampler=sampler):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(xb), yb).backward()
    optimizer.step()
"""
SKLEARN = """
import numpy as np
from shoal.sklearn import DomainClassifier
x, y, g = np.random.randn(90, 4), np.random.randint(2, size=90), np.arange(90) % 3
assert DomainClassifier("fish", steps=5).fit(x, y, groups=g).predict(x).shape == (90,)
"""
HF = """
import datasets
from shoal.data import from_hf
rows = {"a": [1.0, 2.0, 3.0] * 20, "site": ["x", "y", "z"] * 20, "ill": [0, 1] * 30}
assert from_hf(datasets.Dataset.from_dict(rows), label="ill", domain="site", held_out="z").classes == 2
"""
LORA = """
from shoal.vision import load
load("peft", "peft")
"""
TEXT = """
from transformers import DistilBertConfig, DistilBertModel
DistilBertModel(DistilBertConfig(vocab_size=50, n_layers=1, n_heads=2, dim=16, hidden_dim=16))
from shoal.models import language
assert language.known("distilbert-base-uncased")
"""
TABLE = "patients.csv --label ill --domain hospital"
PHOTOS = "shoal train erm photos --steps 2 --data-options.size 32 --device cpu"
TRAIN = f"shoal train erm {TABLE} --steps 5 --device cpu --out run"
USES: dict[str, list[str]] = {
    "": [
        *("shoal --version", "shoal list", "shoal train fish linear --steps 5 --device cpu", TRAIN),
        *("shoal train erm rotated-digits --steps 3 --device cpu", "shoal reproduce theorem --out theorem"),
        *(f"shoal compare {TABLE} --algorithms erm --steps 3 --seeds 1 --jobs 1", "shoal report run"),
    ],
    "images": ["shoal data example images", PHOTOS],
    "timm": ["shoal data example images", f"{PHOTOS} --model lcnet_035"],
    "tables": [f"shoal data check {TABLE}"],
    "onnx": [TRAIN, "shoal export run --out m.onnx"],
    "ray": ["ray --version"],
    "tensorboard": [TRAIN],
    "all": [f"shoal compare {TABLE} --algorithms erm --steps 3 --seeds 1 --jobs 1"],
}
PROGRAMS = {"": LOOP + SKLEARN, "hf": HF, "lora": LORA, "text": TEXT}


def ran(command: list[str], where: Path, environment: Path | None = None) -> str:
    """The end of what it printed where it failed, else nothing."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if environment is not None:
        env["PATH"] = f"{environment / 'bin'}:{env['PATH']}"
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=1800)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-1500:] or f"exit {done.returncode}"


def tried(uv: str, python: str, package: Path, extra: str, lowest: bool, place: Path) -> str:
    environment, folder = place / "env", place / "folder"
    shutil.rmtree(place, ignore_errors=True)
    folder.mkdir(parents=True)
    name = f"shoal[{extra}] @ file://{package}" if extra else f"shoal @ file://{package}"
    how = ["--resolution", "lowest-direct"] if lowest else ["-c", str(ROOT / "constraints.txt")]
    for command in (
        [uv, "venv", "-q", "--python", python, str(environment)],
        [uv, "pip", "install", "-q", "--python", str(environment / "bin" / "python"), *how, name],
    ):
        if failed := ran(command, place):
            return f"FAILED {' '.join(command[1:3])}: {failed}"
    uses = [command.split() for command in USES.get(extra, [])]
    if "patients.csv" in str(uses):
        uses.insert(0, ["shoal", "data", "example", "table"])
    if extra in PROGRAMS:
        (folder / "program.py").write_text(PROGRAMS[extra])
        uses.append(["python", "program.py"])
    for command in uses:
        if failed := ran(command, folder, environment):
            return f"FAILED {' '.join(command)}: {failed}"
    return "works"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=[sys.executable])
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--extras", nargs="*")
    parser.add_argument("--lowest", action="store_true")
    args = parser.parse_args()
    extras = args.extras if args.extras is not None else ["", *(e for e in [*USES, *PROGRAMS] if e)]
    worst = 0
    with tempfile.TemporaryDirectory() as temporary:
        dist = Path(temporary, "dist")
        subprocess.run(
            [sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT)], check=True, capture_output=True
        )
        wheel, sdist = next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))
        print(f"{wheel.name} {wheel.stat().st_size:,} bytes, {sdist.name} {sdist.stat().st_size:,} bytes\n")
        print("| Python | package | extra | result | seconds |\n|---|---|---|---|---|")
        for python in args.pythons:
            for package, extra in [(sdist, ""), *((wheel, extra) for extra in extras)]:
                began = time.monotonic()
                result = tried(args.uv, python, package, extra, args.lowest, Path(temporary, "try"))
                version = subprocess.check_output([python, "-V"], text=True).split()[1]
                kind = "sdist" if package == sdist else "wheel"
                row = [version, kind, extra or "core", result, f"{time.monotonic() - began:.0f}"]
                print(f"| {' | '.join(row)} |", flush=True)
                worst |= result != "works"
    return worst


if __name__ == "__main__":
    sys.exit(main())
