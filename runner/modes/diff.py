"""mode=diff: hold a precision, or any other setting, against a reference, module by module.

Both executions have the same weights and batches. Where `diff.steps` names later steps, the
reference is trained up to each of them first.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from runner.checkpoint.checkpoint_file import LoadedCheckpoint
from runner.config.schema import RunSpec
from runner.config.targets import build_group
from runner.data.batch_layout import Batch
from runner.diagnostics.divergence.compare import compare_batch, record_reference
from runner.diagnostics.divergence.divergence_page import write_page
from runner.diagnostics.divergence.divergence_report import (
    DivergenceReport,
    StepComparison,
    metrics,
    unexplained,
    write_json_report,
)
from runner.diagnostics.divergence.dump import (
    Dump,
    batch_digest,
    dump_path,
    read_dump,
    weights_digest,
    write_dump,
)
from runner.diagnostics.divergence.reference import generator_states
from runner.diagnostics.divergence.roundoffs import Execution
from runner.diagnostics.divergence.tensor_error import log_probability_error
from runner.modes.context import RunContext, RunOutcome, build_result, prepare_process
from runner.modes.diff_reference import (
    DiffReference,
    is_of_training,
    resolve_reference,
    run_reference,
)
from runner.modes.execution import build_execution, starting_model
from runner.modes.replay import checkpoint_before_step, states_before
from runner.modes.saved_run import changes
from runner.precision.contract import Precision
from runner.precision.conversion import ConversionReport
from runner.tracking.history import from_folder
from runner.training.compile import check_compile_options, prepare_model
from runner.training.model import build_model, restore_model, restore_precision_state
from runner.training.setup import TrainingSetup
from runner.training.state import TrainState
from runner.training.state_dict import checkpoint_state_dict
from runner.utils.accelerator import choose_accelerator
from runner.utils.errors import ConfigError
from runner.utils.formatting import now_ms
from runner.utils.reproducibility import seed_all

PAGE = "diff.html"
NUMBERS = "diff.json"


def diff(run: RunContext) -> RunOutcome:
    """Compare two executions, and write and record what was found.

    Raises:
        ConfigError: `against` names nothing, or the executions cannot be compared.
    """
    start = perf_counter()
    if run.spec.train.activation_checkpointing:
        run.say("mode=diff keeps all activations: train.activation_checkpointing changes no number")
    run = replace(run, spec=_comparable(run.spec))
    with run.signals.interruptible():
        prepare_process(run)
        reference = _reference(run)
        comparison = _Comparison(run, reference)
        steps = []
        for step in comparison.compared_steps():
            _warn_of_other_loss(run, reference, step)
            steps.append(step)
            run.tracker.log_metrics([(step.step, now_ms(), metrics(step))])
    name = f"{run.precision.name} {reference.own}".rstrip()
    report = DivergenceReport(name, reference.label, steps)
    run.say(report.sentence)
    run.tracker.tags({"diff": report.sentence, "against": report.against})
    run.save_artifact(run.out / PAGE, lambda path: write_page(report, path))
    run.save_artifact(run.out / NUMBERS, lambda path: write_json_report(report, path))
    chosen = report.chosen
    count = len(unexplained(chosen.batch.rows))
    if count > 1:
        run.say(f"{count} modules add more than rounding explains; all are in {run.out / PAGE}")
    for path in comparison.dumps:
        run.say(f"dump: {path}")
    summary = {
        "metrics": metrics(chosen),
        "steps": chosen.step,
        "peak_memory_mib": run.accelerator.peak_memory_mib(),
    }
    result = build_result(run, summary, perf_counter() - start)
    return RunOutcome(result, comparison.conversion)


def _warn_of_other_loss(
    run: RunContext, reference: DiffReference, compared: StepComparison
) -> None:
    """Warn where a run's training has another loss here than the run recorded at that step."""
    # With train.accumulate a run records the mean of a step's micro-batches; one is compared.
    if reference.run is None or reference.spec.train.accumulate > 1:
        return
    curve = from_folder(reference.run).get("train/loss")
    if curve is None:
        return
    steps, _, losses = curve
    recorded = losses[steps == compared.step]
    loss, _ = compared.batch.losses
    if len(recorded) and float(recorded[-1]) != loss:
        run.say(
            f"warning: at step {compared.step} the run recorded a loss of {float(recorded[-1])!r}, "
            f"and its training has {loss!r} here: the comparison is not at the weights that the "
            "run had. It was resumed with other settings, or trained on another machine or version."
        )


def _reference(run: RunContext) -> DiffReference:
    """Return what the run is compared with; itself, where it only writes a dump.

    Raises:
        ConfigError: `against` names nothing that can be compared with.
    """
    spec = run.spec
    if spec.against is None:
        return DiffReference(run.precision.name, spec)
    reference = run_reference(spec, run.invocation) or resolve_reference(spec)
    return replace(reference, spec=_comparable(reference.spec))


def _comparable(spec: RunSpec) -> RunSpec:
    # A block whose forward is computed again in the backward would be seen twice.
    return replace(spec, train=replace(spec.train, activation_checkpointing=False))


class _Comparison:
    """The comparison of one run.

    Attributes:
        conversion: what the run's precision converted.
        dumps: files that were written.
    """

    def __init__(self, run: RunContext, reference: DiffReference) -> None:
        self.conversion = ConversionReport()
        self.dumps: list[Path] = []
        self._run = run
        self._reference = reference

    def compared_steps(self) -> Iterator[StepComparison]:
        """Train the reference up to each of the steps, and yield what is found there."""
        spec = self._reference.spec
        accelerator = choose_accelerator(spec.accelerator.name, spec.accelerator.index)
        steps = sorted({*self._run.spec.diff.steps})
        start = None
        if self._reference.run is not None:
            start = checkpoint_before_step(self._reference.run, steps[0], self._has_settings)
        if steps[0] > 1:
            # The run's own model is built once, before the reference is trained, which may take
            # long: its precision may convert no layer of it.
            precision: Precision = build_group("precision", self._run.spec.precision)
            seed_all(self._run.spec.seed)
            build_model(self._run.spec, precision, self._run.device)
        device = accelerator.device
        for reached in states_before(spec, steps, start, device, self._run.say, compiles=True):
            yield self._compare(reached.state, reached.step, reached.micros[0])

    def _has_settings(self, checkpoint: LoadedCheckpoint) -> bool:
        """Return whether a checkpoint was trained with the reference's settings."""
        # One from before a resume with other settings leads to other weights.
        changed = changes(checkpoint.content["spec"], self._reference.spec)
        return not any(map(is_of_training, changed))

    def _compare(self, state: TrainState, step: int, batch: Batch) -> StepComparison:
        """Compare the executions on a batch, with the reference's weights of this moment."""
        run = self._run
        generators = generator_states(state.device)
        ours = _execution(self._reference.label, state)
        batches = (_on(batch, state.device), _on(batch, run.device))
        if run.spec.diff.dump:
            path = dump_path(run.out, step)
            content = record_reference(ours, batches[0], generators)
            precision = self._reference.spec.precision
            if run.write_file(
                path,
                lambda path: write_dump(
                    path, content, state.plain_model, batches[0], ours.label, precision
                ),
            ):
                self.dumps.append(path)
        recorded = None
        if self._reference.dump is not None:
            recorded = _read_dump(self._reference.dump, state, batches[0]).reference
        other_state = self._candidate(state, batches[1])
        other = _execution(run.precision.name, other_state)
        compared = compare_batch(ours, other, batches, generators, recorded)
        log_probabilities = None
        if compared.outputs is not None:
            log_probabilities = log_probability_error(run.task, compared.outputs, batches[1][1])
        return StepComparison(step, compared, log_probabilities)

    def _candidate(self, state: TrainState, batch: Batch) -> TrainState:
        """Return the run's own execution, with the reference's weights of this moment; before its
        first step with those of its own seed or init.weights."""
        run = self._run
        spec = run.spec
        # Built anew: a precision notes what it left unconverted in its model.
        precision: Precision = build_group("precision", spec.precision)
        setup = TrainingSetup(spec, precision, run.task, run.device)
        seed_all(spec.seed)
        start = None
        if state.step:
            content = checkpoint_state_dict(state, self._reference.spec)
            start = LoadedCheckpoint(Path(f"step {state.step}"), content)
            make = partial(restore_model, spec, precision, start)
        else:
            make = starting_model(setup)
        built, candidate = build_execution(setup, make, lambda: batch[0])
        if start is not None:
            restore_precision_state(built.model, precision, start)
        check_compile_options(spec, precision, run.device, built.model)
        prepare_model(spec, precision, run.device, built.model)
        self.conversion = built.report
        return candidate


def _read_dump(path: Path, state: TrainState, batch: Batch) -> Dump:
    """Return a dump of the same weights and batch.

    Raises:
        ConfigError: it is of others.
    """
    dump = read_dump(path, state.device)
    different = []
    if dump.weights != weights_digest(state.plain_model):
        different.append("weights")
    if dump.batch != batch_digest(batch):
        different.append("batch")
    if different:
        raise ConfigError(
            f"against={path} was written with other {' and '.join(different)} than this run "
            "has. Type the model=, data=, seed=, init.weights= and diff.steps= that it was "
            "written with."
        )
    return dump


def _execution(label: str, state: TrainState) -> Execution:
    value = state.precision.scale(state.device).value
    return Execution(label, state, 1.0 if value is None else value.item())


def _on(batch: Batch, device: torch.device) -> Batch:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
