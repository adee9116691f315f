"""However a trainer process ends, all it recorded is stored and its run has the right status.

All endings start at once on a store that does not exist: that is a test of its own.
"""

import os
import signal
import subprocess
from contextlib import suppress

import pytest
from forked_process import ForkedProcess
from waiting import wait_for

pytestmark = pytest.mark.slow

STEPS = 400
SIGNALS = {"sigterm": signal.SIGTERM, "sigkill": signal.SIGKILL}
EXPECTED = {
    "finished": ("FINISHED", None),
    "failed": ("FAILED", "ValueError: loss is nan"),
    "sigterm": ("KILLED", "stopped by a signal"),
    "sigkill": ("KILLED", "The training process ended without closing its run."),
    "forked": ("KILLED", "The training process ended without closing its run."),
    "unclosed": ("KILLED", "The training process ended without closing its run."),
}


@pytest.fixture(scope="module")
def ended(reader, start_trainer, tmp_path_factory):
    """Runs a trainer for every ending, all at once; returns the store and their outputs.

    One is a new interpreter: it notices when mlflow is imported in training.
    """
    folder = tmp_path_factory.mktemp("endings")
    uri = f"sqlite:///{folder}/store/mlflow.db"
    (folder / "store").mkdir()
    (folder / "store" / "mlflow.db.new").write_text("left by a writer killed while it made a store")
    outputs = {ending: folder / f"{ending}.txt" for ending in EXPECTED}
    trainers = {
        ending: _start(start_trainer, (uri, folder / ending, ending), output)
        for ending, output in outputs.items()
    }
    for ending, trainer in trainers.items():
        wait_for(lambda output=outputs[ending]: "ready" in output.read_text())
        if ending in SIGNALS:
            _signal(trainer, SIGNALS[ending])
    for trainer in trainers.values():
        trainer.wait(timeout=60)
    yield reader(uri), {ending: output.read_text() for ending, output in outputs.items()}
    for trainer in trainers.values():
        with suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)  # the forked child


def _start(start_trainer, arguments, output):
    popen = subprocess.Popen if "finished" in arguments else ForkedProcess
    # To a file: the forked child would keep a pipe open.
    with output.open("w") as file:
        options = {"stdout": file, "stderr": file, "cwd": output.parent, "start_new_session": True}
        return start_trainer(*arguments, popen, **options)


def _signal(trainer, number):
    """As a terminal or a batch system does: to the whole group. SIGKILL to the trainer alone."""
    if number == signal.SIGKILL:
        trainer.kill()
    else:
        os.killpg(trainer.pid, number)


@pytest.fixture
def settled(ended):
    store, _ = ended

    def wait(ending):
        def over():
            runs = store.named("endings", ending)
            return bool(runs) and runs[0].info.status != "RUNNING"

        wait_for(over)
        (run,) = store.named("endings", ending)
        return run

    return wait


@pytest.mark.parametrize("ending", EXPECTED)
def test_status_and_error_tag_show_how_the_process_ended(settled, ending):
    run = settled(ending)
    assert (run.info.status, run.data.tags.get("error")) == EXPECTED[ending]


@pytest.mark.parametrize("ending", EXPECTED)
def test_every_recorded_point_is_stored_exactly_once(ended, settled, ending):
    store, _ = ended
    run = settled(ending)
    expected = [(step, 1_700_000_000_000 + step, 1 / step) for step in range(1, STEPS + 1)]
    assert store.points(run.info.run_id, "train/loss") == expected


def test_nothing_of_mlflow_reaches_the_trainers_output(ended):
    _, outputs = ended
    lines = {line for output in outputs.values() for line in output.splitlines()}
    ours = ("Uploading the last records to sqlite", "The run is not stored completely in sqlite")
    assert {line.split()[0] for line in lines if not line.startswith(ours)} == {"ready"}


def test_the_working_directory_stays_clean(ended, settled, tmp_path_factory):
    for ending in EXPECTED:
        settled(ending)
    (folder,) = tmp_path_factory.getbasetemp().glob("endings[0-9]*")
    assert not list(folder.rglob("mlruns"))
