import os
import signal
import time
from pathlib import Path

import psutil

from lab.nets import Net


class Job(Net):
    """Does in its sixth training step what it was built for."""

    def __init__(self, how: str, **sizes) -> None:
        super().__init__(**sizes)
        self.how = how

    def forward(self, x):
        if self.training and self.calls == 5:
            getattr(self, self.how)()
        elif self.training and self.calls > 5 and self.how == "waits":
            time.sleep(0.5)  # a stop takes a second to be seen
        return super().forward(x)

    def well(self):
        pass

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def lost(self):
        """With the process that was started for it, as when a machine fails."""
        psutil.Process(os.getppid()).parent().kill()
        time.sleep(60)

    def waits(self):
        Path(f"waits-{os.getpid()}").touch()
        while not Path("go").exists():
            time.sleep(0.02)
