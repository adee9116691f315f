"""Models and tasks of a user's own that fail on a batch: exit status 2, and one message that names
what failed and what to change."""

import pytest
from refusals import check_refused, message_table
from run_folders import write_files

NETS = '''
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)


class Nothing(Base):
    def forward(self, x):
        self.layer(x.flatten(1))


class Pair(Base):
    def forward(self, x):
        return self.layer(x.flatten(1)), x


class Two(Base):
    def forward(self, a, b):
        return self.layer(a.flatten(1)) + b


class Narrow(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(32, 10))


class Rows(Base):
    def forward(self, a):
        return self.layer(a)


class Positions(Base):
    """Logits of every row."""

    def forward(self, x):
        return self.layer(x.flatten(1)).unsqueeze(1).expand(-1, 8, -1)


class Same(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)


class Detached(Base):
    def forward(self, x):
        return self.layer(x.flatten(1)).detach()


def fields(pairs):
    images, labels = zip(*pairs)
    return {"x": torch.stack(images), "labels": torch.stack(labels)}


class Argmax(Base):
    def forward(self, x):
        return nn.functional.one_hot(self.layer(x.flatten(1)).argmax(1), 10).float()


class NoGrad(Base):
    @torch.no_grad()
    def forward(self, x):
        return self.layer(x.flatten(1))


class Boom(Base):
    def forward(self, x):
        raise RuntimeError("boom")


class Top(Base):
    def forward(self, x):
        return self.layer(x.flatten(1)).topk(11)


class Unused(Base):
    def forward(self, x):
        return x.flatten(1)[:, :10]


class Gpt(GPT2LMHeadModel):
    """transformers' own output."""

    def __init__(self):
        super().__init__(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1,
                                    bos_token_id=0, eos_token_id=0, use_cache=False))
'''
DATA = """
import torch
from torch.utils.data import Dataset, TensorDataset


class Rows(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = torch.randn(8, 8)
        ids = torch.arange(8)
        return {
            "pair": ((x, x), 1),
            "three": (x, x.sum(0)[:1].expand(10), 1),
            "fields": {"a": x, "c": x, "label": 1},
            "dict": ({"input_ids": ids, "attention_mask": ids}, ids),
            "target": (x, {"label": 1}),
        }[self.kind]


def rows(kind):
    return Rows(kind), Rows(kind)


def tensors(kind):
    x = torch.randn(8, 8, 8)
    ids = torch.arange(8).repeat(8, 1)
    pair = {"same": (x, x), "tokens": (ids, ids), "floats": (ids.float(), ids),
            "yes": (ids.float(), ids % 2),
            "pixels": (ids.repeat(1, 8).to(torch.uint8).view(8, 1, 8, 8), ids[0])}[kind]
    return TensorDataset(*pair), TensorDataset(*pair)
"""
TASKS = """
from torch.nn import functional as F
from runner.training.tasks.classification import Classification
from runner.training.tasks.task import Task


class EachLoss(Classification):
    def loss(self, output, target):
        return F.cross_entropy(output, target, reduction="none")


class NumberLoss(Classification):
    def loss(self, output, target):
        return float(F.cross_entropy(output, target))


class CutLoss(Classification):
    def loss(self, output, target):
        return F.cross_entropy(output.data, target)


class Spread(Classification):
    # Of the whole batch: no mean over its examples.
    def loss(self, output, target):
        return F.cross_entropy(output, target) + output.std(0).mean()


class DictTotals(Classification):
    def totals(self, output, target):
        return {"loss": 1.0}


class Unnamed(Classification):
    quality = "val/f1"


class Aimless(Task):
    def loss(self, output, target):
        return F.cross_entropy(output, target)

    totals = summarise = loss
"""


FILES = {
    "odd/nets.py": NETS,
    "odd/data.py": DATA,
    "odd/tasks.py": TASKS,
    "odd/conf/task/aimless.yaml": "_target_: odd.tasks.Aimless\n",
    "odd/conf/model/net.yaml": "_target_: odd.nets.Base\n",
    "odd/conf/data/rows.yaml": "_target_: odd.data.rows\nkind: pair\n",
    "odd/conf/data/tensors.yaml": "_target_: odd.data.tensors\nkind: same\n",
}


@pytest.fixture
def odd(main, tmp_path):
    """A tiny run of one of the models above."""
    write_files(tmp_path, FILES)
    words = "--config-dir odd/conf model=net train.max_steps=2 tracking=none".split()
    return lambda *typed: main(*words, *typed)


MESSAGES = message_table("""
Nothing => The model returns None | end Nothing.forward with `return <output>`
Pair => The model returns a tuple of 2 | task=classification takes a tensor, logits [B, C]
    `return <tensor>`
Two data=rows => Two.forward takes (a, b) | as one argument, here a list of 2
    Yield (a, b, target), whose inputs are passed by position
    `def forward(self, inputs): a, b = inputs`
Two data=tensors task=regression => Two.forward takes (a, b) | Yield (a, b, target)
    or type task=model_loss
Two data=rows data.kind=fields => Two.forward takes (a, b) | has the fields a, c beside its target
    b is missing
Pair data=rows data.kind=three => Pair.forward takes (x) | has 2 inputs before its target
    Yield one for each
Rows data=rows data.kind=fields => cannot be multiplied | was made for inputs of another size
    a [8, 8], c [8, 8]
Narrow data=rows data.kind=fields => forward takes (input) | as none is an argument's name
    yield a field input
Base data=rows => yields as inputs a list of 2 | self.net(*inputs)
Same data=rows data.kind=target task=regression => yields as target a dict with the keys label
    task=regression takes a tensor
Same data=tensors data.kind=tokens task=language => The inputs are integers, int64 [8, 8]
    Type a model that takes tokens (model=gpt)
Gpt data=tensors data.kind=floats task=language => transformer.wte (Embedding) takes integer tokens
    x.long()
Narrow => cannot be multiplied | 1 (Linear) was made for inputs of another size
    has the shape [1, 8, 8]
Same data=tensors task=classification => classification needs logits
    Those fit task=regression: type it
Positions => classification needs logits [B, C] | The loss fails, not the model
    returns float32 [64, 8, 10] | the targets are int64 [64]
Base => NotImplementedError | It fails in
Boom => RuntimeError: boom. nets.py, line 77, raises it in the model itself (Boom)
Top => takes the k largest of fewer than k numbers | Type a smaller model.config
Rows data=tensors data.kind=pixels => The inputs are integers, uint8 [8, 1, 8, 8], pixels
    x.float() / 255
Detached => has no gradient, so nothing can train | The last module whose output has one is layer
    .detach(), .data
Detached data.collate=odd.nets.fields => has no gradient, so nothing can train
    The last module whose output has one is layer
Argmax => The last module whose output has one is layer | argmax
NoGrad => NoGrad.forward runs layer with gradients switched off | Leave torch.no_grad() and
Unused => No parameter that trains takes part in Unused.forward (layer.weight
task._target_=odd.tasks.EachLoss model=mlp => returns as loss of the shape [64] | `loss.mean()`
task._target_=odd.tasks.NumberLoss model=mlp => returns as loss a float
task._target_=odd.tasks.CutLoss model=mlp => the task's loss cuts it
task._target_=odd.tasks.Spread model=mlp train.accumulate=2 => the mean of those of its halves
    Type task.whole_batch=true where
task._target_=odd.tasks.Spread model=mlp task.whole_batch=true train.accumulate=2 => is of the batch
    Type train.accumulate=1 train.batch_size=128
task._target_=odd.tasks.DictTotals model=mlp => totals() returned a dict
    return torch.stack([loss * count, count])
task._target_=odd.tasks.Unnamed model=mlp => with val/f1, the task's quality, among them
task=aimless model=mlp => has no quality and no direction
    quality = "val/loss"; direction = "min"
Same data=tensors task=classification data.kind=yes => Those fit task=binary: type it
""")
"""A word without `=` names a model of above."""


@pytest.mark.parametrize(("typed", "parts"), MESSAGES)
def test_a_failure_on_a_batch_gets_one_message(odd, typed, parts):
    words = [w if "=" in w else f"model._target_=odd.nets.{w}" for w in typed.split()]
    done = odd(*words)
    check_refused(done, *parts)
    assert "Choose ones that fit" not in done.stderr


def test_several_inputs_are_passed_by_position(odd):
    done = odd("model._target_=odd.nets.Two", "data=rows", "data.kind=three")
    assert done.rc == 0, done.stderr
    assert "2 inputs of a batch go to Two.forward by position" in done.stdout
