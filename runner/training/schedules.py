"""Build learning-rate schedules: warm-up, torch's schedules, several of them, and by evaluations.

A schedule has `step()`, called after each applied optimizer step, and may have
`step_evaluation(quality)`, called after each evaluation.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer

from runner.core import ConfigError, targets

Node = Mapping[str, Any]
"""A node of the config: a target and its keywords; or a group of the config without a target."""

RUN_LENGTH_KEYWORDS = ("T_max", "total_steps", "total_iters")
"""Keywords of torch's schedulers that say how long a run is; null means the run's own length."""

# Keywords of torch's schedulers that replace the learning rates of all groups by one.
_ABSOLUTE_RATES = ("max_lr", "base_lr")


class WarmUp:
    """A linear rise of each group's learning rate, in front of a schedule or of a constant rate.

    In step i of the warm-up, from 1, the rate is i / (steps + 1) times the schedule's first rate;
    the step after the warm-up is the first one of the schedule, which is not changed.

    Args:
        optimizer: its groups hold the schedule's first rates.
        steps: applied optimizer steps of the warm-up, 1 and up.
        schedule: what follows; None for a constant rate.

    Attributes:
        steps: see above.
        schedule: see above.
    """

    def __init__(self, optimizer: Optimizer, steps: int, schedule: Any) -> None:
        self.steps = steps
        self.schedule = schedule
        self._optimizer = optimizer
        self._taken = 0
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._set_rates()

    def _set_rates(self) -> None:
        # The last factor is exactly 1: the schedule continues from its own first rates.
        factor = min(1.0, (self._taken + 1) / (self.steps + 1))
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def step(self) -> None:
        """Set the rates of the step that follows an applied one."""
        self._taken += 1
        if self._taken <= self.steps:
            self._set_rates()
        elif self.schedule is not None:
            self.schedule.step()

    def step_evaluation(self, quality: float) -> None:
        """Pass an evaluation's quality to the schedule, once the warm-up is over."""
        # A reduction during the warm-up would be overwritten by the next step of it.
        if self._taken >= self.steps and hasattr(self.schedule, "step_evaluation"):
            self.schedule.step_evaluation(quality)

    def scale_rate(self, index: int, factor: float) -> None:
        """Multiply the rate that a group of parameters rises to."""
        self._rates[index] *= factor

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs, in plain containers."""
        own = {"steps": self.steps, "taken": self._taken, "rates": [*self._rates]}
        return {"warmup": own, "schedule": self.schedule and self.schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the warm-up alone; load_schedule restores what follows it."""
        own = state["warmup"]
        if len(own["rates"]) != len(self._rates):
            raise ValueError("its warm-up is of other groups of parameters")
        self._taken = int(own["taken"])
        self._rates = [float(rate) for rate in own["rates"]]


class EvaluationSchedule:
    """A schedule that follows the task's quality in the evaluations, as ReduceLROnPlateau does.

    Args:
        schedule: its step() takes the quality.

    Attributes:
        schedule: see above.
    """

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def step(self) -> None:
        """Leave the rates as they are: optimizer steps do not count here."""

    def step_evaluation(self, quality: float) -> None:
        """Pass the quality of an evaluation to the schedule."""
        self.schedule.step(quality)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's own state."""
        return self.schedule.state_dict()


def warmup_steps(node: Node, steps: int) -> int:
    """Return the steps of a schedule's warm-up; 0 without one.

    Args:
        node: the config's scheduler node; its `warmup` is a number of steps or a share of the run.
        steps: optimizer steps of the whole run.

    Raises:
        ConfigError: it is neither.
    """
    length = targets.runner_values("scheduler", node).get("warmup")
    if length is None:
        return 0
    is_count = isinstance(length, int) and not isinstance(length, bool) and length >= 0
    is_share = isinstance(length, float) and 0 <= length < 1
    if not (is_count or is_share):
        raise ConfigError(
            f"scheduler.warmup={length} is no length. Allowed: a whole number of steps, 0 and up, "
            "or a share of the run below 1, as in scheduler.warmup=0.1."
        )
    # 0.07 * 100 is a little more than 7.
    return length if isinstance(length, int) else math.ceil(round(length * steps, 6))


def build_scheduler(
    node: Node, optimizer: Optimizer, steps: int, direction: str | None = None
) -> Any:
    """Build a schedule that counts applied optimizer steps; None for a constant rate.

    Args:
        node: the config's scheduler node.
        optimizer: its rates are changed.
        steps: optimizer steps of the whole run.
        direction: max or min, of the quality that a schedule of evaluations follows; None if
            that is not known.

    Raises:
        ConfigError: the target refuses its keywords, or they contradict the run.
    """
    warmup = warmup_steps(node, steps)
    # Before any schedule changes them.
    rates = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    schedule = None
    if node.get("_target_"):
        own_node = targets.without_runner_keys("scheduler", node)
        if required_step_arguments(own_node) == ["metrics"]:
            has_mode = "mode" in signature(targets.locate(node["_target_"])).parameters
            mode = node.get("mode")
            if direction is not None and has_mode:
                if mode not in (None, direction):
                    raise ConfigError(
                        f"scheduler.mode={mode} contradicts the task, of whose quality the "
                        f"{direction} is the best. Type scheduler.mode={direction} or null."
                    )
                own_node = {**own_node, "mode": direction}
            schedule = EvaluationSchedule(_build("scheduler", own_node, optimizer, 1, rates))
        else:
            # A run that ends within its warm-up gives its schedule no step; lengths begin at 1.
            schedule = _build("scheduler", own_node, optimizer, max(1, steps - warmup), rates)
    return WarmUp(optimizer, warmup, schedule) if warmup else schedule


def _build(key: str, node: Node, optimizer: Optimizer, steps: int, rates: Sequence[float]) -> Any:
    """Build a schedule of torch's, or of one's own, with those nested in it.

    Args:
        key: of the node, for messages.
        node: its target and keywords.
        optimizer: its rates are changed.
        steps: optimizer steps that the schedule lasts.
        rates: learning rate of each group before any schedule.
    """
    filled = dict(node)
    for keyword in RUN_LENGTH_KEYWORDS:
        if keyword in filled and filled[keyword] is None:
            filled[keyword] = steps
    base = optimizer.defaults.get("lr")
    for keyword in _ABSOLUTE_RATES:
        rate = filled.get(keyword)
        # One rate for all would undo optimizer.groups and optimizer.layer_decay.
        if base and isinstance(rate, int | float) and any(other != base for other in rates):
            filled[keyword] = [rate * other / base for other in rates]
    parts = node.get("schedulers")  # as SequentialLR takes them
    if isinstance(parts, list):
        # The steps between milestones, or all of the run.
        lengths = [steps] * len(parts)
        milestones = node.get("milestones")
        if isinstance(milestones, list) and len(milestones) == len(parts) - 1:
            lengths = [max(1, end - begin) for begin, end in pairwise([0, *milestones, steps])]
        rows = enumerate(zip(parts, lengths, strict=True))
        filled["schedulers"] = [
            _build(f"{key}.schedulers.{i}", part, optimizer, length, rates)
            for i, (part, length) in rows
        ]
    # ChainedScheduler takes the optimizer behind its schedules.
    parameters = [*signature(targets.locate(node["_target_"])).parameters]
    if "optimizer" in parameters[1:]:
        return targets.build_group(key, {**filled, "optimizer": optimizer})
    return targets.build_group(key, filled, optimizer)


def required_step_arguments(node: Node) -> list[str]:
    """Return what step() of a schedule's target needs, besides the schedule itself."""
    step = getattr(targets.locate(node["_target_"]), "step", None)
    parameters = signature(step).parameters if step else {}
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters.values() if p.default is Parameter.empty]
    return [p.name for p in required if p.name != "self" and p.kind in positional]


def check_scheduler(node: Node) -> None:
    """Raise ConfigError for a schedule whose step() needs what a run does not have.

    Schedules of schedules are checked at any depth, and that each is one.
    """
    warmup_steps(node, 1)
    for part in _every_node("scheduler", node):
        needed = required_step_arguments(part) if part.get("_target_") else []
        if needed and (part is not node or needed != ["metrics"]):
            raise ConfigError(
                f"scheduler: {part['_target_']} needs {', '.join(needed)} in each step(), and "
                "schedules here follow the optimizer's steps, or alone, with step(metrics), the "
                "evaluations. Type scheduler=cosine, scheduler=linear or scheduler=onecycle, or "
                "the _target_ of another torch.optim.lr_scheduler class."
            )


def _every_node(key: str, node: Node) -> Iterator[Node]:
    """Yield a schedule's node and those nested in it, at any depth.

    Raises:
        ConfigError: a nested one has no target.
    """
    yield node
    parts = node.get("schedulers")
    for i, part in enumerate(parts if isinstance(parts, list) else []):
        if not (isinstance(part, Mapping) and part.get("_target_")):
            raise ConfigError(
                f"{key}.schedulers.{i}={part} is no schedule. Type {{_target_: "
                "torch.optim.lr_scheduler.<class>, ...}."
            )
        yield from _every_node(f"{key}.schedulers.{i}", part)


def plain_schedules(schedule: Any) -> Iterator[Any]:
    """Yield the schedules of torch's, or of one's own, that a schedule consists of."""
    if isinstance(schedule, WarmUp | EvaluationSchedule):
        yield from plain_schedules(schedule.schedule)
    elif schedule is not None:
        yield schedule
        for part in getattr(schedule, "_schedulers", ()):
            yield from plain_schedules(part)


def load_schedule(schedule: Any, saved: Mapping[str, Any], current_keys: Collection[str]) -> None:
    """Restore a schedule from a checkpoint.

    Args:
        schedule: made for this run.
        saved: what its state_dict() returned.
        current_keys: attributes of a schedule of evaluations that keep this run's values.
    """
    if isinstance(schedule, WarmUp):
        schedule.load_state_dict(saved)
        schedule = schedule.schedule
        saved = saved["schedule"]
    settings = {}
    if isinstance(schedule, EvaluationSchedule):
        schedule = schedule.schedule
        settings = {k: value for k, value in vars(schedule).items() if k in current_keys}
    if schedule is None:
        return
    schedule.load_state_dict(saved)
    vars(schedule).update(settings)


def schedule_after_warmup(schedule: Any) -> Any:
    """Return a schedule without its warm-up; None for a constant rate."""
    return schedule.schedule if isinstance(schedule, WarmUp) else schedule


def follows_run_length(node: Node) -> bool:
    """Return whether a schedule, or one nested in it, lasts as long as the run."""
    every = [*_every_node("scheduler", node)]
    return any(key in part and part[key] is None for part in every for key in RUN_LENGTH_KEYWORDS)


def taken_steps(saved: Mapping[str, Any], is_same: bool, applied: int) -> int:
    """Return the applied steps of a checkpoint's optimizer, of which each has skipped its own.

    Args:
        saved: state of its schedule.
        is_same: whether this run has the same schedule, so that its count means the same.
        applied: steps of the run that no optimizer skipped, where the state has no count.
    """
    if "warmup" in saved:
        return saved["warmup"]["taken"]
    return saved.get("last_epoch", applied) if is_same else applied


def is_same_schedule(theirs: Node, ours: Node, saved: Mapping[str, Any], schedule: Any) -> bool:
    """Return whether a checkpoint's schedule can continue as this run's, of the same length.

    It can with the same settings and the same warm-up. A schedule of evaluations also takes over
    settings that load_schedule keeps as its attributes. Others would mix two schedules: torch
    computes many a rate from the one before.

    Args:
        theirs: the scheduler node of the checkpoint.
        ours: that of this run.
        saved: the state of the checkpoint's schedule.
        schedule: made for this run.
    """
    warmup = schedule.steps if isinstance(schedule, WarmUp) else 0
    plain = schedule_after_warmup(schedule)
    attributes = vars(plain.schedule) if isinstance(plain, EvaluationSchedule) else {}
    for key in (theirs.keys() | ours.keys()) - {"warmup"}:
        if theirs.get(key) != ours.get(key) and key not in attributes:
            return False
    old = saved.get("warmup") or {}
    # Past its end a warm-up leaves no trace in a constant rate and in one that evaluations reduce.
    has_own_steps = plain is not None and not isinstance(plain, EvaluationSchedule)
    if has_own_steps or not warmup or old.get("taken", 0) < max(warmup, old["steps"]):
        return old.get("steps", 0) == warmup
    return True


def describe_schedule(schedule: Any, steps: int, quality: str, direction: str) -> str:
    """Return one line about a warm-up, or about what a schedule follows; empty for neither.

    Args:
        schedule: of an optimizer.
        steps: optimizer steps of the whole run.
        quality: name of the task's quality.
        direction: max or min, whichever of it is the best.
    """
    words = []
    if isinstance(schedule, WarmUp):
        words.append(f"the learning rate warms up for {schedule.steps} of {steps} steps")
        schedule = schedule.schedule
    if isinstance(schedule, EvaluationSchedule):
        name = type(schedule.schedule).__name__
        words.append(f"{name} follows {quality} ({direction}) in the evaluations")
    return "; ".join(words)
