"""Load images from folders of files, one folder for each class.

The files are decoded when an example is read, so the data need not fit in memory. Type
train.num_workers=N to decode in processes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from runner.data.splits import Splits, held_out, require_at_least
from runner.utils.errors import ConfigError

_LAYOUT = (
    "It must hold train/ and val/ with one folder for each class, or the class folders themselves."
)
# ImageNet's statistics, which torchvision's own training and weights use.
_NORMALISE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def image_transform(size: int, augment: bool) -> Callable[[Any], Tensor]:
    """Return the preprocessing: Pillow image to normalised float32 [3, size, size].

    Args:
        size: side in pixels: the shorter side is resized to it, then the centre is cropped.
        augment: crop and resize at random, and mirror half of the images, instead.
    """
    if augment:
        crop = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    else:
        crop = [transforms.Resize(size), transforms.CenterCrop(size)]
    return transforms.Compose([*crop, transforms.ToTensor(), _NORMALISE])


def imagefolder(
    root: str = "data",
    size: int = 224,
    val_fraction: float = 0.1,
    augment: bool = False,
    seed: int = 0,
) -> Splits:
    """Load ROOT/train/CLASS/*.png and ROOT/val/CLASS/*.png, or split ROOT/CLASS/*.png.

    Args:
        root: the folder. It holds train/ and val/ with one folder for each class, or the class
            folders themselves; the images in any format that torchvision's ImageFolder reads.
        size: side of the square image in pixels: the shorter side is resized to it, then
            the centre is cropped.
        val_fraction: share for validation, between 0 and 1; unused when ROOT/val is there.
        augment: train on random resized crops and mirror images instead.
        seed: of the split alone; the run's seed does not change it.

    Returns:
        Map-style data sets with examples of float32 [3, size, size], normalised with ImageNet's
        statistics, and the class number as int.

    Raises:
        ConfigError: a folder is missing or holds no images of classes, the classes of train/ and
            val/ differ, val_fraction leaves an empty split, or the size is below 1.
    """
    require_at_least("imagefolder", size=(size, 1))
    base = Path(root)
    if not base.is_dir():
        raise ConfigError(
            f"data=imagefolder: there is no folder {base.absolute()}. {_LAYOUT} "
            "Type data.root=FOLDER."
        )
    has_two_folders = (base / "train").is_dir() or (base / "val").is_dir()
    # Two data sets of the same files, too: only the training one is augmented.
    train = _folder(base / "train" if has_two_folders else base, size, augment)
    val = _folder(base / "val" if has_two_folders else base, size, False)
    if not has_two_folders:
        val_count = held_out(len(train), val_fraction, "imagefolder")
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
        return Splits(Subset(train, order[val_count:]), Subset(val, order[:val_count]))
    if train.classes != val.classes:
        # ImageFolder numbers the classes of each side by itself: labels would not match.
        different = sorted(set(train.classes) ^ set(val.classes))
        raise ConfigError(
            f"data=imagefolder: the classes of {base.absolute()}/train and val differ: "
            f"{', '.join(different[:5])} on one side only. Make the same folders on both sides."
        )
    return Splits(train, val)


def _folder(path: Path, size: int, augment: bool) -> ImageFolder:
    """Return the data set of one folder of class folders.

    Raises:
        ConfigError: it does not exist, or a class has no images.
    """
    try:
        return ImageFolder(str(path), image_transform(size, augment))
    except OSError as error:
        raise ConfigError(
            f"data=imagefolder: no classes of images in {path.absolute()} ({error}). {_LAYOUT} "
            "Type data.root=FOLDER."
        ) from error
