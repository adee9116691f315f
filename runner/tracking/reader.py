"""Reading an MLflow store back: for reports, in the process that asks. Imports mlflow."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.tracking import dashboard
from runner.tracking.dashboard_views import SweepView, ensure_dashboard, server_version
from runner.tracking.history import Curve
from runner.tracking.uri import sqlite_path
from runner.tracking.writer.experiments import active_experiment
from runner.utils.errors import ConfigError, TrackingError
from runner.utils.quiet_import import quiet_imports
from runner.utils.secrets import redact

if TYPE_CHECKING:
    from mlflow.entities import Experiment, Run


@dataclass(frozen=True)
class StoredRun:
    """A run as the store tells it: its last metrics, tags, params, name and MLflow's status."""

    run_id: str
    experiment_id: str
    name: str
    status: str
    began_ms: int
    metrics: dict[str, float]
    tags: dict[str, str]
    params: dict[str, str]


class Reader:
    """One store. Every method raises TrackingError where the store does not answer.

    Args:
        uri: of the store.
        make: a SQLite file that is not there is made.

    Raises:
        ConfigError: it is not there, and not to be made.
    """

    def __init__(self, uri: str, make: bool = False) -> None:
        self.uri = uri
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        with quiet_imports():
            from mlflow import MlflowClient
        if (database := sqlite_path(uri)) and not database.exists():
            if not make:
                raise ConfigError(
                    f"There is no store at {redact(uri)}: nothing was logged there yet. Type "
                    "tracking.uri=... for another store."
                )
            self._ask(self._make)
        self.client = self._ask(lambda: MlflowClient(uri))

    def run(self, run_id: str) -> StoredRun | None:
        """The run of this id."""
        from mlflow.exceptions import MlflowException

        try:
            with quiet_imports():
                return _plain(self.client.get_run(run_id))
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise TrackingError(redact(f"{self.uri} does not answer: {error}")) from error

    def stage(self, run_id: str) -> str | None:
        """Return the lifecycle stage of a run, "active" or "deleted"; None where it is unknown."""
        from mlflow.exceptions import MlflowException

        try:
            with quiet_imports():
                return str(self.client.get_run(run_id).info.lifecycle_stage)
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            text = redact(str(error).partition("\n")[0])[:300]
            raise TrackingError(f"{redact(self.uri)} does not answer: {text}.") from error

    def sweep(self, sweep_id: str) -> StoredRun | None:
        """The parent run of the sweep of this id, in whatever experiment."""
        query = f"tags.sweep_id = '{sweep_id}' and tags.role = 'sweep'"
        return next(self._search(self._experiments(), query), None)

    def newest_sweep(self, experiment: str) -> StoredRun | None:
        """The parent run of an experiment's newest sweep."""
        found, _ = self._ask(lambda: active_experiment(self.client, experiment))
        ids = [found.experiment_id] if found else []
        return next(self._search(ids, "tags.role = 'sweep'"), None)

    def pages(self, experiment: str) -> Iterator[tuple[str, str]]:
        """What there is to see of an experiment, and its path after the server's address. The
        dashboards are set up where they are missing and the store lets us."""
        found, _ = self._ask(lambda: active_experiment(self.client, experiment))
        if found is None:
            yield f"no experiment {experiment!r} yet", ""
            return
        view = partial(self._view, found, self._ask(lambda: server_version(self.uri)))
        if parent := self.newest_sweep(experiment):
            sweep_id = parent.tags["sweep_id"]
            if path := view(SweepView(sweep_id, parent.run_id, parent.name[:80])):
                yield "newest sweep", path
        if path := view():
            yield "dashboard", path
        yield "runs", f"/#/experiments/{found.experiment_id}/runs?workflowType=machine_learning"

    def jobs(self, parent: StoredRun) -> list[StoredRun]:
        """The runs of a sweep, on whatever machine, in the order in which they began, without those
        that others started over."""
        query = f"tags.sweep_id = '{parent.tags['sweep_id']}' and tags.role = 'run'"
        found = sorted(self._search([parent.experiment_id], query), key=lambda run: run.began_ms)
        old = {run.tags.get("supersedes") for run in found}
        return [run for run in found if run.run_id not in old]

    def artifacts(self, run_id: str, folder: str = "") -> list[str]:
        """Paths of the files in a folder of a run's artifacts."""
        found = self._ask(lambda: self.client.list_artifacts(run_id, folder or None))
        return [str(item.path) for item in found if not item.is_dir]

    def artifact(self, run_id: str, path: str) -> bytes | None:
        """What an artifact holds; None where the run has none of this path."""
        with tempfile.TemporaryDirectory() as folder, suppress(Exception), quiet_imports():
            return Path(self.client.download_artifacts(run_id, path, folder)).read_bytes()
        return None

    def curve(self, run_id: str, name: str) -> Curve:
        """A metric's points. Infinity, for which a store keeps the greatest float, is infinity."""
        points = self._ask(lambda: self.client.get_metric_history(run_id, name))
        points = sorted(points, key=lambda point: (point.timestamp, point.step))
        rows = [(p.step, p.timestamp, p.value) for p in points]
        curve = np.array(rows, dtype=np.float64).reshape(-1, 3).T.copy()
        greatest = np.abs(curve[2]) >= np.finfo(np.float64).max
        curve[2, greatest] = np.copysign(np.inf, curve[2, greatest])
        return curve

    def add(self, run_id: str, path: Path, folder: str = "") -> None:
        """Stores a file with a run."""
        self._ask(lambda: self.client.log_artifact(run_id, str(path), folder or None))

    def tag(self, run_id: str, key: str, value: str) -> None:
        """Sets or replaces a tag."""
        self._ask(lambda: self.client.set_tag(run_id, key, value))

    def _make(self) -> None:
        from runner.tracking.writer.store import Store

        Store(self.uri)  # it keeps others from making it at the same time

    def _experiments(self) -> list[str]:
        return [e.experiment_id for e in self._ask(lambda: list(self.client.search_experiments()))]

    def _view(
        self, experiment: "Experiment", version: str, sweep: SweepView | None = None
    ) -> str | None:
        """The path of a dashboard, of which who may only read sees what is there already."""
        number = experiment.experiment_id
        try:
            return self._ask(lambda: ensure_dashboard(self.client, version, number, sweep=sweep))
        except TrackingError:
            key = dashboard.sweep_key(sweep.sweep_id) if sweep else dashboard.KEY
            there = dashboard.PREFIX + key in experiment.tags
            return dashboard.dashboard_path(number, key) if there else None

    def _search(self, experiments: list[str], query: str) -> Iterator[StoredRun]:
        token = None
        while experiments:
            page = self._ask(lambda: self.client.search_runs(experiments, query, page_token=token))
            yield from map(_plain, page)
            if not (token := page.token):
                return

    def _ask(self, call: Any) -> Any:
        try:
            with quiet_imports():
                return call()
        except Exception as error:
            text = redact(str(error).partition("\n")[0])[:300]
            raise TrackingError(f"{redact(self.uri)} cannot be read: {text}") from error


def _plain(run: "Run") -> StoredRun:
    return StoredRun(
        run.info.run_id,
        run.info.experiment_id,
        run.info.run_name or "",
        run.info.status,
        run.info.start_time or 0,
        dict(run.data.metrics),
        dict(run.data.tags),
        dict(run.data.params),
    )


def folder_of_run(run_id: str, tracking_uri: str | None, key: str = "checkpoint") -> Path:
    """A run keeps its output folder as a tag. mlflow is imported here only."""
    from runner.tracking.uri import resolve_uri, sqlite_path
    from runner.utils.secrets import redact

    uri = resolve_uri(tracking_uri, os.environ, Path.cwd())
    unknown = f"{key}={run_id} is neither a file, a folder nor the id of a run in {redact(uri)}."
    if (database := sqlite_path(uri)) and not database.exists():
        raise ConfigError(unknown)  # MLflow would create it

    from runner.utils.quiet_import import quiet_imports

    with quiet_imports():
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    try:
        with quiet_imports():
            run = MlflowClient(uri).get_run(run_id)
    except MlflowException:
        raise ConfigError(unknown) from None
    return Path(run.data.tags.get("output_dir", "missing"))
