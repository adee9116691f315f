"""Numerical precisions: policies that convert models, and the loss scales that they train with.

`precision(name, device)` returns the Policy for a training loop of one's own; a precision of one's
own is a subclass of Precision.
"""

import sys

from runner.precision import contract
from runner.precision.contract import ConversionReport, Precision
from runner.precision.named_policy import precision
from runner.precision.policy import Policy
from runner.utils.errors import ConfigError, PolicyError, Unavailable

__all__ = [
    "ConfigError",
    "ConversionReport",
    "Policy",
    "PolicyError",
    "Precision",
    "Unavailable",
    "precision",
]

# The contract's module was runner.precision.precision, from which users' code imports Precision.
# With the name in sys.modules Python imports no such module, and so does not replace the function
# `precision` above by it: it sets an imported submodule as an attribute of its package.
sys.modules[f"{__name__}.precision"] = contract
