"""Data sets and loaders as a config describes them."""

from dataclasses import replace

import pytest
import torch
from items import CPU
from torch.utils.data import Dataset, Subset, TensorDataset

from runner.core.base.errors import ConfigError
from runner.core.config.schema import DebugSpec, RunSpec, TrainSpec
from runner.data.build import build_data, build_run_loaders, splits_problems
from runner.data.splits import Splits
from runner.training.tasks.classification import Classification


def make_spec(function, **keywords):
    """Return a spec whose data come from a function in this file."""
    return RunSpec(data={"_target_": f"{__name__}.{function}", **keywords})


class Images(Dataset):
    classes = ("a", "b", "c")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.zeros(1, 2, 2), index % 3


class Empty(Images):
    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


class Unpaired(Images):
    def __getitem__(self, index):
        return torch.zeros(1)


class Alone(Images):
    def __getitem__(self, index):
        return (1,)


def tensors(classes=3):
    labels = torch.arange(6) % classes
    return Splits(
        TensorDataset(torch.zeros(6, 1, 2, 2), labels), TensorDataset(torch.zeros(1), labels[:1])
    )


def images(kind="Images"):
    return Splits(globals()[kind](), globals()[kind]())


def unsized():
    return iter([]), [1]


def lonely():
    return [1, 2, 3]


def numbers():
    both = TensorDataset(torch.zeros(6, 1, 2, 2), torch.rand(6) * 100)
    return both, both


@pytest.mark.parametrize("name", ["iou", "loss", "two words", "", "a/b", 3])
def test_a_set_without_a_name_for_its_metrics_is_refused(name):
    problems = list(splits_problems(([1], {name: [1], "fine": [1]}), "mine.make"))
    assert len(problems) == 1
    assert f"a val set is called {name!r}, which cannot be part of a metric's name" in problems[0]


def test_the_task_of_a_run_is_not_built_again():
    chosen = replace(make_spec("tensors"), task={"_target_": "no.such.Task"})
    task = Classification(inputs=("a",), target="b")
    loaders = build_run_loaders(chosen, build_data(chosen), CPU, task=task)
    assert loaders.train.options.layout.inputs == ("a",)
    assert loaders.val.options.layout.target == "b"


@pytest.mark.parametrize(
    "meta", [{"input": [1, 2, 2], "classes": 3}, {"classes": 4}, {"classes": None}, {}, None]
)
@pytest.mark.parametrize(("target", "count"), [("tensors", 6), ("images", 4)])
def test_data_of_true_descriptions_are_returned(target, count, meta):
    assert len(build_data(make_spec(target, meta=meta)).train) == count


@pytest.mark.parametrize(
    ("target", "named"), [("tensors", ": sample 2 has the label 2"), ("images", ": a, b, c")]
)
def test_every_wrong_description_is_refused(target, named):
    with pytest.raises(ConfigError) as error:
        build_data(make_spec(target, meta={"input": [3, 2, 2], "classes": 2}))
    assert error.value.problems == (
        "data.meta.input=[3, 2, 2], but an example has the shape [1, 2, 2]. "
        "Type data.meta.input=[1,2,2].",
        f"data.meta.classes=2, but the data have 3 classes{named}. Type data.meta.classes=3.",
    )


def shifted(count):
    """Labels 1 to 3."""
    pairs = TensorDataset(torch.zeros(count, 2), torch.arange(count) % 3 + 1)
    return pairs, pairs


def masks():
    """Masks of 4 x 4 pixels with two classes, of which the border of example 3 is none."""
    labels = torch.zeros(6, 4, 4, dtype=torch.int64)
    labels[:, 2:] = 1
    labels[3, 0] = 255
    pairs = TensorDataset(torch.zeros(6, 3, 4, 4), labels)
    return pairs, pairs


def unlike(names):
    """Data sets whose classes have other numbers."""
    first, second = Images(), Images()
    second.classes = names
    return first, Subset(second, [0, 1])


def batches(count):
    """Data sets of one batch of `count` examples."""
    return ([(torch.zeros(count, 2), torch.zeros(count))],) * 2


def waves():
    pairs = TensorDataset(torch.zeros(6, 2), torch.zeros(6, 2, dtype=torch.complex64))
    return pairs, pairs


def test_complex_targets_have_no_classes():
    assert len(build_data(make_spec("waves", meta={"classes": 1})).train) == 6


def test_real_targets_have_no_classes():
    assert len(build_data(make_spec("numbers", meta={"classes": 1})).train) == 6


@pytest.mark.parametrize(
    ("function", "keywords", "message"),
    [
        ("lonely", {}, r"must return \(train, val\), two map-style .*; it returned a list"),
        ("unsized", {}, r"the train set is a list_iterator; it needs __len__ and __getitem__"),
        ("images", {"kind": "Unpaired"}, "yields a Tensor;"),
        ("images", {"kind": "Alone"}, "a tuple of 1"),
        ("images", {"kind": "Empty"}, "data: the train set is empty"),
        # As a damaged checkpoint may hold it.
        ("tensors", {"meta": 5}, "data.meta=5 is no mapping"),
        ("tensors", {"meta": {"input": 5}}, "data.meta.input=5, but an example has the shape"),
        ("shifted", {"count": 6, "meta": {"classes": 3}}, "labels are 1 to 3, and no label is 0"),
        (
            "masks",
            {"meta": {"classes": 2}},
            "sample 3 has the label 255. Type task.ignore_index=255 where 255 marks pixels that",
        ),
        ("unlike", {"names": ["a", "c"]}, "train set and of the val set differ: b on one side"),
        ("unlike", {"names": ["b", "a", "c"]}, "the val set differ. Give both the same: class"),
        ("batches", {"count": 8, "meta": {"input": [2]}}, r"batches of 8, .*train.batch_size=8"),
        ("tensors", {"meta": {"classes": "ten"}}, "data.meta.classes=ten: type a whole number"),
    ],
)
def test_data_that_cannot_be_used_are_refused(function, keywords, message):
    chosen = make_spec(function, **keywords)
    with pytest.raises(ConfigError, match=message):
        build_run_loaders(chosen, build_data(chosen), CPU)


def test_overfit_takes_the_same_few_examples():
    for few, count in ((2, 2), (100, 6)):
        data = build_data(replace(make_spec("tensors"), debug=DebugSpec(overfit=few)))
        assert data.train is data.val
        assert len(data.train) == count


def test_loaders_follow_the_spec():
    chosen = replace(make_spec("tensors"), seed=5, train=TrainSpec(batch_size=4))
    loaders = build_run_loaders(chosen, build_data(chosen), CPU)
    train, val = loaders.train, loaders.val
    assert (train.shuffle, train.seed, train.batch_size, val.shuffle) == (True, 5, 4, False)
    unshuffled = make_spec("tensors", shuffle=False)
    assert not build_run_loaders(unshuffled, build_data(unshuffled), CPU).train.shuffle
