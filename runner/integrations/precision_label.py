"""Name the precision that another trainer's step really had, and what it replaced silently.

A trainer's setting says little: Accelerate's fp16 computes in float32 on a CPU, Lightning's
16-mixed becomes bf16-mixed there, and transformers loads weights in their checkpoint's dtype.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from runner.utils.tensors import dtype_name

_WORD_BY_DTYPE = {"float16": "16", "bfloat16": "bf16", "float32": "32", "float64": "64"}
_UNSEEN_LABELS = ("fp8-mixed", "transformer-engine", "transformer-engine-float16")
"""Precisions whose products are no operators of torch, so that no probe sees their dtypes."""

_REASONS = {"tf32": "torch is set to run float32 products in TF32 in this process."}
"""Why another precision runs, where the trainer is not known to be the cause; by its label."""


@dataclass(frozen=True)
class PrecisionRequest:
    """The precision that a trainer was asked for.

    Attributes:
        setting: as the user typed it, for example "TrainingArguments(fp16=True)".
        label: the runner's name of it, for example "16-mixed".
        reasons: why the trainer runs another precision instead, by that precision's label.
    """

    setting: str
    label: str
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepDtypes:
    """The dtypes of a training's first step.

    Attributes:
        label: the runner's name of the precision.
        computes: names of the dtypes that matrix products and convolutions took, sorted.
        stores: name of the dtype that holds most of the model's elements.
        has_scale: an enabled GradScaler scaled the loss.
        is_observed: False where no probe sees the dtypes: of a compiled model, of FP8 products.
    """

    label: str
    computes: tuple[str, ...] = ()
    stores: str = ""
    has_scale: bool = False
    is_observed: bool = True


def step_dtypes(
    rows: Sequence[Mapping[str, str]], model: nn.Module, has_scale: bool, request: PrecisionRequest
) -> StepDtypes:
    """Return the dtypes of a step, from the rows of a DtypeProbe that watched it.

    Args:
        rows: of the probe; empty for a compiled model, for which the request counts.
        model: the model after the step.
        has_scale: an enabled GradScaler scaled the loss.
        request: what the trainer was asked for.
    """
    elements: Counter[str] = Counter()
    for param in model.parameters():
        elements[dtype_name(param.dtype)] += param.numel()
    stores = elements.most_common(1)[0][0] if elements else "float32"
    counts = Counter(name for row in rows for name in row["computes"].split())
    if not counts or request.label in _UNSEEN_LABELS:
        return StepDtypes(request.label, (), stores, has_scale, False)
    # Under autocast norms and embeddings compute in float32: one half dtype names the precision.
    halves = [name for name, _ in counts.most_common() if name in ("float16", "bfloat16")]
    compute = halves[0] if halves else counts.most_common(1)[0][0]
    kind = "mixed" if halves and stores != compute else "true"
    label = f"{_WORD_BY_DTYPE.get(compute, compute)}-{kind}"
    first = next(model.parameters(), None)
    if label == "32-true" and first is not None and first.is_cuda:
        # The older switches raise where a trainer has set this one.
        label = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else label
    return StepDtypes(label, tuple(sorted(counts)), stores, has_scale)


def substitution_text(request: PrecisionRequest, dtypes: StepDtypes) -> str:
    """Return a sentence on what the trainer replaced silently; empty where it replaced nothing."""
    if not dtypes.is_observed:
        return ""
    if dtypes.label == request.label:
        if dtypes.label == "16-mixed" and not dtypes.has_scale:
            return "float16 was computed without a loss scale: small gradients become zero."
        if dtypes.label.endswith("-mixed") and dtypes.stores not in ("float32", "float64"):
            return f"{dtypes.label} has its weights in {dtypes.stores}, not in float32."
        return ""
    words = "a loss scale" if dtypes.has_scale else "no loss scale"
    reason = request.reasons.get(dtypes.label, _REASONS.get(dtypes.label, ""))
    return (
        f"{request.setting} asks for {request.label}, and the first step computed in "
        f"{' and '.join(dtypes.computes)} with weights in {dtypes.stores} and {words}: the run is "
        f"recorded as {dtypes.label}. {reason}"
    ).rstrip()


def numeric_switches() -> dict[str, Any]:
    """Return torch's process-wide switches that change the numbers of a step, by name."""
    cuda = torch.backends.cuda.matmul
    return {
        "cuda_matmul_fp32_precision": cuda.fp32_precision,
        "cudnn_conv_fp32_precision": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "cpu_matmul_fp32_precision": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        "fp16_reduced_precision_reduction": cuda.allow_fp16_reduced_precision_reduction,
        "bf16_reduced_precision_reduction": cuda.allow_bf16_reduced_precision_reduction,
    }
