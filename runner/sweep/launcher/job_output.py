"""A job's output, and what its end says."""

import os
import signal
from codecs import getincrementaldecoder
from collections.abc import Collection
from pathlib import Path
from typing import TextIO

_KEPT = 8000
_LINES = 3
_FATAL = "Fatal Python error"


class Stream:
    """A job's output on its way to ours; of several jobs at once each line is marked.

    Attributes:
        tail: the last that was written.
    """

    def __init__(self, target: TextIO, mark: str) -> None:
        self._target, self._mark = target, mark
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._held = self.tail = ""

    def feed(self, data: bytes) -> bool:
        """Takes what was read; False for nothing, the end."""
        text = self._held + self._decoder.decode(data, final=not data)
        cut = text.rfind("\n") + 1 if self._mark and data else len(text)
        shown, self._held = text[:cut], text[cut:]
        self.tail = (self.tail + shown)[-_KEPT:]
        if self._mark:
            shown = "".join(self._mark + line for line in shown.splitlines(keepends=True))
        self._target.write(shown)
        self._target.flush()
        return bool(data)


def exit_reason(status: int | None, tail: str, kills: int, asked: Collection[int] = ()) -> str:
    """Why a job's process ended without a result.

    Args:
        status: what os.waitpid said; None where nobody was there to ask.
        tail: what it wrote last.
        kills: processes that the kernel killed meanwhile for want of memory.
        asked: signals that it was sent to stop it.
    """
    if status is not None and (number := _signal(status)) in asked:
        return f"Stopped by {signal.Signals(number).name} before its result."
    if status is None:
        how = "The process that starts jobs was killed, and this one with it."
    elif os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        how = f"Its process was ended by {name}"
        if name == "SIGKILL" and kills:
            how += " (out of memory: the kernel killed a process for it meanwhile)"
        how += "."
    else:
        how = f"Its process ended with exit status {os.WEXITSTATUS(status)} before its result."
    lines = last_lines(tail)
    return f"{how} Last lines: {' | '.join(lines)}" if lines else how


def _signal(status: int) -> int:
    """That ended it, itself or as shells tell it."""
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status) - 128


def last_lines(text: str) -> list[str]:
    """The last lines that say something; of Python's own report of a crash its first ones."""
    _, found, report = text.rpartition(_FATAL)
    lines = [line.strip() for line in (found + report).splitlines() if line.strip()]
    return lines[: _LINES + 1] if found else lines[-_LINES:]


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory, of the whole machine; 0 where it
    does not say."""
    try:
        words = Path("/proc/vmstat").read_text().split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError):
        return 0
