import os
import random
import sys
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from forked_process import run_forked
from states import follow_own_state, make_state, regression_batch
from waiting import SECONDS

from runner.core.base.random_streams import process_state, saved_forward_state, seed_all
from runner.core.loop.step import train_step
from runner.modes.execution import make_deterministic
from runner.training.own_state import saved_state


def everything():
    """What a run may change, in comparable form."""
    cudnn = torch.backends.cudnn
    return {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": cudnn.allow_tf32,
        "strict": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": (cudnn.benchmark, cudnn.deterministic),
        "anomaly": torch.is_anomaly_enabled(),
        "grad": torch.is_grad_enabled(),
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
    }


def change_everything():
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
    make_deterministic()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.set_anomaly_enabled(True)
    torch.set_grad_enabled(False)
    seed_all(987)


@pytest.mark.parametrize("workspace", [None, ":16:8"])
def test_all_is_put_back(monkeypatch, workspace):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if workspace:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    before = everything()
    with process_state():
        change_everything()
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = "other"
        during = everything()
    after = everything()
    assert [key for key in before if before[key] == during[key]] == []
    assert [key for key in before if before[key] != after[key]] == []


def test_all_is_put_back_after_an_exception():
    before = everything()

    def fail():
        change_everything()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), process_state():
        fail()
    assert everything() == before


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1).item()])
def test_a_seed_decides_every_stream(draw):
    with process_state():
        seed_all(3)
        first = draw()
        assert draw() != first
        seed_all(3)
        assert draw() == first


def test_a_seed_beyond_numpys_range_is_taken():
    with process_state():
        seed_all(2**40)


def test_operations_that_can_differ_are_refused():
    with process_state():
        make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]


SWITCHES = """
import sys, torch
from runner.precision.registry import load_precision
from runner.core.base.random_streams import process_state
b = torch.backends
places = (b.cuda.matmul, b.mkldnn.matmul, b.cudnn.conv, b.cudnn.rnn)
def state():
    return ["ieee" if p.fp32_precision == "none" else p.fp32_precision for p in places]
if sys.argv[1] == "new":
    b.fp32_precision = "tf32"
before = state()
precision = load_precision("32-true", float32_matmul=sys.argv[2])
with process_state(), precision.session(torch.nn.Linear(1, 1), torch.device("cpu")):
    print(*state())
assert state() == before, (state(), before)
"""


@pytest.mark.parametrize("family", ["old", "new"])
@pytest.mark.parametrize(("precision", "cudnn"), [("highest", "ieee"), ("high", "tf32")])
def test_tf32_is_as_asked_after_a_program_set_either_switches(clean, family, precision, cudnn):
    # A process of its own: torch has no way back from the new switches to the old ones.
    command = [sys.executable, "-c", SWITCHES, family, precision]
    done = run_forked(command, SECONDS, env=clean)
    assert done.returncode == 0, done.stderr
    matmul, _, *of_cudnn = done.stdout.split()
    assert matmul == cudnn
    assert {*of_cudnn} == {cudnn}


class Counts(torch.nn.Module):
    """Changes attributes, a buffer and a frozen weight in place, and replaces a buffer."""

    def __init__(self):
        super().__init__()
        self.calls, self.is_begun, self.hidden = 0, False, torch.zeros(())
        self.seen, self.by_name, self.last_two = [], {"rows": []}, deque(maxlen=2)
        self.generator = torch.Generator()
        self.teacher = torch.nn.Parameter(torch.ones(()), requires_grad=False)
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.is_begun = True
        self.hidden += 1
        for rows in (self.seen, self.by_name["rows"], self.last_two):
            rows.append(float(x))
        self.made = torch.rand((), generator=self.generator)
        self.teacher.data.mul_(0.5)
        self.total += x
        self.last = x + torch.rand(())
        return self.last


def test_what_a_forward_changes_is_restored():
    model = torch.nn.Sequential(Counts(), torch.nn.Dropout(0.5))
    outputs = set()
    for _ in range(3):
        with saved_forward_state(model, torch.device("cpu")):
            outputs.add(float(model(torch.ones(()))))
            model.eval()
        assert (model[0].calls, float(model[0].total), float(model[0].last)) == (0, 0, 0)
        first = model[0]
        assert (float(first.teacher), float(first.hidden), first.is_begun) == (1, 0, False)
        assert (first.seen, first.by_name, [*first.last_two]) == ([], {"rows": []}, [])
        assert not hasattr(first, "made")
        assert torch.equal(first.generator.get_state(), torch.Generator().get_state())
        assert model.training
    assert len(outputs) == 1


class Fixed(OrderedDict):
    """Refuses changes, as a configuration of diffusers does."""

    def __setitem__(self, key, value):
        if hasattr(self, "is_fixed"):
            raise TypeError(key)
        super().__setitem__(key, value)

    update = pop = clear = None


def read_only_array():
    array = np.ones(2)
    array.flags.writeable = False
    return array


UNCOPIED = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.ones(2, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "expanded": lambda: torch.ones(1).expand(10),
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "array": read_only_array,
    "fixed": lambda: Fixed(a=1),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", UNCOPIED)
@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_what_cannot_be_copied_in_place_stays_as_it_is(kind, precision):
    class Holds(torch.nn.Linear):
        def forward(self, x):
            self.offset = self.offset + 1  # beside it, followed as ever
            return super().forward(x)

    model = Holds(3, 2)
    model.offset, value = torch.zeros(2), UNCOPIED[kind]()
    if isinstance(value, Fixed):
        value.is_fixed = True
    if kind in ("sparse", "conjugated", "expanded"):
        model.register_buffer("own", value, persistent=False)
    else:
        model.own = value
    state = make_state(model, precision)
    own_state = follow_own_state(state)
    with saved_state(state):
        train_step(state, [regression_batch(4)])
    assert float(model.offset.sum()) == 0
    assert model.own is value or kind in ("sparse", "conjugated", "expanded")
    train_step(state, [regression_batch(4)])
    own_state.end_first_step()
    train_step(state, [regression_batch(4)])
    assert own_state.unsaved_attributes() == ["offset"]
    assert own_state.changed_buffers() == {}
