"""What a run leaves: checkpoints, its journal, and the contract of trackers."""
