"""What a training is made of: checked against each other and built, before any step."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shoal.algorithms import Algorithm, algorithm_class, build, check_settings, settings_of
from shoal.algorithms.base import trained_parameters
from shoal.data.batch import DomainData, InMemory, evaluation_view
from shoal.data.loader import MetaBatchLoader, seeded
from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError
from shoal.models.feature_model import FeatureModel
from shoal.models.features import FeatureExtractor
from shoal.options import FitOptions
from shoal.tensors import map_nest
from shoal.training.engine import Engine, Precision, cannot_accumulate
from shoal.training.evaluate import Evaluator
from shoal.training.examine import Examined, check_comparison, check_loss, examine, why_unscored
from shoal.training.metrics import choose_metrics
from shoal.training.options import SPLITS, make_optimizer, make_schedule, uses_swad
from shoal.training.processes import Processes
from shoal.training.progress import Progress

NUMBERS = {"cpu": 2**22, "cuda": 2**26}
"""The most numbers that a batch may become in any operation of an evaluation."""
OF_MEMORY = 512
"""On CUDA it may be more: a number for so many bytes of the device's memory."""
TRAIN_SAMPLE = 5000
"""Examples of the training domains that are evaluated, unless the user says how many."""
EVALUATIONS = (10, 5, 4, 2, 1)
"""How many there may be by default: divisors of most numbers of steps."""
SWAD_EVALUATIONS = 20
"""By default with SWAD, which starts and ends by them."""
CHEAP = 2000
"""So many examples may be evaluated in the shortest training."""


class Setup:
    """The parts of a training. Everything is checked when it is made; nothing is trained.

    Args:
        algorithm: name or class of the algorithm.
        model: model to train, in place.
        data: examples and splits.
        options: complete options.
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
        cls = algorithm_class(algorithm)
        self.options, self.data, self.stage, self.only = options, data, stage, only
        self.frozen = frozen
        self.processes = processes or Processes(options["device"])
        self.device = self.processes.device
        self.model = model.to(self.device)
        self.label = label or (algorithm if isinstance(algorithm, str) else cls.__name__)
        examples: Any = data.examples
        self.examples: Any = examples.to(self.device) if isinstance(examples, InMemory) else examples
        self.splits: list[str] = [s for s in SPLITS if s in data.splits]
        self.select = options["select"] or ("best" if "validation" in self.splits else "last")
        self._check_validation()
        self.precision, self.channels_last = self._formats()
        shown = options["progress"] is True and self.processes.main
        self.progress = Progress(self.label, options["steps"], shown)
        # Reading examples may draw random numbers.
        with seeded(options["seed"]), self.progress.phase("reading data"):
            found = self._build(algorithm, cls, horizon)
        self.sampler = DomainBatchSampler(
            data.splits["train"],
            options["batch_size"],
            options["domains_per_step"],
            draw=options["draw"] or self.algorithm.draw,
            seed=options["seed"],
            steps=options["steps"],
        )
        check_comparison(self.algorithm, data, self.sampler)
        self.algorithm.check_step(self.sampler.domains_per_step)
        if options["loss"] is not None or found.weighted:
            check_loss(self.loss, found, self.algorithm, self._pieces())
        with only_trained(model, only):
            self.engine = self._make_engine()
        self.schedule = make_schedule(options, self.engine.optimizer)
        if self.rates is not None:
            self.rates.check(self.schedule)
        self.eval_batch = options["eval_batch"] or max(1, min(1024, _numbers(self.device) // found.numbers))
        limits = {"train": TRAIN_SAMPLE} if "train" in self.splits else {}
        if options["eval_limit"] is not None:
            limits = dict.fromkeys(self.splits, options["eval_limit"])
        self.evaluator = self.evaluator_of(self.splits, limits)
        self.eval_every = options["eval_every"] or self._default_eval_every()
        if options["compile"]:
            self._compile()

    def _check_validation(self) -> None:
        options = self.options
        needed = self.select == "best" or options["patience"] or options["warm_start"] == "plateau"
        needed = needed or options["wise_ft"] == "validation" or options["retrain"]
        if (needed or uses_swad(options)) and "validation" not in self.splits:
            raise InputError(
                "select='best', average='swad', warm_start='plateau', wise_ft='validation', retrain=True and "
                "patience require validation data."
            )

    def _formats(self) -> tuple[Precision, bool]:
        """The precision, and whether images have their channels last in memory.

        By default pretrained image models compute in bf16 with channels last on CUDA.
        """
        options, weights = self.options, getattr(self.model, "weights", "")
        images = bool(weights) and any(p.ndim == 4 for p in self.model.parameters())
        images = images and self.device.type == "cuda"
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        precision: Any = options["precision"] or (launched if launched in ("fp32", "bf16") else None)
        if precision is None:
            precision = "bf16" if images and torch.cuda.is_bf16_supported(False) else "fp32"
        return precision, options["memory_format"] == "channels-last" or (
            options["memory_format"] is None and images
        )

    def _build(self, algorithm: str | type[Algorithm], cls: type[Algorithm], horizon: int | None) -> Examined:
        """The task, the loss, the algorithm, and what belongs to a pretrained model."""
        options, model, data = self.options, self.model, self.data
        if isinstance(options["loss"], nn.Module):
            options["loss"].to(self.device)  # its class weights
        settings = check_settings(cls, options["settings"])
        layer = settings.get("features")
        extractor = None
        if cls.needs_features and (layer is not None or not isinstance(model, FeatureModel)):
            extractor = FeatureExtractor(model, layer)
            extractor.close()
        found = examine(
            model, data, self.examples, self.device, options["classes"], options["loss"], extractor
        )
        self.example = found.x
        self.task = replace(found.task, steps=horizon or options["steps"])
        self.loss = options["loss"] or found.loss
        if extractor is not None and "features" in settings_of(cls):
            settings |= {"features": extractor.layer}
        self.algorithm = build(algorithm, model, self.loss, self.task, **settings).to(self.device)
        self.algorithm.check_input(found.x)
        self._make_fine_tuning(found.x)
        if self.splits and (why := why_unscored(found)):
            if self.splits != ["train"]:
                raise InputError(f"{why}; give the model one output, or no validation and test data.")
            warnings.warn(f"{why}: nothing is evaluated.", stacklevel=5)
            self.splits = []
        self.metrics, self.selects = choose_metrics(options["metric"], data.measures, self.task.kind)
        return found

    def _make_fine_tuning(self, x: Any) -> None:
        """MIRO and L2-SP, as parts of the algorithm, with which they are moved, trained and saved."""
        from shoal.models.features import find_head
        from shoal.training.fine_tuning import L2SP, head_for
        from shoal.training.miro import Miro

        options, model, algorithm = self.options, self.model, self.algorithm
        self.miro: Miro | None = None
        self.l2_sp: L2SP | None = None
        if options["miro"]:
            if algorithm.second_order:
                raise InputError(
                    f"miro={options['miro']:g} cannot be added to {type(algorithm).__name__}, which "
                    "computes its own gradients; remove miro."
                )
            self.miro = Miro(model, find_head(model, x), options["miro"], x)
            algorithm.add_module("miro", self.miro)
        self.head = head_for(options, model, x)
        if options["l2_sp"] is not None:
            assert self.head is not None
            self.l2_sp = L2SP(model, self.head, options["l2_sp"])
            algorithm.add_module("l2_sp", self.l2_sp)

    def _pieces(self) -> str | None:
        """Why batches are taken in pieces, if they are."""
        if self.options["accumulate"] > 1:
            return f"accumulate={self.options['accumulate']}"
        return f"training in {self.processes.count} processes" if self.processes.count > 1 else None

    def _make_engine(self) -> Engine:
        from shoal.training.fine_tuning import Rates

        options, count, algorithm = self.options, self.processes.count, self.algorithm
        size, accumulate = options["batch_size"], options["accumulate"]
        if options["compile"] and algorithm.second_order:
            raise InputError(
                f"{type(algorithm).__name__} uses second derivatives, which compiled models do not "
                "support; remove compile."
            )
        if size < count:
            raise InputError(
                f"batch_size={size} is split over {count} processes; it must be at least {count}."
            )
        if accumulate > size // count:
            raise InputError(
                f"accumulate={accumulate} pieces of {size // count} examples; it must be at most "
                f"{size // count}."
            )
        overridden = type(algorithm).objective is not Algorithm.objective
        if accumulate > 1 and (overridden or algorithm.second_order):
            raise InputError(cannot_accumulate(algorithm, accumulate))
        auxiliary = algorithm.auxiliary_optimizers()
        optimizer = make_optimizer(options, trained_parameters(algorithm, auxiliary))
        if self.miro is not None:
            self.miro.own_rate(optimizer)
        self.rates = None if self.head is None else Rates(optimizer, options, self.model, self.head)
        algorithm.prepare(optimizer, self.rates.base if self.rates else _rate(optimizer))
        engine = Engine(
            algorithm,
            optimizer,
            self.processes,
            share=len(range(self.processes.index, size, count)) / size,
            precision=self.precision,
            clip=options["clip"],
            accumulate=accumulate,
            auxiliary=auxiliary,
        )
        engine.extra_loss = self.miro
        if self.l2_sp is not None:
            engine.gradient_hooks.append(self.l2_sp.added)
        return engine

    @property
    def lr(self) -> float:
        """The learning rate now, of what has none of its own."""
        return self.rates.now if self.rates else _rate(self.engine.optimizer)

    def _default_eval_every(self) -> int:
        """As many evaluations as pass no more examples through the model than the training does."""
        options, sampler = self.options, self.sampler
        trained = options["steps"] * sampler.domains_per_step * sampler.batch_size
        each = sum(map(len, self.evaluator.which.values()))
        if uses_swad(options):
            return -(-options["steps"] // SWAD_EVALUATIONS)
        asked = options["patience"] is not None  # evaluations are part of it
        fits = [n for n in EVALUATIONS if asked or n * each <= max(trained, CHEAP)]
        return math.ceil(options["steps"] / max([1, *fits]))

    def evaluator_of(self, splits: Sequence[str], limits: Mapping[str, int] | None) -> Evaluator:
        """An evaluator of these splits."""
        return Evaluator(
            evaluation_view(self.examples),
            {split: self.data.splits[split] for split in splits},
            task=self.task,
            loss=self.loss,
            batch_size=self.eval_batch,
            workers=self.options["workers"],
            limits=limits,
            processes=self.processes,
            autocast=lambda: self.engine.autocast(),
            enter=self.enter,
            metrics=self.metrics,
            selects=self.selects,
            uncounted=self.data.uncounted,
            watch=lambda split, done, total: self.progress.count(f"evaluating {split}", done, total),
            label_scale=self.data.label_scale,
        )

    def loader(self, sampler: Any, start: int, stop: int, workers: int | None = None) -> MetaBatchLoader:
        """This process's share of the batches that a sampler plans."""
        return MetaBatchLoader(
            self.examples,
            sampler,
            workers=self.options["workers"] if workers is None else workers,
            device=self.device,
            enter=self.enter if self.channels_last else None,
            start=start,
            stop=stop,
            share=(self.processes.index, self.processes.count),
        )

    def enter(self, x: Any) -> Any:
        """Inputs, laid out in memory as the weights are."""
        return map_nest(_channels_last, x) if self.channels_last else x

    @contextmanager
    def training(self) -> Iterator[None]:
        """While it trains: weights are laid out as asked, hooks attached, and other parts frozen."""
        modules: list[Any] = [self.model] + ([self.miro.pretrained] if self.miro else [])
        recording = self.miro.recording() if self.miro else nullcontext()
        try:
            for module in modules if self.channels_last else ():
                module.to(memory_format=torch.channels_last)
            with self.algorithm.recording(), recording, only_trained(self.model, self.only):
                yield
        finally:
            for module in modules if self.channels_last else ():
                module.to(memory_format=torch.contiguous_format)

    def train_mode(self) -> None:
        """Training mode for what is trained; ``frozen`` is the mode of the rest of the model."""
        self.model.train(self.only is None or self.frozen == "train")
        if self.only is not None:
            self.only.train()

    def _compile(self) -> None:
        """As ``model.compile()`` of what the engine calls, which leaves ``nn.Sequential`` as it is."""
        called: list[nn.Module] = [self.model]
        if self.algorithm.needs_features and self.algorithm.extractor is None:
            called = [self.model.get_submodule(name) for name in ("features", "head")]
        for module in called:
            module._compiled_call_impl = _compiled(module)


@contextmanager
def only_trained(model: nn.Module, part: nn.Module | None) -> Iterator[None]:
    """Within the block no parameter outside ``part`` requires a gradient; ``None``: nothing changes."""
    own = {id(p) for p in (model if part is None else part).parameters()}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    try:
        for p in frozen:
            p.requires_grad_(False)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)


def _compiled(module: nn.Module) -> Any:
    """A compiled call of the module; one that cannot be compiled runs as it is, with the same result."""
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

    return call


def _channels_last(x: Any) -> Any:
    """Every tensor (B, c, h, w) with its channels last in memory; the values are the same."""
    if isinstance(x, Tensor) and x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def _rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0].get("lr", 1.0))


def _numbers(device: torch.device) -> int:
    """What a batch may become in any operation of an evaluation."""
    if device.type != "cuda":
        return NUMBERS.get(device.type, NUMBERS["cuda"])
    return max(NUMBERS["cuda"], torch.cuda.get_device_properties(device).total_memory // OF_MEMORY)
