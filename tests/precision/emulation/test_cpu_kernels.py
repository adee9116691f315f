"""Replaced CPU kernels: each operator against its native float16 kernel (rounding and range), and
the context, the choice of kernels and training (no leaks, what the native kernels give)."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from runner.core.base.errors import ConfigError
from runner.precision.emulation import cpu_kernels
from runner.precision.emulation.cpu_kernels import (
    KERNELS,
    WRITING_VARIANTS,
    choose_kernels,
    float32_accumulate,
    is_float32_accumulation_faster,
)

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


def grouped(x: Tensor, weights: Tensor) -> Tensor:
    return torch._grouped_mm(x, weights, offs=torch.tensor([4, 4, 9], dtype=torch.int32))


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
    "grouped": Case(grouped, ((9, 40), (3, 40, 8))),
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


@pytest.mark.parametrize(
    "name", ["mm", "grouped", "addmm alpha beta", "bmm", "conv2d", "transposed", "fold"]
)
def test_an_operator_rounds_the_result_of_the_float32_kernel(name: str) -> None:
    wide = [t.half() for t in results(CASES[name], torch.float32)]
    with float32_accumulate():
        ours = results(CASES[name])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, wide, strict=True))


@cases
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.extended)], ids=str
)
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


# The context


no_units = pytest.mark.skipif(
    cpu_kernels.has_native_float16(), reason="the CPU has float16 arithmetic: other native kernels"
)


def accumulates() -> bool:
    """Whether float16 goes through float32 in a matrix product now."""
    with profile() as events:
        torch.mm(torch.ones(2, 2, dtype=HALF), torch.ones(2, 2, dtype=HALF))
    return any(event.name == "aten::_to_copy" for event in events.function_events)


def test_kernels_are_restored_after_an_exception() -> None:
    def fail() -> None:
        with float32_accumulate():
            assert accumulates()
            raise KeyError

    assert not accumulates()
    with pytest.raises(KeyError):
        fail()
    assert not accumulates()


def test_a_failed_installation_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "_lstm_kernel", lambda key: "no kernel")
    with pytest.raises(TypeError) as failure, float32_accumulate():
        pass
    monkeypatch.undo()
    assert failure.tb is not None  # a stored traceback holds the frames' locals
    assert not accumulates()
    with float32_accumulate():
        assert accumulates()


def test_the_context_nests_and_covers_every_thread() -> None:
    inside: list[bool] = []

    def other() -> None:
        with float32_accumulate():
            pass
        inside.append(accumulates())

    with float32_accumulate():
        with float32_accumulate():
            pass
        assert accumulates()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert inside == [True]
        assert accumulates()
    assert not accumulates()


class Products(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return torch.mm(torch.ones(2, 40).half(), torch.ones(40, 2).half())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_workers_accumulate_in_float32() -> None:
    with float32_accumulate():
        loader = DataLoader(Products(), num_workers=1, multiprocessing_context="fork")
        assert all(batch.eq(40).all() for batch in loader)


def test_traced_graphs_run() -> None:
    x, w = torch.randn(4, 8).half(), torch.randn(8, 8).half().requires_grad_()
    with float32_accumulate():
        expected = torch.relu(x @ w).sum()
        (gradient,) = torch.autograd.grad(expected, w)
        compiled = torch.compile(lambda: torch.relu(x @ w).sum(), backend="aot_eager")()
        assert torch.equal(compiled, expected)
        assert torch.equal(torch.autograd.grad(compiled, w)[0], gradient)


def small_resnet() -> nn.Module:
    """Return a network of a ResNet's layers: convolutions with strides, batch norms, residuals."""
    torch.manual_seed(0)
    return timm.create_model("resnet18", num_classes=10, channels=(16, 16, 32, 32), stem_width=16)


def losses_of(model: nn.Module) -> list[float]:
    """Return the losses of three steps in float16 under autocast, with a loss scale of 1024."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 32, 32), torch.arange(2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", HALF):
            out = model(x)
        assert out.dtype is HALF
        loss = F.cross_entropy(out.float(), y)
        (1024 * loss).backward()
        for p in model.parameters():
            p.grad /= 1024
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_resnet_trains_as_with_the_native_kernels() -> None:
    native = losses_of(small_resnet())
    with float32_accumulate():
        ours = losses_of(small_resnet())
    # Rounding grows through 18 layers of batch statistics; float32 and native differ by 0.6 %.
    assert ours == pytest.approx(native, rel=1e-2)
    assert ours[2] != ours[0]


@no_units
def test_lstm_under_autocast_fails_natively() -> None:
    with pytest.raises(RuntimeError), torch.autocast("cpu", HALF):
        nn.LSTM(4, 8)(torch.randn(3, 2, 4))


@pytest.mark.parametrize("true_half", [False, True])
def test_lstm_trains(true_half: bool) -> None:
    torch.manual_seed(0)
    lstm, head = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 1)
    x = torch.randn(32, 6, 4)
    y = x.sum((1, 2))[:, None] / 5
    optimizer = torch.optim.SGD([*lstm.parameters(), *head.parameters()], 0.5)
    if true_half:
        lstm, head, x = lstm.half(), head.half(), x.half()
    losses = []
    with float32_accumulate():
        for _ in range(30):
            optimizer.zero_grad()
            with torch.autocast("cpu", HALF, enabled=not true_half):
                states, (_, cell) = lstm(x)
                out = head(states[:, -1])
            assert states.dtype is cell.dtype is out.dtype is HALF
            loss = F.mse_loss(out.float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), False),
        (nn.Linear(64, 64), True),
        (nn.Linear(5000, 1), True),
        (nn.Conv2d(1, 4, 3), False),
        (nn.Sequential(nn.Flatten(), nn.Conv2d(3, 16, 3)), True),
        (nn.Embedding(1000, 32), False),
        (nn.LSTM(2, 2), True),
        (nn.GRU(2, 2), False),
        (nn.LazyLinear(2), True),
        (nn.MultiheadAttention(64, 2), True),
        (nn.BatchNorm2d(8192), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_float32_accumulation_is_for_large_weights(model: nn.Module, expected: bool) -> None:
    assert is_float32_accumulation_faster(model) is expected


def test_an_embedding_tied_to_a_layer_counts() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(1000, 32), "head": nn.Linear(32, 1000)})
    model["table"].weight = model["head"].weight
    assert is_float32_accumulation_faster(model)


def test_auto_chooses_by_speed_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = nn.Linear(64, 64), nn.Linear(4, 4)
    monkeypatch.setattr(cpu_kernels, "native_is_fast", lambda: False)
    assert choose_kernels("auto", large) == "float32_accumulate"
    assert choose_kernels("auto", small) == "native"
    assert choose_kernels("native", large) == "native"
    assert choose_kernels("float32_accumulate", small) == "float32_accumulate"
    monkeypatch.setattr(cpu_kernels, "native_is_fast", lambda: True)
    assert choose_kernels("auto", large) == "native"


@pytest.mark.parametrize("unit", ["avx512_fp16", "amx_fp16", "fp16_arith"])
def test_units_are_read_from_the_cpu(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {unit: True})
    assert cpu_kernels.has_native_float16.__wrapped__()


def test_units_alone_are_not_taken_for_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {torch.float32: 1e-4, torch.float16: 5e-3}
    threads = torch.get_num_threads()
    torch.set_num_threads(2)

    def seconds(dtype: torch.dtype) -> float:
        # Threads that wait for each other on a busy machine would hide the kernels' times.
        assert torch.get_num_threads() == 1
        return taken[dtype]

    monkeypatch.setattr(cpu_kernels, "_convolution_seconds", seconds)
    monkeypatch.setattr(cpu_kernels, "has_native_float16", lambda: True)
    assert not cpu_kernels.native_is_fast.__wrapped__()
    taken[torch.float16] = 1e-4
    assert cpu_kernels.native_is_fast.__wrapped__()
    monkeypatch.setattr(cpu_kernels, "has_native_float16", lambda: False)
    assert not cpu_kernels.native_is_fast.__wrapped__()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)


def test_products_in_bfloat16_are_refused() -> None:
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        with pytest.raises(ConfigError, match="float32_matmul=high"), float32_accumulate():
            pass
    finally:
        matmul.fp32_precision = before
    assert not accumulates()
