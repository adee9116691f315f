"""The trial forward that proves a conversion, before it is announced and before anything trains."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from runner.data.stream_loader import BatchLoader
from runner.distributed.strategy import Single, Strategy
from runner.modes.context import RunContext
from runner.precision.contract import Precision
from runner.precision.conversion import ConversionReport
from runner.precision.conversion_proof import (
    ForwardWatch,
    adapted_layers,
    converted_layers,
    holds_matrix,
)
from runner.training.model import BuiltModel
from runner.training.model_call import call_model
from runner.training.state import TrainState
from runner.utils.errors import ConfigError, RunnerError
from runner.utils.files import write_json
from runner.utils.reproducibility import saved_forward_state, seed_all

# Why a converted layer counts as not converted; the texts are in conversion.json.
BYPASSED_REASON = "the model reads its weight and passes its forward by"
CODES_REASON = "the model reads its weight itself, which packed would hold codes"
NOT_RUN_REASON = "converted, but not proven: it did not run in the first batch"
# Why it counts after all.
RAN_IN_TRAINING_REASON = "ran in the first step, not in the evaluation before it"


class TrialResult(NamedTuple):
    """The layers that a trial forward proves or disproves.

    Attributes:
        layers_run: names of the converted layers that ran.
        bypass_reasons: reasons why others count as not converted, by name.
        forward_completed: whether the forward returned without an error.
        matrix_layers: names of the converted layers that hold a matrix.
    """

    layers_run: set[str]
    bypass_reasons: dict[str, str]
    forward_completed: bool
    matrix_layers: list[str]


def prove_conversion(
    run: RunContext, make: Callable[[], BuiltModel], loader: BatchLoader
) -> BuiltModel:
    """Build a run's model with its conversion proven; see build_proven_model."""

    def inputs() -> Any:
        return next(loader.epoch(0))[0]

    return build_proven_model(make, run.precision, run.device, run.spec.seed, inputs, run.strategy)


def build_proven_model(
    make: Callable[[], BuiltModel],
    precision: Precision,
    device: torch.device,
    seed: int,
    inputs: Callable[[], Any],
    strategy: Strategy | None = None,
) -> BuiltModel:
    """Build a model whose conversion is proven by one forward.

    Layers that the model bypasses stay unconverted and get no adapter. For that the model is built
    a second time.

    Args:
        make: builds the model from a freshly seeded generator.
        precision: converts the model; its `bypassed` names the layers that stay unconverted.
        device: where the model runs.
        seed: of the second build.
        inputs: loads the model inputs of the first batch.
        strategy: of several processes, which agree on the result; None for one process.

    Raises:
        ConfigError: no converted layer runs, or other layers are bypassed in the second build.
    """
    built = make()
    converts = any(row.done for row in built.report.modules)
    if not converts and not adapted_layers(built.model):
        return built
    trial = _Trial(precision, device, inputs, strategy or Single())
    found = trial.run(built)
    if found.bypass_reasons:
        precision.leave_unconverted(found.bypass_reasons)
        del built  # else both models would be in memory
        seed_all(seed)
        built = make()
        found = trial.run(built)
    if found.bypass_reasons:
        reasons = _reasons_text(found.bypass_reasons)
        ignored = sorted({*precision.bypassed, *found.bypass_reasons})
        raise ConfigError(
            f"precision={precision.name}: {reasons}. That shows only where "
            f"{_names_text(precision.bypassed)} are left as they were. Type "
            f"precision.ignore_modules=[{','.join(ignored)}]."
        )
    if not found.forward_completed:
        return built  # try_batch, which comes next, says why
    if converts and not found.layers_run & {*found.matrix_layers}:
        raise ConfigError(
            f"precision={precision.name}: none of the layers that it converts runs in the model's "
            f"forward on the first batch: {_names_text(found.matrix_layers)}. Have the forward "
            "call them. Type a precision without conversion, for example precision=bf16-mixed."
        )
    return built._replace(report=_with_idle(built.report, found.layers_run))


def _names_text(names: Iterable[str], most: int = 6) -> str:
    """Return names in alphabetical order, with a count of those above `most`."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def _bypass_reasons(watch: ForwardWatch) -> dict[str, str]:
    """Return why layers count as not converted, by name."""
    return {
        name: CODES_REASON if name in watch.executed else BYPASSED_REASON
        for name in sorted(watch.bypassed)
    }


def _reasons_text(bypassed: Mapping[str, str], most: int = 4) -> str:
    reasons = [f"{name}: {why}" for name, why in list(bypassed.items())[:most]]
    more = f"; and {len(bypassed) - most} more" if len(bypassed) > most else ""
    return "; ".join(reasons) + more


def _with_idle(report: ConversionReport, ran: set[str]) -> ConversionReport:
    """Return the report in which converted layers that did not run count as not converted."""
    rows = []
    for row in report.modules:
        if row.done and row.module not in ran:
            row = replace(row, done=False, why=NOT_RUN_REASON)
        rows.append(row)
    return replace(report, modules=tuple(rows))


class _Trial:
    """The trial forward of one run."""

    def __init__(
        self,
        precision: Precision,
        device: torch.device,
        inputs: Callable[[], Any],
        strategy: Strategy,
    ) -> None:
        self.precision = precision
        self.device = device
        self.inputs = inputs
        self.strategy = strategy

    def run(self, built: BuiltModel) -> TrialResult:
        """Return the result of all processes together.

        All processes must call it. They see different samples, so a layer that runs in one of them
        has run, and one that is bypassed in one of them is bypassed.
        """
        found = self._run_here(built, strict=False)
        every = self.strategy.gather_object(found)
        together = found._replace(
            layers_run={name for one in every for name in one.layers_run},
            bypass_reasons=dict(
                sorted(pair for one in every for pair in one.bypass_reasons.items())
            ),
            forward_completed=all(one.forward_completed for one in every),
        )
        return self.strategy.broadcast_object(together)

    def _run_here(self, built: BuiltModel, strict: bool) -> TrialResult:
        """Return the result of this process.

        Args:
            built: the model.
            strict: passed on to ForwardWatch.
        """
        converted = converted_layers(built.model, built.report)
        layers = adapted_layers(built.model) | converted
        watch = ForwardWatch(built.model, layers, strict)
        ended = False
        with _unchanged(built.model, self.device):
            try:
                self._forward(built.model, watch)
                ended = True
            except RunnerError:
                raise
            except Exception:  # try_batch reports it, where the packing is not the cause
                pass
        # What the optimizer is built on, and what is counted, are the shards.
        self.strategy.drop_gathered_weights()
        if not ended and watch.queried_dtypes and not strict:
            # What the model asked of a packed weight may be why the forward failed.
            return self._run_here(built, strict=True)
        matrices = [name for name, layer in converted.items() if holds_matrix(layer)]
        return TrialResult(watch.executed, _bypass_reasons(watch), ended, matrices)

    def _forward(self, model: nn.Module, watch: ForwardWatch) -> None:
        precision = self.precision
        inputs = precision.cast(self.inputs())
        # In evaluation mode, so that no statistics of the first batch get into the model.
        model.eval()
        with (
            torch.no_grad(),
            precision.session(model, self.device),
            precision.eval_context(model),
            torch.compiler.set_stance("force_eager"),  # compiled code runs past the watch
            precision.forward(self.device),
            watch,
        ):
            call_model(model, inputs)


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Return the context after which modes, buffers and generators are as before."""
    # Batch norm and FP8 layers change buffers in a forward, and dropout draws random numbers.
    restore = saved_forward_state(model, device)
    try:
        yield
    finally:
        restore()


class FirstStepProof:
    """Watches the first training step; converted layers that run only there count from then on.

    Attributes:
        report: the conversion as proven so far.
    """

    def __init__(self, run: RunContext, state: TrainState, report: ConversionReport) -> None:
        self.report = report
        self._run = run
        self._state = state

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Return the context around the first step.

        Raises:
            ConfigError: the model reads a packed weight in training, though not in evaluation.
        """
        model = self._state.plain_model
        # Layers that did not run in the trial are converted all the same, and may run now.
        idle = [row for row in self.report.modules if row.why == NOT_RUN_REASON]
        rows = (replace(row, done=row.done or row in idle) for row in self.report.modules)
        layers = converted_layers(model, replace(self.report, modules=tuple(rows)))
        # A compiled model runs past the watch.
        if self._run.spec.train.compile or not layers:
            yield
            return
        with ForwardWatch(model, layers) as watch:
            yield
        bypassed = _bypass_reasons(watch)
        if bypassed:
            raise ConfigError(
                f"precision={self._run.precision.name}: in the first step, and not in the "
                f"evaluation before it: {_reasons_text(bypassed)}. Type "
                f"precision.ignore_modules=[{','.join(bypassed)}]."
            )
        if any(row.module in watch.executed for row in idle):
            self._count_trained(watch.executed)

    def _count_trained(self, ran: set[str]) -> None:
        """Count the layers that ran in the first step as converted, and write the report again."""
        run = self._run
        proven = {row.module for row in self.report.modules if row.why == NOT_RUN_REASON} & ran
        rows = []
        for row in self.report.modules:
            if row.module in proven:
                row = replace(row, done=True, why=RAN_IN_TRAINING_REASON)
            rows.append(row)
        self.report = replace(self.report, modules=tuple(rows))
        done, layers = self.report.layer_counts
        run.say(f"converted {done} of {layers} layers: {_names_text(proven)} ran in the first step")
        run.tracker.tags(self.report.tags())
        listed = self.report.to_list()
        run.save_artifact(run.out / "conversion.json", lambda path: write_json(path, listed))
