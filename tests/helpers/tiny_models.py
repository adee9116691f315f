"""Tiny models of Hugging Face and timm as yaml names them, and arrays of padded examples for each.

Widths are multiples of 16, so that FP8 formats can hold the linear layers.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tiny_configs import VOCABULARY, tiny_config, tiny_settings
from torch import Tensor, nn
from torch.nn import functional as F

LENGTH, EXAMPLES, CLASSES = 12, 12, 4
IGNORED = -100
BATCH = 4
MODELS: Mapping[str, tuple[str, str]] = {
    "gpt2": ("causal_lm", "gpt2"),
    "llama": ("causal_lm", "llama"),
    "bert-masked": ("masked_lm", "bert"),
    "bert-sequence": ("sequence_classification", "bert"),
    "bert-token": ("token_classification", "bert"),
    "t5": ("seq2seq_lm", "t5"),
    "vit": ("image_classification", "vit"),
}
"""Kind and model_type of transformers' models, by name."""
TIMM: Mapping[str, tuple[str, dict[str, Any]]] = {
    "timm-resnet": ("resnet10t", {"channels": [16, 16, 32, 32], "stem_width": 16}),
    "timm-vit": (
        "vit_tiny_patch16_224",
        {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    ),
}
"""Name and keywords of timm's models, by name."""
NAMES = (*MODELS, *TIMM)


def kind_of(name: str) -> str:
    """Return the kind of a model, as model.kind names it."""
    return MODELS[name][0] if name in MODELS else "image_classification"


def arrays(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the fields of a model's examples [N, ...]; tokens are padded with 0, labels -100."""
    generator = np.random.default_rng(seed)
    kind = kind_of(name)
    classes = generator.integers(0, CLASSES, EXAMPLES)
    if kind == "image_classification":
        pixels = generator.standard_normal((EXAMPLES, 3, 32, 32)).astype(np.float32)
        return {"x" if name in TIMM else "pixel_values": pixels, "labels": classes}
    lengths = generator.integers(4, LENGTH + 1, (EXAMPLES, 1))
    mask = (np.arange(LENGTH) < lengths).astype(np.int64)
    tokens = generator.integers(4, VOCABULARY, (EXAMPLES, LENGTH)) * mask
    fields = {"input_ids": tokens, "attention_mask": mask}
    if kind == "sequence_classification":
        return {**fields, "labels": classes}
    if kind == "seq2seq_lm":
        answers = generator.integers(4, VOCABULARY, (EXAMPLES, 8))
        ends = generator.integers(3, 9, (EXAMPLES, 1))
        return {**fields, "labels": np.where(np.arange(8) < ends, answers, IGNORED)}
    if kind == "token_classification":
        return {**fields, "labels": np.where(mask == 1, tokens % CLASSES, IGNORED)}
    if kind == "masked_lm":
        chosen = (generator.random(tokens.shape) < 0.4) & (mask == 1)
        chosen[:, 0] = True
        fields["input_ids"] = np.where(chosen, 3, tokens)
        return {**fields, "labels": np.where(chosen, tokens, IGNORED)}
    # Of a causal model: the first tokens are a prompt.
    counts = (mask == 1) & (np.arange(LENGTH) >= 2)
    return {**fields, "labels": np.where(counts, tokens, IGNORED)}


def typed(name, folder) -> list[str]:
    """Return the overrides that train a model on its arrays, whose files are made once.

    Args:
        name: of NAMES.
        folder: where the files are.
    """
    files = [folder / f"{name}.npz", folder / f"{name}-val.npz"]
    for seed, file in enumerate(files):
        if not file.exists():
            np.savez(file, **arrays(name, seed))
    words = [
        "data=npz",
        f"data.path={files[0]}",
        f"data.val_path={files[1]}",
        "data.target=labels",
        "data.shuffle=false",
        "accelerator=cpu",
        f"train.batch_size={BATCH}",
        "train.log_every=1",
    ]
    if name in TIMM:
        model, options = TIMM[name]
        return [
            *words,
            "model=timm",
            f"model.name={model}",
            f"model.options={json.dumps(options, separators=(',', ':')).replace(chr(34), '')}",
            "data.meta.input=[3,32,32]",
            f"data.meta.classes={CLASSES}",
        ]
    kind, model_type = MODELS[name]
    config = folder / f"{name}.json"
    config.write_text(json.dumps(tiny_settings(model_type)))
    words += ["model=hf", f"model.kind={kind}", f"model.config={config}"]
    return [*words, f"model.classes={CLASSES}"] if "classification" in kind else words


def build(name: str) -> nn.Module:
    """Make a model without the runner, seeded as a run seeds it."""
    torch.manual_seed(0)
    if name in TIMM:
        import timm

        model, options = TIMM[name]
        return timm.create_model(model, num_classes=CLASSES, **options)
    import transformers

    from runner.models.huggingface import AUTO_CLASSES

    kind, model_type = MODELS[name]
    labels = {"num_labels": CLASSES} if "classification" in kind else {}
    config = tiny_config(model_type, **labels)
    # As model=hf and transformers' Trainer do: a cache lays T5's keys out in another order, which
    # moves last bits.
    config.use_cache = False
    auto_class = getattr(transformers, AUTO_CLASSES[kind])
    return auto_class.from_config(config, dtype=torch.float32)


def logits_and_labels(name: str, model: nn.Module, batch: Mapping[str, Tensor]):
    """Return logits [N, C] and the labels [N] that they are compared with."""
    labels = batch["labels"]
    if name in TIMM:
        return model(batch["x"]), labels
    passed = dict(batch)
    if kind_of(name) != "seq2seq_lm":
        passed.pop("labels")
    logits = model(**passed).logits
    if kind_of(name) == "causal_lm":
        # As transformers' own loss shifts them.
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)


def batches(name: str, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return the batches of a data set, in its order."""
    fields = {key: torch.from_numpy(value) for key, value in arrays(name, seed).items()}
    starts = range(0, EXAMPLES, BATCH)
    return [{key: t[start : start + BATCH] for key, t in fields.items()} for start in starts]


def train_by_hand(name: str, steps: int) -> tuple[nn.Module, list[float], float]:
    """Train a model in float32 in plain PyTorch; return it, its losses and its validation loss."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    losses = []
    for batch in batches(name)[:steps]:
        loss = F.cross_entropy(*logits_and_labels(name, model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches(name, seed=1):
            logits, labels = logits_and_labels(name, model, batch)
            total += F.cross_entropy(logits.double(), labels, reduction="sum").item()
            count += int((labels != IGNORED).sum())
    return model, losses, total / count


def word_tokenizer(words: Sequence[str], **tokens: str) -> Any:
    """Return transformers' tokenizer of words, numbered in their order; the first is the unknown
    one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(numbers, unk_token=words[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **tokens)
