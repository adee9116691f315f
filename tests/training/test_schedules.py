"""Warm-up, schedules that follow evaluations, and schedules of schedules."""

import math
import re
from dataclasses import replace

import pytest
import torch
from run_folders import finished_run
from torch import nn
from training_states import MLP, begin, resume_halfway, save, train

from runner.core.base.errors import ConfigError
from runner.core.config.targets import check_targets
from runner.training import state_dict
from runner.training.schedules import (
    build_scheduler,
    check_scheduler,
    describe_schedule,
    warmup_steps,
)

TORCH = "torch.optim.lr_scheduler"
PLATEAU = {"_target_": f"{TORCH}.ReduceLROnPlateau", "factor": 0.5, "patience": 0}
SEQUENTIAL = {
    "_target_": f"{TORCH}.SequentialLR",
    "schedulers": [
        {"_target_": f"{TORCH}.ConstantLR", "factor": 0.5, "total_iters": 3},
        {"_target_": f"{TORCH}.CosineAnnealingLR", "T_max": None},
    ],
    "milestones": [3],
}
ONECYCLE = {"_target_": f"{TORCH}.OneCycleLR", "total_steps": None}
CHAINED = {
    "_target_": f"{TORCH}.ChainedScheduler",
    "schedulers": [
        {"_target_": f"{TORCH}.ExponentialLR", "gamma": 0.9},
        {"_target_": f"{TORCH}.LinearLR", "total_iters": None},
    ],
}
SCHEDULES = ("constant", "cosine", "linear", "onecycle")


class NeedsEpoch:
    """A schedule whose step() wants what a run does not pass."""

    def __init__(self, optimizer):
        pass

    def step(self, epoch, loss):
        pass


def sgd(*rates):
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=rates[0])


def rates(node, steps, optimizer=None):
    """The rate of each step of a run, of the first group."""
    optimizer = optimizer or sgd(0.4)
    schedule = build_scheduler(node, optimizer, steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_begins_unchanged_where_its_warm_up_ends(compose, name):
    plain = compose(f"scheduler={name}", "optimizer.lr=0.4").scheduler
    node = compose(f"scheduler={name}", "optimizer.lr=0.4", "scheduler.warmup=4").scheduler
    found = rates(node, 12)
    alone = rates(plain, 8)
    assert found[4:] == alone
    assert found[:4] == pytest.approx([alone[0] * i / 5 for i in (1, 2, 3, 4)])


@pytest.mark.parametrize(
    ("length", "steps", "wanted"),
    [(None, 50, 0), (0.0, 50, 0), (7, 50, 7), (99, 50, 99), (0.1, 51, 6), (0.07, 100, 7)],
)
def test_the_length_of_a_warm_up(length, steps, wanted):
    assert warmup_steps({"_target_": None, "warmup": length}, steps) == wanted


def test_a_run_may_end_within_its_warm_up(compose):
    node = compose("scheduler=cosine", "scheduler.warmup=100").scheduler
    assert rates(node, 3) == pytest.approx([0.4 * i / 101 for i in (1, 2, 3)])


@pytest.mark.parametrize("length", [-1, 1.0, 1.5, True, "10%"])
def test_other_lengths_of_a_warm_up_are_refused(length):
    with pytest.raises(ConfigError, match=re.escape(f"scheduler.warmup={length} is no length.")):
        check_scheduler({"_target_": None, "warmup": length})


def test_every_group_warms_up_to_its_own_rate():
    optimizer = sgd(0.4, 0.8)
    schedule = build_scheduler({"_target_": None, "warmup": 1}, optimizer, 5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.4]
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.4, 0.8]


def test_onecycle_goes_up_to_each_groups_own_rate(compose):
    node = compose("scheduler=onecycle", "optimizer.lr=0.4").scheduler
    optimizer = sgd(0.4, 0.1)
    build_scheduler(node, optimizer, 10)
    assert [group["max_lr"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.1])


def state_and_spec(compose, scheduler, *typed):
    spec = replace(compose(*MLP, "optimizer=sgd", *typed), scheduler=scheduler)
    return begin(spec), spec


RESUMED = {
    "warm-up": {"_target_": None, "warmup": 2},
    "cosine": {"_target_": f"{TORCH}.CosineAnnealingLR", "T_max": None, "warmup": 2},
    "onecycle": {**ONECYCLE, "max_lr": 0.4, "warmup": 3},
    "plateau": {**PLATEAU, "mode": "max"},
    "plateau with warm-up": {**PLATEAU, "mode": "max", "warmup": 2},
    "sequential": SEQUENTIAL,
    "sequential with warm-up": {**SEQUENTIAL, "warmup": 1},
    "chained": CHAINED,
}
SPLITS = [
    # Each schedule at one step, and each step in two schedules.
    pytest.param(name, split, marks=[pytest.mark.extended] * ((i - j) % 4 != 0))
    for i, name in enumerate(RESUMED)
    for j, split in enumerate((1, 2, 3, 5))
]


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_a_resume_continues_every_schedule_bit_by_bit(compose, name, split):
    spec = replace(compose(*MLP, "optimizer=sgd"), scheduler=RESUMED[name])
    resume_halfway(spec, split, 6 - split)


SHARES = {
    **RESUMED,
    "linear": {"_target_": f"{TORCH}.LinearLR", "total_iters": None},
    "typed": {"_target_": f"{TORCH}.CosineAnnealingLR", "T_max": 12, "warmup": 1},
    "plateau with warm-up": {**PLATEAU, "mode": "max", "warmup": 0.1},
}


def rates_of_steps(state):
    """Return the rates of ten steps."""
    found = []
    for _ in range(10):
        train(state)
        found.append(
            [group["lr"] for part in state.optimizers for group in part.optimizer.param_groups]
        )
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
@pytest.mark.parametrize("name", SHARES)
def test_ten_steps_and_ten_more_have_the_rates_of_twenty(compose, name, optimizer):
    spec = replace(compose(*MLP, f"optimizer={optimizer}"), scheduler=SHARES[name])
    short = begin(spec, steps=10)
    rates_of_steps(short)
    saved = save(short, spec)
    resumed = begin(spec, saved, steps=20)
    notes = state_dict.restore(resumed, saved, spec, ())
    # What evaluations have reduced is no function of the step.
    wanted = short
    if "plateau" not in name:
        wanted = begin(spec, steps=20)
        rates_of_steps(wanted)
    assert rates_of_steps(resumed) == rates_of_steps(wanted)
    said = {
        "typed": "CosineAnnealingLR does not follow the run's length of 20 steps",
        "sequential": "SequentialLR follows the run's length of 20 steps: it is taken up at its st",
    }
    assert said.get(name, "") in " ".join(notes)
    assert ("plateau" in name or name == "warm-up") != bool(notes)


def test_another_warm_up_for_a_resume_is_taken_up_at_the_runs_step(compose):
    first, spec = state_and_spec(compose, {"_target_": None, "warmup": 2})
    saved = save(train(first, 3), spec)
    second, changed = state_and_spec(compose, {"_target_": None, "warmup": 5}, "optimizer.lr=0.6")
    notes = state_dict.restore(second, saved, changed, ())
    assert notes == [
        "the constant rate after 5 steps of warm-up is not the checkpoint's schedule: it is taken "
        "up at its step 3"
    ]
    assert second.optimizers[0].lr == pytest.approx(0.6 * 4 / 6)


@pytest.mark.parametrize(
    ("node", "change"),
    [
        (SEQUENTIAL, {"milestones": [5]}),
        (CHAINED, {"schedulers": [{**CHAINED["schedulers"][0], "gamma": 0.5}]}),
        ({**PLATEAU, "mode": "max"}, {"min_lr": 0.1}),
    ],
    ids=["milestones", "schedulers", "min_lr"],
)
def test_settings_that_a_schedule_cannot_take_over_begin_it_anew(compose, node, change):
    first, spec = state_and_spec(compose, node)
    saved = save(train(first, 3), spec)
    second, changed = state_and_spec(compose, {**node, **change})
    (note,) = state_dict.restore(second, saved, changed, ())
    assert note.endswith("is not the checkpoint's schedule: it is taken up at its step 3")


def test_a_rate_typed_for_a_resume_counts_within_the_warm_up_and_after_it(compose):
    node = {"_target_": f"{TORCH}.ExponentialLR", "gamma": 0.5, "warmup": 2}
    first, spec = state_and_spec(compose, node)
    saved = save(train(first), spec)
    second, changed = state_and_spec(compose, node, "optimizer.lr=0.6")
    state_dict.restore(second, saved, changed, ())
    found = []
    for _ in range(3):
        found.append(second.optimizers[0].lr)
        train(second)
    assert found == pytest.approx([0.6 * 2 / 3, 0.6, 0.3])


def test_a_reduction_follows_the_quality_after_the_warm_up(compose):
    state, _ = state_and_spec(compose, {**PLATEAU, "mode": "max", "warmup": 2})
    optimizer = state.optimizers[0]
    found = []
    for quality in (0.1, 0.2, 0.3, 0.2, 0.3, 0.4):
        train(state, qualities=[quality])
        found.append(optimizer.lr)
    assert found[2:] == pytest.approx([found[1], found[1] / 2, found[1] / 4, found[1] / 4])


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": f"{__name__}.NeedsEpoch"}, "NeedsEpoch needs epoch, loss in each step()"),
        ({**SEQUENTIAL, "schedulers": [PLATEAU, PLATEAU]}, "ReduceLROnPlateau needs metrics in"),
    ],
)
def test_schedules_whose_step_needs_more_are_refused(node, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_scheduler(node)


def test_a_mode_that_contradicts_the_task_is_refused():
    with pytest.raises(ConfigError, match=r"scheduler\.mode=min contradicts the task, of whose qu"):
        build_scheduler({**PLATEAU, "mode": "min"}, sgd(0.4), 5, "max")


def test_a_schedule_reaches_its_highest_rate_behind_another_one():
    cycles = [{**ONECYCLE, "max_lr": rate} for rate in (0.1, 0.05)]
    node = {"_target_": f"{TORCH}.SequentialLR", "schedulers": cycles, "milestones": [10]}
    found = rates(node, 20)
    # torch keeps one highest rate for both, in the groups.
    assert max(found) == pytest.approx(0.05)


@pytest.mark.parametrize("part", [None, {"target": "x"}, {"_target_": None}])
def test_every_nested_schedule_has_a_target(part):
    inner = {**CHAINED, "schedulers": [part]}
    node = {**CHAINED, "schedulers": [*CHAINED["schedulers"], inner]}
    with pytest.raises(ConfigError, match=r"scheduler\.schedulers\.2\.schedulers\.0=.* is no sche"):
        check_scheduler(node)


def test_nested_schedules_share_out_the_length_of_the_run():
    found = rates(SEQUENTIAL, 10)
    assert found[:3] == [0.2] * 3
    assert found[3] == 0.4
    assert found[-1] == pytest.approx(0.4 * (1 + math.cos(math.pi * 6 / 7)) / 2)
    assert rates(CHAINED, 4)[1] == pytest.approx(0.4 * 0.9 * (1 / 3 + 2 / 3 / 4) / (1 / 3) / 3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"gamma": 0.1}, "scheduler.schedulers.1.gamma=0.1: torch.optim.lr_scheduler.CosineAnn"),
        ({"_target_": "torch.nowhere"}, "scheduler.schedulers.1._target_=torch.nowhere does not"),
    ],
)
def test_nested_schedules_are_checked_before_the_run(compose, change, problem):
    first, second = SEQUENTIAL["schedulers"]
    node = {**SEQUENTIAL, "schedulers": [first, {**second, **change}]}
    spec = compose("tracking=none")
    assert check_targets(replace(spec, scheduler=CHAINED)) == []  # they get the optimizer last
    found = check_targets(replace(spec, scheduler=node))
    assert [text[: len(problem or "")] for text in found] == ([problem] if problem else [])


def test_what_a_schedule_follows_is_said():
    schedule = build_scheduler({**PLATEAU, "warmup": 0.1}, sgd(0.4), 30, "max")
    assert describe_schedule(schedule, 30, "val/accuracy", "max") == (
        "the learning rate warms up for 3 of 30 steps; "
        "ReduceLROnPlateau follows val/accuracy (max) in the evaluations"
    )
    assert describe_schedule(None, 30, "val/accuracy", "max") == ""


def test_a_plateau_run_reduces_the_rate_and_resumes(quick, tmp_path):
    settings = ("+scheduler.patience=0", "+scheduler.threshold=10", "+scheduler.factor=0.5")
    target = f"scheduler._target_={TORCH}.ReduceLROnPlateau"
    quick(target, *settings, "train.eval_every=1").check_ok(
        "ReduceLROnPlateau follows val/accuracy (max) in the evaluations"
    )
    folder = finished_run(tmp_path)
    quick(f"checkpoint.resume={folder}", "train.max_steps=5").check_ok()
