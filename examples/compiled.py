"""Fish with a compiled model: blends write into the weights in place, so nothing is compiled anew.

python examples/compiled.py    (most of the time goes into the first compilation)
"""

from __future__ import annotations

import torch
from hospitals import dataset, difference, fish, network, ours, sampler
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main(backend: str = "inductor") -> nn.Module:
    model = network()
    compiled = torch.compile(model, backend=backend)  # the same weights
    optimizer = fish(model)
    for x, y in DataLoader(dataset(), batch_sampler=sampler()):
        optimizer.zero_grad()
        cross_entropy(compiled(x), y).backward()
        optimizer.step()
    return model.eval()


if __name__ == "__main__":
    print(f"largest difference from shoal.fit: {difference(main(), ours(network())):.1e}")
