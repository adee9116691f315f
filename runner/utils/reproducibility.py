"""What a run may change in the process, put back when it ends, so that no job of a sweep sees
what the one before it set."""

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from runner.utils import accelerator, tpu


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
    drawn = random_streams()
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
        set_random_streams(drawn)


def random_streams() -> tuple[Any, ...]:
    """The states of the host's generators: torch's, Python's, NumPy's."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_random_streams(states: tuple[Any, ...]) -> None:
    """Take back what `streams` gave."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


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
    tpu.seed(seed)


def make_deterministic() -> None:
    """Have torch refuse operations whose result can differ between runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def rng_state(device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's and torch's generators, the device's too, in plain containers."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    states = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if (drawn := accelerator.rng_state(device)) is not None:
        states[device.type] = drawn
    return states


def set_rng_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Take back what rng_state gave; another kind of device keeps its seeded stream."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"].clone())
    if device.type in states:
        accelerator.set_rng_state(states[device.type].clone(), device)
