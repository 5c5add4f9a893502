"""``shoal.fit``: train a model with any algorithm, in our loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import NDArray
from torch import nn
from typing_extensions import Unpack

from shoal.algorithms import Algorithm, Loss
from shoal.data.arrays import read_examples
from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.errors import InputError, unknown_name
from shoal.experiments.config import RunConfig
from shoal.experiments.record import PYTHON, RunRecord
from shoal.files import read_yaml
from shoal.losses import BINARY, find_terms
from shoal.models.backbones import freeze_batchnorm
from shoal.options import FitOptions, TrainingOptions, declared, public
from shoal.training.calibration import calibrated
from shoal.training.callbacks import Point
from shoal.training.card import model_files
from shoal.training.evaluate import Scores
from shoal.training.folder import RunFolder
from shoal.training.metrics import METRICS
from shoal.training.options import OPTIMIZERS, complete, plain
from shoal.training.processes import Processes
from shoal.training.recipes import Job, find_recipe
from shoal.training.setup import Setup
from shoal.training.summary import describe, summary

if TYPE_CHECKING:
    import pandas

    from shoal.api.export import Exported
    from shoal.trained import Trained


@dataclass
class Fit:
    """A finished training, the result of :func:`fit`.

    Attributes:
        model: trained model, in eval mode, with the weights of ``selected``.
        algorithm: algorithm that trained it.
        history: evaluations during the training.
        warm_up: evaluations during the warm start.
        selected: evaluation whose weights were selected.
        rule: selection rule.
        seconds: duration of the training.
        captured: whether steps were replayed as CUDA graphs.
        agreement: gradient agreement between domains, if it was tracked.
        record: everything that was measured, as plain data: the content of ``record.json``.
    """

    model: nn.Module
    algorithm: Algorithm
    history: list[Point]
    warm_up: list[Point]
    selected: Point
    rule: str
    seconds: float
    captured: bool
    agreement: list[dict[str, Any]]
    record: Mapping[str, Any]
    _files: Callable[..., dict[str, bytes]] = field(default=dict, repr=False)
    _trained: Trained | None = field(default=None, repr=False)

    @property
    def last(self) -> Point:
        return self.history[-1]

    def scores(self, split: str = "test") -> Scores:
        """Return the scores of every domain of a split at the selected step.

        Args:
            split: name of the split.
        """
        found = self.selected.scores
        if split not in found:
            raise unknown_name("split", split, found)
        return found[split]

    def accuracy(self, name: str = "test") -> float:
        """Return the accuracy on a domain or a split at the selected step.

        Args:
            name: name of the domain or split.
        """
        scores = self._scores_with(name)
        if scores.metric != "accuracy":
            raise InputError(
                f"accuracy is not defined for regression; use score({name!r}) for the {scores.metric}."
            )
        return scores[name] if name in scores.names else scores.average

    def score(self, name: str = "test") -> float:
        """Return the metric of the training (accuracy, AUC, mse …) on a domain or a split.

        Args:
            name: name of the domain or split.
        """
        scores = self._scores_with(name)
        if name not in scores.names or scores.names == (name,):
            return scores.selection_score
        if scores.selects not in (None, scores.metric):
            raise InputError(
                f"{scores.selects} was measured per split, not per domain: score('test'), or "
                f"scores(SPLIT)[{name!r}] for the {scores.metric}."
            )
        return scores[name]

    def _scores_with(self, name: str) -> Scores:
        """Those of the split called ``name``, or of the first split that has such a domain."""
        found = self.selected.scores
        for split in (name, "test", "validation", "id_test", "id_validation", "train"):
            if split in found and name in (split, *found[split].names):
                return found[split]
        raise unknown_name("domain or split", name, [n for s in found for n in (s, *found[s].names)])

    def predict(self, source: Any, *, batch_size: int = 256) -> NDArray[Any]:
        """Predict the class of each example (by name, if classes have names), or its value in regression.

        With several labels, the prediction is 0 or 1 for each.

        Args:
            source: array or tensor of inputs or, for data that Shoal has read (tables, images, text),
                anything that :meth:`shoal.Trained.predict` takes.
            batch_size: number of examples per batch.
        """
        return self.trained().predict(source, batch_size=batch_size)

    def trained(self) -> Trained:
        """Return the model with its preprocessing, as :func:`shoal.load` does."""
        from shoal.trained import Trained

        if self._trained is None:
            self._trained = Trained.in_memory(self.model, self._files(), self.record)
        return self._trained

    def save(self, folder: str | Path) -> Path:
        """Save the model, its preprocessing, model card and record to a folder, for :func:`shoal.load`.

        Args:
            folder: new folder.
        """
        return self.trained().save(folder)

    def export(
        self, out: str | Path, *, format: Literal["onnx", "torch-export", "safetensors"] | None = None
    ) -> Exported:
        """Export the model for use without Shoal; see :func:`shoal.export`.

        Args:
            out: file to write.
            format: ``"onnx"``, ``"torch-export"`` or ``"safetensors"`` (default: by the file extension).
        """
        return self.trained().export(out, format=format)

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per evaluation, split and domain."""
        import pandas

        points = self.history if self.selected in self.history else [*self.history, self.selected]
        rows = [
            (point.step, point is self.selected, split, domain, scores.metric, value)
            for point in points
            for split, scores in point.scores.items()
            for domain, value in zip(scores.names, scores.values, strict=True)
        ]
        return pandas.DataFrame(rows, columns=["step", "selected", "split", "domain", "metric", "value"])

    def __getstate__(self) -> dict[str, Any]:
        made = self._files()
        return {**self.__dict__, "_files": functools.partial(dict, made), "_trained": None}

    def __repr__(self) -> str:
        scores = self.selected.scores.items()
        parts = [f"{split} {s.selects or s.metric} {s.selection_score:.3f}" for split, s in scores]
        return f"Fit({type(self.algorithm).__name__}, {self.rule}: {', '.join(parts)})"

    def _repr_html_(self) -> str:
        frame = self.to_frame()
        html: str = frame[frame.selected].drop(columns=["step", "selected"]).to_html(index=False, max_rows=50)
        return html


@public("steps", "batch_size", "lr", "settings", "seed", "metric", "device")
def fit(
    algorithm: str | type[Algorithm],
    model: nn.Module,
    train: DomainData | Mapping[str, Any],
    *,
    validation: Mapping[str, Any] | None = None,
    test: Mapping[str, Any] | None = None,
    task: Literal["classification", "ordinal", "multilabel", "regression"] | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    **options: Unpack[FitOptions],
) -> Fit:
    """Train ``model`` in place with an algorithm and evaluate it on every domain. ::

        run = shoal.fit("fish", model, train={"art": art, "photo": photo}, test={"sketch": sketch}, steps=500)
        print(run.accuracy("sketch"))
        labels = run.predict(new_images)

    Random state outside of the training is not changed. Several inputs are one nested structure, ((a, b), y).
    Sample weights w are the third of three arrays, (x, y, w), or ``"sample_weight"`` of examples that are
    dicts: the loss of a batch is Σ w_i l_i / Σ w_i, also in evaluation; other metrics do not use them.

    Args:
        algorithm: name of an algorithm (``shoal list algorithms``), subclass of
            :class:`~shoal.algorithms.Algorithm`, or recipe for a pretrained model (``"auto"``, ``"erm++"``,
            ``"swad"``, ``"lp-ft"``, ``"miro"``), which sets options that are not given.
        model: any network, with its initial weights; ``"auto"`` freezes its BatchNorm.
        train: datasets by domain name, each a pair of arrays or tensors, or a ``Dataset`` or list of examples
            as in :func:`~shoal.data.from_dataset`; or one :class:`~shoal.data.DomainData` with all splits.
        validation: validation datasets by domain name, as in ``train``.
        test: test datasets by domain name, as in ``train``.
        task: kind of the task. By default integers, booleans and strings are classes (``classification``)
            and floating-point numbers ``regression``. ``multilabel`` is 0 or 1 for each of several labels,
            (B, L), or for one, (B,), with one logit each; a binary cross-entropy as ``loss`` means it.
            ``ordinal`` is classification with ordered classes.
        folder: folder for the log, checkpoints, trained weights and record, which ``shoal report`` and
            :class:`~shoal.experiments.store.Store` read. Ctrl-C and SIGTERM then finish the step and save it.
        resume: resume from the latest checkpoint in the folder; all other arguments must be the same.
        **options: options such as ``steps`` and ``lr``: see :class:`~shoal.options.FitOptions`.

    Returns:
        Fit: the trained model with its scores.
    """
    given: Any = options
    label = None
    if (recipe := find_recipe(algorithm)) is not None:
        algorithm, label, given = recipe.algorithm, recipe.name, recipe.fill(given)
    full = complete(**given)
    if recipe is not None and recipe.freeze_batchnorm:
        freeze_batchnorm(model)
    data = as_domain_data(train, validation, test, task, classes=full["classes"], loss=full["loss"])
    if folder is None:
        if resume or full["wandb"] or full["predictions"]:
            raise InputError("resume, wandb and predictions require folder.")
        return _run(Job(algorithm, model, data, full, label), None)
    processes = Processes(full["device"])
    hint = f"shoal.fit(…, folder={str(folder)!r}, resume=True)"
    run_folder = RunFolder(folder, processes, wandb=full["wandb"], hint=hint)
    # The main process answers for all, before it writes anything.
    started, finished = processes.gather((run_folder.started, run_folder.finished))[0]
    if started and not resume:
        state = "a finished run" if finished else "a run that is not finished"
        raise InputError(
            f"{str(folder)!r} contains {state}; choose another folder, or resume it with resume=True.",
            "folder",
        )
    job = Job(algorithm, model, data, full, label, processes)
    with run_folder:
        run_folder.write_config(describe(job.setup))
        result = _run(job, run_folder)
        result._files = functools.partial(result._files, calibrated(job.setup))
        if name := full["predictions"]:
            from shoal.training import predictions

            dataset_name = "data" if name is True else str(name)
            predictions.write(
                job.setup, Path(folder) / "predictions", dataset_name, ("seed", str(full["seed"]))
            )
        run_folder.finish(model.state_dict(), result.record, result._files)
    return result


def _run(job: Job, folder: RunFolder | None) -> Fit:
    """Takes a training to its end and puts the selected weights into the model."""
    selected = job.run(folder)
    setup = job.setup
    record = RunRecord(config=_config(setup), **summary(job)).to_dict()
    written = folder is not None and folder.main
    config = read_yaml(folder.config) if folder and written else describe(setup, where=False)
    recipe = getattr(setup.model, "recipe", None)
    return Fit(
        model=setup.model,
        algorithm=(job.retraining.setup if job.retraining else setup).algorithm,
        history=job.trainer.history,
        warm_up=job.warm.history if job.warm else [],
        selected=selected,
        rule=job.selected[1],
        seconds=job.seconds,
        captured=job.trainer.steps.graph is not None,
        agreement=list(record["agreement"]),
        record=record,
        _files=functools.partial(model_files, setup, recipe, record, config),
    )


def _config(setup: Setup) -> RunConfig:
    """What was trained, as far as a run's configuration can say it; ``dataset`` is "python".

    Data and models are not part of it: readers tell these runs apart by their folders.
    """
    optimizer, options = setup.engine.optimizer, plain(setup.options)
    first = optimizer.param_groups[0]
    lr = first.get("initial_lr", first["lr"]) / first.get("lr_scale", 1.0)
    known = [name for name, each in OPTIMIZERS.items() if each is type(optimizer)]
    fields = {name: options[name] for name in declared(TrainingOptions)}
    fields |= {"optimizer": known[0] if known else "adam", "lr": float(lr), "eval_every": setup.eval_every}
    fields["domains_per_step"] = setup.sampler.domains_per_step
    if not known:
        fields["optimizer_options"] |= {"class": type(optimizer).__name__}
    if callable(setup.options["schedule"]):
        fields["schedule"] = None
    selects = setup.evaluator.selects
    fields["metric"] = selects.name if selects and selects.name in METRICS else None
    return RunConfig(
        dataset=PYTHON,
        algorithm=setup.label,
        data_options={"domains": {split: len(domains) for split, domains in setup.data.splits.items()}},
        model=type(setup.model).__name__,
        **fields,
    )


def as_domain_data(
    train: DomainData | Mapping[str, Any],
    validation: Mapping[str, Any] | None,
    test: Mapping[str, Any] | None,
    task: str | None = None,
    *,
    classes: int | None = None,
    loss: Loss | None = None,
) -> DomainData:
    """The datasets of each domain and split as one."""
    if isinstance(train, DomainData):
        if validation is not None or test is not None or task is not None:
            raise InputError(
                "train is a DomainData, which already defines the task and the validation and test domains."
            )
        return train
    sets: dict[str, Any] = {}
    members: dict[str, list[str]] = {}
    for split, named in (("train", train), ("validation", validation), ("test", test)):
        if named is None:
            continue
        if not named:
            raise InputError(f"{split} is empty; it must map names of domains to datasets.")
        members[split] = [str(name) for name in named]
        sets |= {f"{split}: {name}": dataset for name, dataset in named.items()}
    # With a loss of their own, users have said what floating targets are.
    terms = find_terms(loss) if loss is not None else None
    found = read_examples(
        sets,
        task=task,
        classes=classes,
        default="regression" if loss is not None else None,
        binary=terms is not None and terms.function in BINARY,
    )
    every = found.splits["train"]
    splits = {
        split: Domains.from_indices({n: every.indices_of(every.number(f"{split}: {n}")) for n in names})
        for split, names in members.items()
    }
    return replace(found, splits=splits)
