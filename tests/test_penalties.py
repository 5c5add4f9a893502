"""Penalties of one mixed batch, against the formulas computed the slow way."""

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, mse_loss

from references.naive import quantile_of
from shoal import penalties
from shoal.errors import InputError
from shoal.penalties import Blocks, DomainDiscriminator, FishrVariances, GroupWeights

DOMAINS, WIDTH, CLASSES = 4, 5, 3
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


# The formulas, one domain, pair and example at a time


def of_domains(values: Tensor, domain: Tensor) -> dict[int, Tensor]:
    """The rows of each domain, as they first appear."""
    found: dict[int, list[Tensor]] = {}
    for value, d in zip(values, domain.tolist(), strict=True):
        found.setdefault(d, []).append(value)
    return {d: torch.stack(rows) for d, rows in found.items()}


def mean(values: Any) -> Any:
    values = list(values)
    return sum(values) / len(values)


def naive_coral(features: Tensor, domain: Tensor) -> Tensor:
    groups = list(of_domains(features, domain).values())
    d = features.shape[1]

    def moments(z: Tensor) -> tuple[list[Tensor], list[list[Tensor]]]:
        middle = [mean(row[a] for row in z) for a in range(d)]
        scale = max(len(z) - 1, 1)
        return middle, [
            [sum((row[a] - middle[a]) * (row[b] - middle[b]) for row in z) / scale for b in range(d)]
            for a in range(d)
        ]

    every = [moments(z) for z in groups]
    found = []
    for i in range(len(every)):
        for j in range(i):
            (m, c), (n, e) = every[i], every[j]
            apart = sum((m[a] - n[a]) ** 2 for a in range(d)) / d
            found.append(apart + sum((c[a][b] - e[a][b]) ** 2 for a in range(d) for b in range(d)) / d**2)
    return mean(found)


def naive_mmd(features: Tensor, domain: Tensor) -> Tensor:
    def kernel(x: Tensor, y: Tensor) -> Any:
        return sum(torch.exp(-(10.0**power) * ((x - y) ** 2).sum()) for power in range(-3, 4))

    def similar(a: Tensor, b: Tensor) -> Tensor:
        return mean(kernel(x, y) for x in a for y in b)

    groups = list(of_domains(features, domain).values())
    pairs = [(groups[i], groups[j]) for i in range(len(groups)) for j in range(i)]
    return mean(similar(a, a) + similar(b, b) - 2 * similar(a, b) for a, b in pairs)


def slope_of_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """∂L/∂logits of one example."""
    return torch.softmax(logits, 0) - torch.eye(len(logits), dtype=logits.dtype)[y]


def naive_irm(logits: Tensor, y: Tensor, domain: Tensor, slope: Any = slope_of_cross_entropy) -> Tensor:
    found = []
    targets = of_domains(y, domain)
    for d, output in of_domains(logits, domain).items():
        target = targets[d]
        each = [(o * slope(o, t)).sum() for o, t in zip(output, target, strict=True)]
        found.append(each[0] ** 2 if len(each) == 1 else mean(each[::2]) * mean(each[1::2]))
    return mean(found)


def naive_vrex(losses: Tensor, domain: Tensor) -> Tensor:
    each = [mean(rows) for rows in of_domains(losses, domain).values()]
    return mean((loss - mean(each)) ** 2 for loss in each)


def naive_quantile(losses: Tensor, domain: Tensor) -> Tensor:
    return quantile_of([mean(rows) for rows in of_domains(losses, domain).values()], 0.9)


class NaiveGroupDRO:
    def __init__(self, domains: int, step_size: float) -> None:
        self.step_size, self.q = step_size, [1 / domains] * domains

    def __call__(self, losses: Tensor, domain: Tensor) -> Tensor:
        each = {d: mean(rows) for d, rows in of_domains(losses, domain).items()}
        for d, loss in each.items():
            self.q[d] *= math.exp(self.step_size * float(loss.detach()))
        self.q = [q / sum(self.q) for q in self.q]
        return sum(self.q[d] * loss for d, loss in each.items()) * len(self.q) / len(each)


class NaiveFishr:
    """An example's gradient of the last layer is the outer product of its slope and its features."""

    def __init__(self, ema: float = 0.0, slope: Any = slope_of_cross_entropy, bias: bool = True) -> None:
        self.ema, self.slope, self.bias = ema, slope, bias
        self.kept: dict[int, Tensor] = {}

    def variances(self, logits: Tensor, features: Tensor, y: Tensor) -> Tensor:
        each = []
        for output, z, target in zip(logits, features, y, strict=True):
            r = self.slope(output, target).reshape(-1)
            parts = [r[c] * z[a] for c in range(len(r)) for a in range(len(z))]
            each.append(torch.stack([*parts, *r] if self.bias else parts))
        return mean((g - mean(each)) ** 2 for g in each)

    def __call__(self, logits: Tensor, features: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        split = [of_domains(t, domain) for t in (logits, features, y)]
        smooth = []
        for d in split[0]:
            found = self.variances(*(part[d] for part in split))
            found = self.ema * self.kept.get(d, torch.zeros_like(found)) + (1 - self.ema) * found
            self.kept[d] = found.detach()
            smooth.append(found / (1 - self.ema))
        return mean(((v - mean(smooth)) ** 2).mean() for v in smooth)


def naive_discriminator(
    discriminator: DomainDiscriminator, features: Tensor, domain: Tensor, y: Tensor | None = None
) -> Tensor:
    each: dict[int, list[Tensor]] = {}
    for n, (z, d) in enumerate(zip(features, domain.tolist(), strict=True)):
        label = 0 if y is None else int(y[n])
        if discriminator.classes is not None:
            z = z + discriminator.classes.weight[label]
        for layer in discriminator.layers:
            z = layer.weight @ z + layer.bias if isinstance(layer, nn.Linear) else torch.relu(z)
        each.setdefault(label, []).append(torch.logsumexp(z, 0) - z[d])
    return mean(mean(losses) for losses in each.values())


def discriminator(classes: int | None = None) -> DomainDiscriminator:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return DomainDiscriminator(WIDTH, DOMAINS, width=8, classes=classes).double()


def naive_with_penalty(judge: DomainDiscriminator, z: Tensor, domain: Tensor, y: Tensor | None) -> Tensor:
    norms = []
    for n in range(len(z)):
        one = z[[n]].requires_grad_()
        own = naive_discriminator(judge, one, domain[[n]], None if y is None else y[[n]])
        (slope,) = torch.autograd.grad(own, one, create_graph=True)
        norms.append((slope**2).sum())
    return naive_discriminator(judge, z, domain, y) + 0.3 * mean(norms)


# One batch


def batch(sizes: tuple[int, ...] = (4, 3, 5), seed: int = 0) -> dict[str, Any]:
    """Features, logits, targets and losses of shuffled examples of several domains."""
    draw = torch.Generator().manual_seed(seed)
    domain = torch.tensor([d for d, n in enumerate(sizes) for _ in range(n)])
    domain = domain[torch.randperm(len(domain), generator=draw)]
    shift = 0.4 * domain[:, None]
    features = torch.randn(len(domain), WIDTH, generator=draw, dtype=torch.float64) * (1 + shift) + shift
    logits = torch.randn(len(domain), CLASSES, generator=draw, dtype=torch.float64) - shift
    y = torch.randint(CLASSES, (len(domain),), generator=draw)
    losses = cross_entropy(logits, y, reduction="none")
    return {"features": features, "logits": logits, "y": y, "losses": losses, "domain": domain}


JUDGE, CLASS_JUDGE = discriminator(), discriminator(CLASSES)
Penalty = Callable[[dict[str, Any]], Tensor]
PENALTIES: dict[str, tuple[Penalty, Penalty]] = {
    "coral": (
        lambda b: penalties.coral(b["features"], b["domain"]),
        lambda b: naive_coral(b["features"], b["domain"]),
    ),
    "mmd": (
        lambda b: penalties.mmd(b["features"], b["domain"]),
        lambda b: naive_mmd(b["features"], b["domain"]),
    ),
    "irm": (
        lambda b: penalties.irm(b["logits"], b["y"], b["domain"]),
        lambda b: naive_irm(b["logits"], b["y"], b["domain"]),
    ),
    "vrex": (
        lambda b: penalties.vrex(b["losses"], b["domain"]),
        lambda b: naive_vrex(b["losses"], b["domain"]),
    ),
    "group_dro": (
        lambda b: penalties.group_dro(b["losses"], b["domain"], GroupWeights(DOMAINS, 0.5)),
        lambda b: NaiveGroupDRO(DOMAINS, 0.5)(b["losses"], b["domain"]),
    ),
    "quantile_risk": (
        lambda b: penalties.quantile_risk(b["losses"], b["domain"], 0.9),
        lambda b: naive_quantile(b["losses"], b["domain"]),
    ),
    "fishr": (
        lambda b: penalties.fishr(b["logits"], b["features"], b["y"], b["domain"]),
        lambda b: NaiveFishr()(b["logits"], b["features"], b["y"], b["domain"]),
    ),
    "smoothed fishr": (
        lambda b: penalties.fishr(
            b["logits"],
            b["features"],
            b["y"],
            b["domain"],
            variances=FishrVariances(DOMAINS, WIDTH, CLASSES, dtype=torch.float64),
        ),
        lambda b: NaiveFishr(0.95)(b["logits"], b["features"], b["y"], b["domain"]),
    ),
    "discriminator": (
        lambda b: JUDGE(b["features"], b["domain"]),
        lambda b: naive_discriminator(JUDGE, b["features"], b["domain"]),
    ),
    "discriminator with classes": (
        lambda b: CLASS_JUDGE(b["features"], b["domain"], b["y"]),
        lambda b: naive_discriminator(CLASS_JUDGE, b["features"], b["domain"], b["y"]),
    ),
}
every_penalty = pytest.mark.parametrize("name", PENALTIES)
BY_NUMBER = ("group_dro", "smoothed fishr", "discriminator", "discriminator with classes")


def take(b: dict[str, Any], order: Any) -> dict[str, Any]:
    return {name: values[order] for name, values in b.items()}


def same(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "irm" else pytest.mark.slow) for name in PENALTIES]
)
def test_in_a_compiled_step(name: str) -> None:
    """Second derivatives in a penalty do not keep a step from being compiled."""
    ours, _ = PENALTIES[name]
    b, weight = batch(), torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)

    def step(scale: Tensor) -> Tensor:
        z = b["features"] * scale
        logits = z[:, :CLASSES] + b["logits"]
        losses = cross_entropy(logits, b["y"], reduction="none")
        return ours(b | {"features": z, "logits": logits, "losses": losses}) + losses.mean()

    compiled: Any = torch.compile(step, backend="aot_eager")
    found, expected = (torch.autograd.grad(run(weight), weight)[0] for run in (compiled, step))
    same(found, expected)


@every_penalty
class TestOneBatch:
    @pytest.mark.parametrize("sizes", [(4, 3, 5), (1, 4), (1, 1, 1, 1), (6, 0, 2, 1)])
    def test_against_the_formula(self, name: str, sizes: tuple[int, ...]) -> None:
        """Domains with one example, and one with none."""
        ours, reference = PENALTIES[name]
        found = ours(batch(sizes))
        assert found.shape == ()
        same(found, torch.as_tensor(reference(batch(sizes))))
        with torch.no_grad():
            silent = ours(batch(sizes))
        assert not silent.requires_grad
        same(silent, found.detach())

    @hypothesis.settings(max_examples=15, deadline=None)
    @hypothesis.given(st.permutations(range(12)))
    def test_the_order_of_the_examples_does_not_count(self, name: str, order: list[int]) -> None:
        ours, _ = PENALTIES[name]
        b = batch()
        if name == "irm":  # but for the order within a domain
            domain = b["domain"].tolist()
            rows = {d: iter([n for n in range(12) if domain[n] == d]) for d in set(domain)}
            order = [next(rows[domain[n]]) for n in order]
        same(ours(take(b, order)), ours(b))

    def test_blocks_are_the_same_and_read_no_value(self, name: str) -> None:
        """So that a CUDA graph can capture them: a tensor without values is enough."""
        ours, _ = PENALTIES[name]
        ordered = take(batch(), batch()["domain"].argsort(stable=True))
        same(ours(ordered | {"domain": Blocks([4, 3, 5])}), ours(batch()))
        turned = take(ordered, [*range(7, 12), *range(7)])
        same(ours(turned | {"domain": Blocks([5, 4, 3], torch.tensor([2, 0, 1]))}), ours(batch()))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            b = {n: mode.from_tensor(v) for n, v in batch().items()}
            with pytest.raises(RuntimeError, match="numpy"):
                ours(b)
            ids = mode.from_tensor(torch.tensor([2, 0, 1]))
            assert ours(b | {"domain": Blocks([4, 3, 5], ids)}).shape == ()

    def test_gradients(self, name: str) -> None:
        b = batch((3, 2, 1))
        ours, reference = PENALTIES[name]
        inputs = [n for n in ("features", "logits", "losses") if n in USES[name]]

        def function(*tensors: Tensor) -> Tensor:
            if name == "group_dro":  # whose weights are constants
                return penalties.group_dro(tensors[0], b["domain"], GroupWeights(DOMAINS).eval())
            return ours(b | dict(zip(inputs, tensors, strict=True)))

        given = [b[n].clone().requires_grad_() for n in inputs]
        if "discriminator" in name:  # whose gradient is reversed on purpose
            found = torch.autograd.grad(function(*given), given)
            expected = torch.autograd.grad(reference(b | dict(zip(inputs, given, strict=True))), given)
            torch.testing.assert_close(found, tuple(-g for g in expected), **CLOSE)
        else:
            assert torch.autograd.gradcheck(function, given)

    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
    def test_half_precision_is_taken_to_float32(self, name: str, half: torch.dtype) -> None:
        ours, _ = PENALTIES[name]
        b = {n: v.to(half) if v.is_floating_point() else v for n, v in batch().items()}
        full = {n: v.float() if v.dtype == half else v for n, v in b.items()}
        expected = ours(full)
        with torch.autocast("cpu", torch.bfloat16):
            assert (full["features"] @ full["features"].T).dtype == torch.bfloat16
            for found in (ours(b), ours(full)):
                torch.testing.assert_close(found, expected)
                assert found.dtype == (torch.float64 if "discriminator" in name else torch.float32)
            assert torch.is_autocast_enabled("cpu")

    @needs_cuda
    def test_on_cuda(self, name: str) -> None:
        if name in BY_NUMBER:
            return
        ours, _ = PENALTIES[name]
        b = {n: v.cuda() for n, v in batch().items()}
        same(ours(b).cpu(), ours(batch()))
        b |= {"domain": Blocks([4, 3, 5])}
        expected = ours(b)
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            found = ours(b)
        graph.replay()
        same(found, expected)


USES = {
    "coral": ("features",),
    "mmd": ("features",),
    "irm": ("logits", "y"),
    "vrex": ("losses",),
    "group_dro": ("losses",),
    "quantile_risk": ("losses",),
    "fishr": ("features", "logits", "y"),
    "smoothed fishr": ("features", "logits", "y"),
    "discriminator": ("features",),
    "discriminator with classes": ("features", "y"),
}


@every_penalty
def test_bad_input_is_named(name: str) -> None:
    ours, _ = PENALTIES[name]
    b = batch()
    domain, what = b["domain"], next(n for n in USES[name] if n != "y")
    wrong: list[dict[str, Any]] = [
        *({"domain": d} for d in (domain[1:], domain[:, None], domain.float(), Blocks([5, 6]))),
        *({what: values} for values in (b[what][1:], b[what].mean())),
        *([{"domain": domain + DOMAINS}, {"domain": -domain}] if name in BY_NUMBER else []),
        {"domain": domain[:0], **{n: v[:0] for n, v in b.items() if n != "domain"}},
    ]
    for each in wrong:
        with pytest.raises(InputError, match=r"^(domain|losses) "):
            ours(b | each)
    one = b | {"domain": torch.full((12,), 2)}
    if name in ("irm", "group_dro", "quantile_risk", "discriminator", "discriminator with classes"):
        assert ours(one).isfinite()
    else:
        with pytest.raises(InputError, match="domain is 2 in this whole batch of 12"):
            ours(one)


def few_numbers(b: dict[str, Any]) -> Tensor:
    few = FishrVariances(3, 4, 1)
    return penalties.fishr(b["logits"], b["features"], b["y"], b["domain"], variances=few)


def test_other_bad_input_is_named() -> None:
    b = batch()
    y, domain = b["y"], b["domain"]
    calls: list[tuple[str, Callable[[], Any]]] = [
        (r'losses .* \(12, 2\).*reduction="none"', lambda: penalties.vrex(torch.ones(12, 2), domain)),
        ('leave out reduction="none"', lambda: penalties.irm(b["logits"], y, domain, loss=none)),
        ("quantile.*got 1", lambda: penalties.quantile_risk(b["losses"], domain, 1.0)),
        ("step_size.*got -1", lambda: GroupWeights(3, -1)),
        ("ema.*got 1", lambda: FishrVariances(3, 2, 2, ema=1)),
        ("alpha.*got 0", lambda: penalties.mixup(b["features"], y, domain, alpha=0)),
        (r"shares.*\(3,\)", lambda: penalties.mixup(b["features"], y, domain, shares=torch.ones(2))),
        ("token ids", lambda: penalties.mixup({"ids": y}, y, domain)),
        ("y, the classes", lambda: CLASS_JUDGE(b["features"], domain)),
        ("y, the classes", lambda: JUDGE(b["features"], domain, y)),
        (
            "5 numbers per domain.*18",
            lambda: penalties.fishr(b["logits"], b["features"], y, domain, variances=few),
        ),
        ("same shape", lambda: penalties.miro(b["features"], b["logits"], torch.ones(1))),
    ]
    none, few = lambda o, t: cross_entropy(o, t, reduction="none"), FishrVariances(3, 4, 1)
    for message, call in calls:
        with pytest.raises(InputError, match=message):
            call()


class TestCoral:
    @pytest.mark.parametrize("sizes", [(4, 3), (1, 5, 2), (1, 1)])
    def test_more_features_than_examples(self, sizes: tuple[int, ...]) -> None:
        b = batch(sizes)
        features = torch.cat([b["features"], b["features"].sin(), b["features"] ** 2 + 3], 1)
        features.requires_grad_()
        found, expected = (f(features, b["domain"]) for f in (penalties.coral, naive_coral))
        same(found, expected)
        same(*(torch.autograd.grad(value, features)[0] for value in (found, expected)))
        assert found.item() > 0.1

    @pytest.mark.parametrize("offset", [0.0, 100.0])
    def test_in_float32(self, offset: float) -> None:
        b = batch()
        features = torch.cat([b["features"] + n for n in range(4)], 1) + offset
        expected = penalties.coral(features, b["domain"])
        found = penalties.coral(features.float(), b["domain"])
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


class TestLosses:
    @pytest.mark.parametrize("outputs", [None, 2])
    def test_of_a_regression(self, outputs: int | None) -> None:
        b = batch()
        output = b["logits"][:, 0] if outputs is None else b["logits"][:, :outputs]
        y = b["features"][:, 1] if outputs is None else b["features"][:, :outputs]

        def slope(output: Tensor, y: Tensor) -> Tensor:
            return 2 * (output - y) / max(output.numel(), 1)

        same(penalties.irm(output, y, b["domain"], loss=mse_loss), naive_irm(output, y, b["domain"], slope))
        same(
            penalties.fishr(output, b["features"], y, b["domain"], loss=mse_loss),
            NaiveFishr(slope=slope)(output, b["features"], y, b["domain"]),
        )


class TestState:
    def test_weights_that_are_evaluated_stay(self) -> None:
        b, weights = batch(), GroupWeights(3, 0.5)
        penalties.group_dro(b["losses"], b["domain"], weights)
        kept = weights.log_weights.clone()
        weights.eval()
        first = penalties.group_dro(b["losses"], b["domain"], weights)
        same(penalties.group_dro(b["losses"], b["domain"], weights), first)
        same(weights.log_weights, kept)
        weights.train()
        penalties.group_dro(b["losses"], b["domain"], weights)
        assert (weights.log_weights - kept).abs().max() > 1e-3

    def test_variances_that_are_evaluated_stay(self) -> None:
        b = batch()
        state = FishrVariances(3, WIDTH, CLASSES, ema=0.5, dtype=torch.float64)
        found = [
            penalties.fishr(b["logits"], b["features"], b["y"], b["domain"], variances=state) for _ in "ab"
        ]
        assert found[0].item() != pytest.approx(found[1].item())
        kept = state.eval().smoothed.clone()
        penalties.fishr(b["logits"], b["features"], b["y"], b["domain"], variances=state)
        same(state.smoothed, kept)

    def test_fishr_in_float32_with_large_features(self) -> None:
        """The variance is a difference of squares."""
        b = batch()
        tensors = [b["logits"], b["features"] + 1000]
        expected = penalties.fishr(*tensors, b["y"], b["domain"])
        found = penalties.fishr(*(t.float() for t in tensors), b["y"], b["domain"])
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)

    def test_a_layer_without_biases(self) -> None:
        b = batch()
        tensors = [b[n] for n in ("logits", "features", "y", "domain")]
        expected = NaiveFishr(bias=False)(*tensors)
        same(penalties.fishr(*tensors, bias=False), expected)
        state = FishrVariances(3, WIDTH, CLASSES, bias=False, ema=0.0, dtype=torch.float64)
        same(penalties.fishr(*tensors, variances=state), expected)
        assert abs((expected - penalties.fishr(*tensors)).item()) > 1e-6


class TestDiscriminator:
    def test_one_optimizer_trains_both(self) -> None:
        """The discriminator down its loss, the features up it, λ times as much."""
        b = batch()
        judge = discriminator()
        judge.weight = 0.3
        z = b["features"].clone().requires_grad_()
        judge(z, b["domain"]).backward()
        own = torch.autograd.grad(judge.loss(z, b["domain"]), [z, *judge.parameters()])
        same(z.grad, -0.3 * own[0])
        for p, g in zip(judge.parameters(), own[1:], strict=True):
            same(p.grad, g)
        same(judge(z, b["domain"]), judge.loss(z, b["domain"]))

    def test_the_gradient_penalty(self) -> None:
        b = batch()
        for judge, y in ((discriminator(), None), (discriminator(CLASSES), b["y"])):
            features = b["features"].detach()
            found = judge.loss(features, b["domain"], y, gradient_penalty=0.3)
            same(found, naive_with_penalty(judge, features, b["domain"], y))
            assert found > naive_discriminator(judge, features, b["domain"], y) + 1e-3
            with torch.no_grad():
                assert not judge.loss(features, b["domain"], y, gradient_penalty=0.3).requires_grad


class TestMixup:
    def test_unequal_domains(self) -> None:
        x = torch.tensor([[1.0], [10.0], [2.0], [100.0], [20.0], [30.0]])
        y, domain = torch.arange(6), torch.tensor([5, -3, 5, 7, -3, -3])
        share = torch.tensor([0.5, 0.9, 0.1])
        mixed, own, other, shares = penalties.mixup(x, y, domain, shares=share)
        assert mixed[:, 0].tolist() == pytest.approx([5.5, 11.0, 0.9 * 10 + 0.1 * 100, 0.1 * 100 + 0.9 * 1])
        assert own.tolist() == [0, 2, 1, 3]
        assert other.tolist() == [1, 4, 3, 0]
        assert shares.tolist() == pytest.approx([0.5, 0.5, 0.9, 0.1])

    def test_shares_are_drawn(self) -> None:
        b = batch()
        torch.manual_seed(0)
        drawn = [penalties.mixup(b["features"], b["y"], b["domain"], alpha=0.2)[3] for _ in range(200)]
        every = torch.cat([d.unique() for d in drawn])
        assert len(every) > 550  # one for each pair of domains
        assert float(every.mean()) == pytest.approx(0.5, abs=0.06)
        assert float(every.var()) == pytest.approx(1 / (4 * 1.4), rel=0.1)


def test_mixed_uint8_images_are_rounded_and_stay_uint8() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (6, 3, 4, 4), generator=draw, dtype=torch.uint8)
    domain, y = torch.tensor([0, 0, 0, 1, 1, 1]), torch.arange(6)
    shares = torch.tensor([0.3, 0.9])
    mixed, *_, share = penalties.mixup(x, y, domain, shares=shares)
    expected = penalties.mixup(x.double(), y, domain, shares=shares)[0]
    assert mixed.dtype == torch.uint8
    assert share.dtype == torch.float32
    assert (mixed.double() - expected).abs().max() <= 0.5 + 1e-4
