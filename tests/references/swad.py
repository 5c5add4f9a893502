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


def sequences(count, seed=0):
    """Losses of pretended trainings: valleys and slopes with noise, with ties, and with some not finite."""
    draw = random.Random(seed)
    for number in range(count):
        length = draw.randint(1, 40)
        bottom, noise = draw.uniform(0.1, 1.5) * length, draw.choice([0.0, 0.02, 0.2, 2.0])
        losses = [0.3 + ((i - bottom) / 9) ** 2 + draw.uniform(0, noise) for i in range(length)]
        if number % 3 == 1:
            losses = [round(loss, 1) for loss in losses]
        if number % 3 == 2:
            losses = [draw.choice([math.nan, math.inf, -math.inf, loss, loss, loss]) for loss in losses]
        yield losses
