"""`shoal resume`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.train import Run
from shoal.cli.arguments import add_data_dir, add_execution, in_data_dir
from shoal.cli.showing import run_seeds, show_result
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The run resumes from its latest valid checkpoint, and the final weights are bit-identical to those "
        "of an uninterrupted run (on CUDA, only with --deterministic). The data and the initial weights are "
        "read from the paths in config.yaml; no code in them is executed."
    )
    parser.add_argument("folder", type=Path, help="run folder: --out of `shoal train`")
    parser.add_argument(
        "--on-nan", choices=["skip"], help="skip non-finite steps, for a run that stopped at one"
    )
    parser.add_argument("--wandb", metavar="PROJECT", help="Weights & Biases project to log to")
    add_data_dir(parser)
    add_execution(parser)


@in_data_dir
def run(args: Any) -> int:
    from shoal.experiments.config import read_started
    from shoal.experiments.run import run as run_one
    from shoal.experiments.store import Store

    folder: Path = args.folder
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}.")
    store = Store(folder, weights=True)
    if (planned := store.planned()) is not None:
        configs, how = planned
        if args.on_nan:
            lost = [r.config for r in store.found(configs) if r.status != "finished"]
            for config in lost:
                _forgive(store.workplace(config), config)
            configs = [replace(c, on_nan="skip") if c in lost else c for c in configs]
        return run_seeds(configs, folder, how, args)
    config, how = read_started(folder)
    if args.on_nan:
        config = _forgive(folder, config)
    record = run_one(config, args.device, not args.json, folder, how, args.wandb)
    return show_result(Run([record], folder), args)


def _forgive(folder: Path, config: RunConfig) -> RunConfig:
    """Takes back the verdict on a run that diverged, so that it resumes from its last good checkpoint."""
    from shoal.experiments.config import change_config
    from shoal.experiments.run import of_same_run
    from shoal.training.folder import RunFolder

    changed = replace(config, on_nan="skip")
    if (record := of_same_run(folder, config)) is not None and record.status == "finished":
        raise InputError(f"the run in {str(folder)!r} is finished; there is nothing to skip.")
    with RunFolder(folder):  # not while it runs
        change_config(folder, changed)
        (folder / "record.json").unlink(missing_ok=True)
    return changed
