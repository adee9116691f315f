"""Profile the first steps (debug=profile) with torch.profiler: a table and a Chrome trace."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import profile

from runner.training.callbacks.callback import RunCallback, RunHandle
from runner.training.records import Steps


@dataclass(eq=False)
class Profiler(RunCallback):
    """Profiles from its construction until a block passes `last_step`, or until the run ends.

    Files: `profile.txt` (operators by CPU time) and `profile.json` (chrome://tracing).

    Args:
        folder: where the files are written.
        last_step: the step whose block ends the profile.
        write_file: calls a function that writes a file, with the file's path.
    """

    key = "profiler"

    folder: Path
    last_step: int
    write_file: Callable[[Path, Callable[[Path], object]], object]

    def __post_init__(self) -> None:
        self._profile: profile | None = profile(acc_events=True)
        self._profile.start()

    def on_steps(self, records: Steps, run: RunHandle) -> None:
        if records[-1].step >= self.last_step:
            self.close()

    def close(self) -> None:
        # The profile ends once: at its last step, or with the run if that is earlier.
        if self._profile is None:
            return
        finished = self._profile
        finished.stop()
        table = finished.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
        self._profile = None
        self.write_file(self.folder / "profile.txt", lambda path: path.write_text(table))
        trace = self.folder / "profile.json"
        self.write_file(trace, lambda path: finished.export_chrome_trace(str(path)))
