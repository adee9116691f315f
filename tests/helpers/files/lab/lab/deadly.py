import ctypes
import os
import signal
import time
from pathlib import Path

import torch

from lab.nets import Net


class Deadly(Net):
    """Dies in its second training step, in the given way."""

    def __init__(self, how: str, **sizes) -> None:
        super().__init__(**sizes)
        self.how = how

    def forward(self, x):
        if self.training and self.calls == 1:
            print("the last thing it said")
            getattr(self, self.how)()
        return super().forward(x)

    def well(self):
        pass

    def too(self):
        pass

    def exits(self):
        os._exit(3)

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def segfault(self):
        ctypes.string_at(0)

    def memory(self):
        torch.empty(2**60)

    def raises(self):
        raise ArithmeticError("failed as it was told to")

    def orphaned(self):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    def leaves_a_child(self):
        if pid := os.fork():
            Path(f"pid-{pid}").touch()
            os._exit(3)
        time.sleep(600)


class Slow(Net):
    """Fifty steps in a second at most; says which process it is, and of which. Hangs where asked
    to, or blocks all signals."""

    def __init__(self, how: str, **sizes) -> None:
        super().__init__(**sizes)
        self.how = how

    def forward(self, x):
        if self.training and self.calls == 6:
            for pid in (os.getpid(), os.getppid()):
                Path(f"pid-{pid}").touch()
            time.sleep(600 if self.how == "hangs" else 0)
            if self.how == "blocks":  # with Python's lock held: only SIGKILL ends it
                lock = ctypes.create_string_buffer(64)
                for _ in range(2):
                    ctypes.PyDLL(None).pthread_mutex_lock(lock)
        time.sleep(0.02)
        return super().forward(x)
