"""Speeds of FP8 that were measured on an H200.

No GPU is here: the processor gets the H200's name, and where a run trains in FP8, precisions do not
refuse it. The warning itself was never printed on an H200.
"""

import json
from pathlib import Path

import pytest
from torch import nn

from runner.core.base import accelerators
from runner.precision import measured_speeds, registry
from runner.precision.float8 import Float8Precision
from runner.precision.measured_speeds import FASTEST, RATIOS, SOURCES, slow_warning

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "gpu"
H200 = "NVIDIA H200"
PAGE = " ".join((ROOT / "docs" / "precisions.md").read_text().split())
MODEL = nn.Sequential(nn.Embedding(5000, 2048), nn.Linear(2048, 8192), nn.LayerNorm(8192))
NET = "model=mlp model.hidden=[32] data=digits tracking=none train.max_steps=1"


def measured_ratios(results):
    """Ratios of every FP8 in the file of a GPU, rounded as its page rounds them."""
    measured = [row for row in results["gpt"] if "error" not in row]
    rows = {(r["precision"], r["width"], r["compiled"]): r for r in measured}
    ratios = {}
    for (name, width, compiled), row in rows.items():
        if name.startswith(("float8-", "transformer-engine", "torchao-mxfp8")):
            base = rows["bf16-mixed", width, True]["tokens_per_second"]
            ratio = round(row["tokens_per_second"] / base, 2)
            ratios.setdefault(name, {})[width, compiled] = ratio
    return ratios


def test_the_speeds_in_the_package_are_those_of_the_committed_measurement():
    (page,) = RESULTS.glob("*.json")
    results = json.loads(page.read_text())
    assert {results["device"]: f"bench/results/gpu/{page.stem}.md, {results['date']}"} == SOURCES
    assert measured_ratios(results) == RATIOS
    assert results["date"] in page.with_suffix(".md").read_text()


def test_the_precision_to_type_is_the_fastest_that_computes_in_bfloat16_outside_of_fp8():
    compute = registry.load_precision(FASTEST).compute
    for name, ratios in RATIOS.items():
        if registry.load_precision(name).compute is compute:
            for (width, _), ratio in ratios.items():
                assert ratio <= RATIOS[FASTEST][width, False]


@pytest.fixture
def warning(compose):
    """The warning for a precision in a run with these words, on an H200 unless it is another."""

    def text(name, *words, device=H200, **changes):
        precision = registry.load_precision(name, **changes)
        return slow_warning(precision, MODEL, device, compose(f"precision={name}", *words))

    return text


@pytest.mark.parametrize(
    ("name", "words", "ratio", "remedy"),
    [
        (
            "float8-rowwise",
            [],
            "(eager) trained 0.42 ×",
            "train.compile=true (0.91 ×) or precision=transformer-engine train.compile=false "
            "(1.31 ×)",
        ),
        (
            "float8-rowwise",
            ["train.compile=regional"],
            "(compiled) trained 0.91 ×",
            "precision=transformer-engine train.compile=false (1.31 ×)",
        ),
        (
            "float8-tensorwise",
            [],
            "(eager) trained 0.44 ×",
            "train.compile=true (1.12 ×) or precision=transformer-engine train.compile=false "
            "(1.31 ×)",
        ),
    ],
)
def test_an_fp8_that_was_measured_slower_says_so_with_what_to_type(
    warning, name, words, ratio, remedy
):
    assert warning(name, *words) == (
        f"warning: precision={name} {ratio} as fast as compiled bf16-mixed on an NVIDIA H200 at "
        "width 2048 (this model's is 2048; bench/results/gpu/h200.md, 2026-11-28). Type "
        f"{remedy}."
    )


def test_the_page_of_precisions_has_the_warning_and_the_ranges(warning):
    assert warning("float8-rowwise").replace("model's is 2048", "model's is 128") in PAGE
    for family, compiled in (("float8", False), ("float8", True), ("transformer", False)):
        found = [
            ratio
            for name, ratios in RATIOS.items()
            for (_, way), ratio in ratios.items()
            if name.startswith(family) and way == compiled
        ]
        assert f"{min(found):.2f} to {max(found):.2f} ×" in PAGE


def test_what_was_faster_or_not_measured_gets_no_warning(warning):
    assert not warning("float8-tensorwise", "train.compile=true")
    assert not warning("transformer-engine")
    assert not warning("transformer-engine-current", "train.compile=true")
    assert not warning("bf16-mixed")
    assert not warning("torchao-mxfp8")
    assert not warning("float8-rowwise", emulate=True)
    assert not warning("float8-rowwise", "mode=evaluate", "checkpoint=x")
    for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200 NVL", "AMD EPYC"):
        assert not warning("float8-rowwise", device=device)


@pytest.fixture
def on_h200(monkeypatch):
    """Give the processor the name of an H200, and let float8-* run on it."""
    monkeypatch.setattr(accelerators, "cpu_name", lambda: H200)
    monkeypatch.setattr(Float8Precision, "require", lambda self, device: None)


def test_a_run_warns_before_its_first_step(main, on_h200):
    done = main("precision=float8-rowwise", "accelerator=cpu", *NET.split()).check_ok()
    assert 0 < done.stdout.index("trained 0.42 × as fast") < done.stdout.index("train/loss")
    assert "this model's is 32" in done.stdout


def test_doctor_says_how_fast_each_fp8_was_on_this_device(main, on_h200, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    text = main("doctor").check_ok().stdout
    for name in ("float8-rowwise", "float8-rowwise-hp", "float8-tensorwise"):
        assert measured_speeds.speed_text(name, H200) in text
    assert "0.42 (eager, width 2048), 0.91 (compiled, width 2048)" in text
    assert SOURCES[H200] in text


def test_doctor_says_nothing_of_devices_that_were_not_measured(main):
    assert "h200.md" not in main("doctor").check_ok().stdout
