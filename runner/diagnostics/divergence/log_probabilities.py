"""How far the log-probabilities of two executions are apart."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.training.tasks.task import Task


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
    pairs = []
    for output in outputs:
        try:
            logits, labels = task.metric_inputs(output, target)
        except (ValueError, TypeError, AttributeError, IndexError):
            return None  # no output of which the task reads classes
        if not _are_classes(logits, labels):
            return None
        pairs.append((logits.detach().float().log_softmax(-1), labels))
    (wanted, labels), (found, _) = pairs
    index = labels.to(wanted.device).unsqueeze(-1)
    found = found.to(wanted.device)
    difference = (found.gather(-1, index) - wanted.gather(-1, index)).square()
    changed = (found.argmax(-1) != wanted.argmax(-1)).float()
    return LogProbabilityError(difference.mean().sqrt().item(), changed.mean().item())


def _are_classes(logits: Any, labels: Any) -> bool:
    is_pair = isinstance(logits, Tensor) and isinstance(labels, Tensor)
    if not is_pair or logits.ndim != 2 or labels.ndim != 1 or not labels.numel():
        return False
    return labels.dtype in (torch.int64, torch.int32)
