"""Fish in a loop with Accelerate, which accumulates gradients over the pieces of each batch.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

from __future__ import annotations

from accelerate import Accelerator
from hospitals import dataset, difference, fish, network, ours, sampler
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

PIECES = 2


def main() -> nn.Module:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PIECES)
    order = sampler(share=(accelerator.process_index, accelerator.num_processes), pieces=PIECES)
    # The loader is not prepared: Accelerate would deal whole batches out, so that every process is in
    # another domain, and `share` has split them already.
    loader = DataLoader(dataset(), batch_sampler=order)
    model = network().to(accelerator.device)
    trained, optimizer = accelerator.prepare(model, fish(model))
    for x, y in loader:
        x, y = x.to(accelerator.device), y.to(accelerator.device)
        with accelerator.accumulate(trained):
            accelerator.backward(cross_entropy(trained(x), y))
            optimizer.step()  # steps with the last piece only
            optimizer.zero_grad()
    return model.eval()


if __name__ == "__main__":
    model = main()
    own = ours(network(), accumulate=PIECES)  # in as many processes as the launcher started
    print(f"largest difference from shoal.fit: {difference(model, own):.1e}")
    Accelerator().end_training()  # closes the process group, where a launcher started several
