"""The features and the head of any model, found in a forward pass."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.data.batch import tensors_in
from shoal.errors import InputError, unknown_name
from shoal.models.calling import PARALLEL, arguments, logits_of, unwrapped
from shoal.models.feature_model import FeatureModel
from shoal.replay import preserve_state
from shoal.settings import checked

NAME_ONE = "name the layer that returns the features, features='layer.name'"


class FeatureExtractor:
    """Records the features of any ``nn.Module`` in each forward pass.

    By default the features z are the input of the last linear layer, W z + b. It is found by a trial pass
    before the first forward pass: it is the layer that returns the model's output (the logits, or the first
    of several) or, if operations without weights follow it, the only one that returns as many numbers.
    Features are flattened to (B, d). ::

        extractor = FeatureExtractor(model)
        logits = model(x)
        loss = cross_entropy(logits, y) + shoal.penalties.coral(extractor.features, domain)

    The extractor uses forward hooks. It stays attached to the model until :meth:`close` or the end of a
    ``with`` block. Models wrapped by ``torch.compile`` or ``DistributedDataParallel`` work too; create the
    extractor before the first forward pass of a compiled model.

    Attributes:
        layer: the name of the layer; ``None`` before the first forward pass, unless it was given.
        width: the number of features per example, d; ``None`` before the first forward pass.
        is_output: whether the layer is linear and its output is the model's, up to the shape.

    Args:
        model: any network.
        layer: the name of a layer, as in ``model.named_modules()``. The features are its output or, if it is
            the last layer of the model, its input.
    """

    @checked
    def __init__(self, model: nn.Module, layer: str | None = None) -> None:
        self.model, self.layer, self.is_output = model, layer, False
        self.width: int | None = None
        self._root, self._is_last = unwrapped(model), False
        self._recorded: list[Tensor] = []
        self._handles: list[RemovableHandle] = []
        self._attached = False  # what the compiler can read
        modules, kind = dict(self._root.named_modules(remove_duplicate=False)), type(self._root).__name__
        if layer is not None and layer not in modules:
            raise unknown_name(f"layer of {kind}", layer, filter(None, modules), "features")
        if layer is None and not any(isinstance(m, nn.Linear) for m in modules.values()):
            raise InputError(f"features: {kind} has no linear layer; {NAME_ONE}.")
        self.attach()

    @property
    def linear(self) -> nn.Linear | None:
        """The layer, if it is linear; ``None`` before the first forward pass."""
        module = None if self.layer is None else self._root.get_submodule(self.layer)
        return module if isinstance(module, nn.Linear) else None

    @property
    def features(self) -> Tensor:
        """The features of the last forward pass, (B, d), with their graph."""
        found = self._recorded
        if not found:
            raise InputError(
                f"features: layer {self.layer!r} was not executed in a forward pass; a model that was "
                "compiled and used before needs torch.compiler.reset()."
            )
        if len(found) > 1 or not found[0].ndim or not found[0].is_floating_point():
            gives = f"layer {self.layer!r} gives {len(found)} of {found[0].dtype}"
            raise InputError(f"features must be one tensor of floats, (B, …); {gives}.")
        return found[0].flatten(1) if found[0].ndim > 1 else found[0][:, None]

    def take(self) -> Tensor:
        """Returns the features and drops the reference to them, so that their memory can be freed."""
        features, self._recorded = self.features, []
        return features

    def find(self, *args: Any, **kwargs: Any) -> FeatureExtractor:
        """Finds the layer in a trial pass ``model(*args, **kwargs)``, which does not change the model.

        Call it if ``width`` is needed before the first forward pass.
        """
        attached = self._attached
        self.close()
        try:
            output, calls = _trial(self._root, self.layer, args, kwargs)
            last, is_output = _last(calls, output)
            named = [call for call in calls if call.name == self.layer]
            found = last if self.layer is None else named[-1] if named else None
            if found is None:
                names = ", ".join(dict.fromkeys(repr(call.name) for call in calls))
                why = f"its output does not come from one last linear layer alone, of {names}; {NAME_ONE}"
                if self.layer is not None:
                    why = f"layer {self.layer!r} is not executed in a forward pass"
                raise InputError(f"features of {type(self._root).__name__}: {why}.")
            self.layer, self._is_last = found.name, found is last
            self.is_output = found is last and is_output and self.linear is not None
            self._recorded = found.input if self._is_last else found.output
            self.width = self.take().shape[1]
        finally:  # after an error too, so that the next pass is another try
            if attached:
                self.attach()
        return self

    def attach(self) -> None:
        """Attaches the hooks again after :meth:`close`."""
        if self._handles:
            return
        self._attached = True
        if self.width is not None:
            layer = self._root.get_submodule(self.layer or "")
            self._handles = [layer.register_forward_hook(self._record, with_kwargs=True)]
        else:
            outermost = self.model.module if isinstance(self.model, PARALLEL) else self.model
            self._handles = [outermost.register_forward_pre_hook(self._find_first, with_kwargs=True)]

    def close(self) -> None:
        """Removes the hooks from the model."""
        while self._handles:
            self._handles.pop().remove()
        self._attached, self._recorded = False, []

    def __enter__(self) -> FeatureExtractor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_recorded": []}  # which have a graph, and cannot be copied

    def _find_first(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._attached:
            self.find(*args, **kwargs)

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._attached:
            self._recorded = _first(args, kwargs) if self._is_last else _copies(output)


def find_head(model: nn.Module, x: Any) -> nn.Module:
    """The head of ``model``: of a :class:`~shoal.models.FeatureModel` its own, else the last linear layer.

    The layer is found by a trial pass on ``x``, a batch of inputs, which does not change the model.
    """
    if isinstance(model, FeatureModel):
        return model.head
    args, kwargs = arguments(model, x)
    why = "its last linear layer does not return its output."
    try:
        extractor = FeatureExtractor(model)
        extractor.close()
        extractor.find(*args, **kwargs)
        if extractor.linear is not None and extractor.is_output:
            return extractor.linear
    except InputError as error:
        why = str(error)
    hint = "Wrap it as shoal.models.FeatureModel(features, head)."
    raise InputError(f"{type(model).__name__} has no head that can be identified: {why} {hint}")


class _Call(NamedTuple):
    name: str
    input: list[Tensor]
    output: list[Tensor]


def _last(calls: list[_Call], output: Tensor) -> tuple[_Call | None, bool]:
    """The call of the last layer, and whether it returns the values of the model's output, in any shape.

    Without such a call it is the only one that returns as many. A layer that is executed twice is none.
    """
    names, values = [call.name for call in calls], output.flatten().double()
    once = [call for call in calls if names.count(call.name) == 1 and len(call.output) == 1]
    sized = [call for call in once if call.output[0].numel() == output.numel()]
    equal = [call for call in sized if torch.equal(call.output[0].flatten().double(), values)]
    if equal:
        return equal[-1], True
    return (sized[0] if len(sized) == 1 else None), False


def _trial(root: nn.Module, layer: str | None, args: Any, kwargs: Any) -> tuple[Tensor, list[_Call]]:
    """The logits of a pass in evaluation mode, and the calls in it of linear layers and of the one named."""
    names: dict[nn.Module, str] = {m: n for n, m in root.named_modules() if isinstance(m, nn.Linear)}
    if layer is not None:
        names[root.get_submodule(layer)] = layer
    calls, modes = list[_Call](), {module: module.training for module in root.modules()}

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(_Call(names[module], _first(args, kwargs), _copies(output)))

    handles = [module.register_forward_hook(record, with_kwargs=True) for module in names]
    eager: Any = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        eager = torch.compiler.set_stance("force_eager")
    try:
        root.eval()
        with torch.no_grad(), preserve_state(root), eager:
            result = logits_of(root(*args, **kwargs))
    finally:
        for module, mode in modes.items():
            module.training = mode
        for handle in handles:
            handle.remove()
    tensors = [t for t in tensors_in([result]) if t.ndim]  # a loss has no dimension
    if not tensors:
        raise InputError(f"features: the model's output is {type(result).__name__}, without a tensor.")
    return tensors[0], calls


def _first(args: Any, kwargs: Any) -> list[Tensor]:
    return list(tensors_in([args[0] if args else next(iter(kwargs.values()), None)]))


def _copies(output: Any) -> list[Tensor]:
    """The tensors of an output, which what comes next may overwrite, as nn.ReLU(inplace=True) does."""
    return [t.clone() for t in tensors_in([output])]
