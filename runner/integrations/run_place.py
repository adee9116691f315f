"""Choose the folder of a run that another trainer trains, alone or in a group of runs.

A group is a sweep whose jobs are these runs, so that `runner report` compares them.
"""

import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from uuid import uuid4

from runner.integrations.options import RecordSettings
from runner.sweeps.manifest import Manifest
from runner.tracking.journal import has_live_owner, latest_journal
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.tracker import RunInfo, Tracker
from runner.utils.errors import ConfigError
from runner.utils.files import os_error_reason
from runner.utils.folder_lock import folder_lock
from runner.utils.formatting import now_ms, relative_path
from runner.utils.layout import MANIFEST
from runner.utils.markup import markdown_code
from runner.utils.terminal import quote_command


@dataclass(frozen=True)
class RunPlace:
    """The folder of a run, and what the run belongs to.

    Attributes:
        folder: of the run; it exists.
        sweep: id of the group that the run is a job of; None for a run alone.
        earlier: journal of the run that is continued; None for a new run.
        group_run: tracker of the group's parent run, which the group's first run opens and closes;
            None for any other run.
    """

    folder: Path
    sweep: str | None = None
    earlier: Path | None = None
    group_run: Tracker | None = None


def process_command() -> list[str]:
    """Return the words of this process's command."""
    # A notebook's kernel and `python -c` have no script that could be typed again.
    return ["python", *sys.argv] if sys.argv and Path(sys.argv[0]).is_file() else ["python"]


def new_tracker(settings: RecordSettings) -> MlflowTracker:
    """Return the tracker of a run.

    Raises:
        ConfigError: no store of MLflow has this URI or can be opened there, or the patience is
            negative.
    """
    tracker = MlflowTracker(settings.tracking_uri, settings.experiment, patience=settings.patience)
    tracker.check_store()
    return tracker


def choose_place(settings: RecordSettings, start_step: int) -> RunPlace:
    """Make the folder of a run, and return it.

    Args:
        settings: of the callback.
        start_step: the step that the training is resumed at; 0 for a new one.

    Raises:
        ConfigError: the folder takes no files, or holds a run that is not resumed.
    """
    try:
        if settings.group is not None:
            return _place_in_group(settings, Path("outputs/groups") / settings.group)
        if settings.folder is None:
            times = (datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f") for _ in count())
            return RunPlace(_make_first(Path("outputs/runs"), times))
        return _place_in_folder(Path(settings.folder), start_step)
    except OSError as error:
        raise ConfigError(
            f"the run's folder takes no files: {error.filename}: {os_error_reason(error)}. Make "
            "room, or type folder=<another folder>."
        ) from error


def _make_first(parent: Path, names: Iterable[str]) -> Path:
    """Make the first of some folders that does not exist; return its path."""
    parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        with suppress(FileExistsError):
            (parent / name).mkdir()
            return parent / name
    raise AssertionError("names do not end")


def _place_in_folder(folder: Path, start_step: int) -> RunPlace:
    """Return the place of a run in a folder of the user's.

    Raises:
        ConfigError: the folder holds a run that is recorded at the moment, or not resumed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = latest_journal(folder)
    if earlier is None:
        return RunPlace(folder)
    if has_live_owner(earlier):
        raise ConfigError(
            f"folder={folder}: another run is being recorded there. Type another folder, or leave "
            "folder= out."
        )
    if not start_step:
        raise ConfigError(
            f"folder={folder} holds a run, and this training starts at step 0. Type another "
            "folder, or resume the trainer from its checkpoint to continue the run."
        )
    return RunPlace(folder, earlier=earlier)


def _place_in_group(settings: RecordSettings, parent: Path) -> RunPlace:
    """Return the place of the next job of a group, which its first job makes."""
    parent.mkdir(parents=True, exist_ok=True)
    group_run = None
    # Two trainers may begin a group at once.
    with folder_lock(parent, wait=True):
        if not (parent / MANIFEST).exists():
            group_run = _open_group(parent, settings)
    folder = _make_first(parent, map(str, count()))
    return RunPlace(folder, Manifest.read(parent).id, group_run=group_run)


def _open_group(parent: Path, settings: RecordSettings) -> Tracker:
    """Write a group's manifest, and open the parent run of its runs; return its tracker."""
    # Finished, because nothing of it can be run again by `sweep.resume`.
    manifest = Manifest(uuid4().hex[:12], process_command(), began_ms=now_ms(), finished=True)
    # First, because it may refuse the store: a manifest would stay without its parent run.
    tracker = new_tracker(settings)
    manifest.write(parent)
    tags = {"sweep_id": manifest.id, "output_dir": str(parent.absolute())}
    tracker.open(RunInfo(parent, {}, tags, settings.group, sweep=manifest.id, role="sweep"))
    words = ["python", "-m", "runner", "report", relative_path(parent)]
    report = markdown_code(quote_command(words))
    tracker.note(f"Runs of other trainers, recorded as one group. Their report:\n\n{report}")
    return tracker
