"""Images of your own: in folder/domain/class, or listed in a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

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
from shoal.errors import InputError
from shoal.settings import Pixels, Seed

if TYPE_CHECKING:
    import pandas as pd

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
        splits_are_domains: whether folders called train, val, test … are domains; they are refused otherwise.
    """
    root = str(needed("image-folder", "folder", folder, "your own images"))
    files = read_folders(root, {name: [name] for name in domain_folders(root, splits_are_domains)})
    _need_classes(files, root)
    options: dict[str, Any] = {"size": size, "augment": augment, "bad": bad, "seed": seed}
    options["augment_validation"] = augment_validation
    return image_data(files, split_files(files, held_out, seed, copies=False), options=options)


def folder_domains(
    *, folder: str | None = None, splits_are_domains: bool = False, **others: Any
) -> list[str]:
    """Those that ``held_out`` can hold out."""
    return domain_folders(needed("image-folder", "folder", folder, "your own images"), splits_are_domains)


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
        file: a table with columns path, label and domain: CSV, Parquet or Excel.
        held_out: this and the other options are as in :func:`load_folder`.
    """
    files = read_manifest(file)
    if "split" not in files:
        splits = split_files(files, held_out, seed, copies=False)
    elif held_out is None:
        splits = _listed_splits(files, first_copies(files), str(file))
    else:
        message = f"{str(file)!r} has a column 'split', which defines the test split; use only one of them."
        raise InputError(message, "held_out")
    return image_data(files, splits, options={"size": size, "augment": augment, "bad": bad, "seed": seed})


def _listed_splits(files: pd.DataFrame, first: NDArray[np.int64], where: str) -> dict[str, Domains]:
    """The domains of each split that a list names; copies of an image count once, as the ``first``."""
    split = files["split"]
    for row in np.flatnonzero(split.to_numpy() != split.to_numpy()[first]):
        pair = f"{files['path'][first[row]]!r} ({split[first[row]]}) and {files['path'][row]!r}"
        raise InputError(f"{pair} ({split[row]}) are the same image in two splits; remove one.")
    rows = files.assign(row=first).groupby(["split", "domain"], observed=True)["row"]
    splits: dict[str, dict[str, Any]] = {name: {} for name in SPLITS if name in set(split)}
    for (name, domain), own in rows:
        splits[name][str(domain)] = np.unique(own)
    if "train" not in splits:
        raise InputError(f"{where!r} has no row of split train; there is nothing to train on.")
    return {name: Domains.from_indices(domains) for name, domains in splits.items()}


def manifest_domains(*, file: str | None = None, **others: Any) -> tuple[str, ...] | None:
    """Those that ``held_out`` can hold out; ``None`` where the table itself says what test is."""
    files = read_manifest(file)
    return None if "split" in files else tuple(files["domain"].cat.categories)


def read_manifest(file: str | None) -> pd.DataFrame:
    """The files listed, and the split of each where the table has one."""
    from shoal.data.tables import as_table, need_column

    path = needed("manifest", "file", file, "a list of images")
    where, table, columns = repr(str(path)), as_table(path), dict[str, list[str]]()
    for name in (*COLUMNS, *(["split"] if "split" in table else [])):
        cells = table[need_column(name, table, f"images of {where}")].texts()
        if None in cells:
            raise InputError(f"{where}, row {cells.index(None) + 1}: {name} is empty; every image needs one.")
        columns[name] = [cell or "" for cell in cells]
    paths = [str(path.parent / name.replace("\\", "/")) for name in columns["path"]]
    files = image_frame(zip(paths, columns["domain"], columns["label"], strict=True))
    _need_classes(files, str(path))
    if "split" in columns:
        files["split"] = [OTHER_WORDS.get(word.lower(), word.lower()) for word in columns["split"]]
        if (wrong := ~files["split"].isin(SPLITS)).any():
            row, valid = int(wrong.argmax()), ", ".join(SPLITS)
            value = columns["split"][row]
            raise InputError(f"{where}, row {row + 1}: split is {value!r}; it must be {valid}.")
    return files


def _need_classes(files: pd.DataFrame, where: str) -> None:
    if len(classes := files["label"].cat.categories) < 2:
        raise InputError(f"{where!r} has images of one class only, {classes[0]!r}; a classifier needs two.")


image_folder = SimpleNamespace(load=load_folder, domains=folder_domains, RESPLIT=True)
manifest = SimpleNamespace(load=load_manifest, domains=manifest_domains, RESPLIT=True)
