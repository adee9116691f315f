"""Run one job in its own process, from the fork to the exit."""

import atexit
import ctypes
import faulthandler
import io
import os
import runpy
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import NoReturn

from runner.core import stop_signals
from runner.sweeps.launcher.job_request import STATUS_STRUCT, JobRequest
from runner.tracking.writer_process import SweepWriter, use_writer

_PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): the signal that this process gets when its parent ends."""


def run_job_process(request: int, status_pipe: int, out: int, err: int) -> NoReturn:
    """Run the job that comes through the request pipe, and exit with its command's exit status.

    What came of the job is in the result.json of its folder.

    Args:
        request: file descriptor of the pipe that a JobRequest comes through.
        status_pipe: file descriptor that takes the process id once the process handles signals.
        out: file descriptor that becomes stdout.
        err: file descriptor that becomes stderr.
    """
    status = 1
    try:
        # Signals are handled from here on: only then may the sweep know the process id.
        with stop_signals.CommandSignals(lambda: True):
            _set_up_process(status_pipe, out, err)
            status = _run_request(Connection(request))
            # os._exit below does not call them.
            atexit._run_exitfuncs()
    except stop_signals.Interrupted as error:
        status = error.exit_status
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Python's own exit would take the imported modules down, which takes long.
        os._exit(status)


def _set_up_process(status_pipe: int, out: int, err: int) -> None:
    """Make this process a process group of its own that ends with its parent, with its output."""
    parent = os.getppid()
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The fork server may have died before prctl took effect.
    if os.getppid() != parent:
        os._exit(1)
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    # The fork server's stdout may have been buffered as for a file. Line buffering here, so that a
    # job that is killed loses no line.
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(open(1, "wb"), line_buffering=True)  # noqa: SIM115
    # A crash in a library prints where it happened, which exit_reason reports.
    faulthandler.enable(all_threads=False)
    # The exit functions of the fork server's imports are not this job's.
    atexit._clear()
    os.write(status_pipe, STATUS_STRUCT.pack(os.getpid()))
    os.close(status_pipe)


def _run_request(connection: Connection) -> int:
    """Receive a job request and run its command; return the exit status."""
    request: JobRequest = connection.recv()
    connection.close()
    request.set_up_process()
    use_writer(SweepWriter(request.job_folder))
    try:
        # What `python -m runner` does: the job is a command of a single run.
        runpy.run_module("runner", run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0
