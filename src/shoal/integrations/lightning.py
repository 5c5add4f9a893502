"""Domain batches and Fish in the ``Trainer`` of Lightning (``lightning`` or ``pytorch_lightning``)."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any

from torch.utils.data import DataLoader

from shoal.data import DomainBatchSampler
from shoal.errors import InputError
from shoal.integrations import find_fish, slow_weights, warn_of_partial_loop
from shoal.vision import allow_torchvision

__all__ = ["FishCallback", "prepared"]

allow_torchvision()
pl: Any = import_module("pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch")
_Callback: Any = pl.Callback


def prepared(loader: DataLoader[Any], trainer: Any) -> DataLoader[Any]:
    """Configure the ``DomainBatchSampler`` of a loader for this process, gradient accumulation and resuming.

    Return its result, the same loader, from ``train_dataloader``. Each process gets its part of every batch;
    with ``accumulate_grad_batches=k`` each batch is split into k pieces; and training resumed from a
    checkpoint continues with the next batch. Use ``Trainer(use_distributed_sampler=False)``, or Lightning
    would split the batches among processes again.

    Args:
        loader: a ``DataLoader`` with ``batch_sampler=DomainBatchSampler(…)``.
        trainer: ``self.trainer``.
    """
    sampler = loader.batch_sampler
    if not isinstance(sampler, DomainBatchSampler):
        raise InputError(f"batch_sampler must be a DomainBatchSampler, got a {type(sampler).__name__}.")
    sampler.split((trainer.global_rank, trainer.world_size), trainer.accumulate_grad_batches)
    sampler.set_step(*divmod(trainer.global_step, sampler.batches_per_step))
    return loader


class FishCallback(_Callback):
    """Callback that adapts the Trainer of Lightning to :class:`~shoal.optim.Fish`. ::

        L.Trainer(max_steps=3000, callbacks=[FishCallback()], use_distributed_sampler=False)

    Validation uses the slow weights, those after the last complete inner loop. ``gradient_clip_val`` works
    also in mixed precision. If ``max_steps`` ends training within an inner loop, there is a warning.
    """

    def __init__(self) -> None:
        self._slow = ExitStack()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        warn_of_partial_loop(trainer.optimizers[0], trainer.max_steps)
        plugin = trainer.precision_plugin
        if find_fish(trainer.optimizers[0]) and isinstance(plugin, pl.plugins.MixedPrecision):
            # It refuses to clip for optimizers that can unscale gradients themselves, as Fish can.
            plugin.clip_gradients = partial(pl.plugins.Precision.clip_gradients, plugin)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and trainer.gradient_clip_val and find_fish(optimizer):
            scaler.unscale_(optimizer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.optimizers:
            self._slow.enter_context(slow_weights(trainer.optimizers[0], pl_module))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._slow.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._slow.close()  # a checkpoint saved on Ctrl-C has the weights of the inner loop
