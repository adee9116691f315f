"""The rooms of the runner. This is the only module that knows all of them."""

from runner.cli.room import ROOM as CLI
from runner.core import Room
from runner.data.room import ROOM as DATA
from runner.diagnostics.room import ROOM as DIAGNOSTICS
from runner.mismatch.room import ROOM as MISMATCH
from runner.modes.room import ROOM as MODES
from runner.planning.room import ROOM as PLANNING
from runner.precision.room import ROOM as PRECISION
from runner.sweeps.room import ROOM as SWEEPS
from runner.training.room import ROOM as TRAINING

ROOMS = (MODES, PLANNING, DIAGNOSTICS, MISMATCH, SWEEPS, DATA, PRECISION, TRAINING, CLI)


def install_rooms() -> None:
    """Have this process know all rooms."""
    Room.install(ROOMS)
