"""MLflow's client without the warnings of its imports and of the database that it opens."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient


def client_of(uri):
    """Return a client of a store."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MlflowClient(tracking_uri=uri)


def runs_in(client, experiment="precision-runner"):
    """Return the runs of an experiment of this name, the newest first."""
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
