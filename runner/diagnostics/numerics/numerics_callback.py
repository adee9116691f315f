"""Measure the tensors of a run every few steps, record the shares that the precision loses, and
write the numerics report at the end."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from runner.config.schema import RunSpec
from runner.diagnostics.numerics.probe import Probe
from runner.diagnostics.numerics.results import Numerics, NumericsSnapshot, read
from runner.distributed.strategy import Strategy
from runner.tracking.tracker import RunOutput
from runner.training.callbacks.callback import RunCallback
from runner.training.state import TrainState
from runner.utils.errors import ConfigError
from runner.utils.formatting import now_ms, relative_path
from runner.utils.layout import NUMERICS
from runner.utils.tensors import dtype_name

_UNMEASURED = nullcontext()


def check_numerics(spec: RunSpec, strategy: Strategy) -> None:
    """Refuse to measure tensors that the strategy shards.

    Raises:
        ConfigError: each process has only a part of every tensor.
    """
    if spec.numerics.every is not None and strategy.shards:
        raise ConfigError(
            f"numerics.every={spec.numerics.every} measures whole tensors, and strategy="
            f"{strategy.name} shards them. Type strategy=ddp, or leave numerics.every= out."
        )


class NumericsCallback(RunCallback):
    """Measures a run's tensors at an interval; only the first process has one.

    Args:
        state: of the training.
        every: optimizer steps between two measurements.
        output: the run's folder, tracker and console.
        label: of the run, the title of the report.
    """

    key = "numerics"

    def __init__(self, state: TrainState, every: int, output: RunOutput, label: str) -> None:
        self.state = state
        self.every = every
        self.output = output
        self.label = label
        self.snapshots: list[NumericsSnapshot] = []
        self._probe = Probe(state, self._record)

    def around_step(self, step: int) -> AbstractContextManager[object]:
        """Return the context around a step: the probe where a measurement is due."""
        return self._probe if step % self.every == 0 else _UNMEASURED

    @property
    def numerics(self) -> Numerics:
        """All measurements so far."""
        precision = self.state.precision
        return Numerics(
            self.every,
            precision.name,
            dtype_name(precision.storage),
            dtype_name(precision.compute),
            tuple(self.snapshots),
        )

    def _record(self, snapshot: NumericsSnapshot) -> None:
        """Keep a snapshot, and record the worst shares of its tensors as metrics."""
        self.snapshots.append(snapshot)
        # The worst module of each share: a mean over a whole model would hide one bad layer.
        numerics = self.numerics
        shares = [stats.formats[numerics.stored_in].swallowed for stats in snapshot.measured]
        swallowed = [share for share in shares if share is not None]
        # An update is added to a weight: it is lost by being swallowed, not by underflow.
        measured = [stats for stats in snapshot.measured if stats.kind != "updates"]
        losses = [numerics.quantization_loss(stats, numerics.computed_in) for stats in measured]
        values = {
            "numerics/underflow_share": max((lost.vanishing for lost in losses), default=0.0),
            "numerics/overflow_share": max((lost.overflow for lost in losses), default=0.0),
        }
        if swallowed:
            values["numerics/swallowed_share"] = max(swallowed)
        self.output.tracker.log_metrics([(snapshot.step, now_ms(), values)])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """On resume, read the snapshots up to the checkpoint's step from the run's folder."""
        # Later ones are measured again, of the steps that are trained again.
        with suppress(ConfigError):  # the file is missing or damaged: the report begins here
            earlier = read(self.output.out).probes
            self.snapshots = [snap for snap in earlier if snap.step <= self.state.step]

    def close(self) -> None:
        """Write the numerics report: numbers, heat maps and a page."""
        if not self.snapshots:
            self.output.say(f"warning: numerics.every={self.every}: no step was measured.")
            return
        # Matplotlib takes a second to import, which a run without measurements need not pay.
        from runner.diagnostics.numerics.numerics_page import (
            draw_heat_maps,
            numerics_summary,
            write_page,
        )

        numerics = self.numerics
        output = self.output
        page = output.out / "numerics.html"
        output.save_artifact(output.out / NUMERICS, numerics.write)
        output.save_artifact(
            output.out / "numerics.png", lambda path: draw_heat_maps(numerics, path)
        )
        output.save_artifact(page, lambda path: write_page(numerics, self.label, path))
        output.say(f"numerics: see {relative_path(page)}\n{numerics_summary(numerics)}")
