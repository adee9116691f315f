"""Collators and samplers of a user's own, from the command line."""

import json

import pytest

SETS = '''
import os

import torch
from torch import nn
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, WeightedRandomSampler


class Bag(nn.Module):
    """Averages the embeddings of tokens [B, T]; token 0 is padding."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, padding_idx=0)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.bag(tokens))


class Sentences(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.arange(1, 2 + index % 5), index % 2


class Whole(Sentences):
    def batch(self, indices):
        return torch.ones(len(indices), 2, dtype=torch.long), indices % 2


def make(kind="Sentences"):
    return globals()[kind](24), globals()[kind](7)


def taken(collate="mine"):
    return make()


class Pad:
    def __init__(self, length):
        self.length = length

    def __call__(self, pairs):
        with open("pids.txt", "a") as file:
            file.write(f"{os.getpid()} ")
        inputs = torch.zeros(len(pairs), self.length, dtype=torch.long)
        for row, (tokens, _) in zip(inputs, pairs):
            row[: len(tokens)] = tokens
        return inputs, torch.tensor([label for _, label in pairs])


def broken(pairs):
    return pairs[0]["input_ids"]


def raises_late(pairs):
    if len(pairs) < 8:
        raise ArithmeticError("too few")
    return Pad(5)(pairs)


LENGTH = 5


def second_half(dataset):
    weights = [float(index >= len(dataset) // 2) for index in range(len(dataset))]
    return WeightedRandomSampler(weights, 16)


def batched(dataset):
    return BatchSampler(SequentialSampler(dataset), 4, drop_last=False)


def needs_labels(dataset):
    return dataset.labels
'''


@pytest.fixture
def own_collate(main, tmp_path):
    (tmp_path / "own_loading.py").write_text(SETS)
    for group, target in (("data", "make"), ("model", "Bag")):
        config = tmp_path / "conf" / group / "own.yaml"
        config.parent.mkdir(parents=True)
        config.write_text(f"_target_: own_loading.{target}\n")
    with (tmp_path / "conf" / "data" / "own.yaml").open("a") as file:
        file.write("kind: Sentences\nmeta:\n  classes: 2\n")
    words = ("--config-dir", "conf", "data=own", "model=own", "task=classification")
    sizes = ("train.batch_size=8", "train.max_steps=4", "tracking=none")
    return lambda *more: main(*words, *sizes, *more)


def outcome(folder):
    result = json.loads((folder / "result.json").read_text())
    return result["train_loss"], result["metrics"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's own, from Python 3.12 on
def test_padding_and_a_class_of_ones_own_train_alike(own_collate, tmp_path):
    outcomes = []
    for i, words in enumerate(
        [
            ["data.collate=runner.data.padding.pad"],
            ["data.collate={_target_: runner.data.padding.pad, multiple_of: 4}"],
            ["data.collate={_target_: own_loading.Pad, length: 5}", "train.num_workers=1"],
        ]
    ):
        done = own_collate(*words, f"hydra.run.dir=run{i}")
        assert done.rc == 0, done.stderr
        outcomes.append(outcome(tmp_path / f"run{i}"))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert len({*(tmp_path / "pids.txt").read_text().split()}) > 1


def test_an_evaluation_takes_the_collator_of_the_training(own_collate, main, tmp_path):
    done = own_collate("data.collate=runner.data.padding.pad", "hydra.run.dir=run")
    assert done.rc == 0, done.stderr
    done = main("mode=evaluate", "checkpoint=run", "tracking=none", "hydra.run.dir=evaluated")
    assert done.rc == 0, done.stderr
    assert outcome(tmp_path / "evaluated")[1] == outcome(tmp_path / "run")[1]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["cannot be stacked", "data.collate=runner.data.padding.pad", "batch(indices)"]),
        (
            ["data.collate=own_loading.broken"],
            [
                "data.collate=own_loading.broken fails on 8 examples: TypeError",
                "own_loading.py, line",
            ],
        ),
        (
            ["data.collate=own_loading.raises_late", "guard.data=ignore", "train.num_workers=1"],
            ["data.collate=own_loading.raises_late fails on 7 examples: ArithmeticError: too few"],
        ),
        (["data.collate=own_loading.none"], ["data.collate=own_loading.none does not import"]),
        (["data.collate=own_loading.LENGTH"], ["is a int, not a class or function"]),
        (["data.collate=[a]"], ["data.collate=['a'] does not fit. Allowed: a dotted path"]),
        (
            ["data.collate={_target_: own_loading.Pad, long: 5}"],
            ["data.collate.long=5: own_loading.Pad takes no long", "data.collate.length is needed"],
        ),
        (
            [
                "data.collate={_target_: transformers.DataCollatorWithPadding, tokenizer: "
                "{_target_: transformers.AutoTokenizer.from_pretrained, _args_: [./absent]}}"
            ],
            ["data.collate.tokenizer: transformers.AutoTokenizer.from_pretrained fails: OSError"],
        ),
        (["data.collate=own_loading.Pad"], ["data.collate: own_loading.Pad refuses its arguments"]),
        (
            ["data.collate={_target_: own_loading.Sentences, count: 3}"],
            ["data.collate=own_loading.Sentences returns a Sentences, which takes no examples"],
        ),
        (
            ["data.collate=runner.data.padding.pad", "data.kind=Whole"],
            ["data.collate=runner.data.padding.pad: the data set, a Whole, makes its own batches"],
        ),
        (
            [
                "data.collate=runner.data.padding.pad",
                "~data.kind",
                "data._target_=own_loading.taken",
            ],
            ["own_loading.taken takes a keyword collate of its own"],
        ),
    ],
)
def test_a_collator_that_cannot_be_used_gets_one_message(own_collate, words, parts):
    done = own_collate(*words)
    assert done.rc == 2, done
    assert "Traceback" not in done.stderr + done.stdout
    for part in parts:
        assert part in done.stderr


SAMPLED = ("data.collate=runner.data.padding.pad", "data.sampler=own_loading.second_half")


def test_a_run_with_a_sampler_is_resumed_with_the_same_order(own_collate, main, tmp_path):
    done = own_collate(*SAMPLED, "train.max_steps=5", "hydra.run.dir=whole")
    assert done.rc == 0, done.stderr
    line = "data.sampler=own_loading.second_half: an epoch has 16 examples, drawn from 24"
    assert line in done.stdout
    done = own_collate(*SAMPLED, "train.max_steps=3", "hydra.run.dir=part")
    assert done.rc == 0, done.stderr
    done = main("checkpoint.resume=part", "train.max_steps=5")
    assert done.rc == 0, done.stderr
    assert outcome(tmp_path / "part") == outcome(tmp_path / "whole")
    done = main("mode=evaluate", "checkpoint=whole", "tracking=none", "hydra.run.dir=evaluated")
    assert done.rc == 0, done.stderr
    assert outcome(tmp_path / "evaluated")[1] == outcome(tmp_path / "whole")[1]


def test_a_sampler_of_torch_needs_no_code(quick):
    sampler = "data.sampler={_target_: torch.utils.data.RandomSampler, replacement: true, "
    done = quick(f"{sampler}num_samples: 64}}", "train.max_steps=2")
    assert done.rc == 0, done.stderr
    assert "an epoch has 64 examples" in done.stdout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["data.sampler=own_loading.batched"],
            ["data.sampler=own_loading.batched cannot be used: it yields a list. Yield one index"],
        ),
        (
            ["data.sampler=own_loading.needs_labels"],
            [
                "data.sampler=own_loading.needs_labels fails on the training set, a Sentences",
                "AttributeError",
            ],
        ),
        (
            ["data.sampler=own_loading.second_half", "data.shuffle=false"],
            ["data.shuffle=false contradicts data.sampler"],
        ),
        (["data.sampler=own_loading.LENGTH"], ["data.sampler=own_loading.LENGTH is a int"]),
        (
            ["data.sampler={_target_: own_loading.second_half, size: 3}"],
            ["data.sampler.size=3: own_loading.second_half takes no size"],
        ),
        (
            [
                "data.sampler={_target_: torch.utils.data.WeightedRandomSampler, weights: [1.0], "
                "num_samples: 3}"
            ],
            [
                "data.sampler.weights=[1.0]: the runner passes weights of torch.utils.data",
                "itself, the training set. Name a function of your own",
            ],
        ),
    ],
)
def test_a_sampler_that_cannot_be_used_gets_one_message(own_collate, words, parts):
    done = own_collate("data.collate=runner.data.padding.pad", *words)
    assert done.rc == 2, done
    assert "Traceback" not in done.stderr + done.stdout
    for part in parts:
        assert part in done.stderr


def test_data_in_memory_are_loaded_one_by_one(quick):
    done = quick("data.collate=runner.data.padding.pad", "train.max_steps=2")
    assert done.rc == 0, done.stderr
    assert "those of data=digits are loaded one by one" in done.stdout
