"""Record what other trainers do, in the form of this runner's own runs."""
