"""Upload an exported model as a logged model of its run, and as a version in the registry.

Called by the writer process only. mlflow.pytorch would import torch into the writer, so the model's
folder is written by mlflow.pyfunc, with the flavor of mlflow.pytorch's serialization_format "pt2".
"""

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core import layout
from runner.tracking.uri import check_artifact_place, is_database, local_folder
from runner.tracking.writer import exported_program_pyfunc

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

LINKED_METRICS_PREFIX = "val/"
"""Prefix of the run's metrics that are linked to the model if they were logged at its step."""
_NAME = "model"
"""Name of the logged model of a run."""


def log_model(
    uri: str,
    run_id: str,
    folder: Path,
    facts: Mapping[str, Any],
    registered_name: str | None = None,
) -> str:
    """Upload an exported model with its run; a repeated call completes an interrupted one.

    Args:
        uri: of the tracking store and registry.
        run_id: of the run that trained it.
        folder: holds model.pt2, and nothing else.
        facts: see runner.training.formats.export.ExportedModel; "step" is the step of the weights.
        registered_name: of a registered model that gets a version; None for none.

    Returns:
        The id: `models:/<id>` finds it, and so does `runs:/<run_id>/model`.

    Raises:
        MlflowException: the store refuses or cannot be reached.
        OSError: model.pt2 cannot be read.
    """
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    run = client.get_run(run_id)
    # An earlier attempt may have made it.
    query = f"source_run_id = '{run_id}'"
    models = client.search_logged_models([run.info.experiment_id], filter_string=query)
    model = next((model for model in models if model.name == _NAME), None)
    if model is None:
        model = client.create_logged_model(
            run.info.experiment_id, _NAME, run_id, params=run.data.params
        )
    check_artifact_place(uri, model.model_id, lambda: str(model.artifact_location))
    # A status of READY is set last, so that it shows a complete upload.
    if str(model.status) != "READY":
        with tempfile.TemporaryDirectory() as parent:
            _write_folder(Path(parent) / "model", folder, facts, model, run_id)
            client.log_model_artifacts(model.model_id, f"{parent}/model")
        client.finalize_logged_model(model.model_id, "READY")
        if is_database(uri):
            _share_file(folder / layout.EXPORTED_MODEL, local_folder(str(model.artifact_location)))
    _link_to_run(client, run, model.model_id, facts.get("step", 0))
    if registered_name:
        # Without a server, MLflow 3.17 would look the id up in the store of the environment.
        served = uri.startswith(("http:", "https:"))
        source = f"models:/{model.model_id}" if served else model.artifact_location
        _register(client, registered_name, model.model_id, run_id, source)
    return model.model_id


def _share_file(exported: Path, stored: Path | None) -> None:
    """Make the stored copy of an exported model a hard link to it, where one file system has both.

    Nobody writes into either: each is replaced as a whole, which ends the link.

    Args:
        exported: the file that was uploaded.
        stored: folder of the logged model; None where it is not on this machine.
    """
    if stored is None:
        return
    copy = stored / "data" / exported.parent.name / exported.name
    link = copy.with_suffix(".partial")
    # Another file system, or one without links: both copies stay.
    with suppress(OSError):
        if copy.stat().st_size == exported.stat().st_size:
            link.hardlink_to(exported)
            link.replace(copy)


def _write_folder(
    path: Path, folder: Path, facts: Mapping[str, Any], model: Any, run_id: str
) -> None:
    """Write a model's folder in the form that mlflow.pytorch and mlflow.pyfunc read."""
    from mlflow import pyfunc
    from mlflow.models import ModelSignature
    from mlflow.models.model import Model
    from mlflow.version import VERSION

    description = Model(
        artifact_path=model.artifact_location,
        run_id=run_id,
        model_uuid=model.model_id,
        model_id=model.model_id,
    )
    fields = bool(facts.get("fields"))
    description.signature = ModelSignature(
        inputs=_schema(facts["inputs"], fields),
        outputs=_schema(facts["outputs"], not facts["one_output"]),
    )
    data = f"data/{folder.name}"
    description.add_flavor("pytorch", model_data=data, pytorch_version=facts["torch"], code=None)
    # mlflow.pytorch's pyfunc takes and returns a single tensor and refuses dicts. An exported
    # program's weights stay on the CPU; MLflow would choose the GPU.
    module = "mlflow.pytorch"
    code = None
    config: dict[str, Any] = {"device": "cpu"}
    if not facts["one_tensor"]:
        module = Path(exported_program_pyfunc.__file__).stem
        code = [exported_program_pyfunc.__file__]
        names = {key: [spec["name"] for spec in facts[key]] for key in ("inputs", "outputs")}
        config = {**names, "fields": fields, "one_output": facts["one_output"]}
    # The part after a plus, as in 2.5.1+cpu, is a local version, which is on no package index.
    torch = f"torch=={facts['torch'].partition('+')[0]}"
    pyfunc.save_model(
        path,
        loader_module=module,
        data_path=str(folder),
        code_paths=code,
        mlflow_model=description,
        pip_requirements=[f"mlflow=={VERSION}", torch],
        model_config=config,
    )


def _schema(specs: list[dict[str, Any]], are_fields: bool) -> Any:
    import numpy as np
    from mlflow.types.schema import Schema, TensorSpec

    # MLflow asks for a dict of tensors where they have names; a model with one takes the tensor.
    has_names = are_fields or len(specs) > 1
    columns = []
    for spec in specs:
        name = spec["name"] if has_names else None
        columns.append(TensorSpec(np.dtype(spec["dtype"]), tuple(spec["shape"]), name))
    return Schema(columns)


def _link_to_run(client: "MlflowClient", run: Any, model_id: str, step: int) -> None:
    """Record the model as an output of its run, with the run's validation metrics of its step."""
    from mlflow.entities import LoggedModelOutput, Metric

    run_id = run.info.run_id
    outputs = run.outputs.model_outputs if run.outputs else []
    if all(output.model_id != model_id for output in outputs):
        client.log_outputs(run_id, [LoggedModelOutput(model_id, step=step)])
    points = []
    for key in run.data.metrics:
        if key.startswith(LINKED_METRICS_PREFIX):
            points += [
                Metric(key, p.value, p.timestamp, step, model_id=model_id, run_id=run_id)
                for p in client.get_metric_history(run_id, key)
                if p.step == step  # that of the model's weights
            ]
    if points:
        client.log_batch(run_id, metrics=points, synchronous=True)


def _register(client: "MlflowClient", name: str, model_id: str, run_id: str, source: str) -> None:
    """Add a version to a registered model, unless this model has one, and link the two pages."""
    from mlflow.exceptions import MlflowException
    from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    known = client.search_model_versions(f"run_id = '{run_id}'")
    version = next((v for v in known if (v.name, v.source) == (name, source)), None)
    if version is None:
        version = client.create_model_version(
            name, source, run_id=run_id, model_id=model_id, await_creation_for=0
        )
    # MLflow's page of a logged model shows its versions from this tag.
    tags = client.get_logged_model(model_id).tags or {}
    links = json.loads(tags.get(MLFLOW_MODEL_VERSIONS, "[]"))
    link = {"name": version.name, "version": version.version}
    if link not in links:
        value = json.dumps([*links, link])
        client.set_logged_model_tags(model_id, {MLFLOW_MODEL_VERSIONS: value})
