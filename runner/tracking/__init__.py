"""Carries runs to their store. Nothing here imports mlflow except the writer process."""
