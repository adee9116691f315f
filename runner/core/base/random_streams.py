"""Seed and save random generators, and restore the process's torch settings after a run.

Jobs of a sweep may share a process (hydra/launcher=basic): a setting or a random stream that one
run leaves behind would change the next one.
"""

import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.core.base import accelerators as accelerator


@contextmanager
def process_state() -> Iterator[None]:
    """Save and restore default dtype, matmul precision, determinism, threads and RNG streams."""
    cudnn = torch.backends.cudnn
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    def restore_workspace() -> None:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        if workspace is not None:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace

    with ExitStack() as stack:
        stack.callback(set_host_rng_state, host_rng_state())
        stack.callback(restore_workspace)
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        # A callback that starts a run may be called within torch.no_grad().
        torch.set_grad_enabled(True)
        stack.callback(torch.set_anomaly_enabled, torch.is_anomaly_enabled())
        stack.callback(setattr, cudnn, "deterministic", cudnn.deterministic)
        stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        stack.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        stack.callback(saved_float32_switches())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        yield


def saved_float32_switches() -> Callable[[], None]:
    """Return a function that sets torch's TF32 switches to what they are now.

    torch has two families of switches, and refuses to read the old one (allow_tf32) once a program
    has set the new one (fp32_precision), as transformers does.
    """
    backends: Any = torch.backends
    cudnn = backends.cudnn
    restores = ExitStack()
    try:
        matmul_precision = torch.get_float32_matmul_precision()
        restores.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
        restores.callback(torch.set_float32_matmul_precision, matmul_precision)
    except RuntimeError:
        matmuls = (backends.mkldnn.matmul, backends.cuda.matmul)
        # The general ones last, which are set first: setting one sets those below it.
        for place in (cudnn.rnn, cudnn.conv, cudnn, *matmuls, backends):
            restores.callback(setattr, place, "fp32_precision", place.fp32_precision)
    return restores.close


def set_float32_switches(precision: str) -> None:
    """Set torch's TF32 switches for matrix products and for cuDNN.

    Args:
        precision: as torch.set_float32_matmul_precision takes it; cuDNN rounds to TF32 under any
            but "highest".
    """
    allows_tf32 = precision != "highest"
    torch.set_float32_matmul_precision(precision)
    # PyTorch's default is on, so that convolutions would round under "highest" too.
    torch.backends.cudnn.allow_tf32 = allows_tf32
    cudnn: Any = torch.backends.cudnn
    for kind in (cudnn.conv, cudnn.rnn):
        # A program's torch.backends.fp32_precision outweighs allow_tf32.
        if (kind.fp32_precision == "tf32") != allows_tf32:
            kind.fp32_precision = "tf32" if allows_tf32 else "ieee"


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


def saved_generator(generator: Any) -> Callable[[], None] | None:
    """Return a function that restores the state of a generator of torch, NumPy or Python; None for
    anything else."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        return partial(generator.set_state, generator.get_state())  # type: ignore[arg-type]
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    # The operating system's has no state.
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return partial(generator.setstate, generator.getstate())
    return None


@contextmanager
def seeded(seed: int, device: torch.device, values: Iterable[Any]) -> Iterator[None]:
    """Seed all generators, and those among some values; restore them on exit.

    Args:
        seed: of each generator.
        device: whose generator is restored, beside those of the host.
        values: of which those that are no generators are left alone.
    """
    with ExitStack() as stack:
        stack.callback(set_rng_state, rng_state(device), device)
        seed_all(seed)
        for value in values:
            restore = saved_generator(value)
            if restore is not None:
                stack.callback(restore)
                seed_generator(value, seed)
        yield


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, those of all devices included."""
    seed_host(seed)
    torch.manual_seed(seed)


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


@contextmanager
def saved_forward_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Return a context at whose end what a forward and a backward of a model change is restored.

    That is the random generators, the tensors of `own_tensors`, and of each module which parameters
    it has, its mode and its attributes, with what lists, dicts, sets, deques and dataclasses among
    them hold. Attributes of other objects stay as they are.

    Args:
        model: its other weights are neither saved nor restored.
        device: whose generator is saved, too.
    """
    own = own_tensors(model)
    # Weights that an optimizer trains, also those that an attribute holds (nn.LSTM's flat weights).
    seen = {id(p) for p in model.parameters()} - {id(tensor) for tensor in own}
    with ExitStack() as stack:
        stack.callback(set_rng_state, rng_state(device), device)
        for tensor in own:
            _save_members(tensor, stack, seen)
        for module in model.modules():
            # A forward may also put another tensor in the place of a buffer, or make a parameter.
            _save_members(module._buffers, stack, seen)
            stack.callback(_remove_new, module._parameters, {*module._parameters})
            attributes = plain_attributes(module)
            for value in attributes.values():
                _save_members(value, stack, seen)
            stack.callback(_set_attributes, module, attributes)
        yield


def own_tensors(model: nn.Module) -> list[Tensor]:
    """Return the tensors that a model's own forward may change: its buffers, and its frozen weights
    unless they outnumber the others."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # A moving average of weights is as large as they are. The frozen model under an adapter is
    # larger, is only read, and a copy of it may not fit into memory. Shards are of another class.
    frozen = [p for p in model.parameters() if not p.requires_grad and type(p) is nn.Parameter]
    if sum(p.numel() for p in frozen) > trained:
        frozen = []
    return [*model.buffers(), *frozen]


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has values in memory, each element its own, that can be copied."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    has_values = not tensor.is_meta and not tensor.is_quantized
    # 1: certainly, as an expanded one.
    return has_values and torch._debug_has_internal_overlap(tensor) != 1


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are no parameters, buffers or modules, by name; of a
    precision's own layer its mode and its numbers alone."""
    registered = ("_parameters", "_buffers", "_modules")
    attributes = {key: value for key, value in vars(module).items() if key not in registered}
    # Its precision saves a layer's other attributes, or they refer to its library's registries.
    if type(module).__module__.startswith(("runner.precision.", "transformer_engine.")):
        numbers = {k: v for k, v in attributes.items() if type(v) in (int, float)}
        return {**numbers, "training": module.training}
    return attributes


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    for key in plain_attributes(module).keys() - attributes.keys():
        del vars(module)[key]
    vars(module).update(attributes)


def _save_members(value: Any, stack: ExitStack, seen: set[int]) -> None:
    """Have a stack restore the content of a tensor, an array, a generator or a container, and of a
    container's members; `seen` has the ids of what is left out or done."""
    if id(value) in seen:
        return
    seen.add(id(value))
    members: Any = ()
    restore_generator = saved_generator(value)
    if restore_generator is not None:
        stack.callback(restore_generator)
    elif isinstance(value, Tensor):
        if is_dense(value):
            stack.callback(_copy_if_changed, value, value.detach().clone())
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            stack.callback(np.copyto, value, value.copy())
    elif isinstance(value, dict | list | set | deque):
        members = value.values() if isinstance(value, dict) else value
        # No copy of its class, which may refuse to be made.
        content = dict(value) if isinstance(value, dict) else [*value]
        stack.callback(_refill, value, content)
    elif isinstance(value, tuple):
        members = value
    elif is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        _save_members(vars(value), stack, seen)
    for member in [*members]:
        _save_members(member, stack, seen)


def _remove_new(parameters: dict[str, Any], names: set[str]) -> None:
    """Remove parameters that were made meanwhile; FSDP exchanges those that are there by itself."""
    for name in parameters.keys() - names:
        del parameters[name]


def _copy_if_changed(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        if not torch.equal(tensor, value):
            tensor.copy_(value)


def _refill(container: Any, content: Any) -> None:
    parts = [(*c, *c.values()) if isinstance(c, dict) else (*c,) for c in (container, content)]
    # An unchanged one may be of a class that refuses changes.
    if len(parts[0]) == len(parts[1]) and all(map(is_, *parts)):
        return
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(content)
