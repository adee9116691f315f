"""Data of a user's own: what a data target returns, and what its batches are made of."""

import pytest
from run_folders import copy_files
from typed_runs import TypedRuns


@pytest.fixture
def runs(main, tmp_path):
    """Tiny runs on the data sets above."""
    copy_files("own_sets", tmp_path)
    words = (
        "--config-dir conf data=own model=mlp model.hidden=[16] model.input_shape=[1,8,8] "
        "train.max_steps=3 train.batch_size=4 train.log_every=2 tracking=none"
    )
    return TypedRuns(main, tmp_path, words)


RAGGED = "inputs of the shapes [1, 4, 8] and [1, "


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("no_items", ["the val set is a NoItems; it needs", "lacks __getitem__."]),
        ("no_length", ["the train set is a NoLength; it needs", "A stream is a torch.utils.data."]),
        ("four", ["returned 4 values; it must return (train, val)", "go into a dict"]),
        ("dict", ["returned a dict with the keys train, val; it must return (train, val)"]),
        ("trains", ["the train set is a dict with the keys seen, unseen", "ConcatDataset"]),
        ("no_vals", ["the dict of val sets is empty"]),
        ("odd_names", ["a val set is called 'a/b'", "is called 'loss'", "is called 3, which"]),
        ("a_val", ["the val/unseen set is a NoLength; it needs"]),
        ("ragged", [RAGGED, "Pad or crop them", "batch(indices)", "docs/own-code.md"]),
        ("ragged_val", ["inputs of the shapes [1, 4, 8] and [1, 5, 8]"]),
        ("ragged train.num_workers=1 guard.data=ignore", ["inputs of the shapes [1, "]),
    ],
)
def test_a_data_set_that_cannot_be_used_gets_one_message(runs, kind, parts):
    message = runs.fail(f"data.kind={kind}")
    assert [part for part in parts if part not in message] == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's own, from Python 3.12 on
def test_loading_processes_gather_padded_batches(runs, tmp_path):
    found = []
    for workers in (0, 2):
        (tmp_path / "pids.txt").unlink(missing_ok=True)
        found.append(runs.train(f"data.kind=padded train.num_workers={workers}").numbers)
        assert len({*(tmp_path / "pids.txt").read_text().split()}) >= 1 + (workers > 0)
    assert found[0] == found[1]


def test_a_few_examples_of_data_that_make_their_own_batches(runs):
    runs.train("data.kind=padded debug.overfit=4")


def test_processes_that_have_nothing_to_load_are_named(quick):
    quick("train.num_workers=2").check_ok(
        "train.num_workers=2 starts no process: the data are in memory"
    )


def test_several_validation_sets_and_test_sets(runs):
    run = runs.train("data.kind=all train.max_steps=4 train.early_stop=5")
    first = "validation sets: seen (8), unseen (8); runs are compared by val/accuracy of seen"
    assert first in run.stdout
    assert "test sets: near (8), far (8); evaluated once, at the end, with the last" in run.stdout
    assert "test/far/loss" in run.stdout
    metrics = run.result["metrics"]
    sets = ("val", "val/seen", "val/unseen", "test/near", "test/far")
    assert set(metrics) == {f"{name}/{key}" for name in sets for key in ("loss", "accuracy")}
    assert metrics["val/loss"] == metrics["val/seen/loss"] != metrics["val/unseen/loss"]
    assert run.result["quality"] == "val/accuracy"
    evaluated = runs.evaluate().result
    assert set(evaluated["metrics"]) == set(metrics)
    assert "val/unseen/loss" in evaluated["as_trained"]


def test_a_test_set_changes_neither_training_nor_validation(runs):
    without = runs.train("data.kind=pair seed=1").result
    beside = runs.train("data.kind=test seed=1").result
    metrics = beside["metrics"]
    assert without["metrics"] == {k: metrics[k] for k in metrics if k.startswith("val/")}
    assert set(metrics) - set(without["metrics"]) == {"test/loss", "test/accuracy"}
    assert without["train_loss"] == beside["train_loss"]


def test_a_run_that_was_stopped_evaluates_the_test_set_when_it_ends(runs):
    whole = runs.train("data.kind=test train.max_steps=6", "whole")
    runs.train("data.kind=test train.max_steps=4", "part")
    resumed = runs.resume("train.max_steps=6", "part")
    assert resumed.stdout.count(" test test/loss") == 1
    assert resumed.result["metrics"] == whole.result["metrics"]


def test_few_examples_leave_the_test_set_out(runs):
    run = runs.train("data.kind=test debug.overfit=4")
    assert "test set: not evaluated with debug.overfit" in run.stdout
    assert "test/loss" not in run.stdout
