"""Folders of image files, one folder a class, decoded as they are needed."""

from pathlib import Path

import torch
from torch.utils.data import Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from runner.data.splits import Splits, held_out, require_at_least
from runner.utils.errors import ConfigError

# ImageNet's statistics, which torchvision's own training and weights use.
_NORMALISE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_LAYOUT = "It holds train/ and val/ with one folder a class each, or the class folders themselves."


def imagefolder(
    root: str = "data",
    size: int = 224,
    val_fraction: float = 0.1,
    augment: bool = False,
    seed: int = 0,
) -> Splits:
    """Read ROOT/train/CLASS/*.png and ROOT/val/CLASS/*.png, or split ROOT/CLASS/*.png.

    Args:
        root: the folder; any format that Pillow reads.
        size: side of the square image in pixels: the shorter side is resized to it, the centre cut.
        val_fraction: share for validation, between 0 and 1; unused when ROOT/val is there.
        augment: train on random resized crops and mirror images instead.
        seed: of the split alone; the run's seed does not move it.

    Returns:
        Items of float32 [3, size, size], normalised with ImageNet's statistics, and int.

    Raises:
        ConfigError: a folder is missing, holds no classes, or the two sides' classes differ.
    """
    require_at_least("imagefolder", size=(size, 1))
    base = Path(root)
    if not base.is_dir():
        raise ConfigError(
            f"data=imagefolder: there is no folder {base.absolute()}. {_LAYOUT} "
            "Type data.root=FOLDER."
        )
    if (base / "train").is_dir() or (base / "val").is_dir():
        return _two_folders(base, size, augment)
    return _one_folder(base, size, augment, val_fraction, seed)


def _two_folders(base: Path, size: int, augment: bool) -> Splits:
    train, val = _folder(base / "train", size, augment), _folder(base / "val", size, False)
    if train.classes != val.classes:
        # ImageFolder numbers the classes of each side by itself: labels would not match.
        differ = sorted(set(train.classes) ^ set(val.classes))
        raise ConfigError(
            f"data=imagefolder: the classes of {base.absolute()}/train and val differ: "
            f"{', '.join(differ[:5])} on one side only. Make the same folders on both sides."
        )
    return Splits(train, val)


def _one_folder(base: Path, size: int, augment: bool, fraction: float, seed: int) -> Splits:
    train, val = _folder(base, size, augment), _folder(base, size, False)
    held = held_out(len(train), fraction, "imagefolder")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    return Splits(Subset(train, order[held:]), Subset(val, order[:held]))


def _folder(path: Path, size: int, augment: bool) -> ImageFolder:
    try:
        return ImageFolder(str(path), _transform(size, augment))
    except OSError as problem:
        raise ConfigError(
            f"data=imagefolder: no classes of images in {path.absolute()} ({problem}). {_LAYOUT} "
            "Type data.root=FOLDER."
        ) from problem


def _transform(size: int, augment: bool) -> transforms.Compose:
    crop = (
        [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
        if augment
        else [transforms.Resize(size), transforms.CenterCrop(size)]
    )
    return transforms.Compose([*crop, transforms.ToTensor(), _NORMALISE])
