"""Measure what products and copies reach on a device of this machine."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from omegaconf import OmegaConf

from runner.core import accelerators, files, random_streams, tensor_facts
from runner.diagnostics.memory.limits import memory_limit
from runner.planning.room import DeviceSpec

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
_SIZES = {"cpu": (512, 1024), "cuda": (4096, 8192)}
"""Edges of the square matrices that are multiplied: the best one counts."""
_COPIED_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Bytes of a tensor that is copied, beyond caches."""
MEASURED = ("cpu", "cuda")
"""Types of devices that are measured."""
MAX_SECONDS = 0.5
"""Seconds for which a product or a copy is repeated."""


def measure_device(
    accelerator: accelerators.Accelerator, formats: tuple[str, ...] = (*DTYPES, "tf32")
) -> DeviceSpec:
    """Return the facts of a device here, with peaks that are what products reach.

    Args:
        accelerator: the device; it should have nothing else to do.
        formats: of the products; those that the device lacks are left out.
    """
    device = accelerator.device
    kind = device.type if device.type in _SIZES else "cpu"
    is_nvidia = kind == "cuda" and not torch.version.hip
    rates = {}
    for name in formats:
        if name == "tf32" and kind != "cuda":
            continue
        dtype = DTYPES.get(name, torch.float32)
        restore = random_streams.saved_float32_switches()
        random_streams.set_float32_switches("high" if name == "tf32" else "highest")
        with suppress(RuntimeError):  # the device has no such products
            rates[name] = max(_product_rate(device, dtype, size) for size in _SIZES[kind])
        restore()
    if is_nvidia:
        with suppress(RuntimeError):
            rates["float8"] = max(_float8_rate(device, size) for size in _SIZES[kind])
    source = torch.ones(_COPIED_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / _seconds(device, lambda: target.copy_(source))
    _, memory = memory_limit(device)
    return DeviceSpec(
        name=accelerator.name,
        memory_gib=round(memory / tensor_facts.GIB, 2),
        bandwidth=round(copied / 1e9, 1),
        capability=[*torch.cuda.get_device_capability(device)] if is_nvidia else None,
        tflops={name: float(f"{rate / 1e12:.4g}") for name, rate in rates.items()},
        reach={**dict.fromkeys(rates, 1.0), "bandwidth": 1.0},
        sources={"facts": f"measured here, torch {torch.__version__}"},
    )


def write_device(path: Path, card: DeviceSpec) -> Path:
    """Write a device's yaml, which `device=` then takes."""
    head = f"# {card.name}, measured: the peaks are what large products reach.\n"
    return files.write_text(path, head + OmegaConf.to_yaml(OmegaConf.create(asdict(card))))


def _product_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the operations per second of products of square matrices."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _seconds(device, lambda: torch.mm(a, b))


def _float8_rate(device: torch.device, size: int) -> float:
    """Return the operations per second of products in FP8 with one scale for each matrix."""
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=device)
    run = partial(torch._scaled_mm, a, b.t(), scale, scale, out_dtype=torch.bfloat16)
    return 2 * size**3 / _seconds(device, run)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Return the least seconds of several calls."""
    times: list[float] = []
    while len(times) < 3 or (sum(times) < MAX_SECONDS and len(times) < 50):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
