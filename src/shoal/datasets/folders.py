"""Published image datasets in folders, each declared by a YAML file beside this one."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from shoal.data.batch import DomainData
from shoal.data.download import SAY_WHERE, Download, Source, roots
from shoal.data.images import SIZE, image_data, read_folders, split_files, subfolders
from shoal.errors import InputError
from shoal.files import read_yaml
from shoal.settings import Pixels, Seed

PUBLISHED = {"network": "resnet50.tv_in1k", "data": {"augment_validation": True}}
"""What DomainBed's published results are of, for all of these; fields of its protocol's ``Sizes``."""


class Layout(SimpleNamespace):
    """Where a published dataset's images are, and how many there should be: the content of its YAML file.

    ``folders`` are names of its own folder, of which case, spaces and signs do not count; ``domains`` have
    other names of theirs; ``counts`` are images of each domain.
    """

    @property
    def how(self) -> str:
        """How it can be obtained."""
        return f"with `shoal data get {self.name}`, or by hand from {self.page}"

    def find(self, folder: str | Path | None, lacking: bool = False) -> tuple[Path, dict[str, list[str]]]:
        """The dataset's folder, and the folder in it of every domain.

        ``folder`` may be the dataset's own, the one it is in, or ``None`` for ``$SHOAL_DATA``. Some domains
        may be missing only if ``lacking``.
        """
        own = {_plain(name) for name in self.folders}
        top = roots(f"the images of {self.title}", folder, self.folders[0], self.name)
        places = [root for root in top if root.is_dir()]
        for _ in range(2):  # an archive may hold a folder of the same name
            places += [p / n for p in places for n in subfolders(p) if _plain(n) in own]
        found = {place: self._domains(place) for place in places}
        place = max(found, key=lambda each: len(found[each]), default=top[0])
        domains = found.get(place, {})
        missing = [name for name in self.domains if name not in domains]
        if missing and not (domains and lacking):
            where = " or ".join(repr(str(each)) for each in ([place] if domains else top))
            raise InputError(
                f"{self.title} is not in {where}: there is no folder {', '.join(missing)}. {SAY_WHERE} to "
                f"look; it can be obtained {self.how}."
            )
        return place, domains

    def _domains(self, place: Path) -> dict[str, list[str]]:
        there = {_plain(name): name for name in subfolders(place)}
        found = {
            d: [there[n] for n in map(_plain, (d, *others)) if n in there]
            for d, others in self.domains.items()
        }
        return {domain: names[:1] for domain, names in found.items() if names}


def _plain(name: str) -> str:
    """A folder's name without case, spaces and signs."""
    return re.sub(r"[\W_]", "", name.casefold())


@cache
def declared(path: Path) -> SimpleNamespace:
    """The dataset that a YAML file declares."""
    about = read_yaml(path)
    layout = Layout(name=path.stem.replace("_", "-"), **about)

    def load(
        *,
        held_out: str | list[str] = about["held_out"],
        folder: str | None = None,
        seed: Seed = 0,
        size: Pixels = SIZE,
        augment: bool = True,
        bad: Literal["stop", "skip"] = "stop",
        augment_validation: bool = False,
    ) -> DomainData:
        """A published dataset with one domain held out, or several.

        A fifth of every training domain is held out for validation, under the same name. The default model is
        a small network that takes images of any size; published results are those of a pretrained ResNet-50,
        which ``shoal sweep`` takes. Options as in :func:`shoal.datasets.own.load_folder`.
        """
        files = read_folders(*layout.find(folder))
        options: dict[str, Any] = {"size": size, "augment": augment, "bad": bad, "seed": seed}
        options["augment_validation"] = augment_validation
        return image_data(files, split_files(files, held_out, seed), options=options)

    sources = [Source(**each) for each in about["download"]]
    prepare = {"remove_copies": remove_copies, "sort_by_camera": sort_by_camera}.get(about.get("prepare"))
    return SimpleNamespace(
        load=load,
        LAYOUT=layout,
        DOMAINS=tuple(layout.domains),
        DOMAINBED=PUBLISHED | about.get("domainbed", {}),
        DOWNLOAD=Download(layout.folders[0], sources, lambda folder: layout.find(folder)[0], prepare),
    )


def __getattr__(name: str) -> SimpleNamespace:
    path = Path(__file__).with_name(f"{name}.yaml")
    if not path.is_file():
        raise AttributeError(name)
    return declared(path)


# What archives need to become folder/domain/class

CAMERAS = ("100", "38", "43", "46")
ANIMALS = ["bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"]


def remove_copies(folder: Path) -> str:
    """DomainNet: removes the images that DomainBed lists as copies of others, and the list."""
    listed = folder / "domain_net_duplicates.txt"
    names = {Path(name.strip()) for name in listed.read_text(errors="replace").splitlines() if name.strip()}
    inside = [folder / name for name in names if not name.is_absolute() and ".." not in name.parts]
    copies = [path for path in inside if path.is_file()]
    for path in (*copies, listed):
        path.unlink()
    return f"{len(copies):,} images that DomainBed lists as duplicates are excluded"


def sort_by_camera(folder: Path) -> str:
    """TerraIncognita: from one folder of images, and the labels beside it, to ``location_46/bird`` and so on.

    Only the four cameras and ten classes that DomainBed chose are kept. An image with two labels is in both
    classes, as there.
    """
    import pandas as pd

    files, images = list(folder.glob("*.json")), folder / "eccv_18_all_images_sm"
    if len(files) != 1 or not images.is_dir():
        raise InputError(f"TerraIncognita's archives contain no labels (.json) or no folder {images.name!r}.")
    content = json.loads(files[0].read_text())
    photos = pd.DataFrame(content["images"]).set_index("id")[["file_name", "location"]]
    animals = pd.DataFrame(content["categories"]).set_index("id")["name"]
    table = pd.DataFrame(content["annotations"])[["image_id", "category_id"]].drop_duplicates()
    table = table.join(photos, "image_id").join(animals, "category_id").astype({"location": str})
    table = table[table["name"].isin(ANIMALS) & table["location"].isin(CAMERAS)]
    kept = set[str]()
    for photo, camera, animal in zip(table["file_name"], table["location"], table["name"], strict=True):
        photo = Path(photo).name  # never a path out of the folder
        if (images / photo).is_file():
            place = folder / f"location_{camera}" / animal
            place.mkdir(parents=True, exist_ok=True)
            os.link(images / photo, place / photo)
            kept.add(photo)
    shutil.rmtree(images)
    files[0].unlink()
    return (
        f"{len(kept):,} of {table['file_name'].nunique():,} images of four cameras and ten classes are kept"
    )
