"""What every kind of converted linear layer must hold to, whatever its format.

Its state dicts and copies are in test_layer_states.py; what only one kind can do is in the file of
that kind.
"""

import copy
import logging

import pytest
import torch
from layer_kinds import (
    X,
    assert_same_outputs,
    convert,
    every_kind,
    kinds_that_skip_tied_weights,
    kinds_that_take_tied_weights,
    load,
    outputs,
    packed_kinds,
    plain_model,
    tied_model,
    train_step,
)
from precision_models import CPU, count_calls, relative_error, reloaded, run_forward, skip_reasons
from torch import nn
from torch.nn import functional as F

from runner.core.base.errors import ConfigError
from runner.precision.conversion import is_converted

pytest.importorskip("runner.precision.layers.bnb_linear")
pytestmark = pytest.mark.usefixtures("imitated_library")

# The backend that shows whether the kind compiles: FP8's backward is traced, too.
COMPILERS = {
    "4-bit": "eager",
    "int8": "eager",
    "float8 by tensor": "aot_eager",
    "float8 by row": "aot_eager",
    "float8 by block": "aot_eager",
    "packed int4": "eager",
    "packed NVFP4": "eager",
    "rounded to int4": "aot_eager",
    "rounded to int8": "aot_eager",
    "rounded to NVFP4": "aot_eager",
}


class Head(nn.Linear):
    """A user's class with a method of its own."""

    def doubled(self, x):
        return 2 * self(x)


# The module


@every_kind
def test_a_layer_stays_the_same_object_with_its_class_and_the_users_attributes(kind):
    model = plain_model().eval()
    head = model.head = Head(32, 32)
    head.note, references = "mine", [head]
    head.gate = gate = nn.Parameter(torch.ones(1))
    head.register_buffer("mask", torch.ones(1), persistent=False)
    model.body.train()
    precision, model = convert(kind, model)
    assert model.head is references[0]
    assert isinstance(head, Head)
    assert is_converted(head)
    assert (head.in_features, head.out_features, head.note) == (32, 32, "mine")
    assert "in_features=32, out_features=32, bias=True" in repr(head)
    assert (head.gate is gate, head.mask.item()) == (True, 1.0)
    assert "head.mask" not in model.state_dict()
    assert (model.norm.training, model.body.training) == (False, True)
    assert run_forward(precision, model, X).shape == (3, 32)
    assert head.doubled.__func__ is Head.doubled


@every_kind
def test_parameters_keep_names_objects_dtypes_and_frozen_flags(kind):
    model = plain_model()
    model.head.bias.requires_grad_(False)
    before = dict(model.named_parameters())
    precision, model = convert(kind, model)
    after = dict(model.named_parameters())
    packed = ["body.weight", "head.weight"] if precision.freezes else []
    assert list(after) == list(before)
    assert [name for name in before if after[name] is not before[name]] == packed
    frozen = {name for name, parameter in after.items() if not parameter.requires_grad}
    assert frozen == {*packed, "head.bias"}
    assert {after[name].dtype for name in set(after) - set(packed)} == {precision.storage}
    train_step(precision, model)
    trained = {name for name, parameter in after.items() if parameter.grad is not None}
    assert trained == set(after) - frozen
    assert {after[name].grad.dtype for name in trained} == {precision.storage}


@packed_kinds
def test_a_hook_on_a_weight_that_is_packed_is_refused(kind):
    model = plain_model()
    handle = model.head.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigError, match=r"a hook hangs on that of head\. Type precision\.ign"):
        convert(kind, model)
    assert type(model.body) is nn.Linear
    handle.remove()
    assert is_converted(convert(kind, model)[1].head)


@kinds_that_take_tied_weights
def test_a_tied_weight_stays_tied_and_both_layers_train_it(kind):
    model = tied_model()
    weight = model.head.weight
    precision, model = convert(kind, model)
    assert model.head.weight is model.twin.weight is weight
    assert is_converted(model.head)
    assert is_converted(model.twin)
    untied = copy.deepcopy(model)
    untied.twin.weight = nn.Parameter(untied.head.weight.detach().clone())
    for one in (model, untied):
        train_step(precision, one)
    wanted = untied.head.weight.grad.float() + untied.twin.weight.grad.float()
    assert relative_error(weight.grad, wanted) < 2**-7  # the sum is rounded to bfloat16
    assert untied.head.weight.grad.any()
    assert untied.twin.weight.grad.any()


@kinds_that_skip_tied_weights
def test_a_tied_weight_is_not_packed(kind):
    model = tied_model()
    weight = model.head.weight
    _, report = load(kind).convert(model)
    assert model.head.weight is model.twin.weight is weight
    assert skip_reasons(report) == {
        "body": "",
        "head": "shares a parameter with twin",
        "twin": "shares a parameter with head",
    }


@every_kind
def test_a_layer_without_a_bias_that_is_the_model_itself_is_converted_and_restored(kind):
    torch.manual_seed(0)
    models = [nn.Linear(96, 32, bias=False) for _ in range(2)]
    states = []
    for model in models:
        precision, made = convert(kind, model)
        assert made is model
        assert is_converted(model)
        assert model.bias is None
        assert "bias" not in model.state_dict()
        states.append(reloaded(model.state_dict()))
    models[1].load_state_dict(states[0], strict=True)
    assert_same_outputs(outputs(precision, models[0]), outputs(precision, models[1]))


@every_kind
def test_a_module_of_keep_fp32_is_not_converted_and_computes_in_float32(kind):
    model, seen = plain_model(), {}
    precision = load(kind, keep_fp32=["head"])
    _, report = precision.convert(model)
    assert skip_reasons(report)["head"] == "kept in float32 by precision.keep_fp32"
    for name in ("norm", "head"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda *args, name=name: seen.update({name: args[2]}))
    with torch.no_grad():
        run_forward(precision, model, X)
        wanted = F.linear(seen["norm"].float(), model.head.weight, model.head.bias)
    assert model.head.weight.dtype is torch.float32
    assert torch.equal(seen["head"], wanted.to(seen["head"].dtype))


@every_kind
def test_ignored_modules_and_converted_layers_are_not_converted(kind):
    _, model = convert(kind, ignore_modules=["head"])
    assert not is_converted(model.head)
    _, report = load(kind).convert(model)
    whys = skip_reasons(report)
    assert (whys["body"].endswith(" already"), whys["head"]) == (True, "")
    with pytest.raises(ConfigError, match=r"convert nothing.* is an? \w+ already"):
        load(kind).convert(model)


@every_kind
def test_a_refusal_leaves_the_model_as_it_was(kind):
    model = plain_model()
    with pytest.raises(ConfigError, match="zz matches no module"):
        convert(kind, model, keep_fp32=["body"], ignore_modules=["zz"])
    assert [type(module) for module in model] == [nn.Linear, nn.LayerNorm, nn.Linear]


# The products


@every_kind
def test_outputs_and_gradients_are_near_those_of_float32(kind):
    plain = plain_model()
    precision, model = convert(kind, copy.deepcopy(plain))
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    wanted, found = plain(inputs[0]), run_forward(precision, model, inputs[1])
    for output in (wanted, found):
        output.float().square().sum().backward()
    pairs = [(found, wanted), (inputs[1].grad, inputs[0].grad)]
    for name, parameter in plain.named_parameters():
        gradient = model.get_parameter(name).grad
        if gradient is not None:
            pairs.append((gradient, parameter.grad))
    errors = [relative_error(one, other) for one, other in pairs]
    assert max(errors) < 0.4
    assert errors[0] > 1e-3  # it was rounded
    training, evaluation = outputs(precision, model)
    assert relative_error(evaluation, training) < 0.02


@every_kind
def test_a_layer_takes_any_number_of_rows(kind):
    precision, model = convert(kind)
    for shape in ((96,), (0, 96), (1, 96), (2, 0, 96), (2, 3, 96), (17, 96)):
        model.zero_grad()
        x = torch.ones(shape, requires_grad=True)
        for mode in (True, False):
            output = run_forward(precision, model.train(mode), x)
            assert output.shape == (*shape[:-1], 32)
            assert output.isfinite().all(), shape
        output.float().sum().backward()
        assert (x.grad.shape, x.grad.dtype) == (shape, torch.float32)
        rows = output[..., 0].numel()
        assert torch.equal(model.head.bias.grad.float(), torch.full((32,), float(rows))), shape


@every_kind
def test_a_layer_takes_its_input_as_a_keyword(kind):
    precision, model = convert(kind, nn.Linear(96, 32))
    with torch.no_grad(), precision.forward(CPU):
        x = precision.cast(X)
        assert torch.equal(model(input=x), model(x))


@every_kind
def test_an_evaluation_of_an_encoder_layer_calls_the_converted_layers(kind, monkeypatch):
    """nn.TransformerEncoderLayer reads its parts' weights in evaluation if no part has a hook."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True, dropout=0.0)
    x = torch.randn(2, 5, 32)
    wanted = model.eval()(x)
    precision, model = convert(kind, model)
    calls = count_calls(monkeypatch, model.linear1)
    with torch.no_grad():
        found = run_forward(precision, model, x)
    assert calls == [1]
    assert relative_error(found, wanted) < 0.2


READERS = (
    lambda weight: F.linear(X, weight),
    lambda weight: weight.float().square().mean(),
    lambda weight: X @ weight.data.t().to(X.dtype),
    lambda weight: F.embedding(torch.tensor([0]), weight),
)


@packed_kinds
def test_codes_are_read_by_their_layer_alone(kind):
    _, model = convert(kind)
    weight = model.body.weight
    assert (weight.shape, weight.dtype, weight.device) == ((32, 96), torch.float32, CPU)
    assert isinstance(weight, nn.Parameter)
    for read in READERS:
        with pytest.raises(
            ConfigError, match=r"weight of body .*precision.ignore_modules=\[body\]"
        ):
            read(weight)
    assert relative_error(model.body.unpacked_weight(), plain_model().body.weight) < 0.2


@every_kind
def test_a_forward_writes_and_logs_nothing(kind, caplog, capfd):
    precision, model = convert(kind)
    with caplog.at_level(logging.INFO):
        train_step(precision, model)
        outputs(precision, model)
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


# torch 2.11 warns of itself while it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", COMPILERS)
def test_a_compiled_layer_computes_the_same_in_one_graph(kind):
    torch._dynamo.reset()  # its limit of recompilations is for all layers of a process
    torch.manual_seed(0)
    precision, layer = convert(kind, nn.Linear(96, 32))
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend=COMPILERS[kind], fullgraph=True)
    assert torch.equal(train_step(precision, compiled), train_step(precision, twin))
    assert torch.equal(layer.bias.grad, twin.bias.grad)
    assert precision.freezes or torch.equal(layer.weight.grad, twin.weight.grad)
    torch._dynamo.reset()
