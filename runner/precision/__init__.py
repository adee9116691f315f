"""Numerical precisions: policies that convert models, and the loss scales that they train with.

`precision(name, device)` returns the Policy for a training loop of one's own; a precision of one's
own is a subclass of Precision.
"""

from runner.precision.contract import Precision
from runner.precision.conversion_report import ConversionReport
from runner.precision.policy import Policy, precision
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
