"""Serve all other packages: errors, files, text, terminal, signals, devices, random numbers."""
