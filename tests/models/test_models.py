"""Models by name: shapes, seeds, and the architecture of the paper."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal import models
from shoal.errors import InputError
from shoal.models.small import mnist_cnn

INPUTS: dict[str, list[tuple[int, ...]]] = {
    "sprite-cnn": [(3, 64, 64), (3, 32, 32), (1, 32, 32)],
    "small-cnn": [(1, 16, 16), (2, 8, 8), (3, 17, 30)],
    "mnist-cnn": [(2, 28, 28), (1, 8, 9)],
    "mlp": [(1,), (13,)],
    "linear": [(4,)],
    "tabular": [(1,), (13,)],
}
WRONG: dict[str, list[tuple[int, ...]]] = {
    "sprite-cnn": [(3, 64), (3, 64, 32), (3, 28, 28)],
    "small-cnn": [(16, 16), (1, 16, 7)],
    "mnist-cnn": [(28, 28), (0, 28, 28), (1, 7, 28)],
    "mlp": [(), (1, 16, 16), (0,)],
    "linear": [(2, 2)],
    "tabular": [(), (2, 2), (0,)],
}
CASES = [(name, shape) for name, shapes in INPUTS.items() for shape in shapes]


def test_only_models_are_offered() -> None:
    assert set(INPUTS) <= set(models.registry.names())
    assert "feature-model" not in models.registry.names()
    with pytest.raises(InputError, match=r"unknown model 'sprit-cnn'.*'sprite-cnn'"):
        models.build("sprit-cnn", input_shape=(3, 64, 64), classes=2, seed=0)


@pytest.mark.parametrize(("name", "shape"), CASES)
@pytest.mark.parametrize("batch", [1, 5])
def test_outputs(name: str, shape: tuple[int, ...], batch: int) -> None:
    x = torch.rand(batch, *shape)
    model = models.build(name, input_shape=shape, classes=3, seed=0).eval()
    assert model(x).shape == (batch, 3)
    torch.testing.assert_close(model(x), model.head(model.features(x)))
    assert model.features(x).ndim == 2
    assert models.build(name, input_shape=shape, classes=None, seed=0)(x).shape == (batch,)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_an_output_does_not_depend_on_batch_mates(name: str, shape: tuple[int, ...]) -> None:
    model = models.build(name, input_shape=shape, classes=2, seed=0).double().eval()
    x = torch.rand(4, *shape, dtype=torch.float64)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


@pytest.mark.parametrize("name", INPUTS)
def test_weights_follow_the_seed_alone(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        model = models.build(name, input_shape=INPUTS[name][0], classes=2, seed=seed)
        return nn.utils.parameters_to_vector(model.parameters())

    torch.manual_seed(7)
    first = weights(0)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), drawn)  # building drew nothing from the global generator
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))


@pytest.mark.parametrize(("name", "shape"), [(n, s) for n, shapes in WRONG.items() for s in shapes])
def test_wrong_input_shapes_are_named(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=f"model '{name}' takes"):
        models.build(name, input_shape=shape, classes=2, seed=0)


@pytest.mark.parametrize("classes", [0, 1])
def test_too_few_classes(classes: int) -> None:
    with pytest.raises(InputError, match=f"classes must be at least 2.*not {classes}"):
        models.build("linear", input_shape=(4,), classes=classes, seed=0)


@pytest.mark.parametrize(
    ("size", "widths"), [(64, [3, 32, 32, 64, 128, 128]), (32, [3, 32, 32, 64, 128])], ids=["64", "32"]
)
def test_sprite_cnn_is_the_papers(size: int, widths: list[int]) -> None:
    features = models.build("sprite-cnn", input_shape=(3, size, size), classes=2, seed=0).features
    convolutions = [m for m in features.modules() if isinstance(m, nn.Conv2d)]
    assert [c.in_channels for c in convolutions] + [convolutions[-1].out_channels] == widths
    assert all(c.kernel_size == (4, 4) and c.stride == (2, 2) for c in convolutions)
    assert [c.padding for c in convolutions] == [(1, 1)] * (len(widths) - 2) + [(0, 0)]
    assert sum(isinstance(m, nn.ReLU) for m in features.modules()) == len(convolutions)
    assert features(torch.rand(2, 3, size, size)).shape == (2, widths[-1])


def test_mnist_cnn_is_domainbeds() -> None:
    model = models.build("mnist-cnn", input_shape=(2, 28, 28), classes=2, seed=0)
    layers = list(model.features)  # type: ignore[call-overload]
    kinds = [nn.Conv2d, nn.ReLU, nn.GroupNorm] * 4 + [nn.AdaptiveAvgPool2d, nn.Flatten]
    assert [type(layer) for layer in layers] == kinds
    convolutions, norms = layers[0:12:3], layers[2:12:3]
    assert [(c.in_channels, c.out_channels) for c in convolutions] == [
        *((2, 64), (64, 128), (128, 128), (128, 128))
    ]
    assert [c.stride for c in convolutions] == [(1, 1), (2, 2), (1, 1), (1, 1)]
    assert all(c.kernel_size == (3, 3) and c.padding == (1, 1) for c in convolutions)
    assert [(n.num_groups, n.num_channels) for n in norms] == [(8, 64), (8, 128), (8, 128), (8, 128)]
    x = torch.rand(2, 2, 28, 28)
    before = nn.Sequential(*layers[:12])(x)
    assert before.shape == (2, 128, 14, 14)
    torch.testing.assert_close(model.features(x), before.mean((2, 3)))
    assert isinstance(model.head, nn.Linear)


def test_mnist_cnn_can_be_narrow_by_whole_groups() -> None:
    assert mnist_cnn.build((1, 28, 28), 10, width=8).features(torch.rand(2, 1, 28, 28)).shape == (2, 16)
    for width in (0, -8, 12):
        with pytest.raises(InputError, match=f"width of model 'mnist-cnn'.*got {width}"):
            models.build("mnist-cnn", input_shape=(1, 28, 28), classes=10, seed=0, width=width)


def test_tabular_starts_linear_and_can_bend() -> None:
    model = models.build("tabular", input_shape=(3,), classes=None, seed=0, depth=2).double().eval()
    x, y = torch.randn(2, 5, 3, dtype=torch.float64)
    middle = (model(x) + model(y)) / 2
    torch.testing.assert_close(model((x + y) / 2), middle)
    for block in list(model.features)[1:]:  # type: ignore[call-overload]
        nn.init.normal_(block.change[-1].weight)
    assert not torch.allclose(model((x + y) / 2), (model(x) + model(y)) / 2)
    # What bends is left out at random in training, what is linear never is.
    model.train()
    assert not torch.equal(model(x), model(x))
    straight = models.build("tabular", input_shape=(3,), classes=None, seed=0, depth=0).train()
    assert torch.equal(straight(x.float()), straight(x.float()))


@pytest.mark.parametrize("name", ["small-cnn", "sprite-cnn", "mnist-cnn", "mlp", "tabular"])
def test_second_derivatives_exist(name: str) -> None:
    """Gradient matching differentiates the gradient."""
    shape = INPUTS[name][0]
    model = models.build(name, input_shape=shape, classes=2, seed=0)
    loss = nn.functional.cross_entropy(model(torch.rand(3, *shape)), torch.tensor([0, 1, 1]))
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    second = torch.autograd.grad(
        torch.cat([g.flatten() for g in gradients]).square().sum(), parameters, allow_unused=True
    )
    assert all(g is None or bool(g.isfinite().all()) for g in second)
    assert any(g is not None and float(g.abs().sum()) > 0 for g in second)
