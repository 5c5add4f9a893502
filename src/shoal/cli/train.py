"""`shoal train`."""

from __future__ import annotations

import argparse
from typing import Any

from shoal.api.train import train
from shoal.cli.arguments import (
    EXECUTION,
    OF_COLUMNS,
    add_options,
    argument_help,
    options_of,
    warnings_in_words,
)
from shoal.cli.showing import show_result

EXAMPLE = """\
Examples:
  shoal train fish cdsprites --data size=32 per_domain=2000 --set meta_lr=0.2 --steps 1000
  shoal train erm patients.csv --label ill --domain hospital --held-out none --out model
  torchrun --nproc-per-node 4 -m shoal train fish cdsprites

The same command, or `shoal resume DIR`, resumes an interrupted run. With torchrun, each batch is split \
over the GPUs."""
GROUPS = {
    "": (
        *("data_options", "bad_images", "data_dir", "held_out", "settings", "steps", "batch_size"),
        *("domains_per_step", "model", "model_options", "weights", "freeze_backbone", "draw", "warm_start"),
        *("warm_select", "seed", "seeds"),
    ),
    "table": ("label", "domain", "group", "task", *OF_COLUMNS),
    "optimization": (
        *("optimizer", "lr", "schedule", "clip", "accumulate", "precision", "average", "average_start"),
        *(
            "average_ratio",
            "average_decay",
            "wise_ft",
            "miro",
            "l2_sp",
            "l2_sp_head",
            "memory_format",
            "retrain",
        ),
        *("select", "metric", "patience", "on_nan"),
        *("head_lr", "layer_decay"),
    ),
    "running": (
        *("out", "workers", *EXECUTION, "eval_every", "eval_limit", "eval_splits", "predictions"),
        *("log_every", "track_every", "track_layers", "checkpoint_every", "keep", "compile"),
        *("deterministic", "wandb"),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    explained = argument_help(train)
    parser.add_argument("algorithm", help=explained["algorithm"])
    parser.add_argument("dataset", metavar="DATA", help=explained["data"])
    for title, names in GROUPS.items():
        add_options(parser.add_argument_group(title) if title else parser, names, train)


def run(args: Any) -> int:
    options = options_of(args, train) | {"algorithm": args.algorithm, "data": args.dataset}
    with warnings_in_words():
        shown = not args.json or args.seeds is not None
        return show_result(train(**options, progress=shown), args)
