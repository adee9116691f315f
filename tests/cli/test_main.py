import gc
import signal
import sys
from pathlib import Path

import pytest

from runner.cli import main as command_line
from runner.modes.result import RunResult
from runner.utils.errors import ConfigError, TrackingError, Unavailable


@pytest.fixture
def running(monkeypatch, main):
    """A command whose run is this function of (spec, folder, invocation)."""

    def use(body):
        monkeypatch.setattr("runner.modes.run.run", body)
        return main

    return use


def raising(error):
    def body(*_):
        raise error

    return body


def test_large_imports_leave_the_collector_as_it_was():
    before = gc.get_threshold()
    with command_line.rare_garbage_collection():
        assert gc.get_threshold()[2] > 1000 * before[2]
    assert gc.get_threshold() == before


def test_a_finished_run_has_exit_status_0(running):
    seen = []

    def body(spec, folder, invocation):
        seen.append((spec, folder, invocation))
        return RunResult("32-true", "x", str(folder), metrics={"a": 0.5}, quality="a")

    assert running(body)("model=mlp", "precision=16", "seed=3").rc == 0
    ((spec, folder, invocation),) = seen
    assert spec.seed == 3
    assert spec.precision["name"] == "16-mixed"
    assert folder.parent == Path.cwd() / "outputs" / "runs"
    assert invocation.overrides == ("model=mlp", "precision=16-mixed", "seed=3")
    assert invocation.choices["precision"] == "16-mixed"
    assert invocation.sweep is None


@pytest.mark.parametrize(
    ("error", "rc", "text"),
    [
        (ConfigError("one", "two"), 2, "error: one\nerror: two\n"),
        (Unavailable("no GPU.", "Type x."), 2, "error: no GPU. Type x.\n"),
        (TrackingError("store away"), 1, "error: store away\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_that_the_user_can_fix_has_no_traceback(running, error, rc, text):
    done = running(raising(error))("seed=1")
    assert (done.rc, done.stderr) == (rc, text)
    assert sys.argv == ["runner"]


@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), ValueError("in the job")])
def test_a_bug_has_its_traceback_here_and_in_the_runs_folder(running, error):
    done = running(raising(error))()
    assert done.rc == 1
    assert done.stderr.rstrip().endswith(f"{type(error).__name__}: {error}")
    (kept,) = Path("outputs/runs").glob("*/error.txt")
    assert "Traceback" in kept.read_text()


@pytest.mark.parametrize("argv", [["--help"], ["--cfg", "job"], ["--version"]])
def test_questions_to_hydra_are_answered(main, argv):
    done = main(*argv)
    assert done.rc == 0
    assert done.stdout
    assert not Path("outputs").exists()


@pytest.mark.parametrize("command", ["doctor", "report", "ui"])
def test_each_command_has_a_help_text(main, command):
    status, out, _ = main(command, "--help")
    assert (status, out.splitlines()[0].split()[:4]) == (0, ["python", "-m", "runner", command])


def test_commands_get_their_arguments(main, monkeypatch):
    seen = []
    monkeypatch.setattr("runner.cli.doctor.doctor", lambda argv: seen.append(argv) or 7)
    assert main("doctor", "a", "b").rc == 7
    assert seen == [["a", "b"]]


def test_the_working_directory_is_on_the_path_last(main, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    main("--version")
    assert sys.path[-1] == str(tmp_path)


def test_signals_are_as_before(quick):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    assert quick().rc == 0
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_process_ends_with_the_status_and_prints_no_traceback(fresh_cli):
    done = fresh_cli("precision=nonsense")
    assert done.rc == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: precision=nonsense is not known. Allowed: ")
