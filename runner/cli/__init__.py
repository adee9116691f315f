"""Turn argv into an exit status: the run command and doctor, prove, report, sync, ui."""
