"""Groups of parameters inside one optimizer, by patterns, without decay, and by depth."""

import re

import pytest
import torch
from nets import Mixture
from processes import Outcome
from run_folders import finished_run
from states import CPU
from torch import nn
from training_states import MLP, begin, resume_halfway, save, train

from runner.core.base.errors import ConfigError
from runner.core.config.targets import check_targets
from runner.precision.layers.experts import convert_experts
from runner.precision.registry import load_precision
from runner.training import state_dict
from runner.training.model import restoring_builder
from runner.training.parameter_groups import (
    describe_groups,
    divide_parameters,
    freeze_parameters,
    matched_names,
)
from runner.training.setup import build_scheduled_optimizers, check_arguments

RANK_JOURNAL = "tracking._target_=runner.core.record.tracker.ProcessJournal"
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.2}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.batch_norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)


def divide(**settings):
    """Names of the parameters of each group, and the groups' other keys."""
    model = Net()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = divide_parameters(
        "optimizer", {**ADAMW, **settings}, model, dict(model.named_parameters())
    )
    rest = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return [[names[id(p)] for p in group["params"]] for group in groups], rest


def test_without_a_setting_there_is_one_group_of_parameters_alone():
    assert divide()[1] == [{}]


def test_the_first_match_wins_and_the_rest_keeps_the_optimizers_options():
    head = {"match": "head", "lr": 0.5}
    linears = {"match": ["*.weight", "stem"], "name": "weights", "weight_decay": 0}
    members, rest = divide(groups=[head, linears])
    assert members[0] == ["head.weight", "head.bias"]
    assert {"stem.weight", "stem.bias", "blocks.0.norm.weight"} <= set(members[1])
    assert {"scale", "blocks.1.linear.bias", "batch_norm.bias"} <= set(members[2])
    assert rest == [
        {"lr": 0.5, "own_options": ["lr"], "name": "head"},
        {"weight_decay": 0, "own_options": ["weight_decay"], "name": "weights"},
        {"own_options": [], "name": "rest"},
    ]


def test_norms_biases_and_vectors_are_exempt_from_weight_decay():
    members, rest = divide(no_decay_on="norms_and_biases")
    linears = ("stem", "blocks.0.linear", "blocks.1.linear", "head")
    assert members[0] == [f"{name}.weight" for name in linears]
    assert rest == [{"own_options": []}, {"weight_decay": 0.0, "own_options": ["weight_decay"]}]
    some, _ = divide(no_decay_on=["blocks.0", "*.norm"])
    assert set(some[1]) == {
        *(f"blocks.0.{part}" for part in ("linear.weight", "linear.bias")),
        *(f"blocks.{i}.norm.{part}" for i in (0, 1) for part in ("weight", "bias")),
    }


def test_layer_decay_lowers_the_rate_from_the_head_to_the_first_layer():
    members, rest = divide(layer_decay=0.5, groups=[{"match": "head", "lr": 1.0}])
    rates = {group["name"]: group["lr"] for group in rest}
    assert rates == {
        "head.layer_03": 1.0,
        "rest.layer_00": 0.1 / 8,
        "rest.layer_01": 0.1 / 4,
        "rest.layer_02": 0.1 / 2,
        "rest.layer_03": 0.1,
    }
    assert members[1] == ["scale", "stem.weight", "stem.bias"]
    assert members[4] == ["batch_norm.weight", "batch_norm.bias"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": [{"match": "tail", "lr": 1}]}, "groups: tail matches no parameter"),
        ({"groups": [{"match": ["head", "tail"], "lr": 1}]}, "groups: tail matches no parameter"),
        (
            {"groups": [{"match": "head", "lr": 1}, {"match": ["head.bias"], "lr": 2}]},
            "match=[head.bias] is left nothing: the groups before it take head.bias.",
        ),
        ({"no_decay_on": "norms"}, "norms_and_biases stands for all norms and biases."),
    ],
)
def test_a_pattern_that_takes_nothing_is_refused(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        divide(**settings)


def test_converted_experts_leave_the_output_layer_what_it_is():
    model = nn.Sequential(nn.Linear(32, 32), Mixture())
    before = matched_names("optimizer", "matrices", dict(model.named_parameters()), model)
    convert_experts(model[1], {"first": True, "second": False}, lambda layer: None)
    after = matched_names("optimizer", "matrices", dict(model.named_parameters()), model)
    assert before == after == {"0.weight"}


def test_packed_experts_can_be_named_among_what_is_frozen():
    model = nn.Sequential(nn.Linear(32, 32), Mixture())
    load_precision("int4", experts=["1.first:in_out"]).convert(model)
    freeze_parameters(model, ["1.first", "1.second"])
    trains = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trains == ["0.bias", "1.table", "1.router.weight"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("groups", [{"match": "matrices", "lr": 1}], "match=matrices matches no parameter that it"),
        ("layer_decay", 0.5, "takes the repeated blocks of a model, and this one"),
    ],
)
def test_what_a_model_of_one_layer_does_not_have_is_refused(key, value, message):
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=message):
        divide_parameters("optimizer", {**ADAMW, key: value}, model, dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("groups=[{match:head,momentum:1}]", "groups.0.momentum=1: torch.optim.AdamW has no"),
        ("groups=[{match:head,lr:fast}]", "groups.0.lr=fast does not fit. Allowed: a number."),
        ("groups=[{match:head,lr:-1}]", "groups.0: torch.optim.AdamW refuses its arguments: In"),
        ("groups=[{lr:1}]", "groups.0={'lr': 1} names no parameters. Type {match: <pattern>"),
        ("groups=[{match:[],lr:1}]", "groups.0={'match': [], 'lr': 1} names no parameters."),
        ("groups=[{match:head,name:[1]}]", "groups.0.name=[1] does not fit. Allowed: text."),
        ("no_decay_on=[[a]]", "no_decay_on=[['a']] does not fit. Allowed: norms_and_biases, or"),
        ("groups=[{match:a},{match:b,name:a}]", "groups.1 has the name a, which is taken"),
        ("groups=[{match:a,name:rest}]", "groups.0 has the name rest, which is taken"),
        ("groups=head", "groups=head is no list. Type optimizer.groups=[{match: head"),
        ("layer_decay=1.5", "layer_decay=1.5 is out of range. Allowed: above 0, 1 and below."),
    ],
)
def test_what_an_optimizer_cannot_follow_is_refused_before_the_model(compose, typed, message):
    spec = compose(f"optimizer.{typed}")
    assert check_targets(spec) == []
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_arguments(spec)


@pytest.mark.parametrize(
    ("optimizer", "refuse", "message"),
    [
        ("lbfgs", check_arguments, "optimizer.no_decay_on: torch.optim.LBFGS takes one group"),
        ("muon", begin, "optimizer.no_decay_on belongs to one of matrices, rest."),
    ],
)
def test_optimizers_that_take_no_groups_of_their_own(compose, optimizer, refuse, message):
    spec = compose(f"optimizer={optimizer}", "optimizer.no_decay_on=norms_and_biases", *MLP)
    with pytest.raises(ConfigError, match=re.escape(message)):
        refuse(spec)


FURTHER = ("adagrad", "adam", "nadam", "rmsprop", "adam8bit", "lion8bit", "paged_adamw8bit")
EVERY_OPTIMIZER = [
    *("adamw", "sgd", "adamw8bit", "adamw4bit"),
    *(pytest.param(name, marks=pytest.mark.extended) for name in (*FURTHER, "adamwfp8")),
]
GROUPS = (
    "optimizer.groups=[{match:layers.0,lr:0.02,weight_decay:0.3}]",
    "optimizer.no_decay_on=norms_and_biases",
)


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_groups_of_every_optimizer_resume_bit_by_bit(name, compose):
    spec = compose(*MLP, f"optimizer={name}", "scheduler=cosine", *GROUPS)
    check_arguments(spec)
    straight, resumed = resume_halfway(spec)
    decays = [group["weight_decay"] for group in straight.optimizers[0].optimizer.param_groups]
    assert [*decays[:2], decays[3]] == [0.3, 0.0, 0.0]
    first = begin(spec).named_rates()
    assert [*first] == ["layers.0", "rest"]
    assert resumed.named_rates() == straight.named_rates() != first


def test_groups_of_one_of_several_optimizers(compose):
    spec = compose(*MLP, "optimizer=muon", "optimizer.rest.no_decay_on=norms_and_biases")
    check_arguments(spec)
    state = begin(spec)
    assert [*state.named_rates()] == ["matrices", "rest"]
    line = describe_groups(state.optimizers)
    assert line.startswith("parameter groups, in tensors: matrices: 2 at lr 0.02, rest: 4 at lr")
    assert line.endswith("; no weight decay on 3 of 6 tensors")


def test_a_rate_that_is_typed_for_a_resume_leaves_the_groups_with_their_own(compose):
    spec = compose(*MLP, *GROUPS)
    saved = save(train(begin(spec)), spec)
    changed = compose(*MLP, *GROUPS, "optimizer.lr=0.1", "optimizer.weight_decay=0.7")
    state = begin(changed, saved)
    state_dict.restore(state, saved, changed, ())
    assert state.named_rates() == pytest.approx({"layers.0": 0.02, "rest": 0.1})
    decays = [group["weight_decay"] for group in state.optimizers[0].optimizer.param_groups]
    assert decays == [0.3, 0.0, 0.7, 0.0]


def test_the_rate_of_each_group_is_recorded(quick, tmp_path):
    groups = "optimizer.groups=[{match:'*.bias',lr:0.5}]"
    quick(groups, "scheduler=linear", "scheduler.end_factor=0.5", RANK_JOURNAL).check_ok(
        "parameter groups, in tensors: *.bias: 2 at lr 0.5, rest: 2 at lr 0.001"
    )
    run = Outcome(finished_run(tmp_path))
    factors = [1, 5 / 6, 2 / 3]
    for name, rate in (("lr/_.bias", 0.5), ("lr/rest", 0.001), ("train/lr", 0.5)):
        found = run.values(name)
        assert [found[step] for step in (1, 2, 3)] == pytest.approx([rate * f for f in factors])


def test_a_resume_with_other_groups_is_refused(quick, tmp_path):
    assert quick(*GROUPS).rc == 0
    folder = finished_run(tmp_path)
    done = quick(f"checkpoint.resume={folder}", "train.max_steps=4", "optimizer.groups=null")
    done.check_refused("is of groups with other settings. Leave optimi")
    quick(f"checkpoint.resume={folder}", "train.max_steps=4").check_ok()


def test_an_optimizer_of_ones_own_that_takes_groups_itself_gets_them(compose):
    typed = f"+optimizer._target_={__name__}.OwnGroups +optimizer.lr=0.1 +optimizer.groups=3"
    spec = compose("~optimizer", *typed.split())
    assert check_targets(spec) == []
    (made,) = build_scheduled_optimizers(spec, Net(), begin(spec).precision, 2)
    assert made.optimizer.own_groups == 3


class OwnGroups(torch.optim.SGD):
    """An optimizer whose own keyword has the name of a key of the runner."""

    def __init__(self, params, lr, groups=None):
        super().__init__(params, lr=lr)
        self.own_groups = groups


def test_an_eps_of_a_group_that_underflows_is_refused(compose):
    typed = ("precision=16-true", "optimizer.eps=1e-4", "optimizer.groups=[{match:head,eps:1e-8}]")
    with pytest.raises(ConfigError, match=r"optimizer\.eps=1e-08: AdamW keeps its state in"):
        begin(compose(*MLP, *typed))


@pytest.mark.parametrize(
    ("patterns", "trainable"),
    [
        ("layers", ["head.weight", "head.bias"]),
        ("*.bias", ["layers.0.weight", "layers.1.weight", "head.weight"]),
        ("layers.1,head.weight", ["layers.0.weight", "layers.0.bias", "head.bias"]),
    ],
)
def test_what_matches_is_frozen_and_the_rest_trains(compose, patterns, trainable):
    spec = compose(*MLP, f"train.freeze=[{patterns}]")
    before = dict(begin(spec).model.named_parameters())
    state, _ = resume_halfway(spec)
    moved = [n for n, p in state.model.named_parameters() if not torch.equal(p, before[n])]
    assert moved == trainable
    assert len(state.trainable_parameters) == len(trainable)


def test_an_adapters_additions_can_be_frozen_by_their_names(compose):
    spec = compose(*MLP, "adapter=lora", "train.freeze=[layers.0]")
    names = [n for n, p in begin(spec).model.named_parameters() if p.requires_grad]
    assert names
    assert not [name for name in names if name.startswith("layers.0")]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("[layer.0]", "train.freeze: layer.0 matches no parameter of the model. Nearest names: l"),
        ("[0]", "train.freeze: 0 matches no parameter of the model."),
        ("['*']", "train.freeze=[*] leaves nothing to train: it freezes all 6 parameters of the"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(compose, patterns, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        begin(compose(*MLP, f"train.freeze={patterns}"))


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("[[1]]", "does not fit. Allowed: names, as in [blocks,head]."),
        ("layers", "train.freeze=layers does not fit. Allowed: a list, as in [a,b]."),
    ],
)
def test_values_that_are_no_patterns_are_refused(quick, patterns, message):
    quick(f"train.freeze={patterns}").check_refused(message)


def test_the_run_says_how_much_is_frozen_and_resumes_with_the_same_patterns(quick, tmp_path):
    quick("train.freeze=[layers]").check_ok(
        "frozen: 2 of 4 parameters, 0.0 MiB", "170 of 1,210 parameters train"
    )
    resume = (f"checkpoint.resume={finished_run(tmp_path)}", "train.max_steps=4")
    quick(*resume, "train.freeze=[head]").check_refused("Leave train.freeze out")
    assert quick(*resume).rc == 0


def test_an_evaluation_of_a_frozen_models_checkpoint_needs_no_pattern(compose):
    spec = compose(*MLP, "train.freeze=[layers]")
    state = train(begin(spec))
    plain = compose(*MLP)
    found = restoring_builder(plain, state.precision, save(state, spec)).build(CPU).model
    assert torch.equal(found.head.weight, state.model.head.weight)
