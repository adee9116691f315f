"""A hostile pickle is refused and not executed, by whichever library a file of weights is read."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from tiny_configs import tiny_config, tiny_settings
from transformers import BertForMaskedLM

from runner.core.base.errors import ConfigError
from runner.core.base.files import read_as_data
from runner.core.config.targets import build_group
from runner.models.huggingface import huggingface
from runner.models.timm_any import timm_any
from runner.models.torchvision_any import torchvision_any
from runner.training.model import safe_loading

NET = "test_resnet"


class Bomb:
    """Makes a file in the working directory where it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("CANARY"),)


def bomb(path, **options):
    """Write a state dict with a bomb in it; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"weight": torch.zeros(1), "bomb": Bomb()}, path, **options)
    return str(path)


def build(target, **arguments):
    """Build a model as a run does."""
    node = {"_target_": target, **arguments}
    with safe_loading(node):
        return build_group("model", node)


def pretrained_of_timm(folder, overlay=None):
    overlay = overlay or {"file": bomb(folder / "evil.pth")}
    keywords = {"model_name": NET, "pretrained": True, "pretrained_cfg_overlay": overlay}
    return build("timm.create_model", **keywords)


def cached_of_timm(folder):
    """A file in the cache of torch.hub, which is not compared with a checksum again."""
    bomb(folder / "hub" / "checkpoints" / "evil.pth")
    overlay = {"url": "https://example.invalid/evil.pth", "hf_hub_id": None}
    return pretrained_of_timm(folder, overlay)


def cached_of_torchvision(folder):
    name = torchvision.models.ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    bomb(folder / "hub" / "checkpoints" / name)
    return build("torchvision.models.resnet18", weights="DEFAULT")


def folder_of_transformers(folder, **typed):
    tiny_config("bert").save_pretrained(folder / "bert")
    bomb(folder / "bert" / "pytorch_model.bin")
    target = "transformers.BertForMaskedLM.from_pretrained"
    return build(target, pretrained_model_name_or_path=str(folder / "bert"), **typed)


def typed_unsafe_of_transformers(folder):
    """A config that asks for the unpickling."""
    return folder_of_transformers(folder, weights_only=False)


def packaged(folder):
    """A folder of an installed package, which may hold a pickle."""
    package = folder / "packaged_net"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "config.json").write_text(json.dumps(tiny_settings("bert")))
    bomb(package / "pytorch_model.bin")
    return huggingface("masked_lm", path="package://packaged_net/")


def legacy_mnist(folder):
    for name in ("training.pt", "test.pt"):
        bomb(folder / "MNIST" / "processed" / name)
    node = {"_target_": "runner.data.datasets.mnist.mnist", "root": str(folder)}
    return build_group("data", node)


def plain_pickle_of_timm(folder):
    path = bomb(folder / "evil.pth", _use_new_zipfile_serialization=False)
    return timm_any(NET, 1000, IMAGE, checkpoint_path=path)


IMAGE = [3, 32, 32]
WAYS = {
    "model=timm model.checkpoint_path": lambda f: timm_any(
        NET, 1000, IMAGE, checkpoint_path=bomb(f / "evil.pth")
    ),
    "model=timm, a plain pickle": plain_pickle_of_timm,
    "model=timm model.weights": lambda f: timm_any(NET, 1000, IMAGE, weights=bomb(f / "evil.pth")),
    "model=torchvision model.weights": lambda f: torchvision_any(
        "resnet18", 3, IMAGE, weights=bomb(f / "evil.pth")
    ),
    "timm.create_model checkpoint_path": lambda f: build(
        "timm.create_model", model_name=NET, checkpoint_path=bomb(f / "evil.pth")
    ),
    "timm.create_model pretrained, a file": pretrained_of_timm,
    "timm.create_model pretrained, the cache": cached_of_timm,
    "torchvision.models weights": cached_of_torchvision,
    "transformers from_pretrained": folder_of_transformers,
    "transformers from_pretrained weights_only=False": typed_unsafe_of_transformers,
    "model=hf model.path=package://": packaged,
    "data=mnist, files of an old torchvision": legacy_mnist,
}


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param("1", id="the environment asks for it"),
        pytest.param("", id="plain", marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_hostile_file_of_weights_is_not_executed(way, environment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", environment)
    with pytest.raises((ConfigError, ValueError)) as refused:
        WAYS[way](tmp_path)
    assert "eights" in str(refused.value) or "tensors" in str(refused.value)
    assert not (tmp_path / "CANARY").exists()


def test_the_canary_shows_a_file_that_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.load(bomb(tmp_path / "evil.pth"), weights_only=False)
    assert (tmp_path / "CANARY").exists()


def test_timms_checkpoints_are_loaded_as_before(tmp_path):
    saved = timm.create_model(NET, num_classes=3)
    path = tmp_path / "last.pth"
    torch.save({"state_dict": saved.state_dict(), "epoch": 3}, path)
    model = timm_any(NET, 3, [3, 32, 32], checkpoint_path=str(path))
    assert all(map(torch.equal, model.state_dict().values(), saved.state_dict().values()))
    with pytest.raises(ValueError, match=f"timm cannot build {NET}: .*size mismatch"):
        timm_any(NET, 4, [3, 32, 32], checkpoint_path=str(path))


def test_weights_of_libraries_that_are_tensors_are_loaded(tmp_path):
    saved = BertForMaskedLM(tiny_config("bert"))
    saved.config.save_pretrained(tmp_path)
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    target = "transformers.BertForMaskedLM.from_pretrained"
    model = build(target, pretrained_model_name_or_path=str(tmp_path))
    words, wanted = (m.bert.embeddings.word_embeddings.weight for m in (model, saved))
    assert torch.equal(words, wanted)


def test_ones_own_code_reads_its_files_as_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = bomb(tmp_path / "mine.pth")
    node = {"_target_": f"{__name__}.own_network", "path": path}
    with safe_loading(node):
        build_group("model", node)
    assert (tmp_path / "CANARY").exists()


def own_network(path):
    torch.load(path, weights_only=False)
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_the_environment_is_as_before_afterwards(before, monkeypatch):
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    if before is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, before)
    with suppress(ValueError), read_as_data():
        assert os.environ[name] == "1"
        raise ValueError
    assert os.environ.get(name) == before
