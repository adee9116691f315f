"""The contract of loss scales: the training step has no branch on the precision.

runner.precision.dynamic_loss_scale has the one that float16 needs.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from runner.core.base.errors import ConfigError


class LossScale:
    """A loss scale as the training step uses it. This one does nothing: every operation is the
    plain one of a precision that needs none. Tensors are scalars on the run's device."""

    @property
    def value(self) -> Tensor | None:
        """Return the current scale, a float32 scalar that later updates do not change."""
        return None

    def multiply(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss

    def unscale(self, grads: Sequence[Tensor]) -> Tensor | None:
        """Divide one optimizer's gradients by the scale in place; return its found-inf, a float32
        scalar that is 1.0 where any gradient is not finite and 0.0 else."""
        return None

    def step(self, optimizer: Optimizer, found_inf: Tensor | None) -> None:
        """Step the optimizer, or skip the step where its gradients overflowed."""
        optimizer.step()

    def update(self, found_infs: Sequence[Tensor | None]) -> None:
        """Grow or back off, once per iteration, after every optimizer has stepped."""

    def step_all(
        self, optimizers: Sequence[Optimizer], found_infs: Sequence[Tensor | None]
    ) -> None:
        """Step the optimizers on their unscaled gradients, and update the scale."""
        for optimizer, found_inf in zip(optimizers, found_infs, strict=True):
            self.step(optimizer, found_inf)
        # One scale for all optimizers, so it changes once, after the last of them has used it.
        self.update(found_infs)

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint stores of the scale; empty without one."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what state_dict returned.

        Raises:
            ConfigError: the checkpoint holds a loss scale and this precision has none, or the
                reverse.
        """
        if state:
            raise ConfigError(
                "The checkpoint holds a loss scale and this precision has none. "
                "Load it with precision=16-mixed."
            )
