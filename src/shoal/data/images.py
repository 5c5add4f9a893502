"""Image files listed in a DataFrame, decoded and augmented when they are asked for."""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import DomainData, Examples
from shoal.data.domains import Domains
from shoal.data.sampler import key
from shoal.data.splits import SHARE, Names, last_domain, natural_key
from shoal.data.splits import split as split_by_domain
from shoal.errors import InputError
from shoal.settings import Pixels, checked
from shoal.vision import load

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image

SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's images
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""What a file's content may be, whatever its name says. EPS is not among them: Pillow starts Ghostscript."""
IGNORED = ("thumbs.db", "desktop.ini")  # left behind by file managers, as hidden files are
SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "dev", "test", "testing", "images")
"""Folders that are called so hold parts of a dataset, and no domains."""
LAYOUT = "the layout is folder/domain/class/image"
SPLITS = ("train", "validation", "test")
VALIDATION_AUGMENTATION = 23  # what a key is for


class Unreadable(Exception):
    """A file is no image, or only a part of one."""


# Files


def read_folders(root: str | Path, domains: Mapping[str, Sequence[str]] | None = None) -> pd.DataFrame:
    """The images in ``root/domain/class``: columns path, domain and label, the last two categorical.

    ``domains`` maps a domain to its folders below ``root``, each of which has classes in it; by default every
    folder is a domain. Warns of files that are no images, and of a class that a domain lacks.
    """
    rows, others = list[tuple[str, str, str]](), list[str]()
    for domain, folders in (domains or {name: [name] for name in subfolders(root)}).items():
        before = len(rows)
        for place, label in ((Path(root, f, c), c) for f in folders for c in subfolders(Path(root, f))):
            paths = [str(place / name) for name in sorted(_listed(place)) if name.lower() not in IGNORED]
            rows += [(path, domain, label) for path in paths if path.lower().endswith(ENDINGS)]
            others += [path for path in paths if not path.lower().endswith(ENDINGS)]
        if len(rows) == before:
            where = os.path.join(root, *folders[:1])
            raise InputError(f"there is no image in the class folders of {where!r}; {LAYOUT}.")
    if not rows:
        raise InputError(f"there is no image in the class folders of {str(root)!r}; {LAYOUT}.")
    if others:
        which = f"{len(others):,} files such as {others[0]!r}"
        warnings.warn(f"{which} are ignored: extensions are {', '.join(ENDINGS)}.", stacklevel=2)
    return image_frame(rows)


def image_frame(rows: Iterable[tuple[Any, str, str]]) -> pd.DataFrame:
    """A DataFrame of (path, domain, label), the last two categorical in natural order."""
    import pandas as pd

    frame = pd.DataFrame(rows, columns=["path", "domain", "label"])
    for column in ("domain", "label"):
        frame[column] = pd.Categorical(frame[column], sorted(frame[column].unique(), key=natural_key))
    if lacking := missing_classes(frame):
        text = ", ".join(f"{label!r} in {domain!r}" for domain, label in lacking[:3])
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        warnings.warn(f"there is no image of class {text}{more}.", stacklevel=3)
    return frame


def missing_classes(files: pd.DataFrame) -> list[tuple[str, str]]:
    """Every domain and class of which there is no file: a model cannot learn the class there."""
    counts = files.groupby(["domain", "label"], observed=False).size()
    return list(counts[counts == 0].index)


def domain_folders(root: str | Path, splits_are_domains: bool = False) -> list[str]:
    """The folders in ``root``, each a domain; refused where their names are those of splits."""
    names = subfolders(root)
    splits = [n for n in names if n.lower() in SPLIT_NAMES]
    if splits_are_domains or not splits or len(splits) == 1 < len(names):
        return names
    raise InputError(
        f"{', '.join(f'{n}/' for n in splits)} in {str(root)!r} look like splits, not domains: {LAYOUT}. "
        "Give the folder that the domains are in, or set splits_are_domains in data_options."
    )


def subfolders(place: str | Path) -> list[str]:
    """The names of the folders in a folder in natural order, without hidden ones."""
    return sorted((name for name in _listed(place) if Path(place, name).is_dir()), key=natural_key)


def _listed(place: str | Path) -> list[str]:
    try:
        return [name for name in os.listdir(place) if not name.startswith(".")]
    except OSError as error:
        raise InputError(f"the folder {os.fspath(place)!r} cannot be read: {error.strerror}.") from error


def first_copies(files: pd.DataFrame) -> NDArray[np.int64]:
    """For each file the first with the same content: as examples, copies are one image.

    Only files of the same size are read. Copies with different labels are refused, others are mentioned.
    """
    sizes = files["path"].map(lambda path: os.stat(path).st_size if os.path.exists(path) else 0)
    first, seen = np.arange(len(files)), dict[str, int]()
    for row in np.flatnonzero(sizes.duplicated(keep=False) & (sizes > 0)):
        first[row] = seen.setdefault(_digest(files["path"][row]), int(row))
    copies = np.flatnonzero(first != np.arange(len(files)))
    for row in copies:
        pair = f"{files['path'][first[row]]!r} and {files['path'][row]!r} are the same image"
        if files["label"][row] != files["label"][first[row]]:
            raise InputError(
                f"{pair} with different labels; remove one. `shoal data check` lists all copies."
            )
    if len(copies):
        more = f" (and {len(copies) - 1:,} more copies)" if len(copies) > 1 else ""
        message = f"{pair}{more}: copies count once, and are held out with each of their domains."
        warnings.warn(message, stacklevel=4)
    return first


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha1").hexdigest()


def split_files(files: pd.DataFrame, held_out: Names, seed: int, copies: bool = True) -> dict[str, Domains]:
    """``held_out`` as the test split, and a fifth of every other domain for validation under its name.

    ``None`` holds out the last domain in natural order, ``[]`` none. If ``copies`` may be images of their
    own, their content is not compared.
    """
    first = np.arange(len(files)) if copies else first_copies(files)
    codes, names = files["domain"].cat.codes.to_numpy(), files["domain"].cat.categories
    domains = Domains.from_indices({name: np.unique(first[codes == n]) for n, name in enumerate(names)})
    return split_by_domain(domains, last_domain(names) if held_out is None else held_out, SHARE, seed)


def inspect_files(paths: Sequence[str], workers: int, on_progress: Callable[[int], None]) -> pd.DataFrame:
    """Columns path, problem, digest and transparent of all files, decoded in full in several processes.

    ``on_progress`` is called with the number of files that were read.
    """
    import pandas as pd
    from joblib import Parallel, delayed

    rows = []
    parallel = Parallel(n_jobs=max(1, workers), return_as="generator", batch_size=64)
    whole = map(os.path.abspath, paths)  # a worker may have been started in another folder
    for count, row in enumerate(parallel(delayed(_inspect)(path) for path in whole), 1):
        rows.append(row)
        on_progress(count)
    found = pd.DataFrame(rows, columns=["path", "problem", "digest", "transparent"])
    return found.assign(path=list(paths))


def _inspect(path: str) -> tuple[str, str | None, str, bool]:
    digest = ""
    try:
        digest = _digest(path)
        decode(path)
    except (OSError, Unreadable) as error:
        return path, str(getattr(error, "strerror", error)), digest, False
    return path, None, digest, has_transparency(path)


# From a file to what a model takes


def decode(source: Any, least: int | None = None) -> Image:
    """A file, its content, or an image of Pillow's, in RGB on white.

    A JPEG may be decoded smaller, but with ``least`` pixels each way. A note in a file on how it was turned
    is not followed, as in torchvision's ImageFolder; of several frames the first counts.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        if isinstance(source, Image.Image):
            return _to_rgb(source)
        with Image.open(source, formats=FORMATS) as image:
            if least is not None:
                image.draft(None, (least, least))
            return _to_rgb(image)
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        raise Unreadable("empty, or not a supported image format") from error
    except Exception as error:  # Pillow's plugins raise whatever they like
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def _to_rgb(image: Image) -> Image:
    """On white: what colour transparent pixels have differs between programs."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits: convert would cut everything off at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def has_transparency(path: str) -> bool:
    """Whether some pixels may be transparent; read from the header."""
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS) as image:
            return bool(image.has_transparency_data)
    except Exception:  # as in decode
        return False


class ToTensor:
    """An image, squashed, as float32 (3, ``size``, ``size``), less ``mean`` and over ``std``.

    ``description`` is itself as plain data; see :mod:`shoal.data.inputs`.
    """

    def __init__(self, size: int, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> None:
        load("PIL.Image", "images")
        self.size = size
        self.description = {"kind": "image", "size": size, "mean": list(mean), "deviation": list(std)}
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, image: Image) -> Tensor:
        from PIL import Image

        resized = np.array(image.resize((self.size, self.size), Image.Resampling.BILINEAR))
        pixels = torch.from_numpy(resized).permute(2, 0, 1).contiguous()
        return (pixels / 255 - self.mean) / self.std


def augmentation(size: int) -> Callable[[Image], Image]:
    """Random changes as in DomainBed (Gulrajani and Lopez-Paz, ICLR 2021).

    A crop of 0.7 to 1.0 of the area, a mirror image, brightness, contrast, saturation and hue by up to 0.3,
    and one image in ten without colours. Random numbers come from torch's generator alone.
    """
    v2 = load("torchvision.transforms.v2", "images")
    colours = v2.ColorJitter(brightness=0.3, contrast=0.3, saturation=0.3, hue=0.3)
    crop = v2.RandomResizedCrop(size, scale=(0.7, 1.0))
    steps = [crop, v2.RandomHorizontalFlip(), colours, v2.RandomGrayscale(0.1)]
    result: Callable[[Image], Image] = v2.Compose(steps)
    return result


class ImageFiles(Examples):
    """Image files as examples: float32 (3, ``size``, ``size``), normalized as ImageNet's images are.

    Images are squashed to a square, as in DomainBed. With ``augment`` those in the split ``"train"``
    (:meth:`with_splits`) are augmented, and no others; :meth:`evaluation` augments none. With
    ``augment_validation`` images of training and validation are augmented there too, as DomainBed does: each
    always in the same way, by ``seed`` and its place among the files.

    A file that cannot be decoded is named in an :class:`InputError`, or with ``bad="skip"`` in a warning, and
    the next one of its domain and split takes its place.

    Args:
        files: DataFrame of :func:`image_frame`; images of Pillow's may take the place of paths.
    """

    @checked
    def __init__(
        self,
        files: Any,
        *,
        size: Pixels = SIZE,
        augment: bool = False,
        bad: Literal["stop", "skip"] = "stop",
        augment_validation: bool = False,
        seed: int = 0,
    ) -> None:
        self.paths = files["path"].array
        self.labels = files["label"].cat.codes.to_numpy(np.int64)
        self.groups = files["domain"].cat.codes.to_numpy(np.int64)
        self.classes = tuple(files["label"].cat.categories)
        self.size, self.bad, self.seed, self.to_tensor = size, bad, seed, ToTensor(size)
        self.augment = augmentation(size) if augment else None
        self.augment_validation, self.evaluated = augment_validation, False
        self.split = np.zeros(len(files), np.int8)  # 1 train, 2 validation, others higher; 0: none

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        augment = self.augment if self.split[index] in ((1, 2) if self.evaluated else (1,)) else None
        # A crop of an image of twice the size has enough pixels.
        used, image = self._read(index, self.size if augment is None else 2 * self.size)
        if augment is not None:
            with torch.random.fork_rng(devices=[], enabled=self.evaluated):
                if self.evaluated:  # not torch.manual_seed, which would reseed accelerators as well
                    seed = key(VALIDATION_AUGMENTATION, self.seed, index)[0] >> np.uint64(1)
                    torch.default_generator.manual_seed(int(seed))
                image = augment(image)
        return self.to_tensor(image), self.labels[used].item()

    def known_labels(self) -> NDArray[Any]:
        return self.labels

    def path(self, index: int) -> str:
        return str(self.paths[index]) if isinstance(self.paths[index], str | Path) else ""

    def open(self, index: int) -> Any:
        """What :func:`decode` reads."""
        return self.paths[index]

    def with_splits(self, splits: Mapping[str, Domains]) -> Self:
        same = copy.copy(self)
        same.split = np.zeros(len(self), np.int8)
        for number, name in enumerate(dict.fromkeys([*SPLITS, *splits]), 1):
            if name in splits:
                same.split[splits[name].examples()] = number
        return same

    def evaluation(self) -> Self:
        same = copy.copy(self)
        same.augment, same.evaluated = self.augment if self.augment_validation else None, True
        return same

    def digest(self) -> str:
        """Of all that the inputs follow from: the files (names, sizes, dates), labels and preprocessing."""
        digest = hashlib.sha256(repr((self.size, self.bad, self.classes)).encode())
        for path in self.paths:
            about = os.stat(path)
            digest.update(f"{path}|{about.st_size}|{about.st_mtime_ns}\n".encode(errors="surrogateescape"))
        for part in (self.labels, self.groups, *([self.split] if self.bad == "skip" else [])):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def _read(self, index: int, least: int) -> tuple[int, Image]:
        """The file or what takes its place, decoded, and which one it is."""
        problem = ""
        for i in self._candidates(index):
            try:
                return i, decode(self.open(i), least)
            except Unreadable as error:
                problem = str(error)
                if self.bad == "skip":
                    warnings.warn(f"the image {self.path(i)!r} is skipped: {error}", stacklevel=2)
        why = problem if self.bad == "stop" else "nor can any other of its domain and split"
        raise InputError(
            f"the image {self.path(index)!r} cannot be read ({why}). Download it again or remove it; "
            "training skips such images with bad='skip', and `shoal data check` lists them all."
        )

    def _candidates(self, index: int) -> Iterator[int]:
        """The file, and those of its domain and split that may take its place, the next before the first."""
        yield index
        if self.bad == "skip":
            near = np.flatnonzero((self.groups == self.groups[index]) & (self.split == self.split[index]))
            yield from np.roll(near, -1 - np.searchsorted(near, index))[:-1].tolist()


def image_data(
    files: pd.DataFrame,
    splits: Mapping[str, Domains],
    *,
    notes: Mapping[str, str] | None = None,
    options: Mapping[str, Any],
    **about: Any,
) -> DomainData:
    """Image files as :class:`~shoal.data.DomainData`; ``options`` are those of :class:`ImageFiles`."""
    examples, notes = ImageFiles(files, **options).with_splits(splits), dict(notes or {})
    some = files["path"].iloc[np.linspace(0, len(files) - 1, min(64, len(files)), dtype=np.int64)]
    if path := next((path for path in some if has_transparency(path)), None):
        notes["images"] = "transparent pixels become white"
        warnings.warn(f"images such as {path!r} have transparent pixels, which become white.", stacklevel=2)
    shape, about = (3, examples.size, examples.size), {"class_names": examples.classes, **about}
    about = {"model": "small-cnn", "inputs": examples.to_tensor.description, "notes": notes, **about}
    return DomainData(examples, splits, len(examples.classes), shape, **about)
