"""Domain batches and Fish in Lightning's ``Trainer``, with automatic optimization. ::

    class Classifier(L.LightningModule):
        ...

        def configure_optimizers(self):
            return Fish(torch.optim.AdamW(self.parameters(), 1e-3), inner_steps=3)

        def train_dataloader(self):
            loader = DataLoader(dataset, batch_sampler=DomainBatchSampler(hospital, 32, domains_per_step=3))
            return prepared(loader, self.trainer)


    trainer = L.Trainer(max_steps=3000, callbacks=[FishCallback()], use_distributed_sampler=False)

Works with the packages ``lightning`` and ``pytorch_lightning``.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError
from shoal.integrations.fish import check_whole_loops, slow_weights
from shoal.vision import allow_torchvision

__all__ = ["FishCallback", "prepared"]


def _lightning() -> Any:
    """``lightning.pytorch`` or ``pytorch_lightning``: the one already imported, or else the one installed."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    allow_torchvision()
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("shoal.integrations.lightning needs Lightning: pip install lightning")


pl = _lightning()
_Callback: Any = pl.Callback


def prepared(loader: DataLoader[Any], trainer: Any) -> DataLoader[Any]:
    """Configure the ``DomainBatchSampler`` of a loader for this process, gradient accumulation and resuming.

    Return its result from ``train_dataloader`` of a LightningModule or LightningDataModule. Each process gets
    its part of every batch; with ``accumulate_grad_batches=k`` each batch is split into k pieces; and
    training resumed from a checkpoint continues with the next batch, also in the middle of an epoch. Use
    ``Trainer(use_distributed_sampler=False)``, or Lightning would split the batches among processes again.

    Args:
        loader: a ``DataLoader`` with ``batch_sampler=DomainBatchSampler(…)``.
        trainer: ``self.trainer``.

    Returns:
        The same loader.
    """
    sampler = loader.batch_sampler
    if not isinstance(sampler, DomainBatchSampler):
        raise InputError(
            f"the loader's batch_sampler is a {type(sampler).__name__}; "
            "make it with DataLoader(dataset, batch_sampler=DomainBatchSampler(…))."
        )
    sampler.split((trainer.global_rank, trainer.world_size), trainer.accumulate_grad_batches)
    sampler.set_step(*divmod(trainer.global_step, sampler.batches_per_step))
    return loader


class FishCallback(_Callback):
    """Callback that adapts the Trainer of Lightning to :class:`~shoal.optim.Fish`.

    - Validation uses the slow weights, those after the last complete inner loop.
    - ``gradient_clip_val`` works in mixed precision. Lightning by itself refuses it for optimizers that
      unscale gradients themselves, as Fish does.
    - If ``max_steps`` ends training within an inner loop, there is a warning.
    """

    def __init__(self) -> None:
        self._showing = ExitStack()
        self._clip: float | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        check_whole_loops(trainer.optimizers, trainer.max_steps)
        in_step = any(_unscales(optimizer) for optimizer in trainer.optimizers)
        if in_step and isinstance(trainer.precision_plugin, pl.plugins.MixedPrecision):
            # Lightning would refuse it before each step: here it is taken over.
            self._clip, trainer.gradient_clip_val = trainer.gradient_clip_val, None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self._clip:
            return
        if _unscales(optimizer) and (scaler := trainer.precision_plugin.scaler):
            scaler.unscale_(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if trainer.gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(params, self._clip)
        else:
            nn.utils.clip_grad_norm_(params, self._clip)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._clip is not None:
            trainer.gradient_clip_val, self._clip = self._clip, None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._showing.enter_context(slow_weights(trainer.optimizers, pl_module))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._showing.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._showing.close()  # so that what is saved on Ctrl-C is the inner loop's state
        self.on_fit_end(trainer, pl_module)


def _unscales(optimizer: Any) -> bool:
    """Whether its ``step`` itself divides gradients by the loss scale."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
