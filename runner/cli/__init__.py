"""Turn argv into an exit status: the run command and doctor, report, sync, ui."""
