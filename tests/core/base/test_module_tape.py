"""Each watcher of modules, on each kind of call: it changes no bit, and leaves nothing behind."""

import copy
import inspect

import pytest
import torch
from states import CPU, count_hooks, make_state
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from runner.core.base.module_tape import ModuleTape
from runner.diagnostics.divergence.boundaries import comparable_modules, visited_modules
from runner.diagnostics.divergence.reference import Recorder
from runner.diagnostics.dtype_trace import DtypeProbe
from runner.diagnostics.memory.memory_tracker import MemoryTracker
from runner.diagnostics.numerics.probe import Probe
from runner.modes.replay import NonfiniteTrace
from runner.precision.forward_watch import ForwardWatch


class Net(nn.Module):
    def __init__(self, recomputes=False, calls=1):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.recomputes = recomputes
        self.calls = calls

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            for _ in range(self.calls):
                x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


KINDS = {
    "plain": Net,
    "recomputed": lambda: Net(recomputes=True),
    "called twice": lambda: Net(calls=2),
    "container": lambda: nn.Sequential(nn.ModuleDict({"one": nn.Linear(4, 4)})["one"], Net()),
}
WATCHERS = {
    "dtypes": DtypeProbe,
    "values": NonfiniteTrace,
    "numerics": lambda model: Probe(make_state(model), lambda snapshot: None),
    "memory": lambda model: MemoryTracker().gradients_of([*model.parameters()]),
    "conversion": lambda model: ForwardWatch(model, {"first": next(iter(model.modules()))}),
    "divergence": lambda model: visited_modules(
        model, comparable_modules(model), Recorder(CPU, copies=True)
    ),
}
every_watcher = pytest.mark.parametrize("watcher", WATCHERS)


def step(model):
    """Return the output and the gradients of a step."""
    model.zero_grad()
    output = model(torch.linspace(-1, 1, 8).view(2, 4))
    output.square().sum().backward()
    return [output, *(p.grad for p in model.parameters())]


def traces(model):
    """Return how many hooks and replaced forwards a model holds."""
    replaced = [m for m in model.modules() if "forward" in vars(m)]
    return count_hooks(model) + len(replaced)


@every_watcher
@pytest.mark.parametrize("kind", KINDS)
def test_a_watched_step_has_the_same_bits_and_leaves_nothing(watcher, kind):
    model = KINDS[kind]()
    plain = step(copy.deepcopy(model))
    with WATCHERS[watcher](model):
        assert traces(model) > 0
        watched = step(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert traces(model) == 0


@every_watcher
def test_nothing_remains_after_an_exception(watcher):
    model = Net()
    with pytest.raises(RuntimeError, match="shape"), WATCHERS[watcher](model):
        model(torch.ones(1, 3))
    assert traces(model) == 0


def compiled(model):
    return torch.compile(model, backend="aot_eager")


@pytest.mark.parametrize("watcher", ["dtypes", "memory", "divergence"])
def test_a_model_that_is_compiled_in_place_is_not_compiled_again(watcher):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = Net()
    model.compile(backend=counter)
    plain = step(model)
    frames = counter.frame_count
    with WATCHERS[watcher](model):
        watched = step(model)
    step(model)
    assert counter.frame_count == frames
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert traces(model) == 0


@pytest.mark.parametrize("wrap", [lambda model: model, compiled])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_told_once_by_name(kind, wrap):
    torch._dynamo.reset()
    model = KINDS[kind]()
    notes = []
    with ModuleTape() as tape:
        for name, module in model.named_modules():
            tape.watch_calls(name, module, end=lambda name, _: notes.append((name, *tape.running)))
        step(wrap(model))
    blocks = [name for name, *_ in notes if name.endswith("blocks.1.0")]
    assert len(blocks) == (2 if kind == "called twice" else 1)
    assert notes[-1] == ("",)
    assert not any(name.endswith("blocks") for name, *_ in notes)


def test_a_recomputed_forward_is_told_where_it_is_asked_for():
    model = Net(recomputes=True)
    notes = []
    with ModuleTape() as tape:
        tape.watch_calls("", model.blocks[0], end=lambda *_: notes.append(1), recomputed=True)
        step(model)
    assert len(notes) == 2


def test_a_replaced_forward_has_the_arguments_of_its_own():
    net = Net()
    with ModuleTape() as tape:
        tape.replace_forward(net, lambda *args, **kwargs: None)
        assert [*inspect.signature(net.forward).parameters] == ["x"]
