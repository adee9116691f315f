"""A user's configs that name classes by the paths of version 0.1 compose and run.

tests/data/lab_of_0_1/conf is such a folder. Its files are never changed: a class that moves keeps
its old path.
"""

from pathlib import Path

import pytest

CONF = Path(__file__).parents[1] / "data" / "lab_of_0_1" / "conf"
COMMANDS = {
    "our-mixed": ("model=our_mlp", "data=our_digits", "optimizer=our_adamw8bit"),
    "our-true": ("model=our_gpt", "data=our_tokens"),
    "our-float8": ("model=our_vit", "data=our_digits"),
    "our-fp8": ("model=our_mlp", "data=our_digits", "adapter=our_lora"),
    "our-nf4": ("model=our_mlp", "data=our_digits", "adapter=our_lora"),
    "32-true": ("model=our_complex", "data=our_signals"),
}
NEEDS = {
    "our-mixed": "bitsandbytes",
    "our-float8": "torchao",
    "our-nf4": "bitsandbytes",
    "our-fp8": "peft",
}


@pytest.mark.parametrize("precision", COMMANDS)
def test_a_config_folder_of_an_old_version_runs(precision, main):
    if precision in NEEDS:
        pytest.importorskip(NEEDS[precision])
    done = main(
        "--config-dir",
        CONF,
        f"precision={precision}",
        *COMMANDS[precision],
        "strategy=our_single",
        "tracking=our_none",
        "train.max_steps=2",
        "train.batch_size=16",
    )
    assert done.rc == 0, done.stderr
    assert "finished" in done.stdout
    assert precision in done.stdout


def test_the_config_folder_names_every_kind_of_target():
    """One of each group that has targets, so that no group's old paths go untested."""
    groups = {path.parent.name for path in CONF.rglob("*.yaml")}
    assert groups == {
        "adapter",
        "data",
        "model",
        "optimizer",
        "precision",
        "strategy",
        "task",
        "tracking",
    }
    text = "".join(path.read_text() for path in CONF.rglob("*.yaml"))
    modules = (
        "true.TruePrecision",
        "mixed.MixedPrecision",
        "float8.Float8Precision",
        "bitsandbytes.BitsandbytesPrecision",
        "transformer_engine.TransformerEnginePrecision",
    )
    assert all(f"_target_: runner.precision.{name}\n" in text for name in modules)
