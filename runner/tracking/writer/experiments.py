"""Which experiment a name means, where one of that name may have been deleted."""

from itertools import chain, count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment


def active_experiment(client: "MlflowClient", name: str) -> "tuple[Experiment | None, str]":
    """The experiment of a name and the name, or of "<name> 2", "<name> 3" ... where those before
    it were deleted; None where the next one is still to be made.

    MLflow keeps a deleted experiment's name and cannot rename it as it is. Restoring it for that
    would bring back every run in it, also those that were deleted before it, for anybody who
    writes there meanwhile.

    Raises:
        MlflowException: the store does not answer.
    """
    for tried in chain([name], (f"{name} {number}" for number in count(2))):
        found = client.get_experiment_by_name(tried)
        if found is None or found.lifecycle_stage != "deleted":
            return found, tried
    raise AssertionError("names do not end")
