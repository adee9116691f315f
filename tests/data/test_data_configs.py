import importlib
import inspect
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from runner.data.splits import Splits

FOLDER = Path(__file__).parents[2] / "conf" / "data"
FILES = sorted(FOLDER.glob("*.yaml"))
FORMER = {"end_token": False, "separate": False}
"""What runs resume with that began before these keys, so that their data stay the same."""
WITHOUT_FILES = ["digits", "text", "synthetic_images", "synthetic_tokens", "signals"]


def load(path):
    """Return the target, its keywords, the facts and the task that a data config gives.

    Files of any data give no task: model=hf or the command does.
    """
    config = OmegaConf.create({"data": OmegaConf.load(path)})
    defaults = config.data.pop("defaults", [{"override /task@_global_.task": "hf"}])
    task = defaults[0]["override /task@_global_.task"]
    meta = config.data.meta
    node = OmegaConf.to_container(config.data)
    keywords = {k: v for k, v in node.items() if k not in ("meta", "_target_")}
    module, name = config.data["_target_"].rsplit(".", 1)
    return getattr(importlib.import_module(module), name), keywords, meta, task


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_config_says_what_the_signature_says(path):
    target, keywords, meta, task = load(path)
    parameters = inspect.signature(target).parameters.values()
    defaults = {p.name: "???" if p.default is p.empty else p.default for p in parameters}
    keywords |= {k: value for k, value in FORMER.items() if k in keywords}
    assert {k: tuple(v) if k == "shape" else v for k, v in keywords.items()} == defaults
    assert set(meta) - {"dtype"} == {"input", "classes"}
    assert (FOLDER.parent / "task" / f"{task}.yaml").exists()


@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_facts_in_the_config_are_those_of_the_data(name):
    target, keywords, meta, task = load(FOLDER / f"{name}.yaml")
    splits = target(**keywords)
    assert isinstance(splits, Splits)
    for split in splits:
        image, label = split[len(split) - 1]
        assert list(image.shape) == list(meta.input)
        if task == "regression":
            assert label.shape == (meta.classes,)
        else:
            highest = max(split[i][1].max().item() for i in range(min(len(split), 300)))
            assert highest < meta.classes


@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_same_call_same_data_and_the_global_random_state_stays(name):
    import torch

    target, keywords, _, _ = load(FOLDER / f"{name}.yaml")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = target(**keywords)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = target(**keywords)
    for one, other in zip(first, second, strict=True):
        assert len(one) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(one[3], other[3], strict=True))
