"""Optimizers whose state takes 8 or 4 bits per element: thin subclasses of bitsandbytes' and
torchao's, made when first asked for, so that a machine without the libraries runs everything else.

Both libraries quantize the state of a tensor in blocks and leave that of tensors below 4096
elements alone. The subclasses add one thing: a parameter group {"params": [...],
"optim_bits": 32} keeps its state in float32. runner.training.optimizers puts embeddings into such a
group, as Dettmers et al. do (section 2.3), since training with 8-bit state of embeddings is less
stable.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861; Li et
al., Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from runner.utils.errors import ConfigError
from runner.utils.import_warnings import suppress_import_warnings

# Both libraries compute in float32 and store the result in the parameter's dtype.
DTYPES = ("bfloat16", "float16", "float32")
_BLOCKS = (32, 64, 128, 256, 512, 1024)


class Blockwise(Optimizer):
    """What the subclasses of bitsandbytes' optimizers share.

    The library's own way to 32-bit state is GlobalOptimManager, one for the whole process, which
    knows parameters by their id and by their index in whatever optimizer comes along; overrides
    of one run hit parameters of the next. Each optimizer here has an empty one of its own.

    Raises:
        ValueError: a keyword outside its range, or parameters that it would spoil.
    """

    wide_embeddings = True
    wide_state = True  # never in the dtype of half-precision weights
    args: Any
    mng: Any
    is_paged: bool

    def __init__(self, params: Iterable[Any], **keywords: Any) -> None:
        check_keywords(keywords)
        init: Any = super().__init__
        init(params, **keywords)
        check_dtypes(self)
        self.mng = object.__new__(type(self.mng))
        self.mng.initialize()

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        base: Any = super()
        config = base.get_config(gindex, pindex, group)
        return {**config, "optim_bits": group.get("optim_bits", self.args.optim_bits)}

    def init_state(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Raise RuntimeError where the library leaves a 32-bit group anything but float32."""
        base: Any = super()
        base.init_state(group, p, gindex, pindex)
        kept = {v.dtype for k, v in self.state[p].items() if k in ("state1", "state2")}
        if group.get("optim_bits") == 32 and kept != {torch.float32}:
            raise RuntimeError(
                f"{type(self).__name__} made the state of a {list(p.shape)} parameter in "
                f"{', '.join(str(dtype) for dtype in kept)}, and its group {gindex} asks for "
                "optim_bits=32: this bitsandbytes does not read it from the group."
            )

    def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return paged memory on CUDA and plain memory elsewhere, without the library's warning."""
        if p.device.type != "cuda":
            return torch.zeros_like(p, dtype=dtype)
        base: Any = super()
        return base.get_state_buffer(p, dtype=dtype)

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load state into paged memory; the library would load it into the device's own."""
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


class BlockwiseAdam(Blockwise):
    """Keywords of Adam8bit and PagedAdam8bit. The weight decay is decoupled, as in AdamW."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        min_8bit_size: int = 4096,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            min_8bit_size=min_8bit_size,
        )


class BlockwiseAdamW(BlockwiseAdam):
    """Keywords of AdamW8bit and PagedAdamW8bit: Adam8bit's with another default."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        min_8bit_size: int = 4096,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, min_8bit_size)


class BlockwiseLion(Blockwise):
    """Keywords of Lion8bit and PagedLion8bit."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: Sequence[float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        min_8bit_size: int = 4096,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, weight_decay=weight_decay, min_8bit_size=min_8bit_size
        )


class WrappedAdamW(Optimizer):
    """What the subclasses of torchao's AdamW share.

    torchao compiles its step, for 80 seconds and more on a CPU, and so the step runs compiled on
    CUDA and eagerly elsewhere. Its learning rates are tensors that schedules fill in place, which
    a record of every step would see change afterwards; here they are numbers but during a step.
    Its state is of tensor subclasses that torch.load refuses where torchao is not imported; here
    checkpoints hold the plain tensors inside them.

    Raises:
        ValueError: a keyword outside its range, or parameters that it would spoil.
    """

    wide_embeddings = True
    block_size: int
    _subclass_zeros: Callable[[Tensor, bool, int], Tensor]

    # The parameters are keys of the yamls in conf/optimizer.
    def __init__(  # noqa: PLR0913
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        block_size: int = 128,
        bf16_stochastic_round: bool = False,
    ) -> None:
        keywords = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "block_size": block_size,
            "bf16_stochastic_round": bf16_stochastic_round,
        }
        check_keywords(keywords)
        init: Any = super().__init__
        init(params, **keywords)
        check_dtypes(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        lr = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)
        self.param_groups[-1]["lr"] = lr

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        rates = [group["lr"] for group in self.param_groups]
        on_cuda = any(p.device.type == "cuda" for g in self.param_groups for p in g["params"])
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
        wide = (g["params"] for g in self.param_groups if g.get("optim_bits") == 32)
        if any(p is other for other in chain.from_iterable(wide)):
            return torch.zeros_like(p, dtype=torch.float32)
        base: Any = super()
        return base._new_buffer(p, signed)

    def state_dict(self) -> dict[str, Any]:
        """torch's, with each quantized tensor as {"tensors": {...}, "context": [...]}."""
        content = super().state_dict()
        state = {
            index: {key: _flatten(value) for key, value in values.items()}
            for index, values in content["state"].items()
        }
        return {**content, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not by way of torch's, which casts all state to the dtype of its parameter."""
        super().load_state_dict({**state_dict, "state": {}})
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for p, index in zip(params, saved, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Mapping):
                    parts = {name: part.to(p.device) for name, part in value["tensors"].items()}
                    self.state[p][key] = self._unflatten(parts, value["context"])
                else:  # the count of steps stays on the CPU
                    self.state[p][key] = value if key == "step" else value.to(p.device)

    def _unflatten(self, parts: Mapping[str, Tensor], context: list[Any]) -> Tensor:
        block: Any = self._subclass_zeros(torch.empty(self.block_size), True, self.block_size)
        return type(block).__tensor_unflatten__(parts, context)


def _flatten(value: Any) -> Any:
    if not (isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)):
        return value
    names, context = value.__tensor_flatten__()
    return {"tensors": {name: getattr(value, name) for name in names}, "context": context}


def _number(value: Any, below: float = math.inf) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and 0 <= value < below


def _whole(value: Any) -> bool:
    return _number(value) and isinstance(value, int)


def _pair(value: Any) -> bool:
    sized = isinstance(value, Sequence) and len(value) == 2
    return sized and all(_number(part, below=1) for part in value)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_number, "a number, 0 and up"),
    "betas": (_pair, "two numbers from 0 to below 1, as in [0.9,0.999]"),
    "eps": (lambda v: _number(v) and v > 0, "a number above 0"),
    "weight_decay": (_number, "a number, 0 and up"),
    "min_8bit_size": (_whole, "a whole number of elements, 0 and up"),
    "block_size": (lambda v: _whole(v) and v in _BLOCKS, f"one of {_BLOCKS}"),
    "amsgrad": (lambda v: isinstance(v, bool), "true or false"),
    "bf16_stochastic_round": (lambda v: isinstance(v, bool), "true or false"),
}


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise ValueError with every keyword out of its range, in one message."""
    wrong = [name for name, value in keywords.items() if not _RULES[name][0](value)]
    if wrong:
        said = (f"{name}={keywords[name]} is not {_RULES[name][1]}" for name in wrong)
        raise ValueError("; ".join(said))


def check_dtypes(optimizer: Optimizer) -> None:
    """Raise ValueError for parameters that both libraries would silently round (float64, to
    float32) or cut (complex, to the real part)."""
    found = {
        str(p.dtype).removeprefix("torch.") for g in optimizer.param_groups for p in g["params"]
    }
    if wrong := sorted(found - set(DTYPES)):
        raise ValueError(
            f"it computes in float32 and the model holds {', '.join(wrong)} parameters. Allowed: "
            f"{', '.join(DTYPES)}. Type optimizer=adamw, or precision=32-true"
        )


# Each class that can be asked for: its library, the module there, and what it gains here.
CLASSES: dict[str, tuple[str, type[Optimizer]]] = {
    "Adam8bit": ("bitsandbytes.optim", BlockwiseAdam),
    "AdamW8bit": ("bitsandbytes.optim", BlockwiseAdamW),
    "Lion8bit": ("bitsandbytes.optim", BlockwiseLion),
    "PagedAdam8bit": ("bitsandbytes.optim", BlockwiseAdam),
    "PagedAdamW8bit": ("bitsandbytes.optim", BlockwiseAdamW),
    "PagedLion8bit": ("bitsandbytes.optim", BlockwiseLion),
    "AdamW4bit": ("torchao.optim", WrappedAdamW),
    "AdamWFp8": ("torchao.optim", WrappedAdamW),
}


@cache
def _made(name: str) -> type[Optimizer]:
    module, mixin = CLASSES[name]
    library = module.partition(".")[0]
    try:
        with suppress_import_warnings():
            base = getattr(import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"{__name__}.{name} needs {library}, which does not import here: {error}. "
            f"Type pip install {library} (its wheels are for Linux), or optimizer=adamw."
        ) from error
    return type(name, (mixin, base), {"__doc__": base.__doc__, "__module__": __name__})


def __getattr__(name: str) -> type[Optimizer]:
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _made(name)
