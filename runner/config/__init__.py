"""Turn a command line and yaml files into a checked RunSpec. Hydra stops here."""
