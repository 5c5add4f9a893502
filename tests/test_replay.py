"""Second passes that change neither buffers nor random state."""

from __future__ import annotations

import copy

import pytest
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


@pytest.mark.parametrize("raises", [False, True])
def test_buffers_and_random_state_are_put_back(raises):
    model, x = Noisy(), torch.randn(6, 4)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    tensors = dict(model.named_buffers())
    try:
        with preserve_state(model):
            inside = model(x)
            with torch.no_grad():
                model.norm.weight.fill_(3)  # parameters are left alone
            if raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert all(torch.equal(before[name], value) for name, value in tensors.items())
    assert all(value is tensors[name] for name, value in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), random)
    assert (model.norm.weight == 3).all()
    model.norm.weight.data.fill_(1)
    assert torch.equal(model(x), inside)  # the same masks, drawn again


def test_since_repeats_the_same_masks_and_goes_on_from_where_it_was():
    model, first, second = Noisy(), torch.randn(6, 4), torch.randn(6, 4)
    before = random_state(model)
    outputs = [model(first), model(second)]
    after = torch.get_rng_state()
    with preserve_state(model, since=before):
        assert torch.equal(model(first), outputs[0])
        assert torch.equal(model(second), outputs[1])
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(model(first), outputs[0])
    with preserve_state(model, since=[]):  # as while a CUDA graph is captured: generators are left alone
        model(first)
