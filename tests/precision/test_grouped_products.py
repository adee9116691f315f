"""Mixtures of experts whose weights are one stacked tensor compute as their loops over experts."""

import copy
from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers.integrations.moe
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from runner.precision import precision
from runner.precision.emulation.autocast_kernels import cuda_casts, grouped_casts

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
SIZES |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
DEEPSEEK |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8}
KINDS = {"Mixtral": {}, "Qwen3Moe": {}, "DeepseekV3": DEEPSEEK, "GptOss": {}, "Olmoe": {}}
FLOAT16 = {"loss_scale": {"init_scale": 1.0}, "cpu_float16": "float32_accumulate"}
PRECISIONS = {"bf16-mixed": {}, "16-mixed": FLOAT16}
# Of odd numbers of tokens; in the second all choose the same experts, and none the others.
TEXTS = (torch.arange(11).reshape(1, 11), torch.full((1, 11), 5))

assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


class Mixture(nn.Module):
    """A mixture that calls torch's kernel itself; each token has one of four experts."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 32)
        self.experts = nn.Parameter(torch.randn(4, 32, 32) / 6)
        self.config = SimpleNamespace(_experts_implementation="grouped_mm")
        self.recomputes = False

    def forward(self, ids):
        x = self.words(ids.flatten())
        # Of 11 tokens, expert 0 has none, and expert 2 all but one.
        ends = torch.tensor([0, 1, len(x), len(x)], dtype=torch.int32)
        multiply = getattr(self, self.config._experts_implementation)
        if self.recomputes:
            multiply = partial(checkpoint, multiply, use_reentrant=False)
        return multiply(x, ends).unsqueeze(0)

    def grouped_mm(self, x, ends):
        return torch._grouped_mm(x, self.experts.transpose(1, 2), offs=ends).tanh()

    def eager(self, x, ends):
        parts = x.tensor_split(ends[:-1].tolist())
        return torch.cat([F.linear(*pair) for pair in zip(parts, self.experts, strict=True)]).tanh()


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
    """Return the loss with the gradients of one step, and the dtypes of its grouped products."""
    policy = precision(name, **PRECISIONS[name])
    model = policy.convert(copy.deepcopy(model))
    # Nothing is compiled within the context.
    with policy.session(), GroupedDtypes() if run is None else nullcontext() as products:
        with policy.forward():
            output = model(ids) if run is None else run(model)(ids)
        logits = getattr(output, "logits", output).flatten(0, 1)
        loss = policy.loss(F.cross_entropy, logits, ids.flatten())
        policy.backward(loss)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return (loss.detach(), gradients), products and products.seen


@pytest.mark.parametrize("ids", TEXTS, ids=["all experts", "two experts"])
@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("kind", [*KINDS, "own"])
def test_grouped_products_are_in_half_precision_with_the_numbers_of_a_loop(kind, name, ids):
    model = built(kind)
    half = torch.float16 if name == "16-mixed" else torch.bfloat16
    (loss, gradients), dtypes = trained(model, name, ids)
    assert set(dtypes) == {half}
    model.config._experts_implementation = "eager"
    expected, dtypes = trained(model, name, ids)
    assert not dtypes
    if kind == "own":
        assert_same((loss, gradients), expected)
    # transformers adds up a token's experts in another order, and in float32.
    eps = torch.finfo(half).eps
    assert abs(loss / expected[0] - 1) < eps
    for parameter in (name for name in gradients if "experts" in name):
        gradient = expected[1][parameter]
        assert (gradients[parameter] - gradient).norm() <= 8 * eps * gradient.norm(), parameter


def test_recomputed_and_compiled_experts_have_the_numbers_of_plain_ones():
    model = built("own")
    plain, dtypes = trained(model, "bf16-mixed", TEXTS[0])
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = partial(torch.compile, backend=graphs, fullgraph=True)
    assert_same(trained(model, "bf16-mixed", TEXTS[0], compiled)[0], plain)
    assert graphs.frame_count == 1
    model.recomputes = True
    recomputed, more = trained(model, "bf16-mixed", TEXTS[0])
    assert len(more) == len(dtypes) + 2
    assert_same(recomputed, plain)


@pytest.mark.parametrize("orders", [[0], [0, 1], [1, 0]])
def test_grouped_products_are_cast_while_the_context_is_open_alone(orders):
    x, weights, ends = torch.ones(5, 8), torch.ones(2, 8, 8), torch.tensor([2, 5]).int()
    fallback = torch.ops.transformers.grouped_mm_fallback
    settings = torch.compiler.config
    tag = settings.cache_key_tag  # of compiled code on disk

    def dtypes(kind=torch.float32):
        operands = (x.to(kind), weights.to(kind), ends)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return {torch._grouped_mm(*operands).dtype, fallback(*operands).dtype}

    with ExitStack() as stack:
        for i in orders:
            stack.enter_context((grouped_casts, cuda_casts)[i]())
        assert settings.cache_key_tag != tag
        for kind in (torch.float32, torch.float16, torch.bfloat16):
            assert dtypes(kind) == {torch.bfloat16}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert fallback(x.double(), weights.double(), ends).dtype is torch.float64
            wide = torch._grouped_mm(x, weights, offs=ends, out_dtype=torch.float32)
        assert wide.dtype is torch._grouped_mm(x, weights, offs=ends).dtype is torch.float32
    assert dtypes() == {torch.float32}
    assert settings.cache_key_tag == tag


def test_sizes_that_the_kernel_does_not_take_are_padded():
    x, weights, ends = torch.randn(5, 12), torch.randn(2, 12, 20), torch.tensor([2, 5]).int()
    x.requires_grad_()
    with grouped_casts(), torch.autocast("cpu", dtype=torch.bfloat16):
        output = torch._grouped_mm(x, weights, offs=ends)
        expected = torch.cat([x[:2] @ weights[0], x[2:] @ weights[1]])
    assert_same(output, expected)
    (output * expected.detach()).sum().backward()
    gradient, x.grad = x.grad, None
    (expected * expected.detach()).sum().backward()
    assert_same(gradient, x.grad)
