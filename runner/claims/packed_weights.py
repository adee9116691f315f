"""Measure claims about weights of 4 bits: their size and their error on normal weights."""

import torch
from torch import Tensor, nn

from runner.claims.claim import Measurement
from runner.precision.emulation.quantizers import Nvfp4Quantizer
from runner.precision.registry import load_precision
from runner.utils.import_warnings import suppress_import_warnings
from runner.utils.tensors import stored_bytes

BLOCK = 64
"""Weights that share a scale in bitsandbytes' 4-bit formats."""


def double_quantization(width: int = 4096) -> Measurement:
    """Measure the bits of a packed NF4 weight with plain and with quantised scales.

    Args:
        width: of the square layer. The library's table of 256 numbers for the scales counts, too:
            1024 of it cost 0.008 bits a weight.
    """
    bits = {}
    for label, name in (("NF4", "bnb-nf4"), ("NF4 + DQ", "bnb-nf4-dq")):
        layer = nn.Sequential(nn.Linear(width, width, bias=False))
        layer, _ = load_precision(name).convert(layer)
        bits[label] = 8 * stored_bytes(layer) / width**2
    return Measurement({**bits, "saved": bits["NF4"] - bits["NF4 + DQ"]})


def nf4_error() -> Measurement:
    """Measure the errors of NF4, FP4 and int4 on normal weights, all with a scale per BLOCK."""
    from runner.precision.layers.linear_4bit import pack_4bit, unpack_4bit
    from runner.precision.layers.weight_formats import Int4Format

    weight = _normal_weight()
    errors = {}
    for kind in ("nf4", "fp4"):
        packed = pack_4bit(weight, kind, nested=False)
        unpacked = unpack_4bit(packed.data, packed.quant_state, torch.float32)
        errors[kind.upper()] = _relative_error(unpacked, weight)
    int4 = Int4Format(BLOCK)
    errors["int4"] = _relative_error(int4.unpack(int4.pack(weight)), weight)
    worst = errors["NF4"] / min(errors["FP4"], errors["int4"])
    return Measurement({**errors, "NF4 / next": worst})


def nvfp4_error() -> Measurement:
    """Measure the errors of MXFP4 (torchao's) and NVFP4 (this runner's) on normal weights."""
    with suppress_import_warnings():
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        weight = _normal_weight()
        mxfp4 = MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, block_size=32)
    errors = {
        "MXFP4": _relative_error(mxfp4.dequantize(torch.float32), weight),
        "NVFP4": _relative_error(Nvfp4Quantizer((1, 16))(weight), weight),
    }
    return Measurement({**errors, "NVFP4 / MXFP4": errors["NVFP4"] / errors["MXFP4"]})


def _normal_weight() -> Tensor:
    """Return normal numbers, float32 [1024, 1024], the same in each call."""
    return torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))


def _relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of the exact values."""
    return ((found - exact).norm() / exact.norm()).item()
