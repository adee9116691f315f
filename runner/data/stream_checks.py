"""Check the settings of a run on a stream, before anything is read from it."""

from collections.abc import Iterator, Mapping
from typing import Any

from runner.config.loading_keys import target_name
from runner.config.schema import RunSpec
from runner.data.stream import is_stream


def stream_problems(spec: RunSpec, train: Any, evaluated: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each setting that streams among the data sets cannot obey.

    Args:
        spec: of the run.
        train: the training set.
        evaluated: the validation and test sets, by their labels in messages.
    """
    if spec.debug.overfit:
        return  # a list of a few training examples takes the place of all sets
    streams = [label for label, dataset in evaluated.items() if is_stream(dataset)]
    # An evaluation reads no training examples.
    if is_stream(train) and spec.mode != "evaluate":
        streams.insert(0, "train")
        yield from _training_problems(spec)
    if not streams:
        return
    name = f"the {streams[0]} set is a stream"
    if spec.train.num_workers > 1:
        yield (
            f"train.num_workers={spec.train.num_workers}: {name}, and each process would read all "
            "of it. Type train.num_workers=1, which reads ahead in one process."
        )
    if spec.train.data_on_device is True:
        yield (
            f"train.data_on_device=true: {name}, which is not in memory. Type "
            "train.data_on_device=auto."
        )


def example_problem(example: Any) -> str:
    """Return why examples of a stream cannot be stacked as they are meant; empty where they can.

    Args:
        example: the first one. Rows of Hugging Face's datasets hold lists where no format is set.
    """
    fields = example if isinstance(example, Mapping) else {}
    lists = [name for name, value in fields.items() if isinstance(value, list)]
    if not lists:
        return ""
    return (
        f"data: the train set is a stream whose examples hold lists, not tensors, in "
        f"{', '.join(map(str, lists))}; stacked, these would be lists of columns. Return "
        'stream.with_format("torch") of a stream of Hugging Face\'s datasets, or type '
        "data.collate=runner.data.padding.pad."
    )


def _training_problems(spec: RunSpec) -> Iterator[str]:
    """Yield a message for each setting that a training set without length cannot obey."""
    if spec.train.max_steps is None:
        yield (
            f"train.epochs={spec.train.epochs}: the train set is a stream, whose length is not "
            "known. Type train.max_steps=<steps>; the stream is begun anew where it ends before."
        )
    sampler = spec.data.get("sampler")
    if sampler is not None:
        yield (
            f"data.sampler={target_name(sampler)}: the train set is a stream, which gives no "
            "example by its index. Leave data.sampler out, and choose the examples in the stream."
        )
