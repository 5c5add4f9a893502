"""Fish in the Trainer of transformers, which trains a tiny DistilBERT on texts from four places.

python examples/huggingface_trainer.py
torchrun --nproc-per-node 2 examples/huggingface_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

from hospitals import INNER_STEPS, STEPS, difference, fish, ours, sampler
from texts import Logits, bert, items, texts
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments


class FishTrainer(Trainer):
    """Draws batches by domain, and evaluates θ also in the middle of a walk."""

    def get_train_dataloader(self) -> DataLoader:
        # Not prepared by Accelerate, which would deal whole batches out to processes.
        order = sampler(
            share=(self.args.process_index, self.args.world_size),
            pieces=self.args.gradient_accumulation_steps,
        )
        loader = DataLoader(self.train_dataset, batch_sampler=order, collate_fn=self.data_collator)
        loader.set_epoch = order.set_epoch  # the Trainer calls it, if it is there, also where it resumes
        return loader

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        walking = getattr(self.optimizer, "optimizer", self.optimizer)  # as Accelerate wraps it
        with walking.slow_weights():
            return super().evaluate(*args, **kwargs)


def main(folder: str | None = None, checkpoint: str | None = None, **settings: Any) -> nn.Module:
    model = bert()
    settings = {
        "max_steps": STEPS * INNER_STEPS,  # whole walks
        "max_grad_norm": 0.0,  # the default clips at 1
        "lr_scheduler_type": "constant",
        "eval_strategy": "steps",
        "eval_steps": 10,
        **{"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, **settings},
    }
    with tempfile.TemporaryDirectory() as temporary:
        arguments = TrainingArguments(folder or temporary, **settings)
        trainer = FishTrainer(
            model,
            arguments,
            train_dataset=items(),
            eval_dataset=items()[:32],
            optimizers=(fish(model), None),
        )
        trainer.train(resume_from_checkpoint=checkpoint)
    return model


if __name__ == "__main__":
    own = ours(Logits(), texts())
    print(f"largest difference from shoal.fit: {difference(main(), own.bert):.1e}")
