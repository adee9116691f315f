"""A sweep: its parent run, and its jobs' results in one table at the end."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from runner.config import instantiate
from runner.report.old import MANIFEST, write_report
from runner.result import plain_console, read_results, sweep_table
from runner.tracking.base import RunInfo, Status, Tracker


class Sweep:
    """The sweep that this process runs. Its manifest lies in its folder, where jobs in other
    processes find its id."""

    current: "Sweep | None" = None

    def __init__(self, folder: Path, overrides: Sequence[str], tracking: Mapping[str, Any]) -> None:
        self.folder, self.id = folder, uuid4().hex[:12]
        folder.mkdir(parents=True, exist_ok=True)
        command = ["python", "-m", "runner", *sys.argv[1:]]
        manifest = {"id": self.id, "overrides": list(overrides), "command": command}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        self.tracker: Tracker = instantiate(tracking)
        name = f"sweep {' '.join(overrides)}"[:250]
        tags = {"sweep_id": self.id, "output_dir": str(folder), "command": " ".join(command)}
        self.tracker.open(RunInfo(folder, {}, tags, name=name, sweep=self.id, role="sweep"))

    @classmethod
    def begin(cls, folder: Path, overrides: Sequence[str], tracking: Mapping[str, Any]) -> None:
        """Open the parent run, so that the store exists before any job needs it."""
        cls.current = cls(folder, overrides, tracking)

    def end(self, status: int) -> int:
        """Print the table, leave the report with the parent run and close it.

        Returns:
            0 when every job finished; 1 when any failed; 2 when none failed and this machine lacks
            what some need; the status itself for a stop.
        """
        results = read_results(self.folder)
        console = plain_console()
        if results:
            console.print()
            console.print(sweep_table(results))
            for result in results:
                if result.error:
                    console.print(f"{result.label}: {result.error}", markup=False)
            for path in write_report(self.folder):
                self.tracker.artifact(path)
        bad = [r for r in results if r.status in ("failed", "stopped")]
        lacking = any(r.status == "unavailable" for r in results)
        word: Status = "KILLED" if status > 128 else "FAILED" if status or bad else "FINISHED"
        status = status or (1 if bad else 2 if lacking else 0)
        error = f"{len(bad)} of {len(results)} jobs did not finish." if bad else None
        self.tracker.close(word, error)
        if self.tracker.run_id:
            console.print(
                f"MLflow: parent run {self.tracker.run_id}; to see it: python -m runner ui"
            )
        console.print(f"folder: {self.folder}")
        return status


def finish(status: int) -> int:
    """End the sweep of this process, if there is one; the exit status of the command."""
    if Sweep.current is None:
        return status
    sweep, Sweep.current = Sweep.current, None
    return sweep.end(status)
