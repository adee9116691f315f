"""What a model learned of its data travels with its checkpoint, or is compared with other data."""

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import runner
from runner.core.base.errors import ConfigError
from runner.data.splits import TensorFields

COLOURS = {"apple": (200, 20, 20), "banana": (200, 200, 20), "cherry": (20, 20, 200)}
SHORT = ["tracking=none", "train.batch_size=12"]
PHOTOS = ["data=imagefolder", "model=mlp", "model.hidden=[16]"]


def write(folder, classes):
    for split in ("train", "val"):
        for name in classes:
            (folder / split / name).mkdir(parents=True)
            for i in range(8):
                path = folder / split / name / f"{i}.png"
                Image.new("RGB", (8, 8), COLOURS[name]).save(path)


def test_images_of_fewer_classes_keep_the_numbers_of_the_training(tmp_path):
    write(tmp_path / "all", COLOURS)
    write(tmp_path / "two", ["banana", "cherry"])
    keys = [f"data.root={tmp_path / 'all'}", "data.size=8", "data.meta.classes=3", "train.epochs=8"]
    trained = runner.run([*SHORT, *PHOTOS, *keys], out=tmp_path / "run", quiet=True)
    assert trained.metrics["val/accuracy"] == 1
    # The size of the images and the number of classes are the checkpoint's, too.
    evaluate = ["tracking=none", "mode=evaluate", f"checkpoint={tmp_path / 'run'}"]
    other = [*evaluate, "data=imagefolder", f"data.root={tmp_path / 'two'}"]
    again = runner.run(other, out=tmp_path / "again", quiet=True)
    assert again.metrics["val/accuracy"] == 1
    with pytest.raises(ConfigError, match="classes of the checkpoint and of the val set differ"):
        runner.run(
            [*other, "data.class_names=[cherry,banana,apple]"], out=tmp_path / "c", quiet=True
        )


def fields(vocabulary):
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    return (TensorFields({"input": x, "labels": x}, {"vocabulary": vocabulary}),) * 2


def test_facts_of_the_data_are_compared_with_those_of_the_checkpoint(tmp_path):
    given = {"model": nn.Linear(4, 4)}
    words = [*SHORT, "task=regression", "train.max_steps=2", "train.batch_size=12"]
    trained = runner.run(words, **given, data=fields({"a": 0}), out=tmp_path / "run", quiet=True)
    evaluate = [*words[:3], "mode=evaluate", f"checkpoint={tmp_path / 'run'}"]
    again = runner.run(evaluate, **given, data=fields({"a": 0}), out=tmp_path / "a", quiet=True)
    assert again.metrics == trained.metrics
    message = "the vocabulary of the checkpoint and of the val set differ"
    with pytest.raises(ConfigError, match=message):
        runner.run(evaluate, **given, data=fields({"a": 1}), out=tmp_path / "b", quiet=True)
    resume = [*words, f"checkpoint.resume={tmp_path / 'run'}", "train.max_steps=3"]
    with pytest.raises(ConfigError, match=message):
        runner.run([*SHORT, "task=regression", *resume[4:]], **given, data=fields({"b": 0}))


def test_objects_replace_the_data_of_the_checkpoint(tmp_path):
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    near, far = ((TensorDataset(x, factor * x),) * 2 for factor in (1, 100))
    given = {"model": nn.Linear(4, 4)}
    words = [*SHORT, "task=regression"]
    first = runner.run(
        [*words, "train.max_steps=1"], **given, data=near, out=tmp_path / "run", quiet=True
    )
    evaluate = [*words, "mode=evaluate", f"checkpoint={tmp_path / 'run'}"]
    second = runner.run(evaluate, **given, data=far, out=tmp_path / "far", quiet=True)
    assert second.metrics["val/loss"] > 1000 * first.metrics["val/loss"]
