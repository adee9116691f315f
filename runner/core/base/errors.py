"""Errors that the command line shows without a traceback, each with its exit status.

Each message says what was given, what is allowed here, and what to type.
"""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any


class RunnerError(Exception):
    """A problem that the user can fix.

    Attributes:
        exit_status: of the command; 2 for what was typed and for hardware, 1 for a failed run.
        finished: True if the run wrote its result before the error was raised: the result stands.
    """

    exit_status = 1
    finished = False

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of a traceback of the runner and of Hydra."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(RunnerError):
    """A composed config that cannot run.

    Args:
        problems: the message of each problem found, one line each.
    """

    exit_status = 2

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def refuse(problems: Iterable[str]) -> None:
    """Raise ConfigError where there is a problem."""
    messages = list(problems)
    if messages:
        raise ConfigError(*messages)


def first_line(error: object) -> str:
    """Return the first line of an error's text, without its full stop."""
    return str(error).strip().partition("\n")[0].rstrip(".")


class PolicyError(RunnerError):
    """A call on a precision's Policy at the wrong time, which would compute other numbers."""

    exit_status = 2


class Unavailable(RunnerError):
    """Hardware or a package that the precision or accelerator needs is missing on this machine.

    Args:
        what: what was asked for and why it cannot run here.
        remedy: what to install, or the nearest override that runs here.
    """

    exit_status = 2

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what} {remedy}")


class CheckpointError(RunnerError):
    """A checkpoint, or the result, that cannot be written."""


class TrackingError(RunnerError):
    """A tracking store that rejected the run or cannot be reached."""


class DataError(RunnerError):
    """Data that cannot be trained on: a sample, a label or a loading process failed."""


class ModelError(RunnerError):
    """A model or loss that fails after the run has trained."""


class HookError(RunnerError):
    """A function or callback of the user's that failed, or returned something else than numbers."""


class Diverged(RunnerError):
    """A run that a guard stopped for its numbers, after it wrote its result."""

    finished = True


def nearest_names(name: str, known: Sequence[str]) -> list[str]:
    """Return the known name that a mistyped one most likely means; empty if none is like it."""
    # difflib counts letters in another order as lost: modle would be nearer to mode than to model.
    reordered = [each for each in known if sorted(each) == sorted(name)]
    return reordered[:1] or get_close_matches(name, known, n=1, cutoff=0.5)


def count_problems(name: str, section: Any, keys: Sequence[str]) -> Iterator[str]:
    """Yield a message for each key of a section that counts something and is below 1."""
    for key in keys:
        value = getattr(section, key)
        if value is not None and value < 1:
            yield f"{name}.{key}={value} is too small. Allowed: 1 and up."
