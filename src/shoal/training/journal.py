"""What a training leaves in its folder while it runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from safetensors.torch import save
from torch import Tensor

from shoal.errors import InputError
from shoal.files import write_atomically
from shoal.training.checkpoint import Checkpoints, Loaded
from shoal.training.folder import RunFolder
from shoal.training.processes import Processes
from shoal.training.tracking import Metrics, TensorBoard, Tracker, WeightsAndBiases, check_wandb


class Journal:
    """The log and the checkpoints of a training, in a folder that is locked meanwhile.

    Of several processes the main one writes and all of them read. A full disk costs checkpoints, never the
    training: the last one that could be written stands.
    """

    def __init__(
        self,
        folder: str | Path,
        processes: Processes,
        *,
        keep: int = 2,
        wandb: str | None = None,
        config: Mapping[str, Any] | None = None,
        going_on: str | None = None,
    ) -> None:
        self.folder = RunFolder(folder)
        self.processes = processes
        self.checkpoints = Checkpoints(self.folder.checkpoints, keep)
        if wandb and processes.main:
            check_wandb()
        self.wandb = wandb
        self.config = config or {}
        self.metrics: Metrics | None = None
        self.trackers: list[Tracker] = []
        self.saved: int | None = None
        self.going_on = going_on or f"shoal resume {self.folder.path}"
        """What to do to go on with a run that was stopped."""
        self._full = False

    def __enter__(self) -> Self:
        if self.processes.main:
            self.folder.__enter__()
            for name in ("config.yaml", "record.json", "model.safetensors", "inputs.json", "card.md"):
                for left in self.folder.path.glob(f".{name}.*"):  # half written by one that was killed
                    left.unlink(missing_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        for tracker in self.trackers:
            tracker.close()
        if self.metrics:
            self.metrics.close()
        if self.processes.main:
            self.folder.__exit__(None, None, None)

    def restore(self) -> Loaded | None:
        """The newest whole checkpoint, if there is one; the log is cut back to where it was."""
        with warnings.catch_warnings():
            if not self.processes.main:  # which would say it again
                warnings.simplefilter("ignore")
            loaded = self.checkpoints.load()
        step = loaded.step if loaded else None
        main = self.processes.told(step)
        if main != step:
            raise InputError(
                f"process {self.processes.index} sees the checkpoint of step {step}, the main one that of "
                f"step {main}: {self.folder.path} must be the same folder for all."
            )
        if self.processes.main:
            self._open(loaded)
        self.saved = step
        return loaded

    def _open(self, loaded: Loaded | None) -> None:
        self.metrics = Metrics(self.folder.metrics, loaded.state["metrics"] if loaded else 0)
        earlier = self.metrics.lines()
        self.trackers.append(TensorBoard(self.folder.path / "tensorboard", earlier))
        if self.wandb:
            name = self.folder.path.name
            self.trackers.append(WeightsAndBiases(self.wandb, name, self.config, self.folder.path, earlier))

    def line(self, line: Mapping[str, Any]) -> None:
        if self.metrics:
            self.metrics.write(line)
            for tracker in self.trackers:
                tracker.write(line)

    def checkpoint(
        self, step: int, state: dict[str, Any], best: tuple[int, Mapping[str, Any]] | None
    ) -> None:
        if self.metrics is None:
            return
        try:
            length = self.metrics.flush()
            self.checkpoints.save(step, {**state, "metrics": length}, best)
            self.saved = step
            self._full = False
        except OSError as error:
            if self._full:  # said once
                return
            self._full = True
            stands = f"that of step {self.saved} stands" if self.saved is not None else "there is none yet"
            warnings.warn(
                f"the checkpoint of step {step} could not be written to {self.folder.path} "
                f"({error.strerror}); {stands}. Training goes on.",
                stacklevel=2,
            )

    def begin(self, config: Mapping[str, Any]) -> None:
        """Writes down what is run; a run that goes on keeps what it began with."""
        if self.processes.main and not self.folder.config.exists():
            text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
            self._write(self.folder.config, text.encode())

    def begun(self) -> dict[str, Any]:
        """What was run, as it was written down when it began."""
        return dict(yaml.safe_load(self.folder.config.read_text(encoding="utf-8")))

    def finish(
        self,
        weights: Mapping[str, Tensor],
        record: Mapping[str, Any],
        beside: Callable[[], Mapping[str, bytes]] | None = None,
    ) -> None:
        """The selected weights, files for those who use them, and the record: the run is complete then."""
        if self.processes.main:
            content = save({k: v.detach().cpu().clone().contiguous() for k, v in weights.items()})
            self._write(self.folder.model, content)
            for name, content in _made(beside).items():
                self._write(self.folder.path / name, content)
            self.record(record)

    def record(self, record: Mapping[str, Any]) -> None:
        if self.processes.main:
            self._write(self.folder.record, json.dumps(record, default=dict).encode())

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_atomically(path, content)
        except OSError as error:
            raise InputError(
                f"{path} could not be written ({error.strerror}). Nothing that was saved before is lost: "
                f"make room, then go on with: {self.going_on}"
            ) from error


def _made(beside: Callable[[], Mapping[str, bytes]] | None) -> Mapping[str, bytes]:
    try:
        return beside() if beside else {}
    except Exception as error:  # whatever it is, a night's training must not end without its record
        first = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"the model's card could not be written ({type(error).__name__}: {first}).", stacklevel=4
        )
        return {}
