"""Second passes that leave no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shoal.replay import leaves_no_trace, random_state


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.passes = self.passes + 1  # another tensor in the buffer's place
        return self.dropout(self.norm(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Noisy()


def same(before, model):
    return all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("raises", [False, True])
def test_buffers_and_random_state_are_put_back(model, raises):
    x = torch.randn(6, 4)
    model(x)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    tensors = dict(model.named_buffers())
    try:
        with leaves_no_trace(model):
            model(x)
            model(x)
            assert not same(before, model)
            assert not torch.equal(torch.get_rng_state(), random)
            if raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert same(before, model)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(value is tensors[name] for name, value in model.named_buffers())


def test_since_repeats_the_same_masks_and_goes_on_from_where_it_was(model):
    first, second = torch.randn(6, 4), torch.randn(6, 4)
    before = random_state(model)
    outputs = [model(first), model(second)]
    after = torch.get_rng_state()
    with leaves_no_trace(model, since=before):
        assert torch.equal(model(first), outputs[0])
        assert torch.equal(model(second), outputs[1])
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(model(first), outputs[0])


def test_without_since_the_block_rehearses_what_comes(model):
    """The masks drawn within are those drawn after it."""
    x = torch.randn(6, 4)
    with leaves_no_trace(model):
        rehearsed = model(x)
    assert torch.equal(model(x), rehearsed)


def test_parameters_are_not_touched(model):
    with leaves_no_trace(model):
        with torch.no_grad():
            model.norm.weight.fill_(3)
    assert (model.norm.weight == 3).all()


def test_a_captured_state_of_nothing_is_no_state(model):
    """While a CUDA graph is captured generators cannot be read: then they are left alone."""
    random = torch.get_rng_state()
    with leaves_no_trace(model, since=[]):
        assert torch.equal(torch.get_rng_state(), random)
        model(torch.randn(6, 4))
    assert torch.equal(torch.get_rng_state(), random)
