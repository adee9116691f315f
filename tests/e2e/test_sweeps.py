"""Real sweeps: every job runs, whatever the others do, and the exit status says how it went."""

import re
from pathlib import Path

import pytest
from quiet_mlflow import runs_in
from run_folders import job_results, read_json, write_lab

from runner.core.run.run_result import RunResult


@pytest.fixture(scope="module")
def swept(tmp_path_factory, inside, store, reader):
    """Two precisions, with a job of each that fails in its second step: (what was printed, the
    sweep's folder, the parent run, its children in the order of their jobs, the client)."""
    folder = write_lab(tmp_path_factory.mktemp("sweep"))
    with inside(folder) as main:
        typed = (
            "--config-dir lab/conf model=net data=mine train.max_steps=3 -m precision=32,'16' "
            "model.fail_at=null,2 tracking.experiment=sweeps"
        )
        done = main(*typed.split(), f"tracking.uri={store}")
    client = reader()
    runs = runs_in(client, "sweeps")
    (parent,) = [run for run in runs if run.data.tags.get("role") == "sweep"]
    children = [run for run in runs if run is not parent]
    children.sort(key=lambda run: int(Path(run.data.tags["output_dir"]).name))
    (out,) = folder.glob("outputs/sweeps/*")
    return done, out, parent, children, client


def test_every_job_runs_and_the_sweep_is_a_failure(swept):
    done, out, *_ = swept
    assert done.rc == 1
    results = [read_json(out / str(i) / "result.json") for i in range(4)]
    assert [r["status"] for r in results] == ["finished", "failed", "finished", "failed"]
    assert [r["precision"] for r in results] == ["32-true"] * 2 + ["16-mixed"] * 2
    assert results[1]["error"] == "ArithmeticError: failed as it was told to"
    assert results[0]["metrics"]
    assert "Traceback" in (out / "1" / "error.txt").read_text()


def test_each_job_prints_one_line_and_the_rest_to_its_log(swept):
    done, out, *_ = swept
    lines = [line for line in done.stdout.splitlines() if line.startswith("job ")]
    assert len(lines) == 4
    assert re.fullmatch(
        r"job 1 of 4  32-true model.fail_at=null .*  finished; about .* of the sweep left", lines[0]
    )
    assert re.fullmatch(r"job 4 of 4  16-mixed model.fail_at=2 *  failed, as 32-.*", lines[3])
    assert "peak memory" not in done.stdout
    assert "peak memory" in (out / "0" / "log.txt").read_text()


def test_a_verbose_sweep_prints_what_its_runs_do(quick, tmp_path):
    done = quick("-m", "tracking=none", "hydra/launcher=basic", "seed=0,1", "sweep.verbose=true")
    assert done.stdout.count("peak memory") == 2
    assert "\njob 1: model=mlp" in done.stdout
    assert not list(tmp_path.glob("outputs/sweeps/*/*/log.txt"))


def test_the_table_has_a_line_per_group_of_seeds(swept):
    done, *_ = swept
    rows = [row.split("│") for row in done.stdout.splitlines() if row.startswith("│")]
    assert {row[1].strip(): row[2].strip() for row in rows if row[1].strip()} == {
        "32-true model.fail_at=null": "finished",
        "32-true model.fail_at=2": "failed",
        "16-mixed model.fail_at=null": "finished",
        "16-mixed model.fail_at=2": "failed",
    }
    assert (
        "32-true model.fail_at=2, 16-mixed model.fail_at=2: ArithmeticError: failed as it was told"
    ) in done.stdout


def test_the_children_are_nested_under_one_parent(swept):
    _, _, parent, children, _ = swept
    assert [run.data.tags["mlflow.parentRunId"] for run in children] == [parent.info.run_id] * 4
    assert [run.info.status for run in children] == ["FINISHED", "FAILED"] * 2
    assert [run.data.tags["precision"] for run in children] == ["32-true"] * 2 + ["16-mixed"] * 2
    assert len({run.data.tags["sweep_id"] for run in [parent, *children]}) == 1
    assert children[1].data.tags["error"] == "ArithmeticError: failed as it was told to"


def test_the_parent_says_how_the_sweep_went(swept):
    _, out, parent, _, client = swept
    assert parent.info.status == "FAILED"
    assert parent.data.tags["error"] == "2 of 4 jobs did not finish."
    assert parent.data.tags["output_dir"] == str(out)
    names = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert {"report.md", "report.html", "report.png"} <= names


def test_the_report_is_rebuilt_from_its_folder_or_mlflow(swept, main, monkeypatch, store, tmp_path):
    _, out, parent, _, client = swept
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    wanted = (out / "report.md").read_text()
    (out / "report.md").unlink()
    assert main("report", out).rc == 0
    assert (out / "report.md").read_text() == wanted
    monkeypatch.setattr(
        "runner.tracking.result_table.read_results", None
    )  # nothing of the folder is read
    for name in (parent.info.run_id, parent.data.tags["sweep_id"]):
        main("report", name).check_ok("Too short for a comparison of speed")
        assert (tmp_path / "outputs" / "reports" / name / "report.md").read_text() == wanted
    kept = client.download_artifacts(parent.info.run_id, "report.md", str(tmp_path))
    assert Path(kept).read_text() == wanted


@pytest.fixture
def sweep(quick):
    """A sweep of tiny runs inside this process."""
    return lambda *args: quick("-m", "hydra/launcher=basic", *args)


def test_old_names_in_a_sweep_whose_jobs_begin_from_the_same_state(quick, tmp_path):
    """The last job repeats the first, after those in other precisions."""
    lists = ("precision=32,'16',\"bf16\"", "deterministic=false,true")
    quick("hydra/launcher=basic", "--multirun", *lists).check_ok()
    first, last, *others = job_results(tmp_path)
    names = [job["precision"] for job in (first, last, *others)]
    assert names == [*["32-true"] * 2, *["16-mixed"] * 2, *["bf16-mixed"] * 2]
    for key in ("train_loss", "metrics"):
        assert first[key] == last[key]
        assert all(job[key] != first[key] for job in others)


def test_unavailable_precisions_are_reported_apart_from_failures(sweep, tmp_path):
    done = sweep("accelerator=cpu", "precision=tf32,bf16-mixed").check_refused()
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("│ tf32 ")]
    assert "unavailable" in line
    assert "precision=32-true, the nearest that runs here." in done.stdout.replace("\n", "")
    (result,) = tmp_path.glob("outputs/sweeps/*/0/result.json")
    assert read_json(result)["status"] == "unavailable"
    assert sweep("accelerator=cpu", "precision=tf32,16-true").rc == 1  # its eps is refused


@pytest.mark.parametrize(("names", "status"), [("32-true,16-true,", 0), ("", 2)])
def test_what_refuses_the_model_is_not_tried_by_a_preset(quick, tmp_path, names, status):
    words = ("accelerator=cpu", "model.hidden=[10]", "precision.emulate=true")
    preset = ("sweep=every_precision", "hydra/launcher=basic")
    done = quick(*preset, *words, f"precision={names}float8-rowwise,transformer-engine")
    assert done.rc == status, done.stderr
    assert "error:" not in done.stderr
    # One reason of two precisions is printed once.
    assert done.stdout.count("not tried, because precision=") == 1
    assert "not tried, as float8-rowwise" in done.stdout
    assert "would convert nothing of the model" in done.stdout
    # The preset gives it an eps of its own, which the comparison says.
    raised = "16-true: trained with optimizer.eps=0.0001 in place of 1e-08, which its difference"
    assert (raised in done.stdout) == ("16-true" in names)
    assert [job["status"] for job in job_results(tmp_path)][-2:] == ["refused", "refused"]
    (manifest,) = tmp_path.glob("outputs/sweeps/*/sweep.json")
    assert read_json(manifest)["finished"]


def test_a_wrong_value_in_one_job_fails_that_job_only(sweep):
    done = sweep("precision.keep_fp32=[nothing],[head]").check_refused(
        "nothing matches no module of the model", status=1
    )
    table = [row for row in done.stdout.splitlines() if row.startswith("│ 32-true precision")]
    # What has no result stands last.
    assert ["finished" in row for row in table] == [True, False]
    assert "keep_fp32=[head]" in table[0]


@pytest.mark.parametrize("typed", ["precision=32-true,nonsense", "seed=0,x", "nosuch=1,2"])
def test_a_wrong_override_stops_the_sweep_before_its_first_job(sweep, tmp_path, typed):
    done = sweep(typed).check_refused()
    assert "is not known" in done.stderr or "does not fit" in done.stderr
    # Neither a folder nor a parent run: the next sweep.resume=last and `ui` are about another one.
    assert not list(tmp_path.glob("outputs/sweeps/*"))


def test_a_job_can_be_typed_again(sweep, quick, tmp_path):
    values = ("seed=${hydra:job.num}",)
    assert sweep("precision=32-true,bf16-mixed", *values).rc == 0
    (swept,) = tmp_path.glob("outputs/sweeps/*")
    folder = swept / "1"
    result = RunResult.read(folder)
    assert result.seed == 1
    other = (swept / "0/result.json").read_bytes()

    quick("precision=bf16-mixed", *values, f"hydra.sweep.dir={swept}", "hydra.job.num=1").check_ok(
        "job 1: "
    )
    repeated = RunResult.read(folder)
    assert repeated.seconds != result.seconds
    assert (repeated.label, repeated.train_loss) == ("bf16-mixed", result.train_loss)
    assert (swept / "0/result.json").read_bytes() == other


def test_a_number_of_a_job_alone_is_no_sweep(quick, tmp_path):
    assert quick("hydra.job.num=3", "seed=${hydra:job.num}").rc == 0
    (result,) = tmp_path.glob("outputs/runs/*/result.json")
    assert RunResult.read(result.parent).seed == 3


def test_a_sweep_preset_names_its_precisions(quick, monkeypatch):
    names = []

    def note(spec, folder, invocation, *_):
        names.append(invocation.label(spec))
        result = RunResult(precision=spec.precision["name"], label="", folder=str(folder))
        result.write(folder)
        return result

    monkeypatch.setattr("runner.core.run_spec", note)
    assert quick("sweep=precisions", "hydra/launcher=basic").rc == 0
    assert names == ["32-true", "bf16-mixed", "16-mixed", "bf16-true"]


def test_a_job_interrupted_by_ctrl_c_ends_the_sweep(sweep, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("runner.core.run_spec", stop)
    done = sweep("seed=0,1,2")
    assert done.rc == 130
    (only,) = tmp_path.glob("outputs/sweeps/*/*/result.json")
    assert read_json(only)["status"] == "stopped"


def test_a_store_that_cannot_be_stops_a_sweep_before_its_first_job(main):
    done = main("-m", "tracking.uri=nonsense://x", "precision=32,16", "model=mlp").check_refused()
    assert done.stderr.startswith("error: tracking.uri=nonsense://x")
    assert "job 0" not in done.stdout


def test_a_sweep_of_plans_tracks_nothing(main, tmp_path):
    main("-m", "hydra/launcher=basic", "mode=plan", "precision=32,16", "model=mlp").check_ok(
        "16-mixed"
    )
    assert not (tmp_path / "outputs" / "mlflow.db").exists()
