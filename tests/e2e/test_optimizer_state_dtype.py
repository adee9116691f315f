"""optimizer.state_dtype from the command line: exact resume, a changed dtype, plan, refusals."""

import json

import pytest
import torch

BF16 = "optimizer.state_dtype=bfloat16"
CASES = {
    "32-true": ["precision=32-true", BF16],
    "bf16-mixed": ["precision=bf16-mixed", "optimizer.betas=[0.9,0.95]", BF16],
    "16-mixed": ["precision=16-mixed", BF16],
    "remainders": ["precision=bf16-true", "precision.update=remainders", BF16],
    "muon": ["optimizer=muon", "optimizer.rest.state_dtype=bfloat16"],
}


def final_state(folder):
    """Weights and the states of all optimizers of a run's last checkpoint."""
    path = max(folder.glob("checkpoints/*.pt"))
    content = torch.load(path, weights_only=True)
    return content["model"], [optimizer["state"] for optimizer in content["optimizers"]]


def moment_dtypes(state):
    keys = ("exp_avg", "exp_avg_sq", "momentum_buffer")
    return {values[key].dtype for values in state.values() for key in keys if key in values}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_ends_as_one_that_was_not_stopped(quick, main, tmp_path, name):
    typed = CASES[name]
    assert quick(*typed, "train.max_steps=6", "hydra.run.dir=whole").rc == 0
    done = quick(*typed, "train.max_steps=3", "hydra.run.dir=part")
    assert done.rc == 0, done.stderr
    assert "keeps its state in bfloat16" in " ".join(done.stdout.split())
    done = main("checkpoint.resume=part", "train.max_steps=6")
    assert done.rc == 0, done.stderr
    assert "is cast" not in done.stdout
    (weights, states), (others, resumed) = map(final_state, (tmp_path / "whole", tmp_path / "part"))
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    assert moment_dtypes(states[-1]) == {torch.bfloat16}
    if name == "muon":
        assert moment_dtypes(states[0]) == {torch.float32}
    for state, other in zip(states, resumed, strict=True):
        for index, values in state.items():
            for key, value in values.items():
                assert other[index][key].dtype is value.dtype
                assert torch.equal(other[index][key], value)


@pytest.mark.parametrize(
    ("before", "after", "cast", "kept"),
    [
        ([], [BF16], "from float32 to bfloat16", torch.bfloat16),
        ([BF16], ["optimizer.state_dtype=null"], "from bfloat16 to float32", torch.float32),
        (
            ["precision=bf16-true", "precision.update=master_weights"],
            ["precision=bf16-true", "precision.update=nearest"],
            "from float32 to bfloat16",
            torch.bfloat16,
        ),
        (["precision=bf16-true"], ["precision=32-true", BF16], "", torch.bfloat16),
    ],
)
def test_a_change_on_resume_is_said(quick, main, tmp_path, before, after, cast, kept):
    assert quick(*before, "train.max_steps=3", "hydra.run.dir=part").rc == 0
    done = main("checkpoint.resume=part", "train.max_steps=6", *after)
    assert done.rc == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert (f"the optimizer's state is cast {cast}" in words) == bool(cast)
    assert ("is cast" in words) == bool(cast)
    _, (state,) = final_state(tmp_path / "part")
    assert moment_dtypes(state) == {kept}


def test_the_table_and_the_plan_count_its_bytes(quick, tmp_path):
    def plan(*typed):
        done = quick("mode=plan", "model.hidden=[256]", "hydra.run.dir=plan", *typed)
        assert done.rc == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if "optimizer state" in line]
        return float(line.split("│")[2].split()[0])

    assert plan(BF16) == pytest.approx(plan() / 2, abs=0.06)
    assert quick("hydra.run.dir=wide").rc == quick(BF16, "hydra.run.dir=narrow").rc == 0
    wide, narrow = (
        json.loads((tmp_path / name / "result.json").read_text())["optimizer_mib"]
        for name in ("wide", "narrow")
    )
    assert narrow == pytest.approx(wide / 2, rel=0.01)


def test_an_average_that_bfloat16_freezes_is_warned_of(quick):
    done = quick(BF16)
    words = " ".join(done.stdout.split())
    assert "with betas[1]=0.999 a step takes less from a running average" in words
    assert "as DeepSeek-V3's betas=[0.9,0.95], or optimizer.state_dtype=null." in words
    assert "warning" not in quick(BF16, "optimizer.betas=[0.9,0.95]").stdout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["optimizer.state_dtype=float16"],
            ["optimizer.state_dtype=float16 is not known", "Allowed: float32, bfloat16, or null"],
        ),
        (["optimizer.state_dtype=[1]"], ["optimizer.state_dtype=[1] is not known"]),
        (["optimizer=adamw8bit", BF16], ["AdamW8bit keeps its state in a format of its own"]),
        (["optimizer=adamw4bit", BF16], ["AdamW4bit keeps its state in a format of its own"]),
        (["optimizer=lbfgs", BF16], ["LBFGS keeps past gradients", "type optimizer=adamw"]),
        (["precision=64-true", BF16], ["weights in float64", "or type precision=32-true"]),
        (["precision=64-true", "mode=plan", BF16], ["weights in float64"]),
        (["optimizer=muon", BF16], ["belongs to one of matrices, rest"]),
    ],
)
def test_what_cannot_work_is_one_message(quick, words, parts):
    done = quick(*words)
    assert done.rc == 2, done.stdout
    assert [part for part in parts if part not in done.stderr] == []
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


def test_a_sweep_compares_the_two(quick, tmp_path):
    done = quick("-m", "optimizer.state_dtype=null,bfloat16")
    assert done.rc == 0, done.stderr
    results = [*tmp_path.glob("outputs/sweeps/*/*/result.json")]
    sizes = [json.loads(path.read_text())["optimizer_mib"] for path in results]
    assert min(sizes) == pytest.approx(max(sizes) / 2, rel=0.01)


OWN = """
import torch


class Own(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3{parameter}):
        super().__init__(params, lr=lr)
        {body}
"""


@pytest.mark.parametrize("is_its_own", [True, False])
def test_an_optimizer_of_ones_own(quick, tmp_path, monkeypatch, is_its_own):
    """A class with a parameter of that name gets the value; any other is kept in the dtype."""
    parameter, body = (", state_dtype=None", "self.defaults['given'] = state_dtype")
    if not is_its_own:
        parameter, body = "", "pass"
    name = f"own_{is_its_own}".lower()
    (tmp_path / f"{name}.py").write_text(OWN.format(parameter=parameter, body=body))
    monkeypatch.syspath_prepend(tmp_path)
    done = quick("~optimizer", f"+optimizer._target_={name}.Own", f"+{BF16}", "hydra.run.dir=own")
    assert done.rc == 0, done.stderr
    _, (state,) = final_state(tmp_path / "own")
    assert moment_dtypes(state) == {torch.float32 if is_its_own else torch.bfloat16}
