"""Layers that count as converted do run: bypassed layers and readers of packed weights."""

import random
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nets import Tables
from nets_that_pass_by import Leaves, Reads
from run_folders import read_json
from states import CPU
from torch import nn

from runner.core.base.errors import ConfigError
from runner.core.config.schema import RunSpec
from runner.core.policy.conversion_report import ConversionReport
from runner.core.run.run_context import TrainingSetup
from runner.modes.execution import build_execution, build_proven_model
from runner.precision import registry
from runner.precision.conversion_proof import (
    BYPASSED_REASON,
    NOT_RUN_REASON,
    RAN_IN_TRAINING_REASON,
)
from runner.training.model import BuiltModel
from runner.training.tasks.regression import Regression

PACKED = ("bnb-nf4", "bnb-int8")
EMULATED = ("float8-tensorwise", "transformer-engine-current")
ALL = (*PACKED, "bnb-int8-training", *EMULATED)


@pytest.fixture
def net(main, tmp_path):
    """Run one of the nets in a precision for a few steps; returns its output and its result.

    `net.command` returns how the command ends, whatever that is.
    """
    return run_net(main, tmp_path)


def run_net(main, tmp_path):
    for option, target in (("model/net", "Reads"), ("data/mine", "rows")):
        path = tmp_path / "conf" / f"{option}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(f"# Mine\n_target_: nets_that_pass_by.{target}\n")

    def command(name, precision, *args):
        words = (
            f"--config-dir conf model=net model._target_=nets_that_pass_by.{name} data=mine"
            f" precision={precision} tracking=none train.max_steps=4 train.batch_size=16"
            f" hydra.run.dir={run.folder}"
        )
        emulate = ["precision.emulate=true"] if precision in EMULATED else []
        return main(*words.split(), *emulate, *args)

    def run(*typed):
        done = command(*typed).check_ok()
        return done, read_json(tmp_path / run.folder / "result.json")

    run.command, run.folder = command, "out"
    return run


def conversion(tmp_path, folder="out"):
    rows = read_json(tmp_path / folder / "conversion.json")
    return {row["module"]: (row["done"], row["why"]) for row in rows}


@pytest.fixture(scope="module")
def loss_in_float32(inside, tmp_path_factory):
    """Return the training loss of the net Reads without a conversion."""
    folder = tmp_path_factory.mktemp("float32")
    with inside(folder) as run:
        net = run_net(run, folder)
        return net("Reads", "32-true")[1]["train_loss"]


@pytest.mark.parametrize("precision", ALL)
def test_layers_that_are_never_called_stay_unconverted(net, tmp_path, loss_in_float32, precision):
    done, found = net("Reads", precision)
    assert f"skipped a, b (Linear, 2,048 weights): {BYPASSED_REASON}" in done.stdout
    assert found["converted"] == "1/3"
    fates = conversion(tmp_path)
    assert fates["a"] == fates["b"] == (False, BYPASSED_REASON)
    assert fates["head"][0]
    net.folder = "named"
    _, named = net("Reads", precision, "precision.ignore_modules=[a,b]")
    assert found["metrics"] == named["metrics"]
    assert found["train_loss"] == named["train_loss"]
    assert found["train_loss"] == pytest.approx(loss_in_float32, rel=0.02)


@pytest.mark.parametrize(
    ("name", "precisions", "message"),
    [
        ("ReadsAll", ALL, f"1,536 matrix weights: a, b (Linear, 1,536 weights): {BYPASSED_REASON}"),
        ("NeverCalled", ("bnb-nf4", EMULATED[0]), "none of the layers that it converts runs in "),
    ],
)
def test_a_run_stops_before_training_when_no_converted_layer_runs(net, name, precisions, message):
    for precision in precisions:
        done = net.command(name, precision).check_refused(
            message, "Type a precision without conversion, for example precision=bf16-m"
        )
        assert "train/loss" not in done.stdout


def test_activations_are_not_cast_to_the_dtype_of_a_packed_weight(net, tmp_path):
    _, trained = net("Casts", "32-true", "train.max_steps=300", "optimizer.lr=0.01")
    accuracy = trained["metrics"]["val/accuracy"]
    assert accuracy > 0.9
    for precision in PACKED:
        net.folder = precision
        _, found = net("Casts", precision, "mode=evaluate", "checkpoint=out")
        assert conversion(tmp_path, precision) == {"a": (True, ""), "b": (True, "")}
        assert found["metrics"]["val/accuracy"] == pytest.approx(accuracy, abs=0.1)


@pytest.mark.parametrize("words", ["bnb-nf4", "bnb-int8", "bnb-nf4 adapter=lora"])
def test_questions_that_do_no_harm_leave_a_layer_converted(net, words):
    _, found = net("Asks", *words.split())
    assert found["converted"] == "2/2"


@pytest.mark.parametrize("precision", PACKED)
def test_a_model_that_takes_the_limits_of_a_weights_dtype_runs(net, tmp_path, precision):
    net("Limits", precision)
    assert conversion(tmp_path) == {"a": (True, ""), "b": (True, "")}


@pytest.mark.parametrize("precision", ["32-true", "bnb-nf4", "float8-tensorwise"])
def test_an_adapter_adds_nothing_to_layers_that_are_never_called(net, main, precision):
    done, found = net("Reads", precision, "adapter=lora")
    assert f"the adapter leaves a, b out: {BYPASSED_REASON}" in done.stdout
    assert "384 of" in done.stdout  # rank 8 on the head, 32 -> 16
    if precision != "bnb-nf4":
        return
    assert found["converted"] == "1/3"
    main("mode=evaluate", "checkpoint=out", "--config-dir", "conf", "tracking=none").check_ok()
    main("checkpoint.resume=out", "--config-dir", "conf", "train.max_steps=6").check_ok()


@pytest.mark.parametrize("precision", ["bnb-nf4", "float8-tensorwise"])
def test_a_layer_counts_once_it_has_run(net, tmp_path, precision):
    done, found = net("Experts", precision)
    first = "converted 2 of 4 layers, 1,536 of 3,072 matrix weights (50 %): experts.0, head"
    assert first in done.stdout
    assert "converted 3 of 4 layers: auxiliary ran in the first step" in done.stdout
    assert found["converted"] == "3/4"
    assert conversion(tmp_path) == {
        "experts.0": (True, ""),
        "experts.1": (False, NOT_RUN_REASON),
        "auxiliary": (True, RAN_IN_TRAINING_REASON),
        "head": (True, ""),
    }


@pytest.mark.parametrize("precision", ["bnb-int8", "float8-tensorwise"])
def test_a_weight_that_is_read_in_training_alone_stops_the_first_step(net, precision):
    done = net.command("TrainsByReading", precision)
    done.check_refused("Type precision.ignore_modules=[a].")
    _, found = net("TrainsByReading", precision, "precision.ignore_modules=[a]")
    assert found["converted"] == "1/2"


def test_a_packed_weight_that_is_read_in_a_short_batch_stops_the_run(net):
    batches = ("train.batch_size=24", "train.max_steps=5")
    net.command("ReadsShort", "bnb-int8", *batches).check_refused(
        "The weight of a is packed into codes", "precision.ignore_modules=[a]"
    )
    net("ReadsShort", "bnb-int8", *batches, "precision.ignore_modules=[a]")


def test_a_checkpoint_keeps_bypassed_layers_plain(net, tmp_path):
    """Its plain weights are not packed by a resumed run, an evaluation or low_memory."""
    _, whole = net("Reads", "bnb-nf4")
    net.folder = "cut"
    net("Reads", "bnb-nf4", "train.max_steps=2")
    _, resumed = net("Reads", "bnb-nf4", "checkpoint.resume=cut")
    assert resumed["metrics"] == whole["metrics"]
    net.folder = "again"
    _, evaluated = net("Reads", "bnb-nf4", "mode=evaluate", "checkpoint=out")
    assert evaluated["metrics"]["val/loss"] == whole["metrics"]["val/loss"]
    assert evaluated["converted"] == "1/3"
    saved = torch.load(next((tmp_path / "out/checkpoints").glob("step-*.pt")), weights_only=True)
    assert saved["bypassed"] == {"a": BYPASSED_REASON, "b": BYPASSED_REASON}
    net.folder = "low"
    _, low = net("Reads", "bnb-nf4", "init.low_memory=true")
    assert low["metrics"] == whole["metrics"]


def test_a_plan_says_that_nothing_is_proven(net):
    done = net.command("Reads", "float8-tensorwise", "mode=plan")
    assert "not proven: no batch was run" in done.stdout


def built(precision, model):
    """A model that is proven on a fixed batch."""

    def make(device, plan):
        torch.manual_seed(0)
        return BuiltModel(*precision.convert(model(), device, plan), 0, plan=plan)

    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    setup = TrainingSetup(RunSpec(), precision, Regression(), CPU)
    return build_proven_model(setup, SimpleNamespace(build=make), lambda: x)


@pytest.mark.parametrize("name", ["bnb-nf4", "transformer-engine"])
def test_the_trial_leaves_no_trace(name):
    precision = registry.load_precision(name, **({"emulate": True} if "engine" in name else {}))
    torch.manual_seed(0)
    plain, _ = precision.convert(Leaves(), CPU)
    drawn = torch.rand(3), random.getstate(), np.random.get_state()[1].tolist()
    model = built(precision, Leaves).model
    assert torch.equal(torch.rand(3), drawn[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == drawn[1:]
    assert model.training
    assert model.calls == 0
    assert not any("forward" in vars(module) for module in model.modules())
    assert [*model._forward_hooks, *model._forward_pre_hooks] == []
    assert precision.state_dict(model) == {}  # scales and amaxes
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_a_second_build_begins_at_the_same_seed():
    precision = registry.load_precision("bnb-nf4")
    model = built(precision, Reads).model
    torch.manual_seed(0)
    assert torch.equal(model.b.weight, Reads().b.weight)


@pytest.mark.parametrize("name", ["bnb-nf4", "transformer-engine-current", "qat-int4"])
def test_parameters_of_three_dimensions_cost_no_second_build(name):
    precision = registry.load_precision(name, **({"emulate": True} if "engine" in name else {}))
    made = []

    def net():
        made.append(Tables())
        return made[-1]

    proven = built(precision, net)
    model = proven.model
    assert (len(made), type(model), proven.plan.expert_layouts) == (1, Tables, {})
    assert [*model._modules] == ["layer"]
    torch.manual_seed(0)
    plain = registry.load_precision(name, **({"emulate": True} if "engine" in name else {}))
    plain, _ = plain.convert(Tables(), CPU)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert vars(model).keys() == vars(plain).keys()


class Routed(nn.Module):
    """Experts of whom `last` says how their last product is written, behind a layer."""

    def __init__(self, last):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.last = last
        self.first = nn.Parameter(torch.randn(4, 48, 32) / 6)
        self.first_bias = nn.Parameter(torch.zeros(4, 1, 48))
        self.second = nn.Parameter(torch.randn(4, 48, 32) / 6)
        self.scores = nn.Parameter(torch.randn(32, 4))

    def forward(self, x):
        x = self.layer(x)
        inner = x.expand(4, -1, -1) @ self.first.mT + self.first_bias
        scores = (x @ self.scores).softmax(-1)
        if self.last == "einsum":
            return torch.einsum("enh,ehd,ne->nd", inner, self.second, scores)
        outputs = torch.baddbmm(x.expand(4, -1, -1), inner, self.second)
        return (outputs * scores.mT[..., None]).sum(0)


@pytest.mark.parametrize("named", [[], ["first"], ["second:in_out"]])
@pytest.mark.parametrize("last", ["einsum", "baddbmm"])
def test_stacks_are_found_beside_named_ones_and_a_left_one_is_counted_and_named(last, named):
    is_left = last == "einsum"
    precision = registry.load_precision("bnb-nf4", experts=named)
    if is_left and named == ["second:in_out"]:
        with pytest.raises(ConfigError, match="uses second in einsum, which is no product"):
            built(precision, lambda: Routed(last))
        return
    found = built(precision, lambda: Routed(last))
    stack = 4 * 48 * 32
    packed = 32 * 32 + stack * (1 if is_left else 2)
    assert found.report.weight_counts == (packed, 32 * 32 + 2 * stack + 32 * 4)
    why = "its forward uses second in einsum, which is no product with each expert"
    assert found.report.modules[0].why == (f"in part, for {why}" if is_left else "")
    layouts = {"first": False} if is_left else {"first": False, "second": True}
    assert found.plan.expert_layouts == layouts


@pytest.mark.parametrize(
    ("named", "right"),
    [
        (["first:in_out"], "as [experts, out, in]. Type first in its place."),
        (["first", "second"], "as [experts, in, out]. Type second:in_out in its place."),
    ],
)
def test_an_order_of_dimensions_that_the_forward_contradicts_is_refused(named, right):
    precision = registry.load_precision("bnb-nf4", experts=named)
    with pytest.raises(ConfigError, match=re.escape(right)):
        built(precision, lambda: Routed("baddbmm"))


class Exchanged(nn.Module):
    """Computes with its layer, and with the same layer of another weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        first, weight = self.layer(x), self.layer.weight.data.clone()
        self.layer.weight.data.zero_()
        second = self.layer(x)
        self.layer.weight.data.copy_(weight)
        return first - second


@pytest.mark.parametrize(("net", "caches"), [(Exchanged, False), (partial(nn.Linear, 4, 1), True)])
def test_what_is_computed_again_casts_changed_weights_at_each_use(net, caches):
    spec = RunSpec(optimizer={"_target_": "torch.optim.SGD"})
    setup = TrainingSetup(spec, registry.load_precision("bf16-mixed"), Regression(), CPU)

    def make(device, plan):
        return BuiltModel(net(), ConversionReport(), 0, plan=plan)

    _, state = build_execution(setup, SimpleNamespace(build=make), lambda: torch.ones(2, 4))
    assert state.plan.caches_casts is caches
