"""Streams of a user's own, from the command line."""

import json

import pytest
import torch

from runner.checkpoint.checkpoint_file import load

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
def own_streams(main, tmp_path):
    (tmp_path / "own_streams.py").write_text(STREAMS)
    for group, text in (("data", YAML), ("model", "_target_: own_streams.Net\n")):
        config = tmp_path / "conf" / group / "own.yaml"
        config.parent.mkdir(parents=True)
        config.write_text(text)
    words = ("--config-dir", "conf", "data=own", "model=own", "task=classification")
    sizes = ("train.batch_size=8", "scheduler=constant", "tracking=none")
    return lambda *more: main(*words, *sizes, *more)


def outcome(folder):
    result = json.loads((folder / "result.json").read_text())
    return result["train_loss"], result["metrics"], result["steps"]


def weights(folder):
    (path,) = (folder / "checkpoints").glob("step-*.pt")
    return load(path)["model"]


def are_equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_is_resumed_in_the_middle_of_the_second_pass(own_streams, main, tmp_path):
    done = own_streams("train.max_steps=8", "train.eval_every=3", "hydra.run.dir=whole")
    assert done.rc == 0, done.stderr
    line = (
        "data: the train set is a stream (Rows), read in its own order, without data.shuffle, and"
    )
    assert line in done.stdout
    assert "evaluated every 3 steps" in done.stdout
    done = own_streams("train.max_steps=5", "train.eval_every=3", "hydra.run.dir=part")
    assert done.rc == 0, done.stderr
    done = main("checkpoint.resume=part", "train.max_steps=8")
    assert done.rc == 0, done.stderr
    assert "the stream is read again up to batch 2 of pass 2: that it yields" in done.stdout
    assert outcome(tmp_path / "part") == outcome(tmp_path / "whole")
    assert are_equal(weights(tmp_path / "part"), weights(tmp_path / "whole"))
    done = main("mode=evaluate", "checkpoint=whole", "tracking=none", "hydra.run.dir=evaluated")
    assert done.rc == 0, done.stderr
    assert outcome(tmp_path / "evaluated")[1] == outcome(tmp_path / "whole")[1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's own, from Python 3.12 on
def test_reading_ahead_changes_no_number(own_streams, tmp_path):
    for workers in (0, 1):
        done = own_streams(
            "train.max_steps=6",
            "train.accumulate=2",
            f"train.num_workers={workers}",
            f"hydra.run.dir=w{workers}",
        )
        assert done.rc == 0, done.stderr
    assert outcome(tmp_path / "w0") == outcome(tmp_path / "w1")
    assert are_equal(weights(tmp_path / "w0"), weights(tmp_path / "w1"))


def test_lists_of_a_stream_are_padded(own_streams):
    done = own_streams(
        "+data.kind=Lists", "train.max_steps=2", "+data.collate=runner.data.padding.pad"
    )
    assert done.rc == 0, done.stderr


def test_streams_that_are_only_evaluated(own_streams, tmp_path):
    done = own_streams("data._target_=own_streams.mixed", "train.epochs=2", "hydra.run.dir=run")
    assert done.rc == 0, done.stderr
    assert "test sets: far (stream); evaluated once" in done.stdout
    assert set(outcome(tmp_path / "run")[1]) >= {"val/loss", "test/far/loss"}


def test_a_few_examples_of_a_stream_are_overfitted(own_streams):
    done = own_streams("debug.overfit=4", "train.epochs=2")
    assert done.rc == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "train.epochs=10: the train set is a stream, whose length is not known"),
        (["data.shuffle=true"], "data.shuffle=true: the train set is a stream, which is read in"),
        (["train.num_workers=3"], "Type train.num_workers=1, which reads ahead in one process"),
        (["+data.sampler=torch.utils.data.RandomSampler"], "Leave data.sampler out, and choose"),
        (["train.data_on_device=true"], "which is not in memory. Type train.data_on_device=auto"),
        (["+data.count=0"], "data: the train set is empty"),
        (
            ["+data.kind=Lists"],
            "hold lists, not tensors, in x; stacked, these would be lists of co",
        ),
        (["+data.kind=Once"], "a Once, is the same iterator each time, and can be read once only"),
    ],
)
def test_what_a_stream_cannot_do_gets_one_message(own_streams, words, part):
    steps = ["train.max_steps=4"] if words else []
    done = own_streams(*steps, *words)
    assert done.rc == 2, done
    assert "Traceback" not in done.stderr + done.stdout
    assert part in done.stderr.replace("\n", " ")


def test_a_step_that_fails_is_replayed_by_reading_the_stream_up_to_it(own_streams, main, tmp_path):
    done = own_streams(
        "+data.spoilt=18", "guard.data=ignore", "train.max_steps=8", "hydra.run.dir=run"
    )
    assert done.rc == 1, done
    saved = json.loads((tmp_path / "run" / "guard" / "batch-000003.json").read_text())
    assert saved["steps"] == [3, 3]
    assert saved["micro_batches"] == []
    done = main("debug=replay", "batch=run/guard/batch-000003.json")
    assert done.rc == 0, done.stderr
    assert "trains 2 steps again, from the beginning" in done.stdout
    assert "replay of step 3: 4 samples" in done.stdout
    assert "the samples themselves are not finite" in done.stdout.replace("\n", " ")
    assert own_streams("train.max_steps=2", "hydra.run.dir=other").rc == 0
    done = main("debug=replay", "batch=run/guard/batch-000003.json", "init.weights=other")
    assert done.rc == 2, done
    assert "A stream's samples have no indices: leave init.weights out" in done.stderr


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("workers", "parts"),
    [
        (
            0,
            ["the stream, a Raising, fails: OSError: the connection is lost (own_streams.py, line"],
        ),
        (1, ["loads the train set for step 4 failed: OSError: the connection is lost"]),
    ],
)
def test_a_stream_that_fails_gets_one_message(own_streams, workers, parts):
    done = own_streams(
        "+data.kind=Raising",
        "+data.count=99",
        "guard.data=ignore",
        "train.max_steps=6",
        f"train.num_workers={workers}",
    )
    assert done.rc == 1, done
    assert "Traceback" not in done.stderr + done.stdout
    for part in parts:
        assert part in done.stderr.replace("\n", " ")


def test_the_first_example_that_is_wrong_is_named_by_its_place(own_streams):
    done = own_streams("+data.spoilt=11", "train.max_steps=4")
    assert done.rc == 1, done
    assert "sample 11 of the train set: its inputs are not finite" in done.stderr.replace("\n", " ")
