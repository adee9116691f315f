"""The trial forward that proves a conversion, before it is announced and before anything trains."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from runner.data.loader import Loader
from runner.distributed.strategy import Single, Strategy
from runner.modes.context import RunContext
from runner.precision.conversion_proof import (
    ForwardWatch,
    adapted_layers,
    converted_layers,
    holds_matrix,
)
from runner.precision.precision import ConversionReport, Precision
from runner.training.model import BuiltModel
from runner.training.state import TrainState
from runner.utils.errors import ConfigError, RunnerError
from runner.utils.files import write_json
from runner.utils.reproducibility import rng_state, seed_all, set_rng_state

BYPASSED = "the model reads its weight and passes its forward by"
CODES = "the model reads its weight itself, which packed would hold codes"
IDLE = "converted, but not proven: it did not run in the first batch"
TRAINS = "ran in the first step, not in the evaluation before it"


class TrialResult(NamedTuple):
    """What a trial forward shows.

    Attributes:
        ran: names of the converted layers that ran.
        bypassed: reasons why others count as not converted, by name.
        ended: whether the forward came to its end.
        matrices: names of the converted layers that hold a matrix.
    """

    ran: set[str]
    bypassed: dict[str, str]
    ended: bool
    matrices: list[str]


def prove_conversion(run: RunContext, make: Callable[[], BuiltModel], loader: Loader) -> BuiltModel:
    """Build a run's model with its conversion proven; see build_proven."""

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
    """Build a model whose conversion is proven by one forward. Layers that the model passes by are
    left as they were, without an adapter too, for which it is built a second time.

    Args:
        make: builds the model from a freshly seeded generator.
        precision: that converts it; its `bypassed` names the layers that are left.
        device: where the model runs.
        seed: of the second build.
        inputs: loads the model inputs of the first batch.
        strategy: of several processes, which agree on what they found.

    Raises:
        ConfigError: no converted layer runs.
    """
    built = make()
    converts = any(row.done for row in built.report.modules)
    if not converts and not adapted_layers(built.model):
        return built
    trial = _Trial(precision, device, inputs, strategy or Single())
    found = trial(built)
    if found.bypassed:
        precision.leave_unconverted(found.bypassed)
        del built  # else both models would be in memory
        seed_all(seed)
        built = make()
        found = trial(built)
    if found.bypassed:
        raise ConfigError(
            f"precision={precision.name}: {_reasons(found.bypassed)}. That shows only where "
            f"{_list(precision.bypassed)} are left as they were. Type precision.ignore_modules="
            f"[{','.join(sorted({*precision.bypassed, *found.bypassed}))}]."
        )
    if not found.ended:
        return built  # the check of the first batch, which comes next, says why
    if converts and not found.ran & {*found.matrices}:
        raise ConfigError(
            f"precision={precision.name}: none of the layers that it converts runs in the model's "
            f"forward on the first batch: {_list(found.matrices)}. Have the forward call them. "
            "Type a precision without conversion, for example precision=bf16-mixed."
        )
    return built._replace(report=_with_idle(built.report, found.ran))


def _list(names: Any, most: int = 6) -> str:
    names = sorted(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _bypassed(watch: ForwardWatch) -> dict[str, str]:
    """Why layers count as not converted, by name."""
    return {name: CODES if name in watch.executed else BYPASSED for name in sorted(watch.bypassed)}


def _reasons(bypassed: Mapping[str, str], most: int = 4) -> str:
    reasons = [f"{name}: {why}" for name, why in list(bypassed.items())[:most]]
    more = f"; and {len(bypassed) - most} more" if len(bypassed) > most else ""
    return "; ".join(reasons) + more


def _with_idle(report: ConversionReport, ran: set[str]) -> ConversionReport:
    """Return the report in which converted layers that did not run count as not converted."""
    rows = (
        replace(row, done=False, why=IDLE) if row.done and row.module not in ran else row
        for row in report.modules
    )
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
        self.precision, self.device, self.strategy = precision, device, strategy
        self.inputs = inputs

    def __call__(self, built: BuiltModel) -> TrialResult:
        """Return what all processes found together."""
        found = self._found(built, strict=False)
        every = self.strategy.gather_object(found)
        together = found._replace(
            ran={name for one in every for name in one.ran},
            bypassed=dict(sorted(pair for one in every for pair in one.bypassed.items())),
            ended=all(one.ended for one in every),
        )
        return self.strategy.broadcast_object(together)

    def _found(self, built: BuiltModel, strict: bool) -> TrialResult:
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
            except Exception:  # the check of the first batch says it, where it is not the packing
                pass
        # The dtype that the model asked for may be why its forward failed.
        if not ended and watch.queried_dtypes and not strict:
            return self._found(built, strict=True)
        matrices = [name for name, layer in converted.items() if holds_matrix(layer)]
        return TrialResult(watch.executed, _bypassed(watch), ended, matrices)

    def _forward(self, model: nn.Module, watch: ForwardWatch) -> None:
        precision = self.precision
        inputs = precision.cast(self.inputs())
        model.eval()
        with (
            torch.no_grad(),
            precision.session(model, self.device),
            precision.eval_context(model),
            torch.compiler.set_stance("force_eager"),  # a compiled part would show nothing
            precision.forward(self.device),
            watch,
        ):
            model(inputs)


@contextmanager
def _unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context after which modes, buffers and generators are as before."""
    drawn = rng_state(device)
    modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    values = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for module, training, buffers in modules:
            module.training = training
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        set_rng_state(drawn, device)


class FirstStepProof:
    """Watches the first training step: converted layers that run there only count from then on.

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
        idle = [row for row in self.report.modules if row.why == IDLE]
        rows = (replace(row, done=row.done or row in idle) for row in self.report.modules)
        layers = converted_layers(model, replace(self.report, modules=tuple(rows)))
        if self._run.spec.train.compile or not layers:
            yield
            return
        with ForwardWatch(model, layers) as watch:
            yield
        if found := _bypassed(watch):
            raise ConfigError(
                f"precision={self._run.precision.name}: in the first step, and not in the "
                f"evaluation before it: {_reasons(found)}. Type "
                f"precision.ignore_modules=[{','.join(found)}]."
            )
        if any(row.module in watch.executed for row in idle):
            self._count_trained(watch.executed)

    def _count_trained(self, ran: set[str]) -> None:
        """Count the layers that ran in the first step as converted, and write the report again."""
        run = self._run
        proven = {row.module for row in self.report.modules if row.why == IDLE} & ran
        rows = (
            replace(row, done=True, why=TRAINS) if row.module in proven else row
            for row in self.report.modules
        )
        self.report = replace(self.report, modules=tuple(rows))
        done, layers = self.report.layer_counts
        run.say(f"converted {done} of {layers} layers: {_list(proven)} ran in the first step")
        run.tracker.tags(self.report.tags())
        listed = self.report.to_list()
        run.save_artifact(run.out / "conversion.json", lambda path: write_json(path, listed))
