"""Check what a training loop of one's own does with a precision: its device, its optimizers, its
sessions, and whether its model calls the converted layers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.precision.conversion_proof import ForwardWatch
from runner.utils.accelerator import KINDS, choose_accelerator
from runner.utils.errors import ConfigError, PolicyError, Unavailable
from runner.utils.formatting import first_names
from runner.utils.tpu import is_tpu


def resolve_device(device: str | torch.device) -> torch.device:
    """Return a device of this machine, with its index where its kind has one.

    Raises:
        ConfigError: the device is not known.
        Unavailable: this machine has no such device.
    """
    if device in ("auto", "tpu"):
        return choose_accelerator(str(device)).device
    unknown = ConfigError(
        f"device={str(device)!r} is not known. Allowed: auto, cpu, cuda, cuda:<index>, mps, tpu."
    )
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise unknown from None
    if wanted.type == "cuda" and wanted.index is None and torch.cuda.is_available():
        # The one that torch.cuda.set_device chose for this process.
        return torch.device("cuda", torch.cuda.current_device())
    if is_tpu(wanted):
        return wanted
    if wanted.type not in KINDS:
        raise unknown
    try:
        return choose_accelerator(wanted.type, wanted.index or 0).device
    except Unavailable as error:
        what, remedy = (t.replace("accelerator", "device") for t in (error.what, error.remedy))
        raise Unavailable(what, remedy) from error


def check_optimizer(optimizer: Optimizer, model: nn.Module, device: torch.device) -> None:
    """Raise PolicyError unless an optimizer holds whole parameters of a model, on its device."""
    if not isinstance(optimizer, Optimizer):
        raise PolicyError(f"A torch.optim.Optimizer is needed, not {kind_of(optimizer)}.")
    kind = type(optimizer).__name__
    own = {*model.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p not in own:
                raise PolicyError(
                    f"{kind} holds a parameter {list(p.shape)} that the converted model does not "
                    "have. Make the optimizer after model = policy.convert(model), from "
                    "model.parameters(), and convert all models that it trains."
                )
            if p.device != device:
                raise PolicyError(
                    f"{kind} holds a parameter on {p.device}, and this policy computes on "
                    f"{device}. Leave the model where policy.convert put it, or make the policy "
                    f'with device="{p.device}".'
                )
            if type(p).__name__ == "DTensor":
                raise PolicyError(
                    f"{kind} holds sharded parameters, over which a policy cannot agree on "
                    "overflows and norms. Train with python -m runner strategy=fsdp."
                )


@contextmanager
def prove_layers_called(
    name: str, model: nn.Module, layers: Mapping[str, nn.Module]
) -> Iterator[None]:
    """Return the context around a model's first forward, which must call its converted layers.

    Args:
        name: of the precision.
        model: converted.
        layers: converted modules by their names.

    Raises:
        PolicyError: the model reads the weight of a layer and does not call the layer, so that
            nothing would be computed in the precision.
    """
    # Compiled code runs past the watch; it is compiled in the second forward.
    with torch.compiler.set_stance("force_eager"), ForwardWatch(model, layers) as watch:
        yield
    if watch.bypassed:
        names = sorted(watch.bypassed)
        raise PolicyError(
            f"The model reads the weight of {first_names(names)} and does not call the layer, "
            f"which computes in precision={name}. Leave such layers as they are: make the policy "
            f"with ignore_modules={names}."
        )


def kind_of(value: object) -> str:
    """Return an object's class, and a tensor's shape, as a phrase."""
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"
