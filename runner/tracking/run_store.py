"""Find the store in which a resumed run or sweep continues its record, and check it."""

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from runner.config.trusted_targets import folder_config
from runner.core import ConfigError, Invocation, RunSpec, errors, fmt, secrets, signature, torchrun
from runner.core import journals as journal
from runner.tracking.upload_state import JournalStore, UploadState, journal_store
from runner.tracking.uri import resolve_uri, sqlite_path

MLFLOW_TARGET = "runner.tracking.mlflow.MlflowTracker"


NO_TRACKER_TARGET = "runner.core.record.tracker.NoTracker"


_RESUME_KEYS = {"run": "checkpoint.resume", "sweep": "sweep.resume"}


_NO_RUN = "0" * 32
"""An id that no run has: a store that answers a question about it is reachable."""


_SHORT_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Seconds, and retries: a server that does not answer is reported within half a minute."""


def journal_stores(folder: Path) -> list[JournalStore]:
    """Return the stores of a run's journals, the first journal first; empty without a journal."""
    newest = journal.latest_journal(folder)
    if newest is None:
        return []
    stores = [journal_store(path) for path in journal.run_journals(newest)]
    return [store for store in stores if store]


def with_run_store(
    spec: RunSpec, folder: Path, invocation: Invocation, waits: bool, say: Callable[[str], None]
) -> RunSpec:
    """Return the spec of a resumed run with the tracking that the run had.

    That is its store, and where its config is signed the other keys of `tracking`, too. What is
    typed wins.

    Args:
        spec: of the resumed run; its tracking is this command's.
        folder: of the run.
        invocation: what was typed.
        waits: continue without an answer of the store, as a job script does that nobody watches.
        say: prints where the record continues.

    Raises:
        ConfigError: the store cannot be named, does not hold the run, or does not answer.
    """
    if not torchrun.process_rank().is_main:
        return spec  # the first process records for all
    # `tracking` itself is typed where another option was.
    keys = map(fmt.override_key, invocation.overrides)
    typed = [key for key in keys if key.partition(".")[0] == "tracking"]
    tracking = _tracking_settings(spec.tracking, folder, typed)
    target = tracking.get("_target_")
    if target == NO_TRACKER_TARGET:
        say(f"continues the run in {folder} without a record: tracking=none")
    stores = journal_stores(folder) if target == MLFLOW_TARGET else []
    if not stores:
        return replace(spec, tracking=tracking)
    typed_uri = tracking.get("uri") if "tracking.uri" in typed else None
    last, uri = _store_to_continue(stores, typed_uri, "run", waits, say)
    _check_earlier_journals(stores, uri)
    name = f"run {last.run_id}" if last.run_id else f"the run in {folder}"
    say(f"continues {name} in {secrets.redact(uri)}")
    experiment = tracking.get("experiment") or last.experiment
    return replace(spec, tracking={**tracking, "uri": uri, "experiment": experiment})


def resumed_sweep_store(folder: Path, typed: str | None) -> str | None:
    """Return the store of a sweep: its own journal's, else its first job's; None without any.

    Args:
        folder: of the sweep.
        typed: the `tracking.uri` of the command, if any.

    Raises:
        ConfigError: the store cannot be named, does not hold the sweep, or does not answer.
    """
    folders = [folder, *sorted(path.parent for path in folder.glob("*/journal.jsonl"))]
    # A sweep that joined one of another machine has no journal but its jobs'.
    stores = next(filter(None, map(journal_stores, folders)), [])
    if not stores:
        return None
    _, uri = _store_to_continue(stores, typed, "sweep", False, print)
    return uri


def _store_to_continue(
    stores: Sequence[JournalStore],
    typed: str | None,
    what: str,
    waits: bool,
    say: Callable[[str], None],
) -> tuple[JournalStore, str]:
    """Return the newest journal that its store has opened, and the store to continue in.

    Args:
        stores: of the journals.
        typed: the `tracking.uri` of the command, if any.
        what: run or sweep.
        waits: continue without an answer of the store.
        say: prints a warning.

    Raises:
        ConfigError: the store cannot be named, does not hold the run or sweep, or does not answer.
    """
    # The newest of all where no store has opened one.
    last = next((store for store in reversed(stores) if store.run_id), stores[-1])
    uri = _chosen_uri(typed, last, what)
    _check_store(uri, last, waits, say, what)
    return last, uri


def _tracking_settings(
    ours: Mapping[str, Any], folder: Path, typed: Sequence[str]
) -> dict[str, Any]:
    """Return the node `tracking` of the resumed run, but for its store.

    Args:
        ours: the node of this command.
        folder: of the run.
        typed: keys of `tracking` that were typed.
    """
    if "tracking" in typed:
        return dict(ours)
    theirs = _recorded_tracking(folder)
    if not isinstance(theirs, dict) or (typed and theirs.get("_target_") == NO_TRACKER_TARGET):
        return dict(ours)
    # The config hides secrets as ***: such a value is this command's to give.
    settings = {key: value for key, value in theirs.items() if "***" not in str(value)}
    if settings.get("_target_") == MLFLOW_TARGET:
        # The store comes from the journal, which knows it by absolute path.
        settings = {**ours, **settings, "uri": ours.get("uri")}
    for key in typed:
        name = key.split(".")[1]
        value = ours.get(name)
        earlier = settings.get(name)
        if isinstance(value, Mapping) and isinstance(earlier, Mapping):
            settings[name] = {**earlier, **value}
        else:
            settings[name] = value
    return settings


def _recorded_tracking(folder: Path) -> object:
    """Return the node `tracking` of a run's config; None where it is not believed.

    Anybody may have written a config without this user's signature. It is believed only that a run
    has no record, which does no harm.
    """
    try:
        config = folder_config(folder, _RESUME_KEYS["run"])
    except ConfigError:
        return None
    node = config.values.get("tracking") if config else None
    if config is None or config.is_signed or not isinstance(node, dict):
        return node
    has_none = node.get("_target_") == NO_TRACKER_TARGET
    has_none = has_none and journal.latest_journal(folder) is None
    return {"_target_": NO_TRACKER_TARGET} if has_none else None


def _chosen_uri(typed: str | None, last: JournalStore, what: str) -> str:
    """Return the store to continue in: the typed one, else the journal's.

    Args:
        typed: the `tracking.uri` of the command, if any.
        last: the store of the newest journal.
        what: run or sweep.

    Raises:
        ConfigError: the journal's store is neither this command's own nor signed by this user.
    """
    if typed:
        return resolve_uri(typed)
    default = resolve_uri(None)
    if _is_same_store(default, last.uri):
        return default  # its credentials are today's, the journal's may have changed since
    if last.signed_by_user:
        return last.uri
    raise ConfigError(
        f"{_RESUME_KEYS[what]}: the {what} is recorded in {secrets.redact(last.uri)}, as its "
        f"journal says, which is not signed with your key ({signature.describe_key_location()}). "
        f"If you trust it, type tracking.uri={secrets.redact(last.uri)} to continue there, or "
        "tracking=none."
    )


def _check_store(
    uri: str, last: JournalStore, waits: bool, say: Callable[[str], None], what: str
) -> None:
    """Raise ConfigError where a store does not hold the run, or does not answer.

    With `waits`, a store that does not answer is a warning, and the records wait in the journal.
    """
    key = _RESUME_KEYS[what]
    try:
        problem = _run_problem(uri, last.run_id)
    except errors.TrackingError as error:
        if waits:
            say(f"warning: {error} Training continues; its records are kept in the run's folder.")
            return
        raise ConfigError(
            f"{key}: the {what} is recorded in {secrets.redact(uri)}, and {error} Start the "
            "store, type tracking.uri=<its address now>, or tracking=none to continue without a "
            "record."
        ) from error
    if not problem:
        return
    if _is_same_store(uri, last.uri):
        other = f"Type tracking.uri=<the store that holds it>, if the {what} was moved there"
    else:
        other = f"Leave tracking.uri out to continue in {secrets.redact(last.uri)}"
    if what == "run":
        # Only a run can do without a record, or be begun anew from a checkpoint.
        other += ", tracking=none for no record, or init.weights=<its checkpoint> for a new run"
    raise ConfigError(f"{key}: {problem} {other}.")


def _check_earlier_journals(stores: Sequence[JournalStore], uri: str) -> None:
    """Have what earlier journals have not sent yet sent to the run's store.

    A journal that its store never opened is sent to the run's. One that its store has begun stays
    with that store, because a journal is uploaded to one store.

    Raises:
        ConfigError: the store of such a journal is not signed by this user.
    """
    for store in stores:
        if store.fully_uploaded or _is_same_store(store.uri, uri):
            continue
        if store.run_id is None:
            # Without the lock a writer is at work on the journal, which then stays where it is.
            progress = UploadState(store.path)
            # Nothing of a journal is sent whose state cannot be written.
            with suppress(OSError):
                if progress.acquire_lock():
                    progress.change_store(uri, store.experiment)
            progress.release_lock()
        elif not store.signed_by_user:
            raise ConfigError(
                f"{_RESUME_KEYS['run']}: {store.path} is to be sent to "
                f"{secrets.redact(store.uri)}, and is not signed with your key "
                f"({signature.describe_key_location()}). Delete it, or type "
                "init.weights=<its checkpoint> to start a new run from its weights."
            )


def _is_same_store(one: str, other: str) -> bool:
    """Return whether two URIs name one store, whatever their credentials."""
    file = sqlite_path(one)
    other_file = sqlite_path(other)
    if file and other_file:
        # One file may have several URIs: relative, absolute or through a link.
        return file.resolve() == other_file.resolve()
    return secrets.redact(one) == secrets.redact(other)


def _run_problem(uri: str, run_id: str | None) -> str:
    """Return why a store does not have a run; without an id, ask only whether the store answers.

    Raises:
        TrackingError: it does not answer.
    """
    # A database is read by itself: importing mlflow takes seconds before anything is trained.
    database = sqlite_path(uri)
    if database is not None:
        stage = _lifecycle_stage(database, run_id) if run_id else None
    else:
        from runner.tracking.reader import Reader

        # MLflow's client soon stops asking a silent server. What the user has set wins.
        added = {key: value for key, value in _SHORT_TIMEOUTS.items() if key not in os.environ}
        os.environ.update(added)
        try:
            run = Reader(uri).run(run_id or _NO_RUN)
            stage = run.stage if run else None
        finally:
            for key in added:
                os.environ.pop(key, None)
    if run_id is None:
        return ""
    if stage is None:
        return f"{secrets.redact(uri)} does not hold its run {run_id}."
    if stage == "deleted":
        return (
            f"its run {run_id} was deleted in {secrets.redact(uri)}. To have it back: "
            f"MLFLOW_TRACKING_URI={secrets.redact(uri)} mlflow runs restore --run-id {run_id}."
        )
    return ""


def _lifecycle_stage(database: Path, run_id: str) -> str | None:
    """Return a run's lifecycle stage in MLflow's table, read without importing mlflow."""
    if not database.is_file():
        return None
    query = "select lifecycle_stage from runs where run_uuid = ?"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as file:
            row = file.execute(query, (run_id,)).fetchone()
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise errors.TrackingError(f"{database} is locked.") from error
        return None  # a database without MLflow's tables holds no run
    except sqlite3.DatabaseError as error:
        raise errors.TrackingError(f"{database} cannot be read: {error}.") from error
    return str(row[0]) if row else None
