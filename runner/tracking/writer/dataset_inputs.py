"""Record data sets as inputs of an MLflow run. Called by the writer process only."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


def log_inputs(client: "MlflowClient", run_id: str, datasets: Sequence[Mapping[str, Any]]) -> None:
    """Record the data sets that a run is trained and validated on; repeating it changes nothing.

    Args:
        client: of the run's store.
        run_id: of the run.
        datasets: see runner.data.fingerprint.describe_data.

    Raises:
        MlflowException: the store refuses or cannot be reached.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils import validation
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    # With debug.overfit the same data set is used for both, and MLflow stores one input with one
    # tag for it.
    contexts: dict[tuple[str, str], list[str]] = {}
    for found in datasets:
        contexts.setdefault((found["name"], found["digest"]), []).append(found["context"])
    inputs = {
        (found["name"], found["digest"]): Dataset(
            # MLflow refuses longer texts.
            found["name"][: validation.MAX_DATASET_NAME_SIZE],
            found["digest"][: validation.MAX_DATASET_DIGEST_SIZE],
            found["source_type"],
            found["source"][: validation.MAX_DATASET_SOURCE_SIZE],
            found["schema"],
            found["profile"],
        )
        for found in datasets
    }
    client.log_inputs(
        run_id,
        [
            DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, ", ".join(contexts[key]))])
            for key, dataset in inputs.items()
        ],
    )
