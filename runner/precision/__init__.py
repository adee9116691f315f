"""Numerical precisions: policies that convert models, and the loss scales that they train with.

`precision(name, device)` returns the Policy for a training loop of one's own; a precision of one's
own is a subclass of BasePrecision.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from runner.core import ConfigError as ConfigError
from runner.core import Unavailable as Unavailable
from runner.core import errors

if TYPE_CHECKING:
    from runner.core import ConversionReport as ConversionReport
    from runner.core import Precision as Precision
    from runner.precision.base import BasePrecision as BasePrecision
    from runner.precision.policy import Policy as Policy
    from runner.precision.policy import precision as precision

PolicyError = errors.PolicyError
_MODULES = {
    "BasePrecision": "runner.precision.base",
    "ConversionReport": "runner.core",
    "Policy": "runner.precision.policy",
    "Precision": "runner.core",
    "precision": "runner.precision.policy",
}
"""Module of each public name. They are imported when they are used: a run needs no policy."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
