"""The data and the task of a run: what is wrong with their nodes, and the task that is built."""

from collections.abc import Iterator
from typing import Any

from runner.core import Room, RunSpec, targets


def _problems(spec: RunSpec) -> Iterator[str]:
    from runner.data.task_target import task_problems

    yield from targets.check_targets(spec)
    yield from targets.loading_problems(spec.data)
    yield from task_problems(spec.task)


def _task(spec: RunSpec, *_: object) -> Any:
    from runner.data.task_target import build_task

    return build_task(spec.task)


ROOM = Room(problems=_problems, parts={"task": _task})
