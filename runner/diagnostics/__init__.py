"""Look into a run: numerics, memory, dtypes, values that are not finite, data, saved batches."""
