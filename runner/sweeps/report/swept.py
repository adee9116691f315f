"""Find which settings a sweep's jobs have, and which of them differ between the jobs."""

from collections.abc import Sequence

from runner.modes.result import RunResult, setting_values


def swept_keys(results: Sequence[RunResult]) -> list[str]:
    """Return the keys whose values differ between jobs, in the order of the command."""
    values_by_job = [setting_values(result) for result in results]
    keys = dict.fromkeys(key for values in values_by_job for key in values)
    swept = []
    for key in keys:
        values_of_key = {values.get(key) for values in values_by_job}
        if len(values_of_key) > 1:
            swept.append(key)
    if swept:
        return swept
    # A result made from the tags of a run has a precision and no overrides.
    precisions = {result.precision for result in results}
    return ["precision"] if len(precisions) > 1 else []
