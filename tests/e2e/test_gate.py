"""mode=gate by its command: real trials, an exit status and verdict.json."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import only_sweep, read_json

from runner.core.run.run_result import RunResult

pytestmark = pytest.mark.slow

TRAINED = "model=mlp data=digits model.hidden=[32] optimizer.lr=3e-3 accelerator=cpu".split()
JUDGED = ("mode=gate", *TRAINED, "advise.budget=1h", "hydra/launcher=basic")
GATE = (*JUDGED, "advise.steps=20")
HELPERS = Path(__file__).parents[1] / "helpers"


def verdict_in(folder: Path) -> dict:
    return read_json(only_sweep(folder) / "verdict.json")


def results_in(folder: Path) -> list[RunResult]:
    return [RunResult.read(path.parent) for path in folder.glob("outputs/sweeps/*/*/result.json")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, inside, store):
    """The folder of a sweep of float32 over three seeds, and the id of its parent run."""
    folder = tmp_path_factory.mktemp("recorded")
    words = "-m precision=32-true seed=0,1,2 train.max_steps=20 hydra/launcher=basic".split()
    with inside(folder) as main:
        done = main(*TRAINED, *words, f"tracking.uri={store}", "tracking.experiment=gate")
        done.check_ok()
    parent = done.stdout.partition("MLflow: parent run ")[2].partition(";")[0]
    return only_sweep(folder), parent


def test_a_shell_script_of_three_lines_goes_on_if_the_precision_is_accepted(recorded, tmp_path):
    command = " ".join([sys.executable, "-m", "runner", *JUDGED, "tracking=none", "advise.seeds=3"])
    script = tmp_path / "ci.sh"
    script.write_text(
        "set -e\n"
        f"{command} precision=bf16-mixed advise.max_gap=0.1 advise.baseline={recorded[0]}\n"
        "echo 'this precision may be used'\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("this precision may be used\n")


def check_not_trained_again(folder, recorded, name):
    """Check that a verdict compares with the losses of the recorded baseline."""
    assert {one.precision for one in results_in(folder)} == {"bf16-mixed"}
    verdict = verdict_in(folder)
    assert verdict["baseline_recorded_in"] == str(name)
    assert (verdict["baseline"], verdict["steps"]) == ("32-true", 20)
    expected = {one.seed: one.metrics["val/loss"] for one in results_in(recorded[0].parents[2])}
    assert {row["seed"]: row["baseline_value"] for row in verdict["seeds"]} == expected


def test_a_difference_of_zero_cannot_be_shown(recorded, main, tmp_path):
    sweep, _ = recorded
    words = ["advise.seeds=3", "advise.max_gap=0", f"advise.baseline={sweep}", "tracking=none"]
    done = main(*JUDGED, "precision=bf16-mixed", *words)
    assert done.rc == 3, done.stderr
    assert "bf16-mixed is undecided.\nIts loss differs by" in done.stdout
    assert "More seeds may decide: type advise.seeds=6." in done.stdout
    check_not_trained_again(tmp_path, recorded, sweep)


def test_a_baseline_in_mlflow_is_not_trained_again(recorded, main, tmp_path, store):
    words = ["advise.seeds=4", "advise.max_gap=0.1", f"advise.baseline={recorded[1]}"]
    tracked = (f"tracking.uri={store}", "tracking.experiment=gate")
    main(*JUDGED, "precision=bf16-mixed", *words, *tracked).check_ok()
    check_not_trained_again(tmp_path, recorded, recorded[1])


def test_an_accepted_precision_leaves_its_verdict_and_the_events(main, tmp_path):
    words = (
        "precision=bf16-true precision.update=kahan tracking=none advise.max_gap=0.1 "
        "advise.baseline=bf16-mixed advise.seeds=6"
    )
    main(*GATE, *words.split()).check_ok(
        "bf16-true precision.update=kahan is accepted.\nIts loss differs by"
    )
    verdict = verdict_in(tmp_path)
    assert (verdict["verdict"], verdict["exit_status"], verdict["bar"]) == ("accepted", 0, 0.1)
    assert verdict["baseline"] == "bf16-mixed"
    assert verdict["overrides"] == ["precision.update=kahan"]
    assert [look["seeds"] for look in verdict["looks"]] == [3]  # of six
    results = results_in(tmp_path)
    losses = {(one.precision, one.seed): one.metrics["val/loss"] for one in results}
    for row in verdict["seeds"]:
        assert row["value"] == losses["bf16-true", row["seed"]]
        assert row["baseline_value"] == losses["bf16-mixed", row["seed"]]
    # The key is for the precision that is asked about.
    asked = [one.precision for one in results if "update" in " ".join(one.overrides)]
    assert {*asked} == {"bf16-true"}


def test_a_worse_precision_is_rejected(main, tmp_path):
    words = "precision=bf16-true optimizer.lr=1e-5 tracking=none advise.max_gap=1e-4 advise.seeds=4"
    done = main(*GATE, *words.split())
    assert done.rc == 1, done.stderr
    assert "bf16-true is rejected.\nIts loss differs by +" in done.stdout
    assert verdict_in(tmp_path)["exit_status"] == 1
    page = only_sweep(tmp_path) / "report.md"
    assert page.read_text().startswith("# Does this precision train mlp on digits?")


def test_a_precision_that_diverges_is_rejected_after_one_seed(cli, clean, tmp_path):
    path = os.pathsep.join([str(HELPERS), clean["PYTHONPATH"]])
    words = (
        "mode=gate experiment=broken_by_range precision=16-mixed tracking=none accelerator=cpu "
        "advise.steps=60 advise.budget=1h"
    ).split()
    planted = ("--config-dir", HELPERS / "planted" / "conf")
    done = cli(*words, *planted, env={"PYTHONPATH": path})
    assert done.rc == 1, done.stderr
    assert "16-mixed is rejected.\nIt diverged at step 30" in done.stdout
    assert len(results_in(tmp_path)) == 2


def test_advice_takes_a_baseline_and_a_bar(recorded, main, tmp_path):
    words = "precision=bf16-true advise.budget=1h advise.seeds=3 tracking=none advise.max_gap=0.1"
    asked = ("advise.objective=memory", f"advise.baseline={recorded[0]}", "hydra/launcher=basic")
    main("mode=advise", *TRAINED, *words.split(), *asked).check_ok(
        "Use bf16-true: 0.50 × 32-true's weights and optimizer state", "tolerated 0.1, 3 seeds"
    )
    assert {one.precision for one in results_in(tmp_path)} == {"bf16-true"}


def check_one_message(done, says):
    done.check_refused(says)
    assert done.stderr.count("error:") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "mode=gate asks about one precision. Type precision=<it>"),
        ("precision=bf16-mixed,16-mixed", "names 2. Type one of them, or mode=advise"),
        ("precision=32-true", "precision=32-true is it. Type another precision"),
        ("precision=bf16-mixed advise.baseline=nope", "advise.baseline=nope is no precision"),
        ("precision=bf16-mixed advise.baseline=.", "no finished run and no sweep"),
        ("precision=bf16-mixed advise.max_gap=-1", "Allowed: 0 and up, or null"),
        ("precision=bf16-mixed seed=0,1", "mode=gate answers for one config"),
        ("precision=bf16-mixed sweep=seeds", "without sweep="),
        ("precision=16-true optimizer.eps=1e-8", "mode=gate has no answer for 16-true"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(main, words, says):
    check_one_message(main(*GATE, "tracking=none", *words.split()), says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("precision=bf16-mixed optimizer.lr=0.1", "optimizer.lr (0.003 there, 0.1 here)"),
        ("precision=bf16-mixed model.hidden=[8]", "model.hidden ([32] there, [8] here)"),
        ("precision=32-true", "alone, which is what is to be judged"),
    ],
)
def test_a_baseline_of_something_else_is_refused(recorded, main, words, says):
    baseline = f"advise.baseline={recorded[0]}"
    check_one_message(main("mode=gate", *TRAINED, "tracking=none", baseline, *words.split()), says)
