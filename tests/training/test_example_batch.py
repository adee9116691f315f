"""Batches of random numbers that mode=plan rehearses a step with."""

import pytest
import torch
from states import CPU

from runner.core.loop.batch_layout import KeywordInputs
from runner.core.loop.model_call import call_model
from runner.training.example_batch import ForecastUnavailable, example_batch

HF = ("model=hf", "model.config={model_type: bert}")


def made(compose, *overrides, **meta):
    spec = compose("data=npz", "data.path=absent.npz", *overrides)
    spec.data["meta"] = {"input": [12], "classes": 4, **meta}
    return example_batch(spec, 3, CPU)


def test_a_seq2seq_batch_has_the_fields_that_the_model_takes(compose):
    inputs, target = made(compose, *HF, "model.kind=seq2seq_lm")
    assert isinstance(inputs, KeywordInputs)
    assert list(inputs) == ["input_ids", "labels"]
    assert target.shape == (3, 12)
    assert target.dtype is torch.int64
    named = ("task.inputs=[tokens,mask]", "task.target=answer")
    inputs, _ = made(compose, *HF, "model.kind=seq2seq_lm", *named)
    assert list(inputs) == ["tokens", "mask", "answer"]


def test_a_classifier_of_text_gets_tokens(compose):
    inputs, target = made(compose, *HF, "model.kind=sequence_classification")
    assert (inputs.dtype, inputs.shape, target.shape) == (torch.int64, (3, 12), (3,))
    own = torch.nn.Sequential(torch.nn.Embedding(2, 4), torch.nn.Flatten())
    inputs, _ = made(compose, "model=mlp", "task=classification", dtype="int64")
    assert call_model(own, inputs).shape == (3, 48)


def test_a_batch_of_pixels_has_a_class_for_each(compose):
    inputs, target = made(compose, "task=segmentation", input=[3, 4, 5])
    assert (inputs.shape, target.shape) == ((3, 3, 4, 5), (3, 4, 5))


def test_a_dtype_that_is_none_is_one_message(compose):
    with pytest.raises(ForecastUnavailable, match=r"data\.meta\.dtype=int46 is no dtype"):
        made(compose, "task=classification", dtype="int46")
