"""Numerical precisions: the policy that converts a model, and the loss scale that it trains with."""
