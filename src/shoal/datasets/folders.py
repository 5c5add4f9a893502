"""Published image datasets in folders, each declared by a YAML file beside this one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
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


@dataclass(frozen=True)
class Layout:
    """Where a published dataset's images are, and how many there should be."""

    title: str
    name: str
    """What it is called on the command line."""
    folders: tuple[str, ...]
    """Names of its own folder; case, spaces, _ and - do not count."""
    domains: Mapping[str, Sequence[str]]
    """The domains, each with other names of its folder."""
    classes: int
    counts: Mapping[str, int]
    """Images of each domain."""
    source: str
    """Who counted."""
    page: str
    """Where it can be got by hand."""
    other_counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What others counted, by who they are."""
    by_class: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    parts: Sequence[Sequence[str]] = ()
    """Folders that may lie between a domain and its classes; the first of these that are there are read."""

    @property
    def how(self) -> str:
        """How it can be got."""
        return f"with `shoal data get {self.name}`, or by hand from {self.page}"

    def find(self, folder: str | Path | None) -> tuple[Path, dict[str, list[str]]]:
        """The dataset's folder, and the folders below it of every domain that is there.

        ``folder`` may be the dataset's own, the one it is in, or ``None`` for ``$SHOAL_DATA``.
        """
        top = roots(f"the images of {self.title}", folder, self.folders[0], self.name)
        own = {_plain(name) for name in self.folders}
        places = [root for root in top if root.is_dir()]
        for _ in range(2):  # an archive may hold a folder of the same name
            places += [
                p / n for p in places for n in subfolders(p) if _plain(n) in own and p / n not in places
            ]
        found = [(place, self._domains(place)) for place in places]
        if not any(domains for _, domains in found):
            where = "the data folder" if folder is None else repr(str(folder))
            raise InputError(
                f"{self.title} is not in {where}: there are no folders {', '.join(self.domains)}. "
                f"{SAY_WHERE} to "
                f"look; it can be obtained {self.how}."
            )
        return max(found, key=lambda one: len(one[1]))

    def read(self, folder: str | Path | None) -> pd.DataFrame:
        """Its images; all domains must be there."""
        root, found = self.find(folder)
        if lacking := [name for name in self.domains if name not in found]:
            raise InputError(
                f"{self.title} in {str(root)!r} has no folder for {', '.join(lacking)}; "
                f"it can be obtained {self.how}."
            )
        return read_folders(root, found)

    def _domains(self, place: Path) -> dict[str, list[str]]:
        there, found = {_plain(name): name for name in subfolders(place)}, {}
        for domain, others in self.domains.items():
            if name := next((there[n] for n in map(_plain, (domain, *others)) if n in there), None):
                inside = subfolders(place / name)
                parts = next(
                    (kept for group in self.parts if (kept := [p for p in group if p in inside])), None
                )
                found[domain] = [os.path.join(name, part) for part in parts] if parts else [name]
        return found

    def differences(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Who counted what is there: for each source, the domains in which it counted otherwise."""
        sources = {self.source: self.counts, **self.other_counts}
        return {
            who: {d: published[d] for d in published if counts.get(d, 0) != published[d]}
            for who, published in sources.items()
        }


def _plain(name: str) -> str:
    """A folder's name without case, spaces and signs."""
    return re.sub(r"[\W_]", "", name.casefold())


@cache
def declared(path: Path) -> SimpleNamespace:
    """The dataset that a YAML file declares."""
    about = read_yaml(path)
    counts, classes, by_class = about["counts"], about["classes"], {}
    if isinstance(classes, list):
        by_class = {domain: dict(zip(classes, each, strict=True)) for domain, each in counts.items()}
        counts, classes = {domain: sum(each) for domain, each in counts.items()}, len(classes)
    known = ("title", "source", "page", "other_counts", "domains", "folders", "parts")
    layout = Layout(
        name=path.stem.replace("_", "-"),
        classes=classes,
        counts=counts,
        by_class=by_class,
        **{key: about[key] for key in known if key in about},
    )

    def load(
        *,
        held_out: str | list[str] = about["held_out"],
        folder: str | None = None,
        seed: Seed = 0,
        size: Pixels = SIZE,
        augment: bool = True,
        bad: Literal["stop", "skip"] = "stop",
        augment_validation: bool = False,
        augment_on: Literal["cpu", "device"] | None = None,
    ) -> DomainData:
        """A published dataset with one domain held out, or several.

        A fifth of every training domain is held out for validation, under the same name. The default model is
        a small network that takes images of any size; published results are those of a pretrained ResNet-50,
        which ``shoal sweep`` takes.

        Args:
            held_out: the held-out domain, or a list of them.
            folder: where it is, the folder itself or the one it is in; ``$SHOAL_DATA`` by default.
            seed: for the choice of the validation examples, and how these are changed.
            size: of the images, in pixels each way.
            augment: whether training images are cropped, mirrored and recoloured at random.
            bad: ``stop`` at an image that cannot be read, or ``skip`` it.
            augment_validation: whether the training domains are scored on images changed in the same way, as
                DomainBed does; each image always alike. ``shoal sweep`` does.
            augment_on: where colours change: on the CPU, as in DomainBed, or on the device, a batch at a
                time; by default on CUDA where the memory format is ``auto``, else on the CPU.
        """
        if held_out != []:
            held_out_names(held_out, list(layout.domains))
        files = layout.read(folder)
        options: dict[str, Any] = {"size": size, "augment": augment, "bad": bad, "seed": seed}
        options |= {"augment_validation": augment_validation, "augment_on": augment_on}
        return image_data(files, split_files(files, held_out, seed), options=options)

    def find(folder: Path) -> Path | None:
        try:
            root, domains = layout.find(folder)
        except InputError:
            return None
        return root if len(domains) == len(layout.domains) else None

    sources = tuple(Source(**{**each, "urls": tuple(each["urls"])}) for each in about["download"])
    arrange = ARRANGE.get(about.get("arrange"))
    return SimpleNamespace(
        load=load,
        LAYOUT=layout,
        DOMAINS=tuple(layout.domains),
        DOMAINBED=PUBLISHED | about.get("domainbed", {}),
        DOWNLOAD=Download(layout.folders[0], sources, find, arrange),
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
    names = dict.fromkeys(listed.read_text(errors="replace").split("\n"))
    inside = [
        folder / n.strip() for n in names if n.strip() and ".." not in Path(n).parts and n[0] not in "/\\"
    ]
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
    for name in there:
        for place in places[name]:
            place.mkdir(parents=True, exist_ok=True)
            os.link(images / name, place / name)
    shutil.rmtree(images)
    files[0].unlink()
    missing = len(places) - len(there)
    note = f"; {missing:,} listed in the labels are not in the archive" if missing else ""
    return f"{len(there):,} images of four cameras and ten classes are kept{note}"


ARRANGE = {"remove_copies": remove_copies, "sort_by_camera": sort_by_camera}
