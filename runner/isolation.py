"""What a run may change in the process, put back when it ends, so that no job of a sweep sees
what the one before it set."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch

from runner.errors import RunnerError


@contextmanager
def process_state() -> Iterator[None]:
    """Save and restore default dtype, matmul precision, determinism, threads and RNG streams."""
    cudnn = torch.backends.cudnn
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    matmul, tf32 = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    flags = cudnn.benchmark, cudnn.deterministic
    anomaly, grad = torch.is_anomaly_enabled(), torch.is_grad_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
        cudnn.allow_tf32 = tf32
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        cudnn.benchmark, cudnn.deterministic = flags
        torch.set_anomaly_enabled(anomaly)
        torch.set_grad_enabled(grad)
        _restore_env("CUBLAS_WORKSPACE_CONFIG", workspace)
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        np.random.set_state(streams[2])


def _restore_env(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    else:
        os.environ[key] = value


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def make_deterministic() -> None:
    """Have torch refuse operations whose result can differ between runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


class Stopped(RunnerError):
    """The run was stopped by a signal after a checkpoint. Exit status 130 or 143."""

    def __init__(self, number: int) -> None:
        self.exit_status = 128 + number
        super().__init__(f"Stopped by {signal.Signals(number).name}.")


class StopSignals:
    """Context that turns the first SIGINT or SIGTERM into a request that the loop sees between
    steps; a second SIGINT interrupts at once. Outside the main thread it changes nothing."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number

    def requested(self) -> bool:
        return self.number is not None

    def check(self) -> None:
        """Raise Stopped if a signal came."""
        if self.number is not None:
            raise Stopped(self.number)
