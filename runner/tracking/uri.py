"""Resolve the store and the experiment of a run from the config and MLflow's variables.

This happens before anything starts, without importing mlflow, so that a wrong URI stops a run at
once.
"""

import errno
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from importlib.metadata import entry_points
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

from runner.core import ConfigError, files, secrets

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment

DEFAULT_EXPERIMENT = "precision-runner"
LOOPBACK = "127.0.0.1"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SCHEMES = ("http", "https", "databricks", *_DATABASES)
_SCHEME = re.compile(r"([a-z][a-z0-9.-]*)(?:\+[\w.-]*)?:", re.IGNORECASE)
_ARTIFACT_SERVERS = ("http", "https", "mlflow-artifacts", "runs", "models")
"""Schemes of artifacts for which MLflow sends its token, or asks another store."""
_ID = re.compile(r"(m-)?[0-9a-f]{32}")
"""Ids that MLflow gives to runs and to logged models."""
_RESERVED = re.compile(r"[%?#\x00-\x1f\x7f]")
"""Characters of a folder's name that mean something else in a URI."""
_MAX_CAUSE_CHARACTERS = 400


class RefusedError(Exception):
    """The store refuses a call; a retry would get the same answer.

    Args:
        message: for the log and the user.
        of_store: the store, or a gateway before it, would refuse any call: a password is wrong.
    """

    def __init__(self, message: str, of_store: bool = False) -> None:
        super().__init__(message)
        self.of_store = of_store


class UnreachableError(Exception):
    """The store cannot answer now.

    Args:
        message: for the log and the user.
        doubtful: the answer may also be a refusal. A server whose connection pool is used up
            answers BAD_REQUEST.
    """

    def __init__(self, message: str, doubtful: bool = False) -> None:
        super().__init__(message)
        self.doubtful = doubtful


def resolve_uri(
    uri: str | None, env: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> str:
    """Return the URI of the store, absolute so that the working directory may change later.

    Args:
        uri: from the config; None takes MLFLOW_TRACKING_URI, then
            sqlite:///<cwd>/outputs/mlflow.db.
        env: environment variables.
        cwd: working directory; None for that of the process.

    Raises:
        ConfigError: for a URI that no installed MLflow store can serve.
    """
    here = (cwd or Path.cwd()).absolute()
    if uri == "":
        raise ConfigError("tracking.uri= is empty. Type tracking.uri=<store>, or leave it out.")
    store_uri = uri or env.get("MLFLOW_TRACKING_URI") or "sqlite:///outputs/mlflow.db"
    shown = secrets.redact(store_uri)
    source = "tracking.uri" if uri else "MLFLOW_TRACKING_URI"
    if store_uri == "databricks":
        return store_uri
    # The part after a plus is the database's driver, postgresql+psycopg2 for example.
    scheme = _scheme(store_uri)
    # MLflow needs lower case (SQLITE:/// is legal in a URL).
    store_uri = scheme + store_uri[len(scheme) :]
    if scheme == "sqlite":
        # MLflow would take a relative path from the working directory of each process that opens
        # it.
        prefix, _, rest = store_uri.partition("://")
        path, mark, query = rest.removeprefix("/").partition("?")
        if path in ("", ":memory:"):
            raise ConfigError(
                f"{source}={shown}: a store in memory is lost when its process ends. Type a file: "
                "tracking.uri=sqlite:///outputs/mlflow.db."
            )
        absolute = sqlite_uri(here / unquote(path))
        if "+" in prefix:
            absolute = prefix + absolute[absolute.index(":") :]
        return f"{absolute}{mark}{query}"
    if scheme in ("", "file"):
        if env.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
            raise ConfigError(
                f"{source}={shown} is a folder, and MLflow no longer keeps runs in plain folders. "
                "Type a database or a server: tracking.uri=sqlite:///outputs/mlflow.db or "
                "tracking.uri=http://host:5000."
            )
        folder = unquote(urlsplit(store_uri).path) if scheme else store_uri
        return (here / folder).as_uri()
    if scheme in ("http", "https") and not _names_server(store_uri):
        raise ConfigError(f"{source}={shown} names no server. Type for example http://host:5000.")
    if scheme not in _SCHEMES:
        plugins = sorted(entry.name for entry in entry_points(group="mlflow.tracking_store"))
        if scheme not in plugins:
            allowed = ", ".join((*_SCHEMES, *plugins))
            raise ConfigError(
                f"{source}={shown}: there is no store of kind {scheme!r}. Allowed: {allowed}. "
                "Type for example tracking.uri=sqlite:///outputs/mlflow.db."
            )
    return store_uri.rstrip("/")


def is_configured_store(uri: str) -> bool:
    """Return whether a URI is that of the store of this command's environment."""
    # Compared as they are: parsers differ on the host of a URI that is made to deceive them.
    with suppress(ConfigError):
        return uri == resolve_uri(None)
    return False


def check_artifact_place(store: str, owner: str, place: Callable[[], str]) -> None:
    """Refuse to read or write artifacts at a place that may be none of a database's.

    A database may be a stranger's, and may name a folder of this user's, or a server that would be
    given this user's token. What an MLflow server names is believed: the user has named the server.

    Args:
        store: URI of the store.
        owner: id of the run or of the logged model.
        place: returns the URI of its artifacts; not called for a server.

    Raises:
        RefusedError: it is no folder of MLflow's, or a server.
    """
    if not is_database(store) and _scheme(store) != "file":
        return
    uri = place()
    is_wrong = _scheme(uri) in _ARTIFACT_SERVERS
    folder = local_folder(uri)
    if folder:
        # MLflow makes a folder of this name for each run, so that no other file can be in it.
        is_own = _ID.fullmatch(owner) and folder.parts[-2:] == (owner, "artifacts")
        is_wrong = not is_own or files.link_out_of(folder, folder) is not None
    if is_wrong:
        raise RefusedError(
            f"it names {secrets.redact(uri)} for the files of {owner}, which is no place of "
            "MLflow's for them. Type tracking.uri=<the server of these runs>"
        )


def local_folder(uri: str) -> Path | None:
    """Return the folder that a URI of artifacts names, without links; None for another place."""
    from mlflow.utils.file_utils import local_file_uri_to_path

    is_local = _scheme(uri) in ("", "file")
    return Path(local_file_uri_to_path(uri)).resolve() if is_local else None


def resolve_experiment(name: str | None, env: Mapping[str, str] = os.environ) -> str:
    """Return the experiment's name: the config's, else MLFLOW_EXPERIMENT_NAME, else ours."""
    return name or env.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_EXPERIMENT


def resolve_experiment_id(
    name: str | None, uri: str | None, env: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> str | None:
    """Return MLFLOW_EXPERIMENT_ID if nothing gives a name, else None.

    Args:
        name: the config's experiment.
        uri: the config's store.
        env: environment variables; mlflow.set_experiment sets MLFLOW_EXPERIMENT_ID.
        cwd: working directory; None for that of the process.
    """
    if name or env.get("MLFLOW_EXPERIMENT_NAME"):
        return None
    # Ids belong to one store, so the variable does not count if MLFLOW_TRACKING_URI names another.
    store_of_id = env.get("MLFLOW_TRACKING_URI")
    is_given = store_of_id and uri
    if is_given and resolve_uri(uri, env, cwd) != resolve_uri(store_of_id, env, cwd):
        return None
    return env.get("MLFLOW_EXPERIMENT_ID") or None


def active_experiment(client: "MlflowClient", name: str) -> "tuple[Experiment | None, str]":
    """Return the experiment for a name, and the name that it has.

    MLflow keeps the name of a deleted experiment, so the names "<name> 2", "<name> 3" ... are tried
    next. Renaming the deleted one would need restoring it, which brings back all of its runs.

    Returns:
        The first experiment of these names that is not deleted, with its name; None with the first
        free name if there is none.

    Raises:
        MlflowException: the store does not answer.
    """
    for candidate in chain([name], (f"{name} {number}" for number in count(2))):
        experiment = client.get_experiment_by_name(candidate)
        if experiment is None or experiment.lifecycle_stage != "deleted":
            return experiment, candidate
    raise AssertionError("names do not end")


def check_store(uri: str) -> None:
    """Raise ConfigError for a store that can never be opened, however often that is tried.

    The folder of a SQLite file is made. A server is not asked: it may be back in a minute.

    Args:
        uri: as resolve_uri returns it.
    """
    database = sqlite_path(uri)
    if database is not None:
        _check_writable(database.parent, database, uri)
    elif uri.startswith("file:"):
        folder = Path(unquote(urlsplit(uri).path))
        _check_writable(folder, folder / "meta.yaml", uri)
    if not is_database(uri):
        return
    if not uri.startswith("sqlite:"):
        _check_driver(uri)
    # MLflow writes this folder into its SQL, between quotes that it does not escape.
    if {"'", '"'} <= set(str(Path.cwd())):
        raise ConfigError(
            f"MLflow cannot open a database from {Path.cwd()}, whose path has both kinds of "
            "quotes. Type cd <another folder> first, or tracking=none to store nothing."
        )


def _check_writable(folder: Path, file: Path, uri: str) -> None:
    """Raise ConfigError where a folder takes no files, or a file of it cannot be changed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
        with suppress(FileNotFoundError):
            file.open("r+b").close()
    except (OSError, ValueError) as error:
        # A full disk may have room again: the writer tries until then.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return
        raise ConfigError(
            f"The store {secrets.redact(uri)} cannot be opened: {file}: "
            f"{files.os_error_reason(error)}. Type tracking.uri=sqlite:///<a file that can be "
            "written>, or tracking=none to store nothing."
        ) from error


def _check_driver(uri: str) -> None:
    """Raise ConfigError for a database whose URI or driver SQLAlchemy cannot use."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        make_url(uri).get_dialect().import_dbapi()
    except ValueError as error:
        # The error's text may hold a part of the password.
        problem = f"The store {secrets.redact(uri)} cannot be opened: its port is no number"
        raise ConfigError(f"{problem}. Type for example postgresql://host:5432/db.") from error
    except (ArgumentError, ImportError) as error:
        raise ConfigError(
            f"The store {secrets.redact(uri)} cannot be opened: {error}. Install the package, "
            "or name the driver that you have in the URI, for example postgresql+psycopg2://."
        ) from error


def is_database(uri: str) -> bool:
    """Return whether a store is a database that runs access directly, without a server."""
    return _scheme(uri) in _DATABASES


def sqlite_uri(file: Path) -> str:
    """Return the URI of a database file for SQLAlchemy, which decodes the path in it."""
    # No more than that is encoded, so that a message shows a folder's name as the user knows it.
    quoted = _RESERVED.sub(lambda char: f"%{ord(char[0]):02X}", str(file))
    # MLflow makes the folder of a sqlite:/// URI, and takes the path as it stands in the URI.
    # Where that is another folder, naming the driver keeps MLflow from it.
    scheme = "sqlite" if quoted == str(file) else "sqlite+pysqlite"
    return f"{scheme}:///{quoted}"


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of an absolute SQLite URI; None for any other store."""
    prefix, _, rest = uri.partition(":///")
    return Path(unquote(rest.partition("?")[0])) if prefix.split("+")[0] == "sqlite" else None


def port_record(uri: str) -> Path | None:
    """Return the file beside a SQLite store that holds the port of its `runner ui`, if one runs.

    None for any other store.
    """
    database = sqlite_path(uri)
    return database and database.with_name(f"{database.name}.port")


def local_server(uri: str, run_id: str) -> str | None:
    """Return the address of the `runner ui` of this machine that serves a run of a store, or None.

    The server is asked for the run: one of another folder may have taken the recorded port.
    """
    record = port_record(uri)
    if record:
        with suppress(OSError, ValueError):
            port = int(files.read_text(record))
            if is_answering(port, f"/api/2.0/mlflow/runs/get?run_id={quote(run_id)}"):
                return f"http://{LOOPBACK}:{port}"
    return None


def is_answering(port: int, path: str = "/health") -> bool:
    """Return whether a server on this machine answers a path, in the time that nobody notices."""
    # Not by urllib, which may send the request to a proxy.
    connection = HTTPConnection(LOOPBACK, port, timeout=0.3)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, OverflowError, HTTPException):
        return False
    finally:
        connection.close()


def _scheme(uri: str) -> str:
    """Return a URI's scheme in lower case, without a driver; empty for a path."""
    match = _SCHEME.match(uri)
    return match[1].lower() if match else ""


def _names_server(uri: str) -> bool:
    """Return whether a URI has a host, and no port that is none."""
    try:
        parts = urlsplit(uri)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port in letters, half an IPv6 address
        return False


def short_cause(message: str) -> str:
    """Return the operating system's error in a message, else its first line, without the SQL.

    A store's error is often a long chain of connection errors.
    """
    error = re.search(r"\[Errno -?\d+\] [\w ]+", message)
    if error:
        return error.group()
    certificate = re.search(r"certificate verify failed[^('\"]*", message)
    if certificate:
        remedy = "type MLFLOW_TRACKING_SERVER_CERT_PATH=<file of the server's certificate>"
        return f"{certificate.group().strip()}; {remedy}"
    # SQLAlchemy puts the statement and its values on the lines after the first.
    return message.partition("\n")[0][:_MAX_CAUSE_CHARACTERS]
