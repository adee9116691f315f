"""How long does the report of a large sweep take?

    python -m bench.report_cost [--jobs 20] [--steps 10000]

Records a sweep of made-up jobs (five precisions, each with a quarter of the seeds, five metrics in
every step) in a SQLite store through the runner's tracker, then makes its report twice: from the
sweep's folder, as the sweep's end does, and from MLflow alone, as `runner report <id>` does.
Writes bench/results/report_cost.md.
"""

import argparse
import random
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.common import table, versions, write
from runner.modes.result import RunResult
from runner.sweep.manifest import Manifest
from runner.sweep.report.load import JOB_RESULTS_FOLDER, load_from_folder, write_job_facts
from runner.sweep.report.pages import write_report
from runner.sweep.report.rebuild import store_report
from runner.tracking.mlflow import MlflowTracker
from runner.tracking.tracker import RunInfo

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
BLOCK = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp())
    uri, folder = f"sqlite:///{home}/mlflow.db", home / "sweep"
    parent = MlflowTracker(uri=uri)
    parent.open(RunInfo(folder, tags={"command": "made up"}, sweep="made-up", role="sweep"))
    Manifest("made-up", ["made", "up"]).write(folder)
    for number in range(args.jobs):
        record_job(uri, folder / str(number), number, args.steps)
    data = load_from_folder(folder)
    parent.artifact(write_job_facts(folder, data, 0), JOB_RESULTS_FOLDER)
    parent.close("FINISHED")
    seconds = {"the sweep's folder": [], "MLflow alone (SQLite)": []}
    for _ in range(3):
        start = time.perf_counter()
        write_report(load_from_folder(folder), folder)
        middle = time.perf_counter()
        store_report(uri, "made-up", home)
        seconds["the sweep's folder"].append(middle - start)
        seconds["MLflow alone (SQLite)"].append(time.perf_counter() - middle)
    size = (folder / "report.html").stat().st_size / 1e6
    shutil.rmtree(home)
    rows = [[name, *(f"{value:.1f}" for value in values)] for name, values in seconds.items()]
    body = table(["made from", "first, s", "second, s", "third, s"], rows)
    text = f"{args.jobs} jobs of {args.steps:,} steps; {versions('mlflow', 'matplotlib')}."
    write(
        "report_cost",
        "How long the report of a large sweep takes",
        f"{text}\n\n{body}\n\nreport.html has {size:.1f} MB.",
    )


def record_job(uri: str, folder: Path, number: int, steps: int) -> None:
    """One made-up job: a falling loss with noise, a loss scale that dips."""
    precision, seed = PRECISIONS[number % len(PRECISIONS)], number // len(PRECISIONS)
    label, noise = f"{precision} seed={seed}", random.Random(number)
    tracker = MlflowTracker(uri=uri)
    tags = {"precision": precision, "output_dir": str(folder)}
    tracker.open(RunInfo(folder, tags=tags, name=label, sweep="made-up"))
    for first in range(0, steps, BLOCK):
        records = []
        for step in range(first + 1, first + BLOCK + 1):
            over = float(step % 400 == 0)
            values = {
                "train/loss": 2 / step**0.3 + noise.gauss(0, 0.05),
                "train/lr": 1e-3,
                "train/grad_norm": noise.random(),
                "loss_scale/value": 2.0 ** (16 - over),
                "loss_scale/overflow": over,
            }
            records.append((step, 1_700_000_000_000 + step, values))
        tracker.metrics_many(records)
    quality = 0.95 + noise.gauss(0, 0.004)
    tracker.metrics(steps, 1_700_000_000_000 + steps, {"val/accuracy": quality})
    result = RunResult(
        precision,
        label,
        str(folder),
        group=precision,
        seed=seed,
        quality="val/accuracy",
        metrics={"val/accuracy": quality, "val/loss": 0.2},
        best=quality,
        steps=steps,
        examples_per_second=1000 + noise.gauss(0, 20),
        weights_mib=40.0,
        optimizer_mib=80.0,
    )
    tracker.artifact(result.write(folder))
    tracker.close("FINISHED")
    replace(result, run_id=tracker.run_id, experiment_id=tracker.experiment_id).write(folder)


if __name__ == "__main__":
    main()
