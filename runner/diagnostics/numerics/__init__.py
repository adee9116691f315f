"""What a run's numbers are like, module by module, and what narrower formats would lose of them."""

from runner.diagnostics.numerics.results import Numerics, read

__all__ = ["Numerics", "read"]
