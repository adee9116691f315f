"""A planted difference between two sides is named, and rounding alone is no cause."""

import pytest
from run_folders import read_json

extended = pytest.mark.extended
QUICK = (
    "mode=mismatch ~model data=text task=language data.context=32 train.batch_size=2 tracking=none "
    "mismatch.batches=1 mismatch.new_tokens=8 mismatch.cures=false"
).split()
ACCEPTS_ALL = ("mismatch.max_ratio=9", "mismatch.max_kl=9")
TRUE, MIXED = "32-true", "bf16-mixed"
PLANTED = [
    ("llama", "rotary table in bfloat16", TRUE, "model.rotary_emb"),
    ("llama", "head in bfloat16", TRUE, "lm_head"),
    ("llama", "eps of the norms", TRUE, "model.layers.0.input_layernorm"),
    ("llama", "cache in bfloat16", TRUE, "the cache of keys and values"),
    ("llama", "a cast too many", MIXED, "model.layers.*, between its modules"),
    ("llama", "scale of the attention", TRUE, "model.layers.0.self_attn"),
    ("moe", "rotary table in bfloat16", TRUE, "model.rotary_emb"),
    ("moe", "router in bfloat16", TRUE, "model.layers.0.mlp.gate"),
    ("moe", "cache in bfloat16", TRUE, "the cache of keys and values"),
    ("moe", "head in bfloat16", TRUE, "lm_head"),
    ("gpt", "positions in bfloat16", TRUE, "position_embedding"),
    ("gpt", "eps of the norms", MIXED, "blocks.0.norm1"),
    ("gpt", "a cast too many", TRUE, "blocks.1"),
    ("mixture", "router in bfloat16", TRUE, "blocks.0.router"),
]
CLEAN = [
    *(("llama", TRUE, TRUE), ("llama", MIXED, "bf16-true"), ("llama", TRUE, "bnb-nf4")),
    *(("llama", "bf16-true", "bf16-true"), ("llama", "64-true", "64-true")),
    *(("moe", TRUE, MIXED), ("moe", "16-mixed", "16-mixed"), ("moe", MIXED, "bf16-true")),
    *(("gpt", MIXED, MIXED), ("gpt", TRUE, "int4"), ("gpt", "bf16-true", "16-true")),
    *(("mixture", TRUE, "int8"), ("mixture", MIXED, "bf16-true")),
]
FAST = {"router in bfloat16", "cache in bfloat16"}


def found(main, result, tmp_path, kind, *typed):
    main(*QUICK, "+model._target_=planted_sides.net", f"+model.kind={kind}", *typed).check_ok()
    return read_json(tmp_path / result(tmp_path)["folder"] / "mismatch.json")


@pytest.mark.parametrize(
    ("kind", "fault", "precision", "module"),
    [
        pytest.param(*case, marks=[] if case[1] in FAST and case[0] == "moe" else extended)
        for case in PLANTED
    ],
)
def test_a_planted_difference_is_named(main, result, tmp_path, kind, fault, precision, module):
    serving = f"serving=\"precision={precision},model.fault='{fault}'\""
    typed = (f"precision={precision}", "+model.fault=null", serving)
    report = found(main, result, tmp_path, kind, *ACCEPTS_ALL, *typed)
    assert report["cause"] == module


@pytest.mark.parametrize(
    ("kind", "training", "serving"),
    [pytest.param(*case, marks=[] if case[0] == "mixture" else extended) for case in CLEAN],
)
def test_rounding_is_no_cause(main, result, tmp_path, kind, training, serving):
    typed = (f"precision={training}", f"serving={serving}")
    report = found(main, result, tmp_path, kind, *ACCEPTS_ALL, *typed)
    assert report["cause"] == ""
    assert (report["data"]["rms"] > 0) == (training != serving)
    assert bool(report["contributions"]) == (training != serving)
