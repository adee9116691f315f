"""Train, compare and choose numerical precision in PyTorch: Hydra in, MLflow out.

docs/python.md describes the functions of this package.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from runner.core import lazy_names

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

# A wheel has conf/ and models/ inside this package; a checkout has them next to it.
if not (Path(__file__).parent / "conf").exists():
    __path__.append(str(Path(__file__).parent.parent))

__version__ = "0.1.0"


_HOMES = {
    "api.composition": "compose",
    "api.runs": "RunResult run",
    "api.sweeps": "SweepResult advise load sweep",
    "core": "ConfigError RunCallback RunSpec RunnerError Unavailable",
    "sweeps.verdict.ranking": "Advice",
}
__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *" ".join(_HOMES.values()).split()})
