"""Examples that are image files, decoded when they are asked for."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.augment import UNCHANGED, Augment, Box, recolour_batch
from shoal.data.batch import DomainData, Examples
from shoal.data.domains import Domains
from shoal.data.sampler import key
from shoal.data.splits import held_out_names, last_domain
from shoal.data.splits import split as split_by_domain
from shoal.data.tree import FileList, Layout, image_names, subfolders
from shoal.errors import InputError
from shoal.files import check_regular, open_regular
from shoal.settings import Pixels, Seed, checked

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's images
BAD = ("stop", "skip")
SPLITS = ("train", "validation", "test")
TRAIN, VALIDATION = 1, 2  # a file's split is its place in SPLITS, from 1; 0 is none, and others are higher
CHANGES = 23  # what a key is for
SMALL, KEPT = 64, 2**30  # images of at most 64 × 64 are kept in memory, up to 1 GiB of them
CHUNK = 256  # files that a process looks at before it says so


class Unreadable(Exception):
    """A file is no image, or only a part of one."""


def decode(path: str, size: int, crop: Callable[[int, int], Box] | None = None) -> tuple[Image, Box]:
    """An image in RGB, and which part of it will be resized to ``size``: what ``crop`` says, or all.

    A JPEG is decoded at the smallest of 1, 1/2, 1/4, 1/8 of its size at which that part still has
    ``size`` pixels each way. A note in it on how it was turned is not followed, as in torchvision's
    ImageFolder. Sixteen bits a pixel become the upper eight, what is transparent keeps its colour, and of
    several frames the first counts.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        check_regular(path)
        with Image.open(path) as image:
            width, height = image.size
            left, top, right, bottom = crop(width, height) if crop else (0, 0, width, height)
            wanted = math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top))
            drafted = image.draft(None, wanted)
            shrunk = drafted[1][2] / width if drafted else 1.0
            return to_rgb(image), (left * shrunk, top * shrunk, right * shrunk, bottom * shrunk)
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        raise Unreadable("empty, or not a supported image format") from error
    except Exception as error:  # Pillow's plugins raise whatever they like
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def to_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):  # convert would cut everything off at 255
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours, and Pillow does not warn
    if image.mode != "RGB":
        return image.convert("RGB")
    image.load()
    return image


def described(
    size: int, mean: Sequence[float] = MEAN, deviation: Sequence[float] = DEVIATION
) -> dict[str, Any]:
    """How an image becomes what a model takes, as plain data; see :mod:`shoal.data.inputs`."""
    return {"kind": "image", "size": size, "mean": list(mean), "deviation": list(deviation)}


class ToTensor:
    """An image, squashed, as float32 (3, ``size``, ``size``), less ``mean`` and over ``deviation``."""

    def __init__(
        self, size: int, mean: Sequence[float] = MEAN, deviation: Sequence[float] = DEVIATION
    ) -> None:
        self.size = size
        self.scale = torch.tensor([1 / (255 * d) for d in deviation])[:, None, None]
        self.shift = torch.tensor([-m / d for m, d in zip(mean, deviation, strict=True)])[:, None, None]

    def resize(self, image: Image, box: Box | None = None) -> Image:
        """The part ``box`` of an image at the size, whatever its shape was."""
        from PIL import Image

        return image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)

    def pixels(self, image: Image) -> Tensor:
        """uint8, (3, ``size``, ``size``)."""
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()

    def numbers(self, image: Image) -> Tensor:
        return self.pixels(image).float().mul_(self.scale).add_(self.shift)

    def __call__(self, source: Any) -> Tensor:
        """An image of Pillow's, or of a file that is named."""
        image, box = decode(source, self.size) if isinstance(source, str) else (to_rgb(source), None)
        return self.numbers(self.resize(image, box))


class ImageFiles(Examples):
    """Image files as examples: float32 (3, ``size``, ``size``), less ``mean`` and over ``deviation``.

    Images are squashed to a square, as in DomainBed. Those whose ``split`` is :data:`TRAIN` are changed by
    ``augment`` first, and no others; :meth:`evaluation` changes none. With ``augment_validation`` it changes
    those of training and validation too, as DomainBed does: there each image in the same way always, by
    ``seed`` and its place among the files.

    A file that cannot be decoded is named in an :class:`InputError`, or with ``bad="skip"`` in a warning, and
    the next one that can takes its place: of the same domain, split and class, or where there is none, of
    another class. Which one that is depends on the files alone.

    Small images (64 × 64 at most, in a sample of them) are decoded once and kept in memory. ``cache=True``
    keeps all, at full size, and ``False`` none.

    The images of :meth:`on_device` are uint8, and colours are changed and numbers normalised where a batch is
    computed on (:meth:`finish`). ``augment_on`` says whether a training takes these: ``"device"``,
    ``"cpu"``, or ``None``: on CUDA where its memory format is ``"auto"``.
    """

    @checked
    def __init__(
        self,
        files: FileList,
        split: Any = None,
        *,
        size: Pixels = SIZE,
        augment: Augment | None = None,
        bad: Literal["stop", "skip"] = "stop",
        cache: bool | None = None,
        mean: Sequence[float] = MEAN,
        deviation: Sequence[float] = DEVIATION,
        augment_validation: bool = False,
        seed: int = 0,
        augment_on: Literal["cpu", "device"] | None = None,
    ) -> None:
        self.files, self.size, self.augment, self.bad = files, size, augment, bad
        self.augment_on, self.raw = augment_on, False
        self.augment_validation, self.seed, self.evaluated = augment_validation, seed, False
        need_pillow()
        self.to_tensor = ToTensor(size, mean, deviation)
        self.split: NDArray[np.uint8] = np.zeros(len(files), np.uint8) if split is None else split
        # In memory that processes share: what one found bad, no other opens or reports again.
        self.known_bad = torch.zeros(len(files) if bad == "skip" else 0, dtype=torch.uint8).share_memory_()
        self.kept: list[NDArray[np.uint8] | None] | None = None
        if cache or self._is_small(cache):
            self.kept = self._keep(limit=math.inf if cache else KEPT)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        augment, split = self.augment, (TRAIN, VALIDATION) if self.evaluated else (TRAIN,)
        changes: Sequence[float] = UNCHANGED
        if augment is None or self.split[index] not in split:
            used, image, box = self._read(index)
            image = self.to_tensor.resize(image, box)
        else:
            chances = augment.draw(self._generator(index) if self.evaluated else None)
            used, image, box = self._read(index, partial(augment.box, chances))
            image = self.to_tensor.resize(image, box)
            if self.raw:
                changes = augment.changes(chances)
            else:
                image = augment.recolour(chances, image)
        label = int(self.files.labels[used])
        if not self.raw:
            return self.to_tensor.numbers(image), label
        pixels = self.to_tensor.pixels(image)
        return pixels if augment is None else (pixels, torch.tensor(changes)), label

    def on_device(self) -> Self:
        """The same files as uint8, of which :meth:`finish` makes what a model takes."""
        same = copy.copy(self)
        same.raw = True
        return same

    def finish(self, x: Any) -> Tensor:
        if not self.raw:
            found: Tensor = x
            return found
        pixels, changes = (x, None) if isinstance(x, Tensor) else x
        if pixels.ndim == 3:
            return self.finish(pixels[None] if changes is None else (pixels[None], changes[None]))[0]
        numbers = pixels.float() if changes is None else recolour_batch(pixels, changes)
        scale, shift = _constants(self.to_tensor, numbers.device)
        return numbers.mul_(scale).add_(shift)

    def _generator(self, index: int) -> torch.Generator:
        return torch.Generator().manual_seed(int(key(CHANGES, self.seed, index)[0] >> np.uint64(1)))

    def known_labels(self) -> NDArray[Any]:
        return self.files.labels

    def path(self, index: int) -> str:
        return self.files.path(index)

    def problem(self, index: int) -> str | None:
        try:
            self._decoded(index, None)
        except Unreadable as error:
            return str(error)
        return None

    def in_splits(self, splits: Mapping[str, Domains]) -> Self:
        """The same files in other splits: those of ``"train"`` are augmented."""
        same = copy.copy(self)
        same.split = np.zeros(len(self), np.uint8)
        for number, (name, domains) in enumerate(splits.items(), len(SPLITS) + 1):
            same.split[domains.examples()] = 1 + SPLITS.index(name) if name in SPLITS else number
        return same

    def evaluation(self) -> Self:
        """The same files, nothing about them random; see ``augment_validation``."""
        same = copy.copy(self)
        same.augment, same.evaluated = self.augment if self.augment_validation else None, True
        return same

    def _read(self, index: int, crop: Callable[[int, int], Box] | None = None) -> tuple[int, Image, Box]:
        """The file or what takes its place, decoded, and which one it is."""
        why = "nor can any other of its domain and split"
        for i in self._in_turn(index):
            try:
                return i, *self._decoded(i, crop)
            except Unreadable as error:
                if not os.path.isdir(self.files.root):
                    raise InputError(f"the folder {self.files.root!r} no longer exists.") from error
                if self.bad == "stop":
                    why = str(error)
                    break
                self._report(i, str(error))
        raise InputError(
            f"the image {self.files.path(index)!r} cannot be read ({why}). Download it again, or skip "
            "unreadable images with bad='skip'; `shoal data check` lists them all."
        )

    def _decoded(self, index: int, crop: Callable[[int, int], Box] | None) -> tuple[Image, Box]:
        if self.kept is None:
            return decode(self.files.path(index), self.size, crop)
        from PIL import Image

        if (pixels := self.kept[index]) is None:
            raise Unreadable("it could not be decoded")
        image = Image.fromarray(pixels)
        return image, crop(*image.size) if crop else (0, 0, *image.size)

    def _in_turn(self, index: int) -> Iterator[int]:
        """The file, and those that may take its place: its class before others, the next before the first."""
        if self.bad == "stop" or not self.known_bad[index]:
            yield index
        if self.bad == "stop":
            return
        files = self.files
        near = (files.groups == files.groups[index]) & (self.split == self.split[index])
        near[index] = False
        alike = files.labels == files.labels[index]
        for others in (np.flatnonzero(near & alike), np.flatnonzero(near & ~alike)):
            at = int(np.searchsorted(others, index))
            yield from (i for i in np.roll(others, -at).tolist() if not self.known_bad[i])

    def _report(self, index: int, why: str) -> None:
        if not self.known_bad[index]:
            self.known_bad[index] = 1
            warnings.warn(f"the image {self.files.path(index)!r} is skipped: {why}", stacklevel=2)

    def _is_small(self, cache: bool | None) -> bool:
        if cache is False or 3 * SMALL**2 * len(self) > KEPT:
            return False
        sample = np.linspace(0, len(self) - 1, min(64, len(self)), dtype=np.int64).tolist()
        return all(max(_size(self.files.path(i))) <= SMALL for i in sample)

    def _keep(self, limit: float) -> list[NDArray[np.uint8] | None] | None:
        kept: list[NDArray[np.uint8] | None] = []
        for i in range(len(self)):
            try:
                kept.append(np.asarray(decode(self.files.path(i), 2**24)[0]))
            except Unreadable as error:
                if self.bad == "stop":
                    self._read(i)
                self._report(i, str(error))
                kept.append(None)
            limit -= 0 if kept[-1] is None else kept[-1].size
            if limit < 0:
                return None
        return kept


@lru_cache(maxsize=16)
def _constants(of: ToTensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift, copied to a device once."""
    return of.scale.to(device), of.shift.to(device)


def usual_size(root: str | Path) -> tuple[int, int]:
    """The most frequent width and height of the images in ``root/domain/class``, one per class; 0 of none."""
    need_pillow()
    places = (os.path.join(root, d, c) for d in subfolders(root) for c in subfolders(os.path.join(root, d)))
    first = (os.path.join(place, name) for place in places for name in image_names(place, "", [])[:1])
    sizes = Counter(_size(path) for path in itertools.islice(first, 64))
    return sizes.most_common(1)[0][0] if sizes else (0, 0)


def _size(path: str) -> tuple[int, int]:
    """Width and height; 0 where the file cannot be read."""
    from PIL import Image

    try:
        check_regular(path)
        with Image.open(path) as image:
            return image.size
    except Exception:
        return 0, 0


def need_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise InputError("reading images requires Pillow: pip install 'shoal[images]'") from error


def load_published(
    layout: Layout,
    *,
    held_out: str | list[str],
    folder: str | None = None,
    seed: Seed = 0,
    size: Pixels = SIZE,
    augment: bool = True,
    bad: Literal["stop", "skip"] = "stop",
    cache: bool | None = None,
    augment_validation: bool = False,
    augment_on: Literal["cpu", "device"] | None = None,
) -> DomainData:
    """A published dataset with one domain held out, or several.

    A fifth of every training domain is held out for validation, under the same name. The default model is a
    small network that takes images of any size; published results are those of a pretrained ResNet-50, which
    ``shoal sweep`` takes.

    Args:
        layout: how it lies on disk.
        held_out: the held-out domain, or a list of them.
        folder: where it is, the folder itself or the one it is in; ``$SHOAL_DATA`` by default.
        seed: for the choice of the validation examples, and how these are changed.
        size: of the images, in pixels each way.
        augment: whether training images are cropped, mirrored and recoloured at random.
        bad: ``stop`` at an image that cannot be read, or ``skip`` it.
        cache: whether decoded images are kept in memory; small ones are by default.
        augment_validation: whether the training domains are scored on images changed in the same way, as
            DomainBed does; each image always alike. ``shoal sweep`` does.
        augment_on: where colours change: on the CPU by Pillow, as in DomainBed, or on the device, a batch at
            a time; by default on CUDA where the memory format is ``auto``, else on the CPU.
    """
    if held_out != []:
        held_out_names(held_out, list(layout.domains))
    files = layout.read(folder)
    splits = split_files(files, held_out, seed)
    options: dict[str, Any] = {"augment_validation": augment_validation, "seed": seed}
    options |= {"augment": augment, "augment_on": augment_on}
    return image_data(files, splits, size=size, bad=bad, cache=cache, **options)


def split_files(files: FileList, held_out: str | list[str] | None, seed: int) -> dict[str, Domains]:
    """``held_out`` as the test split, and a fifth of every other domain for validation under its name.

    ``None`` holds out the last domain, ``[]`` none.
    """
    if held_out is None:
        held_out = last_domain(files.domains)
    names = held_out if isinstance(held_out, list) else [str(held_out)]
    return split_by_domain(Domains.from_indices(files.indices()), names, 0.2, seed)


def image_data(
    files: FileList,
    splits: Mapping[str, Domains],
    *,
    size: int = SIZE,
    augment: bool = True,
    bad: Literal["stop", "skip"] = "stop",
    cache: bool | None = None,
    **more: Any,
) -> DomainData:
    """Image files as the loop and the benchmarks take them."""
    split = np.zeros(len(files), np.uint8)
    for number, name in enumerate(SPLITS, TRAIN):
        if name in splits:
            split[splits[name].examples()] = number
    changes = Augment() if augment else None
    examples = ImageFiles(files, split, size=size, augment=changes, bad=bad, cache=cache, **more)
    return DomainData(
        examples=examples,
        splits=splits,
        classes=len(files.classes),
        input_shape=(3, size, size),
        model="small-cnn",
        class_names=files.classes,
        inputs=described(size),
    )


class Findings(NamedTuple):
    """What is wrong with files: those that cannot be decoded, and groups of the same content, by index."""

    unreadable: dict[int, str]
    duplicates: list[list[int]]


def inspect_files(files: FileList, workers: int, tell: Callable[[int], None]) -> Findings:
    """Decodes every file in full and looks for equal ones, in ``workers`` processes (0: in this one).

    ``tell`` is told how many were decoded. Files of equal size are compared by their SHA-1.
    """
    need_pillow()
    unreadable: dict[int, str] = {}
    by_size: dict[int, list[int]] = defaultdict(list)
    by_content: dict[str, list[int]] = defaultdict(list)
    done = 0
    for sizes in by_chunks(_sizes, files, range(len(files)), workers):
        for i, size, why in sizes:
            by_size[size].append(i)
            if why is not None:
                unreadable[i] = why
        done += len(sizes)
        tell(done)
    alike = [i for size, group in by_size.items() if size > 0 and len(group) > 1 for i in group]
    for digests in by_chunks(_digests, files, alike, workers):
        for i, digest in digests:
            by_content[digest].append(i)
    return Findings(unreadable, sorted(sorted(g) for d, g in by_content.items() if d and len(g) > 1))


def by_chunks(
    work: Callable[[Any, Sequence[int]], Any], state: Any, items: Sequence[int], workers: int
) -> Iterator[Any]:
    """``work(state, chunk)`` for one chunk of ``items`` after the other, in other processes or here (0)."""
    chunks = [items[i : i + CHUNK] for i in range(0, len(items), CHUNK)]
    if not workers:
        yield from (work(state, chunk) for chunk in chunks)
        return
    try:
        with ProcessPoolExecutor(workers, initializer=_STATE.append, initargs=(state,)) as pool:
            yield from pool.map(partial(_with_state, work), chunks)
    except BrokenProcessPool as error:
        raise InputError(
            "a worker process was killed, possibly because it ran out of memory; try fewer workers."
        ) from error


_STATE: list[Any] = []


def _with_state(work: Callable[[Any, Sequence[int]], Any], chunk: Sequence[int]) -> Any:
    return work(_STATE[-1], chunk)


def _sizes(files: FileList, chunk: Sequence[int]) -> list[tuple[int, int, str | None]]:
    """For each file its size in bytes, and why it cannot be decoded."""
    return [(i, *_sized(files.path(i))) for i in chunk]


def _sized(path: str) -> tuple[int, str | None]:
    try:
        size = os.stat(path).st_size
        decode(path, 2**24)
    except OSError as error:
        return -1, str(error.strerror)
    except Unreadable as error:
        return size, str(error)
    return size, None


def _digests(files: FileList, chunk: Sequence[int]) -> list[tuple[int, str]]:
    return [(i, _digest(files.path(i))) for i in chunk]


def _digest(path: str) -> str:
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha1").hexdigest()
    except OSError:
        return ""
