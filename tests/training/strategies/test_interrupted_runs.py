"""Interrupted runs of several processes resume, also with another number of processes."""

import shutil
from pathlib import Path

import pytest
from processes import IMAGES, SGD, Outcome, close
from waiting import SECONDS

pytestmark = pytest.mark.slow

HELPERS = Path(__file__).parents[2] / "helpers"
OWN = (
    f"{IMAGES} {SGD} ~model train.eval_every=4 train.ema=0.5 checkpoint.every_steps=3 "
    "optimizer=adamw"
)
KINDS = ("ddp", "fsdp")
UPDATES = {
    "ddp": "precision=bf16-true precision.update=stochastic_rounding",
    "fsdp": "precision=bf16-true precision.update=remainders",
}
STATE = "optimizer.state_dtype=bfloat16"


def typed(strategy, model, steps, more=""):
    own = f"+model._target_=nets.{model} strategy={strategy} train.max_steps={steps}"
    return f"{OWN} {own} {more}"


@pytest.fixture(scope="module")
def runs(run_in_processes, tmp_path_factory):
    """Runs of twelve steps, and runs of five, of which some are resumed."""
    folder = tmp_path_factory.mktemp("resumed")
    jobs = {}
    saved = f"checkpoint.path={folder / 'ddp-Stays-whole'}"
    rest = {"evaluated": f"strategy=ddp mode=evaluate {saved}"}
    for kind in KINDS:
        jobs[f"{kind}-Stays-whole"] = typed(kind, "Stays", 12)
        jobs[f"{kind}-Stays-cut"] = typed(kind, "Stays", 5)
        for name, more in (("Drops", ""), ("Updates", UPDATES[kind]), ("State", STATE)):
            jobs[f"{kind}-{name}-whole"] = typed(kind, "Drops", 12, more)
            jobs[f"{kind}-{name}-cut"] = typed(kind, "Drops", 5, more)
            resumed = f"{more} checkpoint.resume={folder / f'{kind}-{name}-cut'}"
            rest[f"{kind}-{name}-rest"] = typed(kind, "Drops", 12, resumed)
    return run_in_processes(2, jobs, folder) | run_in_processes(2, rest, folder)


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.extended)])
def elsewhere(request, run_in_processes, runs):
    """Runs of two processes that another number of them continues, by strategy."""
    folder = runs["evaluated"].folder.parent
    jobs, found = {}, {}
    for kind in KINDS:
        name = f"{kind}-Stays-{request.param}"
        path = shutil.copytree(folder / f"{kind}-Stays-cut", folder / name)
        strategy = "single" if request.param == 1 else kind
        jobs[f"{name}-rest"] = typed(strategy, "Stays", 12, f"checkpoint.resume={path}")
        found[kind] = Outcome(path)
    run_in_processes(request.param, jobs, folder)
    return found


def test_processes_share_an_evaluation(runs):
    """Its sums cover all examples, and no example counts twice."""
    trained, evaluated = runs["ddp-Stays-whole"], runs["evaluated"]
    for key in ("val/loss", "val/accuracy"):
        assert evaluated.values(key)[12] == pytest.approx(trained.values(key)[12], rel=1e-6)
    assert evaluated.values("val/loss", rank=1) == evaluated.values("val/loss")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("job", ["Drops", "Updates", "State"])
def test_a_resumed_run_ends_as_an_uninterrupted_one(runs, kind, job):
    """Bit by bit, including the random numbers of each process."""
    whole, cut = runs[f"{kind}-{job}-whole"], runs[f"{kind}-{job}-cut"]
    close(whole.weights(), cut.weights(), rtol=0, atol=0)
    close(whole.averages(), cut.averages(), rtol=0, atol=0)
    close(whole.moments(), cut.moments(), rtol=0, atol=0)
    assert whole.values("val/loss")[12] == cut.values("val/loss")[12]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_in_another_number_of_processes(runs, elsewhere, kind):
    whole, resumed = runs[f"{kind}-Stays-whole"], elsewhere[kind]
    close(whole.weights(), resumed.weights(), rtol=1e-4, atol=1e-5)
    close(whole.averages(), resumed.averages(), rtol=1e-4, atol=1e-5)
    assert len(resumed.values("train/loss")) == 12


def test_a_sharded_checkpoint_holds_the_same_as_one_file(runs):
    sharded, single = runs["fsdp-Stays-whole"], runs["ddp-Stays-whole"]
    close(sharded.weights(), single.weights(), rtol=1e-5, atol=1e-6)
    shards = [*sharded.folder.glob("checkpoints/*.shards/*.safetensors")]
    assert len(shards) == 2
    assert sum(path.stat().st_size for path in shards) > sharded.checkpoint().stat().st_size / 4
    assert [p.suffix for p in sorted(sharded.folder.glob("checkpoints/*"))] == [".pt", ".shards"]


def test_a_killed_process_is_restarted_and_its_run_ends_alike(tmp_path, root, start_command, runs):
    """By torchrun; what a strategy resumes does not depend on who restarts it."""
    process = start_command(
        *("--standalone", "--max-restarts=1", "--monitor-interval=0.2", "--nproc-per-node=2"),
        *f"-m runner tracking=none {typed('fsdp', 'Dies', 12)}".split(),
        module="torch.distributed.run",
        env={"PYTHONPATH": f"{root}:{HELPERS}"},
    )
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err[-3000:]
    assert "resumed at step 6 of 12" in out
    (folder,) = (tmp_path / "outputs" / "runs").iterdir()
    close(Outcome(folder).weights(), runs["fsdp-Drops-whole"].weights(), rtol=0, atol=0)


def test_a_changed_shard_is_reported(runs, tmp_path):
    from runner.core.base.errors import ConfigError
    from runner.core.record.checkpoint_file import load

    folder = shutil.copytree(runs["fsdp-Stays-whole"].folder / "checkpoints", tmp_path / "copy")
    (shard, *_) = sorted(folder.glob("*.shards/*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        load(next(folder.glob("*.pt")))
    shard.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        load(next(folder.glob("*.pt")))
