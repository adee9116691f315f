"""The first divergence is the planted bug, and rounding alone is no divergence."""

import math
from dataclasses import replace

import pytest
import torch
from compared_models import (
    BUGS,
    LAYERS,
    compare,
    execution,
    extended,
    half_inside,
    parts,
    planted,
    replace_forward,
    sentence,
    wrong_gradient,
)
from one_off_nets import net
from torch import nn

from runner.diagnostics.divergence.compare import compare_batch, record_reference
from runner.diagnostics.divergence.divergence_report import DivergenceReport, write_page
from runner.diagnostics.divergence.findings import KNOWN_SUM, first_divergence
from runner.training.tasks.classification import Classification

EVERY_BUG_ONCE = {
    *(("resnet", "half_inside", "32-true"), ("gpt", "half_sums", "bf16-mixed")),
    *(("gpt", "scale_off", "bf16-mixed"), ("bert", "permuted", "32-true")),
    *(("gpt", "other_dropout", "bf16-mixed"), ("bert", "wrong_gradient", "32-true")),
}
CASES = [
    (kind, bug, precision)
    for kind, layers in LAYERS.items()
    for bug, layer in BUGS.items()
    for precision in ("32-true", "bf16-mixed")
    # A batch norm of bfloat16 tensors rounds more than a cast to float16.
    if layers[layer] and (kind, bug, precision) != ("resnet", half_inside, "bf16-mixed")
]


def each_once(cases, once):
    """Return the cases as parameters, those that are further examples in the second tier."""
    parameters = []
    for case in cases:
        words = tuple(getattr(value, "__name__", value) for value in case)
        tier = pytest.param if words in once else extended
        parameters.append(tier(*case, id="-".join(words)))
    return parameters


@pytest.mark.parametrize(("kind", "bug", "precision"), each_once(CASES, EVERY_BUG_ONCE))
def test_a_planted_bug_is_named_first(kind, bug, precision):
    name, plant = planted(kind, bug)
    found = compare(parts(kind), precision, plant)
    first = first_divergence(found.rows)
    assert first.row.module == name
    assert first.is_backward == (bug.__name__ == "wrong_gradient")
    assert f"`{name}`" in sentence(found)


CLEAN = {
    "32-true": ("gpt", "resnet18", "bert"),
    "64-true": ("gpt", "bert"),
    "bf16-mixed": ("bert", "gpt", "resnet18"),
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
EVERY_PRECISION_ONCE = {(kinds[0], precision) for precision, kinds in CLEAN.items()}


@pytest.mark.parametrize(
    ("kind", "precision"),
    each_once([(kind, p) for p, kinds in CLEAN.items() for kind in kinds], EVERY_PRECISION_ONCE),
)
def test_rounding_alone_is_no_divergence(kind, precision):
    options = {"emulate": True} if precision in EMULATED else {}
    found = compare(parts(kind), precision, **options)
    assert first_divergence(found.rows) is None
    assert ("agree in every bit" in sentence(found)) == (precision == "32-true")


def test_a_finite_reference_finds_what_overflows():
    _, batch, task = parts("resnet")
    large = net(
        lambda net, x: net.head(torch.softmax(net.first(x.flatten(1)[:, :8]) * 1e6, -1)),
        first=nn.Linear(8, 8),
        head=nn.Linear(8, 10),
    )
    text = sentence(compare((large, batch, task), "16-true"))
    assert "one parts from other in `(model)`" in text
    assert "first in its mul()" in text


def test_gradients_below_float16s_normal_numbers_are_said_to_be():
    """Without a loss scale, as in 16-true, they keep few digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64))
    model[1].weight.data.mul_(0.1)
    batch = (torch.randn(4096, 8), torch.randint(64, (4096,)))
    found = compare((model, batch, Classification()), "16-true")
    first = first_divergence(found.rows)
    assert first.is_backward
    error = first.added.found
    assert error.subnormal == error.elements > error.flushed > 0
    text = "(100 % of the elements are below the normal numbers of float16, 0.46 %"
    assert text in sentence(found)


@pytest.mark.parametrize("plants_bug", [False, True])
def test_what_torchs_kernel_is_known_to_sum_in_bfloat16_is_no_alarm(plants_bug, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 16))
    batch = (torch.randn(16384, 8), torch.randint(16, (16384,)))
    plant = (lambda model: wrong_gradient(model.get_submodule("0"))) if plants_bug else None
    found = compare((model, batch, Classification()), "bf16-mixed", plant)
    name, known = ("0", False) if plants_bug else ("2", True)
    first = first_divergence(found.rows)
    assert (first.row.module, first.added.is_known_sum) == (name, known)
    assert sentence(found).endswith(f"It is known: {KNOWN_SUM}.") == known
    report = DivergenceReport("bf16-mixed", "32-true", [found])
    write_page(report, [], tmp_path / "diff.html")
    page = (tmp_path / "diff.html").read_text()
    assert f", {KNOWN_SUM}</small>" in page
    assert ('class="bad"' in page) == plants_bug
    assert page.count("<svg") >= 2
    assert "`" not in page
    assert "a layer parts above 2, other code" in page
    assert "gradients of parameters, which are sums over all rows, above 5" in page


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
    assert first_divergence(compare((Kinked(), batch, task), "16-mixed").rows) is None


@pytest.mark.parametrize("kind", ["resnet", "bert"])
def test_the_model_is_left_as_it_was(kind):
    """Parameters, tied ones too, buffers, gradients and forwards."""
    model, batch, task = parts(kind)
    executions = [execution(model, task, name) for name in ("32-true", "bf16-mixed")]
    compare_batch(*executions, (batch, batch), [torch.get_rng_state()])
    before = model.state_dict()
    for executed in executions:
        compared = executed.state.plain_model
        after = compared.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not any("forward" in vars(module) for module in compared.modules())
        assert all(parameter.grad is None for parameter in compared.parameters())


def test_a_reference_holds_the_gradients_of_an_ordinary_backward():
    model, batch, task = parts("gpt")
    reference = execution(model, task, "32-true")
    state = torch.get_rng_state()
    recorded = record_reference(reference, batch, [state])
    model = reference.state.plain_model.train()
    torch.set_rng_state(state)
    loss = task.loss(model(batch[0]), batch[1])
    loss.backward()
    assert recorded.loss == loss.item()
    for name, parameter in model.named_parameters():
        assert torch.equal(recorded.parameter_gradients[name], parameter.grad)


def test_expected_errors_are_near_what_rounding_does_and_have_units():
    """Neither so large that bugs hide, nor so small that rounding is taken for one."""
    found = compare(parts("gpt"), "bf16-mixed")
    linear = {row.module: row.added for row in found.rows if row.kind == "Linear"}
    assert len(linear) == 9
    assert all(0.5 < added.ratio < 1.5 for added in linear.values())
    added = linear["blocks.0.expand"]
    assert added.dtype == "bfloat16"
    assert added.ulps == pytest.approx(added.found.relative * 128)
    assert added.found.sqnr_db == pytest.approx(-20 * math.log10(added.found.relative))


def test_a_gradient_that_is_cut_off_is_one_of_zero():
    plant = replace_forward("blocks.1.expand", lambda plain, x: plain(x.detach()))
    found = compare(parts("gpt"), "32-true", plant)
    first = first_divergence(found.rows)
    assert (first.row.module, first.is_backward) == ("blocks.1.expand", True)
    assert first.added.found.relative == pytest.approx(1)
    assert not found.is_exact


def test_another_shape_is_a_divergence():
    plant = replace_forward("blocks.1.norm2", lambda plain, x: plain(x)[:, :1])
    text = sentence(compare(parts("gpt"), "32-true", plant))
    assert text.startswith("one parts from other in `blocks.1.norm2`: its output has another shape")


def test_what_one_execution_passes_on_and_the_other_changes_is_compared():
    plant = replace_forward("", lambda plain, x: plain(x) * 1.5)
    found = compare(parts("gpt"), "32-true", plant)
    assert first_divergence(found.rows).row.module == "(model)"
    assert found.output_error == pytest.approx(0.5)


def test_a_loss_scale_that_overflows_is_settled_in_both_executions():
    model, batch, task = parts("gpt")
    plain, scaled = (execution(model, task, name) for name in ("32-true", "16-mixed"))
    scaled = replace(scaled, scale=2.0**40)
    for executions in ((plain, scaled), (scaled, plain)):
        found = compare_batch(*executions, (batch, batch), [torch.get_rng_state()])
        assert first_divergence(found.rows) is None
        assert 0 < found.gradient_error < 0.01
