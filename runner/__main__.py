"""python -m runner, and the console script."""

import atexit
import sys

from runner.utils.stop_signals import CommandSignals


def main() -> int:
    """Run a command; a signal is heeded from here to the end of the process."""
    signals = CommandSignals().__enter__()
    atexit.register(signals.leave)  # first, so that it runs last
    from runner.cli.main import main as command

    signals.status = command()
    return signals.status


if __name__ == "__main__":
    sys.exit(main())
