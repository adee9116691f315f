"""doctor, ui and --help, in this process."""

import sqlite3

import pytest
import torch

from runner.core.base.accelerators import available_kinds
from runner.precision.registry import precision_names, supported_precisions
from runner.tracking.reader import Reader


def test_doctor_lists_every_precision_for_every_device(main):
    done = main("doctor").check_ok()
    # Those that need the same thing are one row.
    assert done.stdout.count("compute capability 8.9") <= len(available_kinds())
    for name in precision_names():
        assert done.stdout.count(f" {name} ") >= len(available_kinds())
    for row in supported_precisions(torch.device("cpu")):
        if not row.runs:
            assert row.remedy.split()[0] in done.stdout


def test_help_lists_options_of_the_user_too(main, tmp_path):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "my_net.yaml").write_text("_target_: torch.nn.Identity\n")
    main("--help", "--config-dir", str(tmp_path / "conf")).check_ok(
        "my_net", "16-mixed", "resnet", "doctor", "report", "mode=plan"
    )
    assert "model=my_net" in main("--help", "model", "--config-dir", str(tmp_path / "conf")).stdout


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's own, of SQLAlchemy
def test_pages_of_a_store_with_a_sweep(main, tmp_path):
    command = "-m seed=0,1 model=mlp model.hidden=[4] train.max_steps=1 hydra/launcher=basic"
    assert main(*command.split()).rc == 0
    database = tmp_path / "outputs" / "mlflow.db"
    uri = f"sqlite:///{database}"
    found = dict(Reader(uri).pages("precision-runner"))
    with sqlite3.connect(database) as store:
        rows = store.execute("select value from tags where key='sweep_id'")
        (sweep_id,) = rows.fetchone()
        rows = store.execute("select key from experiment_tags").fetchall()
    assert list(found) == ["report of the newest sweep", "newest sweep", "sweeps", "runs"]
    assert found["report of the newest sweep"].endswith(
        "/artifacts/report.html?workflowType=machine_learning"
    )
    assert f"viewStateShareKey=precision-runner-{sweep_id}&" in found["newest sweep"]
    view = "mlflow.sharedViewState.precision-runner"
    assert {f"{view}-{sweep_id}", view} < {key for (key,) in rows}
    found = dict(Reader(uri).pages("another"))
    assert found == {"no experiment 'another' yet": ""}
