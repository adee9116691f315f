"""transformers' Conv1D, the transposed linear layer of GPT-2, in every converting precision."""

import copy

import pytest
import torch
from precision_models import CPU, load_precision, run_forward, skip_reasons
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from runner.core.config.schema import RunSpec
from runner.core.loop.step import loss_of, train_step
from runner.core.loop.train_state import TrainState
from runner.core.record import checkpoint_file
from runner.core.record.checkpoint_file import LoadedCheckpoint
from runner.training.adapters import Lora
from runner.training.model import ModelBuilder, restoring_builder
from runner.training.setup import build_scheduled_optimizers
from runner.training.state_dict import checkpoint_state_dict, restore, state_dict
from runner.training.tasks.language import Language

FP8 = (
    "transformer-engine transformer-engine-current transformer-engine-mxfp8 "
    "transformer-engine-nvfp4 float8-tensorwise float8-rowwise torchao-mxfp8"
).split()
PACKED = ("bnb-nf4", "bnb-fp4-dq", "bnb-int8")
ALL = (*FP8, *PACKED, "bnb-int8-training")
# One precision for each way in which weights are stored and restored.
STORED_DIFFERENTLY = ("32-true", "transformer-engine", "float8-rowwise", "bnb-nf4", "bnb-int8")


class TwoLayers(nn.Module):
    """Two layers of either kind."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = kind(64, 96), kind(96, 32)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def conv1d_and_linear():
    """Return two Conv1D layers, and linear layers that compute the same."""
    torch.manual_seed(0)
    conv1d = TwoLayers(lambda into, out: Conv1D(out, into))
    linear = TwoLayers(nn.Linear)
    with torch.no_grad():
        for layer, twin in zip(conv1d.children(), linear.children(), strict=True):
            layer.bias.normal_()
            twin.weight.copy_(layer.weight.t())
            twin.bias.copy_(layer.bias)
    return conv1d, linear


# One layer


@pytest.mark.parametrize("name", ALL)
def test_a_conv1d_computes_what_a_linear_layer_of_its_transposed_weight_does(name):
    precision, (conv1d, linear) = load_precision(name), conv1d_and_linear()
    parameters = dict(conv1d.named_parameters())
    shapes = {key: value.shape for key, value in conv1d.state_dict().items()}
    first = conv1d.first
    _, report = precision.convert(conv1d)
    load_precision(name).convert(linear)
    assert report.weight_counts == (64 * 96 + 96 * 32,) * 2
    assert conv1d.first is first
    assert isinstance(first, Conv1D)
    x = torch.randn(2, 7, 64)
    outputs = [run_forward(precision, model, x) for model in (conv1d, linear)]
    assert torch.equal(*outputs)
    if name not in PACKED:
        assert all(parameters[key] is value for key, value in conv1d.named_parameters())
        assert {key: value.shape for key, value in conv1d.state_dict().items()} == shapes
        check_gradients(conv1d, linear, outputs)
    with torch.no_grad(), precision.eval_context(conv1d), precision.eval_context(linear):
        evaluated = run_forward(precision, conv1d.eval(), x)
        assert torch.equal(evaluated, run_forward(precision, linear.eval(), x))
        assert torch.equal(run_forward(precision, copy.deepcopy(conv1d), x), evaluated)


def check_gradients(conv1d, linear, outputs):
    for output in outputs:
        torch.manual_seed(2)  # of stochastic rounding
        output.float().square().sum().backward()
    for layer, twin in zip(conv1d.children(), linear.children(), strict=True):
        assert torch.equal(layer.weight.grad.t(), twin.weight.grad)
        assert torch.equal(layer.bias.grad, twin.bias.grad)


@pytest.mark.parametrize(
    "name", ["transformer-engine-current", "float8-tensorwise", "torchao-mxfp8"]
)
def test_a_converted_conv1d_compiles(name):
    precision, layer = load_precision(name), Conv1D(64, 32)
    layer, _ = precision.convert(layer)
    x = torch.randn(16, 32)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager")
    assert torch.equal(run_forward(precision, compiled, x), run_forward(precision, layer, x))


def test_a_conv1d_whose_shape_does_not_fit_is_skipped():
    model = nn.Sequential(Conv1D(48, 40), Conv1D(64, 48))
    _, report = load_precision("transformer-engine-current").convert(model)
    assert skip_reasons(report) == {"0": "its shape 40 -> 48 is not in multiples of 16", "1": ""}


def test_a_norm_is_fused_with_the_conv1d_that_takes_its_output():
    plain, x = nn.Sequential(nn.LayerNorm(32), Conv1D(64, 32)), torch.randn(4, 32)
    outputs = []
    for fuse in (False, True):
        precision = load_precision("transformer-engine-current", fuse=fuse)
        model, report = precision.convert(copy.deepcopy(plain))
        outputs.append(run_forward(precision, model, x))
    assert skip_reasons(report) == {"0": "computed in 1", "1": "computes 0 too"}
    assert next(report.lines()).startswith("converted 1 of 1 layers, 2,048 of 2,048 matrix weights")
    assert torch.allclose(*outputs, atol=0.05, rtol=0.05)


# GPT-2, of one block

WIDTH, WORDS, LENGTH = 32, 64, 32
BLOCK = 12 * WIDTH * WIDTH  # c_attn, c_proj, c_fc and c_proj
HEAD, POSITIONS = WORDS * WIDTH, LENGTH * WIDTH


class Net(nn.Module):
    """A GPT-2 that returns its logits."""

    def __init__(self, tie=True):
        super().__init__()
        sizes = {"n_layer": 1, "n_embd": WIDTH, "n_head": 2, "n_positions": LENGTH}
        tokens = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = GPT2Config(**sizes, **tokens, **drops, tie_word_embeddings=tie)
        self.gpt = GPT2LMHeadModel(config)

    def forward(self, tokens):
        return self.gpt(tokens, use_cache=False).logits


def run_spec(adapter=None, tie=True):
    return RunSpec(
        model={"_target_": f"{__name__}.Net", "tie": tie},
        adapter=adapter or {},
        optimizer={"_target_": "torch.optim.AdamW", "lr": 3e-3},
        scheduler={"_target_": None},
    )


def batch(seed=0):
    tokens = torch.randint(WORDS, (4, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def build_state(name, spec, saved=None):
    """Return the state of a new or a resumed training, and the report of its conversion."""
    torch.manual_seed(0 if saved is None else 99)
    precision = load_precision(name)
    built = ModelBuilder(spec, precision, start=saved, restore_exactly=saved is not None).build(CPU)
    optimizers = build_scheduled_optimizers(spec, built.model, precision, steps=9)
    scale = precision.scale(CPU)
    return TrainState(built.model, precision, Language(), scale, optimizers, CPU), built.report


def train(name, spec, folder, steps=3):
    """Return the state after some steps, their losses, and its checkpoint."""
    state, _ = build_state(name, spec)
    losses = losses_of_steps(state, range(steps))
    content = checkpoint_state_dict(state, spec, resume_state=state_dict(state, []))
    path = checkpoint_file.save(folder, content, keep=1)
    return state, losses, LoadedCheckpoint(path, checkpoint_file.load(path))


def losses_of_steps(state, seeds):
    losses = []
    with state.precision.session(state.model, CPU):
        for seed in seeds:
            torch.manual_seed(seed)  # of stochastic rounding
            losses.append(train_step(state, [batch(seed)]).loss.item())
    return losses


def evaluated_loss(model, precision):
    model.eval()
    with torch.no_grad(), precision.session(model, CPU), precision.eval_context(model):
        loss = loss_of(TrainState(model, precision, Language(), None, [], CPU), *batch(7))
    model.train()
    return loss.item()


@pytest.mark.parametrize("name", ["transformer-engine-mxfp8", "float8-rowwise", "bnb-nf4"])
def test_the_count_of_gpt2_is_that_of_its_matrix_weights(name):
    _, report = build_state(name, run_spec())
    total = BLOCK + HEAD + POSITIONS
    # A head that is tied to the embedding is one weight with it, and cannot be packed.
    head = 0 if name in PACKED else HEAD
    assert report.weight_counts == (BLOCK + head, total)
    assert report.layer_counts == (4 + bool(head), 6)
    _, report = build_state(name, run_spec(tie=False))
    assert report.weight_counts == (BLOCK + HEAD, total + HEAD)
    assert report.layer_counts == (5, 7)


def in_e4m3(x):
    scale = 448 / x.float().abs().amax()
    return (x.float() * scale).to(torch.float8_e4m3fn).float() / scale


def in_nf4(weight):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    # In one row: on CPUs the library dequantises rows of other widths than 64's multiples wrongly.
    row = weight.reshape(1, -1)
    codes, state = quantize_4bit(row, blocksize=64, quant_type="nf4")
    return dequantize_4bit(codes, state).view(weight.shape)


def test_the_loss_of_gpt2_in_fp8_is_that_of_rounding_by_hand():
    state, _ = build_state("transformer-engine-current", run_spec())
    torch.manual_seed(0)
    plain = Net().bfloat16()

    def product(layer, x):
        weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
        output = in_e4m3(x) @ in_e4m3(weight).t()
        return (output if layer.bias is None else output + layer.bias.float()).bfloat16()

    for layer in plain.modules():
        if isinstance(layer, Conv1D | nn.Linear):
            layer.forward = lambda x, layer=layer: product(layer, x)
    tokens, targets = batch()
    by_hand = F.cross_entropy(plain(tokens).float().flatten(0, 1), targets.flatten()).item()
    assert losses_of_steps(state, [0])[0] == pytest.approx(by_hand, rel=1e-4)


def test_the_outputs_of_gpt2_in_nf4_are_those_of_rounding_by_hand():
    torch.manual_seed(0)
    plain = Net().eval()
    precision = load_precision("bnb-nf4", compute_dtype="float32")
    model, _ = precision.convert(copy.deepcopy(plain))
    for layer in plain.modules():
        if isinstance(layer, Conv1D):
            layer.weight.data = in_nf4(layer.weight.data.t()).t()
    tokens, _ = batch()
    assert torch.allclose(run_forward(precision, model, tokens), plain(tokens), atol=1e-5)


@pytest.mark.parametrize("name", [*STORED_DIFFERENTLY, "bnb-int8-training"])
def test_a_trained_gpt2_resumes_bit_by_bit_and_evaluates_in_other_precisions(name, tmp_path):
    spec = run_spec()
    state, losses, saved = train(name, spec, tmp_path)
    assert losses[0] == pytest.approx(4.16, abs=0.1)
    other, _ = build_state(name, spec, saved)
    restore(other, saved, spec, [])
    own = evaluated_loss(state.model, state.precision)
    assert evaluated_loss(other.model, other.precision) == own
    assert losses_of_steps(other, [3, 4]) == losses_of_steps(state, [3, 4])
    for precision in map(load_precision, ("32-true", "float8-rowwise", "bnb-nf4")):
        if precision.layout and name in PACKED and precision.name != name:
            continue  # packed weights are not packed a second time
        model = restoring_builder(spec, precision, saved).build(CPU).model
        assert evaluated_loss(model, precision) == pytest.approx(own, rel=0.02)


# Adapters


@pytest.mark.parametrize(
    ("name", "tie"), [*((name, True) for name in STORED_DIFFERENTLY), ("bnb-nf4", False)]
)
def test_lora_of_gpt2_trains_its_additions_and_evaluates_with_them(name, tie, tmp_path):
    spec = run_spec({"_target_": "runner.training.adapters.Lora", "rank": 4}, tie)
    plain, _ = build_state(name, run_spec(tie=tie))
    start, _ = build_state(name, spec)
    plain_loss = evaluated_loss(plain.model, plain.precision)
    assert evaluated_loss(start.model, start.precision) == plain_loss
    state, losses, saved = train(name, spec, tmp_path, steps=6)
    trainable = {key for key, value in state.model.named_parameters() if value.requires_grad}
    layers = 4 if tie else 5
    assert len(trainable) == 2 * layers
    assert all("lora_" in key for key in trainable)
    assert loss_of(state, *batch(0)).item() < losses[0]
    for precision in map(load_precision, ("32-true", "bf16-mixed")):
        model = restoring_builder(spec, precision, saved).build(CPU).model
        additions = [key for key in model.state_dict() if "lora_" in key]
        # Beside weights that were packed they are merged.
        assert len(additions) == (0 if name.startswith("bnb-") else 2 * layers)
        wanted = evaluated_loss(state.model, state.precision)
        assert evaluated_loss(model, precision) == pytest.approx(wanted, rel=0.02)


def test_a_merged_addition_computes_what_it_did_next_to_the_conv1d():
    torch.manual_seed(0)
    model, adapter = Net(), Lora(rank=4)
    adapter.add(model, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    tokens, _ = batch()
    wanted = model(tokens)
    adapter.merge(model)
    assert sum(isinstance(module, Conv1D) for module in model.modules()) == 4
    assert torch.allclose(model(tokens), wanted, atol=1e-5)
