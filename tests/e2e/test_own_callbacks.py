"""Callbacks of the user's own: docs/own-callbacks.md as it stands there, resume, stop, errors."""

import json
import re

import pytest
import torch
from run_folders import read_json, write_page
from typed_runs import TypedRuns

NOTE = "callbacks.note._target_=lab.callbacks.Note"
FAIL = "callbacks.fail._target_=lab.callbacks.Fail"


@pytest.fixture
def runs(main, lab):
    """Tiny runs with callbacks of lab/callbacks.py."""
    words = (
        "--config-dir lab/conf model=net data=mine train.max_steps=6 train.eval_every=3 "
        "train.log_every=2 tracking=none"
    )
    return TypedRuns(main, lab, words)


@pytest.fixture
def stopped(runs):
    """Tiny runs, of which one has failed in the fourth step; calls until then are forgotten."""
    runs.fail(f"{NOTE} {FAIL} hydra.run.dir=run", status=1)
    calls()
    return runs


def calls():
    import lab.callbacks

    found = list(lab.callbacks.SEEN)
    lab.callbacks.SEEN.clear()
    return found


def test_a_callback_sees_every_step_and_changes_none(runs):
    plain = runs.train("precision=16-mixed", "plain")
    run = runs.train(f"precision=16-mixed {NOTE}")
    seen = calls()
    assert [call[1] for call in seen if call[0] == "steps"] == [[1, 2], [3], [4], [5, 6]]
    assert [call[1] for call in seen if call[0] == "evaluation"] == [3, 6]
    assert "val/accuracy" in seen[2][2]
    (end,) = [call[1] for call in seen if call[0] == "end"]
    assert (end.step, end.planned_steps, end.reason) == (6, 6, "")
    assert end.metrics == run.result["metrics"]
    weights = run.content()["model"]
    for key, value in plain.content()["model"].items():
        assert torch.equal(value, weights[key])
    assert plain.numbers == run.numbers
    assert (run.folder / "callbacks/note/text-3.txt").exists()
    assert (run.folder / "callbacks/note/more/bytes").read_bytes() == b"x"
    assert "own_callbacks" not in plain.content()["callbacks"]


def test_metrics_are_recorded_at_their_steps(runs):
    journal = "tracking._target_=runner.core.record.tracker.ProcessJournal"
    run = runs.train(f"callbacks={{note:{{_target_:lab.callbacks.Note}}}} {journal}")
    rows = [json.loads(line) for line in (run.folder / "steps.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    doubled = {row["step"]: row["note/doubled"] for row in rows if "note/doubled" in row}
    assert doubled == {step: 2 * loss for step, loss in losses.items()}
    counts = {row["step"]: row["mine/count"] for row in rows if "mine/count" in row}
    assert counts == {step: step for step in (2, 3, 4, 6)}


def test_state_is_resumed_and_what_is_new_is_said(stopped):
    late = "callbacks.late._target_=lab.callbacks.Stop"
    run = stopped.resume(f"tracking=none callbacks.fail.until=99 {late}")
    assert "callbacks.late begins here: the checkpoint has no state of it" in run.stdout
    seen = calls()
    assert seen[0] == ("load", 4, [4.0, 4.0], "torch.bfloat16")
    assert "stopping, as asked at step 6 by callbacks.late: seen enough" in run.stdout
    assert [call[1] for call in seen if call[0] == "steps"] == [[5, 6]]


def test_several_yamls_are_chosen_together_and_resumed(runs, main, lab):
    folder = lab / "lab/conf/callbacks"
    folder.mkdir()
    (folder / "notes.yaml").write_text("# Mine\nnote:\n  _target_: lab.callbacks.Note\n")
    yaml = "# Mine\nfail:\n  _target_: lab.callbacks.Fail\n  until: 4\n"
    (folder / "fails.yaml").write_text(yaml)
    message = runs.fail("callbacks=[notes,fails] hydra.run.dir=run", status=1)
    assert "callbacks.fail.on_steps, called at step 4, fails" in message
    calls()
    resume = "--config-dir lab/conf checkpoint.resume=run tracking=none callbacks.fail.until=99"
    done = main(*resume.split()).check_ok()
    assert "begins here" not in done.stdout
    assert calls()[0][:2] == ("load", 4)


def test_a_removed_callback_is_said(stopped):
    run = stopped.resume("tracking=none callbacks=none")
    for name in ("note", "fail"):
        assert f"callbacks.{name} is not called any more: its state is dropped" in run.stdout


@pytest.mark.parametrize(("hook", "at"), [("on_steps", 2), ("on_evaluation", 3)])
def test_a_callback_stops_the_run(runs, hook, at):
    stop = f"callbacks.stop.hook={hook} callbacks.stop.at={at}"
    run = runs.train(f"callbacks.stop._target_=lab.callbacks.Stop {stop}")
    assert "by callbacks.stop: seen enough" in run.stdout
    found = run.result
    assert (found["status"], found["steps"], found["planned_steps"]) == ("finished", 3, 6)
    assert "val/accuracy" in found["metrics"]
    ((_, end),) = calls()
    assert (end.step, end.reason) == (3, "callbacks.stop: seen enough")


FAILED = "callbacks.fail.on_steps, called at step 4, fails: "


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", FAILED + "KeyError: 'no such thing' (callbacks.py, line "),
        ("weights", FAILED + "ValueError: it changed 1 parameters or buffers of the model;"),
        ("name", FAILED + "ValueError: 'train/loss' begins as the runner's own metrics do"),
        ("value", FAILED + "ValueError: 'loss' is a str, not a number"),
        ("step", FAILED + "ValueError: step=99 is not one of this run, which is at 4"),
        ("file", FAILED + "ValueError: '../secret' is no path below the callback's folder"),
        ("reason", FAILED + "ValueError: stop() needs a reason"),
        ("end", "callbacks.fail.on_end, called at step 6, fails: RuntimeError: at the end"),
        ("state", "callbacks.fail.state_dict fails: TypeError: its state holds a object"),
    ],
)
def test_a_failing_callback_ends_the_run_after_a_checkpoint(runs, lab, what, message):
    said = runs.fail(f"{FAIL} callbacks.fail.what={what}", status=1)
    assert message in said
    assert "Resume with: python -m runner --config-dir lab/conf checkpoint.resume=" in said
    assert list(lab.glob("outputs/runs/*/checkpoints/step-*.pt"))


def test_a_state_that_is_refused_is_reported(stopped, main):
    done = main("checkpoint.resume=run", "tracking=none", "callbacks.fail.what=load")
    said = "callbacks.fail.load_state_dict fails: ValueError: of another version"
    done.check_refused(said, status=1)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("a._target_=lab.callbacks.Misspelt", "has on_step, which is no hook. Hooks: "),
        ("a._target_=lab.callbacks.Misspelt", "Write on_evaluation(self, record, run)"),
        ("a._target_=lab.callbacks.Stranger", "is no callback. Derive it from runner."),
        ("a._target_=lab.callbacks.Idle", "has no hook of its own. Define one of: on_"),
        ("a._target_=lab.callbacks.Nothing", "does not import: lab.callbacks has no No"),
        ("a._target_=lab.callbacks.wrong", "what lab.callbacks.wrong returns is no call"),
        ("a={_target_:lab.callbacks.Note,goal:1}", "callbacks.a.goal=1: lab.callback"),
        ("a=lab.callbacks.Note", "callbacks.a=lab.callbacks.Note does not fit. Allowed:"),
        (
            "_target_=lab.callbacks.Note",
            "callbacks._target_=lab.callbacks.Note does not fit. Allowed: a node",
        ),
        ("val._target_=lab.callbacks.Note", "val cannot name a callback"),
    ],
)
def test_wrong_callbacks_are_refused_before_training(runs, lab, typed, message):
    assert message in runs.fail(f"callbacks.{typed}")
    assert not list(lab.glob("outputs/runs/*/result.json"))


def test_a_choice_that_is_no_yaml_is_refused(runs):
    assert "A callback of your own is callbacks.<name>._target_=" in runs.fail("callbacks=watch")


def test_a_function_may_make_the_callback(runs):
    runs.train("callbacks.a._target_=lab.callbacks.made callbacks.a.times=2")
    assert calls()


def test_a_strangers_checkpoint_calls_no_callback(stopped, main, lab):
    path = max((lab / "run").glob("checkpoints/step-*.pt"))
    content = torch.load(path, weights_only=True)
    content["spec"]["callbacks"]["fail"] = {"_target_": "subprocess.run", "args": ["touch", "no"]}
    torch.save(content, path)
    main("checkpoint.resume=run", "tracking=none").check_refused(
        "names callbacks.fail._target_=subprocess.run"
    )


def test_the_page_runs_in_a_sweep_too(main, lab):
    write_page("own-callbacks.md", lab)
    typed = (
        "-m --config-dir lab/conf callbacks=watch callbacks.watch.goal=0.05,0.999 data=digits "
        "model=mlp train.max_steps=4 train.eval_every=2 tracking=none hydra/launcher=basic "
        "hydra.sweep.dir=sweep"
    )
    main(*typed.split()).check_ok()
    results = [read_json(lab / f"sweep/{i}/result.json") for i in (0, 1)]
    assert [result["steps"] for result in results] == [2, 4]
    text = (lab / "sweep/1/callbacks/watch/summary.txt").read_text()
    assert re.fullmatch(r"worst loss \d\.\d+ in 4 steps\n", text)
