"""Sparse gradients, which embeddings with `sparse=True` get: whose they are, and which optimizers
take them."""

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.nn.functional import embedding
from torch.optim import Optimizer

from runner.precision.gradients import finish_gradients
from runner.utils.errors import ConfigError


def sparse_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters whose gradients are sparse, by name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            found[f"{name}.weight".lstrip(".")] = module.weight
    return {name: p for name, p in found.items() if p.requires_grad}


def check_optimizer(
    key: str,
    build: Callable[[list[nn.Parameter]], Optimizer],
    names: Collection[str],
    dtype: torch.dtype,
) -> None:
    """Raise ConfigError where an optimizer refuses sparse gradients.

    Args:
        key: of the optimizer's node.
        build: makes the optimizer of parameters.
        names: of the parameters whose gradients are sparse.
        dtype: of the tables.
    """
    # torch's optimizers refuse them in a step only, when a model and its data have been loaded. So
    # two steps are tried here on a table of two rows; the second one uses the state of the first.
    invariants = torch.sparse.check_sparse_tensor_invariants
    if not invariants.is_enabled():
        invariants.disable()  # else torch warns of the tensors that its own optimizers make
    table = nn.Parameter(torch.zeros(2, 2, dtype=dtype))
    optimizer = build([table])
    # LBFGS flattens all gradients to one vector, and its step needs a function of the loss.
    if isinstance(optimizer, torch.optim.LBFGS):
        return
    try:
        for _ in range(2):
            table.grad = None
            rows = embedding(torch.zeros(1, dtype=torch.int64), table, sparse=True)
            rows.sum().backward()
            finish_gradients([table])
            optimizer.step()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"{key}: {type(optimizer).__name__} refuses the sparse gradients of "
            f"{', '.join(names)}: {reason}. Type optimizer=sgd optimizer.weight_decay=0 or "
            "optimizer=adagrad optimizer.weight_decay=0, or build the embedding with sparse=False."
        ) from error
