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
    "runner, tracking=none": "5 metrics in a file",
}
STEP_US, SPEED, START, MEMORY = 60.0, 0.98, 1.10, 1.02  # our targets
Row = Mapping[str, Any]


def median_with_quartiles(values: Sequence[float], form: str = ".1f") -> str:
    """Return the text of the median with the quartiles."""
    low, high = quartiles(values)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, method="inclusive")
    return low, high


def differences_and_ratios(
    mine: Sequence[float], raw: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return differences and ratios, round by round."""
    pairs = list(zip(mine, raw, strict=True))
    return [m - r for m, r in pairs], [m / r for m, r in pairs]


def median_ratio(row: Row, raw: Row, clock: str) -> float:
    """Return the median of the ratios to raw, round by round."""
    return statistics.median(differences_and_ratios(row[clock], raw[clock])[1])


class Result:
    """A measurement as it is in peers.json."""

    def __init__(self, results: Mapping[str, Any]) -> None:
        self.results = results
        self.rows: list[Row] = results["rows"]
        self.clock = "wall" if results["device"] == "cuda" else "cpu"  # by which targets are judged

    def groups(self, real: bool) -> Iterator[tuple[str, str, Row, list[Row]]]:
        """Yield job, precision, raw's row and all rows."""
        chosen = [row for row in self.rows if (row["job"] != "mlp") == real]
        for job, precision in dict.fromkeys((r["job"], r["precision"]) for r in chosen):
            rows = [r for r in chosen if (r["job"], r["precision"]) == (job, precision)]
            yield job, precision, next(r for r in rows if r["contender"] == "raw"), rows

    def comparable_rows(self, real: bool, name: str) -> Iterator[tuple[Row, Row]]:
        """Yield a contender's rows that can be compared, each with raw's."""
        for _, _, raw, rows in self.groups(real):
            yield from ((r, raw) for r in rows if r["contender"] == name and not r["void"])

    def step_table(self) -> str:
        """Return the table of what a step of the MLP costs."""
        lines = []
        for _, precision, raw, rows in self.groups(real=False):
            for row in rows:
                name, records = row["contender"], RECORDS.get(row["contender"], "nothing")
                if row["void"]:
                    lines.append(
                        [precision, name, records, f"not compared: {row['void']}", *[""] * 5]
                    )
                    continue
                over, ratio = differences_and_ratios(row["cpu"], raw["cpu"])
                lines.append(
                    [
                        precision,
                        name,
                        records,
                        median_with_quartiles([v * MICRO for v in row["cpu"]], ".0f"),
                        median_with_quartiles([v * MICRO for v in over], "+.0f"),
                        f"{statistics.median(ratio):.2f}",
                        median_with_quartiles([v * MICRO for v in row["wall"]], ".0f"),
                        memory_over_raw(row, raw),
                        loss_agreement(row),
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
        """Return the table of realistic jobs."""
        lines = []
        for job, precision, raw, rows in self.groups(real=True):
            for row in rows:
                name = row["contender"]
                if row["void"]:
                    lines.append([job, precision, name, f"not compared: {row['void']}", *[""] * 5])
                    continue
                cpu, wall = (
                    [1 / v for v in differences_and_ratios(row[k], raw[k])[1]]
                    for k in ("cpu", "wall")
                )
                lines.append(
                    [
                        job,
                        precision,
                        name,
                        median_with_quartiles([v * 1e3 for v in row["cpu"]]),
                        median_with_quartiles([v * 1e3 for v in row["wall"]]),
                        median_with_quartiles(cpu, ".3f"),
                        median_with_quartiles(wall, ".3f"),
                        memory_over_raw(row, raw),
                        loss_agreement(row),
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
        """Return the table of start-up times."""
        lines, start = [], self.results["start"]
        for name, pairs in start.items():
            cpu, wall = zip(*pairs, strict=True)
            raw_cpu, raw_wall = zip(*start["raw"], strict=True)
            lines.append(
                [
                    name,
                    median_with_quartiles(cpu, ".2f"),
                    f"{statistics.median(differences_and_ratios(cpu, raw_cpu)[1]):.2f}",
                    median_with_quartiles(wall, ".2f"),
                    f"{statistics.median(differences_and_ratios(wall, raw_wall)[1]):.2f}",
                ]
            )
        return table(["contender", "CPU s", "over raw", "wall s", "over raw"], lines)

    def writer_table(self) -> str:
        """Return the table of what the processes cost that a contender has started."""
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

    def target_lines(self) -> str:
        """Return which targets are reached; judged by CPU time where a CPU trains."""
        own = [self._step(), self._speed(), self._start(), self._memory()]
        return "\n".join([*filter(None, own), "", *self.framework_lines()])

    def _over(self, name: str) -> dict[str, float]:
        """Return µs per step over raw on the MLP, by precision."""
        return {
            row["precision"]: statistics.median(
                differences_and_ratios(row[self.clock], raw[self.clock])[0]
            )
            * MICRO
            for row, raw in self.comparable_rows(False, name)
        }

    def _step(self) -> str:
        over = self._over("runner")
        if not over:  # asked for realistic jobs alone
            return ""
        aim = f"Cost of a step with all five metrics recorded, at most {STEP_US:.0f} µs over raw"
        return verdict(max(over.values()) <= STEP_US, aim, join_values(over, "{:+.0f} µs"))

    def _speed(self) -> str:
        pairs = list(self.comparable_rows(True, "runner"))
        speeds = {
            clock: {
                f"{r['job']} {r['precision']}": 1 / median_ratio(r, raw, clock) for r, raw in pairs
            }
            for clock in ("cpu", "wall")
        }
        if not pairs:
            return ""
        speeds_text = "; ".join(
            f"by {clock} time {join_values(results, '{:.3f}')}" for clock, results in speeds.items()
        )
        reached = min(speeds[self.clock].values()) >= SPEED
        return verdict(reached, f"Realistic jobs, at least {SPEED} of raw's speed", speeds_text)

    def _start(self) -> str:
        start, which = self.results["start"], 0 if self.clock == "cpu" else 1
        mine, raw = ([pair[which] for pair in start[name]] for name in ("runner", "raw"))
        ratio = statistics.median(differences_and_ratios(mine, raw)[1])
        aim = f"From exec to the first finished step, at most {START:.2f} times raw's"
        return verdict(ratio <= START, aim, f"{ratio:.2f}")

    def _memory(self) -> str:
        pairs = [*self.comparable_rows(False, "runner"), *self.comparable_rows(True, "runner")]
        over = {f"{r['job']} {r['precision']}": r["peak"] / raw["peak"] - 1 for r, raw in pairs}
        aim = f"Peak memory, at most {MEMORY - 1:.0%} over raw"
        return verdict(max(over.values()) <= MEMORY - 1, aim, join_values(over, "{:+.1%}"))

    def framework_lines(self) -> Iterator[str]:
        """Yield a line for each other framework, and for each row that is not compared."""
        for name in ("Fabric", "Trainer", "Accelerate"):
            if over := self._over(name):
                costs = join_values(over, "{:+.0f} µs")
                yield f"- {name}, which records nothing: {costs} per step."
        for r in self.rows:
            if r["void"]:
                yield (
                    f"- {r['contender']} on {r['job']} was asked for {r['precision']} and "
                    f"is left out: {r['void']}."
                )

    def breakdown_table(self) -> str:
        """Return the parts of the runner's cost over raw, each the difference of two rows."""
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
            cells = [
                median_with_quartiles(
                    [d * MICRO for d in differences_and_ratios(by[a], by[b])[0]], "+.0f"
                )
                for a, b in parts
            ]
            lines.append([precision, *cells])
        head = [
            "precision",
            "five metrics by hand, over raw",
            "the same in the runner, over raw",
            "journal and tracking, over that",
        ]
        return table(head, lines)


def memory_over_raw(row: Row, raw: Row) -> str:
    """Return the text of a row's peak memory over raw's."""
    over = (row["peak"] - raw["peak"]) / MIB
    device = (row["device_peak"] - raw["device_peak"]) / MIB
    on_device = f", device {device:+.0f} MiB" if raw["device_peak"] else ""
    return f"{over:+.1f} MiB ({over * MIB / raw['peak']:+.1%}){on_device}"


def loss_agreement(row: Row) -> str:
    """Return whether a row's first losses are raw's."""
    return f"differ by {row['difference']:.0e}" if row["difference"] else "equal"


def join_values(values: Mapping[str, float], form: str) -> str:
    """Return the text of named values."""
    return ", ".join(f"{name} {form.format(value)}" for name, value in values.items())


def verdict(reached: bool, aim: str, measured: str) -> str:
    """Return the line of a target."""
    return f"- {'Reached' if reached else '**Missed**'}: {aim}. Measured: {measured}."


def profile_table(paths: Mapping[str, Path], steps: int, most: int = 12) -> list[list[str]]:
    """Return the functions whose own time per step is most over raw's, the largest first."""
    spent: dict[str, dict[str, tuple[float, float]]] = {}
    for name, path in paths.items():
        results = spent[name] = {}
        stats = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]
        for (file, _, function), (_, calls, own, _, _) in stats.items():
            where = "/".join(Path(file).parts[-2:]) if file != "~" else ""
            key = f"{where} {function}".strip()
            before = results.get(key, (0.0, 0.0))
            results[key] = before[0] + own / steps * MICRO, before[1] + calls / steps
    mine, raw = spent["runner"], spent["raw"]
    over = {key: own - raw.get(key, (0.0, 0.0))[0] for key, (own, _) in mine.items()}
    first = sorted(over, key=lambda key: -over[key])[:most]
    return [[f"`{key}`", f"{mine[key][1]:.2f}", f"{over[key]:+.1f}"] for key in first]


def import_table(results: Mapping[str, Mapping[str, float]], most: int = 10) -> list[list[str]]:
    """Return the packages whose import costs the runner more than raw."""
    raw, mine = results["raw"], results["runner"]
    over = {
        name: seconds - raw.get(name, 0.0)
        for name, seconds in mine.items()
        if name not in raw or name in ("runner", "logging")
    }
    first = sorted(over, key=lambda name: -over[name])[:most]
    rows = [[f"`{name}`", f"{over[name] * 1e3:.0f}"] for name in first]
    return [*rows, ["all of them", f"{sum(over.values()) * 1e3:.0f}"]]
