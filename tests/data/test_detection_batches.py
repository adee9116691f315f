"""Batches of images with boxes."""

import pytest
import torch
from torch.utils._pytree import tree_map
from torchvision import tv_tensors

from runner.core.base.errors import ConfigError
from runner.core.loop.batch_layout import KeywordInputs, PositionalInputs
from runner.core.policy.precision import ConversionPlan
from runner.data.detection import DetectionLayout, collate_detection
from runner.precision import registry

IMAGE = torch.rand(3, 8, 6)
TARGET = {"boxes": [[0, 1, 4, 5]], "labels": [2], "image_id": 7}
LAYOUT = DetectionLayout(passes_target=True)


def test_images_of_any_size_become_lists():
    boxes = tv_tensors.BoundingBoxes([[1, 1, 2, 3]], format="XYXY", canvas_size=(4, 4))
    other = {"boxes": boxes.double(), "labels": torch.tensor([1], dtype=torch.int32)}
    images, targets = collate_detection(
        [(IMAGE, TARGET), (tv_tensors.Image(torch.rand(3, 4, 4)), other), (IMAGE, EMPTY)]
    )
    assert [type(image) for image in images] == [torch.Tensor] * 3
    assert [tuple(target["boxes"].shape) for target in targets] == [(1, 4), (1, 4), (0, 4)]
    assert all(type(t["boxes"]) is torch.Tensor for t in targets)
    assert all(t["boxes"].dtype is torch.float32 for t in targets)
    assert all(t["labels"].dtype is torch.int64 for t in targets)
    assert targets[0]["image_id"] == 7


EMPTY = {"boxes": [], "labels": []}


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (IMAGE, "example 0 is a tensor float32 [3, 8, 6]. Yield (image, target)"),
        ((IMAGE.byte(), TARGET), "the image of example 0 is a tensor uint8 [3, 8, 6]. Yield float"),
        ((IMAGE[0], TARGET), "float32 [8, 6]"),
        ((IMAGE, 3), "the target of example 0 is a int. Yield a dict"),
        ((IMAGE, {"boxes": []}), "has boxes, not labels"),
        ((IMAGE, {"boxes": [[0, 1, 4]], "labels": [1]}), "boxes [1, 3], labels [1]"),
        ((IMAGE, {**TARGET, "labels": [1, 2]}), "boxes [1, 4], labels [2]"),
        ((IMAGE, {**TARGET, "boxes": [[4, 1, 4, 5]]}), "has a box without an area"),
    ],
)
def test_an_example_that_is_something_else_is_refused(example, message):
    with pytest.raises(ConfigError) as refused:
        collate_detection([example])
    assert message in str(refused.value)


@pytest.mark.parametrize("name", ["bf16-true", "16-true", "32-true", "64-true", "bf16-mixed"])
def test_images_are_cast_and_boxes_stay_float32_at_least(name):
    precision = registry.load_precision(name)
    inputs, targets = LAYOUT.split(collate_detection([(IMAGE, TARGET)]))
    assert isinstance(inputs, PositionalInputs)
    plan = ConversionPlan(wide_inputs={1: precision.loss_dtype})
    wide = torch.float64 if name == "64-true" else torch.float32
    # As a copy to a device does.
    images, boxes = precision.cast(tree_map(lambda leaf: leaf, inputs), plan)
    assert images[0].dtype is precision.storage
    assert (boxes[0]["boxes"].dtype, boxes[0]["labels"].dtype) == (wide, torch.int64)
    assert targets[0]["image_id"] == 7


def test_a_batch_of_fields_keeps_its_names():
    images, targets = collate_detection([(IMAGE, TARGET)])
    inputs, _ = LAYOUT.split({"images": images, "targets": targets})
    assert isinstance(inputs, KeywordInputs)
    assert [*inputs] == ["images", "targets"]


@pytest.mark.parametrize("batch", [(IMAGE, TARGET), ([IMAGE, IMAGE], [TARGET]), ([IMAGE], [3])])
def test_other_batches_are_refused(batch):
    with pytest.raises(ConfigError, match="a list of images and a list of as many dicts"):
        LAYOUT.split(batch)
