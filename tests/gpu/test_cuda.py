"""Properties of steps, transfers and batches that only a CUDA device can show."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from runner.core.base.accelerators import Accelerator
from runner.core.loop.step import train_step
from runner.core.loop.step_records import HostTransfer
from runner.core.loop.train_state import ScheduledOptimizer, TrainState
from runner.data.loader import Loader, LoaderOptions
from runner.precision import registry
from runner.training.tasks.regression import Regression

pytestmark = pytest.mark.gpu
NATIVE = ("32-true", "tf32", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


def train_state(name, optimizer=torch.optim.AdamW, **keywords):
    device = torch.device("cuda", 0)
    precision = registry.load_precision(name)
    torch.manual_seed(0)
    model, _ = precision.convert(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)))
    model.to(device)
    built = optimizer(model.parameters(), lr=1e-3, fused=True, **keywords)
    schedule = torch.optim.lr_scheduler.LambdaLR(built, lambda step: 0.5**step)
    driven = [ScheduledOptimizer(built, schedule)]
    scale = precision.scale(device)
    return TrainState(model, precision, Regression(), scale, driven, device, clip_norm=1.0)


def batch():
    return torch.randn(16, 32, device="cuda"), torch.randn(16, 8, device="cuda")


@pytest.mark.parametrize("name", NATIVE)
def test_a_step_does_not_synchronise(name, refused_waits):
    state = train_state(name, eps=1e-4)
    batches = [batch() for _ in range(4)]
    train_step(state, [batches[0]])
    with refused_waits():
        pending = [train_step(state, [b]) for b in batches[1:]]
        transfer = HostTransfer(pending, 0.0)
    records = transfer.records(0)
    assert [record.loss for record in records] == [p.loss.item() for p in pending]


def test_records_of_a_block_do_not_wait_for_what_comes_after_it():
    state = train_state("32-true")
    train_step(state, [batch()])
    transfer = HostTransfer([train_step(state, [batch()])], 0.0)
    torch.cuda._sleep(2_000_000_000)  # about a second of device time
    begun = time.perf_counter()
    transfer.records(0)
    assert time.perf_counter() - begun < 0.3
    assert not torch.cuda.current_stream().query()


@pytest.mark.imitated
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_overflow_is_skipped_on_the_device(optimizer):
    state = train_state("16-mixed", optimizer)
    train_step(state, [batch()])
    state.scale.load_state_dict({**state.scale.state_dict(), "scale": 2.0**40})
    before = [p.detach().clone() for p in state.trainable_parameters]
    pending = train_step(state, [batch()])
    state.optimizers[0].advance_schedule()
    assert pending.found_inf.item() == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, state.trainable_parameters, strict=True))
    assert state.optimizers[0].scheduler.last_epoch == 1


def test_32_true_is_exact_and_tf32_is_not():
    device = torch.device("cuda", 0)
    a, b = torch.randn(512, 512, device=device), torch.randn(512, 512, device=device)
    exact = a.double() @ b.double()
    errors = {}
    for name in ("32-true", "tf32"):
        with registry.load_precision(name).session(nn.Identity(), device):
            errors[name] = (a @ b - exact).abs().max().item()
    assert errors["tf32"] > 10 * errors["32-true"]


def test_peak_memory_leaves_out_what_was_allocated_before():
    accelerator = Accelerator(torch.device("cuda", 0))
    accelerator.reset_peak_memory()
    before = accelerator.peak_memory_mib()
    torch.empty(2**28, dtype=torch.uint8, device="cuda")
    assert accelerator.peak_memory_mib() - before == pytest.approx(256, abs=8)


class Rows(Dataset):
    """Examples that are not in memory."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((4096,), float(index)), index


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_whole_while_the_device_computes(workers, held):
    """Batches are copied in a stream of their own; their memory is used again only after use."""
    device = torch.device("cuda", 0)
    x, y = zip(*(Rows()[i] for i in range(60)), strict=True)
    dataset = TensorDataset(torch.stack(x), torch.tensor(y)) if held else Rows()
    options = LoaderOptions(workers=workers, on_device=held)
    loader = Loader(dataset, 4, shuffle=True, seed=0, device=device, options=options)
    busy, sums = torch.randn(2048, 2048, device=device), []
    for epoch in (1, 2, 3):
        for inputs, target in loader.epoch(epoch):
            busy = (busy @ busy).clamp(-1, 1)
            sums.append(((inputs.mean(1) - target) + 0 * busy[0, 0]).abs().sum())
    loader.close()
    assert torch.stack(sums).sum().item() == 0
