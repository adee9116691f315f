"""What of a checkpoint's config is called."""

import re
import sys
from pathlib import Path

import pytest

from runner.config import trusted_targets
from runner.core.base.errors import ConfigError

KNOWN = {
    "model": "runner.models.resnet.resnet runner.models.mlp.MLP torch.nn.Linear"
    " torchvision.models.resnet18 torchvision.models.detection.backbone_utils.resnet_fpn_backbone",
    "data": "runner.data.datasets.digits.digits runner.data.padding.pad",
    "optimizer": "torch.optim.NAdam runner.training.lowbit_optimizers.AdamW8bit",
    "scheduler": "torch.optim.lr_scheduler.StepLR",
    "task": "torchmetrics.classification.MulticlassF1Score torchmetrics.R2Score",
}
UNKNOWN = {
    "model": "os.system runner.core.config.targets.instantiate runner.cli.main.main torch.hub.load"
    " torch.load torch.nn.functional.relu runner.models.mlp.torch.save mine.os.mkdir"
    " mine.json.loads mine.Net pack.nets.net pack.nets.system outputs.runs.now.net yaml.load"
    " idlelib.idle.main x torchvision.models.feature_extraction.create_feature_extractor"
    " torchvision.models.get_model_weights torch.nn.parallel.distributed.torch.fx.GraphModule",
    "data": "runner.data.datasets.text.Path torch.nn.Linear builtins.open",
    "optimizer": "torch.optim.lr_scheduler.StepLR torch.optim.optimizer.torch.load",
    "task": "torchmetrics.functional.accuracy torchmetrics.MetricCollection"
    " torchmetrics.metric.Module torchmetrics.none",
}
NO_PATHS = ("", 3, ["a"])


def pairs(targets):
    """Each group with each of its targets."""
    return [(group, target) for group, text in targets.items() for target in text.split()]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    """Modules of a stranger in the working directory, that can be imported and must not be."""
    for name in ("mine.py", "yaml.py", "pack/nets.py", "outputs/runs/now.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def check(values, groups, typed):
    config = trusted_targets.SavedConfig(values, Path("x.pt"), "checkpoint")
    trusted_targets.check_trusted(config, groups, typed)


def refused(group, target, typed=None):
    try:
        check({group: {"_target_": target}}, [group], typed or {})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("group", "target"), pairs(KNOWN))
def test_what_is_known_is_trusted(group, target):
    assert not refused(group, target)


@pytest.mark.parametrize(
    ("group", "target"), [*pairs(UNKNOWN), *(("model", value) for value in NO_PATHS)]
)
def test_what_is_not_is_refused_before_it_is_imported(group, target):
    before = set(sys.modules)
    message = refused(group, target)
    assert f"checkpoint=x.pt names {group}._target_={target}" in message
    assert f"type {group}=... yourself" in message
    assert "idlelib" not in {name.partition(".")[0] for name in set(sys.modules) - before}


def test_what_is_typed_is_ones_own():
    assert not refused("model", "os.mkdir", {"model": {"_target_": "os.mkdir"}})


OWN = {"model": "runner.models.mlp.MLP", "data": "runner.data.datasets.digits.digits"}
PLACES = {
    "in a mapping": lambda node: {"config": {"a": node}},
    "in a list": lambda node: {"layers": [1, [node]]},
    "by position": lambda node: {"_args_": [node]},
    "in a nested node": lambda node: {"a": {"_target_": OWN["model"], "b": node}},
    "where nothing is built": lambda node: {"_recursive_": False, "a": node},
}
NESTED_STRANGERS = (
    "builtins.eval hydra.utils.get_class hydra.utils.instantiate hydra.utils.call"
    " functools.partial importlib.import_module transformers.GPT2Config ${vars.path}"
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("target", NESTED_STRANGERS.split())
def test_a_nested_target_of_a_stranger_is_refused(place, target):
    node = {"_target_": target, "_args_": ["1"]}
    spec = {"model": {"_target_": "torch.nn.Sequential", **PLACES[place](node)}}
    said = rf"names model\.[\w.\[\]]+\._target_={re.escape(target)}, which"
    with pytest.raises(ConfigError, match=said):
        check(spec, ["model"], {})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("model", "torch.nn.BatchNorm2d"),
        ("model", "runner.models.mlp.MLP"),
        ("data", "torchvision.transforms.v2.ToImage"),
    ],
)
def test_a_nested_target_that_fits_its_place_is_trusted(place, group, target):
    node = {"_target_": target, "_partial_": True}
    inner = PLACES[place](node)
    if "_target_" in inner.get("a", ()):
        inner["a"]["_target_"] = OWN[group]
    spec = {group: {**inner, "_target_": OWN[group]}}
    check(spec, [group], {})


def test_one_of_several_optimizers():
    spec = {"optimizer": {"a": {"_target_": "torch.optim.SGD"}, "b": {"_target_": "os.mkdir"}}}
    with pytest.raises(ConfigError, match=r"names optimizer\.b\._target_=os\.mkdir"):
        check(spec, ["optimizer"], {})


@pytest.mark.parametrize("key", ["data.collate", "data.sampler", "task.loss"])
def test_a_target_that_is_given_as_text(key):
    group, name = key.split(".")
    spec = {group: {name: "os.system"}}
    with pytest.raises(ConfigError, match=re.escape(f"names {key}=os.system, which is neither")):
        check(spec, [group], {})
    check(spec, [group], {group: {name: "os.system"}})
    check(spec, [group], {group: [{name: "os.system"}, {}]})
    spec = {group: {name: {"a": [1, {"_target_": "os.system"}]}}}
    with pytest.raises(ConfigError, match=re.escape(f"names {key}.a[1]._target_=os.system")):
        check(spec, [group], {})


@pytest.mark.parametrize(
    "keys",
    [
        {"metrics": "os.system"},
        {"metrics": ["torchmetrics.R2Score", "os.system"]},
        {"metrics": {"a": {"_target_": "os.system"}}},
        {"after_evaluation": "os.system"},
        {"after_evaluation": {"_target_": "os.system", "_partial_": True}},
    ],
)
def test_a_metric_or_a_hook_of_a_stranger(keys):
    spec = {"task": keys}
    with pytest.raises(ConfigError, match=r"names task\.[\w.\[\]]+=os\.system"):
        check(spec, ["task"], {})


def test_a_secret_that_was_left_out_is_asked_for():
    spec = {"data": {"api_key": "***", "max_tokens": 3}}
    with pytest.raises(ConfigError, match=r"secret data\.api_key\. Type data\.api_key=<value>"):
        check(spec, ["data"], {})
