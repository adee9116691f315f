"""Start writer processes, and encode the one message that they are sent: a journal's path.

Second stage of the way that runner/tracking/__init__.py describes. The program that starts is
runner/tracking/writer/writer_main.py.
"""

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
_COMMAND += "from runner.tracking.writer.writer_main import run_writer; "
_COMMAND += "run_writer(int(sys.argv[2]))"


def start_writer(folder: Path, keep: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a writer process.

    Args:
        folder: of its log.
        keep: file descriptors that it inherits.
    """
    root = str(Path(__file__).resolve().parents[2])
    with _open_log(folder / "tracking.log") as log_file, signals_blocked():
        return subprocess.Popen(
            # -P keeps the working directory off its path, where a user's file may have the name
            # of a module of the standard library.
            [sys.executable, "-P", "-c", _COMMAND, root, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            bufsize=0,
            # A session of its own keeps Ctrl-C in the terminal from reaching it.
            start_new_session=True,
            pass_fds=keep,
        )


def _open_log(path: Path) -> IO[bytes]:
    try:
        return path.open("ab")
    except OSError:  # a full disk must not keep the writer from starting
        return Path(os.devnull).open("ab")


def start_detached_writer(journals: Sequence[Path], lock: int) -> None:
    """Start a writer that uploads finished journals; return at once.

    Args:
        journals: of runs that have ended; a hundred at most, so that their names fit into a pipe.
        lock: a file descriptor that the writer keeps open while it works.
    """
    process = start_writer(journals[0].parent, [lock])
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(b"".join(map(journal_message, journals)))
    process.stdin.close()
    process.returncode = 0  # nobody waits for it; Popen would warn that it still runs


def journal_message(journal: Path) -> bytes:
    """Return the line that asks a writer to upload a journal."""
    return json.dumps({"journal": str(journal)}).encode() + b"\n"
