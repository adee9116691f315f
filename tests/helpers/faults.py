"""Run trainer processes for tests of outages, and count the points that were stored."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from environments import clean_env
from fault_trainer import BEGAN_MS, values
from forked_process import ForkedProcess
from quiet_mlflow import MlflowClient
from waiting import SECONDS, wait_for

from runner.core.base.layout import HISTORY
from runner.tracking import history
from runner.tracking.upload_state import UploadState

GREATEST = 1.7976931348623157e308


class Trainer:
    """A process of fault_trainer.py."""

    def __init__(self, uri, folder, pause=0.005, **options):
        self.uri, self.folder, self.journal = uri, folder, folder / "journal.jsonl"
        folder.mkdir(parents=True)
        more = [f"{key}={value}" for key, value in options.items()]
        script = Path(__file__).with_name("fault_trainer.py")
        self.process = ForkedProcess(
            [sys.executable, str(script), uri, str(folder), str(pause), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_env(),
        )

    def training(self):
        """Wait until the trainer has begun to record, and note its writer's process."""
        said = self.process.stdout.readline().split()
        assert said[:1] == ["training"], self.process.stderr.read()
        self.writer = int(said[1])
        return self

    def stop(self):
        """Ask the trainer to end its run."""
        self.folder.with_suffix(".stop").touch()

    def opened(self):
        """Wait until the run is in the store; return its id."""
        return wait_for(lambda: progress_of(self.folder).run_id)

    def recorded(self, number):
        """Wait until the journal has grown by a number of bytes."""
        size = self.journal.stat().st_size
        wait_for(lambda: self.journal.stat().st_size > size + number)

    def uploaded(self, number):
        """Wait until a number of bytes more of the journal are in the store."""
        offset = progress_of(self.folder).offset
        wait_for(lambda: progress_of(self.folder).offset > offset + number)

    def result(self, timeout=2 * SECONDS):
        """Wait for the end; return what the trainer printed as JSON, and its stderr."""
        stdout, stderr = self.process.communicate(timeout=timeout)
        assert self.process.returncode == 0, stderr
        return json.loads(stdout), stderr

    def ended(self, complete=True):
        """Ask the trainer to end, and wait; check whether the store has all. As result returns."""
        self.stop()
        done, stderr = self.result()
        assert done["complete"] == complete, stderr
        return done, stderr


def progress_of(folder):
    """Return the upload state of a run's journal."""
    progress = UploadState(folder / "journal.jsonl")
    progress.read()
    return progress


def status_of(uri, run_id):
    return MlflowClient(uri).get_run(run_id).info.status


def counted(uri, run_id, steps, folder):
    """Count the points logged, lost, doubled and altered, in the store and in history.npz."""
    client, found = MlflowClient(uri), Counter()
    kept = client.download_artifacts(run_id, HISTORY, str(folder))
    exact = history.read_history(Path(kept))
    for key in values(1):
        wanted = {n: (BEGAN_MS + n, values(n)[key]) for n in range(1, steps + 1)}
        points = client.get_metric_history(run_id, key)
        found += _compared(wanted, [(p.step, p.timestamp, p.value) for p in points], stored=True)
        in_history = _compared(wanted, exact[key].T.tolist(), stored=False)
        del in_history["logged"]
        found += in_history
    return {name: found[name] for name in ("logged", "lost", "doubled", "altered")}


def _compared(wanted, points, stored):
    by_step = Counter(step for step, *_ in points)
    same = {
        step
        for step, time_ms, value in points
        if step in wanted and (time_ms, repr(float(value))) == _as(wanted[step], stored)
    }
    return Counter(
        logged=len(wanted),
        lost=len(wanted.keys() - by_step.keys()),
        doubled=sum(number - 1 for number in by_step.values()),
        altered=len(wanted.keys() & by_step.keys() - same),
    )


def _as(point, stored):
    """Return a point as recorded, or as a store keeps it, which has no infinity."""
    time_ms, value = point
    return time_ms, repr(
        max(-GREATEST, min(GREATEST, value)) if stored and value == value else value
    )
