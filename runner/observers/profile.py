"""debug=profile: torch.profiler over the first steps, as a table and a Chrome trace."""

from pathlib import Path

from torch.profiler import profile

from runner.observers.base import Observer
from runner.records import Steps


class Profile(Observer):
    """Profiles from its making until a block passes `until` steps, or the run ends.

    Files: `profile.txt` (operators by CPU time) and `profile.json` (chrome://tracing).
    """

    def __init__(self, folder: Path, until: int) -> None:
        self.folder, self.until = folder, until
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
        (self.folder / "profile.txt").write_text(table)
        self._profile.export_chrome_trace(str(self.folder / "profile.json"))
        self._profile = None
