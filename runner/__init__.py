"""Train, compare and choose numerical precision in PyTorch: Hydra in, MLflow out.

docs/python.md describes the functions of this package.
"""

import random
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.api.composition import compose as compose
    from runner.api.runs import RunResult as RunResult
    from runner.api.runs import run as run
    from runner.api.sweeps import SweepResult as SweepResult
    from runner.api.sweeps import advise as advise
    from runner.api.sweeps import load as load
    from runner.api.sweeps import sweep as sweep
    from runner.core import ConfigError as ConfigError
    from runner.core import RunCallback as RunCallback
    from runner.core import RunnerError as RunnerError
    from runner.core import RunSpec as RunSpec
    from runner.core import Unavailable as Unavailable
    from runner.sweeps.verdict.ranking import Advice as Advice

_MODULES = {
    "Advice": "runner.sweeps.verdict.ranking",
    "ConfigError": "runner.core",
    "RunCallback": "runner.core",
    "RunResult": "runner.api.runs",
    "RunSpec": "runner.core",
    "RunnerError": "runner.core",
    "SweepResult": "runner.api.sweeps",
    "Unavailable": "runner.core",
    "advise": "runner.api.sweeps",
    "compose": "runner.api.composition",
    "load": "runner.api.sweeps",
    "run": "runner.api.runs",
    "sweep": "runner.api.sweeps",
}
"""Module of each public name. They are imported when they are used: the command line answers
--help without torch."""

# A wheel has conf/ and models/ inside this package; a checkout has them next to it.
if not (Path(__file__).parent / "conf").exists():
    __path__.append(str(Path(__file__).parent.parent))

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # rich draws a random number for styles that it makes when it is imported.
    drawn = random.getstate()
    value = getattr(import_module(_MODULES[name]), name)
    random.setstate(drawn)
    # Python asks for a name once.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
