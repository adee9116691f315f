"""Share a run among processes: strategies, the process group, torchrun."""
