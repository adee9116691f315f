"""Record how long each phase of each test takes; keep each file to its share of the suite.

A run writes its record into pytest's cache, and prints the slowest files. `make test-budget` reads
the record of the last run:

    python tests/helpers/times_record.py .pytest_cache/v/runner/times
"""

import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

BUDGETS = Path(__file__).parents[1] / "budgets.json"
"""Each file's largest share of the seconds of all tests, and that of a file without its own."""
WHOLE_SUITE = 200
"""Files of a record that shares can be judged by: those of a part of the suite say nothing."""


class TimesRecord:
    """The seconds of set-up, call and teardown of each test, in the process that sees them all."""

    def __init__(self, config):
        self.config, self.seconds = config, defaultdict(dict)
        limit = config.getoption("--stop-after")
        self.end = time.time() + limit if limit else None

    def pytest_runtest_setup(self, item):
        if self.end and time.time() > self.end:
            pytest.skip("no time is left of --stop-after")

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid][report.when] = report.duration

    def pytest_terminal_summary(self, terminalreporter):
        if hasattr(self.config, "workerinput") or not self.seconds:
            return
        if cache := getattr(self.config, "cache", None):
            cache.set("runner/times", self.seconds)
        rows = seconds_per_file(self.seconds)
        terminalreporter.section("slowest files: tests, seconds of set-up, call, teardown, share")
        whole = sum(sum(phases) for _, phases in rows.values())
        for file, (tests, phases) in sorted(rows.items(), key=lambda row: -sum(row[1][1]))[:20]:
            each = " ".join(f"{seconds:7.1f}" for seconds in phases)
            terminalreporter.line(f"{tests:5} {each} {sum(phases) / whole:6.1%} {file}")


def seconds_per_file(seconds):
    """Return each file's number of tests and its seconds of set-up, call and teardown."""
    rows = defaultdict(lambda: (0, [0.0, 0.0, 0.0]))
    for test, phases in seconds.items():
        file = test.partition("::")[0]
        tests, sums = rows[file]
        each = [phases.get(when, 0.0) for when in ("setup", "call", "teardown")]
        rows[file] = (tests + 1, [a + b for a, b in zip(sums, each, strict=True)])
    return dict(rows)


def over_budget(rows, budgets):
    """Return a line for each file that takes more than its share of all seconds."""
    whole = sum(sum(phases) for _, phases in rows.values())
    shares = {file: sum(phases) / whole for file, (_, phases) in rows.items()}
    return [
        f"{file}: {share:.1%} of the suite, allowed: {budgets.get(file, budgets['default']):.1%}"
        for file, share in sorted(shares.items(), key=lambda row: -row[1])
        if share > budgets.get(file, budgets["default"])
    ]


def main(record):
    """Exit with status 1 and a line per file where one takes more than its budget."""
    try:
        rows = seconds_per_file(json.loads(Path(record).read_text()))
    except OSError as error:
        sys.exit(f"There is no record of a run: type `make test` first ({error}).")
    if len(rows) < WHOLE_SUITE:
        sys.exit(f"The last run had {len(rows)} files only: type `make test` first.")
    sys.exit("\n".join(over_budget(rows, json.loads(BUDGETS.read_text()))) or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
