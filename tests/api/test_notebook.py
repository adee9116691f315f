"""A notebook trains the classes and objects of its own cells, and shows progress and the report."""

import re
from typing import ClassVar

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

CLASSES = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import runner

class Net(nn.Module):
    def __init__(self, classes=2):
        super().__init__()
        self.linear = nn.Linear(8, classes)

    def forward(self, x):
        return self.linear(x)

x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()
data = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
net = Net()
"""
RUN = """
result = runner.run(["precision=16-mixed", "train.max_steps=6", "tracking=none"],
                    model=net, data=data, loss=nn.functional.cross_entropy)
result
"""
SWEEP = """
sweep = runner.sweep(["precision=32-true,bf16-mixed", "train.max_steps=4",
                      "tracking=none"], model=Net, data=data)
sweep
"""
NAMED = """
from pathlib import Path
Path("conf/model").mkdir(parents=True)
Path("conf/model/net.yaml").write_text("_target_: __main__.Net")
named = runner.sweep(["model=net", "seed=0,1", "train.max_steps=2", "tracking=none"],
                     data=data, config_dir="conf")
print([run.label for run in named.runs], len(named.history()))
"""
REFUSED = """
runner.run(["precision=nonsense"], model=net, data=data)
"""
STOPPED = """
import signal

class Interrupt(runner.RunCallback):
    def on_steps(self, records, run):
        signal.raise_signal(signal.SIGINT)

runner.sweep(["seed=0,1,2", "train.max_steps=4", "train.log_every=1", "tracking=none"],
             model=Net, data=data, out="stopped", callbacks=[Interrupt])
"""
LATE = """
calls = 0

class Late(Net):
    def forward(self, x):
        global calls
        calls += 1
        return helper(x) if calls == 12 else super().forward(x)

def helper(x):
    raise ValueError("my own mistake")

runner.run(["train.max_steps=40", "tracking=none"], model=Late, data=data)
"""
FIRST = """
class Wrong(Net):
    def forward(self, x):
        return self.linear(missing)

runner.run(["train.max_steps=2", "tracking=none"], model=Wrong, data=data)
"""
PROCESSES = """
runner.sweep(["seed=0,1", "train.max_steps=2", "tracking=none"])
"""
SOURCES = (CLASSES, RUN, SWEEP, NAMED, REFUSED, STOPPED, PROCESSES, LATE, FIRST)


class Client(NotebookClient):
    """Executes the cells, and keeps each page that one of them has shown meanwhile."""

    shown: ClassVar = []

    def process_message(self, message, cell, index):
        html = message["content"].get("data", {}).get("text/html", "")
        self.shown.append((index, html))
        return super().process_message(message, cell, index)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The cells of a notebook after their execution by a real kernel."""
    cells = [nbformat.v4.new_code_cell(source) for source in SOURCES]
    for cell, source in zip(cells, SOURCES, strict=True):
        if source in (REFUSED, STOPPED, LATE, FIRST):
            cell.metadata["tags"] = ["raises-exception"]
    book = nbformat.v4.new_notebook(cells=cells)
    folder = tmp_path_factory.mktemp("notebook")
    client = Client(book, timeout=300, kernel_name="python3")
    try:
        client.execute(cwd=str(folder))
    except CellExecutionError as error:
        pytest.fail(str(error))
    return book.cells, folder


def texts(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def pages(cell):
    found = (output.get("data", {}).get("text/html") for output in cell.outputs)
    return [page for page in found if page]


def folded(page):
    """The line that a log is folded under, and the log."""
    found = re.fullmatch(r"<details><summary>(.*)</summary><pre>(.*)</pre></details>", page, re.S)
    return found.groups()


def test_a_run_shows_its_result_once_and_its_log_folded(notebook):
    cells, folder = notebook
    log, table = pages(cells[1])
    line, text = folded(log)
    assert re.fullmatch(r"16-mixed Net TensorDataset  val/accuracy .*  finished", line)
    assert "train/loss" in text
    assert "16-mixed Net TensorDataset: finished" in table
    assert texts(cells[1]) == ""
    assert list((folder / "outputs" / "runs").glob("*/metrics.jsonl"))


def test_a_sweep_over_a_class_of_the_notebook_shows_its_report(notebook):
    cells, _ = notebook
    log, report = pages(cells[2])
    line, text = folded(log)
    assert "16-mixed" in line  # the conclusion
    assert re.search(r"^job 2 of 2  bf16-mixed +val/accuracy .*  finished$", text, re.M)
    assert report.startswith('<iframe sandbox="" srcdoc=')
    assert "bf16-mixed" in report


def test_a_class_of_the_notebook_can_be_named_as_a_target(notebook):
    cells, _ = notebook
    assert texts(cells[3]).endswith("['32-true seed=0', '32-true seed=1'] 6\n")


def test_errors_are_shown_without_frames(notebook):
    cells, _ = notebook
    (refused,), (stopped,) = (
        [o.traceback for o in cell.outputs if o.output_type == "error"] for cell in cells[4:6]
    )
    assert len(refused) == len(stopped) == 1
    assert refused[0].startswith("ConfigError: ")
    assert "nonsense" in refused[0]
    objects = "model=..., data=..., callbacks=..."
    resume = f"runner.sweep(['sweep.resume=stopped'], {objects})"
    assert stopped == [f"Interrupted: Stopped by SIGINT. Resume with: {resume}"]
    assert "2 of the sweep&#x27;s 3 jobs had not begun" in pages(cells[5])[0]


def test_jobs_in_processes_of_their_own_show_how_far_the_sweep_is(notebook):
    cells, _ = notebook
    shown = "".join(page for index, page in Client.shown if index == 6)
    assert "job 1/2  32-true seed=0<details>" in shown
    log, report = pages(cells[6])
    text = folded(log)[1]
    assert "\x1b" not in text
    lines = re.findall(r"^job (\d) of 2  32-true seed=(\d) .* finished", text, re.M)
    assert lines == [("1", "0"), ("2", "1")]
    assert text.count("┃ precision ") == 1  # one table
    assert report.startswith("<iframe")


def test_an_error_of_the_users_own_code_is_shown_with_its_own_frames(notebook):
    cells, _ = notebook
    (error,) = [o for o in cells[7].outputs if o.output_type == "error"]
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))
    assert re.findall(r"in (\S+)\(", text)[-2:] == ["Late.forward", "helper"]
    assert re.search(r"Cell In\[\d+\], line \d+, in helper", text)
    assert "ValueError: my own mistake" in text
    assert "/runner/" not in text
    assert "contextlib.py" not in text


def test_an_error_of_the_first_batch_is_shown_with_the_users_frames(notebook):
    cells, _ = notebook
    (error,) = [o for o in cells[8].outputs if o.output_type == "error"]
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))
    assert re.findall(r"in (\S+)\(", text) == ["Wrong.forward"]
    assert re.search(r"line \d+, in Wrong.forward", text)
    assert "NameError: name 'missing' is not defined" in text
    assert "ConfigError: model=Wrong fails on the first batch" in text
    assert "/runner/" not in text
