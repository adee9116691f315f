"""mode=replay: forward and backward on a saved batch, to see where its numbers stop being finite.

The weights are those of init.weights=, else those right before the step: the run is trained to it
once more. Where the run's config is gone, they are new ones. Nothing is tracked.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.data.build import build_loaders, build_splits
from runner.data.loader import Batch
from runner.diagnostics import saved_batch
from runner.diagnostics.nonfinite_trace import (
    NonfiniteTrace,
    TracedTensor,
    describe_tensor,
    first_nonfinite,
)
from runner.diagnostics.saved_batch import SavedBatch
from runner.modes.context import RunContext
from runner.modes.result import RunResult
from runner.modes.rewind import rewind_to_step, saved_run_spec
from runner.modes.trial_forward import build_proven_model
from runner.precision import registry
from runner.precision.precision import Precision
from runner.training.model import build_model, keeps_adapter, load_init_weights
from runner.training.setup import TrainingSetup, build_state
from runner.training.state import TrainState
from runner.training.state_dict import checkpoint_state_dict
from runner.training.step import backpropagate, examples_in, loss_of
from runner.training.tasks.task import labels_of, mean
from runner.utils.errors import ConfigError
from runner.utils.formatting import format_number
from runner.utils.reproducibility import rng_state, seed_all, set_rng_state
from runner.utils.tensors import MIB, float32_bytes

ROWS_BEFORE, ROWS_AFTER = 3, 4
"""Rows that are shown around the first tensor that is not finite."""
FINITE_ROWS = 5
"""Rows that are shown where everything is finite."""
CHEAP_MIB = 4096.0
"""Weights in float32 up to which the batch is also replayed in 32-true, for comparison."""


class ReplayResult(NamedTuple):
    """The tensors of a batch in a model.

    Attributes:
        loss: mean over the micro-batches.
        rows: tensors of the first micro-batch that is not finite, or of the last.
        weights_mib: of the model's weights, in float32.
    """

    loss: float
    rows: list[TracedTensor]
    weights_mib: float


def replay(run: RunContext) -> RunResult:
    """Replay the batch that spec.batch names, and print where its numbers stop being finite."""
    spec, precision, console = run.spec, run.precision, run.console
    assert spec.batch is not None
    saved = saved_batch.read_saved_batch(Path(spec.batch))
    device, own = run.device, saved_run_spec(Path(spec.batch))
    value = precision.scale(device).value
    scale = 1.0 if value is None else saved.loss_scale or value.item()
    runs: dict[str, ReplayResult] = {}
    begin, rng = load_init_weights(spec), None
    weights = spec.init.weights or f"fresh ones (seed {spec.seed})"
    if own is None or saved.begun is None or spec.init.weights != own.init.weights:
        batches = _batches(run, saved)
    else:
        with rewind_to_step(replace(own, batch=spec.batch), saved, device, console) as reached:
            state, batches, weights = reached
            begin, rng = (
                LoadedCheckpoint(Path(spec.batch), checkpoint_state_dict(state, own)),
                rng_state(device),
            )
            for line in _nonfinite_weight_warnings(state.plain_model):
                console.print(line)
            if all(getattr(own, key) == getattr(spec, key) for key in ("model", "precision")):
                runs[precision.name] = _traced(state, batches, scale)
    if not runs:
        runs[precision.name] = _replayed(run, precision, batches, scale, begin, rng)
    plain = registry.load_precision("32-true")
    small = runs[precision.name].weights_mib <= CHEAP_MIB
    is_narrower = precision.name != plain.name and precision.storage is not torch.float64
    if is_narrower and small:
        runs[plain.name] = _replayed(run, plain, batches, scale, begin, rng)
    _show(console, saved, runs, weights)
    return RunResult(precision.name, run.label, str(run.out), device=run.accelerator.name)


def _batches(run: RunContext, saved: SavedBatch) -> list[Batch]:
    """Load the batch's samples from the training set, and check that it is the same one."""
    spec, data = run.spec, run.origin.option_name("data", run.spec.data)
    if (data, spec.seed) != (saved.data, saved.seed):
        run.console.print(
            f"warning: the batch is of data={saved.data} seed={saved.seed}, this is data={data} "
            f"seed={spec.seed}: its indices may mean other samples."
        )
    loader, _ = build_loaders(spec, build_splits(spec), run.device)
    highest = max(index for micro in saved.micro_batches for index in micro)
    if highest >= loader.examples:
        raise ConfigError(
            f"batch={spec.batch} holds sample {highest}; the training set has {loader.examples}. "
            f"Type the data= and data.* that it was saved with (data={saved.data})."
        )
    return list(loader.batches([torch.tensor(micro) for micro in saved.micro_batches]))


def _replayed(
    run: RunContext,
    precision: Precision,
    batches: Sequence[Batch],
    scale: float,
    begin: LoadedCheckpoint | None,
    rng: Mapping[str, Any] | None,
) -> ReplayResult:
    """Replay the batch on a new model with these weights.

    Every precision gets the same loss scale, so that their gradients can be compared.
    """
    spec, device = run.spec, run.device
    seed_all(spec.seed)
    # The run's own weights (rng is given) come with the adapter that its gradients were of.
    whole = rng is not None and begin is not None and keeps_adapter(spec, precision, begin)
    make = partial(build_model, spec, precision, device, start=begin, restore_exactly=whole)
    built = build_proven_model(make, precision, device, spec.seed, lambda: batches[0][0])
    state = build_state(TrainingSetup(spec, precision, run.task, device), built.model)
    if rng is not None:
        set_rng_state(rng, device)
    with precision.session(built.model, device):
        built.model.train()
        return _traced(state, batches, scale)


def _traced(state: TrainState, batches: Sequence[Batch], scale: float) -> ReplayResult:
    """Compute forward and backward of each micro-batch as in a step, without the update."""
    rows: list[TracedTensor] = []
    last: list[TracedTensor] = []
    total, whole, task = 0.0, 0.0, type(state.task).__name__
    for inputs, target in batches:
        state.model.zero_grad(set_to_none=True)
        with NonfiniteTrace(state.model) as trace:
            trace.note("forward", "(inputs)", "", "inputs", inputs)
            loss = loss_of(state, inputs, target)
            trace.rows.append(describe_tensor("forward", "(loss)", task, "loss", loss))
            backpropagate(state, loss * scale)
        last = trace.rows
        labels = labels_of(state.task, target)
        count = examples_in((inputs, target)) if labels is None else labels.item()
        if not count:
            continue  # a mean over no labels is NaN and weighs nothing in the step
        total, whole = total + loss.item() * count, whole + count
        if not any(row.lost for row in rows):
            rows = trace.rows
    return ReplayResult(mean(total, whole), rows or last, float32_bytes(state.model) / MIB)


def _nonfinite_weight_warnings(model: nn.Module) -> Iterator[str]:
    """Yield a warning for each weight that is not finite before the step."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.isfinite().all():
            yield f"warning: {name} is not finite before the step: an earlier update broke it."


def _show(
    console: Console, saved: SavedBatch, runs: Mapping[str, ReplayResult], weights: str
) -> None:
    (name, ours), *others = runs.items()
    step = " to ".join(str(number) for number in dict.fromkeys(saved.steps))
    samples = sum(map(len, saved.micro_batches))
    console.print(f"replay of step {step}: {samples} samples, weights: {weights}")
    for label, result in runs.items():
        console.print(f"loss in {label}: {format_number(result.loss)}")
    beside = {row.place: row for _, result in others for row in result.rows}
    spot = first_nonfinite(ours.rows)
    if spot is not None:
        console.print(_verdict(name, ours.rows[spot], beside))
    console.print(_table(name, _around(ours.rows, spot), beside))
    if spot is None:
        console.print(
            "Everything is finite with these weights. Type init.weights=<a checkpoint from shortly "
            "before the step>; above is what comes nearest to the end of its range."
        )


def _verdict(
    name: str, row: TracedTensor, beside: Mapping[tuple[str, str, str], TracedTensor]
) -> str:
    """Return where the first tensor that is not finite is, and whether 32-true helps."""
    of = "" if row.module in ("(inputs)", "(loss)") else f" of {row.module}"
    text = f"It begins in the {row.phase}, at the {row.tensor}{of} ({row.dtype})"
    if row.module == "(inputs)":
        return f"{text}: the samples themselves are not finite."
    plain = beside.get(row.place)
    if plain is None:
        return f"{text}."
    if plain.lost:
        return f"{text}, in 32-true as well: not a matter of precision={name}."
    keep = "" if row.module in ("(model)", "(loss)") else f": precision.keep_fp32=[{row.module}]"
    return f"{text}; in 32-true it is finite, at most {plain.largest:.4g}{keep}"


def _around(rows: Sequence[TracedTensor], spot: int | None) -> Sequence[TracedTensor]:
    """Return the rows around the first that is not finite, else those nearest to their limit."""
    if spot is None:
        return sorted(rows, key=_share_of_range, reverse=True)[:FINITE_ROWS]
    return rows[max(0, spot - ROWS_BEFORE) : spot + ROWS_AFTER]


def _share_of_range(row: TracedTensor) -> float:
    return row.largest / torch.finfo(getattr(torch, row.dtype)).max


def _table(
    name: str, rows: Sequence[TracedTensor], beside: Mapping[tuple[str, str, str], TracedTensor]
) -> Table:
    table = Table(title=f"in {name}", title_justify="left")
    for head in ("pass", "module", "kind", "tensor", "dtype", "largest", "not finite"):
        table.add_column(head)
    if beside:
        table.add_column("largest in 32-true")
    for row in rows:
        cells = [*row[:5], f"{row.largest:.4g}", f"{row.lost:.1%}" if row.lost else ""]
        if beside:
            plain = beside.get(row.place)
            cells.append(_comparison_cell(plain) if plain else "")
        table.add_row(*cells)
    return table


def _comparison_cell(row: TracedTensor) -> str:
    return f"{row.largest:.4g}" + (f", {row.lost:.1%} not finite" if row.lost else "")
