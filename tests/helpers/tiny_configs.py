"""Settings of tiny models of transformers, by their model_type, as a yaml names them."""

from typing import Any

VOCABULARY = 96
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LAYERS = {**SIZES, "intermediate_size": 64}
TEXT = {**LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY}
T5_SIZES = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **GPT2_SIZES,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
    "llama": TEXT,
    "bert": {**TEXT, **NO_DROPOUT},
    "t5": {**T5_SIZES, "vocab_size": VOCABULARY, "decoder_start_token_id": 0, "dropout_rate": 0.0},
    "vit": {**LAYERS, **NO_DROPOUT, "image_size": 32, "patch_size": 8},
}


def tiny_settings(kind: str, **changes: Any) -> dict[str, Any]:
    """Return the settings of a kind as a yaml or a config.json has them."""
    return {"model_type": kind, **SETTINGS[kind], **changes}


def tiny_config(kind: str, **changes: Any) -> Any:
    """Return transformers' config of a kind."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**SETTINGS[kind], **changes})
