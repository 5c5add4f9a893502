"""Fish in DistributedDataParallel: processes split each batch, so that all are in the same domain.

torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import sys

import torch
from hospitals import dataset, difference, fish, network, ours, sampler
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main() -> nn.Module:
    share = distributed.get_rank(), distributed.get_world_size()
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = fish(model)
    for x, y in DataLoader(dataset(), batch_sampler=sampler(share=share)):
        optimizer.zero_grad()
        cross_entropy(parallel(x), y).backward()  # averages the gradients over processes
        optimizer.step()  # so that all take the same inner steps
    return model.eval()


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    model = main()
    if len(sys.argv) > 1:
        torch.save(model.state_dict(), f"{sys.argv[1]}/{distributed.get_rank()}.pt")
    own = ours(network())  # in as many processes
    print(f"largest difference from shoal.fit: {difference(model, own):.1e}")
    distributed.destroy_process_group()
