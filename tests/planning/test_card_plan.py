"""Memory, price and reasons of plans for cards."""

import json

import pytest
from shapes import gpt_words

from bench.common import RESULTS
from bench.plan.fit import FIT, PAIRS, predict, spec_of
from bench.plan.memory import predicted_peak
from runner.core.base.errors import ConfigError
from runner.core.base.tensor_facts import GIB
from runner.core.config.targets import build_group
from runner.core.policy.precision import ConversionPlan
from runner.planning.card_plan import plan_card, rehearse
from runner.training.model import ModelBuilder

H200 = [
    row
    for row in json.loads((RESULTS / "gpu" / "h200.json").read_text())["gpt"]
    if not row["compiled"]
]


def planned(*words, card=("device=h100",)):
    spec = spec_of([*card, *words])
    precision = build_group("precision", spec.precision)
    found = ConversionPlan()
    report = ModelBuilder(spec, precision).build_on_meta(found).report
    return plan_card(spec, precision, report, found)


@pytest.mark.parametrize("row", H200, ids=lambda row: f"{row['precision']}-{row['width']}")
def test_the_peaks_of_an_h200_are_predicted(row):
    """All thirty that were measured, without a GPU."""
    peak = predicted_peak(row["precision"], row["width"]) / GIB
    assert peak == pytest.approx(row["peak_gib"], rel=0.05)


WORDS = gpt_words(2, 1024, 4096, 16, 256)


def test_memory_at_another_batch_is_a_line_and_the_largest_one_fits():
    plan = planned(*WORDS, "precision=bf16-mixed", "device.memory_gib=2")
    assert plan.largest_batch is not None
    for size, fits in ((plan.largest_batch, True), (2 * plan.largest_batch, False)):
        other = planned(
            *WORDS, "precision=bf16-mixed", "device.memory_gib=2", f"train.batch_size={size}"
        )
        assert other.fits is fits


def test_fsdp_shares_what_does_not_compute():
    alone, shared = (planned(*WORDS, "precision=32-true", f"plan.gpus={count}") for count in (1, 8))
    assert shared.peak["optimizer"] == pytest.approx(alone.peak["optimizer"] / 8, rel=0.01)
    assert shared.peak["weights"] == pytest.approx(alone.peak["weights"] / 8, rel=0.01)
    replicated = planned(*WORDS, "precision=32-true", "plan.gpus=8", "plan.strategy=ddp")
    assert replicated.peak["optimizer"] == alone.peak["optimizer"]
    # Each card adds up whole gradients of several micro-batches.
    whole = planned(*WORDS, "precision=32-true", "plan.gpus=8", "train.accumulate=2")
    assert whole.peak["gradients"] > 4 * shared.peak["gradients"]
    # A link that is slow enough is waited for.
    slow = planned(*WORDS, "precision=32-true", "plan.gpus=8", "device.link=0.01")
    assert slow.parts["waiting"] > 10 * shared.parts["products"]


def test_accumulated_gradients_of_16_bits_take_float32_and_steps_take_longer():
    words = [*WORDS, "precision=bf16-true"]
    once, twice = (planned(*words, f"train.accumulate={count}") for count in (1, 4))
    assert sum(twice.peak.values()) > sum(once.peak.values())
    assert twice.parts["products"] == pytest.approx(4 * once.parts["products"])
    assert twice.parts["update"] == pytest.approx(once.parts["update"])


def test_an_anchor_sets_the_time_of_the_baseline():
    """4096 tokens at 1e5 of them a second take 41 ms; 3600 such steps take 147 s."""
    words = [*WORDS, "train.max_steps=3600", "plan.anchor=1e5", "device.price=10"]
    plan = planned(*words, "precision=bf16-mixed")
    seconds = 16 * 256 / 1e5
    assert plan.seconds == pytest.approx((seconds,) * 3)
    assert plan.hours == pytest.approx([seconds] * 3)
    assert plan.price == pytest.approx([10 * seconds] * 3)
    other = planned(*words, "precision=bf16-true")
    assert other.ratio
    assert other.seconds
    assert other.seconds[0] == pytest.approx(seconds / other.ratio[2])


def test_a_plan_has_the_ratio_of_the_published_page():
    """One of the project's own pairs, and one of a trainer whose compiler fuses."""
    for pair in PAIRS:
        if (pair.precision, pair.base_speed) == ("transformer-engine", 232250):
            more = ["precision.emulate=true"]
        elif pair.name.endswith("H100") and pair.precision == "float8-tensorwise":
            more = ["precision.emulate=true", "train.compile=true", "plan.fuses=true"]
            more += ["plan.gpus=8", "precision.ignore_modules=[lm_head]", "train.batch_size=8"]
        else:
            continue
        keys = {word.partition("=")[0] for word in more}
        words = [word for word in pair.base.overrides if word.partition("=")[0] not in keys]
        plan = planned(*words, f"precision={pair.precision}", *more, card=pair.base.card)
        assert plan.ratio
        assert plan.ratio[1] == pytest.approx(predict(pair, FIT).ratio, rel=0.02)


def test_a_fused_norm_is_planned_as_one_beside_its_layer():
    words = [*WORDS, "precision=transformer-engine", "precision.emulate=true"]
    apart, fused = (planned(*words, f"precision.fuse={value}") for value in ("false", "true"))
    assert fused.peak == apart.peak
    assert not fused.memory_of


def test_the_bound_is_above_the_interval():
    plan = planned(
        *gpt_words(1, 8192, 1024, 8, 512), "precision=transformer-engine", "precision.emulate=true"
    )
    assert plan.ratio
    assert plan.most
    assert 1 < plan.ratio[1] < plan.ratio[2] <= plan.most


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("precision=transformer-engine device=a100-80", "it lacks float8 products"),
        ("precision=transformer-engine-block device=l40s", "compute capability 9.0 or higher"),
        ("precision=torchao-mxfp8 device=rtx5090", "10.0 or higher, below 11.0"),
        ("precision=transformer-engine device=mi300x", "needs an NVIDIA GPU"),
        ("precision=bf16-mixed device=t4", "it lacks bfloat16 products"),
        ("precision=float8-tensorwise", "without train.compile=true"),
        ("precision=int8", "no published step supports it"),
        ("precision=64-true", "no published step supports it"),
        ("precision=bf16-mixed model.width=64", "launching operators takes longer"),
    ],
)
def test_what_no_row_supports_is_refused_and_its_memory_planned(words, reason):
    has_emulation = any(name in words for name in ("engine", "torchao", "float8"))
    emulated = ["precision.emulate=true"] if has_emulation else []
    keys = [word.partition("=")[0] for word in words.split()]
    words = [one for one in WORDS if one.partition("=")[0] not in keys] + words.split()
    cards = [word for word in words if word.startswith("device=")]
    spec = spec_of([*words, *emulated, *([] if cards else ["device=h100"])])
    precision = build_group("precision", spec.precision)
    report = ModelBuilder(spec, precision).build_on_meta(ConversionPlan()).report
    plan = plan_card(spec, precision, report, ConversionPlan())
    assert reason in plan.reason
    assert plan.ratio is None
    assert sum(plan.peak.values()) > 0


def test_an_optimizer_that_wants_values_is_refused_with_what_to_type():
    spec = spec_of(["device=h100", *WORDS, "precision=bf16-mixed", "optimizer=adamw8bit"])
    with pytest.raises(ConfigError, match="optimizer=adamw"):
        rehearse(spec, None, ConversionPlan(), 4)
