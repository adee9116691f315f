"""Check what a command that is refused prints."""


def check_refused(done, *parts, status=2):
    """Check that a command ended with a message that has these parts, and printed no traceback."""
    assert done.rc == status, done
    assert "Traceback" not in done.stdout + done.stderr
    for part in parts:
        assert part in done.stderr
