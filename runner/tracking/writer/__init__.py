"""The writer process: the only part that imports mlflow while a run trains."""
