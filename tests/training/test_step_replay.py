import pytest
import torch
from bit_flips import Net
from states import make_state

from runner.config.schema import GuardSpec, NumericsSpec, RunSpec
from runner.training.step import train_step
from runner.training.step_replay import (
    CorruptedStep,
    StepReplay,
    check_replay,
    check_replay_optimizer,
    repeat_step,
)
from runner.training.tasks.classification import Classification
from runner.utils.errors import ConfigError
from runner.utils.reproducibility import seed_all

STEPS = 4


def batch(step):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(16, 64, generator=generator)
    return images, torch.randint(10, (16,), generator=generator)


def trained(take_step, precision="32-true", micros=1, faults=None, **options):
    """Return the state after STEPS steps."""
    seed_all(0)
    model = Net(**(faults or {}))
    state = make_state(model, precision, task=Classification(), **options)
    state.model.train()
    for step in range(1, STEPS + 1):
        take_step(state, [batch(step * 10 + i) for i in range(micros)])
    return state


def bits(state):
    """Everything of a state that a step changes, as bytes by name."""
    tensors = dict(state.model.state_dict())
    tensors |= {f"optimizer {i}": t for i, t in enumerate(state.optimizer_tensors())}
    for layer, values in state.precision.state_dict(state.model).items():
        tensors |= {f"{layer} {name}": value for name, value in values.items()}
    tensors["generator"] = torch.get_rng_state()
    found = {name: t.detach().contiguous().numpy(force=True) for name, t in float_safe(tensors)}
    found = {name: array.tobytes() for name, array in found.items()}
    return found | {"scale": str(state.scale.state_dict()), "forwards": str(state.model.forwards)}


def float_safe(tensors):
    """Yield the tensors by name; NumPy has no bfloat16."""
    for name, tensor in tensors.items():
        yield name, tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("32-true", {}),
        ("16-mixed", {}),
        ("bf16-mixed", {}),
        ("bf16-true", {"update": "stochastic_rounding"}),
        ("transformer-engine", {"emulate": True}),
        ("transformer-engine-nvfp4", {"emulate": True}),
        ("float8-tensorwise", {"emulate": True}),
    ],
)
@pytest.mark.parametrize("every", [1, 3])
def test_a_step_that_is_computed_twice_leaves_the_bits_of_one(precision, options, every):
    def adam(params):
        return torch.optim.AdamW(params, lr=0.01)

    options = {**options, "optimizer": adam}
    expected = bits(trained(train_step, precision, micros=2, **options))
    assert bits(trained(StepReplay(every).train_step, precision, micros=2, **options)) == expected


def test_every_nth_step_is_computed_twice():
    records = []

    def take_step(state, micros):
        records.append(StepReplay(2).train_step(state, micros))

    state = trained(take_step)
    assert [record.replay_ms is not None for record in records] == [False, True, False, True]
    assert state.model.body[3].computations == [STEPS + 2]


# Of a Flip, step 2 is the computations 2 and 3, and a further one is the fourth.
@pytest.mark.parametrize(
    ("faults", "place", "agreeing"),
    [
        ({"flip_forward": [2]}, "the output of body.3", 2),
        ({"flip_forward": [3]}, "the output of body.3", 1),
        ({"flip_backward": [2]}, "the gradient of the input of body.3", 2),
        ({"flip_backward": [3]}, "the gradient of the input of body.3", 1),
        ({"flip_forward": [2], "flip_backward": [4]}, "the output of body.3", None),
    ],
)
def test_a_fault_is_named_and_refuses_the_step(faults, place, agreeing):
    state = make_state(Net(**faults), task=Classification())
    state.epoch = 1
    state.position = 1  # after the micro-batches of the first step are taken
    replay = StepReplay(2)
    replay.train_step(state, [batch(1)])
    before = bits(state)
    state.position = 2
    with pytest.raises(CorruptedStep) as caught:
        replay.train_step(state, [batch(2)])
    mismatch = caught.value.mismatch
    assert (mismatch.step, mismatch.loss_scale) == (2, None)
    assert (mismatch.place, mismatch.agreeing) == (place, agreeing)
    assert mismatch.description == f"step 2 was computed twice, and {place} differs"
    assert ("transient fault" in mismatch.conclusion) == (agreeing is not None)
    assert bits(state) == before
    assert (state.step, state.position, state.epoch) == (1, 1, 1)
    assert all(p.grad is None for p in state.model.parameters())


def test_an_epochs_first_step_that_is_refused_begins_the_epoch_again():
    state = make_state(Net(flip_forward=[1]), task=Classification())
    state.epoch, state.position = 3, 2
    with pytest.raises(CorruptedStep):
        StepReplay(1).train_step(state, [batch(1), batch(2)])
    assert (state.epoch, state.position, state.step) == (2, 0, 0)


@pytest.mark.parametrize(
    ("precision", "options"), [("32-true", {}), ("transformer-engine", {"emulate": True})]
)
def test_after_a_warning_the_step_has_the_bits_of_one_without_the_fault(precision, options):
    mismatches = []
    healthy = bits(trained(train_step, precision, **options))
    replay = StepReplay(2, warn=mismatches.append)
    state = trained(replay.train_step, precision, faults={"flip_backward": [3]}, **options)
    assert bits(state) == healthy
    assert [mismatch.step for mismatch in mismatches] == [2]


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        ({}, "The step has the same bits in 5 computations on this device."),
        ({"flip_backward": [3]}, "computations 1 and 3 on this device: the gradient of the input"),
    ],
)
def test_a_saved_step_can_be_repeated(faults, text):
    seed_all(0)
    state = make_state(Net(**faults), task=Classification())
    before = bits(state)
    assert text in repeat_step(state, [batch(1)])
    assert bits(state) == before


@pytest.mark.parametrize("faults", [{"flip_forward": [0]}, {"flip_backward": [0]}])
def test_what_differs_from_other_machines_in_every_computation_is_no_transient_fault(faults):
    trained(StepReplay(1).train_step, faults=faults)


def test_without_hooks_the_loss_and_the_gradients_are_compared():
    names = {name for name, _ in Net().named_modules()}
    for faults, place in (
        ({"flip_forward": [1]}, "the loss"),
        ({"flip_backward": [1]}, "the gradient of body.2.bias"),
    ):
        with pytest.raises(CorruptedStep) as caught:
            trained(StepReplay(1, names).train_step, faults=faults)
        assert caught.value.mismatch.place == place


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"deterministic": False}, ["guard.replay_every=2", "Type deterministic=true"]),
        ({"numerics": NumericsSpec(every=5)}, ["numerics.every=5", "as null"]),
    ],
)
def test_what_makes_computations_differ_is_refused(changes, parts):
    spec = RunSpec(**{"guard": GuardSpec(replay_every=2), "deterministic": True} | changes)
    with pytest.raises(ConfigError) as caught:
        check_replay(spec)
    for part in parts:
        assert part in str(caught.value)


def test_an_optimizer_that_takes_a_closure_is_refused():
    def lbfgs(params):
        return torch.optim.LBFGS(params)

    state = make_state(Net(), optimizer=lbfgs)
    check_replay_optimizer(RunSpec(), state)
    with pytest.raises(ConfigError, match="optimizer=lbfgs updates weights between"):
        check_replay_optimizer(RunSpec(guard=GuardSpec(replay_every=2)), state)
