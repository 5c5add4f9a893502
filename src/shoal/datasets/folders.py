"""Published image datasets in folders, each declared by a YAML file beside this one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from shoal.data.batch import DomainData
from shoal.data.download import SAY_WHERE, Download, Source, roots
from shoal.data.images import SIZE, image_data, read_folders, split_files, subfolders
from shoal.data.splits import held_out_names
from shoal.errors import InputError
from shoal.files import read_yaml
from shoal.settings import Pixels, Seed

if TYPE_CHECKING:
    import pandas as pd

PUBLISHED = {"network": "resnet50.tv_in1k", "data": {"augment_validation": True}}
"""What DomainBed's published results are of, for all of these; fields of its protocol's ``Sizes``."""


class Layout(SimpleNamespace):
    """Where a published dataset's images are, and how many there should be: the content of its YAML file.

    ``folders`` are names of its own folder, of which case, spaces and signs do not count; ``domains`` have
    other names of theirs; ``parts`` are folders that may lie between a domain and its classes, of which the
    first group that is there is read. ``counts`` are images of each domain, ``source`` says who counted,
    ``other_counts`` are those of others, and ``page`` is where it can be obtained by hand.
    """

    parts: Sequence[Sequence[str]] = ()
    other_counts: Mapping[str, Mapping[str, int]] = MappingProxyType({})

    @property
    def how(self) -> str:
        """How it can be obtained."""
        return f"with `shoal data get {self.name}`, or by hand from {self.page}"

    def find(self, folder: str | Path | None) -> tuple[Path, dict[str, list[str]]]:
        """The dataset's folder, and the folders below it of every domain that is there.

        ``folder`` may be the dataset's own, the one it is in, or ``None`` for ``$SHOAL_DATA``.
        """
        own = {_plain(name) for name in self.folders}
        top = roots(f"the images of {self.title}", folder, self.folders[0], self.name)
        places = [root for root in top if root.is_dir()]
        for _ in range(2):  # an archive may hold a folder of the same name
            places += [p / n for p in places for n in subfolders(p) if _plain(n) in own]
        found = [(place, domains) for place in places if (domains := self._domains(place))]
        if not found:
            raise InputError(
                f"{self.title} is not in {' or '.join(repr(str(root)) for root in top)}: there are no "
                f"folders {', '.join(self.domains)}. {SAY_WHERE} to look; it can be obtained {self.how}."
            )
        return max(found, key=lambda one: len(one[1]))

    def _domains(self, place: Path) -> dict[str, list[str]]:
        there, found = {_plain(name): name for name in subfolders(place)}, {}
        for domain, others in self.domains.items():
            names = [there[name] for name in map(_plain, (domain, *others)) if name in there]
            if names:
                inside = subfolders(place / names[0])
                parts = [kept for group in self.parts if (kept := [p for p in group if p in inside])]
                found[domain] = [os.path.join(names[0], p) for p in parts[0]] if parts else names[:1]
        return found

    def read(self, folder: str | Path | None) -> pd.DataFrame:
        """Its images; all domains must be there."""
        root, found = self.find(folder)
        if lacking := ", ".join(name for name in self.domains if name not in found):
            where = f"{self.title} in {str(root)!r}"
            raise InputError(f"{where} has no folder for {lacking}; it can be obtained {self.how}.")
        return read_folders(root, found)

    def differences(self, counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """For each source of counts, the published ones of the domains in which ``counts`` are others."""
        sources = {self.source: self.counts, **self.other_counts}
        return {
            source: {domain: n for domain, n in published.items() if counts.get(domain, 0) != n}
            for source, published in sources.items()
        }


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
        held_out_names(held_out, list(layout.domains))
        files = layout.read(folder)
        options: dict[str, Any] = {"size": size, "augment": augment, "bad": bad, "seed": seed}
        options["augment_validation"] = augment_validation
        return image_data(files, split_files(files, held_out, seed), options=options)

    def find(folder: Path) -> Path | None:
        try:
            root, domains = layout.find(folder)
        except InputError:
            return None
        return root if len(domains) == len(layout.domains) else None

    sources = tuple(Source(**{**each, "urls": tuple(each["urls"])}) for each in about["download"])
    prepare = {"remove_copies": remove_copies, "sort_by_camera": sort_by_camera}.get(about.get("prepare"))
    return SimpleNamespace(
        load=load,
        LAYOUT=layout,
        DOMAINS=tuple(layout.domains),
        DOMAINBED=PUBLISHED | about.get("domainbed", {}),
        DOWNLOAD=Download(layout.folders[0], sources, find, prepare),
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
    files, images = list(folder.glob("*.json")), folder / "eccv_18_all_images_sm"
    if len(files) != 1 or not images.is_dir():
        raise InputError(f"TerraIncognita's archives contain no labels (.json) or no folder {images.name!r}.")
    content = json.loads(files[0].read_text())
    classes = {c["id"]: c["name"] for c in content["categories"] if c["name"] in ANIMALS}
    names = {i["id"]: (Path(i["file_name"]).name, str(i["location"])) for i in content["images"]}
    places = defaultdict(set)
    for annotation in content["annotations"]:
        name, camera = names[annotation["image_id"]]
        if annotation["category_id"] in classes and camera in CAMERAS:
            places[name].add(folder / f"location_{camera}" / classes[annotation["category_id"]])
    there = [name for name in places if (images / name).is_file()]
    for name, place in [(each, place) for each in there for place in places[each]]:
        place.mkdir(parents=True, exist_ok=True)
        os.link(images / name, place / name)
    shutil.rmtree(images)
    files[0].unlink()
    missing = len(places) - len(there)
    note = f"; {missing:,} listed in the labels are not in the archive" if missing else ""
    return f"{len(there):,} images of four cameras and ten classes are kept{note}"
