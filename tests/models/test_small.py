"""Models by name: shapes, seeds, and the architectures of the papers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal import models
from shoal.errors import InputError

INPUTS: dict[str, list[tuple[int, ...]]] = {
    "sprite-cnn": [(3, 64, 64), (1, 32, 32)],
    "small-cnn": [(2, 8, 8), (3, 17, 30)],
    "mnist-cnn": [(2, 28, 28), (1, 8, 9)],
    "pixel-linear": [(3, 20, 24), (1, 4, 4)],
    "mlp": [(13,)],
    "linear": [(4,)],
    "tabular": [(1,)],
}


@pytest.mark.parametrize("name", INPUTS)
def test_outputs_and_seeds(name: str) -> None:
    for shape in INPUTS[name]:
        x = torch.rand(5, *shape)
        model = models.build(name, input_shape=shape, classes=3, seed=0).eval()
        assert model(x).shape == (5, 3)
        torch.testing.assert_close(model(x), model.head(model.features(x)))
        assert model.features(x).ndim == 2
        assert models.build(name, input_shape=shape, classes=None, seed=0)(x[:1]).shape == (1,)
        # An output does not depend on the other examples of the batch.
        model.double()
        torch.testing.assert_close(model(x.double())[:1], model(x[:1].double()))

    def weights(seed: int) -> torch.Tensor:
        return nn.utils.parameters_to_vector(
            models.build(name, input_shape=INPUTS[name][0], classes=2, seed=seed).parameters()
        )

    torch.manual_seed(7)
    first, drawn = weights(0), torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), drawn)  # building drew nothing from the global generator
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("sprit-cnn", {}, r"unknown model 'sprit-cnn'.*'sprite-cnn'"),
        ("", {}, "no default model"),
        ("linear", {"classes": 1}, "classes must be at least 2.*got 1"),
        ("mnist-cnn", {"width": 12}, "width of model 'mnist-cnn'.*got 12"),
    ],
)
def test_bad_names_and_options(name: str, changes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        models.build(name, **{"input_shape": (1, 28, 28), "classes": 2, "seed": 0, **changes})


@pytest.mark.parametrize(
    ("name", "shape", "parameters", "strides"),
    [
        ("sprite-cnn", (3, 64, 64), 444_288, [2] * 5),
        ("sprite-cnn", (3, 32, 32), 182_016, [2] * 4),
        ("mnist-cnn", (2, 28, 28), 371_136, [1, 2, 1, 1]),
    ],
)
def test_the_networks_of_the_papers(
    name: str, shape: tuple[int, ...], parameters: int, strides: list[int]
) -> None:
    """Numbers of the authors' features, and where they halve the image."""
    features = models.build(name, input_shape=shape, classes=2, seed=0).features
    assert sum(p.numel() for p in features.parameters()) == parameters
    assert [m.stride[0] for m in features.modules() if isinstance(m, nn.Conv2d)] == strides
    assert sum(isinstance(m, nn.ReLU) for m in features.modules()) == len(strides)


def test_tabular_starts_linear_and_can_bend() -> None:
    model = models.build("tabular", input_shape=(3,), classes=None, seed=0, depth=2).double().eval()
    x, y = torch.randn(2, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(model((x + y) / 2), (model(x) + model(y)) / 2)
    for block in list(model.features)[1:]:  # type: ignore[call-overload]
        nn.init.normal_(block.change[-1].weight)
    assert not torch.allclose(model((x + y) / 2), (model(x) + model(y)) / 2)
    model.train()
    assert not torch.equal(model(x), model(x))
    straight = models.build("tabular", input_shape=(3,), classes=None, seed=0, depth=0).train()
    assert torch.equal(straight(x.float()), straight(x.float()))  # dropout is in the blocks only
