"""Training speeds of FP8 that were measured on an H200.

bench/ is not installed, so its figures are here once more; a test compares both.
"""

from torch import nn

from runner.core import Precision, RunSpec

SOURCES = {"NVIDIA H200": "bench/results/gpu/h200.md, 2026-11-28"}
"""Page and date of the measurement, by the name of the device that it was made on."""
RATIOS = {
    "transformer-engine": {(2048, False): 1.31, (4096, False): 1.54},
    "transformer-engine-block": {(2048, False): 1.14, (4096, False): 1.31},
    "transformer-engine-current": {(2048, False): 1.23, (4096, False): 1.49},
    "transformer-engine-float16": {(2048, False): 1.35, (4096, False): 1.6},
    "float8-rowwise": {(2048, False): 0.42, (2048, True): 0.91},
    "float8-rowwise-hp": {(2048, False): 0.6, (2048, True): 1.09},
    "float8-tensorwise": {(2048, False): 0.44, (2048, True): 1.12},
}
"""Tokens per second of GPTs, as multiples of those of bf16-mixed with train.compile: by precision,
then by the width of the GPT and whether it was compiled."""
FASTEST = "transformer-engine"
"""The fastest of these that compute in bfloat16 outside of FP8; it was not compiled."""
_WAYS = ("eager", "compiled")


def speed_text(name: str, device: str) -> str:
    """Return how fast a precision was measured to train on a device of this name, as the end of a
    sentence; empty where it was not measured."""
    ratios = RATIOS.get(name, {}) if device in SOURCES else {}
    cases = [f"{r:.2f} ({_WAYS[way]}, width {width})" for (width, way), r in ratios.items()]
    return f"; speed × compiled bf16-mixed: {', '.join(cases)}" if cases else ""


def slow_warning(precision: Precision, model: nn.Module, device: str, spec: RunSpec) -> str:
    """Return a warning where a run trains in an FP8 that, as it is configured, was measured slower
    than compiled bf16-mixed; empty where it was not, and where it was not measured.

    Args:
        precision: of the run.
        model: converted. The measured width that counts is the nearest one to its own, which is the
            largest that a matrix has as input and as output.
        device: name of the device.
        spec: says whether the run trains, and is compiled.
    """
    ratios = RATIOS.get(precision.name, {})
    compiled = bool(spec.train.compile)
    own = max((min(p.shape) for p in model.parameters() if p.ndim == 2), default=0)
    width = min((w for w, way in ratios if way == compiled), key=lambda w: abs(w - own), default=0)
    ratio = ratios.get((width, compiled), 1)
    if device not in SOURCES or not spec.trains or precision.emulated or ratio >= 1:
        return ""
    remedy = f"precision={FASTEST} train.compile=false ({RATIOS[FASTEST][width, False]:.2f} ×)"
    if not compiled:
        remedy = f"train.compile=true ({ratios[width, True]:.2f} ×) or {remedy}"
    return (
        f"warning: precision={precision.name} ({_WAYS[compiled]}) trained {ratio:.2f} × as fast as "
        f"compiled bf16-mixed on an {device} at width {width} (this model's is {own}; "
        f"{SOURCES[device]}). Type {remedy}."
    )
