"""torchvision beside a torch that it was not built for.

timm imports torchvision, and so do transformers' image models. Where its native library was built for another
torch (a CUDA build beside a CPU one), its import fails for want of two operators that no model needs.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import sys
import warnings
from types import ModuleType
from typing import Any

from shoal.errors import InputError

_kept: list[Any] = []  # a library's definitions live as long as it does


@functools.cache
def allow_torchvision() -> None:
    """Makes ``import torchvision`` work where its native library cannot load; elsewhere changes nothing.

    The missing operators are declared without an implementation: models and transforms work, and calling
    ``torchvision.ops.nms`` raises torch's error of an operator without one. To be called before timm,
    transformers or torchvision are imported, in each process.
    """
    if "torchvision" in sys.modules or (package := importlib.util.find_spec("torchvision")) is None:
        return
    import torch

    native = importlib.machinery.PathFinder.find_spec("_C", package.submodule_search_locations)
    try:
        torch.ops.load_library(getattr(native, "origin", None) or "_C")  # as torchvision does: twice is once
    except OSError as error:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
        message = "torchvision was not built for torch %s (%s): used without its operators."
        logging.getLogger("shoal").info(message, torch.__version__, error)


def load_timm() -> ModuleType:
    """timm, or an :class:`InputError` that says why it cannot be used and what to do."""
    return load("timm", "images")


def load(module: str, extra: str) -> ModuleType:
    """A package that needs torchvision, or is it; an :class:`InputError` says why it cannot be used."""
    allow_torchvision()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it is itself built on
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"{error.name or module} is not installed: pip install 'shoal[{extra}]'.") from error
    except (ImportError, OSError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "install a torchvision built for this torch: https://pytorch.org/get-started has the command"
        raise InputError(f"{module} cannot be imported ({first[:200]}): {remedy}.") from error
