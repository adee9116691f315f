"""Serve the core: errors, files, text, signals, devices, random numbers, processes."""
