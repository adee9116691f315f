"""Read an MLflow store: runs, metrics and artifacts, for reports, resume and the pages of the UI.

A Reader imports mlflow into the process that asks; the module does not, until one is made.
"""

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.core import ConfigError, errors, fmt, journals, layout, secrets, terminal
from runner.tracking import dashboard
from runner.tracking.dashboard import REPORT_PAGE, SweepView, run_path
from runner.tracking.history import Curve, read_history
from runner.tracking.uri import (
    active_experiment,
    check_artifact_place,
    is_database,
    local_folder,
    resolve_uri,
    short_cause,
    sqlite_path,
)

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run


@dataclass(frozen=True)
class StoredRun:
    """A run as the store has it.

    Attributes:
        status: MLflow's.
        started_ms: Unix time in milliseconds; 0 if the store has none.
        metrics: the last value of each.
        stage: "active" or "deleted".
    """

    run_id: str
    experiment_id: str
    name: str
    status: str
    started_ms: int
    metrics: dict[str, float]
    tags: dict[str, str]
    params: dict[str, str]
    stage: str = "active"


class Reader:
    """The runs of one store. Every method raises TrackingError if the store does not answer.

    Args:
        uri: of the store.
        make: create a SQLite file that does not exist.

    Attributes:
        notices: artifacts that could not be fetched, and why; for whoever shows the result.

    Raises:
        ConfigError: the SQLite file does not exist, and `make` is False.
    """

    def __init__(self, uri: str, make: bool = False) -> None:
        self.uri = uri
        self.notices: list[str] = []
        # Before the import below: MLflow reads them when it is imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        with terminal.suppress_warnings():
            from mlflow import MlflowClient
        database = sqlite_path(uri)
        # MlflowClient would create a file that is missing: a mistyped path would look like an empty
        # store.
        if database and not database.exists():
            if not make:
                raise ConfigError(
                    f"There is no store at {secrets.redact(uri)}: nothing was logged there yet. "
                    "Type tracking.uri=... for another store."
                )
            with terminal.suppress_warnings():
                from runner.tracking.writer.store import Store
            # Under a lock that keeps two processes from creating it at once.
            self._ask(lambda: Store(uri))
        self.client = self._ask(lambda: MlflowClient(uri))

    def run(self, run_id: str) -> StoredRun | None:
        """Return the run of an id; None if the store has none."""
        try:
            run = _stored_run(self._ask(lambda: self.client.get_run(run_id)))
            if run.run_id != run_id:
                raise errors.TrackingError(
                    f"{secrets.redact(self.uri)} does not answer as an MLflow store does."
                )
            return run
        except errors.TrackingError as error:
            # The second one is for a text that cannot be an id.
            code = getattr(error.__cause__, "error_code", "")
            if code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise

    def sweep(self, sweep_id: str) -> StoredRun | None:
        """Return the parent run of a sweep in any experiment; None if there is none."""
        query = f"tags.sweep_id = '{sweep_id}' and tags.role = 'sweep'"
        experiments = self._ask(lambda: list(self.client.search_experiments()))
        return next(self._search([each.experiment_id for each in experiments], query), None)

    def newest_sweep(self, experiment: str) -> StoredRun | None:
        """Return the parent run of an experiment's newest sweep; None if there is none."""
        stored, _ = self._ask(lambda: active_experiment(self.client, experiment))
        ids = [stored.experiment_id] if stored else []
        return next(self._search(ids, "tags.role = 'sweep'"), None)

    def pages(self, experiment: str) -> Iterator[tuple[str, str]]:
        """Yield the title and the path, after the server's address, of an experiment's pages:
        the report of the newest sweep, the dashboards of that sweep and of the experiment, and its
        list of runs; of a store without the experiment, only its front page.

        Missing dashboards are set up if the store permits it.
        """
        stored, _ = self._ask(lambda: active_experiment(self.client, experiment))
        if stored is None:
            yield f"no experiment {experiment!r} yet", ""
            return
        parent = self.newest_sweep(experiment)
        if parent:
            # A sweep has its report from its end on, unless it was refused before its first job.
            if REPORT_PAGE in self.artifacts(parent.run_id):
                page = run_path(stored.experiment_id, parent.run_id, REPORT_PAGE)
                yield "report of the newest sweep", page
            keys = parent.tags.get("swept", "").split()
            view = SweepView(parent.tags["sweep_id"], parent.run_id, parent.name, keys)
            path = self._dashboard_path(stored, view)
            if path:
                yield "newest sweep", path
        path = self._dashboard_path(stored)
        if path:
            yield "sweeps", path
        yield "runs", f"/#/experiments/{stored.experiment_id}/runs?workflowType=machine_learning"

    def jobs(self, parent: StoredRun) -> list[StoredRun]:
        """Return the runs of a sweep in the order of their start, on whatever machine they ran.

        A run that another one has replaced is left out.
        """
        query = f"tags.sweep_id = '{parent.tags['sweep_id']}' and tags.role = 'run'"
        runs = sorted(self._search([parent.experiment_id], query), key=lambda run: run.started_ms)
        superseded = {run.tags.get("supersedes") for run in runs}
        return [
            run
            for run in runs
            if superseded.isdisjoint((run.run_id, run.tags.get(journals.JOURNAL_TAG, run.run_id)))
        ]

    def artifacts(self, run_id: str, folder: str = "") -> list[str]:
        """Return the paths of the files in a folder of a run's artifacts."""
        self._check_artifact_place(run_id)
        items = self._ask(lambda: self.client.list_artifacts(run_id, folder or None))
        return [str(item.path) for item in items if not item.is_dir]

    def artifact(self, run_id: str, path: str) -> bytes | None:
        """Return the content of an artifact; None if the run has no artifact of this path.

        Raises:
            TrackingError: it could not be fetched, or it is not known whether the run has it.
        """
        try:
            self._check_artifact_place(run_id)
            with tempfile.TemporaryDirectory() as folder, terminal.suppress_warnings():
                return Path(self.client.download_artifacts(run_id, path, folder)).read_bytes()
        except Exception as error:
            # The error does not show whether the artifact is missing: each kind of artifact store
            # has its own for that, some the same one as for an outage. The list of artifacts does.
            reason = _redacted_cause(error)
            try:
                if path not in self.artifacts(run_id, path.rpartition("/")[0]):
                    return None
            except errors.TrackingError as outage:
                reason = short_cause(str(outage))
            raise errors.TrackingError(
                f"the artifact {path} of run {run_id} in {secrets.redact(self.uri)} could not "
                f"be fetched: {reason}"
            ) from error

    def artifact_or_notice(self, run_id: str, path: str) -> bytes | None:
        """Return the content of an artifact; None if there is none or it could not be fetched.

        An artifact that could not be fetched is added to `notices`.
        """
        try:
            return self.artifact(run_id, path)
        except errors.TrackingError as error:
            self.notices.append(str(error))
            return None

    def curve(self, run_id: str, name: str) -> Curve:
        """Return a metric's points, with infinity where the store has the greatest float."""
        points = self._ask(lambda: self.client.get_metric_history(run_id, name))
        points = sorted(points, key=lambda point: (point.timestamp, point.step))
        rows = [(point.step, point.timestamp, point.value) for point in points]
        curve = np.array(rows, dtype=np.float64).reshape(-1, 3).T.copy()
        # MLflow's databases hold no infinity and store the greatest float in its place.
        is_greatest = np.abs(curve[2]) >= np.finfo(np.float64).max
        curve[2, is_greatest] = np.copysign(np.inf, curve[2, is_greatest])
        return curve

    def history(self, run_id: str, names: Sequence[str] | None = None) -> dict[str, Curve]:
        """Return a run's metrics exactly as it stored them, else as the store's own points.

        Args:
            run_id: of the run.
            names: metrics to read where the run stored no history; None reads all.
        """
        # A damaged history is as good as none.
        with suppress(ValueError):
            data = self.artifact_or_notice(run_id, layout.HISTORY)
            if data:
                return read_history(data)
        run = self.run(run_id)
        known = run.metrics if run else {}
        readable = known if names is None else [name for name in names if name in known]
        return {name: self.curve(run_id, name) for name in readable}

    def artifact_folders(self, run: StoredRun) -> dict[str, Path]:
        """Return the folders with the files of a run and of its models by their ids; none where a
        server keeps them."""
        if not is_database(self.uri):
            return {}
        query = f"source_run_id = '{run.run_id}'"
        owners = [run.experiment_id]
        models = self._ask(lambda: self.client.search_logged_models(owners, filter_string=query))
        uris = {model.model_id: str(model.artifact_location) for model in models}
        uris[run.run_id] = str(self._ask(lambda: self.client.get_run(run.run_id)).info.artifact_uri)
        folders = {}
        for owner, uri in uris.items():
            self._ask(partial(check_artifact_place, self.uri, owner, lambda uri=uri: uri))
            folder = local_folder(uri)
            if folder:
                folders[owner] = folder.parent
        return folders

    def delete_run(self, run: StoredRun) -> None:
        """Move a run to MLflow's trash and delete its models and files; it can be repeated."""
        for owner, folder in self.artifact_folders(run).items():
            if folder.exists():
                self._ask(partial(rmtree, folder))
            if owner != run.run_id:
                self._ask(partial(self.client.delete_logged_model, owner))
        if run.stage == "active":
            self._ask(lambda: self.client.delete_run(run.run_id))

    def log_artifact(self, run_id: str, path: Path, folder: str = "") -> None:
        """Upload a file to a folder of a run's artifacts."""
        self._check_artifact_place(run_id)
        self._ask(lambda: self.client.log_artifact(run_id, str(path), folder or None))

    def log_answer(
        self, run: StoredRun, metrics: Mapping[str, float], tags: Mapping[str, str], step: int
    ) -> None:
        """Add a point of each metric to a sweep's parent run, and set or replace tags of it.

        Metrics and verdicts of an earlier answer whose names this one lacks become NaN and are
        deleted: jobs that joined the sweep may have changed the names.
        """
        with terminal.suppress_warnings():
            from runner.tracking.writer.store import Store, legal_name, metric_name
        store = self._ask(lambda: Store(self.uri))
        values = {metric_name(name): value for name, value in metrics.items()}
        for name in run.metrics:
            # MLflow deletes no metric.
            if name.startswith("answer/"):
                values.setdefault(name, math.nan)
        points = [(name, value, fmt.now_ms(), step) for name, value in values.items()]
        self._ask(lambda: store.log_points(run.run_id, points))
        self._ask(lambda: store.log_tags(run.run_id, tags))
        for name in run.tags.keys() - set(map(legal_name, tags)):
            if name.startswith("verdict/"):
                self._ask(partial(self.client.delete_tag, run.run_id, name))

    def _dashboard_path(
        self, experiment: "Experiment", sweep: SweepView | None = None
    ) -> str | None:
        """Return the path of a dashboard, set up if need be; None if it cannot be."""
        experiment_id = experiment.experiment_id
        try:
            return self._ask(
                lambda: dashboard.ensure_dashboard(self.client, experiment_id, sweep=sweep)
            )
        except errors.TrackingError:
            # A user without write permission still sees a dashboard that exists.
            key = dashboard.sweep_key(sweep.sweep_id) if sweep else dashboard.DASHBOARD_KEY
            exists = dashboard.VIEW_TAG_PREFIX + key in experiment.tags
            return dashboard.dashboard_path(experiment_id, key) if exists else None

    def _search(self, experiments: list[str], query: str) -> Iterator[StoredRun]:
        # MLflow refuses a search without an experiment.
        if not experiments:
            return
        token = None
        while True:
            search = partial(self.client.search_runs, experiments, query, page_token=token)
            page = self._ask(search)
            yield from map(_stored_run, page)
            token = page.token
            if not token:
                return

    def _check_artifact_place(self, run_id: str) -> None:
        """Raise TrackingError for a run whose artifacts are in no place of the store."""

        def place() -> str:
            return str(self.client.get_run(run_id).info.artifact_uri)

        self._ask(lambda: check_artifact_place(self.uri, run_id, place))

    def _ask(self, call: Any) -> Any:
        """Return what a call of the client returns; raise TrackingError if it fails."""
        try:
            with terminal.suppress_warnings():
                return call()
        except Exception as error:
            raise errors.TrackingError(
                f"{secrets.redact(self.uri)} cannot be read: {_redacted_cause(error)}"
            ) from error


def _redacted_cause(error: Exception) -> str:
    """Return the cause of an error, without secrets."""
    # Redacted before it is shortened: half of a secret fits no pattern.
    return short_cause(secrets.redact(str(error)))


def _stored_run(run: "Run") -> StoredRun:
    return StoredRun(
        run.info.run_id,
        run.info.experiment_id,
        run.info.run_name or "",
        run.info.status,
        run.info.start_time or 0,
        run.data.metrics,
        run.data.tags,
        run.data.params,
        run.info.lifecycle_stage,
    )


def folder_of_run(run_id: str, tracking_uri: str | None, key: str = "checkpoint") -> Path:
    """Return the output folder of a run, which is a tag of the run.

    Args:
        run_id: of the run.
        tracking_uri: of its store; None as in resolve_uri.
        key: the config key that names the run, for messages.

    Raises:
        ConfigError: the store has no such run.
    """
    uri = resolve_uri(tracking_uri)
    run = None
    with suppress(ConfigError, errors.TrackingError):
        run = Reader(uri).run(run_id)
    if run is None:
        raise ConfigError(
            f"{key}={run_id} is neither a file, a folder nor the id of a run in "
            f"{secrets.redact(uri)}."
        )
    return Path(run.tags.get("output_dir", "missing"))
