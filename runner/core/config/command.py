"""The contract of commands other than a run: `python -m runner <name> ...`.

argparse does not fit: it knows no `key=value`, so that its help, errors and defaults would all be
overridden. The help of a command, its errors and its rows in docs/commands.md come from one
declaration.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from runner.core.base.errors import ConfigError
from runner.core.base.files import path_exists


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command other than a run.

    Attributes:
        name: the first word after `python -m runner`.
        summary: one line, for the help of a run.
        description: for the help of the command and docs/commands.md.
        run: runs the command on its words that are no options and on the value of each typed
            option by its key, and returns the exit status. It imports what it needs when it is
            called: the command line reads commands before torch is imported. None for
            `explain`, which config/overrides.py makes a run in the mode of its name.
        options: meaning of each argument by the argument as it is typed: `key=<value>`, or a flag
            as `--key <value>`, or without a value as `--key`.
        short: the flag that another spelling stands for.
        words: placeholder of the words that are no options; empty for a command without any.
        words_meaning: for the help.
        words_allowed: what they may be, for errors.
        max_words: how many there may be.
        takes_folders: each of them is an existing folder.
    """

    STORE_OPTIONS: ClassVar[Mapping[str, str]] = {
        "tracking.uri=<store>": "the store; by default the one that runs log to",
        "tracking.experiment=<name>": "the experiment in the store",
    }
    """Options of commands that read a store."""

    name: str
    summary: str
    description: str
    run: Callable[[Sequence[str], Mapping[str, str]], int] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    short: Mapping[str, str] = field(default_factory=dict)
    words: str = ""
    words_meaning: str = ""
    words_allowed: str = ""
    max_words: float = float("inf")
    takes_folders: bool = False

    def parse(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the words after the command's name that are no options, and the value of each
        typed option by its key; that of a flag without a value is the flag.

        Raises:
            ConfigError: the command does not take one of them.
        """
        keys = self._keys()
        words: list[str] = []
        values: dict[str, str] = {}
        rest = list(argv)
        while rest:
            word = rest.pop(0)
            typed, equals, value = word.partition("=")
            key = self.short.get(typed, typed)
            if key in values:
                raise self._refusal(word, ": it is typed twice")
            if word in self.options:
                values[word] = word
            elif key in keys and equals:
                values[key] = value
            elif key in keys and key.startswith("-") and rest:
                values[key] = rest.pop(0)
            else:
                words.append(word)
        self._check_words(words)
        return words, values

    def _keys(self) -> list[str]:
        """Return the keys of the options that have a value."""
        names = {argument: re.split("[ =]", argument)[0] for argument in self.options}
        return [name for argument, name in names.items() if name != argument]

    def _check_words(self, words: Sequence[str]) -> None:
        """Raise ConfigError for words that are neither options nor what the command works on."""
        for word in words:
            is_unknown_key = ("=" in word or word.startswith("--")) and not path_exists(word)
            if not self.words or is_unknown_key:
                raise self._refusal(word)
            if self.takes_folders and not (path_exists(word) and Path(word).is_dir()):
                raise self._refusal(word, ": there is no such folder")
        if self.words and len(words) > self.max_words:
            given = " ".join(words)
            raise ConfigError(f"{self.name} takes {self.words_allowed}, and was given: {given}.")

    def _refusal(self, word: str, reason: str = "") -> ConfigError:
        keys = self._keys()
        flags = [argument for argument in self.options if re.fullmatch("[-a-z]+", argument)]
        allowed = [*(f"{key}=..." for key in keys), *flags]
        if self.words:
            allowed.insert(0, self.words_allowed)
        return ConfigError(
            f"{self.name} does not take {word}{reason}. Allowed: {', '.join(allowed)}; "
            f"type {self.name} --help."
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return each argument and its meaning, for tables."""
        words = [(self.words, self.words_meaning)] if self.words else []
        return [*words, *self.options.items()]

    def help(self) -> str:
        """Return the text of the command's --help."""
        rows = self.rows()
        usage = " ".join(f"[{argument}]" for argument, _ in rows)
        width = max(len(argument) for argument, _ in rows)
        lines = [f"  {argument:{width}}  {meaning}" for argument, meaning in rows]
        return "\n".join(
            [f"python -m runner {self.name} {usage}", "", self.description, "", *lines]
        )
