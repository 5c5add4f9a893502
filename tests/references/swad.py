"""SWAD's rule by index arithmetic over a complete list of losses; nothing is kept between evaluations.

Reference: Cha et al., SWAD: Domain Generalization by Seeking Flat Minima, NeurIPS 2021, and the authors'
program github.com/khanrc/swad (``LossValley`` and ``AveragedModel``). Segments count from 0 here.
"""

import math
import random


def _plain(losses):
    return [loss if math.isfinite(loss) else math.inf for loss in losses]


def start_of(losses, converge, ratio):
    """(segment s, limit), or (None, None)."""
    losses = _plain(losses)
    for s in range(len(losses) - converge + 1):
        window = [loss for loss in losses[s : s + converge] if loss < math.inf]
        if losses[s] < math.inf and all(losses[s] <= loss for loss in window):
            return s, ratio * (sum(window) / len(window))
    return None, None


def released(losses, converge=3, tolerate=6, ratio=1.3):
    """(segments, done): every time that the released program adds a segment's mean, and if it ended early.

    Its averaged model first holds segment s without counting it, so that the first one added replaces it.
    """
    losses, count = _plain(losses), len(losses)
    s, limit = start_of(losses, converge, ratio)
    if s is None:
        return [count - 1] if count else [], False
    found = s + converge - 1

    def oldest(evaluation):
        return max(0, evaluation - tolerate + 1)

    added = []
    if tolerate < converge:
        added = [s + 1 + i for i in range(converge - tolerate)]
    elif tolerate > converge:
        first = oldest(found)
        early = [i for i in range(first, first + tolerate - converge + 1) if i <= found]
        begin = first
        for i in early:
            if losses[i] > limit:
                begin = i + 1
        added = [i for i in early if i > begin]
    for evaluation in range(found + 1, count):
        i = oldest(evaluation)
        if i < s:
            continue
        if all(loss > limit for loss in losses[i : evaluation + 1]):
            return added or [s], True
        added.append(i)
    for i in range(oldest(count - 1) + 1, count):
        if any(loss <= limit for loss in losses[i:]):
            added.append(i)
    return added or [s], False


def step_weights(segments, lengths):
    """The weight of every step in the mean of these segments, which weigh alike."""
    weights = []
    for i, length in enumerate(lengths):
        weights += [segments.count(i) / length / len(segments) if segments else 0.0] * length
    return weights


def sequences(count, seed=0, finite=False):
    """Losses of pretended trainings: falling, with a valley, noisy, stepwise with ties, rising, with NaN."""
    draw = random.Random(seed)
    kinds = ["falling", "valley", "noisy", "ties", "rising"] + ([] if finite else ["broken"])
    for number in range(count):
        kind, length = kinds[number % len(kinds)], draw.randint(1, 40)
        bottom, noise = draw.uniform(0.1, 0.9) * length, draw.choice([0.0, 0.02, 0.2])
        shapes = {
            "falling": lambda i: 2.0 * math.exp(-i / 8) + 0.2,
            "valley": lambda i: 0.3 + ((i - bottom) / 9) ** 2,  # noqa: B023
            "noisy": lambda i: draw.uniform(0.1, 2.0),
            "ties": lambda i: draw.choice([1.0, 1.2, 1.3, 1.5, 2.0]),
            "rising": lambda i: 0.5 + 0.1 * i,
            "broken": lambda i: draw.choice([math.nan, math.inf, -math.inf, 1.0, 1.2, 0.8, 2.0]),
        }
        yield (
            kind,
            [shapes[kind](i) + (draw.uniform(0, noise) if kind != "ties" else 0) for i in range(length)],
        )
