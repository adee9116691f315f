"""The context, the choice of kernels, and training: no leaks, and what the native kernels give."""

import threading

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.utils.data import DataLoader

from runner.precision.emulation import cpu_kernels
from runner.precision.emulation.cpu_kernels import (
    choose_kernels,
    float32_accumulate,
    is_float32_accumulation_faster,
)
from runner.utils.errors import ConfigError

HALF = torch.float16
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


def losses_of(model: nn.Module, scale: float) -> tuple[list[float], torch.amp.GradScaler]:
    """Return the losses of three steps of 16-mixed, and the loss scale after them."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 32, 32), torch.arange(2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=scale), []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", HALF):
            out = model(x)
        assert out.dtype is HALF
        loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scaler


def test_a_resnet_trains_as_with_the_native_kernels() -> None:
    native, _ = losses_of(small_resnet(), 2.0**10)
    with float32_accumulate():
        ours, scaler = losses_of(small_resnet(), 2.0**10)
    # Rounding grows through 18 layers of batch statistics; float32 and native differ by 0.6 %.
    assert ours == pytest.approx(native, rel=1e-2)
    assert scaler.get_scale() == 2.0**10


def test_a_huge_scale_overflows_and_backs_off() -> None:
    model = small_resnet()
    start = model.get_classifier().weight.detach().clone()
    with float32_accumulate():
        losses, scaler = losses_of(model, 2.0**30)
    assert scaler.get_scale() == 2.0**27
    assert torch.equal(model.get_classifier().weight, start)
    assert losses[0] == pytest.approx(losses[2], rel=1e-6)


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


def test_an_unknown_choice_names_the_known() -> None:
    with pytest.raises(ConfigError, match="auto, native, float32_accumulate"):
        choose_kernels("fast", nn.Linear(4, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["avx512_fp16", "amx_fp16", "fp16_arith"])
def test_units_are_read_from_the_cpu(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {unit: True})
    assert cpu_kernels.has_native_float16.__wrapped__()


def test_units_alone_are_not_taken_for_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {torch.float32: 1e-4, torch.float16: 5e-3}
    monkeypatch.setattr(cpu_kernels, "_convolution_seconds", taken.get)
    monkeypatch.setattr(cpu_kernels, "has_native_float16", lambda: True)
    assert not cpu_kernels.native_is_fast.__wrapped__()
    taken[torch.float16] = 1e-4
    assert cpu_kernels.native_is_fast.__wrapped__()
    monkeypatch.setattr(cpu_kernels, "has_native_float16", lambda: False)
    assert not cpu_kernels.native_is_fast.__wrapped__()


def test_a_timed_convolution_takes_some_time() -> None:
    assert 0 < cpu_kernels._convolution_seconds(torch.float32) < 1


def test_products_in_bfloat16_are_refused() -> None:
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        with pytest.raises(ConfigError, match="float32_matmul=high"), float32_accumulate():
            pass
    finally:
        matmul.fp32_precision = before
    assert not accumulates()
