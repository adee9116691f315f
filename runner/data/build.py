"""Build the data sets and the loaders of a run from its config, and check them against `data.meta`.

`data.meta` states the input's shape and the number of classes. Models take their sizes from it
before any data are read, so a wrong value is refused here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from runner.config.loading_keys import data_target_node, target_name
from runner.config.schema import RunSpec
from runner.config.targets import build_group, build_loading_target
from runner.data.batch_layout import PAIRS, BatchLayout
from runner.data.collate import Collator
from runner.data.loader import Loader, LoaderOptions
from runner.data.sampling import SamplerOrder
from runner.data.split_checks import first_samples, named_sets, splits_problems
from runner.data.splits import RunData, Splits, set_labels
from runner.data.stream import example_problem, is_stream, stream_problems
from runner.data.stream_loader import BatchLoader, StreamLoader
from runner.data.task_target import build_task
from runner.distributed.torchrun import SINGLE_PROCESS, ProcessRank
from runner.utils.errors import ConfigError, RunnerError


def build_splits(spec: RunSpec) -> Splits:
    """Return the training set and the first validation set of a run; see build_data."""
    return build_data(spec).splits


def build_data(spec: RunSpec) -> RunData:
    """Return the data sets of a run; with debug.overfit train and val are the same few examples.

    Raises:
        ConfigError: the target does not return data sets, its examples are not (input, target),
            data.meta contradicts them, or a stream cannot obey the settings.
    """
    returned = build_group("data", data_target_node(spec.data))
    problems = list(splits_problems(returned, spec.data["_target_"]))
    if problems:
        raise ConfigError(*problems)
    train, val, *test = returned
    test_sets = named_sets(test[0]) if test else {}
    evaluated = {**set_labels("val", named_sets(val)), **set_labels("test", test_sets)}
    problems = list(stream_problems(spec, train, evaluated))
    if problems:
        raise ConfigError(*problems)
    _check_meta(spec, train)
    if spec.debug.overfit:
        few = first_samples(train, spec.debug.overfit)
        return RunData(Splits(few, few), {"": few}, test_sets)
    validation = named_sets(val)
    return RunData(Splits(train, next(iter(validation.values()))), validation, test_sets)


def _check_meta(spec: RunSpec, dataset: Any) -> None:
    """Raise ConfigError where data.meta states another input shape or fewer classes than the data.

    Args:
        spec: of the run.
        dataset: the training set.
    """
    first = first_samples(dataset, 1)
    if not len(first):  # type: ignore[arg-type]
        return  # build_loaders refuses it
    meta = spec.data.get("meta") or {}
    if not isinstance(meta, Mapping):
        raise ConfigError(
            f"data.meta={meta}: it is a mapping that the model's config reads. Type for example "
            "data.meta.classes=10."
        )
    if is_stream(dataset) and not spec.data.get("collate"):
        problem = example_problem(first[0])
        if problem:
            raise ConfigError(problem)
    # A collator takes examples of any kind, and may give its batches another shape.
    first_input = None if spec.data.get("collate") else _first_input(first)
    answers = (_shape_problem(meta, first_input), _classes_problem(meta, dataset))
    problems = [answer for answer in answers if answer]
    if problems:
        raise ConfigError(*problems)


def _shape_problem(meta: Mapping[str, Any], example: Any) -> str:
    """Return why data.meta.input is wrong; empty where it is right or not stated."""
    shape = list(getattr(example, "shape", []))
    stated = meta.get("input")
    if stated is None or not isinstance(example, Tensor):
        return ""
    if isinstance(stated, Sequence) and shape == list(stated):
        return ""
    return (
        f"data.meta.input={stated}, but an example has the shape {shape}. "
        f"Type data.meta.input={str(shape).replace(' ', '')}."
    )


def _classes_problem(meta: Mapping[str, Any], dataset: Any) -> str:
    """Return why data.meta.classes is too small; empty where it is right or not stated."""
    if isinstance(dataset, TensorDataset) and not dataset.tensors[-1].is_floating_point():
        largest_label, index = dataset.tensors[-1].flatten().max(0)
        classes = int(largest_label) + 1
        sample = f": sample {int(index)} has the label {int(largest_label)}"
    else:
        # torchvision's data sets list their class names.
        names = getattr(dataset, "classes", None)
        classes = len(names) if names else 0
        sample = ""
    stated = meta.get("classes")
    if not stated:
        return ""
    if not isinstance(stated, int):
        return f"data.meta.classes={stated}: type a whole number, for example 10."
    if classes <= stated:
        return ""
    return (
        f"data.meta.classes={stated}, but the data have {classes} classes{sample}. "
        f"Type data.meta.classes={classes}."
    )


def _first_input(dataset: Any) -> Any:
    """Return the input of a data set's first example; of several inputs or fields, None.

    Raises:
        ConfigError: the example has another layout than those of runner.data.batch_layout.
    """
    first = dataset[0]
    if isinstance(first, Mapping):
        return None
    if isinstance(first, tuple | list) and len(first) > 1:
        return first[0] if len(first) == 2 else None
    received = type(first).__name__
    if isinstance(first, tuple | list):
        received = f"{received} of {len(first)}"
    raise ConfigError(
        f"data: the train set yields a {received}; it needs a __getitem__ that yields (input, "
        "target), several inputs with the target last, or a dict of fields (docs/own-code.md)."
    )


def build_loaders(
    spec: RunSpec, splits: Splits, device: torch.device, place: ProcessRank = SINGLE_PROCESS
) -> tuple[BatchLoader, BatchLoader]:
    """Return the training and the validation loader of a run.

    Training batches are shuffled anew in each epoch unless data.shuffle=false; validation batches
    and streams keep the data set's order. Each loader yields one process's part of every batch.

    Args:
        spec: of the run.
        splits: from build_splits.
        device: where the batches go.
        place: this process.

    Raises:
        ConfigError: a set is empty.
    """
    loaders = build_run_loaders(spec, RunData(splits, {"": splits.val}, {}), device, place)
    return loaders.train, loaders.val


class RunLoaders(NamedTuple):
    """The loaders of a run's data sets, each of one process's part of every batch.

    Attributes:
        train: of the training set.
        validation: of the validation sets by name, see RunData.
        test: of the test sets by name; empty with debug.overfit.
    """

    train: BatchLoader
    validation: Mapping[str, BatchLoader]
    test: Mapping[str, BatchLoader]

    @property
    def val(self) -> BatchLoader:
        """Return the loader of the validation set that runs are compared by, the first."""
        return next(iter(self.validation.values()))

    @property
    def labelled(self) -> dict[str, BatchLoader]:
        """Return every loader, by the labels of set_labels."""
        evaluated = {**set_labels("val", self.validation), **set_labels("test", self.test)}
        return {"train": self.train, **evaluated}

    def close(self) -> None:
        """End the loading processes."""
        for loader in self.labelled.values():
            loader.close()


def build_run_loaders(
    spec: RunSpec,
    data: RunData,
    device: torch.device,
    place: ProcessRank = SINGLE_PROCESS,
    task: Any = None,
) -> RunLoaders:
    """Return the loaders of all data sets of a run; see build_loaders for the other arguments.

    Args:
        spec: of the run.
        data: from build_data.
        device: where the batches go.
        place: this process.
        task: of the run, which says how a batch is split; None builds it.

    Raises:
        ConfigError: a set is empty.
    """
    if spec.debug.overfit:
        data = data._replace(test={})
    empty = [label for label, dataset in data.labelled.items() if _is_empty(dataset)]
    if empty:
        raise ConfigError(
            *(
                f"data: the {label} set is empty: it yields no example to work on."
                for label in empty
            )
        )
    options = LoaderOptions(
        spec.train.num_workers,
        place,
        spec.train.data_on_device,
        layout=_batch_layout(spec, task),
        collator=_collator(spec),
    )
    train_options = replace(options, sampler=_sampler(spec, data.splits.train))
    shared = {"batch_size": spec.train.batch_size, "seed": spec.seed, "device": device}
    shuffle = bool(spec.data.get("shuffle", True))

    def loader_of(dataset: Any, shuffle: bool, options: LoaderOptions) -> BatchLoader:
        if is_stream(dataset):
            return StreamLoader(dataset, options=options, **shared)
        return Loader(dataset, shuffle=shuffle, options=options, **shared)

    def in_order(sets: Mapping[str, Dataset]) -> dict[str, BatchLoader]:
        return {name: loader_of(dataset, False, options) for name, dataset in sets.items()}

    train = loader_of(data.splits.train, shuffle, train_options)
    return RunLoaders(train, in_order(data.validation), in_order(data.test))


def _is_empty(dataset: Any) -> bool:
    """Return whether a data set yields no example; of a stream the first one is read."""
    return not len(first_samples(dataset, 1))  # type: ignore[arg-type]


def _collator(spec: RunSpec) -> Collator | None:
    """Return what data.collate names; None where examples are stacked."""
    value = spec.data.get("collate")
    if value is None:
        return None
    collator = build_loading_target("collate", value)
    name = target_name(value)
    if not callable(collator):
        raise ConfigError(
            f"data.collate={name} returns a {type(collator).__name__}, which takes no examples. "
            "Name a function of the list of examples, or a class whose objects are called with it."
        )
    return Collator(name, collator)


def _sampler(spec: RunSpec, dataset: Any) -> SamplerOrder | None:
    """Return the order of data.sampler, called with the training set; None without one."""
    value = spec.data.get("sampler")
    # An evaluation reads no training examples.
    if value is None or spec.mode == "evaluate":
        return None
    name = target_name(value)
    try:
        sampler = build_loading_target("sampler", value, dataset)
    except RunnerError:
        raise
    except Exception as error:
        kind = type(dataset).__name__
        raise ConfigError(
            f"data.sampler={name} fails on the training set, a {kind}: {type(error).__name__}: "
            f"{error}. It is called with that data set and returns a torch.utils.data.Sampler "
            "(docs/own-code.md)."
        ) from error
    return SamplerOrder(name, sampler, len(dataset))


def _batch_layout(spec: RunSpec, task: Any) -> BatchLayout:
    """Return how the run's task splits a batch."""
    if task is None and "_target_" not in spec.task:
        return PAIRS
    # The task itself is asked, as a class of the user's may name its fields.
    task = build_task(spec.task) if task is None else task
    return task.layout(task.input_fields, task.target_field, task.passes_target)
