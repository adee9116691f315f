"""Resume a sweep: rebuild its command from its folder, and skip jobs that need not run again."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from runner.checkpoint import locate
from runner.config.given_objects import given_keys, python_call
from runner.config.overrides import override_key, quote_value
from runner.config.signature import describe_key_location
from runner.modes.result import RunResult
from runner.modes.run_store import resumed_sweep_store
from runner.sweeps.manifest import Manifest
from runner.sweeps.sweep_extension import extend_command, is_list_of_values
from runner.utils.errors import ConfigError
from runner.utils.layout import MANIFEST, RESULT
from runner.utils.secrets import redact
from runner.utils.terminal import quote_command, sanitize

RESUME_KEY = "sweep.resume"
RUNNER_COMMAND = ["python", "-m", "runner"]
_TRACKING = "tracking."
_CHANGEABLE_PREFIXES = (_TRACKING, "sweep.fail_fast=")
"""Prefixes of what may change on resuming: where jobs are recorded and when the sweep ends, but not
what jobs compute, nor how many run at once, which their speed depends on."""
_REDACTION_MARK = "***"


def expand_resume_command(argv: Sequence[str]) -> list[str]:
    """Return the command of the sweep that `sweep.resume=` names, with its own folder.

    Args:
        argv: arguments of the command line, `sweep.resume=` among them. A list of values takes the
            place of the sweep's own list, which it may only lengthen.

    Raises:
        ConfigError: there is no such sweep here, or the command changes more than it may.
    """
    resume = [text for text in argv if override_key(text) == RESUME_KEY]
    added = [text for text in argv if text not in (*resume, "-m", "--multirun")]
    lists = [text for text in added if is_list_of_values(text)]
    added = [text for text in added if text not in lists]
    name = resume[-1].partition("=")[2].strip("'\"")
    if name == "last":
        folder = _last_sweep(is_unfinished=not lists)
    else:
        folder = _find_folder(name, _tracking_uri(added))
    manifest = Manifest.read(folder)
    # The manifest is a file that others may have written: no other program is started.
    if [*manifest.command[:3]] != RUNNER_COMMAND:
        raise ConfigError(
            f"{folder / MANIFEST} is damaged: its command is not a command of the runner."
        )
    _check_trusted(manifest, [*added, *lists], name)
    # Words of the sweep's own command change nothing.
    added = [text for text in added if text not in manifest.command]
    _check_added(added, manifest, name)
    _check_working_directory(manifest, name)
    # Redacted words are typed again, see _check_added().
    command = extend_command(folder, manifest.command[3:], lists)
    command = [word for word in command if _REDACTION_MARK not in word]
    _select_recorded_store(folder, [*command, *added])
    return [*command, *added, *_folder_overrides(folder)]


def _tracking_uri(words: Sequence[str]) -> str | None:
    """Return the value of the first `tracking.uri=` among words."""
    values = (text.partition("=")[2] for text in words if text.startswith("tracking.uri="))
    return next(values, None)


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
            f"({describe_key_location()}), and is not run: {quote_command(manifest.command)}. If "
            f"you trust it, type it, and {RESUME_KEY}={name} behind it."
        )


def _check_added(added: Sequence[str], manifest: Manifest, name: str) -> None:
    """Refuse words that would change the sweep, and ask for secrets that its manifest lacks.

    Args:
        added: words of the resuming command.
        manifest: the sweep's.
        name: value of `sweep.resume=`.
    """
    secret_keys = {override_key(word) for word in manifest.command if _REDACTION_MARK in word}
    for word in added:
        if not word.startswith(_CHANGEABLE_PREFIXES) and override_key(word) not in secret_keys:
            raise ConfigError(
                f"{RESUME_KEY} runs a sweep with the settings that it was started with. Leave "
                f"{word} out: only tracking.* and sweep.fail_fast may change, and lists may get "
                "longer (seed=0,1,2,3). Other settings are a new sweep."
            )
    missing = sorted(secret_keys - {override_key(word) for word in added})
    if missing:
        raise ConfigError(
            f"{RESUME_KEY}={name}: the sweep's command held secrets, which are not stored. Type "
            f"them again: {' '.join(f'{key}=<value>' for key in missing)}"
        )


def _check_working_directory(manifest: Manifest, name: str) -> None:
    """Refuse another working directory than the sweep's, if that one still exists."""
    original = Path(manifest.cwd).absolute()
    if original != Path.cwd() and original.is_dir():
        raise ConfigError(
            f"{RESUME_KEY}={name}: its command was typed in another folder, which its files are "
            f"relative to. Type cd {shlex.quote(str(original))} first."
        )


def _folder_overrides(folder: Path) -> list[str]:
    """Return the overrides that make Hydra run the sweep again in its own folder."""
    return [
        f"hydra.sweep.dir={quote_value(str(folder.absolute()))}",
        "hydra.callbacks.sweep.resume=true",
        "hydra.mode=MULTIRUN",
    ]


def _select_recorded_store(folder: Path, words: Sequence[str]) -> None:
    """Set the store that the sweep was recorded in, unless the command names another one.

    The sweep's command may have taken the store from the environment, and its jobs take it from
    there, too. A URI in the environment is in no file and no command.
    """
    if any(word.startswith("tracking=") for word in words):
        return
    uris = [word.partition("=")[2] for word in words if override_key(word) == "tracking.uri"]
    uri = resumed_sweep_store(folder, uris[-1].strip("'\"") if uris else None)
    if uri is not None:
        print(sanitize(f"continues the sweep in {redact(uri)}"), flush=True)
        if not uris:
            os.environ["MLFLOW_TRACKING_URI"] = uri


def resume_command(folder: Path) -> list[str]:
    """Return the words of the command that resumes the sweep in a folder."""
    return [*RUNNER_COMMAND, f"{RESUME_KEY}={os.path.relpath(folder)}"]


def resume_text(folder: Path) -> str:
    """Return the command line, or the call of the Python API, that resumes a sweep."""
    words = resume_command(folder)
    given = given_keys()
    return python_call("sweep", words[-1:], given) if given else quote_command(words)


def final_result(folder: Path, overrides: Sequence[str]) -> RunResult | None:
    """Return the result of a job that need not run again, None for one that must.

    A job is not run again if it finished, or if a guard stopped it for its numbers: they would be
    the same again.

    Args:
        folder: the job's.
        overrides: the job's this time; a search may choose others than before.
    """
    if not (folder / RESULT).exists():
        return None
    result = RunResult.read(folder)
    is_final = result.status == "finished" or result.diverged
    return result if is_final and have_same_settings(result.overrides, overrides) else None


def have_same_settings(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two jobs' overrides agree, apart from where the jobs are recorded."""
    return _settings(one) == _settings(other)


def _settings(overrides: Sequence[str]) -> set[str]:
    return {redact(text) for text in overrides if not text.lstrip("+~").startswith(_TRACKING)}


def _find_folder(name: str, uri: str | None) -> Path:
    """Return the folder of a sweep.

    Args:
        name: the folder, or the id of the sweep's parent run or of one of its jobs.
        uri: store in which ids are looked up; None for the default one.
    """
    folder = locate.find_sweep(name, uri, RESUME_KEY)
    if folder is not None:
        return folder
    raise ConfigError(
        f"{RESUME_KEY}={name}: no sweep is there. Type {RESUME_KEY}=last, or the folder of a sweep "
        "(outputs/sweeps/<time>), or the MLflow id of a parent run whose sweep ran on this machine."
    )


def _last_sweep(is_unfinished: bool) -> Path:
    """Return the folder of the newest sweep, or of the newest one that has not finished."""
    for folder in locate.newest_sweeps():
        if not is_unfinished or not Manifest.read(folder).finished:
            return folder
    unfinished = " is unfinished" if is_unfinished else ""
    raise ConfigError(
        f"{RESUME_KEY}=last: no sweep in outputs/sweeps{unfinished}. Type "
        f"{RESUME_KEY}=<folder of a sweep>."
    )
