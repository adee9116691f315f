import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.peers.jobs import MLP
from bench.peers.measure import compare_losses, running_workers
from bench.peers.worker import Order

STEPS = 20
REPORT = {"first": [1.0, 0.5], "dtype": "float16"}


def order(contender, precision):
    return Order(contender, "mlp", precision, "cpu", STEPS, 1, 1, first=STEPS)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_the_runner_computes_what_a_loop_by_hand_does(precision, tmp_path):
    names = ["raw", "runner, tracking=none"]
    orders = [order(name, precision) for name in names]
    with running_workers(Path(sys.executable), orders, tmp_path) as running:
        reports = {name: worker.read() for name, worker in running.items()}
        for worker in running.values():
            worker.resume()
            worker.read()
            worker.finish()
    raw, mine = (reports[name] for name in names)
    assert len(raw["first"]) == STEPS
    assert mine["first"] == pytest.approx(raw["first"], rel=1e-6)
    job = replace(MLP, steps=STEPS)
    assert not compare_losses(job, precision, names[1], reports, "cpu").void


def test_what_computes_in_another_dtype_is_not_compared():
    reports = {"raw": REPORT, "Accelerate": REPORT | {"dtype": "float32"}}
    row = compare_losses(MLP, "16-mixed", "Accelerate", reports, "cpu")
    assert row.void == "computes in float32"


def test_what_has_other_losses_is_not_compared():
    reports = {"raw": REPORT, "Fabric": REPORT | {"first": [1.0, 0.5001]}}
    assert "losses differ" in compare_losses(MLP, "16-mixed", "Fabric", reports, "cpu").void
    reports["Fabric"] = REPORT | {"first": [1.0, float("nan")]}
    assert "losses differ" in compare_losses(MLP, "16-mixed", "Fabric", reports, "cpu").void
    assert not compare_losses(MLP, "16-mixed", "raw", reports, "cpu").void
