"""mode=explain: the table of modules, and the input that it refuses."""

import re

import pytest
from refusals import message_table

from runner.core.record.tracker import NoTracker, RunOutput
from runner.modes.explain import _print_table
from runner.output.console import PlainConsole

GPT = "model=gpt data=synthetic_tokens model.layers=2 model.width=32 train.batch_size=4"
HF = (
    "model=hf model.kind=causal_lm model.config={model_type:gpt2,n_layer:2,n_embd:32,n_head:2,"
    "vocab_size:64,n_positions:64,bos_token_id:0,eos_token_id:0} data=synthetic_tokens "
    "train.batch_size=4"
)
MIXTURE = (
    "model=hf model.kind=causal_lm model.config={model_type:mixtral,num_hidden_layers:1,"
    "hidden_size:32,intermediate_size:64,num_attention_heads:2,num_key_value_heads:2,head_dim:16,"
    "num_local_experts:4,vocab_size:64,max_position_embeddings:64} data=synthetic_tokens "
    "train.batch_size=4"
)
RESNET = "model=resnet data=digits train.batch_size=4"


def cells(text, first):
    """Return the cells of the row of the table that begins with a module's name."""
    rows = [re.split(r"\s*│\s*", line.strip()) for line in text.splitlines() if "│" in line]
    return next(row[1:] for row in rows if row[0] == first)


ROWS = message_table(f"""
blocks.0.attention.qkv precision=bf16-mixed {GPT} =>
    Linear, float32, float32, bfloat16, bfloat16, float32
    precision=bf16-mixed converts no modules
layer1.0.conv1 precision=16-mixed {RESNET} =>
    Conv2d, float32, float16, float16, float16, float32
    first batch of 4, weights of seed 0: loss
transformer.h.0.attn.c_attn precision=bnb-nf4 {HF} =>
    Linear4bit, float32 nf4, float32, bfloat16, float32, float32, from Conv1D
blocks.1.expand.base_layer precision=bnb-nf4 adapter=lora {GPT} =>
    Linear4bit, float32 nf4, float32, bfloat16, float32, from Linear
blocks.0.expand.base_layer precision=int4 adapter=lora {GPT} =>
    QuantizedLinear, float32 int4-32, float32, float32, float32, from Linear
head precision=bnb-int8 {GPT} =>
    Linear, float32, float32, bfloat16, bfloat16, float32, no: shares a parameter with \
token_embedding
blocks.1.expand precision=float8-tensorwise precision.emulate=true {GPT} =>
    Float8Linear, float32, float32, float8_e4m3fn, bfloat16, float32, from Linear
    emulated (FP8 in linear layers, bfloat16 elsewhere)
blocks.1.attention.qkv precision=16-true precision.keep_fp32=[blocks.1] {GPT} =>
    Linear, float32, float32, float32, float32, float32, no: kept in float32 by \
precision.keep_fp32
body.3 data=digits ~model +model._target_=nets.Mixes precision=bnb-nf4 \
precision.experts=[*.second] =>
    Mixture, float32 nf4, float32, bfloat16, float32, float32, yes: first, second (in part, for \
its forward uses table in
""")


@pytest.mark.parametrize(("command", "parts"), ROWS)
def test_the_row_of_a_module(main, tmp_path, command, parts):
    row, *lines = parts
    done = main("explain", *command.split()).check_ok(*lines)
    assert ", ".join(cells(done.stdout, command.split()[0])) == row
    assert not (tmp_path / "outputs" / "mlflow.db").exists()


@pytest.mark.parametrize("precision", ["32-true", "qat-int4"])
def test_the_expert_that_a_format_hurts_most_is_named(main, precision):
    done = main("explain", "*.mlp", f"precision={precision}", *MIXTURE.split()).check_ok()
    matrix = r"model\.layers\.0\.mlp\.experts\.(gate_up|down)_proj\[\d\] most: SQNR 3\d\.\d dB"
    assert re.search(f"float8_e4m3fn hurts the weight of expert {matrix}", done.stdout)
    assert "type precision.ignore_modules=[model.layers.0.mlp.experts]" in done.stdout
    assert cells(done.stdout, "model.layers.0.mlp.experts")[0] == "MixtralExperts"
    assert "_experts" not in done.stdout


def test_the_row_of_experts_stands_for_what_they_hold(main):
    done = main("explain", "*.experts.act_fn", "precision=bnb-nf4", *MIXTURE.split()).check_ok()
    _, stores, _, computes, *_ = cells(done.stdout, "model.layers.0.mlp.experts")
    assert (stores, computes) == ("nf4", "bfloat16")


NESTED = "base_model.model.model.decoder.layers.0.self_attn.q_proj.base_layer"
LINES = ["base_model.model.", "model.decoder.layers.", "0.self_attn.q_proj.", "base_layer"]


@pytest.mark.parametrize(
    ("width", "names", "left_out"), [(80, LINES, ["converted"]), (200, [NESTED], [])]
)
def test_a_narrow_terminal_breaks_names_at_dots_and_leaves_out_last_columns(
    width, names, left_out, tmp_path, capsys
):
    output = RunOutput(tmp_path, PlainConsole(width=width), NoTracker())
    formats = ("float32 nf4", "float32", "bfloat16", "bfloat16", "")
    _print_table(output, [(NESTED, "Linear4bit", *formats, "from Linear")])
    table, _, message = capsys.readouterr().out.partition("Columns left out: ")
    assert "gradients" not in table
    first_cells = [line.partition("│")[0].strip() for line in table.splitlines() if "│" in line]
    assert first_cells == names
    assert message.split(".")[0].split(", ") == (left_out or [""])


def test_modules_that_store_nothing_and_do_not_run_have_no_row(main):
    """The model calls the blocks that the list holds."""
    done = main("explain", "blocks", "precision=bnb-nf4", *GPT.split()).check_ok()
    for name in ("blocks.0.contract", "blocks.1.contract"):
        assert cells(done.stdout, name)[-1] == "from Linear"
    with pytest.raises(StopIteration):
        cells(done.stdout, "blocks")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "Type python -m runner explain <module>"),
        ("precision=bf16", "Type python -m runner explain <module>"),
        (f"blocks.9 {GPT}", "blocks.9 matches no module of the model. Nearest names: blocks.1"),
        (f"blocks.0 blocks.1 {GPT}", "blocks.1 is not an override."),
        ("blocks.0 modle=gpt", "modle=gpt is not known."),
        (f"blocks.0 train.compile=true {GPT}", "Type train.compile=false."),
    ],
)
def test_wrong_input_gets_one_message(main, command, message):
    done = main("explain", *command.split()).check_refused(message)
    assert done.stderr.count("error: ") == 1
