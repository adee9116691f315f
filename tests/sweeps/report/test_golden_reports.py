"""The reports of stored sweeps are the same, in each number and each verdict, as when the sweeps
were stored.

A .jsonl file under golden/ holds what `runner report <sweep folder>` reads of a sweep that has run,
one file of it a line: sweep.json, advise.json of mode=advise, and result.json and history.npz of
each job. The .md file beside it is the report that the command made from exactly these files. Write
all reports anew, after a change that is meant to change a report, with

    python tests/sweeps/report/test_golden_reports.py --write

and read the difference before it is committed. The test reaches the report by the command line
alone, so that the modules behind it can be moved.
"""

import csv
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from run_folders import read_json

GOLDEN = Path(__file__).parent / "golden"
SWEEPS = {
    "loss_scale": "32-true, bf16-mixed, 16-mixed with skipped steps and 16-true, three seeds each",
    "advise": "mode=advise: worse precisions, healed ones and one that is not on this machine",
    "failures": "a job with exit status 1, an interrupted one, jobs that never began, bnb-nf4 with "
    "LoRA and an emulated transformer-engine",
    "evaluate": "mode=evaluate of one checkpoint, with the change from its own precision",
    "worse_and_diverged": "a precision that is measurably worse, and one that diverged",
}
RULE = re.compile(r"\|( -+:? \|)+")
SVG = re.compile(r"<svg.*?</svg>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
CELL = re.compile(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", re.DOTALL)


def unpacked(name, folder):
    """Write the files of a stored sweep; return the sweep's folder."""
    for line in (GOLDEN / f"{name}.jsonl").read_text().splitlines():
        file = json.loads(line)
        path = folder / name / file["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".npz":
            np.savez(path, **{metric: np.array(rows) for metric, rows in file["content"].items()})
        else:
            path.write_text(json.dumps(file["content"]))
    return folder / name


def golden_report(name):
    """Return the path of the golden report.md of a stored sweep."""
    return GOLDEN / f"{name}.md"


def table_cells(markdown):
    """Return the text of each table cell of a Markdown report, in order, without markup."""
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    cells = [cell for row in rows if not RULE.fullmatch(row) for cell in row[2:-2].split(" | ")]
    return [plain_text(cell) for cell in cells]


def plain_text(markdown):
    """Return a Markdown text without bold, code and backslashes, each space single."""
    unmarked = re.sub(r"\\(.)", r"\1", markdown.strip().removeprefix("**").removesuffix("**"))
    return " ".join(html.unescape(unmarked).replace("`", "").split())


def html_cells(page):
    """Return the text of each table cell of an HTML report, in order; notes in parentheses."""
    found = []
    for inside in CELL.findall(SVG.sub("", page)):
        noted = re.sub(r"<small>(.*?)</small>", r" (\1)", inside)
        found.append(" ".join(html.unescape(TAG.sub("", noted)).replace("`", "").split()))
    return found


@pytest.fixture(scope="module", params=SWEEPS)
def rebuilt(request, inside, tmp_path_factory):
    """The golden report.md of a stored sweep, and the folder where it was rebuilt."""
    home = tmp_path_factory.mktemp("golden")
    folder = unpacked(request.param, home)
    with inside(home) as main:
        main("report", folder).check_ok()
    return golden_report(request.param).read_text(), folder


def test_each_stored_sweep_has_a_description():
    assert {path.stem for path in GOLDEN.iterdir()} == set(SWEEPS)


def test_the_markdown_report_is_the_golden_one(rebuilt):
    golden, folder = rebuilt
    made = (folder / "report.md").read_text()
    assert table_cells(made) == table_cells(golden)
    assert made == golden


def test_the_html_report_has_the_cells_of_the_golden_one(rebuilt):
    golden, folder = rebuilt
    page = (folder / "report.html").read_text()
    assert html_cells(page) == table_cells(golden)


def test_the_tables_have_a_row_per_job(rebuilt):
    _, folder = rebuilt
    results = [read_json(path) for path in folder.glob("*/result.json")]
    labels = sorted(result["label"] for result in results)
    with (folder / "report.csv").open(newline="") as file:
        assert sorted(row["label"] for row in csv.DictReader(file)) == labels
    rows = read_json(folder / "report.json")["rows"]
    assert sorted(row["label"] for row in rows) == labels


def test_a_changed_number_of_a_job_changes_the_report(main, tmp_path):
    folder = unpacked("loss_scale", tmp_path)
    path = folder / "6" / "result.json"
    text = path.read_text()
    assert text.count('"skipped_steps": 26') == 1
    path.write_text(text.replace('"skipped_steps": 26', '"skipped_steps": 27'))
    assert main("report", folder).rc == 0
    assert (folder / "report.md").read_text() != golden_report("loss_scale").read_text()


def write_golden_reports():
    """Rebuild the golden report.md of each stored sweep by the command."""
    for name in SWEEPS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = unpacked(name, Path(temporary))
            command = [sys.executable, "-m", "runner", "report", name]
            # The report names the folder as a command in this working directory does.
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=temporary)
            shutil.copy(folder / "report.md", golden_report(name))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("Type: python tests/sweeps/report/test_golden_reports.py --write")
    write_golden_reports()
