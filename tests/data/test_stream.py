"""Streams: data sets that are iterated, pass after pass, without indices."""

import json
import random

import numpy as np
import pytest
import torch
from items import CPU
from torch.utils.data import IterableDataset

from runner.core.base.errors import ConfigError
from runner.core.base.torchrun import ProcessRank
from runner.core.config.schema import DebugSpec, RunSpec, TrainSpec
from runner.core.loop.training_loop import accumulation_batches, is_evaluation_step, total_steps
from runner.data.build import build_data, build_run_loaders
from runner.data.collate import Collator
from runner.data.fingerprint import describe_data
from runner.data.loader import LoaderOptions
from runner.data.splits import Splits
from runner.data.stream_loader import StreamLoader, all_targets, samples_of_step, targets_of_steps


class Numbers(IterableDataset):
    """(number, number % 3), offset by 100 in each pass, with noise from every generator."""

    def __init__(self, count=10, noise=False):
        self.count = count
        self.noise = noise
        self.epoch = 0
        self.read = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for i in range(self.count):
            self.read += 1
            drawn = torch.rand(()) + random.random() + np.random.rand() if self.noise else 0.0
            yield torch.tensor(100.0 * self.epoch + i) + drawn, i % 3


class Once(IterableDataset):
    """Its iterator is exhausted after the first pass."""

    def __init__(self):
        self.rows = iter([(torch.zeros(1), 0)] * 5)

    def __iter__(self):
        return self.rows


def loader(stream=None, size=4, seed=0, **options):
    return StreamLoader(
        stream or Numbers(), size, seed=seed, device=CPU, options=LoaderOptions(**options)
    )


def inputs(batches):
    return [x.tolist() for x, _ in batches]


class State:
    """What the loop counts."""

    epoch = position = 0


def test_a_pass_has_all_examples_in_the_order_of_the_stream():
    batches = loader()
    assert inputs(batches.epoch(2)) == [[200, 201, 202, 203], [204, 205, 206, 207], [208, 209]]
    assert batches.examples == 10
    assert [batches.examples_in(4 * i) for i in range(3)] == [4, 4, 2]
    assert [y.tolist() for _, y in loader(size=5).epoch(0)] == [[0, 1, 2, 0, 1], [2, 0, 1, 2, 0]]


def test_any_batch_of_a_pass_is_the_same_when_it_is_begun_there():
    whole = inputs(loader(Numbers(noise=True)).epoch(3))
    for start in range(4):
        assert inputs(loader(Numbers(noise=True)).epoch(3, 4 * start)) == whole[start:]
    assert inputs(loader(Numbers(noise=True), seed=1).epoch(3)) != whole


def test_a_stream_neither_changes_the_random_state_nor_depends_on_it():
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(inputs(loader(Numbers(noise=True)).epoch(1)))
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's own, from Python 3.12 on
def test_a_process_that_reads_ahead_yields_the_same_batches():
    ahead = loader(Numbers(noise=True), workers=1)
    assert inputs(ahead.epoch(1, 4)) == inputs(loader(Numbers(noise=True)).epoch(1, 4))
    assert ahead.examples == 10
    assert [ahead.examples_in(4 * i) for i in range(3)] == [4, 4, 2]


@pytest.mark.parametrize("world", [2, 3])
def test_processes_divide_each_batch(world):
    whole = inputs(loader(Numbers(9, noise=True)).epoch(1))
    parts = [
        inputs(loader(Numbers(9, noise=True), rank=ProcessRank(rank, world)).epoch(1))
        for rank in range(world)
    ]
    # The last batch has one example, which the other processes compute without counting it.
    assert [part[2] for part in parts] == [whole[2]] * world
    joined = [[x for part in parts for x in part[i]] for i in range(2)]
    assert joined == whole[:2]


def test_a_collator_gets_the_list_of_examples():
    taken = []

    def join(examples):
        taken.append(len(examples))
        return torch.rand(len(examples)), torch.zeros(len(examples))

    batches = loader(collator=Collator("mine", join))
    assert inputs(batches.epoch(1)) == inputs(batches.epoch(1, 0))
    # Two more of the first batch, which are compared.
    assert taken == [4, 4, 4, 4, 2, 4, 4, 2]
    # Skipped batches are not collated.
    assert len(inputs(batches.epoch(1, 8))) == 1
    assert taken[8:] == [2]


def test_targets_of_a_pass_are_those_that_a_collator_drew():
    def masking(examples):
        return torch.zeros(len(examples)), torch.rand(len(examples))

    batches = loader(collator=Collator("mine", masking))
    drawn = [target.tolist() for _, target in batches.epoch(1)]
    state = torch.get_rng_state()
    assert [target.tolist() for _, target in all_targets(batches)] == drawn
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("begun", [0, 5])
def test_a_resumed_run_skips_the_batches_that_it_was_trained_on(accumulate, begun):
    whole = accumulation_batches(State(), loader(), accumulate)
    for _ in range(begun):
        next(whole)
    state = State()
    stopped = accumulation_batches(state, loader(), accumulate)
    for _ in range(begun):
        next(stopped)
    resumed = accumulation_batches(state, loader(), accumulate)
    for _ in range(8):
        micros, sizes = next(resumed)
        expected, _ = next(whole)
        assert inputs(micros) == inputs(expected)
        assert sizes == [len(x) for x in inputs(micros)]


def test_a_pass_that_is_shorter_after_a_resume_is_followed_by_the_next():
    state = State()
    stopped = accumulation_batches(state, loader(), 1)
    next(stopped)
    next(stopped)
    micros, _ = next(accumulation_batches(state, loader(Numbers(3)), 1))
    assert inputs(micros) == [[200, 201, 202]]


def test_a_step_on_a_stream_has_no_samples_with_an_index():
    samples = samples_of_step(loader(), 1, 2)
    assert samples.indices == []
    assert list(targets_of_steps(loader(), [samples])) == []


def test_all_targets_are_those_of_a_pass():
    samples, targets = zip(*all_targets(loader()), strict=True)
    assert samples == ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])
    assert [target.tolist() for target in targets] == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0]]


def test_a_stream_that_yields_nothing_the_second_time_is_refused():
    batches = loader(Once())
    assert len(list(batches.epoch(1))) == 2
    with pytest.raises(ConfigError, match="a Once, yields no example when it is begun anew"):
        next(batches.epoch(2))


def test_a_stream_has_no_length_that_evaluations_follow():
    train = TrainSpec(max_steps=7)
    assert total_steps(train, loader()) == 7
    assert [s for s in range(1, 8) if is_evaluation_step(train, loader(), s)] == [7]
    often = TrainSpec(max_steps=7, eval_every=3)
    assert [s for s in range(1, 8) if is_evaluation_step(often, loader(), s)] == [3, 6, 7]


def streams(count=10, val=5):
    return Splits(Numbers(count), Numbers(val))


def make_spec(debug=None, mode="train", train=None, **data):
    node = {"_target_": f"{__name__}.streams", **data}
    train = train or TrainSpec(max_steps=3)
    return RunSpec(mode=mode, data=node, train=train, debug=debug or DebugSpec())


def test_loaders_of_streams_follow_the_spec():
    spec = make_spec(train=TrainSpec(max_steps=3, batch_size=6, num_workers=1))
    loaders = build_run_loaders(spec, build_data(spec), CPU)
    assert isinstance(loaders.train, StreamLoader)
    assert (loaders.train.batch_size, loaders.train.options.workers) == (6, 1)
    assert isinstance(loaders.val, StreamLoader)


def test_a_few_examples_of_a_stream_are_a_list():
    spec = make_spec(DebugSpec(overfit=4), train=TrainSpec())
    data = build_data(spec)
    assert data.train is data.val
    assert [int(x) for x, _ in data.train] == [100, 101, 102, 103]


@pytest.mark.parametrize(
    ("train", "data", "message"),
    [
        ({"max_steps": None}, {}, r"train.epochs=10: the train .*stream.* Type train.max_steps="),
        ({"num_workers": 2}, {}, r"num_workers=2: the train set .*num_workers=1"),
        ({"data_on_device": True}, {}, "data_on_device=true: the train set is"),
        ({}, {"sampler": "a.b"}, "data.sampler=a.b: the train set is a stream"),
        ({}, {"count": 0}, "the train set is empty"),
        ({}, {"val": 0}, "the val set is empty"),
        ({}, {"meta": {"input": [3]}}, r"data.meta.input=\[3\], but an exam"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(train, data, message):
    spec = make_spec(train=TrainSpec(**{"max_steps": 3, **train}), **data)
    with pytest.raises(ConfigError, match=message):
        build_run_loaders(spec, build_data(spec), CPU)


def test_an_evaluation_needs_no_length_of_the_training_stream():
    build_data(make_spec(mode="evaluate", train=TrainSpec()))
    with pytest.raises(ConfigError, match="num_workers=2: the val set is a stream"):
        build_data(make_spec(mode="evaluate", train=TrainSpec(num_workers=2)))


def test_the_description_of_a_stream_says_what_it_is_of():
    random.seed(1)
    described = [describe_data("mine", {}, Splits(Numbers(n, True), Numbers(n)))[0] for n in (9, 9)]
    assert described[0] == described[1]
    profile = {"stream": "Numbers", "digest_of": "the first 9 examples"}
    assert json.loads(described[0]["profile"]) == profile
    assert "float32" in described[0]["schema"]
    other = describe_data("mine", {}, streams(8, 8))[0]
    assert other["digest"] != described[0]["digest"]


def test_a_stream_of_hugging_face_is_shuffled_anew_in_each_pass():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [float(i) for i in range(12)], "label": [0, 1] * 6})
    stream = rows.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=4)

    def values(epoch, start=0, **options):
        batches = loader(stream, **options).epoch(epoch, 4 * start)
        return [[*fields["x"].tolist()] for fields, _ in batches]

    first = values(1)
    assert sorted(x for batch in first for x in batch) == [float(i) for i in range(12)]
    assert values(2) != first
    assert values(1, 2) == first[2:]
    ahead = values(1, workers=1)
    assert sorted(x for batch in ahead for x in batch) == [float(i) for i in range(12)]
