"""Find the checkpoint, run folder or sweep folder that a path, an MLflow id or `last` refers to."""

from pathlib import Path

from runner.core import ConfigError, LoadedCheckpoint, checkpoint_file, layout


def resolve_path(where: str, tracking_uri: str | None, key: str) -> Path:
    """Return the path that a text names: itself, or the output folder of an MLflow run.

    Args:
        where: a path, or the id of an MLflow run.
        tracking_uri: the store that ids are looked up in; None takes the default one.
        key: the command's key that has this value, for messages.

    Raises:
        ConfigError: there is no such path, and the store knows no run of this id.
    """
    path = Path(where)
    # An id holds no slash. A path that is missing is returned: the caller knows what to say of it.
    if path.exists() or "/" in where or "\\" in where:
        return path
    # A run that names no id does not read the store.
    from runner.tracking.reader import folder_of_run

    return folder_of_run(where, tracking_uri, key)


def find_checkpoint(where: str, tracking_uri: str | None = None, key: str = "checkpoint") -> Path:
    """Return the newest checkpoint that a file, a run's folder or an MLflow run id names.

    Args:
        where: the file, folder or id.
        tracking_uri: the store that an id is looked up in.
        key: the command's key that has this value, for messages.

    Raises:
        ConfigError: there is none.
    """
    return _find_checkpoints(where, tracking_uri, key)[0]


def load_newest(
    where: str, tracking_uri: str | None, key: str, notes: list[str]
) -> LoadedCheckpoint:
    """Load the newest undamaged checkpoint that a file, a run's folder or an MLflow run id names.

    Args:
        where: the file, folder or id.
        tracking_uri: the store that an id is looked up in.
        key: the command's key that has this value, for messages.
        notes: gets a line for each file that was skipped.

    Raises:
        ConfigError: there is none.
    """
    problem = ConfigError("")
    for path in _find_checkpoints(where, tracking_uri, key):
        try:
            return LoadedCheckpoint(path, checkpoint_file.load(path))
        except ConfigError as error:
            problem = error
            notes.append(f"skipped {path}: it is damaged")
    raise problem


def _find_checkpoints(where: str, tracking_uri: str | None, key: str) -> list[Path]:
    """Return the checkpoints that a text names, newest first.

    Raises:
        ConfigError: there are none.
    """
    try:
        if Path(where).is_file():
            return [Path(where)]
        path = resolve_path(where, tracking_uri, key)
    except OSError as error:  # a name that is too long, a loop of links
        raise ConfigError(f"{key}={where}: {error.strerror}. Type a file or folder.") from error
    checkpoints = checkpoint_file.checkpoints_of_run(path) or checkpoint_file.checkpoints_in(path)
    if not checkpoints:
        other = ""
        if key == "init.weights":
            other = " Other weights: .safetensors, .pt, .pth, .bin or a folder of save_pretrained."
        elif any(path.glob("*.safetensors")):
            other = f" It holds weights alone: init.weights={where} starts a run from them."
        raise ConfigError(
            f"{key}={where}: no checkpoint is there. Give a .pt file, the folder of a run "
            f"(outputs/runs/<time>), or the id of an MLflow run of this machine.{other}"
        )
    return checkpoints[::-1]


def newest_runs(folder: Path) -> list[Path]:
    """Return the folders of the runs that made a checkpoint folder, by name, newest first."""
    runs = [path.parent for path in folder.glob("*/checkpoints")]
    return sorted(runs, key=lambda path: path.name, reverse=True)


def newest_sweeps(folder: Path = Path("outputs/sweeps")) -> list[Path]:
    """Return the folders of sweeps that hold a manifest, newest first."""
    # A sweep's folder is named by its start time.
    return [path.parent for path in sorted(folder.glob(f"*/{layout.MANIFEST}"), reverse=True)]


def find_sweep(where: str, tracking_uri: str | None, key: str) -> Path | None:
    """Return the sweep's folder that a folder, or the id of a parent run or of a job, names.

    Args:
        where: the sweep's folder, a job's folder, or an MLflow run id.
        tracking_uri: the store that an id is looked up in.
        key: the command's key that has this value, for messages.

    Raises:
        ConfigError: it is no path here, and no run's id.
    """
    path = resolve_path(where, tracking_uri, key)
    # A job's folder is in its sweep's.
    for folder in (path, path.parent):
        if (folder / layout.MANIFEST).is_file():
            return folder
    return None
