"""What keeps its dtype: what transformers declares to be float32, and what a model froze."""

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from runner.core.base.errors import ConfigError
from runner.precision import precision
from runner.precision.conversion import KEPT_REASON

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
T5 = T5Config(
    d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0
)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES), "model.rotary_emb.inv_freq"),
    "deepseek": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**SIZES, **EXPERTS),
        "model.layers.1.mlp.gate.e_score_correction_bias",
    ),
    "t5": (T5ForConditionalGeneration, T5, "encoder.block.0.layer.1.DenseReluDense.wo.weight"),
}
TOKENS = torch.arange(128).view(2, 64) % 64


class Holder(nn.Module):
    """A model of one's own around one of transformers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **inputs):
        return self.inner(**inputs)


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_own_loading(name, dtype, is_held, tmp_path):
    kind, config, declared = MODELS[name]
    torch.manual_seed(0)
    made = kind(config)
    made.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path, dtype=dtype).eval()
    policy = precision("16-true" if dtype is torch.float16 else "bf16-true")
    model = policy.convert(Holder(made) if is_held else made).eval()
    inner = model.inner if is_held else model
    for ours, theirs in (
        (inner.named_parameters(), loaded.named_parameters()),
        (inner.named_buffers(), loaded.named_buffers()),
    ):
        assert {n: t.dtype for n, t in ours} == {n: t.dtype for n, t in theirs}
    # Of T5, transformers declares float32 where it is loaded in float16 alone.
    stays = name != "t5" or dtype is torch.float16
    assert (declared in str(policy)) == stays
    inputs = {"input_ids": TOKENS} | ({"labels": TOKENS} if name == "t5" else {})
    with torch.no_grad(), policy.session():
        expected = loaded(**inputs).logits
        with policy.forward():
            assert torch.equal(model(**inputs).logits, expected)


def test_a_layer_that_is_declared_float32_is_not_converted():
    policy = precision("transformer-engine-float16", emulate=True)
    model = policy.convert(T5ForConditionalGeneration(T5))
    why = {row.module: row.why for row in policy.report.modules}
    assert why["encoder.block.0.layer.1.DenseReluDense.wo"] == KEPT_REASON
    assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype is torch.float32


def with_teacher(dtype):
    teacher = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)).to(dtype)
    return nn.ModuleDict({"teacher": teacher.requires_grad_(False), "head": nn.Linear(16, 16)})


@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "16-mixed", "64-true", "bnb-nf4"])
def test_a_part_that_the_model_froze_keeps_its_dtype(name):
    policy = precision(name)
    model = policy.convert(with_teacher(torch.bfloat16))
    dtypes = {t.dtype for t in model.teacher.state_dict().values() if t.is_floating_point()}
    assert dtypes == {torch.bfloat16}
    assert "stays in bfloat16, frozen by the model: teacher" in str(policy)


def test_parts_in_float32_and_weights_that_train_are_cast_or_refused_as_before():
    model = precision("bf16-true").convert(with_teacher(torch.float32))
    assert model.teacher[0].weight.dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="holds half ones"):
        precision("bf16-mixed").convert(with_teacher(torch.bfloat16).requires_grad_(True))
