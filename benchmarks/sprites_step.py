"""Where the time of a CdSprites training goes: a pass of its network in several forms, as CUDA graphs.

    python benchmarks/sprites_step.py

A pass is 64 images forward and backward and a step of Adam (fused). Milliseconds per pass and network; "N in
parallel" has N networks on N streams, "N in one" has N networks in one batched network (torch.func.vmap).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from shoal.gradients import match
from shoal.models.small import sprite_cnn

DEVICE = torch.device("cuda")
BATCH, ROUNDS = 64, 200
DOMAINS = 20


def network() -> nn.Module:
    return sprite_cnn((3, 64, 64), 2).to(DEVICE)


def data(*shape: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(*shape, 3, 64, 64, device=DEVICE)
    return x, torch.randint(2, shape, device=DEVICE)


def captured(step: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def milliseconds(replay: Callable[[], Any], rounds: int = ROUNDS) -> float:
    replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / rounds * 1e3


def plain(batch: int = BATCH, half: bool = False, last: bool = False, compiled: bool = False) -> Any:
    layout = torch.channels_last if last else torch.contiguous_format
    model = network().to(memory_format=layout)
    x, y = data(batch)
    x = x.contiguous(memory_format=layout)
    adam = torch.optim.Adam(model.parameters(), 1e-3, fused=True, capturable=True)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        adam.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half, cache_enabled=False):
            loss = cross_entropy(forward(x), y)
        loss.backward()
        adam.step()

    return step


def batched(count: int) -> Any:
    models = [network() for _ in range(count)]
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    x, y = data(count, BATCH)
    adam = torch.optim.Adam(params.values(), 1e-3, fused=True, capturable=True)

    def one(p: Any, b: Any, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(base, (p, b), (x,)), y)

    def step() -> None:
        adam.zero_grad()
        vmap(one)(params, buffers, x, y).sum().backward()
        adam.step()

    return step


def idgm(last: bool = False) -> Any:
    layout = torch.channels_last if last else torch.contiguous_format
    model = network().to(memory_format=layout)
    batches = [data(BATCH) for _ in range(DOMAINS)]
    batches = [(x.contiguous(memory_format=layout), y) for x, y in batches]
    adam = torch.optim.Adam(model.parameters(), 1e-3, fused=True, capturable=True)
    losses = [lambda x=x, y=y: cross_entropy(model(x), y) for x, y in batches]

    def step() -> None:
        params = list(model.parameters())
        found = match(losses, params, normalize=True, model=model)
        for p, g in zip(params, found.gradient(-1.0, 0.9), strict=True):
            p.grad = g
        adam.step()

    return step


def report(name: str, value: float) -> None:
    print(f"  {name:44} {value:8.3f} ms", flush=True)


FORMS: dict[str, dict[str, Any]] = {
    "": {},
    ", bf16": {"half": True},
    ", channels-last": {"last": True},
    ", channels-last, bf16": {"half": True, "last": True},
}


def in_parallel(make: Callable[[], Any], count: int) -> float:
    """Milliseconds of a step of one of ``count`` that run on their own streams."""
    streams = [torch.cuda.Stream() for _ in range(count)]
    steps = [make() for _ in streams]  # which hold the tensors that the graphs use
    graphs = [captured(step, stream) for step, stream in zip(steps, streams, strict=True)]

    def replay() -> None:
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()

    return milliseconds(replay, 50) / count


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    step = plain()
    report("eager", milliseconds(step))
    for name, form in FORMS.items():
        step = plain(**form)
        report(f"captured{name}", milliseconds(captured(step).replay))
        step = plain(20 * BATCH, **form)
        report(f"captured{name}, 20 x 64 images, over 20", milliseconds(captured(step).replay) / 20)
        report(f"captured{name}, 10 in parallel", in_parallel(partial(plain, **form), 10))
    for count in (5, 10):
        step = batched(count)
        report(f"captured, {count} in one", milliseconds(captured(step).replay) / count)
    step = idgm()
    report(f"IDGM, {DOMAINS} domains, eager, per domain", milliseconds(step, 5) / DOMAINS)
    for last in (False, True):
        form = ", channels-last" if last else ""
        step = idgm(last)
        per_domain = milliseconds(captured(step).replay, 20) / DOMAINS
        report(f"IDGM, {DOMAINS} domains, captured{form}, per domain", per_domain)
        several = in_parallel(partial(idgm, last), 5) / DOMAINS
        report(f"IDGM, captured{form}, 5 in parallel, per domain", several)
    try:
        step = plain(compiled=True)
        report("compiled, captured", milliseconds(captured(step).replay))
    except Exception as error:
        print(f"  compiled: {type(error).__name__}: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
