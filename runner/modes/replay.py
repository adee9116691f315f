"""mode=replay: forward and backward on a saved batch, to see where its numbers stop being finite.

The weights are those of init.weights=, else those right before the step: the run is trained up to
it once more. Where the run's config is missing, the weights are new ones. Nothing is tracked.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.data.batch_layout import Batch
from runner.data.build import build_data, build_run_loaders
from runner.data.step_samples import saved_batches
from runner.data.stream_loader import StreamLoader
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
from runner.modes.rewind import rewind_to_step, run_of_batch
from runner.modes.trial_forward import build_proven_model
from runner.precision import registry
from runner.precision.contract import Precision
from runner.training.initial_weights import read_initial_weights
from runner.training.model import build_model, keeps_adapter
from runner.training.setup import TrainingSetup, build_state
from runner.training.state import TrainState
from runner.training.state_dict import checkpoint_state_dict
from runner.training.step import backpropagate, examples_in, loss_of
from runner.training.tasks.task import labels_of, mean
from runner.utils.errors import ConfigError
from runner.utils.formatting import format_number
from runner.utils.reproducibility import rng_state, seed_all, set_rng_state
from runner.utils.tensors import MIB, float32_bytes

ROWS_BEFORE_FIRST = 3
"""Rows that are shown before the first tensor that is not finite."""
ROWS_FROM_FIRST = 4
"""Rows that are shown from the first tensor that is not finite on."""
ROWS_WHEN_FINITE = 5
"""Rows that are shown where everything is finite."""
MAX_COMPARED_WEIGHTS_MIB = 4096.0
"""Size of the weights in float32, in MiB, up to which the batch is also replayed in 32-true."""


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


class _Start(NamedTuple):
    """What a replay begins with.

    Attributes:
        batches: the step's micro-batches.
        checkpoint: the weights; None for new ones.
        rng: states of the random generators right before the step; None where the run was not
            rewound to it.
        weights: where the weights come from, in words.
        result: of the rewound state itself, where it is that of the run to replay.
    """

    batches: Sequence[Batch]
    checkpoint: LoadedCheckpoint | None
    rng: Mapping[str, Any] | None
    weights: str
    result: ReplayResult | None = None


def replay(run: RunContext) -> RunResult:
    """Replay the batch that spec.batch names, and print where its numbers stop being finite."""
    precision = run.precision
    assert run.spec.batch is not None
    saved = saved_batch.read_saved_batch(Path(run.spec.batch))
    value = precision.scale(run.device).value
    # The scale of the step where it is known: at another one other gradients overflow.
    scale = 1.0 if value is None else saved.loss_scale or value.item()
    start = _start(run, saved, scale)
    results: dict[str, ReplayResult] = {}
    results[precision.name] = start.result or _replayed(run, precision, start, scale)
    plain = registry.load_precision("32-true")
    is_small = results[precision.name].weights_mib <= MAX_COMPARED_WEIGHTS_MIB
    # 32-true is the comparison; for itself and for float64 it would show nothing.
    is_narrower = precision.name != plain.name and precision.storage is not torch.float64
    if is_narrower and is_small:
        results[plain.name] = _replayed(run, plain, start, scale)
    _show(run.console, saved, results, start)
    return RunResult(precision.name, run.label, str(run.out), device=run.accelerator.name)


def _start(run: RunContext, saved: SavedBatch, scale: float) -> _Start:
    """Return the batch, and the weights and random states to replay it with."""
    spec = run.spec
    checkpoint = read_initial_weights(spec)
    run_spec = run_of_batch(spec, run.origin)
    if run_spec is None or saved.begun is None or spec.init.weights != run_spec.init.weights:
        weights = spec.init.weights or f"fresh ones (seed {spec.seed})"
        return _Start(_batches(run, saved), checkpoint, None, weights)
    with rewind_to_step(run_spec, saved, run.device, run.console) as rewound:
        state, batches, weights = rewound
        checkpoint = LoadedCheckpoint(
            Path(spec.batch or ""), checkpoint_state_dict(state, run_spec)
        )
        rng = rng_state(run.device)
        for line in _nonfinite_weight_warnings(state.plain_model):
            run.console.print(line)
        result = None
        if run_spec.model == spec.model and run_spec.precision == spec.precision:
            # The rewound model is the one to replay; another one is built from its weights.
            result = _traced(state, batches, scale)
    return _Start(batches, checkpoint, rng, weights, result)


def _batches(run: RunContext, saved: SavedBatch) -> list[Batch]:
    """Load the batch's samples from the training set, and check that it is the same one.

    Raises:
        ConfigError: the set has fewer examples than the batch's indices need, or is a stream.
    """
    spec = run.spec
    data = run.origin.option_name("data", spec.data)
    if (data, spec.seed) != (saved.data, saved.seed):
        run.console.print(
            f"warning: the batch is of data={saved.data} seed={saved.seed}, this is data={data} "
            f"seed={spec.seed}: its indices may mean other samples."
        )
    loader = build_run_loaders(spec, build_data(spec), run.device).train
    if isinstance(loader, StreamLoader) or not saved.micro_batches:
        raise ConfigError(
            f"batch={spec.batch} is of a stream, or of another data= than it was saved with "
            f"(data={saved.data}). A stream's samples have no indices: leave init.weights out, so "
            "that the run is trained again up to the step."
        )
    highest = max(index for micro in saved.micro_batches for index in micro)
    if highest >= loader.examples:
        raise ConfigError(
            f"batch={spec.batch} holds sample {highest}; the training set has {loader.examples}. "
            f"Type the data= and data.* that it was saved with (data={saved.data})."
        )
    # By micro-batch, as in the step: batch statistics depend on which samples are together.
    return saved_batches(loader, saved.epoch, saved.micro_batches, saved.first_batch)


def _replayed(run: RunContext, precision: Precision, start: _Start, scale: float) -> ReplayResult:
    """Replay the batch on a new model with these weights.

    Every precision gets the same loss scale, so that their gradients can be compared.
    """
    spec = run.spec
    device = run.device
    checkpoint = start.checkpoint
    seed_all(spec.seed)
    # The run's own weights (rng is given) come with the adapter that its gradients were of.
    whole = (
        start.rng is not None
        and checkpoint is not None
        and keeps_adapter(spec, precision, checkpoint)
    )
    make = partial(build_model, spec, precision, device, start=checkpoint, restore_exactly=whole)
    built = build_proven_model(make, precision, device, spec.seed, lambda: start.batches[0][0])
    state = build_state(TrainingSetup(spec, precision, run.task, device), built.model)
    if start.rng is not None:
        # So that dropout draws what it drew in the step.
        set_rng_state(start.rng, device)
    with precision.session(built.model, device):
        built.model.train()
        return _traced(state, start.batches, scale)


def _traced(state: TrainState, batches: Sequence[Batch], scale: float) -> ReplayResult:
    """Compute forward and backward of each micro-batch as in a step, without the update."""
    rows: list[TracedTensor] = []
    last_rows: list[TracedTensor] = []
    loss_sum = 0.0
    weight_sum = 0.0
    task = type(state.task).__name__
    for inputs, target in batches:
        state.model.zero_grad(set_to_none=True)
        with NonfiniteTrace(state.model) as trace:
            trace.record("forward", "(inputs)", "", "inputs", inputs)
            loss = loss_of(state, inputs, target)
            trace.rows.append(describe_tensor("forward", "(loss)", task, "loss", loss))
            backpropagate(state, loss * scale)
        last_rows = trace.rows
        labels = labels_of(state.task, target)
        count = examples_in((inputs, target)) if labels is None else labels.item()
        if not count:
            continue  # a mean over no labels is NaN and weighs nothing in the step
        loss_sum += loss.item() * count
        weight_sum += count
        if not any(row.nonfinite_share for row in rows):
            rows = trace.rows
    weights_mib = float32_bytes(state.model) / MIB
    return ReplayResult(mean(loss_sum, weight_sum), rows or last_rows, weights_mib)


def _nonfinite_weight_warnings(model: nn.Module) -> Iterator[str]:
    """Yield a warning for each weight that is not finite before the step."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.isfinite().all():
            yield f"warning: {name} is not finite before the step: an earlier update broke it."


def _show(
    console: Console, saved: SavedBatch, results: Mapping[str, ReplayResult], start: _Start
) -> None:
    """Print the losses, the verdict and the table of the rows around it.

    Args:
        console: prints.
        saved: the batch.
        results: by precision, that of the run first, then that of 32-true where it was replayed.
        start: what the replay began with.
    """
    (name, ours), *others = results.items()
    step = " to ".join(str(number) for number in dict.fromkeys(saved.steps))
    # A stream's samples have no indices that were saved.
    samples = sum(map(len, saved.micro_batches)) or sum(map(examples_in, start.batches))
    console.print(f"replay of step {step}: {samples} samples, weights: {start.weights}")
    for label, result in results.items():
        console.print(f"loss in {label}: {format_number(result.loss)}")
    plain_rows = {row.key: row for _, result in others for row in result.rows}
    spot = first_nonfinite(ours.rows)
    if spot is not None:
        console.print(_verdict(name, ours.rows[spot], plain_rows))
    console.print(_table(name, _around(ours.rows, spot), plain_rows))
    if spot is None:
        console.print(
            "Everything is finite with these weights. Type init.weights=<a checkpoint from shortly "
            "before the step>; above is what comes nearest to the end of its range."
        )


def _verdict(
    name: str, row: TracedTensor, plain_rows: Mapping[tuple[str, str, str], TracedTensor]
) -> str:
    """Return where the first tensor that is not finite is, and whether 32-true helps."""
    owner = "" if row.module in ("(inputs)", "(loss)") else f" of {row.module}"
    text = f"It begins in the {row.phase}, at the {row.tensor}{owner} ({row.dtype})"
    if row.module == "(inputs)":
        return f"{text}: the samples themselves are not finite."
    plain = plain_rows.get(row.key)
    if plain is None:
        return f"{text}."
    if plain.nonfinite_share:
        return f"{text}, in 32-true as well: not a matter of precision={name}."
    # Only a submodule can be kept in float32 by its name.
    keep = "" if row.module in ("(model)", "(loss)") else f": precision.keep_fp32=[{row.module}]"
    return f"{text}; in 32-true it is finite, at most {plain.largest:.4g}{keep}"


def _around(rows: Sequence[TracedTensor], spot: int | None) -> Sequence[TracedTensor]:
    """Return the rows around the first that is not finite, else those nearest to their limit."""
    if spot is None:
        return sorted(rows, key=_share_of_range, reverse=True)[:ROWS_WHEN_FINITE]
    return rows[max(0, spot - ROWS_BEFORE_FIRST) : spot + ROWS_FROM_FIRST]


def _share_of_range(row: TracedTensor) -> float:
    """Return a tensor's greatest magnitude as a share of its dtype's range."""
    return row.largest / torch.finfo(getattr(torch, row.dtype)).max


def _table(
    name: str, rows: Sequence[TracedTensor], plain_rows: Mapping[tuple[str, str, str], TracedTensor]
) -> Table:
    table = Table(title=f"in {name}", title_justify="left")
    for head in ("pass", "module", "kind", "tensor", "dtype", "largest", "not finite"):
        table.add_column(head)
    if plain_rows:
        table.add_column("largest in 32-true")
    for row in rows:
        share = f"{row.nonfinite_share:.1%}" if row.nonfinite_share else ""
        cells = [*row[:5], f"{row.largest:.4g}", share]
        if plain_rows:
            plain = plain_rows.get(row.key)
            cells.append(_comparison_cell(plain) if plain else "")
        table.add_row(*cells)
    return table


def _comparison_cell(row: TracedTensor) -> str:
    share = f", {row.nonfinite_share:.1%} not finite" if row.nonfinite_share else ""
    return f"{row.largest:.4g}{share}"
