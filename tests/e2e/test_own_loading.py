"""Collators and samplers of a user's own, from the command line."""

import pytest
from typed_runs import TypedRuns

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


PAD = "data.collate=runner.data.padding.pad"
SAMPLED = f"{PAD} data.sampler=own_loading.second_half"


@pytest.fixture
def runs(main, tmp_path):
    """Tiny runs on the sets above."""
    (tmp_path / "own_loading.py").write_text(SETS)
    meta = "kind: Sentences\nmeta:\n  classes: 2\n"
    for group, text in (("data", f"make\n{meta}"), ("model", "Bag\n")):
        config = tmp_path / "conf" / group / "own.yaml"
        config.parent.mkdir(parents=True)
        config.write_text(f"_target_: own_loading.{text}")
    words = (
        "--config-dir conf data=own model=own task=classification train.batch_size=8 "
        "train.max_steps=4 tracking=none"
    )
    return TypedRuns(main, tmp_path, words)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's own, from Python 3.12 on
def test_padding_and_a_class_of_ones_own_train_alike(runs, tmp_path):
    wanted = runs.train(PAD)
    # An evaluation takes the collator of the training.
    assert runs.evaluate().result["metrics"] == wanted.result["metrics"]
    multiple = "data.collate={_target_:runner.data.padding.pad,multiple_of:4}"
    own = "data.collate={_target_:own_loading.Pad,length:5} train.num_workers=1"
    assert runs.train(multiple).numbers == runs.train(own).numbers == wanted.numbers
    assert len({*(tmp_path / "pids.txt").read_text().split()}) > 1


TOKENIZER = "{_target_:transformers.AutoTokenizer.from_pretrained,_args_:[./absent]}"
REFUSED = [
    ("", ["cannot be stacked", PAD, "batch(indices)"]),
    (
        "data.collate=own_loading.broken",
        ["data.collate=own_loading.broken fails on 8 examples: TypeError", "own_loading.py, line"],
    ),
    (
        "data.collate=own_loading.raises_late guard.data=ignore train.num_workers=1",
        ["data.collate=own_loading.raises_late fails on 7 examples: ArithmeticError: too few"],
    ),
    ("data.collate=own_loading.none", ["data.collate=own_loading.none does not import"]),
    ("data.collate=own_loading.LENGTH", ["is a int, not a class or function"]),
    ("data.collate=[a]", ["data.collate=['a'] does not fit. Allowed: a dotted path"]),
    (
        "data.collate={_target_:own_loading.Pad,long:5}",
        ["data.collate.long=5: own_loading.Pad takes no long", "data.collate.length is needed"],
    ),
    (
        f"data.collate={{_target_:transformers.DataCollatorWithPadding,tokenizer:{TOKENIZER}}}",
        ["data.collate.tokenizer: transformers.AutoTokenizer.from_pretrained fails: OSError"],
    ),
    ("data.collate=own_loading.Pad", ["data.collate: own_loading.Pad refuses its arguments"]),
    (
        "data.collate={_target_:own_loading.Sentences,count:3}",
        ["data.collate=own_loading.Sentences returns a Sentences, which takes no examples"],
    ),
    (f"{PAD} data.kind=Whole", [f"{PAD}: the data set, a Whole, makes its own batches"]),
    (f"{PAD} ~data.kind data._target_=own_loading.taken", ["a keyword of own_loading.taken"]),
    (
        f"{PAD} data.sampler=own_loading.batched",
        ["data.sampler=own_loading.batched cannot be used: it yields a list. Yield one index"],
    ),
    (
        f"{PAD} data.sampler=own_loading.needs_labels",
        ["own_loading.needs_labels fails on the training set, a Sentences", "AttributeError"],
    ),
    (f"{SAMPLED} data.shuffle=false", ["data.shuffle=false contradicts data.sampler"]),
    (f"{PAD} data.sampler=own_loading.LENGTH", ["data.sampler=own_loading.LENGTH is a int"]),
    (
        f"{PAD} data.sampler={{_target_:own_loading.second_half,size:3}}",
        ["data.sampler.size=3: own_loading.second_half takes no size"],
    ),
    (
        f"{PAD} data.sampler={{_target_:torch.utils.data.WeightedRandomSampler,weights:[1.0],"
        "num_samples:3}",
        [
            "data.sampler.weights=[1.0]: the runner passes weights of torch.utils.data",
            "itself, the training set. Name a function that takes it",
        ],
    ),
]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("typed", "parts"), REFUSED)
def test_a_collator_or_sampler_that_cannot_be_used_gets_one_message(runs, typed, parts):
    message = runs.fail(typed)
    assert [part for part in parts if part not in message] == []


def test_a_run_with_a_sampler_is_resumed_with_the_same_order(runs):
    whole = runs.train(f"{SAMPLED} train.max_steps=5")
    line = "data.sampler=own_loading.second_half: an epoch has 16 examples, drawn from 24"
    assert line in whole.stdout
    runs.train(f"{SAMPLED} train.max_steps=3", "part")
    assert runs.resume("train.max_steps=5", "part").numbers == whole.numbers
    assert runs.evaluate().result["metrics"] == whole.result["metrics"]


def test_data_in_memory_take_a_sampler_of_torch_and_a_collator_without_code(quick):
    sampler = "{_target_: torch.utils.data.RandomSampler, replacement: true, num_samples: 64}"
    done = quick(PAD, f"data.sampler={sampler}", "train.max_steps=2")
    assert done.rc == 0, done.stderr
    assert "an epoch has 64 examples" in done.stdout
