"""debug=profile: torch.profiler over the first steps, as a table and a Chrome trace."""

from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile

from runner.training.callbacks.callback import Callback
from runner.training.records import Steps


class Profiler(Callback):
    """Profiles from its making until a block passes `until` steps, or the run ends.

    Files: `profile.txt` (operators by CPU time) and `profile.json` (chrome://tracing).

    Args:
        folder: where they go.
        until: a step.
        write: calls a function that writes a file, with its path.
    """

    key = "profiler"

    def __init__(
        self, folder: Path, until: int, write: Callable[[Path, Callable[[Path], object]], object]
    ) -> None:
        self.folder, self.until, self.write = folder, until, write
        self._profile: profile | None = profile(acc_events=True)
        self._profile.start()

    def steps(self, block: Steps) -> None:
        if block[-1].step >= self.until:
            self.close()

    def close(self) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        table = self._profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
        made, self._profile = self._profile, None
        self.write(self.folder / "profile.txt", lambda path: path.write_text(table))
        trace = self.folder / "profile.json"
        self.write(trace, lambda path: made.export_chrome_trace(str(path)))
