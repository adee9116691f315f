"""Fork the processes of commands from one that has imported torch, Hydra and MLflow already.

    python command_server.py FD

The server computes nothing and has no thread. A command's own children (the tracking writer, the
fork server of a sweep) are forked from it before it begins, and wait until it wants them.
forked_process.py is the way to it.
"""

import atexit
import fcntl
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from forked_process import STATUS, ForkedProcess, Server
from process_request import Request

MODULES = (
    "IPython aiohttp flask importlib_metadata matplotlib.backends.backend_agg "
    "matplotlib.backends.backend_svg matplotlib.figure mlflow.pyfunc "
    "mlflow.store.tracking.sqlalchemy_store mlflow.tracking.request_header.registry "
    "networkx runner.cli.main runner.core.run.run runner.modes.train "
    "runner.sweeps.advisor.trials runner.sweeps.hydra_callback "
    "runner.sweeps.launcher.job_request runner.sweeps.sweep "
    "runner.tracking.writer.uploader sklearn.datasets sklearn.model_selection "
    "sqlalchemy.dialects.sqlite torch._dynamo torch._functorch.aot_autograd "
    "torch.distributed.launcher.api torch.export"
).split()
"""What the server imports; a name that leads nowhere costs time, nothing else."""
_FIRST_MOVED_FD = 512
_register_exit_function = atexit.register


def run(request, files, server):
    """Run a program in this process, which was just forked, and exit.

    Args:
        request: names the program.
        files: what become its standard files and those that it inherits.
        server: forks what it starts, None if that are real processes.
    """
    status = 1
    try:
        _enter(request, files)
        if request.program.is_command:
            os.closerange(_FIRST_MOVED_FD, 2 * _FIRST_MOVED_FD)
            server = Standbys(2)
            atexit.register = _register_to_run_last
        ForkedProcess.server = server
        request.program.run()
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


def _enter(request, files):
    """Give this process the state of a new one."""
    if request.new_session:
        os.setsid()
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_MOVED_FD) for fd in files]
    os.closerange(3, _FIRST_MOVED_FD)
    for fd, target in zip(moved, [0, 1, 2, *request.passed_fds], strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    tempfile.tempdir = None
    sys.modules["numpy"].random.seed()
    sys.path[:0] = request.program.path(request.folder, request.environment)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked_signals)


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
        run(request, files, None)

    def can_run(self, request):
        """Return whether a child is left for a program."""
        return bool(self._waiting)

    def start(self, request, files):
        """Return the id of the child that runs a program; no pipe, the kernel has its status."""
        pid, connection = self._waiting.pop()
        request.send(connection, 2, files)
        connection.close()
        return pid, None


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
                run(request, files, Server.in_fork(forks_end))
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
    # The folder of this script is on the path for its own imports only.
    sys.path[0] = str(Path(__file__).parents[2])
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
