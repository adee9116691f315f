"""task.after_evaluation: a function of the user's after each evaluation."""

import pytest
import torch
from run_folders import read_json, write_files

from runner.core.record.checkpoint_file import load

STEPS = ("train.max_steps=4", "train.eval_every=2", "data=mine")


@pytest.fixture
def command(own):
    """The command of a tiny run with dropout, whose hooks are in lab/hooks.py, in a folder."""
    return lambda name, *typed: own(*STEPS, *typed, f"hydra.run.dir={name}")


@pytest.fixture
def hooked(command, lab):
    """Such a run: what it printed, and its result."""

    def run(name, *typed):
        done = command(name, *typed).check_ok()
        return done, read_json(lab / name / "result.json")

    return run


def calls():
    import lab.hooks

    found, lab.hooks.SEEN = lab.hooks.SEEN, []
    return found


def last_checkpoint(folder):
    content = load(sorted(folder.glob("checkpoints/step-*.pt"))[-1])
    return content["model"], content["metrics"]


def test_the_hook_is_given_the_evaluation_and_changes_no_step(hooked, lab):
    _, plain = hooked("plain", "precision=bf16-mixed")
    _, found = hooked("hooked", "precision=bf16-mixed", "task.after_evaluation=lab.hooks.note")
    for key, value in last_checkpoint(lab / "plain")[0].items():
        assert torch.equal(value, last_checkpoint(lab / "hooked")[0][key])
    assert plain["train_loss"] == found["train_loss"]
    assert found["metrics"].pop("val/steps") == 4
    assert isinstance(found["metrics"].pop("val/largest"), float)
    assert found["metrics"] == plain["metrics"]
    seen = calls()
    assert [info.step for info, _, _ in seen] == [2, 4]
    for info, state, _ in seen:
        assert state == (False, False, True)
        assert info.label == "val"
        assert info.metrics.keys() == plain["metrics"].keys()
        assert [len(part) for part in info.batch] == [20, 20]
        # Nothing was written there.
        assert info.folder == lab / "hooked" / "samples" / f"step-{info.step:08d}"
        assert not info.folder.exists()


def test_the_hook_sees_the_averaged_weights(hooked, lab):
    hooked("run", "train.ema=0.9", "task.after_evaluation=lab.hooks.note")
    weight = calls()[-1][2]
    content = load(sorted((lab / "run").glob("checkpoints/step-*.pt"))[-1])
    assert not torch.equal(weight, next(iter(content["model"].values())))


def test_each_set_has_its_metrics_its_call_and_its_folder(hooked, lab):
    pytest.importorskip("torchmetrics")
    code = (
        "from lab.data import Rows\n\n\ndef sets(count):\n"
        "    return Rows(count), {'seen': Rows(20), 'unseen': Rows(30)}, Rows(10)\n"
    )
    write_files(lab, {"lab/sets.py": code})
    done, found = hooked(
        "run",
        "data._target_=lab.sets.sets",
        "task.after_evaluation={_target_: lab.hooks.Write, text: hello}",
        "task.metrics={f1: {_target_: torchmetrics.F1Score, task: multiclass, num_classes: 2}}",
        "task.quality=unseen/f1",
        "checkpoint.best=true",
    )
    names = ("val/f1", "val/seen/f1", "val/unseen/f1", "test/f1")
    assert all(0 <= found["metrics"][name] <= 1 for name in names)
    assert found["metrics"]["val/f1"] == found["metrics"]["val/seen/f1"]
    assert found["quality"] == "val/unseen/f1"
    assert "runs are compared by val/unseen/f1\n" in done.stdout
    last = lab / "run" / "samples" / "step-00000004"
    written = {str(path.relative_to(last)) for path in last.rglob("*.txt")}
    assert written == {"seen/text.txt", "unseen/text.txt", "test/text.txt"}


@pytest.mark.parametrize(
    "value",
    [
        "{_target_: lab.hooks.Write, text: hello}",
        "{_target_: lab.hooks.partial, _partial_: true, text: hello}",
    ],
)
def test_a_hook_with_values_of_its_own(hooked, lab, value):
    hooked("run", f"task.after_evaluation={value}")
    files = sorted((lab / "run" / "samples").rglob("*.txt"))
    assert [file.parent.name for file in files] == ["step-00000002", "step-00000004"]
    assert {file.read_text() for file in files} == {"hello"}


def test_a_hook_that_fails_loses_nothing(hooked, command, main, lab):
    _, plain = hooked("plain")
    command("run", "task.after_evaluation=lab.hooks.fail").check_refused(
        "task.after_evaluation=lab.hooks.fail, called after the evaluation at step 2, fails: ",
        "KeyError: 'no such prompt' (hooks.py, line ",
        "Resume with: python -m runner --config-dir lab/conf checkpoint.resume=",
        status=1,
    )
    assert "no such prompt" in (lab / "run" / "error.txt").read_text()
    done = main("checkpoint.resume=run", "task.after_evaluation=lab.hooks.note", "tracking=none")
    done.check_ok()
    resumed = read_json(lab / "run" / "result.json")
    # The evaluation of step 2 is done again, and the rest is that of a run that never failed.
    assert [info.step for info, _, _ in calls()] == [2, 4]
    assert resumed["train_loss"] == plain["train_loss"]
    assert plain["metrics"].items() < resumed["metrics"].items()


def test_runs_are_compared_by_a_number_of_the_hook(hooked, command, main, lab):
    keys = ("task.after_evaluation=lab.hooks.note", "task.quality=steps")
    command("run", *keys).check_refused("Type task.direction=maximize or task.direction=minimize")
    done, found = hooked("run", *keys, "task.direction=minimize", "checkpoint.best=true")
    assert "runs are compared by val/steps: less is better" in done.stdout
    assert (found["best"], found["metrics"]["val/steps"]) == (2, 4)
    # Once before the training, to know its names.
    assert [info.step for info, _, _ in calls()] == [0, 2, 4]
    main("mode=evaluate", "checkpoint=run", "tracking=none", "hydra.run.dir=again").check_ok()
    again = read_json(lab / "again" / "result.json")
    assert again["metrics"] == found["metrics"]


@pytest.mark.parametrize(
    ("hook", "more", "status", "message"),
    [
        ("lab.hooks.away", "", 2, "task.after_evaluation=lab.hooks.away does not import"),
        ("3", "", 2, "task.after_evaluation=3 does not fit. Allowed: a dotted path"),
        ("{_target_: lab.hooks.Write}", "", 2, "task.after_evaluation.text is needed by lab.hooks"),
        ("{_target_: builtins.dict}", "", 2, "gives a dict, which cannot be called"),
        ("lab.hooks.a_list", "", 1, "returns a list. Return a mapping of names to numbers"),
        ("lab.hooks.a_text", "", 1, "returns 'bleu': str. Return numbers by names"),
        ("lab.hooks.the_loss", "", 1, "returns 'loss': int. Return numbers by names, text of"),
        (
            "lab.hooks.note",
            "task.quality=bleu task.direction=maximize",
            2,
            "task.quality=val/bleu is not recorded here. Type one of: "
            "val/loss, val/accuracy, val/largest, val/steps",
        ),
    ],
)
def test_wrong_hooks(command, hook, more, status, message):
    done = command("run", f"task.after_evaluation={hook}", *more.split())
    done.check_refused(message, status=status)
