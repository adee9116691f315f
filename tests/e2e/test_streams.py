"""Streams of a user's own, from the command line."""

import json

import pytest
import torch
from typed_runs import TypedRuns

STREAMS = '''
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x):
        return self.layers(x)


class Rows(IterableDataset):
    """Rows whose order follows from the pass, with noise from torch's generator."""

    def __init__(self, count, spoilt=None):
        self.count = count
        self.spoilt = spoilt
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        for i in range(self.count):
            x = torch.randn(4, generator=generator)
            if i == self.spoilt:
                x = x / 0
            yield x + 0.1 * torch.randn(4), int(x[0] > 0)


class Once(Rows):
    def __init__(self, count):
        super().__init__(count)
        self.rows = super().__iter__()

    def __iter__(self):
        return self.rows


class Lists(Rows):
    def __iter__(self):
        for x, label in super().__iter__():
            yield {"x": x.tolist(), "label": label}


class Raising(Rows):
    def __iter__(self):
        for i, row in enumerate(super().__iter__()):
            if i == 30:
                raise OSError("the connection is lost")
            yield row


def streams(kind="Rows", count=20, **more):
    return globals()[kind](count, **more), Rows(7)


def mixed():
    return TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), Rows(7), {"far": Rows(5)}
'''
YAML = "_target_: own_streams.streams\nmeta:\n  input: [4]\n  classes: 2\n"


@pytest.fixture
def runs(main, tmp_path):
    """Tiny runs on the streams above."""
    (tmp_path / "own_streams.py").write_text(STREAMS)
    for group, text in (("data", YAML), ("model", "_target_: own_streams.Net\n")):
        config = tmp_path / "conf" / group / "own.yaml"
        config.parent.mkdir(parents=True)
        config.write_text(text)
    words = (
        "--config-dir conf data=own model=own task=classification train.batch_size=8 "
        "scheduler=constant tracking=none"
    )
    return TypedRuns(main, tmp_path, words)


def same_weights(one, other):
    first, second = (run.content()["model"] for run in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_is_resumed_in_the_middle_of_the_second_pass(runs):
    whole = runs.train("train.max_steps=8 train.eval_every=3")
    line = "data: the train set is a stream (Rows), read in its own order, without data.shuffle, a"
    assert line in whole.stdout
    assert "evaluated every 3 steps" in whole.stdout
    runs.train("train.max_steps=5 train.eval_every=3", "part")
    part = runs.resume("train.max_steps=8", "part")
    assert "the stream is read again up to example 16 of pass 2: that it yields" in part.stdout
    assert part.numbers == whole.numbers
    assert same_weights(part, whole)
    assert runs.evaluate().result["metrics"] == whole.result["metrics"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's own, from Python 3.12 on
def test_reading_ahead_changes_no_number(runs):
    typed = "train.max_steps=6 train.accumulate=2 train.num_workers"
    here, ahead = (runs.train(f"{typed}={workers}", f"w{workers}") for workers in (0, 1))
    assert ahead.numbers == here.numbers
    assert same_weights(ahead, here)


def test_lists_of_a_stream_are_padded(runs):
    collate = "+data.collate=runner.data.padding.pad"
    assert runs.train(f"+data.kind=Lists train.max_steps=2 {collate}").result["steps"] == 2


def test_streams_that_are_only_evaluated(runs):
    run = runs.train("data._target_=own_streams.mixed train.epochs=2")
    assert "test sets: far (stream); evaluated once" in run.stdout
    assert set(run.result["metrics"]) >= {"val/loss", "test/far/loss"}


def test_a_few_examples_of_a_stream_are_overfitted(runs):
    runs.train("debug.overfit=4 train.epochs=2")


@pytest.mark.parametrize(
    ("typed", "part"),
    [
        ("", "train.epochs=10: the train set is a stream without length"),
        ("data.shuffle=true", "data.shuffle=true: the train set is a stream, which is read in"),
        ("train.num_workers=3", "Type train.num_workers=1, which reads ahead in one process"),
        ("+data.sampler=torch.utils.data.RandomSampler", "Leave data.sampler out."),
        ("train.data_on_device=true", "not in memory. Type train.data_on_device=auto"),
        ("+data.count=0", "data: the train set is empty"),
        ("+data.kind=Lists", "hold lists, not tensors, in x. Return stream.with_format"),
        ("+data.kind=Once", "a Once, is the same iterator each time, and can be read once only"),
    ],
)
def test_what_a_stream_cannot_do_gets_one_message(runs, typed, part):
    steps = " train.max_steps=4" if typed else ""
    assert part in runs.fail(typed + steps)


def test_a_step_that_fails_is_replayed_by_reading_the_stream_up_to_it(runs, main, tmp_path):
    spoilt = "+data.spoilt=18 guard.data=ignore train.max_steps=8 hydra.run.dir=run"
    runs.fail(spoilt, status=1)
    replay = ("debug=replay", "batch=run/guard/batch-000003.json")
    saved = json.loads((tmp_path / "run" / "guard" / "batch-000003.json").read_text())
    assert saved["steps"] == [3, 3]
    assert saved["micro_batches"] == []
    done = main(*replay)
    assert done.rc == 0, done.stderr
    assert "trains 2 steps again, from the beginning" in done.stdout
    assert "replay of step 3: 4 samples" in done.stdout
    assert "the samples themselves are not finite" in done.stdout.replace("\n", " ")
    runs.train("train.max_steps=2", "other")
    done = main(*replay, "init.weights=other")
    assert done.rc == 2, done
    assert "A stream's samples have no indices: leave init.weights out" in done.stderr


FAILING = "+data.kind=Raising +data.count=99 guard.data=ignore train.max_steps=6"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("typed", "part"),
    [
        (
            f"{FAILING} train.num_workers=0",
            "a Raising, fails: OSError: the connection is lost (own",
        ),
        (f"{FAILING} train.num_workers=1", "for step 4 failed: OSError: the connection is lost"),
        (
            "+data.spoilt=11 train.max_steps=4",
            "sample 11 of the train set: its inputs are not finite",
        ),
    ],
    ids=["here", "in the loading process", "a wrong example"],
)
def test_a_stream_that_fails_gets_one_message(runs, typed, part):
    assert part in runs.fail(typed, status=1)
