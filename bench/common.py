"""Helpers of the benchmarks: interleaved timing, machine and versions, Markdown tables."""

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def interleave(
    contenders: Mapping[str, Callable[[], None]], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Run the contenders in turn, A B C A B C ..., after one round that is not counted.

    Returns:
        For each, (CPU seconds of the process, wall seconds) per round.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            spent = time.process_time() - cpu, time.perf_counter() - wall
            if turn:
                times[name].append(spent)
    return times


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Median with the least and the greatest."""
    low, high = min(values), max(values)
    return f"{median(values):{form}} ({low:{form}} to {high:{form}})"


def versions(*packages: str) -> str:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def machine() -> str:
    from runner.utils.accelerator import cpu_name

    python = sys.version.split()[0]
    return f"{cpu_name()}, {platform.system()}, Python {python}, {versions('torch')}"


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(name: str, question: str, body: str, command: str = "", at: str = "") -> None:
    """Print a result and keep it under bench/results/. at: the commit, other than the present."""
    command = command or f"python bench/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip()
    text = f"# {question}\n\n`{command}`, commit {at or commit()}, {machine()}\n\n{body}\n"
    print(text)
    (RESULTS / f"{name}.md").write_text(text)
