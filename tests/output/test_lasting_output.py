"""Output that goes nowhere: the command continues, and no file gets it in place of a stream."""

import subprocess
import sys

import pytest

CODE = """
import sys
from pathlib import Path
from runner.output.lasting_output import lasting_output

with lasting_output():
    with open("opened_next", "w") as file:
        for number in range(20_000):
            print("──", number)
            print(number, file=sys.stderr)
        file.write("own text")
Path("result").write_text("done")
"""


@pytest.mark.parametrize(
    "redirection",
    ["2>&1 | head -1", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full", "2>&- >/dev/null"],
)
def test_output_that_nobody_takes_ends_nothing(tmp_path, redirection):
    script = f'set -o pipefail; "$0" -c "$1" {redirection}'
    env = {"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "ascii"}
    command = ["bash", "-c", script, sys.executable, CODE]
    done = subprocess.run(command, cwd=tmp_path, env=env | {"PATH": "/usr/bin:/bin"}, check=False)
    assert done.returncode == 0
    assert (tmp_path / "result").read_text() == "done"
    assert (tmp_path / "opened_next").read_text() == "own text"
