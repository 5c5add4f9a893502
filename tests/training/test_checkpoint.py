"""A checkpoint comes back as it was saved, or is noticed to be damaged; and no file runs code."""

import hashlib
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.errors import InputError
from shoal.training.checkpoint import Checkpoints, load_weights, pack, unpack


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and order, bit by bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).tolist()


# pack and unpack

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint64, torch.uint32, torch.uint16, torch.complex64, torch.complex128),
]
SHAPES = [(), (0,), (3, 0, 2), (1,), (2, 3)]


def some_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Strided, of any bits that all types allow."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (*shape, 16), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)[..., 0]


tensors = st.builds(some_tensor, st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.integers(0, 99))
# Among the strings are this module's own marks, and halves of surrogate pairs.
texts = (
    st.sampled_from(
        ["dict", "tuple", "tensor", "bytes", "int", "float", "str", "shoal", "__metadata__", "", "a/b"]
    )
    | st.text(max_size=5)
    | st.text("\ud800\udc00\udfffé", max_size=3)
)
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


@given(trees)
@settings(max_examples=300, deadline=None)
def test_any_tree_comes_back(tree: Any) -> None:
    content = pack(tree)
    assert same(unpack(content), tree)
    assert pack(tree) == content


def test_memory_layout_does_not_matter() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tree = {
        "base": base,
        "again": base,
        "part": base[1:3],
        "transposed": base.t(),
        "strided": base[:, ::2],
        "one": base[2, 3],
        "expanded": torch.ones(1).expand(5),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    back = unpack(pack(tree))
    for name, tensor in tree.items():
        assert type(back[name]) is torch.Tensor
        assert torch.equal(back[name], tensor.detach()), name
    back["base"].zero_()
    assert torch.equal(back["again"], base)


def test_what_becomes_plain() -> None:
    tree = {
        "f": np.float64(0.5),
        "i": np.int32(3),
        "b": np.bool_(True),
        "s": np.str_("x"),
        "h": np.float16(0.1),
    }
    assert same(unpack(pack(tree)), {"f": 0.5, "i": 3, "b": True, "s": "x", "h": float(np.float16(0.1))})
    assert same(unpack(pack(OrderedDict(z=1, a=2))), {"z": 1, "a": 2})


def test_what_training_saves() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": {k: v for k, v in schedule.state_dict().items() if not callable(v)},
        "random": [torch.get_rng_state(), random.getstate(), np.random.default_rng(1).bit_generator.state],
    }
    back = unpack(pack(tree))
    assert same(back["optimizer"], tree["optimizer"])
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    random.setstate(back["random"][1])
    np.random.default_rng().bit_generator.state = back["random"][2]


class Foo:
    pass


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        ({"optimizer": {"state": {0: {"exp_avg": Foo()}}}}, "optimizer/state/0/exp_avg: a Foo"),
        ({"a": [1, (2, Foo)]}, "a/1/1: a type"),
        ({"a": np.zeros(2)}, "a: a ndarray"),
        ({"a": {1}}, "a: a set"),
        ({"a": torch.zeros(2, device="meta")}, "a: a Tensor"),
    ],
)
def test_what_cannot_be_saved_is_named(tree: Any, where: str) -> None:
    with pytest.raises(InputError, match=where):
        pack(tree)


# Checkpoints


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((100,), float(step))}, "step": step}


def weights(step: int) -> dict[str, Any]:
    return {"w": torch.full((50,), float(step))}


def names(folder: Path) -> list[str]:
    return sorted(path.name[:15] for path in folder.iterdir())


def loaded_step(checkpoints: Checkpoints) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = checkpoints.load()
    assert loaded is not None
    assert same(loaded.state, state(loaded.step))
    return loaded.step


def test_saved_and_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    assert checkpoints.load() is None
    assert checkpoints.latest() is None
    path = checkpoints.save(500, state(500))
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert path == tmp_path / "new" / "folder" / f"step-0000000500-{'0' * 16}-{checksum}.pt"
    loaded = Checkpoints(tmp_path / "new" / "folder").load()
    assert loaded is not None
    assert (loaded.step, loaded.best, loaded.best_step, loaded.path) == (500, None, None, path)
    assert same(loaded.state, state(500))
    checkpoints.save(12_345_678_901, state(1))
    assert checkpoints.latest() == 12_345_678_901


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 6):
        checkpoints.save(step, state(step))
        assert checkpoints.latest() == step
    assert names(tmp_path) == [f"step-{step:010d}" for step in (4, 5)]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    others = [
        "step-1.pt",
        "notes.txt",
        "step-0000000001-mine.pt",
        ".hidden",
        "best.safetensors",
    ]
    leftovers = [".step-0000000001-0123456789abcdef.pt.x1", ".best-0000000001-0123456789abcdef.x2"]
    for name in others + leftovers:
        (tmp_path / name).write_text("x")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() is None
    paths = [checkpoints.save(step, state(step)) for step in (1, 2)]
    assert {p.name for p in tmp_path.iterdir()} == {*others, *(path.name for path in paths)}


def test_the_best_is_written_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, state(10), (5, weights(5)))
    (best,) = tmp_path.glob("best-*")
    assert best.name == f"best-0000000005-{hashlib.sha256(best.read_bytes()).hexdigest()[:16]}.pt"
    os.utime(best, (1, 1))
    checkpoints.save(20, state(20), (5, weights(5)))
    Checkpoints(tmp_path).save(30, state(30), (5, weights(5)))
    resumed = Checkpoints(tmp_path)
    loaded = resumed.load()
    assert loaded is not None
    assert loaded.best_step == 5
    assert same(loaded.best, weights(5))
    resumed.save(40, state(40), (5, loaded.best or {}))
    assert best.stat().st_mtime == 1
    assert names(tmp_path) == ["best-0000000005", "step-0000000030", "step-0000000040"]
    assert same(load_weights(best), weights(5))


def test_a_best_goes_with_the_last_that_refers_to_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    found = []
    for step, best in [(1, 1), (2, 1), (3, 3), (4, 3), (5, None), (6, None)]:
        checkpoints.save(step, state(step), None if best is None else (best, weights(best)))
        found.append([int(name[5:]) for name in names(tmp_path) if name.startswith("best")])
    assert found == [[1], [1], [1, 3], [3], [3], []]
    checkpoints.save(7, state(7), (3, weights(3)))
    assert same(checkpoints.load().best, weights(3))  # type: ignore[union-attr]


# Damage


def saved(folder: Path) -> tuple[Checkpoints, Path, bytes]:
    """Steps 1 and 2, with different best weights; the path and content of the newer."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state(1), (1, weights(1)))
    path = checkpoints.save(2, state(2), (2, weights(2)))
    return Checkpoints(folder), path, path.read_bytes()


def test_a_cut_anywhere_is_found(tmp_path: Path) -> None:
    checkpoints, path, content = saved(tmp_path)
    cuts = {0, 1, 7, 8, 9, 30, 100, len(content) // 4, len(content) // 2, len(content) - 1}
    for cut in sorted(cuts):
        path.write_bytes(content[:cut])
        with pytest.warns(
            UserWarning, match=f"{path.name} is damaged: .* step-0000000001-.* is used instead"
        ):
            loaded = checkpoints.load()
        assert loaded is not None
        assert same(loaded.state, state(1))
        assert same(loaded.best, weights(1))
        assert path.read_bytes() == content[:cut]
    path.write_bytes(content + b"\0")
    assert loaded_step(checkpoints) == 1
    path.write_bytes(content)
    assert loaded_step(checkpoints) == 2


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    checkpoints, path, content = saved(tmp_path)
    rng = random.Random(0)
    for place in [0, 7, 8, len(content) - 1, *rng.sample(range(len(content)), 30)]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        assert loaded_step(checkpoints) == 1


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "other"])
def test_a_damaged_best_is_damage(tmp_path: Path, damage: str) -> None:
    checkpoints, path, _ = saved(tmp_path)
    (best,) = tmp_path.glob("best-0000000002-*")
    content = best.read_bytes()
    if damage == "missing":
        best.unlink()
    else:
        best.write_bytes({"cut": content[:-9], "flipped": content[:-1] + b"\1", "other": b"x"}[damage])
    with pytest.warns(UserWarning, match=f"{path.name} is damaged: its best weights, {best.name}"):
        loaded = checkpoints.load()
    assert loaded is not None
    assert loaded.step == loaded.best_step == 1
    checkpoints.save(2, state(2), (2, weights(2)))
    assert best.read_bytes() == content
    assert loaded_step(checkpoints) == 2


def named_right(folder: Path, step: int, content: bytes, kind: str = "step", best: str = "0" * 16) -> Path:
    parts = [kind, f"{step:010d}", *([best] if kind == "step" else [])]
    path = folder / f"{'-'.join(parts)}-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    path.write_bytes(content)
    return path


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def torch_saved(tree: Any, **more: Any) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file, **more)
    return file.getvalue()


def harmful(marker: Path) -> list[bytes]:
    tree = {"model": {"w": torch.zeros(2)}, "x": Malicious(marker)}
    pickles = [pickle.dumps(tree, protocol) for protocol in range(6)]
    return [*pickles, torch_saved(tree), torch_saved(tree, _use_new_zipfile_serialization=False)]


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for content in harmful(marker):
        for kind in ("step", "best"):
            folder = tmp_path / "checkpoints"
            folder.mkdir()
            pickled = named_right(folder, 9, content, kind)
            if kind == "best":
                checksum = pickled.stem.rsplit("-", 1)[1]
                named_right(folder, 9, pack({"step": 9, "best": 9, "state": {}}), best=checksum)
            with pytest.raises(InputError, match="none of the 1 checkpoint in"):
                Checkpoints(folder).load()
            Checkpoints(folder).save(10, state(10))
            assert loaded_step(Checkpoints(folder)) == 10
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    assert not marker.exists()
    pickle.loads(harmful(marker)[0])
    assert marker.exists()


# A full disk and kills


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Forked children save in a loop and say so through a pipe; each is killed and the next goes on."""
    code = """if True:
        import os, random, signal, sys, time, torch, warnings
        from pathlib import Path
        from shoal.training.checkpoint import Checkpoints
        torch.set_num_threads(1)
        warnings.simplefilter("error", UserWarning)
        rng, folder = random.Random(1), Path(sys.argv[1])

        def train(say):
            checkpoints = Checkpoints(folder)
            loaded = checkpoints.load()
            step, best = (0, None) if loaded is None else (loaded.step, (loaded.best_step, loaded.best))
            while True:
                step += 1
                if best is None or step % 3 == 0:
                    best = step, {"w": torch.full((100_000,), step)}
                a, b = torch.full((200_000,), step), torch.full((200_000,), step)
                checkpoints.save(step, {"a": a, "b": [b], "step": step}, best)
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
            if kill % 2:
                time.sleep(rng.uniform(0, 0.06))
            else:  # in the middle of a write
                while not any(name.startswith(".") for name in os.listdir(folder)):
                    pass
                time.sleep(rng.uniform(0, 0.002))
            os.kill(child, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
            while more := os.read(listen, 8):
                said = more
            os.close(listen)
            loaded = Checkpoints(folder).load()
            assert loaded.step - int.from_bytes(said, "little") in (0, 1), (loaded.step, said)
            assert loaded.step == loaded.state["step"]
            assert {*loaded.state["a"].tolist(), *loaded.state["b"][0].tolist()} == {loaded.step}
            assert {*loaded.best["w"].tolist()} == {loaded.best_step}
            assert loaded.best_step == max(1, loaded.step // 3 * 3)
        """
    answer = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10**6, state(10**6))
    checkpoints.save(10**6 + 1, state(10**6 + 1))
    assert names(tmp_path) == ["step-0001000000", "step-0001000001"]


# load_weights


@pytest.mark.parametrize(
    "tree",
    [
        {"w": torch.ones(2), "b": torch.zeros(())},
        {"state_dict": {"w": torch.ones(2), "b": torch.zeros(())}, "epoch": 3},
        {"model": OrderedDict(w=nn.Parameter(torch.ones(2)), b=torch.zeros(())), "optimizer": {"state": {}}},
        {"model": {"state_dict": {"w": torch.ones(2), "b": torch.zeros(())}}},
    ],
)
@pytest.mark.parametrize("form", ["zip", "old", "shoal"])
def test_weights(tmp_path: Path, tree: Any, form: str) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(
        pack(tree) if form == "shoal" else torch_saved(tree, _use_new_zipfile_serialization=form == "zip")
    )
    assert same(load_weights(str(path)), {"w": torch.ones(2), "b": torch.zeros(())})


def test_weights_from_safetensors(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.SafeTensors", {"format": "pt"})
    loaded = load_weights(tmp_path / "model.SafeTensors")
    model.load_state_dict(loaded)
    path = Checkpoints(tmp_path).save(3, {"model": model.state_dict(), "n": 1})
    assert same(load_weights(path), dict(model.state_dict()))


def test_weights_with_code_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for suffix in (".pt", ".bin", ".pkl", ".safetensors"):
        for content in harmful(marker):
            path = tmp_path / f"w{suffix}"
            path.write_bytes(content)
            with pytest.raises(InputError, match=r"w\.\w+ (was rejected|is not a)") as caught:
                load_weights(path)
            assert "\n" not in str(caught.value)
            assert suffix == ".safetensors" or "reads weights only" in str(caught.value)
            assert "safetensors" in str(caught.value)
    assert not marker.exists()
    (tmp_path / "w.pt").write_bytes(torch_saved(nn.Linear(2, 2)))
    with pytest.raises(
        InputError, match=r"rejected, because it contains more than weights \(torch.nn.modules.linear.Linear"
    ):
        load_weights(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.pt", None, "there is no file"),
        ("w.safetensors", None, "there is no file"),
        ("w.pt", b"", "is empty"),
        ("w.safetensors", b"", "is empty"),
        ("w.pt", b"garbage", "is not a valid weights file"),
        ("w.pt", b"PK\x03\x04 garbage", "is not a valid weights file"),
        ("w.pt", torch_saved({"w": torch.zeros(99)})[:-200], "is not a valid weights file"),
        ("w.safetensors", b"garbage", "is not a valid safetensors file"),
        (
            "w.safetensors",
            safetensors.torch.save({"w": torch.zeros(99)})[:-9],
            "is not a valid safetensors file",
        ),
        ("w.safetensors", pack({"w": torch.zeros(99)}), "is not a valid safetensors file"),
        ("w.pt", torch_saved(torch.zeros(2)), "holds a Tensor; it must hold a dict"),
        ("w.pt", torch_saved({}), "holds nothing"),
        ("w.pt", torch_saved({"epoch": 1}), "holds a int under 'epoch'"),
        ("w.pt", torch_saved({3: torch.zeros(1)}), "holds a Tensor under 3"),
        ("w.safetensors", safetensors.torch.save({}), "holds nothing"),
        ("w.pt", pack([1]), "holds a list"),
    ],
)
def test_no_weights(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_weights(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)
