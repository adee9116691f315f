"""The data and the task of a run: what is wrong with their nodes, and the task that is built."""

from collections.abc import Iterator
from typing import Any

from runner.core.config.room import Room
from runner.core.config.schema import RunSpec
from runner.core.config.targets import check_targets, loading_problems


def _problems(spec: RunSpec) -> Iterator[str]:
    from runner.data.task_target import task_problems

    yield from check_targets(spec)
    yield from loading_problems(spec.data)
    yield from task_problems(spec.task)


def _task(spec: RunSpec, *_: object) -> Any:
    from runner.data.task_target import build_task

    return build_task(spec.task)


ROOM = Room(problems=_problems, parts={"task": _task})
