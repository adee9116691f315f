"""How far is the predicted peak memory of training from the measured one?

    python -m bench.memory_plan [--runs mlp gpt ...] [--device cuda]

predicted: runner.diagnostics.memory.forecast, before anything runs. measured: the most that
torch's allocator held while the runner's own loop trained four steps and evaluated after the last,
from before the model was built, the data set left out; on a CPU from torch.profiler's record
of every allocation, on CUDA torch.cuda.max_memory_allocated. MiB of 2^20 bytes.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_module

from bench.common import RESULTS, parse_options, table, versions, write, write_rows
from runner.config.hydra_plugins import VERSION_BASE
from runner.config.resolve import register_schema, resolve_spec
from runner.core import training_loop
from runner.core.base.errors import RunnerError
from runner.core.base.random_streams import seed_all
from runner.core.base.tensor_facts import MIB
from runner.core.config.schema import RunSpec
from runner.core.config.targets import build_group
from runner.core.loop.train_state import TrainState
from runner.core.policy.precision import Precision
from runner.data.build import build_data, build_run_loaders
from runner.data.loader import Loader
from runner.diagnostics.memory.forecast import peak_forecast
from runner.diagnostics.memory.memory_tracker import MemoryBreakdown
from runner.rooms import install_rooms
from runner.training.compile import prepare_model
from runner.training.model import ModelBuilder
from runner.training.setup import build_scheduled_optimizers

STEPS = 4
FULL = (
    "32-true",
    "64-true",
    "bf16-mixed",
    "16-mixed",
    "bf16-true",
    "16-true",
    "bnb-int8-training",
    "bnb-nf4",
)
# What is trained: its overrides, its batch sizes and its precisions.
RUNS = {
    "mlp": (("model=mlp", "data=digits"), (16, 64, 256), FULL),
    "mlp, 2048 wide": (("model=mlp", "data=digits", "model.hidden=[2048,2048]"), (16, 256), FULL),
    "resnet": (("model=resnet", "data=digits"), (8, 32, 128), FULL),
    "resnet, 32 px": (("model=resnet", "data=synthetic_images", "data.count=320"), (8, 32), FULL),
    "gpt": (("model=gpt", "data=text"), (2, 8, 32), FULL),
    "complex_mlp": (("model=complex_mlp", "data=signals", "data.count=1600"), (64, 256), FULL[:2]),
    "complex_mlp, 256 wide": (
        ("model=complex_mlp", "data=signals", "data.count=1600", "model.hidden=[256,256]"),
        (64, 256),
        FULL[:2],
    ),
}
NEEDS = {
    # A scale that overflows would skip the step that makes the optimizer's state.
    "16-mixed": ("precision.loss_scale.init_scale=64",),
    "16-true": ("optimizer.eps=1e-4",),
    "bnb-nf4": ("adapter=lora",),
}
OTHERS = (
    ("gpt", "bf16-mixed", 8, ("train.activation_checkpointing=true",)),
    ("gpt", "bf16-mixed", 8, ("train.accumulate=2",)),
    ("resnet", "bf16-mixed", 32, ("optimizer=sgd",)),
    ("gpt", "32-true", 8, ("optimizer=muon",)),
    ("resnet", "32-true", 32, ("optimizer=adamw8bit",)),
)


HEAD = ["trained", "precision", "batch", *MemoryBreakdown._fields, "predicted", "measured", "error"]
LARGE = 4  # MiB
WHY = (
    "Not predicted are the loader's order (8 bytes for each example of the data set), oneDNN's "
    "buffers in a bfloat16 product (up to half a MiB), and here and there a tensor that a kernel "
    "casts, or that autograd adds to in place where no one watches. They weigh in models of a MiB."
)


class Row(NamedTuple):
    """A prediction with its measurement."""

    run: str
    case: str
    size: int
    peak: MemoryBreakdown
    measured: int

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.peak.total / self.measured - 1

    def cells(self) -> list[str]:
        """Return the cells of a row of the table."""
        parts = [f"{part / MIB:.1f}" for part in self.peak]
        both = f"{self.peak.total / MIB:.2f}", f"{self.measured / MIB:.2f}"
        return [self.run, self.case, str(self.size), *parts, *both, f"{100 * self.error:+.1f} %"]


def build_spec(run: str, precision: str, size: int, more: tuple[str, ...], device: str) -> RunSpec:
    """Return the spec of a case, with STEPS steps and one evaluation."""
    overrides = [
        *RUNS[run][0],
        f"precision={precision}",
        f"train.batch_size={size}",
        f"accelerator={device}",
        *NEEDS.get(precision, ()),
        *more,
    ]
    with initialize_config_module("runner.conf", **VERSION_BASE):
        spec = resolve_spec(compose("config", overrides=overrides))
    return replace(spec, train=replace(spec.train, max_steps=STEPS, eval_every=STEPS))


def train(
    spec: RunSpec, precision: Precision, device: torch.device, loaders: tuple[Loader, Loader]
) -> None:
    """Train a model as runner.modes.train does, without callbacks and checkpoints."""
    model = ModelBuilder(spec, precision).build(device).model
    task = build_group("task", spec.task)
    optimizers = build_scheduled_optimizers(spec, model, precision, STEPS)
    with precision.session(model, device):
        state = TrainState(model, precision, task, precision.scale(device), optimizers, device)
        prepare_model(spec, precision, device, model)
        for _ in training_loop.fit(state, *loaders, spec.train):
            pass


def measure_peak(spec: RunSpec, precision: Precision, device: torch.device) -> int:
    """Return the peak of the allocator in bytes, above what it held before."""
    sets = build_run_loaders(spec, build_data(spec), device)
    loaders = sets.train, sets.val
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        train(spec, precision, device, loaders)
        return torch.cuda.max_memory_allocated(device) - before
    return peak_allocation(lambda: train(spec, precision, device, loaders))


def peak_allocation(run: Callable[[], object]) -> int:
    """Return the most bytes that the CPU's allocator held during a call, above those before."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        run()
    made: Any = profile.profiler
    all_events = made.kineto_results.events()
    events = [(e.start_ns(), e.nbytes()) for e in all_events if e.name() == "[memory]"]
    held = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        held += size
        peak = max(peak, held)
    return peak


def cases(runs: list[str]) -> Iterator[tuple[str, str, int, tuple[str, ...]]]:
    """Yield run, precision, batch size and further overrides."""
    for run in runs:
        _, sizes, precisions = RUNS[run]
        yield from ((run, name, size, ()) for name in precisions for size in sizes)
        yield from (case for case in OTHERS if case[0] == run)


def summary(rows: list[Row]) -> list[list[str]]:
    """Return a row for each model, for all peaks from LARGE on, and for all."""
    groups = {run: [row for row in rows if row.run == run] for run in RUNS}
    groups[f"all from {LARGE} MiB"] = [row for row in rows if row.measured >= LARGE * MIB]
    groups["all"] = rows
    lines = []
    for name, group in groups.items():
        if group:
            errors = [abs(row.error) for row in group]
            worst = max(group, key=lambda row: abs(row.error))
            sizes = [row.measured / MIB for row in group]
            lines.append(
                [
                    name,
                    str(len(group)),
                    f"{min(sizes):.2g} to {max(sizes):.3g}",
                    f"{100 * statistics.median(errors):.1f} %",
                    f"{100 * worst.error:+.1f} %",
                    f"`{worst.case}`, batch {worst.size}",
                ]
            )
    return lines


def main() -> None:
    """Predict and measure every case."""
    chosen = parse_options(__doc__, runs=list(RUNS), device="cpu")
    install_rooms()
    register_schema()
    torch.set_num_threads(1)
    device, rows, failures = torch.device(chosen.device), [], []
    for run, name, size, more in cases(chosen.runs):
        spec = build_spec(run, name, size, more, chosen.device)
        precision: Precision = build_group("precision", spec.precision)
        case = " ".join([name, *more])
        try:
            precision.require(device)
            seed_all(0)
            peak = peak_forecast(spec, precision, device).peak(spec.train.batch_size)
            measured = measure_peak(spec, precision, device)
        except RunnerError as error:
            failures.append(f"- not run: {run}, {case}: {error}")
            continue
        rows.append(Row(run, case, size, peak, measured))
        print(*rows[-1].cells(), flush=True)
    means, head = summary(rows), ["trained", "cases", "MiB", "median", "worst", "where"]
    setting = f"{versions('torch', 'bitsandbytes')}, one thread, {chosen.device}"
    cells = table(HEAD, [row.cells() for row in rows])
    body = "\n\n".join([table(head, means), WHY, cells, *failures, setting])
    write("memory_plan", (__doc__ or "").splitlines()[0], body)
    write_rows(RESULTS / "memory_plan.json", {"head": head, "rows": means})


if __name__ == "__main__":
    main()
