"""Hydra config groups; config.yaml is the table of contents."""
