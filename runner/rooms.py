"""The rooms of the runner. This is the only module that knows all of them."""

from runner.config.room import install
from runner.diagnostics.room import ROOM as DIAGNOSTICS
from runner.modes.room import ROOM as MODES
from runner.sweeps.room import ROOM as SWEEPS

ROOMS = (MODES, DIAGNOSTICS, SWEEPS)


def install_rooms() -> None:
    """Have this process know all rooms."""
    install(ROOMS)
