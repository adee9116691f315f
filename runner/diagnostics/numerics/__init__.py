"""Measure what narrower formats would lose of a run's numbers, module by module."""

from runner.diagnostics.numerics.results import Numerics, loss_scales, read

__all__ = ["Numerics", "loss_scales", "read"]
