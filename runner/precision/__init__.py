"""Numerical precisions: policies that convert models, and the loss scales that they train with.

`precision(name, device)` returns the Policy for a training loop of one's own; a precision of one's
own is a subclass of BasePrecision.
"""

from typing import TYPE_CHECKING

from runner.core import ConfigError as ConfigError
from runner.core import Unavailable as Unavailable
from runner.core import errors, lazy_names

if TYPE_CHECKING:
    from runner.core import ConversionReport as ConversionReport
    from runner.core import Precision as Precision
    from runner.precision.base import BasePrecision as BasePrecision
    from runner.precision.policy import Policy as Policy
    from runner.precision.policy import precision as precision

PolicyError = errors.PolicyError
__getattr__ = lazy_names(
    __name__,
    {"base": "BasePrecision", "policy": "Policy precision", ".core": "ConversionReport Precision"},
)
