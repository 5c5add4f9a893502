"""The features and the head of any model, against the same model without its last layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from shoal.errors import InputError
from shoal.models import FeatureExtractor


def numbers(count: int = 5, shape: tuple[int, ...] = (4,)) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


class Own(nn.Module):
    """A class as users write them: a mapping comes in, and functions come after the last layer."""

    def __init__(self, ending: Callable[[Tensor], Any] = torch.Tensor.clone) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.dropout = nn.Dropout(0.5)
        self.unused = nn.Linear(3, 3)
        self.fc = nn.Linear(8, 3)
        self.ending = ending

    def forward(self, x: Any, shift: Tensor | None = None) -> Any:
        x = x["x"] if isinstance(x, dict) else x
        return self.ending(self.fc(self.dropout(self.body(x if shift is None else x + shift))))


class TwoHeads(nn.Module):
    def __init__(self, ending: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.one, self.two, self.ending = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3), ending

    def forward(self, x: Tensor) -> Any:
        z = self.body(x).relu()
        return self.ending(self.one(z), self.two(z))


class Shared(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x), self.layer(-x))[0]


CONV = nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten())


def seeded(made: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return made()


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def check(model: nn.Module, layer: str, *args: Any, **kwargs: Any) -> None:
    model.eval()
    without = copy.deepcopy(model)
    without.set_submodule(layer, nn.Identity())
    wanted = without(*args, **kwargs)
    with FeatureExtractor(model) as extractor:
        output = model(*args, **kwargs)
        assert (extractor.layer, extractor.is_output) == (layer, True)
        assert torch.equal(extractor.features, getattr(wanted, "logits", wanted).flatten(1))
        assert extractor.width == extractor.features.shape[1]
        assert extractor.linear is model.get_submodule(layer)
        logits = getattr(output, "logits", output)
        assert torch.equal(logits.flatten(1), extractor.linear(extractor.features))
    assert not hooks(model)


def test_models_of_others(timm: Any) -> None:
    import transformers

    check(
        seeded(lambda: timm.create_model("test_convnext", num_classes=3)), "head.fc", numbers(2, (3, 64, 64))
    )
    ids = torch.randint(3, 50, (4, 7), generator=torch.Generator().manual_seed(0))
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    config = transformers.RobertaConfig(vocab_size=50, num_labels=3, pad_token_id=0, **sizes)
    roberta = seeded(lambda: transformers.RobertaForSequenceClassification(config))
    check(roberta, "classifier.out_proj", input_ids=ids, attention_mask=torch.ones_like(ids))


@pytest.mark.parametrize(
    ("ending", "is_output"),
    [
        (lambda t: t.float().unsqueeze(1).reshape(5, -1).squeeze(), True),
        (lambda t: log_softmax(t, 1), False),
        (lambda t: t.relu_(), False),
        (lambda t: (cross_entropy(t, torch.zeros(5).long()), t), True),
        (lambda t: {"loss": t.sum(), "logits": t}, True),
    ],
)
def test_what_comes_after_the_last_layer(ending: Any, is_output: bool) -> None:
    model = seeded(lambda: Own(ending)).eval().requires_grad_(False)
    with FeatureExtractor(model) as extractor:
        model(x := numbers())
        assert torch.equal(extractor.features, model.body(x))
        assert not extractor.features.requires_grad
    assert (extractor.layer, extractor.is_output) == ("fc", is_output)
    two = TwoHeads(lambda a, b: {"logits": b})
    assert FeatureExtractor(two).find(x).layer == "two"


def test_named_layers() -> None:
    """The output of a layer, and the input of the last."""
    model, x = seeded(Own).eval(), numbers()
    wanted = {"body.0": model.body[0](x), "body": model.body(x), "fc": model.body(x)}
    for layer, features in wanted.items():
        with FeatureExtractor(model, layer) as extractor:
            model(x)
            assert torch.equal(extractor.features, features), layer
        assert extractor.is_output == (layer == "fc")
    images = numbers(2, (3, 9, 9))
    pooled = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 3, 1), nn.Flatten())
    found = FeatureExtractor(pooled, "2")
    pooled(images)
    assert torch.equal(found.features, pooled[:2](images).flatten(1))


@pytest.mark.parametrize(
    ("model", "layer", "x", "message"),
    [
        (Own, "bodi", numbers(), r"features: unknown layer of Own 'bodi'\. Did you mean 'body'"),
        (Own, "unused", numbers(), "features of Own: layer 'unused' is not executed"),
        (lambda: nn.LSTM(4, 8), "", numbers(2, (5, 4)), r"must be one tensor of floats, .* gives 3"),
        (Shared, None, numbers(), r"one last linear layer .*'layer'"),
        (lambda: TwoHeads(lambda a, b: a + b), None, numbers(), r"one last linear layer .*'one', 'two'"),
        (lambda: CONV, None, numbers(), r"Sequential has no linear layer; .*features='layer.name'"),
        (lambda: Own(lambda t: t[:, :1]), None, numbers(), r"one last linear layer"),
    ],
)
def test_what_cannot_be_features(model: Any, layer: str | None, x: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FeatureExtractor(model(), layer).find(x)


def test_the_trial_pass_changes_nothing() -> None:
    x, plain, watched = numbers(), seeded(Own), seeded(Own)
    plain.body.eval()
    watched.body.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        wanted = plain(x)
        torch.manual_seed(3)
        extractor = FeatureExtractor(watched)
        output = watched(x)
    assert torch.equal(output, wanted)
    assert torch.equal(watched.fc(extractor.features), output)
    for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert [m.training for m in watched.modules()] == [m.training for m in plain.modules()]
    (slope,) = torch.autograd.grad(extractor.features.square().sum(), watched.body[0].weight)
    assert slope.abs().sum() > 0  # the features have their graph


def test_compiled_models() -> None:
    torch.compiler.reset()
    plain = seeded(Own).eval()
    model: Any = torch.compile(plain, backend="aot_eager", fullgraph=True)
    extractor = FeatureExtractor(model)
    for x in (numbers(), -numbers()):
        output = model(x)
        torch.testing.assert_close(extractor.features, plain.body(x))
        torch.testing.assert_close(output, plain.fc(extractor.features))
        (slope,) = torch.autograd.grad(extractor.features.square().sum(), plain.body[0].weight)
        (wanted,) = torch.autograd.grad(plain.body(x).square().sum(), plain.body[0].weight)
        torch.testing.assert_close(slope, wanted)
