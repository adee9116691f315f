"""Helpers of the benchmarks: options, timing in turn, machine and versions, result files."""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


T = TypeVar("T")


def parse_options(text: str | None, **defaults: Any) -> argparse.Namespace:
    """Return the options of this process's command.

    Args:
        text: the script's docstring, for --help.
        defaults: by option. The option takes a value of the default's type, and several where the
            default is a list, texts where it is empty; False stands for a flag.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, list):
            kind = type(default[0]) if default else str
            parser.add_argument(option, nargs="+", type=kind, default=default)
        else:
            parser.add_argument(option, type=type(default), default=default)
    return parser.parse_args()


def run_in_turn(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run the contenders in turn, A B C A B C ..., after one round that is not counted.

    Returns:
        What each contender returned, per round.
    """
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            result = run()
            if turn:
                results[name].append(result)
    return results


def interleave(
    contenders: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Time the contenders in turn, after one round that is not counted.

    Returns:
        For each contender, (CPU seconds of the process, wall seconds) per round.
    """

    def time_once(run: Callable[[], object]) -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        run()
        return time.process_time() - cpu, time.perf_counter() - wall

    return run_in_turn({name: partial(time_once, run) for name, run in contenders.items()}, rounds)


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Return the text of the median with the least and the greatest value."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def version_of(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def versions(*packages: str) -> str:
    """Return the names of packages with their installed versions."""
    return ", ".join(f"{package} {version_of(package)}" for package in packages)


def machine() -> str:
    """Return the names of the processor, the operating system, Python and torch."""
    from runner.core.base.accelerators import cpu_name

    python = sys.version.split()[0]
    return f"{cpu_name()}, {platform.system()}, Python {python}, {versions('torch')}"


def commit() -> str:
    """Return the short hash of the checked-out commit."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def own_command() -> str:
    """Return the command of this process, which runs a module of bench."""
    module = sys.modules["__main__"].__spec__.name.removesuffix(".__main__")
    return f"python -m {module} {' '.join(sys.argv[1:])}".strip()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(name: str, question: str, body: str, command: str = "", at: str = "") -> None:
    """Print a result and write it to bench/results/NAME.md.

    Args:
        command: what was run, if it is not this process's own command.
        at: the commit that was measured, if it is not the present one.
    """
    run = f"`{command or own_command()}`, commit {at or commit()}, {machine()}"
    text = f"# {question}\n\n{run}\n\n{body}\n"
    print(text)
    (RESULTS / f"{name}.md").write_text(text)


def write_rows(path: Path, results: Any) -> None:
    """Write results as JSON with one measurement per line."""
    path.write_text("".join(_json_lines(results, "")) + "\n")


def _json_lines(value: Any, indent: str) -> Iterator[str]:
    """Yield the JSON text of a value, with a line for each measurement that it holds."""
    if not isinstance(value, list | tuple | Mapping) or _is_measurement(value):
        yield json.dumps(value)
        return
    inner = f"{indent} "
    is_mapping = isinstance(value, Mapping)
    yield "{" if is_mapping else "["
    for number, item in enumerate(value):
        yield f",\n{inner}" if number else f"\n{inner}"
        if is_mapping:
            yield f"{json.dumps(str(item))}: "
        yield from _json_lines(value[item] if is_mapping else item, inner)
    yield f"\n{indent}" + ("}" if is_mapping else "]")


def _is_measurement(value: Sequence[Any] | Mapping[str, Any]) -> bool:
    """Return whether a list or mapping goes on one line: a list of scalars, or a mapping to them
    and to lists of them.
    """
    containers = list | tuple | Mapping
    if isinstance(value, Mapping):
        parts = [part for part in value.values() if isinstance(part, containers)]
        return not any(isinstance(part, Mapping) or not _is_measurement(part) for part in parts)
    return not any(isinstance(part, containers) for part in value)
