"""Tiny mixtures of experts of transformers' families, and the same with a layer for each expert."""

import copy

import torch
import transformers
from torch import nn

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
SIZES |= {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 16}
LATENT |= {"head_dim": 32, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
# Own keys, and the names of stacked weights that transformers does not declare.
FAMILIES = {
    "Mixtral": ({}, []),
    "Qwen3Moe": ({"moe_intermediate_size": 32}, []),
    "DeepseekV3": ({**LATENT, "moe_intermediate_size": 32, "first_k_dense_replace": 1}, []),
    "GptOss": ({"layer_types": ["full_attention"] * 2}, []),
    "Olmoe": ({}, []),
    "Llama4": ({"intermediate_size_mlp": 64, "num_experts_per_tok": 1}, ["*_proj:in_out"]),
}
IDS = torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(1))


def tiny_mixture(family):
    """Return a causal language model with two layers and four experts in each mixture."""
    keys, _ = FAMILIES[family]
    kind = "Llama4TextConfig" if family == "Llama4" else f"{family}Config"
    config = getattr(transformers, kind)(**{**SIZES, **keys})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def expert_patterns(family):
    """Return what precision.experts is given."""
    return [f"*.experts.{name}" for name in FAMILIES[family][1]]


def unfuse(model):
    """Replace each declared module of experts by one that has an nn.Linear for each matrix."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "has_gate"):
            parent = model.get_submodule(name.rpartition(".")[0])
            parent.experts = UnfusedExperts(module)
    return model


class UnfusedExperts(nn.Module):
    """A loop over experts; each token's outputs are added as transformers' eager loop adds them."""

    def __init__(self, experts):
        super().__init__()
        # In a tuple, so that its parameters are not this module's.
        self.fused = (copy.deepcopy(experts),)
        self.gate_up, self.down = (
            nn.ModuleList(
                linear_of(matrix) for matrix in (stack.mT if experts.is_transposed else stack)
            )
            for stack in (experts.gate_up_proj, experts.down_proj)
        )
        if experts.has_bias:
            self.gate_up_bias = nn.Parameter(experts.gate_up_proj_bias.detach().clone())
            self.down_bias = nn.Parameter(experts.down_proj_bias.detach().clone())

    def forward(self, tokens, index, weights):
        (fused,) = self.fused
        parts = []
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, place = torch.where(index == expert)
            if not len(token):
                continue
            inner = gate_up(tokens[token])
            # As transformers' grouped products are changed in place, in their dtype.
            if fused.has_bias:
                inner = (inner + self.gate_up_bias[expert]).to(inner.dtype)
            output = down(fused._apply_gate(inner))
            if fused.has_bias:
                output = (output + self.down_bias[expert]).to(output.dtype)
            parts.append((token, place, output))
        dtype = torch.result_type(parts[0][2], weights)
        outputs = tokens.new_zeros(*index.shape, tokens.shape[-1], dtype=dtype)
        for token, place, output in parts:
            outputs = outputs.index_put((token, place), output * weights[token, place, None])
        return outputs.sum(1).to(tokens.dtype)


def linear_of(matrix):
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
    layer.weight.data = matrix.detach().clone().contiguous()
    return layer
