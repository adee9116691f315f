"""torchvision's detection and segmentation models from yaml, on small sets of a user's own."""

import re
from importlib import import_module

import pytest
import torch
from run_folders import copy_files, metrics_in, write_page
from safetensors.torch import load_file
from torch.nn import functional as F
from torchvision.models import get_model

DETECTOR = "fasterrcnn_mobilenet_v3_large_320_fpn"
TINY = {
    "min_size": 32,
    "max_size": 32,
    "rpn_pre_nms_top_n_train": 40,
    "rpn_post_nms_top_n_train": 20,
    "rpn_pre_nms_top_n_test": 40,
    "rpn_post_nms_top_n_test": 20,
    "box_batch_size_per_image": 8,
}
OPTIONS = ", ".join(f"{key}: {value}" for key, value in TINY.items())
RUN = (
    "--config-dir conf model=torchvision tracking=none train.batch_size=2 train.max_steps=3 "
    "optimizer=sgd optimizer.lr=0.01 optimizer.momentum=0.0 optimizer.weight_decay=0.0 "
    "scheduler=constant data.shuffle=false"
).split()


@pytest.fixture
def lab(tmp_path):
    return copy_files("detection", tmp_path)


DETECT = (*RUN, "data=boxes", f"model.name={DETECTOR}", f"model.options={{{OPTIONS}}}")


@pytest.fixture
def detect(lab, main):
    return lambda *args: main(*DETECT, *args)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, inside):
    """The folder of a detector's run of three steps."""
    folder = copy_files("detection", tmp_path_factory.mktemp("trained"))
    with inside(folder) as main:
        main(*DETECT, "checkpoint.safetensors=true", "hydra.run.dir=run").check_ok()
    return folder / "run"


@pytest.fixture
def segment(lab, main):
    return lambda *args: main(*RUN, "data=pixels", "model.name=lraspp_mobilenet_v3_large", *args)


@pytest.fixture
def sets(lab, monkeypatch):
    monkeypatch.syspath_prepend(str(lab))
    return import_module("squares")


def has_weights_of(model, folder):
    """Return whether a run exported the very weights of a model."""
    own, saved = model.state_dict(), load_file(folder / "model.safetensors")
    return all(torch.equal(value, own[name]) for name, value in saved.items())


def batches(dataset, make):
    for start in range(0, len(dataset), 2):
        yield make([dataset[i] for i in range(start, min(start + 2, len(dataset)))])


def test_a_detector_learns_bit_by_bit_what_a_loop_by_hand_learns(trained, sets):
    torch.manual_seed(0)
    model = get_model(DETECTOR, weights=None, weights_backbone=None, num_classes=2, **TINY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train, val = sets.squares()
    for images, targets in batches(train, sets.two_lists):
        sum(model(images, targets).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert has_weights_of(model, trained)

    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    torch.manual_seed(0)
    total = 0.0
    with torch.no_grad():
        for images, targets in batches(val, sets.two_lists):
            total += sum(model(images, targets).values()).item() * len(images)
    assert metrics_in(trained) == {"val/loss": pytest.approx(total / len(val), rel=1e-6)}


@pytest.mark.extended
def test_a_detector_trains_in_bf16_mixed_in_micro_batches(detect, lab):
    words = ("precision=bf16-mixed", "train.max_steps=1", "train.accumulate=2")
    detect(*words, "checkpoint.final=false", "hydra.run.dir=run").check_ok()
    assert metrics_in(lab / "run")["val/loss"] > 0


def test_a_detector_in_16_mixed_resumes_where_it_stopped(detect, lab):
    words = (
        "precision=16-mixed",
        "train.max_steps=2",
        "train.accumulate=2",
        "data.collate=squares.two_lists",
    )
    saving = ("hydra.run.dir=run", "checkpoint.every_steps=1", "checkpoint.keep=2")
    detect(*words, "precision.loss_scale.init_scale=256", *saving).check_ok()
    expected = metrics_in(lab / "run")
    (lab / "run" / "result.json").unlink()
    checkpoint = lab / "run" / "checkpoints" / "step-00000001.pt"
    detect(f"checkpoint.resume={checkpoint}", "train.max_steps=2").check_ok()
    assert metrics_in(lab / "run") == expected


def test_it_is_planned_and_evaluated(detect, trained):
    detect("mode=plan", "+data.meta.input=[3,32,40]").check_ok("not predicted")
    found = detect("mode=evaluate", f"checkpoint={trained}", "precision=bf16-mixed").check_ok()
    assert "change +" in found.stdout or "change -" in found.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["data.collate=null"], "data.collate=runner.data.detection.collate_detection"),
        (["data.collate=squares.stacked"], "a batch has a tensor float32 [2, 3, 32, 40] and a"),
        (["task.loss_weights={loss_box: 2}"], "returns loss_classifier, loss_box_reg"),
        (["task.loss_weights={loss_box_reg: -1}"], "task.loss_weights.loss_box_reg=-1 does not"),
        (["task=classification"], "data=boxes yields boxes. Type task=detection"),
        (["model.name=resnet18", "model.options=null"], "resnet18 needs input_shape"),
    ],
)
def test_what_does_not_fit_a_detector_gets_one_message(detect, args, message):
    detect(*args).check_refused(message)


def test_a_model_that_takes_no_boxes_is_refused(lab, main):
    done = main(*RUN, "data=boxes", "model=resnet", "model.input_shape=[3,32,40]")
    done.check_refused("model(images, targets), and ResNet.forward takes (x)")


def test_labels_outside_the_classes_are_found_before_training(detect):
    found = (
        "data: sample 0 of the train set, and 4 more of the 6 looked at: label 2 is outside the 2"
    )
    detect("+data.label=2").check_refused(found, status=1)


def test_a_segmenter_takes_out_and_says_so(segment, lab, sets):
    segment("checkpoint.safetensors=true", "hydra.run.dir=run").check_ok(
        "takes out of the model's output (task.output=out)"
    )

    torch.manual_seed(0)
    name = "lraspp_mobilenet_v3_large"
    model = get_model(name, weights=None, weights_backbone=None, num_classes=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train, _ = sets.squares("pixels")
    for batch in batches(train, torch.utils.data.default_collate):
        F.cross_entropy(model(batch[0])["out"], batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert has_weights_of(model, lab / "run")


def test_the_auxiliary_loss_needs_its_head(segment):
    segment("task.aux_weight=0.4").check_refused("model.options={aux_loss: true}")


@pytest.mark.parametrize(
    "precision", ["bf16-mixed", pytest.param("16-mixed", marks=pytest.mark.extended)]
)
def test_a_segmenter_with_an_auxiliary_head_trains(segment, lab, precision):
    words = (f"precision={precision}", "train.max_steps=1", "hydra.run.dir=run")
    model = ("model.name=deeplabv3_mobilenet_v3_large", "model.options={aux_loss: true}")
    segment(*model, "task.aux_weight=0.4", *words).check_ok()
    assert set(metrics_in(lab / "run")) == {"val/loss", "val/accuracy", "val/iou"}


def test_the_example_of_the_docs_trains(lab, root, main):
    write_page("vision.md", lab)
    page = (root / "docs" / "vision.md").read_text()
    (command,) = re.findall(r"    python -m runner (.*data=boxes.*)\n", page)
    small = ("tracking=none", "train.max_steps=1", "train.batch_size=4", "checkpoint.final=false")
    main(*command.split(), *small).check_ok("val/loss")
