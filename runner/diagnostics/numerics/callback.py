"""The looks of a run: taken where they are due, told to the store, left as files at its end."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from runner.config.schema import RunSpec
from runner.diagnostics.numerics.probe import Probe
from runner.diagnostics.numerics.results import Numerics, NumericsSnapshot, read
from runner.distributed.strategy import Strategy
from runner.training.callbacks.callback import Callback
from runner.training.state import TrainState
from runner.utils.errors import ConfigError
from runner.utils.formatting import now_ms, relative_path
from runner.utils.layout import NUMERICS

if TYPE_CHECKING:
    from runner.modes.context import RunContext

_UNWATCHED = nullcontext()


def check_numerics(spec: RunSpec, strategy: Strategy) -> None:
    """Raise ConfigError where numbers cannot be looked at."""
    if spec.numerics.every is not None and strategy.shards:
        raise ConfigError(
            f"numerics.every={spec.numerics.every} looks at whole tensors, and "
            f"strategy={strategy.name} parts them among processes. Type strategy=ddp, or leave "
            "numerics.every= out."
        )


class NumericsCallback(Callback):
    """Of one process, the first.

    Args:
        this: the run.
        state: of it.
        every: optimizer steps between two looks.
    """

    key = "numerics"

    def __init__(self, this: "RunContext", state: TrainState, every: int) -> None:
        self.this, self.state, self.every = this, state, every
        self.found: list[NumericsSnapshot] = []
        self._probe = Probe(state, self._see)

    def at(self, step: int) -> AbstractContextManager[object]:
        """The context around a step."""
        return self._probe if step % self.every == 0 else _UNWATCHED

    @property
    def numerics(self) -> Numerics:
        """What was found so far."""
        precision = self.this.precision
        return Numerics(
            self.every,
            precision.name,
            str(precision.storage).removeprefix("torch."),
            str(precision.compute).removeprefix("torch."),
            tuple(self.found),
        )

    def _see(self, look: NumericsSnapshot) -> None:
        self.found.append(look)
        numerics = self.numerics
        lost = [(m.kind, numerics.lost(m, numerics.computed_in)) for m in look.measured]
        lost = [found for kind, found in lost if kind != "updates"]
        stored = [m.formats[numerics.stored_in].swallowed for m in look.measured]
        values = {
            "numerics/underflow_share": max((x.vanishing for x in lost), default=0.0),
            "numerics/overflow_share": max((x.overflow for x in lost), default=0.0),
        }
        if swallowed := [share for share in stored if share is not None]:
            values["numerics/swallowed_share"] = max(swallowed)
        self.this.tracker.metrics(look.step, now_ms(), values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A run that goes on keeps what it found before, as far as it has not to do it again."""
        with suppress(ConfigError):  # none, or damaged: then it begins anew
            self.found = [k for k in read(self.this.out).looks if k.step <= self.state.step]

    def close(self) -> None:
        """Leaves the files. Importing what draws takes a second."""
        this, out = self.this, self.this.out
        if not self.found:
            this.say(f"warning: numerics.every={self.every}: no step was looked at.")
            return
        from runner.diagnostics.numerics.numerics_page import (
            draw_heat_maps,
            numerics_summary,
            write_page,
        )

        numerics = self.numerics
        this.leave(out / NUMERICS, numerics.write)
        this.leave(out / "numerics.png", lambda path: draw_heat_maps(numerics, path))
        this.leave(out / "numerics.html", lambda path: write_page(numerics, this.label, path))
        this.say(
            f"numerics: {numerics_summary(numerics)}. See {relative_path(out / 'numerics.html')}"
        )
