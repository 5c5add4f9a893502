"""A checkpoint comes back as it was saved, or is noticed to be damaged; and no file runs code."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from shoal.errors import InputError
from shoal.training.checkpoint import load_checkpoint, load_weights, save_checkpoint

WEIGHTS = {"w": torch.ones(2), "b": torch.zeros(())}


def harmful_files(marker: Path) -> list[bytes]:
    class Malicious:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    tree = {"model": {"w": torch.zeros(2)}, "x": Malicious()}
    return [torch_saved(tree), torch_saved(tree, _use_new_zipfile_serialization=False), pickle.dumps(tree)]


def torch_saved(tree: Any, **more: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file, **more)
    return file.getvalue()


def test_damage_is_noticed_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    marker, whole = tmp_path / "marker", save_checkpoint(tmp_path, 1, {"step": 1})
    path = save_checkpoint(tmp_path, 2, {"w": torch.ones(500), "step": 2})
    content = path.read_bytes()
    place = content.index(torch.ones(500).numpy().tobytes()) + 1001
    flipped = content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
    for damaged in (b"", content[:-100], flipped, *harmful_files(marker)):
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match=rf"is damaged: .*; {whole.name} is used instead"):
            assert load_checkpoint(tmp_path) == (1, {"step": 1})
    whole.write_bytes(b"")
    with pytest.raises(InputError, match="none of the 2 checkpoint"):
        load_checkpoint(tmp_path)
    assert not marker.exists()


def test_files_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    for tree in (
        WEIGHTS,
        {"state_dict": WEIGHTS, "epoch": 3},
        {"model": {"state_dict": OrderedDict(WEIGHTS)}, "n": {}},
    ):
        for zipped in (True, False):
            path.write_bytes(torch_saved(tree, _use_new_zipfile_serialization=zipped))
            torch.testing.assert_close(load_weights(str(path)), WEIGHTS)
    safetensors.torch.save_file(WEIGHTS, tmp_path / "model.SafeTensors", {"format": "pt"})
    assert load_weights(tmp_path / "model.SafeTensors").keys() == WEIGHTS.keys()


def test_files_without_weights(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "w.pt"
    with pytest.raises(InputError, match=r"w\.pt cannot be read \(No such file"):
        load_weights(path)
    bad = dict.fromkeys(harmful_files(marker), r"w\.\w+ (contains more than|is not a).*safetensors")
    bad[torch_saved(nn.Linear(2, 2))] = r"contains more than weights \(torch.nn.modules.linear.Linear"
    bad |= {b"PK\x03\x04 garbage": "not a valid file", torch_saved(torch.zeros(2)): r"w\.pt holds tensor"}
    bad |= {torch_saved({}): r"holds \{\}", torch_saved({"epoch": 1}): "'epoch': 1"}
    for content, message in bad.items():
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            load_weights(path)
        path.with_suffix(".safetensors").write_bytes(content)
        with pytest.raises(InputError, match=r"w\.safetensors is not a valid file"):
            load_weights(path.with_suffix(".safetensors"))
    assert not marker.exists()
