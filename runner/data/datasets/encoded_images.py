"""Images that a table holds as encoded bytes (PNG, JPEG, ...), decoded when an example is read."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms

from runner.utils.errors import ConfigError

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


class EncodedImages(Dataset):
    """Pairs of an image, float32 [3, size, size], and its class as int.

    Args:
        images: a column of a table, Arrow's or a sequence: encoded bytes, or dicts of `bytes` and
            `path` as Hugging Face's datasets store them.
        labels: int64 [N].
        rows: of the column, which are the examples: int64.
        transform: takes a Pillow image in RGB.
        source: names the column in messages, for example `data=parquet: column photo`.
    """

    def __init__(
        self,
        images: Sequence[Any],
        labels: Tensor,
        rows: Tensor,
        transform: Callable[[Any], Tensor],
        source: str,
    ) -> None:
        self.images = images
        self.labels = labels
        self.rows = rows
        self.transform = transform
        self.source = source

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image, transformed, and its class.

        Raises:
            ConfigError: it cannot be decoded; the message says which row of the table it is.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range: there are {len(self)} images")
        row = int(self.rows[index])
        return self.transform(self._decoded(row)), int(self.labels[row])

    def _decoded(self, row: int) -> Image.Image:
        value = self.images[row]
        value = value.as_py() if hasattr(value, "as_py") else value
        try:
            with Image.open(io.BytesIO(_encoded(value))) as image:
                return image.convert("RGB")
        except (OSError, SyntaxError, ValueError, TypeError) as error:
            reason = str(error).split("\n")[0].rstrip(".")
            if isinstance(error, UnidentifiedImageError):  # its text holds an address
                reason = "it is in no format that Pillow knows"
            raise ConfigError(
                f"{self.source}, row {row}: its image cannot be decoded: {reason}. Take that row "
                "out of the table, or write its image again as PNG or JPEG."
            ) from error


def _encoded(value: Any) -> bytes:
    """Return the bytes of an image, from its file where the table holds its path alone."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        return value["bytes"]
    if isinstance(value, Mapping) and value.get("path"):
        return Path(value["path"]).read_bytes()
    raise TypeError(f"the value is {'empty' if value is None else type(value).__name__}")
