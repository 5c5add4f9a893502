"""Fish with FSDP2: each process holds a part of the weights, of Adam's moments and of Fish's slow weights.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

from __future__ import annotations

from hospitals import dataset, difference, fish, network, ours, sampler
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> nn.Module:
    share = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", share[1:])
    model = network()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = fish(model)  # after sharding: its parameters are the parts
    for x, y in DataLoader(dataset(), batch_sampler=sampler(share=share)):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # averages the gradients over processes
        optimizer.step()
    whole = network()
    whole.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    return whole.eval()


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    model = main()
    own = ours(network())  # in as many processes
    print(f"largest difference from shoal.fit: {difference(model, own):.1e}")
    distributed.destroy_process_group()
