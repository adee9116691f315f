"""Language models with a fault that one side of a mismatch has: model.fault=<name>."""

import functools

import torch
from torch import nn

from runner.models.gpt import GPT
from runner.models.huggingface import huggingface
from runner.models.mixture import Mixture

SIZES = {"vocab_size": 256, "max_position_embeddings": 64}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    **SIZES,
}
QWEN_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256}


def bfloat16(tensor):
    """Return a tensor rounded to bfloat16, in its own dtype."""
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def net(kind, fault=None):
    """Return a model: llama, moe, gpt2, gpt or mixture, with weights large enough to matter."""
    if kind in ("gpt", "mixture"):
        model = {"gpt": GPT, "mixture": Mixture}[kind](256, 64, layers=2, width=32)
    else:
        configs = {"llama": LLAMA, "moe": QWEN_MOE, "gpt2": GPT2}
        model = huggingface("causal_lm", config=configs[kind])
    with torch.no_grad():
        for parameter in {*model.parameters()}:
            if parameter.ndim > 1:
                parameter.mul_(3)
    if fault:
        FAULTS[fault](model)
    return model


def wrap(model, names, change):
    """Have modules whose last names are given compute change(forward, *args)."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in names:
            module.forward = functools.partial(change, module.forward)


def _rounded(forward, *args, **kwargs):
    output = forward(*args, **kwargs)
    if isinstance(output, torch.Tensor):
        return bfloat16(output)
    return tuple(bfloat16(t) if t.is_floating_point() else t for t in output)


def _rounds_input(forward, hidden):
    return forward(bfloat16(hidden))


def _larger_eps(model):
    for module in model.modules():
        for key in ("eps", "variance_epsilon"):
            if hasattr(module, key):
                setattr(module, key, 100 * getattr(module, key))


def _narrow_cache(model):
    forward = model.forward

    @functools.wraps(forward)
    def run(*args, cache=None, **kwargs):
        for layer in cache.layers if cache is not None else ():
            layer.keys, layer.values = bfloat16(layer.keys), bfloat16(layer.values)
        return forward(*args, cache=cache, **kwargs)

    model.forward = run


def _doubled_scale(model):
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling *= 1.01


FAULTS = {
    "rotary table in bfloat16": lambda model: wrap(model, ["rotary_emb"], _rounded),
    "positions in bfloat16": lambda model: wrap(model, ["position_embedding"], _rounded),
    "head in bfloat16": lambda model: wrap(model, ["lm_head", "head"], _rounded),
    "eps of the norms": _larger_eps,
    "router in bfloat16": lambda model: wrap(model, ["gate", "router"], _rounds_input),
    "a cast too many": lambda model: wrap(model, ["1"], _rounded),
    "cache in bfloat16": _narrow_cache,
    "scale of the attention": _doubled_scale,
}


class Batches(nn.Module):
    """A classifier of images of 8 x 8 pixels that fails for a batch of one."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        if len(images) == 1:
            raise RuntimeError("this model takes no batch of one")
        return self.head(images.flatten(1))
