"""Measure the claims: numbers and sums, weights of 4 bits, products in int8 and FP8, networks."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.gpt import GPT
from runner.core import terminal
from runner.core.base.tensor_facts import CPU_DEVICE, dtype_name, stored_bytes
from runner.data.datasets.digits import digits
from runner.precision.emulation.formats import (
    E4M3,
    E5M2,
    BlockQuantizer,
    Format,
    Nvfp4Quantizer,
    amax_scale,
    round_to_format,
)
from runner.precision.emulation.te_emulation import scaled_product
from runner.precision.layers.bnb_linear import bnb, pack_4bit, unpack_4bit
from runner.precision.layers.quantized_linear import Int4Format
from runner.precision.registry import load_precision
from runner.precision.weight_updates import UPDATE_RULES
from runner.precision.wide_step import attach_update

Values = dict[str, float]
"""Measured numbers, each with a short name."""

FLOAT_1_6_9 = Format(
    # No dtype of torch's: its values are held in float32.
    "float16_1_6_9",
    torch.float32,
    9,
    -30,
    2.0**31 * (2 - 2.0**-9),
    2.0**31 * (2 - 2.0**-10),
)
"""The 16-bit format of arXiv:1812.08011, with 6 bits of exponent and 9 of significand."""

Rounding = Callable[[Tensor], Tensor]


def lost_updates() -> Values:
    """Measure from which ratio of weight to update on an addition leaves a weight of 1 unchanged.

    The ratios are powers of two, and the additions those of the dtype.
    """
    values = {}
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.ones((), dtype=dtype)
        update = torch.ones((), dtype=dtype)
        while weight + update != weight:
            update = update / 2
        values[dtype_name(dtype)] = 1 / update.item()
    return values


def stalled_weights(weights: int = 10_000) -> Values:
    """Measure the mean of bfloat16 weights of 1 after 100 updates of 0.001, under each rule.

    Args:
        weights: number of them, over which stochastic rounding is averaged.
    """
    values = {}
    for rule in UPDATE_RULES:
        parameter = nn.Parameter(torch.ones(weights, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([parameter], lr=1e-3)
        attach_update(optimizer, rule)
        for _ in range(100):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        values[rule] = parameter.detach().float().mean().item()
    return values


def stopped_sums() -> Values:
    """Measure where sums in 16 bits stop growing, and the error of a sum in chunks of 64.

    The numbers of the (1,6,9) format are uniform with mean 1 and standard deviation 1; IEEE
    float16 adds ones.
    """
    generator = torch.Generator().manual_seed(0)
    spread = math.sqrt(3)
    numbers = 1 + spread * (2 * torch.rand(65_536, generator=generator) - 1)

    def to_1_6_9(x: Tensor) -> Tensor:
        return round_to_format(x, FLOAT_1_6_9)

    numbers = to_1_6_9(numbers)
    in_chunks = _sum_in_order(_sum_in_order(numbers.view(-1, 64), to_1_6_9), to_1_6_9).item()
    exact = numbers.double().sum().item()
    return {
        # A quarter of the numbers is enough to see the sum stop.
        "(1,6,9)": _sum_in_order(numbers[: 1 << 14], to_1_6_9).item(),
        "float16": _sum_in_order(torch.ones(5000).half(), torch.Tensor.half).item(),
        "error in chunks": abs(in_chunks - exact) / exact,
    }


def _sum_in_order(numbers: Tensor, rounded: Rounding) -> Tensor:
    """Return the sums along the last dimension, rounded after each addition."""
    total = torch.zeros_like(numbers[..., 0])
    for column in numbers.unbind(-1):
        total = rounded(total + column)
    return total


def fp8_range() -> Values:
    """Measure the limits of torch's FP8 dtypes, and count where the emulation differs from them.

    The emulation rounds every value of a dtype, every midpoint of two neighbours, and random
    numbers.
    """
    values = {}
    differences = 0
    for label, fmt in (("E4M3", E4M3), ("E5M2", E5M2)):
        every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype).float()
        finite = every[every.isfinite()].unique()
        normal = torch.finfo(fmt.dtype).smallest_normal
        values[f"{label} max"] = finite.max().item()
        values[f"{label} log2 min"] = math.log2(normal)
        values[f"{label} log2 sub"] = math.log2(finite[finite > 0].min().item())
        differences += int(fmt.largest != finite.max()) + int(fmt.normal != normal)
        inputs = [finite, (finite[1:] + finite[:-1]) / 2]
        inputs.append(torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
        for x in inputs:
            differences += int((round_to_format(x, fmt) != x.to(fmt.dtype).float()).sum())
    values["differences"] = float(differences)
    return values


BLOCK = 64
"""Weights that share a scale in bitsandbytes' 4-bit formats."""


def double_quantization(width: int = 4096) -> Values:
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
    return {**bits, "saved": bits["NF4"] - bits["NF4 + DQ"]}


def nf4_error() -> Values:
    """Measure the errors of NF4, FP4 and int4 on normal weights, all with a scale per BLOCK."""
    weight = _normal_weight()
    errors = {}
    for kind in ("nf4", "fp4"):
        packed = pack_4bit(weight, kind, nested=False)
        unpacked = unpack_4bit(packed.data, packed.quant_state, torch.float32)
        errors[kind.upper()] = _relative_error(unpacked, weight)
    int4 = Int4Format(BLOCK)
    errors["int4"] = _relative_error(int4.unpack(int4.pack(weight)), weight)
    worst = errors["NF4"] / min(errors["FP4"], errors["int4"])
    return {**errors, "NF4 / next": worst}


def nvfp4_error() -> Values:
    """Measure the errors of MXFP4 (torchao's) and NVFP4 (this runner's) on normal weights."""
    with terminal.suppress_warnings():
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        weight = _normal_weight()
        mxfp4 = MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, block_size=32)
    errors = {
        "MXFP4": _relative_error(mxfp4.dequantize(torch.float32), weight),
        "NVFP4": _relative_error(Nvfp4Quantizer((1, 16))(weight), weight),
    }
    return {**errors, "NVFP4 / MXFP4": errors["NVFP4"] / errors["MXFP4"]}


def _normal_weight() -> Tensor:
    """Return normal numbers, float32 [1024, 1024], the same in each call."""
    return torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))


def _relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of the exact values."""
    return ((found - exact).norm() / exact.norm()).item()


OUTLIER_THRESHOLD = 6.0


def int8_outliers() -> Values:
    """Measure the errors of bitsandbytes' int8 layer on inputs with a large column of 1024.

    The column is 60 times as large as the others; with the threshold the layer multiplies it in
    float16. The layer is the library's own, on the CPU.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1024, 1024, generator=generator) / 32
    # No other value reaches the threshold.
    rows = torch.randn(256, 1024, generator=generator).clamp_(-5, 5)
    rows[:, 0] *= 60
    errors = {}
    for label, threshold in (("plain", 0.0), ("outliers apart", OUTLIER_THRESHOLD)):
        layer = bnb.nn.Linear8bitLt(
            1024, 1024, bias=False, has_fp16_weights=False, threshold=threshold
        ).eval()
        kind: Any = bnb.nn.Int8Params
        layer.weight = kind(weight.clone(), requires_grad=False, has_fp16_weights=False)
        with torch.no_grad():
            output = layer.to("cpu")(rows.half())
        exact = rows.half().double() @ weight.double().t()
        errors[label] = _relative_error(output, exact)
    ratio = errors["plain"] / errors["outliers apart"]
    return {**errors, "plain / apart": ratio}


def hopper_sums(size: int = 64) -> Values:
    """Measure the largest error of FP8 products with K = 4096 summed as on Hopper.

    Errors are those of the sums alone, relative to the root mean square of the exact products of
    the quantised operands. Both have one scale for a tensor.

    Args:
        size: rows and columns of the product.
    """
    values = {}
    for label, draw in (("normal", torch.randn), ("uniform", torch.rand)):
        generator = torch.Generator().manual_seed(0)
        quantizer = BlockQuantizer(E4M3, amax_scale, keeps_scales=True)
        a = quantizer(draw(size, 4096, generator=generator))
        b = quantizer(draw(size, 4096, generator=generator))
        exact = _values(a) @ _values(b).t()
        unit = exact.square().mean().sqrt()
        for suffix, promotes in (("", False), (" promoted", True)):
            error = (scaled_product(a, b, promotes) - exact).abs().max() / unit
            values[f"{label}{suffix}"] = error.item()
    return values


def _values(operand: Tensor) -> Tensor:
    """Return the float64 values of an operand of scaled_product."""
    return operand.double().prod(0)


LOSS_SCALE = 2.0**16


def half_log_probabilities() -> Values:
    """Measure how far log-probabilities of a GPT in 16 bits are from those in float32.

    The weights are random.
    """
    torch.manual_seed(0)
    network = GPT(256, 64, layers=4, width=128, heads=4).eval()
    tokens = torch.randint(256, (8, 64))
    exact = _log_probabilities("32-true", network, tokens)
    errors = {}
    for label, name in (("float16", "16-true"), ("bfloat16", "bf16-true")):
        error = _log_probabilities(name, network, tokens) - exact
        errors[label] = error.square().mean().sqrt().item()
    return {**errors, "bfloat16 / float16": errors["bfloat16"] / errors["float16"]}


def _log_probabilities(name: str, network: nn.Module, tokens: Tensor) -> Tensor:
    """Return a network's log-probabilities under a precision: float32 [tokens, vocabulary]."""
    precision = load_precision(name)
    model, _ = precision.convert(copy.deepcopy(network))
    with torch.no_grad(), precision.session(model, CPU_DEVICE), precision.forward(CPU_DEVICE):
        logits = model(tokens).flatten(0, 1)
    return logits.float().log_softmax(-1)


def loss_scale() -> Values:
    """Measure the share of activations' gradients that float16 turns into zero, by loss scale.

    Counted are the gradients of the linear layers' outputs that float32 does not compute as zero,
    and overflows under the larger scale. The network is trained on data=digits first, so that its
    gradients are small.
    """
    images, labels = digits().train[:512]
    images = images.flatten(1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    network.append(nn.Linear(128, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
    exact = _activation_gradients("32-true", network, images, labels, 1.0)
    values = {}
    for label, scale in (("scale 1", 1.0), ("scale 2^16", LOSS_SCALE)):
        found = _activation_gradients("16-mixed", network, images, labels, scale)
        values[label] = (found[exact != 0] == 0).double().mean().item()
        values["overflows"] = (~found.isfinite()).double().sum().item()
    return values


def _activation_gradients(
    name: str, network: nn.Module, images: Tensor, labels: Tensor, scale: float
) -> Tensor:
    """Return the gradients of all linear layers' outputs under a precision, in one dimension."""
    precision = load_precision(name)
    model, _ = precision.convert(copy.deepcopy(network))
    outputs = []
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    with precision.session(model, CPU_DEVICE):
        with precision.forward(CPU_DEVICE):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), labels) * scale
        with precision.backward(CPU_DEVICE):
            gradients = torch.autograd.grad(loss, outputs)
    return torch.cat([gradient.float().flatten() for gradient in gradients])
