"""What a process is asked for: the message from one that wants it to one that forks it."""

import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

MAX_FDS = 16
"""File descriptors of a message: request, status pipe, stdin, stdout, stderr, the passed ones."""


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
        """Whether it is a command or a script, whose own children have to be its children."""
        return not self.kind or (self.kind == "-m" and self.name in ("mlflow", "runner"))

    def path(self, folder, environment):
        """Return the entries of sys.path before those of the installation."""
        first = {"-m": folder, "-c": ""}.get(self.kind, str(Path(self.name).parent))
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
