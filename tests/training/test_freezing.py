"""Parameters that train.freeze names do not train, and everything else does."""

import re

import pytest
import torch
from run_folders import finished_run
from states import CPU
from test_state_dict import MLP, begin, resume_halfway, save, train

from runner.training.model import restore_model
from runner.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("patterns", "trainable"),
    [
        ("layers", ["head.weight", "head.bias"]),
        ("*.bias", ["layers.0.weight", "layers.1.weight", "head.weight"]),
        ("layers.1,head.weight", ["layers.0.weight", "layers.0.bias", "head.bias"]),
    ],
)
def test_what_matches_is_frozen_and_the_rest_trains(compose, patterns, trainable):
    spec = compose(*MLP, f"train.freeze=[{patterns}]")
    before = dict(begin(spec).model.named_parameters())
    state, _ = resume_halfway(spec)
    moved = [n for n, p in state.model.named_parameters() if not torch.equal(p, before[n])]
    assert moved == trainable
    assert len(state.trainable_parameters) == len(trainable)


def test_an_adapters_additions_can_be_frozen_by_their_names(compose):
    spec = compose(*MLP, "adapter=lora", "train.freeze=[layers.0]")
    names = [n for n, p in begin(spec).model.named_parameters() if p.requires_grad]
    assert names
    assert not [name for name in names if name.startswith("layers.0")]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("[layer.0]", "train.freeze: layer.0 matches no parameter of the model. Nearest names: l"),
        ("['*']", "train.freeze=[*] leaves nothing to train: it freezes all 6 parameters of the"),
        ("[0]", "train.freeze=[0] does not fit. Allowed: names, as in [blocks,head]."),
        ("[[1]]", "does not fit. Allowed: names, as in [blocks,head]."),
        ("layers", "train.freeze=layers does not fit. Allowed: a list, as in [a,b]."),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(compose, patterns, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        begin(compose(*MLP, f"train.freeze={patterns}"))


def test_the_run_says_how_much_is_frozen_and_resumes_with_the_same_patterns(quick, tmp_path):
    done = quick("train.freeze=[layers]")
    assert done.rc == 0, done.stderr
    assert "frozen: 2 of 4 parameters, 0.0 MiB" in done.stdout
    assert "170 of 1,210 parameters train" in done.stdout
    resume = (f"checkpoint.resume={finished_run(tmp_path)}", "train.max_steps=4")
    refused = quick(*resume, "train.freeze=[head]")
    assert refused.rc == 2
    assert "Leave train.freeze out" in refused.stderr
    assert quick(*resume).rc == 0


def test_an_evaluation_of_a_frozen_models_checkpoint_needs_no_pattern(compose):
    spec = compose(*MLP, "train.freeze=[layers]")
    state = train(begin(spec))
    plain = compose(*MLP)
    found = restore_model(plain, state.precision, save(state, spec), CPU).model
    assert torch.equal(found.head.weight, state.model.head.weight)
