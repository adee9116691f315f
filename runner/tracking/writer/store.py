"""Calls to one MLflow store. Imported by the writer process only: it imports mlflow."""

import fcntl
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.db import utils as database_utils
from mlflow.tracking import MlflowClient
from mlflow.tracking.context.default_context import DefaultRunContext
from mlflow.tracking.context.git_context import GitRunContext
from mlflow.tracking.context.registry import resolve_tags
from mlflow.utils import validation

from runner.tracking import dashboard_views
from runner.tracking.uri import is_database, sqlite_path
from runner.tracking.writer import experiments
from runner.tracking.writer.dataset_inputs import log_inputs
from runner.tracking.writer.logged_model import log_model
from runner.tracking.writer.names import distinct_names, legal_name, truncate
from runner.tracking.writer.store_errors import (
    REFUSALS,
    RefusedError,
    UnreachableError,
    classify_errors,
)
from runner.tracking.writer.system_metrics import PREFIX
from runner.utils.secrets import redact

Point = tuple[str, float, int, int]
"""(name, value, Unix time in milliseconds, step)."""

MAX_POINTS = validation.MAX_METRICS_PER_BATCH
# The prefix keeps it out of the tags that MLflow's pages show.
JOURNAL_TAG = "mlflow.runner.journal"

# MLflow tries ten times to open a database, for 100 s in all; we try again ourselves, sooner.
database_utils.MAX_RETRY_COUNT = 1

# Contexts that would tell of the writer itself. MLflow's annotation wants instances, and asks for
# classes.
_OF_THIS_PROCESS: list[Any] = [DefaultRunContext, GitRunContext]


class Store:
    """One tracking store, at an absolute URI."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._experiments: dict[str, str] = {}
        self._version, self._no_dashboard = "", False
        self.notices: list[str] = []
        """What the user should be told; whoever tells it empties the list."""
        database = sqlite_path(uri)
        with classify_errors(), _one_at_a_time(database):
            if database and not database.exists():
                _create(database, uri)
            self._client = MlflowClient(tracking_uri=uri)

    def experiment(self, name: str, known_id: str | None = None) -> str:
        """The id of the experiment, which is created if need be; one that is known by its id must
        be there. Where it was deleted, the run goes beside it, see experiments.active."""
        key = f"id {known_id}" if known_id else f"name {name}"
        if key not in self._experiments:
            with classify_errors():
                found = self._known(known_id) if known_id else self._get_or_create(name)
            self._experiments[key] = found
        return self._experiments[key]

    def _known(self, experiment_id: str) -> str:
        try:
            found = self._client.get_experiment(experiment_id)
        except MlflowException as error:
            if error.error_code not in REFUSALS:
                raise
            raise RefusedError(
                f"there is no experiment with MLFLOW_EXPERIMENT_ID={experiment_id}. Unset it, or "
                "type tracking.experiment=<name>"
            ) from error
        if found.lifecycle_stage == "deleted":
            raise RefusedError(
                f"the experiment {found.name!r} (MLFLOW_EXPERIMENT_ID={experiment_id}) was deleted "
                f"there. Restore it with {self._restoring(found)}, or type "
                "tracking.experiment=<another name>"
            )
        return experiment_id

    def _get_or_create(self, name: str) -> str:
        found, free = experiments.active_experiment(self._client, name)
        if free != name:
            gone = self._client.get_experiment_by_name(name)
            self.notices.append(
                f"The experiment {name!r} was deleted there: runs go to {free!r}. To have it back: "
                f"{self._restoring(gone)}"
            )
        if found is not None:
            return found.experiment_id
        try:
            return self._client.create_experiment(free, artifact_location=self._artifacts())
        except MlflowException as error:
            found, _ = experiments.active_experiment(
                self._client, name
            )  # another process was faster
            if found is None:
                raise error
            return found.experiment_id

    def _restoring(self, found: Any) -> str:
        uri = redact(self.uri)
        return (
            f"MLFLOW_TRACKING_URI={uri} mlflow experiments restore "
            f"--experiment-id {found.experiment_id}"
        )

    def _artifacts(self) -> str | None:
        """Where artifacts lie: beside a SQLite file, here for another database; a server knows."""
        database = sqlite_path(self.uri)
        if database is None and not is_database(self.uri):
            return None
        return str((database.parent if database else Path.cwd() / "outputs") / "mlartifacts")

    def find_run(self, experiment_id: str, tags: Mapping[str, str]) -> str | None:
        """The newest run that carries all these tags."""
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        with classify_errors():
            runs = self._client.search_runs([experiment_id], query, max_results=1)
        return runs[0].info.run_id if runs else None

    def run_name(self, run_id: str) -> str:
        with classify_errors():
            return str(self._client.get_run(run_id).info.run_name)

    def create_run(
        self, experiment_id: str, name: str | None, time_ms: int, tags: Mapping[str, str]
    ) -> str:
        """Opens a run, whatever MLFLOW_RUN_ID says. Tags of MLFLOW_RUN_CONTEXT and of plugins that
        know a CI system come with it; its own win."""
        with classify_errors():
            around = resolve_tags(ignore=_OF_THIS_PROCESS)
            every = {**{str(key): str(value) for key, value in around.items()}, **tags}
            legal = {tag.key: tag.value for tag in _tags(every)}
            name = redact(name) if name else None
            run = self._client.create_run(experiment_id, time_ms, legal, run_name=name)
        return run.info.run_id

    def reopen(
        self,
        run_id: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        step: int,
        changes: Mapping[str, str],
    ) -> None:
        """Has an ended run go on from a step. Parameters cannot be changed in MLflow: the tags
        `changes` and `resumed_at_step` say what is no longer true of them, and since when."""
        with classify_errors():
            run = self._client.get_run(run_id)
            self._client.update_run(run_id, status="RUNNING")
            if "error" in (known := run.data.tags):
                self._client.delete_tag(run_id, "error")
        told = [f"{key}: {change} (from step {step})" for key, change in changes.items()]
        steps = ", ".join(filter(None, [known.get("resumed_at_step"), str(step)]))
        lines = "\n".join(filter(None, [known.get("changes"), *told]))
        self.log_params(run_id, params, known=run.data.params)
        changed = {"changes": lines} if lines else {}
        since = {"resumed_at_step": steps} if step else {}
        self.log_tags(run_id, {**tags, **changed, **since})

    def samples(self, run_id: str) -> int:
        """How many samples of the machine's load a run has."""
        with classify_errors():
            values = self._client.get_run(run_id).data.metrics
            key = next((key for key in values if key.startswith(PREFIX)), None)
            points = self._client.get_metric_history(run_id, key) if key else []
        return max((point.step for point in points), default=0)

    def log_params(
        self, run_id: str, values: Mapping[str, str], known: Collection[str] = ()
    ) -> None:
        """Sends what is not known there yet, in as many calls as the limits ask for."""
        named = {key: text for key, text in distinct_names(values).items() if key not in known}
        params = [
            Param(key, truncate(redact(text), validation.MAX_PARAM_VAL_LENGTH))
            for key, text in named.items()
        ]
        for some in _chunks(params, validation.MAX_PARAMS_TAGS_PER_BATCH):
            with classify_errors():
                self._client.log_batch(run_id, params=some, synchronous=True)

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Sends points under their own times and steps; sending them again changes nothing."""
        metrics = [Metric(legal_name(key), value, time, step) for key, value, time, step in points]
        for some in _chunks(metrics, MAX_POINTS):
            with classify_errors():
                self._client.log_batch(run_id, metrics=some, synchronous=True)

    def log_tags(self, run_id: str, values: Mapping[str, str]) -> None:
        for some in _chunks(_tags(values), validation.MAX_PARAMS_TAGS_PER_BATCH):
            with classify_errors():
                self._client.log_batch(run_id, tags=some, synchronous=True)

    def log_artifact(self, run_id: str, path: Path, folder: str) -> None:
        """Stores a file under its name, or what a folder holds."""
        if not path.exists():
            raise RefusedError(f"the artifact {path} is not there any more")
        send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        with classify_errors():
            send(run_id, str(path), folder or None)

    def log_inputs(self, run_id: str, datasets: Sequence[Mapping[str, Any]]) -> None:
        with classify_errors():
            log_inputs(self._client, run_id, datasets)

    def log_model(
        self, run_id: str, folder: Path, facts: Mapping[str, Any], register: str | None
    ) -> None:
        """Stores an exported model with its run, and as a version in the registry if named."""
        with classify_errors():
            log_model(self.uri, run_id, folder, facts, "model", register, facts["step"])

    def dashboard(
        self, experiment_id: str, metrics: Collection[str], sweep: dashboard_views.SweepView | None
    ) -> str | None:
        """Keeps the dashboards, see views.ensure; None, and one notice, where there can be none."""
        path = None
        try:
            with classify_errors():
                self._version = self._version or dashboard_views.server_version(self.uri)
                path = dashboard_views.ensure_dashboard(
                    self._client, self._version, experiment_id, metrics, sweep
                )
            reason = dashboard_views.too_old_reason(self.uri, self._version)
        except RefusedError as error:
            reason = str(error)
        except UnreachableError:
            return None  # another run will try
        if path is None and not self._no_dashboard:
            self._no_dashboard = True
            self.notices.append(f"There is no dashboard: {redact(reason)}")
        return path

    def end_run(self, run_id: str, status: str, time_ms: int) -> None:
        with classify_errors():
            self._client.set_terminated(run_id, status, time_ms)


def _tags(values: Mapping[str, str]) -> list[RunTag]:
    limit = validation.MAX_TAG_VAL_LENGTH
    return [RunTag(legal_name(key), truncate(redact(text), limit)) for key, text in values.items()]


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
