"""Pictures of your own, in folder/domain/class."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from shoal.data.batch import DomainData
from shoal.data.images import SIZE, image_data, leave_one_out
from shoal.data.tree import read_tree, subfolders
from shoal.errors import InputError
from shoal.settings import Pixels, Seed

SUMMARY = "Pictures of your own, laid out as folder/domain/class/picture: jpg, png, webp or bmp."
PAPER = "yours"
RESPLIT = True


def load(
    *,
    folder: str | None = None,
    test: str | list[str] | None = None,
    seed: Seed = 0,
    size: Pixels = SIZE,
    augment: bool = True,
    bad: Literal["stop", "skip"] = "stop",
    cache: bool | None = None,
) -> DomainData:
    """Read the pictures below ``folder``; the classes are those of all domains together, sorted by name.

    A fifth of every training domain is held out for validation, under the same name. The default model is a
    small network that takes pictures of any size.

    Args:
        folder: has a folder for each domain, which has one for each class, which has pictures.
        test: the domain left out, by default the last by name; ``[]`` leaves none out.
        seed: for the choice of the validation examples.
        size: of the pictures, in pixels each way.
        augment: whether training pictures are cropped, mirrored and recoloured at random.
        bad: ``stop`` at a picture that cannot be read, or ``skip`` it.
        cache: whether decoded pictures are kept in memory; small ones are by default.
    """
    files = read_tree(_said(folder))
    splits = leave_one_out(files, files.domains[-1] if test is None else test, seed)
    return image_data(files, splits, size=size, augment=augment, bad=bad, cache=cache)


def domains(*, folder: str | None = None, **others: Any) -> list[str]:
    """Those that ``test`` can leave out."""
    return subfolders(_said(folder))


def _said(folder: str | None) -> Path:
    if folder is None:
        raise InputError("dataset 'image-folder' reads pictures of yours: `--data folder=DIR` says where.")
    return Path(str(folder)).expanduser()
