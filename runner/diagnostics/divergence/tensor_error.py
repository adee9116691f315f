"""Measure how far a tensor, or the log-probabilities of a batch, are from a reference."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.core import Task, tensor_facts


class TensorError(NamedTuple):
    """How far a tensor is from its reference.

    Attributes:
        error: 2-norm of the difference, over the elements that are finite in both; of integers the
            number of elements that differ.
        norm: 2-norm of the reference; of integers the number of elements.
        nonfinite: elements that are not finite, and are in the reference.
        flushed: elements that are 0, and are not in the reference.
        subnormal: elements that are not 0 in the reference, and lie below the normal numbers of the
            tensor's dtype, which has a narrower range: they keep fewer digits, or none.
        different: elements that differ from the reference; where the dtypes differ, all if any
            does.
        elements: of the tensor.
        other_shape: whether the tensor has another shape; nothing else was measured then.
        peak: share of the squared error that the element with the largest error has, 0 to 1; 0
            where elements were not counted.
        is_discrete: whether the tensor holds integers or truth values.
    """

    error: float
    norm: float
    nonfinite: int = 0
    flushed: int = 0
    different: int = 0
    elements: int = 0
    other_shape: bool = False
    peak: float = 0.0
    is_discrete: bool = False
    subnormal: int = 0

    @property
    def relative(self) -> float:
        """Return the error relative to the reference's norm; infinite where that is 0 and the
        error is not."""
        if self.error == 0:
            return 0.0
        return self.error / self.norm if self.norm else math.inf

    @property
    def sqnr_db(self) -> float:
        """Return the ratio of signal to error in decibels, infinite without an error."""
        return math.inf if self.relative == 0 else -20 * math.log10(self.relative)

    def share(self, count: int) -> float:
        """Return a count of elements as a share, 0 to 1."""
        return count / self.elements if self.elements else 0.0


def no_error(tensor: Tensor) -> TensorError:
    """Return the error of what equals a tensor; the host waits for the device."""
    tensor = tensor_facts.real_view(tensor)
    elements = tensor.numel()
    if not tensor.is_floating_point():
        return TensorError(0.0, elements, elements=elements, is_discrete=True)
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(tensor.detach(), dtype=wide).item()
    return TensorError(0.0, norm, elements=elements)


def measure_error(
    tensor: Tensor, reference: Tensor, scale: float = 1.0, counts: bool = True
) -> TensorError:
    """Return the error of a tensor; the host waits for the device.

    Args:
        tensor: floating, complex, integer or boolean, any shape. The real and the imaginary part of
            a complex number are compared as two elements.
        reference: what it is compared with.
        scale: what the tensor is divided by first, as a loss scale.
        counts: whether elements are counted that differ or become zero, and the peak is found.
    """
    tensor, reference = tensor_facts.real_view(tensor), tensor_facts.real_view(reference)
    reference = reference.to(tensor.device)  # against=cpu: the executions are on two devices
    elements = tensor.numel()
    if tensor.shape != reference.shape:
        return TensorError(math.inf, 1.0, elements=elements, other_shape=True, peak=1.0)
    if not (tensor.is_floating_point() and reference.is_floating_point()):
        different = int((tensor != reference).sum())
        peak = 1 / different if different else 0.0
        return TensorError(
            different, elements, 0, 0, different, elements, peak=peak, is_discrete=True
        )
    wide = torch.float64 if torch.float64 in (tensor.dtype, reference.dtype) else torch.float32
    value = tensor.detach().to(wide)
    if scale != 1.0:
        value = value / scale
    expected = reference.detach().to(wide)
    difference = value - expected
    norms = torch.linalg.vector_norm(difference), torch.linalg.vector_norm(expected)
    error, norm = torch.stack(norms).tolist()
    info, reference_info = torch.finfo(tensor.dtype), torch.finfo(reference.dtype)
    if not (math.isfinite(error) and math.isfinite(norm)):
        # Only numbers that are finite in both count. Masks are often filled with the lowest number
        # of their dtype: two such numbers are the same.
        both = value.isfinite() & expected.isfinite()
        both &= ~((value == info.min / scale) & (expected == reference_info.min))
        known = torch.where(both, expected.double(), 0)
        difference = torch.where(both, value.double(), 0) - known
        return TensorError(
            torch.linalg.vector_norm(difference).item(),
            torch.linalg.vector_norm(known).item(),
            nonfinite=int((~value.isfinite() & expected.isfinite()).sum()),
            different=int((value != expected).sum()),
            elements=elements,
        )
    if not (counts and error):
        return TensorError(error, norm, elements=elements)
    flushed = subnormal = 0
    if info.tiny > reference_info.tiny:
        is_nonzero = expected != 0
        flushed = int(((value == 0) & is_nonzero).sum())
        subnormal = int(((expected.abs() < info.tiny / scale) & is_nonzero).sum())
    different = elements
    if tensor.dtype is reference.dtype and scale == 1.0:
        different = int(torch.count_nonzero(difference))
    peak = (torch.linalg.vector_norm(difference, math.inf).item() / error) ** 2
    return TensorError(error, norm, 0, flushed, different, elements, peak=peak, subnormal=subnormal)


class LogProbabilityError(NamedTuple):
    """Two executions' log-probabilities of a batch.

    Attributes:
        rms: root of the mean squared difference of the targets' log-probabilities, in nats: the
            mismatch between training and inference that reinforcement learning pays for
            (arXiv:2510.26788).
        changed: share of the labels whose most probable class is another one, 0 to 1.
    """

    rms: float
    changed: float


def log_probability_error(
    task: Task, outputs: tuple[Tensor, Tensor], target: Any
) -> LogProbabilityError | None:
    """Return how far two outputs' log-probabilities are apart; None where a task predicts no class.

    Args:
        task: of the run.
        outputs: the reference's logits and the other execution's, in any dtypes.
        target: of the batch.
    """
    try:
        pairs = [task.metric_inputs(output, target) for output in outputs]
    except (ValueError, TypeError, AttributeError, IndexError):
        return None  # no output of which the task reads classes
    if not all(isinstance(part, Tensor) for pair in pairs for part in pair):
        return None
    (expected, labels), (values, _) = pairs
    is_of_classes = expected.ndim == values.ndim == 2 and labels.ndim == 1 and labels.numel()
    if not is_of_classes or labels.dtype not in (torch.int64, torch.int32):
        return None
    expected = expected.detach().float().log_softmax(-1)
    values = values.detach().float().log_softmax(-1).to(expected.device)
    index = labels.to(expected.device).unsqueeze(-1)
    difference = (values.gather(-1, index) - expected.gather(-1, index)).square()
    changed = (values.argmax(-1) != expected.argmax(-1)).float()
    return LogProbabilityError(difference.mean().sqrt().item(), changed.mean().item())
