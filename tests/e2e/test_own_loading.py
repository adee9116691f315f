"""Collators and samplers of a user's own, from the command line."""

import pytest
from refusals import message_table
from run_folders import copy_files
from typed_runs import TypedRuns

PAD = "data.collate=runner.data.padding.pad"
SAMPLED = f"{PAD} data.sampler=own_loading.second_half"


@pytest.fixture
def runs(main, tmp_path):
    """Tiny runs on the sets above."""
    copy_files("own_loading", tmp_path)
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
WEIGHTED = "torch.utils.data.WeightedRandomSampler"
REFUSED = message_table(f"""
data.kind=Sentences => cannot be stacked | {PAD} | batch(indices)
data.collate=own_loading.broken => data.collate=own_loading.broken fails on 8 examples: TypeError
    own_loading.py, line
data.collate=own_loading.raises_late guard.data=ignore train.num_workers=1 =>
    data.collate=own_loading.raises_late fails on 7 examples: ArithmeticError: too few
data.collate=own_loading.none => data.collate=own_loading.none does not import
data.collate=own_loading.LENGTH => is a int, not a class or function
data.collate=[a] => data.collate=['a'] does not fit. Allowed: a dotted path
data.collate={{_target_:own_loading.Pad,long:5}} =>
    data.collate.long=5: own_loading.Pad takes no long | data.collate.length is needed
data.collate={{_target_:transformers.DataCollatorWithPadding,tokenizer:{TOKENIZER}}} =>
    data.collate.tokenizer: transformers.AutoTokenizer.from_pretrained fails: OSError
data.collate=own_loading.Pad => data.collate: own_loading.Pad refuses its arguments
data.collate={{_target_:own_loading.Sentences,count:3}} =>
    data.collate=own_loading.Sentences returns a Sentences, which takes no examples
{PAD} data.kind=Whole => {PAD}: the data set, a Whole, makes its own batches
{PAD} ~data.kind data._target_=own_loading.taken => a keyword of own_loading.taken
{PAD} data.sampler=own_loading.batched =>
    data.sampler=own_loading.batched cannot be used: it yields a list. Yield one index
{PAD} data.sampler=own_loading.needs_labels =>
    own_loading.needs_labels fails on the training set, a Sentences | AttributeError
{SAMPLED} data.shuffle=false => data.shuffle=false contradicts data.sampler
{PAD} data.sampler=own_loading.LENGTH => data.sampler=own_loading.LENGTH is a int
{PAD} data.sampler={{_target_:own_loading.second_half,size:3}} =>
    data.sampler.size=3: own_loading.second_half takes no size
{PAD} data.sampler={{_target_:{WEIGHTED},weights:[1.0],num_samples:3}} =>
    data.sampler.weights=[1.0]: the runner passes weights of torch.utils.data
    itself, the training set. Name a function that takes it
""")


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
    quick(PAD, f"data.sampler={sampler}", "train.max_steps=2").check_ok("an epoch has 64 examples")
