"""A small trainer for tests that end a real process: trainer_script.py URI FOLDER ENDING INFO.

Prints "ready" and its writer's process after its last record, then ends in the way that ENDING
names. INFO is JSON: the experiment, and more fields of RunInfo.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from runner.core.record.tracker import RunInfo
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.writer_process import shared_writer

STEPS = 400
IS_NEW = "mlflow" not in sys.modules  # else it was forked from a process that has imported it


def main(uri: str, folder: str, ending: str, info: str) -> None:
    given = {"params": {"ending": ending}, "name": ending, **json.loads(info)}
    tracker = MlflowTracker(uri=uri, experiment=given.pop("experiment"))
    tracker.open(RunInfo(Path(folder), **given))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped(tracker))
    for step in range(1, STEPS + 1):
        values = {"train/loss": 1 / step, "train/lr": step / 3}
        tracker.log_metrics([(step, 1_700_000_000_000 + step, values)])
    print("ready", shared_writer().process.pid, flush=True)
    assert ("mlflow" not in sys.modules) == IS_NEW
    end(tracker, ending)


def stopped(tracker: MlflowTracker) -> None:
    tracker.close("KILLED", "stopped by a signal")
    os._exit(143)


def end(tracker: MlflowTracker, ending: str) -> None:
    if ending == "finished":
        tracker.close("FINISHED")
        tracker.check()
    elif ending == "failed":
        tracker.close("FAILED", "ValueError: loss is nan")
    elif ending == "forked":
        if os.fork() == 0:  # as a data loader's worker: holds the writer's pipe open
            time.sleep(120)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    elif ending != "unclosed":
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
