"""Second passes that change neither buffers nor random state."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn

from shoal.replay import preserve_state, random_state


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.passes = self.passes + 1  # another tensor in the buffer's place
        return self.dropout(self.norm(x))


def test_buffers_and_random_state_are_put_back_and_since_repeats_the_same_masks():
    model, x = Noisy(), torch.randn(6, 4)
    state, tensors = copy.deepcopy(model.state_dict()), dict(model.named_buffers())
    with contextlib.suppress(ZeroDivisionError), preserve_state(model):
        before = model(x)
        raise ZeroDivisionError
    assert all(torch.equal(state[name], value) for name, value in tensors.items())
    assert all(value is tensors[name] for name, value in model.named_buffers())
    start = random_state(model)
    assert torch.equal(model(x), before)  # the same masks, drawn again
    after = torch.get_rng_state()
    with preserve_state(model, since=start):
        assert torch.equal(model(x), before)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(model(x), before)
    with preserve_state(model, since=[]):  # as while a CUDA graph is captured: generators are left alone
        model(x)
