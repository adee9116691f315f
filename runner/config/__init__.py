"""Compose a command line and yaml files with Hydra into a run spec."""
