"""Write, find and read checkpoints, and export models."""
