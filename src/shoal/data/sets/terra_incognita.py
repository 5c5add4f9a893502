"""TerraIncognita: which animal is it, before a camera never seen?"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from functools import partial
from pathlib import Path

from shoal.data.download import Download, Source
from shoal.data.images import load_published
from shoal.data.tree import Layout
from shoal.data.unpack import stays_inside
from shoal.errors import InputError
from shoal.files import read_json

SUMMARY = "TerraIncognita: 24,330 pictures of 9 animals or none by four camera traps. Reads its folders."
PAPER = (
    "Beery et al., Recognition in Terra Incognita, ECCV 2018, https://arxiv.org/abs/1807.04975; these four "
    "cameras: Gulrajani and Lopez-Paz, In Search of Lost Domain Generalization, ICLR 2021"
)


LAYOUT = Layout(
    title="TerraIncognita",
    name="terra-incognita",
    folders=("terra_incognita", "TerraIncognitaDataset", "terra"),
    domains={name: (f"location_{name[1:]}", name[1:]) for name in ("L100", "L38", "L43", "L46")},
    classes=10,
    # DomainBed's paper says 24,788 in all. Its download script takes labels that were revised since.
    counts={"L100": 4741, "L38": 9736, "L43": 3970, "L46": 5883},
    source="what DomainBed's download script makes, 24,330 in all; its paper says 24,788",
    page="Caltech Camera Traps, https://lila.science/datasets/caltech-camera-traps, by DomainBed's script",
)
DOMAINS = tuple(LAYOUT.domains)

CAMERAS = ("100", "38", "43", "46")
CLASSES = (
    *("bird", "bobcat", "cat", "coyote", "dog"),
    *("empty", "opossum", "rabbit", "raccoon", "squirrel"),
)


def sort_pictures(folder: Path) -> str:
    """From one folder of all pictures, and the labels beside it, to ``location_46/bird`` and so on.

    Only the four cameras and ten classes that DomainBed chose are kept. A picture with two labels is in both
    classes, as there.
    """
    found, pictures = list(folder.glob("*.json")), folder / "eccv_18_all_images_sm"
    if len(found) != 1 or not pictures.is_dir():
        raise InputError(f"TerraIncognita's archives hold no labels (.json) or no folder {pictures.name!r}.")
    (labels,) = found
    wanted = _wanted(labels)
    lacking = 0
    for name, places in wanted.items():
        if not (pictures / name).is_file():
            lacking += 1
            continue
        *others, last = [folder / f"location_{camera}" / label for camera, label in sorted(places)]
        for place in (*others, last):
            place.mkdir(parents=True, exist_ok=True)
        for place in others:
            shutil.copyfile(pictures / name, place / name)
        os.replace(pictures / name, last / name)
    shutil.rmtree(pictures)
    labels.unlink()
    missing = f"; {lacking:,} that the labels name are not in the archive" if lacking else ""
    return f"{len(wanted) - lacking:,} pictures of four cameras and ten classes are kept{missing}"


def _wanted(labels: Path) -> dict[str, set[tuple[str, str]]]:
    """The camera and class, or classes, of every picture to keep, by the name of its file."""
    try:
        said = read_json(labels)
        classes = {c["id"]: c["name"] for c in said["categories"] if c["name"] in CLASSES}
        images = {
            i["id"]: (str(i["file_name"]), str(i["location"]))
            for i in said["images"]
            if str(i["location"]) in CAMERAS
        }
        found = defaultdict(set)
        for annotation in said["annotations"]:
            label = classes.get(annotation["category_id"])
            if label is not None and annotation["image_id"] in images:
                name, camera = images[annotation["image_id"]]
                found[name].add((camera, label))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{labels.name} holds no labels of camera traps ({error!r}).") from error
    return {name: places for name, places in found.items() if stays_inside(name) and "/" not in name}


LILA = "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps"
DOMAINBEDS = "https://lilablobssc.blob.core.windows.net/caltechcameratraps"
DOWNLOAD = Download(
    home=LAYOUT.folders[0],
    sources=(
        Source(
            "eccv_18_all_images_sm.tar.gz",
            urls=(f"{LILA}/eccv_18_all_images_sm.tar.gz", f"{DOMAINBEDS}/eccv_18_all_images_sm.tar.gz"),
            about=6_492_615_601,
        ),
        Source(
            "caltech_camera_traps.json.zip",
            urls=(
                f"{LILA}/labels/caltech_camera_traps.json.zip",
                f"{DOMAINBEDS}/labels/caltech_camera_traps.json.zip",
            ),
            about=9_000_000,
        ),
    ),
    layout=LAYOUT,
    arrange=sort_pictures,
)

# Read the four cameras that DomainBed chose, in folders such as ``location_46``.
load = partial(load_published, LAYOUT, test="L46")
