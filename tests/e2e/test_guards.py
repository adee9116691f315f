"""Planted faults: each stops the run or warns as the guard section says; its batch is replayed."""

import re
import shlex

import pytest
import torch
from quiet_mlflow import runs_in
from refusals import message_table
from run_folders import job_results, only_run, only_sweep, read_json, write_lab

from runner.core.config.invocation import Invocation
from runner.data.loader import Loader
from runner.data.stream_loader import samples_of_step
from runner.diagnostics import saved_batch
from runner.modes import error_rules
from runner.modes.replay import run_of_batch, state_before_step
from runner.training.state_dict import checkpoint_state_dict

pytestmark = pytest.mark.slow

OWN = (
    "--config-dir lab/conf model=faulty data=faulty tracking=none train.batch_size=8 "
    "train.log_every=4 train.max_steps=12"
).split()
NAN = ("model.factor=nan", "model.at=6")
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # torch's own


@pytest.fixture
def faulty(lab, main):
    return lambda *args: main(*OWN, *args)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, inside, store):
    """A run that a loss of nan ended in step 6: (what was printed, the user's folder)."""
    folder = write_lab(tmp_path_factory.mktemp("stopped"))
    tracked = ("tracking=mlflow", f"tracking.uri={store}", "tracking.experiment=guards")
    with inside(folder) as main:
        return main(*OWN, *NAN, "checkpoint.every_steps=2", *tracked), folder


@pytest.fixture
def replay(stopped, inside, tmp_path):
    """Replay its batch, in a folder of the test's own."""

    def run(*words):
        with inside(stopped[1]) as main:
            done = main("--config-dir", "lab/conf", *words, f"hydra.run.dir={tmp_path}/again")
            done.check_ok()
        return done.stdout

    return run


def check_ended(done, *parts):
    """Check that a guard ended a run with a message that has these parts."""
    done.check_refused(*parts, status=1)


def samples(step, size=8, count=60):
    loader = Loader(range(count), size, shuffle=True, seed=0, device=torch.device("cpu"))
    return samples_of_step(loader, 1, step).micro_batches


def test_a_loss_that_is_not_finite_ends_the_run(stopped):
    done, folder = stopped
    check_ended(
        done,
        "error: guard.non_finite: the loss is nan at step 6.",
        "optimizer.lr=0.0001 or train.clip_norm=1.0",
        "guard.non_finite=warn",
        "debug=replay batch=outputs/runs/",
    )
    out = only_run(folder)
    (saved,) = out.glob("checkpoints/*.pt")
    assert saved.name == "step-00000004.pt"
    assert f"init.weights=outputs/runs/{out.name}/checkpoints/step-00000004.pt" in done.stderr
    weights = torch.load(saved, weights_only=True)["model"]
    assert all(w.isfinite().all() for w in weights.values())
    batch = read_json(out / "guard" / "batch-000006.json")
    assert (batch["steps"], batch["epoch"], batch["seed"]) == ([6, 6], 1, 0)
    assert batch["micro_batches"] == samples(6)
    result = read_json(out / "result.json")
    assert (result["status"], result["diverged"], result["diverged_step"]) == ("failed", True, 6)
    assert "the loss is nan at step 6" in result["error"]


def test_the_store_has_the_reason_and_the_batch(stopped, reader):
    client = reader()
    (run,) = runs_in(client, "guards")
    assert run.info.status == "FAILED"
    assert run.data.tags["error"].startswith("Diverged: guard.non_finite: the loss is nan at step")
    files = [file.path for file in client.list_artifacts(run.info.run_id)]
    assert "result.json" in files
    guards = [file.path for file in client.list_artifacts(run.info.run_id, "guard")]
    assert guards == ["guard/batch-000006.json"]


def test_a_replay_finds_the_planted_module(stopped, replay, tmp_path):
    (batch,) = (only_run(stopped[1]) / "guard").iterdir()
    words = (*OWN[2:], *NAN, "model.at=1", "precision=bf16-mixed")
    printed = replay(*words, "debug=replay", f"batch={batch}")
    assert "replay of step 6: 8 samples, weights: those before the step" in printed
    assert "It begins in the forward, at the output of body.2 (bfloat16), in 32-true as well" in (
        printed
    )
    assert re.search(r"body\.2 +│ Times +│ output +│ bfloat16 +│ 0 +│ 100\.0%", printed)
    assert not list((tmp_path / "again").glob("checkpoints/*"))


def test_a_replay_has_the_weights_of_the_step(stopped, replay):
    done, folder = stopped
    command = next(line for line in done.stderr.splitlines() if "debug=replay" in line)
    again = shlex.split(command)[6:]
    found = "It begins in the forward, at the output of body.2 (float32)"
    for words in (again, ["debug=replay", again[-1]]):
        printed = replay(*words)
        assert "trains 1 steps again, from /" in printed
        assert "checkpoints/step-00000004.pt" in printed
        assert found in printed
    checkpoints = only_run(folder) / "checkpoints"
    checkpoints.rename(folder / "kept")
    printed = replay("debug=replay", again[-1])
    (folder / "kept").rename(checkpoints)
    assert "trains 5 steps again, from the beginning" in printed
    assert found in printed


def test_a_replay_compares_from_the_buffers_before_the_step(faulty, lab):
    """In 32-true as in bf16-mixed the counter of the steps is that of the step that failed."""
    once = ("model.factor=inf", "model.at=6", "+model.once=true", "precision=bf16-mixed")
    faulty(*once)
    (batch,) = (only_run(lab) / "guard").iterdir()
    done = faulty(*once, "debug=replay", f"batch={batch}", "hydra.run.dir=again")
    assert "at the output of body.2 (bfloat16), in 32-true as well" in done.stdout, done.stdout


HOOK = """
def score(model, info):
    # Better once, then worse: the schedule lowers the rate.
    return {"score": -float(info.step != 1)}
"""
FOLLOWED = (
    "task.after_evaluation=lab.hooks.score task.quality=score task.direction=maximize "
    "scheduler=constant scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau "
    "+scheduler.patience=0 train.eval_every=1"
)


@pytest.mark.parametrize(
    "keys",
    ["precision=16-mixed guard.overflow_steps=1", FOLLOWED],
    ids=["a loss scale", "a schedule that follows a hook"],
)
def test_a_replay_trains_to_the_very_bits(faulty, lab, compose, keys):
    (lab / "lab" / "hooks.py").write_text(HOOK)
    faulty(*NAN, *keys.split(), "checkpoint.every_steps=5", "checkpoint.keep=9")
    out = only_run(lab)
    batch = next((out / "guard").iterdir())
    path = out / "checkpoints" / "step-00000005.pt"
    wanted = torch.load(path, weights_only=True)
    path.unlink()
    spec = run_of_batch(compose("model=mlp").with_value("batch", str(batch)), Invocation())
    state, micros, _ = state_before_step(
        spec, saved_batch.read_saved_batch(batch), torch.device("cpu"), lambda line: None
    )
    found = checkpoint_state_dict(state, spec)
    assert len(micros[0][0]) == 8
    assert found["step"] == 5
    for name, tensor in wanted["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    moments = [o["optimizers"][0]["state"][0]["exp_avg"] for o in (found, wanted)]
    assert torch.equal(*moments)
    assert found["loss_scale"] == wanted["loss_scale"]


def test_a_replay_names_what_the_precision_alone_breaks(faulty, lab):
    big = ("model.factor=1e6", "model.at=1", "precision=16-mixed")
    faulty(*big, "guard.overflow_steps=2")
    (batch,) = (only_run(lab) / "guard").iterdir()
    done = faulty(*big, "debug=replay", f"batch={batch}", "hydra.run.dir=again")
    assert "at the output of body.2 (float16); in 32-true it is finite, at most " in done.stdout
    assert "precision.keep_fp32=[body.2]" in done.stdout
    sound = faulty("debug=replay", f"batch={batch}", "hydra.run.dir=sound")
    assert "Everything is finite with these weights. Type init.weights=" in sound.stdout


def test_weights_that_are_not_finite_replace_no_good_ones(faulty, lab):
    faulty(*NAN, "guard.non_finite=warn", "checkpoint.every_steps=2").check_ok(
        "warning: the weights of step 12 are not finite and are not saved."
    )
    (saved,) = only_run(lab).glob("checkpoints/*.pt")
    assert saved.name == "step-00000004.pt"


def test_overflows_in_a_row_end_the_run_with_its_last_good_state(faulty, lab):
    done = faulty("precision=16-mixed", "precision.loss_scale.fixed=1e30", "guard.overflow_steps=5")
    check_ended(
        done,
        "guard.overflow: 5 steps in a row overflowed, up to step 5",
        "Try precision.loss_scale.fixed=null",
    )
    # No step was applied: these are the weights that it began with.
    assert "init.weights=" not in done.stderr
    assert list(only_run(lab).glob("checkpoints/*.pt"))


SPIKE = "model.factor=1e4 model.at=25 train.max_steps=28"
WARNINGS = message_table(f"""
precision=16-mixed precision.loss_scale.init_scale=0.5 => the loss scale fell to 0.5 at step 1
{SPIKE} guard.spike=warn => the loss leapt to
data.fault=rotten guard.data=warn guard.non_finite=ignore => sample 17 of the train set: its inputs
""")


@pytest.mark.parametrize(("words", "parts"), WARNINGS)
def test_a_warning_lets_the_run_finish(faulty, words, parts):
    done = faulty(*words.split()).check_ok()
    assert any("warning: " in line and parts[0] in line for line in done.stdout.splitlines())


def test_a_spike_stops_a_run_or_is_ignored(faulty):
    check_ended(faulty(*SPIKE.split(), "guard.spike=stop"), "the loss leapt to")
    ignored = faulty(*SPIKE.split(), "guard.spike=ignore").check_ok()
    assert "the loss leapt to" not in ignored.stdout + ignored.stderr


FOUND = message_table("""
data.fault=rotten => sample 17 of the train set: its inputs are not finite | guard.data=warn
data.fault=label => sample 17 of the train set: label 12 is outside the 2 classes (0 to 1)
    data.meta.classes=13
""")


@pytest.mark.parametrize(("word", "parts"), FOUND)
def test_data_are_looked_at_before_training(faulty, lab, word, parts):
    check_ended(faulty(word), *parts)
    assert not list(only_run(lab).glob("checkpoints/*"))


def test_an_empty_split_is_named(faulty):
    faulty("data.val=0").check_refused("data: the val set is empty")


def step_of(sample):
    return next(step for step in range(1, 9) if sample in samples(step)[0])


def test_a_label_that_was_not_checked_is_reported_at_its_step(faulty, lab):
    done = faulty("data.fault=label", "guard.data=ignore")
    step = step_of(17)
    check_ended(
        done,
        f"error: At step {step}: Target 12 is out of bounds. Sample 17: label 12 is "
        "outside the 2 classes",
        "error.txt",
        f"guard/batch-{step:06d}.json",
    )
    batch = read_json(only_run(lab) / "guard" / f"batch-{step:06d}.json")
    assert batch["micro_batches"] == samples(step)


def test_a_late_device_assertion_is_searched_for_in_the_steps_before(faulty):
    step = step_of(17)
    done = faulty(
        "data.fault=label",
        "guard.data=ignore",
        f"model.at={step}",
        "model.crash='CUDA error: device-side assert triggered'",
    )
    check_ended(
        done,
        f"At one of steps 1 to {step}: CUDA error: device-side assert triggered. Sample 17: "
        "label 12 is outside the 2 classes",
        "guard/batch-000001.json",
    )


def test_another_error_keeps_its_traceback(faulty):
    done = faulty("model.crash='a bug of my own'")
    assert done.rc == 1
    assert "RuntimeError: a bug of my own" in done.stderr
    assert "Traceback" in done.stderr


def check_worker_death(done, lab, *parts):
    """Check that a process died over sample 17."""
    check_ended(done, "A process that loads the train set for step", "train.num_workers=0", *parts)
    (path,) = (only_run(lab) / "guard").iterdir()
    batch = read_json(path)
    assert 17 in [index for micro in batch["micro_batches"] for index in micro]
    assert "Traceback" in (only_run(lab) / "error.txt").read_text()


@forks
# Where a worker dies while it hands a batch over, torch looks for free file descriptors, and leaves
# the files that it opens for that to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", ["kill", pytest.param("exit", marks=pytest.mark.extended)])
def test_a_process_that_dies_while_training_is_reported_with_its_samples(faulty, lab, fault):
    done = faulty(f"data.fault={fault}", "guard.data=ignore", "train.num_workers=1")
    check_worker_death(done, lab, "DataLoader worker (pid")


@forks
def test_a_death_that_torch_reports_late_is_explained(faulty, monkeypatch):
    explain = error_rules.precision_advice

    def interrupted(*args):
        monkeypatch.setattr(error_rules, "precision_advice", explain)
        raise RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed. ")

    monkeypatch.setattr(error_rules, "precision_advice", interrupted)
    done = faulty("model.crash='a bug of my own'", "train.num_workers=1")
    check_ended(done, "DataLoader worker (pid 17) is killed by signal", "train.num_workers=0")


@forks
def test_a_process_that_raises_names_its_batch(faulty, lab):
    done = faulty("data.fault=raise", "guard.data=ignore", "train.num_workers=1")
    check_worker_death(
        done, lab, f"for step {step_of(17)} failed: ValueError: sample 17 is broken."
    )


@forks
def test_a_process_that_dies_in_the_first_batches_is_reported(faulty):
    done = faulty("data.fault=raise", "train.num_workers=1")
    check_ended(
        done, "A process that loads the train set's first batches failed: ValueError: sample 17"
    )


LABEL = "In the evaluation of the {} set: Target 12 is out of bounds. Sample 17: "
RAISE = "A process that loads the {} set failed: ValueError: sample 17 is broken"


@forks
@pytest.mark.parametrize(
    ("fault", "where", "workers", "message"),
    [
        ("label", "val", 0, LABEL),
        ("raise", "test", 1, RAISE),
        pytest.param("label", "test", 0, LABEL, marks=pytest.mark.extended),
        pytest.param("raise", "val", 1, RAISE, marks=pytest.mark.extended),
    ],
)
def test_a_fault_in_an_evaluation_is_named_by_its_set(faulty, where, fault, workers, message):
    words = ("guard.data=ignore", "train.max_steps=1", f"train.num_workers={workers}")
    done = faulty(f"data.fault={fault}", f"data.where={where}", *words)
    check_ended(done, message.format(f"{where}/bad"), "error.txt")


def test_a_sweep_continues_and_reports_the_jobs_that_diverged(lab, main):
    words = ("-m", "model.factor=1.0,nan,0.5", "train.max_steps=4", "hydra/launcher=basic")
    done = main(*OWN, "model.at=3", *words)
    assert done.rc == 1
    results = job_results(lab)
    assert [(r["status"], r["diverged"]) for r in results] == [
        ("finished", False),
        ("failed", True),
        ("finished", False),
    ]
    assert results[1]["device"]
    assert results[1]["train_loss"] is not None
    report = (only_sweep(lab) / "report.md").read_text()
    assert "guard.non_finite: the loss is nan at step 3" in report
    assert "Diverged: 32-true model.factor=nan" in done.stdout


def test_a_file_that_is_no_batch_gets_one_message(faulty, lab):
    (lab / "b.json").write_text("{}")
    for path in ("b.json", "none.json"):
        faulty("debug=replay", f"batch={path}").check_refused(
            f"batch={path} is no batch that a guard saved"
        )
    faulty("debug=replay").check_refused("batch=outputs/runs/<time>/guard/")
