"""Models and tasks of a user's own that fail on a batch: exit status 2, and one message that names
what failed and what to change."""

import pytest
from refusals import message_table


@pytest.fixture
def odd(main, root):
    """A tiny run of a model of nets_that_fail: its class and arguments, then what else is typed."""
    conf = root / "tests" / "helpers" / "conf"

    def run(typed):
        name, *words = typed.split()
        own = ["model=failing", f"model._target_=nets_that_fail.{name}"]
        return main("--config-dir", conf, *own, *words, "train.max_steps=2", "tracking=none")

    return run


MESSAGES = message_table("""
Net +model.after=nothing => The model returns None | end Net.forward with `return <output>`
Net +model.after=pair => The model returns a tuple of 2
    task=classification takes a tensor, logits [B, C]
    `return <tensor>`
Two data=odd_rows => Two.forward takes (a, b) | as one argument, here a list of 2
    Yield (a, b, target), whose inputs are passed by position
    `def forward(self, inputs): a, b = inputs`
Two data=odd_tensors task=regression => Two.forward takes (a, b) | Yield (a, b, target)
    or type task=model_loss
Two data=odd_rows data.kind=fields => Two.forward takes (a, b)
    has the fields a, c beside its target
    b is missing
Net +model.after=pair data=odd_rows data.kind=three => Net.forward takes (x)
    has 2 inputs before its target
    Yield one for each
Row +model.width=64 data=odd_rows data.kind=fields => cannot be multiplied
    was made for inputs of another size | a [8, 8], c [8, 8]
Narrow data=odd_rows data.kind=fields => forward takes (input) | as none is an argument's name
    yield a field input
Layers data=odd_rows => yields as inputs a list of 2 | self.net(*inputs)
Row data=odd_rows data.kind=target task=regression => yields as target a dict with the keys label
    task=regression takes a tensor
Row data=odd_tensors data.kind=tokens task=language => The inputs are integers, int64 [8, 8]
    Type a model that takes tokens (model=gpt)
gpt data=odd_tensors data.kind=floats task=language => wte (Embedding) takes integer tokens
    x.long()
Narrow => cannot be multiplied | 1 (Linear) was made for inputs of another size
    has the shape [1, 8, 8]
Row data=odd_tensors task=classification => classification needs logits
    Those fit task=regression: type it
Net +model.after=positions => classification needs logits [B, C] | The loss fails, not the model
    returns float32 [64, 8, 10] | the targets are int64 [64]
Layers => NotImplementedError | It fails in
Net +model.inside=boom => RuntimeError: boom. nets_that_fail.py, line
    raises it in the model itself (Net)
Net +model.after=top => takes the k largest of fewer than k numbers | Type a smaller model.config
Row +model.width=64 data=odd_tensors data.kind=pixels => The inputs are integers
    uint8 [8, 1, 8, 8], pixels | x.float() / 255
Net +model.after=cut => has no gradient, so nothing can train
    The last module whose output has one is head
    .detach(), .data
Net +model.after=cut data.collate=nets_that_fail.collate => has no gradient, so nothing can train
    The last module whose output has one is head
Net +model.after=argmax => The last module whose output has one is head | argmax
NoGrad => NoGrad.forward runs layer with gradients switched off | Leave torch.no_grad() and
Unused => No parameter that trains takes part in Unused.forward (layer.weight
Net task._target_=nets_that_fail.EachLoss => returns as loss of the shape [64] | `loss.mean()`
Net task._target_=nets_that_fail.NumberLoss => returns as loss a float
Net task._target_=nets_that_fail.CutLoss => the task's loss cuts it
Net task._target_=nets_that_fail.Spread train.accumulate=2 => the mean of those of its halves
    Type task.whole_batch=true where
Net task._target_=nets_that_fail.Spread task.whole_batch=true train.accumulate=2 => is of the batch
    Type train.accumulate=1 train.batch_size=128
Net task._target_=nets_that_fail.DictTotals => totals() returned a dict
    return torch.stack([loss * count, count])
Net task._target_=nets_that_fail.Unnamed => with val/f1, the task's quality, among them
Net task=aimless => has no quality and no direction
    quality = "val/loss"; direction = "min"
Row data=odd_tensors task=classification data.kind=yes => Those fit task=binary: type it
""")


@pytest.mark.parametrize(("typed", "parts"), MESSAGES)
def test_a_failure_on_a_batch_gets_one_message(odd, typed, parts):
    done = odd(typed).check_refused(*parts)
    assert "Choose ones that fit" not in done.stderr


def test_several_inputs_are_passed_by_position(odd):
    odd("Two data=odd_rows data.kind=three").check_ok(
        "2 inputs of a batch go to Two.forward by position"
    )
