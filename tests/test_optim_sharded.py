"""Fish where parameters and state are sharded over two processes, and where torch saves them in shards.

As a program, this file is one of two processes. What each training should come to is found in one process.
"""

from __future__ import annotations

import copy
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
    "AdamW": lambda p: AdamW(p, 0.05, fused=True),
}


class Network(nn.Module):
    """Has a parameter with a single row, of which one of two processes has nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randn(6, n, generator=generator, dtype=torch.float64)  # noqa: E731
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


def start(name: str, make: Callable[[], nn.Module] = Network, **settings: Any) -> tuple[Any, Fish]:
    model = make()
    return model, Fish(INNER[name](model.parameters()), **{"inner_steps": S, "meta_lr": META_LR} | settings)


OTHER: dict[str, Any] = {"inner_steps": S + 2, "meta_lr": 0.9}
"""Settings of a Fish into which a state is loaded, which has its own."""


def alone(name: str, **settings: Any) -> dict[str, Any]:
    model, fish = start(name, **settings)
    train(model, fish, batches())
    return found(model, fish)


# What the two processes do


def sharded() -> Network:
    from torch.distributed.fsdp import fully_shard

    model = Network()
    fully_shard(model.layers[0])
    fully_shard(model)
    return model


def trained_in_shards(name: str) -> dict[str, Any]:
    model, fish = start(name, sharded)
    train(model, fish, batches())
    rows = sum(e["slow"].to_local().numel() for e in fish.state.values())
    return {**found(model, fish), "numbers here": rows}


def evaluated_in_between() -> dict[str, Any]:
    """Looking at θ after every step changes nothing, and what is seen is θ."""
    (model, fish), seen = start("AdamW", sharded), []
    try:
        with fish.slow_weights():
            refused = ""
    except shoal.errors.InputError as error:
        refused = str(error)

    @torch.no_grad()
    def look(x: Tensor) -> None:
        model(x)
        with fish.slow_weights(model):
            seen.append(model(x))

    train(model, fish, batches(), look)
    return {**found(model, fish), "seen": seen, "refused": refused}


def saved_within_a_loop(name: str, folder: Path) -> dict[str, Any]:
    """Resumed in shards from a checkpoint of shards, and from the gathered state of one process."""
    data = batches()
    model, fish = start(name, sharded)
    train(model, fish, data[:SAVED])
    save(model, fish, folder / name)
    options = StateDictOptions(full_state_dict=True)
    weights, state = copy.deepcopy(get_state_dict(model, fish, options=options))
    train(model, fish, data[SAVED:])
    other, resumed = start(name, sharded, **OTHER)
    load(other, resumed, folder / name)
    train(other, resumed, data[SAVED:])
    third, gathered = start(name, sharded, **OTHER)
    set_state_dict(third, gathered, model_state_dict=weights, optim_state_dict=state, options=options)
    train(third, gathered, data[SAVED:])
    pairs = {"uninterrupted": (model, fish), "resumed": (other, resumed), "gathered": (third, gathered)}
    return {name: found(*pair) for name, pair in pairs.items()}


def first_rate_zero() -> list[Any]:
    """The first step of a warm-up is one; that by which a checkpoint makes state is none."""
    model, positions = sharded(), []
    fish = Fish(AdamW(model.parameters(), 0.0), S)
    train(model, fish, batches(1))
    positions.append(fish.position)
    model, fish = start("AdamW", sharded)
    before = [whole(p.detach()) for p in model.parameters()]
    get_optimizer_state_dict(model, fish)
    pairs = zip(model.parameters(), before, strict=True)
    return [*positions, fish.position, all(torch.equal(whole(p.detach()), b) for p, b in pairs)]


def scaled() -> dict[str, Any]:
    """An infinite gradient in one of the processes is one in all: the step is skipped, and counts."""
    (model, fish), scaler = start("AdamW", sharded), torch.amp.GradScaler("cpu", init_scale=2.0**6)
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

    def pair() -> tuple[nn.Module, Any]:
        model = Network()
        make = lambda params, **_: Fish(INNER[name](params), S, META_LR)  # noqa: E731
        return nn.parallel.DistributedDataParallel(model), ZeroRedundancyOptimizer(model.parameters(), make)

    data = batches()
    model, optimizer = pair()
    train(model, optimizer, data[:SAVED])
    optimizer.consolidate_state_dict(to=0)
    box = [None if dist.get_rank() else optimizer.state_dict()]
    dist.broadcast_object_list(box)
    other, resumed = pair()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(box[0])
    train(other, resumed, data[SAVED:])
    return {
        "weights": {name: p.detach().clone() for name, p in other.module.named_parameters()},
        "position": resumed.optim.position,
        "slow": sum("slow" in entry for entry in resumed.optim.state.values()),
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
        "saved": {name: saved_within_a_loop(name, folder) for name in INNER},
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
            for resumed in ("resumed", "gathered"):
                close(each["saved"][name]["uninterrupted"], each["saved"][name][resumed], 0)

    def test_a_checkpoint_of_shards_resumes_in_one_process(self, both: Any, name: str) -> None:
        model, fish = start(name, **OTHER)
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


def test_slow_weights_of_shards_and_a_first_rate_of_zero(both: Any) -> None:
    expected, (model, fish) = [], start("AdamW")

    @torch.no_grad()
    def look(x: Tensor) -> None:
        with fish.slow_weights():
            expected.append(model(x))

    train(model, fish, batches(), look)
    for each in both[1]:
        close(each["evaluated"], alone("AdamW"))
        torch.testing.assert_close(each["evaluated"]["seen"], expected, rtol=0, atol=1e-12)
        assert "call slow_weights(model)" in each["evaluated"]["refused"]
        assert each["first rate zero"] == [1, 0, True]


def test_an_infinite_gradient_in_one_process(both: Any) -> None:
    model, fish = start("AdamW")
    for n, batch in enumerate(batches()):
        if n == 4:
            fish.found_inf = torch.tensor(1.0)
        train(model, fish, [batch])
        vars(fish).pop("found_inf", None)
    for each in both[1]:
        close(each["scaled"], found(model, fish))


# One process, whose state torch saves as it saves shards


@pytest.mark.parametrize("inner_state", ["carry", "reset"])
@pytest.mark.parametrize(("saved_after", "flat"), [(0, False), (3, True), (4, False), (5, True)])
@pytest.mark.parametrize("name", INNER)
def test_resumes_to_the_bit(
    name: str, saved_after: int, flat: bool, inner_state: Any, tmp_path: Path
) -> None:
    (model, fish), data = start(name, inner_state=inner_state), batches()
    train(model, fish, data[:saved_after])
    fish.zero_grad()
    save(model, fish, tmp_path, flat)
    set_optimizer_state_dict(model, fish, get_optimizer_state_dict(model, fish))  # changes nothing
    train(model, fish, data[saved_after:])
    torch.testing.assert_close(found(model, fish), alone(name, inner_state=inner_state), rtol=0, atol=0)
    other, resumed = start(name, **OTHER)
    load(other, resumed, tmp_path, flat)
    assert (resumed.position, resumed.inner_steps, resumed.meta_lr) == (saved_after % S, S, META_LR)
    train(other, resumed, data[saved_after:])
    torch.testing.assert_close(found(other, resumed), found(model, fish), rtol=0, atol=0)


def test_the_reference_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "optim.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "optim.md", "exec"), {})
    assert (tmp_path / "checkpoint").is_dir()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
