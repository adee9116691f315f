"""The calls to MLflow: names that it takes, data sets as inputs, deleted experiments."""

import json
import sqlite3
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from mlflow.tracking import MlflowClient
from mlflow.utils import validation
from torch.utils.data import TensorDataset

from runner.core import metric_names
from runner.core.base.errors import TrackingError
from runner.data.datasets.digits import digits
from runner.data.fingerprint import describe_data
from runner.data.splits import Splits
from runner.tracking.reader import Reader
from runner.tracking.uri import UnreachableError, sqlite_path
from runner.tracking.writer.store import Store, distinct_names, legal_name, metric_name, truncate

# MLflow's, which runs in this process here.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NODE = {"_target_": "runner.data.datasets.digits.digits", "seed": 0, "meta": {"classes": 10}}


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("train/loss", "train/loss"),
        ("a[0]@b(c),d=e%f+g", "a_0__b_c__d_e_f_g"),
        ("fp8/amax//x", "fp8/amax/x"),
        ("/a", "a"),
        ("../a", "a"),
        (".", "_"),
    ],
)
def test_names_become_legal(name, legal):
    assert legal_name(name) == legal


@pytest.mark.parametrize(
    "name", ["a/../..", "//", "", "a" * 300, "é ü", "a\nb", "..", "a/.", "./."]
)
def test_mlflow_accepts_every_legal_name(name):
    validation._validate_metric(legal_name(name), 1.0, 1, 1)
    validation._validate_param(legal_name(name), "x")


def test_names_of_metrics_stay_apart():
    names = ["h.*", "h.?", "h._", "a" * 300, "a" * 301]
    assert len({metric_name(name) for name in names}) == 5
    assert metric_name("h._") == "h._"
    assert metric_names.legal_names(names[:3]) == ["h._", "h.__2", "h.__3"]


def test_names_that_become_equal_get_a_number():
    assert distinct_names({"a+b": "1", "a%b": "2", "a@b": "3"}) == {
        "a_b": "1",
        "a_b_2": "2",
        "a_b_3": "3",
    }


def test_a_truncated_text_ends_with_an_ellipsis():
    assert truncate("abc", 3) == "abc"
    assert truncate("abcd", 3) == "ab…"


class Gateway(BaseHTTPRequestHandler):
    """Answers every request with the status 200 and one text."""

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.text.encode())

    def do_POST(self):
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def gateway():
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


OTHER_EXPERIMENT = '{"experiment": {"experiment_id": "7", "name": "another"}}'


@pytest.mark.parametrize(
    "text", ["{}", "", "null", '{"experiment": {"exp', "<html>Sign in</html>", OTHER_EXPERIMENT]
)
def test_an_answer_that_is_not_the_stores_is_an_outage(gateway, monkeypatch, text):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    gateway.text = text
    store = Store(f"http://127.0.0.1:{gateway.server_port}")
    with pytest.raises(UnreachableError):
        store.experiment("mine")
    with pytest.raises(UnreachableError):
        store.create_run("1", "mine", 0, {})
    with pytest.raises(TrackingError):
        Reader(store.uri).run("0" * 32)


def test_what_only_a_gateway_took_is_an_outage(store, run_in):
    """A store answers `{}` to these calls, too: it has what was sent if it shows it."""
    run_id = run_in("gateway")
    one = Store(store.uri)
    one.log_tags(run_id, {"a": "1"})
    sent = (
        lambda: one.log_tags(run_id, {"a": "2"}),
        lambda: one.log_params(run_id, {"b": "2"}),
        lambda: one.log_points(run_id, [("c", 1.0, 1, 1)]),
        lambda: one.end_run(run_id, "FINISHED", 1),
    )
    for name in ("log_batch", "set_terminated"):
        setattr(one._client, name, lambda *_, **__: None)
    for call in sent:
        with pytest.raises(UnreachableError):
            call()


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
    Store(store.uri).log_inputs(run_id, described)
    Store(store.uri).log_inputs(run_id, described)
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
    Store(store.uri).log_inputs(run_id, describe_data("digits", NODE, digits()))
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
        Store(store.uri).log_inputs(run_id, described)
    assert inputs_of(store, runs[0]) == inputs_of(store, runs[1])


def test_a_data_set_used_for_training_and_validation_is_recorded_once(store, run_in):
    few = TensorDataset(torch.ones(4, 2), torch.ones(4))
    run_id = run_in("overfit")
    Store(store.uri).log_inputs(run_id, describe_data("few", {}, Splits(few, few)))
    ((_, context, _),) = inputs_of(store, run_id)
    assert context == "training, validation"


def test_names_and_sources_of_any_length_fit(store, run_in):
    few = TensorDataset(torch.ones(4, 2), torch.ones(4))
    run_id = run_in("long")
    node = {"_target_": "a.b", "words": "x" * 100_000}
    Store(store.uri).log_inputs(run_id, describe_data("n" * 1000, node, Splits(few, few)))
    assert len(inputs_of(store, run_id)) == 1


@pytest.fixture
def deleted(tmp_path, empty_store):
    """(store, client, id) of an experiment "old" with two runs; one had been deleted before it."""
    store = Store(empty_store(tmp_path / "mlflow.db"))
    client = MlflowClient(store.uri)
    experiment = client.create_experiment("old")
    first = client.create_run(experiment).info.run_id
    client.create_run(experiment)
    client.delete_run(first)
    client.delete_experiment(experiment)
    return store, client, experiment


def rows(store):
    with sqlite3.connect(sqlite_path(store.uri)) as database:
        runs = database.execute("select run_uuid, lifecycle_stage, deleted_time from runs")
        names = database.execute("select experiment_id, name, lifecycle_stage from experiments")
        return sorted(runs.fetchall()), sorted(names.fetchall())


def test_runs_go_to_another_experiment_and_the_deleted_one_is_unchanged(deleted):
    store, client, experiment = deleted
    before = rows(store)
    beside = store.experiment("old")
    assert beside != experiment
    assert client.get_experiment(beside).name == "old 2"
    (notice,) = store.notices
    assert "'old' was deleted there: runs go to 'old 2'" in notice
    assert f"restore --experiment-id {experiment}" in notice
    assert Store(store.uri).experiment("old") == beside, "every process finds the same one"
    assert rows(store)[0] == before[0]
    assert set(before[1]) < set(rows(store)[1])
    client.delete_experiment(beside)
    third = Store(store.uri).experiment("old")
    assert client.get_experiment(third).name == "old 3"


def test_the_command_in_the_message_restores_the_experiment(deleted):
    store, client, experiment = deleted
    client.restore_experiment(experiment)
    assert store.experiment("old") == experiment


def test_restoring_an_experiment_to_rename_it_would_restore_its_runs(deleted):
    """Why the experiment is not set aside under another name: that takes three calls, and after
    the first one also the run that had been deleted before it is there, for everybody."""
    _, client, experiment = deleted
    client.restore_experiment(experiment)
    assert len(client.search_runs([experiment])) == 2
    theirs = client.create_run(client.get_experiment_by_name("old").experiment_id).info.run_id
    client.rename_experiment(experiment, "old (deleted)")
    client.delete_experiment(experiment)
    assert client.get_run(theirs).info.lifecycle_stage == "deleted"
