"""Images of your own: in folder/domain/class, or listed in a table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pandas as pd

from shoal.data.batch import DomainData
from shoal.data.domains import Domains
from shoal.data.download import needed
from shoal.data.images import (
    SIZE,
    SPLITS,
    domain_folders,
    first_copies,
    image_data,
    image_frame,
    read_folders,
    split_files,
)
from shoal.data.tables import as_table, need_column
from shoal.errors import InputError
from shoal.settings import Pixels, Seed

COLUMNS = ("path", "label", "domain")
OTHER_WORDS = {"val": "validation", "valid": "validation", "dev": "validation", "training": "train"}


def load_folder(
    *,
    folder: str | None = None,
    held_out: str | list[str] | None = None,
    seed: Seed = 0,
    size: Pixels = SIZE,
    augment: bool = True,
    bad: Literal["stop", "skip"] = "stop",
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
        augment_validation: whether the training domains are scored on images changed in the same way, as in
            DomainBed; each image always alike.
        augment_on: where colours change: on the CPU, as in DomainBed, or on the device, a batch at a time; by
            default on CUDA where the memory format is ``auto``, else on the CPU.
        splits_are_domains: whether folders called train, val, test … are domains; they are refused otherwise.
    """
    files = read_image_folder(needed("image-folder", "folder", folder, "your own images"), splits_are_domains)
    options: dict[str, Any] = {"size": size, "augment": augment, "bad": bad, "seed": seed}
    options |= {"augment_validation": augment_validation, "augment_on": augment_on}
    return image_data(files, split_files(files, held_out, seed, copies=False), options=options)


def read_image_folder(folder: Path, splits_are_domains: bool = False) -> pd.DataFrame:
    """The images of a folder that can be trained on."""
    files = read_folders(folder, {name: [name] for name in domain_folders(folder, splits_are_domains)})
    if len(classes := files["label"].cat.categories) < 2:
        raise InputError(
            f"{str(folder)!r} has images of one class only, {classes[0]!r}; a classifier needs two, as "
            "folder/domain/class/image."
        )
    return files


def folder_domains(
    *, folder: str | None = None, splits_are_domains: bool = False, **others: Any
) -> list[str]:
    """Those that ``held_out`` can hold out."""
    path = needed("image-folder", "folder", folder, "your own images")
    return domain_folders(path, splits_are_domains)


def load_manifest(
    *,
    file: str | None = None,
    held_out: str | list[str] | None = None,
    seed: Seed = 0,
    size: Pixels = SIZE,
    augment: bool = True,
    bad: Literal["stop", "skip"] = "stop",
) -> DomainData:
    """Read the images that ``file`` lists, by paths from the folder it is in.

    With a column ``split`` (train, validation, test) these are the splits, and ``held_out`` may not be given.
    Without it one domain is held out and a fifth of every other one held out for validation.

    Args:
        file: the table; Parquet (.parquet), Excel (.xlsx), else CSV in UTF-8 with a line of names first.
        held_out: the held-out domain or a list of them; by default the last in natural order, ``[]``: none.
        seed: for the choice of the validation examples.
        size: of the images, in pixels each way.
        augment: whether training images are cropped, mirrored and recoloured at random.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
    """
    path = needed("manifest", "file", file, "a list of images")
    files, split = read_manifest(path)
    if split is None:
        splits = split_files(files, held_out, seed, copies=False)
    elif held_out is not None:
        message = f"{str(path)!r} has a column 'split', which defines the test split; use only one of them."
        raise InputError(message, "held_out")
    else:
        first, splits = first_copies(files), {}
        for row in np.flatnonzero(first != np.arange(len(files))):
            if split[row] != split[first[row]]:
                pair = f"{files['path'][first[row]]!r} ({split[first[row]]}) and {files['path'][row]!r}"
                raise InputError(f"{pair} ({split[row]}) are the same image in two splits; remove one.")
        for name in SPLITS:
            rows = pd.Series(first)[split == name].groupby(files["domain"], observed=True)
            if members := {str(domain): np.unique(own) for domain, own in rows}:
                splits[name] = Domains.from_indices(members)
        if "train" not in splits:
            raise InputError(f"{str(path)!r} has no row of split train; there is nothing to train on.")
    return image_data(files, splits, options={"size": size, "augment": augment, "bad": bad, "seed": seed})


def manifest_domains(*, file: str | None = None, **others: Any) -> tuple[str, ...] | None:
    """Those that ``held_out`` can hold out; ``None`` where the table itself says what test is."""
    files, split = read_manifest(needed("manifest", "file", file, "a list of images"))
    return tuple(files["domain"].cat.categories) if split is None else None


def read_manifest(path: Path) -> tuple[pd.DataFrame, pd.Series[str] | None]:
    """The files listed, and the split of each where the table has one."""
    source = as_table(path)
    for name in COLUMNS:
        need_column(name, source, f"images of {source.where}")
    columns = [name for name in (*COLUMNS, "split") if name in source]
    table = pd.DataFrame({name: source[name].texts() for name in columns})
    for name in columns:
        empty = table[name].isna() | (table[name].str.strip() == "")
        if empty.any():
            raise InputError(
                f"{source.where}, row {empty.argmax() + 1}: {name} is empty; every image needs one."
            )
    paths = table["path"].str.replace("\\", "/", regex=False).map(lambda p: str(path.parent / p))
    twice = paths.duplicated()
    if twice.any():
        second = int(twice.argmax())
        first = int((paths == paths[second]).argmax())
        raise InputError(
            f"{source.where}, row {second + 1}: {table['path'][second]!r} is listed in row {first + 1} "
            "already; an "
            "image has one label, one domain and one split."
        )
    files = image_frame(zip(paths, table["domain"], table["label"], strict=True))
    if "split" not in table:
        return files, None
    split = table["split"].str.lower().replace(OTHER_WORDS)
    if not split.isin(SPLITS).all():
        row = int((~split.isin(SPLITS)).argmax())
        raise InputError(
            f"{source.where}, row {row + 1}: split is {table['split'][row]!r}; it must be "
            f"{', '.join(SPLITS)}."
        )
    return files, split


image_folder = SimpleNamespace(load=load_folder, domains=folder_domains, RESPLIT=True)
manifest = SimpleNamespace(load=load_manifest, domains=manifest_domains, RESPLIT=True)
