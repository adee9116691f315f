"""The processes that the tests fork are like those of a new interpreter."""

import json
import signal
import subprocess
import sys

import pytest
from forked_process import ForkedProcess, run_forked

STATE = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path,
    "folder": os.getcwd(),
    "variable": os.environ.get("MINE"),
    "handlers": [str(signal.getsignal(number)) for number in (1, 2, 10, 12, 15)],
    "leads": os.getsid(0) == os.getpid(),
    "main": __name__,
}))
print("end", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("program", ["code", "script", "module"])
def test_a_forked_process_has_the_state_of_a_new_one(program, tmp_path, clean):
    (tmp_path / "state.py").write_text(STATE)
    words = {"code": ["-c", STATE], "script": [tmp_path / "state.py"], "module": ["-m", "state"]}
    command = [sys.executable, *map(str, words[program]), "a", "b c"]
    given = {"cwd": tmp_path, "env": {**clean, "MINE": "1"}, "start_new_session": True}
    new = run_forked(command, popen=subprocess.Popen, **given)
    forked = run_forked(command, **given)
    assert json.loads(forked.stdout) == json.loads(new.stdout)
    assert (forked.returncode, forked.stderr) == (new.returncode, new.stderr) == (7, "end\n")


def test_a_forked_process_reports_the_signal_that_ends_it(clean):
    command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    with ForkedProcess(command, stdout=subprocess.PIPE, env=clean) as process:
        assert process.stdout.readline() == b"1\n"
        assert process.poll() is None
        process.terminate()
        assert process.wait() == -signal.SIGTERM


def test_variables_that_are_read_at_import_get_a_new_interpreter(clean):
    command = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    assert run_forked(command, env=clean).stdout == "True\n"
    assert run_forked(command, env={**clean, "OMP_NUM_THREADS": "2"}).stdout == "False\n"
