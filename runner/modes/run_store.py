"""Find the store of a run that is resumed, before anything is trained: its journal names it."""

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml

from runner.config.invocation import Invocation
from runner.config.renamed import current_path
from runner.config.schema import RunSpec
from runner.config.signature import describe_key_location, is_signed
from runner.distributed import torchrun
from runner.modes import artifacts
from runner.tracking import journal
from runner.tracking.upload_state import SIGNED, UploadState
from runner.tracking.uri import resolve_uri, sqlite_path
from runner.utils.errors import ConfigError, TrackingError
from runner.utils.files import read_text
from runner.utils.layout import CONFIG
from runner.utils.secrets import redact

MLFLOW = "runner.tracking.mlflow.MlflowTracker"
NONE = "runner.tracking.tracker.NoTracker"
KEY = "checkpoint.resume"
_NO_RUN = "0" * 32
_BRIEF = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""So that a server that does not answer is told of within half a minute."""


class JournalStore(NamedTuple):
    """Where a journal goes.

    Attributes:
        path: of the journal.
        uri: of its store, absolute, with what credentials it was given.
        run_id: of its run there; None where the store has never opened it.
        experiment: name of the run's experiment.
        own: the URI is signed by this user.
        done: all of it is stored.
    """

    path: Path
    uri: str
    run_id: str | None
    experiment: str | None
    own: bool
    done: bool


class JournalMissing(ConfigError):
    """A store answers, and does not hold the run."""


def journal_stores(folder: Path) -> list[JournalStore]:
    """Return the stores of a run's journals, the first journal first; empty without a journal."""
    newest = journal.latest_journal(folder)
    paths = journal.run_journals(newest) if newest else []
    found = (_store_of(path) for path in paths)
    return [store for store in found if store]


def resumed_store(
    spec: RunSpec, folder: Path, origin: Invocation, waits: bool, say: Callable[[str], None]
) -> RunSpec:
    """Return the spec of a resumed run with the tracking that the run had: its store, and where
    its config is signed the other keys of `tracking`, too. What is typed wins.

    Args:
        spec: of the resumed run; its tracking is this command's.
        folder: of the run.
        origin: what was typed.
        waits: nobody is there to type: a store that does not answer is no reason to stop.
        say: told where the record continues.

    Raises:
        ConfigError: the store cannot be named, does not hold the run, or does not answer.
    """
    if not torchrun.process_rank().is_main:
        return spec
    typed = _typed(origin)
    tracking = _settings(spec.tracking, folder, typed)
    if tracking.get("_target_") == NONE:
        say(f"continues the run in {folder} without a record: tracking=none")
    stores = journal_stores(folder) if tracking.get("_target_") == MLFLOW else []
    if not stores:
        return replace(spec, tracking=tracking)
    last = next((store for store in reversed(stores) if store.run_id), stores[-1])
    uri = _chosen(tracking.get("uri") if "tracking.uri" in typed else None, last)
    _check_store(uri, last, waits, say)
    _check_earlier(stores, uri)
    name = f"run {last.run_id}" if last.run_id else f"the run in {folder}"
    say(f"continues {name} in {redact(uri)}")
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
    last = next((store for store in reversed(stores) if store.run_id), stores[-1])
    uri = _chosen(typed, last, "sweep.resume", "sweep")
    _check_store(uri, last, False, print, "sweep.resume", "sweep")
    return uri


def _store_of(path: Path) -> JournalStore | None:
    start = next((record for record, _ in journal.read_records(path)), {})
    progress = UploadState(path)
    progress.peek()
    moved = isinstance(progress.uri, str)
    uri, signature = start.get("uri"), start.get("signature")
    if moved:
        uri, signature = progress.uri, progress.signature
    if not isinstance(uri, str) or not uri:
        return None
    run_id, experiment = progress.run_id, progress.experiment or start.get("experiment")
    return JournalStore(
        path,
        uri,
        run_id if isinstance(run_id, str) else None,
        experiment if isinstance(experiment, str) else None,
        is_signed(SIGNED, uri, signature),
        bool(progress.done),
    )


def _typed(origin: Invocation) -> list[str]:
    """Keys of `tracking` that were typed; `tracking` itself where another option was."""
    heads = (text.lstrip("+~").partition("=")[0] for text in origin.overrides)
    return [head for head in heads if head.partition(".")[0] == "tracking"]


def _settings(ours: Mapping[str, Any], folder: Path, typed: Sequence[str]) -> dict[str, Any]:
    """Return the node `tracking` of the resumed run, but for its store."""
    if "tracking" in typed:
        return dict(ours)
    signed = artifacts.signed_config(folder)
    kept = signed.get("tracking") if signed else None
    if kept is None and journal.latest_journal(folder) is None and _had_none(folder):
        kept = {"_target_": NONE}
    if not isinstance(kept, dict) or (typed and kept.get("_target_") == NONE):
        return dict(ours)
    found = {key: value for key, value in kept.items() if "***" not in str(value)}
    if found.get("_target_") == MLFLOW:
        found = {**ours, **found, "uri": ours.get("uri")}
    for key in typed:
        name = key.split(".")[1]
        value, own = ours.get(name), found.get(name)
        both = isinstance(value, Mapping) and isinstance(own, Mapping)
        found[name] = {**own, **value} if both else value  # type: ignore[dict-item]
    return found


def _had_none(folder: Path) -> bool:
    """Whether a config that anybody may have written says tracking=none, which does no harm."""
    try:
        content = yaml.safe_load(read_text(folder / CONFIG))
        return bool(current_path(content["tracking"]["_target_"]) == NONE)
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError, RecursionError):
        return False


def _chosen(typed: str | None, last: JournalStore, key: str = KEY, what: str = "run") -> str:
    """Return the store to continue in: the typed one, else the journal's."""
    here = Path.cwd()
    if typed:
        return resolve_uri(typed, os.environ, here)
    default = resolve_uri(None, os.environ, here)
    if _same(default, last.uri):
        return default  # with the credentials of now
    if last.own:
        return last.uri
    raise ConfigError(
        f"{key}: the {what} is recorded in {redact(last.uri)}, as its journal says, which is not "
        f"signed with your key ({describe_key_location()}). If you trust it, type "
        f"tracking.uri={redact(last.uri)} to continue there, or tracking=none."
    )


def _check_store(
    uri: str,
    last: JournalStore,
    waits: bool,
    say: Callable[[str], None],
    key: str = KEY,
    what: str = "run",
) -> None:
    """Raise ConfigError where a store does not hold the run, or does not answer although it was
    asked by name; a job script continues, and its records wait in the journal."""
    same = _same(uri, last.uri)
    try:
        _look(uri, last.run_id, same)
    except JournalMissing as error:
        other = (
            f"Leave tracking.uri out to continue in {redact(last.uri)}"
            if not same
            else f"Type tracking.uri=<the store that holds it>, if the {what} was moved there"
        )
        new = " or init.weights=<its checkpoint> for a new run" if what == "run" else ""
        raise ConfigError(
            f"{key}: {error} {other}, tracking=none to continue without a record,{new}."
            if new
            else f"{key}: {error} {other}."
        ) from error
    except TrackingError as error:
        if waits:
            say(f"warning: {error} Training continues; its records are kept in the run's folder.")
            return
        raise ConfigError(
            f"{key}: the {what} is recorded in {redact(uri)}, and {error} Start the store, type "
            "tracking.uri=<its address now>, or tracking=none to continue without a record."
        ) from error


def _check_earlier(stores: Sequence[JournalStore], uri: str) -> None:
    """Send what earlier journals have not sent yet to the same store, or to one's own."""
    for store in stores:
        if store.done or _same(store.uri, uri):
            continue
        if store.run_id is None:
            _move(store, uri)
        elif not store.own:
            raise ConfigError(
                f"{KEY}: {store.path} is to be sent to {redact(store.uri)}, and is not signed with "
                f"your key ({describe_key_location()}). Delete it, or type "
                "init.weights=<its checkpoint> to start a new run from its weights."
            )


def _move(store: JournalStore, uri: str) -> None:
    """Have a journal sent to the run's own store that another one has refused."""
    progress = UploadState(store.path)
    if progress.claim():
        try:
            progress.move(uri, store.experiment)
        finally:
            progress.release()


def _same(one: str, other: str) -> bool:
    """Whether two URIs name one store, whatever their credentials."""
    files = sqlite_path(one), sqlite_path(other)
    if files[0] and files[1]:
        return files[0].resolve() == files[1].resolve()
    return redact(one) == redact(other)


def _look(uri: str, run_id: str | None, same: bool) -> None:
    """Ask a store for a run, or where there is none yet for anything.

    Raises:
        Missing: it has no such run, or has it as deleted.
        TrackingError: it does not answer.
    """
    database = sqlite_path(uri)
    if database is not None:
        if run_id is not None:
            _check_stage(_stage_in(database, run_id), uri, run_id)
        return
    from runner.tracking.reader import Reader

    with _briefly():
        stage = Reader(uri).stage(run_id or _NO_RUN)
    if run_id is not None:
        _check_stage(stage, uri, run_id)


def _check_stage(stage: str | None, uri: str, run_id: str) -> None:
    if stage is None:
        raise JournalMissing(f"{redact(uri)} does not hold its run {run_id}.")
    if stage == "deleted":
        raise JournalMissing(
            f"its run {run_id} was deleted in {redact(uri)}. To have it back: "
            f"MLFLOW_TRACKING_URI={redact(uri)} mlflow runs restore --run-id {run_id}."
        )


def _stage_in(database: Path, run_id: str) -> str | None:
    """Return a run's lifecycle stage in MLflow's table, read without importing mlflow."""
    if not database.is_file():
        return None
    query = "select lifecycle_stage from runs where run_uuid = ?"
    try:
        with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as file:
            row = file.execute(query, (run_id,)).fetchone()
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise TrackingError(f"{database} is locked.") from error
        return None
    except sqlite3.DatabaseError as error:
        raise TrackingError(f"{database} cannot be read: {error}.") from error
    return str(row[0]) if row else None


@contextmanager
def _briefly() -> Iterator[None]:
    """Context in which MLflow's client gives a silent server up soon."""
    added = {key: value for key, value in _BRIEF.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
