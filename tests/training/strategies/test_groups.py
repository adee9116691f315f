"""A group of one process: what is reduced, how often, and in which dtype."""

import os
import signal
import socket
from datetime import timedelta
from threading import Timer

import pytest
import torch
import torch.distributed as dist
from states import CPU
from torch import nn
from torch.distributed import TCPStore

from runner.core.base import torchrun
from runner.core.base.errors import ConfigError, Unavailable
from runner.core.base.torchrun import ProcessRank, command_of_rank, process_rank
from runner.core.loop.step import train_step
from runner.core.loop.train_state import ScheduledOptimizer, TrainState
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.precision.registry import load_precision
from runner.training.strategies.ddp import DDP
from runner.training.strategies.fsdp import FSDP
from runner.training.tasks.classification import Classification


@pytest.fixture
def alone(monkeypatch):
    """torchrun's variables, without torchrun: this process keeps the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for key, value in found.items():
        monkeypatch.setenv(key, str(value))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x)


def state_of(strategy, name="32-true"):
    torch.manual_seed(0)
    precision = load_precision(name)
    net = nn.Sequential(nn.Linear(8, 8), Block(), Block())
    net, _ = precision.convert(net)
    model = strategy.wrap(net, CPU)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return TrainState(
        model,
        precision,
        Classification(),
        precision.scale(CPU),
        [ScheduledOptimizer(optimizer)],
        CPU,
        strategy=strategy,
    )


def micros(count):
    return [(torch.randn(4, 8), torch.randint(8, (4,))) for _ in range(count)]


def test_ddp_reduces_once_per_step_in_float32(alone, monkeypatch):
    reduced = []

    sums = dist.all_reduce

    def watch(tensor, *how, **named):
        reduced.append(tensor.dtype)
        return sums(tensor, *how, **named)

    monkeypatch.setattr(dist, "all_reduce", watch)
    for name in ("32-true", "bf16-true"):
        strategy = DDP()
        with strategy.session():
            state = state_of(strategy, name)
            reduced.clear()
            train_step(state, micros(3))
            assert reduced == [torch.float32]
    strategy = DDP()
    with strategy.session():
        state = state_of(strategy, "64-true")
        reduced.clear()
        train_step(state, micros(1))
        assert reduced == [torch.float64]


def test_the_dtypes_of_a_module_inside_ddp_have_its_name_in_the_model(alone):
    strategy = DDP()
    with strategy.session():
        state = state_of(strategy)
        with DtypeProbe(state.model) as probe:
            train_step(state, micros(1))
    assert {module for module, _, _ in probe.work} == {"0", "1.inner", "2.inner"}


def test_units_that_name_no_module_are_refused(alone):
    strategy = FSDP(units=["block"])
    with strategy.session(), pytest.raises(ConfigError, match="matches no module"):
        state_of(strategy)


def test_a_dtype_that_cannot_be_reduced_in_is_refused_with_those_that_can():
    with pytest.raises(ValueError, match=r"^reduce_dtype=float16 is not known\. Allowed: null, f"):
        FSDP(reduce_dtype="float16")


def test_the_slices_of_all_processes_cover_a_batch():
    for world in (1, 2, 3, 8):
        for size in (1, 2, 7, 8, 64):
            parts = [ProcessRank(rank, world).batch_slice(size) for rank in range(world)]
            taken = [i for part in parts for i in range(size)[part]]
            assert taken == list(range(size))
            lengths = [ProcessRank(rank, world).batch_share(size) for rank in range(world)]
            assert lengths == [part.stop - part.start for part in parts]
            assert max(lengths) - min(lengths) <= 1
            assert lengths[0] > 0


def test_a_precision_may_refuse_to_be_sharded(monkeypatch):
    precision = load_precision("32-true")
    precision.require_strategy(FSDP())
    monkeypatch.setattr(type(precision), "unshardable_reason", "its weights are packed")
    precision.require_strategy(DDP())
    with pytest.raises(Unavailable, match=r"its weights are packed\. Type strategy=ddp"):
        precision.require_strategy(FSDP())


def test_a_sweep_starts_its_own_processes(monkeypatch):
    for key, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(key, str(value))
    assert process_rank() == ProcessRank(0, 2)
    with pytest.raises(ConfigError, match="a sweep starts its own"):
        command_of_rank(["-m", "seed=0,1"])
    assert command_of_rank(["--help"]) == ["--help"]


def test_a_process_that_waits_for_the_main_one_obeys_a_signal(monkeypatch):
    def refuse(*_):
        raise KeyboardInterrupt

    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    rank = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for key, value in {**rank, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(key, str(value))
    monkeypatch.setattr(torchrun, "_STORE_TIMEOUT", timedelta(seconds=20))
    before = signal.signal(signal.SIGUSR1, refuse)
    timer = Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            command_of_rank(["model=mlp"])
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    store.set(torchrun.START_KEY, "/runs/here")
    expected = ["hydra.run.dir='/runs/here'", "hydra.output_subdir=null", "model=mlp"]
    assert command_of_rank(["model=mlp"]) == expected


def test_parameters_without_dimensions_are_refused_before_they_are_sharded():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    with pytest.raises(ConfigError, match=r"without dimensions: scale\. .*strategy=ddp"):
        FSDP().wrap(model, torch.device("cpu"))
