"""One training, from checked input to the selected weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.algorithms import Algorithm, Loss, build
from shoal.data.batch import DomainData, Task
from shoal.data.check import check_examples, check_outputs
from shoal.data.domains import Domains
from shoal.data.loader import MetaBatchLoader, seeded, to_device
from shoal.data.sampler import DomainBatchSampler
from shoal.errors import InputError
from shoal.replay import leaves_no_trace
from shoal.training.capture import CapturedSteps, why_not
from shoal.training.engine import Engine, pick_device
from shoal.training.evaluate import Scores, evaluate, snapshot
from shoal.training.options import Options
from shoal.training.progress import Progress

CHUNK = 50
"""Steps between two looks up from the work, to show how far it is."""


class Diverged(RuntimeError):
    """The loss was no longer a finite number; ``history`` holds what was measured before."""

    def __init__(self, message: str, history: list[Point]) -> None:
        super().__init__(message)
        self.history = history


@dataclass(frozen=True)
class Point:
    """What was measured at one step: the mean loss since the point before, and scores by split.

    ``passes`` counts the minibatches passed forward and backward so far, in which methods with different
    numbers of batches a step are to be compared.
    """

    step: int
    passes: int
    loss: float
    scores: Mapping[str, Scores]


class Training:
    """Trains ``model`` in place, in chunks; everything is checked when it is made, before any training."""

    def __init__(
        self,
        algorithm: str | type[Algorithm],
        model: nn.Module,
        data: DomainData,
        options: Options,
        label: str | None = None,
    ) -> None:
        self.options = options
        self.data = data
        self.device = pick_device(options.device)
        self.model = model.to(self.device)
        self.label = label or (algorithm if isinstance(algorithm, str) else algorithm.__name__)
        examples: Any = data.examples
        self.examples: Any = examples.to(self.device) if hasattr(examples, "batch") else examples
        self.splits: list[str] = [s for s in options.eval_splits if s in data.splits]
        self.select = options.select or ("best" if "validation" in self.splits else "last")
        watches = self.select == "best" or options.patience or options.warm_start == "plateau"
        if watches and "validation" not in self.splits:
            raise InputError(
                "select='best', patience and warm_start='plateau' need validation data; give some."
            )
        self.eval_every = options.eval_every or max(1, options.steps // 10)

        with seeded(options.seed):  # reading examples may draw random numbers
            self.task, usual_loss = self._check_task()
        self.algorithm = build(
            algorithm, self.model, options.loss or usual_loss, self.task, **options.settings
        ).to(self.device)
        self.sampler = DomainBatchSampler(
            data.splits["train"],
            options.batch_size,
            options.domains_per_step,
            draw=options.draw or self.algorithm.draw,
            seed=options.seed,
            steps=options.steps,
        )
        self._check_comparison()
        optimizer = options.make_optimizer(self.algorithm)
        self.engine = Engine(self.algorithm.wrap(optimizer, self.sampler.domains_per_step))
        self.unroll = self._unroll()
        self.warm = self._warm_training() if options.warm_start is not None else None

        self.history: list[Point] = []
        self.best: tuple[Point, dict[str, Tensor]] | None = None
        self.seconds = 0.0
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(options.seed)
            self.random_state = self._random_state()

    def _check_task(self) -> tuple[Task, Loss]:
        """Looks at the data, and at what the model makes of two examples."""
        domains = self.data.splits["train"]
        x, y = _two(self.examples, domains, self.device)
        output = self._trial(x)
        classes = self.options.classes or self.data.classes
        if y.is_floating_point() and classes is not None:
            raise InputError(f"classes={classes} but the targets are {y.dtype}; labels must be integers.")
        if not y.is_floating_point() and classes is None and output.ndim == 2:
            classes = output.shape[1]
            if classes == 1:
                raise InputError(
                    "the model has one output and the labels are integers: for classification give it one "
                    "output a class; for regression make the targets floating."
                )
        for which in self.data.splits.values():
            check_examples(self.examples, which, classes)
        check_outputs(output, y, classes)
        usual: Loss = nn.functional.mse_loss if classes is None else nn.functional.cross_entropy
        return Task(domains=len(domains), classes=classes), usual

    def _trial(self, x: Any) -> Any:
        """What the model makes of ``x``, before training and without a trace."""
        mode = self.model.training
        try:
            with torch.no_grad(), leaves_no_trace(self.model):
                return self.model.eval()(x)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            given = f"x of shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            first = (str(error).splitlines() or [""])[0]
            raise InputError(f"the model cannot take two training examples ({given}): {first}") from error
        finally:
            self.model.train(mode)

    def _check_comparison(self) -> None:
        if not self.algorithm.compares_domains or self.sampler.draw == "regrouped":
            return
        name = type(self.algorithm).__name__
        if self.task.domains < 2:
            only = self.data.splits["train"].names[0]
            raise InputError(
                f"{name} compares domains and there is only one to train on ({only!r}); "
                "give at least two, or train with 'erm'."
            )
        if self.sampler.domains_per_step < 2:
            raise InputError(f"{name} compares domains: domains_per_step must be at least 2, got 1.")

    def _warm_training(self) -> Training:
        steps, one_pass = self.options.warm_steps(len(self.data.splits["train"].examples()))
        plateau = self.options.warm_start == "plateau"
        options = replace(
            self.options,
            steps=steps,
            domains_per_step=1,
            settings={},
            draw=None,
            warm_start=None,
            patience=5 if plateau else None,
            select="best" if plateau else "last",
            eval_every=max(1, one_pass // 10) if plateau else steps,
        )
        return Training("erm", self.model, self.data, options, label="warm start")

    def _unroll(self) -> int:
        """How many steps a CUDA graph holds; 0 for none."""
        if self.options.capture is False:
            return 0
        reason = why_not(self.algorithm, self.examples, self.device)
        if reason and self.options.capture:
            raise InputError(f"capture=True cannot be had: {reason}.")
        if reason:
            return 0
        # About ten batches to a graph, so that launching it pays also where a step is a single batch.
        batches = max(1, 10 // self.sampler.domains_per_step)
        return math.gcd(math.gcd(self.options.steps, self.eval_every), batches)

    def _random_state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        return [*states, torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else states

    def _set_random_state(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self.device)

    @contextmanager
    def _own_world(self) -> Iterator[None]:
        """This training's random numbers and clock; afterwards those outside are as they were."""
        outside = self._random_state()
        self._set_random_state(self.random_state)
        began = time.monotonic()
        try:
            yield
        finally:
            self.random_state = self._random_state()
            self._set_random_state(outside)
            self.seconds += time.monotonic() - began

    def run(self) -> None:
        """Trains to the end."""
        if self.warm is not None:
            self.warm.run()
            self.warm.restore_selected()
        steps, every = self.options.steps, self.eval_every
        shown = self.options.progress
        progress = Progress(self.label, steps, bool(shown))
        tell = shown if callable(shown) else progress.update
        self.model.train()
        advance = self._captured() if self.unroll else self._eager()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        step = since = 0
        try:
            while step < steps and not self._stale():
                stop = min(steps, step + every - step % every, step + CHUNK)
                with self._own_world():
                    while step < stop:
                        taken, losses = next(advance)
                        total += losses.double().mean() * taken
                        step += taken
                    if step % every == 0 or step == steps:
                        self._measure(step, float(total) / (step - since), since)
                        total.zero_()
                        since = step
                tell(step, self._note())
        finally:
            progress.close()

    def _eager(self) -> Iterator[tuple[int, Tensor]]:
        options = self.options
        loader = MetaBatchLoader(
            self.examples, self.sampler, workers=options.workers, device=self.device, stop=options.steps
        )
        for batches in loader:
            yield 1, self.algorithm.step(batches, self.engine)["losses"]

    def _captured(self) -> Iterator[tuple[int, Tensor]]:
        captured = CapturedSteps(self.algorithm, self.engine, self.examples, self.sampler, self.unroll)
        for step in range(0, self.options.steps, self.unroll):
            yield self.unroll, captured.run(step)["losses"]

    def _measure(self, step: int, loss: float, since: int) -> None:
        if not math.isfinite(loss):
            raise Diverged(
                f"{self.label}: the loss turned {loss} between steps {since} and {step}; lower the learning "
                "rate or the weight of the penalty.",
                self.history,
            )
        before = self._random_state()
        scores = {split: self._score(self.data.splits[split]) for split in self.splits}
        self._set_random_state(before)  # how often one looks must not change the training
        point = Point(step, step * self.sampler.domains_per_step, loss, scores)
        self.history.append(point)
        if self.select == "best" and (
            self.best is None or scores["validation"].better_than(self.best[0].scores["validation"])
        ):
            self.best = (point, snapshot(self.model))

    def _score(self, domains: Domains) -> Scores:
        return evaluate(
            self.model,
            self.examples,
            domains,
            classification=self.task.is_classification,
            device=self.device,
            workers=self.options.workers,
            limit=self.options.eval_limit,
        )

    def _stale(self) -> bool:
        if self.options.patience is None or not self.history:
            return False
        best = 0
        for i, point in enumerate(self.history):
            if point.scores["validation"].better_than(self.history[best].scores["validation"]):
                best = i
        return len(self.history) - 1 - best >= self.options.patience

    def _note(self) -> str:
        if not self.history:
            return ""
        point = self.history[-1]
        return f"loss {point.loss:.3f}  " + "  ".join(
            f"{split} {s.average:.1%}" if s.metric == "accuracy" else f"{split} mse {s.average:.3g}"
            for split, s in point.scores.items()
        )

    def restore_selected(self) -> Point:
        """Puts the selected weights into the model, ready to predict, and says where they come from."""
        if not self.history:
            raise RuntimeError("this training has not run yet.")
        self.model.eval()
        if self.best is None:
            return self.history[-1]
        point, weights = self.best
        self.model.load_state_dict(weights)
        return point


def _two(examples: Any, domains: Domains, device: torch.device) -> tuple[Any, Tensor]:
    """Two examples as a batch."""
    which = [int(i) for i in domains.indices[:2]]
    if hasattr(examples, "batch"):
        return to_device(examples.batch(torch.tensor(which, device=examples.device)), device)
    return to_device(tuple(torch.utils.data.default_collate([examples[i] for i in which])), device)
