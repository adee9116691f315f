"""The weights that are evaluated in place of those that train.

They are an exponential average of the weights (train.ema), or those of the eval() of optimizers
that have it, as schedule-free ones do.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from runner.core import checkpoint_file, fmt, gradients, tensor_facts, train_state

AVERAGE_KEY = "average"
"""Key of a checkpoint that holds what EvaluatedWeights.state_dict returns."""


class _Views(NamedTuple):
    """An optimizer's weights and their averages, as the update reads and writes them.

    Attributes:
        weights: detached; of sharded ones this process's shards.
        averages: the same of the averages.
        is_narrow: whether a weight has another dtype than its average.
    """

    weights: list[Tensor]
    averages: list[Tensor]
    is_narrow: bool


class WeightAverage(train_state.EvaluatedWeights, train_state.StepHook):
    """Exponential moving average of a model's trainable weights, in float32 or their wider dtype.

    After each applied step, average = decay * average + (1 - decay) * weight; before the first one
    the average is the initial weights. The running statistics of batch norms are averaged, too.
    Of sharded weights each process averages its shards. Nothing here makes the host wait for the
    device.

    Source: Polyak and Juditsky, SIAM J. Control Optim. 30, 1992; the form of Tarvainen and Valpola,
    arXiv:1703.01780.

    Args:
        model: on its device; not changed.
        params: of each optimizer, whose steps may be skipped one by one.
        decay: above 0 and below 1.

    Attributes:
        decay: see above.
    """

    def __init__(self, model: nn.Module, params: Sequence[Sequence[Tensor]], decay: float) -> None:
        self.decay = decay
        self._weights = [[*part] for part in params]
        for module in model.modules():
            if isinstance(module, _NormBase):
                # The running statistics follow the first optimizer's steps.
                buffers = (module.running_mean, module.running_var)
                self._weights[0] += [buffer for buffer in buffers if buffer is not None]
        self._averages: list[list[Tensor]] = []
        for part in self._weights:
            # Below float32 most updates of an average are rounded away.
            dtypes = [torch.promote_types(weight.dtype, torch.float32) for weight in part]
            pairs = zip(part, dtypes, strict=True)
            self._averages.append([weight.detach().clone().to(dtype) for weight, dtype in pairs])
        # In the state dict, by the tensor's id; weights that layers share have several names.
        named = model.state_dict(keep_vars=True)
        self._names = fmt.grouped((id(tensor), name) for name, tensor in named.items())
        self._views = None

    @torch.no_grad()
    def end(self, found_infs: Sequence[Tensor | None]) -> None:
        """Move the average towards the weights after a step; see StepHook."""
        if self._views is None:
            # The weights and their averages, in the same memory layout. Once: a walk over the
            # tensors costs host time in every step, and train.channels_last changes layouts after
            # the average was made.
            views = []
            for weights, averages in zip(self._weights, self._averages, strict=True):
                is_narrow = False
                for i, (weight, average) in enumerate(zip(weights, averages, strict=True)):
                    is_narrow |= weight.dtype != average.dtype
                    if weight.stride() != average.stride():
                        averages[i] = torch.empty_like(weight, dtype=average.dtype).copy_(average)
                views.append(_Views(_local(weights), _local(averages), is_narrow))
            self._views = views
        for (weights, averages, is_narrow), found_inf in zip(self._views, found_infs, strict=True):
            wide = weights
            if is_narrow:
                pairs = zip(weights, averages, strict=True)
                wide = [weight.to(average.dtype) for weight, average in pairs]
            if found_inf is None:
                torch._foreach_lerp_(averages, wide, 1 - self.decay)
                continue
            # A skipped step has a share of 0: to ask whether it was skipped would read the device.
            share = (1 - found_inf) * (1 - self.decay)
            differences = torch._foreach_sub(wide, averages)
            torch._foreach_mul_(differences, share)
            torch._foreach_add_(averages, differences)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Return a context in which the model has the averaged weights, in its own dtypes."""
        weights = _local([*chain(*self._weights)])
        with _restored(weights):
            torch._foreach_copy_(weights, _local(self.tensors()))
            yield

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the average."""
        return [*chain(*self._averages)]

    def describe(self) -> str:
        """Return one line about what is averaged and what its metrics are."""
        size = tensor_facts.tensor_bytes(*self.tensors()) / tensor_facts.MIB
        return (
            f"val/... are those of the averaged weights (train.ema={self.decay:g}; "
            f"{size:.1f} MiB more)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the average by the names that the model's state dict has; not copied."""
        weights = {}
        for weight, average in zip(chain(*self._weights), self.tensors(), strict=True):
            for name in self._names[id(weight)]:
                weights[name] = average
        return {"decay": self.decay, "weights": weights}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Copy the average of a checkpoint; its decay is not taken over.

        Raises:
            ValueError: it is of other weights.
        """
        current = self.state_dict()["weights"]
        theirs = saved["weights"]
        if current.keys() != theirs.keys():
            raise ValueError("its average is of other weights")
        for name, average in current.items():
            saved_average = theirs[name]
            if tensor_facts.is_sharded(average):
                saved_average = checkpoint_file.shard_like(saved_average, average)
            average.copy_(saved_average)


class OptimizerModes(train_state.EvaluatedWeights):
    """The weights that the eval() of optimizers makes of those that train.

    Args:
        model: of the run.
        optimizers: of the run; one of them has modes.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._trained = {id(p) for p in gradients.parameters_of(*optimizers)}
        self._moded: list[Any] = [optimizer for optimizer in optimizers if has_modes(optimizer)]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        # What train() computes back is rounded, and an evaluation must not change the training.
        with _restored(_local(gradients.parameters_of(*self._moded))):
            for optimizer in self._moded:
                optimizer.eval()
            try:
                yield
            finally:
                for optimizer in self._moded:
                    optimizer.train()

    def state_dict(self) -> dict[str, Any]:
        with self.swapped_in():
            named = self._model.state_dict(keep_vars=True)
            weights = {n: p.detach().clone() for n, p in named.items() if id(p) in self._trained}
        return {"decay": self.decay, "weights": weights}


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has train() and eval(), which give its parameters the weights
    that train and those that are evaluated."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def with_averaged_weights(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's content with its averaged weights in place of those of the last step.

    Args:
        content: as checkpoint_file.load returns it, with an average.

    Raises:
        ValueError: the average is of other weights than the model's.
    """
    weights = content[AVERAGE_KEY]["weights"]
    if not weights.keys() <= content["model"].keys():
        raise ValueError("its average is of other weights")
    return {**content, "model": {**content["model"], **weights}}


@contextmanager
def _restored(weights: list[Tensor]) -> Iterator[None]:
    """Return a context at whose end detached tensors have the values of its beginning."""
    copies = [weight.clone() for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, copies)


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return this process's shards of sharded tensors and the others as they are, detached."""
    shards = [
        tensor.to_local() if tensor_facts.is_sharded(tensor) else tensor for tensor in tensors
    ]
    return [shard.detach() for shard in shards]
