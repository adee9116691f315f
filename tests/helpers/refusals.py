"""Check what a command that is refused prints."""

import re


def check_refused(done, *parts, status=2):
    """Check that a command ended with a message that has these parts, and printed no traceback."""
    assert done.rc == status, done
    assert "Traceback" not in done.stdout + done.stderr
    for part in parts:
        assert part in done.stderr


def message_table(text):
    """Return (command, parts of its message) for each row of a text: `command => part | part`.

    An indented line continues the row above it with further parts.
    """
    rows = re.sub(r"\n +", " | ", text.strip()).splitlines()
    return [(typed, parts.split(" | ")) for typed, parts in (row.split(" => ") for row in rows)]
