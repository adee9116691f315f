"""The predicted peak against the allocator's, and what moves it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compared_models import extended
from states import CPU

from bench.memory_plan import measure_peak as measured
from runner.core.base.tensor_facts import stored_bytes
from runner.core.config.targets import build_group
from runner.core.run.run_context import TrainingSetup
from runner.diagnostics.memory import limits
from runner.diagnostics.memory.forecast import (
    MAX_FORECAST_BATCH_SIZE,
    build_rehearsal,
    failed_step_forecast,
    find_experts,
    largest_fitting_batch,
    peak_forecast,
)
from runner.precision.layers.experts import Experts
from runner.training.example_batch import ForecastUnavailable, example_batch
from runner.training.model import ModelBuilder
from runner.training.setup import build_state

MIB = 2**20
TEXT = "model=gpt data=text model.layers=1"
MLP = "model=mlp model.hidden=[2048]"


NO_FAKES = "runner.diagnostics.memory.forecast._replace_by_fakes"
"""Where this function cannot be called, steps on fake tensors fail."""


@pytest.fixture
def of(compose):
    """The spec of words, with its precision."""

    def compose_words(words):
        spec = compose("accelerator=cpu", *words.split())
        return spec, build_group("precision", spec.precision)

    return compose_words


def predict_peak(spec, precision, size=None):
    return peak_forecast(spec, precision, CPU).peak(size or spec.train.batch_size)


def largest_batch(spec, precision, room):
    return largest_fitting_batch(
        peak_forecast(spec, precision, CPU).peak, spec.train.batch_size, room
    )


@pytest.mark.parametrize(
    ("words", "size", "within"),
    [
        ("model=mlp data=digits", 256, 0.01),
        ("model=resnet data=digits precision=bf16-mixed", 8, 0.01),
        extended("model=mlp model.hidden=[1024] precision=64-true", 64, 0.01),
        (f"{TEXT} precision=bf16-true", 4, 0.01),
        (f"{TEXT} precision=16-mixed precision.loss_scale.init_scale=64", 4, 0.01),
        (f"{TEXT} precision=bnb-int8-training", 4, 0.01),
        (f"{TEXT} precision=bnb-nf4 adapter=lora", 4, 0.1),
        (f"{TEXT} optimizer=adamw8bit", 4, 0.05),
        (f"{TEXT} train.activation_checkpointing=true", 4, 0.05),
    ],
)
def test_the_allocator_holds_what_was_predicted(of, words, size, within):
    # Few examples to evaluate: their number is without influence on the peak.
    spec, precision = of(f"{words} train.batch_size={size} data.val_fraction=0.02")
    spec = replace(spec, train=replace(spec.train, max_steps=2, eval_every=2))
    predicted = predict_peak(spec, precision).total
    assert predicted == pytest.approx(measured(spec, precision, CPU), rel=within)


def test_twice_the_batch_has_twice_the_activations_and_the_same_weights(of):
    once, twice = (predict_peak(*of(TEXT), size) for size in (8, 16))
    assert twice.activations == pytest.approx(2 * once.activations, rel=0.01)
    assert (twice.weights, twice.optimizer) == (once.weights, once.optimizer)


def test_activation_checkpointing_holds_less(of):
    words = "model=gpt data=text model.layers=2"
    whole = predict_peak(*of(words), 16)
    again = predict_peak(*of(f"{words} train.activation_checkpointing=true"), 16)
    assert again.activations < 0.5 * whole.activations
    assert again.total < 0.7 * whole.total


def test_micro_batches_add_gradients_and_inputs_alone(of):
    once = predict_peak(*of(TEXT), 8)
    several = predict_peak(*of(f"{TEXT} train.accumulate=4"), 8)
    inputs = 3 * 8 * (128 + 1) * 8
    assert several.gradients >= once.weights - once.gradients
    assert several.activations == pytest.approx(once.activations + inputs, rel=1e-3)


def test_frozen_parameters_have_neither_gradients_nor_state(of):
    """LoRA on the text model: a few of its parameters train, by more than one at the peak."""
    whole, few = (predict_peak(*of(TEXT + more), 1) for more in ("", " adapter=lora"))
    assert few.gradients + few.optimizer < 0.2 * whole.optimizer
    assert few.weights > whole.weights


def test_magnitudes_and_kept_starts_of_an_adapter_are_counted(of):
    """In float32: DoRA's magnitudes train, and what PiSSA started with is kept frozen."""
    words = f"{TEXT} adapter=lora adapter.modules=[head] model.tie_weights=false"
    lora, dora, pissa = (
        predict_peak(*of(words + more), 1)
        for more in ("", " adapter.use_dora=true", " adapter.init=pissa")
    )
    model = of(TEXT)[0].model
    magnitudes = 4 * model["vocab_size"]
    additions = 4 * 8 * (model["width"] + model["vocab_size"])
    assert dora.weights - lora.weights == magnitudes
    assert dora.optimizer - lora.optimizer == pytest.approx(2 * magnitudes, abs=16)
    assert pissa.weights - lora.weights == additions
    assert pissa.optimizer == lora.optimizer


@pytest.mark.parametrize(("momentum", "states"), [(0.0, 0), (0.9, 1)])
def test_the_state_is_the_optimizers_own(of, momentum, states):
    peak = predict_peak(*of(f"model=mlp optimizer=sgd optimizer.momentum={momentum}"), 64)
    assert peak.optimizer == states * peak.weights


@pytest.mark.parametrize("size", [extended(1), 100])
def test_steps_of_few_examples_extrapolate_to_many(of, monkeypatch, size):
    """The same as fake tensors of that size: of a step that they do not refuse."""
    spec, precision = of(TEXT)
    exact = predict_peak(spec, precision, size)
    monkeypatch.setattr(NO_FAKES, None)
    real = peak_forecast(spec, precision, CPU).peak(size)
    assert real.total == pytest.approx(exact.total, rel=1e-3)
    assert real.activations == pytest.approx(exact.activations, rel=0.02)


@pytest.mark.parametrize("fake", [True, False])
def test_a_failed_step_is_forecast_from_the_runs_own_batch_and_state(of, monkeypatch, fake):
    spec, precision = of(f"{TEXT} train.batch_size=16")
    exact = predict_peak(*of(f"{TEXT} train.batch_size=8 train.accumulate=2"))
    model = ModelBuilder(spec, precision).build(CPU).model
    setup = TrainingSetup(spec, precision, build_group("task", spec.task), CPU)
    state = build_state(setup, model, total_steps=1)
    if not fake:
        monkeypatch.setattr(NO_FAKES, None)
    forecast = failed_step_forecast(spec, state, example_batch(spec, 3, CPU))
    assert bool(forecast.fallback) is not fake
    assert forecast.peak(8).total == pytest.approx(exact.total, rel=1e-3)


def test_the_largest_batch_fits_and_the_next_does_not(of):
    spec, precision = of(MLP)
    room = 20 * MIB
    size = largest_batch(spec, precision, room) or 0
    assert predict_peak(spec, precision, size).total <= room
    assert predict_peak(spec, precision, 2 * size).total > room


def test_the_users_own_batch_size_is_among_them(of):
    spec, precision = of(f"{MLP} train.batch_size=24")
    room = predict_peak(spec, precision).total
    assert largest_batch(spec, precision, room) == 24
    assert largest_batch(spec, precision, room - 1) == 16


@pytest.mark.parametrize(
    ("words", "room", "size"),
    [(MLP, MIB, None), ("model=mlp model.hidden=[4]", 1e12, MAX_FORECAST_BATCH_SIZE)],
)
def test_there_is_a_smallest_and_a_largest_size_that_is_tried(of, words, room, size):
    assert largest_batch(*of(words), room) == size


def test_a_size_that_the_model_refuses_does_not_fit():
    """As batch normalisation of a single example."""

    def peak(size):
        raise ValueError("Expected more than 1 value per channel when training")

    assert largest_fitting_batch(peak, 64, 1e12) is None


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({}, "data.meta.input and data.meta.classes"),
        ({"input": [1, 8, 8]}, "without data.meta.classes"),
        ({"input": [1, 9, 9], "classes": 10}, "does not run on random inputs"),
    ],
)
def test_a_forecast_that_cannot_be_made_says_why(of, meta, said):
    spec, precision = of("model=mlp")
    with pytest.raises(ForecastUnavailable, match=said):
        predict_peak(replace(spec, data={**spec.data, "meta": meta}), precision)


def test_an_operator_without_a_rule_for_fake_tensors_writes_no_traceback(of, capfd):
    spec, precision = of("model=mixture model.width=16 model.hidden=16 data=text")
    assert peak_forecast(spec, precision, CPU).fallback.startswith("RuntimeError: Expected mat_a")
    assert capfd.readouterr().err == ""


def test_experts_of_a_module_of_ones_own_are_known(of):
    mixture = "~model +model._target_=nets.Mixes +model.in_turns=true data=digits"
    spec, precision = of(f"{mixture} precision=bnb-nf4 adapter=lora adapter.modules=[head]")
    plan = find_experts(spec, precision, CPU)
    assert plan.expert_layouts == {"body.3.first": True, "body.3.second": False}
    model = ModelBuilder(spec, precision).build(CPU, plan).model
    assert isinstance(model.body[3], Experts)

    def batches(size):
        return [example_batch(spec, size, CPU)]

    last = build_rehearsal(spec, precision, CPU, plan, batches, fake=False).timeline(8)[-1]
    assert last.weights == stored_bytes(model)
    # Few examples leave experts without a token, and more of them are tried.
    assert predict_peak(spec, precision, 8).total >= last.total


def test_an_optimizer_that_keeps_more_with_every_step_is_not_predicted(of):
    with pytest.raises(ForecastUnavailable, match="history_size"):
        predict_peak(*of("model=mlp optimizer=lbfgs"))


def test_no_real_step_where_there_is_no_room_for_it(of, monkeypatch):
    monkeypatch.setattr("runner.diagnostics.memory.forecast.free_memory", lambda device: 200 * MIB)
    with pytest.raises(ForecastUnavailable, match=r"about 0\.2 of the 0\.2 GiB"):  # 171 of 160 MiB
        predict_peak(*of("model=resnet data=digits optimizer=adamw8bit"))
    predict_peak(*of("model=resnet data=digits optimizer=adamw"))


def test_it_draws_no_memory(of):
    """A model of 1.6 GB in float32, and its batch of 1024, on fake tensors."""
    spec, precision = of("model=mlp model.hidden=[20000,20000] train.batch_size=1024")
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        peak = predict_peak(spec, precision)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
    assert peak.weights > 1600 * MIB * 0.9
    assert allocated < MIB


@pytest.mark.parametrize(
    ("taken", "whole", "available", "free"), [(3, 10, 100, 7), (3, 10, 5, 5), (12, 10, 100, 0)]
)
def test_free_is_what_limits_and_other_processes_leave(monkeypatch, taken, whole, available, free):
    monkeypatch.setattr(limits, "memory_limit", lambda device: (taken, whole))
    memory = SimpleNamespace(available=available)
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: memory)
    assert limits.free_memory(CPU) == free
