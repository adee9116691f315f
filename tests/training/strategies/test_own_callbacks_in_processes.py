"""Callbacks of one's own in several processes: the main one calls them, and all agree."""

import pytest

pytestmark = pytest.mark.slow

OWN = (
    "model=mlp model.hidden=[16] data=digits optimizer=sgd train.max_steps=6 train.batch_size=32 "
    "train.log_every=1 train.eval_every=6"
)
STOP = "+callbacks.stop._target_=process_callbacks.Stop"
FAIL = "+callbacks.fail._target_=process_callbacks.Fail"


@pytest.fixture(scope="module")
def several(run_in_processes, tmp_path_factory):
    jobs = {
        "stop": f"{OWN} {STOP} strategy=ddp",
        "fail": f"{OWN} {FAIL} strategy=ddp",
        "shards": f"{OWN} {FAIL} +callbacks.fail.reads=true strategy=fsdp",
    }
    return run_in_processes(2, jobs, tmp_path_factory.mktemp("callbacks"))


def test_all_processes_stop_together(several):
    found = several["stop"]
    for rank in (0, 1):
        assert max(found.values("train/loss", rank)) == 3
        assert list(found.values("val/loss", rank)) == [3]
    assert list(found.values("stop/loss")) == [1, 2, 3]
    assert found.values("stop/loss", 1) == {}
    assert found.content()["callbacks"]["own_callbacks"] == {"stop": {"at": 2}}
    written = sorted(path.name for path in found.folder.rglob("callbacks/stop/*.txt"))
    assert written == ["step-1.txt", "step-2.txt", "step-3.txt"]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("fail", "callbacks.fail.on_steps, called at step 2, fails: ValueError: failed as it was"),
        ("shards", "called at step 1, fails: ValueError: the model's weights are sharded among"),
    ],
)
def test_a_callback_that_fails_ends_all_processes(several, job, message):
    found = several[job]
    assert message in found.text("refused-0.txt")
    assert "A callback fails in the main process." in found.text("refused-1.txt")
