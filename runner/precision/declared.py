"""Find what keeps its dtype in a conversion: what a model declares to be float32 whatever dtype it
is loaded in, and what it froze in another dtype than float32.

Models of transformers declare float32: a list names parameters and persistent buffers, and a
constructor may give a tensor float32 explicitly, as the frequencies of rotary embeddings. Loading
one in 16 bits keeps both, and the model's own forward casts at their borders.

Source: transformers, modeling_utils.py (_keep_in_fp32_modules for float16, its strict form for
bfloat16, too) and core_model_loading.py.
"""

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn

from runner.precision.casting import named_tensors
from runner.utils.formatting import first_names
from runner.utils.import_warnings import suppress_import_warnings
from runner.utils.modules import frozen_parts, outermost_names
from runner.utils.tensors import dtype_name


class KeptTensors(NamedTuple):
    """What keeps its dtype in a conversion.

    Attributes:
        float32: names of the parameters and buffers that the model declares to be float32.
        unchanged: names of those that it froze in a dtype of their own.
        lines: for the console; what stays in which dtype.
    """

    float32: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


def find_kept_tensors(model: nn.Module, storage: torch.dtype) -> KeptTensors:
    """Return what keeps its dtype where the other floating tensors get the storage dtype."""
    unchanged: list[str] = []
    lines: list[str] = []
    for path, part in frozen_parts(model).items():
        # float32 is what torch makes unless it is asked for another dtype.
        dtypes = {n: t.dtype for n, t in named_tensors(part).items() if t.is_floating_point()}
        own = {n: d for n, d in dtypes.items() if d not in (torch.float32, storage)}
        unchanged += [f"{path}.{name}" for name in own]
        for dtype in {*own.values()}:
            lines.append(f"stays in {dtype_name(dtype)}, frozen by the model: {path}")
    declared: list[str] = []
    if storage.itemsize == 2:
        models = [n for n, m in model.named_modules() if hasattr(m, "_keep_in_fp32_modules")]
        # The lists of a model hold those of the models in it, whose names begin with its own.
        for path in sorted(outermost_names(models)):
            names = _declared_of(model.get_submodule(path), storage)
            declared += [f"{path}.{name}".lstrip(".") for name in names]
    if declared:
        lines.append(f"stays in float32, as the model declares: {first_names(declared, 8)}")
    return KeptTensors(tuple(declared), tuple(unchanged), tuple(lines))


def _declared_of(model: Any, storage: torch.dtype) -> Iterator[str]:
    """Yield the names of the float32 tensors of a model of transformers."""
    patterns = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if storage is torch.float16:
        patterns |= {*(model._keep_in_fp32_modules or ())}
    listed = re.compile("|".join(p.replace("*", ".*") for p in patterns) or "$^")
    persistent = model.state_dict(keep_vars=True)
    explicit = _explicit_float32(model, storage)
    for name, tensor in named_tensors(model).items():
        is_listed = name in persistent and listed.search(name)
        if tensor.is_floating_point() and (is_listed or name in explicit):
            yield name


def _explicit_float32(model: Any, storage: torch.dtype) -> set[str]:
    """Return the names of the tensors that a model's constructor makes in float32 where torch's
    default dtype is the storage dtype."""
    try:
        # Without memory, as transformers' own loading builds it first.
        with torch.device("meta"), torch.random.fork_rng(devices=[]), suppress_import_warnings():
            built = type(model)._from_config(deepcopy(model.config), dtype=storage)
    except Exception:
        # A class of one's own may take more than a config. Every architecture has these in float32.
        return {name for name, _ in model.named_buffers() if name.endswith("inv_freq")}
    return {name for name, tensor in named_tensors(built).items() if tensor.dtype is torch.float32}
