"""Data sets as inputs of a run, as MLflow reads them back."""

import json
import warnings

import pytest
import torch
from torch.utils.data import TensorDataset

from runner.data.datasets.digits import digits
from runner.data.fingerprint import describe_data
from runner.data.splits import Splits
from runner.tracking.writer.dataset_inputs import log_inputs

NODE = {"_target_": "runner.data.datasets.digits.digits", "seed": 0, "meta": {"classes": 10}}


@pytest.fixture(scope="module")
def run_in(store):
    """A new run of an experiment."""

    def made(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mlflow's, while it makes its tables
            experiment = store.experiment(name)
        return store.client.create_run(experiment).info.run_id

    return made


def inputs_of(store, run_id):
    found = store.run(run_id).inputs.dataset_inputs
    return sorted((i.dataset.name, i.tags[0].value, i.dataset.digest) for i in found)


def test_a_run_shows_both_splits(store, run_in):
    described = describe_data("digits", NODE, digits())
    run_id = run_in("splits")
    log_inputs(store.client, run_id, described)
    log_inputs(store.client, run_id, described)
    wanted = [("digits", d["context"], d["digest"]) for d in described]
    assert inputs_of(store, run_id) == sorted(wanted)
    train = next(i for i in store.run(run_id).inputs.dataset_inputs if i.tags[0].value < "v")
    assert train.tags[0].key == "mlflow.data.context"
    assert json.loads(train.dataset.profile) == {"num_rows": 1438, "classes": 10}
    assert train.dataset.source_type == "code"


def test_mlflow_reads_the_schema_and_the_source(store, run_in):
    from mlflow.data import get_source
    from mlflow.data.schema import TensorDatasetSchema

    run_id = run_in("read")
    log_inputs(store.client, run_id, describe_data("digits", NODE, digits()))
    dataset = store.run(run_id).inputs.dataset_inputs[0].dataset
    schema = TensorDatasetSchema.from_dict(json.loads(dataset.schema))
    (features,) = schema.features.inputs
    assert (str(features.type), features.shape) == ("float32", (-1, 1, 8, 8))
    assert schema.targets.inputs[0].shape == (-1,)
    assert get_source(dataset).to_dict()["tags"]["target"] == "runner.data.datasets.digits.digits"


def test_runs_on_the_same_data_share_one_data_set(store, run_in):
    described = describe_data("digits", NODE, digits())
    runs = [run_in("shared"), run_in("shared")]
    for run_id in runs:
        log_inputs(store.client, run_id, described)
    assert inputs_of(store, runs[0]) == inputs_of(store, runs[1])


def test_a_data_set_used_for_training_and_validation_is_recorded_once(store, run_in):
    few = TensorDataset(torch.ones(4, 2), torch.ones(4))
    run_id = run_in("overfit")
    log_inputs(store.client, run_id, describe_data("few", {}, Splits(few, few)))
    ((_, context, _),) = inputs_of(store, run_id)
    assert context == "training, validation"


def test_names_and_sources_of_any_length_fit(store, run_in):
    few = TensorDataset(torch.ones(4, 2), torch.ones(4))
    run_id = run_in("long")
    node = {"_target_": "a.b", "words": "x" * 100_000}
    log_inputs(store.client, run_id, describe_data("n" * 1000, node, Splits(few, few)))
    assert len(inputs_of(store, run_id)) == 1
