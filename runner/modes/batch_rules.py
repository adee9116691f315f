"""Explain why a model or a loss fails on the first batch, by a table of rules."""

from collections.abc import Mapping
from dis import opmap
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.core import batch_layout, model_call, tensor_facts
from runner.modes.error_rules import LIBRARIES, Failure, Rule, first_message, precision_advice
from runner.training.tasks.tensor_task import TensorTask

_LAYOUTS = "(docs/own-code.md)"


def explain_batch_error(failure: Failure) -> str:
    """Return the message for a failure: what failed on which batch, and what to change."""
    names = failure.names
    advice = precision_advice(failure) or first_message(BATCH_RULES, failure)
    return (
        f"model={names['model']} fails on the first batch of data={names['data']} (inputs "
        f"{_kind(failure.inputs)}) with task={names['task']}: {type(failure.error).__name__}: "
        f"{failure.text.strip().rstrip('.')}. {advice}"
    )


def explain_loss(loss: Any, task: str) -> str:
    """Return a message for a task's loss that is no single number."""
    what = f"of the shape {_shape(loss)}" if isinstance(loss, Tensor) else f"a {_kind(loss)}"
    return f"task={task} returns as loss {what}, no number. Return `loss.mean()`."


_DTYPES = r"dtype|scalar type|[Ii]nput type|not implemented for|Boolean"
"""Pattern of PyTorch's messages about operands whose dtypes do not fit."""
_SIZES = (
    r"cannot be multiplied|to have \d+ channels|size mismatch|must match the size|is invalid for "
    r"input of size|normalized_shape|shape mismatch|size of tensor"
)
"""Pattern of PyTorch's messages about operands whose sizes do not fit."""


def _yields_boxes(failure: Failure) -> bool:
    first = next(iter(failure.target), None) if isinstance(failure.target, list) else None
    return isinstance(first, Mapping) and "boxes" in first


def _returns_structure(failure: Failure) -> bool:
    if not (failure.expected_output and failure.outputs):
        return False
    output = failure.outputs[-1]
    # A built-in task takes the logits of an output by itself.
    taken = failure.task.select(output) if isinstance(failure.task, TensorTask) else output
    return not isinstance(taken, Tensor)


def _does_not_bind(failure: Failure) -> bool:
    """Return whether the forward takes other arguments than the inputs of the batch."""
    model = failure.model
    inputs = failure.inputs
    if not failure.in_forward:
        return False
    if type(inputs) is batch_layout.KeywordInputs and not model_call.takes_fields(model, inputs):
        return True
    if not isinstance(failure.error, TypeError):
        return False
    # A TypeError may come from inside the forward, too: only the signature shows the difference.
    forward = signature(model.forward)
    try:
        if type(inputs) is batch_layout.PositionalInputs:
            forward.bind(*inputs)
        elif model_call.takes_fields(model, inputs):
            forward.bind(**{name: inputs[name] for name in forward.parameters if name in inputs})
        else:
            forward.bind(inputs)
    except TypeError:
        return True
    return False


def _explain_arguments(failure: Failure) -> str:
    """Return what to change where a forward takes other arguments than a batch gives."""
    inputs = failure.inputs
    parameters = signature(failure.model.forward).parameters
    names = [*parameters]
    if type(inputs) is batch_layout.KeywordInputs:
        fields = f"a batch has the fields {', '.join(map(str, inputs))} beside its target"
        if model_call.takes_fields(failure.model, inputs):
            # The parameters that a call by names has to give.
            kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
            needed = [n for n, p in parameters.items() if p.kind in kinds and p.default is p.empty]
            missing = ", ".join(name for name in needed if name not in inputs)
            is_packed = missing == "attention_mask" and "position_ids" in inputs
            typed = " Packed texts have one with data.separate=false." if is_packed else ""
            return (
                f"{failure.takes}, and {fields}, which are passed by their names: {missing} is "
                f"missing. Have the data set yield fields of these names {_LAYOUTS}.{typed}"
            )
        name = names[0] if names else "as the argument"
        return (
            f"{failure.takes}, and {fields}: as none is an argument's name, the forward was given "
            f"one dict. Have the data set yield a field {name}, or (input, target) {_LAYOUTS}."
        )
    if type(inputs) is batch_layout.PositionalInputs:
        return (
            f"{failure.takes}, and a batch has {len(inputs)} inputs before its target, which are "
            f"passed by position. Yield one for each, or type task.inputs=[<names>] {_LAYOUTS}."
        )
    if isinstance(inputs, Tensor) and len(names) > 1:
        return (
            f"{failure.takes}, and of a batch (input, target) it is given the input alone, here "
            f"{_kind(inputs)}. Yield ({', '.join(names)}, target) for several inputs, or type "
            f"task=model_loss if the forward takes the target and returns the loss {_LAYOUTS}."
        )
    # The forward to write for inputs that are one argument, or the batch to yield.
    flat = ", ".join(names)
    start = f"{flat} = inputs" if names else "return ..."
    if isinstance(inputs, Mapping):
        start = "; ".join(f'{name} = inputs["{name}"]' for name in names)
    remedy = f"Write `def forward(self, inputs): {start}`."
    if isinstance(inputs, tuple | list) and len(names) > 1:
        remedy = (
            f"Yield ({flat}, target), whose inputs are passed by position, or write "
            f"`def forward(self, inputs): {start}`."
        )
    return (
        f"{failure.takes}, and the runner passes the inputs of a batch as one argument, here a "
        f"{_kind(inputs)}. {remedy}"
    )


def _explain_integers(failure: Failure) -> str:
    """Return what to change where weights are given integers; empty for another failure."""
    tensors = [leaf for leaf in tree_leaves(failure.inputs) if isinstance(leaf, Tensor)]
    integers = [t for t in tensors if not (t.is_floating_point() or t.is_complex())]
    embeds = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in failure.model.modules())
    if embeds or not (integers and failure.in_forward and failure.says(_DTYPES)):
        return ""
    first = integers[0]
    white = {torch.uint8: " / 255", torch.uint16: " / 65535"}.get(first.dtype, "")
    remedy = f"Have the data set yield floating-point inputs, x.float(){white}"
    if failure.names["data"] == "npz":
        remedy = f"Write the array as x.astype('float32'){white}"
    # Tokens are int64 [B, T].
    if not white and first.ndim == 2:
        remedy += ". Type a model that takes tokens (model=gpt) where they are tokens"
    what = "pixels" if white and first.ndim > 2 else "numbers or tokens"
    return f"The inputs are integers, {_kind(first)}, {what}; the model takes floats. {remedy}."


def _explain_raise(failure: Failure) -> str:
    """Return where a `raise` or `assert` raised the error; empty where an operation, PyTorch or the
    runner did."""
    last = failure.error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_frame.f_code.co_code[last.tb_lasti] != opmap["RAISE_VARARGS"]:
        return ""
    path = last.tb_frame.f_code.co_filename
    if path.startswith(LIBRARIES):
        return ""
    inside = f" in {failure.module_in_words}" if failure.module_in_words else ""
    return f"{Path(path).name}, line {last.tb_lineno}, raises it{inside}: that code says why."


def _fitting_task(failure: Failure) -> str:
    """Return the built-in task that takes this output and target; empty for none."""
    output = failure.outputs[-1]
    target = failure.target
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        return ""
    fits = output.shape in (target.shape, (*target.shape, 1))
    is_regression = failure.names["task"] == "regression" and target.is_floating_point()
    if fits and not is_regression and bool(((target == 0) | (target == 1)).all()):
        return "binary"
    if target.is_floating_point() or target.is_complex():
        return "regression" if output.shape == target.shape else ""
    if target.shape == output.shape[:-1]:
        return {2: "classification", 3: "language"}.get(output.dim(), "")
    return ""


def _output_and_target(failure: Failure) -> str:
    output, target = _kind(failure.outputs[-1]), _kind(failure.target)
    return f"The model returns {output}, and the targets are {target}."


def _elsewhere(failure: Failure) -> str:
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
    where = failure.module_in_words or f"{type(failure.model).__name__}.forward"
    return (
        f"It fails in {where}. If its input or sizes do not fit this data set, change model= (or "
        "its keys, model.<key>=) or data= to one that the other can take."
    )


BATCH_RULES: tuple[Rule, ...] = (
    (
        lambda f: any(output is None for output in f.outputs),
        lambda f: (
            f"The model returns None: end {type(f.model).__name__}.forward with `return <output>`."
        ),
    ),
    (
        lambda f: not f.is_detection and _yields_boxes(f),
        lambda f: f"data={f.names['data']} yields boxes. Type task=detection (docs/vision.md).",
    ),
    (
        lambda f: f.is_detection and _does_not_bind(f),
        lambda f: (
            f"task=detection calls the model as model(images, targets), and {f.takes}. Type "
            "model=torchvision model.name=fasterrcnn_resnet50_fpn, or have the forward take both."
        ),
    ),
    (
        _returns_structure,
        lambda f: (
            f"The model returns a {_kind(f.outputs[-1])}; task={f.names['task']} takes a tensor, "
            f"{f.expected_output}. Type task.output=<its key or place> to take a part of it, or "
            f"end the model's forward with `return <tensor>` {_LAYOUTS}."
        ),
    ),
    (
        lambda f: bool(f.expected_output and f.outputs) and not isinstance(f.target, Tensor),
        lambda f: (
            f"data={f.names['data']} yields as target a {_kind(f.target)}; "
            f"task={f.names['task']} takes a tensor. Yield (input, target) with a tensor as target."
        ),
    ),
    (_does_not_bind, _explain_arguments),
    (
        lambda f: (
            f.in_forward
            and type(f.inputs) not in (batch_layout.KeywordInputs, batch_layout.PositionalInputs)
            and isinstance(f.inputs, Mapping | tuple | list)
        ),
        lambda f: (
            f"data={f.names['data']} yields as inputs a {_kind(f.inputs)}, one argument of the "
            "model. In a module of your own, write `def forward(self, inputs): return self.net("
            f"{'**' if isinstance(f.inputs, Mapping) else '*'}inputs)` and take the tensor that "
            f"the task needs {_LAYOUTS}."
        ),
    ),
    ("", _explain_integers),
    (
        "selected index k out of range",
        lambda f: (
            f"{f.module_in_words} takes the k largest of fewer than k numbers: a mixture chooses "
            "more experts than it has. Type a smaller model.config.num_experts_per_tok=."
        ),
    ),
    (
        lambda f: f.in_forward and "for argument #1 'indices'" in f.text,
        lambda f: (
            f"{f.module_in_words} takes integer tokens, and the inputs are floating-point numbers. "
            "Have the data set yield int64 inputs (x.long()), or type a model that takes numbers."
        ),
    ),
    (
        lambda f: f.in_forward and f.says(_SIZES),
        lambda f: (
            f"{f.module_in_words} was made for inputs of another size. Give the model the sizes of "
            "the data: model keys that are ${data.meta.input} or ${data.meta.classes} follow the "
            "data set's meta, others you type (--cfg job shows model= as it is). An example of "
            f"data={f.names['data']} has the shape {_example_shapes(f.inputs)}."
        ),
    ),
    (
        lambda f: bool(f.outputs) and _fitting_task(f) not in ("", f.names["task"]),
        lambda f: f"{_output_and_target(f)} Those fit task={_fitting_task(f)}: type it.",
    ),
    ("", _explain_raise),
    ("", _elsewhere),
)
"""Kinds of failures. The order goes from what is certain (the model returns None) to what the text
of the error suggests; the last row always applies."""


def _kind(value: Any) -> str:
    """Return a value in words: dtype and shape of a tensor, the parts of a structure."""
    if isinstance(value, Tensor):
        return f"{tensor_facts.dtype_name(value.dtype)} {_shape(value)}"
    # The names of the containers of a batch say nothing to a user.
    name = {batch_layout.KeywordInputs: "dict", batch_layout.PositionalInputs: "list"}.get(
        type(value), type(value).__name__
    )
    if isinstance(value, Mapping):
        return f"{name} with the keys {', '.join(map(str, value))}"
    return f"{name} of {len(value)}" if isinstance(value, tuple | list) else name


def _example_shapes(inputs: Any) -> str:
    """Return the shape of one example, of fields and several inputs that of each."""
    if isinstance(inputs, Mapping):
        return ", ".join(f"{name} {_shape(value)[1:]}" for name, value in inputs.items())
    if isinstance(inputs, tuple | list):
        return ", ".join(str(_shape(value)[1:]) for value in inputs)
    return str(_shape(inputs)[1:])


def _shape(value: Any) -> list[int]:
    return list(getattr(value, "shape", []))
