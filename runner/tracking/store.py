"""Calls to one MLflow store. Imported by the writer process only: it imports mlflow."""

import fcntl
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from mlflow.utils import validation

from runner.tracking.uri import sqlite_path

Point = tuple[str, float, int, int]
"""(name, value, Unix time in milliseconds, step)."""

MAX_POINTS = validation.MAX_METRICS_PER_BATCH
# The prefix keeps it out of the tags that MLflow's pages show.
JOURNAL_TAG = "mlflow.runner.journal"

# Saying it again would get the same answer. All else is retried: a server that is away answers
# INTERNAL_ERROR here, a locked database TEMPORARILY_UNAVAILABLE.
_REFUSALS = {
    "INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "NOT_FOUND",
    "PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "ENDPOINT_NOT_FOUND",
    "FEATURE_DISABLED", "NOT_IMPLEMENTED",
}  # fmt: skip


class RefusedError(Exception):
    """The store will not take this, however often it is asked."""


class UnreachableError(Exception):
    """The store cannot answer now. `doubtful` if the answer may also be a refusal: a server whose
    connection pool is used up answers BAD_REQUEST."""

    def __init__(self, message: str, doubtful: bool = False) -> None:
        super().__init__(message)
        self.doubtful = doubtful


class Store:
    """One tracking store, at an absolute URI."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._experiments: dict[str, str] = {}
        database = sqlite_path(uri)
        with _told_apart(), _one_at_a_time(database):
            if database and not database.exists():
                _create(database, uri)
            self._client = MlflowClient(tracking_uri=uri)

    def experiment(self, name: str) -> str:
        """The id of the experiment, which is created if need be.

        A deleted one is refused: restoring it would also bring back the runs that someone meant
        to be rid of, and MLflow has no second experiment of the same name.
        """
        if name not in self._experiments:
            with _told_apart():
                self._experiments[name] = self._get_or_create(name)
        return self._experiments[name]

    def _get_or_create(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            database = sqlite_path(self.uri)
            location = str(database.parent / "mlartifacts") if database else None
            try:
                return self._client.create_experiment(name, artifact_location=location)
            except MlflowException as error:
                found = self._client.get_experiment_by_name(name)  # another process was faster
                if found is None:
                    raise error
        if found.lifecycle_stage == "deleted":
            raise RefusedError(
                f"the experiment {name!r} (id {found.experiment_id}) was deleted there. Restore it "
                f"with MLFLOW_TRACKING_URI={self.uri} mlflow experiments restore --experiment-id "
                f"{found.experiment_id}, or type tracking.experiment=<another name>"
            )
        return found.experiment_id

    def find_run(self, experiment_id: str, tags: Mapping[str, str]) -> str | None:
        """The newest run that carries all these tags."""
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        with _told_apart():
            runs = self._client.search_runs([experiment_id], query, max_results=1)
        return runs[0].info.run_id if runs else None

    def create_run(
        self, experiment_id: str, name: str | None, time_ms: int, tags: Mapping[str, str]
    ) -> str:
        """Opens a run; what MLFLOW_RUN_ID says does not matter here."""
        with _told_apart():
            legal = {tag.key: tag.value for tag in _tags(tags)}
            run = self._client.create_run(experiment_id, time_ms, legal, run_name=name)
        return run.info.run_id

    def log_params(self, run_id: str, values: Mapping[str, str]) -> None:
        """Sends all parameters, in as many calls as the limits ask for."""
        named = _distinct(values)
        params = [
            Param(key, cut(text, validation.MAX_PARAM_VAL_LENGTH)) for key, text in named.items()
        ]
        for some in _chunks(params, validation.MAX_PARAMS_TAGS_PER_BATCH):
            with _told_apart():
                self._client.log_batch(run_id, params=some, synchronous=True)

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Sends points under their own times and steps; sending them again changes nothing."""
        metrics = [Metric(legal_name(key), value, time, step) for key, value, time, step in points]
        for some in _chunks(metrics, MAX_POINTS):
            with _told_apart():
                self._client.log_batch(run_id, metrics=some, synchronous=True)

    def log_tags(self, run_id: str, values: Mapping[str, str]) -> None:
        for some in _chunks(_tags(values), validation.MAX_PARAMS_TAGS_PER_BATCH):
            with _told_apart():
                self._client.log_batch(run_id, tags=some, synchronous=True)

    def log_artifact(self, run_id: str, path: Path, folder: str) -> None:
        """Stores a file under its name, or what a folder holds."""
        if not path.exists():
            raise RefusedError(f"the artifact {path} is not there any more")
        send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        with _told_apart():
            send(run_id, str(path), folder or None)

    def end_run(self, run_id: str, status: str, time_ms: int) -> None:
        with _told_apart():
            self._client.set_terminated(run_id, status, time_ms)


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, with a mark where something was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


@lru_cache(maxsize=10_000)
def legal_name(name: str) -> str:
    """The name with each character that this MLflow refuses replaced by an underscore."""
    if not _legal(name):
        name = "".join(char if _legal(f"a{char}a") else "_" for char in name)
    if validation.path_not_unique(name):  # a//b, ./a, /a: names may become files
        name = re.sub(r"^(\.*/)+", "", posixpath.normpath(name)).strip(".") or "_"
    return name[: validation.MAX_ENTITY_KEY_LENGTH]


def _legal(name: str) -> bool:
    return bool(validation.validate_param_and_metric_name(name))


def _distinct(values: Mapping[str, str]) -> dict[str, str]:
    """Legal names, kept apart where two become equal: a parameter cannot be set twice."""
    named: dict[str, str] = {}
    for key, text in values.items():
        legal = base = legal_name(key)
        number = 2
        while legal in named:
            legal, number = f"{base[:240]}_{number}", number + 1
        named[legal] = text
    return named


def _tags(values: Mapping[str, str]) -> list[RunTag]:
    limit = validation.MAX_TAG_VAL_LENGTH
    return [RunTag(legal_name(key), cut(text, limit)) for key, text in values.items()]


def _chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def _create(database: Path, uri: str) -> None:
    """Makes a SQLite store under another name first: MLflow needs seconds for its tables, and
    cannot open what it left behind when it is killed meanwhile."""
    draft = database.with_name(database.name + ".new")
    draft.unlink(missing_ok=True)
    MlflowClient(tracking_uri=uri.replace(str(database), str(draft)))
    draft.replace(database)


@contextmanager
def _told_apart() -> Iterator[None]:
    """Turns whatever a client call raises into RefusedError or UnreachableError."""
    try:
        yield
    except (RefusedError, UnreachableError):
        raise
    except MlflowException as error:
        if error.error_code in _REFUSALS:
            raise RefusedError(str(error)) from error
        raise UnreachableError(str(error), error.error_code == "BAD_REQUEST") from error
    except ImportError as error:
        raise RefusedError(f"a package is missing for it: {error}") from error
    except Exception as error:
        raise UnreachableError(f"{type(error).__name__}: {error}", doubtful=True) from error


@contextmanager
def _one_at_a_time(database: Path | None) -> Iterator[None]:
    """Holds a lock beside a SQLite file: MLflow's creation of its tables is not safe against
    itself, and jobs of a sweep start together."""
    if database is None:
        yield
        return
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = database.with_name(database.name + ".lock").open("w")
    except OSError as error:
        raise RefusedError(f"{database.parent} cannot be written: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
