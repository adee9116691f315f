"""Each operator with float32 accumulation against its native float16 kernel: rounding and range."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.precision.emulation.cpu_kernels import KERNELS, WRITING_VARIANTS, float32_accumulate

HALF = torch.float16
# Native convolution gradients round partial sums too: up to 1.2e-3 of the output's scale.
TOLERANCE = 4e-3


class Case(NamedTuple):
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def conv(dims: int = 2, transposed: bool = False, **options: Any) -> Callable[..., Tensor]:
    function = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")
    return lambda x, w, b=None: function(x, w, b, **options)


def strided(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x.t()[::2], w.t())


def channels_last(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x.contiguous(memory_format=torch.channels_last), w, padding=1)


def attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.detach())


def math_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def recurrent(kind: str, **options: Any) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return getattr(nn, kind)(x.shape[-1], 12, batch_first=True, **options).to(x.dtype)(x)[0]

    return run


QKV = ((2, 2, 9, 8),) * 3
CASES = {
    "mm": Case(torch.mm, ((5, 40), (40, 7))),
    "mm large": Case(torch.mm, ((64, 300), (300, 33))),
    "mm strided": Case(strided, ((30, 8), (9, 30))),
    "mm no rows": Case(torch.mm, ((0, 4), (4, 3))),
    "mm no columns inside": Case(torch.mm, ((3, 0), (0, 4))),
    "bmm": Case(torch.bmm, ((3, 5, 20), (3, 20, 6))),
    "bmm no batch": Case(torch.bmm, ((0, 5, 20), (0, 20, 6))),
    "addmm": Case(torch.addmm, ((7,), (5, 40), (40, 7))),
    "addmm alpha beta": Case(
        lambda *t: torch.addmm(*t, beta=0.5, alpha=-2.0), ((5, 7), (5, 40), (40, 7))
    ),
    "baddbmm": Case(
        lambda *t: torch.baddbmm(*t, beta=2.0, alpha=0.25), ((3, 5, 6), (3, 5, 20), (3, 20, 6))
    ),
    "addbmm": Case(torch.addbmm, ((5, 6), (3, 5, 20), (3, 20, 6))),
    "linear": Case(F.linear, ((4, 3, 16), (8, 16), (8,))),
    "linear no bias": Case(F.linear, ((4, 3, 16), (8, 16))),
    "einsum": Case(lambda a, b: torch.einsum("bqd,bkd->bqk", a, b), ((2, 5, 8), (2, 6, 8))),
    "conv2d": Case(conv(padding=1), ((2, 6, 9, 9), (8, 6, 3, 3), (8,))),
    "conv2d no bias": Case(conv(), ((2, 6, 9, 9), (8, 6, 3, 3))),
    "conv2d stride": Case(conv(stride=2, padding=1), ((2, 6, 9, 9), (8, 6, 3, 3))),
    "conv2d groups": Case(conv(groups=3), ((2, 6, 9, 9), (9, 2, 3, 3), (9,))),
    "conv2d depthwise": Case(conv(groups=6, padding=1), ((2, 6, 9, 9), (6, 1, 3, 3))),
    "conv2d dilation": Case(conv(dilation=2), ((2, 6, 9, 9), (8, 6, 3, 3))),
    "conv2d 1x1": Case(conv(), ((2, 6, 9, 9), (8, 6, 1, 1))),
    "conv2d channels last": Case(channels_last, ((2, 6, 9, 9), (8, 6, 3, 3))),
    "conv2d no images": Case(conv(padding=1), ((0, 6, 9, 9), (8, 6, 3, 3))),
    "conv2d unbatched": Case(conv(), ((6, 9, 9), (8, 6, 3, 3), (8,))),
    "conv1d": Case(conv(1, padding=1), ((2, 6, 20), (8, 6, 3), (8,))),
    "conv3d": Case(conv(3), ((1, 3, 5, 6, 7), (4, 3, 3, 3, 3), (4,))),
    "transposed": Case(conv(2, True, stride=2), ((2, 6, 5, 5), (6, 4, 3, 3), (4,))),
    "transposed output padding": Case(
        conv(2, True, stride=2, padding=1, output_padding=1, groups=2), ((2, 6, 5, 5), (6, 4, 3, 3))
    ),
    "fold": Case(lambda x: F.fold(x, (8, 8), 3), ((2, 18, 36),)),
    "attention": Case(attention(), QKV),
    "attention causal": Case(attention(is_causal=True, scale=0.3), QKV),
    "attention masked": Case(masked, (*QKV, (9, 9))),
    "attention math": Case(math_attention, QKV),
    "lstm": Case(recurrent("LSTM"), ((3, 5, 8),)),
    "lstm two layers, both ways": Case(
        recurrent("LSTM", num_layers=2, bidirectional=True), ((3, 5, 8),)
    ),
    "lstm no bias": Case(recurrent("LSTM", bias=False), ((3, 5, 8),)),
    "gru": Case(recurrent("GRU"), ((3, 5, 8),)),
    "rnn": Case(recurrent("RNN"), ((3, 5, 8),)),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def inputs(case: Case, dtype: torch.dtype = HALF) -> list[Tensor]:
    torch.manual_seed(0)
    # Rounded through float16, so that every dtype gets the same values.
    return [torch.randn(s).half().to(dtype).requires_grad_() for s in case.shapes]


def results(case: Case, dtype: torch.dtype = HALF) -> list[Tensor]:
    """Return the output and the gradients of a case."""
    tensors = inputs(case, dtype)
    out = case.run(*tensors)
    torch.manual_seed(2)
    seed = torch.randn(out.shape).half().to(out.dtype)
    grads = torch.autograd.grad(out, tensors, seed, allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


def close(ours: Tensor, native: Tensor) -> bool:
    if ours.shape != native.shape or ours.dtype is not native.dtype:
        return False
    if not native.numel():
        return True
    error = (ours.double() - native.double()).abs().max()
    return bool(error <= TOLERANCE * native.double().abs().max())


@cases
def test_an_operator_agrees_with_the_native_kernel(case: Case) -> None:
    native = results(case)
    with float32_accumulate():
        ours = results(case)
    assert len(ours) == len(native)
    for index, (mine, theirs) in enumerate(zip(ours, native, strict=True)):
        assert close(mine, theirs), index


@pytest.mark.parametrize("name", ["mm", "addmm alpha beta", "bmm", "conv2d", "transposed", "fold"])
def test_an_operator_rounds_the_result_of_the_float32_kernel(name: str) -> None:
    wide = [t.half() for t in results(CASES[name], torch.float32)]
    with float32_accumulate():
        ours = results(CASES[name])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, wide, strict=True))


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes_keep_their_bits(case: Case, dtype: torch.dtype) -> None:
    before = results(case, dtype)
    with float32_accumulate():
        inside = results(case, dtype)
    assert all(torch.equal(a, b) for a, b in zip(before, inside, strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.complex128], ids=str)
def test_integers_and_complex_keep_their_bits(dtype: torch.dtype) -> None:
    a, b = (torch.arange(12).view(s).to(dtype) for s in ((3, 4), (4, 3)))
    before = torch.mm(a, b)
    with float32_accumulate():
        assert torch.equal(torch.mm(a, b), before)


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func._schema.name.removeprefix("aten::") + "." + func._overloadname)
        return func(*args, **(kwargs or {}))


def variants() -> dict[str, Tensor]:
    """Every variant that writes into a tensor, and the two that only inference calls."""
    torch.manual_seed(0)
    a, b, c = torch.randn(3, 4, 4).half().unbind()
    x, y, z = torch.randn(3, 2, 4, 4).half().unbind()
    empty = [torch.empty_like(t) for t in (a, x, a, x, a)]
    return {
        "mm.out": torch.mm(a, b, out=empty[0]),
        "bmm.out": torch.bmm(x, y, out=empty[1]),
        "addmm.out": torch.addmm(c, a, b, beta=2.0, out=empty[2]),
        "baddbmm.out": torch.baddbmm(z, x, y, alpha=2.0, out=empty[3]),
        "addbmm.out": torch.addbmm(c, x, y, out=empty[4]),
        "addmm_": c.clone().addmm_(a, b, beta=0.5),
        "baddbmm_": z.clone().baddbmm_(x, y),
        "addbmm_": c.clone().addbmm_(x, y),
        "_addmm_activation": torch._addmm_activation(a[0], a, b, use_gelu=True),
    }


def test_variants_agree_with_the_native_kernels() -> None:
    native = variants()
    with float32_accumulate():
        ours = variants()
    assert all(close(ours[name], native[name]) for name in native)
    assert set(WRITING_VARIANTS) <= set(native)


def test_cases_reach_every_kernel() -> None:
    names = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "conv2d", "fold", "attention", "lstm")
    with float32_accumulate(), Recorder() as recorder:
        for name in names:
            results(CASES[name])
        variants()
    seen = {name.removesuffix(".default").removesuffix(".") for name in recorder.seen}
    assert set(KERNELS) <= {name.split(".")[0] for name in seen}


def test_output_of_a_given_tensor_is_that_tensor() -> None:
    a, out, empty = torch.ones(3, 3).half(), torch.zeros(3, 3).half(), torch.empty(0).half()
    with float32_accumulate():
        assert torch.mm(a, a, out=out) is out
        assert torch.mm(a, a, out=empty).shape == (3, 3)
    assert torch.equal(out, a * 3)
    assert torch.equal(empty, a * 3)


EDGES = [65504.0, 65519.0, 65520.0, 7e4, -7e4, 6e-8, 3e-8, 2.9e-8, -5e-6, 1e-9, 0.0]


@pytest.mark.parametrize("value", EDGES)
@pytest.mark.parametrize("kind", ["mm", "addmm", "bmm", "conv2d", "linear"])
def test_results_have_the_range_of_float16(value: float, kind: str) -> None:
    # A product of two float16 numbers near the value, exact in float32.
    factor = 256.0 if abs(value) > 1 else 2.0**-12
    row = torch.tensor([[value / factor] + [0.0] * 15]).half().repeat(3, 1)
    column = torch.full((16, 2), factor).half()

    def run() -> Tensor:
        if kind == "mm":
            return torch.mm(row, column)
        if kind == "addmm":
            return torch.addmm(torch.full((2,), value).half(), row, column)
        if kind == "bmm":
            return torch.bmm(row[None], column[None])
        if kind == "linear":
            return F.linear(row, column.t())
        return F.conv2d(row.t()[None, :, :, None], column.t()[:, :, None, None])

    native = run()
    with float32_accumulate():
        ours = run()
    assert torch.equal(ours, native)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_infinities_and_nans_pass_through(bad: float) -> None:
    a, b = torch.ones(3, 4).half(), torch.ones(4, 2).half()
    a[1, 2] = bad
    native = torch.mm(a, b)
    with float32_accumulate():
        torch.testing.assert_close(torch.mm(a, b), native, rtol=0, atol=0, equal_nan=True)


def test_partial_sums_beyond_the_range_cancel() -> None:
    row = torch.tensor([[6e4, 6e4, -6e4, -6e4]]).half()
    with float32_accumulate():
        assert torch.mm(row, torch.ones(4, 1).half()).item() == 0


def test_mixed_dtypes_raise_the_native_error() -> None:
    a, b = torch.ones(2, 2).half(), torch.ones(2, 2)
    calls: list[Callable[[], Any]] = [
        lambda: torch.mm(a, b),
        lambda: torch.addmm(b, a, a),
        lambda: F.conv2d(a[None, None], b[None, None]),
        lambda: torch.mm(a, a, out=torch.empty(2, 2)),
        lambda: torch.mm(a, torch.ones(3, 2).half()),
        lambda: nn.LSTM(2, 2)(a),
    ]
    for call in calls:
        with pytest.raises((RuntimeError, ValueError)) as native:
            call()
        with float32_accumulate(), pytest.raises(native.type) as ours:
            call()
        assert str(ours.value) == str(native.value)


def test_double_backward() -> None:
    def second(dtype: torch.dtype) -> Tensor:
        x, w = inputs(CASES["conv2d no bias"], dtype)
        (first,) = torch.autograd.grad(conv()(x, w).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum() / 256, w)[0]

    wide, native = second(torch.float64), second(HALF)
    with float32_accumulate():
        assert close(second(HALF), native)
        assert torch.equal(second(torch.float64), wide)
