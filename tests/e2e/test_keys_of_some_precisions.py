"""Keys under precision that only some precisions of a sweep take: jobs of the others run without
them, which is said once on the terminal and in the report."""

from pathlib import Path

import pytest
from refusals import message_table
from run_folders import job_results, only_sweep, write_files

BASIC = ("hydra/launcher=basic", "accelerator=cpu")
FIXED = "precision.loss_scale.fixed=8"


def jobs(*sweeps):
    return job_results(Path(), *sweeps)


def report():
    return (only_sweep(Path()) / "report.md").read_text()


@pytest.mark.parametrize("mark", ["", pytest.param("++", marks=pytest.mark.extended)])
def test_one_precision_has_nothing_to_emulate(quick, mark):
    precisions = "precision=32-true,bf16-mixed,transformer-engine"
    done = quick("-m", *BASIC, precisions, f"{mark}precision.emulate=true").check_ok()
    assert done.stdout.count("precision.emulate is left out for 32-true:") == 1
    assert "precision.emulate is left out for 32-true:" in report()
    assert [job["label"] for job in jobs()] == ["32-true", "bf16-mixed", "transformer-engine"]
    assert [job["kernels"] for job in jobs()] == ["", "emulated", "emulated"]
    assert [job["left_out"] for job in jobs()] == [["precision.emulate"], [], []]
    emulate = [[t for t in job["overrides"] if "emulate" in t.lower()] for job in jobs()]
    assert emulate == [[], ["precision.emulate=True"], ["precision.emulate=True"]]


def test_a_nested_key_in_this_process_and_when_the_sweep_is_resumed(quick, main):
    done = quick("-m", *BASIC, "precision=32-true,16-mixed,bf16-mixed", FIXED).check_ok()
    told = "precision.loss_scale.fixed is left out for 32-true, bf16-mixed:"
    assert done.stdout.count(told) == 1
    assert told in report()
    assert [job["loss_scale"] for job in jobs()] == [None, 8.0, None]
    folder = only_sweep(Path())
    (folder / "0" / "result.json").unlink()
    again = main(f"sweep.resume={folder}").check_ok()
    assert again.stdout.count("finished before") == 2
    assert told in report()
    assert [job["label"] for job in jobs()] == ["32-true", "16-mixed", "bf16-mixed"]


def test_a_key_that_the_sweep_varies(quick):
    quick("-m", *BASIC, "precision=16-mixed,32-true", "precision.loss_scale.fixed=8,16").check_ok()
    assert [job["label"] for job in jobs()] == [
        "16-mixed precision.loss_scale.fixed=8",
        "16-mixed precision.loss_scale.fixed=16",
        "32-true",
        "32-true",
    ]


PRESET = """# @package _global_
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      precision: 32-true,16-mixed
      precision.loss_scale.fixed: 8
"""


def test_presets_of_a_sweep(quick, tmp_path):
    assert quick("sweep=precisions", *BASIC, FIXED).rc == 0
    assert [job["loss_scale"] for job in jobs()] == [None, None, 8.0, None]
    write_files(tmp_path, {"mine/sweep/scales.yaml": PRESET})
    quick("--config-dir", "mine", "sweep=scales", *BASIC, "hydra.sweep.dir=own").check_ok()
    assert [job["loss_scale"] for job in jobs("own")] == [None, 8.0]


def test_a_search(quick):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    choice = "hydra.sweeper.params.precision='choice(16-mixed,32-true)'"
    quick("sweep=search", *BASIC, "hydra.sweeper.n_trials=2", FIXED, choice).check_ok()
    scales = {job["precision"]: job["loss_scale"] for job in jobs()}
    assert set(scales.items()) <= {("16-mixed", 8.0), ("32-true", None)}


REFUSED = message_table("""
-m precision=32-true,64-true precision.emulate=true => precision.emulate=true: no precision of
    no precision of this sweep (32-true, 64-true) takes | Of the built-in ones, 16-mixed,
-m precision=32-true,bf16-mixed precision.nosuch=3 => precision.nosuch=3: no precision of
    no precision of this sweep (32-true, bf16-mixed) takes | Leave it out
sweep=precisions precision.nosuch=3 => no precision of this sweep (32-true, bf16-mi
-m seed=0,1 precision.loss_scale.fixed=8 => precision.loss_scale.fixed=8 is not known
    Allowed for precision=32-true:
precision.emulate=true => precision.emulate=true is not known. Allowed for precision=32-true
    Precisions that have it: 16-mixed, 16-true, bf16-mixed
precision=bf16-mixed precision.loss_scale.fixed=8 => Allowed for precision=bf16-mixed
    Precisions that have it: 16-mixed.
""")


@pytest.mark.parametrize(("typed", "parts"), REFUSED)
def test_a_key_that_none_takes_is_an_error(quick, typed, parts):
    quick(*typed.split()).check_refused(*parts)
    assert not jobs()
