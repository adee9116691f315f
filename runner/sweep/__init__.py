"""Run many jobs: the parent run, launchers, the report and the advisor."""
