"""A run that was interrupted and resumed computes what an uninterrupted one does, bit by bit."""

import math
import random

import numpy as np
import pytest
import torch
from run_folders import cut_run
from states import check_same_checkpoints
from torch import nn
from torch.utils.data import Dataset

from runner.core.config.invocation import Invocation
from runner.core.loop.step_records import EvalRecord
from runner.core.record import checkpoint_file
from runner.core.run.run import run_spec
from runner.modes import training_callbacks
from runner.tracking import locate

pytestmark = pytest.mark.slow

QUICK = (
    "train.max_steps=12 train.eval_every=5 train.log_every=3 train.batch_size=8"
    " checkpoint.keep=99 tracking=none"
)
MLP = "model=mlp model.hidden=[32]"  # a width that NVFP4 takes
BF16 = "optimizer.state_dtype=bfloat16"
RULE = "optimizer.lr=1e-4 precision=bf16-true precision.update"
OVERFLOWS = "precision.loss_scale.init_scale=1e9 precision.loss_scale.growth_interval=3"
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
    dispatch = training_callbacks.TrainingCallbacks.dispatch

    def spy(callbacks, record):
        dispatch(callbacks, record)
        if isinstance(record, EvalRecord):
            seen.append(record._replace(time_ms=0))
        else:
            seen.extend(r._replace(time_ms=0, step_ms=0.0) for r in record)

    monkeypatch.setattr(training_callbacks.TrainingCallbacks, "dispatch", spy)
    return seen


@pytest.fixture
def check(main, compose, records, tmp_path):
    """Compare a run with one that is interrupted at each of some steps, and resumed."""

    def compare(steps, words):
        folder = tmp_path / "whole"
        typed = words.split()
        spec = compose(*QUICK.split(), f"checkpoint.every_steps={math.gcd(*steps)}", *typed)
        run_spec(spec, folder, Invocation(overrides=tuple(typed)))
        whole, end = [*records], checkpoint_file.load(locate.find_checkpoint(str(folder)))
        for step in steps:
            copy = cut_run(folder, tmp_path / f"cut-{step}", step)
            records.clear()
            main(f"checkpoint.resume={copy}").check_ok(f"resumed at step {step} of 12")
            after = [r for r in whole if r.step > step]
            assert repr(records) == repr(after)  # a NaN is itself
            again = checkpoint_file.load(locate.find_checkpoint(str(copy)))
            check_same_checkpoints(end, again)

    return compare


TEXT = {
    "dropout": "",
    "dora": "precision=16-mixed adapter=lora adapter.use_dora=true adapter.dropout=0.1",
    "loftq": "precision=bnb-nf4 adapter=lora adapter.init=loftq adapter.rank=2",
}
MORE_TEXT = {
    "dropout in float16": "precision=16-mixed",
    "packed in 4 bits": "precision=bnb-nf4 adapter=lora",
    "packed in 8 bits": "precision=bnb-int8 adapter=lora",
    "pissa": "adapter=lora adapter.init=pissa adapter.rank=2",
    "olora": (
        "precision=bf16-true adapter=lora adapter.init=olora adapter.use_rslora=true adapter.rank=2"
    ),
    "pissa niter": "adapter=lora adapter.use_dora=true adapter.init=pissa_niter_16 adapter.rank=2",
}
ROWS = {
    # Every precision's: tests/e2e/test_precisions.py; every schedule's and optimizer's: the tests
    # of resume_halfway in tests/training.
    "loss scale": ((7,), f"{MLP} precision=16-mixed {OVERFLOWS}"),
    "int8": ((7,), f"{MLP} precision=bnb-int8-training"),
    "optimizer": ((5,), f"{MLP} optimizer=adamw8bit scheduler=onecycle precision=bf16-true"),
    "state in bfloat16": ((5,), f"{MLP} {BF16}"),
    "state of muon's rest": ((5,), f"{MLP} optimizer=muon optimizer.rest.state_dtype=bfloat16"),
    "remainders": ((5,), f"{MLP} {RULE}=remainders {BF16}"),
    "kahan": ((5,), f"{MLP} {RULE}=kahan"),
    "master weights": ((5,), f"{MLP} {RULE}=master_weights"),
    "stochastic rounding": ((5,), f"{MLP} {RULE}=stochastic_rounding"),
    "noise": ((1, 5), f"{OWN} train.accumulate=2"),
    "noise in workers": ((1, 5), f"{OWN} train.accumulate=2 train.num_workers=2"),
    **{name: ((4,), f"{GPT} {words}") for name, words in TEXT.items()},
}
MORE_ROWS = {
    "state in bfloat16 under bf16-mixed": ((5,), f"{MLP} precision=bf16-mixed {BF16}"),
    "state in bfloat16 under 16-mixed": ((5,), f"{MLP} precision=16-mixed {BF16}"),
    "remainders alone": ((5,), f"{MLP} {RULE}=remainders"),
    **{name: ((4,), f"{GPT} {words}") for name, words in MORE_TEXT.items()},
}


@pytest.mark.parametrize(("steps", "words"), ROWS.values(), ids=ROWS)
def test_a_resumed_run_ends_bit_by_bit_as_one_that_was_not_stopped(steps, words, check):
    check(steps, words)


@pytest.mark.extended
@pytest.mark.parametrize(("steps", "words"), MORE_ROWS.values(), ids=MORE_ROWS)
def test_further_models_and_adapters_do_too(steps, words, check):
    check(steps, words)
