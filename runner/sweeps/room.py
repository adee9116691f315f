"""mode=advise and mode=gate: sweeps whose jobs are chosen as results come in."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from runner.core.base.errors import ConfigError
from runner.core.config.room import Mode, Room
from runner.core.config.schema import AdviseSpec

if TYPE_CHECKING:
    from runner.core.loop.strategy import Strategy
    from runner.core.run.context import PlannedRun

ADVISE_USAGE_MESSAGE = (
    "mode=advise and mode=gate choose their own jobs. Type mode=advise or mode=gate on the command "
    "line, without sweep= and without another hydra/sweeper."
)


class Advise(Mode):
    """Find the best precision for a training, by trials."""

    name = "advise"
    chooses_jobs = True

    def plan(
        self, plan: "PlannedRun", say: Callable[[str], None], strategy: "Strategy"
    ) -> NoReturn:
        raise ConfigError(ADVISE_USAGE_MESSAGE)


class Gate(Advise):
    """Judge whether one precision trains as well as the baseline, seed by seed."""

    name = "gate"


ROOM = Room(sections={"advise": AdviseSpec}, modes=(Advise(), Gate()))
