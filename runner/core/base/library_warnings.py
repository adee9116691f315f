"""Silence log lines and warnings that libraries print while they are imported or used."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def suppress_warnings(level: int = logging.WARNING) -> Iterator[None]:
    """Suppress Python warnings, and log records up to a level, within a context."""
    previous_level = logging.root.manager.disable
    # A caller may have disabled more already.
    logging.disable(max(previous_level, level))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)
