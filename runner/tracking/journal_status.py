"""What the writer has said about one journal, and what of it the user is told."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass
class JournalStatus:
    """One journal, as seen from the trainer.

    Attributes:
        refused: why the store does not take the run; None while all is well.
        trouble: the last thing that went wrong, also if it did not concern the whole run.
        complete: everything in the journal is stored and the run has its status.
        heard: time.monotonic() of the last sign of progress.
        away: why the store does not answer at the moment; None where it does.
        sending: a file is under way, which may take long.
        offset: up to which the journal is stored.
        dashboard: where the store shows the run beside others, after the server's address.
        relay: hears every event, for the process whose run it is, and tells its user.
    """

    journal: Path
    relay: Callable[[dict[str, Any]], None] | None = None
    opened: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)
    run_id: str | None = None
    experiment_id: str | None = None
    refused: str | None = None
    trouble: str | None = None
    complete: bool = False
    warned: bool = False
    away: str | None = None
    sending: bool = False
    offset: int = 0
    dashboard: str | None = None
    heard: float = field(default_factory=time.monotonic)

    def hear(self, event: dict[str, Any]) -> None:
        """Takes in an event of the writer's."""
        kind = event["event"]
        if self.relay is not None:
            self.relay(event)
        self.sending = kind == "sending"
        if kind in ("waiting", "away"):
            self.away = event["message"]
        if kind == "away" and self.relay is None:
            self._tell_outage(event["seconds"])
        if kind in ("sending", "waiting", "away"):
            return  # an attempt, and that it failed: no progress
        self.heard, self.away = time.monotonic(), None
        self._note(event)

    def waiting(self, store: str, patience: float) -> str:
        """What is said while the end of a run waits."""
        if self.away:
            return (
                f"Uploading the last records to {store}: no answer yet ({self.away}). Gives up "
                f"after {patience:.0f} s without one; `python -m runner sync` then sends the rest."
            )
        share = self._share()
        progress = f" ({share} % done)" if share else ""
        return f"Uploading the last records to {store}{progress} ..."

    def _share(self) -> int:
        return 100 * self.offset // max(1, self.journal.stat().st_size)

    def _note(self, event: dict[str, Any]) -> None:
        """What the writer has achieved, or given up."""
        kind = event["event"]
        if kind == "opened":
            self.run_id, self.experiment_id = event["run_id"], event["experiment_id"]
            self.dashboard = event["dashboard"]
            self.opened.set()
        elif kind == "progress":
            self.offset = event["offset"]
        elif kind == "back" and self.relay is None:
            log.warning("The store answers again; what was recorded meanwhile is sent to it.")
        elif kind == "notice" and self.relay is None:
            log.warning(event["message"])
        elif kind == "error":
            self._complain(event)
        elif kind == "closed":
            self.complete = event["complete"]
            self.closed.set()

    def _complain(self, event: dict[str, Any]) -> None:
        """A refusal of the run is for check and close to tell; lesser trouble is told once."""
        self.trouble = event["message"]
        if event["fatal"]:
            self.refused = event["message"]
            self.opened.set()
        elif not (self.warned or self.relay):
            self.warned = True
            log.warning("%s The records are kept in %s.", event["message"], self.journal)

    def _tell_outage(self, seconds: int) -> None:
        log.warning(
            "No answer from the tracking store for %d s: %s. Training goes on; the records are "
            "kept in %s and are sent when it answers. What is left when the run has ended, "
            "`python -m runner sync` sends.",
            seconds,
            self.away,
            self.journal,
        )
