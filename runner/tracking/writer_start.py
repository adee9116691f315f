"""Starting writer processes, and what is said to them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from runner.utils.stop_signals import signals_blocked

_COMMAND = "import sys; sys.path.insert(0, sys.argv[1]); "
_COMMAND += "from runner.tracking.writer.writer_main import main; "
_COMMAND += "main(int(sys.argv[2]))"


def start_writer(folder: Path, events: int, keep: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Starts a writer process.

    -P keeps the working directory off its path, where a user's file may be called like a module of
    the standard library. A session of its own keeps Ctrl-C away from it.

    Args:
        folder: of its log.
        events: its stdout, as subprocess takes it.
        keep: file descriptors that it inherits.
    """
    root = str(Path(__file__).resolve().parents[2])
    with _log(folder / "tracking.log") as log_file, signals_blocked():
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _COMMAND, root, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=events,
            stderr=log_file,
            bufsize=0,
            start_new_session=True,
            pass_fds=keep,
        )


def _log(path: Path) -> IO[bytes]:
    try:
        return path.open("ab")
    except OSError:  # a full disk
        return Path(os.devnull).open("ab")


def start_detached_writer(journals: Sequence[Path], lock: int) -> None:
    """Has a writer of its own send journals that nobody writes to any more; returns at once.

    Args:
        journals: a hundred at most, so that their names fit into a pipe.
        lock: a file descriptor that the writer keeps open while it works.
    """
    process = start_writer(journals[0].parent, subprocess.DEVNULL, [lock])
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(b"".join(map(named_journal, journals)))
    process.stdin.close()
    process.returncode = 0  # nobody waits for it; Popen would complain that it still runs


def named_journal(journal: Path) -> bytes:
    """The line that names a journal to a writer."""
    return json.dumps({"journal": str(journal)}).encode() + b"\n"
