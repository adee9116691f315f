"""Data of a user's own: what a data target returns, and what its batches are made of."""

import json

import pytest

SETS = '''
import os

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset


def tensors():
    return TensorDataset(torch.randn(8, 1, 8, 8), torch.arange(8) % 2)


class Stream(IterableDataset):
    def __len__(self):
        return 8

    def __iter__(self):
        yield torch.randn(1, 8, 8), 0


class NoItems(Dataset):
    def __len__(self):
        return 8


class NoLength:
    def __getitem__(self, index):
        return torch.randn(1, 8, 8), 0


class Ragged(Dataset):
    """Rows of several heights, and batches that are padded."""

    pids = "pids.txt"

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((1, 4 + index % 5, 8), float(index)), index % 2


class Padded(Ragged):
    def batch(self, indices):
        with open(self.pids, "a") as file:
            file.write(f"{os.getpid()}\\\\n")
        x = torch.zeros(len(indices), 1, 8, 8)
        for row, index in enumerate(indices.tolist()):
            one, _ = Ragged.__getitem__(self, index)
            x[row, :, : one.shape[1]] = one
        return x, indices % 2


KINDS = {
    "stream": lambda: (Stream(), tensors()),
    "no_items": lambda: (tensors(), NoItems()),
    "no_length": lambda: (NoLength(), tensors()),
    "three": lambda: (tensors(), tensors(), tensors()),
    "dict": lambda: {"train": tensors(), "val": tensors()},
    "vals": lambda: (tensors(), {"seen": tensors(), "unseen": tensors()}),
    "ragged": lambda: (Ragged(), tensors()),
    "ragged_val": lambda: (tensors(), Ragged()),
    "padded": lambda: (Padded(), tensors()),
}


def make(kind):
    return KINDS[kind]()
'''.replace("\\\\n", "\\n")


@pytest.fixture
def run(quick, tmp_path):
    """A tiny run on one of the data sets above."""
    (tmp_path / "own_sets.py").write_text(SETS)
    config = tmp_path / "conf" / "data" / "own.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("_target_: own_sets.make\nkind: ???\nmeta:\n  classes: 2\n")
    return lambda *words: quick(
        "--config-dir",
        "conf",
        "data=own",
        "model.input_shape=[1,8,8]",
        "train.batch_size=4",
        *words,
    )


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("stream", ["the train set is a Stream, an IterableDataset", "__getitem__(index)"]),
        ("no_items", ["the val set is a NoItems; it needs", "lacks __getitem__."]),
        ("no_length", ["the train set is a NoLength; it needs", "lacks __len__."]),
        ("three", ["returned 3 values; it must return (train, val)", "mode=evaluate"]),
        ("dict", ["returned a dict with the keys train, val; it must return (train, val)"]),
        (
            "vals",
            [
                "the val set is a dict with the keys seen, unseen",
                "ConcatDataset",
                "mode=evaluate checkpoint=<run> data=<yours>",
            ],
        ),
        (
            "ragged",
            [
                "inputs of the shapes [1, 4, 8] and [1, ",
                "Pad or crop them",
                "batch(indices)",
                "docs/own-code.md",
            ],
        ),
        ("ragged_val", ["inputs of the shapes [1, 4, 8] and [1, 5, 8]"]),
        ("ragged train.num_workers=1 guard.data=ignore", ["inputs of the shapes [1, "]),
    ],
)
def test_a_data_set_that_cannot_be_used_gets_one_message(run, kind, parts):
    done = run(*f"data.kind={kind}".split())
    assert done.rc == 2, done
    assert "Traceback" not in done.stderr + done.stdout
    for part in parts:
        assert part in done.stderr


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's own, from Python 3.12 on
def test_loading_processes_gather_padded_batches(run, tmp_path):
    losses = []
    for workers in (0, 2):
        (tmp_path / "pids.txt").unlink(missing_ok=True)
        done = run("data.kind=padded", f"train.num_workers={workers}", f"hydra.run.dir=w{workers}")
        assert done.rc == 0, done.stderr
        assert len({*(tmp_path / "pids.txt").read_text().split()}) >= 1 + (workers > 0)
        result = json.loads((tmp_path / f"w{workers}" / "result.json").read_text())
        losses.append((result["train_loss"], result["metrics"]))
    assert losses[0] == losses[1]


def test_a_few_examples_of_data_that_make_their_own_batches(run):
    done = run("data.kind=padded", "debug.overfit=4")
    assert done.rc == 0, done.stderr


def test_processes_that_have_nothing_to_load_are_named(quick):
    done = quick("train.num_workers=2")
    assert done.rc == 0
    assert "train.num_workers=2 starts no process: data=digits is in memory" in done.stdout
