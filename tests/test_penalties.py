"""Penalties of one mixed batch, against the formulas computed the slow way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, mse_loss

from references import naive
from references.naive import mean
from shoal import penalties
from shoal.errors import InputError
from shoal.penalties import Blocks, DomainDiscriminator, FishrVariances, GroupWeights

DOMAINS, WIDTH, CLASSES = 4, 5, 3
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def same(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, **CLOSE)


# The formulas, one domain and example at a time


def by_domain(values: Tensor, domain: Tensor) -> dict[int, Tensor]:
    """The rows of each domain, as they first appear."""
    return {d: values[domain == d] for d in dict.fromkeys(domain.tolist())}


def losses_of(b: dict[str, Any]) -> dict[int, Tensor]:
    return {d: mean(list(rows)) for d, rows in by_domain(b["losses"], b["domain"]).items()}


def naive_fishr(b: dict[str, Any], loss: Any = cross_entropy, ema: float = 0.0, bias: bool = True) -> Tensor:
    """An example's gradient of a linear layer is the outer product of its logits' slope and its features."""

    def variances(logits: Tensor, features: Tensor, y: Tensor) -> Tensor:
        each = []
        for n in range(len(y)):
            output = logits[[n]] if logits.requires_grad else logits[[n]].requires_grad_()
            r = torch.autograd.grad(loss(output, y[[n]]), output, create_graph=True)[0].flatten()
            products = [r[c] * features[n, a] for c in range(len(r)) for a in range(features.shape[1])]
            each.append(torch.stack([*products, *r] if bias else products))
        return mean([(g - mean(each)) ** 2 for g in each])

    parts = [by_domain(b[name], b["domain"]) for name in ("logits", "features", "y")]
    with torch.enable_grad():
        return naive.SmoothedVariances(ema)({d: variances(*(part[d] for part in parts)) for d in parts[0]})


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


def fishr(b: dict[str, Any], **options: Any) -> Tensor:
    return penalties.fishr(b["logits"], b["features"], b["y"], b["domain"], **options)


def smoothed_fishr(b: dict[str, Any]) -> Tensor:
    return fishr(b, variances=FishrVariances(DOMAINS, WIDTH, CLASSES, dtype=torch.float64))


def groups(name: str, b: dict[str, Any]) -> list[Tensor]:
    return list(by_domain(b[name], b["domain"]).values())


Penalty = Callable[[dict[str, Any]], Tensor]
PENALTIES: dict[str, tuple[tuple[str, ...], Penalty, Penalty]] = {
    "coral": (
        ("features",),
        lambda b: penalties.coral(b["features"], b["domain"]),
        lambda b: naive.coral(groups("features", b)),
    ),
    "mmd": (
        ("features",),
        lambda b: penalties.mmd(b["features"], b["domain"]),
        lambda b: naive.mmd(groups("features", b)),
    ),
    "irm": (
        ("logits",),
        lambda b: penalties.irm(b["logits"], b["y"], b["domain"]),
        lambda b: naive.irm(groups("logits", b), groups("y", b), cross_entropy),
    ),
    "vrex": (
        ("losses",),
        lambda b: penalties.vrex(b["losses"], b["domain"]),
        lambda b: naive.variance_of_losses(list(losses_of(b).values())),
    ),
    "group_dro": (
        ("losses",),
        lambda b: penalties.group_dro(b["losses"], b["domain"], GroupWeights(DOMAINS, 0.5)),
        lambda b: naive.RobustLoss(DOMAINS, 0.5)(losses_of(b)),
    ),
    "quantile_risk": (
        ("losses",),
        lambda b: penalties.quantile_risk(b["losses"], b["domain"], 0.9),
        lambda b: naive.quantile_of(list(losses_of(b).values()), 0.9),
    ),
    "fishr": (("features", "logits"), fishr, naive_fishr),
    "smoothed fishr": (("features", "logits"), smoothed_fishr, lambda b: naive_fishr(b, ema=0.95)),
}
every_penalty = pytest.mark.parametrize("name", PENALTIES)
BY_NUMBER = ("group_dro", "smoothed fishr")


def take(b: dict[str, Any], order: Any) -> dict[str, Any]:
    return {name: values[order] for name, values in b.items()}


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_in_a_compiled_step() -> None:
    """Second derivatives in a penalty do not keep a step from being compiled."""
    b, weight = batch(), torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)

    def step(scale: Tensor) -> Tensor:
        logits = (b["features"] * scale)[:, :CLASSES] + b["logits"]
        return penalties.irm(logits, b["y"], b["domain"]) + cross_entropy(logits, b["y"])

    compiled: Any = torch.compile(step, backend="aot_eager")
    found, expected = (torch.autograd.grad(run(weight), weight)[0] for run in (compiled, step))
    same(found, expected)


@every_penalty
class TestOneBatch:
    @pytest.mark.parametrize("sizes", [(4, 3, 5), (1, 4), (1, 1, 1, 1), (6, 0, 2, 1)])
    def test_against_the_formula(self, name: str, sizes: tuple[int, ...]) -> None:
        """Domains with one example, and one with none."""
        _, ours, reference = PENALTIES[name]
        found = ours(batch(sizes))
        assert found.shape == ()
        same(found.detach(), torch.as_tensor(reference(batch(sizes))).detach())
        with torch.no_grad():
            silent = ours(batch(sizes))
        assert not silent.requires_grad
        same(silent, found.detach())

    def test_the_order_of_the_examples_does_not_count(self, name: str) -> None:
        _, ours, _ = PENALTIES[name]
        b, order = batch(), [7, 0, 11, 3, 5, 1, 10, 2, 9, 8, 4, 6]
        if name == "irm":  # but for the order within a domain
            domain = b["domain"].tolist()
            rows = {d: iter([n for n in range(12) if domain[n] == d]) for d in set(domain)}
            order = [next(rows[domain[n]]) for n in order]
        same(ours(take(b, order)), ours(b))

    def test_blocks_are_the_same_and_read_no_value(self, name: str) -> None:
        """So that a CUDA graph can capture them: a tensor without values is enough."""
        _, ours, _ = PENALTIES[name]
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
        inputs, ours, _ = PENALTIES[name]

        def function(*tensors: Tensor) -> Tensor:
            if name == "group_dro":  # whose weights are constants
                return penalties.group_dro(tensors[0], b["domain"], GroupWeights(DOMAINS).eval())
            return ours(b | dict(zip(inputs, tensors, strict=True)))

        values = [b[n].clone().requires_grad_() for n in inputs]
        assert torch.autograd.gradcheck(function, values)

    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
    def test_half_precision_is_taken_to_float32(self, name: str, half: torch.dtype) -> None:
        _, ours, _ = PENALTIES[name]
        b = {n: v.to(half) if v.is_floating_point() else v for n, v in batch().items()}
        full = {n: v.float() if v.dtype == half else v for n, v in b.items()}
        expected = ours(full)
        with torch.autocast("cpu", torch.bfloat16):
            for found in (ours(b), ours(full)):
                torch.testing.assert_close(found, expected)
                assert found.dtype == torch.float32
            assert torch.is_autocast_enabled("cpu")

    def test_bad_input_is_named(self, name: str) -> None:
        (what, *_), ours, _ = PENALTIES[name]
        b = batch()
        domain = b["domain"]
        wrong: list[dict[str, Any]] = [
            *({"domain": d} for d in (domain[1:], domain[:, None], Blocks([5, 6]))),
            *({what: values} for values in (b[what][1:], b[what].mean())),
            *([{"domain": domain + DOMAINS}, {"domain": -domain}] if name in BY_NUMBER else []),
            {"domain": domain[:0], **{n: v[:0] for n, v in b.items() if n != "domain"}},
        ]
        for each in wrong:
            with pytest.raises(InputError, match=r"^(domain|losses) "):
                ours(b | each)
        one = b | {"domain": torch.full((12,), 2)}
        if name in ("irm", "group_dro", "quantile_risk"):
            assert ours(one).isfinite()
        else:
            with pytest.raises(InputError, match="domain is 2 in this whole batch of 12"):
                ours(one)


B = batch()
Y, DOMAIN = B["y"], B["domain"]
WRONG: list[tuple[str, Callable[[], Any]]] = [
    (r'losses .*\(12, 2\).*reduction="none"', lambda: penalties.vrex(torch.ones(12, 2), DOMAIN)),
    (
        'leave out reduction="none"',
        lambda: penalties.irm(
            B["logits"], Y, DOMAIN, loss=lambda o, t: cross_entropy(o, t, reduction="none")
        ),
    ),
    ("quantile.*got 1", lambda: penalties.quantile_risk(B["losses"], DOMAIN, 1.0)),
    ("alpha.*got 0", lambda: penalties.mixup(B["features"], Y, DOMAIN, alpha=0)),
    ("token ids", lambda: penalties.mixup(Y, Y, DOMAIN)),
    ("y must be passed if", lambda: DomainDiscriminator(WIDTH, DOMAINS)(B["features"], DOMAIN, Y)),
    ("y must be passed if", lambda: DomainDiscriminator(WIDTH, DOMAINS, classes=3)(B["features"], DOMAIN)),
]


@pytest.mark.parametrize(("message", "call"), WRONG)
def test_other_bad_input_is_named(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_coral_with_more_features_than_examples() -> None:
    b = batch((1, 5, 2))
    features = torch.cat([b["features"], b["features"].sin(), b["features"] ** 2 + 3], 1).requires_grad_()
    found, expected = (
        PENALTIES["coral"][1](b | {"features": features}),
        naive.coral(groups("features", b | {"features": features})),
    )
    same(found, expected)
    same(*(torch.autograd.grad(value, features)[0] for value in (found, expected)))
    assert found.item() > 0.1


def test_differences_of_squares_in_float32() -> None:
    """Far from zero, coral and fishr are computed in float64 inside."""
    b = batch()
    wide = torch.cat([b["features"] + n for n in range(4)], 1) + 100
    found, expected = (penalties.coral(z, b["domain"]) for z in (wide.float(), wide))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    far = b | {"features": b["features"] + 1000}
    near = {n: v.float() if v.is_floating_point() else v for n, v in far.items()}
    torch.testing.assert_close(fishr(near).double(), fishr(far), rtol=1e-4, atol=0)


@pytest.mark.parametrize("columns", [0, slice(2)])
def test_losses_of_a_regression(columns: Any) -> None:
    b = batch()
    b |= {"logits": b["logits"][:, columns], "y": b["features"][:, columns]}
    found = penalties.irm(b["logits"], b["y"], b["domain"], loss=mse_loss)
    same(found, naive.irm(groups("logits", b), groups("y", b), mse_loss))
    same(fishr(b, loss=mse_loss), naive_fishr(b, mse_loss))


def test_state_changes_in_training_mode_only() -> None:
    b, weights = batch(), GroupWeights(3, 0.5)
    variances = FishrVariances(3, WIDTH, CLASSES, ema=0.5, dtype=torch.float64)
    calls: list[tuple[nn.Module, Callable[[], Tensor]]] = [
        (weights, lambda: penalties.group_dro(b["losses"], b["domain"], weights)),
        (variances, lambda: fishr(b, variances=variances)),
    ]
    for state, call in calls:
        first = call()
        (kept,) = [buffer.clone() for buffer in state.eval().buffers()]
        assert call().item() == pytest.approx(call().item())
        same(next(state.buffers()), kept)
        state.train()
        assert call().item() != pytest.approx(first.item())
        assert (next(state.buffers()) - kept).abs().max() > 1e-3


def test_a_layer_without_biases() -> None:
    b = batch()
    expected = naive_fishr(b, bias=False)
    same(fishr(b, bias=False), expected)
    state = FishrVariances(3, WIDTH, CLASSES, bias=False, ema=0.0, dtype=torch.float64)
    same(fishr(b, variances=state), expected)
    assert abs((expected - fishr(b)).item()) > 1e-6


@pytest.mark.parametrize("classes", [None, CLASSES])
def test_the_discriminator_behind_the_reversal(classes: int | None) -> None:
    """It descends its loss and the features ascend it, λ times as much; DANN's tests have the formula."""
    torch.manual_seed(4)
    judge = DomainDiscriminator(WIDTH, DOMAINS, width=8, classes=classes, weight=0.3).double()
    b = batch()
    z, y = b["features"].clone().requires_grad_(), None if classes is None else b["y"]
    reversed_, *own = torch.autograd.grad(judge(z, b["domain"], y), [z, *judge.parameters()])
    there, *expected = torch.autograd.grad(judge.loss(z, b["domain"], y), [z, *judge.parameters()])
    torch.testing.assert_close([reversed_, *own], [-0.3 * there, *expected], **CLOSE)
    order = b["domain"].argsort(stable=True)
    blocks = Blocks([4, 3, 5], torch.tensor([0, 1, 2]))
    same(judge(z[order], blocks, None if y is None else y[order]), judge(z, b["domain"], y))


def test_mixup_of_unequal_domains() -> None:
    x = torch.tensor([[1.0], [10.0], [2.0], [100.0], [20.0], [30.0]])
    y, domain = torch.arange(6), torch.tensor([5, -3, 5, 7, -3, -3])
    mixed, own, other, shares = penalties.mixup(x, y, domain, shares=torch.tensor([0.5, 0.9, 0.1]))
    assert mixed[:, 0].tolist() == pytest.approx([5.5, 11.0, 0.9 * 10 + 0.1 * 100, 0.1 * 100 + 0.9 * 1])
    assert own.tolist() == [0, 2, 1, 3]
    assert other.tolist() == [1, 4, 3, 0]
    assert shares.tolist() == pytest.approx([0.5, 0.5, 0.9, 0.1])


def test_shares_of_mixup_are_from_a_beta_distribution() -> None:
    torch.manual_seed(0)
    drawn = [penalties.mixup(B["features"], Y, DOMAIN, alpha=0.2)[3] for _ in range(200)]
    every = torch.cat([d.unique() for d in drawn])
    assert len(every) > 550  # one for each pair of domains
    assert float(every.mean()) == pytest.approx(0.5, abs=0.06)
    assert float(every.var()) == pytest.approx(1 / (4 * 1.4), rel=0.1)


def test_mixed_uint8_images_are_rounded_and_stay_uint8() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (6, 3, 4, 4), generator=draw, dtype=torch.uint8)
    domain, y, shares = torch.tensor([0, 0, 0, 1, 1, 1]), torch.arange(6), torch.tensor([0.3, 0.9])
    mixed, *_, share = penalties.mixup(x, y, domain, shares=shares)
    expected = penalties.mixup(x.double(), y, domain, shares=shares)[0]
    assert mixed.dtype == torch.uint8
    assert share.dtype == torch.float32
    assert (mixed.double() - expected).abs().max() <= 0.5 + 1e-4
