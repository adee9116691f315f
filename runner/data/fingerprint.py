"""What a run's data sets are, told in a way that other runs' can be compared with."""

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path
from torch.utils.data import Subset

from runner.config.targets import target_arguments
from runner.data.splits import Splits

SAMPLES = 64
BYTES = 8
CONTEXTS = {"train": "training", "val": "validation"}


def describe_data(name: str, node: Mapping[str, Any], splits: Splits) -> list[dict[str, Any]]:
    """The training and the validation set, as MLflow's inputs of a run.

    The digest is over the number of examples and up to 64 of them, evenly spaced, so it is the
    same in every process; on another machine where the data set computes the same bits there.
    Of a folder of images it is over the files, and an augmentation does not move it; of another
    data set that draws its samples at random it is over what it draws from one seed. The global
    random states are left as they were. Nothing here raises: what cannot be read is left out.

    Args:
        name: of the data config.
        node: its target and keywords.
        splits: the data sets.

    Returns:
        For each split name, context, digest (16 hex digits), source_type (local, or code), source,
        schema and profile: strings, JSON in the last three; schema is None where a sample is
        neither a tensor or number nor a flat nest of them.
    """
    kind, source = _source(node)
    return [
        {
            "name": name,
            "context": CONTEXTS[split],
            "source_type": kind,
            "source": json.dumps(source, default=str),
            **_facts(getattr(splits, split), node),
        }
        for split in CONTEXTS
    ]


def _source(node: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The files that the data were read from, or else the call that made them."""
    for key in ("path", "root"):
        where = node.get(key)
        if isinstance(where, str) and Path(where).exists():
            return "local", {"uri": str(Path(where).absolute())}
    given = {"target": node.get("_target_"), **target_arguments(node)}
    return "code", {"tags": {key: str(value) for key, value in given.items()}}


def _facts(dataset: Any, node: Mapping[str, Any]) -> dict[str, Any]:
    with _same_random():
        try:
            digest = _digest(dataset)
        except Exception:  # a data set of the user's, of which one sample is broken, say
            digest = blake2b(_text(node), digest_size=BYTES).hexdigest()
        try:
            first = dataset[0]
            schema = _schema(first)
        except Exception:
            first = schema = None
    profile = {"num_rows": len(dataset), "classes": _classes(dataset, first, node)}
    return {
        "digest": digest,
        "schema": schema,
        "profile": json.dumps({key: value for key, value in profile.items() if value is not None}),
    }


def _text(node: Mapping[str, Any]) -> bytes:
    return repr(sorted((str(key), str(value)) for key, value in node.items())).encode()


@contextmanager
def _same_random() -> Iterator[None]:
    """A fixed seed inside, the random states from before after it; the CPU's, where data are
    made."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _digest(dataset: Any) -> str:
    count = len(dataset)
    content = blake2b(str(count).encode(), digest_size=BYTES)
    chosen = min(count, SAMPLES)
    for i in range(chosen):
        index = i * (count - 1) // max(chosen - 1, 1)
        whole, inner = _inner(dataset, index)
        files = getattr(whole, "samples", None)
        if isinstance(files, list) and _is_file(files[inner], whole):
            path, target = files[inner]
            content.update(f"{Path(path).relative_to(whole.root)} {target} ".encode())
            content.update(Path(path).read_bytes())
        else:
            _feed(content, dataset[index])
    return content.hexdigest()


def _inner(dataset: Any, index: int) -> tuple[Any, int]:
    """What a Subset takes its example from, and which."""
    while type(dataset) is Subset:
        dataset, index = dataset.dataset, int(dataset.indices[index])
    return dataset, index


def _is_file(sample: Any, dataset: Any) -> bool:
    """Whether it is one of torchvision's pairs of a file below the data set's root and a class."""
    pair = isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], str)
    return pair and hasattr(dataset, "root") and Path(sample[0]).is_file()


def _feed(content: Any, value: Any) -> None:
    """Add a sample: tensors and arrays by dtype, shape and bytes, nests by their parts, and of an
    object that has no bytes its type."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        content.update(f"{value.dtype} {list(value.shape)} ".encode())
        content.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            content.update(f"{key}: ".encode())
            _feed(content, value[key])
    elif isinstance(value, list | tuple):
        content.update(f"{len(value)} ".encode())
        for part in value:
            _feed(content, part)
    elif isinstance(value, str | bytes | int | float | complex | None):
        content.update(f"{value!r} ".encode())
    elif hasattr(value, "tobytes"):  # numpy's, Pillow's
        about = [str(getattr(value, key, "")) for key in ("dtype", "shape", "mode", "size")]
        content.update(" ".join([type(value).__name__, *about]).encode())
        content.update(value.tobytes())
    else:
        content.update(type(value).__name__.encode())


def _schema(sample: Any) -> str | None:
    """MLflow's tensor schema of samples (input, target), -1 for the rows."""
    features, targets = (_specs(part) for part in sample)
    if features is None or targets is None:
        return None
    parts = {"features": json.dumps(features), "targets": json.dumps(targets)}
    return json.dumps({"mlflow_tensorspec": parts})


def _specs(value: Any) -> list[dict[str, Any]] | None:
    """One tensor's specification, or those of a flat nest by name."""
    leaves = tree_flatten_with_path(value)[0]
    found = []
    for path, leaf in leaves:
        array = leaf if isinstance(leaf, Tensor | np.ndarray | np.generic) else np.asarray(leaf)
        dtype = str(array.dtype).removeprefix("torch.")
        if len(path) > 1 or not hasattr(np, dtype):
            return None
        spec: dict[str, Any] = {"type": "tensor"}
        if path:
            spec["name"] = str(getattr(path[0], "key", getattr(path[0], "idx", path[0])))
        spec["tensor-spec"] = {"dtype": dtype, "shape": [-1, *array.shape]}
        found.append(spec)
    return found or None


def _classes(dataset: Any, first: Any, node: Mapping[str, Any]) -> int | None:
    """How many classes there are, where the targets are class numbers."""
    if named := getattr(_inner(dataset, 0)[0], "classes", None):
        return len(named)
    target = first[1] if isinstance(first, tuple | list) and len(first) == 2 else None
    whole = isinstance(target, int) or (
        isinstance(target, Tensor) and not target.is_floating_point() and not target.is_complex()
    )
    return (node.get("meta") or {}).get("classes") if whole else None
