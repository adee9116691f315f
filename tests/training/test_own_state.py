"""What a model changes by itself: skipped steps leave no trace, checkpoints hold it or say so."""

import copy
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from states import follow_own_state, make_state, regression_batch
from torch import nn

from runner.core.base.errors import ConfigError
from runner.core.loop.step import train_step
from runner.core.record.checkpoint_file import LoadedCheckpoint
from runner.precision.weight_updates import UPDATE_RULES, WideForward
from runner.training.model import load_weights
from runner.training.own_state import OWN_BUFFERS_KEY, SkippedSteps
from runner.training.weight_average import WeightAverage


@dataclass
class Memory:
    rows: list = field(default_factory=list)


class Changing(nn.Module):
    """Changes buffers in place and by another one, a teacher through `data`, and attributes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        nn.init.constant_(self.teacher.weight, 0.5)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("late", torch.zeros(2), persistent=False)
        self.register_buffer("queue", None, persistent=False)
        self.hidden, self.table = torch.zeros(2), None
        self.count, self.memory, self.is_begun = 0, Memory(), False

    def forward(self, x):
        y = self.norm(self.student(x))
        with torch.no_grad():
            for slow, fast in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                slow.data.mul_(0.9).add_(fast + y.mean(), alpha=0.1)
            # Another tensor in the place of each.
            self.mean = 0.9 * self.mean + 0.1 * y.mean(0).float()
            self.hidden = 0.5 * self.hidden + y.mean(0).float()
            self.table = torch.arange(3)
            if self.count:
                self.queue = y[:2].float()
            if self.count:
                self.late += y.mean(0)
            self.count += 1
            self.is_begun = True
            self.memory.rows.append(float(y.mean()))
        return y


def own_values(model):
    return [*model.state_dict().values(), model.late, model.hidden]


@pytest.mark.parametrize("order", [("bad", 1, "bad", 2), (1, "bad", 2), (1, 2, "bad")])
@pytest.mark.parametrize("is_first_noted", [False, True])
def test_a_step_that_the_loss_scale_skips_leaves_what_the_forward_changes(order, is_first_noted):
    values = []
    for batches in (order, [seed for seed in order if seed != "bad"]):
        scale = {"fixed": 1024.0}
        state = make_state(Changing(), "16-mixed", loss_scale=scale)
        average = WeightAverage(state.model, [state.optimizers[0].params], 0.9)
        state.hooks.add(average)
        state.model.count = 1
        own_state = follow_own_state(state)
        for i, seed in enumerate(batches):
            inputs, targets = regression_batch(4, 7 if seed == "bad" else seed)
            inputs = inputs * (1e30 if seed == "bad" else 1)
            # Of two micro-batches the first is a good one.
            train_step(state, [regression_batch(4, 9), (inputs, targets)])
            if i == 0 and is_first_noted:
                own_state.end_first_step()
        values.append([*own_values(state.model), *average.tensors()])
    for after_skip, without in zip(*values, strict=True):
        assert torch.equal(after_skip, without)


def after_first_step(model, precision, **options):
    """Return a state after its first step, and what follows the model's own changes."""
    state = make_state(model, precision, **options)
    own_state = follow_own_state(state)
    train_step(state, [regression_batch(4)])
    own_state.end_first_step()
    return state, own_state


def test_a_checkpoint_holds_the_buffers_that_change_and_names_the_attributes():
    state, own_state = after_first_step(Changing(), "32-true")
    assert own_state.changed_buffers() == {}
    train_step(state, [regression_batch(4)])
    assert {*own_state.changed_buffers()} == {"late", "queue"}
    # Not the table, which is the same after each step.
    assert own_state.unsaved_attributes() == ["hidden", "count", "memory", "is_begun"]


class Makes(nn.Module):
    """Makes what was None, changes a shape, empties, or works in inference mode."""

    def __init__(self, kind, place):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kind = nn.Linear(3, 2), kind
        start = None if kind == "none" else torch.zeros(1, 2)
        if place == "buffer":
            self.register_buffer("held", start)
        else:
            self.held = start

    def forward(self, x):
        y = self.linear(x)
        with torch.inference_mode(self.kind == "inference"), torch.no_grad():
            new = y.clone().mean(0, keepdim=True)
            if self.kind == "grows":
                self.held = torch.cat([self.held, new])
            elif self.kind == "empties":
                self.held = None if self.held is not None else new
            else:
                self.held = new if self.held is None else 0.5 * self.held + new
        return y


@pytest.mark.parametrize("order", [("bad", 1, 2), (1, "bad", 2)])
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *((kind, "attribute") for kind in ("none", "grows", "inference")),
        *((kind, "buffer") for kind in ("none", "grows", "inference", "empties")),
    ],
)
def test_a_skipped_step_undoes_what_was_made_or_changed_its_shape(kind, place, order):
    held = []
    for batches in (order, [seed for seed in order if seed != "bad"]):
        state = make_state(Makes(kind, place), "16-mixed", loss_scale={"fixed": 1024.0})
        own_state = follow_own_state(state)
        for i, seed in enumerate(batches):
            inputs, targets = regression_batch(4, 7 if seed == "bad" else seed)
            train_step(state, [(inputs * (1e30 if seed == "bad" else 1), targets)])
            if i == 0:
                own_state.end_first_step()
        held.append(state.model.held)
    assert (held[0] is None) == (held[1] is None)
    assert held[0] is None or torch.equal(*held)


class Carries(nn.Module):
    """Keeps a hidden state with its graph, a loss to look at, a table and weights that are derived,
    and saves one of two further states in another structure."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.linear = nn.utils.weight_norm(nn.Linear(3, 2))
        self.hidden, self.loss, self.table = None, None, torch.arange(3)
        self.saved, self.slow = {}, {}

    def forward(self, x):
        y = self.linear(x)
        for kept, factor in ((self.saved, 1), (self.slow, 2)):
            before = kept.get(self.training, (0.0,))[0]
            kept[self.training] = (before + factor * y.detach().mean(),)
        if self.hidden is not None:
            y = y + 0.1 * self.hidden.detach() + 0 * self.table.sum()
        self.hidden, self.loss = y.mean(), y.sum()
        return y

    def get_extra_state(self):
        return {"saved": {str(key): [*value] for key, value in self.saved.items()}}


class Lookahead(torch.optim.SGD):
    """Keeps slow weights in an attribute, and saves a count in its state dict."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.slow, self.count = None, 0.5

    def step(self, closure=None):
        every = [p.detach() for group in self.param_groups for p in group["params"]]
        self.slow = self.slow or [torch.zeros_like(p) for p in every]
        torch._foreach_lerp_(self.slow, every, 0.5)
        self.count += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}


def test_attributes_are_named_that_carry_values_from_step_to_step_and_are_not_saved():
    state, own_state = after_first_step(Carries(), "32-true", optimizer=Lookahead)
    with own_state.watched_reads():
        train_step(state, [regression_batch(4)])
    with torch.no_grad():  # an evaluation derives plain weights
        state.model(regression_batch(4)[0])
    assert own_state.unsaved_attributes() == ["hidden", "slow", "Lookahead.slow"]


class Wraps(torch.optim.SGD):
    """Steps by an optimizer in an attribute, and saves its state, as timm's Lookahead."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.AdamW(self.param_groups)

    def step(self, closure=None):
        return self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()


class Shows(nn.Linear):
    """Keeps what it computed in a step in an attribute."""

    def forward(self, x):
        y = super().forward(x)
        self.shown = y.detach().mean()
        return y


def test_what_a_step_makes_anew_or_an_optimizer_saves_is_not_named():
    state, own_state = after_first_step(Shows(3, 2), "16-mixed", optimizer=Wraps)
    with own_state.watched_reads():
        train_step(state, [regression_batch(4)])
    train_step(state, [regression_batch(4)])
    assert own_state.unsaved_attributes() == []


class Clamps(nn.Module):
    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.write = nn.Linear(3, 2), write

    def forward(self, x):
        with torch.no_grad():
            self.write(self.linear.weight)
        return self.linear(x)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.clamp_(-0.1, 0.1),
        lambda weight: weight.data.clamp_(-0.1, 0.1),
        lambda weight: weight.copy_(weight.clamp(-0.1, 0.1)),
    ],
)
@pytest.mark.parametrize("name", ["bf16-true", "16-true"])
def test_weights_that_a_forward_writes_stay_so_beside_their_float32_copies(name, write):
    moved = []
    for rule in ("master_weights", "kahan"):
        state = make_state(Clamps(write), name, update=rule)
        own_state = follow_own_state(state)
        for step in range(12):
            train_step(state, [regression_batch(4, step)])
            if step == 0:
                own_state.end_first_step()
        moved.append(state.model.linear.weight.detach().float())
    # An update of the last step is on top.
    assert torch.allclose(*moved, atol=2e-3)
    assert float(moved[0].abs().max()) < 0.3


class Followed(nn.Module):
    """A teacher that follows by a moving average, a counter, and a mean that is copied into."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)
        nn.init.constant_(self.teacher.weight, 0.5)
        self.register_buffer("tokens", torch.zeros(4))
        self.register_buffer("copied", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            self.teacher.weight.mul_(0.998).add_(self.student.weight, alpha=0.002)
            torch._foreach_add_([self.tokens[:2]], 1.0)
            self.copied.copy_(self.copied * 1.001)
        return self.student(x)


@pytest.mark.parametrize("name", ["bf16-true", "16-true"])
@pytest.mark.parametrize("rule", [*UPDATE_RULES])
def test_what_a_forward_writes_in_16_bits_follows_the_update_rule(name, rule):
    if (name, rule) == ("16-true", "remainders"):
        pytest.skip("remainders are those of bfloat16")
    torch.manual_seed(0)
    state = make_state(
        Followed(), name, update=rule, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
    )
    model, student = state.model, state.model.student.weight.detach().float()
    own_state = follow_own_state(state)
    for step in range(600):
        train_step(state, [regression_batch(4)])
        if step == 0:
            own_state.end_first_step()
    counted = model.tokens.float().tolist()
    warning = own_state.end_second_step("")
    named = [word in warning for word in ("copied", "teacher", "tokens")]
    if rule == "nearest":
        assert counted == [256 if name == "bf16-true" else 600] * 2 + [0, 0]
        assert named == [True, True, True]
        assert "keep_fp32=[tokens,copied,teacher]" in warning
        return
    left = (model.teacher.weight.float() - student).abs().mean() / (0.5 - student).abs().mean()
    assert float(left) == pytest.approx(0.998**600, abs=0.02)
    assert counted[0] == pytest.approx(600, abs=40 if rule == "stochastic_rounding" else 2)
    # What is computed in 16 bits before it is copied is not mended.
    assert named == [True, False, False]
    assert "keep_fp32=[copied]" in warning


def test_saved_buffers_are_loaded_or_do_not_fit():
    saved, loaded = Changing(), Changing()
    train_step(make_state(saved, "32-true"), [regression_batch(4)])
    saved.queue = torch.ones(3)
    content = {"model": saved.state_dict(), "layout": "", "spec": {}}
    content[OWN_BUFFERS_KEY] = {"late": torch.full((2,), 7.0), "queue": saved.queue}
    load_weights(loaded, LoadedCheckpoint(Path("a.pt"), content))
    assert torch.equal(loaded.late, torch.full((2,), 7.0))
    assert torch.equal(loaded.queue, torch.ones(3))
    content[OWN_BUFFERS_KEY] = {"part.gone": saved.queue}
    with pytest.raises(ConfigError, match="does not fit the model"):
        load_weights(loaded, LoadedCheckpoint(Path("a.pt"), content))


@pytest.mark.parametrize("kind", ["none", "grows"])
def test_a_checkpoint_is_loaded_whose_buffer_a_forward_has_made_or_given_another_shape(kind):
    state = make_state(Makes(kind, "buffer"), "32-true")
    own_state = follow_own_state(state)
    train_step(state, [regression_batch(4)])
    held, model = own_state.changed_buffers(), Makes(kind, "buffer")
    assert {*held} == {"held"}
    content = {"model": state.model.state_dict(), "layout": "", "spec": {}, OWN_BUFFERS_KEY: held}
    load_weights(model, LoadedCheckpoint(Path("a.pt"), content))
    assert torch.equal(model.held, state.model.held)


class Late(nn.Module):
    """Reaches a batch norm after its first step."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.count = nn.Linear(3, 2), nn.BatchNorm1d(3), 0

    def forward(self, x):
        self.count += 1
        return self.linear(self.norm(x) if self.count > 1 else x)


def test_a_batch_norm_that_a_later_step_reaches_is_followed_too():
    state, _ = after_first_step(Late(), "16-mixed", loss_scale={"fixed": 1024.0})
    inputs, targets = regression_batch(4)
    train_step(state, [(inputs * float("inf"), targets)])
    assert torch.equal(state.model.norm.running_mean, torch.zeros(3))
    # Afterwards nothing else is copied in a step.
    assert state.hooks.find(SkippedSteps)._trusts_versions


def test_batch_norm_beside_another_tensor_is_advised_what_mends_both():
    model = nn.Sequential(Followed(), nn.BatchNorm1d(2))
    _, own_state = after_first_step(model, "bf16-true")
    warning = own_state.end_second_step("precision.update=kahan, or ")
    assert "precision.update" not in warning
    assert "keep_fp32=[0.tokens,0.copied,0.teacher,1]" in warning


class Shares(nn.Linear):
    """Has an empty buffer, and two in one storage, and changes an empty and a sparse tensor."""

    def __init__(self):
        super().__init__(3, 2)
        both = torch.zeros(8, dtype=torch.bfloat16)
        self.register_buffer("empty", both[:0].clone())
        self.register_buffer("upper", both[:4])
        self.register_buffer("lower", both[4:])

    def forward(self, x):
        torch.zeros(0).add_(1)
        torch.eye(2).to_sparse().mul_(2)
        self.upper += 1
        self.lower += 2
        return super().forward(x)


def test_buffers_without_a_storage_of_their_own_are_written_as_ever():
    model = Shares()
    with WideForward(model, "kahan"):
        model(torch.ones(1, 3))
    assert (float(model.upper.sum()), float(model.lower.sum())) == (4, 8)


def test_stochastic_rounding_of_a_forward_is_the_runs_own():
    values = []
    for seed in (1, 2):  # as of two processes, whose weights are equal
        torch.manual_seed(0)
        state = make_state(Followed(), "bf16-true", update="stochastic_rounding")
        torch.manual_seed(seed)
        drawn = torch.get_rng_state()
        for _ in range(5):
            train_step(state, [regression_batch(4)])
        assert torch.equal(torch.get_rng_state(), drawn)
        values.append(state.model.teacher.weight)
    assert torch.equal(*values)
