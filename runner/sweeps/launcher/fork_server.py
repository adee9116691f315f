"""Fork one process per job from a process that has imported torch already.

The fork server computes nothing: it holds no thread, no device and nothing of any job, so that a
fork of it is a clean start. It runs as a process of its own, and ends with the sweep's process.

multiprocessing's fork server is not used: it passes the end of the pipe that it waits on to its
children, so that they outlive a killed sweep; a terminal's Ctrl-C reaches it; and it does not know
which processes a job has started and not ended.
"""

import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from runner.core import stop_signals
from runner.sweeps.launcher.job_request import STATUS_STRUCT, run_job_process

REQUEST_FD_COUNT = 4
"""Number of file descriptors in a request: the pipe that the JobRequest comes through, the status
pipe, stdout and stderr, in this order."""

# A module that is renamed, and not here, gives no error: every job would import it again, and start
# seconds later. tests/arch/test_module_names.py fails for a name of ours that leads nowhere.
PRELOADED_MODULES = (
    (
        "runner.cli.main",
        "runner.core.run.run",
        "runner.modes.train",
        "runner.sweeps.hydra_callback",
        "torch.export",
        "torch._dynamo",
        "sklearn.datasets",
        "sklearn.model_selection",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
    )
    if sys.platform == "linux"
    else ()  # Apple's frameworks break in a forked process
)
"""Modules that most jobs need, imported before the first fork."""


def run_fork_server(fd: int) -> None:
    """Serve requests until the sweep's process closes its end of the socket, or is gone.

    Args:
        fd: file descriptor of the socket that requests come through.
    """
    job_handlers: dict[int, Any] = {
        number: signal.getsignal(number) for number in stop_signals.SIGNALS
    }
    # The sweep's process decides what a signal means, and forwards it to its jobs.
    stop_signals.ignore_signals()
    # Without NVML, asking for CUDA initialises it, and an initialised CUDA fails in forked jobs.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Imports make objects that stay: searching them for garbage takes a tenth of the time.
    gc.disable()
    for name in PRELOADED_MODULES:
        with suppress(ImportError):  # a job that needs the module reports the error
            import_module(name)
    # A garbage collection in a job would write to every page that it shares with this process.
    gc.collect()
    gc.freeze()
    gc.enable()
    ForkServer(socket.socket(fileno=fd), job_handlers).run()
    # Python's own exit would take the imported modules down, which takes longer than all else.
    os._exit(0)


class ForkServer:
    """A loop that forks a process for each request, and reports how each process ended.

    Args:
        requests: socket that requests come through.
        job_handlers: handlers of signals that jobs start with.
    """

    def __init__(self, requests: socket.socket, job_handlers: Mapping[int, Any]) -> None:
        self._requests = requests
        self._job_handlers = job_handlers
        self._status_pipes: dict[int, int] = {}
        """File descriptor of each running job's status pipe, by process id."""
        self._wakeup_read, self._wakeup_write = os.pipe()
        # Python refuses a wake-up pipe on which a signal handler could block.
        os.set_blocking(self._wakeup_write, False)

    def run(self) -> None:
        """Serve requests until the socket closes, then kill the jobs that still run."""
        # Python writes to the wake-up pipe only for signals that have a handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_write)
        while True:
            ready = select.select([self._requests, self._wakeup_read], [], [])[0]
            if self._wakeup_read in ready:
                # One byte for each signal; several ended jobs may share one.
                os.read(self._wakeup_read, 4096)
                self._report_ended_jobs()
            if self._requests in ready:
                data, fds, *_ = socket.recv_fds(self._requests, 1, REQUEST_FD_COUNT)
                # No data: the sweep's process has closed the socket, or is gone.
                if not data:
                    break
                self._fork(fds)
        for pid in self._status_pipes:
            _kill_group(pid)

    def _fork(self, fds: list[int]) -> None:
        """Fork a process that runs the job of a request.

        Args:
            fds: as REQUEST_FD_COUNT lists them.
        """
        request, status, out, err = fds
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number, handler in {**self._job_handlers, signal.SIGCHLD: signal.SIG_DFL}.items():
                signal.signal(number, handler)
            self._requests.close()
            # An open copy of another job's status pipe would hide that job's end from the sweep.
            for fd in (self._wakeup_read, self._wakeup_write, *self._status_pipes.values()):
                os.close(fd)
            run_job_process(request, status, out, err)
        # The status pipe stays open here: this process writes the exit status to it.
        self._status_pipes[pid] = status
        for fd in (request, out, err):
            os.close(fd)

    def _report_ended_jobs(self) -> None:
        """Write the exit status of each ended job to its status pipe, and end its children."""
        while self._status_pipes:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
            # Every other job still runs.
            if not pid:
                return
            # Before the status is reported: then nothing that the job started writes any more.
            _kill_group(pid)
            pipe = self._status_pipes.pop(pid)
            # Nobody reads the pipe of a sweep that was killed.
            with suppress(BrokenPipeError):
                os.write(pipe, STATUS_STRUCT.pack(wait_status))
            os.close(pipe)


def _kill_group(pid: int) -> None:
    """Kill the processes that a job started: each job leads a process group."""
    # No process is in the group if the job started none.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
