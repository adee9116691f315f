"""How long does a new user wait for the first line, the first step and the answer?

python bench/first_hour.py [checkout ...]   compares checkouts in turn; by default this one alone

Each command runs on a terminal of its own, in a new folder, with a new store.
"""

import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

COMMANDS = {
    "run": ["model=mlp", "data=digits", "train.max_steps=200"],
    "sweep": [
        *("-m", "precision=32-true,bf16-mixed,bf16-true", "seed=0,1"),
        *("model=mlp", "data=digits", "train.max_steps=60"),
    ],
}
ROUNDS = 3
_ANSWERS = re.compile(rb"Stay with|Train in|Too short|Try |finished +\r?\n")
"""What the answer of a sweep begins with, and the title of a run's table."""


def wait_times(checkout: Path, words: list[str], home: Path) -> dict[str, float]:
    """Return the seconds from Enter to the first line, the first step, the answer and the end."""
    began = time.time()
    times: dict[str, float] = {}
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "runner", *words],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(checkout), "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            shown += os.read(main, 65536)
        except OSError:  # Linux's end of a terminal without writers
            break
        times.setdefault("first line", time.time() - began)
        if _ANSWERS.search(shown):
            times.setdefault("answer", time.time() - began)
    process.wait()
    times["end"] = time.time() - began
    times["first step"] = first_step(home) - began
    return times


def first_step(home: Path) -> float:
    """Return when the first training loss was recorded, in Unix seconds."""
    from runner.tracking import history

    folders = {path.parent for path in home.rglob("result.json")}
    curves = [history.from_folder(folder)["train/loss"] for folder in folders]
    return min(curve[1][0] for curve in curves) / 1000


def main() -> None:
    """Print a table of the medians."""
    checkouts = [Path(each).resolve() for each in sys.argv[1:]] or [Path.cwd()]
    print(f"load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds in turn, medians in seconds")
    for name, words in COMMANDS.items():
        rounds: dict[Path, list[dict[str, float]]] = {each: [] for each in checkouts}
        for _ in range(ROUNDS):
            for checkout in checkouts:
                with tempfile.TemporaryDirectory() as home:
                    rounds[checkout].append(wait_times(checkout, words, Path(home)))
        for checkout, each in rounds.items():
            cells = [f"{key} {median(times[key] for times in each):.1f}" for key in each[0]]
            print(f"{name} {checkout.name}: {', '.join(cells)}")


if __name__ == "__main__":
    main()
