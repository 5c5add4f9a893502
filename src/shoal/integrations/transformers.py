"""Domain batches, Fish and penalties in the ``Trainer`` of transformers. ::

    trainer = DomainTrainer(model, args, train_dataset=data, domains=data["hospital"], meta_lr=0.5)
    trainer.train()

Requires the packages ``transformers`` and ``accelerate``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shoal.data.sampler import DomainBatchSampler
from shoal.data.with_domain import WithDomain
from shoal.errors import InputError, shown
from shoal.integrations.fish import check_whole_loops, fish_among, slow_weights
from shoal.optim import Fish
from shoal.settings import Count, Range, coerce
from shoal.vision import allow_torchvision

allow_torchvision()
try:
    _Trainer: Any = importlib.import_module("transformers").Trainer
except ModuleNotFoundError as error:
    raise ImportError(
        f"shoal.integrations.transformers needs transformers and accelerate ({error}): "
        "pip install transformers accelerate"
    ) from error

__all__ = ["DomainTrainer"]

Penalty = Callable[[Any, Tensor, Tensor], Tensor]


class DomainTrainer(_Trainer):
    """The ``Trainer`` of transformers, with training batches drawn by domain.

    With ``meta_lr`` it trains with Fish: each optimizer step uses a batch from one domain, and
    ``domains_per_step`` (S) steps make one inner loop. With ``penalty`` each optimizer step uses a batch
    with examples from S domains, and the penalty is added to the model's loss::

        def penalty(outputs, labels, domain):
            return 10 * irm(outputs.logits, labels, domain)

        DomainTrainer(model, args, train_dataset=data, domains=data["hospital"], penalty=penalty)

    With neither, each batch comes from one domain, and the optimizer is the Trainer's.

    The batch of one optimizer step has ``per_device_train_batch_size`` × number of devices ×
    ``gradient_accumulation_steps`` examples, from one domain or in equal numbers from S domains. Each process
    and each accumulated piece gets a part of it with examples from the same domains; a penalty is computed on
    each part. Training resumed from a checkpoint continues with the next batch. Evaluation and prediction use
    the slow weights of Fish, those after the last complete inner loop.

    The model's loss is assumed to be the mean over the examples of its batch. If it divides by
    ``num_items_in_batch``, set ``model.accepts_loss_kwargs = True``.

    Args:
        *args, **kwargs: passed to the Trainer.
        domains: one label (integer or string) for each example of ``train_dataset``.
        domains_per_step: S, by default the number of domains, or 5 if there are more than 16.
        meta_lr: if set, the optimizer is wrapped in Fish with this ``meta_lr``. For other options of Fish,
            pass ``optimizers=(Fish(…), None)`` instead.
        penalty: a function ``penalty(outputs, labels, domain)`` of a mixed batch that returns a scalar;
            ``outputs`` is what the model returns, and ``domain`` holds the domain index of each example.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,
        domains: Any,
        domains_per_step: int | None = None,
        meta_lr: float | None = None,
        penalty: Penalty | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if penalty is not None and meta_lr is not None:
            raise InputError(
                f"meta_lr={meta_lr} with penalty: Fish takes batches of one domain, a penalty compares "
                "several in one batch; drop one."
            )
        if penalty is not None and not callable(penalty):
            raise InputError(
                f"penalty must be a function of outputs, labels and domain, got {shown(penalty)}."
            )
        if self.train_dataset is None:
            raise InputError("train_dataset is missing: domains are those of its examples.")
        self.meta_lr = coerce(Annotated[float, Range(above=0, most=1)] | None, meta_lr, "meta_lr")
        self.penalty = penalty
        self._data = WithDomain(self.train_dataset, domains)
        self.domains_per_step = coerce(Count | None, domains_per_step, "domains_per_step")
        self._sampler = self._make_sampler()
        if not hasattr(self.accelerator.unwrap_model(self.model), "accepts_loss_kwargs"):
            # A model with **kwargs is otherwise taken for one that divides by a number of items.
            self.model_accepts_loss_kwargs = False

    def _make_sampler(self) -> DomainBatchSampler:
        args, mixed = self.args, self.penalty is not None
        own = self._train_batch_size  # which auto_find_batch_size reduces
        size = own * args.world_size * args.gradient_accumulation_steps
        seed = args.seed if args.data_seed is None else args.data_seed
        domains = self._data.domains
        slots = DomainBatchSampler(domains, 1, self.domains_per_step, steps=1).domains_per_step
        if mixed and own % slots:
            raise InputError(
                f"per_device_train_batch_size={own} cannot be shared equally among "
                f"domains_per_step={slots} domains; it must be a multiple of {slots}."
            )
        return DomainBatchSampler(
            domains,
            size // slots if mixed else size,
            slots,
            seed=seed,
            mixed=mixed,
            share=(args.process_index, args.world_size),
            pieces=args.gradient_accumulation_steps,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        # Not prepared by Accelerate, which would deal whole batches out to processes.
        self._sampler = self._make_sampler()
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        args, workers = self.args, self.args.dataloader_num_workers
        loader = DataLoader(
            self._data,
            batch_sampler=self._sampler,
            collate_fn=_WithDomainColumn(collate),
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
        )
        # The Trainer calls it, also where it resumes.
        loader.set_epoch = self._sampler.set_epoch
        return loader

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        super().create_optimizer(*args, **kwargs)
        if self.meta_lr is not None and not fish_among([self.optimizer]):
            self.optimizer = Fish(self.optimizer, self._sampler.domains_per_step, self.meta_lr)
        check_whole_loops([self.optimizer], self.args.max_steps)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        domain, labels = inputs.pop("domain", None), inputs.get("labels")
        if self.penalty is None or domain is None:  # an evaluation has no domains
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        penalty = self.penalty(outputs, labels, domain)
        if not isinstance(penalty, (Tensor, int, float)) or (isinstance(penalty, Tensor) and penalty.ndim):
            raise InputError(f"penalty must return one number, a tensor (), got {shown(penalty)}.")
        counted = kwargs.get("num_items_in_batch") is not None
        if self.compute_loss_func or (self.model_accepts_loss_kwargs and counted):
            penalty = penalty / self.args.gradient_accumulation_steps  # as the loss is already
        loss = loss + penalty
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with slow_weights([self.optimizer], self.model):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with slow_weights([self.optimizer], self.model):
            return super().predict(*args, **kwargs)


class _WithDomainColumn:
    """Collates items without their domain, which collators do not know, and then adds it to the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, items: list[dict[str, Any]]) -> Any:
        domain = torch.tensor([item.pop("domain") for item in items])
        batch = self.collate(items)
        batch["domain"] = domain
        return batch
