import gc
import signal
import sys
from pathlib import Path

import pytest
import torch

import runner
from runner.core.base.errors import ConfigError, TrackingError, Unavailable
from runner.core.run.run_result import RunResult
from runner.sweeps.hydra_job import rare_garbage_collection


@pytest.fixture
def running(monkeypatch, main):
    """A command whose run is this function of (spec, folder, invocation)."""

    def use(body):
        monkeypatch.setattr("runner.core.run_spec", body)
        return main

    return use


def raising(error):
    def body(*_):
        raise error

    return body


def test_large_imports_leave_the_collector_as_it_was():
    before = gc.get_threshold()
    with rare_garbage_collection():
        assert gc.get_threshold()[2] > 1000 * before[2]
    assert gc.get_threshold() == before


def test_a_finished_run_has_exit_status_0(running):
    seen = []

    def body(spec, folder, invocation, *_):
        seen.append((spec, folder, invocation))
        return RunResult(
            precision="32-true", label="x", folder=str(folder), metrics={"a": 0.5}, quality="a"
        )

    assert running(body)("model=mlp", "precision=16", "seed=3").rc == 0
    ((spec, folder, invocation),) = seen
    assert spec.seed == 3
    assert spec.precision["name"] == "16-mixed"
    assert folder.parent == Path.cwd() / "outputs" / "runs"
    assert invocation.overrides == ("model=mlp", "precision=16-mixed", "seed=3")
    assert invocation.choices["precision"] == "16-mixed"
    assert invocation.sweep is None


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (ConfigError("no layer"), "refused", "not tried, because no layer\n"),
        (Unavailable("no GPU.", "Type x."), "unavailable", "not tried, because no GPU. Type x\n"),
        (TrackingError("store away"), "failed", ""),
        (ValueError("bug"), "failed", ""),
    ],
)
def test_what_a_preset_does_not_try_is_no_failure(running, error, status, shown):
    """Beside a job that finishes: alone, nothing has been tried."""
    seen = []

    def body(spec, folder, *_):
        seen.append(spec.optimizer.get("eps"))
        if spec.precision["name"] == "16-true":
            raise error
        result = RunResult(
            precision="32-true", label="x", folder=str(folder), metrics={"a": 0.5}, quality="a"
        )
        result.write(folder)
        return result

    words = ("sweep=every_precision", "tracking=none", "hydra/launcher=basic")
    done = running(body)(*words, "precision=16-true,32-true")
    assert done.rc == (1 if status == "failed" else 0)
    assert seen == [1e-4, 1e-8]
    assert shown in done.stdout
    (path,) = Path("outputs/sweeps").glob("*/0/result.json")
    assert RunResult.read(path.parent).status == status
    assert running(body)(*words, "precision=16-true", "optimizer.eps=1e-6").rc == (
        1 if status == "failed" else 2
    )
    assert seen[-1] == 1e-6
    typed = running(body)("-m", *words[1:], "precision=16-true,32-true")
    assert typed.rc == (2 if status == "unavailable" else 1)


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


def test_an_error_that_several_jobs_have_is_printed_once(running):
    words = ("-m", "seed=0,1", "tracking=none", "hydra/launcher=basic")
    done = running(raising(TrackingError("store away")))(*words)
    assert done.stderr.count("store away") == 1
    assert "failed, as 32-true seed=0" in done.stdout


@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), ValueError("in the job")])
def test_a_bug_has_its_traceback_here_and_in_the_runs_folder(running, error):
    done = running(raising(error))()
    assert done.rc == 1
    assert done.stderr.rstrip().endswith(f"{type(error).__name__}: {error}")
    (kept,) = Path("outputs/runs").glob("*/error.txt")
    assert "Traceback" in kept.read_text()


@pytest.mark.parametrize(
    ("typed", "status", "text"),
    [
        ("--help", 0, "`--help model` lists all of a group"),
        ("--help precision", 0, "\nprecision=16-mixed                    float32 weights, float16"),
        ("sweep -h", 0, "sweep=every_precision             Every precision that trains;"),
        ("--help ui", 0, "python -m runner ui [tracking.uri=<store>]"),
        ("explain x --help", 0, "python -m runner explain [<module>"),
        ("--help precison", 2, "--help precison is not known. Allowed: doctor, explain,"),
        ("--cfg job", 0, "\nseed: 0\n"),
        ("--version", 0, f"runner {runner.__version__}, torch {torch.__version__.split('+')[0]}"),
        ("doctr", 2, "doctr is not an override. Type doctor or key=value.\n"),
        ("seed=1 explain x", 2, "comes before all else. Type python -m runner explain ...\n"),
    ],
)
def test_questions_are_answered(main, typed, status, text):
    done = main(*typed.split())
    assert done.rc == status
    assert text in f"\n{done.stdout}{done.stderr}"
    assert not Path("outputs").exists()


def test_the_help_is_one_screen(main):
    lines = main("--help").stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("command", ["doctor", "report", "ui"])
def test_each_command_has_a_help_text(main, command):
    status, out, _ = main(command, "--help")
    assert (status, out.splitlines()[0].split()[:4]) == (0, ["python", "-m", "runner", command])


def test_commands_get_their_arguments(main, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "runner.cli.doctor.doctor", lambda folder, measures: seen.append(folder) or 7
    )
    assert main("doctor", "-cd", "a").rc == 7
    assert seen == ["a"]


def test_the_working_directory_is_on_the_path_last(main, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    main("--version")
    assert sys.path[-1] == str(tmp_path)


def test_signals_are_as_before(quick):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    assert quick().rc == 0
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_process_ends_with_the_status_and_prints_no_traceback(fresh_cli):
    done = fresh_cli("precision=nonsense").check_refused()
    assert done.stdout == ""
    assert done.stderr.startswith("error: precision=nonsense is not known. Allowed: ")
