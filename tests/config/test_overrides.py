import sys
from pathlib import Path

import pytest

from runner.config.overrides import config_dir, rewrite_arguments, shadowed_configs


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("precision=64", "precision=64-true"),
        ("precision=32", "precision=32-true"),
        ("precision=16", "precision=16-mixed"),
        ("precision=bf16", "precision=bf16-mixed"),
        ("precision='16'", "precision=16-mixed"),
        ('precision="64"', "precision=64-true"),
        ("precision=32,'16',\"bf16\"", "precision=32-true,16-mixed,bf16-mixed"),
        ("precision=32, bf16", "precision=32-true,bf16-mixed"),
        ("precision=choice(16,bf16-true)", "precision=choice(16-mixed,bf16-true)"),
        ("+precision=16", "+precision=16-mixed"),
        ("model=12", "model='12'"),
        ("data=1,mine", "data='1',mine"),
        ("model=null", "model='null'"),
        ("tracking=False", "tracking='False'"),
    ],
)
def test_names_that_hydra_would_read_as_something_else(given, wanted):
    assert rewrite_arguments([given]) == [wanted]


@pytest.mark.parametrize(
    "text",
    [
        "precision=16-mixed",
        "precision=glob(*-mixed)",
        "precision.dtype=16",
        "seed=16",
        "~debug",
        "train.max_steps=null",
        "mode=plan",
        "precision=",
        "hydra.run.dir=x",
    ],
)
def test_all_else_stays(text):
    assert rewrite_arguments([text]) == [text]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("explain blocks.0", ["mode=explain", "explain='blocks.0'"]),
        ("explain precision=16 *.qkv", ["mode=explain", "explain='*.qkv'", "precision=16-mixed"]),
        ("explain -cd lab a", ["mode=explain", "explain='a'", "-cd", "lab"]),
        ("explain ~debug", ["mode=explain", "~debug"]),
        ("explain a b", ["mode=explain", "explain='a'", "b"]),
        ("explain=a", ["explain=a"]),
    ],
)
def test_the_command_explain_is_short_for_its_mode(given, wanted):
    assert rewrite_arguments(given.split()) == wanted


def test_tags_need_no_mark():
    assert rewrite_arguments(["tracking.tags.team=x", "+tracking.tags.a=1"]) == [
        "++tracking.tags.team=x",
        "+tracking.tags.a=1",
    ]


def test_the_dtype_of_an_optimizers_state_needs_no_mark():
    typed = ["optimizer.state_dtype=bfloat16", "optimizer.rest.state_dtype=null", "optimizer.lr=1"]
    marked = ["++optimizer.state_dtype=bfloat16", "++optimizer.rest.state_dtype=null"]
    assert rewrite_arguments(typed) == [*marked, "optimizer.lr=1"]


def test_what_loads_data_needs_no_mark():
    assert rewrite_arguments(["data.collate=a.b", "data.sampler._target_=a.c", "data.root=x"]) == [
        "++data.collate=a.b",
        "++data.sampler._target_=a.c",
        "data.root=x",
    ]


def test_checkpoint_is_short_for_its_path(tmp_path):
    assert rewrite_arguments(["checkpoint=ab12"]) == ["checkpoint.path=ab12"]
    assert rewrite_arguments(["checkpoint=a,b"]) == ["checkpoint.path=a,b"]  # a sweep
    assert rewrite_arguments(["checkpoint.keep=2", "checkpoint="]) == [
        "checkpoint.keep=2",
        "checkpoint=",
    ]
    odd = tmp_path / "lr=0.1, (b).pt"
    odd.touch()
    assert rewrite_arguments([f"checkpoint={odd}"]) == [f"checkpoint.path='{odd}'"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("-m seed=0,1", "seed=0,1 -m"),
        ("model=vit -m seed=0,1", "model=vit seed=0,1 -m"),
        ("a=1 --config-dir lab b=2", "a=1 b=2 --config-dir lab"),
        ("a=1 -cd lab --cfg job b=2", "a=1 b=2 -cd lab --cfg job"),
        ("--info searchpath a=1", "a=1 --info searchpath"),
        ("--info a=1", "a=1 --info"),
        ("--config-dir=lab a=1", "a=1 --config-dir=lab"),
        ("--config-dir", "--config-dir"),
        ("-sc query=bash", "query=bash -sc"),
    ],
)
def test_flags_come_after_the_overrides(given, wanted):
    assert rewrite_arguments(given.split()) == wanted.split()


def test_config_dir():
    assert config_dir(["a=1", "--config-dir", "lab/conf"]) == Path("lab/conf")
    assert config_dir(["--config-dir=lab"]) == Path("lab")
    assert config_dir(["-cd", "lab"]) == Path("lab")
    assert config_dir(["--config-dir"]) is None
    assert config_dir(["a=1"]) is None


def test_a_shadowed_config_is_warned_of_by_both_names(tmp_path, root):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mlp.yaml").touch()
    (tmp_path / "model" / "mine.yaml").touch()
    (warning,) = shadowed_configs(tmp_path)
    assert str(tmp_path / "model" / "mlp.yaml") in warning
    assert str(root / "conf" / "model" / "mlp.yaml") in warning
    assert "my_mlp.yaml" in warning


def test_python_is_the_one_of_the_checkout(root):
    """What these tests test is this checkout, not an installed copy."""
    assert Path(sys.modules["runner"].__file__).parent == root / "runner"
