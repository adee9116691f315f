"""The model of a step's time: its constants, its directions, and what it refuses."""

import json
from dataclasses import asdict, replace

import pytest
from shapes import gpt_words, rehearsed

from bench.common import RESULTS
from bench.plan.fit import PAIRS, card_of, predict
from runner.planning.card_speed import (
    FIT,
    RECIPES,
    baseline_of,
    least_seconds,
    narrowest_width,
    product_rate,
    recipe_change,
    recipe_of,
    speed_ratio,
    step_seconds,
)
from runner.planning.room import DeviceSpec
from runner.precision.registry import load_precision, precision_names

CARD = DeviceSpec(
    name="card",
    memory_gib=80,
    bandwidth=1000,
    tflops={"float32": 10, "tf32": 50, "bfloat16": 100, "float8": 200},
    reach=dict.fromkeys(("float32", "tf32", "bfloat16", "float8", "bandwidth"), 1.0),
)


def test_the_constants_are_those_of_the_last_fit():
    file = json.loads((RESULTS / "plan.json").read_text())
    assert asdict(FIT) == file["constants"]


@pytest.mark.extended
def test_published_ratios_are_predicted():
    """With the constants of all rows; bench/results/plan.md leaves each source out."""
    errors = sorted(abs(predict(pair, FIT).error) for pair in PAIRS)
    assert errors[len(errors) // 2] < 0.05
    assert sum(error < 0.14 for error in errors) >= 0.9 * len(errors)


def test_the_published_page_holds_what_was_asked_of_it():
    facts = json.loads((RESULTS / "plan.json").read_text())["facts"]
    assert float(facts["median error of the ratio"].rstrip("%")) <= 7
    within, rows = map(int, facts["within 15 %"].split(" of "))
    assert within >= 0.9 * rows
    assert 75 <= float(facts["covered by the 80 % interval"].rstrip("%")) <= 90


def test_every_precision_in_fp8_has_a_recipe_and_the_others_have_none():
    with_recipe = {name for name in precision_names() if recipe_of(load_precision(name))}
    expected = {
        n for n in precision_names() if n.startswith(("transformer-engine", "float8", "torchao"))
    }
    assert with_recipe == expected


def wide_cost(width=4096, length=512):
    names = [f"blocks.0.{name}" for name in ("attention.qkv", "expand", "contract")]
    return rehearsed(*gpt_words(1, width, 1024, 4, length), watched=names).cost


def test_a_narrow_format_gains_in_wide_layers_and_loses_in_narrow_ones():
    for width, sign in ((4096, 1), (128, -1)):
        change = recipe_change(wide_cost(width), CARD, RECIPES["current"])
        assert (change.gain - change.casts) * sign > 0, width
    edge = narrowest_width(CARD, RECIPES["current"])
    assert edge is not None
    assert 128 < edge < 4096
    slower = replace(CARD, tflops={**CARD.tflops, "float8": 80})
    assert narrowest_width(slower, RECIPES["current"]) is None


def test_attention_hides_what_a_format_gains():
    ratios = []
    for length in (512, 16384):
        cost = wide_cost(2048, length)
        base = step_seconds(cost, CARD, False, False)
        change = recipe_change(cost, CARD, RECIPES["delayed"])
        step = replace(base, gain=change.gain, casts=change.casts)
        ratios.append(base.total / step.total)
    assert ratios[0] - 1 > 1.5 * (ratios[1] - 1) > 0


def test_the_interval_is_wider_where_more_changes():
    base = step_seconds(wide_cost(), CARD, False, False)
    low, value, high = speed_ratio(base.total, base)
    assert low < value == 1 < high
    changed = replace(base, gain=base.total / 2)
    wide = speed_ratio(base.total, changed)
    assert wide[1] == pytest.approx(2)
    assert wide[2] / wide[1] > high


def test_no_step_is_below_the_least_time_and_tf32_is_between():
    cost = rehearsed(*gpt_words(1, 512, 1024, 4, 128), "precision=32-true").cost
    times = {tf32: step_seconds(cost, CARD, tf32, False).total for tf32 in (False, True)}
    assert times[True] < times[False]
    for tf32, time in times.items():
        assert 0 < least_seconds(cost, CARD, tf32) < time


def test_a_card_without_bfloat16_computes_in_float16():
    card = card_of(("device=t4", "mode=plan"))
    assert product_rate(card, "bfloat16", False) == card.ceiling("float16") == 0.66 * 65e12
    assert baseline_of(card) == "16-mixed"
