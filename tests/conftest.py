"""How the tests reach the runner: as a process, inside this process, or through its config."""

import copy
import functools
import gc
import io
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import NamedTuple

import pytest

# Two test runs on one machine would wait for each other's threads at every tiny operation. Read as
# torch is imported, by this process and by those that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from composition_cache import composition_cache  # noqa: F401
from environments import ROOT, clean_env
from forked_process import ForkedProcess, Server, run_forked
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from times_record import TimesRecord

from runner.cli import main as command_line
from runner.config.hydra_plugins import VERSION_BASE
from runner.config.overrides import rewrite_arguments
from runner.config.resolve import register_schema, resolve_spec
from runner.core.base.stop_signals import SIGNALS as STOP_SIGNALS
from runner.rooms import install_rooms
from runner.sweeps.launcher import job_process

install_rooms()
COMMAND_SECONDS = 600
"""Longer than any command takes on a machine whose load is ten times its cores."""
QUICK = ("model=mlp", "model.hidden=[16]", "train.max_steps=3", "train.log_every=2")


def use_default_signals():
    """Give this process, and those that it starts, the signals of a command in a terminal.

    nohup and the background of a script have some of them ignored, and the runner leaves ignored
    signals ignored: tests that send one would wait in vain.
    """
    ignored = [number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    if not ignored:
        return
    # In a session of its own: the end of the terminal, which nohup is for, must not reach it.
    if os.getpgrp() != os.getpid():  # the leader of a process group cannot leave its session
        os.setsid()
    for number in ignored:
        is_ctrl_c = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)


# xdist's controller runs no test, and keeps the signals that it was given.
if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in sys.argv:
    use_default_signals()


def pytest_addoption(parser):
    """Add the limit of the second tier in CI."""
    text = "skip the tests that have not begun after this many seconds"
    parser.addoption("--stop-after", type=float, metavar="SECONDS", help=text)


def pytest_configure(config):
    """Record the seconds of each test."""
    config.pluginmanager.register(TimesRecord(config))


def pytest_collection_modifyitems(items):
    """Files with slow tests first, so that no worker is left with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


FROZEN_MODULES = [0]
"""Number of imported modules at the last freeze."""


def freeze_imported_modules():
    """Keep what imports made out of the collections of garbage that each run begins with."""
    if len(sys.modules) > FROZEN_MODULES[0] + 50:
        FROZEN_MODULES[0] = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_unconfigure():
    """Undo gc.freeze: without it triton prints a list of leaks when the interpreter exits."""
    gc.unfreeze()


class Done(NamedTuple):
    """The exit status and the output of a command."""

    rc: int
    stdout: str
    stderr: str

    def check_ok(self, *printed):
        """Check that the command ended well and printed these texts; return it."""
        assert self.rc == 0, self.stderr + self.stdout
        for text in printed:
            assert text in self.stdout
        return self

    def check_refused(self, *parts, status=2):
        """Check that the command ended with a message that has these parts, and printed no
        traceback; return it."""
        assert self.rc == status, self
        assert "Traceback" not in self.stdout + self.stderr
        for part in parts:
            assert part in self.stderr
        return self


def last_of_each_key(args):
    """The words of a command without those of a key that comes again: tests add words to lists that
    several of them share, and a command refuses a key that is typed twice."""
    words = [str(arg) for arg in args]
    last = {word.partition("=")[0]: i for i, word in enumerate(words)}
    return [w for i, w in enumerate(words) if "=" not in w or last[w.partition("=")[0]] == i]


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture
def clean():
    """The environment of a command of ours."""
    return clean_env()


@pytest.fixture(scope="session", autouse=True)
def _command_server(_key_of_the_tests):
    """Forks the processes of commands: a new interpreter would import torch for seconds."""
    if sys.platform != "linux":  # Apple's frameworks break in a forked process
        yield
        return
    ForkedProcess.server = server = Server()
    yield
    ForkedProcess.server = None
    server.close()


@pytest.fixture(scope="module", autouse=True)
def _forked_launcher(request, _command_server):
    """Fork the fork server of a sweep inside this process, too, but in tests of the fork server."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name != "test_isolated.py":
            forked = SimpleNamespace(**{**vars(subprocess), "Popen": ForkedProcess})
            patch.setattr(job_process, "subprocess", forked)
        yield


def _runner_command(popen, folder):
    """Return a function that runs a command to its end, in a process that `popen` starts."""

    def run(*args, cwd=folder, env=None, timeout=COMMAND_SECONDS):
        command = [sys.executable, "-m", "runner", *last_of_each_key(args)]
        environment = clean_env(**(env or {}))
        done = run_forked(command, timeout, popen, cwd=cwd, env=environment)
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def cli(tmp_path):
    """`python -m runner <args>` as a process of its own."""
    return _runner_command(ForkedProcess, tmp_path)


@pytest.fixture
def fresh_cli(tmp_path):
    """The same in a new interpreter, for what happens before or while it imports its modules."""
    return _runner_command(subprocess.Popen, tmp_path)


@pytest.fixture
def start_command(tmp_path):
    """Start `python -m <module> <args>`, runner by default, in a process group of its own.

    It returns a subprocess.Popen with text pipes. What still runs after the test is killed.
    With `fresh`, a new interpreter runs the command; so does another `python`.
    """
    started = []

    def start(*args, module="runner", cwd=tmp_path, env=None, fresh=False, python=sys.executable):
        process = (subprocess.Popen if fresh else ForkedProcess)(
            [python, "-m", module, *last_of_each_key(args)],
            cwd=cwd,
            env=clean_env(**(env or {})),
            stdout=PIPE,
            stderr=PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        # Also where it has ended: what it has started may outlive it.
        with process, suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def in_process(folder):
    """The same command inside this process, in a folder; torch is imported already."""
    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [p for p in sys.path if p])
        patch.setattr(sys, "argv", ["runner"])
        for key in [k for k in os.environ if k.startswith(("MLFLOW_", "HYDRA_"))]:
            patch.delenv(key)

        def run(*args):
            out, err = io.StringIO(), io.StringIO()
            with redirect_stdout(out), redirect_stderr(err):
                rc = command_line.main(last_of_each_key(args))
            return Done(rc, out.getvalue(), err.getvalue())

        yield run
    for left in ("HYDRA_FULL_ERROR", "MLFLOW_TRACKING_URI"):
        os.environ.pop(left, None)
    for name in set(sys.modules) - modules:  # the folder's own; the next test may name one so, too
        # Not by getattr: some modules of torch compile code for a name that they lack.
        module = vars(sys.modules[name])
        # A package without __init__.py has folders and no file.
        places = [module.get("__file__"), *module.get("__path__", ())]
        if any(str(folder) in str(place) for place in places):
            del sys.modules[name]


@pytest.fixture(scope="session")
def inside():
    """in_process, for fixtures that several tests share."""
    return in_process


@pytest.fixture
def main(tmp_path):
    """`python -m runner <args>` inside this process, in tmp_path."""
    with in_process(tmp_path) as run:
        yield run


@pytest.fixture
def quick(main):
    """A tiny run without tracking."""
    return lambda *args: main(*QUICK, "tracking=none", *args)


@pytest.fixture(scope="session")
def compose():
    """The spec that a command's overrides compose to, once: Hydra takes a fifth of a second."""
    register_schema()

    @functools.cache
    def made(*overrides):
        with initialize_config_module("runner.conf", **VERSION_BASE):
            words = [word for word in rewrite_arguments(overrides) if word != "--multirun"]
            return resolve_spec(hydra_compose("config", words))

    return lambda *overrides: copy.deepcopy(made(*overrides))


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """Copy a SQLite store without runs to a path and return its URI: making one takes seconds."""
    template = tmp_path_factory.mktemp("empty") / "mlflow.db"

    def copy(path):
        if not template.exists():
            from quiet_mlflow import client_of

            client_of(f"sqlite:///{template}")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(template, path)
        return f"sqlite:///{path}"

    return copy


@pytest.fixture(scope="session", autouse=True)
def _key_of_the_tests(tmp_path_factory):
    """Runs are signed with a key of this session's, not with the developer's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(autouse=True)
def _same_process():
    """No test may leave the process changed for the next."""
    freeze_imported_modules()
    before = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    yield
    assert (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()) == before


@pytest.fixture
def small(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    if mount is None or os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    # Lazily: the writer of a run may outlive it in this folder.
    subprocess.run(["umount", "-l", str(folder)], check=True)
