"""Check the records by the guard section of the config: stop the run or warn once.

The guard reads records, which the host has anyway, and nothing of the device.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any, NamedTuple

from runner.config.schema import RunSpec
from runner.precision.precision import Precision
from runner.training.callbacks.callback import Callback
from runner.training.records import EvalRecord, StepRecord, Steps

STAGNANT = 0.5
TINY_SCALE = 1.0
WINDOW, ENOUGH = 50, 20  # losses that a spike is measured by: at most, at least


class Finding(NamedTuple):
    """What a guard found: its key under guard., and a sentence that names step and value."""

    key: str
    what: str


class Guard(Callback):
    """reached is True once a finding stops the run; finding says which and message tells the user.

    Args:
        spec: of the run; its guard section decides.
        precision: of the run.
        say: prints a warning.
        keep: saves the samples of a record's step; returns where they are and how to replay them.
        cause: returns why the loss of a record's step is not finite, and what to do about it,
            where its samples tell.
    """

    key = "guard"
    is_in_every_run = True

    def __init__(
        self,
        spec: RunSpec,
        precision: Precision,
        say: Callable[[str], None],
        keep: Callable[[StepRecord, str], str],
        cause: Callable[[StepRecord], str | None] = lambda _: None,
    ) -> None:
        self.spec, self.precision, self.say, self.keep = spec, precision, say, keep
        self.cause = cause
        self.finding: Finding | None = None
        self.message = ""
        self._said: set[str] = set()
        self._overflows = 0
        self._losses: deque[float] = deque(maxlen=WINDOW)

    @property
    def reached(self) -> bool:
        return self.finding is not None

    @property
    def sound(self) -> bool:
        """Return whether the weights are those of the last good step: an overflow is skipped."""
        return self.finding is None or self.finding.key in ("overflow", "scale_floor")

    def steps(self, block: Steps) -> None:
        for record in block:
            for finding in self._findings(record):
                self._act(finding, record)
                if self.reached:
                    return

    def _findings(self, record: StepRecord) -> Iterator[Finding]:
        step, scale = record.step, record.loss_scale
        self._overflows = self._overflows + 1 if record.overflow else 0
        if self._overflows >= self.spec.guard.overflow_steps:
            what = f"{self._overflows} steps in a row overflowed, up to step {step}"
            yield Finding("overflow", f"{what} (loss scale {scale:g}): none was applied")
        if scale is not None and scale < TINY_SCALE:
            what = f"the loss scale fell to {scale:g} at step {step}"
            yield Finding("scale_floor", f"{what}: gradients overflow at every scale")
        if record.overflow:
            return  # by design: the step was skipped
        if not math.isfinite(record.loss):
            yield Finding("non_finite", f"the loss is {record.loss} at step {step}")
        elif scale is None and not math.isfinite(record.grad_norm):
            what = f"the gradient norm is {record.grad_norm} at step {step}"
            yield Finding("non_finite", f"{what} (loss {record.loss:.4g})")
        else:
            yield from self._spike(record)

    def _spike(self, record: StepRecord) -> Iterator[Finding]:
        """Yield a finding if the loss is far above its running median and its recent maximum."""
        loss, usual, factor = record.loss, self._losses, self.spec.guard.spike_factor
        # The first of these is one of the second's, and spares most steps the window's maximum.
        leaps = len(usual) >= ENOUGH and loss > 2 * usual[-1] and loss > 2 * max(usual)
        if leaps and loss > factor * median(usual) > 0:
            what = f"the loss leapt to {loss:.4g} at step {record.step}"
            yield Finding("spike", f"{what}, {loss / median(usual):.0f} times its running median")
        usual.append(loss)

    def _act(self, finding: Finding, record: StepRecord) -> None:
        key, what = finding
        action = getattr(self.spec.guard, key)
        if action == "ignore" or (action == "warn" and key in self._said):
            return
        advice = self.cause(record) if key == "non_finite" else None
        if advice is None:
            advice = "Try " + " or ".join(guard_remedies(self.spec, self.precision, key))
        regardless = f"; guard.{key}=warn continues regardless" if action == "stop" else ""
        message = f"{what}.\n{advice}{regardless}.\n{self.keep(record, what)}"
        if action == "stop":
            self.finding, self.message = finding, f"guard.{key}: {message}"
        else:
            self._once(key, message)

    def evaluation(self, record: EvalRecord) -> None:
        if record.stagnant is not None and record.stagnant > STAGNANT:
            self._once(
                "stagnant",
                f"{record.stagnant:.0%} of the parameter elements with a gradient did not move at "
                f"step {record.step}: the update is under half a unit in the last place of "
                f"precision={self.precision.name}. Type a larger optimizer.lr, or a -mixed "
                "precision.",
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "said": sorted(self._said),
            "overflows": self._overflows,
            "losses": list(self._losses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._said.update(state.get("said", ()))
        self._overflows = state.get("overflows", 0)
        self._losses.extend(state.get("losses", ()))

    def _once(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.say(f"warning: {message}")


def guard_remedies(spec: RunSpec, precision: Precision, key: str) -> Iterator[str]:
    """Yield settings that may help, as they are typed; a wider range first where that may help."""
    scale = spec.precision.get("loss_scale") or {}
    if key != "spike" and scale.get("fixed"):
        yield "precision.loss_scale.fixed=null"
    if key != "spike" and precision.wider_precision:
        yield f"precision={precision.wider_precision}"
        if precision.has_limited_range:
            yield "precision.keep_fp32=[<module>]"
    rate = spec.optimizer.get("lr")
    if isinstance(rate, float | int):
        yield f"optimizer.lr={rate / 10:g}"
    else:
        yield "a smaller learning rate"
    if spec.train.clip_norm is None and spec.optimizer.get("_target_") != "torch.optim.LBFGS":
        yield "train.clip_norm=1.0"
