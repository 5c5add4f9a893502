"""torchvision beside a CPU build of torch: it comes as a CUDA build and then lacks two operators.

Naming them is enough for models and transforms; nothing here calls them. Tests import this; processes that
they start do so by themselves when this folder is in PYTHONPATH.
"""

import sys

import torch

try:
    import torchvision  # noqa: F401
except ImportError:
    pass
except RuntimeError:
    for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")  # lives as long as this module
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
