"""Record what crosses the boundaries of a model's modules in one forward and backward.

Such a reference is also written to a file, and read from one of another machine, commit or version
of torch.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from runner.core import Batch, ConfigError, files, tensor_facts
from runner.diagnostics.divergence.boundaries import Boundary, Visitor
from runner.diagnostics.module_tensors import tensors_in

Call = tuple[str, int]
"""A module's name, and the number of its call."""
_CASTS = ("to", "type", "type_as", "half", "bfloat16", "float", "double", "copy")
"""Functions that round because the code says so. They excuse no error: a cast where the precision
has none is a bug."""


@dataclass
class NarrowCode:
    """A listener that notes in which modules' own code functions of torch return a narrow dtype.

    Attributes:
        dtype: the narrow one.
        by_autocast: names of the modules in which autocast casts an operand.
        computing: names of those in which a function computes in the dtype.
    """

    dtype: torch.dtype
    by_autocast: set[str] = field(default_factory=set)
    computing: set[str] = field(default_factory=set)

    def __call__(self, module: str, name: str, arguments: Any, result: Any) -> None:
        """Note a function's call."""
        if name in _CASTS:
            return
        operands = tensors_in(arguments)
        dtypes = {t.dtype for t in operands if t.is_floating_point()}
        results = tensors_in(result)
        # A view only has the dtype of what it is of; that of a grouped product is of no operand.
        passes_on = self.dtype in dtypes
        if not any(t.dtype is self.dtype and not (t._is_view() and passes_on) for t in results):
            return
        self.computing.add(module)
        # With a dtype among its arguments the code itself asked for it.
        asked = any(isinstance(leaf, torch.dtype) for leaf in tree_leaves(arguments))
        if not asked and dtypes - {self.dtype}:
            self.by_autocast.add(module)

    def modules(self, takers: Iterable[str]) -> set[str]:
        """Return the names of the modules whose own code rounds to the dtype because the precision
        has it so.

        Args:
            takers: names of the modules that take a tensor of the dtype.
        """
        return self.by_autocast | self.computing.intersection(takers)


@dataclass
class Reference:
    """The tensors of one forward and backward.

    Attributes:
        values: by boundary, in the order of the forward; one tensor at several boundaries where
            modules only pass it on.
        gradients: of the loss with respect to these, through that boundary alone, not scaled; one
            tensor at several boundaries where it is the same memory.
        parameter_gradients: by the parameter's name, not scaled.
        buffers: by name, after the forward and backward.
        owners: by boundary, the module whose own code computed the tensor.
        users: by boundary, the module whose own code takes it.
        generators: states of the random generators right before each call, by call; device states
            after the host's.
        writes_in_place: whether the model may write into what crosses boundaries.
        loss: of the batch.
        narrow_code: which modules' own code computes in the precision's narrow dtype; None where
            its functions were not seen.
    """

    values: dict[Boundary, Tensor] = field(default_factory=dict)
    gradients: dict[Boundary, Tensor] = field(default_factory=dict)
    parameter_gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    owners: dict[Boundary, str] = field(default_factory=dict)
    users: dict[Boundary, str] = field(default_factory=dict)
    generators: dict[Call, list[Tensor]] = field(default_factory=dict)
    writes_in_place: bool = True
    loss: float = 0.0
    narrow_code: NarrowCode | None = None


class GivenTensors:
    """The tensors that a visitor gave to the modules. One of them that crosses a later boundary
    unchanged is what modules only pass on."""

    def __init__(self) -> None:
        self._given = WeakTensorKeyDictionary()

    def add(self, boundary: Boundary, tensor: Tensor) -> None:
        """Note what a visitor gave at a boundary."""
        self._given[tensor] = (boundary, tensor._version)

    def source(self, tensor: Tensor) -> Boundary | None:
        """Return the boundary where a tensor was given; None where it was not, or was written
        into since."""
        noted = self._given.get(tensor)
        if noted is None:
            return None
        boundary, version = noted
        return boundary if version == tensor._version else None


class Overwritten(Exception):
    """The model wrote into a tensor after it was recorded: it must be recorded as copies."""


class Recorder(Visitor):
    """A visitor that records a reference.

    Args:
        device: whose generator is recorded beside the host's.
        copies: whether tensors are copied, as a model with operations in place needs.
    """

    def __init__(
        self,
        device: torch.device,
        copies: bool,
        receive: Callable[[Boundary, Tensor], None] | None = None,
    ) -> None:
        self.reference = Reference()
        self._receive = receive or self.reference.gradients.__setitem__
        self._device = device
        self._copies = copies
        self._given = GivenTensors()
        # The tensors are kept alive, with their versions when they were recorded.
        self._versions: list[tuple[Tensor, int]] = []

    def begin_call(self, module: str, call: int) -> None:
        """Record the states of the generators."""
        self.reference.generators[module, call] = generator_states(self._device)

    def visit(self, boundary: Boundary, owner: str, user: str, tensor: Tensor) -> Tensor:
        """Record a tensor; return a view of it whose gradient is that through this boundary."""
        reference = self.reference
        source = self._given.source(tensor)
        if source is not None:
            reference.values[boundary] = reference.values[source]
        elif self._copies:
            reference.values[boundary] = tensor.detach().clone()
        else:
            self._versions.append((tensor.detach(), tensor._version))
            reference.values[boundary] = tensor.detach()
        reference.owners[boundary] = owner
        reference.users[boundary] = user
        given = tensor
        if tensor.requires_grad:
            given = tensor.view_as(tensor)
            given.register_hook(partial(self._receive, boundary))
        self._given.add(boundary, given)
        return given

    def visit_written(
        self, boundary: Boundary, caller: Tensor, tensor: Tensor, writes: bool
    ) -> None:
        """Record an input that the module wrote into."""
        if writes:
            self.reference.values[boundary] = tensor.detach().clone()
            self.reference.owners[boundary] = self.reference.users[boundary] = boundary.module

    def finish(self, model: nn.Module, loss: Tensor, scale: float) -> Reference:
        """Return the reference, after the backward.

        Args:
            model: its parameters hold their gradients.
            loss: of the batch, not scaled.
            scale: what the gradients are divided by.

        Raises:
            Overwritten: the model wrote into a recorded tensor.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise Overwritten
        reference = self.reference
        reference.writes_in_place = self._copies
        reference.loss = loss.item()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                reference.parameter_gradients[name] = unscaled(parameter.grad, scale)
        # Copies, for the caller restores the model's own.
        reference.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        unscaled_gradients: dict[object, Tensor] = {}
        for boundary, gradient in reference.gradients.items():
            memory = _memory(gradient)
            if memory not in unscaled_gradients:
                unscaled_gradients[memory] = unscaled(gradient, scale)
            reference.gradients[boundary] = unscaled_gradients[memory]
        return reference


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Return by what two tensors are the same memory, seen as the same numbers."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def unscaled(gradient: Tensor, scale: float) -> Tensor:
    """Return a gradient divided by the loss scale; in float32 at least, where that changes it."""
    if scale == 1.0:
        return gradient.detach()
    wide = gradient.float() if gradient.itemsize < 4 else gradient
    return wide.detach() / scale


def generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of the host's and the device's random generators."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_generator_states(states: list[Tensor], device: torch.device) -> None:
    """Restore what generator_states returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


_FORMAT_FAMILY = "runner-diff-"
VERSION = "2"
_SUFFIX = ".safetensors"


def dump_path(folder: Path, step: int) -> Path:
    """Return the path of the dump of a step."""
    return folder / f"diff-{step:08d}{_SUFFIX}"


def is_dump(path: Path) -> bool:
    """Return whether a file is a dump."""
    if path.suffix != _SUFFIX or not path.is_file():
        return False
    return _metadata(path).get("format", "").startswith(_FORMAT_FAMILY)


def dump_precision(path: Path) -> dict[str, Any]:
    """Return the config of the precision that a dump was written in; empty where it is not known,
    or the file is damaged, which read_dump reports."""
    try:
        precision = json.loads(_metadata(path).get("precision", "{}"))
    except ValueError:
        return {}
    return precision if isinstance(precision, dict) else {}


def _metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty where it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def write_dump(
    path: Path,
    reference: Reference,
    model: nn.Module,
    batch: Batch,
    label: str,
    precision: Mapping[str, Any],
) -> None:
    """Write a reference to a file.

    Args:
        path: of the file.
        reference: the tensors.
        model: that computed it.
        batch: that it was computed for.
        label: of the execution.
        precision: its node in the config.

    Raises:
        OSError: it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    # The first name of the same tensor, by name: what one module returns the next one takes.
    same: dict[str, str] = {}
    for kind, by_boundary in (("value", reference.values), ("gradient", reference.gradients)):
        names: dict[object, str] = {}
        for boundary, tensor in by_boundary.items():
            name = f"{kind}|{boundary.key}"
            first = names.setdefault(_memory(tensor), name)
            if first == name:
                tensors[name] = tensor
            else:
                same[name] = first
    tensors |= {f"parameter|{name}": t for name, t in reference.parameter_gradients.items()}
    tensors |= {f"buffer|{name}": t for name, t in reference.buffers.items()}
    for (module, call), states in reference.generators.items():
        tensors |= {f"generator|{module}|{call}|{n}": t for n, t in enumerate(states)}
    code = reference.narrow_code
    narrow_code = None
    if code is not None:
        narrow_code = {
            "dtype": tensor_facts.dtype_name(code.dtype),
            "by_autocast": sorted(code.by_autocast),
            "computing": sorted(code.computing),
        }
    facts = {
        "owners": _by_key(reference.owners),
        "users": _by_key(reference.users),
        "calls": [*reference.generators],
        "loss": reference.loss,
        "narrow_code": narrow_code,
        "same": same,
    }
    save_file(
        # Copies: tensors of one storage, as views are, cannot be written.
        {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()},
        path,
        {
            "format": f"{_FORMAT_FAMILY}{VERSION}",
            "label": label,
            "precision": json.dumps(precision),
            "weights": weights_digest(model),
            "batch": batch_digest(batch),
            "facts": json.dumps(facts),
        },
    )


def _by_key(names: Mapping[Boundary, str]) -> list[tuple[str, str]]:
    """Return names by boundary as pairs, which JSON holds in their order."""
    return [(boundary.key, name) for boundary, name in names.items()]


def read_dump(path: Path, device: torch.device, model: nn.Module, batch: Batch) -> Reference:
    """Read a dump of a model and a batch onto a device.

    Raises:
        ConfigError: the file is damaged, or of other weights or another batch.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            files.check_version(
                f"against={path}",
                "dump",
                metadata["format"].removeprefix(_FORMAT_FAMILY),
                VERSION,
                "Write it again: mode=diff diff.dump=true.",
            )
            # Moved once, so that what modules pass on stays one tensor.
            tensors = {
                name: file.get_tensor(name).to("cpu" if name.startswith("generator|") else device)
                for name in file.keys()  # noqa: SIM118
            }
        json.loads(metadata["precision"])["name"]
        digests = {"weights": weights_digest(model), "batch": batch_digest(batch)}
        different = [name for name, digest in digests.items() if metadata[name] != digest]
        reference = _reference(tensors, json.loads(metadata["facts"]))
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"against={path} is damaged ({type(error).__name__}). Write it again: mode=diff "
            "diff.dump=true."
        ) from error
    if different:
        raise ConfigError(
            f"against={path} was written with other {' and '.join(different)} than this run "
            "has. Type the model=, data=, seed=, init.weights= and diff.steps= of that file."
        )
    return reference


def _reference(tensors: dict[str, Tensor], facts: Mapping[str, Any]) -> Reference:
    tensors |= {name: tensors[first] for name, first in facts["same"].items()}
    by_kind: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        kind, _, key = name.partition("|")
        by_kind[kind][key] = tensor
    reference = Reference(
        loss=facts["loss"], parameter_gradients=by_kind["parameter"], buffers=by_kind["buffer"]
    )
    code = facts["narrow_code"]
    if code is not None:
        dtype = getattr(torch, code["dtype"])
        reference.narrow_code = NarrowCode(dtype, {*code["by_autocast"]}, {*code["computing"]})
    # In the order of the forward, which the file's own order of names is not.
    for key, owner in facts["owners"]:
        boundary = Boundary.from_key(key)
        reference.owners[boundary] = owner
        reference.values[boundary] = by_kind["value"][key]
        if key in by_kind["gradient"]:
            reference.gradients[boundary] = by_kind["gradient"][key]
    reference.users |= {Boundary.from_key(key): user for key, user in facts["users"]}
    for module, call in facts["calls"]:
        prefix = f"generator|{module}|{call}|"
        states = [tensors[name] for name in sorted(tensors) if name.startswith(prefix)]
        reference.generators[module, call] = states
    return reference


def weights_digest(model: nn.Module) -> str:
    """Return a digest of a model's parameters in float32, the same in every precision that rounds
    none of them."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(_bytes(tensor_facts.real_view(parameter.detach()).float()))
    return digest.hexdigest()


def batch_digest(batch: Batch) -> str:
    """Return a digest of a batch's tensors."""
    digest = hashlib.sha256()
    for tensor in tensors_in(tuple(batch)):
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
