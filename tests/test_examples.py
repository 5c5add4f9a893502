"""Each example, and other people's trainers, end with the weights of ``shoal.fit``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import shoal
from shoal.vision import allow_torchvision

# Lightning's warnings are of its own kinds. The process that gets them from xdist's workers would have to
# import Lightning, which fails where torchvision does not fit torch.
pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module", autouse=True)
def here() -> Any:
    """What all examples share; they find it beside them."""
    allow_torchvision()
    sys.path.insert(0, str(EXAMPLES))
    yield import_module("hospitals")
    sys.path.remove(str(EXAMPLES))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def after(here: Any, steps: int) -> nn.Module:
    """The model after so many steps of Fish, in a bare loop."""
    model = here.network()
    optimizer = here.fish(model)
    for x, y in torch.utils.data.DataLoader(here.dataset(), batch_sampler=here.sampler(steps=steps)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("stop_at", [None, 10])  # never, within an inner loop
def test_plain_loop(here: Any, stop_at: int | None) -> None:
    """Bit for bit, BatchNorm's buffers included: shoal.fit too leaves them as the inner loop left them."""
    model = import_module("plain_loop").main(stop_at)
    assert here.difference(model, here.ours(here.network(nn.BatchNorm1d(16)))) == 0
    assert here.difference(model, here.network(nn.BatchNorm1d(16))) > 0.01


# Lightning


@pytest.fixture(scope="module")
def lightning(here: Any) -> Any:
    pytest.importorskip("lightning")
    return import_module("lightning_trainer")


def scheduled(here: Any, **options: Any) -> nn.Module:
    falling = import_module("lightning_trainer").falling
    return here.ours(here.network(), schedule=lambda optimizer: LambdaLR(optimizer, falling), **options)


def test_lightning(here: Any, lightning: Any) -> None:
    model = lightning.main()
    assert here.difference(model, scheduled(here)) == 0
    assert here.difference(model, here.ours(here.network())) > 0.001  # the schedule does something
    pieces = lightning.main(accumulate_grad_batches=2)
    assert here.difference(pieces, scheduled(here, accumulate=2)) == 0


def test_lightning_resumes_within_an_inner_loop(
    here: Any, lightning: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    monkeypatch.setattr(lightning, "sampler", lambda **more: here.sampler(steps=8, **more))
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=10, save_top_k=-1)
    whole = lightning.main(callbacks=[keep], enable_checkpointing=True)
    assert here.difference(whole, scheduled(here)) == 0
    resumed = lightning.main(checkpoint=str(tmp_path / "step=10.ckpt"))
    assert here.difference(resumed, scheduled(here)) == 0


def test_lightning_validates_slow_weights(here: Any, lightning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    validate = lightning.Classifier.validation_step

    def watched(self: Any, batch: Any, number: int) -> None:
        seen[self.global_step] = weights(self.network)
        validate(self, batch, number)

    monkeypatch.setattr(lightning.Classifier, "validation_step", watched)
    monkeypatch.setattr(lightning, "falling", lambda step: 1.0)
    lightning.main()
    assert sorted(seen) == [0, 4, 8, 12, 16, 20, 24]
    for step, found in seen.items():
        assert same(found, weights(after(here, step // here.INNER_STEPS) if step else here.network()))


# transformers


@pytest.fixture(scope="module")
def huggingface(here: Any) -> Any:
    pytest.importorskip("transformers")
    return import_module("huggingface_trainer")


def test_huggingface_and_resumed(here: Any, huggingface: Any, tmp_path: Path) -> None:
    own = huggingface.own()
    whole = huggingface.main(str(tmp_path), save_strategy="steps", save_steps=10)
    assert here.difference(whole, own) == 0
    assert here.difference(whole, huggingface.bert()) > 0.01
    resumed = huggingface.main(str(tmp_path), checkpoint=str(tmp_path / "checkpoint-10"))
    assert here.difference(resumed, own) == 0


# torch.compile, Accelerate and several processes


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_once(here: Any, backend: str) -> None:
    """To the bit with the kernels of an ordinary model; fused ones round in another way."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        model = import_module("compiled").main(backend)
    assert here.difference(model, here.ours(here.network())) <= (0 if backend == "aot_eager" else 1e-5)


def test_accelerate(here: Any) -> None:
    loop = import_module("accelerate_loop")
    model = loop.main()
    assert here.difference(model, here.ours(here.network(), accumulate=loop.PIECES)) == 0
    assert here.difference(model, here.ours(here.network())) < 1e-5  # pieces change nothing but rounding


TOGETHER = """
import sys
sys.path[:0] = sys.argv[3:]
from shoal.vision import allow_torchvision
allow_torchvision()
import torch
from shoal.training.processes import leave
from importlib import import_module
from hospitals import difference, network, ours
from torch import distributed

torch.set_num_threads(1)
distributed.init_process_group("gloo")
folder, names = sys.argv[1], sys.argv[2].split(",")
for name in names:
    example = import_module(name)
    model = example.main(**({"devices": 2, "strategy": "ddp"} if name == "lightning_trainer" else {}))
    torch.save(model.state_dict(), f"{folder}/{name}-{distributed.get_rank()}.pt")
torch.save(ours(network()).state_dict(), f"{folder}/ours-{distributed.get_rank()}.pt")
# Gloo's threads may still run while the interpreter ends, which now and then aborts the process.
leave(0)
"""


def together(folder: Path, *names: str) -> dict[str, list[dict[str, torch.Tensor]]]:
    """What the two processes of each example end with, and those of shoal.fit."""
    script = folder / "together.py"
    script.write_text(TOGETHER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    paths = [EXAMPLES, Path(__file__).parent, Path(shoal.__file__).parents[1]]
    words = [*command, folder, ",".join(names), *paths]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(w) for w in words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        for name in (*names, "ours")
    }


def largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def test_two_processes(here: Any, tmp_path: Path) -> None:
    found = together(tmp_path, "ddp", "accelerate_loop", "fsdp2")
    alone = here.ours(here.network()).state_dict()
    for first, second in found.values():
        assert largest(first, second) == 0
        assert largest(first, alone) < 1e-5  # sums of halves are rounded in another way
    assert largest(found["ddp"][0], found["ours"][0]) == 0
    assert largest(found["fsdp2"][0], found["ours"][0]) == 0


@pytest.mark.parametrize("name", ["images", "table"])
def test_notebooks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell runs, and the notebook in the repository shows what it gives."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    shown = {kind for cell in cells for output in cell.get("outputs", []) for kind in output.get("data", [])}
    assert {"text/html", "image/png"} <= shown
    world: dict[str, Any] = {"__name__": "notebook"}
    for source in sources:
        exec(compile(re.sub(r"steps=\d+", "steps=5", source), name, "exec"), world)
