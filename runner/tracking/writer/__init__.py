"""The writer process, which uploads journals: the only part of a run that imports mlflow."""
