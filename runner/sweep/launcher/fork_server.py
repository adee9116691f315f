"""The nursery: a process that has imported torch, computes nothing, and forks once per job, so
that a job starts in milliseconds. It holds no thread, no device and nothing of any job."""

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

from runner.sweep.launcher.job_request import STATUS_STRUCT
from runner.utils.stop_signals import SIGNALS, ignore_signals

FDS = 5
"""What comes with each request: the job's order, its line to the tracking writer, the pipe that
tells of its life, its stdout and its stderr."""
PRELOAD = (
    (
        "runner.modes.run",
        "runner.sweep.hydra_callback",
        "runner.sweep.launcher.job_main",
        "torch.export",
        "torch._dynamo",
        "sklearn.datasets",
        "sklearn.model_selection",
    )
    if sys.platform == "linux"
    else ()  # Apple's frameworks break in a forked process
)


def main(line: int) -> None:
    """Runs until the sweep's process closes its end of the socket `line`, or is gone."""
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    ignore_signals()  # the sweep's process tells its jobs
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA that was asked here fails in forks
    for name in PRELOAD:
        with suppress(ImportError):  # the job that needs it will say so
            import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a job would copy every page that it touches
    ForkServer(socket.socket(fileno=line), handlers).run()
    os._exit(0)  # taking the imports down takes longer than all else


class ForkServer:
    """Takes requests, forks, and tells how each job's process ended.

    Args:
        line: where requests come from.
        handlers: of signals in the jobs.
    """

    def __init__(self, line: socket.socket, handlers: Mapping[int, Any]) -> None:
        self._line, self._handlers = line, handlers
        self._lives: dict[int, int] = {}
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)  # else the wake-up is never written
        signal.set_wakeup_fd(self._wake)
        while True:
            ready = select.select([self._line, self._woken], [], [])[0]
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if self._line in ready:
                data, fds, *_ = socket.recv_fds(self._line, 1, FDS)
                if not data:
                    break
                self._fork(fds)
        for pid in self._lives:
            _kill_group(pid)

    def _fork(self, fds: list[int]) -> None:
        order, tracking, life, out, err = fds
        pid = os.fork()
        if pid == 0:
            self._forget()
            from runner.sweep.launcher.job_main import run_job_process

            run_job_process(order, tracking, life, out, err)
        self._lives[pid] = life
        for fd in (order, tracking, out, err):
            os.close(fd)

    def _forget(self) -> None:
        """In a new job's process: the signals as they were, none of our files."""
        signal.set_wakeup_fd(-1)
        for number, handler in {**self._handlers, signal.SIGCHLD: signal.SIG_DFL}.items():
            signal.signal(number, handler)
        self._line.close()
        for fd in (self._woken, self._wake, *self._lives.values()):
            os.close(fd)

    def _reap(self) -> None:
        """Tells the ends of processes; what those have left running ends, too."""
        while self._lives:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _kill_group(pid)
            life = self._lives.pop(pid)
            with suppress(BrokenPipeError):
                os.write(life, STATUS_STRUCT.pack(status))
            os.close(life)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
