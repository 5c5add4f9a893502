"""Fish in the Trainer of Lightning, with a schedule, validation within an inner loop, and checkpoints.

python examples/lightning_trainer.py
"""

from __future__ import annotations

from typing import Any

import lightning as L
from hospitals import INNER_STEPS, STEPS, dataset, difference, fish, network, ours, patients, sampler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from shoal.integrations.lightning import FishCallback, prepared


def falling(step: int) -> float:
    return 1 - step / STEPS


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.network(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        x, y = batch
        self.log("validation", cross_entropy(self.network(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = fish(self.network)
        # One rate for all inner steps, as in shoal.fit; without `frequency` it falls within inner loops too.
        schedule = {"scheduler": LambdaLR(optimizer, falling), "interval": "step", "frequency": INNER_STEPS}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def train_dataloader(self) -> DataLoader:
        return prepared(DataLoader(dataset(), batch_sampler=sampler()), self.trainer)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*patients(4, 40)), batch_size=40)


def main(checkpoint: str | None = None, callbacks: Any = (), **settings: Any) -> nn.Module:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        max_steps=STEPS * INNER_STEPS,  # whole inner loops
        use_distributed_sampler=False,  # or every process would be in another domain
        val_check_interval=4,
        callbacks=[FishCallback(), *callbacks],
        **{"accelerator": "cpu", "enable_checkpointing": False, **quiet, **settings},
    )
    classifier = Classifier()
    trainer.fit(classifier, ckpt_path=checkpoint)
    return classifier.network


if __name__ == "__main__":
    own = ours(network(), schedule=lambda optimizer: LambdaLR(optimizer, falling))
    print(f"largest difference from shoal.fit: {difference(main(), own):.1e}")
