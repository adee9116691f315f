"""Operations and bytes of a step, against those by hand."""

import pytest
from shapes import gpt_words, rehearsed

from runner.planning.step_cost import (
    BACKWARD,
    FORWARD,
    OTHER,
    POINTWISE,
    PRODUCT,
    Operator,
    StepCost,
    moved_bytes,
)


def product_flops(cost):
    return sum(count * one.flops for one, count in cost.products.items())


def test_a_gpts_operations_are_six_for_each_weight_and_token():
    """And those of causal attention: 2 products of the forward and 5 of the backward, half of each
    (Chowdhery et al. 2022, PaLM, appendix B)."""
    layers, width, vocabulary, batch, length = 2, 128, 512, 4, 64
    cost = rehearsed(*gpt_words(layers, width, vocabulary, batch, length)).cost
    weights = layers * 12 * width**2 + width * vocabulary
    tokens = batch * length
    assert product_flops(cost) == 6 * weights * tokens
    attention = layers * batch * length**2 * width * 2 * 7 / 2
    assert sum(cost.attention.values()) == pytest.approx(attention, rel=0.01)


def test_a_resnet_50s_operations_are_the_published_ones():
    """4.09 G multiplications of a forward at 224 pixels (He et al. 2015; torchvision's own table),
    and three times as many with the backward, but for the first layer's input."""
    words = "model=torchvision model.name=resnet50 data=synthetic_images data.meta.classes=1000 "
    cost = rehearsed(*(words + "data.meta.input=[3,224,224] train.batch_size=2").split()).cost
    first = 2 * 112**2 * 64 * 3 * 7**2
    assert product_flops(cost) == pytest.approx(2 * (3 * 2 * 4.09e9 - first), rel=0.002)
    is_3x3 = [one for one in cost.products if one.is_3x3]
    share = sum(cost.products[one] * one.flops for one in is_3x3) / product_flops(cost)
    assert 0.3 < share < 0.5


def test_a_vits_operations_are_those_of_its_layers():
    words = (
        "model=vit model.hidden_dim=64 model.mlp_dim=128 model.layers=2 model.heads=4 "
        "model.patch_size=4 data=synthetic_images data.meta.input=[3,16,16] data.meta.classes=10 "
        "train.batch_size=4"
    )
    cost = rehearsed(*words.split()).cost
    tokens = 4 * (16 + 1)  # patches and the class token
    blocks = 2 * (4 * 64**2 + 2 * 64 * 128) * tokens
    # The image needs no gradient.
    patches = 64 * 3 * 4**2 * 4 * 16
    assert product_flops(cost) == 6 * (blocks + 4 * 64 * 10) + 4 * patches


def test_of_a_mixture_only_the_chosen_experts_count():
    words = (
        "model=mixture model.layers=1 model.width=64 model.heads=4 model.experts=8 model.top_k=2 "
        "model.hidden=32 data=synthetic_tokens data.meta.input=[16] data.meta.classes=128 "
        "train.batch_size=4"
    )
    cost = rehearsed(*words.split()).cost
    tokens = 4 * 16
    experts = 2 * (2 * 32 * 64 + 64 * 32)
    others = 4 * 64**2 + 64 * 8 + 64 * 128
    assert product_flops(cost) == 6 * tokens * (experts + others)


def test_bytes_of_the_update_are_those_of_adam():
    """Reads gradient, weight and two averages, and writes them: torch may write the gradient."""
    cost = rehearsed(*gpt_words(1, 64, 128, 2, 16), "precision=32-true").cost
    elements = 12 * 64**2 + 13 * 64 + 128 * 64 + 16 * 64 + 2 * 64
    assert 28 * elements <= cost.update <= 33 * elements


def test_a_checkpointed_forward_counts_again_and_a_frozen_weight_has_no_gradient():
    words = gpt_words(2, 64, 128, 2, 16)
    plain = rehearsed(*words)
    again = rehearsed(*words, "train.activation_checkpointing=true")
    # But for the last product of a block, whose output nothing in the backward needs.
    blocks = 2 * 2 * 8 * 64**2 * 2 * 16
    assert product_flops(again.cost) - product_flops(plain.cost) == blocks
    frozen = rehearsed(*words, "train.freeze=[blocks]", watched=["blocks.1.expand"])
    (watched,) = [one for one in frozen.cost.products if one.shape]
    assert watched.gradients == 1
    assert watched.shape == (2 * 16, 64, 256)


def test_below_everything_that_trains_there_is_no_backward():
    words = [*gpt_words(2, 64, 128, 2, 16), "model.tie_weights=false"]
    frozen = "train.freeze=[token_embedding,position_embedding,blocks]"
    cost = rehearsed(*words, frozen, watched=["blocks.1.expand", "head"]).cost
    assert {one.shape[2]: one.gradients for one in cost.products if one.shape} == {256: 0, 128: 2}


def test_dropout_of_attention_does_not_change_its_kernel():
    words = gpt_words(1, 64, 128, 2, 16)
    plain, dropped = (rehearsed(*words, f"model.dropout={p}").cost for p in (0.0, 0.1))
    assert dropped.attention == plain.attention != {}


def test_products_of_an_optimizer_belong_to_the_update():
    words = gpt_words(1, 64, 128, 2, 16)
    adam, muon = (rehearsed(*words, f"optimizer={name}").cost for name in ("adamw", "muon"))
    assert muon.flops == adam.flops
    assert sum(muon.update_flops.values()) > 0 == sum(adam.update_flops.values())


def test_all_experts_of_a_stack_are_cast():
    words = (
        "model=mixture model.layers=1 model.width=64 model.heads=4 model.top_k=2 model.hidden=32 "
        "data=synthetic_tokens data.meta.input=[16] data.meta.classes=128 train.batch_size=4"
    )
    elements = []
    for experts in (4, 16):
        name = "blocks.0.experts.down_proj"
        cost = rehearsed(*words.split(), f"model.experts={experts}", watched=[name]).cost
        elements.append(sum(one.weight for one in cost.products if one.shape))
    assert elements[1] == 4 * elements[0] > 0


def operator(kind, reads, writes, phase=FORWARD):
    return Operator(kind, phase, "float32", 0.0, reads, writes)


def test_what_a_compiler_fuses_is_not_in_memory():
    """Two pointwise operators in a row: the tensor between them is neither written nor read."""
    first = operator(POINTWISE, {1: 4.0}, {2: 4.0})
    second = operator(POINTWISE, {2: 4.0}, {3: 4.0})
    last = operator(PRODUCT, {3: 4.0}, {4: 4.0})
    assert moved_bytes([first, second, last], is_fused=False) == 16
    assert moved_bytes([first, second, last], is_fused=True) == 8
    # A product or the backward that reads it needs it in memory.
    in_backward = operator(OTHER, {2: 4.0}, {5: 4.0}, BACKWARD)
    assert moved_bytes([first, second, last, in_backward], is_fused=True) == 8 + 4 + 8


def test_operators_are_counted_and_an_evaluation_is_not():
    words = gpt_words(1, 64, 128, 2, 16)
    with_evaluation, alone = (rehearsed(*words, evaluates=each).cost for each in (True, False))
    assert with_evaluation.flops == alone.flops
    assert alone.operators > 50
    empty = StepCost.of_operators([])
    assert (empty.flops, empty.update, empty.operators) == (0, 0, 0)
