"""A trainer for tests of outages: python fault_trainer.py URI FOLDER PAUSE [KEY=VALUE ...].

Records a step every PAUSE seconds until a file FOLDER.stop exists, in blocks as the runner does,
and prints its result as JSON. Values are computed from their step, so that a test knows them all.
With `outage` it warns of a store that has not answered for so many seconds, with `patience` its end
waits so long.
"""

import json
import math
import sys
import time
from pathlib import Path

from runner.core.record.tracker import RunInfo
from runner.tracking import upload_state
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.writer_process import shared_writer

BLOCK = 20
BEGAN_MS = 1_700_000_000_000
ODD = {7: math.nan, 11: math.inf, 13: -math.inf}


def values(step: int) -> dict[str, float]:
    """Return the values recorded at a step, counted from 1."""
    loss = ODD.get(step % 97, 1 / step)
    return {"train/loss": loss, "train/lr": step / 3, "loss_scale/value": 2.0 ** (step % 24)}


def main(uri: str, folder: Path, pause: float, **options: str) -> None:
    patience = float(options.get("patience", 60))
    upload_state.OUTAGE_SECONDS = float(options.get("outage", upload_state.OUTAGE_SECONDS))
    tracker = MlflowTracker(uri=uri, patience=patience, system_metrics=None)
    tracker.open(RunInfo(folder, params={"pause": str(pause)}, name=folder.name))
    step, slowest = 0, 0.0
    print("training", shared_writer().process.pid, flush=True)
    while not folder.with_suffix(".stop").exists():
        block = range(step + 1, step + BLOCK + 1)
        step += BLOCK
        began = time.perf_counter()
        tracker.log_metrics((n, BEGAN_MS + n, values(n)) for n in block)
        tracker.check()
        slowest = max(slowest, time.perf_counter() - began)
        time.sleep(BLOCK * pause)
    began = time.perf_counter()
    tracker.close("FINISHED")
    closed = time.perf_counter() - began
    tracker.check()
    done = {"steps": step, "slowest_ms": slowest * 1e3, "close_s": closed}
    done |= {"complete": tracker.complete, "run_id": tracker.run_id}
    print(json.dumps(done), flush=True)


if __name__ == "__main__":
    uri, run, seconds, *texts = sys.argv[1:]
    main(uri, Path(run), float(seconds), **dict(text.split("=") for text in texts))
