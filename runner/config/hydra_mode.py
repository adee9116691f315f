"""Keep Hydra from composing the config a second time, only to read hydra.mode from it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra

from runner.config.overrides import config_dir

_HARMLESS = ("hydra.run.dir=", "hydra.sweep.dir=")
"""Overrides of Hydra's own config that cannot change its mode."""
_FLAGS = ("-m", "--multirun", "--config-dir", "-cd")


@contextmanager
def single_composition(argv: Sequence[str]) -> Iterator[None]:
    """Let Hydra compose a command once within the context, where nothing can set hydra.mode.

    Hydra 1.3 composes twice: first to see whether a config makes the command a sweep. Where none
    can, the composition is skipped with its own answer, None: --multirun alone decides.

    Args:
        argv: the command as Hydra gets it.
    """
    if _may_set_mode(argv):
        yield
        return
    composing = Hydra.get_mode
    Hydra.get_mode = _no_mode
    try:
        yield
    finally:
        Hydra.get_mode = composing


def _no_mode(*_: Any, **__: Any) -> None:
    """Stand in for Hydra.get_mode, which returns None where no config sets the mode."""


def _may_set_mode(argv: Sequence[str]) -> bool:
    """Return whether a word of the command, or a config that it may compose, can set hydra.mode."""
    # A job of a sweep: the command line has the last word.
    if "hydra.mode=RUN" in argv:
        return False
    folder = config_dir(argv)
    for word in argv:
        if word.startswith("-"):
            if word.partition("=")[0] not in _FLAGS:
                return True
            continue
        key = word.partition("=")[0]
        # Of the built-in configs only those of the group sweep set it. Another package may add
        # configs to Hydra's search path, whose groups take a plus.
        adds_group = key.startswith("+") and "." not in key
        is_hydras = "hydra" in word and not word.startswith(_HARMLESS)
        if adds_group or is_hydras or key.startswith("sweep"):
            return True
    return folder is not None and any(map(_names_hydra, folder.rglob("*.yaml")))


def _names_hydra(path: Path) -> bool:
    try:
        return b"hydra" in path.read_bytes()
    except OSError:
        return True
