"""precision.update from the command line: exact resume, a changed rule, what a sweep keeps."""

import json

import pytest
import torch

from runner.precision.weight_updates import UPDATE_RULES

RUN = ("precision=bf16-true", "optimizer.lr=1e-4")


def final_state(folder):
    """Weights and optimizer state of a run's last checkpoint."""
    path = max(folder.glob("checkpoints/*.pt"))
    content = torch.load(path, weights_only=True)
    (optimizer,) = content["optimizers"]
    return content["model"], optimizer["state"]


@pytest.mark.parametrize("update", UPDATE_RULES[1:])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(quick, main, tmp_path, update):
    rule = f"precision.update={update}"
    assert quick(*RUN, rule, "train.max_steps=6", "hydra.run.dir=whole").rc == 0
    assert quick(*RUN, rule, "train.max_steps=3", "hydra.run.dir=part").rc == 0
    done = main("checkpoint.resume=part", "train.max_steps=6")
    assert done.rc == 0, done.stderr
    (weights, state), (others, resumed) = map(final_state, (tmp_path / "whole", tmp_path / "part"))
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
    for index, values in state.items():
        for key, value in values.items():
            assert resumed[index][key].dtype is value.dtype
            assert torch.equal(resumed[index][key], value)


def test_a_changed_rule_is_named_and_begins_anew(quick, main, tmp_path):
    kahan = "precision.update=kahan"
    assert quick(*RUN, kahan, "train.max_steps=3", "hydra.run.dir=part").rc == 0
    done = main(
        "checkpoint.resume=part",
        "precision=bf16-true",
        "precision.update=master_weights",
        "train.max_steps=6",
    )
    assert done.rc == 0, done.stderr
    assert "the checkpoint's compensations are dropped" in " ".join(done.stdout.split())
    _, state = final_state(tmp_path / "part")
    assert {*state[0]} == {"step", "exp_avg", "exp_avg_sq", "master_weight"}
    assert state[0]["master_weight"].dtype is torch.float32


def test_no_update_is_counted_as_lost(quick, tmp_path):
    quick(*RUN, "hydra.run.dir=lost")
    quick(*RUN, "precision.update=kahan", "hydra.run.dir=kept")
    metrics = {name: (tmp_path / name / "metrics.jsonl").read_text() for name in ("lost", "kept")}
    assert "guard/stagnant_share" in metrics["lost"]
    assert "guard/stagnant_share" not in metrics["kept"]


def test_a_plan_counts_what_a_rule_keeps(quick, tmp_path):
    done = quick(*RUN, "mode=plan", "precision.update=remainders", "hydra.run.dir=plan")
    assert done.rc == 0, done.stderr
    plain = quick(*RUN, "mode=plan", "hydra.run.dir=plain")

    def state_mib(text):
        (line,) = [line for line in text.splitlines() if "optimizer state" in line]
        return float(line.split("│")[2].split()[0])

    # Two bfloat16 moments; two float32 moments and two bytes more.
    assert state_mib(done.stdout) == pytest.approx(state_mib(plain.stdout) * 2.5, rel=0.3)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["precision=bf16-true", "precision.update=kahn"], "Allowed: nearest, master_weights"),
        (["precision=16-true", "precision.update=remainders", "optimizer.eps=1e-4"], "upper half"),
        (["precision=32-true", "precision.update=kahan"], "precision.update=kahan is not known"),
        (
            ["precision=bf16-true", "precision.update=kahan", "optimizer=lbfgs"],
            "LBFGS evaluates the loss within its step",
        ),
    ],
)
def test_what_cannot_work_is_one_message(quick, words, text):
    done = quick(*words)
    assert (done.rc, text in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_precisions_without_the_key_run_beside(quick, tmp_path):
    done = quick("-m", "precision=32-true,bf16-true", "precision.update=kahan")
    assert done.rc == 0, done.stderr
    results = [
        json.loads(path.read_text()) for path in tmp_path.glob("outputs/sweeps/*/*/result.json")
    ]
    assert {result["precision"] for result in results} == {"32-true", "bf16-true"}
    assert {result["status"] for result in results} == {"finished"}
