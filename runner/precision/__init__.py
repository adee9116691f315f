"""Numerical precisions: how a model is converted, computes and scales its loss."""
