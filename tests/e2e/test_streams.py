"""Streams of a user's own, from the command line."""

import pytest
import torch
from run_folders import copy_files, read_json
from typed_runs import TypedRuns


@pytest.fixture
def runs(main, tmp_path):
    """Tiny runs on the streams above."""
    copy_files("own_streams", tmp_path)
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
    saved = read_json(tmp_path / "run" / "guard" / "batch-000003.json")
    assert saved["steps"] == [3, 3]
    assert saved["micro_batches"] == []
    done = main(*replay).check_ok(
        "trains 2 steps again, from the beginning", "replay of step 3: 4 samples"
    )
    assert "the samples themselves are not finite" in done.stdout.replace("\n", " ")
    runs.train("train.max_steps=2", "other")
    main(*replay, "init.weights=other").check_refused(
        "A stream's samples have no indices: leave init.weights out"
    )


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
