"""Silence log lines and warnings of libraries that print them while they are imported."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def suppress_import_warnings() -> Iterator[None]:
    """Suppress Python warnings, and log records below ERROR, within a context."""
    previous_level = logging.root.manager.disable
    # A caller may have disabled more than warnings already.
    logging.disable(max(previous_level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)
