"""A checkpoint comes back as it was saved, or is noticed to be damaged; and no file runs code."""

from __future__ import annotations

import io
import os
import pickle
import random
import signal
import struct
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import InputError
from shoal.training.checkpoint import Checkpoints, load_weights

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order, bit by bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return struct.pack("d", a) == struct.pack("d", b) if isinstance(a, float) else bool(a == b)


def raw(tensor: Tensor) -> list[int]:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()


def some_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Strided, of any bits that all types allow."""
    bits = torch.randint(0, 2, (*shape, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype)[..., 0]


shapes = st.sampled_from([(), (0,), (3, 0, 2), (1,), (2, 3)])
tensors = st.builds(some_tensor, shapes, st.sampled_from(DTYPES), st.integers(0, 99))
names = st.sampled_from(["state", "step", "", "a/b"]) | st.integers()
leaves = st.none() | st.booleans() | st.integers() | st.floats() | names | tensors
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(names, inner, max_size=3)
    ),
    max_leaves=12,
)


def saved(folder: Path, state: Any, step: int = 1) -> Any:
    checkpoints = Checkpoints(folder)
    checkpoints.save(step, {"it": state})
    loaded = checkpoints.load()
    assert loaded is not None
    assert loaded[0] == step
    return loaded[1]["it"]


@given(trees)
@settings(max_examples=30, deadline=None)
def test_any_tree_comes_back(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    assert same(saved(tmp_path_factory.mktemp("checkpoints"), tree), tree)


def test_what_becomes_plain(tmp_path: Path) -> None:
    """Parameters become tensors, views and shared memory whole tensors, NumPy's numbers Python's."""
    base = torch.arange(24.0).reshape(4, 6)
    tree = {"base": base, "again": base, "part": base[1:3], "strided": base[:, ::2], "one": base[2, 3]}
    tree |= {"expanded": torch.ones(1).expand(5), "parameter": nn.Parameter(torch.ones(2))}
    back = saved(tmp_path, tree)
    assert all(type(back[n]) is Tensor and torch.equal(back[n], t.detach()) for n, t in tree.items())
    back["base"].zero_()
    assert torch.equal(back["again"], base)
    numbers = {"f": np.float64(0.5), "i": np.int32(3), "b": np.bool_(True), "s": np.str_("x")}
    assert same(saved(tmp_path, numbers, 2), {"f": 0.5, "i": 3, "b": True, "s": "x"})
    for wrong in ({"x": [{1, 2}]}, {"x": [np.zeros(2)]}, {"x": [torch.ones(2).to_sparse()]}):
        with pytest.raises(InputError, match=r"'x'\]\[0\]: a (set|ndarray|Tensor) cannot be saved"):
            saved(tmp_path, wrong)


def test_the_newest_are_kept_and_other_files_are_left_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() is None
    (tmp_path / "step-notes.pt").write_text("mine")
    for step in (1, 5, 3, 4):  # resumed from an earlier one, as 5 could not be read
        checkpoints.save(step, {"step": step})
    assert sorted(p.name for p in tmp_path.glob("step-0*")) == [f"step-{n:010}.pt" for n in (3, 4, 5)]
    assert (tmp_path / "step-notes.pt").read_text() == "mine"


def harmful_files(marker: Path) -> list[bytes]:
    class Malicious:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    tree = {"model": {"w": torch.zeros(2)}, "x": Malicious()}
    saved = [torch_saved(tree), torch_saved(tree, _use_new_zipfile_serialization=False)]
    return [*(pickle.dumps(tree, protocol) for protocol in (0, 2, 5)), *saved]


def torch_saved(tree: Any, **more: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file, **more)
    return file.getvalue()


def test_damage_is_noticed_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    checkpoints, marker = Checkpoints(tmp_path), tmp_path / "marker"
    whole = checkpoints.save(1, {"step": 1})
    path = checkpoints.save(2, {"w": torch.ones(500), "step": 2})
    content = path.read_bytes()
    place = content.index(torch.ones(500).numpy().tobytes()) + 1001
    flipped = content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
    for damaged in (b"", content[:-100], content[:100], flipped, *harmful_files(marker)):
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match=rf"is damaged: .*; {whole.name} is used instead"):
            assert checkpoints.load() == (1, {"step": 1})
    whole.write_bytes(b"")
    with pytest.raises(InputError, match="none of the 2 checkpoint"):
        checkpoints.load()
    assert not marker.exists()


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Forked children save in a loop and say so through a pipe; each is killed and the next resumes."""
    chance, checkpoints, threads = random.Random(1), Checkpoints(tmp_path), torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(6):
        listen, say = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                step = (checkpoints.load() or (0, None))[0]
                while True:
                    step += 1
                    checkpoints.save(step, {"a": torch.full((300_000,), step), "step": step})
                    os.write(say, step.to_bytes(8, "little"))
            finally:
                os._exit(1)
        os.close(say)
        newest = os.read(listen, 8)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        while more := os.read(listen, 8):
            newest = more
        os.close(listen)
        loaded = checkpoints.load()
        assert loaded is not None
        assert loaded[0] - int.from_bytes(newest, "little") in (0, 1)
        assert {*loaded[1]["a"].tolist(), loaded[1]["step"]} == {loaded[0]}
    torch.set_num_threads(threads)


WEIGHTS = {"w": torch.ones(2), "b": torch.zeros(())}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "tree",
    [WEIGHTS, {"state_dict": WEIGHTS, "epoch": 3}, {"model": {"state_dict": OrderedDict(WEIGHTS)}, "n": {}}],
)
def test_weights(tmp_path: Path, tree: Any, zipped: bool) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(torch_saved(tree, _use_new_zipfile_serialization=zipped))
    assert same(load_weights(str(path)), WEIGHTS)
    safetensors.torch.save_file(WEIGHTS, tmp_path / "model.SafeTensors", {"format": "pt"})
    assert load_weights(tmp_path / "model.SafeTensors").keys() == WEIGHTS.keys()


def test_no_weights(tmp_path: Path) -> None:
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
