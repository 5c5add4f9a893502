"""BatchNorm that keeps the statistics it was pretrained with."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class _Frozen(nn.Module):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class FrozenBatchNorm1d(_Frozen, nn.BatchNorm1d):
    pass


class FrozenBatchNorm2d(_Frozen, nn.BatchNorm2d):
    pass


class FrozenBatchNorm3d(_Frozen, nn.BatchNorm3d):
    pass


class FrozenSyncBatchNorm(_Frozen, nn.SyncBatchNorm):
    pass


FROZEN: dict[Any, Any] = {frozen.__mro__[2]: frozen for frozen in _Frozen.__subclasses__()}


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
        if isinstance(module, _BatchNorm) and type(module) in FROZEN and _has_statistics(module):
            module.__class__ = FROZEN[type(module)]
            module.eval()
            names.append(name)
    return names


def _has_statistics(module: _BatchNorm) -> bool:
    mean = module.running_mean
    return mean is not None and bool(mean.count_nonzero())
