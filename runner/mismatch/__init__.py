"""Whether the policy that trains is the policy that serves: log-probabilities of both sides."""

from typing import TYPE_CHECKING

from runner.core import lazy_names

if TYPE_CHECKING:
    from runner.mismatch.record import Mismatch as Mismatch
    from runner.mismatch.record import compare_log_probabilities as compare_log_probabilities

__all__ = ["Mismatch", "compare_log_probabilities"]
__getattr__ = lazy_names(__name__, {"record": "Mismatch compare_log_probabilities"})
