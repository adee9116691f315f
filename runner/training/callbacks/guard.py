"""End a run early: by the guard section of the config, or where its quality has stopped improving.

Both read records, which the host has anyway, and nothing on the device, so that they cost the loop
no wait.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from runner.core import Precision, RunCallback, RunHandle, RunSpec, step_records

MAX_STAGNANT_SHARE = 0.5
"""Share of unchanged parameter elements above which an evaluation warns: most of the update is
rounded away."""

MIN_LOSS_SCALE = 1.0
"""A loss scale below this shrinks gradients; scaling exists to enlarge them."""

USUAL_LOSS_SCALE = 65536.0
"""What loss scaling begins with by default; where it begins far above, every step overflows."""

SPIKE_WINDOW_STEPS = 50
"""Steps whose losses a spike is compared with, at most."""

MIN_SPIKE_STEPS = 20
"""Steps that must have been seen before a loss can be called a spike."""


class Finding(NamedTuple):
    """A problem that the guard found in a record.

    Attributes:
        key: the setting that decides about it, `guard.<key>`.
        description: a sentence without a full stop that names the step and the value.
    """

    key: str
    description: str


@dataclass(eq=False)
class Guard(RunCallback):
    """Checks each record; a finding may end the run.

    Args:
        spec: of the run; its guard section decides.
        precision: of the run.
        warn: prints a warning.
        save_samples: saves the samples of the step of a record, with the finding's description;
            returns where they are and how to replay them.
        explain: returns why the loss of a record's step is not finite, and what to do about it;
            None where the samples show no reason.

    Attributes:
        finding: the finding that stops the run; None while there is none.
        stopped_step: the step whose numbers stop the run; None while there is none.
        stop_reason: the text for the user about that finding.
    """

    key = "guard"
    is_in_every_run = True

    spec: RunSpec
    precision: Precision
    warn: Callable[[str], None]
    save_samples: Callable[[step_records.StepRecord, str], str]
    explain: Callable[[step_records.StepRecord], str | None] = lambda _: None

    def __post_init__(self) -> None:
        self.finding = None
        self.stopped_step = None
        self._warned_keys: set[str] = set()
        self._overflows_in_a_row = 0
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW_STEPS)
        self._first_loss = 0.0

    @property
    def weights_are_good(self) -> bool:
        """Return whether the weights are those of the last good step, and may be saved."""
        # A step that overflows is skipped, so that it leaves the weights as they were.
        return self.finding is None or self.finding.key in ("overflow", "scale_floor")

    def on_steps(self, records: Sequence[step_records.StepRecord], run: RunHandle) -> None:
        for record in records:
            for finding in self._findings(record):
                self._act(finding, record)
                # What follows the first bad step is a consequence of it.
                if self.finding is not None:
                    return

    def _findings(self, record: step_records.StepRecord) -> Iterator[Finding]:
        step = record.step
        loss = record.loss
        scale = record.loss_scale
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if record.overflow else 0
        if self._overflows_in_a_row >= self.spec.guard.overflow_steps:
            yield Finding(
                "overflow",
                f"{self._overflows_in_a_row} steps in a row overflowed, up to step {step} "
                f"(loss scale {scale:g}): none was applied",
            )
        if scale is not None and scale < MIN_LOSS_SCALE:
            yield Finding(
                "scale_floor",
                f"the loss scale fell to {scale:g} at step {step}: gradients overflow at every "
                "scale",
            )
        # A loss scale overflows by design: the step was skipped, and its values mean nothing.
        if record.overflow:
            return
        if not math.isfinite(loss):
            yield Finding("non_finite", f"the loss is {loss} at step {step}")
        # With a loss scale, a gradient that is not finite is an overflow, judged above.
        elif scale is None and not math.isfinite(record.grad_norm):
            yield Finding(
                "non_finite",
                f"the gradient norm is {record.grad_norm} at step {step} (loss {loss:.4g})",
            )
        else:
            if self._is_spike(loss):
                ratio = loss / median(self._losses)
                yield Finding(
                    "spike",
                    f"the loss leapt to {loss:.4g} at step {step}, {ratio:.0f} times its running "
                    "median",
                )
            self._first_loss = self._first_loss or loss
            # A larger fall in one step ends a bad start: half of the way back to it means nothing.
            if len(self._losses) == 1 and self._losses[0] > 100 * abs(loss):
                self._first_loss = 100 * abs(loss)
                self._losses.clear()
            self._losses.append(loss)

    def _is_spike(self, loss: float) -> bool:
        """Return whether a loss is far above its running median and its recent maximum, and half of
        the way back to the run's first loss or further."""
        recent = self._losses
        # The comparison with the last loss follows from the one with the maximum. It comes first
        # because it spares most steps the search of the window. The maximum keeps a loss that has
        # always been noisy from being reported.
        if len(recent) < MIN_SPIKE_STEPS or loss <= 2 * recent[-1] or loss <= 2 * max(recent):
            return False
        # A median of 0 or below is no scale that a factor could be applied to, and near 0 a loss is
        # many times its median for one example of a batch: the training has lost nothing by it.
        usual, first = median(recent), self._first_loss
        return loss > self.spec.guard.spike_factor * usual > 0 and loss >= (first + usual) / 2

    def _act(self, finding: Finding, record: step_records.StepRecord) -> None:
        key = finding.key
        action = getattr(self.spec.guard, key)
        if action == "ignore" or (action == "warn" and key in self._warned_keys):
            return
        explanation = self.explain(record) if key == "non_finite" else None
        remedies = guard_remedies(self.spec, self.precision, key, record)
        advice = explanation or "Try " + " or ".join(remedies)
        if action == "stop":
            advice += f"; guard.{key}=warn continues regardless"
        samples = self.save_samples(record, finding.description)
        message = f"{finding.description}.\n{advice}.\n{samples}"
        if action == "stop":
            self.finding = finding
            self.stopped_step = record.step
            self.stop_reason = f"guard.{key}: {message}"
        else:
            self._warn_once(key, message)

    def on_evaluation(self, record: step_records.EvalRecord, run: RunHandle) -> None:
        share = record.stagnant_share
        if share is not None and share > MAX_STAGNANT_SHARE:
            self._warn_once(
                "stagnant",
                f"{share:.0%} of the parameter elements with a gradient did not move in a step "
                f"up to step {record.step}: the update is under half a unit in the last place of "
                f"precision={self.precision.name}. Type {self.precision.update_remedy}a larger "
                "optimizer.lr, or a -mixed precision.",
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "said": sorted(self._warned_keys),
            "overflows": self._overflows_in_a_row,
            "losses": list(self._losses),
            "first_loss": self._first_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._warned_keys.update(state.get("said", ()))
        self._overflows_in_a_row = state.get("overflows", 0)
        self._losses.extend(state.get("losses", ()))
        self._first_loss = state.get("first_loss", 0.0)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned_keys:
            self._warned_keys.add(key)
            self.warn(f"warning: {message}")


class EarlyStopping(RunCallback):
    """Ends the training after `patience` evaluations in a row that were no better than the best.

    Args:
        quality: name of the metric to watch.
        direction: "max" if more of it is better, otherwise "min".
        patience: evaluations.
    """

    key = "early_stopping"

    def __init__(self, quality: str, direction: str, patience: int) -> None:
        self.quality = quality
        self.sign = 1 if direction == "max" else -1
        self.patience = patience
        self._best = -math.inf
        self._worse = 0

    def on_evaluation(self, record: step_records.EvalRecord, run: RunHandle) -> None:
        value = self.sign * record.metrics[self.quality]
        # A NaN is never above the best, and as the second argument of max() it never becomes it.
        self._worse = 0 if value > self._best else self._worse + 1
        self._best = max(self._best, value)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "worse": self._worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._best = state["best"]
            self._worse = state["worse"]

    @property
    def stop_reason(self) -> str:  # type: ignore[override]
        """Return the setting that ends the training; empty while there is patience."""
        return f"train.early_stop={self.patience}" if self._worse >= self.patience else ""


def guard_remedies(
    spec: RunSpec, precision: Precision, key: str, record: step_records.StepRecord
) -> Iterator[str]:
    """Yield settings that may help against a finding, as they are typed on the command line.

    A wider range comes first where it may help.

    Args:
        spec: of the run.
        precision: of the run.
        key: of the finding.
        record: of its step.
    """
    # No step was applied: the weights, and with them the learning rate, are not the cause.
    is_untrained = record.skipped_steps == record.step
    # It cures overflow and non-finite values; it does nothing against a spike.
    scale = spec.precision.get("loss_scale") or {}
    if key != "spike" and scale.get("fixed"):
        yield "precision.loss_scale.fixed=null"
    elif is_untrained and (record.loss_scale or 0.0) > USUAL_LOSS_SCALE:
        yield f"precision.loss_scale.init_scale={USUAL_LOSS_SCALE:g}"
    if key != "spike" and precision.wider_precision:
        yield f"precision={precision.wider_precision}"
        if precision.has_limited_range:
            yield "precision.keep_fp32=[<module>]"
    if is_untrained:
        return
    rate = spec.optimizer.get("lr")
    if isinstance(rate, float | int):
        yield f"optimizer.lr={rate / 10:g}"
    else:
        yield "a smaller learning rate"
    clips = spec.train.clip_norm is not None or spec.train.clip_value is not None
    if not clips and spec.optimizer.get("_target_") != "torch.optim.LBFGS":
        yield "train.clip_norm=1.0"
