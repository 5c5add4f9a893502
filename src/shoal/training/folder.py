"""The folder of a run: its log, checkpoints, weights and record, written by one process at a time."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from filelock import Timeout
from safetensors.torch import save
from torch import Tensor

from shoal import files
from shoal.errors import InputError
from shoal.training.checkpoint import load_checkpoint, save_checkpoint
from shoal.training.loggers import Log, start_wandb
from shoal.training.processes import Processes

OWN = (
    *("config.yaml", "metrics.jsonl", "record.json", "model.safetensors", "model.txt"),
    *("inputs.json", "card.md", "columns.json", ".lock", "checkpoints", "stages", "predictions"),
    *("tensorboard", "encoder", "tokenizer"),
)
"""What Shoal writes to the folder of a run."""


class RunFolder:
    """A run's folder: config.yaml, metrics.jsonl, record.json, checkpoints/, model.safetensors, card.md.

    ``with folder:`` locks it, until the process ends at the latest; some network file systems have no locks.
    Symbolic links are refused: whoever made them could have other files overwritten. Of several processes the
    main one writes and all of them read. ``hint`` says how to resume a run that was interrupted.
    """

    def __init__(
        self,
        path: str | Path,
        processes: Processes | None = None,
        *,
        wandb: str | None = None,
        hint: str = "the same command or call",
    ) -> None:
        self.path = Path(path)
        self.config, self.record = self.path / "config.yaml", self.path / "record.json"
        self.model, self.checkpoints = self.path / "model.safetensors", self.path / "checkpoints"
        self.processes, self.main = processes, processes is None or processes.main
        self.wandb, self.hint = wandb, hint
        self.saved: int | None = None
        """The step of the newest checkpoint."""
        self._log: Log | None = None
        self._wandb_run: Any = None
        self._disk_full = False
        self._lock = files.file_lock(self.path / ".lock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = "it is a file" if isinstance(error, FileExistsError) else error.strerror or error
            raise InputError(f"{self.path} cannot be the folder of a run ({why}); choose another.") from error

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end, which is when its record is written."""
        return self.record.exists()

    @property
    def started(self) -> bool:
        """Whether there is a run to resume."""
        return self.config.exists() or self.resumable

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint."""
        return any(self.checkpoints.glob("step-*.pt"))

    def __enter__(self) -> Self:
        if not self.main:
            return self
        own = [self.path / name for name in OWN]
        for entry in (*own, *(inside for folder in own for inside in folder.rglob("*"))):
            if entry.is_symlink():
                raise InputError(f"{str(entry)!r} is a symbolic link; a run's folder must not contain any.")
        file = Path(self._lock.lock_file)
        try:
            self._lock.acquire(blocking=False)
            file.write_text(f"process {os.getpid()} on host {socket.gethostname()}")
        except Timeout:
            who = file.read_text(errors="replace") or "another process"
            message = f"{self.path} is in use by {who}; wait for it, or choose another folder."
            raise InputError(message) from None
        except OSError as error:
            if not os.access(self.path, os.W_OK):
                message = f"{self.path} cannot be written to ({error.strerror}); choose another folder."
                raise InputError(message) from error
            message = f"cannot be locked ({error.strerror}); make sure that only one process uses it."
            warnings.warn(f"{self.path} {message}", stacklevel=3)
        return self

    def __exit__(self, *error: object) -> None:
        if self._log is not None:
            self._log.close()
        if self.wandb and self._wandb_run is not None:
            self._wandb_run.finish()
        self._lock.release()

    def stage(self, name: str) -> RunFolder:
        """The folder of a stage of a recipe."""
        stage = RunFolder(self.path / "stages" / name.replace(" ", "-"), self.processes, hint=self.hint)
        stage._wandb_run = self._wandb_run
        return stage

    def restore(self) -> dict[str, Any] | None:
        """The newest checkpoint, if there is one; the log is opened, and cut back to where it was then."""
        self.saved, state = load_checkpoint(self.checkpoints) or (None, None)
        seen = {self.saved} if self.processes is None else set(self.processes.gather(self.saved))
        if len(seen) > 1:
            raise InputError(f"processes see checkpoints of steps {seen}: {self.path} must be one folder.")
        if self.main:
            length = state["log"] if state else 0
            try:
                self._log = Log(self.path, length, self.saved or 0, self._wandb_run)
            except OSError as error:
                why = f"metrics.jsonl in {self.path} cannot be written: {error.strerror}."
                raise InputError(why) from error
        return state

    def log(self, line: Mapping[str, Any]) -> None:
        """Write a line of the log."""
        if self._log is not None:
            self._log.write(line)

    def save(self, step: int, state: Mapping[str, Any]) -> bool:
        """Whether a checkpoint was written; a full disk is a warning."""
        if self._log is None:
            return False
        try:
            save_checkpoint(self.checkpoints, step, {**state, "log": self._log.flush()})
            self.saved, self._disk_full = step, False
        except OSError as error:
            if not self._disk_full:
                latest = "there is none yet" if self.saved is None else f"the latest is that of {self.saved}"
                what = f"the checkpoint of step {step} could not be written to {self.path} ({error.strerror})"
                warnings.warn(f"{what}; {latest}. Training continues.", stacklevel=2)
            self._disk_full = True
        return not self._disk_full

    def write(self, name: str, content: bytes) -> None:
        """Replace the entry called ``name``, whole or not at all."""
        path = self.path / name
        try:
            if self.main and path.is_symlink():
                path.unlink()  # also one to a device, which would be written to
            if self.main:
                files.write_atomically(path, content)
        except OSError as error:
            raise InputError(
                f"{path} could not be written ({error.strerror}). Free some disk space, then run again, "
                f"which continues from a checkpoint if there is one: {self.hint}"
            ) from error

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write down what is run; a run that is resumed has that of its first start."""
        if not self.config.exists():
            self.write("config.yaml", files.dump_yaml(dict(config)).encode())
        if self.wandb and self.main:
            self._wandb_run = start_wandb(self.wandb, config, self.path)

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write the record, the last file of a run."""
        self.write("record.json", json.dumps(record, default=dict).encode())

    def finish(
        self,
        weights: Mapping[str, Tensor],
        record: Mapping[str, Any],
        more: Callable[[], Mapping[str, bytes]],
    ) -> dict[str, str]:
        """Write the selected weights, the other files of the model and the record: the run is complete.

        Returns the checksums (SHA-256) of the files, which the record has under ``files``.
        """
        if not self.main:
            return {}
        contents: dict[str, bytes] = {}
        if weights:  # a baseline has none
            contiguous = {k: v.detach().cpu().clone().contiguous() for k, v in weights.items()}
            contents[self.model.name] = save(contiguous)
        try:
            contents |= more()
        except Exception as error:  # whatever it is, a night's training must not end without its record
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(f"the model's card could not be written ({why}).", stacklevel=3)
        for name, content in contents.items():
            self.write(name, content)
        sums = {k: hashlib.sha256(v).hexdigest() for k, v in contents.items() if k != "card.md"}
        self.write_record({**record, "files": sums})
        return sums


def check_files(folder: Path, checksums: Mapping[str, str]) -> None:
    """Refuse the files of a model that are not what the run wrote; its record has their ``checksums``."""
    for name, checksum in checksums.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InputError(f"{str(folder / 'record.json')!r} is damaged: it names a file elsewhere.")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        if hashlib.sha256(content).hexdigest() != checksum:
            raise InputError(
                f"{str(path)!r} is damaged: its content has changed since the run wrote it (record.json has "
                "another checksum). Restore it from a copy, or train again."
            )
