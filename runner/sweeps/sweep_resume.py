"""Resume a sweep: rebuild its command from its folder, and skip jobs that need not run again."""

import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.config.overrides import as_typed, rewrite_arguments
from runner.config.python_objects import given_keys
from runner.core import (
    ConfigError,
    Invocation,
    RunResult,
    fmt,
    layout,
    secrets,
    signature,
    terminal,
)
from runner.sweeps.manifest import Manifest
from runner.sweeps.room import ROOM
from runner.tracking import locate
from runner.tracking.result_table import read_results
from runner.tracking.run_store import resumed_sweep_store

RESUME_KEY = "sweep.resume"
RUNNER_COMMAND = ["python", "-m", "runner"]
_TRACKING = "tracking."
_TOLERANCE = ("advise.tolerance=", "advise.max_gap=")
_CHANGEABLE_PREFIXES = (_TRACKING, "sweep.fail_fast=", "sweep.verbose=", *_TOLERANCE)
"""Prefixes of what may change on resuming: where jobs are recorded, when the sweep ends and what
its answer accepts, but not what jobs compute, nor how many run at once, which their speed depends
on."""
_ADVISE_MODES = tuple(f"mode={mode.name}" for mode in ROOM.modes)
_FIXING_WORDS = ("sweep=", "hydra/sweeper=", "launcher=", "hydra/launcher=", *_ADVISE_MODES)
"""How the words begin that let other code than Hydra's own sweeper and our launcher number the jobs
of a sweep."""
_KNOWN_ENDS = ("=isolated", "sweep=every_precision", "sweep=precisions")
"""How such words end that do not: our launcher, and presets that only list precisions."""
_SEED = "seed="
_NO_LISTS = ("-", "hydra.", "hydra/", "launcher=", "sweep", _TRACKING)


def expand_resume_command(argv: Sequence[str]) -> list[str]:
    """Return the command of the sweep that `sweep.resume=` names, with its own folder.

    Args:
        argv: arguments of the command line, `sweep.resume=` among them. A list of values takes the
            place of the sweep's own list, which it may only lengthen.

    Raises:
        ConfigError: there is no such sweep here, or the command changes more than it may.
    """
    resume = [text for text in argv if fmt.override_key(text) == RESUME_KEY]
    typed = [text for text in argv if text not in (*resume, "-m", "--multirun")]
    name = resume[-1].partition("=")[2].strip("'\"")
    uris = (text.partition("=")[2] for text in typed if text.startswith("tracking.uri="))
    lists = [text for text in typed if "," in text and not text.startswith(_NO_LISTS)]
    folder = _find_folder(name, next(uris, None), is_unfinished=not lists)
    manifest = Manifest.read(folder)
    # The manifest is a file that others may have written: no other program is started.
    if [*manifest.command[:3]] != RUNNER_COMMAND:
        raise ConfigError(
            f"{folder / layout.MANIFEST} is damaged: its command is not a command of the runner."
        )
    _check_trusted(manifest, typed, name)
    # Words of the sweep's own command change nothing.
    new = [text for text in typed if text not in manifest.command]
    added = [text for text in new if text not in lists]
    _check_added(added, manifest, name)
    # Another working directory than the sweep's is refused, if that one still exists.
    original = Path(manifest.cwd).absolute()
    if original != Path.cwd() and original.is_dir():
        raise ConfigError(
            f"{RESUME_KEY}={name}: its command was typed in another folder, which its files are "
            f"relative to. Type cd {shlex.quote(str(original))} first."
        )
    # Redacted words are typed again, see _check_added(), as are tracking.* and others.
    command = _with_lists(manifest.command[3:], [text for text in new if text in lists], folder)
    replaced = {"hydra.sweep.dir", *map(fmt.override_key, added)}
    command = [word for word in command if fmt.override_key(word) not in replaced]
    _select_recorded_store(folder, [*command, *added])
    # Hydra then runs the sweep again in its own folder.
    return [
        *command,
        *added,
        f"hydra.sweep.dir={fmt.quote_value(str(folder.absolute()))}",
        "hydra.callbacks.sweep.resume=true",
        "hydra.mode=MULTIRUN",
    ]


def _with_lists(command: Sequence[str], lists: Sequence[str], folder: Path) -> list[str]:
    """Return the words of a sweep's command with longer lists in their places.

    A sweep whose command has no seed takes a list that holds the seed of its jobs.

    Raises:
        ConfigError: a list lacks a value that the sweep has, or the sweep cannot take more jobs.
    """
    words = [*command]
    fixing = fixing_word(words)
    if lists and fixing:
        raise ConfigError(
            f"{lists[0]}: lists cannot get longer in a sweep with {fixing}. Start a new sweep; "
            "runner report <A> <B> reports both."
        )
    # Of two words for a key Hydra takes the last one.
    places = {fmt.override_key(text): i for i, text in enumerate(words)}
    for word in map(as_typed, rewrite_arguments(lists)):
        key = fmt.override_key(word)
        if word.startswith(_SEED) and key not in places:
            seeds = {result.seed for result in read_results(folder)} - {None}
            if len(seeds) == 1:
                places[key] = len(words)
                words.append(f"{_SEED}{seeds.pop()}")
        if key not in places:
            raise ConfigError(
                f"{word}: the sweep's command does not set {key}. Only its own lists may get "
                "longer; another key is a new sweep, and runner report <A> <B> reports both."
            )
        former = words[places[key]]
        known = _listed_values(former)
        new = _listed_values(word)
        if not {*known} <= {*new}:
            longer = ",".join(dict.fromkeys([*known, *new]))
            raise ConfigError(
                f"{word}: the sweep has {former}, and a list may only get longer. Type "
                f"{key}={longer}."
            )
        words[places[key]] = word
    return words


def fixing_word(command: Sequence[str]) -> str:
    """Return the word of a sweep's command that keeps its lists from getting longer; empty without
    any."""
    fixing = (word for word in command if word.startswith(_FIXING_WORDS))
    return next((word for word in fixing if not word.endswith(_KNOWN_ENDS)), "")


def _listed_values(word: str) -> list[str]:
    """Return the values that a word lists for its key, as in seed=0,1,2 or seed=range(0,3)."""
    override = OverridesParser.create().parse_override(word)
    if override.is_sweep_override():
        return [*override.sweep_string_iterator()]
    return [word.partition("=")[2]]


def with_longer_lists(manifest: Manifest, overrides: Sequence[str]) -> Manifest:
    """Return a resumed sweep's manifest with the lists that its command has now.

    Args:
        manifest: of the sweep as it was.
        overrides: words that Hydra composes the jobs from now.
    """
    old = {*map(as_typed, manifest.overrides)}
    lists = [text for text in map(as_typed, overrides) if "," in text and text not in old]
    by_key = {fmt.override_key(text): text for text in lists if not text.startswith(_TRACKING)}
    command = [by_key.get(fmt.override_key(text), text) for text in manifest.command]
    fields = [by_key.get(fmt.override_key(text), text) for text in manifest.overrides]
    added = [text for text in by_key.values() if text not in fields]
    longer = replace(manifest, command=[*command, *added], overrides=[*fields, *added])
    return longer.signed() if manifest.is_signed_by_user else longer


def resumed_numbers(
    folder: Path, jobs: Sequence[Sequence[str]], numbers: Sequence[int]
) -> list[int]:
    """Return the number of each job of a resumed sweep: its result's, else the next free one.

    Args:
        folder: of the sweep.
        jobs: overrides of each job.
        numbers: numbers that the jobs have together.
    """
    # A job whose result cannot be read has no overrides.
    results: dict[int | None, RunResult] = {
        int(Path(result.folder).name): result for result in read_results(folder) if result.overrides
    }
    resumed: list[int | None] = []
    for words in jobs:
        texts = _settings([*map(as_typed, words)])
        # A result lacks the keys that the sweep leaves out for its precision.
        known = (n for n in numbers if n in results and _settings_of(results[n], texts) <= texts)
        number = next(known, None)
        resumed.append(number)
        results.pop(number, None)
    free = (number for number in numbers if number not in resumed)
    return [next(free) if number is None else number for number in resumed]


def _check_trusted(manifest: Manifest, typed: Sequence[str], name: str) -> None:
    """Refuse a manifest from elsewhere, whose command could name any code.

    Args:
        manifest: the sweep's.
        typed: words of the resuming command. Where they repeat the sweep's command, it is trusted.
        name: value of `sweep.resume=`.
    """
    command = {word for word in manifest.command[3:] if word not in ("-m", "--multirun")}
    if not manifest.is_signed_by_user and not command.issubset(typed):
        raise ConfigError(
            f"{RESUME_KEY}={name}: the sweep's command is not signed with your key "
            f"({signature.describe_key_location()}), and is not run: "
            f"{terminal.quote_command(manifest.command)}. If "
            f"you trust it, type it, and {RESUME_KEY}={name} behind it."
        )


def _check_added(added: Sequence[str], manifest: Manifest, name: str) -> None:
    """Refuse words that would change the sweep, and ask for secrets that its manifest lacks.

    Args:
        added: words of the resuming command.
        manifest: the sweep's.
        name: value of `sweep.resume=`.
    """
    secret_keys = {fmt.override_key(word) for word in manifest.command if "***" in word}
    for word in added:
        if not word.startswith(_CHANGEABLE_PREFIXES) and fmt.override_key(word) not in secret_keys:
            raise ConfigError(
                f"{RESUME_KEY} runs a sweep with the settings that it was started with. Leave "
                f"{word} out: only tracking.*, advise.max_gap, advise.tolerance, sweep.fail_fast "
                "and sweep.verbose may change, and lists may get longer (seed=0,1,2,3). Other "
                "settings are a new sweep."
            )
    missing = sorted(secret_keys - {fmt.override_key(word) for word in added})
    if missing:
        raise ConfigError(
            f"{RESUME_KEY}={name}: the sweep's command held secrets, which are not stored. Type "
            f"them again: {' '.join(f'{key}=<value>' for key in missing)}"
        )


def _select_recorded_store(folder: Path, words: Sequence[str]) -> None:
    """Set the store that the sweep was recorded in, unless the command names another one.

    The sweep's command may have taken the store from the environment, and its jobs take it from
    there, too. A URI in the environment is in no file and no command.
    """
    settings = {fmt.override_key(word): word.partition("=")[2] for word in words}
    if "tracking" in settings:
        return
    typed = settings.get("tracking.uri")
    uri = resumed_sweep_store(folder, typed and typed.strip("'\""))
    if uri is not None:
        print(terminal.sanitize(f"continues the sweep in {secrets.redact(uri)}"), flush=True)
        if typed is None:
            os.environ["MLFLOW_TRACKING_URI"] = uri


class Command(NamedTuple):
    """A command of the runner; as text the command line, or the call of the Python API.

    Attributes:
        function: of the Python API that does the same.
        words: behind `python -m runner`.
    """

    function: Literal["run", "sweep"]
    words: Sequence[str]

    def __str__(self) -> str:
        objects = given_keys()
        if not (objects or terminal.in_notebook()):
            return terminal.quote_command([*RUNNER_COMMAND, *self.words])
        return Invocation.python_call(
            self.function, [word for word in self.words if "=" in word], objects
        )


def resume_command(folder: str | Path, *lists: str) -> Command:
    """Return the command that resumes a sweep.

    Args:
        folder: the sweep's.
        lists: longer lists of values, as seed=0,1,2,3.
    """
    return Command("sweep", [f"{RESUME_KEY}={os.path.relpath(folder)}", *lists])


def final_result(folder: Path, overrides: Sequence[str]) -> RunResult | None:
    """Return the result of a job that need not run again, None for one that must.

    A job is not run again if it finished, or if a guard stopped it for its numbers: they would be
    the same again.

    Args:
        folder: the job's.
        overrides: the job's this time; a search may choose others than before.
    """
    if not (folder / layout.RESULT).exists():
        return None
    result = RunResult.read(folder)
    is_final = result.status == "finished" or result.diverged
    return result if is_final and has_settings(result, overrides) else None


def has_settings(result: RunResult, overrides: Sequence[str]) -> bool:
    """Return whether a job had these overrides, apart from where it is recorded."""
    settings = _settings(overrides)
    return _settings_of(result, settings) == settings


def _settings_of(result: RunResult, others: Collection[str]) -> set[str]:
    """Return a job's settings, with the seed that it took by default where others name theirs."""
    settings = _settings(result.overrides)
    has_own, has_other = (
        any(text.startswith(_SEED) for text in texts) for texts in (settings, others)
    )
    return settings | {f"{_SEED}{result.seed}"} if has_other and not has_own else settings


def _settings(overrides: Sequence[str]) -> set[str]:
    unlike = (_TRACKING, *_TOLERANCE)
    return {secrets.redact(text) for text in overrides if not text.lstrip("+~").startswith(unlike)}


def _find_folder(name: str, uri: str | None, is_unfinished: bool) -> Path:
    """Return the folder of a sweep.

    Args:
        name: the folder, or the id of the sweep's parent run or of one of its jobs, or `last`.
        uri: store in which ids are looked up; None for the default one.
        is_unfinished: the last sweep is the newest one that has not finished.
    """
    if name != "last":
        folder = locate.find_sweep(name, uri, RESUME_KEY)
        if folder:
            return folder
        raise ConfigError(
            f"{RESUME_KEY}={name}: no sweep is there. Type {RESUME_KEY}=last, or the folder of a "
            "sweep (outputs/sweeps/<time>), or the MLflow id of a parent run whose sweep ran on "
            "this machine."
        )
    for folder in locate.newest_sweeps():
        if not is_unfinished or not Manifest.read(folder).finished:
            return folder
    unfinished = " is unfinished" if is_unfinished else ""
    raise ConfigError(
        f"{RESUME_KEY}=last: no sweep in outputs/sweeps{unfinished}. Type "
        f"{RESUME_KEY}=<folder of a sweep>."
    )
