import importlib
import inspect
from pathlib import Path

import pytest
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf"
FACTS = {"data": {"meta": {"input": [1, 8, 8], "classes": 10}}}
GIVEN = {"hf": {"kind": "masked_lm", "config": {"model_type": "albert", "num_attention_heads": 4}}}


@pytest.mark.parametrize("path", sorted((CONF / "model").glob("*.yaml")), ids=lambda p: p.stem)
def test_config_builds_the_model(path):
    config = OmegaConf.merge(FACTS, {"model": OmegaConf.load(path)})
    config.model.update(GIVEN.get(path.stem, {}))
    keywords = OmegaConf.to_container(config, resolve=True)["model"]
    keywords.pop("defaults", None)
    module, name = keywords.pop("_target_").rsplit(".", 1)
    target = getattr(importlib.import_module(module), name)
    assert set(keywords) == set(inspect.signature(target).parameters)
    assert sum(p.numel() for p in target(**keywords).parameters()) > 0
