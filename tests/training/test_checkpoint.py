"""A checkpoint comes back as it was saved, or is noticed to be damaged; and no file runs code."""

from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
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


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8),
    *(torch.bool, torch.complex64),
]


def some_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Strided, of any bits that all types allow."""
    bits = torch.randint(0, 2, (*shape, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype)[..., 0]


SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (2, 3)]
tensors = st.builds(some_tensor, st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.integers(0, 99))
texts = st.sampled_from(["state", "step", "tensor", "", "a/b"]) | st.text(max_size=5)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts | tensors
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts | st.integers(), inner, max_size=3)
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
@settings(max_examples=60, deadline=None)
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
    numbers = OrderedDict(f=np.float64(0.5), i=np.int32(3), b=np.bool_(True), s=np.str_("x"))
    assert same(saved(tmp_path, numbers, 2), {"f": 0.5, "i": 3, "b": True, "s": "x"})
    for wrong in ({"x": [{1, 2}]}, {"x": [np.zeros(2)]}, {"x": [torch.ones(2).to_sparse()]}):
        with pytest.raises(InputError, match=r"state/it/x/0: a (set|ndarray|Tensor) cannot be saved"):
            saved(tmp_path, wrong)


def test_the_newest_are_kept_and_other_files_are_left_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert (checkpoints.load(), checkpoints.latest()) == (None, None)
    (tmp_path / "step-notes.txt").write_text("mine")
    for step in (1, 5, 3, 4):  # resumed from an earlier one, as 5 could not be read
        path = checkpoints.save(step, {"step": step})
    steps = sorted(int(p.name[5:15]) for p in tmp_path.glob("step-0*"))
    assert steps == [3, 4, 5]
    assert checkpoints.latest() == 5
    assert checkpoints.save(4, {"step": 4}) == path
    assert (tmp_path / "step-notes.txt").read_text() == "mine"


@pytest.mark.parametrize("damage", ["cut", "bit", "pickle"])
def test_damage_is_noticed_and_the_checkpoint_before_is_used(tmp_path: Path, damage: str) -> None:
    checkpoints, marker = Checkpoints(tmp_path), tmp_path / "marker"
    whole = checkpoints.save(1, {"step": 1})
    path = checkpoints.save(2, {"w": torch.ones(50), "step": 2})
    content = bytearray(path.read_bytes())
    if damage == "pickle":
        for harmful in harmful_files(marker):
            path.write_bytes(harmful)
            with pytest.warns(UserWarning, match="is damaged"):
                checkpoints.load()
    for place in range(0, len(content), 97) if damage != "pickle" else ():
        changed = content[:place] if damage == "cut" else content.copy()
        if damage == "bit":
            changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.warns(UserWarning, match=rf"is damaged: .*; {whole.name} is used instead"):
            loaded = checkpoints.load()
        assert loaded == (1, {"step": 1})
    whole.write_bytes(b"")
    with pytest.raises(InputError, match="none of the 2 checkpoint"):
        checkpoints.load()
    assert not marker.exists()


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def torch_saved(tree: Any, **more: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file, **more)
    return file.getvalue()


def harmful_files(marker: Path) -> list[bytes]:
    tree = {"model": {"w": torch.zeros(2)}, "x": Malicious(marker)}
    pickles = [pickle.dumps(tree, protocol) for protocol in (0, 2, 5)]
    return [*pickles, torch_saved(tree), torch_saved(tree, _use_new_zipfile_serialization=False)]


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Forked children save in a loop and say so through a pipe; each is killed and the next resumes."""
    code = """if True:
        import os, random, signal, sys, time, torch, warnings
        from pathlib import Path
        from shoal.training.checkpoint import Checkpoints
        torch.set_num_threads(1)
        warnings.simplefilter("error", UserWarning)
        rng, checkpoints = random.Random(1), Checkpoints(Path(sys.argv[1]))

        def train(say):
            step = (checkpoints.load() or (0, None))[0]
            while True:
                step += 1
                checkpoints.save(step, {"a": torch.full((300_000,), step), "step": step})
                os.write(say, step.to_bytes(8, "little"))

        for kill in range(6):
            listen, say = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    train(say)
                finally:
                    os._exit(1)
            os.close(say)
            said = os.read(listen, 8)
            time.sleep(rng.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
            while more := os.read(listen, 8):
                said = more
            os.close(listen)
            step, state = checkpoints.load()
            assert step - int.from_bytes(said, "little") in (0, 1), (step, said)
            assert {*state["a"].tolist(), state["step"]} == {step}
        """
    answer = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr


# load_weights


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


def test_weights_with_code_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for suffix in (".pt", ".safetensors"):
        for content in harmful_files(marker):
            (tmp_path / f"w{suffix}").write_bytes(content)
            with pytest.raises(InputError, match=r"w\.\w+ (was rejected|is not a).*safetensors"):
                load_weights(tmp_path / f"w{suffix}")
    assert not marker.exists()
    (tmp_path / "w.pt").write_bytes(torch_saved(nn.Linear(2, 2)))
    with pytest.raises(InputError, match=r"contains more than weights \(torch.nn.modules.linear.Linear"):
        load_weights(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.pt", None, "there is no file"),
        ("w.pt", b"", "is not a valid weights file"),
        ("w.pt", b"PK\x03\x04 garbage", "is not a valid weights file"),
        ("w.safetensors", b"garbage", "is not a valid safetensors file"),
        ("w.pt", torch_saved(torch.zeros(2)), "must hold a dict"),
        ("w.pt", torch_saved({}), "holds nothing"),
        ("w.pt", torch_saved({"epoch": 1}), "holds a int under 'epoch'"),
        ("w.safetensors", safetensors.torch.save({}), "holds nothing"),
    ],
)
def test_no_weights(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name}.*{message}|{message}.*{name}"):
        load_weights(tmp_path / name)
