"""Sign what this user's commands compose, to distinguish it from a stranger's file later.

The key is random, belongs to one user, and is outside every folder of runs: a folder that was
downloaded may hold any config, journal and checkpoint, but no signature made with this key. A
signature says who composed a text, not that the file around it is unchanged.
"""

import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

KEY_BYTES = 32


def key_path() -> Path:
    """Return the path of this user's key: $XDG_DATA_HOME/precision-runner/key, or the same under
    ~/.local/share.

    Raises:
        RuntimeError: this user has no home folder.
    """
    given = Path(os.environ.get("XDG_DATA_HOME", ""))
    data = given if given.is_absolute() else Path.home() / ".local" / "share"
    return data / "precision-runner" / "key"


def sign(purpose: str, text: str) -> str:
    """Return the signature of a text; empty where there is no key and none can be made.

    Args:
        purpose: what the text is, so that a signature of one thing is none of another.
        text: what a command of this user composed.
    """
    try:
        key = _read(key_path(), creates=True)
    except (OSError, ValueError, RuntimeError):
        return ""
    return _digest(key, purpose, text)


def is_signed(purpose: str, text: str, signature: object) -> bool:
    """Check a signature of `sign` with this user's key; False where there is no key."""
    if not isinstance(signature, str) or not signature:
        return False
    try:
        key = _read(key_path())
    except (OSError, ValueError, RuntimeError):
        return False
    expected = _digest(key, purpose, text)
    return hmac.compare_digest(expected.encode(), signature.encode(errors="replace"))


def describe_key_location() -> str:
    """Return where the key is, and why it is not used if it is not, for a message."""
    try:
        path = key_path()
    except RuntimeError:
        return "none: this user has no home folder"
    try:
        # The reason of a key that is missing is that of why it cannot be made.
        _read(path, creates=True)
    except (OSError, ValueError) as error:
        return f"{path}, which is not used: {getattr(error, 'strerror', '') or error}"
    return str(path)


def _digest(key: bytes, purpose: str, text: str) -> str:
    # Without a separator, two pairs of purpose and text could give the same content. Arguments that
    # are not UTF-8 hold surrogates.
    content = f"{purpose}\0{text}".encode(errors="surrogatepass")
    return hmac.new(key, content, "sha256").hexdigest()


def _read(path: Path, creates: bool = False) -> bytes:
    """Return the key; with `creates`, make it where there is none.

    Raises:
        ValueError: others could have written or read the file.
        OSError: it cannot be read or made.
    """
    if creates and not path.exists():
        _create(path)
    # A link is not followed. Opening a pipe does not wait for a writer; it is refused below.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != KEY_BYTES:
            raise ValueError(f"it is no file of {KEY_BYTES} bytes. Delete it")
        if status.st_uid != os.geteuid():
            raise ValueError("it belongs to another user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ValueError(f"others can open it. Type chmod 600 {path}")
        return os.read(file, KEY_BYTES)
    finally:
        os.close(file)


def _create(path: Path) -> None:
    """Write a new random key, unless another process has written one meanwhile."""
    # Jobs of a sweep start together: link() shows other processes a complete key only, and fails
    # where another process was first.
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, secrets.token_bytes(KEY_BYTES))
        os.fsync(file)
        try:
            os.link(draft, path)
        except OSError:
            # Another process was first, or the file system has no hard links.
            with suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                draft.replace(path)
    finally:
        os.close(file)
        draft.unlink(missing_ok=True)
