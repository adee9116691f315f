"""Optimizers whose state takes 8 or 4 bits per element, from bitsandbytes and torchao.

The classes are thin subclasses of the libraries', made when first asked for, so that a machine
without the libraries runs everything else.

Both libraries quantize the state of a tensor in blocks and leave that of tensors below 4096
elements alone. The subclasses add one thing: a parameter group {"params": [...],
"optim_bits": 32} keeps its state in float32. runner.training.setup puts embeddings into such a
group, as Dettmers et al. do (section 2.3), since training with 8-bit state of embeddings is less
stable.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861; Li et
al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.core import ConfigError, tensor_facts, terminal

# Both libraries compute in float32 and store the result in the parameter's dtype.
SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)  # elements that share one scale


class LowBitOptimizer(Optimizer):
    """Base of the subclasses.

    Args:
        params: as any optimizer takes them.
        keywords: of the library's class, with its defaults.

    Attributes:
        library: the name of the library.
        unused_keywords: those of its classes that they read nowhere.
        wide_embeddings: build_optimizer gives embeddings a group with 32-bit state.

    Raises:
        ValueError: a keyword outside its range, or parameters whose values would be damaged.
    """

    library: ClassVar[str]
    unused_keywords: ClassVar[Collection[str]] = ()
    wide_embeddings = True

    def __init__(self, params: Iterable[Any], **keywords: Any) -> None:
        check_keywords(keywords)
        init: Any = super().__init__
        init(params, **keywords)
        check_dtypes(self)


class Blockwise(LowBitOptimizer):
    """Base of the subclasses of bitsandbytes' optimizers.

    Attributes:
        wide_state: the state is never in the dtype of half-precision weights.
    """

    library = "bitsandbytes"
    unused_keywords = ("amsgrad",)
    wide_state = True
    args: Any
    mng: Any
    is_paged: bool

    def __init__(self, params: Iterable[Any], **keywords: Any) -> None:
        super().__init__(params, **keywords)
        # The library's own way to 32-bit state is GlobalOptimManager, one for the whole process. It
        # knows parameters by their id and by their index in any optimizer, so that overrides of one
        # run change parameters of the next. Each optimizer here has an empty one of its own.
        self.mng = object.__new__(type(self.mng))
        self.mng.initialize()

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        base: Any = super()
        config = base.get_config(gindex, pindex, group)
        return {**config, "optim_bits": group.get("optim_bits", self.args.optim_bits)}

    def init_state(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Make the state of a parameter.

        Raises:
            RuntimeError: the state of a 32-bit group is not in float32.
        """
        base: Any = super()
        base.init_state(group, p, gindex, pindex)
        # A release of the library that does not ask get_config here would quantise the embeddings
        # unnoticed.
        state = self.state[p]
        dtypes = {state[key].dtype for key in ("state1", "state2") if key in state}
        if group.get("optim_bits") == 32 and dtypes != {torch.float32}:
            raise RuntimeError(
                f"{type(self).__name__} made the state of a {list(p.shape)} parameter in "
                f"{', '.join(str(dtype) for dtype in dtypes)}, and its group {gindex} asks for "
                "optim_bits=32: this bitsandbytes does not read it from the group."
            )

    def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory for state: paged on CUDA, plain elsewhere."""
        # The library would return plain memory, too, with a warning for each parameter.
        if p.device.type != "cuda":
            return torch.zeros_like(p, dtype=dtype)
        base: Any = super()
        return base.get_state_buffer(p, dtype=dtype)

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load state, into paged memory where the optimizer is paged."""
        # The library would load it into the device's own memory.
        base: Any = super()
        base.load_state_dict(state_dict, move_to_device=move_to_device and not self.is_paged)
        if not self.is_paged:
            return
        for p, state in self.state.items():
            for key, value in state.items():
                if key in ("state1", "state2"):
                    state[key] = self.get_state_buffer(p, dtype=value.dtype).copy_(value)
                elif isinstance(value, Tensor):
                    state[key] = value.to(p.device)


class WrappedAdamW(LowBitOptimizer):
    """Base of the subclasses of torchao's AdamW.

    Learning rates are plain numbers outside of step(), and checkpoints hold plain tensors.
    """

    library = "torchao"
    block_size: int
    _subclass_zeros: Callable[[Tensor, bool, int], Tensor]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # torchao makes the rate a tensor, which schedules fill in place: the rate in the record of
        # a step would change afterwards.
        lr = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = lr

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step, compiled on CUDA and eagerly elsewhere."""
        rates = [group["lr"] for group in self.param_groups]
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        on_cuda = any(p.device.type == "cuda" for p in params)
        # torchao compiles its step, which takes 80 seconds and more on a CPU.
        stance = nullcontext() if on_cuda else torch.compiler.set_stance("force_eager")
        try:
            for group in self.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)
            with stance:
                return super().step(closure)  # type: ignore[arg-type]
        finally:
            for group, lr in zip(self.param_groups, rates, strict=True):
                group["lr"] = lr

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        for group in self.param_groups:
            if group.get("optim_bits") == 32 and any(p is other for other in group["params"]):
                return torch.zeros_like(p, dtype=torch.float32)
        base: Any = super()
        return base._new_buffer(p, signed)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with plain tensors in place of quantized ones.

        A quantized tensor becomes {"tensors": {...}, "context": [...]}.
        """
        # torch.load refuses torchao's tensor subclasses where torchao is not imported.
        content = super().state_dict()
        state = {}
        for index, values in content["state"].items():
            state[index] = dict(values)
            for key, value in values.items():
                if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
                    names, context = value.__tensor_flatten__()
                    tensors = {name: getattr(value, name) for name in names}
                    state[index][key] = {"tensors": tensors, "context": context}
        return {**content, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() returned, with each tensor in the dtype that it has there."""
        # torch's own method gets the groups only: it casts all state to its parameter's dtype.
        super().load_state_dict({**state_dict, "state": {}})
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for p, index in zip(params, saved, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Mapping):
                    parts = {name: part.to(p.device) for name, part in value["tensors"].items()}
                    # The tensor's class depends on the optimizer and on torchao's version, so a
                    # tiny state tensor is made to ask for it.
                    tiny = torch.empty(self.block_size)
                    block: Any = self._subclass_zeros(tiny, True, self.block_size)
                    restored = type(block).__tensor_unflatten__(parts, value["context"])
                    self.state[p][key] = restored
                elif key == "step":
                    self.state[p][key] = value  # the count of steps stays on the CPU
                else:
                    self.state[p][key] = value.to(p.device)


def _is_number(value: Any, below: float = math.inf) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < below


def _is_whole_number(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int)


def _is_pair_below_1(value: Any) -> bool:
    is_pair = isinstance(value, Sequence) and len(value) == 2
    return is_pair and all(_is_number(part, below=1) for part in value)


# Whether a value is allowed, and the allowed values in words, by keyword.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_is_number, "a number, 0 and up"),
    "betas": (_is_pair_below_1, "two numbers from 0 to below 1, as in [0.9,0.999]"),
    "eps": (lambda v: _is_number(v) and v > 0, "a number above 0"),
    "weight_decay": (_is_number, "a number, 0 and up"),
    "min_8bit_size": (_is_whole_number, "a whole number of elements, 0 and up"),
    "block_size": (lambda v: _is_whole_number(v) and v in _BLOCK_SIZES, f"one of {_BLOCK_SIZES}"),
    "amsgrad": (lambda v: isinstance(v, bool), "true or false"),
    "bf16_stochastic_round": (lambda v: isinstance(v, bool), "true or false"),
}


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise ValueError with every keyword out of its range, in one message.

    Raises:
        TypeError: a keyword is none of these classes'.
    """
    unknown = [name for name in keywords if name not in _RULES]
    if unknown:
        raise TypeError(f"unexpected keywords: {', '.join(unknown)}")
    wrong = [name for name, value in keywords.items() if not _RULES[name][0](value)]
    if wrong:
        problems = [f"{name}={keywords[name]} is not {_RULES[name][1]}" for name in wrong]
        raise ValueError("; ".join(problems))


def check_dtypes(optimizer: Optimizer) -> None:
    """Raise ValueError for parameters in dtypes that the libraries do not support."""
    # Both would silently round float64 to float32, and reduce complex numbers to their real parts.
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    wrong = sorted({tensor_facts.dtype_name(p.dtype) for p in params}.difference(SUPPORTED_DTYPES))
    if wrong:
        raise ValueError(
            f"it computes in float32 and the model holds {', '.join(wrong)} parameters. Allowed: "
            f"{', '.join(SUPPORTED_DTYPES)}. Type optimizer=adamw, or precision=32-true"
        )


# The base here of each class of the libraries that a config may name.
_CLASSES: dict[str, type[LowBitOptimizer]] = {
    "Adam8bit": Blockwise,
    "AdamW8bit": Blockwise,
    "Lion8bit": Blockwise,
    "PagedAdam8bit": Blockwise,
    "PagedAdamW8bit": Blockwise,
    "PagedLion8bit": Blockwise,
    "AdamW4bit": WrappedAdamW,
    "AdamWFp8": WrappedAdamW,
}


@cache
def __getattr__(name: str) -> type[Optimizer]:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    mixin = _CLASSES[name]
    try:
        with terminal.suppress_warnings():
            base = getattr(import_module(f"{mixin.library}.optim"), name)
    except Exception as error:
        raise ConfigError(
            f"{__name__}.{name} needs {mixin.library}, which does not import here: {error}. "
            f"Type pip install {mixin.library} (its wheels are for Linux), or optimizer=adamw."
        ) from error
    own = signature(base)
    allowed = {"params", *_RULES}.difference(mixin.unused_keywords)
    shown = own.replace(parameters=[p for p in own.parameters.values() if p.name in allowed])
    members = {"__doc__": base.__doc__, "__module__": __name__, "__signature__": shown}
    return type(name, (mixin, base), members)
