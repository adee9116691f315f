"""runner.sweep.launcher.job_output: why a job ended without a result."""

import signal

import pytest

from runner.sweep.launcher.job_output import exit_reason

BY_SHELL, BY_SIGNAL, BY_ITSELF = (128 + signal.SIGINT) << 8, signal.SIGINT, 3 << 8


@pytest.mark.parametrize("status", [BY_SHELL, BY_SIGNAL])
def test_a_stop_that_was_asked_for_is_told_as_one(status):
    told = "Stopped by SIGINT before its result."
    assert exit_reason(status, "KeyboardInterrupt", 0, [signal.SIGINT]) == told
    assert told not in exit_reason(status, "", 0)


def test_what_ends_by_itself_is_not_taken_for_it():
    assert "exit status 3" in exit_reason(BY_ITSELF, "boom", 0, [signal.SIGINT])
    assert "SIGKILL" in exit_reason(signal.SIGKILL, "", 0, [signal.SIGINT])
    assert "killed" in exit_reason(None, "", 0, [signal.SIGINT])
