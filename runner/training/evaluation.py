"""Evaluate a model on the validation data, and measure updates that leave weights unchanged."""

from collections.abc import Callable

import torch
from torch import Tensor

from runner.data.loader import Loader
from runner.precision.casting import cast_nest
from runner.training.state import TrainState
from runner.utils.stop_signals import until_interrupted


@torch.no_grad()
def evaluate(
    state: TrainState, validation: Loader, stopped: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Return the task's metrics over a data set, computed in the run's precision.

    Args:
        state: its model is evaluated; schedules that wait for a found-inf flag are advanced.
        validation: the data set.
        stopped: asked before each batch; once it returns True, the result is None.
    """
    precision, task, strategy = state.precision, state.task, state.strategy
    for d in state.optimizers:
        d.advance_schedule()
    strategy.broadcast_buffers(state.plain_model)
    state.model.eval()
    totals: Tensor | None = None
    with precision.eval_context(state.plain_model):
        for i, (inputs, target) in enumerate(until_interrupted(validation.epoch(0))):
            if stopped():
                return None
            with precision.forward(state.device):
                output = state.model(precision.cast(inputs))
            dtype = precision.loss_dtype
            found = task.totals(cast_nest(output, dtype), cast_nest(target, dtype))
            if not strategy.place.examples(validation.examples_in(i)):
                found = torch.zeros_like(found)  # another process's example
            totals = found if totals is None else totals + found
    state.model.train()
    if stopped() or totals is None:
        return None
    return task.summarise(strategy.sum(totals).tolist())


class Stagnation:
    """Counts elements that had a gradient and did not move, as happens in half precision where
    the update is under half a unit in the last place. Made before a step, read after it."""

    def __init__(self, state: TrainState) -> None:
        self.strategy = state.strategy
        self.params = [p for p in state.trainable if p.dtype.itemsize == 2]
        self.before = [p.clone() for p in self._held(self.params)]
        self.pulled: dict[int, Tensor] = {}
        self._handles = [p.register_post_accumulate_grad_hook(self._note) for p in self.params]

    def _note(self, param: Tensor) -> None:
        assert param.grad is not None
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        self.pulled[id(param)] = self._held([grad])[0] != 0

    def close(self) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()

    def _held(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.strategy.local_shards([t.detach() for t in tensors])

    def share(self) -> float:
        """Share of the half-precision elements with a gradient that did not move, 0 to 1."""
        self.close()
        rows = zip(self.params, self._held(self.params), self.before, strict=True)
        pairs = [(now, b, self.pulled[id(p)]) for p, now, b in rows if id(p) in self.pulled]
        pulled = sum(int(mask.count_nonzero()) for _, _, mask in pairs)
        still = sum(int(((p == b) & mask).count_nonzero()) for p, b, mask in pairs)
        if self.strategy.shards:
            still, pulled = self.strategy.sum(torch.tensor([still, pulled])).tolist()
        return still / pulled if pulled else 0.0
