"""Fish as an optimizer: wrap any other optimizer and train on batches from different domains in turn."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import InputError
from shoal.settings import Count, Fraction, checked

SLOW = "slow"
IN_GROUPS = ("inner_steps", "meta_lr", "inner_state", "position", "untrained")


def _in_groups(name: str) -> Any:
    """An attribute that is kept in ``param_groups``, which everything that saves optimizers saves."""

    def get(optimizer: Optimizer) -> Any:
        return optimizer.param_groups[0][name]

    def put(optimizer: Optimizer, value: Any) -> None:
        for group in optimizer.param_groups:
            group[name] = value

    return property(get, put)


class Fish(Optimizer):
    """Take S steps with ``inner`` from θ to θ̃, then interpolate: θ ← θ + ε(θ̃ − θ).

    Each ``step()`` is one step of this inner loop, so the training loop does not change; every S-th step also
    interpolates. With S batches from S *different domains* this is Fish, which maximises the inner product
    between the domains' gradients without second derivatives (Shi et al., Gradient Matching for Domain
    Generalization, 2021). The update is that of Lookahead (Zhang et al., 2019); what differs is the order of
    the batches. ::

        loader = DataLoader(data, batch_sampler=DomainBatchSampler(domain_of_each_example, 32, 4))
        optimizer = Fish(torch.optim.AdamW(model.parameters(), 5e-5), inner_steps=4, meta_lr=0.5)

    Args:
        inner: the optimizer that takes the steps, such as ``torch.optim.AdamW``. Both share their state and
            ``param_groups``, so learning-rate schedulers and ``GradScaler`` work on either.
        inner_steps: S, the number of steps of an inner loop: the ``domains_per_step`` of the sampler.
        meta_lr: ε in (0, 1], as written; the code of the authors divides its setting by S first.
        inner_state: ``"carry"`` keeps the inner optimizer's moments from one inner loop to the next;
            ``"reset"`` starts every inner loop with fresh ones.

    Within an inner loop the model holds θ̃; in the block ``with optimizer.slow_weights():`` it holds θ, the
    slow weights. The extra memory is one copy of the trained weights. A step that ``GradScaler`` skips still
    counts, so that S batches remain one inner loop. Buffers, such as BatchNorm statistics, are not changed.

    θ is in ``state[p]["slow"]``; the three settings and ``position`` are in ``param_groups``. So anything
    that shards or saves optimizers (FSDP2, ``torch.distributed.checkpoint``, ``ZeroRedundancyOptimizer``)
    also shards and saves the inner loop, and loading a state sets the three settings as it sets ``lr``.
    """

    inner: Optimizer
    inner_steps: int = _in_groups("inner_steps")
    meta_lr: float = _in_groups("meta_lr")
    inner_state: str = _in_groups("inner_state")
    position: int = _in_groups("position")
    """Steps taken in the current inner loop; 0 right after an interpolation."""
    _untrained: bool = _in_groups("untrained")
    """The inner optimizer's state is of a step that ``torch.distributed.checkpoint`` made it take."""
    _fresh: defaultdict[Tensor, Any]
    """Its state when it was made: empty for most optimizers, not for Adagrad."""
    _showing_slow: bool

    # GradScaler then calls step() also when it found an infinite gradient, and sets `found_inf` before.
    _step_supports_amp_scaling = True

    @checked
    def __init__(
        self,
        inner: Optimizer,
        inner_steps: Count,
        meta_lr: Fraction = 0.5,
        inner_state: Literal["carry", "reset"] = "carry",
    ) -> None:
        if isinstance(inner, Fish):
            raise InputError("must not be a Fish itself.", "inner")
        # Optimizer.__init__ would make a second set of groups and state; __setstate__ sets up hooks alone.
        super().__setstate__({"inner": inner, "_fresh": _clone(inner.state), "_showing_slow": False})
        self.inner_steps, self.meta_lr, self.inner_state = inner_steps, meta_lr, inner_state
        self.position, self._untrained = 0, False
        if inner.state:
            self._note_slow()

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
        """Add parameters; within an inner loop, they join at the next one.

        Args:
            param_group: parameters and options.
        """
        self.inner.add_param_group(param_group)
        self.param_groups[-1].update({k: self.param_groups[0][k] for k in IN_GROUPS})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        self._refuse_slow("step()")
        if closure is None and self._is_only_to_make_state():
            self.inner.step()
            self._untrained = True
            self._note_slow()
            return None
        if self.position == 0:
            if self._untrained or self.inner_state == "reset":
                fresh = _clone(self._fresh)
                for p, value in self._slow().items():
                    fresh[p][SLOW] = value
                self.inner.state = fresh
            self._untrained = False
            self._note_slow()
        loss = self._inner_step(closure)
        self.position += 1
        if self.position >= self.inner_steps:
            pairs = self._slow()
            slow, fast = _shards(pairs.values()), _shards(pairs)
            if slow:  # foreach functions refuse empty lists, which is what a wholly frozen model has
                torch._foreach_lerp_(slow, fast, self.meta_lr)
                torch._foreach_copy_(fast, slow)
            self.position = 0
        return loss

    def _inner_step(self, closure: Callable[[], float] | None) -> float | None:
        """A step of the inner optimizer, which does not see θ: many make their state where it is empty."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            for grad in _shards(p.grad for p in self._params() if p.grad is not None):
                grad.mul_(_whole(scale).to(grad.device).reciprocal())
        if found_inf is not None and bool(_whole(found_inf)):
            return None
        slow = self._slow()
        for p in slow:
            del self.inner.state[p][SLOW]
            if not self.inner.state[p]:
                del self.inner.state[p]
        try:
            # Not every optimizer turns gradients on for the closure, which here are off.
            return self.inner.step() if closure is None else self.inner.step(torch.enable_grad()(closure))
        finally:
            for p, value in slow.items():
                self.inner.state[p][SLOW] = value

    def _is_only_to_make_state(self) -> bool:
        """Whether this is no step of the training but one of ``torch.distributed.checkpoint``.

        It has an optimizer that never took a step take one, to see what state it will have, with rates and
        gradients of zero. Rates alone are zero in the first step of many a warm-up.
        """
        if self.position or self.inner.state or hasattr(self, "found_inf"):
            return False
        if any(group.get("lr", 0) != 0 for group in self.param_groups):
            return False
        grads = [p.grad for p in self._params() if p.requires_grad]
        # A process must not decide by its own shard.
        return bool(grads) and all(g is not None and not _whole(g.abs().sum()) for g in grads)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _slow(self) -> dict[Tensor, Tensor]:
        state = self.inner.state
        return {p: state[p][SLOW] for p in self._params() if SLOW in state.get(p, ())}

    def _note_slow(self) -> None:
        """The parameters become θ, in the same memory from one inner loop to the next."""
        state = self.inner.state
        for p in self._params():
            old = state.get(p, {}).get(SLOW)
            if not p.requires_grad:
                state.get(p, {}).pop(SLOW, None)
            elif old is None or (old.shape, old.dtype, old.device) != (p.shape, p.dtype, p.device):
                state[p][SLOW] = torch.empty_like(p, requires_grad=False)
        if slow := self._slow():
            with torch.no_grad():
                torch._foreach_copy_(_shards(slow.values()), _shards(slow))

    @contextmanager
    def slow_weights(self, model: nn.Module | None = None) -> Iterator[None]:
        """Within the block, set the model to the slow weights θ, to evaluate or save it within an inner loop.

        Args:
            model: required only if the parameters are sharded: FSDP must gather them again.
        """
        if model is None and any(hasattr(p, "to_local") for p in self._params()):
            raise InputError("the parameters are sharded; call slow_weights(model), with the sharded model.")
        slow = self._slow()
        if self.position == 0 or self._showing_slow or not slow:  # the model holds θ already
            yield
            return
        params = _shards(slow)
        fast = [p.detach().clone() for p in params]
        with torch.no_grad():
            torch._foreach_copy_(params, _shards(slow.values()))
        _reshard(model)
        self._showing_slow = True
        try:
            yield
        finally:
            self._showing_slow = False
            with torch.no_grad():
                torch._foreach_copy_(params, fast)
            _reshard(model)

    def _refuse_slow(self, method: str) -> None:
        if self._showing_slow:
            raise RuntimeError(
                f"{method} was called inside slow_weights(); leave the block first, which restores the inner "
                "weights."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer and of the inner loop, with θ under ``"slow"``."""
        self._refuse_slow("state_dict()")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and continue within the inner loop, with the saved settings.

        A plain state of the inner optimizer starts a new inner loop, with the settings of this optimizer.

        Args:
            state_dict: state, from :meth:`state_dict`.
        """
        groups, entries = state_dict["param_groups"], state_dict["state"]
        slow = {n: e[SLOW] for n, e in entries.items() if isinstance(e, dict) and SLOW in e}
        if groups[0].get("position") and not slow and any(p.requires_grad for p in self._params()):
            raise InputError(
                f"the state is {groups[0]['position']} steps into an inner loop of "
                f"{groups[0]['inner_steps']}, and the slow weights, state[p][{SLOW!r}], are missing; load a "
                "complete state."
            )
        settings = {k: self.param_groups[0][k] for k in IN_GROUPS} | {"position": 0, "untrained": False}
        # Adam looks for its moments in every entry that there is.
        bare = {n: {k: v for k, v in e.items() if k != SLOW} if n in slow else e for n, e in entries.items()}
        bare = {n: e for n, e in bare.items() if n not in slow or e}
        self.inner.load_state_dict({**state_dict, "state": bare})
        for group in self.param_groups:
            group.update({**settings, **{k: v for k, v in groups[0].items() if k in settings}})
        for n, p in zip((n for group in groups for n in group["params"]), self._params(), strict=True):
            if n in slow:
                self.inner.state[p][SLOW] = slow[n].to(device=p.device, dtype=p.dtype, copy=True)
        if self.position == 0 and self.inner.state:
            self._note_slow()

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler hangs its own `step` on the instance; it is its to restore, as with any optimizer.
        temporary = ("step", "grad_scale", "found_inf")
        return {k: v for k, v in vars(self).items() if k not in temporary and not k.startswith("_optimizer_")}

    def __repr__(self) -> str:
        return f"Fish({self.inner!r}, {self.inner_steps}, {self.meta_lr}, {self.inner_state!r})"


def _shards(tensors: Iterable[Any]) -> list[Tensor]:
    """This process's shards of ``DTensor`` objects, whose memory they share; other tensors themselves."""
    return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


def _whole(tensor: Tensor) -> Tensor:
    """A ``DTensor`` put together from all processes; any other tensor itself."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _reshard(model: nn.Module | None) -> None:
    """Drop the whole parameters that FSDP2 has gathered from shards."""
    if model is None or "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _clone(state: defaultdict[Tensor, Any]) -> defaultdict[Tensor, Any]:
    """A copy of an optimizer's state: new tensors under the same parameters."""

    def clone(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else deepcopy(value)

    return defaultdict(dict, {p: {k: clone(v) for k, v in entry.items()} for p, entry in state.items()})
