"""Tables and conclusions of a measurement; every number in them is computed from it."""

import pstats
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import table

MICRO, MIB = 1e6, 2**20
RECORDS = {
    "raw": "nothing",
    "raw, recording": "5 metrics in a list",
    "runner": "5 metrics in MLflow",
    "runner, tracking=none": "5 metrics read, not kept",
}
STEP_US, SPEED, START, MEMORY = 60.0, 0.98, 1.10, 1.02  # our targets
Row = Mapping[str, Any]


def middle(values: Sequence[float], form: str = ".1f") -> str:
    """Median with the quartiles."""
    low, high = quartiles(values)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, method="inclusive")
    return low, high


def paired(mine: Sequence[float], raw: Sequence[float]) -> tuple[list[float], list[float]]:
    """Differences and ratios, round by round."""
    pairs = list(zip(mine, raw, strict=True))
    return [m - r for m, r in pairs], [m / r for m, r in pairs]


def median_ratio(row: Row, raw: Row, clock: str) -> float:
    return statistics.median(paired(row[clock], raw[clock])[1])


class Result:
    """A measurement as it is in peers.json."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.found = found
        self.rows: list[Row] = found["rows"]
        self.clock = "wall" if found["device"] == "cuda" else "cpu"  # by which targets are judged

    def groups(self, real: bool) -> Iterator[tuple[str, str, Row, list[Row]]]:
        """Job, precision, raw's row and all rows."""
        chosen = [row for row in self.rows if (row["job"] != "mlp") == real]
        for job, precision in dict.fromkeys((r["job"], r["precision"]) for r in chosen):
            rows = [r for r in chosen if (r["job"], r["precision"]) == (job, precision)]
            yield job, precision, next(r for r in rows if r["contender"] == "raw"), rows

    def measured(self, real: bool, name: str) -> Iterator[tuple[Row, Row]]:
        """A contender's rows that are a comparison, each with raw's."""
        for _, _, raw, rows in self.groups(real):
            yield from ((r, raw) for r in rows if r["contender"] == name and not r["void"])

    def step_table(self) -> str:
        lines = []
        for _, precision, raw, rows in self.groups(real=False):
            for row in rows:
                name, kept = row["contender"], RECORDS.get(row["contender"], "nothing")
                if row["void"]:
                    lines.append([precision, name, kept, f"not compared: {row['void']}", *[""] * 5])
                    continue
                over, ratio = paired(row["cpu"], raw["cpu"])
                lines.append(
                    [
                        precision,
                        name,
                        kept,
                        middle([v * MICRO for v in row["cpu"]], ".0f"),
                        middle([v * MICRO for v in over], "+.0f"),
                        f"{statistics.median(ratio):.2f}",
                        middle([v * MICRO for v in row["wall"]], ".0f"),
                        memory(row, raw),
                        agreement(row),
                    ]
                )
        return table(
            [
                "precision",
                "contender",
                "records",
                "µs CPU per step",
                "over raw",
                "ratio",
                "µs wall per step",
                "peak over raw",
                "first losses",
            ],
            lines,
        )

    def real_table(self) -> str:
        lines = []
        for job, precision, raw, rows in self.groups(real=True):
            for row in rows:
                name = row["contender"]
                if row["void"]:
                    lines.append([job, precision, name, f"not compared: {row['void']}", *[""] * 5])
                    continue
                cpu, wall = ([1 / v for v in paired(row[k], raw[k])[1]] for k in ("cpu", "wall"))
                lines.append(
                    [
                        job,
                        precision,
                        name,
                        middle([v * 1e3 for v in row["cpu"]]),
                        middle([v * 1e3 for v in row["wall"]]),
                        middle(cpu, ".3f"),
                        middle(wall, ".3f"),
                        memory(row, raw),
                        agreement(row),
                    ]
                )
        return table(
            [
                "job",
                "precision",
                "contender",
                "ms CPU per step",
                "ms wall per step",
                "speed over raw, CPU",
                "speed over raw, wall",
                "peak over raw",
                "first losses",
            ],
            lines,
        )

    def start_table(self) -> str:
        lines, start = [], self.found["start"]
        for name, pairs in start.items():
            cpu, wall = zip(*pairs, strict=True)
            raw_cpu, raw_wall = zip(*start["raw"], strict=True)
            lines.append(
                [
                    name,
                    middle(cpu, ".2f"),
                    f"{statistics.median(paired(cpu, raw_cpu)[1]):.2f}",
                    middle(wall, ".2f"),
                    f"{statistics.median(paired(wall, raw_wall)[1]):.2f}",
                ]
            )
        return table(["contender", "CPU s", "over raw", "wall s", "over raw"], lines)

    def beside_table(self) -> str:
        """What the processes cost that a contender has started."""
        rows = [r for r in self.rows if r["writer_peak"]]
        return table(
            ["job", "precision", "contender", "µs CPU per step", "MiB"],
            [
                [
                    r["job"],
                    r["precision"],
                    r["contender"],
                    f"{r['writer_cpu'] * MICRO:.0f}",
                    f"{r['writer_peak'] / MIB:.0f}",
                ]
                for r in rows
            ],
        )

    def targets(self) -> str:
        """What was aimed at, and whether it is reached; judged by CPU time where a CPU trains."""
        own = [self._step(), self._speed(), self._start(), self._memory()]
        return "\n".join([*filter(None, own), "", *self.others()])

    def _over(self, name: str) -> dict[str, float]:
        """µs per step over raw on the MLP, by precision."""
        return {
            row["precision"]: statistics.median(paired(row[self.clock], raw[self.clock])[0]) * MICRO
            for row, raw in self.measured(False, name)
        }

    def _step(self) -> str:
        over = self._over("runner")
        if not over:  # asked for realistic jobs alone
            return ""
        aim = f"Cost of a step with all five metrics recorded, at most {STEP_US:.0f} µs over raw"
        return verdict(max(over.values()) <= STEP_US, aim, listed(over, "{:+.0f} µs"))

    def _speed(self) -> str:
        pairs = list(self.measured(True, "runner"))
        speeds = {
            clock: {
                f"{r['job']} {r['precision']}": 1 / median_ratio(r, raw, clock) for r, raw in pairs
            }
            for clock in ("cpu", "wall")
        }
        if not pairs:
            return ""
        told = "; ".join(
            f"by {clock} time {listed(found, '{:.3f}')}" for clock, found in speeds.items()
        )
        reached = min(speeds[self.clock].values()) >= SPEED
        return verdict(reached, f"Realistic jobs, at least {SPEED} of raw's speed", told)

    def _start(self) -> str:
        start, which = self.found["start"], 0 if self.clock == "cpu" else 1
        mine, raw = ([pair[which] for pair in start[name]] for name in ("runner", "raw"))
        ratio = statistics.median(paired(mine, raw)[1])
        aim = f"From exec to the first finished step, at most {START:.2f} times raw's"
        return verdict(ratio <= START, aim, f"{ratio:.2f}")

    def _memory(self) -> str:
        pairs = [*self.measured(False, "runner"), *self.measured(True, "runner")]
        over = {f"{r['job']} {r['precision']}": r["peak"] / raw["peak"] - 1 for r, raw in pairs}
        aim = f"Peak memory, at most {MEMORY - 1:.0%} over raw"
        return verdict(max(over.values()) <= MEMORY - 1, aim, listed(over, "{:+.1%}"))

    def others(self) -> Iterator[str]:
        """The frameworks on the same scale."""
        for name in ("Fabric", "Trainer", "Accelerate"):
            if over := self._over(name):
                yield f"- {name}, which records nothing: {listed(over, '{:+.0f} µs')} per step."
        for r in self.rows:
            if r["void"]:
                yield (
                    f"- {r['contender']} on {r['job']} was asked for {r['precision']} and "
                    f"is left out: {r['void']}."
                )

    def rest(self) -> str:
        """Where the runner's cost over raw goes: each part is a difference between two rows."""
        lines = []
        for _, precision, _, rows in self.groups(real=False):
            by = {row["contender"]: row["cpu"] for row in rows}
            if "raw, recording" not in by:
                continue
            parts = (
                ("raw, recording", "raw"),
                ("runner, tracking=none", "raw"),
                ("runner", "runner, tracking=none"),
            )
            cells = [middle([d * MICRO for d in paired(by[a], by[b])[0]], "+.0f") for a, b in parts]
            lines.append([precision, *cells])
        head = [
            "precision",
            "five metrics by hand, over raw",
            "the same in the runner, over raw",
            "journal and tracking, over that",
        ]
        return table(head, lines)


def memory(row: Row, raw: Row) -> str:
    over = (row["peak"] - raw["peak"]) / MIB
    device = (row["device_peak"] - raw["device_peak"]) / MIB
    on_device = f", device {device:+.0f} MiB" if raw["device_peak"] else ""
    return f"{over:+.1f} MiB ({over * MIB / raw['peak']:+.1%}){on_device}"


def agreement(row: Row) -> str:
    return f"differ by {row['difference']:.0e}" if row["difference"] else "equal"


def listed(values: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{name} {form.format(value)}" for name, value in values.items())


def verdict(reached: bool, aim: str, told: str) -> str:
    return f"- {'Reached' if reached else '**Missed**'}: {aim}. Measured: {told}."


def profile_table(paths: Mapping[str, Path], steps: int, most: int = 12) -> list[list[str]]:
    """Own time of functions per step, the runner's less raw's, the largest first."""
    spent: dict[str, dict[str, tuple[float, float]]] = {}
    for name, path in paths.items():
        found = spent[name] = {}
        stats = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]
        for (file, _, function), (_, calls, own, _, _) in stats.items():
            where = "/".join(Path(file).parts[-2:]) if file != "~" else ""
            key = f"{where} {function}".strip()
            before = found.get(key, (0.0, 0.0))
            found[key] = before[0] + own / steps * MICRO, before[1] + calls / steps
    mine, raw = spent["runner"], spent["raw"]
    over = {key: own - raw.get(key, (0.0, 0.0))[0] for key, (own, _) in mine.items()}
    first = sorted(over, key=lambda key: -over[key])[:most]
    return [[f"`{key}`", f"{mine[key][1]:.2f}", f"{over[key]:+.1f}"] for key in first]


def import_table(found: Mapping[str, Mapping[str, float]], most: int = 10) -> list[list[str]]:
    """Packages whose import costs the runner more than raw."""
    raw, mine = found["raw"], found["runner"]
    over = {
        name: seconds - raw.get(name, 0.0)
        for name, seconds in mine.items()
        if name not in raw or name in ("runner", "logging")
    }
    first = sorted(over, key=lambda name: -over[name])[:most]
    rows = [[f"`{name}`", f"{over[name] * 1e3:.0f}"] for name in first]
    return [*rows, ["all of them", f"{sum(over.values()) * 1e3:.0f}"]]
