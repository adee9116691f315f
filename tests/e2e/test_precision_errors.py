"""Models that a precision, or PyTorch's kernels for it, cannot run: one message that names what
works, and what it names then trains."""

import re

import pytest
from nets_that_fail import OPERATIONS
from refusals import message_table
from run_folders import read_json


@pytest.fixture
def strange(main, root):
    """A tiny run of a model of nets_that_fail, in the folder out."""
    conf = root / "tests" / "helpers" / "conf"

    def run(typed):
        name, *words = typed.split()
        own = f"--config-dir {conf} model=failing model._target_=nets_that_fail.{name}".split()
        short = "train.max_steps=2 train.batch_size=4 tracking=none hydra.run.dir=out".split()
        return main(*own, *short, *words)

    return run


TRUE16 = "precision=16-true optimizer.eps=1e-3"
FP8 = "precision=transformer-engine precision.emulate=true"
NO_KERNEL = "no such operation in half precision on cpu"
NUMPY = OPERATIONS["numpy"].__code__.co_firstlineno
KEEP_OP = "precision.keep_fp32=[op]"
KEEP_SPECTRAL = "precision.keep_fp32=[spectral]"

FAILING = message_table(f"""
Ops +model.op=inverse precision=bf16-true => It fails in op (Op), nets_that_fail.py, line
    {NO_KERNEL} | {KEEP_OP} | precision=bf16-mixed
Ops +model.op=cholesky {TRUE16} => {NO_KERNEL} | {KEEP_OP} | precision=16-mixed
Ops +model.op=distances {FP8} => {NO_KERNEL} | {KEEP_OP}
Blocks +model.op=inverse precision=bf16-true => precision.keep_fp32=[blocks.*.op]
Blocks +model.op=inverse precision=bf16-true precision.keep_fp32=[head] =>
    precision.keep_fp32=[head,blocks.*.op]
Operator precision=bf16-true => {KEEP_SPECTRAL} | precision=bf16-mixed
Net +model.inside=fft precision=bf16-true => It fails in the model itself (Net), nets_that_fail.py
    Type precision=bf16-mixed | in Net.forward, give the operation x.float()
Net +model.inside=float precision=bf16-true => Tensors of two dtypes meet there
    precision.keep_fp32=[head]
Net +model.inside=float precision=64-true => Leave out .float(), .double() and dtype= in the forward
Ops +model.op=mask {TRUE16} => beyond the range of float16, which ends at 65504 | {KEEP_OP}
    torch.finfo(x.dtype).min | precision=bf16-true
Ops +model.op=mask precision=16-mixed => {KEEP_OP} | precision=bf16-mixed
Ops +model.op=detached precision=bf16-mixed => NumPy has no bfloat16 | {KEEP_OP}
Recurrent precision=16-mixed precision.cpu_float16=native => It fails in rnn (LSTM)
    Type precision.cpu_float16=
Built +model.dtype=float64 precision=bnb-nf4 =>
    leaves what it does not convert as the model was built, here float64 (conv.weight
    computes in bfloat16 | end its constructor with self.float()
Built +model.dtype=float16 precision=bnb-int8 => here float16
    or type precision.compute_dtype=float16
Built +model.dtype=bfloat16 precision=bnb-int8-training precision.compute_dtype=float32 =>
    here bfloat16 | or type precision.compute_dtype=bfloat16
Built +model.dtype=float16 precision=bf16-mixed => Build the model in float32
Ops +model.op=train_mask precision=16-mixed => fails in step 1 with | {KEEP_OP}
Ops +model.op=train_fft precision=bf16-true => fails in step 1 with | {KEEP_OP}
Ops +model.op=numpy precision=32-true => fails in step 1 with | have no gradient
    x.detach().float().cpu().numpy()
Net task._target_=nets_that_fail.NumpyLoss =>
    It fails outside the model's forward, nets_that_fail.py, line {NUMPY}. | no gradient
Net +model.inside=cube precision=bf16-true => fails in step 1 with | nets_that_fail.py, line
    {NO_KERNEL}
Net +model.after=pair precision=bnb-nf4 => The model returns a tuple of 2 | `return <tensor>`
Two precision=bnb-int8 => Two.forward takes (a, b)
Net +model.after=cut {FP8} => has no gradient, so nothing can train
""")


@pytest.mark.parametrize(("typed", "parts"), FAILING)
def test_a_model_that_a_precision_cannot_run_gets_one_message(strange, typed, parts):
    assert "that fit" not in strange(typed).check_refused(*parts).stderr


TRAINING = message_table(f"""
Ops +model.op=cholesky {TRUE16} {KEEP_OP} => layer | float16 | float16
Ops +model.op=distances {FP8} {KEEP_OP} => layer | bfloat16 | float32
Blocks +model.op=inverse precision=bf16-true precision.keep_fp32=[blocks.*.op] =>
    blocks.0.layer | bfloat16 | bfloat16
Operator precision=bf16-true {KEEP_SPECTRAL} => lift | bfloat16 | bfloat16
Net +model.inside=fft precision=bf16-mixed => layer | float32 | bfloat16
Net +model.inside=float precision=bf16-true precision.keep_fp32=[head] => head | float32 | float32
Ops +model.op=mask precision=16-mixed {KEEP_OP} => layer | float32 | float16
Recurrent precision=16-mixed precision.cpu_float16=float32_accumulate => rnn | float32 | float16
Built +model.dtype=float16 precision=bnb-nf4 precision.compute_dtype=float16 =>
    layer | float16 uint8 | float16
""")
"""What messages name: model and words, then a module, its dtypes in store and in products."""


@pytest.mark.parametrize(("typed", "wanted"), TRAINING)
def test_what_a_message_names_trains_in_the_precision(strange, tmp_path, typed, wanted):
    module, stores, computes = wanted
    strange(typed).check_ok()
    result = read_json(tmp_path / "out" / "result.json")
    assert 0 < result["train_loss"] < 10
    table = read_json(tmp_path / "out" / "dtypes.json")
    (row,) = [row for row in table["data"] if row[0] == module]
    found = dict(zip(table["columns"], row, strict=True))
    assert (found["stores"], found["computes"]) == (stores, computes)


@pytest.mark.parametrize(
    "precision",
    [
        "bnb-fp4-dq",
        "bnb-int8",
        "bnb-int8-training",
        FP8.removeprefix("precision="),
        "float8-rowwise precision.emulate=true",
    ],
)
def test_a_converted_layer_takes_its_input_by_keyword(strange, tmp_path, precision):
    assert strange(f"Net precision={precision}").rc == 0
    rows = read_json(tmp_path / "out" / "conversion.json")
    assert "layer" in {row["module"] for row in rows if row["done"]}


@pytest.mark.parametrize("precision", ["bnb-nf4", "bnb-int8"])
def test_a_model_that_reads_converted_weights_trains_with_those_as_they_were(strange, precision):
    done = strange(f"Swin precision={precision}").check_ok()
    assert re.search(
        r"attn\.qkv.*the model reads its weight and passes its forward by", done.stdout
    )


def test_what_fails_after_steps_were_trained_is_a_failed_run(strange):
    strange("Ops +model.op=late_fft precision=bf16-true").check_refused(
        "fails in step 2 with precision=bf16-true", KEEP_OP, status=1
    )
