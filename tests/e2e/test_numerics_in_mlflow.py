"""Files and metrics of numerics.every in a store, and with two processes."""

import pytest
from waiting import SECONDS

from runner.diagnostics.numerics import read

FILES = {"numerics.json", "numerics.html"}
TYPED = ("model=mlp", "model.hidden=[16]", "numerics.every=5", "train.max_steps=10")


def test_artifacts_and_metrics_are_in_the_store(main, store, run_named, reader, tmp_path):
    named = f"tracking.uri={store}", "tracking.run_name=numerics"
    main(*TYPED, "train.log_every=4", *named).check_ok()
    client, run = reader(), run_named("numerics")
    assert {item.path for item in client.list_artifacts(run.info.run_id)} >= FILES
    assert "bf16-mixed" in run.data.tags["numerics"]
    for name in ("underflow", "overflow", "swallowed"):
        points = client.get_metric_history(run.info.run_id, f"numerics/{name}_share")
        assert [p.step for p in points] == [5, 10]
        assert all(0 <= p.value <= 1 for p in points)
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    client.download_artifacts(run.info.run_id, "numerics.json", str(fetched))
    found = read(fetched)
    assert [probe.step for probe in found.probes] == [5, 10]
    worst = max(
        m.formats["bfloat16"].swallowed for m in found.probes[-1].measured if m.kind == "updates"
    )
    assert worst == points[-1].value


@pytest.mark.slow
def test_two_processes_leave_one(tmp_path, start_command):
    torchrun = ("--standalone", "--nproc-per-node=2", "-m", "runner")
    typed = (*TYPED, "strategy=ddp", "tracking=none")
    process = start_command(*torchrun, *typed, module="torch.distributed.run")
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    (path,) = tmp_path.rglob("numerics.json")
    numbers = {(m.module, m.kind): m for m in read(path.parent).probes[0].measured}
    assert numbers["head", "activations"].elements == 32 * 10  # of a batch of 64, half
    assert ("head", "updates") in numbers
