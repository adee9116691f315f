"""Write files atomically and through no link, and read files that may come from strangers.

A stranger's folder may hold a link to any file of this user's in the place of each file that a
command writes there. So every file in an output folder is opened by `open_output`, or written by a
library after `prepare_output`; `check_links` refuses a folder whose subfolders lead out of it.

A folder is locked for one command, because two commands would write the same files. The lock is the
kernel's (flock), so it ends with the process that holds it, however that ends.
"""

import fcntl
import io
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, cast, get_args, get_origin, get_type_hints

from runner.core.base.annotations import fits_type
from runner.core.base.errors import ConfigError
from runner.core.base.layout import WRITTEN_PLACES
from runner.core.base.secrets import redact_values

MAX_CONFIG_BYTES = 2**20
"""Largest file of a config; PyYAML takes seconds for more."""
_MAX_VALUES = 100_000
"""Largest number of values in a config."""


def prepare_output(path: Path) -> Path:
    """Return the path of a file that is about to be written, with nothing but a plain file there.

    A link, a pipe or a device in the file's place is deleted; what a link leads to is unchanged.

    Raises:
        OSError: it cannot be deleted.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.unlink()
    return path


def open_output(path: Path, flags: int, permissions: int = 0o666) -> int:
    """Open a file of an output folder through no link; return its descriptor.

    Args:
        path: of the file, which is made if it is missing.
        flags: os.O_WRONLY or os.O_RDWR, with os.O_APPEND or os.O_TRUNC if need be.
        permissions: of a new file.

    Raises:
        OSError: it cannot be written.
    """
    flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(prepare_output(path), flags, permissions)


def link_out_of(folder: Path, place: Path) -> Path | None:
    """Return the first path at or below a place in a folder that leads out of the folder.

    The folder itself may be a link, for example to another disk.
    """
    root = os.path.realpath(folder)
    # Only links are resolved among thousands of files: resolving asks the file system per folder.
    links = (path for path in place.rglob("*") if path.is_symlink())
    for path in chain([place], links):
        if not Path(os.path.realpath(path)).is_relative_to(root):
            return path
    return None


def path_exists(path: str) -> bool:
    """Return whether a text names an existing file or folder, whatever text it is."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        # A value that is no path: too long for a name, or with a null character.
        return False


def check_links(folder: Path) -> None:
    """Refuse to write into an output folder where a link leads out of it.

    Looked at are the places that commands write into, and the folders of a sweep's jobs: other
    files beside them are the user's. A link in place of a single file in the folder itself is no
    harm, see `prepare_output`.

    Raises:
        ConfigError: such a place is a link that leads out of the folder, or holds one.
    """
    jobs = [path for path in folder.glob("*") if path.name.isdecimal()]
    for place in (*jobs, *(folder / name for name in WRITTEN_PLACES)):
        link = link_out_of(folder, place)
        if link:
            raise ConfigError(
                f"{link} is a link to {os.path.realpath(link)}: nothing is written out of a run's "
                "or a sweep's folder through a link. Delete the link; the whole folder may be one."
            )


@contextmanager
def replaced_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a draft that takes the place of a file in one step, at the end of the context.

    The file's folder is made if it is missing.

    Raises:
        OSError: it cannot be written; the old file is unchanged, and the draft deleted.
    """
    # Readers see the old or the new content: a rename within a folder is atomic.
    draft = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with os.fdopen(open_output(draft, os.O_WRONLY | os.O_TRUNC), mode) as file:
            yield file
        draft.replace(path)
    except BaseException:  # a stop signal, too: the draft may be gigabytes
        draft.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> Path:
    """Replace a file's text in one step and return its path; make its folder if it is missing.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
    with replaced_file(path, "w") as file:
        file.write(text)
    return path


def read_text(path: Path, max_bytes: int = 2**24) -> str:
    """Return the text of a file that may come from a stranger.

    Raises:
        OSError: it cannot be read, or is no regular file (reading a pipe would never end).
        ValueError: it is larger than `max_bytes`, or is not UTF-8.
    """
    # O_NONBLOCK: opening a pipe without a writer would wait for one.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no plain file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} is larger than {max_bytes} bytes")
    return data.decode()


def check_values(content: Any, name: object = "it") -> Any:
    """Refuse nested containers that unfold to more values than a config has; return all others.

    In YAML (aliases) and in a pickle one value may be in many places: a few lines may stand for
    more than the memory.

    Args:
        content: the containers.
        name: of what holds them, for the message.

    Raises:
        ConfigError: they hold too many.
    """
    found = [content]
    for value in found:
        if len(found) > _MAX_VALUES:
            raise ConfigError(f"{name} holds more than {_MAX_VALUES} values, as no config does.")
        if isinstance(value, Mapping):
            found += value.values()
        elif isinstance(value, list | tuple):
            found += value
    return content


def package_file(package: str, inside: str) -> Path | None:
    """Return the path of a file or folder of an installed package; None where there is none.

    Args:
        package: top-level name, for example rxnmapper.
        inside: relative path in its folder.
    """
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / inside
        if path.exists():
            return path
    return None


@contextmanager
def imports_without_working_directory() -> Iterator[None]:
    """Have imports find nothing new in the working directory, which may be a stranger's."""
    path = [*sys.path]
    sys.path[:] = import_paths()
    try:
        yield
    finally:
        # A library may have added a folder of its own.
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]


def import_paths() -> list[str]:
    """Return sys.path without the working directory, which may be a stranger's."""
    return [entry for entry in sys.path if Path(entry).resolve() != Path.cwd()]


@contextmanager
def read_as_data() -> Iterator[None]:
    """Have the libraries that are called inside take the files that they read for data alone.

    Each torch.load refuses a pickle that holds more than tensors and plain values: what libraries
    pass to it, and what it does where they pass nothing, changes with their versions and the
    environment. Imports find nothing new in the working directory: libraries import packages that
    a file names, and a folder of such a name may be a stranger's.
    """
    changes = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
    before = {name: os.environ[name] for name in changes if name in os.environ}
    os.environ.update(changes)
    try:
        with imports_without_working_directory():
            yield
    finally:
        for name in changes:
            del os.environ[name]
        os.environ.update(before)


def read_json(path: Path) -> Any:
    """Return the value of a JSON file that may come from a stranger.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is too large, or no JSON.
    """
    try:
        return json.loads(read_text(path))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def check_version(file: str, kind: str, version: object, expected: object, remedy: str) -> None:
    """Refuse a file whose format has another version than the one that this program reads.

    Args:
        file: the file as the command names it, key=path.
        kind: what it is, in one noun.
        version: that it names; None where it names none.
        expected: the only version that is read.
        remedy: what to do instead.

    Raises:
        ConfigError: the versions differ.
    """
    # Types are compared first: a file from elsewhere may hold a value whose comparison fails.
    if type(version) is type(expected) and version == expected:
        return
    given = "without a version" if version is None else f"of version {str(version)[:40]}"
    raise ConfigError(
        f"{file} is a {kind} {given}; this program reads version {expected}. {remedy}"
    )


class _ErrorBuffer(io.RawIOBase):
    """A stream that reports success and stores the first error of the file that it writes to."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            if self.error is None:
                self.file.write(data)
        except OSError as error:
            self.error = error
        return memoryview(data).nbytes

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        # torch.export seeks back to 0 after it has written, and writes nothing more.
        return offset


@contextmanager
def write_with_torch(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for torch.save, as a context that replaces it at its end.

    Under its name the file is complete at any moment: the data is on the disk before the rename.

    Raises:
        OSError: it cannot be written.
    """
    with replaced_file(path) as file:
        # An exception inside torch's zip writer can abort the process when the writer is freed;
        # the buffer defers it until torch is done.
        buffer = _ErrorBuffer(file)
        yield cast("IO[bytes]", buffer)
        if buffer.error is not None:
            raise buffer.error
        file.flush()
        os.fsync(file.fileno())


def os_error_reason(error: BaseException) -> str:
    """Return an error's reason in one line: for an OSError the operating system's own words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__


def unreadable(error: PermissionError) -> ConfigError:
    """Return the message for a file that another user's permissions close."""
    return ConfigError(
        f"{error.filename} cannot be opened: {error.strerror}. Ask its owner for access, or copy "
        "what you may read to a folder of your own (cp -r) and type that folder."
    )


def write_json(path: Path, content: Any) -> Path:
    """Write a value as indented JSON without its secrets (see secrets.py); return the path."""
    return write_text(path, json.dumps(redact_values(content), indent=2) + "\n")


def write_table(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    """Write rows with the same keys as JSON that MLflow shows as a table; return the path."""
    columns = list(rows[0]) if rows else []
    data = [[row[column] for column in columns] for row in rows]
    return write_json(path, {"columns": columns, "data": data})


_open_descriptors: set[int] = set()


def _close_in_child() -> None:
    """Close the descriptors that a forked process inherits."""
    # flock belongs to the open file: a child with the descriptor would hold its parent's lock.
    while _open_descriptors:
        os.close(_open_descriptors.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def folder_lock(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder within a context.

    Args:
        folder: to lock.
        wait: wait for whoever holds the lock.

    Raises:
        ConfigError: another command holds it, and `wait` is false.
    """
    file = os.open(folder, os.O_RDONLY)
    _open_descriptors.add(file)
    try:
        if not _lock(file, wait):
            raise ConfigError(
                f"{folder}: another command is running in this folder. Wait for it, stop it, or "
                "leave out the folder, so that a new one is made."
            )
        yield
    finally:
        _open_descriptors.discard(file)
        os.close(file)


def is_locked(folder: Path) -> bool:
    """Return whether a command, of this process or another, holds the lock of a folder."""
    file = os.open(folder, os.O_RDONLY)
    try:
        return not _lock(file)
    finally:
        os.close(file)


def _lock(file: int, wait: bool = False) -> bool:
    """Return whether the lock of an open folder was taken."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: work without one
    return True


def interpolation_problem(content: Mapping[str, Any]) -> str:
    """Return why a config that was read from a file is not resolved; empty where it may be.

    A run writes resolved values. An interpolation in a file from elsewhere could read this
    machine's environment (`${oc.env:...}`), or call a resolver.

    Args:
        content: plain containers, with the interpolations as they are written.

    Raises:
        TypeError, ValueError: the content holds what no config does.
    """
    # The values are searched and not the file's text: YAML has other spellings of a character.
    if "${" in json.dumps(content):
        return "holds an interpolation, which would be resolved here"
    return ""


def dataclass_fields_from_json(kind: type, values: object) -> dict[str, Any]:
    """Return the entries of a mapping, read from a file, that are fields of a dataclass.

    Raises:
        ValueError: a value is missing or does not fit its annotation.
    """
    hints = get_type_hints(kind)
    if not isinstance(values, Mapping):
        raise ValueError(f"no {kind.__name__}")
    # Other keys are ignored: a newer version may have written the file.
    entries = {key: value for key, value in values.items() if key in hints}
    for key, value in entries.items():
        if not _fits_field(value, hints[key]):
            raise ValueError(f"{key} is no {kind.__name__}'s")
    # Both are MISSING for a field without a default.
    required = {field.name for field in fields(kind) if field.default is field.default_factory}
    lacking = required - set(entries)
    if lacking:
        raise ValueError(f"no {kind.__name__}: it lacks {', '.join(sorted(lacking))}")
    return entries


def _fits_field(value: Any, hint: Any) -> bool:
    """Return whether a value read from a file fits a field's annotation."""
    if not fits_type(value, hint):
        return False
    if get_origin(hint) is Literal and value not in get_args(hint):
        return False
    # The values of a mapping of Any are not looked at.
    if isinstance(value, Mapping) and get_args(hint):
        _, item_hint = get_args(hint)
        return all(_fits_field(item, item_hint) for item in value.values())
    return True
