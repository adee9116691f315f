"""What trains a model: the optimizers of a run, and the user's callbacks."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from runner.core import Room, RunSpec

if TYPE_CHECKING:
    from runner.core import RunCallback, RunContext, Strategy


def _problems(spec: RunSpec) -> Iterator[str]:
    from runner.training.callbacks.user_callbacks import callback_problems

    yield from callback_problems(spec.callbacks)


def _callbacks(spec: RunSpec, strategy: "Strategy", _: object) -> "Mapping[str, RunCallback]":
    from runner.training.callbacks.user_callbacks import build_user_callbacks

    calls = spec.trains and strategy.rank.is_main
    return build_user_callbacks(spec.callbacks) if calls else {}


def _check(spec: RunSpec, _: "Strategy") -> None:
    from runner.training.setup import check_arguments

    check_arguments(spec)


def _training_callbacks(run: "RunContext", _: object) -> "Iterator[RunCallback]":
    from runner.training.callbacks.guard import EarlyStopping
    from runner.training.callbacks.runner_callbacks import Profiler

    patience, profiled = run.spec.train.early_stop, run.spec.debug.profile
    if patience:
        yield EarlyStopping(run.task.quality, run.task.direction, patience)
    if profiled:
        yield Profiler(run.out, profiled, run.write_file)


ROOM = Room(
    problems=_problems, parts={"callbacks": _callbacks}, check=_check, callbacks=_training_callbacks
)
