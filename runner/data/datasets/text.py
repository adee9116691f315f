"""Load a text as bytes: the documentation that ships with Python, or any file.

A token is a byte, so the vocabulary is 256 and no tokenizer is needed.
"""

import errno
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.core import ConfigError
from runner.data.splits import Splits, held_out, require_at_least


@dataclass(frozen=True, eq=False)
class TextWindows(Dataset):
    """A data set of consecutive windows of a byte sequence; targets are shifted by one byte.

    It stays in memory as bytes, an eighth of the int64 that models take, and is gathered by batch.

    Attributes:
        tokens: uint8 [N].
        context: T, the window's length in tokens; windows do not overlap.
    """

    tokens: Tensor
    context: int

    def __len__(self) -> int:
        """Return the number of windows; the last one needs a byte after it as its last target."""
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
        """Bytes of the tokens in memory."""
        return self.tokens.nbytes

    def to(self, device: torch.device) -> "TextWindows":
        """Return a copy on a device; its `batch` takes indices on that device."""
        return TextWindows(self.tokens.to(device), self.context)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return many windows: indices int64 [B] to input and target, int64 [B, T] each."""
        offsets = torch.arange(self.context + 1, device=self.tokens.device)
        windows = self.tokens[indices[:, None] * self.context + offsets].to(torch.int64)
        return windows[:, :-1], windows[:, 1:]


def text(path: str | None = None, context: int = 128, val_fraction: float = 0.1) -> Splits:
    """Load a text as windows of bytes; its last part is for validation.

    Args:
        path: a file, read as bytes. None: the topics of Python's own documentation (0.5 MB; the
            text differs a little between Python versions).
        context: T, tokens in a window, at least 1.
        val_fraction: share for validation, between 0 and 1.

    Returns:
        TextWindows with examples of input and target, int64 [T] each, values 0 to 255.

    Raises:
        ConfigError: the file cannot be read or is too short for one window on each side.
    """
    require_at_least("text", context=(context, 1))
    if path is None:
        from pydoc_data.topics import topics

        content = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        content = _read(Path(path))
    tokens = torch.empty(0, dtype=torch.uint8)
    if content:
        # frombuffer refuses an empty buffer and warns about a read-only one.
        tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    window_bytes = context + 1  # with the last target
    if len(tokens) < 2 * window_bytes:
        size = f"has {len(tokens)} bytes" if content else "is empty"
        raise ConfigError(
            f"data=text: {path or 'the built-in text'} {size}; context={context} needs "
            f"{2 * window_bytes} bytes or more. Type a longer data.path=FILE or less data.context."
        )
    cut = len(tokens) - held_out(len(tokens), val_fraction, "text")
    if min(cut, len(tokens) - cut) < window_bytes:
        raise ConfigError(
            f"data=text: val_fraction={val_fraction} of {len(tokens)} bytes leaves less than "
            f"{context} + 1 bytes on one side. Type data.val_fraction=0.5 or data.context=<less>."
        )
    return Splits(TextWindows(tokens[:cut], context), TextWindows(tokens[cut:], context))


def _read(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is not a file")  # a pipe would never end
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data=text: cannot read {path.absolute()} ({error.strerror}). "
            "Type data.path=FILE with a file that exists, or data.path=null for the built-in text."
        ) from error
