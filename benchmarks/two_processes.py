"""Do two processes always come to their end, and always to the same one?

    python benchmarks/two_processes.py --launches 50

Launches a training of every registered algorithm in two processes (see tests/training/together.py) again and
again. Counts exit codes, launches that hang, and algorithms whose weights, scores or losses differ in any bit
from the first launch, or between the two processes. Ends with 1 if any of it went wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "training"))

import together

from shoal.algorithms import registry


def launch(seconds: float) -> tuple[str, list[dict[str, Any]], str]:
    """How it ended, what each process found, and what was said."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = together.end(together.start(folder, "every"), seconds)
        log = (folder / "every.log").read_text(errors="replace")
        if code != 0:
            return "hang" if code is None else f"exit code {code}", [], log
        return "exit code 0", [json.loads((folder / f"every-{n}.json").read_text()) for n in range(2)], log


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=50)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a launch hangs")
    given = parser.parse_args()
    ends: Counter[str] = Counter()
    other, apart = Counter[str](), Counter[str]()
    first: dict[str, Any] | None = None
    took = []
    for number in range(1, given.launches + 1):
        began = time.monotonic()
        end, found, log = launch(given.timeout)
        took.append(time.monotonic() - began)
        ends[end] += 1
        if end != "exit code 0":
            print(f"launch {number}: {end}\n{log}", file=sys.stderr, flush=True)
            continue
        first = first or found[0]
        for name in registry.names():
            other[name] += found[0][name] != first[name]
            apart[name] += found[0][name] != found[1][name]
        print(f"\rlaunch {number} of {given.launches}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    done = ends["exit code 0"]
    print(f"{given.launches} launches, {sum(took) / len(took):.1f} s each (longest {max(took):.1f} s)")
    for end, count in sorted(ends.items()):
        print(f"  {end}: {count}")
    print(f"\n{'algorithm':<14}{'runs':>6}{'unlike the first':>18}{'processes apart':>17}")
    for name in registry.names():
        print(f"{name:<14}{done:>6}{other[name]:>18}{apart[name]:>17}")
    return int(done < given.launches or any(other.values()) or any(apart.values()))


if __name__ == "__main__":
    sys.exit(main())
