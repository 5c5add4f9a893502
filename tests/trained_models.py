"""Small trained models of tables, images and text, in folders, for the tests of what uses them."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
import shoal.models
from shoal import datasets as sets
from shoal.data import DomainData, from_table

LABELS = ("ill", "grade", "stay")
"""Columns of :func:`patients` to predict: two classes, three classes, a number."""


def patients(
    seed: int, rows: int = 400, sites: tuple[str, ...] = ("oslo", "lima", "kyoto")
) -> dict[str, list[Any]]:
    rng = np.random.default_rng(seed)
    age, colour = rng.normal(50, 12, rows), rng.choice(["red", "blue", "green"], rows)
    odds = (age - 50) / 8 + (colour == "red")
    table = {
        "age": age.round(1),
        "colour": colour,
        "site": rng.choice(sites, rows),
        "ill": np.where(rng.random(rows) < 1 / (1 + np.exp(-odds)), "yes", "no"),
        "grade": np.digitize(odds + rng.normal(0, 0.5, rows), [-1, 1.5]),
        "stay": (3 + 0.2 * age + rng.normal(0, 1, rows)).round(2),
    }
    return {name: values.tolist() for name, values in table.items()}


def write_csv(path: Path, columns: Mapping[str, Any]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
    return path


def fit(folder: Path, data: DomainData, steps: int = 3, **options: Any) -> Path:
    shape = {"input_shape": data.input_shape, "classes": data.classes}
    model = shoal.models.build(data.model, **shape, seed=0)
    with warnings.catch_warnings(action="ignore"):
        shoal.fit("erm", model, data, steps=steps, folder=folder, progress=False, device="cpu", **options)
    return folder


def table_model(folder: Path, label: str = "ill", steps: int = 40) -> Path:
    """Of patients, with the domain kyoto held out."""
    drop = [name for name in LABELS if name != label]
    task = "regression" if label == "stay" else None
    with warnings.catch_warnings(action="ignore"):  # rows that repeat others
        data = from_table(patients(0), label=label, domain="site", held_out="kyoto", drop=drop, task=task)
    return fit(folder, data, steps, lr=0.01)


def write_images(folder: Path, count: int = 5) -> Path:
    """Arranged as domain/class/image; dogs are brighter than cats."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for domain in ("day", "night", "rain"):
        for number, kind in enumerate(("cat", "dog")):
            place = folder / domain / kind
            place.mkdir(parents=True)
            for n in range(count):
                pixels = rng.integers(0, 100, (20 + n, 30, 3)) + 120 * number
                image.fromarray(pixels.astype(np.uint8)).save(place / f"{n}.png")
    return folder


def image_model(folder: Path, images: Path) -> Path:
    """Of such images, with the domain rain held out."""
    return fit(folder, sets.load("image-folder", folder=str(images), size=16, held_out="rain"), batch_size=4)


def text_model(folder: Path, texts: Path) -> Path:
    """Of reviews, which are written to ``texts``, with an encoder that is there too."""
    pytest.importorskip("transformers")
    from imitations.wilds_text import fake_amazon

    fake_amazon(texts)
    encoder = str(texts / "tiny-bert")
    data = sets.load("amazon", folder=str(texts), tokenizer=encoder, max_tokens=32)
    return fit(folder, data, steps=2, batch_size=4, eval_limit=8)
