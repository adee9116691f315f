"""Explain why a model or a loss fails on a batch.

A table holds the kinds of failures, each with what to change or type.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import Tensor, nn

from runner.data.batch_layout import KeywordInputs, PositionalInputs
from runner.modes.argument_errors import binds, explain_arguments
from runner.modes.precision_errors import failing_module, precision_advice
from runner.precision.contract import Precision
from runner.training.model_call import takes_fields
from runner.training.tasks.detection import Detection
from runner.training.tasks.task import Task
from runner.training.tasks.tensor_task import TensorTask

# PyTorch's messages about operands whose sizes do not fit.
_SIZE_ERROR = re.compile(
    r"cannot be multiplied|to have \d+ channels|size mismatch|must match the size|is invalid for "
    r"input of size|normalized_shape|shape mismatch|size of tensor"
)


@dataclass(frozen=True)
class BatchFailure:
    """A batch on which the model or the loss failed.

    Attributes:
        error: what was raised.
        model: as it was built and converted.
        task: of the run.
        precision: of the run.
        names: the options of `model`, `data`, `task` and `precision`.
        inputs: of the batch, as the data set yields them.
        target: of the batch.
        outputs: the model's output; empty where its forward raised.
    """

    error: Exception
    model: nn.Module
    task: Task
    precision: Precision
    names: Mapping[str, str]
    inputs: Any
    target: Any
    outputs: Sequence[Any] = field(default_factory=list)

    @property
    def in_forward(self) -> bool:
        """Return whether the model's forward raised, not the loss."""
        return not self.outputs

    @property
    def text(self) -> str:
        """Message of the error itself."""
        return str(self.error)

    @property
    def expected_output(self) -> str:
        """Output that a built-in task takes, in words; empty for a task of the user's own."""
        # Of the class alone: a subclass may take another part of the output.
        return vars(type(self.task)).get("takes", "")

    def failing_module_name(self) -> str:
        """Return the innermost module whose forward raised, as `layers.0 (Linear)`, or empty."""
        found = failing_module(self.error, self.model)
        if found is None:
            return ""
        name, module = found
        return f"{name or 'the model itself'} ({type(module).__name__})"


def explain_batch_error(failure: BatchFailure) -> str:
    """Return the message for a failure: what failed on which batch, and what to change."""
    names = failure.names
    advice = precision_advice(failure.error, failure.model, failure.precision)
    if not advice:
        advice = next(text(failure) for applies, text in RULES if applies(failure))
    return (
        f"model={names['model']} fails on the first batch of data={names['data']} (inputs "
        f"{_kind(failure.inputs)}) with task={names['task']}: {type(failure.error).__name__}: "
        f"{failure.text.strip().rstrip('.')}. {advice}"
    )


@contextmanager
def outputs_of(model: nn.Module) -> Iterator[list[Any]]:
    """Return the context in which the outputs of a model's forward are collected."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def _returns_none(failure: BatchFailure) -> bool:
    return any(output is None for output in failure.outputs)


def _say_none(failure: BatchFailure) -> str:
    name = type(failure.model).__name__
    return f"The model returns None: end {name}.forward with `return <output>`."


def _yields_boxes(failure: BatchFailure) -> bool:
    target = failure.target
    if isinstance(failure.task, Detection) or not isinstance(target, list) or not target:
        return False
    return isinstance(target[0], Mapping) and "boxes" in target[0]


def _say_boxes(failure: BatchFailure) -> str:
    return f"data={failure.names['data']} yields boxes. Type task=detection (docs/vision.md)."


def _takes_no_boxes(failure: BatchFailure) -> bool:
    return isinstance(failure.task, Detection) and _does_not_bind(failure)


def _say_no_boxes(failure: BatchFailure) -> str:
    taken = ", ".join(signature(failure.model.forward).parameters)
    return (
        "task=detection calls the model as model(images, targets), and "
        f"{type(failure.model).__name__}.forward takes ({taken}). Type model=torchvision "
        "model.name=fasterrcnn_resnet50_fpn, or have the forward take both (docs/vision.md)."
    )


def _returns_structure(failure: BatchFailure) -> bool:
    if not (failure.expected_output and failure.outputs):
        return False
    output = failure.outputs[-1]
    # A built-in task takes the logits of an output by itself.
    taken = failure.task.select(output) if isinstance(failure.task, TensorTask) else output
    return not isinstance(taken, Tensor)


def _say_structure(failure: BatchFailure) -> str:
    output = failure.outputs[-1]
    how = "return output[0]" if isinstance(output, tuple | list) else "return one tensor"
    return (
        f"The model returns a {_kind(output)}; task={failure.names['task']} takes a tensor, "
        f"{failure.expected_output}. Type task.output=<its key or place> to take a part of it, or "
        f"end the model's forward with `{how}` (docs/own-code.md)."
    )


def _yields_structure(failure: BatchFailure) -> bool:
    return bool(failure.expected_output and failure.outputs) and not isinstance(
        failure.target, Tensor
    )


def _say_target(failure: BatchFailure) -> str:
    return (
        f"data={failure.names['data']} yields as target a {_kind(failure.target)}; "
        f"task={failure.names['task']} takes a tensor. Yield (input, target) with one tensor as "
        "target, or write a task that takes it."
    )


def _does_not_bind(failure: BatchFailure) -> bool:
    if not failure.in_forward:
        return False
    is_dict = type(failure.inputs) is KeywordInputs
    if is_dict and not takes_fields(failure.model, failure.inputs):
        return True
    if not isinstance(failure.error, TypeError):
        return False
    # A TypeError may come from inside the forward, too: only the signature shows the difference.
    return not binds(failure.model, failure.inputs)


def _say_arguments(failure: BatchFailure) -> str:
    return explain_arguments(failure.model, failure.inputs, _kind(failure.inputs))


def _takes_no_structure(failure: BatchFailure) -> bool:
    is_argument = type(failure.inputs) not in (KeywordInputs, PositionalInputs)
    is_structure = isinstance(failure.inputs, Mapping | tuple | list)
    return failure.in_forward and is_argument and is_structure


def _say_inputs(failure: BatchFailure) -> str:
    call = "self.net(**inputs)" if isinstance(failure.inputs, Mapping) else "self.net(*inputs)"
    return (
        f"data={failure.names['data']} yields as inputs a {_kind(failure.inputs)}, and the runner "
        "passes them to the model as one argument. In a module of your own around the model, write "
        f"`def forward(self, inputs): return {call}` and take the tensor that the task needs "
        "(docs/own-code.md)."
    )


def _tokens_without_embedding(failure: BatchFailure) -> bool:
    inputs = failure.inputs
    if not failure.in_forward or not isinstance(inputs, Tensor):
        return False
    if inputs.is_floating_point() or inputs.is_complex():
        return False
    return not any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in failure.model.modules())


def _say_tokens(failure: BatchFailure) -> str:
    return (
        f"The inputs are integers ({failure.inputs.dtype}), tokens, and the model has no "
        "embedding for them. Type a model that takes tokens (model=gpt), or have the data set "
        "yield floating-point inputs (x.float())."
    )


def _numbers_for_embedding(failure: BatchFailure) -> bool:
    return failure.in_forward and "for argument #1 'indices'" in failure.text


def _say_indices(failure: BatchFailure) -> str:
    return (
        f"{failure.failing_module_name()} takes integer tokens, and the inputs are floating-point "
        "numbers. Have the data set yield int64 inputs (x.long()), or type a model that takes "
        "numbers."
    )


def _size_differs(failure: BatchFailure) -> bool:
    return failure.in_forward and bool(_SIZE_ERROR.search(failure.text))


def _say_size(failure: BatchFailure) -> str:
    where = failure.failing_module_name()
    return (
        f"{where} was made for inputs of another size. Give the model the sizes of the data: model "
        "keys that are ${data.meta.input} or ${data.meta.classes} follow the data set's meta, "
        f"others you type (--cfg job shows model= as it is). An example of data="
        f"{failure.names['data']} has the shape {_example_shapes(failure.inputs)}."
    )


def _task_differs(failure: BatchFailure) -> bool:
    return bool(failure.outputs) and _fitting_task(failure) not in ("", failure.names["task"])


def _say_task(failure: BatchFailure) -> str:
    return f"{_output_and_target(failure)} Those fit task={_fitting_task(failure)}: type it."


def _fitting_task(failure: BatchFailure) -> str:
    """Return the built-in task that takes this output and target; empty for none."""
    output = failure.outputs[-1]
    target = failure.target
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        return ""
    if target.is_floating_point():
        return "regression" if output.shape == target.shape else ""
    if output.dim() == 2 and target.shape == output.shape[:1]:
        return "classification"
    if output.dim() == 3 and target.shape == output.shape[:2]:
        return "language"
    return ""


def _output_and_target(failure: BatchFailure) -> str:
    return (
        f"The model returns {_kind(failure.outputs[-1])}, and the targets are "
        f"{_kind(failure.target)}."
    )


def _say_where(failure: BatchFailure) -> str:
    """Return what helps with a failure of no known kind."""
    if not failure.in_forward:
        more = (
            f" task={failure.names['task']} takes {failure.expected_output}."
            if failure.expected_output
            else ""
        )
        return (
            f"The loss fails, not the model. {_output_and_target(failure)}{more} Change the "
            "model's last layer or the data set's targets, or type the task= that takes them."
        )
    where = failure.failing_module_name() or f"{type(failure.model).__name__}.forward"
    return (
        f"It fails in {where}, whose input or sizes do not fit this data set. Change model= (or "
        "its keys, model.<key>=) or data= to one that the other can take."
    )


def _always(_failure: BatchFailure) -> bool:
    return True


RULES: tuple[tuple[Callable[[BatchFailure], bool], Callable[[BatchFailure], str]], ...] = (
    (_returns_none, _say_none),
    (_yields_boxes, _say_boxes),
    (_takes_no_boxes, _say_no_boxes),
    (_returns_structure, _say_structure),
    (_yields_structure, _say_target),
    (_does_not_bind, _say_arguments),
    (_takes_no_structure, _say_inputs),
    (_tokens_without_embedding, _say_tokens),
    (_numbers_for_embedding, _say_indices),
    (_size_differs, _say_size),
    (_task_differs, _say_task),
    (_always, _say_where),
)
"""Kinds of failures: whether one applies, and what to say. The first that applies counts.

The order goes from what is certain (the model returns None) to what the error's text suggests; the
last row always applies.
"""


def loss_problem(loss: Any, task: str) -> str | None:
    """Return what is wrong with a task's loss that is no single number; None where it is one."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return None
    what = f"of the shape {_shape(loss)}" if isinstance(loss, Tensor) else f"a {_kind(loss)}"
    return (
        f"task={task} returns as loss {what}, and training needs one number. Return the mean over "
        "the batch, `loss.mean()`."
    )


def _kind(value: Any) -> str:
    """Return a value in words: dtype and shape of a tensor, the parts of a structure."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {_shape(value)}"
    # The names of the containers of a batch say nothing to a user.
    name = {KeywordInputs: "dict", PositionalInputs: "list"}.get(type(value), type(value).__name__)
    if isinstance(value, Mapping):
        return f"{name} with the keys {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"{name} of {len(value)}"
    return name


def _example_shapes(inputs: Any) -> str:
    """Return the shape of one example, of fields and several inputs that of each."""
    if isinstance(inputs, Mapping):
        return ", ".join(f"{name} {_shape(value)[1:]}" for name, value in inputs.items())
    if isinstance(inputs, tuple | list):
        return ", ".join(str(_shape(value)[1:]) for value in inputs)
    return str(_shape(inputs)[1:])


def _shape(value: Any) -> list[int]:
    return list(getattr(value, "shape", []))
