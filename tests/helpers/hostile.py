"""What the tests with generated input share."""

from hypothesis import HealthCheck, Phase, settings


def cases(count):
    """So many, the same ones each time, as long as each may take."""
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def ended_well(done):
    """With a run or a message, and nothing that steers a terminal."""
    told = done.stdout + done.stderr
    assert done.rc in (0, 1, 2), done
    assert "Traceback" not in told, done
    assert "\x1b" not in told, done
    assert not done.rc or "error: " in done.stderr, done
