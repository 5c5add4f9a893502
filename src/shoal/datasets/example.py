"""Small generated data to try Shoal with: a table of patients, and a folder of images.

Both are the same on every machine and depend on no other file. Nothing in them is real.
"""

from __future__ import annotations

import datetime
import math
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.images import need_pillow
from shoal.datasets.cdsprites import LATENT_SIZES, SHAPES, render
from shoal.errors import InputError
from shoal.files import write_atomically

SEED = 0
PER_CLASS, SIDE = 20, 64
"""Images of each class in each domain, and their pixels each way."""
COLUMNS = (
    *("patient", "hospital", "admitted", "age", "sex", "smoker", "pain", "pressure", "cholesterol"),
    *("ecg", "ward", "ill"),
)
PAIN = {"absent": 0.0, "atypical": 0.8, "typical": 2.4}
"""And what each adds to the log odds of being ill."""


class Hospital(NamedTuple):
    """How a hospital differs from the others."""

    patients: int
    age: float
    """The mean of its patients."""
    frequent: float
    """Added to the log odds of being ill."""
    cardiology: tuple[float, float]
    """The share of healthy and of ill patients who are on that ward: a shortcut that does not carry over."""
    unmeasured: float = 0.1
    """The share of patients whose cholesterol was not measured."""
    millimoles: bool = False
    """Cholesterol in mmol/l, not mg/dl."""
    rounded: bool = False
    """Notes some blood pressures as a guess, such as "ca. 140"."""


HOSPITALS = {
    "oslo": Hospital(150, 62, 0.2, (0.12, 0.85)),
    "lima": Hospital(120, 54, -0.4, (0.15, 0.8), unmeasured=0.3, rounded=True),
    "kyoto": Hospital(140, 66, 0.0, (0.1, 0.9)),
    "cairo": Hospital(100, 57, 0.6, (0.75, 0.2), unmeasured=0.9),
    "leeds": Hospital(90, 60, -0.1, (0.45, 0.5), millimoles=True),
}


def write_table(path: str | Path = "patients.csv") -> Path:
    """Writes a CSV table of 600 patients from five hospitals; ``ill`` is the label, ``hospital`` the domain.

    The columns are of several kinds and some cells are missing or unreadable. Illness depends on age, blood
    pressure, cholesterol, smoking, pain and ECG in the same way everywhere. Two things do not carry over: one
    hospital notes cholesterol in another unit, and the ward tells who is ill in some hospitals only. A file
    that exists is not overwritten.
    """
    import pandas as pd

    path, draw = _new(path), random.Random(SEED)
    rows = [
        (f"{name[:3].upper()}-{number:04d}", name, *_patient(hospital, draw))
        for name, hospital in HOSPITALS.items()
        for number in range(1, hospital.patients + 1)
    ]
    table = pd.DataFrame(rows, columns=COLUMNS)
    write_atomically(path, table.to_csv(index=False, lineterminator="\n").encode())
    return path


def _patient(hospital: Hospital, draw: random.Random) -> list[str]:
    def unless(share: float, cell: str, missing: str = "") -> str:
        return missing if draw.random() < share else cell

    day = datetime.date(2024, 1, 1) + datetime.timedelta(days=draw.randrange(366))
    age = min(max(draw.gauss(hospital.age, 11), 19), 95)
    male, smokes = draw.random() < 0.55, draw.random() < 0.3
    pain = draw.choices(list(PAIN), (5, 3, 2))[0]
    pressure = draw.gauss(132 + 0.3 * (age - 60), 16)
    cholesterol = draw.gauss(205 + 8 * male, 38)
    ecg = draw.choices(("normal", "ST-T", "hypertrophy"), (6, 2, 2))[0]
    odds = 0.07 * (age - 60) + 0.03 * (pressure - 132) + 0.02 * (cholesterol - 205) + 1.1 * smokes - 1.6
    odds += PAIN[pain] + 1.4 * (ecg != "normal") + hospital.frequent
    ill = draw.random() < 1 / (1 + math.exp(-odds))
    cardiology = draw.random() < hospital.cardiology[ill]
    ward = "cardiology" if cardiology else draw.choice(("emergency", "general", "surgery"))
    guess = hospital.rounded and draw.random() < 0.04
    amount = f"{cholesterol / 38.67:.1f}" if hospital.millimoles else f"{cholesterol:.0f}"
    return [
        day.isoformat(),
        unless(0.03, f"{age:.0f}"),
        "male" if male else "female",
        unless(0.12, "yes" if smokes else "no"),
        pain,
        f"ca. {round(pressure, -1):.0f}" if guess else unless(0.05, f"{pressure:.0f}", "n/a"),
        unless(hospital.unmeasured, amount),
        unless(0.06, ecg),
        ward,
        "yes" if ill else "no",
    ]


def write_images(folder: str | Path = "photos") -> Path:
    """Writes a folder ``domain/class/image.png`` of 240 images of 64 × 64 pixels.

    Squares, ellipses and hearts (the classes) in four styles (the domains): ``paint``, ``street``, ``night``
    and ``sketch``. A folder that exists is not written to. Needs Pillow.
    """
    need_pillow()
    from PIL import Image

    folder, draw = _new(folder), np.random.RandomState(SEED)  # whose stream no version of NumPy changes
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Under its name only when it is whole.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".shoal-example-") as partial:
        for domain, style in STYLES.items():
            for number, shape in enumerate(SHAPES):
                place = Path(partial, folder.name, domain, shape)
                place.mkdir(parents=True)
                for index, mask in enumerate(_masks(number, draw)):
                    Image.fromarray(style(mask, draw)).save(place / f"{index:02d}.png")
        Path(partial, folder.name).rename(folder)
    return folder


Array = NDArray[np.uint8]


def _masks(shape: int, draw: np.random.RandomState) -> Array:
    """Sprites of one shape, of which none is tiny."""
    _, scales, *others = LATENT_SIZES
    columns = [np.full(PER_CLASS, shape), draw.randint(2, scales, PER_CLASS)]
    columns += [draw.randint(0, size, PER_CLASS) for size in others]
    return render(torch.as_tensor(np.stack(columns, 1)), SIDE).numpy()


def _paint(mask: Array, draw: np.random.RandomState) -> Array:
    """A plain bright colour on a plain pale one."""
    return _colour(mask, draw.randint(40, 200, 3), draw.randint(200, 256, 3))


def _street(mask: Array, draw: np.random.RandomState) -> Array:
    """In front of blocks of other colours."""
    blocks = draw.randint(60, 230, (8, 8, 3)).repeat(SIDE // 8, 0).repeat(SIDE // 8, 1)
    return _colour(mask, draw.randint(0, 256, 3), blocks)


def _night(mask: Array, draw: np.random.RandomState) -> Array:
    """Dim, on dark grain."""
    grain = draw.randint(0, 40, (SIDE // 2, SIDE // 2, 1)).repeat(2, 0).repeat(2, 1).repeat(3, 2)
    return _colour(mask, draw.randint(50, 120, 3), grain)


def _sketch(mask: Array, draw: np.random.RandomState) -> Array:
    """The outline, in a dark grey on white."""
    padded = np.pad(mask, 1, mode="edge")
    inside = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    outline = np.where(inside, 0, mask).astype(np.uint8)
    return _colour(outline, np.full(3, draw.randint(0, 90)), np.full(3, 255))


STYLES = {"paint": _paint, "street": _street, "night": _night, "sketch": _sketch}


def _colour(mask: Array, front: NDArray[np.int_], back: NDArray[np.int_]) -> Array:
    return np.where(mask[:, :, None] == 1, front, back).astype(np.uint8)


def _new(path: str | Path) -> Path:
    path = Path(path).expanduser()
    if path.is_dir() or path.is_file():
        raise InputError(f"{str(path)!r} exists already; it is not overwritten. Choose another name.")
    for above in path.parents:
        if above.exists() and not above.is_dir():
            raise InputError(f"{str(path)!r} cannot be written: {str(above)!r} is a file.")
    return path
