"""A run that was interrupted and resumed computes what an uninterrupted one does, bit by bit."""

import math
import random
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from runner.checkpoint import checkpoint_file, locate
from runner.config.invocation import Invocation
from runner.modes import training_callbacks
from runner.modes.run import run
from runner.training.callbacks.callback import dispatch
from runner.training.records import EvalRecord
from runner.utils.reproducibility import rng_state, set_rng_state

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
QUICK = (
    "train.max_steps=12",
    "train.eval_every=5",
    "train.log_every=3",
    "train.batch_size=8",
    "checkpoint.keep=99",
    "tracking=none",
)
MLP = ("model=mlp", "model.hidden=[16]")
GPT = (
    "model=gpt",
    "data=synthetic_tokens",
    "data.count=80",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.dropout=0.2",
    "data.context=8",
    "optimizer=adamw",
)


class Drawn(Dataset):
    """Examples with noise of their own, noisy_data anew each time, as augmentation does."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return noise + index % 3, index % 3


def noisy_data(**_):
    return Drawn(), Drawn()


class Net(nn.Module):
    def __init__(self, **_):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


OWN = (
    f"model._target_={__name__}.Net",
    f"data._target_={__name__}.noisy_data",
    "data.meta.input=[4]",
    "data.meta.classes=3",
)


@pytest.fixture
def records(monkeypatch):
    """The records of the loop, without times."""
    seen = []

    def spy(callbacks, record, handle):
        dispatch(callbacks, record, handle)
        if isinstance(record, EvalRecord):
            seen.append(record._replace(time_ms=0))
        else:
            seen.extend(r._replace(time_ms=0, step_ms=0.0) for r in record)

    monkeypatch.setattr(training_callbacks, "dispatch", spy)
    return seen


def cut(folder, step):
    """Leaves a run's folder as a run that died after this step would."""
    (folder / "result.json").unlink()
    for path in folder.glob("checkpoints/step-*.pt"):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()


def tensors(value, prefix=""):
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{prefix}.{key}")
    elif isinstance(value, list | tuple):
        for key, item in enumerate(value):
            yield from tensors(item, f"{prefix}.{key}")


def bits(tensor):
    plain = (
        tensor.dequantize()
        if type(tensor) is not torch.Tensor and hasattr(tensor, "dequantize")
        else tensor
    )
    return plain.detach().contiguous().flatten().view(torch.uint8)


def same_numbers(one, other):
    first, second = dict(tensors(one)), dict(tensors(other))
    assert first.keys() == second.keys()
    assert any(".model." in f".{name}" for name in first)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(bits(tensor), bits(second[name])), name


@pytest.fixture
def check(main, compose, records, tmp_path):
    """Compare a run with one that is interrupted at each of some steps, and resumed."""

    def compare(steps, *typed):
        folder = tmp_path / "whole"
        spec = compose(*QUICK, f"checkpoint.every_steps={math.gcd(*steps)}", *typed)
        run(spec, folder, Invocation(overrides=typed))
        whole, end = [*records], checkpoint_file.load(locate.find_checkpoint(str(folder)))
        for step in steps:
            copy = tmp_path / f"cut-{step}"
            shutil.copytree(folder, copy)
            cut(copy, step)
            records.clear()
            done = main(f"checkpoint.resume={copy}")
            assert done.rc == 0, done.stderr
            assert f"resumed at step {step} of 12" in done.stdout
            after = [r for r in whole if r.step > step]
            assert repr(records) == repr(after)  # a NaN is itself
            again = checkpoint_file.load(locate.find_checkpoint(str(copy)))
            same_numbers(end, again)
            for key in ("step", "epoch", "position", "loss_scale", "schedulers", "metrics"):
                assert again[key] == end[key]

    return compare


@pytest.mark.parametrize(
    "precision",
    [
        "64-true",
        "32-true",
        "16-mixed",
        "bf16-mixed",
        "16-true",
        "bf16-true",
        "bnb-int8-training",
        "float8-tensorwise",
        "float8-rowwise",
        "transformer-engine",
        "transformer-engine-nvfp4",
    ],
)
def test_every_precision_resumes_bit_by_bit(precision, check):
    imitated = precision.startswith(("float8", "transformer-engine"))
    more = ("precision.emulate=true",) if imitated else ()
    if precision == "16-true":
        more = ("optimizer.eps=1e-4",)
    if precision == "16-mixed":
        more = ("precision.loss_scale.init_scale=1e9", "precision.loss_scale.growth_interval=3")
    more += ("model.hidden=[32]",)  # what NVFP4 takes
    check((7,), *MLP, f"precision={precision}", *more)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bnb-nf4"])
def test_dropout_and_adapters_resume_bit_by_bit(precision, check):
    more = ("adapter=lora",) if precision == "bnb-nf4" else ()
    check((4,), *GPT, f"precision={precision}", *more)


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("32-true", ["adapter.init=pissa", "adapter.rank=2"]),
        ("bf16-true", ["adapter.init=olora", "adapter.use_rslora=true", "adapter.rank=2"]),
        ("16-mixed", ["adapter.use_dora=true", "adapter.dropout=0.1"]),
        ("32-true", ["adapter.use_dora=true", "adapter.init=pissa_niter_16", "adapter.rank=2"]),
        ("bnb-nf4", ["adapter.init=loftq", "adapter.rank=2"]),
        ("bnb-int8", []),
    ],
    ids=str,
)
def test_every_kind_of_addition_resumes_bit_by_bit(precision, words, check):
    check((4,), *GPT, f"precision={precision}", "adapter=lora", *words)


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        ("sgd", "cosine"),
        ("adam8bit", "linear"),
        ("lion8bit", "constant"),
        ("adamw4bit", "cosine"),
        ("muon", "constant"),
        ("adamwfp8", "cosine"),
        ("adamw8bit", "onecycle"),
        ("lbfgs", "constant"),
    ],
)
def test_every_optimizer_and_schedule_resumes_bit_by_bit(optimizer, scheduler, check):
    typed = (f"optimizer={optimizer}", f"scheduler={scheduler}", "precision=bf16-true")
    check((5,), *MLP, *typed)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_of_an_interrupted_epoch_is_seen_once_with_its_noise(workers, check):
    typed = (f"train.num_workers={workers}", "train.accumulate=2", "data=digits", *OWN)
    check((1, 5), "model=mlp", *typed)


def test_generators_come_back(tmp_path):
    states = rng_state(CPU)
    torch.save(states, tmp_path / "rng.pt")
    drew = [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()]
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True), CPU)
    assert [torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()] == drew
