"""Fork the processes of commands from one that has imported torch, Hydra and MLflow already.

A command of the runner spends most of its time on imports. With `subprocess.Popen` replaced by
`ForkedProcess`, the process of `python -m ...`, `python -c ...` or `python <script>` is forked from
a server, with the arguments, variables, folder, files, signals and sys.path of a new interpreter.
The server computes nothing and has no thread. A command's own children (the tracking writer, the
fork server of a sweep) are forked from it before it begins, and wait until it wants them.

A test of start-up, of variables that are read at import or of a package that is missing needs a new
interpreter: the real subprocess.Popen, or the fixture `fresh_cli`.
"""

import atexit
import fcntl
import gc
import json
import os
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import NamedTuple

STATUS = struct.Struct("i")
MODULES = (
    "networkx",
    "runner.cli.main",
    "runner.modes.run",
    "runner.sweep.hydra_callback",
    "runner.sweep.launcher.job_main",
    "runner.tracking.writer.store_cache",
    "runner.tracking.writer.uploader",
    "sklearn.datasets",
    "sklearn.model_selection",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.launcher.api",
    "torch.export",
)
"""What the server imports; a name that leads nowhere costs time, nothing else."""
READ_AT_IMPORT = re.compile("CUDA_VISIBLE|LANG|LC_|LD_|MKL_|OMP_|PJRT_|PYTHON|TORCH_|TPU_|XLA_")
"""Matches variables that a forked process reads too late."""
SET_BY_TORCHRUN = ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)
MAX_FDS = 16
"""File descriptors of a message: request, status pipe, stdin, stdout, stderr, the passed ones."""
_FIRST_MOVED_FD = 512
_OwnPopen = subprocess.Popen
_register_exit_function = atexit.register
_ENVIRONMENT = dict(os.environ)


class Program(NamedTuple):
    """What python is asked to run: `-m` and a module, `-c` and code, or "" and a script."""

    kind: str
    name: str
    arguments: list[str]
    safe_path: bool
    unbuffered: bool

    @classmethod
    def parse(cls, command):
        """Return the program of a command line; None if python is given other options."""
        executable, *words = map(os.fspath, command)
        options = set()
        while words and words[0] in ("-P", "-u"):
            options.add(words.pop(0))
        flags = "-P" in options, "-u" in options
        if executable != sys.executable or not words:
            return None
        if words[0] in ("-m", "-c"):
            return cls(words[0], words[1], words[2:], *flags)
        if words[0].startswith("-"):
            return None
        return cls("", words[0], words[1:], *flags)

    @property
    def is_command(self):
        """Whether it is a command whose own children have to be its children."""
        return self.kind == "-m" and self.name in ("mlflow", "runner")

    def path(self, folder, environment):
        """Return the entries of sys.path before those of the installation."""
        first = folder if self.kind else str(Path(self.name).parent)
        entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
        return entries if self.safe_path else [first, *entries]

    def run(self):
        """Run the program as `__main__`."""
        sys.argv = [self.kind or self.name, *self.arguments]
        if self.unbuffered:
            sys.stdout.reconfigure(write_through=True)
        if self.kind == "-m":
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        elif self.kind == "-c":
            exec(compile(self.name, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(self.name, run_name="__main__")


class Request(NamedTuple):
    """A process that is wanted: its program, and what it must not inherit from its server."""

    program: Program
    folder: str
    environment: dict[str, str]
    new_session: bool
    blocked_signals: list[int]
    passed_fds: list[int]

    @classmethod
    def parse(cls, arguments):
        """Return what the arguments of subprocess.Popen ask for; None if it is no such program."""
        command = arguments["args"]
        program = None if isinstance(command, str | bytes) else Program.parse(command)
        if program is None or arguments["shell"]:
            return None
        environment = os.environ if arguments["env"] is None else arguments["env"]
        return cls(
            program,
            os.path.abspath(arguments["cwd"] or "."),  # noqa: PTH100
            {os.fspath(name): os.fspath(value) for name, value in environment.items()},
            bool(arguments["start_new_session"]),
            [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            list(arguments["pass_fds"]),
        )

    def send(self, connection, status, files):
        """Send the request with the write end of its status pipe and its files."""
        message = os.memfd_create("request")
        os.write(message, json.dumps(self).encode())
        os.lseek(message, 0, os.SEEK_SET)
        socket.send_fds(connection, [b"r"], [message, status, *files])
        os.close(message)

    @classmethod
    def receive(cls, connection):
        """Return the next request, its status pipe and its files; None if no other will come."""
        data, fds, *_ = socket.recv_fds(connection, 1, MAX_FDS)
        if not data:
            return None
        message, status, *files = fds
        with os.fdopen(message, encoding="utf-8") as file:
            program, *more = json.load(file)
        return cls(Program(*program), *more), status, files

    def run(self, files, server):
        """Run the program in this process, which was just forked, and exit.

        Args:
            files: what become its standard files and those that it inherits.
            server: forks what it starts, None if that are real processes.
        """
        status = 1
        try:
            self._enter(files)
            if self.program.is_command:
                os.closerange(_FIRST_MOVED_FD, 2 * _FIRST_MOVED_FD)
                server = Standbys(2)
            ForkedProcess.server = server
            if self.program.is_command:
                atexit.register = _register_to_run_last
            self.program.run()
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        threading._shutdown()
        # The runner's own handler exits, so that nothing is taken down; other programs get here.
        atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(status)

    def _enter(self, files):
        """Give this process the state of a new one."""
        if self.new_session:
            os.setsid()
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_MOVED_FD) for fd in files]
        os.closerange(3, _FIRST_MOVED_FD)
        for fd, target in zip(moved, [0, 1, 2, *self.passed_fds], strict=True):
            os.dup2(fd, target)
            os.close(fd)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        time.tzset()
        tempfile.tempdir = None
        sys.modules["numpy"].random.seed()
        sys.path[:0] = self.program.path(self.folder, self.environment)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked_signals)


class Standbys:
    """Children of a command, forked before it begins, which become what the command starts first.

    A tracking writer must be the child of its trainer, so the server cannot fork it.
    """

    def __init__(self, count):
        self._waiting = []
        for _ in range(count):
            own_end, other_end = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                own_end.close()
                self._wait_for_program(other_end)
            other_end.close()
            self._waiting.append((pid, own_end))

    def _wait_for_program(self, connection):
        for _, other in self._waiting:
            other.close()
        os.chdir("/")  # the command's folder may be unmounted once the command has ended
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):  # a pipe of the command's must end with the command
            os.dup2(null, number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        received = Request.receive(connection)
        if received is None:
            os._exit(0)
        request, _, files = received
        request.run(files, None)

    def can_run(self, request):
        """Return whether a child is left for a program."""
        return bool(self._waiting)

    def start(self, request, files):
        """Return the id of the child that runs a program; no pipe, the kernel has its status."""
        pid, connection = self._waiting.pop()
        request.send(connection, 2, files)
        connection.close()
        return pid, None


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
        command = [sys.executable, "-P", __file__, str(other_end.fileno())]
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
        names = {*request.environment, *_ENVIRONMENT} - {"PYTHONPATH", *SET_BY_TORCHRUN}
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

    def _try_wait(self, wait_flags):
        if self._status is None:
            return super()._try_wait(wait_flags)
        timeout = 0 if wait_flags & os.WNOHANG else None
        if not select.select([self._status], [], [], timeout)[0]:
            return 0, 0
        data = os.read(self._status, STATUS.size)
        os.close(self._status)
        # Without data the server has ended, and has killed what it had forked.
        return self.pid, STATUS.unpack(data)[0] if data else signal.SIGKILL


def serve(connection):
    """Fork a process for each request until the socket closes; report how each one ended."""
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write)
    running: dict[int, int] = {}
    # Forked processes send their own requests through this one. Its numbers are those that a
    # forked process does not close.
    requests, forks_end = map(_move, socket.socketpair())
    while True:
        ready = select.select([connection, requests, wakeup], [], [])[0]
        if wakeup in ready:
            os.read(wakeup, 4096)
            _report_ended(running)
        for source in {connection, requests}.intersection(ready):
            received = Request.receive(source)
            if received is None:
                _end(running)
            request, status, files = received
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                request.run(files, Server.in_fork(forks_end))
            running[pid] = status
            os.write(status, STATUS.pack(pid))
            for fd in files:
                os.close(fd)


def _move(connection):
    """Return a socket as one with a high number."""
    fd = fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, _FIRST_MOVED_FD)
    return socket.socket(fileno=fd)


def _end(running):
    """Kill the processes that still run, and exit."""
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _report_ended(running):
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pipe = running.pop(pid)
        with suppress(BrokenPipeError):
            os.write(pipe, STATUS.pack(status))
        os.close(pipe)


_last_exit_functions = []


def _register_to_run_last(function):
    """Take the place of atexit.register once.

    The runner registers a function before its imports, so that it runs after what those register:
    here they were imported before.
    """
    _last_exit_functions.append(function)
    atexit.register = _register_exit_function


def _run_last_exit_functions():
    for function in _last_exit_functions:
        function()


def main():
    atexit.register(_run_last_exit_functions)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    subprocess.Popen = ForkedProcess  # also where a module imports it by name
    for name in MODULES:
        with suppress(ImportError):
            import_module(name)
    sys.path.pop(0)
    # A collection in a forked process would copy every page that it shares with the server.
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
