"""Fish where parameters and state are sharded over two processes, and where torch saves them in shards.

As a program, this file is one of two processes. What each training should come to is found in one process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW

import shoal
from shoal.optim import Fish

S, META_LR, STEPS, SAVED = 3, 0.4, 10, 4
INNER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.3),
    "SGD without state": lambda p: SGD(p, 0.1, foreach=False),
    "AdamW": lambda p: AdamW(p, 0.05, foreach=True),
    "AdamW, fused": lambda p: AdamW(p, 0.05, fused=True),
}


class Network(nn.Module):
    """Has a parameter with a single row, of which one of two processes has nothing."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


def batches(count: int = STEPS, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randn(6, n, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return [(draw(3), draw(2) + i) for i in range(count)]


def train(model: nn.Module, optimizer: Any, data: list[tuple[Tensor, Tensor]], after: Any = None) -> None:
    """Each process has its share of each batch."""
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for x, y in data:
        optimizer.zero_grad()
        mse_loss(model(x[rank::count]), y[rank::count]).backward()
        optimizer.step()
        if after is not None:
            after(x)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def found(model: nn.Module, fish: Fish) -> dict[str, Any]:
    """The weights θ̃, θ, and the position in the inner loop."""
    with torch.no_grad():
        weights = {name: whole(p) for name, p in model.named_parameters()}
        slow = {name: whole(fish.state[p]["slow"]) for name, p in model.named_parameters()}
    return {"weights": weights, "slow": slow, "position": fish.position}


def alone(name: str, data: Any = None) -> dict[str, Any]:
    model = Network()
    fish = Fish(INNER[name](model.parameters()), S, META_LR)
    train(model, fish, data or batches())
    return found(model, fish)


# What the two processes do


def sharded(dtype: torch.dtype = torch.float64, **options: Any) -> Network:
    from torch.distributed.fsdp import fully_shard

    model = Network(dtype)
    fully_shard(model.layers[0], **options)
    fully_shard(model, **options)
    return model


def trained_in_shards(name: str) -> dict[str, Any]:
    model = sharded()
    fish = Fish(INNER[name](model.parameters()), S, META_LR)
    train(model, fish, batches())
    rows = sum(e["slow"].to_local().numel() for e in fish.state.values())
    return {**found(model, fish), "numbers here": rows}


def evaluated_in_between() -> dict[str, Any]:
    """Looking at θ after every step changes nothing, and what is seen is θ."""
    model, seen = sharded(), []
    fish = Fish(INNER["AdamW"](model.parameters()), S, META_LR)

    @torch.no_grad()
    def look(x: Tensor) -> None:
        model(x)
        with fish.slow_weights(model):
            seen.append(model(x))

    train(model, fish, batches(), look)
    return {**found(model, fish), "seen": seen}


def refused() -> str:
    model = sharded()
    try:
        with Fish(SGD(model.parameters(), 0.1), S).slow_weights():
            return ""
    except shoal.errors.InputError as error:
        return str(error)


def saved_within_a_loop(name: str, folder: Path) -> dict[str, Any]:
    """Goes on in another model, whose optimizer was made otherwise."""
    model, data = sharded(), batches()
    fish = Fish(INNER[name](model.parameters()), S, META_LR)
    train(model, fish, data[:SAVED])
    save(model, fish, folder / name)
    train(model, fish, data[SAVED:])
    other = sharded()
    resumed = Fish(INNER[name](other.parameters()), S + 2, 0.9)
    load(other, resumed, folder / name)
    train(other, resumed, data[SAVED:])
    return {"went on": found(model, fish), "resumed": found(other, resumed)}


def gathered(name: str) -> dict[str, Any]:
    """The state of one process, from and to shards."""
    model, data = sharded(), batches()
    fish = Fish(INNER[name](model.parameters()), S, META_LR)
    train(model, fish, data[:SAVED])
    options = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, fish, options=options)
    other = sharded()
    resumed = Fish(INNER[name](other.parameters()), S + 2, 0.9)
    set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state, options=options)
    train(other, resumed, data[SAVED:])
    return found(other, resumed)


def first_rate_zero() -> list[Any]:
    """The first step of a warm-up is one; that by which a checkpoint makes state is none."""
    model, positions = sharded(), []
    fish = Fish(AdamW(model.parameters(), 0.0), S)
    train(model, fish, batches(1))
    positions.append(fish.position)
    model = sharded()
    before = [whole(p.detach()) for p in model.parameters()]
    fish = Fish(AdamW(model.parameters(), 0.1), S)
    get_optimizer_state_dict(model, fish)
    moved = any(
        not torch.equal(whole(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True)
    )
    return [*positions, fish.position, moved]


def scaled() -> dict[str, Any]:
    """An infinite gradient in one of the processes is one in all: the step is skipped, and counts."""
    model, scaler = sharded(), torch.amp.GradScaler("cpu", init_scale=2.0**6)
    fish = Fish(INNER["AdamW"](model.parameters()), S, META_LR)
    for n, (x, y) in enumerate(batches()):
        fish.zero_grad()
        x, y = x[dist.get_rank() :: 2], y[dist.get_rank() :: 2]
        scaler.scale(mse_loss(model(x), y)).backward()
        if n == 4 and dist.get_rank() == 0:
            next(model.parameters()).grad.to_local()[0] = float("inf")
        scaler.step(fish)
        scaler.update()
    return found(model, fish)


def zero_redundancy(name: str) -> dict[str, Any]:
    """Each process has its own parameters; the state goes on from that of one process."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def start() -> tuple[nn.Module, Any]:
        model = Network()
        make = lambda params, **_: Fish(INNER[name](params), S, META_LR)  # noqa: E731
        return nn.parallel.DistributedDataParallel(model), ZeroRedundancyOptimizer(model.parameters(), make)

    data = batches()
    model, optimizer = start()
    train(model, optimizer, data[:SAVED])
    optimizer.consolidate_state_dict(to=0)
    box = [None if dist.get_rank() else optimizer.state_dict()]
    dist.broadcast_object_list(box)
    other, resumed = start()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(box[0])
    train(other, resumed, data[SAVED:])
    mine = resumed.optim.state
    return {
        "weights": {name: p.detach().clone() for name, p in other.module.named_parameters()},
        "position": resumed.optim.position,
        "slow": sum("slow" in entry for entry in mine.values()),
    }


def save(model: nn.Module, fish: Fish, folder: Path, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, fish, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, fish: Fish, folder: Path, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, state = get_state_dict(model, fish, options=options)
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(
        model, fish, model_state_dict=read["model"], optim_state_dict=read["optimizer"], options=options
    )


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    results = {
        "trained": {name: trained_in_shards(name) for name in INNER},
        "evaluated": evaluated_in_between(),
        "refused": refused(),
        "saved": {name: saved_within_a_loop(name, folder) for name in INNER},
        "gathered": {name: gathered(name) for name in ("SGD", "AdamW")},
        "first rate zero": first_rate_zero(),
        "scaled": scaled(),
        "zero": {name: zero_redundancy(name) for name in INNER},
    }
    torch.save(results, folder / f"{rank}.pt")
    from shoal.training.processes import leave

    leave(0)


# What it should come to


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(shoal.__file__).parents[1])}
    logs = [(folder / f"{rank}.log").open("wb") for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)], env=environment | {"RANK": str(rank)}, stderr=logs[rank]
        )
        for rank in range(2)
    ]
    try:
        codes = [process.wait(90) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            log.close()
    assert codes == [0, 0], (folder / "0.log").read_text()[-3000:]
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def close(a: dict[str, Any], b: dict[str, Any], within: float = 1e-12) -> None:
    for kind in ("weights", "slow"):
        torch.testing.assert_close(a[kind], b[kind], rtol=0, atol=within)
    assert a["position"] == b["position"] == STEPS % S


@pytest.mark.parametrize("name", INNER)
class TestTwoProcesses:
    def test_fsdp_ends_with_the_weights_of_one_process(self, both: Any, name: str) -> None:
        results = [each["trained"][name] for each in both[1]]
        for result in results:
            close(result, alone(name))
        trained = sum(p.numel() for p in Network().parameters())
        assert sum(result["numbers here"] for result in results) == trained  # one copy in all
        for each in both[1]:
            close(each["saved"][name]["went on"], each["saved"][name]["resumed"], 0)
            if name in each["gathered"]:  # the state of one process, from and to shards
                close(each["gathered"][name], alone(name))

    def test_a_checkpoint_of_shards_resumes_in_one_process(self, both: Any, name: str) -> None:
        model = Network()
        fish = Fish(INNER[name](model.parameters()), S + 2, 0.9)
        load(model, fish, both[0] / name)
        assert (fish.position, fish.inner_steps, fish.meta_lr) == (SAVED % S, S, META_LR)
        train(model, fish, batches()[SAVED:])
        close(found(model, fish), alone(name))

    def test_zero_redundancy(self, both: Any, name: str) -> None:
        results = [each["zero"][name] for each in both[1]]
        for result in results:
            torch.testing.assert_close(result["weights"], alone(name)["weights"], rtol=0, atol=1e-12)
            assert result["position"] == STEPS % S
        assert sum(result["slow"] for result in results) == len(list(Network().parameters()))
        assert all(result["slow"] for result in results)


def test_slow_weights_of_shards(both: Any) -> None:
    expected, model = [], Network()
    fish = Fish(INNER["AdamW"](model.parameters()), S, META_LR)

    @torch.no_grad()
    def look(x: Tensor) -> None:
        with fish.slow_weights():
            expected.append(model(x))

    train(model, fish, batches(), look)
    for each in both[1]:
        close(each["evaluated"], alone("AdamW"))
        torch.testing.assert_close(each["evaluated"]["seen"], expected, rtol=0, atol=1e-12)
        assert "call slow_weights(model)" in each["refused"]


def test_a_first_rate_of_zero(both: Any) -> None:
    for each in both[1]:
        assert each["first rate zero"] == [1, 0, False]


def test_an_infinite_gradient_in_one_process(both: Any) -> None:
    model = Network()
    fish = Fish(INNER["AdamW"](model.parameters()), S, META_LR)
    for n, batch in enumerate(batches()):
        if n == 4:
            fish.found_inf = torch.tensor(1.0)
        train(model, fish, [batch])
        vars(fish).pop("found_inf", None)
    for each in both[1]:
        close(each["scaled"], found(model, fish))


# One process, whose state torch saves as it saves shards


@pytest.mark.parametrize("inner_state", ["carry", "reset"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("saved_after", [0, 3, 4, 5])
@pytest.mark.parametrize("name", ["SGD", "SGD without state", "AdamW, fused"])
def test_goes_on_to_the_bit(
    name: str, saved_after: int, flat: bool, inner_state: Any, tmp_path: Path
) -> None:
    model, data = Network(), batches()
    fish = Fish(INNER[name](model.parameters()), S, META_LR, inner_state)
    train(model, fish, data[:saved_after])
    fish.zero_grad()
    save(model, fish, tmp_path, flat)
    train(model, fish, data[saved_after:])
    other = Network()
    resumed = Fish(INNER[name](other.parameters()), S + 1, 0.9)
    load(other, resumed, tmp_path, flat)
    assert (resumed.position, resumed.inner_steps, resumed.meta_lr) == (saved_after % S, S, META_LR)
    train(other, resumed, data[saved_after:])
    torch.testing.assert_close(found(other, resumed), found(model, fish), rtol=0, atol=0)


@pytest.mark.parametrize("inner_state", ["carry", "reset"])
@pytest.mark.parametrize("name", INNER)
def test_asking_a_fresh_one_for_its_state_changes_nothing(name: str, inner_state: Any) -> None:
    model = Network()
    fish = Fish(INNER[name](model.parameters()), S, META_LR, inner_state)
    before = [p.detach().clone() for p in model.parameters()]
    state = get_optimizer_state_dict(model, fish)
    assert all("slow" in entry for entry in state["state"].values())
    assert len(state["state"]) == len(before)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert fish.position == 0
    train(model, fish, batches())
    plain = Network()
    other = Fish(INNER[name](plain.parameters()), S, META_LR, inner_state)
    train(plain, other, batches())
    torch.testing.assert_close(found(model, fish), found(plain, other), rtol=0, atol=0)


def test_a_state_that_is_set_again_is_that_of_before() -> None:
    model, data = Network(), batches()
    fish = Fish(AdamW(model.parameters(), 0.05), S, META_LR)
    train(model, fish, data[:SAVED])
    fish.zero_grad()
    set_optimizer_state_dict(model, fish, get_optimizer_state_dict(model, fish))
    train(model, fish, data[SAVED:])
    close(found(model, fish), alone("AdamW"), 0)


def test_the_reference_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "optim.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "optim.md", "exec"), {})
    assert (tmp_path / "checkpoint").is_dir()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
