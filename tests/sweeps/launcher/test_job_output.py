"""runner.sweeps.launcher.job_process: why a job ended without a result."""

import signal

import pytest

from runner.sweeps.launcher.job_process import exit_reason

BY_SHELL = (128 + signal.SIGINT) << 8
BY_SIGNAL = signal.SIGINT
BY_ITSELF = 3 << 8


@pytest.mark.parametrize("status", [BY_SHELL, BY_SIGNAL])
def test_a_requested_stop_is_reported_as_a_stop(status):
    reason = "Stopped by SIGINT before it wrote a result."
    assert exit_reason(status, "KeyboardInterrupt", 0, [signal.SIGINT]) == reason
    assert reason not in exit_reason(status, "", 0)


def test_an_end_without_a_request_is_not_reported_as_a_stop():
    assert "exit status 3" in exit_reason(BY_ITSELF, "boom", 0, [signal.SIGINT])
    assert "SIGKILL" in exit_reason(signal.SIGKILL, "", 0, [signal.SIGINT])
    assert "fork server was killed" in exit_reason(None, "", 0, [signal.SIGINT])
