"""RunConfig → RunRecord."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache

import torch

from shoal.algorithms import algorithm_class, settings_of
from shoal.bench.config import OPTIMIZERS, RunConfig
from shoal.bench.record import RunRecord
from shoal.data import sets
from shoal.data.batch import DomainData
from shoal.errors import check_names
from shoal.models import build
from shoal.training.journal import Journal
from shoal.training.loop import Diverged, Training
from shoal.training.options import Options
from shoal.training.summary import summary

Tell = Callable[[int, str], None]


@lru_cache(maxsize=1)
def _loaded(dataset: str, options: str) -> DomainData:
    """The last dataset is kept: neighbouring runs of a comparison mostly share it."""
    return sets.load(dataset, **json.loads(options))


def prepare(config: RunConfig, device: str | None = None, tell: Tell | bool = False) -> Training:
    """The training that a configuration describes, checked and ready."""
    data = _loaded(config.dataset, json.dumps(dict(config.data_options), sort_keys=True))
    model = build(
        config.model or data.model,
        input_shape=data.input_shape,
        classes=data.classes,
        seed=config.seed,
        **config.model_options,
    )
    optimizer = getattr(torch.optim, OPTIMIZERS[config.optimizer])
    options = Options(
        steps=config.steps,
        batch_size=config.batch_size,
        domains_per_step=config.domains_per_step,
        settings=config.settings,
        optimizer=lambda params: optimizer(params, **config.optimizer_options),
        draw=config.draw,  # type: ignore[arg-type]
        seed=config.seed,
        warm_start=config.warm_start,
        eval_every=config.eval_every,
        eval_limit=config.eval_limit,
        select=config.select,  # type: ignore[arg-type]
        device=device,
        progress=tell,
    )
    return Training(config.algorithm, model, data, options, label=config.name)


def run(config: RunConfig, device: str | None = None, tell: Tell | bool = False) -> RunRecord:
    """Trains and records."""
    return complete(config, prepare(config, device, tell))


def complete(config: RunConfig, training: Training, journal: Journal | None = None) -> RunRecord:
    """Takes a training to its end. A loss that is no longer finite is a result too, not an error."""
    status, error = "finished", ""
    try:
        training.run(journal)
    except Diverged as stop:
        status, error = "diverged", str(stop)
    return RunRecord(config=config, **summary(training, status, error))


def check(config: RunConfig) -> None:
    """Raises InputError for a configuration with a name that is not known, before others are started."""
    sets.registry.module(config.dataset)
    algorithm = algorithm_class(config.algorithm)
    check_names(f"setting of {algorithm.__name__}:", config.settings, settings_of(algorithm))
