"""Images of your own, in folder/domain/class."""

from __future__ import annotations

from typing import Any, Literal

from shoal.data.batch import DomainData
from shoal.data.folders import needed
from shoal.data.images import SIZE, image_data, split_files
from shoal.data.tree import domain_folders, read_tree, subfolders
from shoal.settings import Pixels, Seed

SUMMARY = "Your own images, arranged as folder/domain/class/image: jpg, png, webp or bmp."
PAPER = "yours"
RESPLIT = True


def load(
    *,
    folder: str | None = None,
    held_out: str | list[str] | None = None,
    seed: Seed = 0,
    size: Pixels = SIZE,
    augment: bool = True,
    bad: Literal["stop", "skip"] = "stop",
    cache: bool | None = None,
    augment_validation: bool = False,
    augment_on: Literal["cpu", "device"] | None = None,
    splits_are_domains: bool = False,
) -> DomainData:
    """Read the images below ``folder``; the classes are those of all domains together, sorted by name.

    A fifth of every training domain is held out for validation, under the same name. The default model is a
    small network that takes images of any size.

    Args:
        folder: has a folder for each domain, which has one for each class, which has images.
        held_out: the held-out domain or a list of them; by default the last in natural order, ``[]``: none.
        seed: for the choice of the validation examples, and how these are changed.
        size: to which images are resized, in pixels each way.
        augment: whether training images are cropped, mirrored and recoloured at random.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
        cache: whether decoded images are kept in memory; small ones are by default.
        augment_validation: whether the training domains are scored on images changed in the same way, as in
            DomainBed; each image always alike.
        augment_on: where colours change: on the CPU by Pillow, as in DomainBed, or on the device, a batch at
            a time; by default on CUDA where the memory format is ``auto``, else on the CPU.
        splits_are_domains: whether folders called train, val, test … are domains; they are refused otherwise.
    """
    names = domains(folder=folder, splits_are_domains=splits_are_domains)
    files = read_tree(
        needed("image-folder", "folder", folder, "your own images"), {name: [name] for name in names}
    )
    splits = split_files(files, held_out, seed)
    options: dict[str, Any] = {"augment_validation": augment_validation, "seed": seed}
    options |= {"augment": augment, "augment_on": augment_on}
    return image_data(files, splits, size=size, bad=bad, cache=cache, **options)


def domains(*, folder: str | None = None, splits_are_domains: bool = False, **others: Any) -> list[str]:
    """Those that ``held_out`` can hold out."""
    return (subfolders if splits_are_domains else domain_folders)(
        needed("image-folder", "folder", folder, "your own images")
    )
