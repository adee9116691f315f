"""The values of options that a precision refuses, each with what is allowed, and all at once."""

import pytest
from omegaconf import OmegaConf
from refusals import message_table

from runner.core.base.errors import ConfigError
from runner.precision import registry
from runner.precision.transformer_engine import TransformerEnginePrecision

SWITCH = "is not known. Allowed: true, false."
# What is typed after `precision.`, precisions of each class that checks it, and the problem.
SHARED = message_table(f"""
reduced_precision_reduction=2 => 16-true bf16-mixed bnb-nf4 float8-rowwise transformer-engine
    precision.reduced_precision_reduction=2 {SWITCH}
reduced_precision_reduction=true => 64-true 32-true tf32
    precision.reduced_precision_reduction=true: precision={{name}} has no products in half \
precision. Leave it out.
float32_matmul=tf32 => 32-true bf16-mixed bnb-nf4 float8-tensorwise
    precision.float32_matmul=tf32 is not known. Allowed: highest, high, medium.
cpu_float16=fast => 16-true 16-mixed bnb-nf4
    precision.cpu_float16=fast is not known. Allowed: auto, native, float32_accumulate.
emulate=maybe => bf16-mixed tf32 float8-rowwise transformer-engine
    precision.emulate=maybe {SWITCH}
allow_substitute=1 => 16-mixed | precision.allow_substitute=1 {SWITCH}
""")
# A precision and what is typed after `precision.`, and its problems.
OWN = message_table(f"""
32-true dtype=float8 =>
    precision.dtype=float8 is not known. Allowed: float64, float32, float16, bfloat16.
bf16-mixed dtype=float32 => precision.dtype=float32 is not known. Allowed: float16, bfloat16.
32-true emulate=true => precision.emulate=true: precision=32-true runs everywhere as it is.
32-true float32_matmul=tf32 cpu_float16=fast =>
    precision.float32_matmul=tf32 is not known. Allowed: highest, high, medium.
    precision.cpu_float16=fast is not known. Allowed: auto, native, float32_accumulate.
16-mixed loss_scale.init_scale=0 => precision.loss_scale.init_scale=0 cannot work. Allowed: above 0.
bf16-mixed loss_scale.init_scale=1024.0 =>
    precision.loss_scale={{'init_scale': 1024.0}}: precision=bf16-mixed has none, because \
bfloat16 has float32's range. Leave it out, or type precision=16-mixed.
bnb-nf4 compute_dtype=float64 threshold=6.0 =>
    precision.compute_dtype=float64 is not known. Allowed: bfloat16, float16, float32.
    precision.threshold=6.0: nf4 has none. Type precision=bnb-int8, or leave it out.
bnb-int8 threshold=-1.0 => precision.threshold=-1.0 is negative. Allowed: 0 (none) and up.
bnb-nf4 mode=nf8 =>
    precision.mode=nf8 is not known. Allowed: nf4, nf4-dq, fp4, fp4-dq, int8, int8-training.
bnb-nf4 mode=fp4 => precision.mode=fp4 is not what bnb-nf4 is. Type precision=bnb-fp4.
qat-int4 group_size=7 compute_dtype=float16 => precision.group_size=7 must be an even number from 2.
    precision.compute_dtype=float16 is not known. Allowed: float32, bfloat16.
int4 group_size=true => precision.group_size=True must be an even number from 2.
int4 format=[int4] => precision.format=['int4'] is not known. Allowed: int4, int8, nvfp4.
qat-int4 format=int8 => precision.format=int8 is not what qat-int4 is. Type precision=qat-int8.
int4 format=int8 => precision.format=int8 is not what int4 is. Type precision=int8.
float8-tensorwise recipe=delayed weights=half emulate=maybe min_features=0 =>
    precision.recipe=delayed is not known. Allowed: tensorwise, rowwise, rowwise_with_gw_hp, \
mxfp8_rceil, mxfp8_rceil_wgrad_with_hp.
    precision.weights=half is not known. Allowed: float32, bfloat16.
    precision.emulate=maybe {SWITCH} | precision.min_features=0 must be a whole number from 1.
torchao-mxfp8 recipe=rowwise =>
    precision.recipe=rowwise is not what torchao-mxfp8 is. Type precision=float8-rowwise.
float8-rowwise recipe=tensorwise =>
    precision.recipe=tensorwise is not what float8-rowwise is. Type precision=float8-tensorwise.
transformer-engine recipe.kind=delayed recipe.margin=-1 recipe.format=E5M2 recipe.history=16 \
recipe.reduce_amax=1 weights=float32 fuse=maybe =>
    precision.recipe.margin=-1 is not known. Allowed: a whole number from 0.
    precision.recipe.format=E5M2 is not known. Allowed: HYBRID, E4M3.
    precision.recipe.history=16: the recipe delayed has no such key. Allowed: format, margin, \
amax_history_len, amax_compute_algo, reduce_amax.
    precision.recipe.reduce_amax=1 {SWITCH}
    precision.weights=float32 is not known. Allowed: bfloat16, float16.
    precision.fuse=maybe {SWITCH}
transformer-engine recipe.kind=current =>
    precision.recipe.kind=current is not what transformer-engine is. Type \
precision=transformer-engine-current.
transformer-engine-block recipe.kind=delayed =>
    precision.recipe.kind=delayed is not what transformer-engine-block is. Type \
precision=transformer-engine.
transformer-engine-nvfp4 weights=float16 =>
    precision.weights=float16: NVFP4's products cannot come out in float16. Type \
precision.weights=bfloat16.
transformer-engine accumulate=ada =>
    precision.accumulate=ada is not known. Allowed: float32, hopper.
transformer-engine-block accumulate=hopper =>
    precision.accumulate=hopper is for emulated products: hardware sums in its own way. Allowed \
without precision.emulate=true: float32. Type precision.emulate=true, too.
transformer-engine-mxfp8 accumulate=hopper emulate=true =>
    precision.accumulate=hopper: Hopper has no products of the recipe mxfp8. Allowed: recipes \
delayed, current, block. Type precision=transformer-engine-block.
""")
REFUSED = OWN + [
    (f"{name} {word}", [problem.format(name=name)])
    for word, (names, problem) in SHARED
    for name in names.split()
]


@pytest.mark.parametrize(("typed", "problems"), REFUSED)
def test_a_value_that_cannot_work_is_refused(typed, problems):
    name, *words = typed.split()
    options = OmegaConf.to_container(OmegaConf.from_dotlist(words))
    with pytest.raises(ConfigError) as error:
        registry.load_precision(name, **options)
    assert [*error.value.problems] == problems


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("current", "recipe=current has no keys"),
        ({}, "kind=None is not known. Allowed: delayed, current, block, mxfp8, nvfp4."),
        ({"kind": ["delayed"]}, "kind=['delayed'] is not known"),
        ({"kind": "current", "margin": 0}, "margin=0: the recipe current has no such key"),
        ({"kind": "delayed", "amax_history_len": 0}, "Allowed: a whole number from 1."),
        ({"kind": "delayed", "amax_history_len": 16.0}, "amax_history_len=16.0 is not known"),
        ({"kind": "delayed", "margin": True}, "margin=True is not known"),
        ({"kind": "delayed", "amax_compute_algo": "mean"}, "Allowed: max, most_recent."),
        ({"kind": "block", "x_block_scaling_dim": 3}, "Allowed: 1, 2."),
        ({"kind": "block", "x_block_scaling_dim": 2}, "x_block_scaling_dim and w_block_scaling_"),
        ({"kind": "mxfp8", "backward_override": "no"}, "null, high_precision, dequantized."),
    ],
)
def test_a_bad_recipe_is_refused(recipe, message):
    with pytest.raises(ConfigError) as error:
        TransformerEnginePrecision("own", "bfloat16", recipe)
    (problem,) = error.value.problems
    assert message in problem
