"""Sweeps whose jobs other launchers run: Slurm through submitit, Ray, joblib; in real processes."""

import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pytest
from quiet_mlflow import runs_in
from run_folders import job_results, only_sweep, read_json
from slurm_cluster import missing_program, slurm_cluster
from waiting import SECONDS, wait_for

TINY = ("--config-dir lab/conf model=job data=mine train.max_steps=12 train.log_every=1 -m").split()


@pytest.fixture
def begin(lab, start_command):
    """Start a sweep as a process."""
    return lambda *args, **how: start_command(*TINY, *args, **how)


def living(folder):
    """Processes that work in a folder."""
    found = []
    for process in psutil.process_iter(["cwd", "status", "cmdline"]):
        if process.info["cwd"] == str(folder) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A function that calls a command of Slurm's; sweeps reach the same cluster."""
    missing = missing_program()
    if missing:
        pytest.skip(f"no Slurm: {missing} is missing")
    home = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(home) as call, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(home / "slurm.conf"))
        yield call


SLURM = ("launcher=slurm", "hydra.launcher.cpus_per_task=1")


@pytest.mark.slow
@pytest.mark.extended
def test_a_sweep_on_slurm_is_recorded_as_one_here(begin, lab, slurm, store, reader):
    """One job is killed, one gets the signal of its time limit in its sixth step, and Slurm's
    process of one dies with it."""
    tracked = (f"tracking.uri={store}", "tracking.experiment=slurm", "tracking.log_model=false")
    given = ("hydra.launcher.partition=all", "model.how=killed,waits,lost")
    sweep = begin(*SLURM, *given, *tracked)
    wait_for(lambda: [*lab.glob("waits-*")], sweep)
    (job,) = [job for job in slurm("squeue", "--noheader", "--format=%i").split() if "_1" in job]
    slurm("scancel", "--signal=USR2", job)
    time.sleep(1)
    (lab / "go").touch()
    # Slurm lets a job that is queued again wait for two minutes.
    wait_for(lambda: "PENDING" in slurm("squeue", "--noheader", f"--job={job}", "--format=%T"))
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    stdout, stderr = sweep.communicate(timeout=SECONDS)
    assert sweep.returncode == 1, stderr
    found = job_results(lab)
    assert [job["status"] for job in found] == ["failed", "finished", "failed"]
    assert [job["label"] for job in found] == [
        "32-true model.how=killed",
        "32-true model.how=waits",
        "32-true model.how=lost",
    ]
    assert found[0]["error"].startswith("Its process was ended by SIGKILL")
    assert found[2]["error"].startswith("Its SlurmJob ")
    assert "(1 of " in found[1]["device"]
    assert "│ 32-true model.how=waits  │ finished │" in stdout
    folder = only_sweep(lab)
    assert (folder / "report.html").exists()
    assert read_json(folder / "sweep.json")["jobs"] == 3
    logs = "".join(path.read_text() for path in folder.glob(".submitit/*/*_1_0_log.out"))
    assert re.search(r"resumed at step \d+ of 12", logs)
    assert not [*folder.glob(".submitit/**/*.pkl")]
    _check_store(reader(), found)
    (line,) = stderr.splitlines()
    assert line.startswith("error: job 2: Its SlurmJob ")


def _check_store(client, found):
    runs = runs_in(client, "slurm")
    (parent,) = [run for run in runs if run.data.tags.get("role") == "sweep"]
    assert parent.info.status == "FAILED"
    assert len(runs) == 4  # the job that was started twice is one run
    children = [run for run in runs if run is not parent]
    children.sort(key=lambda run: int(Path(run.data.tags["output_dir"]).name))
    assert [run.info.status for run in children[:2]] == ["FAILED", "FINISHED"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert children[0].data.tags["error"] == found[0]["error"]
    points = client.get_metric_history(children[1].info.run_id, "train/loss")
    assert sorted(point.step for point in points) == list(range(1, 13))


def stop(sweep, jobs, number=signal.SIGTERM):
    """Send a signal to a sweep's own process, let its jobs go on, and return what it prints."""
    sweep.send_signal(number)
    wait_for((only_sweep(jobs) / "stop").exists)
    (jobs / "go").touch()
    stdout, stderr = sweep.communicate(timeout=SECONDS)
    assert sweep.returncode == 128 + number, stderr
    assert "Traceback" not in stderr
    wait_for(lambda: not living(jobs))
    return stdout


@pytest.mark.slow
@pytest.mark.extended
def test_ctrl_c_stops_slurms_jobs_and_the_sweep_is_resumed(begin, lab, slurm, cli):
    alone = "hydra.launcher.array_parallelism=1"
    sweep = begin(*SLURM, alone, "seed=0,1", "model.how=waits", "tracking=none")
    wait_for(lambda: [*lab.glob("waits-*")], sweep)
    stdout = stop(sweep, lab, signal.SIGINT)
    assert [job["error"].partition(".")[0] for job in job_results(lab)] == ["Stopped by SIGINT"]
    assert not (only_sweep(lab) / "1").exists()
    assert not slurm("squeue", "--noheader")
    assert "sweep.resume=" in stdout
    again = cli("sweep.resume=last").check_ok()
    assert again.stderr == ""
    assert [job["status"] for job in job_results(lab)] == ["finished"] * 2
    logs = "".join(path.read_text() for path in lab.glob("outputs/sweeps/*/.submitit/*/*.out"))
    assert len(re.findall(r"resumed at step \d+ of 12", logs)) == 1


@pytest.mark.slow
@pytest.mark.extended
def test_a_signal_stops_joblibs_jobs_and_the_sweep_is_resumed(begin, lab, cli):
    sweep = begin("launcher=joblib", "seed=0,1,2", "model.how=waits", "tracking=none")
    wait_for(lambda: len([*lab.glob("waits-*")]) == 2, sweep)
    stdout = stop(sweep, lab)
    found = job_results(lab)
    assert [job["error"].partition(".")[0] for job in found[:2]] == ["Stopped by SIGTERM"] * 2
    assert {job["status"] for job in found} == {"stopped"}
    folder = only_sweep(lab)
    assert f"sweep.resume=outputs/sweeps/{folder.name}" in stdout
    again = cli(f"sweep.resume={folder}").check_ok()
    found = job_results(lab)
    assert [job["status"] for job in found] == ["finished"] * 3
    assert len(re.findall(r"resumed at step \d+ of 12", again.stdout)) == 2
    assert [job["label"] for job in found] == [f"32-true seed={n}" for n in range(3)]


@pytest.fixture(scope="session")
def with_ray(root):
    """A Python with Ray besides what this one has. Hydra's plugin for it wants an older cloudpickle
    than joblib does, so that both have no place in one environment; kept for the next time."""
    home = Path(sys.prefix) / "with-ray"
    if not (home / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        python, (packages,) = home / "bin" / "python", home.glob("lib/python*/site-packages")
        (packages / "around.pth").write_text(sysconfig.get_path("purelib"))
        install = "-m pip install --quiet hydra-ray-launcher -c".split()
        done = subprocess.run(
            [python, *install, root / "constraints.txt"],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"Ray cannot be installed here: {done.stderr[-500:]}")
        (home / "ready").touch()
    return str(home / "bin" / "python")


@pytest.mark.slow
@pytest.mark.extended
def test_a_ray_cluster_runs_jobs_and_is_stopped(begin, lab, with_ray):
    sweep = begin("launcher=ray", "model.how=well,waits", "tracking=none", python=with_ray)
    wait_for(lambda: [*lab.glob("waits-*")], sweep)
    wait_for(lambda: len(job_results(lab)) == 1)
    stdout = stop(sweep, lab)
    found = job_results(lab)
    assert [job["status"] for job in found] == ["finished", "stopped"]
    assert [job["label"] for job in found] == [f"32-true model.how={h}" for h in ("well", "waits")]
    assert [*only_sweep(lab).glob("1/checkpoints/step-*.pt")]
    assert "│ 32-true model.how=well  │ finished │" in stdout


@pytest.mark.slow
@pytest.mark.extended
def test_a_job_lost_with_its_process_is_reported_and_the_others_run(main, lab):
    done = main(*TINY, "launcher=submitit_local", "model.how=lost,well", "tracking=none")
    assert done.rc == 1, done.stderr
    lost, well = job_results(lab)
    assert (lost["status"], well["status"]) == ("failed", "finished")
    assert lost["error"].startswith("Its LocalJob ")
    assert "32-true model.how=lost: Its LocalJob" in done.stdout
    line = r"^job 2 of 2  32-true model.how=lost +failed, its log is in \S+/0: Its LocalJob"
    before_table, _ = done.stdout.split("┏", 1)
    assert re.search(line, before_table, re.MULTILINE)
    assert well["label"] == "32-true model.how=well"
    wait_for(lambda: len(living(lab)) <= 1)


def test_a_job_that_a_stop_kept_from_starting_is_not_waited_for(tmp_path):
    from submitit.slurm.slurm import SlurmJob

    from runner.sweeps.launcher import remote

    job = SlurmJob(tmp_path, "70_1")
    assert remote._outcome(job, is_stopped=True) == "Stopped before it began."


def test_a_folder_that_is_not_shared_is_reported_in_one_message(tmp_path, monkeypatch, capsys):
    from hydra.core.utils import JobReturn, JobStatus
    from omegaconf import OmegaConf

    from runner.sweeps.launcher import remote

    monkeypatch.setattr(remote, "_MAX_VISIBILITY_SECONDS", 0.1)
    monkeypatch.setattr(remote, "record_result", lambda *told: recorded.append(told[2:]))
    recorded = []
    configs = {
        n: OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path), "subdir": str(n)}}})
        for n in (0, 1)
    }
    monkeypatch.setattr(remote, "job_hydra_config", lambda config: (tmp_path / "lock").open("w"))
    came = JobReturn(status=JobStatus.COMPLETED)
    remote._record_missing_results(configs, [came, came], stopped=False)
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert said.startswith(f"error: job 0, 1: It ran, but left no result in {tmp_path}")
    assert "hydra.sweep.dir=<folder that all of them see>" in said
    assert [status for status, _ in recorded] == ["failed"] * 2


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "launcher=slurm",
            "there is no sbatch here. Type the command on a node of Slurm's, or "
            "launcher=submitit_local to try it on this machine.",
        ),
        ("hydra/launcher=submitit_slurm", "there is no sbatch here."),
        (
            "launcher=nonsense",
            "launcher=nonsense is not known. Allowed: isolated, joblib, ray, slurm",
        ),
        ("launcher=joblib hydra.launcher.n_jobs=x", "hydra.launcher.n_jobs=x does not fit."),
        ("launcher=joblib hydra.launcher.n_jobs=0", "hydra/launcher=joblib takes no jobs: "),
    ],
)
def test_what_a_launcher_cannot_do_is_one_message(quick, monkeypatch, typed, said, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    quick("-m", *typed.split(), "seed=0,1").check_refused(said)


@pytest.mark.parametrize(
    ("option", "extra"),
    [
        ("submitit_slurm", "slurm"),
        ("submitit_local", "slurm"),
        ("ray", "ray"),
        ("joblib", "joblib"),
    ],
)
def test_a_missing_launcher_says_what_to_type(quick, monkeypatch, tmp_path, option, extra):
    from hydra.core.config_store import ConfigStore

    known = ConfigStore.instance().repo["hydra"]["launcher"]
    monkeypatch.delitem(known, f"{option}.yaml", raising=False)
    preset = "slurm" if option == "submitit_slurm" else option
    for typed in (f"hydra/launcher={option}", f"launcher={preset}"):
        done = quick("-m", typed, "seed=0,1").check_refused()
        assert done.stderr == (
            f"error: hydra/launcher={option} needs a package that is missing. Type "
            f"pip install 'precision-runner[{extra}]'.\n"
        )
    assert not (tmp_path / "outputs").exists()
