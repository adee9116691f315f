"""Look up an MLflow experiment by name, trying numbered names if a deleted one holds the name."""

from itertools import chain, count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment


def active_experiment(client: "MlflowClient", name: str) -> "tuple[Experiment | None, str]":
    """Return the experiment for a name, and the name that it has.

    MLflow keeps the name of a deleted experiment, so the names "<name> 2", "<name> 3" ... are tried
    next. Renaming the deleted one would need restoring it, which brings back all of its runs.

    Returns:
        The first experiment of these names that is not deleted, with its name; None with the first
        free name if there is none.

    Raises:
        MlflowException: the store does not answer.
    """
    for tried in chain([name], (f"{name} {number}" for number in count(2))):
        found = client.get_experiment_by_name(tried)
        if found is None or found.lifecycle_stage != "deleted":
            return found, tried
    raise AssertionError("names do not end")
