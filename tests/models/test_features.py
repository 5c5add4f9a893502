"""The features of any model, against the same model without its last layer."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import shoal
from shoal.algorithms import build
from shoal.data import Task
from shoal.errors import InputError
from shoal.models import FeatureExtractor, FeatureModel
from shoal.models import build as build_model

IMAGE = (3, 64, 64)
ALGORITHMS = ["coral", "mmd", "dann", "cdann", "fishr"]


def images(count: int = 4, shape: tuple[int, ...] = IMAGE) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


def ids(count: int = 4) -> Tensor:
    return torch.randint(3, 50, (count, 7), generator=torch.Generator().manual_seed(0))


class Own(nn.Module):
    """A class as users write them: a dictionary comes in, and functions come after the last layer."""

    def __init__(self, ending: Callable[[Tensor], Tensor] = torch.Tensor.clone) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.dropout = nn.Dropout(0.5)
        self.unused = nn.Linear(3, 3)
        self.fc = nn.Linear(8, 3)
        self.ending = ending

    def forward(self, x: Any, shift: Tensor | None = None) -> Tensor:
        x = x["x"] if isinstance(x, dict) else x
        x = x if shift is None else x + shift
        return self.ending(self.fc(self.dropout(self.body(x))))


class TwoHeads(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.one, self.two, self.how = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3), how

    def forward(self, x: Tensor) -> Any:
        z = self.body(x).relu()
        if self.how == "training":
            return (self.one(z), self.two(z)) if self.training else self.one(z)
        if self.how == "logits":
            return {"aux": self.two(z), "logits": self.one(z)}
        if self.how == "features too":
            return self.one(z), z
        return self.one(z) + self.two(z) if self.how == "sum" else (self.one(z), self.two(z))


class Shared(nn.Module):
    """One layer, used again and again, and last."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "pair":
            return self.layer(x) - self.layer(-x)
        if self.how == "then another":
            first = self.layer(x)
            self.layer(-x)
            return first
        return self.layer(self.layer(self.layer(x).relu()).relu())


def seeded(made: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return made()


def by_hand(model: nn.Module, layer: str, *args: Any, **kwargs: Any) -> Tensor:
    """What a copy of the model returns whose last layer returns its input."""
    changed = copy.deepcopy(model)
    changed.set_submodule(layer, nn.Identity())
    output = changed(*args, **kwargs)
    return getattr(output, "logits", output).flatten(1)


def check(model: nn.Module, layer: str, *args: Any, **kwargs: Any) -> FeatureExtractor:
    model.eval()
    with FeatureExtractor(model) as extractor:
        output = model(*args, **kwargs)
        assert extractor.layer == layer
        assert torch.equal(extractor.features, by_hand(model, layer, *args, **kwargs))
        assert extractor.width == extractor.features.shape[1]
        assert extractor.linear is model.get_submodule(layer)
        logits = getattr(output, "logits", output)
        same = torch.equal(logits.flatten(1), extractor.linear(extractor.features))
        assert same == extractor.is_output
    assert not hooks(model)
    return extractor


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class TestModelsOfOthers:
    @pytest.mark.parametrize(
        ("name", "layer"),
        [
            ("resnet18", "fc"),
            ("mobilenet_v2", "classifier.1"),
            ("efficientnet_b0", "classifier.1"),
            ("convnext_tiny", "classifier.2"),
            ("vgg11", "classifier.6"),
            ("googlenet", "fc"),
        ],
    )
    @pytest.mark.usefixtures("timm")
    def test_torchvision(self, name: str, layer: str) -> None:
        from torchvision.models import get_model

        more = {"init_weights": False} if name == "googlenet" else {}
        model = seeded(lambda: get_model(name, num_classes=3, **more))
        assert check(model, layer, images(2)).is_output

    @pytest.mark.parametrize(
        ("name", "layer", "options"),
        [
            ("resnet18", "fc", {}),
            ("convnext_atto", "head.fc", {}),
            ("mobilenetv3_small_050", "classifier", {}),
            ("vit_tiny_patch16_224", "head", {"img_size": 64, "depth": 1}),
        ],
    )
    def test_timm(self, timm: Any, name: str, layer: str, options: dict[str, Any]) -> None:
        model = seeded(lambda: timm.create_model(name, num_classes=3, **options))
        assert check(model, layer, images(2)).is_output

    @pytest.mark.parametrize(
        ("name", "layer"),
        [("DistilBert", "classifier"), ("Bert", "classifier"), ("Roberta", "classifier.out_proj")],
    )
    @pytest.mark.usefixtures("timm")
    def test_transformers_of_text(self, name: str, layer: str) -> None:
        model = text_classifier(name)
        extractor = check(model, layer, input_ids=ids(), attention_mask=torch.ones_like(ids()))
        assert extractor.width == 16
        assert extractor.is_output

    @pytest.mark.usefixtures("timm")
    def test_transformers_of_images(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
        config = transformers.ViTConfig(**sizes, image_size=64, patch_size=16, num_labels=3)
        check(transformers.ViTForImageClassification(config), "classifier", pixel_values=images(2))

    @pytest.mark.usefixtures("timm")
    def test_a_head_on_every_token_of_which_one_counts(self) -> None:
        model = text_classifier("GPT2")
        with pytest.raises(InputError, match=r"features: the last linear layer 'score' is applied to every"):
            FeatureExtractor(model).find(ids())

    @pytest.mark.parametrize("name", ["resnet18", "mlp", "small-cnn", "tabular"])
    @pytest.mark.usefixtures("timm")
    def test_those_that_come_with_shoal(self, name: str) -> None:
        shape = (6,) if name in ("mlp", "tabular") else (3, 32, 32)
        model = build_model(name, input_shape=shape, classes=3, seed=0).eval()
        with FeatureExtractor(model) as extractor:
            model(x := images(2, shape))
        assert extractor.layer is not None
        assert extractor.layer.startswith("head")
        assert extractor.width == model.features(x).shape[1]


def text_classifier(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    own = {
        "DistilBert": {"dim": 16, "n_heads": 2, "n_layers": 1, "hidden_dim": 32},
        "GPT2": {"n_embd": 16, "n_head": 2, "n_layer": 1, "bos_token_id": 1, "eos_token_id": 2},
    }
    usual = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    sizes = own.get(name, usual)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=50, num_labels=3, pad_token_id=0, max_position_embeddings=32, **sizes
    )
    return seeded(lambda: getattr(transformers, f"{name}ForSequenceClassification")(config))


class TestOwnModels:
    def test_inputs_of_any_kind(self) -> None:
        model = seeded(Own)
        x = images(5, (4,))
        check(model, "fc", x)
        check(model, "fc", {"x": x})
        check(model, "fc", x, shift=torch.ones(4))
        check(model, "fc", x=x)

    @pytest.mark.parametrize(
        ("ending", "is_output"),
        [
            (lambda t: t.unsqueeze(1).reshape(5, -1), True),
            (lambda t: t.float().squeeze(), True),
            (lambda t: log_softmax(t, 1), False),
            (lambda t: t.relu(), False),
            (lambda t: t * 2, False),
            (lambda t: t[:, :1], False),
        ],
    )
    def test_what_comes_after_the_last_layer(self, ending: Any, is_output: bool) -> None:
        model = seeded(lambda: Own(ending)).eval()
        with FeatureExtractor(model) as extractor:
            model(x := images(5, (4,)))
            assert torch.equal(extractor.features, model.body(x))
        assert (extractor.layer, extractor.is_output) == ("fc", is_output)

    def test_weights_after_it_are_no_layer(self) -> None:
        """A scale, a norm: the last linear layer stays what it is."""
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3))
        assert FeatureExtractor(model).find(images(2, (4,))).layer == "2"

    def test_frozen_weights_and_no_graph(self) -> None:
        model = seeded(Own).requires_grad_(False)
        extractor = FeatureExtractor(model)
        with torch.no_grad():
            model(images(5, (4,)))
        assert extractor.layer == "fc"
        assert not extractor.features.requires_grad
        assert not any(p.requires_grad for p in model.parameters())

    @pytest.mark.parametrize("inplace", [False, True])
    def test_an_activation_after_the_last_layer(self, inplace: bool) -> None:
        """Overwriting the output of a layer does not make it the model's."""
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.ReLU(inplace))
        found = FeatureExtractor(model).find(images(2, (4,)))
        assert (found.layer, found.is_output) == ("2", False)

    @pytest.mark.parametrize("count", [1, 2])
    def test_a_loss_beside_the_logits(self, count: int) -> None:
        class Judged(Own):
            def forward(self, x: Tensor, y: Tensor) -> Any:
                logits = super().forward(x)
                return (cross_entropy(logits, y), logits)[:count]

        extractor = FeatureExtractor(model := Judged().eval())
        _, *logits = model(x := images(2, (4,)), torch.tensor([0, 1]))
        assert extractor.layer == "fc"
        assert torch.equal(extractor.features, model.body(x))
        assert all(torch.equal(model.fc(extractor.features), each) for each in logits)

    def test_a_layer_used_again(self) -> None:
        model = seeded(lambda: Shared("chain"))
        with FeatureExtractor(model) as extractor:
            model(x := images(2, (4,)))
            assert torch.equal(extractor.features, model.layer(model.layer(x).relu()).relu())
        for how in ("pair", "then another"):
            with pytest.raises(InputError, match=r"layer 'layer' is executed 2 times"):
                FeatureExtractor(Shared(how)).find(x)

    @pytest.mark.parametrize("how", ["pair", "sum"])
    def test_two_heads_must_be_told_apart(self, how: str) -> None:
        model = TwoHeads(how)
        with pytest.raises(
            InputError, match=r"several linear layers; .* features='(one|two)' or '(one|two)'"
        ):
            FeatureExtractor(model).find(images(2, (4,)))
        assert FeatureExtractor(model, "two").find(images(2, (4,))).width == 8


class TestNamedLayers:
    def test_the_output_of_a_layer_and_the_input_of_the_last(self) -> None:
        model = seeded(Own).eval()
        x = images(5, (4,))
        for layer, wanted in {
            "body.0": model.body[0](x),
            "body": model.body(x),
            "dropout": model.body(x),
            "fc": model.body(x),
        }.items():
            with FeatureExtractor(model, layer) as extractor:
                model(x)
                assert torch.equal(extractor.features, wanted), layer
            assert extractor.is_output == (layer == "fc")

    def test_a_convolution_as_the_last_layer(self) -> None:
        convolutions = [nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 3, 1), nn.Flatten()]
        model = nn.Sequential(*convolutions)
        x = images(2)
        with pytest.raises(InputError, match=r"Sequential has no linear layer .*features='layer.name'"):
            FeatureExtractor(model)
        with pytest.raises(InputError, match=r"comes from layer '3' \(Conv2d\).*features='layer.name'"):
            FeatureExtractor(nn.Sequential(nn.Linear(64, 64), *convolutions)).find(x)
        for layer in ("1", "2"):
            with FeatureExtractor(nn.Sequential(*convolutions), layer) as extractor:
                extractor.model(x)
                assert torch.equal(extractor.features, model[:2](x).flatten(1))
        assert not extractor.is_output

    def test_every_token_of_an_example(self) -> None:
        model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(28, 3))
        with FeatureExtractor(model, "0") as extractor:
            model(ids(2))
            assert torch.equal(extractor.features, model[0](ids(2)).flatten(1))


class Rounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.round().long().clamp(0, 9)


class TestBadInput:
    @pytest.mark.parametrize(
        ("layer", "message"),
        [
            ("bodi", r"features: Own has no layer 'bodi'\. Did you mean 'body'"),
            ("zzz", r"features: Own has no layer 'zzz' \(such as 'body', 'dropout'"),
            ("", r"features: Own has no layer ''"),
            ("unused", r"features: layer 'unused' is not executed in a forward pass of Own"),
        ],
    )
    def test_layers_that_cannot_be(self, layer: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            FeatureExtractor(Own(), layer).find(images(2, (4,)))

    def test_whole_numbers(self) -> None:
        model = nn.Sequential(Rounded(), nn.Embedding(10, 4), nn.Flatten(), nn.Linear(16, 2))
        with pytest.raises(InputError, match=r"features must be floating-point.*'0' gives torch.int64"):
            FeatureExtractor(model, "0").find(images(2, (4,)))

    def test_several_tensors(self) -> None:
        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm, self.fc = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

            def forward(self, x: Tensor) -> Tensor:
                return self.fc(self.lstm(x)[0][:, -1])

        x = images(2, (5, 4))
        with pytest.raises(InputError, match=r"features must be one tensor, .*layer 'lstm' gives 3"):
            FeatureExtractor(Recurrent(), "lstm").find(x)
        assert FeatureExtractor(Recurrent()).find(x).width == 8

    def test_before_any_pass_and_after_the_end(self) -> None:
        extractor = FeatureExtractor(model := Own())
        with pytest.raises(InputError, match="features: the model was not executed"):
            _ = extractor.features
        model(images(2, (4,)))
        extractor.close()
        with pytest.raises(InputError, match="not executed in a forward pass since the extractor was closed"):
            _ = extractor.features

    def test_a_first_pass_that_fails(self) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        extractor = FeatureExtractor(model)
        with pytest.raises(RuntimeError):
            model(images(2, (5,)))
        model(x := images(2, (4,)))
        assert torch.equal(extractor.features, model[:2](x))
        two = TwoHeads("tuple")
        extractor = FeatureExtractor(two)
        for _ in range(2):
            with pytest.raises(InputError, match="several linear layers"):
                two(x)


class TestHooks:
    def test_the_trial_leaves_no_trace(self) -> None:
        x = images(6, (4,))
        plain, watched = seeded(Own), seeded(Own)
        watched.body.eval()
        plain.body.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            wanted = plain(x)
            torch.manual_seed(3)
            FeatureExtractor(watched)
            extractor = FeatureExtractor(watched)
            output = watched(x)
        assert torch.equal(output, wanted)
        assert torch.equal(watched.fc(extractor.features), output)
        for a, b in zip(plain.state_dict().items(), watched.state_dict().items(), strict=True):
            assert a[0] == b[0]
            assert torch.equal(a[1], b[1])
        assert [m.training for m in watched.modules()] == [m.training for m in plain.modules()]

    def test_gradients_go_through_them(self) -> None:
        model = seeded(Own).eval()
        x = images(6, (4,))
        weight = model.body[0].weight
        (wanted,) = torch.autograd.grad(model.body(x).square().sum(), weight)
        extractor = FeatureExtractor(model)
        model(x)
        assert torch.equal(torch.autograd.grad(extractor.features.square().sum(), weight)[0], wanted)

    def test_copies_record_nothing(self) -> None:
        extractor = FeatureExtractor(model := seeded(Own))
        model(x := images(6, (4,)))
        written = io.BytesIO()
        torch.save(model, written)
        written.seek(0)
        read = torch.load(written, weights_only=False)
        for other in (copy.deepcopy(model), read):
            before = extractor.features
            assert other.eval()(x).shape == (6, 3)
            assert extractor.features is not None
            assert torch.equal(extractor.features, before)
        assert list(model.state_dict()) == list(Own().state_dict())

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
    def test_a_copy_of_an_extractor_goes_with_its_copy_of_the_model(self, copied: Any) -> None:
        extractor = FeatureExtractor(model := seeded(Own).eval())
        model(x := images(6, (4,)))
        other = copied(extractor)
        assert other.model is not model
        other.attach()
        other.model(-x)
        assert torch.equal(other.features, model.body(-x))

    @pytest.mark.parametrize("found_first", [False, True])
    @pytest.mark.parametrize("in_place", [False, True])
    def test_compiled_models(self, in_place: bool, found_first: bool) -> None:
        torch.compiler.reset()
        plain = seeded(Own).eval()
        model: Any = plain
        if in_place:
            model.compile(backend="aot_eager")
        else:
            model = torch.compile(plain, backend="aot_eager", fullgraph=True)
        extractor = FeatureExtractor(model)
        if found_first:
            extractor.find(images(6, (4,)))
        for x in (images(6, (4,)), -images(6, (4,))):
            output = model(x)
            torch.testing.assert_close(extractor.features, plain.body(x))
            torch.testing.assert_close(output, plain.fc(extractor.features))
            loss = extractor.features.square().sum()
            (slope,) = torch.autograd.grad(loss, plain.body[0].weight)
            (wanted,) = torch.autograd.grad(plain.body(x).square().sum(), plain.body[0].weight)
            torch.testing.assert_close(slope, wanted)

    def test_distributed_data_parallel(self) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            inner = seeded(Own)
            model = nn.parallel.DistributedDataParallel(inner, find_unused_parameters=True)
            extractor = FeatureExtractor(model)
            for x in (images(6, (4,)), -images(6, (4,))):
                output = model(x)
                assert torch.equal(output, inner.fc(extractor.features))
                (output.sum() + extractor.features.square().sum()).backward()
            assert extractor.layer == "fc"
        finally:
            torch.distributed.destroy_process_group()

    def test_gradient_checkpointing(self) -> None:
        class Checkpointed(Own):
            def forward(self, x: Any, shift: Tensor | None = None) -> Tensor:
                return self.fc(checkpoint(self.body, x, use_reentrant=False))

        model, plain = seeded(Checkpointed).eval(), seeded(Own).eval()
        x = images(6, (4,))
        slopes = []
        for each in (model, plain):
            for layer in (None, "body.0"):
                with FeatureExtractor(each, layer) as extractor:
                    total = each(x).sum() + extractor.features.square().sum()
                    slopes.append(torch.autograd.grad(total, each.body[0].weight)[0])
        assert torch.equal(slopes[0], slopes[2])
        assert torch.equal(slopes[1], slopes[3])


def data(x: Callable[[int], Tensor], count: int = 12, classes: int = 3) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (x(count) * (1 + n), torch.arange(count) % classes) for n, name in enumerate("ab")}


class Tokens(Dataset[Any]):
    """Examples as a tokenizer gives them."""

    def __init__(self, ids: Tensor, y: Tensor) -> None:
        self.ids, self.y = ids, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return {"input_ids": self.ids[i], "attention_mask": torch.ones_like(self.ids[i])}, self.y[i]


class TestTraining:
    @pytest.mark.parametrize("which", ["torchvision", "timm", "transformers", "own"])
    def test_coral_on_models_as_they_are(self, which: str, timm: Any) -> None:
        if which == "torchvision":
            from torchvision.models import resnet18

            model, train, layer = seeded(lambda: resnet18(num_classes=3)), data(images), "fc"
        elif which == "timm":
            options = {"img_size": 64, "depth": 1, "num_classes": 3}
            model = seeded(lambda: timm.create_model("vit_tiny_patch16_224", **options))
            train, layer = data(images), "head"
        elif which == "transformers":
            model, layer = text_classifier("DistilBert"), "classifier"
            train = {name: Tokens(ids(12), y) for name, (_, y) in data(images).items()}
        else:
            model, train, layer = seeded(Own), data(lambda n: images(n, (4,))), "fc"
        before = [p.clone() for p in model.parameters()]
        run = shoal.fit("coral", model, train, steps=2, batch_size=4, progress=False, device="cpu")
        assert 0 <= run.accuracy("train") <= 1
        assert run.algorithm.extractor.layer == layer
        assert run.algorithm.task.features == model.get_submodule(layer).in_features
        assert not hooks(model)
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    @pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}], ids=str)
    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_the_same_network_as_a_plain_module(self, name: str, options: dict[str, Any]) -> None:
        def network() -> nn.Sequential:
            return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

        parts = seeded(network)
        models = [seeded(network), FeatureModel(parts[:3], parts[3])]
        train = data(lambda n: images(n, (4,)))
        settings = {"start": 0, "weight": 1.0}
        for model in models:
            shoal.fit(
                name, model, train, steps=5, batch_size=4, settings=settings, progress=False, device="cpu",
                **options,
            )  # fmt: skip
        for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
            assert torch.equal(a, b)

    def test_mixed_features(self) -> None:
        def network() -> nn.Sequential:
            return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

        parts = seeded(network)
        models = [seeded(network), FeatureModel(parts[:2], parts[2])]
        train = data(lambda n: images(n, (4,)).double())
        for model in models:
            shoal.fit(
                "mixup", model, train, steps=5, settings={"where": "features", "alpha": 1.0}, progress=False,
                device="cpu",
            )  # fmt: skip
        for a, b in zip(*(m.state_dict().values() for m in models), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
        softmax = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)).double()
        with pytest.raises(InputError, match=r"where='features' needs a model whose output is that of its"):
            shoal.fit("mixup", softmax, train, steps=1, settings={"where": "features"}, progress=False)

    @pytest.mark.parametrize(
        "name", ["coral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dann", "fishr"))]
    )
    def test_compiled(self, name: str) -> None:
        torch.compiler.reset()
        train = data(lambda n: images(n, (4,)))
        models = [seeded(Own), seeded(Own)]
        for model, compiled in zip(models, (False, True), strict=True):
            model.dropout.p = 0.0
            # Not Adam: of the gradient of a bias before BatchNorm, which is zero, it would make noise.
            options = {"optimizer": lambda p: torch.optim.SGD(p, 0.1), "compile": compiled}
            shoal.fit(name, model, train, steps=3, progress=False, device="cpu", **options)
        for a, b in zip(*(m.state_dict().values() for m in models), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["coral", "mmd", "dann", "cdann"])
    def test_a_named_layer(self, name: str) -> None:
        train = data(lambda n: images(n, (4,)))
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        run = shoal.fit(name, model, train, steps=1, settings={"features": "1"}, progress=False)
        assert run.algorithm.task.features == 5
        assert run.algorithm.output_and_features(x := images(2, (4,)))[1].shape == (2, 5)
        run.algorithm.extractor.close()
        parts = FeatureModel(model[:4], model[4])
        run = shoal.fit(name, parts, train, steps=1, settings={"features": "features.1"}, progress=False)
        assert torch.equal(run.algorithm.output_and_features(x)[1], parts.features[:2](x))

    def test_fishr_needs_the_last_layer(self) -> None:
        train = data(lambda n: images(n, (4,)))
        with pytest.raises(InputError, match=r"Fishr.* output is that of a linear layer, and layer 'fc' is"):
            shoal.fit("fishr", Own(lambda t: t.relu()), train, steps=1, progress=False)
        for layer in ("dropout", "body.0"):
            with pytest.raises(InputError, match=r"Fishr's closed form needs"):
                shoal.fit("fishr", Own(), train, steps=1, settings={"features": layer}, progress=False)
        with pytest.raises(InputError, match=r"must name one, got None"):
            build("fishr", Own(), cross_entropy, Task(2, 3))
        assert build("fishr", Own(), cross_entropy, Task(2, 3), features="fc").extractor.linear is not None

    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_a_model_without_a_linear_layer(self, name: str) -> None:
        model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        with pytest.raises(InputError, match=r"features: Sequential has no linear layer .nn.Linear."):
            shoal.fit(name, model, data(images), steps=1, progress=False)

    def test_hooks_go_where_training_fails(self) -> None:
        class Stop(shoal.training.callbacks.Callback):
            def on_start(self, state: Any) -> None:
                raise InputError("stopped")

        model = seeded(Own)
        with pytest.raises(InputError, match="stopped"):
            shoal.fit(
                "coral", model, data(lambda n: images(n, (4,))), steps=1, callbacks=[Stop()], progress=False
            )
        assert not hooks(model)
