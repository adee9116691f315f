"""The generators of Python, NumPy and torch, as plain containers."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_state(device: torch.device) -> dict[str, Any]:
    """Python's, NumPy's and torch's generators, the device's too, in plain containers."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    states = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if device.type in ("cuda", "mps"):
        states["device"] = getattr(torch, device.type).get_rng_state()
    return states


def set_rng_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Take back what rng_state gave; another kind of device keeps its seeded stream."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"].clone())
    if "device" in states and device.type in ("cuda", "mps"):
        getattr(torch, device.type).set_rng_state(states["device"].clone())
