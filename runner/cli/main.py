"""Run a command line: rewrite argv, hand it to Hydra, run the job or sweep, return an exit status.

torch and mlflow are imported inside functions only, so that --help, --cfg and tab completion
answer at once.
"""

import logging
import os
import re
import sys
from collections.abc import Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten

from runner import __version__
from runner.config.overrides import check_config_dir, config_dir, rewrite_arguments
from runner.core import (
    ConfigError,
    Mode,
    Room,
    RunnerError,
    files,
    layout,
    stop_signals,
    terminal,
    torchrun,
)
from runner.rooms import install_rooms
from runner.sweeps.hydra_job import call_hydra, expand_resumed_sweep, print_error_once, sweep_module


class PlainFormatter(logging.Formatter):
    """A logging formatter whose lines are safe for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return terminal.sanitize(super().format(record))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. See docs/commands.md."""
    install_rooms()
    try:
        with stop_signals.CommandSignals(_has_open_sweep):
            status = _run_command(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt as error:
        status = stop_signals.interrupt_status(error)
    if status:
        torchrun.publish_failure()
    return status


def _run_command(argv: Sequence[str]) -> int:
    """Run a command of a room, or train through Hydra; return the exit status."""
    # logging.lastResort writes the warnings of libraries to stderr.
    if logging.lastResort:
        logging.lastResort.setFormatter(PlainFormatter())
    # The user's own modules: the path of a console script lacks the working directory, which
    # `python -m runner` has.
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))
    if argv == ["--version"]:
        print(f"runner {__version__}, torch {version('torch')}, Python {sys.version.split()[0]}")
        return 0
    try:
        invalid = next((text for text in argv if not _is_text(text)), None)
        if invalid is not None:
            raise ConfigError(f"{invalid} is not valid UTF-8.")
        command = Room.all_commands().get(argv[0]) if argv else None
        asks_for_help = not {"--help", "-h"}.isdisjoint(argv)
        if command and command.run and not asks_for_help:
            return command.run(*command.parse(argv[1:]))
        argv = torchrun.command_of_rank(rewrite_arguments(expand_resumed_sweep(argv)))
        if asks_for_help:
            # Words without a value come before the flags.
            topic = command.name if command else next(text for text in argv if "=" not in text)
            print(_help_text(config_dir(argv), topic))
            return 0
        check_config_dir(config_dir(argv))
    except RunnerError as error:
        print_error_once(error)
        return error.exit_status
    except PermissionError as error:
        print_error_once(files.unreadable(error))
        return 2
    except torchrun.MainRankFailed:
        return 2
    if "-sc" in argv:
        _print_completions(os.environ.get("COMP_LINE", ""))
    return _run_hydra(argv)


def _help_text(own_folder: Path | None, topic: str) -> str:
    """Return the help: one screen, or that of a command or of a group of options.

    Args:
        own_folder: of --config-dir, whose options are listed, too.
        topic: word typed with --help; a flag if there is none.

    Raises:
        ConfigError: there is no help on the topic.
    """
    commands = Room.all_commands()
    if topic in commands:
        return commands[topic].help()
    options: dict[str, dict[str, Path]] = {}
    for folder in filter(None, (layout.BUILT_IN_CONFIGS, own_folder)):
        for path in folder.glob("*/*.yaml"):
            options.setdefault(path.parent.name, {})[path.stem] = path
    if topic in options:
        rows = sorted(options[topic].items())
        return "\n".join(f"{topic}={name:27} {option_note(path)}" for name, path in rows)
    if not topic.startswith("-"):
        topics = ", ".join([*commands, *sorted(options)])
        raise ConfigError(f"--help {topic} is not known. Allowed: {topics}.")
    rows = [f"{name:13} {command.summary}" for name, command in commands.items()]
    groups = [f"{group}: {', '.join(sorted(options[group]))}" for group in sorted(options)]
    shown = [shorten(text, 98, placeholder=" ...") for text in groups]
    # Hydra's own help takes six times as long: it lists the groups.
    text = resources.files(str(__package__)).joinpath("help.txt").read_text()
    return text.format(commands="\n  python -m runner ".join(rows), groups="\n  ".join(shown))


def option_note(path: Path) -> str:
    """Return the first comment of an option's yaml: what it is. Empty without one."""
    comments = (line.lstrip("# ") for line in path.read_text().splitlines() if line[:1] == "#")
    return next((text for text in comments if not text.startswith("@package")), "")


def _print_completions(line: str) -> None:
    """Print the commands and modes that complete a typed line; Hydra knows options and keys."""
    *typed, word = line.removeprefix("python -m ").split(" ")
    offered = [f"mode={mode}" for mode in Mode.all()]
    if len(typed) == 1:
        offered += Room.all_commands()
    print("\n".join(text for text in offered if text.startswith(word)), flush=True)


def _run_hydra(argv: Sequence[str]) -> int:
    """Run a command through Hydra, print its errors in our form and return the exit status."""
    status = 0
    try:
        call_hydra(argv)
    except RunnerError as error:
        terminal.print_error(str(error))
        status = error.exit_status
    except KeyboardInterrupt as error:
        status = stop_signals.interrupt_status(error)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        module = sweep_module()
        status = module.finish_sweep(status) if module else status
    return status


def _has_open_sweep() -> bool:
    """Return whether this process runs a sweep, which must be ended before the process exits."""
    module = sweep_module()
    return module is not None and module.Sweep.current is not None


def _is_text(text: str) -> bool:
    """Return whether a text is valid Unicode; an argument with bytes that are not UTF-8 is not."""
    # Python decodes such bytes of argv to lone surrogates (PEP 383).
    return not re.search("[\ud800-\udfff]", text)
