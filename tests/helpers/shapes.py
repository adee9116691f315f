"""Steps that are rehearsed for a card."""

from bench.plan.fit import spec_of
from runner.core.policy.precision import ConversionPlan
from runner.planning.card_plan import rehearse


def gpt_words(layers, width, vocabulary, batch, length):
    return [
        *("model=gpt", "data=synthetic_tokens", f"model.layers={layers}", f"model.width={width}"),
        *("model.heads=2", f"data.meta.classes={vocabulary}", f"data.meta.input=[{length}]"),
        f"train.batch_size={batch}",
    ]


def rehearsed(*words, watched=(), evaluates=True):
    """Return the rehearsal of a step in bf16-mixed, or in the precision of the words."""
    spec = spec_of(["precision=bf16-mixed", *words] if not is_chosen(words) else words)
    return rehearse(spec, None, ConversionPlan(), spec.train.batch_size, watched, evaluates)


def is_chosen(words):
    return any(word.startswith("precision=") for word in words)
