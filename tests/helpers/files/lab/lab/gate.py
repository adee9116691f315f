import time
from pathlib import Path

from lab.nets import Net


class Gate(Net):
    """Waits from its sixth step on for a file, where it was built as the one that waits."""

    def __init__(self, waits: int, seed: int, **sizes) -> None:
        super().__init__(**sizes)
        self.waits = waits == seed

    def forward(self, x):
        if self.training and self.calls >= 5 and self.waits:
            Path("waits").touch()
            while not Path("go").exists():
                time.sleep(0.02)
            time.sleep(0.1)  # a signal to the sweep reaches its job a little later
        return super().forward(x)
