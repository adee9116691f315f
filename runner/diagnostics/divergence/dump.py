"""Write a reference to a file, and read one of another machine, commit or version of torch."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.data.batch_layout import Batch
from runner.diagnostics.divergence.boundaries import Boundary
from runner.diagnostics.divergence.reference import NarrowCode, Reference
from runner.utils.errors import ConfigError
from runner.utils.files import check_version
from runner.utils.tensors import dtype_name, real_view

_FORMAT_FAMILY = "runner-diff-"
VERSION = "2"
_SUFFIX = ".safetensors"


class Dump(NamedTuple):
    """A reference of elsewhere.

    Attributes:
        reference: the tensors of the step.
        weights: digest of the weights that it was computed with.
        batch: digest of the batch.
    """

    reference: Reference
    weights: str
    batch: str


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
    # By name, the first name of the same tensor: what one module returns the next one takes.
    same: dict[str, str] = {}
    for kind, by_boundary in (("value", reference.values), ("gradient", reference.gradients)):
        names: dict[object, str] = {}
        for boundary, tensor in by_boundary.items():
            name = f"{kind}|{boundary.key}"
            memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            first = names.setdefault(memory, name)
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
            "dtype": dtype_name(code.dtype),
            "by_autocast": sorted(code.by_autocast),
            "computing": sorted(code.computing),
        }
    facts = {
        "owners": [[b.key, owner] for b, owner in reference.owners.items()],
        "users": [[b.key, user] for b, user in reference.users.items()],
        "calls": [[module, call] for module, call in reference.generators],
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


def read_dump(path: Path, device: torch.device) -> Dump:
    """Read a dump onto a device.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            check_version(
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
        facts = json.loads(metadata["facts"])
        tensors |= {name: tensors[first] for name, first in facts["same"].items()}
        return Dump(_reference(tensors, facts), metadata["weights"], metadata["batch"])
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"against={path} is damaged ({type(error).__name__}). Write it again: mode=diff "
            "diff.dump=true."
        ) from error


def _reference(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Reference:
    reference = Reference(loss=facts["loss"])
    code = facts["narrow_code"]
    if code is not None:
        dtype = getattr(torch, code["dtype"])
        reference.narrow_code = NarrowCode(dtype, {*code["by_autocast"]}, {*code["computing"]})
    # In the order of the forward, which the file's own order of names is not.
    for key, owner in facts["owners"]:
        boundary = Boundary.from_key(key)
        reference.owners[boundary] = owner
        reference.values[boundary] = tensors[f"value|{key}"]
        if f"gradient|{key}" in tensors:
            reference.gradients[boundary] = tensors[f"gradient|{key}"]
    reference.users |= {Boundary.from_key(key): user for key, user in facts["users"]}
    for name, tensor in tensors.items():
        kind, _, key = name.partition("|")
        if kind == "parameter":
            reference.parameter_gradients[key] = tensor
        elif kind == "buffer":
            reference.buffers[key] = tensor
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
        digest.update(_bytes(real_view(parameter.detach()).float()))
    return digest.hexdigest()


def batch_digest(batch: Batch) -> str:
    """Return a digest of a batch's tensors."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(tuple(batch)):
        if isinstance(leaf, Tensor):
            digest.update(_bytes(leaf))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
