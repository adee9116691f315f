"""Going on with a sweep: the command that does it, and the jobs that need not run again."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from runner.modes.result import RunResult
from runner.modes.run_store import resumed_sweep_store
from runner.sweep.manifest import Manifest
from runner.tracking.reader import folder_of_run
from runner.utils.errors import ConfigError
from runner.utils.layout import MANIFEST, RESULT
from runner.utils.secrets import redact
from runner.utils.terminal import sanitize

KEY = "sweep.resume"
COMMAND = ["python", "-m", "runner"]
_FREE = "tracking."
"""What may change: where jobs are recorded, not what they compute nor how many at once, which their
speed depends on."""


def expand_resume_command(argv: Sequence[str]) -> list[str]:
    """The command of the sweep that `sweep.resume=` names, as it was typed, in its own folder.

    Raises:
        ConfigError: there is no such sweep here, or the command asks for something else as well.
    """
    asked = [text for text in argv if override_key(text) == KEY]
    beside = [text for text in argv if text not in (*asked, "-m", "--multirun")]
    where = asked[-1].partition("=")[2].strip("'\"")
    uri = next((t.partition("=")[2] for t in beside if t.startswith("tracking.uri=")), None)
    folder = _last() if where == "last" else _folder(where, uri)
    manifest = Manifest.read(folder)
    if [*manifest.command[:3]] != COMMAND:
        raise ConfigError(f"{folder / MANIFEST} is damaged: its command is none of the runner's.")
    secret = {override_key(word) for word in manifest.command if "***" in word}
    if alien := [t for t in beside if not t.startswith(_FREE) and override_key(t) not in secret]:
        raise ConfigError(
            f"{KEY} goes on with a sweep as it was asked for. Leave {alien[0]} out; beside it, "
            "only tracking.* may change. Other settings are a new sweep."
        )
    if lacking := sorted(secret - {override_key(text) for text in beside}):
        raise ConfigError(
            f"{KEY}={where}: the sweep's command held secrets, which are kept nowhere. Type them "
            f"again: {' '.join(f'{key}=<value>' for key in lacking)}"
        )
    if (typed_in := Path(manifest.cwd).absolute()) != Path.cwd() and typed_in.is_dir():
        raise ConfigError(
            f"{KEY}={where}: its command was typed in another folder, which its files are relative "
            f"to. Type cd {shlex.quote(str(typed_in))} first."
        )
    quoted = str(folder.absolute()).replace("\\", "\\\\").replace("'", "\\'")
    here = [
        f"hydra.sweep.dir='{quoted}'",
        "hydra.callbacks.sweep.resume=true",
        "hydra.mode=MULTIRUN",
    ]
    command = [word for word in manifest.command[3:] if "***" not in word]
    _keep_store(folder, [*command, *beside])
    return [*command, *beside, *here]


def _keep_store(folder: Path, words: Sequence[str]) -> None:
    """Have the sweep record where it did: its command may have taken the store from the
    environment, which its jobs take it from, too. A URI there is in no file and no command."""
    if any(word.startswith("tracking=") for word in words):
        return
    typed = [word.partition("=")[2] for word in words if override_key(word) == "tracking.uri"]
    uri = resumed_sweep_store(folder, typed[-1].strip("'\"") if typed else None)
    if uri is not None:
        print(sanitize(f"continues the sweep in {redact(uri)}"), flush=True)
        if not typed:
            os.environ["MLFLOW_TRACKING_URI"] = uri


def override_key(override: str) -> str:
    """Without marks and value."""
    return override.lstrip("+~").partition("=")[0]


def resume_command(folder: Path) -> list[str]:
    """Words of the command that goes on with the sweep in a folder."""
    return [*COMMAND, f"{KEY}={os.path.relpath(folder)}"]


def finished_result(folder: Path, overrides: Sequence[str]) -> RunResult | None:
    """What a job came to that need not run again: it finished, or a guard stopped it for its
    numbers, which it would do again.

    Args:
        folder: the job's.
        overrides: of the job; a search may ask for others this time.
    """
    if not (folder / RESULT).exists():
        return None
    result = RunResult.read(folder)
    settled = result.status == "finished" or result.diverged
    return result if settled and same_settings(result.overrides, overrides) else None


def same_settings(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two jobs' overrides ask for the same, wherever they are recorded."""
    return _settings(one) == _settings(other)


def _settings(overrides: Sequence[str]) -> set[str]:
    return {redact(text) for text in overrides if not text.lstrip("+~").startswith(_FREE)}


def _folder(where: str, uri: str | None) -> Path:
    """Of the sweep that a folder, or the id of its parent run or of a job, names."""
    path = Path(where)
    if not path.exists() and "/" not in where:
        path = folder_of_run(where, uri, KEY)
    for folder in (path, path.parent):
        if (folder / MANIFEST).is_file():
            return folder
    raise ConfigError(
        f"{KEY}={where}: no sweep is there. Type {KEY}=last, or the folder of a sweep "
        "(outputs/sweeps/<time>), or the MLflow id of a parent run whose sweep ran on this machine."
    )


def _last() -> Path:
    found = sorted(Path("outputs/sweeps").glob(f"*/{MANIFEST}"), reverse=True)
    for path in found:
        if not Manifest.read(path.parent).finished:
            return path.parent
    raise ConfigError(
        f"{KEY}=last: no sweep in outputs/sweeps is unfinished. Type {KEY}=<folder of a sweep>."
    )
