"""The first divergence is the planted bug, and rounding alone is no divergence."""

import math
from dataclasses import replace

import pytest
import torch
from compared_models import BUGS, LAYERS, compare, compare_model, execution, half_inside, parts
from torch import nn

from runner.diagnostics.divergence.compare import compare_batch, record_reference
from runner.diagnostics.divergence.divergence_report import describe_divergence
from runner.diagnostics.divergence.findings import first_divergence
from runner.training.tasks.classification import Classification

CASES = [
    pytest.param(kind, bug, precision, id=f"{kind}-{bug.__name__}-{precision}")
    for kind in LAYERS
    for bug, layer in BUGS.items()
    for precision in ("32-true", "bf16-mixed")
    # A batch norm of bfloat16 tensors rounds more than a cast to float16.
    if LAYERS[kind][layer] and (kind, bug, precision) != ("resnet", half_inside, "bf16-mixed")
]


@pytest.mark.parametrize(("kind", "bug", "precision"), CASES)
def test_a_planted_bug_is_named_first(kind, bug, precision):
    found, name = compare(kind, precision, bug)
    first = first_divergence(found.rows)
    assert first is not None
    assert first.row.module == name
    assert first.is_backward == (bug.__name__ == "wrong_gradient")
    sentence = describe_divergence(found, precision, "32-true")
    assert f"`{name}`" in sentence


CLEAN = {
    "32-true": ("gpt", "resnet18", "bert"),
    "64-true": ("gpt", "bert"),
    "bf16-mixed": ("gpt", "resnet18", "bert"),
    "16-mixed": ("gpt", "resnet18", "bert"),
    "bf16-true": ("resnet18",),
    "tf32": ("gpt", "resnet18", "bert"),
    "float8-tensorwise": ("gpt", "bert"),
    "transformer-engine": ("gpt",),
    "transformer-engine-nvfp4": ("gpt",),
    "bnb-nf4": ("gpt", "bert"),
    "bnb-int8-training": ("gpt", "bert"),
    "qat-int4": ("gpt",),
}
"""Without the models whose gradients of norms and embeddings torch adds up in bfloat16 there."""
EMULATED = ("tf32", "float8-tensorwise", "transformer-engine", "transformer-engine-nvfp4")


@pytest.mark.parametrize(
    ("precision", "kind"), [(name, kind) for name, kinds in CLEAN.items() for kind in kinds]
)
def test_rounding_alone_is_no_divergence(kind, precision):
    changes = {"emulate": True} if precision in EMULATED else {}
    found, _ = compare(kind, precision, **changes)
    assert first_divergence(found.rows) is None
    sentence = describe_divergence(found, precision, "32-true")
    assert ("agree in every bit" in sentence) == (precision == "32-true")


def test_a_finite_reference_finds_what_overflows():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.head = nn.Linear(8, 10)

        def forward(self, x):
            return self.head(torch.softmax(self.first(x.flatten(1)[:, :8]) * 1e6, -1))

    _, batch, task = parts("resnet")
    found = compare_model(Large(), batch, task, "16-true")
    first = first_divergence(found.rows)
    assert first.row.module == "(model)"
    sentence = describe_divergence(found, "16-true", "32-true")
    assert "parts from 32-true in `(model)`" in sentence
    assert "first in its mul()" in sentence


def test_gradients_below_float16s_normal_numbers_are_said_to_be():
    """Without a loss scale, as in 16-true, they keep few digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64))
    model[1].weight.data.mul_(0.1)
    batch = (torch.randn(4096, 8), torch.randint(64, (4096,)))
    found = compare_model(model, batch, Classification(), "16-true")
    first = first_divergence(found.rows)
    assert first.is_backward
    found_error = first.added.found
    assert found_error.subnormal == found_error.elements > found_error.flushed > 0
    sentence = describe_divergence(found, "16-true", "32-true")
    assert "(100 % of the elements are below the normal numbers of float16, 0.46 %" in sentence


class Kinked(nn.Module):
    """Elements of the ReLU's input that are near 0 have another sign where it is rounded."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.first(x)
        return self.head(torch.relu(x + self.second(x)).mean((2, 3)))


@pytest.mark.parametrize("seed", [1, 2, 9])
def test_another_sign_at_a_kink_is_no_divergence(seed):
    """With these seeds no element has another sign in the first perturbation."""
    _, batch, task = parts("resnet")
    torch.manual_seed(seed)
    found = compare_model(Kinked(), batch, task, "16-mixed")
    assert first_divergence(found.rows) is None


@pytest.mark.parametrize("kind", ["resnet", "bert"])
def test_the_model_is_left_as_it_was(kind):
    """Parameters, tied ones too, buffers, gradients and forwards."""
    _, batch, _ = parts(kind)
    reference, _ = execution(kind, "32-true")
    other, _ = execution(kind, "bf16-mixed")
    model = other.state.plain_model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    compare_batch(reference, other, (batch, batch), [torch.get_rng_state()])
    for executed in (reference, other):
        after = executed.state.plain_model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_reference_holds_the_gradients_of_an_ordinary_backward():
    _, batch, task = parts("gpt")
    reference, _ = execution("gpt", "32-true")
    states = [torch.get_rng_state()]
    recorded = record_reference(reference, batch, states)
    model = reference.state.plain_model.train()
    torch.set_rng_state(states[0])
    loss = task.loss(model(batch[0]), batch[1])
    loss.backward()
    assert recorded.loss == loss.item()
    for name, parameter in model.named_parameters():
        assert torch.equal(recorded.parameter_gradients[name], parameter.grad)


def test_expected_errors_are_near_what_rounding_does():
    """Neither so large that bugs hide, nor so small that rounding is taken for one."""
    found, _ = compare("gpt", "bf16-mixed")
    ratios = [row.added.ratio for row in found.rows if row.kind == "Linear"]
    assert len(ratios) == 9
    assert all(0.5 < ratio < 1.5 for ratio in ratios)


def test_units_of_an_error():
    found, _ = compare("gpt", "bf16-mixed")
    added = next(row.added for row in found.rows if row.module == "blocks.0.expand")
    assert added.dtype == "bfloat16"
    assert added.ulps == pytest.approx(added.found.relative * 128)
    assert added.found.sqnr_db == pytest.approx(-20 * math.log10(added.found.relative))


def test_a_gradient_that_is_cut_off_is_one_of_zero():
    reference, _ = execution("gpt", "32-true")
    other, _ = execution("gpt", "32-true")
    layer = other.state.plain_model.get_submodule("blocks.1.expand")
    plain = layer.forward
    layer.forward = lambda x: plain(x.detach())
    _, batch, _ = parts("gpt")
    found = compare_batch(reference, other, (batch, batch), [torch.get_rng_state()])
    first = first_divergence(found.rows)
    assert (first.row.module, first.is_backward) == ("blocks.1.expand", True)
    assert first.added.found.relative == pytest.approx(1)
    assert not found.is_exact


def test_another_shape_is_a_divergence():
    reference, _ = execution("gpt", "32-true")
    other, _ = execution("gpt", "32-true")
    layer = other.state.plain_model.get_submodule("blocks.1.norm2")
    plain = layer.forward
    layer.forward = lambda x: plain(x)[:, :1]
    _, batch, _ = parts("gpt")
    found = compare_batch(reference, other, (batch, batch), [torch.get_rng_state()])
    sentence = describe_divergence(found, "one", "other")
    assert sentence.startswith(
        "one parts from other in `blocks.1.norm2`: its output has another shape"
    )


def test_what_one_execution_passes_on_and_the_other_changes_is_compared():
    reference, _ = execution("gpt", "32-true")
    other, _ = execution("gpt", "32-true")
    model = other.state.plain_model
    plain = model.forward
    model.forward = lambda x: plain(x) * 1.5
    _, batch, _ = parts("gpt")
    found = compare_batch(reference, other, (batch, batch), [torch.get_rng_state()])
    assert first_divergence(found.rows).row.module == "(model)"
    assert found.output_error == pytest.approx(0.5)


def test_a_loss_scale_that_overflows_is_settled_in_both_executions():
    for against, precision in (("32-true", "16-mixed"), ("16-mixed", "32-true")):
        made = []
        for name in (against, precision):
            one, _ = execution("gpt", name)
            made.append(replace(one, scale=2.0**40) if name == "16-mixed" else one)
        _, batch, _ = parts("gpt")
        found = compare_batch(*made, (batch, batch), [torch.get_rng_state()])
        assert first_divergence(found.rows) is None
        assert 0 < found.gradient_error < 0.01
