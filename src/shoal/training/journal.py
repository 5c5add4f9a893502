"""What a training leaves in its folder while it runs."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from safetensors.torch import save
from torch import Tensor

from shoal.errors import InputError
from shoal.files import dump_yaml, read_yaml
from shoal.training.checkpoint import Checkpoints
from shoal.training.folder import RunFolder
from shoal.training.loggers import Logger, Metrics, TensorBoard, WeightsAndBiases
from shoal.training.processes import Processes


class Journal(RunFolder):
    """The log and the checkpoints of a training, in a folder that is locked meanwhile.

    Of several processes the main one writes and all of them read. A full disk costs checkpoints, never the
    training: the last one that could be written stays.

    Args:
        folder: folder of the run.
        processes: the processes that train together.
        wandb: project of Weights & Biases to log to.
        config: what is run, for Weights & Biases.
        resume_hint: how to resume a run that was stopped.
    """

    def __init__(
        self,
        folder: str | Path,
        processes: Processes,
        *,
        wandb: str | None = None,
        config: Mapping[str, Any] | None = None,
        resume_hint: str = "the same command or call",
    ) -> None:
        super().__init__(folder)
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self.processes, self.wandb = processes, wandb
        self.written_config, self.resume_hint = config or {}, resume_hint
        self.saved: int | None = None
        """The step of the newest checkpoint."""
        self._metrics: Metrics | None = None
        self._loggers: list[Logger] = []
        self._wandb: list[Logger] = []
        """The one of all stages, if there is one."""
        self._full = False

    def __enter__(self) -> Self:
        if self.processes.main:
            super().__enter__()
            if self.wandb:
                self._wandb = [WeightsAndBiases(self.wandb, self.written_config, self.path)]
        return self

    def __exit__(self, *error: object) -> None:
        for logger in (*self._loggers, *(self._wandb if self.wandb else ())):
            logger.close()
        super().__exit__()

    def stage(self, name: str) -> Journal:
        """The journal of a stage of a recipe, in a folder of its own."""
        folder = self.path / "stages" / name.replace(" ", "-")
        stage = Journal(folder, self.processes, resume_hint=self.resume_hint)
        stage._wandb = self._wandb
        return stage

    def restore(self) -> dict[str, Any] | None:
        """The newest checkpoint, if there is one; the log is cut back to where it was."""
        self.saved, state = self.checkpoints.load() or (None, None)
        if len(steps := set(self.processes.gather(self.saved))) > 1:
            raise InputError(f"processes see checkpoints of steps {steps}: {self.path} must be one folder.")
        if self.processes.main:
            try:
                self._metrics = Metrics(self.path / "metrics.jsonl", state["log"] if state else 0)
            except OSError as error:
                raise InputError(
                    f"metrics.jsonl in {self.path} cannot be written: {error.strerror}."
                ) from error
            self._loggers = [self._metrics]
            if importlib.util.find_spec("tensorboard") is not None:
                self._loggers.append(TensorBoard(self.path / "tensorboard", self.saved or 0))
        return state

    def line(self, line: Mapping[str, Any]) -> None:
        """Write a line of the log."""
        for logger in (*self._loggers, *self._wandb):
            logger.log(line)

    def checkpoint(self, step: int, state: Mapping[str, Any]) -> bool:
        """Whether one was written; a full disk is a warning."""
        if self._metrics is None:
            return False
        try:
            self.checkpoints.save(step, {**state, "log": self._metrics.flush()})
            self.saved, self._full = step, False
        except OSError as error:
            if not self._full:
                latest = "there is none yet" if self.saved is None else f"the latest is that of {self.saved}"
                warnings.warn(
                    f"the checkpoint of step {step} could not be written to {self.path} ({error.strerror}); "
                    f"{latest}. Training continues.",
                    stacklevel=2,
                )
            self._full = True
        return not self._full

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write down what is run; a run that is resumed has that of its first start."""
        if not self.config.exists():
            self.write("config.yaml", dump_yaml(dict(config)).encode())

    def read_config(self) -> dict[str, Any]:
        """What is run, as it was written down at the first start."""
        return dict(read_yaml(self.config))

    def finish(
        self,
        weights: Mapping[str, Tensor],
        record: Mapping[str, Any],
        files: Callable[[], Mapping[str, bytes]] | None = None,
    ) -> dict[str, str]:
        """Write the selected weights, the other files of the model and the record: the run is complete.

        Returns the checksums (SHA-256) of the files, which the record has under ``files``.
        """
        if not self.processes.main:
            return {}
        contents: dict[str, bytes] = {}
        if weights:  # a baseline has none
            contiguous = {k: v.detach().cpu().clone().contiguous() for k, v in weights.items()}
            contents[self.model.name] = save(contiguous)
        try:
            contents |= files() if files else {}
        except Exception as error:  # whatever it is, a night's training must not end without its record
            first = (str(error).splitlines() or [""])[0]
            message = f"the model's card could not be written ({type(error).__name__}: {first})."
            warnings.warn(message, stacklevel=3)
        for name, content in contents.items():
            self.write(name, content)
        sums = {k: hashlib.sha256(v).hexdigest() for k, v in contents.items() if k != "card.md"}
        self.write_record({**record, "files": sums})
        return sums

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write the record, the last file of a run."""
        self.write("record.json", json.dumps(record, default=dict).encode())

    def write(self, name: str, content: bytes) -> None:
        """Replace the entry of the folder called ``name``."""
        try:
            if self.processes.main:
                super().write(name, content)
        except OSError as error:
            raise InputError(
                f"{self.path / name} could not be written ({error.strerror}). Free some disk space, then run "
                f"again, which continues from a checkpoint if there is one: {self.resume_hint}"
            ) from error
