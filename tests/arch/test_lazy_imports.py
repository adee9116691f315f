"""What answers at once must not import torch or MLflow, which take seconds."""

import json
import os
import subprocess
import sys

SCRIPT = """
import contextlib, io, json, os, sys
from runner.cli.main import main

found = {}
for argv in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        rc = main(argv)
    heavy = {"torch", "mlflow", "numpy", "matplotlib", "rich", "sklearn"} & set(sys.modules)
    found[" ".join(argv)] = [rc, len(out.getvalue()), sorted(heavy)]
    if argv[0] == "-sc":
        found["completions"] = out.getvalue()
print(json.dumps(found))
"""
COMMANDS = [
    ["--cfg", "job"],
    ["--help"],
    ["-sc", "query=bash"],
    ["precision=nonsense"],
    ["train.nonsense=1"],
    ["--version"],
]


def test_no_heavy_import_before_a_run_starts(tmp_path, root):
    env = {**os.environ, "PYTHONPATH": str(root)}
    env |= {"COMP_LINE": "runner precision=16", "COMP_POINT": "19", "_PROG": "runner"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("completions").split() == ["precision=16-mixed", "precision=16-true"]
    assert {command: heavy for command, (_, _, heavy) in found.items()} == {
        command: [] for command in found
    }
    assert {command: rc for command, (rc, _, _) in found.items()} == {
        "--cfg job": 0,
        "--help": 0,
        "-sc query=bash": 0,
        "--version": 0,
        "precision=nonsense": 2,
        "train.nonsense=1": 2,
    }
    assert all(found[command][1] > 500 for command in ("--cfg job", "--help"))
