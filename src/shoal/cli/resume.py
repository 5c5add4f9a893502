"""`shoal resume`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.train import Run
from shoal.cli.arguments import (
    add_data_dir,
    add_device,
    few,
    in_data_dir,
)
from shoal.cli.showing import run_seeds, show_result
from shoal.errors import InputError

if TYPE_CHECKING:
    from shoal.experiments.config import RunConfig

SUMMARY = "Go on with a run that was stopped, as if it never had been."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The run goes on from its newest whole checkpoint and ends with the same weights, bit for bit, as "
        "one that was never stopped (on CUDA if it was started with --deterministic). It reads the data, and "
        "the weights to start from, that config.yaml in the folder names; no code in them is run."
    )
    parser.add_argument("folder", type=Path, help="what `shoal train` was given as --out, or said it used")
    parser.add_argument(
        "--on-nan", choices=["skip"], help="for a run that stopped at a step that was not finite: skip it"
    )
    parser.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases too")
    parser.add_argument("--jobs", type=few, metavar="P", help="of several seeds: runs side by side")
    add_data_dir(parser)
    add_device(parser)


@in_data_dir
def run(given: Any) -> int:
    from shoal.experiments import baselines
    from shoal.experiments.config import read_config, read_how
    from shoal.experiments.record import RunFolders
    from shoal.experiments.run import run as run_one

    folder: Path = given.folder
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}.")
    store = RunFolders(folder)
    if (planned := store.planned()) is not None:
        configs, how = planned
        if given.on_nan:
            lost = [r.config for r in store.found(configs) if r.status != "finished"]
            for config in lost:
                _forgive(store.workplace(config), config)
            configs = [replace(c, on_nan="skip") if c in lost else c for c in configs]
        return run_seeds(configs, folder, how, given)
    config, how = read_config(folder), read_how(folder)
    if given.on_nan:
        config = _forgive(folder, config)
    if baselines.is_one(config):
        record = baselines.train(config, folder)
    else:
        record = run_one(config, given.device, not given.json, folder, how, given.wandb)
    return show_result(Run([record], folder), given)


def _forgive(folder: Path, config: RunConfig) -> RunConfig:
    """Takes back the verdict on a run that diverged, so that it goes on from its last good checkpoint."""
    from shoal.experiments.config import change_config
    from shoal.experiments.run import of_same_run
    from shoal.training.folder import RunFolder

    changed = replace(config, on_nan="skip")
    path = folder / "record.json"
    if (record := of_same_run(folder, config)) is not None and record.status == "finished":
        raise InputError(f"the run in {str(folder)!r} is finished; there is nothing to skip.")
    with RunFolder(folder):  # not while it runs
        change_config(folder, changed)
        path.unlink(missing_ok=True)
    return changed
