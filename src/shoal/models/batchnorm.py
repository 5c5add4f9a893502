"""BatchNorm that keeps the statistics it was pretrained with."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.settings import checked


@checked
def freeze_batchnorm(model: nn.Module) -> list[str]:
    """Keep the running statistics of every BatchNorm layer in training mode too, in place.

    The layers normalise with their pretrained means and variances; their scales and shifts are still trained.
    Layers whose statistics were never updated are left as they are. Weights and their names do not change. ::

        model = torchvision.models.resnet50(weights="IMAGENET1K_V2")
        freeze_batchnorm(model)

    Args:
        model: any network with pretrained weights.

    Returns:
        The names of the layers that are now frozen.
    """
    names = []
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and "train" not in vars(module):
            mean = module.running_mean
            if mean is not None and mean.count_nonzero():
                module.train = partial(_eval, module)  # type: ignore[assignment, method-assign]
                module.eval()
                names.append(name)
    return names


def _eval(module: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(module, False)
