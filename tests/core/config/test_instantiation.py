"""Nodes of a config are called as hydra.utils.instantiate calls them."""

from functools import partial
from pathlib import Path

import pytest
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from runner.config.hydra_plugins import VERSION_BASE
from runner.core.base.errors import ConfigError
from runner.core.config.targets import build_group, instantiate, locate


class Called:
    """A target that keeps what it was called with."""

    def __init__(self, *args, **kwargs):
        self.args = args
        self.kwargs = kwargs

    def __eq__(self, other):
        return isinstance(other, Called) and vars(self) == vars(other)

    __hash__ = None


def refuses(value):
    raise ValueError(f"{value}\n  is wrong")


def reads(path):
    return Path(path).read_text()


def lacks():
    raise ImportError("install it")


CALLED = f"{__name__}.Called"
REFUSES = f"{__name__}.refuses"


@pytest.mark.parametrize(
    "node",
    [
        {"a": 1, "b": [1, {"c": 2}], "d": {}},
        {"a": {"_target_": CALLED, "b": 1}},
        {"a": [[{"_target_": CALLED}], {"b": {"_target_": CALLED, "c": {"_target_": CALLED}}}]},
        {"_args_": [1, {"_target_": CALLED, "_args_": [2, [3]]}], "a": None},
        {"_recursive_": False, "a": {"_target_": CALLED}, "_args_": [{"_target_": CALLED}]},
        {"a": {"_target_": CALLED, "_recursive_": False, "b": {"_target_": CALLED}}},
        {"_convert_": "partial", "a": [{"b": []}]},
        {"_convert_": "object", "a": [{"b": []}]},
    ],
)
def test_nodes_are_built_as_hydra_builds_them(node):
    # Hydra 1.4 warns where nothing says which targets it may call.
    allowed = {} if VERSION_BASE else {"_execution_whitelist_": CALLED}
    expected = hydra_instantiate({"_convert_": "all", **node, "_target_": CALLED}, **allowed)
    assert instantiate({**node, "_target_": CALLED}) == expected


def test_nested_partial_nodes_are_called_later():
    node = {"_target_": CALLED, "norm": {"_target_": CALLED, "_partial_": True, "eps": 1}}
    norm = instantiate(node).kwargs["norm"]
    assert isinstance(norm, partial)
    assert norm(2) == Called(2, eps=1)


def test_targets_get_plain_containers_unless_they_ask_for_hydras():
    built = {"_target_": CALLED, "names": ["a"]}
    node = {"_target_": CALLED, "sizes": [1, {"a": 2}], "built": [built]}
    assert type(instantiate(node).kwargs["sizes"]) is list
    called = instantiate({**node, "_convert_": "none"})
    assert isinstance(called.kwargs["sizes"], ListConfig)
    assert isinstance(called.kwargs["sizes"][1], DictConfig)
    assert isinstance(called.kwargs["built"][0].kwargs["names"], ListConfig)
    raw = instantiate({**node, "_convert_": "none", "_recursive_": False})
    assert OmegaConf.to_container(raw.kwargs["built"]) == [built]


def test_the_runners_arguments_come_before_those_of_the_node():
    node = {"_target_": CALLED, "_args_": [2], "lr": 3}
    assert instantiate(node, 1) == Called(1, 2, lr=3)
    # As it is written for programs that call the partial themselves.
    assert instantiate({**node, "_partial_": True}, 1) == Called(1, 2, lr=3)


def test_keys_that_describe_a_group_are_arguments_of_nested_nodes():
    nested = {"_target_": CALLED, "shuffle": True, "meta": {}, "match": "x"}
    outer = {"_target_": CALLED, "shuffle": True, "a": nested}
    expected = Called(a=Called(shuffle=True, meta={}, match="x"))
    assert instantiate(outer) == expected


@pytest.mark.parametrize("key", ["data.sampler", "data.collate", "task.loss", "scheduler"])
def test_a_node_below_a_group_gets_every_keyword(key):
    node = {"_target_": CALLED, "shuffle": False, "meta": {}, "match": "x"}
    below = "." in key
    expected = Called(shuffle=False, meta={}, match="x") if below else Called()
    assert build_group(key, node) == expected


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"a": [{"_target_": REFUSES, "value": 3}]},
            f"model.a[0]: {REFUSES} refuses its arguments: 3 is wrong",
        ),
        (
            {"a": {"_target_": f"{__name__}.reads", "path": "absent"}},
            f"model.a: {__name__}.reads fails: FileNotFoundError: [Errno 2] No such file",
        ),
        (
            {"a": {"_target_": f"{__name__}.lacks"}},
            f"model.a: {__name__}.lacks fails: ImportError: install it",
        ),
        (
            {"_args_": [{"b": {"_target_": REFUSES, "_args_": [4]}}]},
            f"model._args_[0].b: {REFUSES} refuses its arguments: 4 is wrong",
        ),
        ({"a": {"_target_": "nowhere.Net"}}, "nowhere.Net does not import: no module named"),
    ],
)
def test_a_nested_target_that_refuses_is_named_by_its_key(node, message):
    with pytest.raises(ConfigError) as caught:
        build_group("model", {"_target_": CALLED, **node})
    assert str(caught.value).startswith(message)


def test_a_model_of_layers_from_yaml():
    layers = [{"_target_": "torch.nn.Linear", "_args_": [4, 3]}, {"_target_": "torch.nn.ReLU"}]
    model = build_group("model", {"_target_": "torch.nn.Sequential", "_args_": layers})
    assert isinstance(model, nn.Sequential)
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU]


def test_a_model_of_transformers_from_yaml():
    transformers = pytest.importorskip("transformers")
    size = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    config = {"_target_": "transformers.GPT2Config", **size}
    model = build_group("model", {"_target_": "transformers.GPT2LMHeadModel", "config": config})
    assert isinstance(model, transformers.GPT2LMHeadModel)
    assert model.config.n_embd == 8
    with pytest.raises(ConfigError, match=r"^model\.config: transformers\.GPT2Config refuses"):
        build_group("model", {"_target_": CALLED, "config": {**config, "n_embd": "wide"}})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("distributed.strategy.Single", "runner.core.loop.strategy.Single"),
        ("distributed.ddp.DDP", "runner.training.strategies.ddp.DDP"),
        ("tracking.tracker.NoTracker", "runner.core.record.tracker.NoTracker"),
    ],
)
def test_a_target_that_moved_is_refused_with_its_new_place(old, new):
    with pytest.raises(ConfigError, match=f"It is now {new}: write that in its place"):
        locate(f"runner.{old}")
    locate(new)
