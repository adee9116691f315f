"""Calls to one MLflow store: open a run, send points, tags and files, end the run.

The last module of the way that runner/tracking/__init__.py describes. It imports mlflow, so only
the writer process may import it. Every call raises RefusedError or UnreachableError: a refusal ends
an upload, an outage is retried. Sending the same twice changes nothing, so that a caller may retry.
"""

import fcntl
import hashlib
import os
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.db import utils as database_utils
from mlflow.tracking import MlflowClient
from mlflow.tracking.context.default_context import DefaultRunContext
from mlflow.tracking.context.git_context import GitRunContext
from mlflow.tracking.context.registry import resolve_tags
from mlflow.utils import validation
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from runner.core import files, fmt, metric_names, secrets
from runner.tracking import dashboard
from runner.tracking.uri import (
    RefusedError,
    UnreachableError,
    active_experiment,
    check_artifact_place,
    is_database,
    sqlite_path,
)
from runner.tracking.writer.logged_model import log_model
from runner.tracking.writer.system_metrics import SYSTEM_PREFIX

MetricPoint = tuple[str, float, int, int]
"""(name, value, Unix time in milliseconds, step)."""

# One less than MLflow takes in a call, which also carries the tag of its confirmation.
MAX_POINTS = validation.MAX_METRICS_PER_BATCH - 1
# The prefix keeps it out of the tags that MLflow's pages show.
BATCH_TAG = "mlflow.runner.batch"

# Error codes of MLflow whose cause no retry changes. All others are retried: a server that cannot
# be reached gives INTERNAL_ERROR here, a locked database TEMPORARILY_UNAVAILABLE.
STORE_CODES = {
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "CUSTOMER_UNAUTHORIZED",
    "ENDPOINT_NOT_FOUND",
    "FEATURE_DISABLED",
    "NOT_IMPLEMENTED",
}
"""Codes of errors that do not depend on what was sent."""
REFUSAL_CODES = STORE_CODES | {
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_DOES_NOT_EXIST",
    "RESOURCE_ALREADY_EXISTS",
    "NOT_FOUND",
}
# Messages of databases whose cause no retry changes, whatever the type of the error.
PERMANENT_MESSAGES = (
    "file is not a database",
    "readonly database",
    "password authentication failed",
    "out-of-date database schema",
)

# MLflow tries ten times to open a database, for 100 s in all; we try again ourselves, sooner.
database_utils.MAX_RETRY_COUNT = 1

# Contexts whose tags would describe the writer process instead of the trainer. MLflow's annotation
# says instances, but its code expects classes.
_WRITER_CONTEXTS: list[Any] = [DefaultRunContext, GitRunContext]


@contextmanager
def classify_errors() -> Iterator[None]:
    """Turn any exception of a client call into RefusedError or UnreachableError."""
    try:
        yield
    except (RefusedError, UnreachableError):
        raise
    except MlflowException as error:
        of_store = error.error_code in STORE_CODES or _is_permanent(error)
        if of_store or error.error_code in REFUSAL_CODES:
            raise RefusedError(secrets.redact(str(error)), of_store) from error
        # A server whose storage of artifacts fails answers 500.
        is_doubtful = error.error_code in ("BAD_REQUEST", "INTERNAL_ERROR")
        raise UnreachableError(secrets.redact(str(error)), is_doubtful) from error
    except ImportError as error:
        raise RefusedError(
            f"a package is missing for it: {error}. Install it, or name the driver that you have "
            "in the URI, for example postgresql+psycopg2://"
        ) from error
    except Exception as error:
        # Connection errors of many libraries, and bugs: doubtful, so that a batch that always
        # fails is skipped in the end.
        text = secrets.redact(f"{type(error).__name__}: {error}")
        if _is_permanent(error):
            raise RefusedError(text, of_store=True) from error
        raise UnreachableError(text, doubtful=True) from error


def _is_permanent(error: Exception) -> bool:
    return any(text in str(error) for text in PERMANENT_MESSAGES)


def _require(is_of_store: bool) -> None:
    """Raise UnreachableError for an answer that the store did not give, whatever its status is."""
    # A gateway may answer 200 to anything. MLflow's client takes `{}` and an empty text for an
    # answer, in which every field is empty.
    if not is_of_store:
        raise UnreachableError("its answer is not that of an MLflow store: a gateway's, perhaps")


class Store:
    """One tracking store.

    Args:
        uri: its absolute URI; a SQLite file is created if it does not exist.

    Attributes:
        notices: messages for the user; whoever shows them empties the list.
        parents: the id of a sweep's parent run, by the sweep's id, as far as it is known.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._experiments: dict[str, str] = {}
        self._dashboard_notice_given = False
        self.notices: list[str] = []
        self.parents: dict[str, str] = {}
        database = sqlite_path(uri)
        with classify_errors(), _creation_lock(database):
            if database and not database.exists():
                _create(database, uri)
            self._client = MlflowClient(tracking_uri=uri)

    def experiment(self, name: str, known_id: str | None = None) -> str:
        """Return the id of an experiment; create it if it does not exist.

        Args:
            name: used without an id. If an experiment of this name was deleted, the run goes to
                another one, see uri.active_experiment.
            known_id: of an experiment that must exist.
        """
        key = f"id {known_id}" if known_id else f"name {name}"
        if key not in self._experiments:
            with classify_errors():
                self._experiments[key] = (
                    self._get_active(known_id) if known_id else self._get_or_create(name)
                )
        return self._experiments[key]

    def _get_active(self, experiment_id: str) -> str:
        try:
            experiment = self._client.get_experiment(experiment_id)
        except MlflowException as error:
            if error.error_code not in REFUSAL_CODES:
                raise
            raise RefusedError(
                f"there is no experiment with MLFLOW_EXPERIMENT_ID={experiment_id}. Unset it, or "
                "type tracking.experiment=<name>"
            ) from error
        _require(experiment.experiment_id == experiment_id)
        if experiment.lifecycle_stage == "deleted":
            raise RefusedError(
                f"the experiment {experiment.name!r} (MLFLOW_EXPERIMENT_ID={experiment_id}) was "
                f"deleted there. Restore it with {self._restore_command(experiment)}, or type "
                "tracking.experiment=<another name>"
            )
        return experiment_id

    def _get_or_create(self, name: str) -> str:
        experiment, free = active_experiment(self._client, name)
        if free != name:
            deleted = self._client.get_experiment_by_name(name)
            self.notices.append(
                f"The experiment {name!r} was deleted there: runs go to {free!r}. To restore it: "
                f"{self._restore_command(deleted)}"
            )
        if experiment is not None:
            # Databases that compare names without their case answer with the one that they hold.
            _require(experiment.name.casefold() == free.casefold())
            return experiment.experiment_id
        # The folder of a database's artifacts; a server has its own.
        location = None
        database = sqlite_path(self.uri)
        if is_database(self.uri):
            folder = database.parent if database else Path.cwd() / "outputs"
            # MLflow decodes the path in any URI of artifacts, one without a scheme included.
            location = quote(os.fsencode(folder / "mlartifacts"))
        try:
            new_id = self._client.create_experiment(free, artifact_location=location)
            _require(bool(new_id) and self._client.get_experiment(new_id).name == free)
            return new_id
        except MlflowException as error:
            # Another process may have created it in the meantime.
            experiment, _ = active_experiment(self._client, name)
            if experiment is None:
                raise error
            return experiment.experiment_id

    def _restore_command(self, experiment: Any) -> str:
        uri = secrets.redact(self.uri)
        return (
            f"MLFLOW_TRACKING_URI={uri} mlflow experiments restore "
            f"--experiment-id {experiment.experiment_id}"
        )

    def find_run(self, experiment_id: str, tags: Mapping[str, str]) -> str | None:
        """Return the id of the newest run that has all these tags; None if there is none."""
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        with classify_errors():
            runs = self._client.search_runs([experiment_id], query, max_results=1)
        return runs[0].info.run_id if runs else None

    def run_name(self, run_id: str) -> str:
        """Return the name that the store shows for a run."""
        with classify_errors():
            return str(self._get_run(run_id).info.run_name)

    def _get_run(self, run_id: str) -> Run:
        """Return a run; it also shows that the store is what answers."""
        run = self._client.get_run(run_id)
        _require(run.info.run_id == run_id)
        return run

    def create_run(
        self, experiment_id: str, name: str | None, time_ms: int, tags: Mapping[str, str]
    ) -> str:
        """Create a run and return its id.

        MLflow's contexts (MLFLOW_RUN_CONTEXT, plugins that know a CI system) add tags; given tags
        replace theirs.
        """
        with classify_errors():
            context = resolve_tags(ignore=_WRITER_CONTEXTS)
            context_tags = {str(key): str(value) for key, value in context.items()}
            legal = {tag.key: tag.value for tag in _run_tags({**context_tags, **tags})}
            name = secrets.redact(name) if name else None
            run = self._client.create_run(experiment_id, time_ms, legal, run_name=name)
            _require(bool(run.info.run_id) and run.info.experiment_id == experiment_id)
        return run.info.run_id

    def reopen(self, run_id: str, start: Mapping[str, Any]) -> None:
        """Set an ended run to RUNNING, because it is resumed.

        Parameters cannot be changed in MLflow: the tags `changes` and `resumed_at_step` say which
        of them no longer hold, and since when.

        Args:
            run_id: of the run.
            start: the start record of the journal that continues it.
        """
        step = start["step"]
        with classify_errors():
            run = self._get_run(run_id)
            self._client.update_run(run_id, status="RUNNING")
            known = run.data.tags
            # The tag names the error of an interruption that is over.
            if "error" in known:
                self._client.delete_tag(run_id, "error")
        lines = [f"{key}: {change} (from step {step})" for key, change in start["changes"].items()]
        changes = "\n".join(filter(None, [known.get("changes"), *lines]))
        steps = ", ".join(filter(None, [known.get("resumed_at_step"), str(step)]))
        tags = dict(start["tags"])
        if changes:
            tags["changes"] = changes
        if step:
            tags["resumed_at_step"] = steps
        self.log_params(run_id, start["params"], known=run.data.params)
        self.log_tags(run_id, tags)

    def system_sample_count(self, run_id: str) -> int:
        """Return how many samples of the machine's load a run has."""
        with classify_errors():
            values = self._get_run(run_id).data.metrics
            # One of them stands for all, to save calls; a sensor that failed may have fewer.
            key = next((key for key in values if key.startswith(SYSTEM_PREFIX)), None)
            points = self._client.get_metric_history(run_id, key) if key else []
        return max((point.step for point in points), default=0)

    def log_params(
        self, run_id: str, values: Mapping[str, str], known: Collection[str] = ()
    ) -> None:
        """Send the parameters that the run does not have yet.

        Args:
            run_id: of the run.
            values: by name.
            known: names that the run has; MLflow refuses to change their values.
        """
        params = [
            Param(key, truncate(text, validation.MAX_PARAM_VAL_LENGTH))
            for key, text in distinct_names(values).items()
            if key not in known
        ]
        self._log_batches(run_id, "params", params, validation.MAX_PARAMS_TAGS_PER_BATCH - 1)

    def log_points(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        """Send points with their own times and steps; sending them again changes nothing."""
        metrics = [Metric(metric_name(key), value, time, step) for key, value, time, step in points]
        self._log_batches(run_id, "metrics", metrics, MAX_POINTS)

    def log_tags(self, run_id: str, values: Mapping[str, str]) -> None:
        """Set or replace tags."""
        tags = _run_tags(values)
        self._log_batches(run_id, "tags", tags, validation.MAX_PARAMS_TAGS_PER_BATCH - 1)

    def _log_batches(self, run_id: str, kind: str, items: Sequence[Any], size: int) -> None:
        """Send items in calls of at most `size` of them, each confirmed by a tag that is read."""
        for begin in range(0, len(items), size):
            tag = RunTag(BATCH_TAG, uuid4().hex)
            batch: dict[str, list[Any]] = {"metrics": [], "params": [], "tags": []}
            batch[kind] += items[begin : begin + size]
            batch["tags"].append(tag)
            with classify_errors():
                self._client.log_batch(run_id, **batch, synchronous=True)
                _require(self._get_run(run_id).data.tags.get(BATCH_TAG) == tag.value)

    def log_artifact(self, run_id: str, path: Path, folder: str) -> None:
        """Upload a file under its name, or the contents of a folder."""
        if not path.exists():
            raise RefusedError(f"the artifact {path} no longer exists")
        send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        with classify_errors():
            check_artifact_place(
                self.uri, run_id, lambda: str(self._get_run(run_id).info.artifact_uri)
            )
            send(run_id, str(path), folder or None)
            self._get_run(run_id)

    def log_inputs(self, run_id: str, datasets: Sequence[Mapping[str, Any]]) -> None:
        """Record the data sets that a run is trained and validated on as its inputs.

        Args:
            run_id: of the run.
            datasets: see runner.data.fingerprint.describe_data.
        """
        # With debug.overfit the same data set is used for both, and MLflow stores one input with
        # one tag for it.
        uses = fmt.grouped(((dataset["name"], dataset["digest"]), dataset) for dataset in datasets)
        inputs = []
        for (name, digest), same in uses.items():
            dataset = Dataset(
                # MLflow refuses longer texts.
                name[: validation.MAX_DATASET_NAME_SIZE],
                digest[: validation.MAX_DATASET_DIGEST_SIZE],
                same[-1]["source_type"],
                same[-1]["source"][: validation.MAX_DATASET_SOURCE_SIZE],
                same[-1]["schema"],
                same[-1]["profile"],
            )
            contexts = ", ".join(use["context"] for use in same)
            inputs.append(DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, contexts)]))
        with classify_errors():
            self._client.log_inputs(run_id, inputs)
            self._get_run(run_id)

    def log_model(
        self, run_id: str, folder: Path, facts: Mapping[str, Any], register: str | None
    ) -> None:
        """Upload an exported model with its run; `register` names it in the model registry."""
        with classify_errors():
            log_model(self.uri, run_id, folder, facts, register)
            self._get_run(run_id)

    def dashboard(
        self, experiment_id: str, metrics: Collection[str], sweep: dashboard.SweepView
    ) -> str | None:
        """Set up the dashboards, see dashboard.ensure_dashboard; return the path.

        Returns:
            None if the store does not answer, or refuses them.
        """
        try:
            with classify_errors():
                return dashboard.ensure_dashboard(self._client, experiment_id, metrics, sweep)
        except RefusedError as error:
            if not self._dashboard_notice_given:
                self._dashboard_notice_given = True
                self.notices.append(f"There is no dashboard: {secrets.redact(str(error))}")
        except UnreachableError:
            pass  # no run depends on a dashboard, and the next one tries again
        return None

    def end_run(self, run_id: str, status: str, time_ms: int) -> None:
        """Set the status and the end time (Unix milliseconds) of a run."""
        with classify_errors():
            self._client.set_terminated(run_id, status, time_ms)
            _require(self._get_run(run_id).info.status == status)


def _run_tags(values: Mapping[str, str]) -> list[RunTag]:
    limit = validation.MAX_TAG_VAL_LENGTH
    return [RunTag(legal_name(key), truncate(text, limit)) for key, text in values.items()]


@lru_cache(maxsize=10_000)
def legal_name(name: str) -> str:
    """Return the name with an underscore for each character that this MLflow refuses."""
    is_legal = validation.validate_param_and_metric_name
    if not is_legal(name):
        # Each character between two legal ones: some are refused at the ends of a name only.
        name = "".join(char if is_legal(f"a{char}a") else "_" for char in name)
    # a//b, ./a, /a: MLflow refuses names that are no unique path, because they may become files.
    if validation.path_not_unique(name):
        name = re.sub(r"^(\.*/)+", "", posixpath.normpath(name)).strip(".") or "_"
    return name[: validation.MAX_ENTITY_KEY_LENGTH]


@lru_cache(maxsize=10_000)
def metric_name(name: str) -> str:
    """Return a legal name that no other metric has, whichever process sends it."""
    legal = legal_name(name)
    if legal == name:
        return name
    # h.* and h.? would share one curve.
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{legal[:240]}_{digest[:6]}"


def distinct_names(values: Mapping[str, str]) -> dict[str, str]:
    """Return the values under legal names; names that become equal get a number."""
    # MLflow refuses a second value for a parameter that is set.
    return dict(zip(metric_names.numbered(map(legal_name, values)), values.values(), strict=True))


def truncate(text: str, limit: int) -> str:
    """Return a text without secrets, at most `limit` characters of it, with an ellipsis if it was
    longer."""
    text = secrets.redact(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _create(database: Path, uri: str) -> None:
    """Create a SQLite store."""
    # Under another name first: MLflow needs seconds for the tables, and a file that holds only a
    # part of them, because the process was killed meanwhile, cannot be opened.
    draft = database.with_name(database.name + ".new")
    draft.unlink(missing_ok=True)
    path, mark, query = uri.partition("?")
    MlflowClient(tracking_uri=f"{path}.new{mark}{query}")
    draft.replace(database)


@contextmanager
def _creation_lock(database: Path | None) -> Iterator[None]:
    """Hold a lock next to a SQLite file while it may be created."""
    # MLflow's creation of the tables fails if two processes do it at once, and the jobs of a sweep
    # start together.
    if database is None:
        yield
        return
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = files.open_output(database.with_name(database.name + ".lock"), os.O_WRONLY)
    except OSError as error:
        raise RefusedError(f"{database.parent} cannot be written: {error.strerror}") from error
    with os.fdopen(lock, "wb"):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


open_store = cache(Store)
"""Return the store at a URI; open it if this process has not yet."""
