"""The features of any model: the input of its last linear layer, or the output of a named layer."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.data.batch import tensors_in
from shoal.errors import InputError, did_you_mean, shown
from shoal.replay import preserve_state
from shoal.settings import checked
from shoal.tensors import map_nest

RESHAPES = {
    *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "Slice"),
    *("Alias", "Clone", "ToCopy"),
}
"""Autograd operations that change no value. Whether they drop any is checked by size."""
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class FeatureExtractor:
    """Records the features of any ``nn.Module`` in each forward pass.

    By default the features z are the input of the last linear layer, W z + b. Operations without weights,
    such as a reshape or a softmax, may follow it. The layer is found in the first forward pass, by following
    the output of an additional trial pass (the logits, or the first of several) back through the autograd
    graph. Features are flattened to (B, d): the output of a layer with tokens (B, T, d) becomes T·d numbers
    per example, and feature maps (B, c, h, w) become c·h·w, so name the pooling layer after them instead. ::

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
        names = [name for name, _ in self._root.named_modules(remove_duplicate=False)]
        kind = type(self._root).__name__
        if layer is not None and layer not in names[not isinstance(self._root, nn.Linear) :]:
            hint = did_you_mean(layer, names) or _such_as(self._root)
            raise InputError(f"features: {kind} has no layer {shown(layer)}.{hint}")
        if layer is None and not any(isinstance(m, nn.Linear) for m in self._root.modules()):
            raise InputError(
                f"features: {kind} has no linear layer (nn.Linear) whose input they could be; "
                f"set features='layer.name' to the layer that returns them.{_such_as(self._root)}"
            )
        self._takes_input: bool | None = None
        self._recorded: Any = None
        self._handles: list[RemovableHandle] = []
        self._attached = False  # what the compiler can read
        self.attach()

    @property
    def linear(self) -> nn.Linear | None:
        """The layer, if it is linear; ``None`` before the first forward pass."""
        module = None if self.layer is None else self._root.get_submodule(self.layer)
        return module if isinstance(module, nn.Linear) else None

    @property
    def features(self) -> Tensor:
        """The features of the last forward pass, (B, d), with their graph."""
        tensors = list(tensors_in([self._recorded]))
        what = f"layer {self.layer!r}" if self.layer else "the model"
        if not tensors:
            state = "" if self._handles else " since the extractor was closed"
            raise InputError(
                f"features: {what} was not executed in a forward pass{state}. A model that was compiled and "
                "used before needs torch.compiler.reset()."
            )
        if len(tensors) > 1 or not tensors[0].ndim or not tensors[0].is_floating_point():
            raise InputError(
                f"features must be one tensor of floats, (B, …); {what} gives {len(tensors)} of "
                f"{tensors[0].dtype}."
            )
        return tensors[0].flatten(1) if tensors[0].ndim > 1 else tensors[0][:, None]

    def take(self) -> Tensor:
        """Returns the features and drops the reference to them, so that their memory can be freed."""
        features, self._recorded = self.features, None
        return features

    def find(self, *args: Any, **kwargs: Any) -> FeatureExtractor:
        """Finds the layer in a trial pass ``model(*args, **kwargs)``, which does not change the model.

        Call it if ``width`` is needed before the first forward pass.
        """
        attached = bool(self._handles)
        self.close()
        try:
            call, self._takes_input, is_output, rows = _feature_layer(self._root, self.layer, args, kwargs)
            self.layer, self._recorded = call.name, call.input if self._takes_input else call.output
            features = self.take().detach()
        finally:  # after an error too, so that the next pass is another try
            if attached:
                self.attach()
        if rows is not None and len(features) != rows:
            raise InputError(
                f"features must have a row per example: layer {call.name!r} gives {len(features)} rows for "
                f"an output of {rows} rows. Name another layer, features='layer.name'."
            )
        self.is_output = is_output and self.linear is not None
        self.width = features.shape[1]
        return self

    def attach(self) -> None:
        """Attaches the hooks again after :meth:`close`, or those of a copy, which starts detached."""
        if self._handles:
            return
        self._attached = True
        if self.layer is None or self._takes_input is None:
            # The hooks of what torch.compile returns are not compiled, those of module.compile() are.
            outermost = self.model.module if isinstance(self.model, PARALLEL) else self.model
            in_place = self._root._compiled_call_impl is not None
            find: Any = torch.compiler.disable(self._find_first) if in_place else self._find_first
            self._handles = [outermost.register_forward_pre_hook(find, with_kwargs=True)]
            return
        layer = self._root.get_submodule(self.layer)
        if self._takes_input:
            record = layer.register_forward_pre_hook(self._record_input, with_kwargs=True)
        else:
            record = layer.register_forward_hook(self._record_output)
        self._handles = [self._root.register_forward_pre_hook(self._clear, prepend=True), record]

    def close(self) -> None:
        """Removes the hooks from the model."""
        while self._handles:
            self._handles.pop().remove()
        self._attached, self._recorded = False, None

    def __enter__(self) -> FeatureExtractor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # A copy of the model has hooks of a copy of the extractor, which is not attached: they do nothing.

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_recorded": None, "_handles": [], "_attached": False}

    def _find_first(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._attached:
            self.find(*args, **kwargs)
            if self.layer == "":  # the model is the layer, and its hooks are those from before
                self._recorded = _first(args, kwargs)

    def _clear(self, module: nn.Module, args: Any) -> None:
        if self._attached:
            self._recorded = None

    def _record_input(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._attached:
            self._recorded = _first(args, kwargs)

    def _record_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._attached:  # copied: what comes next may overwrite it, as nn.ReLU(inplace=True) does
            self._recorded = [t.clone() for t in tensors_in([output])]


class Call(NamedTuple):
    """One call of a layer in a trial pass."""

    name: str
    input: Any
    output: Any
    nodes: list[Any]
    """Where its output is in autograd's graph, whatever overwrites it later."""


def _feature_layer(
    root: nn.Module, layer: str | None, args: Any, kwargs: Any
) -> tuple[Call, bool, bool, int | None]:
    """The call that has the features, whether they are its input, whether it returns the output; its rows."""
    watched: dict[nn.Module, str] = {m: n for n, m in root.named_modules() if isinstance(m, nn.Linear)}
    if layer is not None:  # a module may have two names
        watched[root.get_submodule(layer)] = layer
    result, calls = _trial(root, watched, args, kwargs)
    output, several = _main_output(result)
    if layer is not None:
        calls = [call for call in calls if call.name == layer]
    last = next((call for call in reversed(calls) if _is_last(call, output, root)), None)
    kind, name_one = type(root).__name__, f"features='layer.name'.{_such_as(root)}"
    if not calls:
        raise InputError(f"features: layer {layer!r} is not executed in a forward pass of {kind}.")
    if layer is None and last is None:
        names = ", ".join(dict.fromkeys(repr(call.name) for call in calls[-8:]))
        raise InputError(
            f"features: the output of {kind} does not come from one last linear layer (nn.Linear) alone; "
            f"name the layer that returns them, or one of the linear layers ({names}), {name_one}"
        )
    call = last or calls[-1]
    count = sum(c.name == call.name for c in calls)
    if count > 1 and (last is None or call is not [c for c in calls if c.name == call.name][-1]):
        raise InputError(
            f"features: layer {call.name!r} is executed {count} times in a forward pass, and it is not clear "
            f"which counts; name another layer, {name_one}"
        )
    same_size = isinstance(call.output, Tensor) and call.output.numel() == output.numel()
    if layer is None and call.input.ndim > 2 and not same_size and output.ndim:
        raise InputError(
            f"features: the last linear layer {call.name!r} is applied to every token (its input has shape "
            f"{tuple(call.input.shape)}), and the output uses a part of them: name the layer that returns "
            "the features, features='layer.name', or give a shoal.models.FeatureModel."
        )
    node: Any = output.grad_fn
    while node is not None and node not in call.nodes:
        reshape = node.name().rstrip("0123456789").removesuffix("Backward") in RESHAPES
        node = node.next_functions[0][0] if reshape else None
    is_output = node is not None and same_size and not several
    return call, last is not None, is_output, len(output) if output.ndim else None


def _trial(
    root: nn.Module, watched: Mapping[nn.Module, str], args: Any, kwargs: Any
) -> tuple[Any, list[Call]]:
    """The output of a pass in evaluation mode with a graph, and the calls of the watched modules in it."""
    calls: list[Call] = []

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nodes = [t.grad_fn for t in tensors_in([output]) if t.grad_fn is not None]
        calls.append(Call(watched[module], _first(args, kwargs), output, nodes))

    # The model's own hooks are not called by model.forward.
    handles = [m.register_forward_hook(record, with_kwargs=True) for m in watched if m is not root]
    try:
        with _evaluated(root):
            args, kwargs = map_nest(_for_autograd, args), map_nest(_for_autograd, kwargs)
            result = root.forward(*args, **kwargs)
            if root in watched:
                record(root, args, kwargs, result)
    finally:
        for handle in handles:
            handle.remove()
    return result, calls


@contextlib.contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, a graph whatever is frozen, compiled parts run eagerly; the model stays as it was."""
    modes = [(module, module.training) for module in model.modules()]
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    eager: Any = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        eager = torch.compiler.set_stance("force_eager")
    try:
        for p in frozen:
            p.requires_grad_(True)
        model.eval()
        with torch.inference_mode(False), torch.enable_grad(), preserve_state(model), eager:
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for p in frozen:
            p.requires_grad_(False)


def _is_last(call: Call, output: Tensor, root: nn.Module) -> bool:
    """Whether the output comes from this call, and from no weights but through it; a scale may follow."""
    weights = {p for p in root.parameters() if p.ndim > 1}
    todo, seen = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) in weights:
            return False
        seen.add(node)
        todo += () if node in call.nodes else (n for n, _ in node.next_functions)
    return not seen.isdisjoint(call.nodes)


def _main_output(result: Any) -> tuple[Tensor, bool]:
    """The logits, where an output names them so, or its first tensor; and whether there are others."""
    logits = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    tensors = [t for t in tensors_in([result if logits is None else logits]) if t.grad_fn is not None]
    tensors = [t for t in tensors if t.ndim] or tensors  # a loss beside the logits does not count
    if not tensors:
        raise InputError(
            f"features: the model's output ({type(result).__name__}) has no tensor that depends on its "
            "weights, so they cannot be found."
        )
    return tensors[0], len(tensors) > 1


def _first(args: Any, kwargs: Any) -> Any:
    """The first argument of a call."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _for_autograd(part: Any) -> Any:
    """A tensor made in inference mode as one that a graph can hold; all else as it is."""
    return part.clone() if isinstance(part, Tensor) and part.is_inference() else part


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and torch.compile."""
    inner = model.module if isinstance(model, PARALLEL) else getattr(model, "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def _such_as(model: nn.Module) -> str:
    """Names of layers for a message: the parts of a model, and those of its last part."""
    names = [name for name, _ in model.named_children()]
    if names:
        names += [f"{names[-1]}.{n}" for n, _ in model.get_submodule(names[-1]).named_children()]
    return f" Layers are {', '.join(map(repr, names[-8:]))}." if names else ""
