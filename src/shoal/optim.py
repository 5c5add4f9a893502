"""Fish as an optimizer: wrap any other optimizer and train on batches from different domains in turn."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
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


SLOW = "slow"
_PLAIN = {Tensor, nn.Parameter}
WALK = ("inner_steps", "meta_lr", "inner_state", "position", "spoilt", "untrained")


def _in_groups(name: str) -> Any:
    """An attribute of an optimizer that is kept in its ``param_groups``, as all that saves them expects."""

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
        inner: the optimizer that takes the steps, such as ``torch.optim.AdamW``. Both share their
            ``param_groups``, so learning-rate schedulers, gradient clipping and ``GradScaler`` work on
            either.
        inner_steps: S, the number of steps of an inner loop: the ``domains_per_step`` of the sampler.
        meta_lr: ε in (0, 1], applied exactly as written. The code of the authors divides its setting by S
            first; to repeat one of its runs, divide here.
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
    _saved_spoilt: bool = _in_groups("spoilt")  # what `_spoilt` was when the state was saved or loaded
    _untrained: bool = _in_groups("untrained")  # the inner optimizer has a state and took no step
    _slow: dict[Tensor, Tensor]
    _shared: bool
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
        if isinstance(inner, Fish):
            raise InputError(
                f"inner of Fish must not be a {type(inner).__name__}: pass the wrapped optimizer."
            )
        # Optimizer.__init__ would make a second set of groups and state; __setstate__ sets up hooks alone.
        super().__setstate__(
            {
                "inner": inner,
                "_slow": {},
                "_shared": False,
                "_showing_slow": False,
                "_spoilt": None,
                # A few optimizers (Adagrad) fill their state when they are made; most start empty.
                "_fresh": clone_state(inner.state),
            }
        )
        self.inner_steps, self.meta_lr, self.inner_state = inner_steps, meta_lr, inner_state
        self.position, self._saved_spoilt, self._untrained = 0, False, False
        if inner.state:
            self._leave_from_here()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The inner optimizer's, with θ under ``"slow"``; whoever writes to it writes to both."""
        if not self._shared:
            for p, slow in self._slow.items():
                self.inner.state.setdefault(p, {})[SLOW] = slow
            self._shared = True
        return self.inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.inner.state, self._shared = state, True

    def _unshare(self) -> None:
        """Takes θ out of the inner optimizer's state. Many make theirs where they find ``state[p]`` empty."""
        if self._shared:
            for p in self._params():
                entry = self.inner.state.get(p, {})
                if SLOW in entry:
                    self._slow[p] = entry.pop(SLOW)
                    if not entry:
                        del self.inner.state[p]
            self._shared = False

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; within an inner loop, they join at the next one.

        Args:
            param_group: parameters and options.
        """
        self.inner.add_param_group(param_group)
        self.param_groups[-1].update(self._walk())

    def _walk(self) -> dict[str, Any]:
        return {k: self.param_groups[0][k] for k in WALK}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self._showing_slow:
            raise RuntimeError(
                "step() was called inside slow_weights(); leave the block first, which restores the inner "
                "weights."
            )
        self._unshare()
        if closure is None and self._is_only_to_make_state():
            self._leave_from_here()
            self.inner.step()
            _copy(self._walking(), self._left())
            self._untrained = True
            return None
        if self.position == 0:
            self._start_walk()
        loss = self._inner_step(closure)
        self.position += 1
        if self.position >= self.inner_steps:
            if self._spoilt is not None:
                copy_where(self._spoilt, self._walking(), self._left())
            self.blend()
            self.restart()
        return loss

    def _is_only_to_make_state(self) -> bool:
        """Whether this is no step of the training but one of ``torch.distributed.checkpoint``.

        It has an optimizer that never took a step take one, to see what state it will have, with rates and
        gradients of zero. Rates alone are zero in the first step of many a warm-up.
        """
        if self.position or self._slow or self.inner.state or hasattr(self, "found_inf"):
            return False
        if any(group.get("lr", 0) != 0 for group in self.param_groups):
            return False
        grads = [p.grad for p in self._params() if p.requires_grad]
        # A process must not decide by its own shard.
        return bool(grads) and all(g is not None and not _whole(g.abs().sum()) for g in grads)

    def restart(self) -> None:
        """Start a new inner loop from the current parameters with the next step."""
        self.position = 0
        self._spoilt = None

    def spoil(self, bad: Tensor) -> None:
        """Discard the current inner loop where ``bad`` is true: at its end the parameters are θ again.

        The host does not wait for the device.

        Args:
            bad: tensor with one boolean on the device of the parameters.
        """
        self._spoilt = bad if self._spoilt is None else self._spoilt | bad

    @torch.no_grad()
    def forget(self, where: Tensor) -> None:
        """Reset the moments of the inner optimizer to zero where ``where`` is true.

        The operation is in place and on the device, so that a CUDA graph can contain it. Call it between
        inner loops, with optimizers whose moments start at zero.

        Args:
            where: tensor with one boolean.
        """
        self._unshare()
        by_device: dict[torch.device, list[Tensor]] = {}
        for entry in self.inner.state.values():
            for value in _shards(v for v in entry.values() if isinstance(v, Tensor)):
                by_device.setdefault(value.device, []).append(value)
        for device, values in by_device.items():
            torch._foreach_mul_(values, (~where).to(device, values[0].dtype))

    def _start_walk(self) -> None:
        if self.inner_state == "reset" or self._untrained:
            self.inner.state = clone_state(self._fresh)
        self._untrained = False
        self._leave_from_here()

    def _leave_from_here(self) -> None:
        """Notes the parameters as θ, in the same memory from walk to walk."""
        params, old = [p for p in self._params() if p.requires_grad], self._slow
        if len(params) != len(old) or any(
            p is not q or p.shape != s.shape or p.dtype != s.dtype or p.device != s.device
            for p, (q, s) in zip(params, old.items(), strict=True)
        ):
            self._slow = {p: torch.empty_like(p, requires_grad=False) for p in params}
        with torch.no_grad():
            _copy(self._left(), self._walking())

    def _walking(self) -> list[Tensor]:
        """The parameters of the walk; where they are sharded, this process's shards."""
        return _shards(self._slow)

    def _left(self) -> list[Tensor]:
        """θ, likewise."""
        return _shards(self._slow.values())

    def blend(self) -> None:
        """Interpolate: write θ + ε(θ̃ − θ) to the parameters. Called by ``step``; to be overridden, not
        called."""
        walking, left = self._walking(), self._left()
        if left:
            torch._foreach_lerp_(left, walking, self.meta_lr)
        _copy(walking, left)

    def _inner_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """A step of the inner optimizer, minding what GradScaler leaves to the optimizer."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None:
            for grad in _shards(p.grad for p in self._params() if p.grad is not None):
                grad.mul_(_whole(scale).to(grad.device).reciprocal())
        if found is None:
            # Not every optimizer turns gradients on for the closure, which here are off.
            return self.inner.step() if closure is None else self.inner.step(torch.enable_grad()(closure))
        step_unless(self.inner, _whole(found))
        return None

    @contextmanager
    def slow_weights(self, model: nn.Module | None = None) -> Iterator[None]:
        """Within the block, set the model to the slow weights θ, to evaluate or save it within an inner loop.

        Args:
            model: required only if the parameters are sharded: FSDP must gather them again.
        """
        if model is None and any(hasattr(p, "to_local") for p in self._params()):
            raise InputError("the parameters are sharded; call slow_weights(model), with the sharded model.")
        if self.position == 0 or self._showing_slow:  # the model holds θ already
            yield
            return
        self._unshare()
        with torch.no_grad():
            walking = self._walking()
            fast = [p.clone() for p in walking]
            _copy(walking, self._left())
        _reshard(model)
        self._showing_slow = True
        try:
            yield
        finally:
            self._showing_slow = False
            with torch.no_grad():
                _copy(walking, fast)
            _reshard(model)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer and of the inner loop, with θ under ``"slow"``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._showing_slow:
            raise RuntimeError(
                "state_dict() was called inside slow_weights(); leave the block first, which restores the "
                "inner weights."
            )
        self._unshare()
        self._saved_spoilt = self._spoilt is not None and bool(self._spoilt)
        found = self.inner.state_dict()
        state = dict(found["state"])
        numbers = (n for group in found["param_groups"] for n in group["params"])
        for n, p in zip(numbers, self._params(), strict=True):
            if p in self._slow:  # the entry is the optimizer's own and stays as it is
                state[n] = {**state.get(n, {}), SLOW: self._slow[p]}
        found = {**found, "state": state}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and continue within the inner loop, with the saved settings.

        A plain state of the inner optimizer starts a new inner loop, with the settings of this optimizer.

        Args:
            state_dict: state, from :meth:`state_dict`.
        """
        given = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        groups, entries = given["param_groups"], given["state"]
        slow = {n: e[SLOW] for n, e in entries.items() if isinstance(e, dict) and SLOW in e}
        walk = {**self._walk(), "position": 0, "spoilt": False, "untrained": False}
        walk |= {k: v for k, v in groups[0].items() if k in walk}
        if "fish" in given:
            raise InputError(
                "this state of Fish was saved by Shoal 0.2 or earlier, in another format; "
                "load it with that version, or train again."
            )
        if walk["position"] and not slow and any(p.requires_grad for p in self._params()):
            raise InputError(
                f"the state is {walk['position']} steps into an inner loop of {walk['inner_steps']}, and the "
                f"slow weights, state[p][{SLOW!r}], are missing; load a complete state."
            )
        # Adam looks for its moments in every entry that there is.
        bare = {n: {k: v for k, v in e.items() if k != SLOW} if n in slow else e for n, e in entries.items()}
        self._unshare()
        self.inner.load_state_dict({**given, "state": {n: e for n, e in bare.items() if n not in slow or e}})
        for group in self.param_groups:
            group.update(walk)
        numbers = [n for group in groups for n in group["params"]]
        self._slow = {
            p: slow[n].to(device=p.device, dtype=p.dtype, copy=True)
            for n, p in zip(numbers, self._params(), strict=True)
            if n in slow
        }
        if self.position == 0 and self.inner.state:
            self._leave_from_here()
        spoilt = self._saved_spoilt and self._slow
        self._spoilt = torch.tensor(True, device=next(iter(self._slow)).device) if spoilt else None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        self._unshare()
        # A scheduler hangs its own `step` on the instance; it is its to restore, as with any optimizer.
        left = ("step", "grad_scale", "found_inf")
        return {k: v for k, v in self.__dict__.items() if k not in left and not k.startswith("_optimizer_")}

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


def _shards(tensors: Iterable[Any]) -> list[Tensor]:
    """This process's shards of ``DTensor`` objects, whose memory they share; other tensors themselves."""
    found = list(tensors)
    if _PLAIN.issuperset(map(type, found)):
        return found
    return [t.to_local() if hasattr(t, "to_local") else t for t in found]


def _whole(tensor: Tensor) -> Tensor:
    """A ``DTensor`` put together from all processes; any other tensor itself."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _reshard(model: nn.Module | None) -> None:
    """Drops the whole parameters that FSDP2 has gathered from shards."""
    if model is None or "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clone_state(state: defaultdict[Tensor, Any]) -> defaultdict[Tensor, Any]:
    """A copy of an optimizer's state: new tensors under the same parameters."""

    def clone(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else deepcopy(value)

    return defaultdict(dict, {p: {k: clone(v) for k, v in entry.items()} for p, entry in state.items()})
