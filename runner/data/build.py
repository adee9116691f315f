"""Build the data sets and the loaders of a run."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from runner.config.schema import RunSpec
from runner.config.targets import build_group
from runner.data.loader import Loader
from runner.data.split_checks import first_samples, splits_problems
from runner.data.splits import Splits
from runner.distributed.torchrun import SINGLE_PROCESS, ProcessRank
from runner.utils.errors import ConfigError


def build_splits(spec: RunSpec) -> Splits:
    """The data sets; with debug.overfit both are the same few examples."""
    made = build_group("data", spec.data)
    if problems := [*splits_problems(made, spec.data["_target_"])]:
        raise ConfigError(*problems)
    _check_meta(spec, made[0])
    if spec.debug.overfit:
        few = first_samples(made[0], spec.debug.overfit)
        return Splits(few, few)
    return Splits(*made)


def _check_meta(spec: RunSpec, dataset: Any) -> None:
    """What data.meta says of the data, from which models take their sizes, must be true."""
    if not len(dataset):
        return  # build_loaders says so
    meta, example = spec.data.get("meta") or {}, _first_input(dataset)
    shape = list(getattr(example, "shape", []))
    problems = []
    if "input" in meta and isinstance(example, Tensor) and shape != list(meta["input"]):
        problems.append(
            f"data.meta.input={meta['input']}, but an example has the shape {shape}. "
            f"Type data.meta.input={str(shape).replace(' ', '')}."
        )
    named = getattr(dataset, "classes", None)
    found, sample = len(named) if named else None, ""
    if isinstance(dataset, TensorDataset) and not dataset.tensors[1].is_floating_point():
        label, first = (int(value) for value in dataset.tensors[1].flatten().max(0))
        found, sample = label + 1, f": sample {first} has the label {label}"
    if found is not None and found > (meta.get("classes") or found):
        problems.append(
            f"data.meta.classes={meta['classes']}, but the data have {found} classes{sample}. "
            f"Type data.meta.classes={found}."
        )
    if problems:
        raise ConfigError(*problems)


def _first_input(dataset: Any) -> Any:
    first = dataset[0]
    if not (isinstance(first, tuple | list) and len(first) == 2):
        size = f" of {len(first)}" if isinstance(first, tuple | list) else ""
        raise ConfigError(
            f"data: the train set yields a {type(first).__name__}{size}; it needs a __getitem__ "
            "that yields (input, target)."
        )
    return first[0]


def build_loaders(
    spec: RunSpec, splits: Splits, device: torch.device, place: ProcessRank = SINGLE_PROCESS
) -> tuple[Loader, Loader]:
    """Training batches in an order of their own per epoch, validation batches in the set's; of each
    the part of one process.

    Raises:
        ConfigError: a set is empty.
    """
    if empty := [name for name, made in splits._asdict().items() if not len(made)]:
        raise ConfigError(
            *(f"data: the {name} set is empty: it yields no example to work on." for name in empty)
        )
    size, workers = spec.train.batch_size, spec.train.num_workers
    common = {
        "batch_size": size,
        "seed": spec.seed,
        "device": device,
        "workers": workers,
        "place": place,
        "on_device": spec.train.data_on_device,
    }
    shuffle = bool(spec.data.get("shuffle", True))
    train = Loader(splits.train, shuffle=shuffle, **common)
    return train, Loader(splits.val, shuffle=False, **common)
