"""Load images from folders of files, one folder for each class.

The files are decoded when an example is read, so the data need not fit in memory. Type
train.num_workers=N to decode in processes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import is_image_file

from runner.core import ConfigError, errors, fmt
from runner.data.splits import Splits, held_out, require_at_least

_LAYOUT = (
    "It must hold train/ and val/ with one folder for each class, or the class folders themselves. "
    "Type data.root=FOLDER."
)
# ImageNet's statistics, which torchvision's own training and weights use.
_NORMALISE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_GREY_16_BITS = {"I;16": ("PNG", "TIFF", "JPEG2000"), "I;16B": ("TIFF",), "I": ("PNG", "PPM")}
"""Pillow's modes of more than 8 bits, and the formats in which they fill 16 bits."""
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262  # TIFF's tags; the latter is 0 where 0 is white
_HIDDEN = (".", "__MACOSX")
"""How the names of files and folders begin that Jupyter and macOS make unseen."""


def decoded_image(file: Path | BinaryIO | None, where: str) -> Image.Image:
    """Return an image in Pillow's mode RGB, or of 16 grey bits in mode F from 0 to 1.

    It is upright, as EXIF's orientation says and as viewers show it.

    Args:
        file: in a format that Pillow reads; None is refused as an empty value.
        where: names the image in the message.

    Raises:
        ConfigError: it cannot be decoded, or its numbers have no range that its format states.
    """
    try:
        if file is None:
            raise TypeError("the value is empty")
        # For EPS Pillow starts Ghostscript, which runs the file as a program.
        Image.init()
        with Image.open(file, formats=[name for name in Image.ID if name != "EPS"]) as image:
            image.load()
            # An image with damaged EXIF data stays as its pixels are stored.
            with suppress(Exception):
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode == "F" or image.mode.startswith("I"):
                return _grey_levels(image)
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, TypeError, Image.DecompressionBombError) as error:
        reason = errors.first_line(error)
        if isinstance(error, UnidentifiedImageError):  # its text holds an address
            reason = "it is in no format that Pillow knows"
        raise ConfigError(
            f"{where}: its image cannot be decoded: {reason}. Write a PNG (8 or 16 bits) or JPEG, "
            "of at most 178 million pixels."
        ) from error


def _grey_levels(image: Image.Image) -> Image.Image:
    """Return grey levels in mode F from 0 to 1; convert("RGB") would clip them at 255.

    Raises:
        ValueError: the format does not say which number is white.
    """
    if image.format not in _GREY_16_BITS.get(image.mode, ()):
        raise ValueError(f"{image.format} in mode {image.mode} does not say which number is white")
    tags = getattr(image, "tag_v2", {})  # a TIFF's, which may hold 12 bits
    levels = np.asarray(image, np.float32) / (2 ** tags.get(_BITS_PER_SAMPLE, (16,))[0] - 1)
    return Image.fromarray(1 - levels if tags.get(_PHOTOMETRIC) == 0 else levels)


def _in_three_channels(image: Tensor) -> Tensor:
    return image.expand(3, -1, -1)


def image_transform(size: int, augment: bool) -> Callable[[Any], Tensor]:
    """Return the preprocessing: image of decoded_image to normalised float32 [3, size, size].

    Args:
        size: side in pixels: the shorter side is resized to it, then the centre is cropped.
        augment: crop and resize at random, and mirror half of the images, instead.
    """
    if augment:
        crop = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    else:
        crop = [transforms.Resize(size), transforms.CenterCrop(size)]
    return transforms.Compose([*crop, transforms.ToTensor(), _in_three_channels, _NORMALISE])


class ClassFolders(ImageFolder):
    """torchvision's data set of class folders, without hidden files and folders.

    Args:
        root: the folder of the class folders.
        transform: takes an image of decoded_image.
        names: of the classes in the order of their numbers, some of which may have no folder; none
            for those of the folders, sorted.

    Raises:
        OSError: there is no folder, one is none of the named classes, or a class has no image.
    """

    def __init__(self, root: Path, transform: Callable[..., Tensor], names: Sequence[str]) -> None:
        self._names = names
        super().__init__(str(root), transform, None, _load, self._is_shown_image, bool(names))

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the names of the classes in the order of their numbers, and each one's number."""
        folders, _ = super().find_classes(directory)
        shown = [name for name in folders if not name.startswith(_HIDDEN)]
        names = [*(self._names or shown)]
        others = [name for name in shown if name not in names]
        if others:
            raise OSError(
                f"{fmt.first_names(others)} is none of the classes {fmt.first_names(names)}"
            )
        return names, {name: number for number, name in enumerate(names)}

    def _is_shown_image(self, file: str) -> bool:
        parts = Path(file).relative_to(self.root).parts
        return is_image_file(file) and not any(part.startswith(_HIDDEN) for part in parts)


def imagefolder(
    root: str = "data",
    size: int = 224,
    val_fraction: float = 0.1,
    augment: bool = False,
    seed: int = 0,
    class_names: Sequence[str] | None = None,
) -> Splits:
    """Load ROOT/train/CLASS/*.png and ROOT/val/CLASS/*.png, or split ROOT/CLASS/*.png.

    Args:
        root: the folder. It holds train/ and val/ with one folder for each class, or the class
            folders themselves; the images in any format that torchvision's ImageFolder reads. Grey
            images of 16 bits keep them; numbers without a stated range (32 bits) are refused.
            Hidden files and folders (.ipynb_checkpoints) are left out.
        size: side of the square image in pixels: the shorter side is resized to it, then
            the centre is cropped.
        val_fraction: share for validation, between 0 and 1; unused when ROOT/val is there.
        augment: train on random resized crops and mirror images instead.
        seed: of the split alone; the run's seed does not change it.
        class_names: names of the class folders in the order of their numbers, some of which may be
            missing; None for the folders that are there, sorted. A checkpoint keeps the names.

    Returns:
        Map-style data sets with examples of float32 [3, size, size], normalised with ImageNet's
        statistics, and the class number as int.

    Raises:
        ConfigError: a folder is missing, holds no images of classes or is none of class_names,
            val_fraction leaves an empty split, or the size is below 1.
    """
    require_at_least("imagefolder", size=(size, 1))
    base = Path(root)
    if not base.is_dir():
        raise ConfigError(f"data=imagefolder: there is no folder {base.absolute()}. {_LAYOUT}")
    has_two_folders = (base / "train").is_dir() or (base / "val").is_dir()
    # Two data sets of the same files, too: only the training one is augmented.
    folders = [base / "train", base / "val"] if has_two_folders else [base, base]
    train = _folder(folders[0], image_transform(size, augment), class_names or ())
    val = _folder(folders[1], image_transform(size, False), class_names or ())
    if not has_two_folders:
        val_count = held_out(len(train), val_fraction, "imagefolder")
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        return Splits(Subset(train, order[val_count:]), Subset(val, order[:val_count]))
    return Splits(train, val)


def _folder(path: Path, transform: Callable[..., Tensor], names: Sequence[str]) -> ClassFolders:
    """Return the data set of one folder of class folders.

    Raises:
        ConfigError: it does not exist, or ClassFolders refuses it.
    """
    try:
        return ClassFolders(path, transform, names)
    except OSError as error:
        raise ConfigError(
            f"data=imagefolder: no classes of images in {path.absolute()} ({error}). {_LAYOUT}"
        ) from error


def _load(path: str) -> Image.Image:
    return decoded_image(Path(path), f"data=imagefolder: {path}")
