"""Split batches of the usual layouts into the inputs of the model and the target of the task.

| a batch | inputs | target |
| --- | --- | --- |
| (input, target) | input, as it is | the second |
| (input, input, ..., target) | PositionalInputs | the last |
| a dict, as Hugging Face's collators return it | KeywordInputs | the field of the labels |
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils._pytree import (
    _dict_flatten,
    _dict_flatten_with_keys,
    _list_flatten_with_keys,
    register_pytree_node,
    tree_leaves,
)

from runner.core.base.errors import ConfigError

# A prime above the number of epochs and of an epoch's batches: no two of them share a seed.
_SEED_STRIDE = 1_000_003
IGNORED_LABEL = -100
"""The label of padding, which torch's cross entropy leaves out."""

Batch = tuple[Any, Any]

TARGET_FIELDS = ("labels", "label", "targets", "target")
"""Names of a dict batch's field that holds the target, unless task.target names one."""


class KeywordInputs(dict[str, Any]):
    """Inputs of a batch that the model takes as keyword arguments, by their names."""


class PositionalInputs(list[Any]):
    """Inputs of a batch that the model takes as positional arguments."""


# torch's functions for nested containers look into these classes.
register_pytree_node(
    KeywordInputs,
    _dict_flatten,
    lambda values, names: KeywordInputs(zip(names, values, strict=True)),
    serialized_type_name=f"{__name__}.KeywordInputs",
    flatten_with_keys_fn=_dict_flatten_with_keys,
)
register_pytree_node(
    PositionalInputs,
    lambda inputs: ([*inputs], None),
    lambda values, _: PositionalInputs(values),
    serialized_type_name=f"{__name__}.PositionalInputs",
    flatten_with_keys_fn=_list_flatten_with_keys,
)


@dataclass(frozen=True)
class BatchLayout:
    """Parts of a batch that go to the model, and those that go to the task.

    Attributes:
        inputs: fields that the model takes; None for all but the target. Those of a tuple are named
            in its order, and become keyword arguments.
        target: the field of the target; None looks for one of TARGET_FIELDS.
        passes_target: whether the model takes the target, too, because it computes the loss.
        ignored_label: of the data, which does not count; the task gets IGNORED_LABEL for it.
    """

    inputs: tuple[str, ...] | None = None
    target: str | None = None
    passes_target: bool = False
    ignored_label: int = IGNORED_LABEL

    def split(self, batch: Any) -> Batch:
        """Return the inputs and the target of a batch.

        Raises:
            ConfigError: the batch lacks a field, or has another layout.
        """
        inputs, target = self._parts(batch)
        if self.ignored_label != IGNORED_LABEL and isinstance(target, Tensor):
            # Masks are often of uint8, which has no -100.
            target = target.long().masked_fill(target == self.ignored_label, IGNORED_LABEL)
        return inputs, target

    def _parts(self, batch: Any) -> Batch:
        """Return the inputs and the target of a batch as they are in the data."""
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        if is_pair and self.inputs is None and not self.passes_target:
            return batch[0], batch[1]
        if isinstance(batch, Mapping):
            target_field, names = self.field_names(tuple(batch))
            return KeywordInputs({name: batch[name] for name in names}), batch[target_field]
        if isinstance(batch, tuple | list) and len(batch) > 1:
            return self._split_sequence(batch)
        raise ConfigError(
            f"data: a batch is a {type(batch).__name__}. Yield (input, target), several inputs "
            "with the target last, or a dict of fields (docs/own-code.md)."
        )

    def field_names(self, batch: Sequence[str]) -> tuple[str, Sequence[str]]:
        """Return the name of the target and the names of the inputs, of a batch with these fields.

        Raises:
            ConfigError: a field is missing.
        """
        candidates = TARGET_FIELDS if self.target is None else (self.target,)
        target_field = next((name for name in candidates if name in batch), None)
        if target_field is None:
            looked_for = f"task.target={self.target}" if self.target else "a field of labels"
            raise ConfigError(
                f"data: a batch has the fields {_listed(batch)}; {looked_for} is not among them. "
                "Type task.target=<the field of labels, or without labels any input>."
            )
        others = [name for name in batch if name != target_field]
        missing = [name for name in self.inputs or () if name not in batch]
        if missing:
            raise ConfigError(
                f"task.inputs names {', '.join(missing)}, and a batch has the fields "
                f"{_listed(batch)}. Type task.inputs=[{','.join(others)}]."
            )
        names = [*(self.inputs or others)]
        if self.passes_target:
            # The last one, also where task.inputs names it.
            names = [name for name in names if name != target_field] + [target_field]
        return target_field, names

    def _split_sequence(self, batch: Sequence[Any]) -> Batch:
        *inputs, target = batch
        if self.inputs is None:
            return PositionalInputs(batch if self.passes_target else inputs), target
        if len(self.inputs) != len(inputs):
            raise ConfigError(
                f"task.inputs=[{','.join(self.inputs)}] names {len(self.inputs)} inputs, and a "
                f"batch has {len(inputs)} before its target. Name each."
            )
        named = KeywordInputs(zip(self.inputs, inputs, strict=True))
        if self.passes_target:
            named[self.target or TARGET_FIELDS[0]] = target
        return named, target


PAIRS = BatchLayout()
"""The layout of tasks that name no fields."""


def _listed(batch: Sequence[str]) -> str:
    return ", ".join(map(str, batch)) or "(none)"


class StartingPoint(NamedTuple):
    """Point in the training data where a run begins or is resumed.

    Attributes:
        step: optimizer steps that were taken.
        epoch: passes that were begun, from 1.
        reads: examples of this pass that were taken, and in batches of which size, in order.
    """

    step: int = 0
    epoch: int = 1
    reads: tuple[tuple[int, int], ...] = ()

    @property
    def examples(self) -> int:
        """Return the examples of the pass that were taken, in all processes."""
        return sum(taken for taken, _ in self.reads)


FIRST_STEP = StartingPoint()


class BatchLoader(Protocol):
    """What the loop asks of a data set's batches, whether it has indices or is a stream.

    Attributes:
        batch_size: examples in a micro-batch, in all processes.
        seed: of what is drawn at random.
        start: where the run begins to train on these data.
    """

    batch_size: int
    seed: int
    start: StartingPoint

    @property
    def epoch_examples(self) -> int | None:
        """Return the examples of an epoch; None for a stream, whose length is not known."""
        ...

    def epoch(self, epoch: int, taken: int = 0) -> Iterator[Batch]:
        """Return the micro-batches of an epoch after the examples that are taken already."""
        ...

    def examples_in(self, first: int) -> int:
        """Return how many examples the micro-batch from this one on has, in all processes."""
        ...


def steps_of_epoch(loader: BatchLoader, accumulate: int, taken: int = 0) -> int:
    """Return the optimizer steps of an epoch, of whose examples the first `taken` are left out."""
    examples = loader.epoch_examples
    assert examples is not None  # a stream is refused without train.max_steps
    batches = -(-max(0, examples - taken) // loader.batch_size)
    return -(-batches // accumulate)


def ends_epoch(loader: BatchLoader, accumulate: int, step: int) -> bool:
    """Return whether an epoch ends with a step; False for a stream, whose length is not known."""
    if loader.epoch_examples is None:
        return False
    beyond = step - loader.start.step - steps_of_epoch(loader, accumulate, loader.start.examples)
    return beyond >= 0 and beyond % steps_of_epoch(loader, accumulate) == 0


def epoch_seed(seed: int, epoch: int, use: int = 0) -> int:
    """Return the seed of an epoch; epochs of another use share none with it."""
    return seed * _SEED_STRIDE + epoch + use * 2**40


def batch_seed(seed: int, epoch: int, number: int, use: int = 0) -> int:
    """Return the seed of a batch.

    Args:
        seed: of the run.
        epoch: that the batch belongs to.
        number: of the batch in its epoch, from 0.
        use: what is drawn, or which process draws it.
    """
    return (epoch_seed(seed, epoch, use) * _SEED_STRIDE + number) % 2**63


def examples_in(batch: Batch) -> int:
    """Return the examples of a batch: the first dimension of its target, or else of its inputs.

    A target that is a list has one member for each example. A batch that holds a tensor in neither
    place counts as one example.
    """
    inputs, target = batch
    if isinstance(target, list):
        return len(target)
    counted = target
    if not isinstance(counted, Tensor):
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        counted = tensors[0] if tensors else None
    if counted is None or counted.ndim == 0:
        return 1
    return counted.shape[0]  # len() of a tensor costs 3 µs more, in every step
