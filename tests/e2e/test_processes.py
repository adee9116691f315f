"""Runs of several processes as their users start, stop and see them."""

import os
import signal
import subprocess
import sys
import time

import pytest

DIGITS = ("model=mlp", "train.log_every=1", "train.eval_every=100000")


@pytest.fixture
def torchrun(tmp_path, root):
    """Starts a command in two processes and returns its outcome."""
    started = []

    def start(*typed, processes=2):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "HYDRA_"))}
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            "-m",
            "runner",
            *typed,
        ]
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**kept, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def errors(text):
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_a_strategy_of_several_processes_needs_them(quick):
    for kind in ("ddp", "fsdp"):
        done = quick(f"strategy={kind}")
        assert done.rc == 2
        assert f"-m runner strategy={kind}" in done.stderr


@pytest.mark.slow
def test_an_error_of_all_processes_is_printed_once(torchrun):
    out, err = torchrun("tracking=none", *DIGITS).communicate(timeout=120)
    assert [line for line in errors(err) if "Stopped by" not in line] == [
        "error: torchrun started 2 processes, and strategy=single is for one. Type strategy=ddp "
        "(every process has the whole model) or strategy=fsdp (a part)."
    ]
    assert not out


ORDERS = (
    ("--config-dir", "lab/conf", "model=net", "data=mine"),
    ("model=net", "--config-dir=lab/conf", "data=mine"),
    ("model=net", "data=mine", "-cn", "config", "-cd", "lab/conf"),
)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=["flag first", "flag between", "flags last"])
def test_ones_own_code_runs_in_two_processes(torchrun, lab, order):
    more = ("strategy=ddp", "train.max_steps=2", "tracking=none")
    process = torchrun(*order, *more)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-2000:]
    assert "32-true net mine" in out
    (folder,) = (lab / "outputs" / "runs").glob("*")
    assert (folder / "ranks" / "1" / "steps.jsonl").exists()


@pytest.mark.slow
def test_an_error_before_the_config_is_printed_once(torchrun):
    for typed, told in (
        (("--config-dir", "none/conf", "strategy=ddp"), "--config-dir=none/conf is no folder in"),
        (("-m", "seed=0,1", "strategy=ddp"), "torchrun started 2 processes, and a sweep starts"),
        (("strategy=ddp", "lr=0.1"), "lr=0.1 is not known"),
    ):
        err = torchrun(*typed, "tracking=none").communicate(timeout=240)[1]
        (line,) = (line for line in errors(err) if "Stopped by" not in line)
        assert told in line
        assert "Unable to shutdown" not in err  # no process waits for one that has ended


@pytest.mark.slow
def test_a_stopped_run_continues_as_one_run_in_mlflow(torchrun, tmp_path, store, reader, main):
    made = main(
        "model=mlp", "train.max_steps=1", f"tracking.uri={store}"
    )  # seconds, else in a stop
    assert made.rc == 0, made.stderr
    typed = (*DIGITS, "strategy=ddp", f"tracking.uri={store}", "tracking.experiment=processes")
    process = torchrun(
        *typed,
        "train.max_steps=10000000",
        "checkpoint.every_steps=5",
        "hydra.run.dir=outputs/runs/it",
    )
    end = time.monotonic() + 90
    while not (found := [*tmp_path.glob("outputs/runs/it/checkpoints/step-*.pt")]):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    folder = found[0].parents[1]
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert "Stopped by SIGTERM." in err
    (checkpoint,) = folder.glob("checkpoints/step-*.pt")
    assert f"checkpoint: {checkpoint.relative_to(tmp_path)}" in out.replace(f"{tmp_path}/", "")
    (run,) = runs(reader())
    assert run.info.status == "KILLED"

    step = int(checkpoint.stem.removeprefix("step-"))
    again = torchrun(
        "strategy=ddp",
        f"checkpoint.resume={folder}",
        f"train.max_steps={step + 3}",
        f"tracking.uri={store}",
        "tracking.experiment=processes",
    )
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err[-2000:]
    assert f"resumed at step {step} of {step + 3}" in out
    (run,) = runs(reader())
    assert (run.info.status, run.data.tags["processes"]) == ("FINISHED", "2")
    assert run.data.tags["device_name"].startswith("2 x ")
    points = reader().get_metric_history(run.info.run_id, "train/loss")
    assert [p.step for p in points] == list(range(1, step + 4))
    assert (folder / "processes.json").exists()
    assert (folder / "ranks" / "1" / "steps.jsonl").exists()


def runs(client):
    (experiment,) = client.search_experiments(filter_string="name = 'processes'")
    return client.search_runs([experiment.experiment_id])
