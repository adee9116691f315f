"""What is known of where a model's weights come from: nothing is claimed that is not known."""

from types import SimpleNamespace

import pytest
import timm
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from runner.core.config.schema import InitSpec, RunSpec
from runner.core.config.targets import instantiate
from runner.modes.startup import print_trainable
from runner.precision import registry
from runner.training.model import starts_random
from runner.training.pretrained_folder import write_pretrained

SMALL = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}


def test_a_model_that_from_pretrained_loaded_is_not_called_random(tmp_path):
    saved = GPT2LMHeadModel(GPT2Config(**SMALL, bos_token_id=0, eos_token_id=0))
    saved.save_pretrained(tmp_path)
    target = "transformers.GPT2LMHeadModel.from_pretrained"
    node = {"_target_": target, "pretrained_model_name_or_path": str(tmp_path)}
    assert torch.equal(instantiate(node).lm_head.weight, saved.lm_head.weight)
    assert not starts_random(node)


def test_timms_checkpoint_is_not_called_random(tmp_path):
    name, path = "test_resnet", tmp_path / "weights.pt"
    saved = timm.create_model(name)
    torch.save(saved.state_dict(), path)
    node = {"_target_": "timm.create_model", "model_name": name}
    assert starts_random(node)
    assert starts_random({**node, "pretrained": False, "checkpoint_path": ""})
    assert starts_random({**node, "pretrained_window_sizes": [8, 8]})
    loading = {**node, "checkpoint_path": str(path)}
    assert torch.equal(instantiate(loading).conv1[0].weight, saved.conv1[0].weight)
    assert not starts_random(loading)
    assert not starts_random({**node, "pretrained": True})


def test_torchvisions_weights_are_not_called_random():
    resnet = {"_target_": "torchvision.models.resnet18"}
    assert starts_random({**resnet, "weights": None})
    assert not starts_random({**resnet, "weights": "DEFAULT"})
    found = {"_target_": "torchvision.models.detection.fasterrcnn_resnet50_fpn"}
    assert not starts_random(found)  # it loads its backbone by default
    assert starts_random({**found, "weights_backbone": None})


def test_a_link_out_of_a_tokenizers_folder_is_not_copied(tmp_path):
    """A file of Hugging Face's cache is a link into blobs/; one to a file elsewhere is none."""
    model = GPT2LMHeadModel(GPT2Config(**SMALL, bos_token_id=0, eos_token_id=0))
    (tmp_path / "secret").write_text("secret")
    for name in ("models--a/blobs", "models--a/snapshots/1", "theirs/snapshots/1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models--a/blobs/0").write_text("a b")
    cached = tmp_path / "models--a/snapshots/1"
    (cached / "merges.txt").symlink_to("../../blobs/0")
    theirs = tmp_path / "theirs/snapshots/1"
    (theirs / "vocab.txt").symlink_to(tmp_path / "secret")
    # A folder in the place of the cache's own leads out, too.
    (theirs.parents[1] / "blobs").symlink_to(tmp_path)
    (theirs / "chat_template.jinja").symlink_to("../../blobs/secret")
    (theirs / "tokenizer.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/merges.txt").symlink_to(tmp_path / "secret")
    said = write_pretrained(model, model.state_dict(), tmp_path / "run", {}, [cached, theirs])
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names.isdisjoint({"vocab.txt", "chat_template.jinja"})
    assert (tmp_path / "run/merges.txt").read_text() == "a b"
    assert (tmp_path / "run/tokenizer.json").read_text() == "{}"
    assert (tmp_path / "secret").read_text() == "secret"
    assert f"without {theirs / 'vocab.txt'}, a link to {tmp_path / 'secret'}" in said


def own_network():
    return torch.nn.Linear(4, 4)


def test_models_of_the_runner_are_random_and_of_ones_own_nothing_is_claimed():
    assert starts_random({"_target_": "runner.models.mlp.MLP"})
    assert not starts_random({"_target_": f"{__name__}.own_network"})


CASES = {
    "a model of the runner": ("runner.models.mlp.MLP", None, True),
    "it starts from a checkpoint": ("runner.models.mlp.MLP", "outputs/runs/1", False),
    "one's own": (f"{__name__}.own_network", None, False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "adapter", [{}, {"_target_": "runner.training.adapters.Lora"}], ids=["bare", "lora"]
)
def test_the_run_says_that_weights_are_random_only_where_they_are(case, adapter):
    target, weights, random = CASES[case]
    lines: list[str] = []
    spec = RunSpec(model={"_target_": target}, adapter=adapter, init=InitSpec(weights=weights))
    precision = registry.load_precision("bnb-nf4")
    this = SimpleNamespace(spec=spec, precision=precision, say=lines.append)
    print_trainable(this, 1, 2, {})  # type: ignore
    if adapter:
        assert ("the frozen weights are random ones" in lines[-1]) == random
    else:
        assert ("adapter=lora init.weights=<checkpoint>" in lines[-1]) == random
        assert "Type adapter=lora" in lines[-1]
