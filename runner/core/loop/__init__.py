"""Batches, state, step and training loop, and the contracts of what they call."""
