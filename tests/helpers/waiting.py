"""Wait for what another process does."""

import time

SECONDS = 300
"""Far longer than anything takes on a machine whose load is ten times its cores."""


def wait_for(condition, process=None, seconds=SECONDS):
    """Return what a condition returns once that is true; fail if a process ends before."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
    return found
