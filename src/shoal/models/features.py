"""The features of any model: the input of its last linear layer, or the output of a named layer."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.data.batch import tensors_in
from shoal.errors import InputError, shown
from shoal.replay import preserve_state
from shoal.settings import checked
from shoal.tensors import map_nest

SHOWN = 8
"""The number of layers that a message lists."""
RESHAPES = {
    *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "Slice"),
    *("Alias", "Clone", "ToCopy"),
}
"""Autograd operations that change no value. Whether they drop any is checked by size."""


class FeatureExtractor:
    """Records the features of any ``nn.Module`` in each forward pass.

    By default the features z are the input of the last linear layer, W z + b. Operations without weights,
    such as a reshape or a softmax, may follow it. The layer is found in the first forward pass, by tracing
    the output of an additional trial pass back through the autograd graph. Features are flattened to (B, d):
    the output of a layer with tokens (B, T, d) becomes T·d numbers per example, and feature maps (B, c, h, w)
    become c·h·w, so name the pooling layer after them instead. ::

        extractor = FeatureExtractor(model)
        logits = model(x)
        loss = cross_entropy(logits, y) + shoal.penalties.coral(extractor.features, domain)

    The extractor uses forward hooks. It stays attached to the model until :meth:`close` or the end of a
    ``with`` block. It does not change the model's ``state_dict``, and copies of the model record nothing.
    Models wrapped by ``torch.compile`` or ``DistributedDataParallel`` work too; create the extractor before
    the first forward pass of a compiled model.

    Args:
        model: any network.
        layer: the name of a layer, as in ``model.named_modules()``. The features are its output or, if it is
            the last layer of the model, its input.
    """

    @checked
    def __init__(self, model: nn.Module, layer: str | None = None) -> None:
        self.model = model
        self.layer = layer
        """The name of the layer; ``None`` before the first forward pass."""
        self.width: int | None = None
        """The number of features per example, d; ``None`` before the first forward pass."""
        self.is_output = False
        """Whether the layer is linear and its output is the model's, up to the shape."""
        self._root = unwrapped(model)
        if layer is not None:
            _check_name(layer, self._root)
        if layer is None and not any(isinstance(m, nn.Linear) for m in self._root.modules()):
            raise InputError(
                f"features: {_name(self._root)} has no linear layer (nn.Linear) whose input they could be; "
                f"set features='layer.name' to the layer that returns them{_such_as(self._root)}."
            )
        self._takes_input: bool | None = None
        self._detached()
        self.attach()

    def _detached(self) -> None:
        self._slot = Slot()
        self._handles: list[RemovableHandle] = []
        self._finalizer = weakref.finalize(self, _remove, self._handles)

    @property
    def linear(self) -> nn.Linear | None:
        """The layer, if it is linear; ``None`` before the first forward pass."""
        module = None if self.layer is None else self._root.get_submodule(self.layer)
        return module if isinstance(module, nn.Linear) else None

    @property
    def features(self) -> Tensor:
        """The features of the last forward pass, (B, d), with their graph."""
        value = self._slot.value
        tensors = [value] if isinstance(value, Tensor) else list(tensors_in(value))
        if not tensors:
            state = "" if self._handles else " since the extractor was closed"
            compiled = _compiled(self.model) is not None or self._root._compiled_call_impl is not None
            hint = " A model compiled and used before needs torch.compiler.reset()." if compiled else ""
            raise InputError(f"features: {self._what()} was not executed in a forward pass{state}.{hint}")
        if len(tensors) > 1 or not tensors[0].ndim:
            raise InputError(f"features must be one tensor, (B, …); {self._what()} gives {len(tensors)}.")
        if not tensors[0].is_floating_point():
            raise InputError(
                f"features must be floating-point numbers; {self._what()} gives {tensors[0].dtype}."
            )
        return tensors[0].flatten(1) if tensors[0].ndim > 1 else tensors[0][:, None]

    def take(self) -> Tensor:
        """Returns the features and drops the reference to them, so that their memory can be freed."""
        features, self._slot.value = self.features, None
        return features

    def find(self, *args: Any, **kwargs: Any) -> FeatureExtractor:
        """Finds the layer in a trial pass ``model(*args, **kwargs)``, which does not change the model.

        Call it if ``width`` is needed before the first forward pass.
        """
        was_open = bool(self._handles)
        self.close()
        try:
            self._find(*args, **kwargs)
        finally:  # after an error too, so that the next pass is another try
            if was_open:
                self.attach()
        return self

    def _find(self, *args: Any, **kwargs: Any) -> None:
        trial = _Trial(self._root, self.layer)
        with trial.watching(), _as_trial(self._root), _eager():
            args, kwargs = map_nest(_for_autograd, args), map_nest(_for_autograd, kwargs)
            output = self._root.forward(*args, **kwargs)
            trial.finish(args, kwargs, output)
            call, takes_input, is_output = trial.feature_layer(output)
        self._slot.value = call.input if takes_input else call.output
        rows, features = _main_output(output)[0].shape[:1], self.take().detach()
        if rows and features.shape[:1] != rows:
            what = self._what() if self.layer is not None else f"layer {call.name!r}"
            raise InputError(
                f"features must have a row per example: {what} gives {features.shape[0]} rows for "
                f"an output of {rows[0]} rows. Name another layer, features='layer.name'."
            )
        self.layer, self._takes_input = call.name, takes_input
        self.is_output = is_output and self.linear is not None
        self.width = features.shape[1]

    def attach(self) -> None:
        """Attaches the hooks again after :meth:`close`, or those of a copy, which starts detached."""
        if self._handles:
            return
        if self.layer is None or self._takes_input is None:
            compiled = _compiled(self.model)
            at = self._root if compiled is None else compiled
            self._handles.append(at.register_forward_pre_hook(Finder(self), with_kwargs=True))
            return
        module = self._root.get_submodule(self.layer)
        self._handles.append(self._root.register_forward_pre_hook(Clear(self._slot)))
        if self._takes_input:
            handle = module.register_forward_pre_hook(RecordInput(self._slot), with_kwargs=True)
        else:
            handle = module.register_forward_hook(RecordOutput(self._slot))
        self._handles.append(handle)

    def close(self) -> None:
        """Removes the hooks from the model."""
        _remove(self._handles)
        self._slot.value = None

    def __enter__(self) -> FeatureExtractor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_slot", "_handles", "_finalizer")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._detached()

    def _what(self) -> str:
        if self.layer is None:
            return "the model"
        return f"layer {self.layer!r}" if self.layer else f"the {type(self._root).__name__}"


class Slot:
    """Where hooks put what they record."""

    value: Any = None


class Hook:
    """One of an extractor's; in a copy of the model, or in one that was saved, it does nothing."""

    def __init__(self, slot: Slot | None = None) -> None:
        self.slot = slot

    def __deepcopy__(self, memo: Any) -> Hook:
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()


class Clear(Hook):
    """Before a forward pass: nothing of the pass before is left."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.slot is not None:
            self.slot.value = None


class RecordInput(Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.slot is not None:
            self.slot.value = _first(args, kwargs)


class RecordOutput(Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.slot is not None:
            # Copied: what comes next may overwrite it, as nn.ReLU(inplace=True) does.
            self.slot.value = [t.clone() for t in tensors_in(output)]


class Finder(Hook):
    """Before the first forward pass: a trial pass finds the layer."""

    def __init__(self, extractor: FeatureExtractor | None = None) -> None:
        super().__init__()
        self.extractor = weakref.ref(extractor) if extractor is not None else None

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        extractor = self.extractor() if self.extractor is not None else None
        if extractor is not None:
            extractor.find(*args, **kwargs)
            if extractor.layer == "":  # the model is the layer, and its hooks are those from before
                extractor._slot.value = _first(args, kwargs)


class Call(NamedTuple):
    """One call of a layer in a trial pass."""

    name: str
    number: int
    """How many calls of the layer came before."""
    input: Any
    output: Any
    ends: list[Any]
    """Where its output is in autograd's graph, whatever overwrites it later."""


class _Trial:
    """The calls of all linear layers, and of the named one, in a forward pass of ``model``."""

    def __init__(self, model: nn.Module, layer: str | None) -> None:
        self.model, self.layer = model, layer
        modules = model.named_modules()
        self.watched = {m: n for n, m in modules if n == layer or isinstance(m, nn.Linear)}
        if layer is not None:  # a module may have two names
            self.watched[model.get_submodule(layer)] = layer
        self.calls: list[Call] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        # The model itself, whose hooks are not called by model.forward, is added by `finish`.
        inner = [m for m in self.watched if m is not self.model]
        handles = [m.register_forward_hook(self._record, with_kwargs=True) for m in inner]
        try:
            yield
        finally:
            _remove(handles)

    def finish(self, args: Any, kwargs: Any, output: Any) -> None:
        if self.model in self.watched:
            self._record(self.model, args, kwargs, output)

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self.watched[module]
        number = sum(call.name == name for call in self.calls)
        ends = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
        self.calls.append(Call(name, number, _first(args, kwargs), output, ends))

    def feature_layer(self, output: Any) -> tuple[Call, bool, bool]:
        """The call that has the features, whether they are its input, and whether it returns the output."""
        named = [call for call in self.calls if call.name == self.layer]
        if self.layer is not None and not named:
            raise InputError(
                f"features: layer {self.layer!r} is not executed in a forward pass of {_name(self.model)}."
            )
        tensors = _main_output(output)
        # The outermost of those that return the same tensor comes last, and with it the named one.
        ends = {end: call for call in self.calls for end in call.ends}
        if self.layer is not None:
            last = named[-1]
            found, blocked = zip(*(self._last(t, ends) for t in tensors), strict=True)
            if not any(blocked) and any(last in each for each in found):
                found = [call for each in found for call in each]
                self._check_single(last, [c for c in found if c.name == self.layer])
                return last, True, self._only_reshaped(tensors, last)
            self._check_single(last, named)
            return last, False, False
        return self._automatic(tensors, ends)

    def _automatic(self, tensors: list[Tensor], ends: Mapping[Any, Call]) -> tuple[Call, bool, bool]:
        candidates: dict[str, list[Call]] = {}
        blocking: str | None = None
        for tensor in tensors:
            found, blocked = self._last(tensor, ends)
            blocking = blocked or blocking
            if blocked is None:
                for call in found:
                    candidates.setdefault(call.name, []).append(call)
        candidates = {
            name: calls
            for name, calls in candidates.items()
            if not any(_comes_from(other, calls) for n, (other, *_) in candidates.items() if n != name)
        }
        if len(candidates) > 1:
            raise InputError(
                f"features: the output of {_name(self.model)} comes from several linear layers; say whose "
                f"input they are: features={' or '.join(repr(n) for n in [*candidates][:SHOWN])}."
            )
        if not candidates:
            last = f"has an output that comes from {blocking or 'something else'}"
            raise InputError(
                f"features: {_name(self.model)} {last}, not from a linear layer (nn.Linear) whose input they "
                f"could be; set features='layer.name' to the layer that returns them{_such_as(self.model)}."
            )
        (calls,) = candidates.values()
        call = calls[0]
        self._check_single(call, calls)
        if isinstance(call.input, Tensor) and call.input.ndim > 2 and not _same_size(tensors, call):
            raise InputError(
                f"features: the last linear layer {call.name!r} is applied to every token (its input has "
                f"shape {tuple(call.input.shape)}), and the output uses a part of them: name the layer that "
                "returns the features, features='layer.name', or give a shoal.models.FeatureModel."
            )
        return call, True, self._only_reshaped(tensors, call)

    def _check_single(self, call: Call, calls: list[Call]) -> None:
        """Refuses a layer that is executed several times, unless the features are those of its last call."""
        count = sum(c.name == call.name for c in self.calls)
        if len({c.number for c in calls}) > 1 or call.number != count - 1:
            raise InputError(
                f"features: layer {call.name!r} is executed {count} times in a forward pass, and it is not "
                "clear which of them counts; name another layer, features='layer.name'."
            )

    def _last(self, tensor: Tensor, ends: Mapping[Any, Call]) -> tuple[list[Call], str | None]:
        """The calls that a tensor comes from, and the first weights that come after any of them."""
        weights = {id(p): n for n, p in self.model.named_parameters() if p.ndim > 1}
        found: list[Call] = []
        todo, seen = [tensor.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in ends:
                if ends[node] not in found:
                    found.append(ends[node])
                continue
            if (name := weights.get(id(getattr(node, "variable", None)))) is not None:
                owner = name.rpartition(".")[0]
                kind = type(self.model.get_submodule(owner)).__name__
                return found, f"layer {owner!r} ({kind})" if owner else f"weights {name!r} of its own"
            todo += [n for n, _ in node.next_functions]
        return found, None

    def _only_reshaped(self, tensors: list[Tensor], call: Call) -> bool:
        """Whether the output is that of the call, but for its shape."""
        if len(tensors) > 1 or not _same_size(tensors, call):
            return False
        node: Any = tensors[0].grad_fn
        while node not in call.ends:
            if node is None or node.name().rstrip("0123456789").removesuffix("Backward") not in RESHAPES:
                return False
            node = node.next_functions[0][0]
        return True


def _comes_from(call: Call, calls: list[Call]) -> bool:
    """Whether the input of a call was computed from an output of the others."""
    ends = {end for each in calls for end in each.ends}
    todo, seen = [t.grad_fn for t in tensors_in(call.input)], set()
    while todo:
        node = todo.pop()
        if node in ends:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            todo += [n for n, _ in node.next_functions]
    return False


def _same_size(tensors: list[Tensor], call: Call) -> bool:
    """Whether one of the tensors may be the output of the call."""
    return isinstance(call.output, Tensor) and any(t.numel() == call.output.numel() for t in tensors)


def _first(args: Any, kwargs: Any) -> Any:
    """The first argument of a call."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _main_output(output: Any) -> list[Tensor]:
    """The tensors of a model's output: the logits, where it names them so."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    output = logits if isinstance(logits, Tensor) else output
    found = [t for t in tensors_in(output) if t.grad_fn is not None]
    found = [t for t in found if t.ndim] or found  # a loss beside the logits is none of them
    if not found:
        raise InputError(
            f"features: the model's output ({type(output).__name__}) has no tensor that depends on its "
            "weights, so they cannot be found."
        )
    return found


def _for_autograd(part: Any) -> Any:
    """A tensor made in inference mode as one that a graph can hold; all else as it is."""
    return part.clone() if isinstance(part, Tensor) and part.is_inference() else part


@contextmanager
def _as_trial(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and a graph whatever is frozen; nothing of it is left afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for p in frozen:
            p.requires_grad_(True)
        model.eval()
        with torch.inference_mode(False), torch.enable_grad(), preserve_state(model):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for p in frozen:
            p.requires_grad_(False)


def _eager() -> Any:
    """Compiled parts run as they were written."""
    return torch.compiler.set_stance("force_eager")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _compiled(model: nn.Module) -> nn.Module | None:
    """The outermost that torch.compile has made, whose own hooks are not compiled."""
    while not isinstance(getattr(model, "_orig_mod", None), nn.Module):
        if not isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            return None
        model = model.module
    return model


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _such_as(model: nn.Module) -> str:
    """Names of layers for a message: the parts of a model, and those of its last part."""
    names = [name for name, _ in model.named_children()]
    if names:
        names += [f"{names[-1]}.{n}" for n, _ in model.get_submodule(names[-1]).named_children()]
    return f" (such as {', '.join(map(repr, names[-SHOWN:]))})" if names else ""


def _check_name(layer: str, model: nn.Module) -> None:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    if isinstance(model, nn.Linear):
        names.append("")  # its name as a module of itself
    if layer not in names:
        near = difflib.get_close_matches(layer[:100], names, n=3, cutoff=0.5)
        hint = f". Did you mean {' or '.join(map(repr, near))}?" if near else f"{_such_as(model)}."
        raise InputError(f"features: {_name(model)} has no layer {shown(layer)}{hint}")
