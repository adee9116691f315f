"""Draw a measurement: medians as dots, quartiles as lines."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

from bench.peers.report import (
    MEMORY,
    MICRO,
    SPEED,
    START,
    STEP_US,
    Result,
    differences_and_ratios,
    quartiles,
)

COLOURS = {
    "raw, recording": "0.45",
    "runner": "#c2410c",
    "runner, tracking=none": "#fb923c",
    "Fabric": "#1d4ed8",
    "Trainer": "#60a5fa",
    "Accelerate": "#047857",
}


def draw(result: Result, path: Path) -> None:
    """Write the picture of a measurement."""
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), layout="constrained")
    _steps(axes[0, 0], result)
    _speeds(axes[0, 1], result)
    _start(axes[1, 0], result)
    _memory(axes[1, 1], result)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    known = dict(zip(labels, handles, strict=True))
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=len(known))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _dots(axis: Any, groups: dict[str, dict[str, list[float]]], limit: float, title: str) -> None:
    """Draw a cluster of dots per group, one dot per contender, and the target as a line."""
    for place, contenders in enumerate(groups.values()):
        for number, (name, values) in enumerate(contenders.items()):
            x, mid = place + (number - (len(contenders) - 1) / 2) * 0.12, statistics.median(values)
            low, high = quartiles(values)
            errors = [[max(0.0, mid - low)], [max(0.0, high - mid)]]
            axis.errorbar(x, mid, yerr=errors, fmt="o", color=COLOURS[name], label=name, capsize=3)
    axis.axhline(limit, color="0.6", linestyle="--", linewidth=1)
    axis.annotate(
        "target",
        (1, limit),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        color="0.45",
    )
    axis.set_xticks(range(len(groups)), groups)
    axis.set_title(title, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def _clock_name(clock: str) -> str:
    return "CPU" if clock == "cpu" else clock


def _compared(rows: list[Any]) -> list[Any]:
    return [row for row in rows if not row["void"] and row["contender"] != "raw"]


def _steps(axis: Any, result: Result) -> None:
    clock = result.clock
    groups = {
        precision: {
            row["contender"]: [v * MICRO for v in differences_and_ratios(row[clock], raw[clock])[0]]
            for row in _compared(rows)
        }
        for _, precision, raw, rows in result.groups(real=False)
    }
    _dots(
        axis,
        groups,
        STEP_US,
        f"MLP: µs of {_clock_name(clock)} time per step over raw (lower is better)",
    )


def _speeds(axis: Any, result: Result) -> None:
    clock = result.clock
    groups = {
        f"{job}\n{precision}": {
            row["contender"]: [1 / v for v in differences_and_ratios(row[clock], raw[clock])[1]]
            for row in _compared(rows)
        }
        for job, precision, raw, rows in result.groups(real=True)
    }
    _dots(axis, groups, SPEED, f"Speed over raw, {_clock_name(clock)} time (higher is better)")


def _start(axis: Any, result: Result) -> None:
    start = result.results["start"]
    groups = {
        kind: {
            name: differences_and_ratios([p[i] for p in pairs], [p[i] for p in start["raw"]])[1]
            for name, pairs in start.items()
            if name != "raw"
        }
        for i, kind in enumerate(("CPU time", "wall time"))
    }
    _dots(axis, groups, START, "Exec to first finished step, times raw's (lower is better)")


def _memory(axis: Any, result: Result) -> None:
    groups: dict[str, dict[str, list[float]]] = {}
    for real in (False, True):
        for job, _, raw, rows in result.groups(real):
            for row in _compared(rows):
                percentages = groups.setdefault(job, {}).setdefault(row["contender"], [])
                percentages.append((row["peak"] / raw["peak"] - 1) * 100)
    _dots(axis, groups, (MEMORY - 1) * 100, "Peak memory, % over raw (lower is better)")
