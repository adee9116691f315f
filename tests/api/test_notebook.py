"""A notebook trains the classes and objects of its own cells, and shows progress and the report."""

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


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The cells of a notebook after their execution by a real kernel."""
    cells = [nbformat.v4.new_code_cell(source) for source in (CLASSES, RUN, SWEEP, NAMED)]
    book = nbformat.v4.new_notebook(cells=cells)
    folder = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(book, timeout=300, kernel_name="python3")
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


def test_a_run_shows_its_progress_and_its_result(notebook):
    cells, folder = notebook
    bar, table = pages(cells[1])
    assert 'value="6" max="6"' in bar
    assert "16-mixed Net TensorDataset: finished" in table
    assert "step 6" in texts(cells[1])
    assert list((folder / "outputs" / "runs").glob("*/metrics.jsonl"))


def test_a_sweep_over_a_class_of_the_notebook_shows_its_report(notebook):
    cells, _ = notebook
    *bars, report = pages(cells[2])
    assert len(bars) == 2
    assert report.startswith('<iframe sandbox="" srcdoc=')
    assert "bf16-mixed" in report


def test_a_class_of_the_notebook_can_be_named_as_a_target(notebook):
    cells, _ = notebook
    assert texts(cells[3]).endswith("['32-true seed=0', '32-true seed=1'] 6\n")
