"""Several processes read one stream, and train on it as one process does."""

import pytest
from processes import MLP, SGD, close

pytestmark = pytest.mark.slow

STREAM = (
    f"{MLP} {SGD} ~data task=classification +data._target_=streams.made +data.meta.input=[16] "
    "+data.meta.classes=4 train.batch_size=11 train.max_steps=6 train.eval_every=3 "
    "train.log_every=2 precision=64-true"
)
STRATEGIES = ("ddp", "fsdp")
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module")
def alone(run_in_processes, tmp_path_factory):
    jobs = {"plain": STREAM, "accumulated": f"{STREAM} train.accumulate=2"}
    return run_in_processes(1, jobs, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two(run_in_processes, tmp_path_factory):
    jobs = {"differs": f"{STREAM} strategy=ddp +data.differs=true"}
    for strategy in STRATEGIES:
        jobs[f"{strategy}-plain"] = f"{STREAM} strategy={strategy} train.num_workers=1"
        jobs[f"{strategy}-accumulated"] = f"{STREAM} strategy={strategy} train.accumulate=2"
    return run_in_processes(2, jobs, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", ["plain", "accumulated"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_see_the_batches_of_one(alone, two, strategy, name):
    """Of 23 examples the last batch of a pass has one, which only one process counts."""
    one, many = alone[name], two[f"{strategy}-{name}"]
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/accuracy"):
        close(one.values(key), many.values(key), **EXACT)
    assert many.values("train/loss") == many.values("train/loss", rank=1)


def test_one_process_resumes_a_run_of_two(alone, run_in_processes, tmp_path):
    parts = {"part": f"{STREAM} strategy=ddp train.max_steps=4"}
    run_in_processes(2, parts, tmp_path)
    rest = {"part": f"{STREAM} checkpoint.resume=auto train.max_steps=6"}
    found = run_in_processes(1, rest, tmp_path)["part"]
    output = (tmp_path / "output-0.txt").read_text()
    assert "the stream is read again up to example 11 of pass 2" in output
    close(found.values("train/loss"), alone["plain"].values("train/loss"), **EXACT)


def test_processes_that_read_different_streams_are_refused(two):
    for rank in (0, 1):
        refused = two["differs"].text(f"refused-{rank}.txt")
        assert "the processes read different examples from the train set's stream" in refused
