"""Start processes that a server forks, in the place of new interpreters.

A command of the runner spends most of its time on imports. `ForkedProcess` is subprocess.Popen for
`python -m ...`, `python -c ...` and `python <script>`: their processes are forked from a server
(command_server.py) that has imported torch, Hydra and MLflow already, with the arguments,
variables, folder, files, signals and sys.path of a new interpreter.

A test of start-up, of variables that are read at import or of a package that is missing needs a new
interpreter: the real subprocess.Popen, or the fixture `fresh_cli`.
"""

import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
from inspect import signature
from pathlib import Path

from process_request import Request

STATUS = struct.Struct("i")
READ_AT_IMPORT = re.compile("CUDA_VISIBLE|LANG|LC_|LD_|MKL_|OMP_|PJRT_|PYTHON|TORCH_|TPU_|XLA_")
"""Matches variables that a forked process reads too late."""
SET_BY_TORCHRUN = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_OwnPopen = subprocess.Popen
_SERVER = Path(__file__).with_name("command_server.py")
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class Server:
    """A process that forks others, for this one and for those; it starts with the first."""

    def __init__(self):
        self._connection: socket.socket | None = None
        self._process = None

    @classmethod
    def in_fork(cls, connection):
        """Return the server that has forked this process, for the processes that this one wants."""
        server = cls()
        server._connection = connection
        return server

    def _begin(self):
        """Start the server's process; return the socket that takes requests."""
        connection, other_end = socket.socketpair()
        command = [sys.executable, str(_SERVER), str(other_end.fileno())]
        with other_end:
            self._process = _OwnPopen(
                command,
                pass_fds=[other_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
                env={**_ENVIRONMENT, "MLFLOW_DISABLE_TELEMETRY": "true"},
            )
        return connection

    def can_run(self, request):
        """Return whether a forked process would be the same as a new one."""
        names = {*request.environment, *_ENVIRONMENT} - {"PYTHONPATH", SET_BY_TORCHRUN}
        return all(
            request.environment.get(name) == _ENVIRONMENT.get(name)
            for name in names
            if READ_AT_IMPORT.match(name)
        )

    def start(self, request, files):
        """Return the id of the process that runs a program, and the pipe that brings its status."""
        self._connection = self._connection or self._begin()
        status, write_end = os.pipe()
        request.send(self._connection, write_end, files)
        os.close(write_end)
        data = os.read(status, STATUS.size)
        assert data, "the command server has ended"
        return STATUS.unpack(data)[0], status

    def close(self):
        """End the server and what it has forked."""
        if self._connection and self._process:
            # A loading process that a test has forked may hold a copy of the socket.
            self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            self._process.wait()


class ForkedProcess(subprocess.Popen):
    """A process that a server forks, where it can; else one that is started as always.

    It overrides what subprocess.Popen calls to start a process, to poll it and to wait for it.
    """

    server = None
    """What forks the processes of this one."""
    _status = None

    def _execute_child(self, *given):
        bound = signature(super()._execute_child).bind(*given).arguments
        request = Request.parse(bound)
        if request is None or self.server is None or not self.server.can_run(request):
            super()._execute_child(*given)
            return
        standard = [bound[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        files = [number if fd == -1 else fd for number, fd in enumerate(standard)]
        self.pid, self._status = self.server.start(request, [*files, *request.passed_fds])
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(bound[name] for name in names))

    def _internal_poll(self, *given, **named):
        if self._status is None:
            return super()._internal_poll(*given, **named)
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode

    def _is_running(self):
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"

    def _try_wait(self, wait_flags):
        if self._status is None:
            return super()._try_wait(wait_flags)
        # The status of a process that has ended may still be on its way from the server.
        timeout = 0 if wait_flags & os.WNOHANG and self._is_running() else None
        if not select.select([self._status], [], [], timeout)[0]:
            return 0, 0
        data = os.read(self._status, STATUS.size)
        os.close(self._status)
        # Without data the server has ended, and has killed what it had forked.
        return self.pid, STATUS.unpack(data)[0] if data else signal.SIGKILL


def run_forked(command, timeout=None, popen=ForkedProcess, **options):
    """Do what subprocess.run does with text that is captured, in a process that is forked."""
    pipe = subprocess.PIPE
    with popen(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
