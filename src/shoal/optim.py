"""Fish as an optimizer: wrap any other one and feed it batches from different domains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import InputError
from shoal.settings import Range, checked


@runtime_checkable
class Walks(Protocol):
    """An optimizer whose steps belong together, such as :class:`Fish`: one that is skipped still counts."""

    inner: Optimizer
    """What takes the steps."""

    def spoil(self, bad: Tensor) -> None:
        """Where ``bad`` holds, all steps that belong together are given up in the end."""

    def restart(self) -> None:
        """The next step begins anew from where the parameters are."""


class Fish(Optimizer):
    """Walks with ``inner`` for S steps from θ to θ̃, then steps back: θ ← θ + ε(θ̃ − θ).

    Each ``step()`` is one inner step, so the training loop stays what it was; every S-th blends. Fed with S
    batches from S *different domains* this is Fish, which maximises the inner product between the domains'
    gradients without second derivatives (Shi et al., Gradient Matching for Domain Generalization, 2021). The
    update itself is that of Lookahead (Zhang et al., 2019); the order of the batches makes the difference. ::

        loader = DataLoader(data, batch_sampler=DomainBatchSampler(domain_of_each_example, 32, 4))
        optimizer = Fish(torch.optim.AdamW(model.parameters(), 5e-5), inner_steps=4, meta_lr=0.5)

    Args:
        inner: the optimizer that walks. Its ``param_groups`` are this one's, so learning-rate schedulers,
            gradient clipping and ``GradScaler`` work on either.
        inner_steps: S, the number of steps of a walk (the number of domains visited).
        meta_lr: ε in (0, 1], applied exactly as written. The authors' program divides its setting by S first;
            to repeat one of its runs, divide here.
        inner_state: ``"carry"`` keeps the inner optimizer's moments from walk to walk; ``"reset"`` starts
            every walk with fresh ones.

    Between two blends the model holds θ̃; ``with optimizer.slow_weights():`` shows θ. No model is copied: the
    extra memory is one copy of the trained weights. A step that ``GradScaler`` skips still counts in the
    walk, so that S batches remain one walk. Buffers (BatchNorm statistics) are not an optimizer's to touch:
    they keep the values of the walk.
    """

    inner: Optimizer
    inner_steps: int
    meta_lr: float
    inner_state: str
    position: int
    """Steps taken in the current walk; 0 right after a blend."""
    _walking: list[Tensor]
    _slow: list[Tensor]
    _showing_slow: bool
    _spoilt: Tensor | None
    _fresh: defaultdict[Tensor, Any]

    # GradScaler then calls step() also when it found an infinite gradient, and tells so in `found_inf`.
    _step_supports_amp_scaling = True

    @checked
    def __init__(
        self,
        inner: Optimizer,
        inner_steps: Annotated[int, Range(1)],
        meta_lr: Annotated[float, Range(above=0, most=1)] = 0.5,
        inner_state: Literal["carry", "reset"] = "carry",
    ) -> None:
        # Optimizer.__init__ would make a second set of groups and state; __setstate__ sets up hooks alone.
        super().__setstate__(
            {
                "inner": inner,
                "inner_steps": inner_steps,
                "meta_lr": meta_lr,
                "inner_state": inner_state,
                "position": 0,
                "_walking": [],
                "_slow": [],
                "_showing_slow": False,
                "_spoilt": None,
                # A few optimizers (Adagrad) fill their state when they are made; most start empty.
                "_fresh": clone_state(inner.state),
            }
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        return self.inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters added within a walk join at the next one."""
        self.inner.add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self._showing_slow:
            raise RuntimeError("step() inside slow_weights(): leave the block first, it puts θ̃ back.")
        if self.position == 0:
            self._start_walk()
        loss = self._inner_step(closure)
        self.position += 1
        if self.position >= self.inner_steps:
            if self._spoilt is not None:
                copy_where(self._spoilt, self._walking, self._slow)
            self.blend()
            self.position = 0
            self._spoilt = None
        return loss

    def restart(self) -> None:
        """The next step begins a new walk from where the parameters are."""
        self.position = 0
        self._spoilt = None

    def spoil(self, bad: Tensor) -> None:
        """Where ``bad``, a single truth value on the parameters' device, holds, this walk will lead nowhere.

        At its end the parameters are θ again. Nothing waits for the device to know.
        """
        self._spoilt = bad if self._spoilt is None else self._spoilt | bad

    def _start_walk(self) -> None:
        if self.inner_state == "reset":
            self.inner.state = clone_state(self._fresh)
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if len(params) != len(self._walking) or any(
            a is not b or a.shape != s.shape or a.dtype != s.dtype or a.device != s.device
            for a, b, s in zip(params, self._walking, self._slow, strict=True)
        ):
            self._walking = params
            self._slow = [torch.empty_like(p) for p in params]
        _copy(self._slow, self._walking)

    def blend(self) -> None:
        """θ + ε(θ̃ − θ) into the parameters. Called by ``step``; to be overridden, not called."""
        if self._walking:
            torch._foreach_lerp_(self._slow, self._walking, self.meta_lr)
        _copy(self._walking, self._slow)

    def _inner_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """A step of the inner optimizer, minding what GradScaler leaves to the optimizer."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            for grad in grads:
                grad.mul_(scale.to(grad.device).reciprocal())
        if found is None:
            # Not every optimizer turns gradients on for the closure, which here are off.
            return self.inner.step() if closure is None else self.inner.step(torch.enable_grad()(closure))
        step_unless(self.inner, found)
        return None

    @contextmanager
    def slow_weights(self) -> Iterator[None]:
        """Within the block the model holds θ, the weights at the last blend (for evaluating in mid-walk)."""
        if self.position == 0 or self._showing_slow:  # the model holds θ already
            yield
            return
        fast = [p.detach().clone() for p in self._walking]
        with torch.no_grad():
            _copy(self._walking, self._slow)
        self._showing_slow = True
        try:
            yield
        finally:
            self._showing_slow = False
            with torch.no_grad():
                _copy(self._walking, fast)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with the walk under ``"fish"``: where it stands and from where it left."""
        if self._showing_slow:
            raise RuntimeError("state_dict() inside slow_weights(): leave the block first, the walk is at θ̃.")
        every = [p for group in self.param_groups for p in group["params"]]
        numbers = {id(p): n for n, p in enumerate(every)}
        slow = {}
        if self.position:
            pairs = zip(self._walking, self._slow, strict=True)
            slow = {numbers[id(p)]: s.clone() for p, s in pairs if id(p) in numbers}
        walk = {
            "position": self.position,
            "inner_steps": self.inner_steps,
            "meta_lr": self.meta_lr,
            "inner_state": self.inner_state,
            "slow": slow,
            "spoilt": self._spoilt is not None and bool(self._spoilt),
        }
        return {**self.inner.state_dict(), "fish": walk}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on in mid-walk. A plain state of the inner optimizer is taken too: a walk then begins."""
        walk = state_dict.get("fish", {"position": 0, "slow": {}})
        steps = walk.get("inner_steps", self.inner_steps)
        if walk["position"] and steps != self.inner_steps:
            raise InputError(
                f"the saved walk is {walk['position']} steps into {steps}, this optimizer's are "
                f"inner_steps={self.inner_steps} long; make it with inner_steps={steps}."
            )
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != "fish"})
        self.meta_lr = walk.get("meta_lr", self.meta_lr)
        self.inner_state = walk.get("inner_state", self.inner_state)
        self.position = walk["position"]
        every = [p for group in self.param_groups for p in group["params"]]
        self._walking = [every[int(n)] for n in walk["slow"]]
        self._slow = [s.to(p, copy=True) for s, p in zip(walk["slow"].values(), self._walking, strict=True)]
        spoilt = walk.get("spoilt", False) and self._walking
        self._spoilt = torch.tensor(True, device=self._walking[0].device) if spoilt else None

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler hangs its own `step` on the instance; it is its to restore, as with any optimizer.
        return {k: v for k, v in self.__dict__.items() if k not in ("step", "grad_scale", "found_inf")}

    def __repr__(self) -> str:
        settings = f"inner_steps={self.inner_steps}, meta_lr={self.meta_lr}, inner_state={self.inner_state!r}"
        return f"Fish({self.inner!r}, {settings})"


def inner_of(optimizer: Optimizer) -> Optimizer:
    """What takes the steps."""
    return optimizer.inner if isinstance(optimizer, Walks) else optimizer


def can_skip(optimizer: Optimizer) -> bool:
    """Whether its steps can be skipped on the device, without waiting to know whether they are to be."""
    return getattr(inner_of(optimizer), "_step_supports_amp_scaling", False)


def step_unless(optimizer: Optimizer, bad: Tensor) -> None:
    """A step, except where ``bad``, a single truth value on the parameters' device, holds.

    Fused optimizers are told on the device; for others this waits for it, which on the CPU costs nothing.
    """
    if isinstance(optimizer, Walks) or (bad.is_cuda and can_skip(optimizer)):
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(bad):
        optimizer.step()


def copy_where(condition: Tensor, to: list[Tensor], values: list[Tensor]) -> None:
    """Copies everything or nothing; on CUDA without waiting to know which."""
    if condition.is_cuda:
        for a, b in zip(to, values, strict=True):
            torch.where(condition, b, a, out=a)
    elif bool(condition):
        _copy(to, values)


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:  # foreach functions refuse empty lists, which is what a wholly frozen model has
        torch._foreach_copy_(to, values)


def clone_state(state: defaultdict[Tensor, Any]) -> defaultdict[Tensor, Any]:
    """A copy of an optimizer's state: new tensors under the same parameters."""

    def clone(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else deepcopy(value)

    return defaultdict(dict, {p: {k: clone(v) for k, v in entry.items()} for p, entry in state.items()})
