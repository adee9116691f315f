"""mode=explain: facts about one module or several, and the input that it refuses."""

import re

import pytest

GPT = "model=gpt data=synthetic_tokens model.layers=2 model.width=32 train.batch_size=4"
HF = (
    "model=hf model.kind=causal_lm model.config={model_type:gpt2,n_layer:2,n_embd:32,n_head:2,"
    "vocab_size:64,n_positions:64,bos_token_id:0,eos_token_id:0} data=synthetic_tokens "
    "train.batch_size=4"
)
RESNET = "model=resnet data=digits train.batch_size=4"
EMULATED = "precision.emulate=true"
ROWWISE = f"precision=float8-rowwise {EMULATED}"


def cells(text, first):
    """Return the cells of the first row of a table that begins with a text."""
    rows = [re.split(r"\s*│\s*", line.strip()) for line in text.splitlines() if "│" in line]
    return next(row[1:] for row in rows if row[0] == first)


@pytest.mark.parametrize(
    ("command", "facts"),
    [
        pytest.param(
            f"blocks.0.attention.qkv precision=bf16-mixed {GPT}",
            {
                "weight": ["float32", "[96, 32]", "12,288", ""],
                "forward": ["float32 [4, 64, 32]", "bfloat16 (addmm)", "bfloat16 [4, 64, 96]"],
                "backward": ["bfloat16 [4, 64, 96]", "bfloat16 (mm)", "float32 [4, 64, 32]"],
                "line": "precision=bf16-mixed converts no modules",
                "remedy": "precision.keep_fp32=[blocks.0.attention.qkv]",
            },
            id="autocast",
        ),
        pytest.param(
            f"head precision=bf16-true {GPT}",
            {
                "forward": ["bfloat16 [4, 64, 32]", "bfloat16 (mm)", "bfloat16 [4, 64, 64]"],
                "remedy": "precision.keep_fp32=[head,token_embedding]",
            },
            id="a tied weight",
        ),
        pytest.param(
            f"layer1.0.conv1 precision=16-mixed {RESNET}",
            {
                "forward": [
                    "float16 [4, 64, 8, 8]",
                    "float16 (convolution)",
                    "float16 [4, 64, 8, 8]",
                ],
                "line": "gradients times the loss scale 65536",
            },
            id="a convolution",
        ),
        pytest.param(
            f"transformer.h.0.attn.c_attn precision=bnb-nf4 {HF}",
            {
                "weight": ["uint8", "[96, 32]", "1,792", "nf4, float32 scale per 64, frozen"],
                "line": "converted from Conv1D to Linear4bit",
                "remedy": "precision.ignore_modules=[transformer.h.0.attn.c_attn]",
            },
            id="a Hugging Face model in 4 bits",
        ),
        pytest.param(
            f"blocks.1.expand precision=bnb-nf4 adapter=lora {GPT}",
            {
                "base_layer.weight": [
                    "uint8",
                    "[128, 32]",
                    "2,368",
                    "nf4, float32 scale per 64, frozen",
                ],
                "line": "converted from Linear to Linear4bit",
            },
            id="an adapter",
        ),
        pytest.param(
            f"head precision=bnb-int8 {GPT}",
            {"line": "not converted: shares a parameter with token_embedding"},
            id="not converted",
        ),
        pytest.param(
            f"blocks.1.expand precision=float8-tensorwise {EMULATED} {GPT}",
            {
                "forward": [
                    "float32 [4, 64, 32]",
                    "float8_e4m3fn (mm)",
                    "bfloat16 [4, 64, 128]",
                ],
                "backward": ["bfloat16 [4, 64, 128]", "float8_e5m2 (mm)", "float32 [4, 64, 32]"],
                "line": "emulated (FP8 in linear layers, bfloat16 elsewhere)",
            },
            id="FP8 of torchao",
        ),
        pytest.param(
            f"blocks.1.expand precision=transformer-engine {EMULATED} {GPT}",
            {
                "line": "fp8/scale/blocks.1.expand: ",
                "forward": ["bfloat16 [4, 64, 32]", "float32 (mm)", "bfloat16 [4, 64, 128]"],
            },
            id="FP8 of TransformerEngine",
        ),
        pytest.param(
            f"blocks.0.expand {ROWWISE} precision.keep_blocks=[1,0] {GPT}",
            {
                "line": "not converted: kept by precision.keep_blocks",
                "remedy": "leave precision.keep_blocks= out, or keep fewer blocks",
            },
            id="a kept block",
        ),
        pytest.param(
            f"blocks.1.attention precision=16-true precision.keep_fp32=[blocks.1] {GPT}",
            {
                "line": "kept in float32 by precision.keep_fp32",
                "remedy": "leave it out of precision.keep_fp32=",
            },
            id="in float32",
        ),
        pytest.param(
            f"blocks precision=32-true {GPT}",
            {"line": "the model may call the modules inside it. Type explain blocks.0"},
            id="a container",
        ),
    ],
)
def test_the_facts_about_a_module(main, tmp_path, command, facts):
    done = main("explain", *command.split())
    assert done.rc == 0, done.stderr
    for name in facts.keys() - {"line", "remedy"}:
        assert cells(done.stdout, name) == facts[name]
    assert facts.get("line", "") in done.stdout
    remedies = "\n".join(line for line in done.stdout.splitlines() if line.startswith("To "))
    assert remedies
    assert facts.get("remedy", "") in remedies
    assert not (tmp_path / "outputs" / "mlflow.db").exists()


def test_several_modules_have_a_line_each(main):
    done = main("explain", "*.contract", "precision=bnb-nf4", *GPT.split())
    assert done.rc == 0, done.stderr
    assert "2 modules match *.contract" in done.stdout
    for name in ("blocks.0.contract", "blocks.1.contract"):
        assert cells(done.stdout, name)[:3] == ["1/1", "uint8", "bfloat16"]
    assert "precision.ignore_modules=[*.contract]" in done.stdout


def test_the_loss_scale_keeps_gradients_in_float16s_range(main):
    """Mean gradients of many tokens are below float16's least number, until they are multiplied."""
    command = ("explain", "blocks.0.attention.qkv", *GPT.split(), "train.batch_size=64")
    without = main(*command, "precision=32-true")
    scaled = main(*command, "precision=16-mixed")
    assert cells(without.stdout, "float16")[-1] == "lacks range"
    assert cells(scaled.stdout, "float16")[-1] == "would do"


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
    done = main("explain", *command.split())
    assert done.rc == 2
    assert message in done.stderr
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
