"""Penalties of one mixed batch. Their formulas are tested with the algorithms, as they call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy

from references import naive
from shoal import penalties
from shoal.errors import InputError
from shoal.penalties import Blocks, DomainDiscriminator, FishrVariances, GroupWeights

DOMAINS, WIDTH, CLASSES = 4, 5, 3
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
Batch = dict[str, Any]


def batch(sizes: tuple[int, ...] = (4, 3, 5)) -> Batch:
    """Features, logits, targets and losses of shuffled examples of several domains."""
    draw = torch.Generator().manual_seed(0)
    domain = torch.tensor([d for d, n in enumerate(sizes) for _ in range(n)])
    domain = domain[torch.randperm(len(domain), generator=draw)]
    shift = 0.4 * domain[:, None]
    features = torch.randn(len(domain), WIDTH, generator=draw, dtype=torch.float64) * (1 + shift) + shift
    logits = torch.randn(len(domain), CLASSES, generator=draw, dtype=torch.float64) - shift
    y = torch.randint(CLASSES, (len(domain),), generator=draw)
    losses = cross_entropy(logits, y, reduction="none")
    return {"features": features, "logits": logits, "y": y, "losses": losses, "domain": domain}


def take(b: Batch, order: Any) -> Batch:
    return {name: values[order] for name, values in b.items()}


def groups(name: str, b: Batch) -> list[Tensor]:
    """The rows of each domain, as they first appear."""
    return [b[name][b["domain"] == d] for d in dict.fromkeys(b["domain"].tolist())]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, **CLOSE)


def fishr(b: Batch, **options: Any) -> Tensor:
    return penalties.fishr(b["logits"], b["features"], b["y"], b["domain"], **options)


PENALTIES: dict[str, tuple[str, Callable[[Batch], Tensor]]] = {
    "coral": ("features", lambda b: penalties.coral(b["features"], b["domain"])),
    "mmd": ("features", lambda b: penalties.mmd(b["features"], b["domain"])),
    "irm": ("logits", lambda b: penalties.irm(b["logits"], b["y"], b["domain"])),
    "vrex": ("losses", lambda b: penalties.vrex(b["losses"], b["domain"])),
    "group_dro": (
        "losses",
        lambda b: penalties.group_dro(b["losses"], b["domain"], GroupWeights(DOMAINS, 0.5)),
    ),
    "quantile_risk": ("losses", lambda b: penalties.quantile_risk(b["losses"], b["domain"], 0.9)),
    "fishr": ("features", fishr),
    "smoothed fishr": (
        "features",
        lambda b: fishr(b, variances=FishrVariances(DOMAINS, WIDTH, CLASSES, dtype=torch.float64)),
    ),
}
every_penalty = pytest.mark.parametrize("name", PENALTIES)
BY_NUMBER = ("group_dro", "smoothed fishr")


@every_penalty
class TestOneBatch:
    def test_the_order_of_the_examples_does_not_count(self, name: str) -> None:
        _, ours = PENALTIES[name]
        b, order = batch(), [7, 0, 11, 3, 5, 1, 10, 2, 9, 8, 4, 6]
        if name == "irm":  # but for the order within a domain
            domain = b["domain"].tolist()
            rows = {d: iter([n for n in range(12) if domain[n] == d]) for d in set(domain)}
            order = [next(rows[domain[n]]) for n in order]
        same(ours(take(b, order)), ours(b))

    def test_blocks_are_the_same_and_read_no_value(self, name: str) -> None:
        """So that a CUDA graph can capture them: a tensor without values is enough."""
        _, ours = PENALTIES[name]
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

    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
    def test_half_precision_is_taken_to_float32_and_no_grad_is_kept(self, name: str, half: Any) -> None:
        _, ours = PENALTIES[name]
        b = {n: v.to(half) if v.is_floating_point() else v for n, v in batch().items()}
        full = {n: v.float() if v.dtype == half else v for n, v in b.items()}
        expected = ours(full).detach()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            for found in (ours(b), ours(full)):
                torch.testing.assert_close(found, expected)
                assert found.dtype == torch.float32
                assert not found.requires_grad
            assert torch.is_autocast_enabled("cpu")

    def test_bad_input_is_named(self, name: str) -> None:
        what, ours = PENALTIES[name]
        b = batch()
        domain = b["domain"]
        wrong: list[Batch] = [
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
NO_MEAN: Any = lambda o, t: cross_entropy(o, t, reduction="none")  # noqa: E731
WRONG: list[tuple[str, Callable[[], Any]]] = [
    (r'losses .*\(12, 2\).*reduction="none"', lambda: penalties.vrex(torch.ones(12, 2), DOMAIN)),
    ('leave out reduction="none"', lambda: penalties.irm(B["logits"], Y, DOMAIN, loss=NO_MEAN)),
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


@pytest.mark.parametrize("sizes", [(1, 4), (1, 1, 1, 1), (6, 0, 2, 1)])
def test_domains_with_one_example_and_one_with_none(sizes: tuple[int, ...]) -> None:
    b = batch(sizes)
    same(penalties.coral(b["features"], b["domain"]), naive.coral(groups("features", b)))
    same(penalties.mmd(b["features"], b["domain"]), naive.mmd(groups("features", b)))
    losses = [naive.mean(list(each)) for each in groups("losses", b)]
    same(penalties.vrex(b["losses"], b["domain"]), naive.variance_of_losses(losses))
    same(penalties.quantile_risk(b["losses"], b["domain"], 0.9), naive.quantile_of(losses, 0.9))
    found = penalties.irm(b["logits"], b["y"], b["domain"])
    same(found, naive.irm(groups("logits", b), groups("y", b), cross_entropy).detach())


def test_fishr_far_from_zero_in_float32() -> None:
    b = batch()
    far = b | {"features": b["features"] + 1000}
    near = {n: v.float() if v.is_floating_point() else v for n, v in far.items()}
    torch.testing.assert_close(fishr(near).double(), fishr(far), rtol=1e-4, atol=0)


def test_mixup_of_unequal_domains() -> None:
    x = torch.tensor([[1.0], [10.0], [2.0], [100.0], [20.0], [30.0]])
    y, domain = torch.arange(6), torch.tensor([5, -3, 5, 7, -3, -3])
    mixed, own, other, shares = penalties.mixup(x, y, domain, shares=torch.tensor([0.5, 0.9, 0.1]))
    assert mixed[:, 0].tolist() == pytest.approx([5.5, 11.0, 0.9 * 10 + 0.1 * 100, 0.1 * 100 + 0.9 * 1])
    assert own.tolist() == [0, 2, 1, 3]
    assert other.tolist() == [1, 4, 3, 0]
    assert shares.tolist() == pytest.approx([0.5, 0.5, 0.9, 0.1])
