"""Load a file of weights into a model whose head may be of another size."""

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

_MOST_NAMED = 5
"""Names of weights in a message, at most."""


def load_except_head(
    model: nn.Module,
    file: str,
    other_head: Callable[[], nn.Module],
    left_out: Sequence[str] = (),
) -> None:
    """Copy the weights of a local file into a model; nothing is downloaded.

    A head for another number of classes keeps the weights that it has, which a line of the log
    says.

    Args:
        model: changed in place.
        file: a state dict, .pth (of tensors alone) or .safetensors.
        other_head: makes the model with a head of another size: the weights that have another
            shape in it are those of the head. It is called where a shape differs.
        left_out: starts of the names in the file that the model is built without.

    Raises:
        ValueError: the file cannot be read, or it has other names or shapes than the model.
    """
    saved = _without(read_weights(file), left_out)
    own = model.state_dict()
    differing = [name for name in saved if name in own and saved[name].shape != own[name].shape]
    head = _head_names(own, other_head) if differing else set()
    problems = [_shape_problem(name, saved, own) for name in differing if name not in head]
    skipped = head if differing else set()
    result = model.load_state_dict(
        {name: value for name, value in saved.items() if name not in {*skipped, *differing}},
        strict=False,
    )
    missing = [name for name in result.missing_keys if name not in {*skipped, *differing}]
    if missing:
        problems.append(f"it lacks {_listed(missing)}")
    if result.unexpected_keys:
        problems.append(f"the model has no {_listed(result.unexpected_keys)}")
    if problems:
        raise ValueError(
            f"weights={file} do not fit the model: {'; '.join(problems)}. Give a file of this "
            "model, or the model.name= and model.options= that it was made with"
        )
    if skipped:
        log.warning(
            "model.weights: the head keeps its random weights, because the file's is for other "
            "classes: %s",
            _listed(sorted(skipped)),
        )


def read_weights(file: str) -> dict[str, Tensor]:
    """Return the tensors of a local file by name; nothing in it is executed.

    Raises:
        ValueError: it is missing, or holds something else.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"weights={file} is no file. Give a local .pth or .safetensors")
    found: Any
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            found = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"weights={file} cannot be read: {error}") from error
    else:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            first_line = str(error).split("\n")[0]
            raise ValueError(
                f"weights={file} cannot be read as tensors alone: {first_line}. Write one with "
                "torch.save(model.state_dict(), path), or as .safetensors"
            ) from error
    is_state = isinstance(found, Mapping) and all(isinstance(v, Tensor) for v in found.values())
    if not (is_state and found):
        keys = f" with the keys {_listed(list(map(str, found)))}" if hasattr(found, "keys") else ""
        raise ValueError(
            f"weights={file} holds a {type(found).__name__}{keys}, no state dict: tensors by "
            "name. Write one with torch.save(model.state_dict(), path)"
        )
    return dict(found)


def _without(saved: Mapping[str, Tensor], starts: Sequence[str]) -> dict[str, Tensor]:
    kept = {name: value for name, value in saved.items() if not name.startswith(tuple(starts))}
    if len(kept) < len(saved):
        log.warning(
            "model.weights: %s of the file are left out, which the model is built without",
            _listed([name for name in saved if name not in kept]),
        )
    return kept


def _head_names(own: Mapping[str, Tensor], other_head: Callable[[], nn.Module]) -> set[str]:
    """Return the names of the weights whose shapes depend on the number of classes."""
    with torch.device("meta"):
        other = other_head().state_dict()
    return {name for name in own if own[name].shape != other[name].shape}


def _shape_problem(name: str, saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    return f"{name} has the shape {list(saved[name].shape)}, and here {list(own[name].shape)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
