import importlib
import inspect
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from runner.core.loop.task import Task
from runner.training.tasks import tensor_task

FILES = sorted((Path(__file__).parents[3] / "conf" / "task").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_config_builds_a_task(path):
    config = OmegaConf.create({"model": {"kind": "masked_lm"}, "task": OmegaConf.load(path)})
    keywords = OmegaConf.to_container(config, resolve=True)["task"]
    module, name = keywords.pop("_target_").rsplit(".", 1)
    target = getattr(importlib.import_module(module), name)
    task = target(**keywords)
    assert isinstance(task, Task)
    assert task.direction in ("min", "max")
    parameters = inspect.signature(target).parameters.values()
    keywords.pop("kind", None)
    assert keywords == {p.name: p.default for p in parameters if p.default is not p.empty}


def test_sums_are_single_on_mps_only():
    class OnMps:
        device = torch.device("mps")

    assert tensor_task.wide(OnMps()) == torch.float32
    assert tensor_task.wide(torch.zeros(1)) == torch.float64
