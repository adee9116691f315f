"""Text as bytes: the documentation that ships with Python, or any file."""

import errno
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.splits import Splits, held_out, require_at_least
from runner.utils.errors import ConfigError

_EMPTY = torch.empty(0, dtype=torch.uint8)


class TextWindows(Dataset):
    """Consecutive windows of a byte sequence, each with its targets one byte on.

    Args:
        tokens: uint8 [N].
        context: T, the window's length in tokens; windows do not overlap.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return input and target, int64 [T] each."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = self.tokens[start : start + self.context + 1].to(torch.int64)
        return window[:-1], window[1:]

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes

    def to(self, device: torch.device) -> "TextWindows":
        """The same on a device, whose indices `batch` then takes."""
        return TextWindows(self.tokens.to(device), self.context)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gather many windows at once: indices int64 [B] to input and target, int64 [B, T]."""
        offsets = torch.arange(self.context + 1, device=self.tokens.device)
        windows = self.tokens[indices[:, None] * self.context + offsets].to(torch.int64)
        return windows[:, :-1], windows[:, 1:]


def text(path: str | None = None, context: int = 128, val_fraction: float = 0.1) -> Splits:
    """Cut a text into windows of bytes; the last part is for validation.

    Args:
        path: a file, read as bytes. None: the topics of Python's own documentation (0.5 MB; the
            text differs a little between Python versions).
        context: tokens in a window.
        val_fraction: share for validation, between 0 and 1.

    Raises:
        ConfigError: the file cannot be read or is too short for one window on each side.
    """
    require_at_least("text", context=(context, 1))
    tokens = _embedded() if path is None else _read(Path(path))
    enough = context + 1
    if len(tokens) < 2 * enough:
        raise ConfigError(_too_short(path, len(tokens), context, 2 * enough))
    cut = len(tokens) - held_out(len(tokens), val_fraction, "text")
    if min(cut, len(tokens) - cut) < enough:
        raise ConfigError(
            f"data=text: val_fraction={val_fraction} of {len(tokens)} bytes leaves less than one "
            f"window of {context} + 1 bytes on one side. Type data.val_fraction=0.5, a smaller "
            "data.context=N, or give a longer file."
        )
    return Splits(TextWindows(tokens[:cut], context), TextWindows(tokens[cut:], context))


def _too_short(path: str | None, length: int, context: int, needed: int) -> str:
    what = "is empty" if length == 0 else f"has {length} bytes"
    return (
        f"data=text: {path or 'the built-in text'} {what}; context={context} needs {needed} bytes "
        "or more. Type data.path=FILE with a longer file, or a smaller data.context=N."
    )


def _read(path: Path) -> Tensor:
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is no file")  # a pipe would never end
        content = path.read_bytes()
    except OSError as problem:
        raise ConfigError(
            f"data=text: cannot read {path.absolute()} ({problem.strerror}). "
            "Type data.path=FILE with a file that exists, or data.path=null for the built-in text."
        ) from problem
    return _tokens(content)


def _embedded() -> Tensor:
    from pydoc_data.topics import topics

    return _tokens("\n".join(topics[name] for name in sorted(topics)).encode())


def _tokens(content: bytes) -> Tensor:
    # frombuffer refuses an empty buffer and warns about a read-only one.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else _EMPTY
