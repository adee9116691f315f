"""How far is the predicted peak memory of training from the measured one?

predicted: runner.memory_plan, before anything runs. measured: the most that torch's allocator held
while the runner's own loop trained four steps and evaluated after the last, from before the model
was built, the data set left out; on a CPU from torch.profiler's record of every allocation, on
CUDA torch.cuda.max_memory_allocated. MiB of 2^20 bytes.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from common import RESULTS, table, versions, write
from hydra import compose, initialize_config_module

from runner.accelerator import MIB
from runner.build import build_driven, build_group, build_loaders, build_splits
from runner.config import register_schema, resolve
from runner.data.loading import Loader
from runner.errors import Unavailable
from runner.isolation import seed_all
from runner.loop import fit
from runner.memory_plan import Peak, predict
from runner.model import build_model
from runner.precision.base import Precision
from runner.shape import shape
from runner.spec import RunSpec
from runner.state import TrainState

STEPS = 4
# A model with its data, its batch sizes, and what its runs need beside a precision.
RUNS = {
    "mlp": ("digits", (16, 64, 256), ()),
    "resnet": ("digits", (8, 32, 128), ()),
    "resnet 32 px": ("synthetic_images", (8, 32), ("model=resnet", "data.count=320")),
    "gpt": ("text", (2, 8, 32), ()),
    "complex_mlp": ("signals", (64, 256), ("data.count=1600",)),
}
PRECISIONS = {
    "32-true": (), "64-true": (), "bf16-mixed": (), "bf16-true": (),
    # A scale that overflows would skip the step that makes the optimizer's state.
    "16-mixed": ("precision.loss_scale.init_scale=64",),
    "16-true": ("optimizer.eps=1e-4",), "bnb-int8-training": (), "bnb-nf4": ("adapter=lora",),
}  # fmt: skip
OTHERS = (
    ("gpt", "bf16-mixed", 8, ("train.activation_checkpointing=true",)),
    ("gpt", "bf16-mixed", 8, ("train.accumulate=2",)),
    ("resnet", "bf16-mixed", 32, ("optimizer=sgd",)),
    ("gpt", "32-true", 8, ("optimizer=muon",)),
    ("resnet", "32-true", 32, ("optimizer=adamw8bit",)),
)


def spec_of(model: str, precision: str, size: int, more: tuple[str, ...], device: str) -> RunSpec:
    data, _, needs = RUNS[model]
    own = (f"model={model}",) if " " not in model else ()
    overrides = [*own, f"data={data}", f"precision={precision}", f"train.batch_size={size}",
                 f"accelerator={device}", *needs, *PRECISIONS[precision], *more]  # fmt: skip
    with initialize_config_module(version_base="1.3", config_module="runner.conf"):
        spec = resolve(compose("config", overrides=overrides))
    return replace(spec, train=replace(spec.train, max_steps=STEPS, eval_every=STEPS))


def trained(
    spec: RunSpec, precision: Precision, device: torch.device, loaders: tuple[Loader, Loader]
) -> None:
    """What runner.train does with a model, without observers and checkpoints."""
    model = build_model(spec, precision, device).model
    task, driven = build_group("task", spec.task), build_driven(spec, model, precision, STEPS)
    with precision.session(model, device):
        state = TrainState(model, precision, task, precision.scale(device), driven, device)
        shape(spec, precision, device, model)
        for _ in fit(state, *loaders, spec.train):
            pass


def measured(spec: RunSpec, precision: Precision, device: torch.device) -> int:
    """Bytes at the allocator, above what it held before."""
    loaders = build_loaders(spec, build_splits(spec), device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        trained(spec, precision, device, loaders)
        return torch.cuda.max_memory_allocated(device) - before
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        trained(spec, precision, device, loaders)
    made: Any = profile.profiler
    all_events = made.kineto_results.events()
    events = [(e.start_ns(), e.nbytes()) for e in all_events if e.name() == "[memory]"]
    held = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        held += size
        peak = max(peak, held)
    return peak


def cases(models: list[str]) -> Iterator[tuple[str, str, int, tuple[str, ...]]]:
    for model in models:
        for precision in PRECISIONS:
            for size in RUNS[model][1]:
                yield model, precision, size, ()
        yield from (case for case in OTHERS if case[0] == model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(RUNS))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    register_schema()
    torch.set_num_threads(1)
    device, rows, errors, left = torch.device(given.device), [], {}, {}
    for model, name, size, more in cases(given.models):
        spec = spec_of(model, name, size, more, given.device)
        precision: Precision = build_group("precision", spec.precision)
        case = " ".join([model, name, *more])
        try:
            precision.require(device)
            seed_all(0)
            peak: Peak = predict(spec, precision, device)
            seed_all(0)
            found = measured(spec, precision, device)
        except (Unavailable, Exception) as error:
            left[case] = str(error).partition("\n")[0]
            continue
        error = peak.total / found - 1
        errors[f"{case} {size}"] = error
        kinds = [f"{part / MIB:.1f}" for part in peak]
        rows.append([case, str(size), *kinds, f"{peak.total / MIB:.2f}", f"{found / MIB:.2f}",
                     f"{100 * error:+.1f} %"])  # fmt: skip
        print(*rows[-1], flush=True)
    sizes = sorted(abs(error) for error in errors.values())
    figures = {
        "cases": len(sizes), "median": statistics.median(sizes), "worst": sizes[-1],
        "case": max(errors, key=lambda case: abs(errors[case])),
    }  # fmt: skip
    head = ["model, precision", "batch", *Peak._fields, "predicted", "measured", "error"]
    text = (
        f"{len(sizes)} cases: error median {100 * figures['median']:.2f} %, worst "
        f"{100 * figures['worst']:.1f} % ({figures['case']}); "
        f"{sum(size <= 0.05 for size in sizes)} within 5 %."
    )
    refused = "\n".join(f"- not run: {case}: {why}" for case, why in left.items())
    setting = f"{versions('torch', 'bitsandbytes')}, one thread, {given.device}"
    body = "\n\n".join(filter(None, [text, table(head, rows), refused, setting]))
    write("memory_plan", (__doc__ or "").strip().splitlines()[0], body)
    (RESULTS / "memory_plan.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
