"""Declare the commands doctor, explain, report, sync and ui, and parse their arguments.

argparse does not fit: it knows no `key=value`, so that its help, errors and defaults would all be
overridden. The help of a command, its errors and its rows in docs/commands.md come from one
declaration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.config.overrides import EXPLAIN_COMMAND, path_exists
from runner.core import ConfigError


@dataclass(frozen=True)
class Option:
    """An argument `key=value`, or a flag with a value.

    Attributes:
        key: what is typed before the value; a flag begins with `--`.
        value: placeholder of the value.
        meaning: for the help.
        short: another spelling of a flag; None for none.
    """

    key: str
    value: str
    meaning: str
    short: str | None = None

    @property
    def is_flag(self) -> bool:
        """Return whether the value may be the word after the key."""
        return self.key.startswith("-")


@dataclass(frozen=True)
class Positional:
    """The words of a command that are no options.

    Attributes:
        usage: placeholder of the words.
        allowed: what they may be, for errors.
        meaning: for the help.
        are_folders: there may be any number of them, each an existing folder.
        max_words: how many there may be.
    """

    usage: str
    allowed: str
    meaning: str
    are_folders: bool = False
    max_words: float = float("inf")


@dataclass(frozen=True)
class Command:
    """A command other than a run.

    Attributes:
        name: the first word after `python -m runner`.
        summary: one line, for the help of a run.
        description: for the help of the command and docs/commands.md.
        options: that it takes.
        positional: its other words; None if it takes none.
        function: dotted path of the function that is given the other words, whose module none but
            this command imports; empty for a command that Hydra parses.
    """

    name: str
    summary: str
    description: str
    options: tuple[Option, ...]
    positional: Positional | None = None
    function: str = ""

    def parse(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the words after the command's name that are no options, and the value of each
        typed option by its key.

        Raises:
            ConfigError: the command does not take one of them.
        """
        words: list[str] = []
        values: dict[str, str] = {}
        rest = list(argv)
        while rest:
            word = rest.pop(0)
            key, equals, value = word.partition("=")
            option = next((each for each in self.options if key in (each.key, each.short)), None)
            if option is not None and option.key in values:
                raise self._refusal(word, ": it is typed twice")
            if option is not None and equals:
                values[option.key] = value
            elif option is not None and option.is_flag and rest:
                values[option.key] = rest.pop(0)
            else:
                words.append(word)
        self._check_words(words)
        return words, values

    def _check_words(self, words: Sequence[str]) -> None:
        """Raise ConfigError for words that are neither options nor what the command works on."""
        for word in words:
            is_unknown_key = ("=" in word or word.startswith("--")) and not path_exists(word)
            if self.positional is None or is_unknown_key:
                raise self._refusal(word)
            if self.positional.are_folders and not (path_exists(word) and Path(word).is_dir()):
                raise self._refusal(word, ": there is no such folder")
        if self.positional and len(words) > self.positional.max_words:
            allowed = self.positional.allowed
            raise ConfigError(f"{self.name} takes {allowed}, and was given: {' '.join(words)}.")

    def _refusal(self, word: str, reason: str = "") -> ConfigError:
        allowed = [f"{option.key}=..." for option in self.options]
        if self.positional:
            allowed.insert(0, self.positional.allowed)
        return ConfigError(
            f"{self.name} does not take {word}{reason}. Allowed: {', '.join(allowed)}; "
            f"type {self.name} --help."
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return each argument and its meaning, for tables."""
        rows = []
        for option in self.options:
            sign = " " if option.is_flag else "="
            rows.append((f"{option.key}{sign}{option.value}", option.meaning))
        if self.positional:
            rows.insert(0, (self.positional.usage, self.positional.meaning))
        return rows

    def help(self) -> str:
        """Return the text of the command's --help."""
        rows = self.rows()
        usage = " ".join(f"[{argument}]" for argument, _ in rows)
        width = max(len(argument) for argument, _ in rows)
        lines = [f"  {argument:{width}}  {meaning}" for argument, meaning in rows]
        return "\n".join(
            [f"python -m runner {self.name} {usage}", "", self.description, "", *lines]
        )


_URI = Option("tracking.uri", "<store>", "the store; by default the one that runs log to")
_EXPERIMENT = Option("tracking.experiment", "<name>", "the experiment in the store")

DOCTOR = Command(
    "doctor",
    "which precisions run on this machine",
    "Lists every precision: whether it runs on this machine, why not, what to install.",
    (
        Option(
            "--config-dir", "<folder>", "of your own configs: lists their precisions, too", "-cd"
        ),
    ),
    function="runner.cli.doctor.doctor",
)
# Short for mode=explain: overrides.py rewrites it, and Hydra parses its keys.
EXPLAIN = Command(
    EXPLAIN_COMMAND,
    "what modules store, take, compute in and give",
    "Prints a table of modules of a run: what each stores, the dtypes that it takes, computes in\n"
    "and gives in a forward and backward of the first training batch, and whether it is converted\n"
    "and why not. Nothing is trained, and nothing is recorded in MLflow.",
    (),
    Positional(
        "<module> <key>=<value> ...",
        "a module and keys of a run",
        "a dotted name, with * for any part of one segment, and any keys of a run",
    ),
)
REPORT = Command(
    "report",
    "rebuild a sweep's report, or make one of two sweeps",
    "Rebuilds the report of a sweep from its folder, or from an id out of MLflow alone. With two\n"
    "sweeps, writes the report over the jobs of both, compared with 32-true of the first one.",
    (
        _URI,
        _EXPERIMENT,
        Option(
            "--out",
            "<folder>",
            "where the files are written; by default the sweep's folder, "
            "or outputs/reports/<sweep>",
        ),
    ),
    Positional(
        "<sweep> [<sweep>]",
        "one or two sweeps",
        "its folder, its id or the id of its parent run; by default the newest",
        max_words=2,
    ),
    function="runner.sweeps.report.load.rebuild_report",
)
SYNC = Command(
    "sync",
    "upload records that are missing in MLflow",
    "Uploads records that are missing in MLflow, after an outage or a crash; nothing is uploaded\n"
    "twice. Exit status 1 if an upload failed: type it again.",
    (
        Option("tracking.uri", "<store>", "upload to another store"),
        Option("tracking.experiment", "<name>", "upload to another experiment"),
    ),
    Positional(
        "<folder> ...",
        "folders of runs or sweeps",
        "of runs or sweeps; by default all runs under outputs/",
        are_folders=True,
    ),
    function="runner.cli.sync.sync",
)
UI = Command(
    "ui",
    "MLflow's pages on the store that runs log to",
    "Starts MLflow's server on 127.0.0.1 and prints the URLs of its pages.",
    (_URI, _EXPERIMENT, Option("port", "<number>", "by default the first free one from 5000 on")),
    function="runner.cli.ui.ui",
)
COMMANDS = {command.name: command for command in (DOCTOR, EXPLAIN, REPORT, SYNC, UI)}
"""Every command other than a run, by the first word after `python -m runner`."""
