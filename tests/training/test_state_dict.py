"""What comes back when a run is resumed with something else than it was trained with."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves
from training_states import MLP, begin, resume_halfway, save, train

from runner.core.base.errors import ConfigError
from runner.core.record.checkpoint_file import LoadedCheckpoint
from runner.training import state_dict
from runner.training.own_state import OwnUpdates

PRECISIONS = ("64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
OPTIMIZERS = {
    "sgd": ("optimizer=sgd",),
    "adam": ("optimizer=adamw", "optimizer._target_=torch.optim.Adam", "optimizer.eps=1e-4"),
    "adamw": ("optimizer=adamw", "optimizer.eps=1e-4"),
    "rmsprop": ("optimizer=rmsprop", "optimizer.eps=1e-3"),
    "muon": ("optimizer=muon", "optimizer.rest.eps=1e-4"),
    "adam8bit": ("optimizer=adam8bit",),
    "adamw4bit": ("optimizer=adamw4bit",),
    "lbfgs": ("optimizer=lbfgs",),
}
EVERYWHERE = [
    *("adamw", "muon"),
    *(pytest.param(name, marks=pytest.mark.extended) for name in ("sgd", "adam", "rmsprop")),
]


def dtypes_in(value):
    """Dtypes of a state, in nested containers."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if isinstance(value, dict):
        return {key: dtypes_in(item) for key, item in value.items()}
    return [dtypes_in(item) for item in value] if isinstance(value, list) else None


def dtypes(state):
    return [dtypes_in(d.optimizer.state_dict()["state"]) for d in state.optimizers]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_continues_bit_by_bit(name, compose):
    typed = ("scheduler=cosine", "precision=bf16-true")
    resume_halfway(compose(*MLP, *OPTIMIZERS[name], *typed), 3, 5)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_another_precision_takes_the_state_as_a_fresh_optimizer_would_keep_it(name, compose):
    chosen = compose(*MLP, *OPTIMIZERS[name])
    specs = {p: replace(chosen, precision=compose(f"precision={p}").precision) for p in PRECISIONS}
    states = {p: train(begin(spec), 2) for p, spec in specs.items()}
    for before, after in permutations(PRECISIONS, 2):
        source, spec = save(states[before], specs[before]), specs[after]
        state = begin(spec, source)
        notes = state_dict.restore(state, source, spec, ())
        assert dtypes(state) == dtypes(states[after]), (before, after)
        stored = [states[p].precision.storage_format for p in (before, after)]
        cast = "the optimizer's state is cast from {} to {}".format(*stored)
        assert (cast in notes) == (stored[0] != stored[1]), (before, after, notes)
        assert any("loss scale" in text for text in notes) == ("16-mixed" in (before, after))
        train(state)
        assert dtypes(state) == dtypes(states[after])


@pytest.mark.parametrize("name", ["adam8bit", "adamw4bit"])
def test_state_that_is_wide_or_packed_on_purpose_stays_so(name, compose):
    names = ("32-true", "bf16-true")
    specs = {p: compose(*MLP, *OPTIMIZERS[name], f"precision={p}") for p in names}
    states = {p: train(begin(spec)) for p, spec in specs.items()}
    for before, after in permutations(names, 2):
        source = save(states[before], specs[before])
        state = begin(specs[after], source)
        state_dict.restore(state, source, specs[after], ())
        assert dtypes(state) == dtypes(states[after]), (before, after)
        train(state)


def test_lists_of_state_are_cast_too(compose):
    """Those of LBFGS; torch casts them, and its own tensors in the same state follow."""
    state, notes = resumed(compose, ("optimizer=lbfgs",), ("precision=64-true",))
    assert notes == ["the optimizer's state is cast from float32 to float64"]
    found = {d for d in tree_leaves(dtypes(state)) if d}
    assert found == {"torch.float64"}
    train(state)


def test_values_survive_the_cast(compose):
    specs = [compose(*MLP, *OPTIMIZERS["adamw"], f"precision={p}") for p in ("32-true", "64-true")]
    source = save(train(begin(specs[0])), specs[0])
    state = begin(specs[1], source)
    state_dict.restore(state, source, specs[1], ())
    theirs = source.content["optimizers"][0]["state"]
    ours = state.optimizers[0].optimizer.state_dict()["state"]
    for index, values in theirs.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours[index][key], values[key].double())


def resumed(compose, before, after):
    """(state, notes) of a run of two steps that continues with other overrides."""
    spec = compose(*MLP, *before)
    source = save(train(begin(spec), 2), spec)
    spec = compose(*MLP, *before, *after)
    state = begin(spec, source)
    return state, state_dict.restore(state, source, spec, ())


SCALED = ("precision=16-mixed",)
INIT = "precision.loss_scale.init_scale"
HUGE = (*SCALED, f"{INIT}=1e30")


@pytest.mark.parametrize(
    ("before", "after", "scale", "note"),
    [
        (SCALED, (f"{INIT}=1024",), 1024, "begins at 1024, as typed; it was 65536"),
        (HUGE, (), 2.5e29, ""),
        (SCALED, ("precision.loss_scale.fixed=8",), 8, "is fixed at 8; it was 65536"),
        (("precision=32-true",), SCALED, 65536, "begins at 65536: the checkpoint holds none"),
        (SCALED, ("precision=bf16-mixed",), None, "65536.0 is dropped: precision=bf16-mixed"),
    ],
)
def test_a_note_says_which_loss_scale_a_resume_takes(before, after, scale, note, compose):
    state, lines = resumed(compose, before, after)
    assert (state.scale.state_dict() or {"scale": None})["scale"] == pytest.approx(scale)
    assert note in " ".join(lines)
    assert bool(lines) == bool(note)


def rates(state):
    return [group["lr"] for d in state.optimizers for group in d.optimizer.param_groups]


def test_another_schedule_begins_at_the_step_of_the_run(compose):
    pairs = [("constant", "cosine"), ("onecycle", "linear"), ("linear", "onecycle")]
    for before, after in pairs:
        spec = compose(*MLP, f"scheduler={after}")
        wanted = train(begin(spec), 3)
        state, notes = resumed(compose, (f"scheduler={before}",), (f"scheduler={after}",))
        train(state)
        assert rates(state) == pytest.approx(rates(wanted)), (before, after)
        assert len(notes) == 1


def test_a_typed_rate_is_taken_by_schedules_and_by_each_of_several_optimizers(compose):
    state, _ = resumed(compose, ("optimizer=muon",), ("optimizer.matrices.lr=0.002",))
    assert rates(state) == [0.002, 0.001]
    state, _ = resumed(compose, ("optimizer.lr=1",), ("optimizer.lr=0.5",))
    assert rates(state) == [0.5]
    state, _ = resumed(compose, ("scheduler=linear",), ("scheduler.end_factor=0.5",))
    train(state, 30)
    assert rates(state) == [pytest.approx(0.0005, rel=0.2)]


class Counting(torch.optim.SGD):
    """Counts in its groups, as D-Adaptation and schedule-free optimizers do."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.defaults["k"] = self.param_groups[0]["k"] = 0

    def step(self, closure=None):
        self.param_groups[0]["k"] += 1
        return super().step(closure)


def test_what_an_optimizer_counts_in_its_groups_continues_at_another_length(compose):
    spec = compose(*MLP, "scheduler=cosine")
    spec = replace(spec, optimizer={"_target_": f"{__name__}.Counting", "lr": 0.1})
    source = save(train(begin(spec), 2), spec)
    longer = replace(spec, optimizer={**spec.optimizer, "lr": 0.2})
    state = begin(longer, source, steps=40)
    state_dict.restore(state, source, longer, ())
    (group,) = state.optimizers[0].optimizer.param_groups
    assert (group["k"], group["initial_lr"]) == (2, 0.2)
    assert rates(state) == rates(train(begin(longer, steps=40), 2))


def test_what_a_rule_kept_beside_the_models_own_tensors_is_read_by_no_other(compose):
    own = torch.ones(2, dtype=torch.int16)
    for rule, other in permutations(("remainders", "kahan", "nearest"), 2):
        specs = [
            compose(*MLP, "precision=bf16-true", f"precision.update={name}")
            for name in (rule, other)
        ]
        source = save(train(begin(specs[0])), specs[0])
        source.content["own_updates"] = {"x": own}
        for after in specs:
            state = begin(after, source)
            notes = state_dict.restore(state, source, after, ())
            is_same = after is specs[0]
            assert any("beside tensors that the model changes" in n for n in notes) != is_same
            updates = state.hooks.find(OwnUpdates)
            if updates is not None:
                assert bool(updates.rule_state) == is_same


def test_state_of_another_model_is_refused_in_one_message(compose):
    spec = compose(*MLP)
    source = save(train(begin(spec)), spec)
    other = compose(*MLP, "model.hidden=[4]")
    with pytest.raises(ConfigError, match=r"its optimizer state does not fit.*init\.weights"):
        state_dict.restore(begin(other), source, other, ())


@pytest.mark.parametrize(
    ("counted", "reads"),
    [
        ({"position": 3}, ((24, 8),)),  # in micro-batches
        ({"position": 30, "reads": [[24, 8], [6, 2]]}, ((24, 8), (6, 2))),
        ({"reads": [[24, 0]]}, None),
        ({"reads": [[2**60, 1]]}, None),
    ],
)
def test_where_a_run_was_in_its_data_is_read_in_examples(counted, reads):
    content = {"spec": {"train": {"batch_size": 8}}, "step": 3, "epoch": 1, **counted}
    saved = LoadedCheckpoint(Path("x.pt"), content)
    if reads is None:
        with pytest.raises(ConfigError, match=r"was not written by this runner"):
            state_dict.starting_point(saved)
    else:
        assert state_dict.starting_point(saved) == (3, 1, reads)


@pytest.mark.parametrize("rule", ["nearest", "kahan", "stochastic_rounding"])
def test_updates_that_were_rounded_away_are_no_finding_of_a_rule_that_keeps_them(compose, rule):
    pair = ("nearest", rule)
    specs = [compose(*MLP, "precision=bf16-true", f"precision.update={r}") for r in pair]
    before = train(begin(specs[0]))
    before.stagnant_share = 0.75
    source = save(before, specs[0])
    state = begin(specs[1], source)
    state_dict.restore(state, source, specs[1], ())
    assert state.stagnant_share == (0.75 if rule == "nearest" else None)
