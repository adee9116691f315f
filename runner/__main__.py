"""Start the command line: python -m runner, and the console script.

Signals are handled before the slow imports, so that Ctrl-C ends those at once, too.
"""

import atexit
import sys
from pathlib import Path

from runner import __version__
from runner.core import files, stop_signals, torchrun
from runner.output.lasting_output import lasting_output


def main() -> int:
    """Run a command and return its exit status; signals are handled until the process ends."""
    signals = stop_signals.CommandSignals().__enter__()
    # Registered first, so that it runs last.
    atexit.register(signals.exit_if_finished)
    with lasting_output():
        warn_of_shadow(Path.cwd())
        print_start()
        # A folder in the working directory may have the name of a library that is imported here.
        with files.imports_without_working_directory():
            from runner.cli.main import main as command

        signals.status = command()
    return signals.status


def print_start() -> None:
    """Print a first line on a terminal: what follows imports torch, for seconds without a word."""
    # Those that answer at once.
    quick = {"--help", "-h", "--version", "-sc"}
    is_first = torchrun.process_rank().is_main
    if is_first and sys.stderr.isatty() and quick.isdisjoint(sys.argv):
        print(f"precision-runner {__version__} is starting ...", file=sys.stderr)


def warn_of_shadow(folder: Path) -> None:
    """Print a warning if a folder holds a module that `python -m runner` would run in it.

    Only the console script gets here in such a folder: Python runs the other module for -m.
    """
    package = Path(__file__).parent
    for path in (folder / f"{package.name}.py", folder / package.name / "__init__.py"):
        if path.is_file() and path.parent != package:
            print(
                f"warning: {path.relative_to(folder)} hides this package: `python -m runner` would "
                "run it in this folder. Type runner in place of python -m runner here.",
                file=sys.stderr,
            )


if __name__ == "__main__":
    sys.exit(main())
