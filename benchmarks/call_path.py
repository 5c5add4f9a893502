"""Which of Shoal's functions one meta-batch passes through, from ``shoal.fit`` to the changed weights.

python benchmarks/call_path.py [--list]

Every Python function of the package that is called in a training of one step and its evaluation, in the
order of the first call: how much a reader has to know to follow a batch.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path

import torch

import shoal
import shoal.algorithms.fish
import shoal.training

PACKAGE = str(Path(shoal.__file__).parent)


def called() -> dict[tuple[str, str], None]:
    found: dict[tuple[str, str], None] = {}

    def watch(frame: types.FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and not frame.f_code.co_name.startswith("<"):
            found.setdefault((name[len(PACKAGE) + 1 :], frame.f_code.co_qualname), None)

    torch.manual_seed(0)
    domains = {name: (torch.randn(64, 4), torch.randint(2, (64,))) for name in ("a", "b", "c")}
    model = torch.nn.Linear(4, 2)
    shoal.fit("fish", model, domains, steps=1, batch_size=8, device="cpu")  # imports and caches
    sys.setprofile(watch)
    try:
        shoal.fit("fish", model, domains, steps=1, batch_size=8, device="cpu")
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name them")
    found = called()
    print(f"{len(found)} functions in {len({file for file, _ in found})} files")
    if parser.parse_args().list:
        print("\n".join(f"  {file}: {name}" for file, name in found))


if __name__ == "__main__":
    main()
