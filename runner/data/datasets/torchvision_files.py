"""Load a data set of torchvision into memory, or explain which files are missing and where.

torchvision raises several types of errors for a missing or damaged file, and none says what to
type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch.utils.data import TensorDataset
from torchvision.datasets import CIFAR10, MNIST

from runner.core import ConfigError, files
from runner.data.splits import Splits, image_tensors


@dataclass(frozen=True)
class TorchvisionDataset:
    """A data set of torchvision, the files that it needs and the statistics of its images.

    Attributes:
        name: the data config's name.
        kind: torchvision's class; CIFAR100 is a CIFAR10, FashionMNIST an MNIST.
        folder: where torchvision looks, below the root.
        files: what it looks for there.
        mean, std: per channel over the training images, full range = 1.
    """

    name: str
    kind: type[MNIST] | type[CIFAR10]
    folder: str
    files: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]

    def load(self, root: str, download: bool) -> Splits:
        """Read both splits: float32 [N, C, H, W], normalised, and int64 [N].

        Args:
            root: the folder that holds `folder`.
            download: let torchvision download missing files.

        Raises:
            ConfigError: files are missing or damaged, or the download failed.
        """
        try:
            return Splits(self._split(root, True, download), self._split(root, False, download))
        # torchvision's errors for missing files, a failed download, damaged headers and sizes.
        except (RuntimeError, OSError, ValueError, AssertionError, UnpicklingError) as error:
            folder = Path(root).absolute() / self.folder
            advice = (
                "The download did not succeed: put the files there yourself"
                if download
                else "Type data.download=true to download them"
            )
            first_line = str(error).partition("\n")[0]
            raise ConfigError(
                f"data={self.name}: files are missing or damaged in {folder}. Expected there, "
                f"unpacked: {', '.join(self.files)}. {advice}, or data.root=FOLDER with the folder "
                f"that holds {self.folder}. (torchvision: {first_line})"
            ) from error

    def _split(self, root: str, train: bool, download: bool) -> TensorDataset:
        # torchvision compares CIFAR's pickles with their checksums before it reads them, and loads
        # the files that its older versions made of MNIST.
        with files.read_as_data():
            dataset = self.kind(root, train=train, download=download)
        pixels = torch.as_tensor(dataset.data)  # uint8 [N, H, W] or [N, H, W, C]
        pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
        return image_tensors(pixels, torch.as_tensor(dataset.targets), self.mean, self.std)
