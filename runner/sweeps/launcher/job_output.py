"""Forward a job's output to the sweep's, and explain from its last lines why the job died."""

import os
import signal
from codecs import getincrementaldecoder
from collections.abc import Collection
from pathlib import Path
from typing import TextIO

_TAIL_CHARACTERS = 32_000
"""Characters of a job's output in which the reason of its death is looked for: Python's report of a
crash names every frame and every compiled module."""
_REASON_LINES = 3
_PYTHON_CRASH = "Fatal Python error"


class OutputStream:
    """A job's stdout or stderr on its way to this process's.

    Args:
        target: this process's stream.
        prefix: begins each line, where several jobs run at once; empty for one that runs alone.

    Attributes:
        tail: the last characters of the output, without prefixes.
    """

    def __init__(self, target: TextIO, prefix: str) -> None:
        self.tail = ""
        self._target = target
        self._prefix = prefix
        # Incremental: a read may end within a character of several bytes.
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._unfinished_line = ""

    def feed(self, data: bytes) -> bool:
        """Forward data that was read; return False at the end of the output.

        Args:
            data: empty at the end.
        """
        text = self._unfinished_line + self._decoder.decode(data, final=not data)
        end = len(text)
        if self._prefix and data:
            # Jobs that run at once must not write into each other's lines.
            end = text.rfind("\n") + 1
        shown = text[:end]
        self._unfinished_line = text[end:]
        self.tail = (self.tail + shown)[-_TAIL_CHARACTERS:]
        if self._prefix:
            shown = "".join(self._prefix + line for line in shown.splitlines(keepends=True))
        self._target.write(shown)
        self._target.flush()
        return bool(data)


def exit_reason(
    status: int | None, tail: str, kills: int, stop_signals: Collection[int] = ()
) -> str:
    """Return why a job's process ended without a result.

    Args:
        status: status of os.waitpid; None for a job whose fork server died.
        tail: end of the job's output.
        kills: processes that the kernel killed for lack of memory while the job ran.
        stop_signals: signals that the sweep sent to stop the job.
    """
    # First: what a job prints or how it exits after a requested stop is no reason of its own.
    if status is not None and _signal_number(status) in stop_signals:
        name = signal.Signals(_signal_number(status)).name
        return f"Stopped by {name} before it wrote a result."
    if status is None:
        reason = "The fork server was killed, and this job with it."
    elif os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        reason = f"Its process was ended by {name}"
        # The kernel counts such kills for the whole machine, not by process.
        if name == "SIGKILL" and kills:
            reason += " (out of memory: the kernel killed a process for it meanwhile)"
        reason += "."
    else:
        code = os.WEXITSTATUS(status)
        reason = f"Its process ended with exit status {code} before it wrote a result."
    lines = last_lines(tail)
    return f"{reason} Last lines: {' | '.join(lines)}" if lines else reason


def _signal_number(status: int) -> int:
    """Return the signal that ended a process, directly or as an exit status of 128 + number."""
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    return os.WEXITSTATUS(status) - 128


def last_lines(text: str) -> list[str]:
    """Return the last lines of an output that are not blank, without surrounding spaces.

    If the output holds Python's report of a crash, they are the first lines of that report.
    """
    # The report's first lines say where the crash happened; a long stack follows.
    _, crash, report = text.rpartition(_PYTHON_CRASH)
    lines = [line.strip() for line in (crash + report).splitlines() if line.strip()]
    if crash:
        return lines[: _REASON_LINES + 1]
    return lines[-_REASON_LINES:]


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since the machine started.

    It is 0 where the kernel does not say.
    """
    try:
        words = Path("/proc/vmstat").read_text().split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError):
        return 0
