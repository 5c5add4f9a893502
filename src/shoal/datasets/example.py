"""Small generated data to try Shoal with: a table of patients, and a folder of images.

Both are the same on every machine and depend on no other file. Nothing in them is real.
"""

from __future__ import annotations

import datetime
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.ndimage import binary_erosion

from shoal.datasets.cdsprites import LATENT_SIZES, SHAPES, render
from shoal.errors import InputError
from shoal.files import write_atomically
from shoal.vision import load

HOSPITALS = {
    "oslo": (150, 62, 0.2, (0.12, 0.85), 0.1),
    "lima": (120, 54, -0.4, (0.15, 0.8), 0.3),
    "kyoto": (140, 66, 0.0, (0.1, 0.9), 0.1),
    "cairo": (100, 57, 0.6, (0.75, 0.2), 0.9),
    "leeds": (90, 60, -0.1, (0.45, 0.5), 0.1),
}
"""The number of patients, their mean age, a term of the log odds of being ill, the shares of healthy and of
ill patients on the cardiology ward (a shortcut that does not carry over), and without cholesterol."""
PAIN = {"absent": 0.0, "atypical": 0.8, "typical": 2.4}
"""And what each adds to the log odds of being ill."""


def write_table(path: str | Path = "patients.csv") -> Path:
    """Writes a CSV table of 600 patients from five hospitals; ``ill`` is the label, ``hospital`` the domain.

    The columns are of several kinds and some cells are missing or unreadable. Illness depends on age, blood
    pressure, cholesterol, smoking, pain and ECG in the same way everywhere. Two things do not carry over: one
    hospital notes cholesterol in another unit, and the ward tells who is ill in some hospitals only. A file
    that exists is not overwritten.
    """
    import pandas as pd

    path, draw, rows = _new(path), random.Random(0), []
    for hospital, (patients, *_) in HOSPITALS.items():
        for number in range(1, patients + 1):
            patient = {"patient": f"{hospital[:3].upper()}-{number:04d}", "hospital": hospital}
            rows.append(patient | _patient(hospital, draw))
    table = pd.DataFrame(rows)
    write_atomically(path, table.to_csv(index=False, lineterminator="\n").encode())
    return path


def _patient(hospital: str, draw: random.Random) -> dict[str, str]:
    def unless(share: float, cell: str, missing: str = "") -> str:
        return missing if draw.random() < share else cell

    _, mean_age, frequent, on_cardiology, unmeasured = HOSPITALS[hospital]
    day = datetime.date(2024, 1, 1) + datetime.timedelta(days=draw.randrange(366))
    age = min(max(draw.gauss(mean_age, 11), 19), 95)
    male, smokes = draw.random() < 0.55, draw.random() < 0.3
    pain = draw.choices(list(PAIN), (5, 3, 2))[0]
    pressure = draw.gauss(132 + 0.3 * (age - 60), 16)
    cholesterol = draw.gauss(205 + 8 * male, 38)
    ecg = draw.choices(("normal", "ST-T", "hypertrophy"), (6, 2, 2))[0]
    odds = 0.07 * (age - 60) + 0.03 * (pressure - 132) + 0.02 * (cholesterol - 205) + 1.1 * smokes - 1.6
    odds += PAIN[pain] + 1.4 * (ecg != "normal") + frequent
    ill = draw.random() < 1 / (1 + math.exp(-odds))
    cardiology = draw.random() < on_cardiology[ill]
    ward = "cardiology" if cardiology else draw.choice(("emergency", "general", "surgery"))
    guess = hospital == "lima" and draw.random() < 0.04
    level = f"{cholesterol / 38.67:.1f}" if hospital == "leeds" else f"{cholesterol:.0f}"
    return {
        "admitted": day.isoformat(),
        "age": unless(0.03, f"{age:.0f}"),
        "sex": "male" if male else "female",
        "smoker": unless(0.12, "yes" if smokes else "no"),
        "pain": pain,
        "pressure": f"ca. {round(pressure, -1):.0f}" if guess else unless(0.05, f"{pressure:.0f}", "n/a"),
        "cholesterol": unless(unmeasured, level),
        "ecg": unless(0.06, ecg),
        "ward": ward,
        "ill": "yes" if ill else "no",
    }


STYLES = ("paint", "street", "night", "sketch")
PER_CLASS, SIDE = 20, 64
"""Images of each class in each domain, and their pixels each way."""


def write_images(folder: str | Path = "photos") -> Path:
    """Writes a folder ``domain/class/image.png`` of 240 images of 64 × 64 pixels.

    Squares, ellipses and hearts (the classes) in four styles (the domains): ``paint``, ``street``, ``night``
    and ``sketch``. A folder that exists is not written to. Needs Pillow.
    """
    load("PIL.Image", "images")
    from PIL import Image

    folder, draw = _new(folder), np.random.RandomState(0)  # whose stream no version of NumPy changes
    for domain in STYLES:
        for number, shape in enumerate(SHAPES):
            (folder / domain / shape).mkdir(parents=True)
            least, most = [number, 2, 0, 0, 0], [number + 1, *LATENT_SIZES[1:]]  # none is tiny
            latents = torch.from_numpy(draw.randint(least, most, (PER_CLASS, 5)))
            for index, mask in enumerate(render(latents, SIDE).bool().numpy()):
                image = Image.fromarray(_image(domain, mask, draw))
                image.save(folder / domain / shape / f"{index:02d}.png")
    return folder


def _image(domain: str, mask: Any, draw: np.random.RandomState) -> Any:
    front, back = np.full(3, draw.randint(0, 90)), np.full(3, 255)
    if domain == "paint":  # a plain bright colour on a plain pale one
        front, back = draw.randint(40, 200, 3), draw.randint(200, 256, 3)
    elif domain == "street":  # in front of blocks of other colours
        blocks = draw.randint(60, 230, (8, 8, 3)).repeat(SIDE // 8, 0).repeat(SIDE // 8, 1)
        front, back = draw.randint(0, 256, 3), blocks
    elif domain == "night":  # dim, on dark grain
        front, back = draw.randint(50, 120, 3), draw.randint(0, 40, (SIDE, SIDE, 1))
    else:  # sketch: the outline
        mask = mask & ~binary_erosion(mask)
    return np.where(mask[:, :, None], front, back).astype(np.uint8)


def _new(path: str | Path) -> Path:
    """A path that nothing is at yet, in a folder that exists."""
    path = Path(path).expanduser()
    if path.exists():
        raise InputError(f"{str(path)!r} exists already; it is not overwritten. Choose another name.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror}.") from error
    return path
