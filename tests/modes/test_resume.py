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

pytestmark = pytest.mark.slow

QUICK = (
    "train.max_steps=12 train.eval_every=5 train.log_every=3 train.batch_size=8"
    " checkpoint.keep=99 tracking=none"
)
MLP = "model=mlp model.hidden=[32]"  # a width that NVFP4 takes
GPT = (
    "model=gpt model.layers=1 model.width=16 model.heads=2 model.dropout=0.2 optimizer=adamw"
    " data=synthetic_tokens data.count=80 data.context=8"
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
    f"model=mlp model._target_={__name__}.Net data=digits data._target_={__name__}.noisy_data"
    " data.meta.input=[4] data.meta.classes=3"
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
    is_packed = type(tensor) is not torch.Tensor and hasattr(tensor, "dequantize")
    plain = tensor.dequantize() if is_packed else tensor
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

    def compare(steps, words):
        folder = tmp_path / "whole"
        typed = words.split()
        spec = compose(*QUICK.split(), f"checkpoint.every_steps={math.gcd(*steps)}", *typed)
        run(spec, folder, Invocation(overrides=tuple(typed)))
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


SMALL_SCALE = "precision.loss_scale.init_scale=1e9 precision.loss_scale.growth_interval=3"


def more(*words):
    """A further example of what another row shows."""
    return pytest.param(*words, marks=pytest.mark.extended)


# Every precision's: tests/e2e/test_precisions.py.
@pytest.mark.parametrize(
    ("precision", "words"), [("16-mixed", SMALL_SCALE), ("bnb-int8-training", "")]
)
def test_a_precision_resumes_bit_by_bit(precision, words, check):
    check((7,), f"{MLP} precision={precision} {words}")


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("32-true", ""),
        ("16-mixed", "adapter=lora adapter.use_dora=true adapter.dropout=0.1"),
        ("bnb-nf4", "adapter=lora adapter.init=loftq adapter.rank=2"),
        more("16-mixed", ""),
        more("bnb-nf4", "adapter=lora"),
        more("bnb-int8", "adapter=lora"),
        more("32-true", "adapter=lora adapter.init=pissa adapter.rank=2"),
        more("bf16-true", "adapter=lora adapter.init=olora adapter.use_rslora=true adapter.rank=2"),
        more(
            "32-true",
            "adapter=lora adapter.use_dora=true adapter.init=pissa_niter_16 adapter.rank=2",
        ),
    ],
)
def test_dropout_and_every_adapter_resume_bit_by_bit(precision, words, check):
    check((4,), f"{GPT} precision={precision} {words}")


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        ("adam8bit", "linear"),
        ("muon", "cosine"),
        ("lbfgs", "constant"),
        ("adamw8bit", "onecycle"),
        more("sgd", "cosine"),
        more("lion8bit", "constant"),
        more("adamw4bit", "cosine"),
        more("adamwfp8", "cosine"),
    ],
)
def test_every_optimizer_and_schedule_resumes_bit_by_bit(optimizer, scheduler, check):
    check((5,), f"{MLP} optimizer={optimizer} scheduler={scheduler} precision=bf16-true")


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_of_an_interrupted_epoch_is_seen_once_with_its_noise(workers, check):
    check((1, 5), f"{OWN} train.num_workers={workers} train.accumulate=2")
