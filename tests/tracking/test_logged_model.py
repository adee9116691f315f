"""A logged model in a real store: with its run, loadable by MLflow alone, once however often it is
sent."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from serving import Server
from torch import nn

from runner.checkpoint.export import export
from runner.precision.mixed import MixedPrecision
from runner.tracking.writer.logged_model import log_model

ODD = "Anna's model"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return export(model, MixedPrecision("bf16-mixed", "bfloat16"), torch.randn(4, 6), folder)


@pytest.fixture(scope="module")
def quiet_store(store):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mlflow's, while it makes its tables
        yield store


def opened(store, name):
    """A run with an evaluation at step 8."""
    client = store.client
    run_id = client.create_run(store.experiment(name)).info.run_id
    client.log_param(run_id, "model", "mlp")
    for key, step in (("val/loss", 4), ("val/loss", 8), ("train/loss", 8)):
        client.log_metric(run_id, key, step / 10, timestamp=1_700_000_000_000, step=step)
    return run_id


def logged(store, run_id, exported, **more):
    folder = exported.path.parent
    facts = {**exported.facts, "step": 8}
    return log_model(store.uri, run_id, folder, facts, "model", **more)


def test_a_logged_model_belongs_to_its_run(quiet_store, exported):
    run_id = opened(quiet_store, "belongs")
    model_id = logged(quiet_store, run_id, exported)
    model = quiet_store.client.get_logged_model(model_id)
    run = quiet_store.run(run_id)
    assert (str(model.status), model.name, model.source_run_id) == ("READY", "model", run_id)
    assert model.params == {"model": "mlp"}
    assert [(metric.key, metric.value) for metric in model.metrics] == [("val/loss", 0.8)]
    assert [(o.model_id, o.step) for o in run.outputs.model_outputs] == [(model_id, 8)]
    moment = 1_700_000_000_000
    assert quiet_store.points(run_id, "val/loss") == [(4, moment, 0.4), (8, moment, 0.8)]


class Fields(nn.Module):
    def forward(self, fields):
        return fields["a"] + fields["b"]


def test_a_model_of_fields_has_them_in_its_signature(quiet_store, tmp_path):
    import mlflow

    fields = {"a": torch.ones(4, 3), "b": torch.ones(4, 3)}
    made = export(Fields(), MixedPrecision("bf16-mixed", "bfloat16"), fields, tmp_path)
    model_id = logged(quiet_store, opened(quiet_store, "fields"), made)
    model = mlflow.models.Model.load(
        quiet_store.client.get_logged_model(model_id).artifact_location
    )
    assert model.signature.inputs.input_names() == ["a", "b"]
    assert [*model.flavors] == ["pytorch"]


def test_a_model_can_be_uploaded_again(quiet_store, exported):
    run_id = opened(quiet_store, "again")
    ids = {logged(quiet_store, run_id, exported, registered_name=ODD) for _ in range(3)}
    assert len(ids) == 1
    assert len(quiet_store.run(run_id).outputs.model_outputs) == 1
    versions = quiet_store.client.search_model_versions(f"run_id = '{run_id}'")
    assert [(v.name, str(v.status)) for v in versions] == [(ODD, "READY")]
    tags = quiet_store.client.get_logged_model(*ids).tags
    assert json.loads(tags["mlflow.modelVersions"]) == [{"name": ODD, "version": 1}]


def test_an_interrupted_upload_of_a_model_is_completed(quiet_store, exported, monkeypatch):
    run_id = opened(quiet_store, "broken")
    client = type(quiet_store.client)

    def fail(*_):
        raise ConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(client, "log_model_artifacts", fail)
        with pytest.raises(ConnectionError):
            logged(quiet_store, run_id, exported)
    model_id = logged(quiet_store, run_id, exported)
    experiment = quiet_store.run(run_id).info.experiment_id
    (model,) = quiet_store.client.search_logged_models([experiment])
    assert (model.model_id, str(model.status)) == (model_id, "READY")


def test_each_model_becomes_the_next_version_in_the_registry(quiet_store, exported):
    for _ in range(2):
        run_id = opened(quiet_store, "versions")
        logged(quiet_store, run_id, exported, registered_name="digits-classifier")
    found = quiet_store.client.search_model_versions("name = 'digits-classifier'")
    assert sorted(int(version.version) for version in found) == [1, 2]


LOAD = """
import sys, warnings
warnings.simplefilter("ignore")
import mlflow, mlflow.pyfunc, mlflow.pytorch, numpy as np, torch
exported, *pairs = sys.argv[1:]
rows = np.linspace(-1, 1, 30, dtype="float32").reshape(5, 6)
with torch.no_grad():
    wanted = torch.export.load(exported).module()(torch.from_numpy(rows))
for pair in pairs:
    uri, name = pair.split()
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    with torch.no_grad():
        assert torch.equal(mlflow.pytorch.load_model(name)(torch.from_numpy(rows)), wanted), name
    found = mlflow.pyfunc.load_model(name)
    assert np.array_equal(found.predict(rows), wanted.numpy()), name
    try:
        found.predict(rows.astype("float64"))
    except mlflow.MlflowException:
        continue
    raise AssertionError("the signature is not enforced")
assert "runner" not in sys.modules
"""


def load_alone(exported, folder, pairs):
    """Load "store model" pairs with MLflow and torch alone; compare with the exported file."""
    kept = {key: v for key, v in os.environ.items() if not key.startswith(("MLFLOW_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, str(exported.path), *pairs],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env={**kept, "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"},
    )
    assert done.returncode == 0, done.stderr


def test_the_writer_uploads_a_model_without_importing_torch(quiet_store, exported, tmp_path, root):
    """It holds a process of its own, whose memory and start count."""
    run_id = opened(quiet_store, "lean")
    script = (
        "import json, pathlib, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        "from runner.tracking.writer.logged_model import log_model\n"
        "uri, run_id, folder, facts = sys.argv[1:]\n"
        "facts = json.loads(facts)\n"
        "log_model(uri, run_id, pathlib.Path(folder), facts, 'model')\n"
        "assert 'torch' not in sys.modules\n"
        "import mlflow\n"
        "assert mlflow.get_tracking_uri() != uri\n"
    )
    given = (quiet_store.uri, run_id, str(exported.path.parent), json.dumps(exported.facts))
    command = [sys.executable, "-P", "-c", script, *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def server(tmp_path, empty_store):
    running = Server(tmp_path, empty_store(tmp_path / "mlflow.db"))
    running.start()
    yield running.url
    running.stop()


@pytest.mark.slow
def test_mlflow_loads_a_logged_model_without_this_package(
    quiet_store, server, reader, exported, tmp_path
):
    """From a database, and over HTTP."""
    pairs = []
    for store in (quiet_store, reader(server)):
        run_id = opened(store, "loads")
        model_id = logged(store, run_id, exported, registered_name="loads")
        assert logged(store, run_id, exported, registered_name="loads") == model_id
        assert len(store.client.search_model_versions("name = 'loads'")) == 1
        names = (f"models:/{model_id}", f"runs:/{run_id}/model", "models:/loads/1")
        pairs += [f"{store.uri} {name}" for name in names]
    load_alone(exported, tmp_path, pairs)
