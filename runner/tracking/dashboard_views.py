"""Keep the dashboards of an experiment in its store, through an MLflow client.

dashboard.py makes their content. This module is apart from it because it needs mlflow.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from runner.tracking import dashboard
from runner.tracking.dashboard import SweepView
from runner.utils.formatting import now_ms

if TYPE_CHECKING:
    from mlflow import MlflowClient


MAX_NAME_CHARACTERS = 80
"""Upper bound on the name of a sweep's view, which MLflow shows in a menu."""


def ensure_dashboard(
    client: "MlflowClient",
    version: str,
    experiment_id: str,
    metrics: Collection[str] = (),
    sweep: SweepView | None = None,
) -> str | None:
    """Set or renew the dashboards of an experiment, and of a sweep of it.

    Args:
        client: of the store.
        version: of the MLflow that shows the pages, see server_version.
        experiment_id: of the experiment.
        metrics: names of those that are logged.
        sweep: the sweep whose path is returned; None returns the experiment's.

    Returns:
        The dashboard's path after the server's address; None where the version has no such views.

    Raises:
        MlflowException: the store refuses or cannot be reached.
    """
    if not dashboard.is_supported(version):
        return None
    # Read now rather than cached: other runs, and users, change the tags meanwhile.
    tags = dict(client.get_experiment(experiment_id).tags)
    new = dashboard.tags_to_set(tags, experiment_id, version, now_ms(), metrics, sweep)
    for key, value in new.items():
        client.set_experiment_tag(experiment_id, key, value)
    for key in dashboard.tags_to_delete({**tags, **new}):
        client.delete_experiment_tag(experiment_id, key)
    key = dashboard.sweep_key(sweep.sweep_id) if sweep else dashboard.DASHBOARD_KEY
    return dashboard.dashboard_path(experiment_id, key)


def server_version(uri: str) -> str:
    """Return the version of the MLflow that shows a store's pages: the server's, or the one here.

    Raises:
        MlflowException: the server does not answer.
    """
    import mlflow

    if not uri.startswith("http"):
        return str(mlflow.__version__)
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    # MLflow's client has no call for the version.
    answer: Any = http_request(get_default_host_creds(uri), "/version", "GET")
    return answer.text.strip() if answer.ok else "unknown"


def too_old_reason(uri: str, version: str) -> str:
    """Return the message for a user whose server cannot show the dashboard."""
    return (
        f"{uri} runs MLflow {version}, whose pages cannot show the dashboard (3.10 or newer can); "
        "its plain pages hold everything."
    )
