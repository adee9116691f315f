"""Runs of several processes as their users start, stop and see them."""

import os
import signal

import pytest
from run_folders import read_json
from waiting import SECONDS, wait_for

DIGITS = ("model=mlp", "train.log_every=1", "train.eval_every=100000")
TORCHRUN = ("--standalone", "--nproc-per-node=2", "-m", "runner")


@pytest.fixture
def torchrun(start_command):
    """Start a command in two processes."""
    return lambda *typed: start_command(*TORCHRUN, *typed, module="torch.distributed.run")


def errors(text):
    """Return the errors that a command printed, but for those of the processes that it stopped."""
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    return [line for line in lines if "Stopped by" not in line]


def test_a_strategy_of_several_processes_needs_them(quick):
    for kind in ("ddp", "fsdp"):
        quick(f"strategy={kind}").check_refused(f"-m runner strategy={kind}")


@pytest.mark.slow
def test_own_batches_order_and_test_sets_are_those_of_one_process(torchrun, main, lab):
    # Flags after the words: torchrun takes flags, too.
    words = (
        "model=mlp data=mine data._target_=lab.loading.sets data.collate=runner.data.padding.pad "
        "data.sampler=lab.loading.few train.batch_size=8 train.max_steps=5 tracking=none "
        "-cn config -cd lab/conf"
    ).split()
    assert main(*words, "hydra.run.dir=one").rc == 0
    process = torchrun(*words, "strategy=ddp", "hydra.run.dir=two")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err[-2000:]
    one, two = (read_json(lab / n / "result.json") for n in ("one", "two"))
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-4)
    assert {"val/unseen/loss", "test/loss"} < two["metrics"].keys()
    assert out.count("test/loss") == 2  # a line and a row of the table


@pytest.mark.slow
def test_an_error_of_all_processes_is_printed_once(torchrun):
    out, err = torchrun("tracking=none", *DIGITS).communicate(timeout=SECONDS)
    assert errors(err) == [
        "error: torchrun started 2 processes, and strategy=single is for one. Type strategy=ddp "
        "(every process has the whole model) or strategy=fsdp (a part)."
    ]
    assert not out


@pytest.mark.slow
def test_a_finished_run_that_is_repeated_ends_in_all_processes(torchrun):
    words = (*DIGITS, "strategy=ddp", "tracking=none", "train.max_steps=2", "hydra.run.dir=it")
    for printed in ("32-true mlp digits", "finished before\n"):
        process = torchrun(*words, "checkpoint.resume=auto")
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err[-2000:]
        assert out.count(printed) > 0
    assert out == printed


ORDERS = {
    "flag first": "--config-dir lab/conf model=net data=mine",
    "flag between": "model=net --config-dir=lab/conf data=mine",
}


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("order", ORDERS)
def test_ones_own_code_runs_in_two_processes(torchrun, lab, order):
    more = ("strategy=ddp", "train.max_steps=2", "tracking=none")
    process = torchrun(*ORDERS[order].split(), *more)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err[-2000:]
    assert "32-true net mine" in out
    (folder,) = (lab / "outputs" / "runs").glob("*")
    assert (folder / "ranks" / "1" / "steps.jsonl").exists()


EARLY = {
    "no folder": ("--config-dir none/conf", "--config-dir=none/conf is no folder in"),
    "a sweep": ("-m seed=0,1", "torchrun started 2 processes, and a sweep starts"),
    "no key": ("lr=0.1", "lr=0.1 is not known"),
}
MORE_EARLY = ("a sweep", "no key")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["no folder", *(pytest.param(c, marks=pytest.mark.extended) for c in MORE_EARLY)]
)
def test_an_error_before_the_config_is_printed_once(torchrun, case):
    typed, message = EARLY[case]
    process = torchrun(*typed.split(), "strategy=ddp", "tracking=none")
    err = process.communicate(timeout=SECONDS)[1]
    (line,) = errors(err)
    assert message in line
    assert "Unable to shutdown" not in err  # no process waits for one that has ended


@pytest.mark.slow
def test_a_stopped_run_continues_as_one_run_in_mlflow(torchrun, tmp_path, store, reader):
    recorded = ("strategy=ddp", f"tracking.uri={store}", "tracking.experiment=processes")
    endless = "train.max_steps=10000000 checkpoint.every_steps=5 hydra.run.dir=outputs/runs/it"
    process = torchrun(*DIGITS, *recorded, *endless.split())
    folder = tmp_path / "outputs/runs/it"
    wait_for(lambda: [*folder.glob("checkpoints/step-*.pt")], process)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=SECONDS)
    assert "Stopped by SIGTERM." in err
    (checkpoint,) = folder.glob("checkpoints/step-*.pt")
    assert f"checkpoint: {checkpoint.relative_to(tmp_path)}" in out.replace(f"{tmp_path}/", "")
    # The writer outlives a run that is stopped, and may open it in the store only now.
    wait_for(lambda: [run.info.status for run in runs(reader())] == ["KILLED"])

    step = int(checkpoint.stem.removeprefix("step-"))
    again = torchrun(*recorded, f"checkpoint.resume={folder}", f"train.max_steps={step + 3}")
    out, err = again.communicate(timeout=SECONDS)
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
    found = client.search_experiments(filter_string="name = 'processes'")
    return client.search_runs([experiment.experiment_id for experiment in found]) if found else []
