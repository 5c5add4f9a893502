"""What people see while runs go on, and at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.bench.config import RunConfig
    from shoal.bench.record import RunRecord


class Status:
    """How a list of runs comes along, on stderr: a live line on a terminal, one line a run elsewhere."""

    def __init__(self, configs: Sequence[RunConfig], missing: int) -> None:
        self.total = len(configs)
        self.finished = self.total - missing
        self.at: dict[str, str] = {}
        self.terminal = sys.stderr.isatty()
        if missing:
            kept = f", {self.finished} kept from before" if self.finished else ""
            print(f"{missing} runs to do{kept}.", file=sys.stderr, flush=True)

    def tell(self, config: RunConfig, step: int, note: str) -> None:
        self.at[f"{config.name}, seed {config.seed}"] = f"{100 * step // config.steps}%"
        if self.terminal:
            running = " · ".join(f"{name} {share}" for name, share in self.at.items())
            sys.stderr.write(f"\r\x1b[K[{self.finished}/{self.total}] {running}"[:130])
            sys.stderr.flush()

    def done(self, record: RunRecord) -> None:
        self.finished += 1
        config = record.config
        self.at.pop(f"{config.name}, seed {config.seed}", None)
        number = config.data_options.get("domains", "")
        result = f"unseen {record.score('test', last=True):.1%}" if record.history else record.status
        line = f"[{self.finished}/{self.total}] {config.name}, N={number}, seed {config.seed}: {result}"
        start = "\r\x1b[K" if self.terminal else ""
        print(f"{start}{line} ({record.seconds:.0f} s)", file=sys.stderr, flush=True)


def run_all(configs: Sequence[RunConfig], folder: Path, given: Any) -> list[RunRecord]:
    from shoal.bench import pool
    from shoal.bench.record import Store

    store = Store(folder)
    status = Status(configs, len(store.missing(configs)))
    return pool.run_all(
        configs, store, device=given.device, processes=given.processes, tell=status.tell, done=status.done
    )


def samples(options: dict[str, Any], each: int = 9) -> dict[str, Any]:
    """A few images of every domain of CdSprites, as arrays for the plots."""
    import torch

    from shoal.data.sets import load

    data = load("cdsprites", **{**options, "per_domain": 2 * each})
    found = {}
    for split in ("train", "test"):
        domains = data.splits[split]
        for d, name in enumerate(domains.names):
            rows = torch.as_tensor(domains.indices_of(d)[:each]).long()
            images, _ = data.examples.batch(rows)  # type: ignore[attr-defined]
            found["unseen" if split == "test" else name] = images.permute(0, 2, 3, 1).numpy()
    return found


def show(content: dict[str, Any], text: str, given: Any, pictures: Sequence[Path] = ()) -> None:
    if given.json:
        print(json.dumps(content, default=dict))
        return
    print(text)
    if pictures:
        print("\nPictures: " + ", ".join(str(p) for p in pictures))


def draw(make: Callable[[], Any], path: Path) -> list[Path]:
    from shoal.report import plots

    try:
        return plots.save(make(), path)
    except InputError as error:
        print(f"shoal: no picture: {error}", file=sys.stderr)
        return []
