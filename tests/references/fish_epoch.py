"""An epoch of Fish as the authors' program (YugeTen/fish, src/main.py) counts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def epoch_steps(sizes: Sequence[int], batch: int, slots: int, draw: Callable[[], Sequence[int]]) -> int:
    """Meta-steps of an epoch, with every example kept in a list; ``draw`` names the domains of a step."""
    queues = []
    for size in sizes:
        examples = list(range(size))
        queue = []
        while examples:
            queue.append(examples[:batch])
            examples = examples[batch:]
        queues.append(queue)
    steps = 0
    while len([queue for queue in queues if len(queue) >= 2]) >= slots:
        for domain in draw():
            if len(queues[domain]) >= 2:  # the last one stays, and is drawn again and again
                queues[domain] = queues[domain][1:]
        steps += 1
    return steps
