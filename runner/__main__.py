"""Start the command line: python -m runner, and the console script.

Signals are handled before the slow imports, so that Ctrl-C ends those at once, too.
"""

import atexit
import sys

from runner.utils.stop_signals import CommandSignals


def main() -> int:
    """Run a command and return its exit status; signals are handled until the process ends."""
    signals = CommandSignals().__enter__()
    # Registered first, so that it runs last.
    atexit.register(signals.exit_if_finished)
    from runner.cli.main import main as command

    signals.status = command()
    return signals.status


if __name__ == "__main__":
    sys.exit(main())
