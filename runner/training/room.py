"""What trains a model: the optimizers of a run, and the user's callbacks."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from runner.core import Room, RunSpec

if TYPE_CHECKING:
    from runner.core import RunCallback, Strategy


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


ROOM = Room(problems=_problems, parts={"callbacks": _callbacks}, check=_check)
