"""optimizer.state_dtype and precision.update from the command line: exact resume, what is said of
a change, the plan, refusals."""

import pytest
import torch
from run_folders import job_results
from typed_runs import TypedRuns

BF16 = "optimizer.state_dtype=bfloat16"
RULE = "optimizer.lr=1e-4 precision=bf16-true precision.update"
STEPS, HALF = 6, 3


@pytest.fixture
def runs(main, tmp_path):
    """Tiny runs without tracking."""
    words = "model=mlp model.hidden=[16] train.log_every=2 tracking=none"
    return TypedRuns(main, tmp_path, f"{words} train.max_steps={HALF}")


def states(run):
    """Return the states of all optimizers of a run's last checkpoint."""
    return [optimizer["state"] for optimizer in run.content()["optimizers"]]


def moment_dtypes(state):
    keys = ("exp_avg", "exp_avg_sq", "momentum_buffer")
    return {values[key].dtype for values in state.values() for key in keys if key in values}


def test_one_optimizer_of_several_keeps_its_state_in_bfloat16(runs):
    run = runs.train("optimizer=muon optimizer.rest.state_dtype=bfloat16")
    assert [moment_dtypes(state) for state in states(run)] == [{torch.float32}, {torch.bfloat16}]


@pytest.mark.parametrize(
    ("before", "after", "cast", "kept"),
    [
        ("", BF16, "from float32 to bfloat16", torch.bfloat16),
        (BF16, "optimizer.state_dtype=null", "from bfloat16 to float32", torch.float32),
        (
            "precision=bf16-true precision.update=master_weights",
            "precision=bf16-true precision.update=nearest",
            "from float32 to bfloat16",
            torch.bfloat16,
        ),
        ("precision=bf16-true", f"precision=32-true {BF16}", "", torch.bfloat16),
    ],
)
def test_a_changed_dtype_on_resume_is_said(runs, before, after, cast, kept):
    runs.train(before)
    resumed = runs.resume(f"train.max_steps={STEPS} {after}")
    assert (f"the optimizer's state is cast {cast}" in resumed.stdout) == bool(cast)
    assert ("is cast" in resumed.stdout) == bool(cast)
    (state,) = states(resumed)
    assert moment_dtypes(state) == {kept}


def test_a_changed_rule_is_named_and_begins_anew(runs):
    runs.train(f"{RULE}=kahan")
    rule = "precision=bf16-true precision.update=master_weights"
    resumed = runs.resume(f"train.max_steps={STEPS} {rule}")
    assert "the checkpoint's compensations are dropped" in resumed.stdout
    (state,) = states(resumed)
    assert {*state[0]} == {"step", "exp_avg", "exp_avg_sq", "master_weight"}
    assert state[0]["master_weight"].dtype is torch.float32


def test_no_update_is_counted_as_lost_with_a_rule(runs):
    for rule, is_counted in (("nearest", True), ("kahan", False)):
        metrics = runs.train(f"{RULE}={rule}", rule).folder / "metrics.jsonl"
        assert ("guard/stagnant_share" in metrics.read_text()) == is_counted


@pytest.mark.parametrize(
    ("typed", "plain", "ratio"),
    [
        (BF16, "", 0.5),
        # Two float32 moments and two bytes more; two bfloat16 moments.
        (f"{RULE}=remainders", f"{RULE}=nearest", 2.5),
    ],
)
def test_a_plan_counts_the_bytes_of_the_state(runs, typed, plain, ratio):
    def state_mib(words):
        done = runs(f"mode=plan model.hidden=[4096] hydra.run.dir=plan {words}").check_ok()
        (line,) = [line for line in done.stdout.splitlines() if "optimizer state" in line]
        return float(line.split("│")[2].split()[0])

    assert state_mib(typed) == pytest.approx(state_mib(plain) * ratio, rel=0.05)


def test_an_average_that_bfloat16_freezes_is_warned_of(runs):
    said = runs.train(BF16).stdout
    assert "keeps its state in bfloat16" in said
    assert "with betas[1]=0.999 a step takes less from a running average" in said
    assert "as DeepSeek-V3's betas=[0.9,0.95], or optimizer.state_dtype=null." in said
    assert "warning" not in runs.train(f"{BF16} optimizer.betas=[0.9,0.95]").stdout


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        (
            "optimizer.state_dtype=float16",
            ["optimizer.state_dtype=float16 is not known", "Allowed: float32, bfloat16, or null"],
        ),
        ("optimizer.state_dtype=[1]", ["optimizer.state_dtype=[1] is not known"]),
        (f"optimizer=adamw8bit {BF16}", ["AdamW8bit keeps its state in a format of its own"]),
        (f"optimizer=lbfgs {BF16}", ["LBFGS moves its weights by itself"]),
        (f"precision=64-true {BF16}", ["weights in float64", "or type precision=32-true"]),
        (f"precision=64-true mode=plan {BF16}", ["weights in float64"]),
        (f"optimizer=muon {BF16}", ["belongs to one of matrices, rest"]),
        (f"{RULE}=kahn", ["Allowed: nearest, master_weights"]),
        ("precision=32-true precision.update=kahan", ["precision.update=kahan is not known"]),
    ],
)
def test_what_cannot_work_is_one_message(runs, typed, parts):
    message = runs.fail(typed)
    assert [part for part in parts if part not in message] == []
    assert message.count("error: ") == 1


def test_a_sweep_compares_dtypes(runs, tmp_path):
    runs("-m hydra/launcher=basic optimizer.state_dtype=null,bfloat16").check_ok()
    wide, narrow = (job["optimizer_mib"] for job in job_results(tmp_path))
    assert narrow == pytest.approx(wide / 2, rel=0.01)


def test_a_precision_without_the_key_runs_in_a_sweep_of_rules(runs, tmp_path):
    typed = "precision=32-true,bf16-true precision.update=kahan"
    runs(f"-m hydra/launcher=basic {typed}").check_ok()
    jobs = [(job["precision"], job["status"]) for job in job_results(tmp_path)]
    assert jobs == [("32-true", "finished"), ("bf16-true", "finished")]


OWN = """
import torch


class Own(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3{parameter}):
        super().__init__(params, lr=lr)
        {body}
"""


@pytest.mark.parametrize("is_its_own", [True, False])
def test_an_optimizer_of_ones_own(runs, tmp_path, monkeypatch, is_its_own):
    """A class with a parameter of that name gets the value; any other is kept in the dtype."""
    parameter, body = (", state_dtype=None", "self.defaults['given'] = state_dtype")
    if not is_its_own:
        parameter, body = "", "pass"
    name = f"own_{is_its_own}".lower()
    (tmp_path / f"{name}.py").write_text(OWN.format(parameter=parameter, body=body))
    monkeypatch.syspath_prepend(tmp_path)
    run = runs.train(f"~optimizer +optimizer._target_={name}.Own +{BF16}")
    (state,) = states(run)
    assert moment_dtypes(state) == {torch.float32 if is_its_own else torch.bfloat16}
