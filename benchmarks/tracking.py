"""What tracking the gradients' agreement costs, and the records of `shoal track` on CdSprites, N = 15.

python benchmarks/tracking.py [--algorithms fish erm] [--size 64] [--device cuda] [--steps 200] [--repeats 5]
python benchmarks/tracking.py --records shoal-track [--seeds 3] [--steps 1000]

Cost: the same training with and without `track_every=50`, the paper's CdSprites network and batches of 64 of
S = 15 domains (ERM takes them all as one), turn and turn about; the ratio is of medians, with each repeat's
beside it. On the CPU it is of the processor's time, which other programs disturb less. Both end with the same
weights, which is checked. "Inside" is how much of the training's time went into measuring: on the CPU the
steadier number.

Records: one JSON file per seed, as `shoal track cdsprites --seeds 3 --out shoal-track` makes them, without
matplotlib. The figure is drawn from them anywhere by the same command with --no-run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.experiments.config import RunConfig
from shoal.experiments.execute import Store, execute, make_executor
from shoal.experiments.record import RunRecord
from shoal.experiments.run import prepare
from shoal.paper import tracking

EVERY = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["fish", "erm"])
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--domains-per-step", type=int, default=15)
    parser.add_argument("--per-domain", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--records", type=Path, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if given.records is not None:
        records(given)
        return
    for algorithm in given.algorithms:
        cost(algorithm, given)


def records(given: Any) -> None:
    configs = tracking.plan("cdsprites", given.seeds, steps=given.steps)
    store = Store(tracking.folder_of(given.records, configs, 1))

    def done(record: RunRecord) -> None:
        print(f"{store.path(record.config)}: {record.seconds:.0f} s", flush=True)

    how = {"runner": tracking.RUNNER, "track_every": 1}
    found = execute(configs, store, make_executor(device=given.device), how=how, done=done)
    if found.failed:
        sys.exit("\n".join(found.failed.values()))


class Watched:
    """A training's tracking, and how long it took."""

    def __init__(self, tracking: Any, clock: Any) -> None:
        self.tracking, self.clock, self.seconds = tracking, clock, 0.0

    def __call__(self, *given: Any) -> None:
        began = self.clock()
        self.tracking(*given)
        self.seconds += self.clock() - began

    def read(self) -> Any:
        began = self.clock()
        found = self.tracking.read()
        self.seconds += self.clock() - began
        return found

    def close(self) -> None:
        self.tracking.close()


def cost(algorithm: str, given: Any) -> None:
    steps = given.steps or 200
    config = RunConfig(
        dataset="cdsprites",
        data_options={"domains": given.domains_per_step, "size": given.size, "per_domain": given.per_domain},
        algorithm=algorithm,
        steps=steps,
        batch_size=given.batch_size,
        domains_per_step=given.domains_per_step,
        eval_every=steps,
        eval_splits=["test"],
        eval_limit=64,
    )
    how = {"plain": {}, "tracked": {"track_every": EVERY, "track_layers": given.layers}}
    times: dict[str, list[float]] = {name: [] for name in how}
    weights, inside = {}, []
    for repeat in range(given.repeats + 1):
        for name in sorted(how, reverse=repeat % 2 == 1):
            # The first of each warms up. Sums come in one order, so that weights can be compared.
            now = config if repeat else replace(config, steps=100, eval_every=100)
            training = prepare(now, given.device, how={**how[name], "deterministic": True})
            clock = time.perf_counter if training.device.type == "cuda" else time.process_time
            watched: Any = Watched(training.tracking, clock)
            training.tracking = watched if name == "tracked" else None
            began = clock()
            training.run()
            if training.device.type == "cuda":
                torch.cuda.synchronize()
            if repeat:
                times[name].append(clock() - began)
                if name == "tracked":
                    inside.append(watched.seconds / (times[name][-1] - watched.seconds))
            weights[name] = {k: v.clone() for k, v in training.model.state_dict().items()}
    same = all(torch.equal(v, weights["tracked"][k]) for k, v in weights["plain"].items())
    ratios = [b / a for a, b in zip(times["plain"], times["tracked"], strict=True)]
    plain, tracked = (statistics.median(times[n]) for n in ("plain", "tracked"))
    print(
        f"{algorithm}, S={given.domains_per_step}×{given.batch_size}, {given.size}², {training.device.type}: "
        f"{1000 * plain / steps:.2f} ms a step, tracked every {EVERY}: ×{tracked / plain:.3f} "
        f"({', '.join(f'{r:.3f}' for r in ratios)}), "
        f"inside {statistics.median(inside):.2%}; weights {'equal' if same else 'DIFFER'}",
        flush=True,
    )
    if not same:
        sys.exit("tracking changed the training")


if __name__ == "__main__":
    main()
