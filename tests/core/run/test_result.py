import io
import math
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from rich.console import Console

from runner.core.base.fmt import format_number
from runner.core.run.run_result import RunResult
from runner.output.console import plain_console
from runner.tracking.result_table import page_lines, print_result, read_results, table_rows

DONE = RunResult(
    precision="16-mixed",
    label="16-mixed mlp digits",
    folder="/out/1",
    metrics={"val/accuracy": 0.91, "val/loss": 0.3},
    quality="val/accuracy",
    best=0.93,
    steps=40,
    examples_per_second=1234.5,
    skipped_steps=2,
    loss_scale=32768.0,
    peak_memory_mib=12.0,
    device="Some CPU",
    kernels="float32_accumulate",
    overrides=("precision=16-mixed",),
)
FAILED = RunResult(
    precision="32-true",
    label="32-true seed=1",
    folder="/out/2",
    status="failed",
    error="ValueError: boom\nmore",
)


def printed(result, width=200):
    console = Console(file=io.StringIO(), width=width)
    print_result(console, result)
    return console.file.getvalue()


def test_a_result_reads_back(tmp_path):
    DONE.write(tmp_path / "deep" / "folder")
    back = RunResult.read(tmp_path / "deep" / "folder")
    assert replace(back, overrides=tuple(back.overrides)) == DONE


def test_an_earlier_result_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    DONE.write(tmp_path)

    def cut_off(descriptor, mode):
        raise OSError

    with monkeypatch.context() as full_disk:
        full_disk.setattr("runner.core.base.files.os.fdopen", cut_off)
        with pytest.raises(OSError):
            FAILED.write(tmp_path)
    assert RunResult.read(tmp_path).label == DONE.label


def test_numbers_that_are_not_finite_read_back(tmp_path):
    replace(DONE, train_loss=math.inf, metrics={"val/accuracy": math.nan}).write(tmp_path)
    back = RunResult.read(tmp_path)
    assert back.train_loss == math.inf
    assert math.isnan(back.objective)


def test_the_objective_is_the_quality():
    assert DONE.objective == 0.91
    assert math.isnan(FAILED.objective)


def test_brackets_of_an_override_are_not_taken_for_markup(capsys):
    odd = replace(DONE, label="32-true precision.keep_fp32=[head]", folder="/out/[red]")
    print_result(plain_console(), odd)
    text = capsys.readouterr().out
    assert "precision.keep_fp32=[head]" in text
    assert "/out/[red]" in text


def test_numbers_have_four_digits():
    texts = {
        None: "",
        0.123456: "0.1235",
        12.3456: "12.35",
        999.96: "1000",
        65536.0: "65536",
        1e6: "1000000",
        2.0**-15: "3.052e-05",
        1e20: "1e+20",
        math.inf: "inf",
        -math.inf: "-inf",
        math.nan: "nan",
        -65536.0: "-65536",
        0.0: "0",
    }
    assert {value: format_number(value) for value in texts} == texts


def test_the_table_shows_every_value_of_a_result_and_no_row_for_a_missing_one():
    text = printed(DONE)
    shown = "0.91|best val/accuracy|0.93|40|1234|12 MiB|32768|float32_accumulate|Some CPU|/out/1"
    for part in shown.split("|"):
        assert part in text, part
    assert "MLflow" not in text
    text = printed(replace(DONE, loss_scale=None, skipped_steps=None, kernels="", best=0.91))
    for part in ("skipped", "best", "kernels"):
        assert part not in text


@pytest.mark.parametrize("width", [20, 80, 160])
def test_the_pages_of_a_run_are_on_lines_of_their_own_in_every_width(width, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = replace(DONE, run_id="r1", experiment_id="4", dashboard="/#/charts")
    page = "/#/experiments/4/runs/r1?workflowType=machine_learning"
    lines = printed(replace(run, tracking_uri="http://host:5000"), width).splitlines()
    assert lines[-3:] == [
        "MLflow: run r1",
        f"page: http://host:5000{page}",
        "dashboard: http://host:5000/#/charts",
    ]
    assert not any("http" in line for line in lines[:-3]), "no column of the table"
    own = replace(run, tracking_uri=f"sqlite:///{tmp_path}/outputs/mlflow.db")
    lines = printed(own, width).splitlines()
    assert lines[-1] == "MLflow: run r1; to see it: python -m runner ui"
    other = replace(run, tracking_uri="sqlite:////x.db", experiment="night")
    assert page_lines(other, "parent run")[0] == (
        "MLflow",
        "parent run r1; to see it: python -m runner ui tracking.uri=sqlite:////x.db "
        "tracking.experiment=night",
    )
    # As runner.load returns the jobs of a sweep whose store this command does not name.
    unnamed = "run r1; to see it: python -m runner ui 'tracking.uri=<its store>'"
    assert page_lines(run)[0] == ("MLflow", unnamed)
    assert page_lines(DONE) == []


def test_the_pages_of_a_local_store_are_those_of_a_server_that_has_the_run(tmp_path):
    database = tmp_path / "mlflow.db"
    record = tmp_path / "mlflow.db.port"
    run = replace(DONE, run_id="r1", dashboard="/#/charts", tracking_uri=f"sqlite:///{database}")
    alone = [("MLflow", page_lines(run)[0][1])]
    assert page_lines(run) == alone, "no server"
    asked = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.path.endswith("?run_id=r1") else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    for text in ("", "x", "999999", "1"):
        record.write_text(text)
        assert page_lines(run) == alone, text
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever).start()
        address = f"http://127.0.0.1:{server.server_port}"
        record.write_text(str(server.server_port))
        found = page_lines(run)
        foreign = page_lines(replace(run, run_id="r2"))
        server.shutdown()
    assert [name for name, _ in found] == ["MLflow", "page", "dashboard"]
    assert found[2][1] == f"{address}/#/charts"
    assert foreign[1:] == [], "the server of another folder"
    assert asked[-1] == "/api/2.0/mlflow/runs/get?run_id=r2"


def test_a_run_that_was_not_timed_has_no_step_time_in_tables():
    timed = replace(DONE, step_ms=2.0)
    rows = table_rows([timed, replace(timed, examples_per_second=None)])
    assert [row["step_ms"] for row in rows] == [2.0, None]


def test_the_results_of_a_sweep_come_in_the_order_of_its_jobs(tmp_path):
    for job in ("10", "2", "0"):
        replace(DONE, label=job).write(tmp_path / job)
    (tmp_path / "3").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "4").write_text("a file")
    found = read_results(tmp_path)
    assert [r.label for r in found] == ["0", "2", "job 3", "10"]
    assert (found[2].status, found[2].error) == ("failed", "died without a result")
