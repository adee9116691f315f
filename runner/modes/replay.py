"""Run again what a run computed: a saved batch (mode=replay), and the training up to a step.

mode=replay computes forward and backward of a saved batch, to see where its numbers stop being
finite. The weights are those of init.weights=, else those right before the step: the run is trained
up to it once more, from its last checkpoint or its seed. Training is bit-exact, so the state is the
original one. Where the run's config is missing, the weights are new ones. Nothing is tracked.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.config.trusted_targets import folder_config
from runner.core import (
    Batch,
    ConfigError,
    Invocation,
    LoadedCheckpoint,
    Precision,
    RunContext,
    RunSpec,
    Task,
    TrainState,
    backpropagate,
    batch_layout,
    checkpoint_file,
    fmt,
    loss_of,
    module_tape,
    module_tree,
    random_streams,
    run_context,
    targets,
    tensor_facts,
    train_step,
    training_loop,
)
from runner.data.build import build_data, build_run_loaders
from runner.data.stream_loader import DatasetLoader, StreamLoader, saved_batches
from runner.data.task_target import build_task
from runner.diagnostics import saved_batch
from runner.diagnostics.data_checks import labels_of
from runner.diagnostics.saved_batch import SavedBatch
from runner.modes.execution import (
    build_execution,
    read_initial_weights,
    seed_process,
    starting_model,
)
from runner.modes.saved_run import RUN_KEYS, check_run, merge
from runner.precision import registry
from runner.training import state_dict
from runner.training.compile import check_compile_options, prepare_model
from runner.training.evaluation_hook import EvaluationHook
from runner.training.model import ModelBuilder, keeps_adapter
from runner.training.own_state import OwnState, saved_state
from runner.training.state_dict import checkpoint_state_dict
from runner.training.tasks.tensor_task import mean

ROWS_BEFORE_FIRST = 3
"""Rows that are shown before the first tensor that is not finite."""
ROWS_FROM_FIRST = 4
"""Rows that are shown from the first tensor that is not finite on."""
ROWS_WHEN_FINITE = 5
"""Rows that are shown where everything is finite."""
MAX_COMPARED_WEIGHTS_MIB = 4096.0
"""Size of the weights in float32, in MiB, up to which the batch is also replayed in 32-true."""


class TracedTensor(NamedTuple):
    """The statistics of one tensor of a step.

    Attributes:
        phase: forward or backward.
        module: its dotted name, or (inputs), (model), (loss).
        kind: the module's class.
        tensor: output, gradient of the output, or gradient of a parameter by its name.
        dtype: name without "torch.".
        largest: greatest magnitude of the finite elements.
        nonfinite_share: share of elements that are not finite, 0 to 1.
    """

    phase: str
    module: str
    kind: str
    tensor: str
    dtype: str
    largest: float
    nonfinite_share: float

    @property
    def key(self) -> tuple[str, str, str]:
        """Phase, module and tensor, which are the same in a trace of another precision."""
        return self.phase, self.module, self.tensor


def describe_tensor(phase: str, module: str, kind: str, tensor: str, value: Tensor) -> TracedTensor:
    """Return the statistics of a tensor; the host waits for the device."""
    value = value.detach()
    wide = tensor_facts.widest_float(value.device)
    magnitude = value.abs().to(wide)
    finite = magnitude.isfinite()
    largest = 0.0
    nonfinite_share = 0.0
    if value.numel():  # max() of an empty tensor raises, and its mean is NaN
        largest = torch.where(finite, magnitude, 0).max().item()
        nonfinite_share = 1 - finite.to(wide).mean().item()
    name = tensor_facts.dtype_name(value.dtype)
    return TracedTensor(phase, module, kind, tensor, name, largest, nonfinite_share)


class NonfiniteTrace:
    """Context around a forward and a backward that records each module's tensors.

    `rows` are in the order in which the tensors were made, so a module's own output comes before
    that of the module that holds it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.rows: list[TracedTensor] = []
        self._tape = module_tape.ModuleTape()

    def __enter__(self) -> "NonfiniteTrace":
        for dotted_name, module in self.model.named_modules():
            name, kind = dotted_name or module_tape.ROOT, type(module).__name__
            # Recomputed, too: a reentrant checkpoint has gradients in the second forward alone.
            self._tape.watch_calls(name, module, end=partial(self._end, kind), recomputed=True)
            for key, param in module.named_parameters(recurse=False):
                if param.requires_grad:
                    note = partial(self.record, "backward", name, kind, f"gradient of {key}")
                    self._tape.watch_gradient(param, lambda made, note=note: note(made.grad))
        return self

    def __exit__(self, *_: object) -> None:
        self._tape.close()

    def record(self, phase: str, module: str, kind: str, tensor: str, nest: Any) -> None:
        """Add the floating and complex tensors of a nest."""
        for value in tree_leaves(nest):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                self.rows.append(describe_tensor(phase, module, kind, tensor, value))

    def _end(self, kind: str, name: str, output: Any) -> None:
        self.record("forward", name, kind, "output", output)
        note = partial(self.record, "backward", name, kind, "gradient of the output")
        for value in tree_leaves(output):
            # On the output: a backward hook on the module refuses what writes in place.
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(note)


def first_nonfinite(rows: Sequence[TracedTensor]) -> int | None:
    """Return the index of the first row that is not all finite; None where every row is."""
    return next((i for i, row in enumerate(rows) if row.nonfinite_share), None)


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
            trained up to it.
        weights: where the weights come from, in words.
        result: of the trained state itself, where it is that of the run to replay.
    """

    batches: Sequence[Batch]
    checkpoint: LoadedCheckpoint | None
    rng: Mapping[str, Any] | None
    weights: str
    result: ReplayResult | None = None


def replay(run: RunContext) -> None:
    """Replay the batch that batch= names, and print where its numbers stop being finite."""
    precision = run.precision
    saved = saved_batch.read_saved_batch(Path(run.spec.value("batch")))
    value = precision.scale(run.device).value
    # The scale of the step where it is known: at another one other gradients overflow.
    scale = 1.0 if value is None else saved.loss_scale or value.item()
    start = _start(run, saved, scale)
    ours = start.result or _replayed(run, precision, start, scale)
    results = {precision.name: ours}
    plain_rows: dict[tuple[str, str, str], TracedTensor] = {}
    plain = registry.load_precision("32-true")
    is_small = ours.weights_mib <= MAX_COMPARED_WEIGHTS_MIB
    # 32-true is the comparison; for itself and for float64 it would show nothing.
    is_narrower = precision.name != plain.name and precision.storage is not torch.float64
    if is_narrower and is_small:
        results[plain.name] = _replayed(run, plain, start, scale)
        plain_rows = {row.key: row for row in results[plain.name].rows}
    console = run.console
    step = " to ".join(map(str, dict.fromkeys(saved.steps)))
    # A stream's samples have no indices that were saved.
    samples = sum(map(len, saved.micro_batches)) or sum(
        map(batch_layout.examples_in, start.batches)
    )
    console.print(f"replay of step {step}: {samples} samples, weights: {start.weights}")
    for label, result in results.items():
        console.print(f"loss in {label}: {fmt.format_number(result.loss)}")
    spot = first_nonfinite(ours.rows)
    if spot is not None:
        console.print(_verdict(precision.name, ours.rows[spot], plain_rows))
        rows = ours.rows[max(0, spot - ROWS_BEFORE_FIRST) : spot + ROWS_FROM_FIRST]
        console.print(_table(precision.name, rows, plain_rows))
        return

    def share_of_range(row: TracedTensor) -> float:
        return row.largest / torch.finfo(getattr(torch, row.dtype)).max

    # The tensors that come nearest to the end of their dtype's range are shown.
    rows = sorted(ours.rows, key=share_of_range, reverse=True)[:ROWS_WHEN_FINITE]
    console.print(_table(precision.name, rows, plain_rows))
    console.print(
        "Everything is finite with these weights. Type init.weights=<a checkpoint from shortly "
        "before the step>; above is what comes nearest to the end of its range."
    )


def _start(run: RunContext, saved: SavedBatch, scale: float) -> _Start:
    """Return the batch, and the weights and random states to replay it with."""
    spec = run.spec
    checkpoint = read_initial_weights(spec)
    run_spec = run_of_batch(spec, run.invocation)
    if run_spec is None or saved.begun is None or spec.init.weights != run_spec.init.weights:
        weights = spec.init.weights or f"fresh ones (seed {spec.seed})"
        return _Start(_batches(run, saved), checkpoint, None, weights)
    state, batches, weights = state_before_step(run_spec, saved, run.device, run.say)
    with state.precision.session(state.plain_model, run.device):
        checkpoint = LoadedCheckpoint(
            Path(spec.value("batch") or ""), checkpoint_state_dict(state, run_spec)
        )
        rng = random_streams.rng_state(run.device)
        for name, parameter in state.plain_model.named_parameters():
            if parameter.is_floating_point() and not parameter.isfinite().all():
                run.say(f"warning: {name} is not finite before the step, by an earlier update.")
        result = None
        if run_spec.model == spec.model and run_spec.precision == spec.precision:
            # The trained model is the one to replay; another one is built from its weights.
            # The checkpoint refers to the model's buffers, which a training forward may change.
            with saved_state(state):
                result = _traced(state, batches, scale)
    return _Start(batches, checkpoint, rng, weights, result)


def _batches(run: RunContext, saved: SavedBatch) -> list[Batch]:
    """Load the batch's samples from the training set, and check that it is the same one.

    Raises:
        ConfigError: the set has fewer examples than the batch's indices need, or is a stream.
    """
    spec, path = run.spec, run.spec.value("batch")
    data = run.invocation.option_name("data", spec.data)
    saved_data = saved.names["data"]
    if (data, spec.seed) != (saved_data, saved.seed):
        run.console.print(
            f"warning: the batch is of data={saved_data} seed={saved.seed}, this is data={data} "
            f"seed={spec.seed}: its indices may mean other samples."
        )
    data_sets = build_data(spec).train_and_val()
    loader = build_run_loaders(spec, data_sets, run.device).train
    if isinstance(loader, StreamLoader) or not saved.micro_batches:
        raise ConfigError(
            f"batch={path} is of a stream, or of another data= than it was saved with "
            f"(data={saved_data}). A stream's samples have no indices: leave init.weights out."
        )
    highest = max(index for micro in saved.micro_batches for index in micro)
    if highest >= loader.examples:
        raise ConfigError(
            f"batch={path} holds sample {highest}; the training set has {loader.examples}. "
            f"Type the data= and data.* that it was saved with (data={saved_data})."
        )
    # In the micro-batches of the step: batch statistics depend on which samples are together.
    return saved_batches(loader, saved.epoch, saved.micro_batches, saved.first_batch)


def _replayed(run: RunContext, precision: Precision, start: _Start, scale: float) -> ReplayResult:
    """Replay the batch on a new model with these weights.

    Every precision gets the same loss scale, so that their gradients can be compared.
    """
    spec = run.spec
    device = run.device
    checkpoint = start.checkpoint
    random_streams.seed_all(spec.seed)
    # The run's own weights (rng is given) come with the adapter that its gradients were of.
    whole = (
        start.rng is not None
        and checkpoint is not None
        and keeps_adapter(spec, precision, checkpoint)
    )
    make = ModelBuilder(spec, precision, checkpoint, restore_exactly=whole)
    # It runs in one process, whatever the strategy.
    setup = run_context.TrainingSetup(spec, precision, run.task, device)
    built, state = build_execution(setup, make, lambda: start.batches[0][0])
    run.begin_steps(state)
    if start.rng is not None:
        # So that dropout draws what it drew in the step.
        random_streams.set_rng_state(start.rng, device)
    with precision.session(built.model, device):
        module_tree.set_training(built.model)
        return _traced(state, start.batches, scale)


def _traced(state: TrainState, batches: Sequence[Batch], scale: float) -> ReplayResult:
    """Compute forward and backward of each micro-batch as in a step, without the update."""
    traces: list[list[TracedTensor]] = []
    last_rows: list[TracedTensor] = []
    loss_sum = 0.0
    weight_sum = 0.0
    for inputs, target in batches:
        state.model.zero_grad(set_to_none=True)
        with NonfiniteTrace(state.model) as trace:
            trace.record("forward", "(inputs)", "", "inputs", inputs)
            loss = loss_of(state, inputs, target)
            trace.record("forward", "(loss)", type(state.task).__name__, "loss", loss)
            backpropagate(state, loss * scale)
        last_rows = trace.rows
        labels = labels_of(state.task, target)
        count = batch_layout.examples_in((inputs, target)) if labels is None else labels.item()
        if count:  # a mean over no labels is NaN and weighs nothing in the step
            traces.append(trace.rows)
            loss_sum += loss.item() * count
            weight_sum += count
    shown = traces[-1] if traces else last_rows
    rows = next((rows for rows in traces if first_nonfinite(rows) is not None), shown)
    weights_mib = tensor_facts.float32_bytes(state.model) / tensor_facts.MIB
    return ReplayResult(mean(loss_sum, weight_sum), rows, weights_mib)


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
            cells.append("" if plain is None else f"{plain.largest:.4g}")
            if plain is not None and plain.nonfinite_share:
                cells[-1] += f", {plain.nonfinite_share:.1%} not finite"
        table.add_row(*cells)
    return table


def run_of_batch(spec: RunSpec, invocation: Invocation) -> RunSpec | None:
    """Return the spec of the run whose guard saved the batch; None where its config is gone.

    Args:
        spec: of the replay; its batch names the file in the run's folder.
        invocation: what was typed.

    Raises:
        ConfigError: the run's config is damaged, or names code that is not trusted.
    """
    config = folder_config(_run_folder(spec), "batch")
    return config and check_run(config, spec, invocation).with_value("batch", spec.value("batch"))


def _run_folder(spec: RunSpec) -> Path:
    """Return the folder of the run whose guard saved a batch, as `guard/batch-<step>.json`."""
    return Path(spec.value("batch") or "").absolute().parent.parent


def plan_replay(plan: run_context.PlannedRun) -> run_context.PlannedRun:
    """Return a replay with its run's values where none was typed.

    Args:
        plan: its spec's batch names the file in the run's folder.

    Raises:
        ConfigError: the run's config is damaged, or names code that is not trusted.
    """
    spec, invocation = plan.spec, plan.invocation
    saved = saved_batch.read_saved_batch(Path(spec.value("batch")))
    config = folder_config(_run_folder(spec), "batch")
    if config is None:
        return plan
    untyped = [key for key in RUN_KEYS if not invocation.overrides_key(key)]
    choices = {key: name for key, name in saved.names.items() if key in untyped}
    spec, invocation = merge(config, spec, invocation, untyped, choices)
    return plan._replace(spec=spec, invocation=invocation)


def checkpoint_before_step(
    folder: Path, step: int, is_usable: Callable[[LoadedCheckpoint], bool]
) -> LoadedCheckpoint | None:
    """Return a run's newest undamaged checkpoint before a step; None without one.

    Args:
        folder: of the run.
        step: from 1.
        is_usable: returns whether training from a checkpoint leads to the run's weights.
    """
    # Newest first: the fewer steps are trained again, the sooner the step is reached.
    for path in reversed(checkpoint_file.checkpoints_of_run(folder)):
        with suppress(ConfigError):  # damaged: an earlier one costs more steps, no exactness
            checkpoint = LoadedCheckpoint(path, checkpoint_file.load(path))
            if checkpoint.content["step"] < step and is_usable(checkpoint):
                return checkpoint
    return None


def state_before_step(
    spec: RunSpec, saved: SavedBatch, device: torch.device, say: Callable[[str], None]
) -> tuple[TrainState, list[Batch], str]:
    """Train a run up to the step of a saved batch.

    Args:
        spec: the run's own; its batch names the run's folder.
        saved: the batch that its guard saved.
        device: where it trains.
        say: prints how many steps are trained again.

    Returns:
        The state in training mode, the step's micro-batches, and words for where the weights come
        from.

    Raises:
        ConfigError: the run was resumed, and no checkpoint from there to the step exists.
    """
    step = saved.steps[0]
    # A checkpoint from before the resume was trained with other settings.
    start = checkpoint_before_step(
        _run_folder(spec), step, lambda checkpoint: saved.begun <= checkpoint.content["step"]
    )
    if start is None and saved.begun:
        raise ConfigError(
            f"The run was resumed at step {saved.begun}, and no checkpoint from there to step "
            f"{step} is left. Type init.weights=<a checkpoint from shortly before>."
        )
    reached = next(states_before(spec, [step], start, device, say))
    source = _starting_place(start)
    return reached.state, reached.micros, f"those before the step, trained from {source}"


def _starting_place(start: LoadedCheckpoint | None) -> str:
    """Return in words where a training begins."""
    return "the beginning" if start is None else str(start.path)


class ReachedStep(NamedTuple):
    """A run right before a step.

    Attributes:
        step: its number, from 1.
        state: in training mode; it trains on where the next step is asked for.
        micros: micro-batches of the step.
    """

    step: int
    state: TrainState
    micros: list[Batch]


def states_before(
    spec: RunSpec,
    steps: Sequence[int],
    start: LoadedCheckpoint | None,
    device: torch.device,
    say: Callable[[str], None],
    compiles: bool = False,
) -> Iterator[ReachedStep]:
    """Train a run once more, and yield it right before each of the steps.

    The caller may compute with the state; the run does not see it. The run is built by the same
    calls in the same order as in mode=train, or the bits would differ.

    Args:
        spec: the run's own.
        steps: from 1, in rising order.
        start: a checkpoint before the first of them; None for the run's beginning.
        device: where it trains.
        say: prints how many steps are trained.
        compiles: whether the model is compiled as spec.train has it.

    Raises:
        ConfigError: the run has fewer steps.
    """
    precision: Precision = targets.build_group("precision", spec.precision)
    precision.require(device)
    task: Task = build_task(spec.task)
    # Seeded twice, as mode=train does: whatever random numbers the data draws, the model's weights
    # are those of the seed.
    seed_process(spec)
    loaders = build_run_loaders(spec, build_data(spec), device, task=task)
    loaders.train.start = state_dict.starting_point(start)
    planned = training_loop.total_steps(spec.train, loaders.train)
    last = steps[-1]
    if last > planned:
        raise ConfigError(
            f"There is no step {last}: the training has {planned}. Type diff.steps= up to that."
        )
    random_streams.seed_all(spec.seed)
    # A precision that cannot train has no optimizers, and its first step can be looked at.
    trained = planned if start is not None or last > 1 else None
    setup = run_context.TrainingSetup(spec, precision, task, device)
    built, state = build_execution(
        setup, starting_model(setup, start, loaders), lambda: next(loaders.val.epoch(0))[0], trained
    )
    with precision.session(built.model, device):
        if compiles:
            check_compile_options(spec, precision, device, built.model)
            prepare_model(spec, precision, device, built.model)
        # The checkpoint from which a step is computed in another precision holds its buffers.
        state.hooks.add(OwnState(state))
        if start is not None:
            state_dict.restore(state, start, spec, [])
    if last > 1:
        say(f"trains {last - 1 - state.step} steps again, from {_starting_place(start)}")
    batches = training_loop.accumulation_batches(state, loaders.train, spec.train.accumulate)
    for micros, _ in batches:
        step = state.step + 1
        if step in steps:
            with saved_state(state):
                module_tree.set_training(state.model)
                # Outside the session: the caller may compute in another precision.
                yield ReachedStep(step, state, micros)
        if step == last:
            return
        with precision.session(state.plain_model, device):
            module_tree.set_training(state.model)
            train_step(state, micros)
            if training_loop.is_evaluation_step(spec.train, loaders.train, state.step):
                _evaluate(state, loaders.validation)


def _evaluate(state: TrainState, validation: Mapping[str, DatasetLoader]) -> None:
    """Evaluate as the run did, its hook included, whose files are deleted."""
    # An evaluation's data may draw random numbers, and a schedule may follow its quality.
    with TemporaryDirectory() as folder:
        has_hook = state.task.additions.hook is not None
        hook = EvaluationHook(state, Path(folder)) if has_hook else None
        metrics = training_loop.evaluate_sets("val", state, validation, hook=hook)
    if metrics is not None:
        state.record_evaluation(metrics)
