from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest
from omegaconf import OmegaConf

from runner.config.invocation import Invocation
from runner.config.schema import (
    CheckpointSpec,
    DebugSpec,
    GuardSpec,
    NumericsSpec,
    RunSpec,
    TrainSpec,
)


def test_the_defaults_have_no_problem():
    assert list(RunSpec().problems()) == []


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"mode": "fly"}, ["mode=fly", "train, evaluate, plan"]),
        ({"mode": "evaluate"}, ["checkpoint=<file"]),
        ({"seed": -1}, ["seed=-1", "0 and up"]),
        ({"train": TrainSpec(max_seconds=-1.0)}, ["train.max_seconds=-1.0 must be above 0"]),
        ({"train": TrainSpec(max_seconds=float("nan"))}, ["train.max_seconds=nan must be"]),
        ({"train": TrainSpec(max_steps=0)}, ["train.max_steps=0", "1 and up"]),
        ({"train": TrainSpec(epochs=0)}, ["train.epochs=0"]),
        ({"train": TrainSpec(batch_size=-3)}, ["train.batch_size=-3"]),
        ({"train": TrainSpec(accumulate=0)}, ["train.accumulate=0"]),
        ({"train": TrainSpec(eval_every=0)}, ["train.eval_every=0"]),
        ({"train": TrainSpec(log_every=0)}, ["train.log_every=0"]),
        ({"train": TrainSpec(early_stop=0)}, ["train.early_stop=0"]),
        ({"train": TrainSpec(clip_norm=0.0)}, ["train.clip_norm=0.0", "null"]),
        ({"train": TrainSpec(clip_norm=float("nan"))}, ["train.clip_norm=nan"]),
        ({"train": TrainSpec(clip_value=-1.0)}, ["train.clip_value=-1.0", "null"]),
        (
            {"train": TrainSpec(clip_norm=1.0, clip_value=0.5)},
            ["train.clip_norm=1.0 and train.clip_value=0.5 exclude each other."],
        ),
        ({"train": TrainSpec(compile="fast")}, ["train.compile=fast is not known", "regional"]),
        (
            {"train": TrainSpec(compile=True, compile_rounding="exact")},
            ["train.compile_rounding=exact is not known", "Allowed: fused, eager."],
        ),
        (
            {"train": TrainSpec(compile_rounding="eager")},
            ["train.compile_rounding=eager", "train.compile=false compiles nothing", "Type train"],
        ),
        (
            {"train": TrainSpec(activation_checkpointing="blocks")},
            ["train.activation_checkpointing=blocks does not fit", "[blocks,head]"],
        ),
        ({"train": TrainSpec(activation_checkpointing=[])}, ["activation_checkpointing=[] does"]),
        ({"train": TrainSpec(num_workers=-1)}, ["train.num_workers=-1"]),
        ({"checkpoint": CheckpointSpec(every_steps=0)}, ["checkpoint.every_steps=0"]),
        ({"checkpoint": CheckpointSpec(keep=0)}, ["checkpoint.keep=0"]),
        ({"debug": DebugSpec(overfit=0)}, ["debug.overfit=0"]),
        ({"debug": DebugSpec(profile=0)}, ["debug.profile=0"]),
        ({"guard": GuardSpec(non_finite="off")}, ["guard.non_finite=off", "stop, warn, ignore"]),
        ({"guard": GuardSpec(data="False")}, ["guard.data=False", "stop, warn, ignore"]),
        ({"guard": GuardSpec(overflow_steps=0)}, ["guard.overflow_steps=0", "1 and up"]),
        ({"guard": GuardSpec(spike_factor=1.0)}, ["guard.spike_factor=1.0", "above 1"]),
        ({"guard": GuardSpec(spike_factor=float("nan"))}, ["guard.spike_factor=nan"]),
        ({"numerics": NumericsSpec(every=0)}, ["numerics.every=0", "1 and up"]),
        (
            {"numerics": NumericsSpec(every=9), "train": TrainSpec(compile="regional")},
            ["numerics.every=9", "train.compile=regional", "Type train.compile=false"],
        ),
        ({"mode": "replay"}, ["debug=replay", "Type", "batch=outputs/runs/<time>/guard/"]),
        ({"batch": "x.json"}, ["debug=replay", "batch="]),
        ({"data": {"shuffle": "no"}}, ["data.shuffle=no", "true or false"]),
    ],
)
def test_each_problem_has_its_message(changes, parts):
    (problem,) = replace(RunSpec(), **changes).problems()
    assert all(part in problem for part in parts)


def test_all_problems_are_reported_at_once():
    spec = replace(RunSpec(), mode="fly", seed=-1, train=TrainSpec(epochs=0, accumulate=0))
    assert len(list(spec.problems())) == 4


def test_a_spec_is_frozen_throughout():
    spec = RunSpec()
    for part in fields(spec):
        with pytest.raises(FrozenInstanceError):
            setattr(spec, part.name, None)
        value = getattr(spec, part.name)
        if is_dataclass(value):
            with pytest.raises(FrozenInstanceError):
                setattr(value, fields(value)[0].name, None)


def test_the_yaml_states_the_defaults_of_the_spec(root):
    """conf/config.yaml repeats every default of schema.py; the two must agree."""
    shown = OmegaConf.to_container(OmegaConf.load(root / "conf" / "config.yaml"))
    defaults = OmegaConf.to_container(OmegaConf.structured(RunSpec))
    for key in ("mode", "seed", "deterministic", "train", "init", "checkpoint", "guard", "batch"):
        assert shown[key] == defaults[key], key


def test_overrides_key_looks_at_a_key_and_the_keys_under_it_only():
    invocation = Invocation(overrides=("model=vit", "+data.root=x", "taskish=1", "~optimizer"))
    assert invocation.overrides_key("model")
    assert invocation.overrides_key("data")
    assert invocation.overrides_key("optimizer")
    assert not invocation.overrides_key("task")


def test_labels_name_what_was_swept_or_precision_model_and_data():
    spec = replace(RunSpec(), precision={"name": "16-mixed"}, model={"_target_": "lab.nets.Net"})
    single = Invocation({"model": "mlp", "data": "digits"})
    assert single.label(spec) == "16-mixed mlp digits"
    assert Invocation({"data": "digits"}).label(spec) == "16-mixed Net digits"
    job = Invocation(swept_overrides=("precision=16-mixed", "seed=1"), sweep="abc")
    assert job.label(spec) == "16-mixed seed=1"
    found = Invocation(
        sweep="s", swept_overrides=("optimizer.lr=0.006431172050131994", "data.x=0.12", "a=b")
    )
    assert found.label(spec) == "16-mixed optimizer.lr=0.006431 data.x=0.12 a=b"
