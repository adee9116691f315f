"""Sessions and runs of one process do not change each other's numbers."""

import copy
import random
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import runner
from runner.core.base.errors import PolicyError
from runner.precision import precision

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
BASE = nn.Linear(16, 16)
TF32 = ("tf32", {"emulate": True})
FP8 = ("float8-rowwise", {"emulate": True})
HALF = ("16-mixed", {"cpu_float16": "float32_accumulate"})
PLAIN = ("32-true", {})
DATA = (TensorDataset(X, (X[:, 0] > 0).long()),) * 2


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 2))


@pytest.fixture(autouse=True)
def _in_folder(main):
    """The working directory and the environment of the test's own command."""


def policy_of(name, keys):
    policy = precision(name, **keys)
    return policy, policy.convert(copy.deepcopy(BASE))


def output(policy, model):
    with policy.forward():
        return model(policy.cast(X)).detach()


def run(*words, **options):
    fixed = ["tracking=none", "task=classification", "train.max_steps=3", "train.batch_size=32"]
    result = runner.run([*fixed, *words], model=Net, data=DATA, quiet=True, **options)
    return result.metrics["val/loss"]


def in_thread(function, *args):
    """Return what a function returns or raises in a thread of its own."""
    found = []

    def call():
        try:
            found.append(function(*args))
        except PolicyError as error:
            found.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize(
    ("outer", "inner", "works"),
    [
        (TF32, PLAIN, False),
        (PLAIN, TF32, False),
        (TF32, FP8, False),
        (("bf16-mixed", {}), ("bf16-mixed", {"emulate": True}), False),
        (("16-true", {"cpu_float16": "native"}), HALF, False),
        (PLAIN, HALF, True),
        (FP8, PLAIN, True),
        (TF32, TF32, True),
    ],
)
def test_a_session_beside_one_computes_as_alone_or_is_refused(outer, inner, works, is_elsewhere):
    alone = []
    for name, keys in (outer, inner):
        policy, model = policy_of(name, keys)
        with policy.session():
            alone.append(output(policy, model))
    first, first_model = policy_of(*outer)
    second, second_model = policy_of(*inner)

    def inside():
        with second.session():
            return output(first, first_model), output(second, second_model)

    with first.session():
        try:
            found = in_thread(inside) if is_elsewhere else inside()
        except PolicyError as error:
            found = str(error)
        if works:
            assert all(map(torch.equal, found, alone))
        else:
            assert f"{inner[0]} would change process-wide switches" in found
        assert torch.equal(output(first, first_model), alone[0])


def test_sessions_that_end_in_another_order_restore_the_switches_at_the_last_end():
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    cudnn.allow_tf32 = True
    try:
        first, second = (policy_of(*PLAIN)[0].session() for _ in range(2))
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not cudnn.allow_tf32
        second.__exit__(None, None, None)
        assert cudnn.allow_tf32
    finally:
        cudnn.allow_tf32 = before


def test_runs_in_threads_have_the_numbers_of_runs_in_sequence():
    commands = [["precision=32-true"], ["precision=tf32", "precision.emulate=true"], ["seed=1"]]
    drawn = random.getstate()
    expected = [run(*words) for words in commands]
    assert random.getstate() == drawn
    found = [None] * len(commands)

    def start(i):
        found[i] = run(*commands[i])

    threads = [threading.Thread(target=start, args=(i,)) for i in range(len(commands))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


class Inner(runner.RunCallback):
    """Runs another run within its run's evaluation."""

    key = "inner"

    def __init__(self, words):
        self.words = words
        self.found = None

    def on_evaluation(self, record, run_handle):
        try:
            self.found = run(*self.words)
        except PolicyError as error:
            self.found = str(error)


def test_a_run_within_a_run_computes_as_alone_or_is_refused():
    alone = run("precision=32-true")
    same = Inner(["seed=1"])
    assert run("precision=32-true", callbacks=[same]) == alone
    assert same.found == run("seed=1")
    other = Inner(["precision=tf32", "precision.emulate=true"])
    assert run("precision=32-true", callbacks=[other]) == alone
    assert "whose session is open, has set. Open them one after the other." in other.found


def test_a_run_is_refused_while_another_thread_has_a_session():
    with policy_of(*TF32)[0].session():
        assert "Start the run when it is closed." in in_thread(run, "precision=32-true")


class Padded(nn.Module):
    """An encoder whose evaluation torch computes by nested tensors, with weights of its parts."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.encoder(
            x, src_key_padding_mask=torch.arange(6)[None] >= torch.tensor([[4], [6]])
        )


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bf16-mixed", {}),
        ("16-mixed", {}),
        ("bf16-mixed", {"emulate": True}),
        ("bf16-true", {"keep_fp32": ["encoder.layers.0"]}),
        ("qat-int8", {}),
        ("bnb-int8-training", {}),
        ("int8", {}),
    ],
)
def test_a_padded_encoder_is_evaluated_as_it_is_trained(name, keys):
    torch.manual_seed(0)
    policy = precision(name, **keys)
    model = policy.convert(Padded())
    fuses = torch.backends.mha.get_fastpath_enabled()
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
    with policy.session(), torch.no_grad(), policy.forward():
        outputs = [model.train(mode)(policy.cast(x)) for mode in (True, False)]
    torch.testing.assert_close(*outputs, atol=0.05, rtol=0.0)
    assert torch.backends.mha.get_fastpath_enabled() is fuses
