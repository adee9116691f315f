import pytest
import torch
from PIL import Image

from runner.data.datasets.imagefolder import imagefolder
from runner.utils.errors import ConfigError

COLOURS = {"green": (0, 255, 0), "red": (255, 0, 0)}


def write(folder, classes=COLOURS, count=5):
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (20 + i, 12), COLOURS[name]).save(folder / name / f"{i}.png")


@pytest.mark.parametrize("augment", [False, True])
def test_train_and_val_folders(tmp_path, augment):
    write(tmp_path / "train")
    write(tmp_path / "val", count=2)
    train, val = imagefolder(str(tmp_path), size=8, augment=augment)
    assert (len(train), len(val)) == (10, 4)
    for split in (train, val):
        image, label = split[len(split) - 1]
        assert (image.shape, image.dtype, label) == ((3, 8, 8), torch.float32, 1)
        assert image[0, 0, 0].item() == pytest.approx((1 - 0.485) / 0.229, rel=1e-4)


def test_one_folder_is_split_once_for_all(tmp_path):
    write(tmp_path)
    train, val = imagefolder(str(tmp_path), size=8, val_fraction=0.3)
    assert (len(train), len(val)) == (7, 3)
    assert sorted([*train.indices, *val.indices]) == list(range(10))
    assert val.indices == imagefolder(str(tmp_path), size=8, val_fraction=0.3).val.indices


@pytest.mark.parametrize("folders", [["."], ["train", "val"]])
def test_validation_is_not_augmented(tmp_path, folders):
    for folder in folders:
        write(tmp_path / folder)
    train, val = (
        getattr(split, "dataset", split)  # the split of one folder is a Subset
        for split in imagefolder(str(tmp_path), size=8, augment=True)
    )
    assert "RandomResizedCrop" in str(train.transform)
    assert "Random" not in str(val.transform)


def test_missing_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.*data\.root=FOLDER"):
        imagefolder(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        ({}, "no classes"),
        ({".": COLOURS, "violet": ()}, "violet"),  # a class without images
        ({"train": COLOURS}, "val"),
        # Each side would number its classes in its own way.
        ({"train": COLOURS, "val": ["red"]}, "green on one side only"),
    ],
)
def test_folders_without_images_of_every_class_are_refused(tmp_path, folders, message):
    for name, classes in folders.items():
        (tmp_path / name).mkdir(exist_ok=True)
        write(tmp_path / name, classes)
    with pytest.raises(ConfigError, match=message):
        imagefolder(str(tmp_path))
