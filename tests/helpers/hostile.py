"""Settings and checks of the tests with generated input."""

from hypothesis import HealthCheck, Phase, core, settings

QUICK = (
    "model=mlp model.hidden=[4] train.max_steps=2 train.log_every=1 tracking=none accelerator=cpu"
).split()
"""The words of a run that takes less than a second."""


def cases(count):
    """Return settings for `count` examples without a deadline.

    They are the same ones each time, but with --hypothesis-seed, as in make test-all.
    """
    return settings(
        max_examples=count,
        derandomize=core.global_force_seed is None,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def ended_well(done):
    """Check that a command ended with a run or a message, and printed no terminal control codes."""
    printed = done.stdout + done.stderr
    assert done.rc in (0, 1, 2), done
    assert "Traceback" not in printed, done
    assert "\x1b" not in printed, done
    assert not done.rc or "error: " in done.stderr, done
