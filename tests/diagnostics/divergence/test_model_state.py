"""What a module leaves in its input, in its buffers and in its weights is compared, too."""

import pytest
import torch
from compared_models import compare, replace_forward, sentence
from torch import nn

from runner.diagnostics.divergence.findings import first_divergence
from runner.training.tasks.classification import Classification

PRECISIONS = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])


class Doubled(nn.Module):
    writes = False

    def forward(self, x):
        doubled = 2 * x
        if self.writes:
            x.mul_(1.5)
        return doubled


class Net(nn.Module):
    """`ignores` what its activation returns, which overwrites its input."""

    def __init__(self, ignores=False):
        super().__init__()
        self.ignores = ignores
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.activation = nn.ReLU(inplace=True)
        self.doubled = Doubled()
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.norm(self.conv(x))
        if self.ignores:
            self.activation(x)
        else:
            x = self.activation(x)
        x = x.mean((2, 3)) + 1
        return self.head(x + self.doubled(x))


def compare_nets(precision, plant=None, ignores=False):
    torch.manual_seed(0)
    model = Net(ignores)
    batch = (torch.randn(8, 3, 12, 12), torch.randint(10, (8,)))
    return compare((model, batch, Classification()), precision, plant)


@PRECISIONS
@pytest.mark.parametrize("ignores", [False, True])
def test_overwriting_an_input_as_the_reference_does_is_no_divergence(precision, ignores):
    found = compare_nets(precision, ignores=ignores)
    assert first_divergence(found.rows) is None
    assert found.other_weights == []
    assert found.is_exact == (precision == "32-true")


@PRECISIONS
def test_a_module_that_writes_into_its_input_is_named(precision):
    found = compare_nets(precision, lambda model: setattr(model.doubled, "writes", True))
    assert first_divergence(found.rows).row.module == "doubled"
    assert "what it writes into its input is off by 50 %" in sentence(found)


@PRECISIONS
def test_another_momentum_of_running_statistics_is_named(precision):
    found = compare_nets(precision, lambda model: setattr(model.norm, "momentum", 0.2))
    first = first_divergence(found.rows)
    assert first.row.module == "norm"
    assert first.added.tensor in ("running_mean", "running_var")
    assert not found.is_exact


class Observed(nn.Module):
    """Keeps the mean of its input in a buffer that holds nothing before the first forward."""

    factor = 1.0

    def __init__(self, registers):
        super().__init__()
        self.registers = registers
        if not registers:
            self.register_buffer("mean", None)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        mean = self.factor * x.detach().mean(0)
        if self.registers:
            self.register_buffer("mean", mean)
        else:
            self.mean = mean
        return self.head(x)


@PRECISIONS
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(("factor", "module"), [(1.0, None), (1.5, "(model)")])
def test_a_buffer_that_the_forward_makes_is_compared(precision, registers, factor, module):
    torch.manual_seed(0)
    batch = (torch.randn(8, 8), torch.randint(10, (8,)))
    made = (Observed(registers), batch, Classification())
    found = compare(made, precision, lambda model: setattr(model, "factor", factor))
    first = first_divergence(found.rows)
    assert (first and first.row.module) == module
    assert first is None or first.added.tensor == "mean"


@PRECISIONS
def test_other_weights_are_said_to_be_no_bug_of_the_code(precision):
    found = compare_nets(precision, lambda model: model.conv.reset_parameters())
    assert found.other_weights == ["conv"]
    assert "Both have other weights in 1 module" in sentence(found)


def test_a_narrow_dtype_does_not_excuse_itself():
    plant = replace_forward("head", lambda plain, x: plain(x).half())
    assert first_divergence(compare_nets("32-true", plant).rows).row.module == "head"


def test_a_module_is_named_for_its_first_wrong_tensor():
    """Not for its worst one, which may come after another module's."""

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 10)
            self.wrong = False

        def forward(self, x):
            x = x.flatten(1)[:, :8]
            # 1.001 in what the first takes, and 2 in what the model returns.
            x = self.first(1.001 * x if self.wrong else x)
            return self.second(x) * (2 if self.wrong else 1)

    def plant(model):
        model.wrong = True
        replace_forward("second", lambda plain, x: 1.5 * plain(x))(model)

    torch.manual_seed(0)
    batch = (torch.randn(8, 3, 4, 4), torch.randint(10, (8,)))
    found = compare((Parent(), batch, Classification()), "32-true", plant)
    first = first_divergence(found.rows)
    assert (first.row.module, first.added.tensor) == ("(model)", "input of first")
