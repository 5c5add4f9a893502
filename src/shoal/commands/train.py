"""`shoal train`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from shoal.commands.arguments import add_device, count, make_folder, values
from shoal.commands.showing import show
from shoal.errors import InputError

SUMMARY = "Train one algorithm on a built-in dataset."
EXAMPLE = (
    "Example: shoal train fish --dataset cdsprites --data size=32 per_domain=2000 "
    "--set meta_lr=0.2 inner_state=reset --steps 1000 --batch 64"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("algorithm", help="see `shoal list algorithms`")
    parser.add_argument("--dataset", required=True, help="see `shoal list datasets`")
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=VALUE", help="the dataset's options")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="the algorithm's settings")
    parser.add_argument("--steps", type=count, default=1000, help="meta-steps (default: %(default)s)")
    parser.add_argument("--batch", type=count, default=32, help="examples a batch (default: %(default)s)")
    parser.add_argument(
        "--domains", type=count, metavar="S", help="domains a step (default: all up to 16, else 5)"
    )
    parser.add_argument("--optimizer", default="adam", help="adam, adamw or sgd (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="its learning rate (default: %(default)s)")
    parser.add_argument("--model", help="(default: the dataset's own)")
    parser.add_argument(
        "--draw", help="domains, one-domain, pooled or regrouped (default: the algorithm's own)"
    )
    parser.add_argument(
        "--warm-start", metavar="W", help="ERM first: steps (500), share of the data (0.1), plateau"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="save record.json and model.safetensors there"
    )
    add_device(parser)


def run(given: Any) -> None:
    from shoal.bench.config import RunConfig
    from shoal.bench.run import complete, prepare
    from shoal.files import write_atomically
    from shoal.report.tables import Table

    warm = values([f"w={given.warm_start}"], "--warm-start")["w"] if given.warm_start else None
    config = RunConfig(
        dataset=given.dataset,
        algorithm=given.algorithm,
        steps=given.steps,
        data_options=values(given.data, "--data"),
        settings=values(given.set, "--set"),
        model=given.model,
        optimizer=given.optimizer,
        optimizer_options={"lr": given.lr},
        batch_size=given.batch,
        domains_per_step=given.domains,
        draw=given.draw,
        seed=given.seed,
        warm_start=int(warm) if isinstance(warm, float) and warm > 1 else warm,
    )
    if given.out:
        make_folder(given.out)
    training = prepare(config, given.device, tell=not given.json)
    record = complete(config, training)
    if given.out:
        write_atomically(given.out / "record.json", json.dumps(record.to_dict(), default=dict).encode())
    if record.status == "diverged":
        raise InputError(record.error + (f" What was measured is in {given.out}." if given.out else ""))
    training.restore_selected()
    if given.out:
        from safetensors.torch import save

        weights = {k: v.contiguous().cpu() for k, v in training.model.state_dict().items()}
        write_atomically(given.out / "model.safetensors", save(weights))
    at = record.history[record.selected]
    table = Table(["split", "domain", next(iter(at["scores"].values()))["metric"], "at the last step"])
    for split, scores in at["scores"].items():
        last = record.history[-1]["scores"][split]["domains"]
        for name, value in scores["domains"].items():
            table.add(split, name, f"{value:.3f}", f"{last[name]:.3f}")
    note = training.data.notes.get("validation", "")
    rule = f"{record.rule} (step {at['step']})" + (
        f"; validation is {note}" if note and training.best else ""
    )
    text = f"{table.text()}\n\n{config.algorithm} on {config.dataset}, {rule}, {record.seconds:.1f} s."
    show(record.to_dict(), text + (f" Saved in {given.out}." if given.out else ""), given)
