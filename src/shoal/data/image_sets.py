"""Published image datasets, each declared by a YAML file in ``data/sets``."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.data.download import Download, Source, drive
from shoal.data.images import load_published
from shoal.data.tree import Layout
from shoal.data.unpack import stays_inside
from shoal.errors import InputError
from shoal.files import read_json, read_text, read_yaml

PUBLISHED = {"network": "resnet50.tv_in1k", "data": {"augment_validation": True}}
"""What DomainBed's published results are of, for all of these; fields of its protocol's ``Sizes``."""


@cache
def image_set(path: Path) -> ModuleType:
    """What a YAML file declares, in the form of a module of :mod:`shoal.data.sets`."""
    about = read_yaml(path)
    counts, classes = about["counts"], about["classes"]
    by_class = {}
    if isinstance(classes, list):
        by_class = {domain: dict(zip(classes, each, strict=True)) for domain, each in counts.items()}
        counts, classes = {domain: sum(each) for domain, each in counts.items()}, len(classes)
    layout = Layout(
        name=path.stem.replace("_", "-"),
        domains={domain: tuple(others) for domain, others in about["domains"].items()},
        classes=classes,
        counts=counts,
        by_class=by_class,
        parts=tuple(map(tuple, about.get("parts", ()))),
        folders=tuple(about["folders"]),
        **{key: about[key] for key in ("title", "source", "page", "other_counts") if key in about},
    )
    sources = tuple(map(_source, about["download"]))
    module: Any = ModuleType(f"shoal.data.sets.{path.stem}", about["summary"])
    module.SUMMARY, module.PAPER, module.LAYOUT = about["summary"], about["paper"], layout
    module.DOMAINS, module.DOMAINBED = tuple(layout.domains), PUBLISHED | about.get("domainbed", {})
    module.DOWNLOAD = Download(
        layout.folders[0], sources, layout=layout, arrange=ARRANGE.get(about.get("arrange"))
    )
    module.load = partial(load_published, layout, held_out=about["held_out"])
    return module


def _source(about: dict[str, Any]) -> Source:
    about = dict(about)
    address = about.pop("drive", None)
    return Source(**{**about, "urls": (drive(address),) if address else tuple(about["urls"])})


# What archives need to become folder/domain/class

COPIES = "domain_net_duplicates.txt"
CAMERAS = ("100", "38", "43", "46")
ANIMALS = ["bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"]


def remove_copies(folder: Path) -> str:
    """DomainNet: removes the images that DomainBed lists as copies of others, and the list."""
    listed = read_text(folder / COPIES, errors="replace").splitlines()
    names = [name for line in listed if stays_inside(name := line.strip())]
    copies = [path for name in dict.fromkeys(names) if (path := folder / name).is_file()]
    for path in copies:
        path.unlink()
    (folder / COPIES).unlink(missing_ok=True)
    return f"{len(copies):,} images that DomainBed lists as duplicates are excluded"


def sort_by_camera(folder: Path) -> str:
    """TerraIncognita: from one folder of images, and the labels beside it, to ``location_46/bird`` and so on.

    Only the four cameras and ten classes that DomainBed chose are kept. An image with two labels is in both
    classes, as there.
    """
    files, images = list(folder.glob("*.json")), folder / "eccv_18_all_images_sm"
    if len(files) != 1 or not images.is_dir():
        raise InputError(f"TerraIncognita's archives contain no labels (.json) or no folder {images.name!r}.")
    chosen, lacking = _camera_labels(files[0]), 0
    for name, labels in chosen.items():
        if not (images / name).is_file():
            lacking += 1
            continue
        *others, last = [folder / f"location_{camera}" / label for camera, label in sorted(labels)]
        for place in (*others, last):
            place.mkdir(parents=True, exist_ok=True)
        for place in others:
            shutil.copyfile(images / name, place / name)
        os.replace(images / name, last / name)
    shutil.rmtree(images)
    files[0].unlink()
    missing = f"; {lacking:,} listed in the labels are not in the archive" if lacking else ""
    return f"{len(chosen) - lacking:,} images of four cameras and ten classes are kept{missing}"


def _camera_labels(path: Path) -> dict[str, set[tuple[str, str]]]:
    """The camera and class, or classes, of every image to keep, by the name of its file."""
    chosen = defaultdict(set)
    try:
        content = read_json(path)
        classes = {c["id"]: c["name"] for c in content["categories"] if c["name"] in ANIMALS}
        images = {i["id"]: (str(i["file_name"]), str(i["location"])) for i in content["images"]}
        for annotation in content["annotations"]:
            label = classes.get(annotation["category_id"])
            name, camera = images.get(annotation["image_id"], ("", ""))
            if label is not None and camera in CAMERAS and stays_inside(name) and "/" not in name:
                chosen[name].add((camera, label))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path.name} contains no camera trap labels ({error!r}).") from error
    return chosen


ARRANGE = {"remove_copies": remove_copies, "sort_by_camera": sort_by_camera}
