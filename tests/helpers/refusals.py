"""Tables of commands that are refused."""

import re


def message_table(text):
    """Return (command, parts of its message) for each row of a text: `command => part | part`.

    An indented line continues the row above it with further parts.
    """
    rows = re.sub(r"\n +", " | ", re.sub(r"=>\n +", "=> ", text.strip())).splitlines()
    return [(typed, parts.split(" | ")) for typed, parts in (row.split(" => ") for row in rows)]
