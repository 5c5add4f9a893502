"""The features and the head of any model, found in a forward pass."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.data.batch import tensors_in
from shoal.errors import InputError, did_you_mean, shown
from shoal.models.calling import PARALLEL, arguments, unwrapped
from shoal.models.feature_model import FeatureModel
from shoal.replay import preserve_state
from shoal.settings import checked

NAME_ONE = "name the layer that returns the features, features='layer.name'"


class FeatureExtractor:
    """Records the features of any ``nn.Module`` in each forward pass.

    By default the features z are the input of the last linear layer, W z + b. Operations without weights,
    such as a reshape or a softmax, may follow it. It is found by a trial pass before the first forward pass:
    it is the layer that returns the model's output (the logits, or the first of several) or, where there is
    none, the only one that returns as many numbers. Features are flattened to (B, d): those of a layer with
    tokens, (B, T, d), are T·d numbers per example; name the pooling layer after it instead. ::

        extractor = FeatureExtractor(model)
        logits = model(x)
        loss = cross_entropy(logits, y) + shoal.penalties.coral(extractor.features, domain)

    The extractor uses forward hooks. It stays attached to the model until :meth:`close` or the end of a
    ``with`` block. It does not change the model's ``state_dict``; a copy of the model has one of its own.
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
        self._takes_input: bool | None = None  # not known before the first forward pass
        self._recorded: Any = None
        self._handles: list[RemovableHandle] = []
        self._attached = False  # what the compiler can read
        modules, kind = dict(self._root.named_modules(remove_duplicate=False)), type(self._root).__name__
        names = [name for name in modules if name or isinstance(self._root, nn.Linear)]
        if layer is not None and layer not in names:
            hint = did_you_mean(layer, names) or f" Layers are {', '.join(map(repr, names[-8:]))}."
            raise InputError(f"features: {kind} has no layer {shown(layer)}.{hint}")
        if layer is None and not any(isinstance(m, nn.Linear) for m in modules.values()):
            raise InputError(f"features: {kind} has no linear layer (nn.Linear); {NAME_ONE}.")
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
            compiled = "a model that was compiled and used before needs torch.compiler.reset()"
            raise InputError(f"features: {what} was not executed in a forward pass; {compiled}.")
        if len(tensors) > 1 or not tensors[0].ndim or not tensors[0].is_floating_point():
            gives = f"{what} gives {len(tensors)} of {tensors[0].dtype}"
            raise InputError(f"features must be one tensor of floats, (B, …); {gives}.")
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
            call, self._takes_input, self.is_output, rows = _search(self._root, self.layer, args, kwargs)
            self.layer, self._recorded = call.name, call.input if self._takes_input else call.output
            features = self.take()
        finally:  # after an error too, so that the next pass is another try
            if attached:
                self.attach()
        if len(features) != rows:
            gives = f"layer {self.layer!r} gives {len(features)} rows for an output of {rows}"
            raise InputError(f"features must have a row per example: {gives}; {NAME_ONE}.")
        self.width = features.shape[1]
        return self

    def attach(self) -> None:
        """Attaches the hooks again after :meth:`close`."""
        if self._handles:
            return
        self._attached = True
        if self._takes_input is not None:
            layer = self._root.get_submodule(self.layer or "")
            self._handles = [layer.register_forward_hook(self._record, with_kwargs=True)]
            return
        # The hooks of what torch.compile returns are not compiled, those of module.compile() are.
        outermost = self.model.module if isinstance(self.model, PARALLEL) else self.model
        in_place = self._root._compiled_call_impl is not None
        find: Any = torch.compiler.disable(self._find_first) if in_place else self._find_first
        self._handles = [outermost.register_forward_pre_hook(find, with_kwargs=True)]

    def close(self) -> None:
        """Removes the hooks from the model."""
        while self._handles:
            self._handles.pop().remove()
        self._attached, self._recorded = False, None

    def __enter__(self) -> FeatureExtractor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_recorded": None}  # which has a graph, and cannot be copied

    def _find_first(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._attached:
            self.find(*args, **kwargs)

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._attached:  # copied: what comes next may overwrite it, as nn.ReLU(inplace=True) does
            copies = [] if self._takes_input else [t.clone() for t in tensors_in([output])]
            self._recorded = copies or _first(args, kwargs)


def find_head(model: nn.Module, x: Any) -> nn.Module:
    """The head of ``model``: of a :class:`~shoal.models.FeatureModel` its own, else the last linear layer.

    The layer is found by a trial pass on ``x``, a batch of inputs, which does not change the model.

    Raises:
        InputError: the model has no linear layer at its end.
    """
    if isinstance(model, FeatureModel):
        return model.head
    kind, hint = type(model).__name__, "Wrap it as shoal.models.FeatureModel(features, head)."
    try:
        args, kwargs = arguments(model, x)
        with FeatureExtractor(model) as extractor:
            extractor.find(*args, **kwargs)
    except InputError as error:
        raise InputError(f"{kind} has no head that can be identified: {error} {hint}") from error
    if extractor.linear is None or not extractor.is_output:
        raise InputError(f"{kind} has no head: its last linear layer does not return its output. {hint}")
    return extractor.linear


# The search in a trial pass


class Call(NamedTuple):
    """One call of a layer: its input, and copies of the tensors that it returned."""

    name: str
    input: Any
    output: list[Tensor]

    def returned(self, output: Tensor) -> bool | None:
        """Whether it returned the values of ``output``, in any shape; ``None``: as many, but other ones."""
        if len(self.output) != 1 or self.output[0].numel() != output.numel():
            return False
        return torch.equal(self.output[0].flatten().double(), output.flatten().double()) or None


def _search(root: nn.Module, layer: str | None, args: Any, kwargs: Any) -> tuple[Call, bool, bool, int]:
    """The call of the layer, or of the last linear one; whether its input are the features, and its output is
    the model's; and the rows of the model's output.

    The last layer is the one that returns the model's output, or else the only linear one that returns as
    many numbers: operations without weights follow it. It must not be executed again for something else.
    """
    result, calls = _trial(root, layer, args, kwargs)
    output, several = _main_output(result)
    final, kind = {call.name: n for n, call in enumerate(calls)}, type(root).__name__
    linear = [n for n, call in enumerate(calls) if isinstance(root.get_submodule(call.name), nn.Linear)]
    equal = [n for n, call in enumerate(calls) if call.returned(output)]
    sized = [n for n in linear if calls[n].returned(output) is not False]
    last = equal[-1] if equal else sized[0] if len(sized) == 1 else None
    if last not in final.values():
        last = None
    which = last if layer is None else final.get(layer)
    if which is None and layer is not None:
        raise InputError(f"features: layer {layer!r} is not executed in a forward pass of {kind}.")
    if which is None:
        names = ", ".join(dict.fromkeys(repr(calls[n].name) for n in linear[-8:]))
        why = f"does not come from one last linear layer alone, of {names}"
        raise InputError(f"features: the output of {kind} {why}; {NAME_ONE}.")
    return calls[which], which == last, which in equal and which in linear and not several, len(output)


def _trial(root: nn.Module, layer: str | None, args: Any, kwargs: Any) -> tuple[Any, list[Call]]:
    """The output of a pass in evaluation mode, and the calls in it of linear layers and of the one named.

    Compiled parts run eagerly, and the model stays as it was.
    """
    names: dict[nn.Module, str] = {m: n for n, m in root.named_modules() if isinstance(m, nn.Linear)}
    if layer is not None:
        names[root.get_submodule(layer)] = layer
    calls, modes = list[Call](), [(module, module.training) for module in root.modules()]

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        copies = [t.clone() for t in tensors_in([output])]  # what comes next may overwrite it
        calls.append(Call(names[module], _first(args, kwargs), copies))

    handles = [module.register_forward_hook(record, with_kwargs=True) for module in names]
    eager: Any = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        eager = torch.compiler.set_stance("force_eager")
    try:
        root.eval()
        with torch.no_grad(), preserve_state(root), eager:
            return root(*args, **kwargs), calls
    finally:
        for module, mode in modes:
            module.training = mode
        for handle in handles:
            handle.remove()


def _main_output(result: Any) -> tuple[Tensor, bool]:
    """The logits, where an output names them so, or its first tensor; and whether there are others."""
    logits = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    tensors = [t for t in tensors_in([result if logits is None else logits]) if t.ndim]  # no loss
    if not tensors:
        raise InputError(f"features: the model's output is {type(result).__name__}, without a tensor.")
    return tensors[0], len(tensors) > 1


def _first(args: Any, kwargs: Any) -> Any:
    """The first argument of a call."""
    return args[0] if args else next(iter(kwargs.values()), None)
