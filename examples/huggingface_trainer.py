"""Fish in the Trainer of transformers, which trains a tiny DistilBERT on texts from four places.

python examples/huggingface_trainer.py
torchrun --nproc-per-node 2 examples/huggingface_trainer.py
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from hospitals import BATCH, INNER_STEPS, LR, META_LR, SEED, STEPS, difference, labels, ours
from texts import Logits, bert, items, texts
from torch import nn
from transformers import TrainingArguments

from shoal.integrations.transformers import DomainTrainer


def main(folder: str | None = None, checkpoint: str | None = None, **settings: Any) -> nn.Module:
    model = bert()
    parts = int(os.environ.get("WORLD_SIZE", 1)) * settings.get("gradient_accumulation_steps", 1)
    settings = {
        "max_steps": STEPS * INNER_STEPS,  # whole inner loops
        "per_device_train_batch_size": BATCH // parts,
        "learning_rate": LR,
        "optim": "adamw_torch_fused",  # as shoal.fit; the others round in another way
        "max_grad_norm": 0.0,  # the default clips at 1
        "lr_scheduler_type": "constant",
        "data_seed": SEED,
        "eval_strategy": "steps",
        "eval_steps": 10,
        **{"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, **settings},
    }
    with tempfile.TemporaryDirectory() as temporary:
        trainer = DomainTrainer(
            model,
            TrainingArguments(folder or temporary, **settings),
            train_dataset=items(),
            eval_dataset=items()[:32],
            domains=labels(),
            domains_per_step=INNER_STEPS,
            meta_lr=META_LR,
        )
        trainer.train(resume_from_checkpoint=checkpoint)
    return model


def own(**options: Any) -> nn.Module:
    """The same in Shoal's own loop. The Trainer's weight decay is 0, torch's 0.01."""
    return ours(Logits(), texts(), optimizer_options={"weight_decay": 0.0}, **options).bert


if __name__ == "__main__":
    print(f"largest difference from shoal.fit: {difference(main(), own()):.1e}")
