"""What a training is made of: checked against each other and built, before any step."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.algorithms import Algorithm, algorithm_class, build, check_settings, settings_of
from shoal.algorithms.base import trained_parameters
from shoal.data.batch import DomainData, TensorData
from shoal.data.loader import MetaBatchLoader, seeded
from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel
from shoal.models.features import FeatureExtractor, find_head
from shoal.options import FitOptions
from shoal.tensors import map_nest
from shoal.training.engine import Engine, cannot_accumulate
from shoal.training.evaluate import Evaluator
from shoal.training.examine import Examined, check_comparison, check_loss, examine, scored_splits
from shoal.training.fine_tuning import L2SP, Rates, head_for
from shoal.training.metrics import choose_metrics
from shoal.training.options import SPLITS, learning_rate, make_optimizer, make_schedule, uses_swad
from shoal.training.processes import Processes
from shoal.training.progress import Progress

TRAIN_SAMPLE = 5000
"""Examples of the training domains that are evaluated, unless the user says how many."""
EVALUATIONS, SWAD_EVALUATIONS = (10, 5, 4, 2, 1), 20
"""How many there may be by default, divisors of most numbers of steps; with SWAD, which ends by them, 20."""
CHEAP = 2000
"""So many examples may be evaluated in the shortest training."""


class Setup:
    """The parts of a training. Everything is checked when it is made; nothing is trained.

    Args:
        algorithm: name or class of the algorithm.
        model: model to train, in place.
        data: examples and splits.
        options: complete options; what is not given of them is then decided by the model and the data.
        label: name of the run in messages.
        stage: stage of a recipe, or ``"train"``.
        processes: the processes that train together.
        only: the part of the model that is trained, if not all of it.
        horizon: the number of steps that algorithms schedule by, if not that of ``options``.
        frozen: mode of the rest of the model where only a part is trained.
    """

    def __init__(
        self,
        algorithm: str | type[Algorithm],
        model: nn.Module,
        data: DomainData,
        options: FitOptions,
        label: str | None = None,
        stage: str = "train",
        processes: Processes | None = None,
        only: nn.Module | None = None,
        horizon: int | None = None,
        frozen: Literal["train", "eval"] = "eval",
    ) -> None:
        self.stage, self.only, self.frozen = stage, only, frozen
        self.processes = processes or Processes(options["device"])
        self.device, main = self.processes.device, self.processes.main
        self.model = model.to(self.device)
        self.data = data
        if isinstance(data.examples, TensorData):
            self.data = replace(data, examples=data.examples.to(self.device))
        self.options = options = _decided(options, self.model, data)
        self.channels_last = options["memory_format"] == "channels-last"
        self.label = label or (algorithm if isinstance(algorithm, str) else algorithm.__name__)
        self.progress = Progress(self.label, options["steps"], options["progress"] if main else False)
        # Reading examples may draw random numbers.
        with seeded(options["seed"]), self.progress.phase("reading data"):
            found = self._build(algorithm, horizon)
        self.sampler = DomainBatchSampler(
            data.splits["train"],
            options["batch_size"],
            options["domains_per_step"],
            draw=options["draw"] or self.algorithm.draw,
            seed=options["seed"],
            steps=options["steps"],
        )
        scored = self._check(found)
        with only_trained(model, only):
            self._make_engine()
        self.evaluator = self._make_evaluator(scored)
        self.eval_every = options["eval_every"] or self._default_eval_every()
        if options["compile"]:
            parts = self.algorithm.needs_features and self.algorithm.extractor is None
            for module in [model.features, model.head] if parts else [model]:  # what the engine calls
                _compile(module)  # type: ignore[arg-type]

    def _build(self, algorithm: str | type[Algorithm], horizon: int | None) -> Examined:
        """Finds out the task and the loss, and builds the algorithm."""
        options, model, cls = self.options, self.model, algorithm_class(algorithm)
        loss: Any = options["loss"]
        if isinstance(loss, nn.Module):
            loss.to(self.device)  # its class weights
        settings, extractor = check_settings(cls, options["settings"]), None
        layer = settings.get("features")
        if cls.needs_features and (layer is not None or not isinstance(model, FeatureModel)):
            extractor = FeatureExtractor(model, layer)
            extractor.close()
        found = examine(model, self.data, self.device, options["classes"], loss, extractor)
        self.example, self.task = found.x, replace(found.task, steps=horizon or options["steps"])
        if extractor is not None and "features" in settings_of(cls):
            settings |= {"features": extractor.layer}
        self.algorithm = build(algorithm, model, found.loss, self.task, **settings).to(self.device)
        self.algorithm.check_input(found.x)
        return found

    def _check(self, found: Examined) -> list[str]:
        """Refuses what does not go together; the splits that can be evaluated."""
        options, algorithm, count = self.options, self.algorithm, self.processes.count
        splits = scored_splits(found, [split for split in SPLITS if split in self.data.splits])
        needed = {
            "select": options["select"] == "best",
            "patience": options["patience"],
            "average": uses_swad(options),
            "warm_start": options["warm_start"] == "plateau",
            "wise_ft": options["wise_ft"] == "validation",
            "retrain": options["retrain"],
        }
        for option in (name for name, each in needed.items() if each and "validation" not in splits):
            raise InputError(f"{options[option]!r} requires validation data.", option)  # type: ignore[literal-required]
        check_comparison(algorithm, self.data, self.sampler)
        name, size, pieces = type(algorithm).__name__, options["batch_size"], options["accumulate"]
        once = {"compile": options["compile"], "miro": options["miro"], "accumulate": pieces > 1}
        for option, given in once.items() if algorithm.second_order else ():
            if given:
                why = f"{name} differentiates the model twice"
                raise InputError(f"{options[option]} cannot be used, as {why}.", option)  # type: ignore[literal-required]
        if pieces > 1 and type(algorithm).objective is not Algorithm.objective:
            raise InputError(cannot_accumulate(algorithm, pieces))
        if size % count or pieces > size // count:
            raise InputError(
                f"{size} cannot be split over {count} processes and accumulate={pieces} pieces, each process "
                "with as many examples.",
                "batch_size",
            )
        if options["loss"] is not None or found.weighted:
            why = f"accumulate={pieces}" if pieces > 1 else "training in several processes"
            check_loss(found, algorithm, why if pieces > 1 or count > 1 else None)
        return splits

    def _make_engine(self) -> None:
        """The optimizer, its schedule, and what belongs to fine-tuning.

        MIRO and L2-SP are parts of the algorithm, with which they are moved, trained and saved.
        """
        from shoal.training.miro import Miro

        options, model, algorithm = self.options, self.model, self.algorithm
        self.miro: Miro | None = None
        if options["miro"]:
            self.miro = Miro(model, find_head(model, self.example), options["miro"], self.example)
            algorithm.add_module("miro", self.miro)
        head = head_for(options, model, self.example)
        self.l2_sp: L2SP | None = None
        if options["l2_sp"] is not None and head is not None:
            self.l2_sp = L2SP(model, head, options["l2_sp"])
            algorithm.add_module("l2_sp", self.l2_sp)
        auxiliary = algorithm.auxiliary_optimizers()
        optimizer = make_optimizer(options, trained_parameters(algorithm, auxiliary))
        if self.miro is not None:
            self.miro.own_rate(optimizer)
        self.rates = None if head is None else Rates(optimizer, options, model, head)
        base = self.rates.base if self.rates else learning_rate(optimizer.param_groups[0])
        algorithm.prepare(optimizer, base)
        self.engine = Engine(
            algorithm,
            optimizer,
            self.processes,
            precision=options["precision"] or "fp32",
            clip=options["clip"],
            accumulate=options["accumulate"],
            auxiliary=auxiliary,
        )
        self.engine.extra_loss = self.miro
        if self.l2_sp is not None:
            self.engine.gradient_hooks.append(self.l2_sp.added)
        self.schedule = make_schedule(options, optimizer)
        if self.rates is not None:
            self.rates.check(self.schedule)

    def _make_evaluator(self, splits: Sequence[str]) -> Evaluator:
        """That of these ``splits``.

        Without gradients a batch may be larger than those of the training.
        """
        options, data = self.options, self.data
        trained = self.sampler.domains_per_step * options["batch_size"] // options["accumulate"]
        metrics, selects = choose_metrics(options["metric"], data.measures, self.task.kind)
        limit = options["eval_limit"]
        return Evaluator(
            data.examples.evaluation(),
            {split: data.splits[split] for split in splits},
            task=self.task,
            loss=self.algorithm.loss,
            batch_size=options["eval_batch"] or max(1, min(4 * trained, 1024)),
            workers=options["workers"],
            limits={split: limit or TRAIN_SAMPLE for split in splits if limit or split == "train"},
            processes=self.processes,
            autocast=self.engine.autocast,
            enter=channels_last if self.channels_last else lambda x: x,
            metrics=metrics,
            selects=selects,
            uncounted=data.uncounted,
            watch=lambda split, done, total: self.progress.show(f"evaluating {split} {done:,}/{total:,}"),
            label_scale=data.label_scale,
        )

    def evaluator_of(self, splits: Sequence[str], limits: Mapping[str, int]) -> Evaluator:
        """An evaluator of these splits."""
        return replace(self.evaluator, splits={s: self.data.splits[s] for s in splits}, limits=limits)

    def _default_eval_every(self) -> int:
        """As many evaluations as pass no more examples through the model than the training does."""
        options, sampler = self.options, self.sampler
        if uses_swad(options):
            return -(-options["steps"] // SWAD_EVALUATIONS)
        trained = options["steps"] * sampler.domains_per_step * sampler.batch_size
        each = sum(map(len, self.evaluator.which.values()))
        asked = options["patience"] is not None  # evaluations are part of it
        fits = [n for n in EVALUATIONS if asked or n * each <= max(trained, CHEAP)]
        return math.ceil(options["steps"] / max([1, *fits]))

    def loader(self, sampler: Any, start: int, stop: int, workers: int | None = None) -> MetaBatchLoader:
        """This process's share of the batches that a sampler plans."""
        return MetaBatchLoader(
            self.data.examples,
            sampler,
            workers=self.options["workers"] if workers is None else workers,
            device=self.device,
            enter=channels_last if self.channels_last else lambda x: x,
            start=start,
            stop=stop,
            share=(self.processes.index, self.processes.count),
        )

    @contextmanager
    def training(self) -> Iterator[None]:
        """While it trains: modes are set, weights laid out as asked, hooks attached, other parts frozen."""
        modules: list[Any] = [self.model] + ([self.miro.pretrained] if self.miro else [])
        recording = self.miro.recording() if self.miro else nullcontext()
        try:
            for module in modules if self.channels_last else ():
                module.to(memory_format=torch.channels_last)
            self.model.train(self.only is None or self.frozen == "train")
            if self.only is not None:
                self.only.train()
            with self.algorithm.extractor or nullcontext(), recording, only_trained(self.model, self.only):
                yield
        finally:
            for module in modules if self.channels_last else ():
                module.to(memory_format=torch.contiguous_format)


def _decided(options: FitOptions, model: nn.Module, data: DomainData) -> FitOptions:
    """The options, with what is not given decided by the model and the data.

    Pretrained image models compute in bf16 with channels last on CUDA.
    """
    device = next(iter(model.parameters()), torch.empty(0)).device
    images = bool(getattr(model, "weights", "")) and any(p.ndim == 4 for p in model.parameters())
    fast = images and device.type == "cuda" and torch.cuda.is_bf16_supported(False)
    decided: FitOptions = {
        "select": options["select"] or ("best" if "validation" in data.splits else "last"),
        "precision": options["precision"] or ("bf16" if fast else "fp32"),
        "memory_format": options["memory_format"] or ("channels-last" if fast else "contiguous"),
    }
    return {**options, **decided}


def channels_last(x: Any) -> Any:
    """Images of a nest in this memory format, in which the weights are too."""

    def converted(part: Any) -> Any:
        images = isinstance(part, Tensor) and part.ndim == 4
        return part.contiguous(memory_format=torch.channels_last) if images else part

    return map_nest(converted, x)


@contextmanager
def only_trained(model: nn.Module, part: nn.Module | None) -> Iterator[None]:
    """Within the block no parameter outside ``part`` requires a gradient; ``None``: nothing changes."""
    own = set((model if part is None else part).parameters())
    frozen = [p for p in model.parameters() if p.requires_grad and p not in own]
    try:
        for p in frozen:
            p.requires_grad_(False)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)


def _compile(module: nn.Module) -> None:
    """As ``module.compile()``; one that cannot be compiled runs as it is, with the same result."""
    plain = module._call_impl
    compiled = torch.compile(lambda *args, **kwargs: plain(*args, **kwargs))

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except Exception as error:  # of any of the compilers; an error of the model itself comes again
            first = (str(error).splitlines() or [""])[0]
            module._compiled_call_impl = None
            result = plain(*args, **kwargs)
            message = f"the model cannot be compiled ({type(error).__name__}: {first}); it runs as it is."
            logging.getLogger("shoal").warning(message)
            return result

    module._compiled_call_impl = call
