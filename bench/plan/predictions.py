"""How well does mode=plan predict shapes that were not measured?

    python -m bench.plan.predictions
    python -m bench.plan.predictions --measure scores.json

The first predicts six shapes on an H200 and writes bench/results/plan_predictions.json, before any
of them has run on one. The second, on the card (bench/gpu/run.sh), measures the time of a step and
the peak of memory of each, and writes them beside the predictions, whatever they are.
"""

import gc
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.common import RESULTS, parse_options, write_rows
from bench.gpu.throughput import device_seconds
from bench.plan.fit import spec_of
from bench.plan.published import gpt
from runner.core import RunSpec, train_step
from runner.core.config.targets import build_group
from runner.core.run.run_context import TrainingSetup
from runner.data.loader import Batch
from runner.data.task_target import build_task
from runner.diagnostics.memory.forecast import find_experts
from runner.planning.card_plan import plan_card
from runner.rooms import install_rooms
from runner.training.example_batch import example_batch
from runner.training.model import ModelBuilder
from runner.training.setup import build_state

FILE = RESULTS / "plan_predictions.json"
SHAPES = {
    "gpt, width 1024, length 512": gpt(12, 1024, 50304, 64, 512),
    "gpt, width 3072, length 2048": gpt(8, 3072, 50304, 8, 2048),
    "gpt, width 8192, length 8192": gpt(2, 8192, 32768, 2, 8192),
    "vit, width 1024": [
        *("model=vit", "data=synthetic_images", "data.meta.input=[3,224,224]"),
        *("data.meta.classes=1000", "model.hidden_dim=1024", "model.layers=24", "model.heads=16"),
        *("model.mlp_dim=4096", "model.patch_size=16", "train.batch_size=128"),
    ],
    "resnet-50": [
        *("model=torchvision", "model.name=resnet50", "data=synthetic_images"),
        *("data.meta.input=[3,224,224]", "data.meta.classes=1000", "train.batch_size=256"),
    ],
    "mixture of 8, width 2048": [
        *("model=mixture", "data=synthetic_tokens", "data.meta.classes=50304", "model.layers=4"),
        *("data.meta.input=[1024]", "model.width=2048", "model.heads=16", "model.hidden=4096"),
        "train.batch_size=16",
    ],
}
PRECISIONS = ("bf16-mixed", "bf16-true", "tf32", "transformer-engine", "transformer-engine-current")


def cases() -> Iterator[tuple[str, str, list[str]]]:
    """Yield each shape, precision and the overrides."""
    for shape, words in SHAPES.items():
        for name in PRECISIONS:
            if shape == "resnet-50" and name.startswith("transformer-engine"):
                continue  # it converts no convolution
            if shape.startswith("mixture") and name == "tf32":
                continue  # torch has no shapes of grouped products of float32
            yield shape, name, [*words, f"precision={name}", "optimizer.eps=1e-4"]


def predict() -> list[dict[str, Any]]:
    """Return the predictions, on an H200."""
    rows = []
    for shape, name, words in cases():
        emulated = ["precision.emulate=true"] if name not in ("bf16-mixed", "bf16-true") else []
        spec = spec_of([*words, *emulated, "device=h200"])
        precision = build_group("precision", spec.precision)
        found = find_experts(spec, precision, torch.device("cpu"))
        report = ModelBuilder(spec, precision).build_on_meta(found).report
        plan = plan_card(spec, precision, report, found)
        row: dict[str, Any] = {"shape": shape, "precision": name}
        row["peak_gib"] = round(sum(plan.peak.values()) / 2**30, 2)
        if plan.ratio and plan.seconds:
            row["ratio"] = [round(each, 3) for each in plan.ratio]
            row["step_ms"] = [round(1000 * each, 1) for each in plan.seconds]
        else:
            row["reason"] = plan.reason
        print(row, flush=True)
        rows.append(row)
    return rows


def measure(spec: RunSpec) -> dict[str, float]:
    """Return the milliseconds of a step on a GPU, and the peak of memory in GiB."""
    device = torch.device("cuda")
    precision = build_group("precision", spec.precision)
    model = ModelBuilder(spec, precision).build(device).model
    setup = TrainingSetup(replace(spec, scheduler={}), precision, build_task(spec.task), device)
    with precision.session(model, device):
        state = build_state(setup, model, total_steps=100)
        batches: list[Batch] = [example_batch(spec, spec.train.batch_size, device)]

        def step() -> None:
            train_step(state, batches)

        for _ in range(4):
            step()
        torch.cuda.reset_peak_memory_stats(device)
        times = [device_seconds(device, step) for _ in range(10)]
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    return {"measured_ms": 1000 * statistics.median(times), "measured_gib": peak}


def score(out: Path) -> None:
    """Measure every shape, and write it beside its prediction."""
    rows = {(row["shape"], row["precision"]): row for row in json.loads(FILE.read_text())}
    base: dict[str, float] = {}
    for shape, name, words in cases():
        row = rows[shape, name]
        try:
            found = measure(spec_of([*words, "accelerator=cuda"]))
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        else:
            base.setdefault(shape, found["measured_ms"])  # bf16-mixed is the first
            row |= found | {"measured_ratio": base[shape] / found["measured_ms"]}
        gc.collect()
        torch.cuda.empty_cache()
        print(row, flush=True)
        write_rows(out, [*rows.values()])


def main() -> None:
    """Predict, or measure."""
    options = parse_options(__doc__, measure="")
    install_rooms()
    if options.measure:
        score(Path(options.measure))
    else:
        write_rows(FILE, predict())


if __name__ == "__main__":
    main()
