"""Configs that nobody means well: each ends with a message or a run, never with a traceback, a hang
or anything outside the run's folder."""

from pathlib import Path

import pytest
from hostile import cases, ended_well
from hypothesis import given
from hypothesis import strategies as st
from tiers import counts

pytestmark = pytest.mark.slow

QUICK = (
    "model=mlp model.hidden=[4] train.max_steps=1 train.log_every=1 tracking=none "
    "checkpoint.final=false accelerator=cpu"
).split()
KEYS = """
mode seed deterministic batch +nosuch debug debug.overfit experiment init.weights
train.max_steps train.batch_size train.accumulate train.clip_norm train.clip_value
train.compile_rounding train.freeze train.ema train.eval_every train.log_every train.early_stop
+train.nosuch guard.spike_factor guard.data
data data.shuffle data.val_fraction data.meta.classes data.meta.input
checkpoint checkpoint.keep checkpoint.every_steps checkpoint.resume
model model.hidden model.classes +model.nosuch task adapter scheduler scheduler.warmup
optimizer.lr optimizer.betas optimizer.eps optimizer.weight_decay optimizer.groups
optimizer.no_decay_on optimizer.layer_decay optimizer.state_dtype
precision precision.keep_fp32 precision.name accelerator.index accelerator.name hydra/launcher
""".split()
WORDS = r"""
null nan inf -inf -1 0 1e308 1e-320 99999999999999999999 true [] {} [[1]] {a:1} [nan] 'x' '<script>'
../../x /dev/null ${nowhere} ${oc.env:NOT_SET_ANYWHERE} ${oc.env:HOME} ${seed} ${.x}
${oc.decode:'['} ??? = , 😀 \ ' "
""".split()
OTHERS = ("", "a b", "'\x1b[31m'", "'\n'", "\u202e", f"'{5000 * 'y'}'", 50 * "[" + 50 * "]")
ODD = (*WORDS, *OTHERS)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ANY = st.one_of(st.sampled_from(ODD), st.integers().map(str), st.floats().map(str), TEXTS)


TARGETS = (
    "os.system subprocess.run builtins.eval builtins.exec builtins.print os.getcwd torch.nn.Linear "
    "torch.nn antigravity no.such os . a..b torch.nn."
).split()


@pytest.fixture(scope="module")
def main(inside, tmp_path_factory):
    with inside(tmp_path_factory.mktemp("hostile")) as run:
        yield run


def folder_is_clean():
    return [path.name for path in Path.cwd().iterdir()] in ([], ["outputs"])


@counts(10, 35)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 4)], ids=["one key", "several"])
def test_any_value_of_any_key(main, sizes, count):
    @cases(count)
    @given(st.lists(st.tuples(st.sampled_from(KEYS), ANY), min_size=sizes[0], max_size=sizes[1]))
    def check(overrides):
        ended_well(main(*QUICK, *(f"{key}={value}" for key, value in overrides)))
        assert folder_is_clean()

    check()


@counts(4, 12)
def test_a_target_that_is_none(main, count):
    """A typed target is called, because it is one's own; an error in it is reported."""
    groups = ("model", "data", "task", "optimizer", "scheduler", "precision")

    @cases(count)
    @given(st.sampled_from(groups), st.sampled_from([*TARGETS, ""]))
    def check(group, target):
        done = main(*QUICK, f"{group}._target_={target}")
        ended_well(done)
        assert done.rc
        assert folder_is_clean()

    check()


def test_bytes_that_are_no_text(main):
    done = main(*QUICK, "tracking.run_name=a\udcffb").check_refused()
    assert done.stderr == "error: tracking.run_name=a\\udcffb is not valid UTF-8.\n"
