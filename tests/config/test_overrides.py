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
        ("model=Inf,NaN,1e5", "model='Inf','NaN','1e5'"),
    ],
)
def test_names_that_hydra_would_read_as_something_else(given, wanted):
    assert rewrite_arguments([given]) == [wanted]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        # The command explain is short for its mode.
        ("explain blocks.0", "mode=explain explain='blocks.0'"),
        ("explain precision=16 *.qkv", "mode=explain explain='*.qkv' precision=16-mixed"),
        ("explain -cd lab a", "mode=explain explain='a' -cd lab"),
        ("explain ~debug", "mode=explain ~debug"),
        ("explain a b", "mode=explain explain='a' b"),
        ("explain=a", "explain=a"),
        # Keys that no yaml lists need no mark.
        ("tracking.tags.team=x +tracking.tags.a=1", "++tracking.tags.team=x +tracking.tags.a=1"),
        (
            "optimizer.state_dtype=bfloat16 optimizer.rest.state_dtype=null optimizer.lr=1",
            "++optimizer.state_dtype=bfloat16 ++optimizer.rest.state_dtype=null optimizer.lr=1",
        ),
        (
            "data.collate=a.b data.sampler._target_=a.c data.root=x",
            "++data.collate=a.b ++data.sampler._target_=a.c data.root=x",
        ),
        # checkpoint= is short for its path, also in a sweep.
        ("checkpoint=ab12", "checkpoint.path=ab12"),
        ("checkpoint=a,b", "checkpoint.path=a,b"),
        ("checkpoint.keep=2 checkpoint=", "checkpoint.keep=2 checkpoint="),
        # Flags come after the overrides.
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
def test_a_command_is_rewritten(given, wanted):
    assert rewrite_arguments(given.split()) == wanted.split()


UNCHANGED = (
    "precision=16-mixed precision=glob(*-mixed) precision.dtype=16 seed=16 ~debug"
    " train.max_steps=null mode=plan precision= hydra.run.dir=x"
    " +model={hidden:[8,8,8]} callbacks=[1,2,a]"
)


def test_all_else_stays():
    assert rewrite_arguments(UNCHANGED.split()) == UNCHANGED.split()


def test_the_path_of_a_file_is_quoted(tmp_path):
    odd = tmp_path / "lr=0.1, (b).pt"
    odd.touch()
    assert rewrite_arguments([f"checkpoint={odd}"]) == [f"checkpoint.path='{odd}'"]


def test_a_folder_of_configs_may_have_an_equals_sign(tmp_path):
    odd = tmp_path / "a=b"
    odd.mkdir()
    argv = ["--config-dir", str(odd), "seed=1"]
    assert rewrite_arguments(argv) == ["seed=1", "--config-dir", str(odd)]


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
    assert "Rename yours." in warning


def test_python_is_the_one_of_the_checkout(root):
    """What these tests test is this checkout, not an installed copy."""
    assert Path(sys.modules["runner"].__file__).parent == root / "runner"
