"""DomainBed's ways to choose and to tabulate, written again from what its programs do.

Facts, from its ``model_selection.py``, ``scripts/collect_results.py`` and ``lib/{query,reporting}.py``:

- Every line of every ``results.jsonl`` counts, whether its run is finished or not.
- Lines are put together by trial seed, dataset, algorithm and each of their test environments.
- Each hyperparameter seed gives one candidate or none: of equal steps the first.
- Candidates are sorted by what they are chosen by, upwards and stably in the order of the hyperparameter
  seeds, and that list is reversed: of equals the highest hyperparameter seed.
- A cell is the mean over the trials that have a choice, and its error √(variance over n / n).
- A dataset's average is the mean of its cells, or none where a cell is empty.
- Over datasets, a trial counts with the mean of the environments it has a choice for.

A line is a dictionary: ``dataset``, ``algorithm``, ``test_envs``, ``trial``, ``hparams``, ``step``, and the
lists ``in`` and ``out`` of accuracies by environment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def training_candidate(lines: list[dict], env: int) -> tuple[float, float] | None:
    best = None
    for line in lines:
        if len(line["test_envs"]) != 1:
            continue
        judged = np.mean([acc for i, acc in enumerate(line["out"]) if i != env])
        if best is None or judged > best[0]:
            best = (judged, line["in"][env])
    return best


def leave_one_out_candidate(lines: list[dict], env: int) -> tuple[float, float] | None:
    best = None
    for step in sorted({line["step"] for line in lines}):
        here = [line for line in lines if line["step"] == step]
        alone = [line for line in here if len(line["test_envs"]) == 1]
        if len(alone) != 1:
            continue
        count = len(here[0]["out"])
        held_out: list[float | None] = [None] * count
        for line in here:
            if len(line["test_envs"]) == 2:
                (other,) = set(line["test_envs"]) - {env}
                held_out[other] = line["in"][other]
        del held_out[env]
        if None in held_out:
            continue
        judged = np.sum(held_out) / (count - 1)
        if best is None or judged > best[0]:
            best = (judged, alone[0]["in"][env])
    return best


def oracle_candidate(lines: list[dict], env: int) -> tuple[float, float] | None:
    alone = [line for line in lines if len(line["test_envs"]) == 1]
    if not alone:
        return None
    last = alone[0]
    for line in alone:
        if line["step"] >= last["step"]:
            last = line
    return last["out"][env], last["in"][env]


CANDIDATES = {
    "training": training_candidate,
    "leave-one-out": leave_one_out_candidate,
    "oracle": oracle_candidate,
}


def choice(lines: list[dict], env: int, rule: str) -> float | None:
    """The accuracy that is reported of lines of one trial, dataset, algorithm and test environment."""
    found = []
    for number in sorted({line["hparams"] for line in lines}):
        candidate = CANDIDATES[rule]([line for line in lines if line["hparams"] == number], env)
        if candidate is not None:
            found.append(candidate)
    found.sort(key=lambda candidate: candidate[0])
    return found[-1][1] if found else None


def chosen(lines: list[dict], rule: str) -> dict[tuple[str, str, int, int], float]:
    """By dataset, algorithm, test environment and trial, where there is anything to choose from."""
    groups: dict[tuple[str, str, int, int], list[dict]] = {}
    for line in lines:
        for env in line["test_envs"]:
            groups.setdefault((line["dataset"], line["algorithm"], env, line["trial"]), []).append(line)
    every = {group: choice(own, group[2], rule) for group, own in groups.items()}
    return {group: accuracy for group, accuracy in every.items() if accuracy is not None}


def mean_and_error(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    mean = sum(values) / len(values)
    return mean, (sum((v - mean) ** 2 for v in values) / len(values) / len(values)) ** 0.5


def cell(lines: list[dict], rule: str, dataset: str, algorithm: str, env: int) -> tuple[float, float] | None:
    found = chosen(lines, rule)
    return mean_and_error([v for k, v in sorted(found.items()) if k[:3] == (dataset, algorithm, env)])


def dataset_average(lines: list[dict], rule: str, dataset: str, algorithm: str, envs: int) -> float | None:
    cells = [cell(lines, rule, dataset, algorithm, env) for env in range(envs)]
    return None if None in cells else sum(c[0] for c in cells if c) / envs


def overall(lines: list[dict], rule: str, dataset: str, algorithm: str) -> tuple[float, float] | None:
    """A dataset's entry in the table of averages."""
    own = {k: v for k, v in chosen(lines, rule).items() if k[:2] == (dataset, algorithm)}
    trials = []
    for trial in sorted({k[3] for k in own}):
        values = [v for k, v in own.items() if k[3] == trial]
        trials.append(sum(values) / len(values))
    return mean_and_error(trials)
