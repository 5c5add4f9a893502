"""Images of your own: in folder/domain/class, or listed in a table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

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
    root = needed("image-folder", "folder", folder, "your own images")
    files = read_folders(root, {name: [name] for name in domain_folders(root, splits_are_domains)})
    _need_classes(files, str(root))
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
        held_out: the held-out domain or a list of them; by default the last in natural order, ``[]``: none.
        seed: for the choice of the validation examples.
        size: of the images, in pixels each way.
        augment: whether training images are cropped, mirrored and recoloured at random.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
    """
    path = needed("manifest", "file", file, "a list of images")
    files = read_manifest(path)
    if "split" not in files:
        splits = split_files(files, held_out, seed, copies=False)
    elif held_out is not None:
        message = f"{str(path)!r} has a column 'split', which defines the test split; use only one of them."
        raise InputError(message, "held_out")
    else:
        first, split = first_copies(files), files["split"]
        for row in np.flatnonzero(split.to_numpy() != split.to_numpy()[first]):
            pair = f"{files['path'][first[row]]!r} ({split[first[row]]}) and {files['path'][row]!r}"
            raise InputError(f"{pair} ({split[row]}) are the same image in two splits; remove one.")
        splits = {}
        for name in SPLITS:
            inside = (split == name).to_numpy()
            rows = files[inside].assign(row=first[inside]).groupby("domain", observed=True)["row"].unique()
            if len(rows):
                splits[name] = Domains.from_indices({str(d): np.sort(own) for d, own in rows.items()})
        if "train" not in splits:
            raise InputError(f"{str(path)!r} has no row of split train; there is nothing to train on.")
    return image_data(files, splits, options={"size": size, "augment": augment, "bad": bad, "seed": seed})


def manifest_domains(*, file: str | None = None, **others: Any) -> tuple[str, ...] | None:
    """Those that ``held_out`` can hold out; ``None`` where the table itself says what test is."""
    files = read_manifest(needed("manifest", "file", file, "a list of images"))
    return None if "split" in files else tuple(files["domain"].cat.categories)


def read_manifest(path: Path) -> pd.DataFrame:
    """The files listed, and the split of each where the table has one."""
    from shoal.data.tables.read import cell_text, need_column, read

    where, table = repr(str(path)), read(path)
    columns = [*COLUMNS, *(["split"] if "split" in table else [])]
    for name in columns:
        need_column(name, table, f"images of {where}")
        empty = table[name].isna() | (table[name].astype(str).str.strip() == "")
        if empty.any():
            raise InputError(f"{where}, row {empty.argmax() + 1}: {name} is empty; every image needs one.")
        table[name] = table[name].map(cell_text).astype(str)
    paths = table["path"].str.replace("\\", "/", regex=False).map(lambda p: str(path.parent / p))
    if (twice := paths.duplicated()).any():
        second = int(twice.argmax())
        first = int((paths == paths[second]).argmax())
        raise InputError(
            f"{where}, row {second + 1}: {table['path'][second]!r} is listed in row {first + 1} already; an "
            "image has one label, one domain and one split."
        )
    files = image_frame(zip(paths, table["domain"], table["label"], strict=True))
    _need_classes(files, str(path))
    if "split" in table:
        files["split"] = table["split"].str.strip().str.lower().replace(OTHER_WORDS)
        if (wrong := ~files["split"].isin(SPLITS)).any():
            row = int(wrong.argmax())
            raise InputError(
                f"{where}, row {row + 1}: split is {table['split'][row]!r}; it must be {', '.join(SPLITS)}."
            )
    return files


def _need_classes(files: pd.DataFrame, where: str) -> None:
    if len(classes := files["label"].cat.categories) < 2:
        raise InputError(f"{where!r} has images of one class only, {classes[0]!r}; a classifier needs two.")


image_folder = SimpleNamespace(load=load_folder, domains=folder_domains, RESPLIT=True)
manifest = SimpleNamespace(load=load_manifest, domains=manifest_domains, RESPLIT=True)
