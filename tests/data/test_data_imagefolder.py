import io

import numpy as np
import pytest
import torch
from PIL import Image

from runner.core.base.errors import ConfigError
from runner.data.datasets.imagefolder import decoded_image, image_transform, imagefolder

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
    ],
)
def test_folders_without_images_of_every_class_are_refused(tmp_path, folders, message):
    for name, classes in folders.items():
        (tmp_path / name).mkdir(exist_ok=True)
        write(tmp_path / name, classes)
    with pytest.raises(ConfigError, match=message):
        imagefolder(str(tmp_path))


def test_hidden_files_and_folders_are_no_images_and_no_classes(tmp_path):
    write(tmp_path)
    for name in (".ipynb_checkpoints", "red/.ipynb_checkpoints", "__MACOSX"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "0-checkpoint.png")
    (tmp_path / "green" / "._0.png").write_bytes(b"no image")
    train, val = imagefolder(str(tmp_path), size=8)
    assert train.dataset.classes == ["green", "red"]
    assert len(train) + len(val) == 10


def test_named_classes_keep_their_numbers_where_a_folder_is_missing(tmp_path):
    write(tmp_path, ["red"], count=10)
    train, _ = imagefolder(str(tmp_path), size=8, class_names=["violet", "red", "green"])
    assert {label for _, label in train} == {1}
    with pytest.raises(ConfigError, match="red is none of the classes green, violet"):
        imagefolder(str(tmp_path), size=8, class_names=["green", "violet"])


@pytest.mark.parametrize(
    ("form", "orientation"), [("JPEG", 3), ("JPEG", 6), ("PNG", 8), ("TIFF", 3), ("WEBP", 2)]
)
@pytest.mark.parametrize("mode", ["RGB", "I;16"])
def test_images_are_upright_as_exif_says(form, orientation, mode):
    if mode == "I;16" and form in ("JPEG", "WEBP"):
        pytest.skip(f"{form} holds no 16 bits")
    stored = np.zeros((8, 12), np.uint8)
    stored[:, :4] = 255
    turns = {2: np.fliplr, 3: lambda a: np.rot90(a, 2), 6: lambda a: np.rot90(a, -1), 8: np.rot90}
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    pixels = stored.astype(np.uint16) * 257 if mode == "I;16" else stored
    image = Image.fromarray(pixels)
    (image if mode == "I;16" else image.convert(mode)).save(file, form, exif=exif)
    levels = np.asarray(decoded_image(file, "here").convert("L" if mode == "RGB" else "F"))
    bright = levels > levels.max() / 2
    assert (bright == (turns[orientation](stored) > 0)).all()


def test_an_image_with_damaged_exif_data_stays_as_it_is_stored():
    file = io.BytesIO()
    Image.new("RGB", (4, 2)).save(file, "JPEG", exif=b"Exif\0\0no TIFF header")
    assert decoded_image(file, "here").size == (4, 2)


RAMP = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)


def read(image, form, **options):
    """Return an image that was written and read again, before its normalisation: [3, 8, 8]."""
    file = io.BytesIO()
    image.save(file, form, **options)
    *_, normalise = image_transform(8, False).transforms
    mean, std = (torch.tensor(each)[:, None, None] for each in (normalise.mean, normalise.std))
    return image_transform(8, False)(decoded_image(io.BytesIO(file.getvalue()), "it")) * std + mean


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_grey_images_of_16_bits_keep_them(form):
    wanted = torch.tensor(RAMP.astype(np.float64) / 65535).float().expand(3, -1, -1)
    assert torch.allclose(read(Image.fromarray(RAMP), form), wanted, atol=1e-6)
    negative = read(Image.fromarray(RAMP), "TIFF", tiffinfo={262: 0})
    assert torch.allclose(negative, 1 - wanted, atol=1e-6)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "YCbCr"])
def test_images_of_8_bits_are_those_of_pillow(mode):
    image = Image.fromarray((RAMP >> 8).astype(np.uint8)).convert("RGB").convert(mode)
    form = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    wanted = torch.tensor(np.asarray(image.convert("RGB"))).permute(2, 0, 1) / 255
    assert torch.allclose(read(image, form), wanted, atol=1e-6)


def test_an_image_whose_numbers_have_no_stated_range_is_named(tmp_path):
    write(tmp_path)
    for dtype in (np.float32, np.int32):
        Image.fromarray(RAMP.astype(dtype)).save(tmp_path / "green" / "0.tif")
        (tmp_path / "green" / "0.png").unlink(missing_ok=True)
        train = imagefolder(str(tmp_path), size=8).train
        place = train.indices.index(0) if 0 in train.indices else None
        with pytest.raises(ConfigError, match=r"green/0\.tif: .* mode (I|F) does not say which"):
            train.dataset[0] if place is None else train[place]
