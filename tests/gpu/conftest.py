"""What the tests on a GPU share."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from imitated_cuda import imitated_cuda


@pytest.fixture(autouse=True)
def _device(request):
    """The machine's GPU; where it has none, an imitated one for the tests that are marked so."""
    if torch.cuda.is_available():
        yield
    elif request.node.get_closest_marker("imitated"):
        with imitated_cuda():
            yield
    else:
        pytest.skip("no CUDA device on this machine")


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
