"""Export a sweep's jobs as rows, and write them beside the report: CSV and JSON.

runner/modes/result.py has the columns.
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.modes.result import (
    FIXED_COLUMNS,
    METRIC_PREFIX,
    SETTING_PREFIX,
    table_rows,
)
from runner.sweeps.report.jobs import SweepData
from runner.utils.files import write_text
from runner.utils.secrets import redact_values

SCHEMA_VERSION = 1
"""Version of report.json; a new column does not change it."""


def job_rows(data: SweepData) -> list[dict[str, object]]:
    """Return one row per job, in the order of the jobs, see table_rows."""
    return table_rows([job.result for job in data.jobs])


def write_rows(rows: Sequence[Mapping[str, object]], folder: Path) -> list[Path]:
    """Write rows of job_rows() as report.csv and report.json into a folder; return the paths.

    Raises:
        OSError: the folder cannot be written to.
    """
    safe_rows = redact_values([dict(row) for row in rows])
    return [
        write_text(folder / "report.csv", _csv_text(safe_rows)),
        write_text(folder / "report.json", _json_text(safe_rows)),
    ]


def _csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as CSV with a line of names; None is an empty field."""
    columns = list(rows[0]) if rows else list(FIXED_COLUMNS)
    text = io.StringIO()
    # "\n": csv's own "\r\n" would become "\r\r\n" where the platform writes line ends of two.
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _json_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows with the meaning of their columns as JSON, in which all numbers are finite."""
    plain = [{name: _json_value(value) for name, value in row.items()} for row in rows]
    content = {"version": SCHEMA_VERSION, "columns": _column_meanings(rows), "rows": plain}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _json_value(value: object) -> object:
    """Return a value as JSON can hold it: a number that is not finite as its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _column_meanings(rows: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Return the meaning of each column of the rows."""
    meanings = dict(FIXED_COLUMNS)
    for name in rows[0] if rows else ():
        if name.startswith(METRIC_PREFIX):
            meanings[name] = f"last value of {name.removeprefix(METRIC_PREFIX)}"
        elif name.startswith(SETTING_PREFIX):
            meanings[name] = f"value of {name.removeprefix(SETTING_PREFIX)} that the command sets"
    return meanings
