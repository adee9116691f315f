from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest
from omegaconf import OmegaConf

from runner.config.resolve import resolve_spec
from runner.core import Room
from runner.core.config.invocation import Invocation
from runner.core.config.schema import RunSpec

COUNTS = (
    "train.max_steps train.epochs train.batch_size train.accumulate train.eval_every"
    " train.log_every train.early_stop checkpoint.every_steps checkpoint.keep debug.overfit"
    " debug.profile guard.overflow_steps numerics.every advise.steps"
)
NAN = float("nan")


def changed(values):
    """A spec with these values of dotted keys."""
    spec = RunSpec()
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        kind = Room.all_sections().get(section or name)
        if kind is not None:
            spec = spec.with_value(section or name, kind(**{name: value}) if section else value)
        elif section:
            part = replace(getattr(spec, section), **{name: value})
            spec = replace(spec, **{section: part})
        else:
            spec = replace(spec, **{key: value})
    return spec


@pytest.mark.parametrize("key", COUNTS.split())
def test_a_count_below_one_is_refused(key):
    for value in (0, -3):
        message = f"{key}={value} is too small. Allowed: 1 and up."
        assert list(changed({key: value}).problems()) == [message]


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("mode", "fly", ["train, evaluate, plan"]),
        ("seed", -1, ["0 to 8796093022207"]),
        ("train.max_seconds", -1.0, ["must be above 0"]),
        ("train.max_seconds", NAN, ["must be above 0"]),
        ("train.clip_norm", 0.0, ["above 0, or null"]),
        ("train.clip_norm", NAN, ["above 0, or null"]),
        ("train.clip_value", -1.0, ["above 0, or null"]),
        ("train.compile", "fast", ["is not known", "regional"]),
        ("train.compile_rounding", "eager", ["train.compile=false compiles nothing", "Type train"]),
        ("train.activation_checkpointing", "blocks", ["does not fit", "[blocks,head]"]),
        ("train.activation_checkpointing", [], ["does not fit"]),
        ("train.num_workers", -1, ["0 and up"]),
        ("guard.non_finite", "off", ["stop, warn, ignore"]),
        ("guard.data", "False", ["stop, warn, ignore"]),
        ("guard.spike_factor", 1.0, ["above 1"]),
        ("guard.spike_factor", NAN, ["above 1"]),
    ],
)
def test_a_value_that_is_not_allowed_is_named(key, value, parts):
    (problem,) = changed({key: value}).problems()
    assert problem.startswith(f"{key}={value} ")
    assert all(part in problem for part in parts)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"mode": "evaluate"}, ["checkpoint=<file"]),
        (
            {"train.clip_norm": 1.0, "train.clip_value": 0.5},
            ["train.clip_norm=1.0 and train.clip_value=0.5 exclude each other."],
        ),
        (
            {"train.compile": True, "train.compile_rounding": "exact"},
            ["train.compile_rounding=exact is not known", "Allowed: fused, eager."],
        ),
        (
            {"numerics.every": 9, "train.compile": "regional"},
            ["numerics.every=9", "train.compile=regional", "Type train.compile=false"],
        ),
        ({"mode": "replay"}, ["debug=replay", "Type", "batch=outputs/runs/<time>/guard/"]),
        ({"batch": "x.json"}, ["debug=replay", "batch="]),
        ({"data": {"shuffle": "no"}}, ["data.shuffle=no", "true or false"]),
    ],
)
def test_each_problem_has_its_message(values, parts):
    (problem,) = changed(values).problems()
    assert all(part in problem for part in parts)


def test_all_problems_are_reported_at_once():
    values = {"mode": "fly", "seed": -1, "train.epochs": 0, "train.accumulate": 0}
    assert len(list(changed(values).problems())) == 4


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
    defaults = resolve_spec(OmegaConf.create({})).to_dict()
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
