"""Build the data sets and the loaders of a run from its config, and check them against `data.meta`.

`data.meta` states the input's shape and the number of classes. Models take their sizes from it
before any data are read, so a wrong value is refused here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from runner.core import (
    ConfigError,
    Mode,
    RunnerError,
    RunSpec,
    batch_layout,
    fmt,
    refuse,
    targets,
    torchrun,
)
from runner.data.collate import Collator, input_and_target, makes_batches
from runner.data.fingerprint import fact_problems, learned_facts
from runner.data.loader import Loader, LoaderOptions, SamplerOrder
from runner.data.splits import RunData, RunSets, TextPairs, label_remedy, set_labels
from runner.data.stream_loader import (
    DatasetLoader,
    StreamLoader,
    first_examples,
    is_stream,
    stream_problems,
)
from runner.data.task_target import build_task

_RETURN = "return (train, val), two map-style data sets, or (train, val, test)"
_DOCS = "See docs/own-code.md."
_KINDS = ("train", "val", "test")
_SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_METRIC_NAMES = ("loss", "accuracy", "perplexity", "iou")


def build_data(spec: RunSpec) -> RunData:
    """Return the data sets of a run; with debug.overfit train and val are the same few examples.

    Raises:
        ConfigError: the target does not return data sets, its examples are not (input, target),
            data.meta contradicts them, or a stream cannot obey the settings.
    """
    returned = targets.build_group("data", targets.without_runner_keys("data", spec.data))
    refuse(splits_problems(returned, spec.data["_target_"]))
    train, val, *test = returned
    validation = _named_sets(val)
    test_sets = _named_sets(test[0]) if test else {}
    evaluated = set_labels("val", validation) | set_labels("test", test_sets)
    refuse(stream_problems(spec, train, evaluated))
    refuse(_meta_problems(spec, train))
    refuse(fact_problems(learned_facts(train), "the train set", evaluated))
    if spec.debug.overfit:
        few = _first_samples(train, spec.debug.overfit)
        return RunData(few, {"": few}, test_sets)
    return RunData(train, validation, test_sets)


def splits_problems(returned: Any, target: str) -> Iterator[str]:
    """Yield what is wrong with what a data target returned, one message for each data set.

    It is to return data sets with __len__ and __getitem__, or streams.

    Args:
        returned: by the target; anything, if it is a user's.
        target: its dotted path, for the messages.
    """
    if isinstance(returned, Mapping):
        keys = ", ".join(map(str, returned))
        yield f"data: {target} returned a dict with the keys {keys}; it must {_RETURN}. {_DOCS}"
    elif isinstance(returned, tuple) and len(returned) > 3:
        yield (
            f"data: {target} returned {len(returned)} values; it must {_RETURN}. Several sets of "
            "one kind go into a dict: (train, {name: set, ...}, {name: set, ...})."
        )
    elif not (isinstance(returned, tuple) and len(returned) > 1):
        kind = type(returned).__name__
        yield f"data: {target} must {_RETURN}; it returned a {kind}. {_DOCS}"
    else:
        for kind, sets in zip(_KINDS, returned, strict=False):
            if kind == "train" or not isinstance(sets, Mapping):
                yield from _dataset_problems(kind, sets)
                continue
            if not sets:
                yield f"data: the dict of {kind} sets is empty. Return at least one set in it."
            for name, dataset in sets.items():
                yield from _name_problems(kind, name)
                yield from _dataset_problems(f"{kind}/{name}", dataset)


def _name_problems(kind: str, name: Any) -> Iterator[str]:
    """Yield why metrics cannot be called `val/<name>/loss` beside `val/loss`."""
    is_name = isinstance(name, str) and bool(_SET_NAME.fullmatch(name))
    if not is_name or name in _METRIC_NAMES:
        yield (
            f"data: a {kind} set is called {name!r}, which cannot be part of a metric's name. "
            "Allowed: letters, digits, _, - and ., and no name of a metric, such as loss."
        )


def _named_sets(sets: Any) -> dict[str, Any]:
    """Return the val or test sets of a data target by name; the name of an only one is empty."""
    return dict(sets) if isinstance(sets, Mapping) else {"": sets}


def _dataset_problems(name: str, dataset: Any) -> Iterator[str]:
    """Yield why a data set cannot be the train, val or test set."""
    kind = type(dataset)
    if isinstance(dataset, Mapping):
        yield (
            f"data: the {name} set is a dict with the keys {', '.join(map(str, dataset))}; it must "
            "be one data set. Return one of them, or torch.utils.data.ConcatDataset(list of them)."
        )
        return
    if is_stream(dataset):
        return
    missing = [each for each in ("__len__", "__getitem__") if not hasattr(dataset, each)]
    # torch's Dataset defines a __getitem__ that only raises NotImplementedError.
    if getattr(kind, "__getitem__", None) is Dataset.__getitem__:
        missing.append("__getitem__")
    if missing:
        yield (
            f"data: the {name} set is a {kind.__name__}; it needs __len__ and __getitem__, and "
            f"lacks {' and '.join(missing)}. A stream is a torch.utils.data.IterableDataset."
        )


def _first_samples(dataset: Any, count: int) -> Dataset[Any]:
    """Return the first examples of a data set, with its `batch(indices)` where it has that."""
    if is_stream(dataset):
        dataset = first_examples(dataset, count)
    few = range(min(count, len(dataset)))
    return _BatchSubset(dataset, few) if makes_batches(dataset) else Subset(dataset, few)


class _BatchSubset(Subset[Any]):
    """A subset whose batches its data set gathers."""

    def batch(self, indices: Tensor) -> Any:
        """Return the batch of these examples of the subset, indices int64 [B]."""
        dataset: Any = self.dataset
        return dataset.batch(torch.as_tensor(self.indices)[indices])


def _meta_problems(spec: RunSpec, dataset: Any) -> Iterator[str]:
    """Yield where data.meta states another input shape or fewer classes than the data.

    Args:
        spec: of the run.
        dataset: the training set.

    Raises:
        ConfigError: the first example has no layout that is known.
    """
    examples = _first_samples(dataset, 1)
    if not len(examples):  # type: ignore[arg-type]
        return  # build_run_loaders refuses it
    meta = spec.data.get("meta") or {}
    if not isinstance(meta, Mapping):
        yield f"data.meta={meta} is no mapping. Type for example data.meta.classes=10."
        return
    # A collator takes examples of any kind, and may give its batches another shape.
    if not spec.data.get("collate"):
        example = examples[0]
        if is_stream(dataset) and isinstance(example, Mapping):
            # Rows of Hugging Face's datasets hold lists where no format is set.
            lists = [str(name) for name, value in example.items() if isinstance(value, list)]
            if lists:
                yield (
                    "data: the train set is a stream whose examples hold lists, not tensors, in "
                    f'{", ".join(lists)}. Return stream.with_format("torch") of Hugging Face\'s '
                    "datasets, or type data.collate=runner.data.padding.pad."
                )
                return
        yield from _shape_problems(meta, example)
    yield from _classes_problems(meta, dataset, spec.task.get("ignore_index"))


def _shape_problems(meta: Mapping[str, Any], example: Any) -> Iterator[str]:
    """Yield why data.meta.input is wrong; of several inputs or fields nothing.

    Raises:
        ConfigError: the example has another layout than those of runner.core.loop.batch_layout.
    """
    is_sequence = isinstance(example, tuple | list)
    if not isinstance(example, Mapping) and not (is_sequence and len(example) > 1):
        received = type(example).__name__
        if is_sequence:
            received = f"{received} of {len(example)}"
        raise ConfigError(
            f"data: the train set yields a {received}; it needs a __getitem__ that yields (input, "
            "target), several inputs with the target last, or a dict of fields (docs/own-code.md)."
        )
    stated = meta.get("input")
    example_input, target = input_and_target(example)
    if stated is None or not isinstance(example_input, Tensor):
        return
    shape = list(example_input.shape)
    # A Python program may give a tuple.
    wanted = [*stated] if isinstance(stated, Sequence) else stated
    is_batch = shape[1:] == wanted and shape[0] > 1
    if is_batch and getattr(target, "shape", ())[:1] == example_input.shape[:1]:
        yield (
            f"data: the train set yields batches of {shape[0]}, not examples. Leave out what makes "
            f"them (.batched(), a DataLoader), and type train.batch_size={shape[0]}."
        )
    elif shape != wanted:
        typed = f"data.meta.input={str(shape).replace(' ', '')}"
        yield f"data.meta.input={stated}, but an example has the shape {shape}. Type {typed}."


def _classes_problems(meta: Mapping[str, Any], dataset: Any, ignored: Any) -> Iterator[str]:
    """Yield why data.meta.classes is too small.

    Args:
        meta: data.meta.
        dataset: the training set.
        ignored: task.ignore_index, the label that does not count; None without the key.
    """
    stated = meta.get("classes")
    if not stated:
        return
    if not isinstance(stated, int):
        yield f"data.meta.classes={stated}: type a whole number, for example 10."
        return
    # torchvision's data sets list their class names.
    names = learned_facts(dataset).get("classes", [])
    classes = len(names)
    sample = f": {fmt.first_names(names)}"
    labels = dataset.tensors[-1] if isinstance(dataset, TensorDataset) else torch.zeros(())
    if not (labels.is_floating_point() or labels.is_complex()):
        if isinstance(ignored, int):
            labels = labels.masked_fill(labels == ignored, 0)
        largest_label, index = labels.flatten().max(0)
        classes = int(largest_label) + 1
        row = int(index) // labels[0].numel()
        sample = f": sample {row} has the label {int(largest_label)}"
    if classes == stated + 1 and labels[labels != batch_layout.IGNORED_LABEL].min() == 1:
        yield f"data: the labels are 1 to {stated}, and no label is 0. Subtract 1 from all."
    elif classes > stated:
        yield (
            f"data.meta.classes={stated}, but the data have {classes} classes{sample}. "
            f"Type {label_remedy(classes - 1, is_mask=labels.ndim > 2)}."
        )


class RunLoaders(RunSets[DatasetLoader]):
    """The loaders of a run's data sets, each of one process's part of every batch.

    With debug.overfit there is no test set.
    """

    def close(self) -> None:
        """End the loading processes."""
        for loader in self.labelled.values():
            loader.close()


def build_run_loaders(
    spec: RunSpec,
    data: RunData,
    device: torch.device,
    rank: torchrun.ProcessRank = torchrun.SINGLE_PROCESS,
    task: Any = None,
) -> RunLoaders:
    """Return the loaders of all data sets of a run.

    Training batches are shuffled anew in each epoch unless data.shuffle=false; validation batches
    and streams keep the data set's order. Each loader yields one process's part of every batch.

    Args:
        spec: of the run.
        data: from build_data.
        device: where the batches go.
        rank: of this process.
        task: of the run, which says how a batch is split; None builds it.

    Raises:
        ConfigError: a set is empty.
    """
    if spec.debug.overfit:
        data = data._replace(test={})
    refuse(
        f"data: the {label} set is empty: it yields no example to work on."
        for label, dataset in data.labelled.items()
        if not len(_first_samples(dataset, 1))  # type: ignore[arg-type]
    )
    layout = batch_layout.PAIRS
    if task is not None or "_target_" in spec.task:
        # The task itself is asked, as a class of the user's may name its fields.
        task = build_task(spec.task) if task is None else task
        fields = (task.input_fields, task.target_field, task.passes_target)
        layout = task.layout(*fields, task.ignored_label)
        if isinstance(data.train, TextPairs) and not task.passes_target:
            raise ConfigError(
                f"data.target={spec.data.get('target')} holds texts, for an encoder-decoder. Type "
                "model.kind=seq2seq_lm or task=seq2seq, or data.target=<a column of numbers>."
            )
    options = LoaderOptions(
        spec.train.num_workers, rank, spec.train.data_on_device, layout, _collator(spec)
    )
    train_options = replace(options, sampler=_sampler(spec, data.train))
    shared = {"batch_size": spec.train.batch_size, "seed": spec.seed, "device": device}
    shuffle = bool(spec.data.get("shuffle", True))

    def loader_of(dataset: Any, shuffle: bool, options: LoaderOptions) -> DatasetLoader:
        if is_stream(dataset):
            return StreamLoader(dataset, options=options, **shared)
        return Loader(dataset, shuffle=shuffle, options=options, **shared)

    def in_order(sets: Mapping[str, Dataset]) -> dict[str, DatasetLoader]:
        return {name: loader_of(dataset, False, options) for name, dataset in sets.items()}

    train = loader_of(data.train, shuffle, train_options)
    return RunLoaders(train, in_order(data.validation), in_order(data.test))


def first_inputs(spec: RunSpec, loaders: RunLoaders | None = None) -> Any:
    """Return the inputs of the first two examples of a training, on the CPU.

    Args:
        spec: of the run.
        loaders: of its data sets; None loads these.
    """
    if loaders is None:
        data = build_data(spec).train_and_val()
    else:
        data = RunData(loaders.train.dataset, {"": loaders.val.dataset}, {})
    # No workers for two examples, and no data set moved to the device.
    few = replace(spec.train, batch_size=2, num_workers=0, data_on_device=False)
    loader = build_run_loaders(replace(spec, train=few), data, torch.device("cpu")).train
    return next(loader.epoch(0))[0]


def _collator(spec: RunSpec) -> Collator | None:
    """Return what data.collate names; None where examples are stacked."""
    value = spec.data.get("collate")
    if value is None:
        return None
    collator = targets.build_value("data.collate", value)
    name = targets.target_name(value)
    if not callable(collator):
        raise ConfigError(
            f"data.collate={name} returns a {type(collator).__name__}, which takes no examples. "
            "Name a function of the list of examples, or a class whose objects are called with it."
        )
    return Collator(name, collator)


def _sampler(spec: RunSpec, dataset: Any) -> SamplerOrder | None:
    """Return the order of data.sampler, called with the training set; None without one."""
    value = spec.data.get("sampler")
    if value is None or not Mode.named(spec.mode).reads_training_data:
        return None
    name = targets.target_name(value)
    try:
        sampler = targets.build_value("data.sampler", value, dataset)
    except RunnerError:
        raise
    except Exception as error:
        kind = type(dataset).__name__
        raise ConfigError(
            f"data.sampler={name} fails on the training set, a {kind}: {type(error).__name__}: "
            f"{error}. It is called with that data set and returns a torch.utils.data.Sampler."
        ) from error
    return SamplerOrder(name, sampler, len(dataset))
