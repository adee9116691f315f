"""transformers' Conv1D, the transposed linear layer of GPT-2, in every converting precision."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from runner.checkpoint import checkpoint_file
from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.config.schema import RunSpec
from runner.precision import registry
from runner.precision.layers.exportable import exportable_copy
from runner.training.adapters import Lora
from runner.training.model import build_model, restore_model
from runner.training.optimizers import build_scheduled_optimizers
from runner.training.state import TrainState
from runner.training.state_dict import checkpoint_state_dict, restore, state_dict
from runner.training.step import loss_of, train_step
from runner.training.tasks.language import Language

CPU = torch.device("cpu")
FP8 = (
    "transformer-engine",
    "transformer-engine-current",
    "transformer-engine-mxfp8",
    "transformer-engine-nvfp4",
    "float8-tensorwise",
    "float8-rowwise",
)
PACKED = ("bnb-nf4", "bnb-fp4-dq", "bnb-int8")
ALL = (*FP8, *PACKED, "bnb-int8-training")
LORA = {"_target_": "runner.training.adapters.Lora", "rank": 4}


def load(name, **changes):
    emulate = {"emulate": True} if name in FP8 else {}
    return registry.load_precision(name, **emulate, **changes)


class Pair(nn.Module):
    """Two layers of either kind."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = kind(64, 96), kind(96, 32)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def pair():
    """Two Conv1D layers, and linear layers that compute the same."""
    torch.manual_seed(0)
    ours, linear = Pair(lambda into, out: Conv1D(out, into)), Pair(nn.Linear)
    with torch.no_grad():
        for layer, twin in zip(ours.children(), linear.children(), strict=True):
            layer.bias.normal_()
            twin.weight.copy_(layer.weight.t())
            twin.bias.copy_(layer.bias)
    return ours, linear


def run(precision, model, x):
    torch.manual_seed(1)  # of stochastic rounding
    with precision.session(model, CPU), precision.forward(CPU):
        return model(precision.cast(x))


# One layer


@pytest.mark.parametrize("name", ALL)
def test_a_conv1d_computes_what_a_linear_layer_of_its_transposed_weight_does(name):
    ours, linear = pair()
    x = torch.randn(2, 7, 64)
    parameters, shapes = (
        dict(ours.named_parameters()),
        {key: value.shape for key, value in ours.state_dict().items()},
    )
    first = ours.first
    report = load(name).convert(ours)[1]
    load(name).convert(linear)
    assert str(report) == "2/2"
    assert report.weight_counts == (64 * 96 + 96 * 32,) * 2
    assert ours.first is first
    assert isinstance(first, Conv1D)
    precision = load(name)
    outputs = [run(precision, model, x) for model in (ours, linear)]
    assert outputs[0].shape == (2, 7, 32)
    assert torch.equal(*outputs)
    if name not in PACKED:
        assert all(parameters[key] is value for key, value in ours.named_parameters())
        assert {key: value.shape for key, value in ours.state_dict().items()} == shapes
        for output in outputs:
            torch.manual_seed(2)
            output.float().square().sum().backward()
        for layer, twin in zip(ours.children(), linear.children(), strict=True):
            assert torch.equal(layer.weight.grad.t(), twin.weight.grad)
            assert torch.equal(layer.bias.grad, twin.bias.grad)
    with torch.no_grad(), precision.eval_context(ours), precision.eval_context(linear):
        assert torch.equal(run(precision, ours.eval(), x), run(precision, linear.eval(), x))
        assert torch.equal(run(precision, copy.deepcopy(ours), x), run(precision, ours, x))


@pytest.mark.parametrize("name", ["float8-rowwise", "bnb-nf4", "bnb-int8", "bnb-int8-training"])
def test_a_conv1d_is_exported_as_plain_operations(name):
    precision, (model, _) = load(name), pair()
    model = precision.convert(model)[0].eval()
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert torch.allclose(run(precision, exportable_copy(model), x), run(precision, model, x))


@pytest.mark.parametrize("name", ["transformer-engine-current", "float8-tensorwise"])
def test_a_converted_conv1d_compiles(name):
    precision, (model, _) = load(name), pair()
    model = precision.convert(model)[0]
    x = torch.randn(16, 64)
    found = run(precision, torch.compile(copy.deepcopy(model), backend="aot_eager"), x)
    assert torch.equal(found, run(precision, model, x))


def test_a_conv1d_whose_shape_does_not_fit_is_skipped():
    model = nn.Sequential(Conv1D(48, 40), Conv1D(64, 48))
    _, report = load("transformer-engine-current").convert(model)
    assert [(row.done, row.why) for row in report.modules] == [
        (False, "its shape 40 -> 48 is not in multiples of 16"),
        (True, ""),
    ]


def test_a_norm_is_fused_with_the_conv1d_that_takes_its_output():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(32), Conv1D(64, 32)

        def forward(self, x):
            return self.layer(self.norm(x))

    block, x = Block(), torch.randn(4, 32)
    whole, apart = (load("transformer-engine-current", fuse=fuse) for fuse in (True, False))
    fused, report = whole.convert(copy.deepcopy(block))
    assert {row.module: row.why for row in report.modules} == {
        "norm": "computed in layer",
        "layer": "computes norm too",
    }
    assert next(report.lines()).startswith("converted 1 of 1 layers, 2,048 of 2,048 matrix weights")
    plain, _ = apart.convert(block)
    assert torch.allclose(run(whole, fused, x), run(apart, plain, x), atol=0.05, rtol=0.05)


# GPT-2


class Net(nn.Module):
    """A GPT-2 that returns its logits."""

    def __init__(self, tie=True):
        super().__init__()
        self.gpt = GPT2LMHeadModel(
            GPT2Config(
                n_layer=2,
                n_embd=64,
                n_head=2,
                vocab_size=64,
                n_positions=32,
                bos_token_id=0,
                eos_token_id=0,
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
                tie_word_embeddings=tie,
            )
        )

    def forward(self, tokens):
        return self.gpt(tokens, use_cache=False).logits


BLOCKS = 2 * 12 * 64 * 64  # c_attn, c_proj, c_fc and c_proj of each
HEAD, POSITIONS = 64 * 64, 32 * 64


def spec(node=None, tie=True):
    return RunSpec(
        model={"_target_": f"{__name__}.Net", "tie": tie},
        adapter=node or {},
        optimizer={"_target_": "torch.optim.AdamW", "lr": 1e-3},
        scheduler={"_target_": None},
    )


def batch(seed=0):
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def state_of(precision, model, spec):
    driven = build_scheduled_optimizers(spec, model, precision, steps=9)
    return TrainState(model, precision, Language(), precision.scale(CPU), driven, CPU)


def made(name, spec, saved=None):
    torch.manual_seed(0 if saved is None else 99)
    precision = load(name)
    built = build_model(spec, precision, CPU, start=saved, restore_exactly=saved is not None)
    return state_of(precision, built.model, spec), built.report


def trained(name, spec, folder, steps=3):
    """Return a state after some steps, their losses, and its checkpoint."""
    state, _ = made(name, spec)
    losses = steps_of(state, range(steps))
    content = checkpoint_state_dict(state, spec, resume_state=state_dict(state, []))
    path = checkpoint_file.save(folder, content, keep=1)
    return state, losses, LoadedCheckpoint(path, checkpoint_file.load(path))


def steps_of(state, seeds):
    losses = []
    with state.precision.session(state.model, CPU):
        for seed in seeds:
            torch.manual_seed(seed)  # of stochastic rounding
            losses.append(train_step(state, [batch(seed)]).loss.item())
    return losses


def evaluated(model, precision):
    model.eval()
    with torch.no_grad(), precision.session(model, CPU), precision.eval_context(model):
        loss = loss_of(TrainState(model, precision, Language(), None, [], CPU), *batch(7))
    model.train()
    return loss.item()


@pytest.mark.parametrize("name", ALL)
def test_the_count_of_gpt2_is_that_of_its_matrix_weights(name):
    _, report = made(name, spec())
    every = BLOCKS + HEAD + POSITIONS
    # A head that is tied to the embedding is one weight with it, and cannot be packed.
    head = 0 if name in PACKED else HEAD
    assert report.weight_counts == (BLOCKS + head, every)
    assert report.layer_counts == (8 + bool(head), 10)
    _, report = made(name, spec(tie=False))
    assert report.weight_counts == (BLOCKS + HEAD, every + HEAD)
    assert report.layer_counts == (9, 11)


def e4m3(x):
    scale = 448 / x.float().abs().amax()
    return (x.float() * scale).to(torch.float8_e4m3fn).float() / scale


def nf4(weight):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(weight.contiguous(), blocksize=64, quant_type="nf4")
    return dequantize_4bit(codes, state)


def test_the_loss_of_gpt2_in_fp8_is_that_of_rounding_by_hand():
    state, _ = made("transformer-engine-current", spec())
    torch.manual_seed(0)
    plain = Net().bfloat16()

    def product(layer, x):
        weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
        output = e4m3(x) @ e4m3(weight).t()
        return (output if layer.bias is None else output + layer.bias.float()).bfloat16()

    for layer in plain.modules():
        if isinstance(layer, Conv1D | nn.Linear):
            layer.forward = lambda x, layer=layer: product(layer, x)
    tokens, targets = batch()
    by_hand = F.cross_entropy(plain(tokens).float().flatten(0, 1), targets.flatten()).item()
    assert steps_of(state, [0])[0] == pytest.approx(by_hand, rel=1e-4)


def test_the_loss_of_gpt2_in_nf4_is_that_of_rounding_by_hand():
    state, _ = made("bnb-nf4", spec())
    torch.manual_seed(0)
    plain = Net()
    for layer in plain.modules():
        if isinstance(layer, Conv1D):
            layer.weight.data = nf4(layer.weight.data.t()).t()
    tokens, targets = batch()
    with torch.autocast("cpu", torch.bfloat16):
        logits = plain(tokens).float()
    by_hand = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert steps_of(state, [0])[0] == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.parametrize("name", ["32-true", *ALL])
def test_a_trained_gpt2_resumes_bit_by_bit_and_evaluates_in_every_precision(name, tmp_path):
    run = spec()
    state, losses, saved = trained(name, run, tmp_path)
    assert losses[0] == pytest.approx(4.16, abs=0.1)
    other, _ = made(name, run, saved)
    restore(other, saved, run, [])
    own = evaluated(state.model, state.precision)
    assert evaluated(other.model, other.precision) == own
    assert steps_of(other, [3, 4]) == steps_of(state, [3, 4])
    for precision in map(load, ("32-true", "bf16-mixed", "float8-rowwise", "bnb-nf4")):
        if precision.layout and name in PACKED and precision.name != name:
            continue  # packed weights are not packed a second time
        model = restore_model(run, precision, CPU, saved).model
        assert evaluated(model, precision) == pytest.approx(own, rel=0.02)


# Adapters


@pytest.mark.parametrize(
    "name", ["32-true", "bf16-true", "transformer-engine-current", "float8-rowwise", *PACKED]
)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_lora_of_gpt2_trains_its_additions_and_evaluates_with_them(name, tie, tmp_path):
    run = spec(LORA, tie)
    plain, _ = made(name, spec(tie=tie))
    start, _ = made(name, run)
    assert evaluated(start.model, start.precision) == evaluated(plain.model, plain.precision)
    state, losses, saved = trained(name, run, tmp_path, steps=20)
    names = {key for key, value in state.model.named_parameters() if value.requires_grad}
    layers = 8 if tie else 9
    assert len(names) == 2 * layers
    assert all("lora_" in key for key in names)
    again = loss_of(state, *batch(0)).item()
    assert again < losses[0]
    for other in ("32-true", "bf16-mixed"):
        precision = load(other)
        model = restore_model(run, precision, CPU, saved).model
        additions = [key for key in model.state_dict() if "lora_" in key]
        assert len(additions) == (0 if name.startswith("bnb-") else 2 * layers)  # else merged
        found = evaluated(model, precision)
        assert found == pytest.approx(evaluated(state.model, state.precision), rel=0.02)


def test_a_merged_addition_computes_what_it_did_next_to_the_conv1d():
    torch.manual_seed(0)
    model = Net()
    adapter = Lora(rank=4)
    adapter.add(model, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    tokens, _ = batch()
    wanted = model(tokens)
    adapter.merge(model)
    assert sum(isinstance(module, Conv1D) for module in model.modules()) == 8
    assert torch.allclose(model(tokens), wanted, atol=1e-5)
