"""What a training is made of: checked against each other and built, before any step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.algorithms import Algorithm, algorithm_class, build, check_settings, settings_of
from shoal.algorithms.base import trained_parameters
from shoal.data.batch import DomainData, InMemory, evaluation_view
from shoal.data.loader import MetaBatchLoader, seeded
from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError
from shoal.models import FeatureExtractor, FeatureModel
from shoal.models.head import find_head
from shoal.options import FitOptions
from shoal.training.agreement import Agreement, Tracking
from shoal.training.averaging import SWAD
from shoal.training.callbacks import each_step
from shoal.training.capture import draws, why_not
from shoal.training.engine import Engine, Precision, check_precision
from shoal.training.evaluate import Evaluator
from shoal.training.examine import (
    check_comparison,
    check_loss,
    examine,
    why_unscored,
)
from shoal.training.fine_tuning import L2SP, Rates, head_for
from shoal.training.formats import Choice, Format, channels_last, lay_out
from shoal.training.metrics import choose_metrics
from shoal.training.miro import Miro
from shoal.training.options import (
    SPLITS,
    make_average,
    make_optimizer,
    make_schedule,
    precision_of,
    probes_head,
    uses_swad,
    warm_steps,
)
from shoal.training.probing import only_trained, probed_head
from shoal.training.processes import Processes
from shoal.training.progress import Progress
from shoal.training.retraining import with_validation

EVALUATION_NUMBERS, ON_CPU = 2**26, 2**22
"""The most that a batch may become in any operation of an evaluation; on the CPU, what its caches like."""
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
LOG_EVERY = 50
"""Steps between two lines of the log."""
NOT_WARM: FitOptions = {
    **{"draw": None, "warm_start": None, "schedule": None, "average": None, "wise_ft": None},
    **{"miro": None, "l2_sp": None, "retrain": False, "track_every": None, "track_after": False},
}
"""Options that a warm start does without."""


class Setup:
    """The parts of a training. Everything is checked when it is made; nothing is trained.

    ``only`` is the part of the model that is trained, if not all of it; ``horizon`` the steps that algorithms
    schedule by, if not those of ``options``.
    """

    def __init__(
        self,
        algorithm: str | type[Algorithm],
        model: nn.Module,
        data: DomainData,
        options: FitOptions,
        label: str | None = None,
        phase: str = "train",
        processes: Processes | None = None,
        only: nn.Module | None = None,
        horizon: int | None = None,
    ) -> None:
        cls = algorithm_class(algorithm)
        self.options, self.data, self.phase, self.only = options, data, phase, only
        self.processes = processes or Processes(options["device"])
        self.device = self.processes.device
        self.model = model.to(self.device)
        precision = precision_of(options)
        self.choice = Choice(Format("contiguous", "fp32" if precision == "auto" else precision))
        """In what the model is computed; it may change before the first step (see :meth:`use`)."""
        self._laid_out: list[Tensor] = []
        self.label = label or (algorithm if isinstance(algorithm, str) else cls.__name__)
        examples: Any = data.examples
        self.gathers = isinstance(examples, InMemory)
        """A batch is gathered where the examples are."""
        self.examples: Any = examples.to(self.device) if self.gathers else examples
        self.splits: list[str] = [s for s in SPLITS if s in data.splits]
        self.select = options["select"] or ("best" if "validation" in self.splits else "last")
        watches = self.select == "best" or options["patience"] or options["warm_start"] == "plateau"
        watches = watches or options["wise_ft"] == "validation" or options["retrain"]
        if (watches or uses_swad(options)) and "validation" not in self.splits:
            raise InputError(
                "select='best', average='swad', warm_start='plateau', wise_ft='validation', retrain=True and "
                "patience require validation data."
            )
        if options["retrain"]:
            with_validation(data)
        shown = options["progress"] is True and self.processes.main
        self.progress = Progress(self.label, options["steps"], shown)
        # Reading examples may draw random numbers.
        with seeded(options["seed"]), self.progress.phase("reading data"):
            if isinstance(options["loss"], nn.Module):
                options["loss"].to(self.device)  # its class weights
            settings = check_settings(cls, options["settings"])
            extractor = self._extractor(cls, settings)
            found = examine(
                self.model, data, self.examples, self.device, options["classes"], options["loss"], extractor
            )
            self.task = replace(found.task, steps=horizon or options["steps"])
            self.loss = options["loss"] or found.loss
            if extractor is not None and "features" in settings_of(cls):
                settings |= {"features": extractor.layer}
            made = build(algorithm, self.model, self.loss, self.task, **settings)
            self.algorithm = made.to(self.device)
            self.algorithm.check_input(found.x)
            self.head: nn.Module | None = None
            """What a linear probe trains, where there is to be one."""
            if probes_head(options):
                self.head = probed_head(self.model, found.x, f"warm_start={options['warm_start']!r}")
            self.miro = (
                self._make_miro(found.x) if options["miro"] and phase in ("train", "retrain") else None
            )
            self.tuned_head = head_for(options, self.model, found.x)
            self.l2_sp = self._make_l2_sp() if options["l2_sp"] is not None else None
            if self.splits and (why := why_unscored(found)):
                if self.splits != ["train"]:
                    raise InputError(f"{why}; give the model one output, or no validation and test data.")
                warnings.warn(f"{why}: nothing is evaluated.", stacklevel=4)
                self.splits = []
            kind = self.task.kind
            self.metrics, self.selects = choose_metrics(options["metric"], data.measures, kind)
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
            check_loss(self.loss, found, self.algorithm, self._divided())
        with only_trained(self.model, only):
            self.engine = self._make_engine()
        self.algorithm.autocast = self.engine.autocast
        self.schedule = make_schedule(options, self.engine.optimizer)
        if self.rates is not None:
            self.rates.check(self.schedule)
        self.average = make_average(options)
        most = _most_numbers(self.device)
        self.eval_batch = options["eval_batch"] or max(1, min(1024, most // found.numbers))
        limits = {"train": TRAIN_SAMPLE} if "train" in self.splits else {}
        if options["eval_limit"] is not None:
            limits = dict.fromkeys(self.splits, options["eval_limit"])
        self.evaluator = self.evaluator_of(self.splits, limits)
        self.eval_every = options["eval_every"] or self._usual_eval_every()
        self.few_evaluations = self._few_evaluations()
        if self.few_evaluations and self.processes.main:
            warnings.warn(self.few_evaluations, stacklevel=3)
        if options["wise_ft"] is not None and options["warm_start"] is None and phase == "train":
            self._warn_of_new_head()
        self.unroll = self._unroll()
        self.tracking = self._make_tracking() if options["track_every"] is not None else None

    def _extractor(self, cls: type[Algorithm], settings: Mapping[str, Any]) -> FeatureExtractor | None:
        """What finds the features of the model, where the algorithm uses any and they are to be found."""
        layer = settings.get("features")
        if not cls.needs_features or (layer is None and isinstance(self.model, FeatureModel)):
            return None
        extractor = FeatureExtractor(self.model, layer)
        extractor.close()
        return extractor

    def _make_l2_sp(self) -> L2SP:
        assert self.tuned_head is not None
        made = L2SP(self.model, self.tuned_head, self.options["l2_sp"] or 0.0)
        self.algorithm.add_module("l2_sp", made)
        return made

    def _make_miro(self, x: Any) -> Miro:
        """As a part of the algorithm, with which it is moved, trained and saved."""
        if not self.algorithm.by_engine:
            raise InputError(
                f"miro={self.options['miro']:g} cannot be added to {type(self.algorithm).__name__}, which "
                "computes its own gradients; remove miro."
            )
        made = Miro(self.model, find_head(self.model, x), self.options["miro"] or 0.0, x)
        self.algorithm.add_module("miro", made)
        return made

    def _divided(self) -> str | None:
        """Why batches are taken in pieces, if they are."""
        if self.options["accumulate"] > 1:
            return f"accumulate={self.options['accumulate']}"
        return f"training in {self.processes.count} processes" if self.processes.count > 1 else None

    def _make_engine(self) -> Engine:
        options, count = self.options, self.processes.count
        check_precision(precision_of(options), self.algorithm)
        if options["compile"] and self.algorithm.second_order:
            raise InputError(
                f"{type(self.algorithm).__name__} uses second derivatives, which compiled models do not "
                "support; "
                "remove compile."
            )
        if options["batch_size"] < count:
            raise InputError(
                f"batch_size={options['batch_size']} is split over {count} processes; "
                f"it must be at least {count}."
            )
        least = options["batch_size"] // count  # the same answer in all of them
        if options["accumulate"] > least:
            raise InputError(
                f"accumulate={options['accumulate']} pieces of {least} examples; it must be at most {least}."
            )
        auxiliary = self.algorithm.auxiliary_optimizers()
        optimizer = make_optimizer(options, trained_parameters(self.algorithm, auxiliary))
        if self.miro is not None:
            self.miro.own_rate(optimizer)
        self.rates = (
            None if self.tuned_head is None else Rates(optimizer, options, self.model, self.tuned_head)
        )
        return Engine(
            self.algorithm.wrap(optimizer, self.sampler.domains_per_step),
            self.processes,
            share=len(range(self.processes.index, options["batch_size"], count)) / options["batch_size"],
            precision=self.choice.format.precision,
            clip=options["clip"],
            accumulate=options["accumulate"],
            auxiliary=auxiliary,
            loss=self.loss,
            miro=self.miro,
            l2_sp=self.l2_sp,
        )

    @property
    def lr(self) -> float:
        """The learning rate now, of what has none of its own."""
        return self.rates.now if self.rates else float(self.engine.optimizer.param_groups[0]["lr"])

    def _usual_eval_every(self) -> int:
        """As many evaluations as pass no more examples through the model than the training does."""
        options, sampler = self.options, self.sampler
        trained = options["steps"] * sampler.domains_per_step * sampler.batch_size
        each = sum(map(len, self.evaluator.which.values()))
        if uses_swad(options):
            return -(-options["steps"] // SWAD_EVALUATIONS)
        asked = options["patience"] is not None  # evaluations are part of it
        fits = [n for n in EVALUATIONS if asked or n * each <= max(trained, CHEAP)]
        return -(-options["steps"] // max([1, *fits]))

    def _few_evaluations(self) -> str:
        """What is wrong where SWAD could not find an end in so few evaluations."""
        average, steps, every = self.average, self.options["steps"], self.eval_every
        count = -(-steps // every)
        if not isinstance(average, SWAD) or count >= average.converge + average.tolerate:
            return ""
        return (
            f"average='swad' has {count} evaluation{'s' * (count != 1)} (steps={steps:,}, "
            f"eval_every={every:,}). It needs {average.converge} to find a start and "
            f"{average.converge + average.tolerate} to find an end; its authors evaluate 31 to 101 times. "
            f"Set eval_every={max(1, steps // 50)}."
        )

    def _warn_of_new_head(self) -> None:
        if self.processes.main:
            warnings.warn(
                "wise_ft interpolates with the weights at the start. If the head is randomly initialised, "
                "train it first with warm_start='head'.",
                stacklevel=4,
            )

    def evaluator_of(self, splits: Sequence[str], limits: Mapping[str, int] | None) -> Evaluator:
        return Evaluator(
            evaluation_view(self.examples),
            {split: self.data.splits[split] for split in splits},
            task=self.task,
            loss=self.loss,
            batch_size=self.eval_batch,
            workers=self.options["workers"],
            limits=limits,
            processes=self.processes,
            autocast=self._autocast,
            enter=self.entering,
            metrics=self.metrics,
            selects=self.selects,
            uncounted=self.data.uncounted,
            watch=self.watch,
            label_scale=self.data.label_scale,
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        return self.engine.autocast()

    def compute_in(self, precision: Precision) -> None:
        """Sets the precision of forward passes, those of evaluations too."""
        self.engine.compute_in(precision)
        self.algorithm.autocast = self.engine.autocast

    def use(self, choice: Choice) -> None:
        """Computes in this format from now on."""
        self.choice = choice
        self.compute_in(choice.format.precision)
        if choice.format.memory_format == "channels-last":
            self._laid_out += lay_out(self.model)
            if self.miro is not None:
                lay_out(self.miro.pretrained)

    def give_back(self) -> None:
        """Lays the model's weights out as they were."""
        for tensor in self._laid_out:
            tensor.data = tensor.data.contiguous()
        self._laid_out = []

    def entering(self, x: Any) -> Any:
        """Inputs, laid out in memory as the weights are."""
        return channels_last(x) if self.choice.format.memory_format == "channels-last" else x

    def watch(self, split: str, done: int, total: int) -> None:
        """Called between two batches of an evaluation."""

    def loader(self, sampler: Any, start: int, stop: int, workers: int | None = None) -> MetaBatchLoader:
        """This process's share of the batches that a sampler plans."""
        return MetaBatchLoader(
            self.examples,
            sampler,
            workers=self.options["workers"] if workers is None else workers,
            device=self.device,
            enter=self.entering,
            start=start,
            stop=stop,
            share=(self.processes.index, self.processes.count),
        )

    def _make_tracking(self) -> Tracking:
        options = self.options
        capture = self.unroll > 0 and self.gathers and not draws(self.algorithm)
        return Tracking(
            Agreement(self.algorithm, self.engine, capture=capture),
            self.data.splits["train"],
            self.sampler,
            self.examples,
            every=options["track_every"] or 1,
            after=options["track_after"],
            workers=options["workers"],
            share=(self.processes.index, self.processes.count),
            enter=self.entering,
        )

    def retrain_options(self, found: FitOptions) -> FitOptions:
        """Those of the training on all data, with what the search has found."""
        once: FitOptions = {"patience": None, "track_every": None, "retrain": False, "select": "last"}
        return {**self.options, **found, **once, "eval_every": found["steps"]}

    def warm_options(self) -> FitOptions:
        """Those of the training with ERM that a warm start is."""
        steps, one_pass = warm_steps(self.options, len(self.data.splits["train"].examples()))
        plateau = self.options["warm_start"] == "plateau"
        return {
            **self.options,
            **NOT_WARM,
            "steps": steps,
            "domains_per_step": 1,
            "settings": {},
            "patience": 5 if plateau else None,
            "select": "best" if plateau else "last",
            "eval_every": max(1, one_pass // 10) if plateau else steps,
        }

    def _unroll(self) -> int:
        """How many steps a CUDA graph is to hold; 0 for none."""
        options = self.options
        if options["capture"] is False:
            return 0
        reason = why_not(self.algorithm, self.engine)
        if self.schedule is not None:
            reason = reason or "a schedule changes the learning rate between steps"
        if reason and options["capture"]:
            raise InputError(f"capture=True is not possible: {reason}.")
        if reason:
            return 0
        alone = self.average or options["track_after"] or each_step(options["callbacks"])
        if draws(self.algorithm) or alone or not self.gathers:
            return 1
        # About ten batches to a graph, so that launching it pays also where a step is a single batch.
        batches = max(1, 10 // self.sampler.domains_per_step)
        regular = (LOG_EVERY, options["checkpoint_every"] or 0, options["track_every"] or 0)
        return math.gcd(options["steps"], self.eval_every, batches, *regular)

    def compile(self) -> None:
        """As ``model.compile()`` of what the algorithm calls, which leaves ``nn.Sequential`` as it is."""
        called: list[nn.Module] = [self.model]
        if (
            self.algorithm.needs_features
            and self.algorithm.extractor is None
            and isinstance(self.model, FeatureModel)
        ):
            called = [self.model.features, self.model.head]
        for module in called:
            call = module._call_impl
            module._compiled_call_impl = torch.compile(
                lambda *inputs, call=call, **named: call(*inputs, **named)
            )


def _most_numbers(device: torch.device) -> int:
    """What a batch may become in any operation of an evaluation."""
    if device.type == "cpu":
        return ON_CPU
    if device.type != "cuda":
        return EVALUATION_NUMBERS
    return max(EVALUATION_NUMBERS, torch.cuda.get_device_properties(device).total_memory // OF_MEMORY)
