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
from runner.config.invocation import Invocation
from runner.config.schema import RunSpec, TrainSpec
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
from runner.diagnostics.divergence.log_probabilities import log_probability_error
from runner.diagnostics.divergence.reference import generator_states
from runner.diagnostics.divergence.roundoffs import Execution
from runner.modes.context import RunContext, RunOutcome, build_result, prepare_process
from runner.modes.diff_reference import DiffReference, resolve_reference
from runner.modes.diff_run import (
    changed_words,
    checkpoint_of_run,
    diffed_run_spec,
    logged_loss,
    run_folder_of,
)
from runner.modes.rewind import states_before
from runner.modes.trial_forward import build_proven_model
from runner.precision.contract import Precision
from runner.precision.conversion import ConversionReport
from runner.training.compile import check_compile_options, prepare_model
from runner.training.initial_weights import read_initial_weights
from runner.training.model import build_model, restore_model, restore_precision_state
from runner.training.setup import TrainingSetup, build_state
from runner.training.state import TrainState
from runner.training.state_dict import checkpoint_state_dict
from runner.utils.accelerator import choose_accelerator
from runner.utils.errors import ConfigError
from runner.utils.formatting import now_ms, relative_path
from runner.utils.reproducibility import seed_all

PAGE = "diff.html"
NUMBERS = "diff.json"


def diff(run: RunContext) -> RunOutcome:
    """Compare two executions, and write and record what was found.

    Raises:
        ConfigError: `against` names nothing, or the executions cannot be compared.
    """
    start = perf_counter()
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
    _report(run, report, comparison.dumps)
    chosen = report.chosen
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
    recorded = logged_loss(reference.run, compared.step)
    found, _ = compared.batch.losses
    if recorded is not None and recorded != found:
        run.say(
            f"warning: at step {compared.step} the run recorded a loss of {recorded!r}, and its "
            f"training has {found!r} here: the comparison is not at the weights that the run had. "
            "It was resumed with other settings, or trained on another machine or version."
        )


def _reference(run: RunContext) -> DiffReference:
    """Return what the run is compared with; itself, where it only writes a dump.

    Raises:
        ConfigError: `against` names nothing that can be compared with.
    """
    if run.spec.train.activation_checkpointing:
        run.say("mode=diff keeps all activations: train.activation_checkpointing changes no number")
    spec = replace(run.spec, train=_comparable_train(run.spec))
    if spec.against is None:
        return DiffReference(run.precision.name, spec)
    found = _run_reference(spec, run.origin) or resolve_reference(spec)
    return replace(found, spec=replace(found.spec, train=_comparable_train(found.spec)))


def _run_reference(spec: RunSpec, origin: Invocation) -> DiffReference | None:
    """Return the run that `against` names; None where it names no run's folder."""
    folder = run_folder_of(spec)
    if folder is None:
        return None
    run_spec = diffed_run_spec(spec, origin, folder)
    label = f"{run_spec.precision['name']} of {relative_path(folder)}"
    return DiffReference(label, run_spec, run=folder, own=changed_words(spec, run_spec))


def _comparable_train(spec: RunSpec) -> TrainSpec:
    # A block whose forward is computed again in the backward would be seen twice.
    return replace(spec.train, activation_checkpointing=False)


def _report(run: RunContext, report: DivergenceReport, dumps: list[Path]) -> None:
    """Print the sentence, and write the page, the numbers and where the dumps are."""
    run.say(report.sentence)
    run.tracker.tags({"diff": report.sentence, "against": report.against})
    run.save_artifact(run.out / PAGE, lambda path: write_page(report, path))
    run.save_artifact(run.out / NUMBERS, lambda path: write_json_report(report, path))
    count = len(unexplained(report.chosen.batch.rows))
    if count > 1:
        run.say(f"{count} modules add more than rounding explains; all are in {run.out / PAGE}")
    for path in dumps:
        run.say(f"dump: {path}")


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
            start = checkpoint_of_run(self._reference.run, spec, steps[0])
        if steps[0] > 1:
            self._check_conversion()
        device, say = accelerator.device, self._run.say
        for reached in states_before(spec, steps, start, device, say, compiles=True):
            yield self._compare(reached.state, reached.step, reached.micros[0])

    def _check_conversion(self) -> None:
        """Build the run's own model once, before the reference is trained, which may take long.

        Raises:
            ConfigError: its precision converts no layer of it.
        """
        spec = self._run.spec
        precision: Precision = build_group("precision", spec.precision)
        seed_all(spec.seed)
        build_model(spec, precision, self._run.device)

    def _compare(self, state: TrainState, step: int, batch: Batch) -> StepComparison:
        """Compare the executions on a batch, with the reference's weights of this moment."""
        run = self._run
        generators = generator_states(state.device)
        ours = _execution(self._reference.label, state)
        batches = (_on(batch, state.device), _on(batch, run.device))
        if run.spec.diff.dump:
            self._write_dump(ours, step, batches[0], generators)
        recorded = None
        if self._reference.dump is not None:
            recorded = self._read_dump(self._reference.dump, state, batches[0]).reference
        other_state = self._candidate(state, batches[1])
        other = _execution(run.precision.name, other_state)
        found = compare_batch(ours, other, batches, generators, recorded)
        log_probabilities = None
        if found.outputs is not None:
            log_probabilities = log_probability_error(run.task, found.outputs, batches[1][1])
        return StepComparison(step, found, log_probabilities)

    def _candidate(self, state: TrainState, batch: Batch) -> TrainState:
        """Return the run's own execution, with the reference's weights of this moment; before its
        first step with those of its own seed or init.weights."""
        run = self._run
        spec = replace(run.spec, train=_comparable_train(run.spec))
        # Built anew: a precision notes what it left unconverted in its model.
        precision: Precision = build_group("precision", spec.precision)
        seed_all(spec.seed)
        start = None
        if state.step:
            content = checkpoint_state_dict(state, self._reference.spec)
            start = LoadedCheckpoint(Path(f"step {state.step}"), content)
            make = partial(restore_model, spec, precision, start, run.device)
        else:
            weights = read_initial_weights(spec)
            make = partial(build_model, spec, precision, run.device, start=weights)
        built = build_proven_model(make, precision, run.device, spec.seed, lambda: batch[0])
        if start is not None:
            restore_precision_state(built.model, precision, start)
        check_compile_options(spec, precision, run.device, built.model)
        found = build_state(TrainingSetup(spec, precision, run.task, run.device), built.model)
        prepare_model(spec, precision, run.device, built.model)
        self.conversion = built.report
        return found

    def _write_dump(
        self, execution: Execution, step: int, batch: Batch, generators: list[Tensor]
    ) -> None:
        run = self._run
        recorded = record_reference(execution, batch, generators)
        path = dump_path(run.out, step)
        model = execution.state.plain_model
        precision = self._reference.spec.precision
        if run.write_file(
            path, lambda path: write_dump(path, recorded, model, batch, execution.label, precision)
        ):
            self.dumps.append(path)

    def _read_dump(self, path: Path, state: TrainState, batch: Batch) -> Dump:
        """Return a dump of the same weights and batch.

        Raises:
            ConfigError: it is of others.
        """
        found = read_dump(path, state.device)
        different = []
        if found.weights != weights_digest(state.plain_model):
            different.append("weights")
        if found.batch != batch_digest(batch):
            different.append("batch")
        if different:
            raise ConfigError(
                f"against={path} was written with other {' and '.join(different)} than this run "
                "has. Type the model=, data=, seed=, init.weights= and diff.steps= that it was "
                "written with."
            )
        return found


def _execution(label: str, state: TrainState) -> Execution:
    value = state.precision.scale(state.device).value
    return Execution(label, state, 1.0 if value is None else value.item())


def _on(batch: Batch, device: torch.device) -> Batch:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
