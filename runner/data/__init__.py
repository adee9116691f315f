"""Load data: the data sets of the configs, their batches on the run's device, their fingerprint.

A data target is a function that returns Splits(train, val); see docs/own-code.md for your own.
"""
