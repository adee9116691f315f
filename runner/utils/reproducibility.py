"""Seed and save random generators, and restore the process's torch settings after a run.

Jobs of a sweep may share a process (hydra/launcher=basic): a setting or a random stream that one
run leaves behind would change the next one.
"""

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
    dtype = torch.get_default_dtype()
    threads = torch.get_num_threads()
    matmul_precision = torch.get_float32_matmul_precision()
    cudnn_tf32 = cudnn.allow_tf32
    cudnn_benchmark = cudnn.benchmark
    cudnn_deterministic = cudnn.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly = torch.is_anomaly_enabled()
    grad = torch.is_grad_enabled()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    generators = host_rng_state()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul_precision)
        cudnn.allow_tf32 = cudnn_tf32
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        cudnn.benchmark = cudnn_benchmark
        cudnn.deterministic = cudnn_deterministic
        torch.set_anomaly_enabled(anomaly)
        torch.set_grad_enabled(grad)
        _restore_env("CUBLAS_WORKSPACE_CONFIG", workspace)
        set_host_rng_state(generators)


def host_rng_state() -> tuple[Any, ...]:
    """Return the states of the host's generators: torch's, Python's, NumPy's."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def set_host_rng_state(states: tuple[Any, ...]) -> None:
    """Set the host's generators to states that host_rng_state returned."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def seed_host(seed: int) -> None:
    """Seed the host's generators: torch's, Python's, NumPy's. Those of devices stay as they are."""
    # torch.manual_seed would seed the devices' generators, too, which dropout draws from.
    torch.random.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits only


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator of torch, NumPy or Python in place; anything else stays as it is."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)  # NumPy takes 32 bits only
    elif isinstance(generator, random.Random):
        generator.seed(seed)


def _restore_env(key: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(key, None)
    else:
        os.environ[key] = value


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, those of all devices included."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits only
    torch.manual_seed(seed)
    tpu.seed(seed)


def make_deterministic() -> None:
    """Have torch raise an error for operations whose result can differ between runs."""
    # cuBLAS is deterministic with a workspace of a fixed size only (CUDA's cuBLAS documentation,
    # "Results reproducibility"); the user's own setting stays.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and the device's generators.

    Only tensors and plain containers are in it, so that torch.load(weights_only=True) reads it.
    """
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    states = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    device_state = accelerator.device_rng_state(device)
    if device_state is not None:
        states[device.type] = device_state
    return states


def set_rng_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to states that rng_state returned.

    The generator of a device whose type is not in them keeps its present state.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"].clone())
    if device.type in states:
        accelerator.set_device_rng_state(states[device.type].clone(), device)
