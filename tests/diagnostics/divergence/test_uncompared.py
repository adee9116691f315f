"""What is 0 or not finite in the reference shows nothing, and is counted and named."""

import math
from dataclasses import replace

import one_off_nets
import pytest
import torch
from compared_models import compare, wrong_gradient
from run_folders import read_json
from torch import nn

from runner.diagnostics.divergence.divergence_report import (
    DivergenceReport,
    metrics,
    uncompared,
    write_json_report,
    write_page,
)
from runner.diagnostics.divergence.findings import first_divergence
from runner.training.tasks.classification import Classification
from runner.training.tasks.regression import Regression


def net(*zero_layers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
    for layer in zero_layers:
        for parameter in model[layer].parameters():
            nn.init.zeros_(parameter)
    return model, (torch.randn(32, 8), torch.randint(10, (32,))), Classification()


def plant(model):
    wrong_gradient(model[0])


def report(*found):
    steps = [replace(each, step=number) for number, each in enumerate(found, 1)]
    return DivergenceReport("one", "other", steps)


def modules_of(found):
    left = uncompared([found])
    return {*left["output"]}, {*left["backward"]}


def test_a_bug_behind_a_layer_of_zeros_is_not_compared(tmp_path):
    found = compare(net(2), "bf16-mixed", plant)
    assert first_divergence(found.rows) is None
    assert modules_of(found) == ({"2"}, {"(model)", "0", "1", "2"})
    text = report(found).sentence
    assert "differ by rounding alone in what was compared" in text
    assert "the output of 1 of 5 modules (`2`) and the backward of 4 of 5 modules (" in text
    assert "diff/output_error" not in metrics(found)
    write_page(report(found), [], tmp_path / "diff.html")
    assert "nothing that could be compared" in (tmp_path / "diff.html").read_text()
    write_json_report(report(found), tmp_path / "diff.json")
    (step,) = read_json(tmp_path / "diff.json")["steps"]
    rows = {row["module"]: row["uncompared"] for row in step["modules"]}
    assert rows.pop("2") == ["backward", "output"]
    assert rows.pop("(loss)") == []
    assert [*rows.items()] == [(name, ["backward"]) for name in ("(model)", "0", "1")]


def test_bits_that_agree_are_those_that_were_compared():
    text = report(compare(net(2), "32-true")).sentence
    assert "agree in every bit in what was compared. Not compared: the output of 1 of 5" in text


@pytest.mark.parametrize(
    ("zero_layers", "forward", "backward"),
    # A batch norm without scale still counts its batches and has a gradient of its own.
    [((), set(), set()), ((1,), {"1"}, {"(model)", "0", "1"})],
)
def test_only_what_is_zero_counts(zero_layers, forward, backward):
    found = compare(net(*zero_layers), "bf16-mixed")
    assert modules_of(found) == (forward, backward)
    assert ("in what was compared" in report(found).sentence) == bool(zero_layers)


def test_a_later_step_that_compares_the_rest_decides():
    first = compare(net(2), "bf16-mixed", plant)
    clean = report(first, compare(net(), "bf16-mixed"))
    assert clean.chosen.step == 2
    assert clean.sentence.startswith("In all 2 steps: one and other differ by rounding alone")
    assert "Not compared" not in clean.sentence
    text = report(first, compare(net(), "bf16-mixed", plant)).sentence
    assert text.startswith("In step 2: one parts from other in the backward of `0`")


def test_a_step_that_differs_is_not_hidden_by_one_that_agrees_in_every_bit():
    text = report(compare(net(), "32-true"), compare(net(), "bf16-mixed")).sentence
    assert "every bit" not in text


def test_a_reference_that_is_not_finite_compares_nothing():
    model, batch, task = net()
    model[0].weight.data.fill_(math.nan)
    found = compare((model, batch, task), "bf16-mixed")
    _, backward = modules_of(found)
    assert {"0", "1", "2"} <= backward
    assert "in what was compared" in report(found).sentence


@pytest.mark.parametrize("bug", [None, wrong_gradient])
def test_complex_tensors_are_compared(bug):
    torch.manual_seed(0)
    model = one_off_nets.net(
        lambda net, x: net.head(net.first(x.to(net.first.weight.dtype))).real,
        first=nn.Linear(8, 8, dtype=torch.complex64),
        head=nn.Linear(8, 1, dtype=torch.complex64),
    )
    made = model, (torch.randn(16, 8), torch.randn(16, 1)), Regression()
    found = compare(made, "64-true", bug and (lambda model: bug(model.first)))
    assert {"first", "head"} <= {row.module for row in found.rows if row.added}
    first = first_divergence(found.rows)
    assert (first and first.row.module) == (bug and "first")
    assert bug or 0 < found.gradient_error < 1e-6
