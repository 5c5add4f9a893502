"""Other people's trainers end with the weights of ours: each example, and what is said of it in the docs."""

from __future__ import annotations

import os
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
from shoal.data import Domains
from shoal.vision import allow_torchvision

# Lightning's warnings are of its own kinds. The process that gets them from xdist's workers would have to
# import Lightning, which fails where torchvision does not fit torch.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module", autouse=True)
def on_the_path() -> Any:
    """Examples find hospitals.py beside them; what they import finds torchvision as tests can have it."""
    allow_torchvision()
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


def example(name: str) -> Any:
    return import_module(name)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def after_walks(model: nn.Module, count: int) -> nn.Module:
    """The model after so many walks of the examples' training, in a bare loop."""
    here = example("hospitals")
    optimizer = here.fish(model)
    for x, y in torch.utils.data.DataLoader(here.dataset(), batch_sampler=here.sampler(steps=count)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def in_passes_of(steps: int, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Lets the example's training be several epochs instead of one."""
    make = example("hospitals").sampler
    monkeypatch.setattr(module, "sampler", lambda **more: make(steps=steps, **more))


# A plain loop


@pytest.mark.parametrize("stop_at", [None, 9, 10, 11])  # never, between walks, within one
def test_plain_loop(stop_at: int | None) -> None:
    """Bit for bit, BatchNorm's buffers included: shoal.fit too leaves them as the walk left them."""
    here = example("hospitals")
    model = example("plain_loop").main(stop_at)
    assert here.difference(model, here.ours(here.network(nn.BatchNorm1d(16)))) == 0
    assert here.difference(model, here.network(nn.BatchNorm1d(16))) > 0.01


def test_interpolated_buffers_are_what_an_optimizer_cannot_do() -> None:
    here = example("hospitals")
    model = example("plain_loop").main(None)
    own = here.ours(
        here.network(nn.BatchNorm1d(16)), settings={"meta_lr": here.META_LR, "buffers": "interpolate"}
    )
    assert same(weights(model), weights(own))
    assert here.difference(model, own) > 0.01


def test_order_is_that_of_fit_where_domains_are_in_the_same_order() -> None:
    """Labels are sorted; fit keeps the order of its mapping, and so does a Domains."""
    here = example("hospitals")
    backwards = dict(reversed(here.hospitals().items()))
    sizes = Domains.from_sizes({name: len(y) for name, (_, y) in backwards.items()})
    order = shoal.data.DomainBatchSampler(sizes, here.BATCH, here.INNER_STEPS, seed=here.SEED)
    x, y = (torch.cat(parts) for parts in zip(*backwards.values(), strict=True))
    model = here.network()
    optimizer = here.fish(model)
    order.steps = here.STEPS
    for rows in order:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    assert here.difference(model, here.ours(here.network(), backwards)) == 0
    assert here.difference(model, here.ours(here.network())) > 0.001


# Lightning


@pytest.fixture(scope="module")
def lightning(on_the_path: Any) -> Any:
    pytest.importorskip("lightning")
    return example("lightning_trainer")


def scheduled(**options: Any) -> nn.Module:
    here, falling = example("hospitals"), example("lightning_trainer").falling
    return here.ours(here.network(), schedule=lambda optimizer: LambdaLR(optimizer, falling), **options)


@pytest.fixture(scope="module")
def own_scheduled(lightning: Any) -> nn.Module:
    return scheduled()


def test_lightning(lightning: Any, own_scheduled: nn.Module) -> None:
    here = example("hospitals")
    model = lightning.main()
    assert here.difference(model, own_scheduled) == 0
    assert here.difference(model, here.ours(here.network())) > 0.001  # the schedule does something


def test_lightning_accumulates_pieces_of_a_batch(lightning: Any) -> None:
    model = lightning.main(accumulate_grad_batches=2)
    assert example("hospitals").difference(model, scheduled(accumulate=2)) == 0


@pytest.mark.parametrize(("steps", "at"), [(8, 10), (4, 11), (4, 12), (4, 16)])
def test_lightning_resumes_within_a_walk(
    lightning: Any,
    own_scheduled: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    steps: int,
    at: int,
) -> None:
    """In one epoch of 8 steps and in two of 4, at 12 exactly between them."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    in_passes_of(steps, monkeypatch, lightning)
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=at, save_top_k=-1)
    whole = lightning.main(callbacks=[keep], enable_checkpointing=True)
    assert example("hospitals").difference(whole, own_scheduled) == 0
    resumed = lightning.main(checkpoint=str(tmp_path / f"step={at}.ckpt"))
    assert example("hospitals").difference(resumed, own_scheduled) == 0


HALF = {
    "fp32": lambda plugin: {},
    "bf16": lambda plugin: {"precision": "bf16-mixed"},
    "fp16": lambda plugin: {"plugins": plugin("16-mixed", "cpu", torch.amp.GradScaler("cpu"))},
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lightning_in_half_precision(lightning: Any, own_scheduled: nn.Module, precision: str) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    model = lightning.main(**HALF[precision](MixedPrecision))
    assert example("hospitals").difference(model, scheduled(precision=precision)) == 0
    assert example("hospitals").difference(model, own_scheduled) > 1e-5


@pytest.mark.parametrize("precision", HALF)
def test_lightning_clips(lightning: Any, own_scheduled: nn.Module, precision: str) -> None:
    """Not to the bit: torch divides by the norm and a millionth, shoal.fit by the norm."""
    from lightning.pytorch.plugins import MixedPrecision

    model = lightning.main(gradient_clip_val=0.1, **HALF[precision](MixedPrecision))
    assert example("hospitals").difference(model, scheduled(precision=precision, clip=0.1)) < 2e-6
    assert example("hospitals").difference(model, own_scheduled) > 0.01


def test_lightning_refuses_to_clip_in_half_precision(lightning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why the callback does it: the day this fails, that part of it can go."""
    monkeypatch.delattr(lightning.FishCallback, "on_fit_start")
    assert isinstance(lightning.main(gradient_clip_val=0.1), nn.Module)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        lightning.main(gradient_clip_val=0.1, precision="bf16-mixed")


def test_lightning_validates_slow_weights(lightning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    validate = lightning.Classifier.validation_step

    def watched(self: Any, batch: Any, number: int) -> None:
        seen[self.global_step] = weights(self.network)
        validate(self, batch, number)

    monkeypatch.setattr(lightning.Classifier, "validation_step", watched)
    monkeypatch.setattr(lightning, "falling", lambda step: 1.0)
    lightning.main()
    here = example("hospitals")
    assert sorted(seen) == [0, 4, 8, 12, 16, 20, 24]
    assert same(seen[0], weights(here.network()))
    for step in (4, 8, 12, 16, 20, 24):
        assert same(seen[step], weights(after_walks(here.network(), step // here.INNER_STEPS)))


def test_lightning_leaves_the_walk_when_validation_is_stopped(
    lightning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def stopped(self: Any, batch: Any, number: int) -> None:
        if self.global_step == 4:
            seen.extend([self.trainer.optimizers[0], self.network, weights(self.network)])
            raise ZeroDivisionError

    monkeypatch.setattr(lightning.Classifier, "validation_step", stopped)
    with pytest.raises(ZeroDivisionError):
        lightning.main()
    fish, model, shown = seen
    assert fish.state_dict()["param_groups"][0]["position"] == 1
    assert not same(weights(model), shown)  # θ̃ again, which goes with that state


# transformers


@pytest.fixture(scope="module")
def huggingface(on_the_path: Any) -> Any:
    pytest.importorskip("transformers")
    return example("huggingface_trainer")


@pytest.fixture(scope="module")
def own_bert(huggingface: Any) -> nn.Module:
    return huggingface.own()


def test_huggingface(huggingface: Any, own_bert: nn.Module) -> None:
    model = huggingface.main()
    assert example("hospitals").difference(model, own_bert) == 0
    assert example("hospitals").difference(model, huggingface.bert()) > 0.01


@pytest.mark.parametrize("at", [10, 18, 20])
def test_huggingface_resumes_within_a_walk(
    huggingface: Any, own_bert: nn.Module, tmp_path: Path, at: int
) -> None:
    """An epoch is 6 steps of 3 batches: in the first, exactly between two, in the second."""
    whole = huggingface.main(str(tmp_path), save_strategy="steps", save_steps=at)
    assert example("hospitals").difference(whole, own_bert) == 0
    resumed = huggingface.main(str(tmp_path), checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert example("hospitals").difference(resumed, own_bert) == 0


def test_huggingface_accumulates_pieces_of_a_batch(huggingface: Any, own_bert: nn.Module) -> None:
    model = huggingface.main(gradient_accumulation_steps=2)
    assert example("hospitals").difference(model, huggingface.own(accumulate=2)) == 0


def test_huggingface_evaluates_slow_weights(huggingface: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    from transformers import Trainer

    evaluate = Trainer.evaluate

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen[self.state.global_step] = weights(self.model)
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "evaluate", watched)
    huggingface.main(eval_steps=5)
    assert sorted(seen) == [5, 10, 15, 20, 24]
    for step in (5, 10):
        whole_walks = huggingface.main(max_steps=step // 3 * 3, eval_strategy="no")
        assert same(seen[step], weights(whole_walks))
    assert not same(seen[5], seen[10])


# torch.compile and Accelerate


def test_compiled_once() -> None:
    """Captured and differentiated as when compiled, with the kernels of an ordinary model."""
    here = example("hospitals")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert here.difference(example("compiled").main("aot_eager"), here.ours(here.network())) == 0


@pytest.mark.slow
def test_compiled_to_machine_code() -> None:
    """Not to the bit: fused kernels round sums in another way."""
    here = example("hospitals")
    torch._dynamo.reset()
    assert here.difference(example("compiled").main(), here.ours(here.network())) < 1e-5


def test_accelerate() -> None:
    here, loop = example("hospitals"), example("accelerate_loop")
    model = loop.main()
    assert here.difference(model, here.ours(here.network(), accumulate=loop.PIECES)) == 0
    # Up to rounding, taking batches in pieces changes nothing.
    assert here.difference(model, here.ours(here.network())) < 1e-5


def test_accelerate_can_split_batches_itself() -> None:
    from accelerate.data_loader import BatchSamplerShard

    order = example("hospitals").sampler
    halves = [list(BatchSamplerShard(order(), 2, rank, split_batches=True)) for rank in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=True)] == list(order())


# Two processes

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
    done = subprocess.run(
        [*map(str, command), str(folder), ",".join(names), *map(str, paths)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        for name in (*names, "ours")
    }


def largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def test_two_processes(tmp_path: Path) -> None:
    here = example("hospitals")
    found = together(tmp_path, "ddp", "accelerate_loop", "fsdp2")
    alone = here.ours(here.network()).state_dict()
    for first, second in found.values():
        assert largest(first, second) == 0
        assert largest(first, alone) < 1e-5  # sums of halves are rounded in another way
    assert largest(found["ddp"][0], found["ours"][0]) == 0
    assert largest(found["fsdp2"][0], found["ours"][0]) == 0


@pytest.mark.slow
def test_two_processes_of_lightning_and_transformers(tmp_path: Path) -> None:
    found = together(tmp_path, "lightning_trainer", "huggingface_trainer")
    assert largest(found["lightning_trainer"][0], scheduled().state_dict()) < 1e-5
    own = example("huggingface_trainer").own().state_dict()
    # A key's bias has no effect on attention: its gradient is rounding, which Adam makes steps of.
    assert (
        largest(found["huggingface_trainer"][0], {k: v for k, v in own.items() if "k_lin.bias" not in k})
        < 1e-4
    )
