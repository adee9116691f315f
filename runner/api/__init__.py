"""The Python API: compose, run, sweep, advise and load, which `import runner` shows."""
