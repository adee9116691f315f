"""Resolve the store and the experiment of a run from the config and MLflow's variables.

This happens before anything starts, without importing mlflow, so that a wrong URI stops a run at
once.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

from runner.utils.errors import ConfigError
from runner.utils.secrets import redact

DEFAULT_EXPERIMENT = "precision-runner"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SCHEMES = ("http", "https", "databricks", *_DATABASES)


def resolve_uri(uri: str | None, env: Mapping[str, str], cwd: Path) -> str:
    """Return the URI of the store, absolute so that the working directory may change later.

    Args:
        uri: from the config; None takes MLFLOW_TRACKING_URI, then
            sqlite:///<cwd>/outputs/mlflow.db.
        env: environment variables.
        cwd: working directory.

    Raises:
        ConfigError: for a URI that no installed MLflow store can serve.
    """
    given = uri or env.get("MLFLOW_TRACKING_URI") or "sqlite:///outputs/mlflow.db"
    shown = redact(given)
    source = "tracking.uri" if uri else "MLFLOW_TRACKING_URI"
    if given == "databricks":
        return given
    # The part after a plus is the database's driver, postgresql+psycopg2 for example.
    scheme = urlsplit(given).scheme.split("+")[0]
    # urlsplit has made the scheme lower case, as MLflow needs it (SQLITE:/// is legal in a URL).
    given = scheme + given[len(scheme) :]
    if scheme == "sqlite":
        return _absolute_sqlite(given, source, cwd)
    if scheme in ("", "file"):
        return _file_store(given, source, env, cwd)
    if scheme in ("http", "https") and not urlsplit(given).hostname:
        raise ConfigError(f"{source}={shown} names no server. Type for example http://host:5000.")
    if scheme not in _SCHEMES and scheme not in _plugins():
        allowed = ", ".join((*_SCHEMES, *_plugins()))
        raise ConfigError(
            f"{source}={shown}: there is no store of kind {scheme!r}. Allowed: {allowed}. "
            "Type for example tracking.uri=sqlite:///outputs/mlflow.db."
        )
    return given.rstrip("/")


def resolve_experiment(name: str | None, env: Mapping[str, str]) -> str:
    """Return the experiment's name: the config's, else MLFLOW_EXPERIMENT_NAME, else ours."""
    return name or env.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT


def resolve_experiment_id(
    name: str | None, uri: str | None, env: Mapping[str, str], cwd: Path
) -> str | None:
    """Return MLFLOW_EXPERIMENT_ID if nothing gives a name, else None.

    Args:
        name: the config's experiment.
        uri: the config's store.
        env: environment variables; mlflow.set_experiment sets MLFLOW_EXPERIMENT_ID.
        cwd: working directory.
    """
    if name or env.get("MLFLOW_EXPERIMENT_NAME"):
        return None
    # Ids belong to one store, so the variable does not count if MLFLOW_TRACKING_URI names another.
    store_of_id = env.get("MLFLOW_TRACKING_URI")
    if store_of_id and uri:
        without = {key: value for key, value in env.items() if key != "MLFLOW_TRACKING_URI"}
        if resolve_uri(uri, without, cwd) != resolve_uri(store_of_id, without, cwd):
            return None
    return env.get("MLFLOW_EXPERIMENT_ID") or None


def is_database(uri: str) -> bool:
    """Return whether a store is a database that runs access directly, without a server."""
    return urlsplit(uri).scheme.split("+")[0] in _DATABASES


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of an absolute SQLite URI; None for any other store."""
    prefix, _, rest = uri.partition(":///")
    return Path(rest.partition("?")[0]) if prefix.split("+")[0] == "sqlite" else None


def _absolute_sqlite(uri: str, source: str, cwd: Path) -> str:
    # MLflow would take a relative path from the working directory of each process that opens it.
    prefix, _, rest = uri.partition("://")
    path, mark, query = rest.removeprefix("/").partition("?")
    if not path or path == ":memory:":
        raise ConfigError(
            f"{source}={redact(uri)}: a store in memory is lost when its process ends. "
            "Type a file: tracking.uri=sqlite:///outputs/mlflow.db."
        )
    return f"{prefix}:///{cwd.absolute() / path}{mark}{query}"


def _file_store(uri: str, source: str, env: Mapping[str, str], cwd: Path) -> str:
    if env.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        raise ConfigError(
            f"{source}={redact(uri)} is a folder, and MLflow no longer keeps runs in plain "
            "folders. Type a database or a server: tracking.uri=sqlite:///outputs/mlflow.db "
            "or tracking.uri=http://host:5000."
        )
    path = urlsplit(uri).path if uri.startswith("file:") else uri
    return (cwd.absolute() / path).as_uri()


def _plugins() -> list[str]:
    return sorted(entry.name for entry in entry_points(group="mlflow.tracking_store"))
