"""TransformerEngine's precisions: their configs, and the recipes that the library gets.

What needs a GPU is in tests/gpu, what the emulation shows in emulation/test_te_emulation.py.
"""

import pytest
import torch
from precision_models import CPU

from runner.precision import registry, te_recipes
from runner.precision.te_recipes import KINDS

NAMES = [name for name in registry.precision_names() if name.startswith("transformer-engine")]


def test_there_is_a_yaml_for_each_recipe_with_all_its_keys_at_their_defaults():
    assert len(NAMES) == 6
    loaded = [registry.load_precision(name) for name in NAMES]
    assert {p.recipe["kind"] for p in loaded} == set(KINDS)
    for precision in loaded:
        keys = {key: entry.default for key, entry in precision.kind.keys.items()}
        assert precision.recipe == {"kind": precision.recipe["kind"], **keys}
        assert precision.storage is precision.compute
        is_float16 = precision.name == "transformer-engine-float16"
        assert (precision.storage is torch.float16) == is_float16
        assert (precision.layout, precision.loss_dtype) == ("", torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_the_forward_on_a_cpu_only_sets_the_default_dtype(name):
    precision = registry.load_precision(name)
    for _ in range(2):
        with precision.forward(CPU):
            assert torch.get_default_dtype() is precision.storage
    assert precision.cast({"x": torch.ones(1)})["x"].dtype is precision.storage
    with precision.session(torch.nn.Linear(2, 2), CPU):
        assert precision.kernels(torch.nn.Linear(2, 2), CPU) == ""
    assert precision.cast(torch.ones(1).long()).dtype is torch.int64


@pytest.fixture
def library():
    """TransformerEngine makes its recipes without a GPU."""
    pytest.importorskip("transformer_engine.pytorch", reason="TransformerEngine is not installed")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("library")
def test_the_library_takes_every_recipe_and_fills_none_from_the_environment(name):
    precision = registry.load_precision(name)
    made = te_recipes.build_recipe(precision.recipe)
    assert type(made).__name__ == precision.kind.recipe
    for key, value in precision.recipe.items():
        if key == "format":
            assert made.fp8_format.name == value
        elif key != "kind":
            assert getattr(made, key) == value


@pytest.mark.usefixtures("library")
def test_power_of_two_scales_reach_what_the_library_reads():
    parts = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    for kind, key, wanted in (
        ("current", "use_power_2_scales", {False: False, True: True}),
        ("block", "use_f32_scales", {False: True, True: False}),
    ):
        for value, power_2 in wanted.items():
            made = te_recipes.build_recipe({"kind": kind, key: value})
            assert [getattr(made, part).power_2_scale for part in parts] == [power_2] * 3
