"""What a training leaves in its folder while it runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from safetensors.torch import save
from torch import Tensor

from shoal.errors import InputError
from shoal.files import dump_yaml, parse_yaml, read_bytes, write_atomically
from shoal.training.callbacks import Callback
from shoal.training.checkpoint import Checkpoints
from shoal.training.folder import RunFolder
from shoal.training.processes import Processes
from shoal.training.tracking import Metrics, TensorBoard, WeightsAndBiases, check_wandb, has_tensorboard


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
        wandb: str | None = None,
        config: Mapping[str, Any] | None = None,
        resume_hint: str | None = None,
    ) -> None:
        self.folder = RunFolder(folder)
        self.processes = processes
        self.checkpoints = Checkpoints(self.folder.checkpoints)
        if wandb and processes.main:
            check_wandb()
        self.wandb = wandb
        self.config = config or {}
        self.metrics: Metrics | None = None
        self.trackers: list[TensorBoard | WeightsAndBiases] = []
        self.saved: int | None = None
        self.resume_hint = resume_hint or "the same command or call"
        """What to do to go on with a run that was stopped."""
        self._full = False
        self._config = b""

    def __enter__(self) -> Self:
        if self.processes.main:
            self.folder.__enter__()
            self.checkpoints.clear()
        return self

    def __exit__(self, *error: object) -> None:
        for tracker in self.trackers:
            tracker.close()
        if self.metrics:
            self.metrics.close()
        if self.processes.main:
            self.folder.__exit__(None, None, None)

    def stage(self, name: str) -> Journal:
        """That of a stage of a recipe, in a folder of its own."""
        folder = self.folder.path / "stages" / name.replace(" ", "-")
        return Journal(folder, self.processes, config=self.config, resume_hint=self.resume_hint)

    def restore(self) -> dict[str, Any] | None:
        """The newest whole checkpoint, if there is one; the log is cut back to where it was."""
        with warnings.catch_warnings():
            if not self.processes.main:  # which would say it again
                warnings.simplefilter("ignore")
            loaded = self.checkpoints.load()
        step = loaded.step if loaded else None
        main = self.processes.broadcast(step)
        if main != step:
            raise InputError(
                f"process {self.processes.index} sees the checkpoint of step {step}, the main one that of "
                f"step {main}: {self.folder.path} must be the same folder for all."
            )
        if self.processes.main:
            self._open(loaded.state if loaded else None)
        self.saved = step
        return loaded.state if loaded else None

    def _open(self, state: dict[str, Any] | None) -> None:
        known = list(_known(state)) if state else []
        self.metrics = Metrics(self.folder.metrics, state["metrics"] if state else 0, known)
        earlier = self.metrics.lines()
        if has_tensorboard():
            self.trackers.append(TensorBoard(self.folder.path / "tensorboard", earlier))
        if self.wandb:
            name = self.folder.path.name
            self.trackers.append(WeightsAndBiases(self.wandb, name, self.config, self.folder.path, earlier))

    @property
    def callbacks(self) -> list[Callback]:
        """What writes the log, once there is one."""
        return [self.metrics, *self.trackers] if self.metrics else []

    def line(self, line: Mapping[str, Any]) -> None:
        """Writes a line of the log, where there is no training that does."""
        for callback in (self.metrics, *self.trackers):
            if callback is not None:
                callback.write(line)

    def checkpoint(self, step: int, state: dict[str, Any]) -> bool:
        """Whether one was written."""
        if self.metrics is None:
            return False
        try:
            self.hold()
            length = self.metrics.flush()
            about = {"step": state["step"], "seconds": state["seconds"]}
            self.checkpoints.save(step, {**state, "metrics": length}, None, about)
            self.saved = step
            self._full = False
            return True
        except OSError as error:
            if self._full:  # said once
                return False
            self._full = True
            stands = (
                f"the latest is that of step {self.saved}" if self.saved is not None else "there is none yet"
            )
            warnings.warn(
                f"the checkpoint of step {step} could not be written to {self.folder.path} "
                f"({error.strerror}); {stands}. Training continues.",
                stacklevel=2,
            )
            return False

    def hold(self) -> None:
        """Makes a folder that was removed again, with its log and configuration, and warns of it."""
        if not self.processes.main:
            return
        if not self.folder.held:
            self.folder.make_again()
            self._fill()
            warnings.warn(
                f"{self.folder.path} was removed while the run was using it. It was created again, with the "
                "configuration and the log; earlier checkpoints are lost.",
                stacklevel=3,
            )
        elif self._config and not self.folder.config.exists():
            write_atomically(self.folder.config, self._config)

    def _fill(self) -> None:
        if self._config:
            write_atomically(self.folder.config, self._config)
        if self.metrics:
            self.metrics.move(self.folder.metrics)
            for tracker in self.trackers:
                if isinstance(tracker, TensorBoard):
                    tracker.begin(self.folder.path / "tensorboard", self.metrics.lines())

    def begin(self, config: Mapping[str, Any]) -> None:
        """Writes down what is run; a run that goes on keeps what it began with."""
        if self.processes.main:
            if not self.folder.config.exists():
                self._write(self.folder.config, dump_yaml(dict(config)).encode())
            self._config = read_bytes(self.folder.config)

    def begun(self) -> dict[str, Any]:
        """What was run, as it was written down when it began."""
        return dict(parse_yaml(self._config.decode()))

    def finish(
        self,
        weights: Mapping[str, Tensor],
        record: Mapping[str, Any],
        beside: Callable[[], Mapping[str, bytes]] | None = None,
    ) -> dict[str, str]:
        """The selected weights, files for those who use them, and the record: the run is complete then.

        Returns the checksums (SHA-256) of the files, which the record has under ``files``.
        """
        if not self.processes.main:
            return {}
        files = dict(_made(beside))
        if weights:  # a baseline has none
            content = save({k: v.detach().cpu().clone().contiguous() for k, v in weights.items()})
            files = {self.folder.model.name: content, **files}
        sums = {k: hashlib.sha256(v).hexdigest() for k, v in files.items() if k != "card.md"}
        self._keep(files, {**record, "files": sums})
        return sums

    def record(self, record: Mapping[str, Any]) -> None:
        """The record of a run that leaves no weights."""
        if self.processes.main:
            self._keep({}, record)

    def _keep(self, files: dict[str, bytes], record: Mapping[str, Any]) -> None:
        """Writes these and last the record, and looks whether they are there."""
        files = {**files, self.folder.record.name: json.dumps(record, default=dict).encode()}
        asked = self.folder
        for _ in range(3):  # it may be removed meanwhile
            self._hold_to_the_end()
            for name, content in files.items():
                self._write(self.folder.path / name, content)
            if self.folder.held and all(_is_there(self.folder.path / k, v) for k, v in files.items()):
                break
        else:
            raise InputError(f"{self.folder.path} does not keep written files: the run is not saved.")
        if self.folder is not asked:
            raise InputError(
                f"something else took the place of {asked.path} while the run was using it. "
                f"The results are in {self.folder.path}."
            )

    def _hold_to_the_end(self) -> None:
        """As :meth:`hold`; where another folder has come into its place, this one gets another name."""
        try:
            self.hold()
        except FileExistsError:
            path, number = self.folder.path, 1
            while (other := path.with_name(f"{path.name}-{number}")).exists():
                number += 1
            self.folder.__exit__(None, None, None)
            self.folder = RunFolder(other)
            self.folder.__enter__()
            self._fill()
        except OSError as error:
            raise self._unwritten(self.folder.path, error) from error

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_atomically(path, content)
        except OSError as error:
            raise self._unwritten(path, error) from error

    def _unwritten(self, path: Path, error: OSError) -> InputError:
        stands = "Earlier checkpoints are intact: free some disk space, then resume with"
        if self.saved is None or self.checkpoints.latest() is None:
            stands = "No checkpoint was saved. Free some disk space, then start again with"
        return InputError(f"{path} could not be written ({error.strerror}). {stands}: {self.resume_hint}")


def _is_there(path: Path, content: bytes) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size == len(content)
    return False


def _known(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of the log that a checkpoint can tell again, in order: what was measured."""
    stage = state["made_with"]["stage"]
    tracked = [{"phase": "agreement", **found} for found in (state["tracking"] or {}).get("found", ())]
    points = [
        {"phase": stage, "step": point["step"], "scores": point["scores"]} for point in state["history"]
    ]
    yield from sorted([*tracked, *points], key=lambda line: int(line["step"]))
    yield {"phase": stage, "step": state["step"], "seconds": round(state["seconds"], 3)}


def _made(beside: Callable[[], Mapping[str, bytes]] | None) -> Mapping[str, bytes]:
    try:
        return beside() if beside else {}
    except Exception as error:  # whatever it is, a night's training must not end without its record
        first = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"the model's card could not be written ({type(error).__name__}: {first}).", stacklevel=4
        )
        return {}
