"""A logged model in a real store: with its run, loadable by MLflow alone, once however often it is
sent."""

import json
import os
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
from forked_process import ForkedProcess
from serving import free_port
from torch import nn
from waiting import SECONDS, wait_for

from runner.core.base.files import write_text
from runner.core.loop.batch_layout import KeywordInputs, PositionalInputs
from runner.core.loop.model_call import call_model
from runner.precision.mixed import MixedPrecision
from runner.tracking.writer.logged_model import log_model
from runner.training.formats.export import export
from runner.training.tasks.language import CausalLM

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
    return log_model(store.uri, run_id, folder, facts, **more)


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


def test_the_stored_file_is_the_exported_one_until_one_of_them_is_replaced(quiet_store, exported):
    model_id = logged(quiet_store, opened(quiet_store, "shared"), exported)
    place = Path(quiet_store.client.get_logged_model(model_id).artifact_location)
    stored = place / "data" / exported.path.parent.name / "model.pt2"
    assert stored.samefile(exported.path)
    content = stored.read_bytes()
    write_text(exported.path, "another export")
    assert stored.read_bytes() == content
    exported.path.write_bytes(content)


class Parts(nn.Module):
    def forward(self, a, b):
        return {"sum": a + b, "product": a * b}


def positional(model, inputs):
    return model(*inputs)


def by_name(model, inputs):
    return model(**inputs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("inputs", "call", "names"),
    [
        ({"a": torch.ones(4, 3), "b": 2 * torch.ones(4, 3)}, by_name, ["a", "b"]),
        (
            PositionalInputs([torch.ones(4, 3), 2 * torch.ones(4, 3)]),
            positional,
            ["input_0", "input_1"],
        ),
    ],
)
def test_pyfunc_takes_named_fields_and_returns_arrays(quiet_store, tmp_path, inputs, call, names):
    import mlflow

    precision = MixedPrecision("bf16-mixed", "bfloat16")
    made = export(Parts(), precision, inputs, tmp_path, call)
    model_id = logged(quiet_store, opened(quiet_store, "pyfunc"), made)
    found = mlflow.pyfunc.load_model(
        quiet_store.client.get_logged_model(model_id).artifact_location
    )
    assert found.metadata.signature.inputs.input_names() == names
    assert {*found.metadata.flavors} == {"pytorch", "python_function"}
    rows = dict(zip(names, (torch.full((2, 3), x).numpy() for x in (3.0, 5.0)), strict=True))
    answer = found.predict(rows)
    assert {name: part.tolist() for name, part in answer.items()} == {
        "sum": [[8.0] * 3] * 2,
        "product": [[15.0] * 3] * 2,
    }
    with pytest.raises(mlflow.MlflowException, match="missing inputs"):
        found.predict({names[0]: rows[names[0]]})


def ask(url, content):
    """The answer of a scoring server."""
    body = json.dumps(content).encode()
    request = Request(f"{url}/invocations", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


@pytest.mark.extended  # pyfunc's predict above is what it serves
@pytest.mark.slow
def test_mlflow_serves_a_model_of_transformers_by_its_fields(quiet_store, tmp_path):
    from tiny_models import batches, build

    model = build("gpt2")
    fields = {name: t for name, t in batches("gpt2")[0].items() if name != "labels"}
    made = export(
        model,
        MixedPrecision("bf16-mixed", "bfloat16"),
        KeywordInputs(fields),
        tmp_path,
        lambda model, inputs: CausalLM().select(call_model(model, inputs)),
    )
    logged(quiet_store, opened(quiet_store, "serves"), made, registered_name="served-gpt2")
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/served-gpt2/1"]
    command += ["--env-manager=local", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    kept = {key: v for key, v in os.environ.items() if not key.startswith(("MLFLOW_", "PYTHON"))}
    environment = {**kept, "MLFLOW_TRACKING_URI": quiet_store.uri, "OMP_NUM_THREADS": "1"}
    # MLflow starts uvicorn by its name, which no folder of PATH may have here.
    uvicorn = tmp_path / "bin" / "uvicorn"
    uvicorn.parent.mkdir()
    uvicorn.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m uvicorn "$@"\n')
    uvicorn.chmod(0o755)
    environment["PATH"] = f"{uvicorn.parent}:{kept['PATH']}"
    log = (tmp_path / "serve.log").open("wb")
    process = ForkedProcess(
        command, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True, env=environment
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: is_up(f"{url}/ping", process, tmp_path / "serve.log"))
        for rows, length in ((4, 12), (1, 5)):
            part = {name: t[:rows, :length] for name, t in fields.items()}
            answer = ask(url, {"inputs": {name: t.tolist() for name, t in part.items()}})
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                wanted = model.eval()(**part).logits.float()
            found = torch.tensor(answer["predictions"])
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=SECONDS)
        log.close()


def is_up(url, process, log):
    assert process.poll() is None, log.read_text()
    with suppress(OSError), urlopen(url, timeout=5) as answer:
        return answer.status == 200
    return False


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


LOG = """
import json, pathlib, sys, warnings
warnings.simplefilter("ignore")
root, uri, run_id, folder, facts = sys.argv[1:]
sys.path.insert(0, root)
from runner.tracking.writer.logged_model import log_model
log_model(uri, run_id, pathlib.Path(folder), json.loads(facts))
assert "torch" not in sys.modules
import mlflow
assert mlflow.get_tracking_uri() != uri
"""


def run_alone(code, *arguments, cwd):
    """Run a script in a new interpreter that knows nothing of this one's settings."""
    kept = {key: v for key, v in os.environ.items() if not key.startswith(("MLFLOW_", "PYTHON"))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**kept, "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"},
    )
    assert done.returncode == 0, done.stderr


def test_the_writer_uploads_a_model_without_importing_torch(quiet_store, exported, tmp_path, root):
    """It holds a process of its own, whose memory and start count."""
    run_id = opened(quiet_store, "lean")
    facts = json.dumps(exported.facts)
    run_alone(LOG, root, quiet_store.uri, run_id, exported.path.parent, facts, cwd=tmp_path)


@pytest.mark.slow
def test_mlflow_loads_a_model_without_this_package(
    quiet_store, server_url, reader, exported, tmp_path
):
    """By each of its names from a database, and by its version over HTTP."""
    pairs = []
    for store in (quiet_store, reader(server_url)):
        run_id = opened(store, "loads")
        model_id = logged(store, run_id, exported, registered_name="loads")
        assert logged(store, run_id, exported, registered_name="loads") == model_id
        assert len(store.client.search_model_versions("name = 'loads'")) == 1
        names = (f"models:/{model_id}", f"runs:/{run_id}/model", "models:/loads/1")
        taken = names if store is quiet_store else names[-1:]
        pairs += [f"{store.uri} {name}" for name in taken]
    run_alone(LOAD, exported.path, *pairs, cwd=tmp_path)
