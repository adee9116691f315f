"""model=hf: which configs and folders it takes, and what it never loads or runs."""

import shutil

import pytest
import torch
from tiny_configs import tiny_settings

from runner.models.huggingface import huggingface
from runner.training.model import starts_random

GPT2, BERT, T5 = (tiny_settings(kind) for kind in ("gpt2", "bert", "t5"))
QWEN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "vocab_size": 20,
    "hidden_size": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pretrained classifier of two classes."""
    path = tmp_path_factory.mktemp("pretrained")
    huggingface("sequence_classification", config=BERT, classes=2).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        ("causal_lm", BERT, "bert sees all. Type +model.config.is_decoder=true"),
        ("causal_lm", {**GPT2, "n_layers": 2}, "config.n_layers is no key of GPT2Config. Close"),
        ("causal_lm", {**QWEN, "head_dimm": 16}, "config.head_dimm is no key"),
        ("causal_lm", {**GPT2, "device_map": "meta"}, "config.device_map is no key"),
        ("causal_lm", {**GPT2, "attn_implementation": "a/kernel"}, "names code from elsewhere"),
        ("causal_lm", {**GPT2, "x": {"attn_implementation": "a/b"}}, "names code from elsewhere"),
        ("causal_lm", {**GPT2, "activation_function": "nope"}, "KeyError: 'nope'"),
        ("causal_lm", {**GPT2, "n_head": 0}, "ZeroDivisionError"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(kind, config, said):
    with pytest.raises(ValueError) as refused:
        huggingface(kind, config=config)
    assert said in str(refused.value)


def test_a_key_that_the_models_read_without_declaring_it_is_taken():
    model = huggingface("causal_lm", config={**QWEN, "head_dim": 6})
    assert model.model.layers[0].self_attn.q_proj.out_features == 2 * 6


def test_a_decoder_of_an_encoder_s_kind_does_not_see_the_next_token():
    model = huggingface("causal_lm", config={**BERT, "is_decoder": True}).eval()
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, -1] = 9
    with torch.no_grad():
        assert torch.equal(model(tokens).logits[:, :-1], model(changed).logits[:, :-1])


@pytest.mark.parametrize(
    ("kind", "config"), [("causal_lm", GPT2), ("seq2seq_lm", T5)], ids=["gpt2", "t5"]
)
def test_keys_and_values_are_kept_only_where_that_was_typed(kind, config):
    assert huggingface(kind, config=config).config.use_cache is False
    assert huggingface(kind, config={**config, "use_cache": True}).config.use_cache is True


def test_a_file_of_another_version_may_have_further_keys(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("".join(f"{key}: {value}\n" for key, value in GPT2.items()) + "old: 1\n")
    assert huggingface("causal_lm", config=str(file)).config.n_embd == 32
    file.write_text("a: [1")
    with pytest.raises(ValueError, match=r"config.yaml cannot be read: while parsing"):
        huggingface("causal_lm", config=str(file))


def test_a_head_for_other_classes_starts_with_random_weights(folder):
    ours = huggingface("sequence_classification", path=str(folder))
    other = huggingface("sequence_classification", path=str(folder), classes=5)
    assert ours.classifier.out_features == 2
    assert other.classifier.out_features == 5
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(ours.state_dict()[name], other.state_dict()[name])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"config": {"hidden_size": 64}}, "has weights of other sizes than the model's config"),
        ({"config": {"num_hidden_layers": 3}}, "lacks weights that the model's config asks for"),
        ({"config": {"hidden_sise": 32}}, "Close matches: hidden_size"),
        ({"classes": 0}, "classes=0 is no number of logits. Allowed: 1 and up"),
        ({"classes": 3, "config": {"hidden_size": 64}}, "has weights of other sizes"),
    ],
)
def test_pretrained_weights_are_never_dropped_silently(folder, settings, said):
    with pytest.raises(ValueError) as refused:
        huggingface("sequence_classification", path=str(folder), **settings)
    assert said in str(refused.value)


def test_a_classifier_is_tuned_from_a_model_of_masked_tokens(tmp_path):
    masked = huggingface("masked_lm", config=BERT)
    masked.save_pretrained(tmp_path)
    model = huggingface("sequence_classification", path=str(tmp_path), classes=3)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(model.state_dict()[name], masked.state_dict()[name])


def test_a_damaged_file_of_weights_is_one_message(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="damaged cannot be loaded: "):
        huggingface("sequence_classification", path=str(tmp_path / "damaged"))


def test_a_path_leaves_no_package(folder):
    """Only what somebody installed may have a pickle."""
    path = f"package://torch/{'../' * 12}{str(folder)[1:]}"
    with pytest.raises(ValueError, match="is not among the installed packages"):
        huggingface("sequence_classification", path=path)


def test_weights_of_a_folder_are_not_random():
    node = {"_target_": "runner.models.huggingface.huggingface", "kind": "causal_lm"}
    assert starts_random({**node, "config": GPT2})
    assert not starts_random({**node, "path": "pretrained"})
