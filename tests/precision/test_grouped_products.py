"""Mixtures of experts whose weights are one stacked tensor compute as their loops over experts."""

import copy
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch
import transformers.integrations.moe
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from runner.precision import precision
from runner.precision.casting import grouped_casts
from runner.precision.emulation.cuda_autocast import cuda_casts

COUNTS = ("hidden_layers", "attention_heads", "key_value_heads", "local_experts", "experts")
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0}
SIZES |= dict(zip((f"num_{name}" for name in COUNTS), (2, 2, 2, 4, 4), strict=True))
SIZES |= {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
DEEPSEEK = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
DEEPSEEK |= dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"), 8)
KINDS = {"Mixtral": {}, "Qwen3Moe": {}, "DeepseekV3": DEEPSEEK, "GptOss": {}, "Olmoe": {}}
FLOAT16 = {"loss_scale": {"init_scale": 1024.0}, "cpu_float16": "float32_accumulate"}
PRECISIONS = {"bf16-mixed": {}, "16-mixed": FLOAT16}
# Of odd numbers of tokens; in the second all choose the same experts, and none the others.
TEXTS = (torch.arange(11).reshape(1, 11), torch.full((1, 11), 5))


class Mixture(nn.Module):
    """A mixture that calls torch's kernel itself; each token has one of four experts."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 32)
        self.experts = nn.Parameter(torch.randn(4, 32, 32) / 6)
        self.is_eager = self.recomputes = False

    def forward(self, ids):
        x = self.words(ids.flatten())
        # Of 11 tokens, expert 0 has none, and expert 2 all but one.
        ends = torch.tensor([0, 1, len(x), len(x)], dtype=torch.int32)
        multiply = self.loop if self.is_eager else self.grouped
        if self.recomputes:
            multiply = partial(checkpoint, multiply, use_reentrant=False)
        return multiply(x, ends).unsqueeze(0)

    def grouped(self, x, ends):
        return torch._grouped_mm(x, self.experts.transpose(1, 2), offs=ends)

    def loop(self, x, ends):
        parts = x.tensor_split(ends[:-1].tolist())
        return torch.cat([F.linear(*pair) for pair in zip(parts, self.experts, strict=True)])


class GroupedDtypes(TorchDispatchMode):
    """A context that notes the dtypes of the operands of each grouped product."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "grouped_mm" in func.name():
            self.seen += [args[0].dtype, args[1].dtype]
        return func(*args, **(kwargs or {}))


def built(name):
    torch.manual_seed(0)
    if name == "own":
        return Mixture()
    config = getattr(transformers, f"{name}Config")(**SIZES, **KINDS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config)


def trained(model, name, ids, run=None):
    """Return the loss and the gradients of one step, and the dtypes of its grouped products."""
    policy = precision(name, **PRECISIONS[name])
    model = policy.convert(copy.deepcopy(model))
    products = GroupedDtypes()
    # Nothing is compiled within it.
    with policy.session(), products if run is None else nullcontext():
        with policy.forward():
            output = model(ids) if run is None else run(model)(ids)
        logits = getattr(output, "logits", output)
        loss = policy.loss(F.cross_entropy, logits.flatten(0, 1), ids.flatten())
        policy.backward(loss)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss, gradients, products.seen


def assert_same(found, expected):
    # Of a float32 parameter, torch holds no gradient in another dtype.
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=0)


@pytest.mark.parametrize("ids", TEXTS, ids=["all experts", "two experts"])
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("kind", [*KINDS, "own"])
def test_grouped_products_are_in_half_precision_with_the_numbers_of_a_loop(kind, name, ids):
    model = built(kind)
    found = trained(model, name, ids)
    assert set(found[2]) == {torch.float16 if name == "16-mixed" else torch.bfloat16}
    if kind == "own":
        model.is_eager = True
    else:
        model.config._experts_implementation = "eager"
    expected = trained(model, name, ids)
    assert not expected[2]
    assert_same(found, expected)


def test_recomputed_and_compiled_experts_have_the_numbers_of_plain_ones():
    model = built("own")
    plain = trained(model, "bf16-mixed", TEXTS[0])
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = partial(torch.compile, backend=graphs, fullgraph=True)
    assert_same(trained(model, "bf16-mixed", TEXTS[0], compiled), plain)
    assert graphs.frame_count == 1
    model.recomputes = True
    recomputed = trained(model, "bf16-mixed", TEXTS[0])
    assert len(recomputed[2]) == len(plain[2]) + 2
    assert_same(recomputed, plain)


@pytest.mark.parametrize("orders", [[0], [0, 1], [1, 0]])
def test_grouped_products_are_cast_while_the_context_is_open_alone(orders):
    x, weights, ends = torch.ones(5, 8), torch.ones(2, 8, 8), torch.tensor([2, 5]).int()
    fallback = torch.ops.transformers.grouped_mm_fallback
    tag = torch.compiler.config.cache_key_tag

    def dtypes(kind=torch.float32):
        operands = (x.to(kind), weights.to(kind), ends)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return {torch._grouped_mm(*operands).dtype, fallback(*operands).dtype}

    with ExitStack() as stack:
        for i in orders:
            stack.enter_context((grouped_casts, cuda_casts)[i]())
        # Compiled code on disk is that of these casts alone.
        assert torch.compiler.config.cache_key_tag != tag
        for kind in (torch.float32, torch.float16, torch.bfloat16):
            assert dtypes(kind) == {torch.bfloat16}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert fallback(x.double(), weights.double(), ends).dtype is torch.float64
            wide = torch._grouped_mm(x, weights, offs=ends, out_dtype=torch.float32)
        assert wide.dtype is torch._grouped_mm(x, weights, offs=ends).dtype is torch.float32
    assert dtypes() == {torch.float32}
    assert torch.compiler.config.cache_key_tag == tag
