"""Domain batches, Fish and penalties in the ``Trainer`` of transformers, which requires ``accelerate``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shoal.data import DomainBatchSampler, WithDomain
from shoal.errors import InputError
from shoal.integrations import find_fish, slow_weights, warn_of_partial_loop
from shoal.optim import Fish
from shoal.vision import allow_torchvision

__all__ = ["DomainTrainer"]

allow_torchvision()
_Trainer: Any = import_module("transformers").Trainer


class DomainTrainer(_Trainer):
    """The ``Trainer`` of transformers, with training batches drawn by domain. ::

        DomainTrainer(model, args, train_dataset=data, domains=data["hospital"], meta_lr=0.5).train()

    The batch of one optimizer step has ``per_device_train_batch_size`` × number of devices ×
    ``gradient_accumulation_steps`` examples, from one domain or, with ``penalty``, in equal numbers from
    ``domains_per_step`` (S) domains. Each process and each accumulated piece gets a part of it with examples
    from the same domains; a penalty is computed on each part. Training resumed from a checkpoint continues
    with the next batch. Evaluation and prediction use the slow weights of Fish. The model's loss must be the
    mean over the examples of its batch; if it divides by ``num_items_in_batch``, set
    ``model.accepts_loss_kwargs = True``.

    Args:
        *args, **kwargs: passed to the Trainer.
        domains: one label (integer or string) for each example of ``train_dataset``.
        domains_per_step: S (default: the number of domains, or 5 if there are more than 16).
        meta_lr: train with Fish, with this ``meta_lr`` and inner loops of S steps. For other options of Fish,
            pass ``optimizers=(Fish(…), None)`` instead.
        penalty: a function ``penalty(outputs, labels, domain)`` that returns a scalar, which is added to the
            loss; ``outputs`` is what the model returns, ``domain`` the domain index of each example.
    """

    def __init__(
        self,
        *args: Any,
        domains: Any,
        domains_per_step: int | None = None,
        meta_lr: float | None = None,
        penalty: Callable[[Any, Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if penalty is not None and meta_lr is not None:
            raise InputError("Fish uses batches of one domain and a penalty batches of several.", "meta_lr")
        self.domains_per_step, self.meta_lr, self.penalty = domains_per_step, meta_lr, penalty
        self._data = WithDomain(self.train_dataset, domains)
        if not hasattr(self.accelerator.unwrap_model(self.model), "accepts_loss_kwargs"):
            # Of a model with **kwargs, the Trainer assumes that it divides by a number of items.
            self.model_accepts_loss_kwargs = False

    def _make_sampler(self) -> DomainBatchSampler:
        args, domains, mixed = self.args, self._data.domains, self.penalty is not None
        slots = DomainBatchSampler(domains, 1, self.domains_per_step, steps=1).domains_per_step
        size, pieces = self._train_batch_size, args.gradient_accumulation_steps
        if mixed and size % slots:
            message = f"{size} must be a multiple of {slots}, the number of domains per step."
            raise InputError(message, "per_device_train_batch_size")
        size = size * args.world_size * pieces // (slots if mixed else 1)
        seed = args.seed if args.data_seed is None else args.data_seed
        share = (args.process_index, args.world_size)
        return DomainBatchSampler(domains, size, slots, seed=seed, mixed=mixed, share=share, pieces=pieces)

    def get_train_dataloader(self) -> DataLoader[Any]:
        # Not prepared by Accelerate, which would assign whole batches to processes.
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        args, sampler = self.args, self._make_sampler()
        loader = DataLoader(
            self._data,
            batch_sampler=sampler,
            collate_fn=partial(_with_domain, collate),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
        )
        loader.set_epoch = sampler.set_epoch  # which the Trainer calls, also when it resumes
        return loader

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        made = super().create_optimizer(*args, **kwargs)
        if self.meta_lr is not None and find_fish(made) is None:
            made = self.optimizer = Fish(made, self._make_sampler().domains_per_step, self.meta_lr)
        warn_of_partial_loop(made, self.args.max_steps)
        return made

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        domain, labels = inputs.pop("domain", None), inputs.get("labels")
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if self.penalty is not None and domain is not None:  # in evaluation there is no domain
            penalty = self.penalty(outputs, labels, domain)
            counted = kwargs.get("num_items_in_batch") is not None
            if self.compute_loss_func or (self.model_accepts_loss_kwargs and counted):
                penalty = penalty / self.args.gradient_accumulation_steps  # as the loss is already
            loss = loss + penalty
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with slow_weights(self.optimizer, self.model):
            return super().evaluation_loop(*args, **kwargs)


def _with_domain(collate: Callable[[list[Any]], Any], items: list[dict[str, Any]]) -> Any:
    """A batch, with the domain that collators do not know."""
    domain = torch.tensor([item.pop("domain") for item in items])
    return {**collate(items), "domain": domain}
