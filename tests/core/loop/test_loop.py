import random
import signal
from functools import partial
from itertools import chain, islice
from time import perf_counter, sleep

import numpy as np
import pytest
import torch
from states import CPU, decaying_sgd, make_state
from torch import nn
from torch.utils.data import TensorDataset

from runner.core.base.random_streams import seed_all
from runner.core.base.stop_signals import Stopped
from runner.core.config.schema import TrainSpec
from runner.core.loop.step import train_step
from runner.core.loop.step_records import EvalRecord, HostTransfer
from runner.core.loop.train_state import ScheduledOptimizer
from runner.core.loop.training_loop import (
    LoopHooks,
    Stagnation,
    accumulation_batches,
    evaluate,
    fit,
    total_steps,
)
from runner.data.loader import Loader
from runner.precision import registry
from runner.training.tasks.classification import Classification


def data(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (count,), generator=generator))


def loader(count=10, size=4, *, shuffle=True, seed=0):
    return Loader(data(count), size, shuffle=shuffle, seed=seed, device=CPU)


def small_state(name="32-true", lr=0.1, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return make_state(model, name, task=Classification(), optimizer=decaying_sgd(lr), **options)


def run(state=None, batches=None, should_stop=lambda: False, flush_every=None, **train):
    """All records of a fit, and the shape of its course: lengths of blocks, E for evaluations."""
    parts = (state or small_state(), batches or loader(), loader(5), TrainSpec(**train))
    records = list(fit(*parts, LoopHooks(flush_every, should_stop)))
    course = ["E" if isinstance(r, EvalRecord) else len(r) for r in records]
    return records, course


def steps(records):
    return [s for r in records if not isinstance(r, EvalRecord) for s in r]


def evaluations(records):
    return [r for r in records if isinstance(r, EvalRecord)]


# Lengths and boundaries


@pytest.mark.parametrize(
    ("count", "size", "accumulate", "per_epoch"),
    [(10, 4, 1, 3), (10, 4, 2, 2), (8, 4, 2, 1), (10, 4, 5, 1), (4, 8, 1, 1)],
)
def test_lengths(count, size, accumulate, per_epoch):
    batches = loader(count, size)
    epochs = TrainSpec(epochs=3, accumulate=accumulate)
    assert total_steps(epochs, batches) == 3 * per_epoch
    assert total_steps(TrainSpec(epochs=3, max_steps=7, accumulate=accumulate), batches) == 7
    records, _ = run(batches=batches, epochs=3, accumulate=accumulate)
    assert len(steps(records)) == 3 * per_epoch
    sizes = [s.examples for s in steps(records)]
    assert sum(sizes) == 3 * count


@pytest.mark.parametrize("log_every", [1, 2, 4, 100])
def test_every_step_comes_once_in_order_with_true_numbers(log_every):
    records, _ = run(epochs=3, log_every=log_every)
    found = steps(records)
    assert [s.step for s in found] == list(range(1, 10))
    assert [s.epoch for s in found] == [1] * 3 + [2] * 3 + [3] * 3
    assert [s.examples for s in found] == [4, 4, 2] * 3
    assert [s.lr for s in found] == pytest.approx([0.1 * 0.9**i for i in range(9)])
    assert all(s.step_ms > 0 for s in found)
    assert [(e.step, e.epoch) for e in evaluations(records)] == [(3, 1), (6, 2), (9, 3)]
    wanted = steps(run(epochs=3, log_every=1)[0])  # the numbers do not depend on the blocks
    assert [(s.loss, s.grad_norm) for s in found] == [(s.loss, s.grad_norm) for s in wanted]


@pytest.mark.parametrize(
    ("options", "course"),
    [
        ({"epochs": 2}, [3, "E", 3, "E"]),
        ({"epochs": 2, "log_every": 2}, [2, 1, "E", 1, 2, "E"]),
        ({"max_steps": 5}, [3, "E", 2, "E"]),
        ({"max_steps": 5, "eval_every": 2}, [2, "E", 2, "E", 1, "E"]),
        ({"max_steps": 4, "eval_every": 2}, [2, "E", 2, "E"]),
        ({"max_steps": 2, "eval_every": 100}, [2, "E"]),
        ({"max_steps": 7, "eval_every": 100, "log_every": 3}, [3, 3, 1, "E"]),
        ({"epochs": 2, "accumulate": 2}, [2, "E", 2, "E"]),
        ({"max_steps": 1}, [1, "E"]),
        # Blocks end for checkpoints as well.
        ({"max_steps": 7, "eval_every": 9, "flush_every": 3}, [3, 3, 1, "E"]),
        ({"max_steps": 7, "eval_every": 9, "log_every": 2, "flush_every": 3}, [2, 1, 1, 2, 1, "E"]),
    ],
)
def test_blocks_end_and_evaluations_fall_where_the_spec_says(options, course):
    assert run(**options)[1] == course


def test_a_block_ends_at_the_states_step():
    state = small_state()
    for record in fit(state, loader(), loader(5), TrainSpec(epochs=2, log_every=2)):
        last = record.step if isinstance(record, EvalRecord) else record[-1].step
        assert last == state.step


def test_a_stop_ends_after_a_last_block():
    state = small_state()
    records, course = run(state, epochs=5, log_every=100, should_stop=lambda: state.step == 5)
    assert course == [3, "E", 2]
    assert steps(records)[-1].step == 5


def test_a_stop_ends_an_evaluation_as_if_it_had_not_begun(monkeypatch):
    """Between its batches; what it has drawn at random is put back for the resumed run."""
    state, batches = small_state(), loader(5)

    def drawing(epoch):
        for batch in Loader.epoch(batches, epoch):
            torch.rand(1)
            yield batch

    monkeypatch.setattr(batches, "epoch", drawing)
    asked = []

    def stopped():
        asked.append(torch.get_rng_state())
        return len(asked) > 4  # three steps, and the first batch of the evaluation

    spec = TrainSpec(epochs=5, log_every=2)
    records = list(fit(state, loader(), batches, spec, LoopHooks(should_stop=stopped)))
    assert [len(block) for block in records] == [2, 1]
    assert (state.step, state.last_evaluation_step) == (3, 0)
    assert torch.equal(torch.get_rng_state(), asked[2])


def test_an_interrupted_wait_for_a_batch_ends_after_a_last_block():
    """The state is that of the step before."""
    state, batches = small_state(), loader()

    def interrupted(epoch, start=0):
        yield from islice(Loader.epoch(batches, epoch, start), 2)
        raise Stopped(signal.SIGTERM)

    batches.epoch = interrupted
    _, course = run(state, batches, epochs=5, log_every=100)
    assert course == [2]
    assert (state.step, state.position) == (2, 8)


def test_a_loop_that_its_caller_breaks_leaves_a_usable_state():
    state = small_state()
    for _ in fit(state, loader(), loader(5), TrainSpec(epochs=5, log_every=2)):
        break
    assert state.step == 2
    train_step(state, [next(loader().epoch(1))])


def test_each_step_runs_in_the_context_of_its_number():
    class Context:
        def __init__(self, step):
            self.step = step

        def __enter__(self):
            seen.append((self.step, state.step))

        def __exit__(self, *_):
            seen.append(state.step)

    seen, state, hooks = [], small_state(), LoopHooks(step_context=Context)
    list(fit(state, loader(), loader(5), TrainSpec(max_steps=2), hooks))
    assert seen == [(1, 0), 1, (2, 1), 2]
    seen.clear()
    list(fit(state, loader(), loader(5), TrainSpec(max_steps=3), hooks))
    assert seen == [(3, 2), 3]  # true numbers: a run may have been resumed


def test_time_spent_in_an_evaluation_is_no_steps_time(monkeypatch):
    from runner.core import step_records, training_loop
    from runner.core.loop import step as step_module

    now = [0.0]

    def clock():
        now[0] += 0.001
        return now[0]

    def slow(split, state, validation, should_stop, hook):
        now[0] += 100.0
        return {}

    monkeypatch.setattr(training_loop, "perf_counter", clock)
    monkeypatch.setattr(step_records, "perf_counter", clock)
    monkeypatch.setattr(step_module, "perf_counter", clock)
    monkeypatch.setattr(training_loop, "evaluate_sets", slow)
    assert all(s.step_ms < 100 for s in steps(run(epochs=3)[0]))


@pytest.mark.parametrize("is_late", [False, True], ids=["blocks at once", "blocks later"])
def test_skipped_steps_are_counted_through_the_run(monkeypatch, is_late):
    if is_late:
        monkeypatch.setattr("runner.core.loop.step_records.HostTransfer.is_ready", False)
    state = small_state("16-mixed", loss_scale={"init_scale": 2.0**24, "growth_interval": 3})
    records, _ = run(state, max_steps=24, log_every=5)
    found = steps(records)
    assert (found[0].loss_scale, found[0].overflow) == (2.0**24, 1.0)
    total = 0
    for s in found:
        total += s.overflow
        assert s.skipped_steps == total
    assert 1 < total < 24
    assert state.skipped == total
    assert state.optimizers[0].scheduler.last_epoch == 24 - total


# Order of the data


def orders(seed, state=None, epochs=3):
    """First inputs of each micro-batch of a run."""
    batches = Loader(data(10), 4, shuffle=True, seed=seed, device=CPU)
    stream = accumulation_batches(state or small_state(), batches, 2)
    return [[x.sum().item() for x, _ in next(stream)[0]] for _ in range(2 * epochs)]


def test_the_order_depends_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    first = orders(0)
    torch.manual_seed(2)
    torch.randn(100)
    assert orders(0) == first
    assert orders(1) != first
    by_epoch = [first[0], first[2], first[4]]
    assert len({tuple(x) for x in by_epoch}) == 3
    resumed = small_state()
    resumed.epoch = 1
    assert orders(0, resumed, epochs=2) == first[2:]


# Evaluation


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_a_partial_batch_weighs_what_it_should(size):
    state = small_state()
    dataset = data(7, seed=3)
    metrics = evaluate(state, Loader(dataset, size, shuffle=False, seed=0, device=CPU))
    inputs, target = dataset.tensors
    with torch.no_grad():
        output = state.model.eval()(inputs)
    loss = nn.functional.cross_entropy(output, target).item()
    assert metrics["val/loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["val/accuracy"] == (output.argmax(1) == target).double().mean().item()


# Blocks of NVFP4 have 16 weights, more than this model's layers have inputs.
RUNNING = [row.name for row in registry.supported_precisions(CPU) if row.runs]
EVALUATED = [name for name in RUNNING if not name.endswith("nvfp4")]


@pytest.mark.parametrize("name", EVALUATED)
def test_an_evaluation_changes_nothing(name):
    state = small_state(name, **({"group_size": 4} if name.endswith("int4") else {}))
    state.model.train()
    before = {k: v.clone() for k, v in state.model.state_dict().items()}
    stream = torch.get_rng_state()
    first, second = (evaluate(state, loader(7, shuffle=False)) for _ in range(2))
    assert first == second
    after = state.model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(m.training for m in state.model.modules())
    assert all(p.grad is None for p in state.model.parameters())
    assert torch.equal(stream, torch.get_rng_state())
    assert torch.is_grad_enabled()


def test_an_evaluation_is_in_the_runs_precision():
    dtypes = {"16-mixed": torch.float16, "bf16-true": torch.bfloat16, "64-true": torch.float64}
    for name, dtype in dtypes.items():
        state, seen = small_state(name), []
        state.model[3].register_forward_hook(lambda m, a, out, seen=seen: seen.append(out))
        evaluate(state, loader(3))
        assert [(out.dtype, out.requires_grad) for out in seen] == [(dtype, False)]


def test_an_evaluation_settles_the_schedule():
    state = small_state("16-mixed", loss_scale={"init_scale": 8.0})
    train_step(state, [next(loader().epoch(1))])
    assert state.optimizers[0].scheduler.last_epoch == 0
    evaluate(state, loader(3))
    assert state.optimizers[0].scheduler.last_epoch == 1
    state.optimizers[0].advance_schedule()
    assert state.optimizers[0].scheduler.last_epoch == 1


class Noisy(nn.Linear):
    """Draws from every generator of the host, and from one of its own, in evaluation, too."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.own = torch.Generator().manual_seed(1)

    def forward(self, x):
        noise = torch.randn_like(x) + random.random() + float(np.random.rand())
        noise += torch.randn(x.shape, generator=self.own)
        return super().forward(x + noise)


@pytest.mark.parametrize("every", [1, 2, 6])
def test_noise_is_the_same_in_each_evaluation_and_the_trainings_goes_on(every):
    def course(lr, every):
        seed_all(0)
        optimizer = partial(torch.optim.SGD, lr=lr)
        state = make_state(Noisy(4, 3), task=Classification(), optimizer=optimizer)
        records, _ = run(state, max_steps=6, eval_every=every)
        losses = [record.metrics["val/loss"] for record in evaluations(records)]
        return [record.loss for record in steps(records)], losses

    trained, _ = course(0.1, every)
    seed_all(0)
    model = Noisy(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader()
    by_hand = []
    for inputs, target in islice(chain(batches.epoch(1), batches.epoch(2)), 6):
        loss = nn.functional.cross_entropy(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        by_hand.append(loss.item())
    assert trained == by_hand
    _, fixed = course(0.0, every)
    assert len(fixed) == 6 // every
    assert len({*fixed, *course(0.0, 6)[1]}) == 1


# Stagnation


@pytest.mark.parametrize(("lr", "low", "high"), [(1e-9, 0.99, 1.0), (0.1, 0.0, 0.05)])
@pytest.mark.parametrize("name", ["bf16-true", "16-true"])
def test_the_share_of_elements_that_did_not_move(name, lr, low, high):
    state = small_state(name)
    weights = [p for n, p in state.model.named_parameters() if n.startswith(("0.w", "3."))]
    state.optimizers = [ScheduledOptimizer(torch.optim.Adam(weights, lr=lr, eps=1e-4))]
    records, _ = run(state, epochs=2)
    for record in evaluations(records):
        assert record.stagnant_share is not None
        assert low <= record.stagnant_share <= high


@pytest.mark.parametrize("name", ["64-true", "32-true", "16-mixed", "bf16-mixed"])
def test_unchanged_elements_are_counted_in_half_precision_only(name):
    assert {r.stagnant_share for r in evaluations(run(small_state(name), epochs=1)[0])} == {None}


def test_only_elements_with_a_gradient_count():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    state = small_state("bf16-true")
    state.optimizers = [ScheduledOptimizer(optimizer)]
    watch = Stagnation(state)
    # 1 - 1e-4 rounds to 1 in bfloat16; the last element has no gradient at all.
    (weight * torch.tensor([1e-4, 1e-4, 0.5, 0.0], dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert watch.stagnant_share() == pytest.approx(2 / 3)
    assert not weight._post_accumulate_grad_hooks


@pytest.mark.parametrize(
    ("lr", "full", "share"),
    [
        (1e-9, {"initial_lr": 2e-9}, 1.0),
        (1e-9, {"initial_lr": 1e-8}, None),
        (1e-9, {"max_lr": 1e-8, "initial_lr": 1e-9}, None),
        (0.0, {}, None),
    ],
)
def test_a_rate_that_the_schedule_has_lowered_is_no_fault_of_the_format(lr, full, share):
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    state = small_state("bf16-true")
    state.optimizers = [ScheduledOptimizer(torch.optim.SGD([{"params": [weight], **full}], lr=lr))]
    watch = Stagnation(state)
    weight.sum().backward()
    assert watch.stagnant_share() == share


@pytest.mark.parametrize(("lr", "low", "high"), [(1e-9, 0.8, 1.0), (0.1, 0.0, 0.2)])
def test_weights_are_counted_before_a_schedule_ends(lr, low, high):
    """A run with one evaluation, at its end, whose last steps have a rate of nearly 0."""
    state = small_state("bf16-true")
    optimizer = torch.optim.Adam(state.model.parameters(), lr=lr, eps=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
    state.optimizers = [ScheduledOptimizer(optimizer, schedule)]
    (record,) = evaluations(run(state, max_steps=9, eval_every=9)[0])
    assert low <= record.stagnant_share <= high


def test_float32_islands_do_not_count():
    state = small_state("bf16-true", lr=1e-9, keep_fp32=["0", "1", "3"])
    assert evaluations(run(state, epochs=1)[0])[0].stagnant_share is None


def test_a_stop_leaves_no_hook():
    state = small_state("bf16-true")
    run(state, max_steps=5, eval_every=1, should_stop=lambda: True)
    assert not any(p._post_accumulate_grad_hooks for p in state.trainable_parameters)


def test_a_block_is_yielded_once_the_next_one_is_sent(monkeypatch):
    """As on a device that computes while the host continues; evaluations and the end wait."""
    _, wanted = run(max_steps=9, log_every=2, eval_every=5)
    exact = steps(run(max_steps=9, log_every=2, eval_every=5)[0])
    monkeypatch.setattr("runner.core.loop.step_records.HostTransfer.is_ready", False)
    seen = []
    state = small_state("16-mixed")
    spec = TrainSpec(max_steps=9, log_every=2, eval_every=5)
    for record in fit(state, loader(), loader(5), spec, LoopHooks(flush_every=8)):
        last = "E" if isinstance(record, EvalRecord) else record[-1].step
        seen.append((last, state.step))
    assert seen == [(2, 4), (4, 5), (5, 5), ("E", 5), (6, 8), (8, 8), (9, 9), ("E", 9)]
    records, course = run(max_steps=9, log_every=2, eval_every=5)
    assert course == wanted
    assert [s.loss for s in steps(records)] == [s.loss for s in exact]


class Late(HostTransfer):
    """Of a device that is done long after the host has asked it for everything."""

    here, SECONDS = False, 0.05

    def wait(self):
        sleep(self.SECONDS)
        return super().wait()


def test_waiting_for_the_device_is_a_part_of_the_steps(monkeypatch):
    monkeypatch.setattr("runner.core.loop.step_records.HostTransfer", Late)
    started = perf_counter()
    records, _ = run(max_steps=4, log_every=2, eval_every=2)
    seconds = perf_counter() - started
    counted = sum(s.step_ms for s in steps(records)) / 1e3
    assert 2 * Late.SECONDS < counted < seconds


class BreaksAt(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.calls_left = call

    def forward(self, x):
        self.calls_left -= self.training
        if self.calls_left == 0:
            raise ValueError("broken")
        return x


@pytest.mark.parametrize("call", [2, 5, 6])
def test_what_was_computed_before_an_exception_is_recorded(call, monkeypatch):
    monkeypatch.setattr("runner.core.loop.step_records.HostTransfer.is_ready", False)
    state, seen = small_state(), []
    state.model = nn.Sequential(state.model, BreaksAt(call))
    records = fit(state, loader(40), loader(5), TrainSpec(max_steps=9, log_every=2))
    with pytest.raises(ValueError, match="broken"):
        seen.extend(record for block in records for record in block)
    assert [record.step for record in seen] == [*range(1, call)]
