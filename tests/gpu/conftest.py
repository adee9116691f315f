"""What the tests on a GPU share."""

import warnings
from contextlib import contextmanager

import pytest
import torch


@pytest.fixture
def refused_waits():
    """A context in which an operation that makes the host wait for the device is an error."""

    @contextmanager
    def context():
        with warnings.catch_warnings(action="ignore"):  # torch calls this mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context
